"""All health checks by name, and running them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tr11ops.base.errors import Unanswered
from tr11ops.base.processes import ProbeOutput
from tr11ops.health import gpu, host
from tr11ops.health.base import Answer, CheckOutcome, CheckResult, NodeRequirements, System
from trainer.contract.record import Record
from trainer.contract.units import printable, shortened

# A site's own checks: executables whose exit status is the verdict and whose first line of output
# is the why.
#
# What an exit status means depends on the family that a check belongs to, its dialect:
#
# - `tr11`: a script made for tr11.
# - `nagios`: a plugin of Nagios, Icinga, Sensu or Checkmk, by the return codes of the plugin
#   interface.
# - `gcm`: a health check of facebookresearch/gcm (`health_checks NAME ...`), which has the same
#   codes.
# - `nhc`: LBNL Node Health Check (mej/nhc), which ends with the status of the check that failed, or
#   with how many failed (`-a`). It keeps some for itself: 10 (its own command line), 126 and 127 (a
#   check that cannot be run, or is not there), 129 to 143 (a signal, or its time-out), 145 (an
#   earlier one still runs).

_FINE = CheckOutcome.FINE
_WARNING = CheckOutcome.WARNING
_BAD = CheckOutcome.BAD
_UNKNOWN = CheckOutcome.UNKNOWN
_MONITORING = {0: _FINE, 1: _WARNING, 2: _BAD, 3: _UNKNOWN}
_NHC_OWN = {10, 126, 127}
_LONGEST = 200

# What each exit status means; whatever is not here is unknown: a broken script must not empty a
# cluster.
DIALECTS: Mapping[str, Mapping[int, CheckOutcome]] = {
    "tr11": {0: _FINE, 1: _BAD, 3: _UNKNOWN},
    "nagios": _MONITORING,
    "gcm": _MONITORING,
    "nhc": {0: _FINE, **{status: _BAD for status in range(1, 128) if status not in _NHC_OWN}},
}


class SiteScript(Record):
    """One check of the site's: an executable, what it is called with, and what its exit status
    means.
    """

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
    lines = [
        line.strip()
        for line in (*output.text.splitlines(), *output.error.splitlines())
        if line.strip()
    ]
    said = ""
    if lines:
        said = shortened(printable(lines[0]), _LONGEST)
    outcomes = DIALECTS.get(script.dialect)
    if outcomes is None:
        raise Unanswered(
            f"{script.dialect!r} is no dialect of health checks: {', '.join(DIALECTS)}"
        )
    if outcomes is _MONITORING and _is_misuse(output):
        raise Unanswered(f"it does not take its arguments: {shortened(lines[-1], _LONGEST)}")
    if output.status not in outcomes:
        if script.dialect == "tr11":
            known = "none of 0, 1, 3"
        else:
            known = f"no verdict in {script.dialect}"
        raise Unanswered(
            f"exit status {output.status}, which is {known}{f': {said}' if said else ''}"
        )
    return outcomes[output.status], said or f"{script.path} exited with {output.status}"


def _is_misuse(output: ProbeOutput) -> bool:
    """Whether a program of Python refused its own arguments: it ends with 2 then, which would mean
    a bad node.
    """
    return (
        output.status == 2
        and not output.text.strip()
        and output.error.lstrip().lower().startswith("usage:")
    )


CheckFunction: TypeAlias = "Callable[[System, NodeRequirements], Answer]"


class HealthCheck(Record):
    """A check's name, as `resilience.skip_checks` spells it. `of_gpus`: left out when a run asks
    for no GPU.
    """

    name: str
    function: CheckFunction
    of_gpus: bool = False


CHECKS: tuple[HealthCheck, ...] = (
    HealthCheck("gpu-count", gpu.check_gpu_count, of_gpus=True),
    HealthCheck("gpu-memory", gpu.check_gpu_memory, of_gpus=True),
    HealthCheck("row-remap", gpu.check_row_remap, of_gpus=True),
    HealthCheck("xid", gpu.check_xid, of_gpus=True),
    HealthCheck("nvlink", gpu.check_nvlink, of_gpus=True),
    HealthCheck("throttling", gpu.check_throttling, of_gpus=True),
    HealthCheck("pcie", gpu.check_pcie, of_gpus=True),
    HealthCheck("network", host.check_network),
    HealthCheck("run-directory", host.check_run_directory),
    HealthCheck("local-disk", host.check_local_disk),
    HealthCheck("shared-memory", host.check_shared_memory),
    HealthCheck("memory", host.check_memory),
    HealthCheck("leftovers", host.check_leftovers),
    HealthCheck("clock", host.check_clock),
)
NAMES = tuple(check.name for check in CHECKS)


def chosen(
    wanted: NodeRequirements,
    scripts: Sequence[str | Mapping[str, Any]] = (),
    skip: Collection[str] = (),
) -> tuple[HealthCheck, ...]:
    """The checks to run for a run that wants `wanted`; own scripts (`script:NAME`), as the card has
    them, last.
    """
    mine = [check for check in CHECKS if wanted.gpus > 0 or not check.of_gpus]
    if wanted.folder is None:
        mine = [check for check in mine if check.name != "run-directory"]
    if wanted.controller_time is None:
        mine = [check for check in mine if check.name != "clock"]
    scripts_of: dict[str, int] = {}
    for script in map(SiteScript.of, scripts):
        count = scripts_of[script.check_name] = scripts_of.get(script.check_name, 0) + 1
        if script.check_name in skip:
            continue

        def own(system: System, wanted: NodeRequirements, script: SiteScript = script) -> Answer:
            return run_script(system, wanted, script)

        # each has a verdict of its own
        if count == 1:
            name = script.check_name
        else:
            name = f"{script.check_name}-{count}"
        mine.append(HealthCheck(name, own))
    return tuple(check for check in mine if check.name not in skip)


def run_checks(
    checks: Sequence[HealthCheck], system: System, wanted: NodeRequirements
) -> tuple[CheckResult, ...]:
    """Run all checks at once, in their order. One that does not answer within `wanted.seconds` is
    unknown.

    A check that hangs (a dead file system holds it in the kernel) is left behind; its thread ends
    with the process.
    """
    results: list[CheckResult | None] = [None] * len(checks)
    threads = []
    for place, check in enumerate(checks):
        arguments = (check, system, wanted, results, place)
        threads.append(threading.Thread(target=_run, args=arguments, daemon=True, name=check.name))
        threads[-1].start()
    deadline = time.monotonic() + wanted.seconds
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    late = f"no answer within {wanted.seconds:g} s"
    answers = tuple(results)  # a late answer no longer counts
    return tuple(
        answer or CheckResult(check.name, CheckOutcome.UNKNOWN, late)
        for check, answer in zip(checks, answers, strict=True)
    )


def _run(
    check: HealthCheck,
    system: System,
    wanted: NodeRequirements,
    results: list[CheckResult | None],
    place: int,
) -> None:
    """One check; what it cannot find out is unknown, and whatever breaks in it says nothing of the
    node.
    """
    try:
        outcome, why = check.function(system, wanted)
    except Unanswered as error:
        outcome = CheckOutcome.UNKNOWN
        why = str(error)
    except OSError as error:
        outcome = CheckOutcome.UNKNOWN
        why = f"{error.filename or 'the system'}: {error.strerror or error}"
    except Exception as error:
        outcome = CheckOutcome.UNKNOWN
        why = f"the check itself failed: {type(error).__name__}: {error}"
    results[place] = CheckResult(check.name, outcome, why)
