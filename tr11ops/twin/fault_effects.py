"""What each fault does and how it is undone: by exact process, and each undoing may be tried again.

`EFFECTS` has both for each kind. The fault's record is there before its break begins, and what it
is about to touch is written into it first (`FaultStore.write`), so that anyone who finds the record can
repair it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import TwinError
from tr11ops.base.observed import known, observed
from tr11ops.twin import fault_files, fault_site
from tr11ops.twin.fault_files import TEXTS, restore_script, spoil_script
from tr11ops.twin.fault_site import ask_client, retried
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.processes import NodeContents, ProcessRecord, StepWatch, end, scan, send
from tr11ops.twin.twin import Twin
from trainer.contract.metrics_record import MetricsRecord, parse_record
from trainer.contract.state_file import tail_lines

# Faults that the training itself carries: the stand-in's workers read them from the twin's records
# (`stand_in.ailments`).

FIRST_ITERATION = 7
AHEAD = 5  # iterations, of a run that trains already
TAIL_BYTES = 4096
SLOW_FACTOR = 8.0  # of the seconds of a step
CLOCK_AHEAD_SECONDS = 300.0

Break = Callable[[Twin, InjectedFault], InjectedFault]


def fatal_iteration(run: Path) -> int:
    """An iteration that is still to come: the last one that is well."""
    step = last_step(run)
    return max(FIRST_ITERATION, ((step and step.iteration) or 0) + AHEAD)


def last_step(run: Path) -> MetricsRecord | None:
    """The last step that a run below this folder has logged; None when there is none."""
    for path in run.glob("*-logs/logs/*/metrics.jsonl"):
        lines, _ = known(observed(lambda path=path: tail_lines(path, TAIL_BYTES)), ([], True))  # type: ignore[misc]
        found = (
            record
            for line in reversed(lines)
            if (record := parse_record(line)) is not None and record.is_step
        )
        if step := next(found, None):
            return step
    return None


# ----------------------------------------------------------------------------- what stand-ins do by
# themselves
def keep(**details: float) -> Break:
    """A fault that is all in its record."""

    def record(twin: Twin, fault: InjectedFault) -> InjectedFault:
        return twin.faults.write(
            replace(fault, details={name: f"{value:g}" for name, value in details.items()})
        )

    return record


def befall_job(twin: Twin, fault: InjectedFault) -> InjectedFault:
    """A fault of the job that runs on the node now: another one there is well. Raises TwinError
    when none trains.
    """
    daemons = scan(twin.folders, [fault.target])[fault.target].daemons
    steps = {
        daemon.title[0]
        for daemon in daemons
        if daemon.title is not None and daemon.title[1].isdecimal()
    }
    if not steps:
        raise TwinError(f"{fault.kind}: no job trains on {fault.target}")
    return twin.faults.write(replace(fault, details={"job": max(steps, key=int)}))


def spoil_data(twin: Twin, fault: InjectedFault) -> InjectedFault:
    """From an iteration on that is still to come, whichever launch does it."""
    return twin.faults.write(
        replace(fault, details={"iteration": str(fatal_iteration(Path(fault.target)))})
    )


def leave_well(_twin: Twin, fault: InjectedFault) -> str:
    return f"the training on {fault.target} is well again"


FOREIGN_REASON = "memory errors on DIMM B2, ticket 20917 (site staff)"
SLOW_SHARE = 0.2  # of the time in which a slow node's tasks may run
SLOW_PERIOD_SECONDS = 0.5
BLACK_HOLE_SECONDS = 0.02  # between two looks for new tasks
KEEPS_SLURMD_DEAD = frozenset({"slurmd-killed", "half-dead", "node-dead", "batch-host-dead"})

Undo = Callable[[Twin, InjectedFault], str]


# ----------------------------------------------------------------------------- processes
Find = Callable[[Twin, InjectedFault], Iterable[ProcessRecord]]


def _strike(find: Find, act: Callable[[Sequence[ProcessRecord]], object]) -> Break:
    """A break that is all in what it does to some processes."""

    def change(twin: Twin, fault: InjectedFault) -> InjectedFault:
        fault = twin.faults.write(replace(fault, processes=tuple(find(twin, fault))))
        act(fault.processes)
        return fault

    return change


def _kill(records: Sequence[ProcessRecord]) -> None:
    survivors = end(records, 0.0)
    if survivors:
        raise TwinError(f"process {survivors[0].pid} would not die; try again")


def _stop(records: Sequence[ProcessRecord]) -> None:
    send(records, signal.SIGSTOP)


def _contents(twin: Twin, fault: InjectedFault) -> NodeContents:
    return scan(twin.folders, [fault.target])[fault.target]


def _daemon(twin: Twin, fault: InjectedFault) -> Iterable[ProcessRecord]:
    return (twin.process(fault.target),)


def _one_worker(twin: Twin, fault: InjectedFault) -> Iterable[ProcessRecord]:
    contents = _contents(twin, fault)
    if contents.workers:
        return (contents.workers[0].record,)
    tasks = [task.record for task in contents.tasks if task.step is not None]
    if tasks:  # no training: a step's own first process stands for it
        return (min(tasks, key=lambda record: (record.start_ticks, record.pid)),)
    raise TwinError(f"{fault.kind}: no worker runs on {fault.target}")


def _half(twin: Twin, fault: InjectedFault) -> Iterable[ProcessRecord]:
    if not _contents(twin, fault).daemons:
        raise TwinError(
            f"half-dead: no job runs on {fault.target}, so slurmd would be all of it: use slurmd-killed"
        )
    return _daemon(twin, fault)


def _batch_shells(twin: Twin, fault: InjectedFault) -> Iterable[ProcessRecord]:
    """The shells of the batch scripts alone: what they have started is the step daemon's to end."""
    contents = _contents(twin, fault)
    hosts = {
        daemon.record.pid
        for daemon in contents.daemons
        if daemon.title is not None and daemon.title[1] == "batch"
    }
    return (task.record for task in contents.tasks if task.parent in hosts)


def _continue(_twin: Twin, fault: InjectedFault) -> str:
    return f"{send(fault.processes, signal.SIGCONT)} process(es) go on"


# ----------------------------------------------------------------------------- nodes
def _begin(_twin: Twin, fault: InjectedFault) -> InjectedFault:
    return fault  # its agent does it


def _end_black_hole(_twin: Twin, fault: InjectedFault) -> str:
    return f"tasks live on {fault.target} again"


def _end_slow_node(twin: Twin, fault: InjectedFault) -> str:
    tasks = [task.record for task in _contents(twin, fault).tasks]
    send(tasks, signal.SIGCONT)
    return f"the tasks of {fault.target} run at full speed"


def _kill_node(twin: Twin, fault: InjectedFault) -> InjectedFault:
    """Everything is stopped before anything is killed, so that no part can report the end of
    another.
    """
    frozen: dict[int, ProcessRecord] = {}
    slurmd = twin.process(fault.target)
    for _ in range(20):
        contents = _contents(twin, fault)
        found = [slurmd, *(process.record for process in contents.all)]
        new = [record for record in found if record.pid not in frozen and record.is_alive]
        if not new:
            break
        frozen.update((record.pid, record) for record in new)
        fault = twin.faults.write(replace(fault, processes=tuple(frozen.values())))
        _stop(new)
    _kill(fault.processes)
    return fault


def _start_slurmd(twin: Twin, fault: InjectedFault) -> str:
    others = [
        other
        for other in twin.faults.active()
        if other.target == fault.target
        and other.kind in KEEPS_SLURMD_DEAD
        and other.identity != fault.identity
    ]
    if others:
        return f"slurmd of {fault.target} stays dead: {others[0].kind}"
    # a crash of the one who broke the node may have left processes that are stopped and not yet
    # killed
    end([record for record in fault.processes if not fault.is_complete], 0.0)
    return _start(twin, fault.target, f"slurmd of {fault.target}")


def _start(twin: Twin, name: str, words: str) -> str:
    if twin.process(name).is_alive:
        return f"{words} runs already"
    twin.start_daemon(name)
    return f"{words} is started again"


# ----------------------------------------------------------------------------- the controller
def _restart(twin: Twin, fault: InjectedFault) -> InjectedFault:
    fault = _strike(_daemon, lambda found: end(found, 20.0))(twin, fault)
    twin.start_daemon("slurmctld")
    return fault


def _start_controller(twin: Twin, _fault: InjectedFault) -> str:
    return _start(twin, "slurmctld", "slurmctld")


# ----------------------------------------------------------------------------- another hand
def _set_aside(state: str) -> Break:
    """A break that puts the node into a state of an administrator's, DRAIN or FAIL, in another
    person's name.
    """

    def change(twin: Twin, fault: InjectedFault) -> InjectedFault:
        now, reason = _node_facts(twin, fault.target)
        wanted = fault.details.get("reason") or FOREIGN_REASON
        if state in now and reason != wanted:
            raise TwinError(
                f"{fault.kind}: {fault.target} is {now} already ({reason or 'no reason given'}); that is left as it is"
            )
        fault = twin.faults.write(replace(fault, details={"reason": wanted}))
        ask_client(
            twin,
            "scontrol",
            "update",
            f"NodeName={fault.target}",
            f"State={state}",
            f"Reason={wanted}",
        )
        return fault

    return change


def _resume_from(state: str) -> Undo:
    """Take the node out of that state, unless someone else has put it there meanwhile."""

    def undo(twin: Twin, fault: InjectedFault) -> str:
        now, reason = _node_facts(twin, fault.target)
        if state not in now:
            return f"{fault.target} is not in {state} any more"
        if reason != fault.details.get("reason"):
            return f"{fault.target} stays in {state}: the reason is another one now ({reason})"
        retried(
            lambda: ask_client(
                twin, "scontrol", "update", f"NodeName={fault.target}", "State=RESUME"
            )
        )
        return f"{fault.target} is resumed"

    return undo


def _node_facts(twin: Twin, node: str) -> tuple[str, str]:
    """State and reason of a node, as the controller says."""
    state = reason = ""
    for line in ask_client(twin, "scontrol", "show", "node", node).splitlines():
        words = line.strip()
        if words.startswith("State="):
            state = words.removeprefix("State=").split()[0]
        if words.startswith("Reason="):
            reason = words.removeprefix("Reason=").rsplit(" [", 1)[0]
    return state, reason


# ----------------------------------------------------------------------------- directories and
# scripts
def _of_target(act: Callable[[InjectedFault], None]) -> Break:
    """A break that is all in what it does to the target."""

    def change(_twin: Twin, fault: InjectedFault) -> InjectedFault:
        act(fault)
        return fault

    return change


def _fill_disk(twin: Twin, fault: InjectedFault) -> InjectedFault:
    fault_files.fill(fault, twin.folders)
    return fault


def _restore_script(_twin: Twin, fault: InjectedFault) -> str:
    return f"{fault.target} is {'as it was' if restore_script(fault) else 'as it was already'}"


def _end_bad_sample(_twin: Twin, fault: InjectedFault) -> str:
    iteration = fault.details.get("iteration", "")
    if iteration:
        trained = str(int(iteration) + 1)
    else:
        trained = "?"
    return f"iteration {trained} can be trained again"


def _uncover(twin: Twin, fault: InjectedFault) -> str:
    fault_files.uncover(fault, twin.folders)
    return f"{fault.target} is as it was"


EFFECTS: Mapping[str, tuple[Break, Undo]] = {
    "worker-crash": (_strike(_one_worker, lambda found: send(found, signal.SIGKILL)), _continue),
    "worker-stop": (_strike(_one_worker, _stop), _continue),
    "black-hole": (_begin, _end_black_hole),
    "slow-node": (_begin, _end_slow_node),
    "slurmd-killed": (_strike(_daemon, _kill), _start_slurmd),
    "half-dead": (_strike(_half, _kill), _start_slurmd),
    "node-dead": (_kill_node, _start_slurmd),
    "batch-host-dead": (_kill_node, _start_slurmd),
    "controller-frozen": (_strike(_daemon, _stop), _continue),
    "controller-killed": (_strike(_daemon, _kill), _start_controller),
    "controller-restarted": (_restart, _start_controller),
    "drain": (_set_aside("DRAIN"), _resume_from("DRAIN")),
    "node-failing": (_set_aside("FAIL"), _resume_from("FAIL")),
    "job-limit-lowered": (fault_site.lower_job_limit, fault_site.leave_job_limit),
    "node-removed": (fault_site.remove_node, fault_site.put_node_back),
    "partition-down": (fault_site.change_partition("State=DOWN"), fault_site.open_partition),
    "partition-closed": (fault_site.change_partition("State=INACTIVE"), fault_site.open_partition),
    "time-limit-lowered": (
        fault_site.change_partition(f"MaxTime={fault_site.LOWERED_MINUTES}"),
        fault_site.restore_time_limit,
    ),
    "maintenance": (fault_site.begin_maintenance, fault_site.end_maintenance),
    "reservation-ended": (fault_site.end_reservations, fault_site.leave_ended),
    "limit-exhausted": (fault_site.exhaust_limit, fault_site.lift_limit),
    "disk-full": (_fill_disk, _uncover),
    "read-only": (_of_target(fault_files.make_read_only), _uncover),
    "unmounted": (_of_target(fault_files.hide), _uncover),
    "torn-state": (_of_target(fault_files.tear_state), _continue),
    "bad-sample": (spoil_data, _end_bad_sample),
    "batch-killed": (_strike(_batch_shells, _kill), _continue),
    "step-hang": (befall_job, leave_well),
    "data-wait": (befall_job, leave_well),
    "save-error": (keep(), leave_well),
    "slow-steps": (
        keep(factor=SLOW_FACTOR),
        leave_well,
    ),
    "clock-ahead": (
        keep(seconds=CLOCK_AHEAD_SECONDS),
        leave_well,
    ),
    "loss-spike": (spoil_data, leave_well),
    **dict.fromkeys(TEXTS, (_of_target(spoil_script), _restore_script)),
}


# ----------------------------------------------------------------------------- what an agent does
# again and again
def black_hole(watch: StepWatch) -> float:
    """Kill the tasks that are there now; returns the seconds until the next look."""
    send(watch.look(), signal.SIGABRT)
    return BLACK_HOLE_SECONDS


def slow_down(watch: StepWatch) -> float:
    """Let the tasks run for a share of the period, then stop them for the rest of it."""
    tasks = watch.look()
    _stop(tasks)
    time.sleep(SLOW_PERIOD_SECONDS * (1 - SLOW_SHARE))
    send(tasks, signal.SIGCONT)
    return SLOW_PERIOD_SECONDS * SLOW_SHARE
