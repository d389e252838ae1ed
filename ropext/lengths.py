"""Lengths in tokens, "8k" <-> 8192, growing schedules and free lists; times, "10m" -> 600 seconds; bytes; percentages.

`k` is 1024 and `m` is 1024 * 1024, in either case.
"""

from __future__ import annotations

import math
import re

from ropext.errors import UsageError

LONGEST = 2**24  # tokens; float32 counts no further without gaps
_LENGTH = re.compile(r"([0-9]+)([km]?)", re.IGNORECASE | re.ASCII)
_TIME = re.compile(r"([0-9]{1,9})([smh]?)", re.IGNORECASE | re.ASCII)
_BYTES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?(|[kmgt]i?b)", re.IGNORECASE | re.ASCII)
_BYTE_UNITS = {"": 1} | {
    f"{unit}{middle}b": base**power
    for power, unit in enumerate("kmgt", 1)
    for middle, base in (("", 1000), ("i", 1024))
}
_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}


def parse_length(text: str) -> int:
    """Tokens that `text` names. Raises UsageError unless it is a whole number above 0 with k, m or nothing behind."""
    match = _LENGTH.fullmatch(text.strip())
    tokens = int(match[1]) * _UNITS[match[2].lower()] if match and len(match[1]) < 19 else 0
    if tokens < 1:
        raise UsageError(f"a length is a whole number of tokens such as 512, 2k or 1m: found {text!r}")
    return tokens


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths separated by commas, in the order given, each once. Raises UsageError for anything else."""
    return tuple(dict.fromkeys(parse_length(part) for part in text.split(",")))


def parse_schedule(text: str) -> tuple[int, ...]:
    """Growing stage lengths, such as 2k,4k,8k. Raises UsageError unless each is longer than the one before."""
    stages = tuple(parse_length(part) for part in text.split(","))
    for shorter, longer in zip(stages, stages[1:], strict=False):
        if longer <= shorter:
            raise UsageError(
                f"each stage of a schedule is longer than the one before: found {format_length(longer)} after "
                f"{format_length(shorter)} in {text!r}"
            )
    return stages


def parse_seconds(text: str) -> float:
    """Seconds that "10m", "90s", "2h" or plain "90" name. Raises UsageError for anything else, and for no time."""
    match = _TIME.fullmatch(text.strip())
    seconds = int(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2].lower()] if match else 0
    if seconds < 1:
        raise UsageError(f"a time is a whole number with s, m or h behind, such as 90s, 10m or 2h: found {text!r}")
    return float(seconds)


def parse_bytes(text: str) -> int:
    """Bytes that "24GB", "512MB" or "2GiB" name; a plain number is bytes. Raises UsageError for anything else."""
    match = _BYTES.fullmatch(text.strip())
    found = int(float(match[1]) * _BYTE_UNITS[match[2].lower()]) if match else 0
    if found < 1:
        raise UsageError(f"an amount of memory is a number with MB, GB or GiB behind, such as 24GB: found {text!r}")
    return found


def parse_percent(text: str) -> float:
    """The share that "2%" or "2" names, 0.02. Raises UsageError for anything but a percentage from 0 on."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise UsageError(f"a percentage is a number from 0 on, such as 2% or 0.5%: found {text!r}")
    return share


def format_length(tokens: int) -> str:
    """The shortest exact name: 8192 -> "8k", 1000 -> "1000"."""
    for unit in ("m", "k"):
        if tokens >= _UNITS[unit] and tokens % _UNITS[unit] == 0:
            return f"{tokens // _UNITS[unit]}{unit}"
    return str(tokens)
