"""A site's own checks: executables whose exit status is the verdict and whose first line of output is the why.

What an exit status means depends on the family that a check belongs to, its dialect:

- `tr11`: a script made for tr11.
- `nagios`: a plugin of Nagios, Icinga, Sensu or Checkmk, by the return codes of the plugin interface.
- `gcm`: a health check of facebookresearch/gcm (`health_checks NAME ...`), which has the same codes.
- `nhc`: LBNL Node Health Check (mej/nhc), which ends with the status of the check that failed, or with how many failed
  (`-a`). It keeps some for itself: 10 (its own command line), 126 and 127 (a check that cannot be run, or is not
  there), 129 to 143 (a signal, or its time-out), 145 (an earlier one still runs).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr11ops.base.errors import Unanswered
from tr11ops.base.probes import ProbeOutput
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System
from trainer.contract.record import Record

_FINE, _WARNING, _BAD, _UNKNOWN = CheckOutcome.FINE, CheckOutcome.WARNING, CheckOutcome.BAD, CheckOutcome.UNKNOWN
_MONITORING = {0: _FINE, 1: _WARNING, 2: _BAD, 3: _UNKNOWN}
_NHC_OWN = {10, 126, 127}
_LONGEST = 200

# What each exit status means; whatever is not here is unknown: a broken script must not empty a cluster.
DIALECTS: Mapping[str, Mapping[int, CheckOutcome]] = {
    "tr11": {0: _FINE, 1: _BAD, 3: _UNKNOWN},
    "nagios": _MONITORING,
    "gcm": _MONITORING,
    "nhc": {0: _FINE, **{status: _BAD for status in range(1, 128) if status not in _NHC_OWN}},
}


class SiteScript(Record):
    """One check of the site's: an executable, what it is called with, and what its exit status means."""

    path: str
    arguments: tuple[str, ...] = ()
    dialect: str = "tr11"
    name: str = ""

    @classmethod
    def of(cls, value: str | Mapping[str, Any]) -> SiteScript:
        """An entry of the card's `resilience.check_scripts`: a path alone, or a table."""
        if isinstance(value, str):
            return cls(value)
        return cls(
            str(value["script"]),
            tuple(map(str, value.get("arguments") or ())),
            str(value.get("dialect") or "tr11"),
            str(value.get("name") or ""),
        )

    @property
    def check_name(self) -> str:
        """As `resilience.skip_checks` spells it."""
        return f"script:{self.name or Path(self.path).name}"


def run_script(system: System, wanted: NodeRequirements, script: SiteScript) -> Answer:
    """Run one script. An exit status that its dialect does not know is unknown."""
    try:
        output = system.command([script.path, *script.arguments], wanted.seconds)
    except OSError as error:
        raise Unanswered(f"{script.path}: {error.strerror or error}") from None
    lines = [line.strip() for line in (*output.text.splitlines(), *output.error.splitlines()) if line.strip()]
    said = "".join(character if character.isprintable() else "?" for character in lines[0])[:_LONGEST] if lines else ""
    outcomes = DIALECTS.get(script.dialect)
    if outcomes is None:
        raise Unanswered(f"{script.dialect!r} is no dialect of health checks: {', '.join(DIALECTS)}")
    if outcomes is _MONITORING and _is_misuse(output):
        raise Unanswered(f"it does not take its arguments: {lines[-1][:_LONGEST]}")
    if output.status not in outcomes:
        known = "none of 0, 1, 3" if script.dialect == "tr11" else f"no verdict in {script.dialect}"
        raise Unanswered(f"exit status {output.status}, which is {known}{f': {said}' if said else ''}")
    return outcomes[output.status], said or f"{script.path} exited with {output.status}"


def _is_misuse(output: ProbeOutput) -> bool:
    """Whether a program of Python refused its own arguments: it ends with 2 then, which would mean a bad node."""
    return output.status == 2 and not output.text.strip() and output.error.lstrip().lower().startswith("usage:")
