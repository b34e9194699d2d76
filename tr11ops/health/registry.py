"""All health checks by name, and running them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tr11ops.base.errors import Unanswered
from tr11ops.health import (
    clock,
    gpu_count,
    gpu_memory,
    leftovers,
    local_disk,
    memory,
    network,
    nvlink,
    pcie,
    row_remap,
    run_directory,
    shared_memory,
    throttling,
    xid,
)
from tr11ops.health.base import Answer, CheckOutcome, CheckResult, NodeRequirements, System
from tr11ops.health.scripts import SiteScript, run_script
from trainer.contract.record import Record

CheckFunction = Callable[[System, NodeRequirements], Answer]


class HealthCheck(Record):
    """A check's name, as `resilience.skip_checks` spells it. `of_gpus`: left out when a run asks for no GPU."""

    name: str
    function: CheckFunction
    of_gpus: bool = False


CHECKS: tuple[HealthCheck, ...] = (
    HealthCheck("gpu-count", gpu_count.check, of_gpus=True),
    HealthCheck("gpu-memory", gpu_memory.check, of_gpus=True),
    HealthCheck("row-remap", row_remap.check, of_gpus=True),
    HealthCheck("xid", xid.check, of_gpus=True),
    HealthCheck("nvlink", nvlink.check, of_gpus=True),
    HealthCheck("throttling", throttling.check, of_gpus=True),
    HealthCheck("pcie", pcie.check, of_gpus=True),
    HealthCheck("network", network.check),
    HealthCheck("run-directory", run_directory.check),
    HealthCheck("local-disk", local_disk.check),
    HealthCheck("shared-memory", shared_memory.check),
    HealthCheck("memory", memory.check),
    HealthCheck("leftovers", leftovers.check),
    HealthCheck("clock", clock.check),
)
NAMES = tuple(check.name for check in CHECKS)


def chosen(
    wanted: NodeRequirements, scripts: Sequence[str | Mapping[str, Any]] = (), skip: Collection[str] = ()
) -> tuple[HealthCheck, ...]:
    """The checks to run for a run that wants `wanted`; own scripts (`script:NAME`), as the card has them, last."""
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

        name = script.check_name if count == 1 else f"{script.check_name}-{count}"  # each has a verdict of its own
        mine.append(HealthCheck(name, own))
    return tuple(check for check in mine if check.name not in skip)


def run_checks(checks: Sequence[HealthCheck], system: System, wanted: NodeRequirements) -> tuple[CheckResult, ...]:
    """Run all checks at once, in their order. One that does not answer within `wanted.seconds` is unknown.

    A check that hangs (a dead file system holds it in the kernel) is left behind; its thread ends with the process.
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
    check: HealthCheck, system: System, wanted: NodeRequirements, results: list[CheckResult | None], place: int
) -> None:
    """One check; what it cannot find out is unknown, and whatever breaks in it says nothing of the node."""
    try:
        outcome, why = check.function(system, wanted)
    except Unanswered as error:
        outcome, why = CheckOutcome.UNKNOWN, str(error)
    except OSError as error:
        outcome, why = CheckOutcome.UNKNOWN, f"{error.filename or 'the system'}: {error.strerror or error}"
    except Exception as error:
        outcome, why = CheckOutcome.UNKNOWN, f"the check itself failed: {type(error).__name__}: {error}"
    results[place] = CheckResult(check.name, outcome, why)
