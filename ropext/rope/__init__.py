"""Rotary frequencies: how far each pair of head dimensions turns per token.

Pure arithmetic: reads no file, touches no model, caches nothing. One frozen dataclass a method.
Suffix F = rotary_dims // 2 pairs. Lengths are in tokens, angles in radians.
"""

from __future__ import annotations

from ropext.rope.bands import Llama3, NtkByParts, Yarn
from ropext.rope.bases import Abf, Linear, Ntk
from ropext.rope.changing import Dynamic, LongRope, changes_with_length, frequencies_at
from ropext.rope.form import ORIGINAL, ConfigForm, Method, Plain, unfinished_pair
from ropext.rope.named import (
    METHODS,
    SETTINGS,
    Progressive,
    Settings,
    canonical_name,
    check_asked,
    given_settings,
    method_named,
)

__all__ = [
    "METHODS",
    "ORIGINAL",
    "SETTINGS",
    "Abf",
    "ConfigForm",
    "Dynamic",
    "Linear",
    "Llama3",
    "LongRope",
    "Method",
    "Ntk",
    "NtkByParts",
    "Plain",
    "Progressive",
    "Settings",
    "Yarn",
    "canonical_name",
    "changes_with_length",
    "check_asked",
    "frequencies_at",
    "given_settings",
    "method_named",
    "unfinished_pair",
]
