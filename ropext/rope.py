"""Rotary frequencies: how far each pair of head dimensions turns per token.

Pure arithmetic: reads no file, touches no model, caches nothing.
Suffix F = rotary_dims // 2 pairs. Lengths are in tokens, angles in radians.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ropext.errors import Refused, UsageError
from ropext.facts import FLOAT32_MAX


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigForm:
    """How stock transformers is told of a method: theta, and the scaling block (None for plain rope)."""

    theta: float
    scaling: Mapping[str, Any] | None


class Method(Protocol):
    """One way to set the frequencies: two views of the same table."""

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Radians per token of each pair: `[F]`."""

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """What config.json says so that stock code computes `frequencies`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """The rotary embedding as trained, no extension (Su et al. 2021, arXiv:2104.09864, section 3.2.2)."""

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """theta^(-2i/d) for pair i: `[F]`."""
        return [theta ** (-2 * pair / rotary_dims) for pair in range(rotary_dims // 2)]

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """Plain rope with its own theta."""
        return ConfigForm(theta=theta, scaling=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """Position interpolation: every pair turns slower by the factor (Chen et al. 2023, arXiv:2306.15595, eq. 4)."""

    factor: float  # target length / native length, above 1

    def __post_init__(self) -> None:
        _check_factor(self.factor)

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
        _check_factor(self.factor)

    def theta(self, theta: float, rotary_dims: int) -> float:
        """theta * factor^(d/(d-2)). Raises Refused with fewer than two pairs (not defined) and beyond float32."""
        if rotary_dims < 4:
            raise Refused(f"ntk needs at least 4 rotary dimensions: this model has {rotary_dims}. Use linear")
        larger = float(theta * self.factor ** (rotary_dims / (rotary_dims - 2)))
        if larger > FLOAT32_MAX:
            raise Refused(f"ntk needs a theta within float32: {theta:g} at factor {self.factor:g} gives {larger:g}")
        return larger

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Plain frequencies of the larger theta: `[F]`."""
        return Plain().frequencies(self.theta(theta, rotary_dims), rotary_dims)

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """Plain rope with the larger theta."""
        return ConfigForm(theta=self.theta(theta, rotary_dims), scaling=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progressive:
    """An inner method whose factor grows with the training stage and ends at `factor` (DESIGN: What is on disk).

    Between patch and training the checkpoint carries the final factor, so both views are the inner method's.
    """

    factor: float  # the final one: target length / native length, above 1
    inner: str = "ntk"

    INNER: ClassVar[tuple[str, ...]] = ("ntk", "linear")

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def at(self, factor: float) -> Method:
        """The inner method at one stage's factor; at 1 and below nothing is scaled yet."""
        return method_named(self.inner, factor) if factor > 1 else Plain()

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Frequencies at the final factor: `[F]`."""
        return self.at(self.factor).frequencies(theta, rotary_dims)

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """Config form at the final factor."""
        return self.at(self.factor).config_form(theta, rotary_dims)


METHODS = ("linear", "ntk", "progressive")
ALIASES = {"pi": "linear", "ntk-aware": "ntk", "su": "longrope"}
NOT_BUILT = ("abf", "dynamic", "ntk-by-parts", "yarn", "longrope", "llama3")


def canonical_name(name: str) -> str:
    """The method that `name` means, in any case. Raises UsageError for an unknown one and one that is not built."""
    lower = name.strip().lower()
    method = ALIASES.get(lower, lower)
    if method in NOT_BUILT:
        raise UsageError(
            f"the method {method} is not built yet: use one of {', '.join(METHODS)} (ntk is the one to prefer)"
        )
    if method not in METHODS:
        raise UsageError(f"there is no method {name!r}: use one of {', '.join(METHODS)} (ntk is the one to prefer)")
    return method


def method_named(name: str, factor: float, inner: str | None = None) -> Method:
    """The method of a canonical or alias name at a factor; `inner` belongs to progressive alone."""
    method = canonical_name(name)
    if inner is not None and method != "progressive":
        raise UsageError(f"an inner method belongs to progressive: found it with {method}. Leave it out")
    if method == "progressive":
        return Progressive(factor=factor, inner=_inner_name(inner or "ntk"))
    return Linear(factor=factor) if method == "linear" else Ntk(factor=factor)


def _inner_name(inner: str) -> str:
    name = canonical_name(inner)
    if name not in Progressive.INNER:
        raise UsageError(f"progressive grows the factor of {' or '.join(Progressive.INNER)}: found {inner!r}")
    return name


def _check_factor(factor: float) -> None:
    if not (math.isfinite(factor) and factor > 1):
        raise Refused(f"a factor must be a finite number above 1, it lengthens the context: found {factor}")


def unfinished_pair(theta: float, rotary_dims: int, native_length: int) -> int | None:
    """The first pair that never completed a turn in training (None where all did): its angles are new beyond it."""
    for pair, frequency in enumerate(Plain().frequencies(theta, rotary_dims)):
        if frequency * native_length < 2 * math.pi:
            return pair
    return None
