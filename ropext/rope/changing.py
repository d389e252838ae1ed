"""Methods whose table depends on how long the input is: every reader computes it anew in its forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ropext.errors import Refused
from ropext.rope.bases import larger_theta
from ropext.rope.form import ORIGINAL, ConfigForm, Method, Plain, check_factor, check_native_length, check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Dynamic:
    """Dynamic NTK: theta grows with the input beyond the native length (emozilla 2023, "Dynamically Scaled RoPE").

    As transformers computes it, `_compute_dynamic_ntk_parameters`.
    """

    factor: float  # target length / native length, above 1
    native_length: int  # tokens

    def __post_init__(self) -> None:
        check_factor(self.factor)
        check_native_length(self.native_length)

    @property
    def attention_scaling(self) -> float:
        """None."""
        return 1.0

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Those of inputs up to the native length, plain ones: `[F]`."""
        return self.frequencies_at(self.native_length, theta, rotary_dims)

    def frequencies_at(self, length: int, theta: float, rotary_dims: int) -> list[float]:
        """Those of an input of `length` tokens: `[F]`. Its slowest pair is divided by factor * l / L0 - (factor - 1),
        at factor * L0 thus by more than the factor."""
        grown = max(length, self.native_length) / self.native_length
        division = self.factor * grown - (self.factor - 1)
        return Plain().frequencies(larger_theta("dynamic", theta, rotary_dims, division), rotary_dims)

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """The stock type `dynamic`, and a window that stays the native length.

        Both majors of transformers take the native length of this type from max_position_embeddings alone; with the
        target there, nothing would be scaled before the target. vLLM multiplies that key by the factor itself.
        """
        scaling = {"rope_type": "dynamic", "factor": self.factor}
        return ConfigForm(theta=theta, scaling=scaling, window=self.native_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRope:
    """A searched divisor for each pair, one list for short inputs, one for longer ones (Ding et al. 2024,
    arXiv:2402.13753, section 3; the switch and the attention factor as in transformers,
    `_compute_longrope_parameters`)."""

    factor: float  # target length / native length, above 1
    native_length: int  # tokens; longer inputs take the long list
    short_factor: tuple[float, ...]  # [F]
    long_factor: tuple[float, ...]  # [F]
    attention_factor: float | None = None  # on cos and sin; default from factor and native length

    def __post_init__(self) -> None:
        check_factor(self.factor)
        check_native_length(self.native_length)
        check_positive("attention_factor", self.attention_factor)
        for name in ("short_factor", "long_factor"):
            for divisor in getattr(self, name):
                check_positive(f"each number of {name}", divisor)

    @property
    def attention_scaling(self) -> float:
        """sqrt(1 + ln s / ln L0), for short inputs too."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(self.native_length))

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Those of inputs up to the native length: `[F]`."""
        return self.frequencies_at(self.native_length, theta, rotary_dims)

    def frequencies_at(self, length: int, theta: float, rotary_dims: int) -> list[float]:
        """Plain ones divided by the list for `length` tokens: `[F]`. Raises Refused for a list of another size."""
        name = "long_factor" if length > self.native_length else "short_factor"
        divisors, plain = getattr(self, name), Plain().frequencies(theta, rotary_dims)
        if len(divisors) != len(plain):
            raise Refused(
                f"longrope needs one number for each of the {len(plain)} rotated pairs: {name} has {len(divisors)}. "
                "Use lists that were made for this model"
            )
        return [frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True)]

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """The stock type `longrope`. Transformers 4 reads the original length beside the block only."""
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "factor": self.factor,
            "short_factor": list(self.short_factor),
            "long_factor": list(self.long_factor),
            ORIGINAL: self.native_length,
        }
        if self.attention_factor is not None:
            scaling["attention_factor"] = float(self.attention_factor)
        return ConfigForm(theta=theta, scaling=scaling, original_beside=True)


def changes_with_length(method: Method) -> bool:
    """Whether the table depends on the input's length."""
    return isinstance(method, Dynamic | LongRope)


def frequencies_at(method: Method, length: int, theta: float, rotary_dims: int) -> list[float]:
    """The table of any method for an input of `length` tokens: `[F]`."""
    if isinstance(method, Dynamic | LongRope):
        return method.frequencies_at(length, theta, rotary_dims)
    return method.frequencies(theta, rotary_dims)
