"""What a method is: two views of one table, its frequencies and what config.json says so that readers compute them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ropext.errors import Refused
from ropext.facts import FLOAT32_MAX

ORIGINAL = "original_max_position_embeddings"  # in config.json: the length that a formula starts from


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigForm:
    """How stock transformers is told of a method."""

    theta: float
    scaling: Mapping[str, Any] | None  # the scaling block; None for plain rope
    original_beside: bool = False  # its original length also stands at the top level of the config
    window: int | None = None  # max_position_embeddings where it is not the target, tokens


class Method(Protocol):
    """One way to set the frequencies."""

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by; attention logits scale by its square."""

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Radians per token of each pair: `[F]`. Where they depend on the input's length: those of short inputs."""

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """What config.json says so that stock code computes `frequencies`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """The rotary embedding as trained, no extension (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""

    @property
    def attention_scaling(self) -> float:
        """None."""
        return 1.0

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """theta^(-2i/d) for pair i: `[F]`."""
        return [theta ** (-2 * pair / rotary_dims) for pair in range(rotary_dims // 2)]

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """Plain rope with its own theta."""
        return ConfigForm(theta=theta, scaling=None)


def check_factor(factor: float) -> None:
    """Raises Refused unless a factor lengthens the context by a finite amount."""
    if not (math.isfinite(factor) and factor > 1):
        raise Refused(f"a factor must be a finite number above 1, it lengthens the context: found {factor}")


def check_positive(name: str, value: float | None) -> None:
    """Raises Refused for a setting that is neither left to its default nor a number above 0 that float32 can hold."""
    if value is not None and not 1 / FLOAT32_MAX <= value <= FLOAT32_MAX:
        raise Refused(f"{name} must be a finite number above 0: found {value}")


def check_theta(name: str, theta: float, larger: float) -> float:
    """The larger theta. Raises Refused where float32, in which readers compute, has no such number."""
    if not larger <= FLOAT32_MAX:
        raise Refused(f"{name} needs a theta within float32: {theta:g} would become {larger:g}. Use a smaller factor")
    return larger


def check_native_length(native_length: int) -> None:
    """Raises Refused for a length that no formula can start from."""
    if native_length < 2:
        raise Refused(f"a method needs a native length of at least 2 tokens: found {native_length}")


def unfinished_pair(theta: float, rotary_dims: int, native_length: int) -> int | None:
    """The first pair that never completed a turn in training (None where all did): its angles are new beyond it."""
    for pair, frequency in enumerate(Plain().frequencies(theta, rotary_dims)):
        if frequency * native_length < 2 * math.pi:
            return pair
    return None
