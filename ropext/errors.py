"""Every exception that ropext raises on purpose.

    RopextError             exit 1   something failed: a file, a write, a verification
    ├── UsageError          exit 2   the request cannot be understood, or contradicts itself
    ├── Refused             exit 3   understood, but wrong to do
    └── GateNotMet          exit 4   measured, and worse than was allowed

A message is one or two lines: the rule, the value found, what to do instead.
"""


class RopextError(Exception):
    """The work was started and did not succeed. Base of all errors here."""

    exit_code = 1


class UsageError(RopextError):
    """The request is unparsable, incomplete or contradicts itself."""

    exit_code = 2


class Refused(RopextError):
    """The request is understood and would do harm, so nothing was written."""

    exit_code = 3


class GateNotMet(RopextError):
    """Everything was measured and written, and a figure is worse than the request allows."""

    exit_code = 4


def short(value: object) -> str:
    """A value for a message of one line, however long it is in the file."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of more than 4300 digits
        text = "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its name, for a message of one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
