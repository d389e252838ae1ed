"""Methods that treat pairs by how often they turn within the native length: fast ones kept, slow ones divided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ropext.errors import Refused
from ropext.rope.form import ORIGINAL, ConfigForm, Plain, check_factor, check_native_length, check_positive

BETA_FAST, BETA_SLOW = 32.0, 1.0  # turns; the paper's values for Llama, and stock transformers' defaults
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0  # Llama 3.1's


@dataclass(frozen=True, kw_only=True, slots=True)
class NtkByParts:
    """YaRN's frequencies without its temperature (bloc97 2023; Peng et al. 2023, arXiv:2309.00071, section 3.2)."""

    factor: float  # target length / native length, above 1
    native_length: int  # tokens
    beta_fast: float | None = None  # pairs turning more often are kept; default 32
    beta_slow: float | None = None  # pairs turning less often are divided by the factor; default 1
    truncate: bool | None = None  # round the band's edges to whole pairs; default true

    def __post_init__(self) -> None:
        self.yarn()

    @property
    def attention_scaling(self) -> float:
        """None."""
        return 1.0

    def yarn(self) -> Yarn:
        """The same method in the words of stock transformers: YaRN with an attention factor of 1."""
        return Yarn(
            factor=self.factor,
            native_length=self.native_length,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
            attention_factor=1.0,
        )

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Those of YaRN: `[F]`."""
        return self.yarn().frequencies(theta, rotary_dims)

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """The stock type `yarn` with an attention factor of 1."""
        return self.yarn().config_form(theta, rotary_dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Keep fast pairs, stretch slow ones, sharpen attention (Peng et al. 2023, arXiv:2309.00071, section 3.2 to 3.4).

    A setting that is None is left to the reader's default, and not written.
    """

    factor: float  # target length / native length, above 1
    native_length: int  # tokens
    beta_fast: float | None = None  # pairs turning more often are kept; default 32
    beta_slow: float | None = None  # pairs turning less often are divided by the factor; default 1
    truncate: bool | None = None  # round the band's edges to whole pairs; default true
    attention_factor: float | None = None  # on cos and sin; default from the factor
    mscale: float | None = None  # DeepSeek's pair: attention factor = ratio of two temperatures
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        check_factor(self.factor)
        check_native_length(self.native_length)
        for name in ("beta_fast", "beta_slow", "attention_factor"):
            check_positive(name, getattr(self, name))
        for name in ("mscale", "mscale_all_dim"):
            check_positive(name, getattr(self, name) or None)  # 0 is as good as none to readers
        fast, slow = self.beta_fast or BETA_FAST, self.beta_slow or BETA_SLOW
        if fast <= slow:
            raise Refused(f"beta_fast must be above beta_slow, fast pairs are kept: found {fast:g} and {slow:g}")

    @property
    def attention_scaling(self) -> float:
        """0.1 ln(factor) + 1 (section 3.4, eq. 22), unless settings say otherwise; order of precedence as in
        transformers' `_compute_yarn_parameters`."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Plain ones (1 - ramp) + ramp / factor of them: `[F]`.

        Equals transformers' yarn with its oddities: edges clamped to 0 and d - 1, equal ones held 0.001 apart.
        """
        low, high = self._band(theta, rotary_dims)
        if low == high:
            high += 0.001
        ramps = [min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(rotary_dims // 2)]
        plain = Plain().frequencies(theta, rotary_dims)
        return [w * (1 - ramp) + w / self.factor * ramp for w, ramp in zip(plain, ramps, strict=True)]

    def _band(self, theta: float, rotary_dims: int) -> tuple[float, float]:
        """The pairs at which the ramp starts and ends (the inverse of the turns that a pair makes, eq. 17)."""

        def pair(turns: float) -> float:
            return rotary_dims * math.log(self.native_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(self.beta_fast or BETA_FAST), pair(self.beta_slow or BETA_SLOW)
        if self.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, rotary_dims - 1)

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """The stock type `yarn`; numbers as floats, for transformers 4 complains of whole ones."""
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": self.factor, ORIGINAL: self.native_length}
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if (value := getattr(self, name)) is not None:
                scaling[name] = float(value)
        if self.truncate is not None:
            scaling["truncate"] = self.truncate
        return ConfigForm(theta=theta, scaling=scaling)


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3:
    """Keep short wavelengths, divide long ones, blend between (Llama 3.1: meta-llama/llama-models, apply_scaling)."""

    factor: float  # what long wavelengths are multiplied by, above 1
    native_length: int  # tokens; wavelengths are compared with it
    low_freq_factor: float = LOW_FREQ_FACTOR  # wavelengths above native length / this are multiplied
    high_freq_factor: float = HIGH_FREQ_FACTOR  # wavelengths below native length / this are kept

    def __post_init__(self) -> None:
        check_factor(self.factor)
        check_native_length(self.native_length)
        check_positive("low_freq_factor", self.low_freq_factor)
        check_positive("high_freq_factor", self.high_freq_factor)
        if self.high_freq_factor <= self.low_freq_factor:
            raise Refused(
                f"high_freq_factor must be above low_freq_factor, short wavelengths are kept: found "
                f"{self.high_freq_factor:g} and {self.low_freq_factor:g}"
            )

    @property
    def attention_scaling(self) -> float:
        """None."""
        return 1.0

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Plain ones kept, divided by the factor, or a blend of both: `[F]`."""
        return [self._scaled(frequency) for frequency in Plain().frequencies(theta, rotary_dims)]

    def _scaled(self, frequency: float) -> float:
        turns = self.native_length * frequency / (2 * math.pi)  # native length / wavelength
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """The stock type `llama3`. The original length stands beside it too, where llama.cpp's converter looks."""
        scaling = {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
            ORIGINAL: self.native_length,
        }
        return ConfigForm(theta=theta, scaling=scaling, original_beside=True)
