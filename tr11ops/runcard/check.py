"""One line of a preflight: how it came out, what it is about, why, and how to repair it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from trainer.contract.record import Record


class Level(StrEnum):
    """How a check came out."""

    OK = "ok"
    WARNING = "warning"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class PreflightCheck(Record):
    """One line of the preflight. `exit_code` counts where the level is refused (1 needs a person, 2
    wrong usage).
    """

    level: Level
    name: str
    text: str
    fix: str = ""
    exit_code: int = 1

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def ok(name: str, text: str) -> PreflightCheck:
    return PreflightCheck(Level.OK, name, text)


def warning(name: str, text: str, fix: str = "") -> PreflightCheck:
    return PreflightCheck(Level.WARNING, name, text, fix)


def refused(name: str, text: str, fix: str, exit_code: int = 1) -> PreflightCheck:
    return PreflightCheck(Level.REFUSED, name, text=text, fix=fix, exit_code=exit_code)


def unknown(name: str, text: str) -> PreflightCheck:
    return PreflightCheck(
        Level.UNKNOWN,
        name,
        text=text,
        fix="nothing was submitted; try again when it answers",
        exit_code=3,
    )


def verdict(checks: Iterable[PreflightCheck]) -> int:
    """The exit code that the checks add up to: 0, else unknown (3) before wrong usage (2) before a
    refusal (1).
    """
    checks = list(checks)
    if any(check.level is Level.UNKNOWN for check in checks):
        return 3
    return max((check.exit_code for check in checks if check.level is Level.REFUSED), default=0)
