"""Methods that set every pair by one number: a divisor of all frequencies, or another theta."""

from __future__ import annotations

from dataclasses import dataclass

from ropext.errors import Refused
from ropext.rope.form import ConfigForm, Plain, check_factor, check_positive, check_theta


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """Position interpolation: every pair turns slower by the factor (Chen et al. 2023, arXiv:2306.15595, eq. 4)."""

    factor: float  # target length / native length, above 1

    def __post_init__(self) -> None:
        check_factor(self.factor)

    @property
    def attention_scaling(self) -> float:
        """None."""
        return 1.0

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Plain frequencies / factor: `[F]`."""
        return [frequency / self.factor for frequency in Plain().frequencies(theta, rotary_dims)]

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """The stock type `linear`."""
        return ConfigForm(theta=theta, scaling={"rope_type": "linear", "factor": self.factor})


@dataclass(frozen=True, kw_only=True, slots=True)
class Ntk:
    """Static NTK-aware: a larger theta that keeps the fastest pair and divides the slowest by the factor.

    Source: bloc97 2023, "NTK-Aware Scaled RoPE allows LLaMA models to have extended context size". Transformers has
    no static type of this name, so it is stored as plain rope with the larger theta.
    """

    factor: float  # target length / native length, above 1

    def __post_init__(self) -> None:
        check_factor(self.factor)

    @property
    def attention_scaling(self) -> float:
        """None."""
        return 1.0

    def theta(self, theta: float, rotary_dims: int) -> float:
        """theta * factor^(d/(d-2)). Raises Refused with fewer than two pairs (not defined) and beyond float32."""
        return larger_theta("ntk", theta, rotary_dims, self.factor)

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Plain frequencies of the larger theta: `[F]`."""
        return Plain().frequencies(self.theta(theta, rotary_dims), rotary_dims)

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """Plain rope with the larger theta."""
        return ConfigForm(theta=self.theta(theta, rotary_dims), scaling=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Abf:
    """Adjusted base frequency: theta is given directly (Xiong et al. 2023, arXiv:2309.16039, section 2.1)."""

    theta: float  # in force from now on, above the trained one

    def __post_init__(self) -> None:
        check_positive("theta", self.theta)

    @property
    def attention_scaling(self) -> float:
        """None."""
        return 1.0

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Plain frequencies of the given theta: `[F]`."""
        return Plain().frequencies(self.config_form(theta, rotary_dims).theta, rotary_dims)

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """Plain rope with the given theta. Raises Refused unless that is larger than the trained one."""
        if self.theta <= theta:
            raise Refused(f"abf lengthens the context by a larger theta: {self.theta:g} is not above {theta:g}")
        return ConfigForm(theta=check_theta("abf", theta, self.theta), scaling=None)


def larger_theta(name: str, theta: float, rotary_dims: int, division: float) -> float:
    """The theta whose slowest pair is that of `theta` divided by `division`, the fastest as it was."""
    if rotary_dims < 4:
        raise Refused(f"{name} needs at least 4 rotary dimensions: this model has {rotary_dims}. Use linear")
    try:
        larger = float(theta * division ** (rotary_dims / (rotary_dims - 2)))
    except OverflowError:
        larger = float("inf")
    return check_theta(name, theta, larger)
