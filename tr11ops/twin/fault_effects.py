"""What the faults of a twin do to processes, nodes, the controller and the stand-ins, and how that is undone.

Each undoing is by exact process, and may be tried again. The fault's record is there before its break begins, and what
it is about to touch is written into it first (`FaultStore.write`), so that anyone who finds the record can repair it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import TwinError
from tr11ops.base.observed import known, observed
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.plan import TwinFolders
from tr11ops.twin.processes import NodeContents, ProcessRecord, StepWatch, end, scan, send
from tr11ops.twin.twin import Twin
from trainer.contract.metrics_record import MetricsRecord, parse_record
from trainer.contract.state_file import tail_lines

Break = Callable[[Twin, InjectedFault], None]  # does it; what it finds out goes into the record
Undo = Callable[[Twin, InjectedFault], str]  # heals it, and says in words what that came to

FIRST_ITERATION = 7
AHEAD = 5  # iterations, of a run that trains already
TAIL_BYTES = 4096
SLOW_SHARE = 0.2  # of the time in which a slow node's tasks may run
SLOW_PERIOD_SECONDS = 0.5
BLACK_HOLE_SECONDS = 0.02  # between two looks for new tasks
KEEPS_SLURMD_DEAD = frozenset({"slurmd-killed", "half-dead", "node-dead", "batch-host-dead"})


def nothing(_twin: Twin, _fault: InjectedFault) -> None:
    """The break of a fault that is all in its record, or that its agent does."""


def says(text: str) -> Undo:
    """The undoing of what is over with its record; `{target}` in the text is the fault's."""

    def undo(_twin: Twin, fault: InjectedFault) -> str:
        return text.format(target=fault.target)

    return undo


def fatal_iteration(run: Path) -> int:
    """An iteration that is still to come: the last one that is well."""
    step = last_step(run)
    return max(FIRST_ITERATION, ((step and step.iteration) or 0) + AHEAD)


def last_step(run: Path) -> MetricsRecord | None:
    """The last step that a run below this folder has logged; None when there is none."""
    for path in run.glob("*-logs/logs/*/metrics.jsonl"):
        lines, _ = known(observed(tail_lines, path, TAIL_BYTES), ([], True))
        found = (
            record
            for line in reversed(lines)
            if (record := parse_record(line)) is not None and record.is_step
        )
        if step := next(found, None):
            return step
    return None


# ----------------------------------------------------------------------------- of stand-ins
# Their workers read these from the twin's records (`stand_in.ailments`).
def keep(**details: float) -> Break:
    """A fault that is all in its record."""

    def change(twin: Twin, fault: InjectedFault) -> None:
        kept = {name: f"{value:g}" for name, value in details.items()}
        twin.faults.write(replace(fault, details=kept))

    return change


def befall_job(twin: Twin, fault: InjectedFault) -> None:
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
    twin.faults.write(replace(fault, details={"job": max(steps, key=int)}))


def spoil_data(twin: Twin, fault: InjectedFault) -> None:
    """From an iteration on that is still to come, whichever launch does it."""
    iteration = fatal_iteration(Path(fault.target))
    twin.faults.write(replace(fault, details={"iteration": str(iteration)}))


def mend_data(_twin: Twin, fault: InjectedFault) -> str:
    iteration = fault.details.get("iteration", "")
    if iteration:
        trained = str(int(iteration) + 1)
    else:
        trained = "?"
    return f"iteration {trained} can be trained again"


# ----------------------------------------------------------------------------- processes
Find = Callable[[Twin, InjectedFault], Iterable[ProcessRecord]]


def strike(find: Find, act: Callable[[Sequence[ProcessRecord]], object]) -> Break:
    """A break that is all in what it does to some processes."""

    def change(twin: Twin, fault: InjectedFault) -> None:
        struck = twin.faults.write(replace(fault, processes=tuple(find(twin, fault))))
        act(struck.processes)

    return change


def kill(records: Sequence[ProcessRecord]) -> None:
    survivors = end(records, 0.0)
    if survivors:
        raise TwinError(f"process {survivors[0].pid} would not die; try again")


def crash(records: Sequence[ProcessRecord]) -> None:
    send(records, signal.SIGKILL)


def stop(records: Sequence[ProcessRecord]) -> None:
    send(records, signal.SIGSTOP)


def _contents(twin: Twin, fault: InjectedFault) -> NodeContents:
    return scan(twin.folders, [fault.target])[fault.target]


def daemon_of(twin: Twin, fault: InjectedFault) -> Iterable[ProcessRecord]:
    return (twin.process(fault.target),)


def one_worker(twin: Twin, fault: InjectedFault) -> Iterable[ProcessRecord]:
    contents = _contents(twin, fault)
    if contents.workers:
        return (contents.workers[0].record,)
    tasks = [task.record for task in contents.tasks if task.step is not None]
    if tasks:  # no training: a step's own first process stands for it
        return (min(tasks, key=lambda record: (record.start_ticks, record.pid)),)
    raise TwinError(f"{fault.kind}: no worker runs on {fault.target}")


def slurmd_of_half(twin: Twin, fault: InjectedFault) -> Iterable[ProcessRecord]:
    if not _contents(twin, fault).daemons:
        raise TwinError(
            f"half-dead: no job runs on {fault.target}, so slurmd would be all of it: use slurmd-killed"
        )
    return daemon_of(twin, fault)


def batch_shells(twin: Twin, fault: InjectedFault) -> Iterable[ProcessRecord]:
    """The shells of the batch scripts alone: what they have started is the step daemon's to end."""
    contents = _contents(twin, fault)
    hosts = {
        daemon.record.pid
        for daemon in contents.daemons
        if daemon.title is not None and daemon.title[1] == "batch"
    }
    return (task.record for task in contents.tasks if task.parent in hosts)


def let_go_on(_twin: Twin, fault: InjectedFault) -> str:
    return f"{send(fault.processes, signal.SIGCONT)} process(es) go on"


# ----------------------------------------------------------------------------- nodes
def end_slow_node(twin: Twin, fault: InjectedFault) -> str:
    tasks = [task.record for task in _contents(twin, fault).tasks]
    send(tasks, signal.SIGCONT)
    return f"the tasks of {fault.target} run at full speed"


def kill_node(twin: Twin, fault: InjectedFault) -> None:
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
        stop(new)
    kill(fault.processes)


def start_slurmd(twin: Twin, fault: InjectedFault) -> str:
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
def restart(twin: Twin, fault: InjectedFault) -> None:
    strike(daemon_of, lambda found: end(found, 20.0))(twin, fault)
    twin.start_daemon("slurmctld")


def start_controller(twin: Twin, _fault: InjectedFault) -> str:
    return _start(twin, "slurmctld", "slurmctld")


# ----------------------------------------------------------------------------- files
def of_files(act: Callable[[InjectedFault, TwinFolders], None]) -> Break:
    """A break that is all in what it does to the target's files."""

    def change(twin: Twin, fault: InjectedFault) -> None:
        act(fault, twin.folders)

    return change


# ----------------------------------------------------------------------------- what an agent does
# again and again
def black_hole(watch: StepWatch) -> float:
    """Kill the tasks that are there now; returns the seconds until the next look."""
    send(watch.look(), signal.SIGABRT)
    return BLACK_HOLE_SECONDS


def slow_down(watch: StepWatch) -> float:
    """Let the tasks run for a share of the period, then stop them for the rest of it."""
    tasks = watch.look()
    stop(tasks)
    time.sleep(SLOW_PERIOD_SECONDS * (1 - SLOW_SHARE))
    send(tasks, signal.SIGCONT)
    return SLOW_PERIOD_SECONDS * SLOW_SHARE
