"""What a rule is: it looks at a case and reports findings; a verdict holds all of them and alone may refuse.

Lengths are in tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ropext.checkpoint import Checkpoint
from ropext.errors import Refused
from ropext.facts import Facts
from ropext.plan import RopePlan

Severity = Literal["refuse", "warn", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing a rule found."""

    code: str  # stable: RPX001 ...
    severity: Severity
    message: str  # the rule and the value found
    fix: str  # what to do


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Every finding of the rules, in their order."""

    findings: tuple[Finding, ...]

    @property
    def refuses(self) -> bool:
        """Whether some finding says that this is unsafe."""
        return any(finding.severity == "refuse" for finding in self.findings)

    def require(self) -> None:
        """Raise Refused with the first finding that refuses, if any does."""
        for finding in self.findings:
            if finding.severity == "refuse":
                raise Refused(f"{finding.message}. {finding.fix} [{finding.code}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What the rules look at: a checkpoint as it lies there, and what is asked for it."""

    checkpoint: Checkpoint
    known: Facts | None = None  # None where they cannot be read
    unknown: str | None = None  # why not
    problems: tuple[str, ...] = ()  # what could not be read of the files
    planned: RopePlan | None = None  # None where nothing is planned
    verified: bool = True  # stock transformers is asked for the planned table
    native_length_stated: bool = False
    readers: tuple[str, ...] = ()  # that count beside transformers

    @property
    def facts(self) -> Facts:
        """For rules that are asked only where facts are known."""
        assert self.known is not None
        return self.known

    @property
    def plan(self) -> RopePlan:
        """For rules that are asked only where something is planned."""
        assert self.planned is not None
        return self.planned


Check = Callable[[Case], Iterator[tuple[str, str]]]  # message and fix of each finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A check with its stable code, how grave its findings are, and the page that explains it."""

    code: str
    severity: Severity
    title: str  # one line
    page: str  # what goes wrong, why, what to do
    source: str
    check: Check

    def findings(self, case: Case) -> Iterator[Finding]:
        """What the check finds in a case."""
        for message, fix in self.check(case):
            yield Finding(code=self.code, severity=self.severity, message=message, fix=fix)


def rule(code: str, severity: Severity, source: str) -> Callable[[Check], Rule]:
    """Make a rule of a check: its docstring gives the title (first line) and the page (the rest)."""

    def made(check: Check) -> Rule:
        title, _, page = (inspect.getdoc(check) or "").partition("\n")
        return Rule(
            code=code, severity=severity, title=title.rstrip("."), page=page.strip(), source=source, check=check
        )

    return made


def judged(case: Case, *groups: tuple[Rule, ...]) -> Verdict:
    """The verdict of groups of rules, in their order."""
    return Verdict(findings=tuple(found for rules in groups for each in rules for found in each.findings(case)))
