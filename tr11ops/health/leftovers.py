"""Do processes of an earlier job or launch of ours still live here? They hold GPUs, ports and
memory.
"""

from __future__ import annotations

from tr11ops.base.units import first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System, TrainerProcess


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when a leftover process cannot be ended; a warning when it was, or when someone still
    looks after it.

    Only this user's processes of trainings are looked at, and only those that were started on this
    very node: one machine may play several.
    """
    others = [
        process
        for process in system.trainer_processes()
        if process.node == wanted.node
        and (process.job_id, process.launch) != (wanted.job_id, str(wanted.launch))
    ]
    if not others:
        return CheckOutcome.FINE, "none"
    abandoned = [process for process in others if not process.is_kept]
    if not abandoned or not wanted.ends_leftovers:
        return CheckOutcome.WARNING, f"trainings of ours live here too: {_named(others)}"
    left = set(system.end(process.pid for process in abandoned))
    stuck = [process for process in abandoned if process.pid in left]
    if stuck:
        return CheckOutcome.BAD, f"earlier processes of ours cannot be ended: {_named(stuck)}"
    return CheckOutcome.WARNING, f"earlier processes of ours were ended: {_named(abandoned)}"


def _named(processes: list[TrainerProcess]) -> str:
    return first_few(
        f"{one.name} {one.pid} of job {one.job_id}, launch {one.launch}" for one in processes
    )
