"""Methods by name: which there are, what settings each takes, and one whose factor grows with the training stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from ropext.errors import UsageError
from ropext.rope.bands import Llama3, NtkByParts, Yarn
from ropext.rope.bases import Abf, Linear, Ntk
from ropext.rope.changing import Dynamic, LongRope
from ropext.rope.form import ConfigForm, Method, Plain, check_factor

METHODS = ("linear", "ntk", "abf", "dynamic", "ntk-by-parts", "yarn", "longrope", "llama3", "progressive")
ALIASES = {"pi": "linear", "ntk-aware": "ntk", "su": "longrope"}
GROWING = ("ntk", "linear", "ntk-by-parts", "yarn", "llama3")  # whose factor a training stage can set
_BANDS = ("beta_fast", "beta_slow", "truncate")
# Settings of each method beside its factor, under the names of the config form.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "abf": ("theta",),
    "ntk-by-parts": _BANDS,
    "yarn": (*_BANDS, "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "progressive": ("inner",),
}
NOT_GROWING = {
    "abf": "its theta is given, no factor sets it",
    "dynamic": "it grows by itself with the input",
    "longrope": "its lists belong to one factor",
    "progressive": "it grows an inner method",
}


class Settings(TypedDict, total=False):
    """What a method takes beside its factor; SETTINGS says which takes what."""

    inner: str | None
    theta: float | None
    beta_fast: float | None
    beta_slow: float | None
    truncate: bool | None
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    low_freq_factor: float | None
    high_freq_factor: float | None
    short_factor: tuple[float, ...] | None
    long_factor: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progressive:
    """An inner method whose factor grows with the training stage and ends at `factor` (DESIGN: What is on disk).

    Between patch and training the checkpoint carries the final factor, so both views are the inner method's.
    """

    factor: float  # the final one: target length / native length, above 1
    native_length: int  # tokens
    inner: str = "ntk"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the inner method

    def __post_init__(self) -> None:
        check_factor(self.factor)
        if self.inner not in GROWING:
            raise UsageError(
                f"progressive grows the factor of {', '.join(GROWING)}: not of {self.inner}, "
                f"{NOT_GROWING.get(self.inner, 'there is no such method')}"
            )

    @property
    def attention_scaling(self) -> float:
        """That of the inner method at the final factor."""
        return self.at(self.factor).attention_scaling

    def at(self, factor: float) -> Method:
        """The inner method at one stage's factor; at 1 and below nothing is scaled yet."""
        return method_named(self.inner, factor, self.native_length, self.settings) if factor > 1 else Plain()

    def frequencies(self, theta: float, rotary_dims: int) -> list[float]:
        """Frequencies at the final factor: `[F]`."""
        return self.at(self.factor).frequencies(theta, rotary_dims)

    def config_form(self, theta: float, rotary_dims: int) -> ConfigForm:
        """Config form at the final factor."""
        return self.at(self.factor).config_form(theta, rotary_dims)


def canonical_name(name: str) -> str:
    """The method that `name` means, in any case. Raises UsageError for an unknown one."""
    lower = name.strip().lower()
    method = ALIASES.get(lower, lower)
    if method not in METHODS:
        raise UsageError(f"there is no method {name!r}: use one of {', '.join(METHODS)} (ntk is the one to prefer)")
    return method


def method_named(
    name: str, factor: float, native_length: int, settings: Mapping[str, Any] | Settings | None = None
) -> Method:
    """The method of a canonical or alias name. Raises UsageError for a setting that it does not take."""
    method = canonical_name(name)
    given = given_settings(settings or {})
    _check_settings(method, given)
    if method == "progressive":
        inner = canonical_name(given.pop("inner", "ntk"))
        return Progressive(factor=factor, native_length=native_length, inner=inner, settings=given)
    if method == "abf":
        check_factor(factor)
        return Abf(theta=given["theta"])
    if method in ("linear", "ntk"):
        return Linear(factor=factor) if method == "linear" else Ntk(factor=factor)
    made = {"dynamic": Dynamic, "ntk-by-parts": NtkByParts, "yarn": Yarn, "longrope": LongRope, "llama3": Llama3}
    chosen: Method = made[method](factor=factor, native_length=native_length, **given)
    return chosen


def given_settings(settings: Mapping[str, Any] | Settings) -> dict[str, Any]:
    """Settings that are not left to their default."""
    return {name: value for name, value in settings.items() if value is not None}


def _check_settings(method: str, given: Mapping[str, Any]) -> None:
    taken = SETTINGS.get(method, ())
    if method == "progressive":  # what is not its own belongs to the inner method
        taken += SETTINGS.get(canonical_name(given.get("inner", "ntk")), ())
    for name in given:
        if name not in taken:
            owners = " or ".join(owner for owner, names in SETTINGS.items() if name in names) or "no method"
            raise UsageError(f"{_option(name)} belongs to {owners}: found it with {method}. Leave it out")
    if method == "abf" and "theta" not in given:
        raise UsageError("abf needs the theta to set: add --theta, for instance 500000")
    if method == "longrope" and not {"short_factor", "long_factor"} <= given.keys():
        raise UsageError("longrope needs its lists of factors: add --longrope-factors with a JSON or CSV file")


def check_asked(settings: Mapping[str, Any] | Settings) -> None:
    """Raises UsageError for settings of which readers would ignore one; a checkpoint that has such stays as it is."""
    given = given_settings(settings)
    if ("mscale" in given) != ("mscale_all_dim" in given):
        raise UsageError("mscale and mscale_all_dim work as a pair: give both, or leave both out")
    if "mscale" in given and "attention_factor" in given:
        raise UsageError("readers obey attention_factor and ignore mscale beside it: give one of them")


def _option(name: str) -> str:
    lists = ("short_factor", "long_factor")
    return "--longrope-factors" if name in lists else "--" + name.replace("_", "-")
