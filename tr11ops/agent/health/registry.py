"""All health checks by name, and running them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tr11ops.agent.health import (
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
from tr11ops.agent.health.base import Answer, CheckResult, Outcome, System, Unanswered, Wanted
from tr11ops.agent.health.scripts import run_script

CheckFunction = Callable[[System, Wanted], Answer]


@dataclass(frozen=True)
class Check:
    """A check's name, as `resilience.skip_checks` spells it. `of_gpus`: left out when a run asks for no GPU."""

    name: str
    function: CheckFunction
    of_gpus: bool = False


CHECKS: tuple[Check, ...] = (
    Check("gpu-count", gpu_count.check, of_gpus=True),
    Check("gpu-memory", gpu_memory.check, of_gpus=True),
    Check("row-remap", row_remap.check, of_gpus=True),
    Check("xid", xid.check, of_gpus=True),
    Check("nvlink", nvlink.check, of_gpus=True),
    Check("throttling", throttling.check, of_gpus=True),
    Check("pcie", pcie.check, of_gpus=True),
    Check("network", network.check),
    Check("run-directory", run_directory.check),
    Check("local-disk", local_disk.check),
    Check("shared-memory", shared_memory.check),
    Check("memory", memory.check),
    Check("leftovers", leftovers.check),
    Check("clock", clock.check),
)
NAMES = tuple(check.name for check in CHECKS)


def chosen(wanted: Wanted, scripts: Sequence[str] = (), skip: Collection[str] = ()) -> tuple[Check, ...]:
    """The checks to run for a run that wants `wanted`, own scripts (`script:NAME`) last."""
    mine = [check for check in CHECKS if wanted.gpus > 0 or not check.of_gpus]
    if wanted.folder is None:
        mine = [check for check in mine if check.name != "run-directory"]
    if wanted.controller_time is None:
        mine = [check for check in mine if check.name != "clock"]
    for path in scripts:

        def own(system: System, wanted: Wanted, path: str = path) -> Answer:
            return run_script(system, wanted, path)

        mine.append(Check(f"script:{Path(path).name}", own))
    return tuple(check for check in mine if check.name not in skip)


def run_checks(checks: Sequence[Check], system: System, wanted: Wanted) -> tuple[CheckResult, ...]:
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
        answer or CheckResult(check.name, Outcome.UNKNOWN, late) for check, answer in zip(checks, answers, strict=True)
    )


def _run(check: Check, system: System, wanted: Wanted, results: list[CheckResult | None], place: int) -> None:
    """One check; what it cannot find out is unknown, and whatever breaks in it says nothing of the node."""
    try:
        outcome, why = check.function(system, wanted)
    except Unanswered as error:
        outcome, why = Outcome.UNKNOWN, str(error)
    except OSError as error:
        outcome, why = Outcome.UNKNOWN, f"{error.filename or 'the system'}: {error.strerror or error}"
    except Exception as error:
        outcome, why = Outcome.UNKNOWN, f"the check itself failed: {type(error).__name__}: {error}"
    results[place] = CheckResult(check.name, outcome, why)
