"""What the faults of a twin do to processes, nodes, the controller and the stand-ins, and how that is undone.

Each undoing is by exact process, and may be tried again. The fault's record is there before its break begins, and what
it is about to touch is written into it first (`FaultStore.write`), so that anyone who finds the record can repair it.
"""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.errors import TwinError
from tr11ops.base.observed import known, observed
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.machine import ACCOUNT
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
    daemons = _contents(twin, fault).daemons
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


# What starts there afterwards sees a /dev/shm of its own; what runs there goes on with the machine's.
_FILL = 'mount -t tmpfs -o size=4m full /dev/shm && head -c 4M /dev/zero > /dev/shm/of-another; exec "$@"'
FULL_SHARED_MEMORY = ("/bin/sh", "-c", f"exec unshare --mount /bin/sh -c '{_FILL}' sh \"$@\"", "sh")


def fill_shared_memory(twin: Twin, fault: InjectedFault) -> None:
    """Root is needed, for the mount. Raises TwinError without it, before anything is changed."""
    if os.geteuid():
        raise TwinError(f"{fault.kind}: this user has no right to mount")
    slurmd = twin.process(fault.target)
    twin.faults.write(replace(fault, processes=(slurmd,)))
    end([slurmd], 5.0)
    twin.start_daemon(fault.target, FULL_SHARED_MEMORY)


def empty_shared_memory(twin: Twin, fault: InjectedFault) -> str:
    end([twin.process(fault.target)], 5.0)
    return start_slurmd(twin, fault)


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


# ---------------------------------------------------------------------------
# What the site does to a run, as faults of a twin (partitions, reservations, limits, nodes), by Slurm's commands.

# Slurm's own commands on a twin, as a site's administrator types them.

CLIENT_SECONDS = 30.0
# a controller that has just come back refuses much until the nodes have spoken
RETRY_SECONDS = 10.0


def ask_client(twin: Twin, command: str, *words: str) -> str:
    """What a command answers; `words` are further ones, which may hold blanks. Raises TwinError with its last words
    where it fails.
    """
    typed = [*command.split(), *words]
    try:
        done = subprocess.run(
            typed,
            env=twin.client_environment,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise TwinError(
            "the controller does not answer: heal that first (tr11 twin heal)"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise TwinError(
            f"{typed[0]} {typed[1]}: {said[-1] if said else f'exit status {done.returncode}'}"
        )
    return done.stdout


def retried(action: Callable[[], object]) -> None:
    """Do it again while it is refused, for a while. Raises the last TwinError."""
    until = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            action()
        except TwinError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
        else:
            return


MAINTENANCE = "tr11-maintenance"  # the name of the reservation
MAINTENANCE_MINUTES = 600
LOWERED_MINUTES = 5
LEFT_MINUTES = 2  # of a lowered job, counted from the whole minutes that it has run
END_SECONDS = 90.0  # the controller looks at its reservations now and then
FOREIGN_REASON = "memory errors on DIMM B2, ticket 20917 (site staff)"


# ----------------------------------------------------------------------------- the partition
def change_partition(setting: str) -> Break:
    """A break that changes the GPU partition."""

    def change(twin: Twin, fault: InjectedFault) -> None:
        ask_client(twin, f"scontrol update PartitionName={fault.target} {setting}")

    return change


def open_partition(twin: Twin, fault: InjectedFault) -> str:
    change_partition("State=UP")(twin, fault)
    return f"partition {fault.target} is up"


def restore_time_limit(twin: Twin, fault: InjectedFault) -> str:
    change_partition(f"MaxTime={twin.plan.max_time_minutes}")(twin, fault)
    return f"partition {fault.target} allows {twin.plan.max_time_minutes} minutes"


def begin_maintenance(twin: Twin, _fault: InjectedFault) -> None:
    ask_client(
        twin,
        f"scontrol create reservation ReservationName={MAINTENANCE} StartTime=now Duration={MAINTENANCE_MINUTES} "
        f"Nodes={','.join(twin.plan.gpu_node_names)} Users={getpass.getuser()} Flags=MAINT,IGNORE_JOBS",
    )


def end_maintenance(twin: Twin, fault: InjectedFault) -> str:
    if MAINTENANCE in _reservations(twin):
        ask_client(twin, f"scontrol delete ReservationName={MAINTENANCE}")
    return f"the maintenance of {fault.target} is over"


# ----------------------------------------------------------------------------- one job
def lower_job_limit(twin: Twin, fault: InjectedFault) -> None:
    """Of the job whose batch script runs on the node. Slurm counts limits in whole minutes."""
    running = ask_client(
        twin, f"squeue --noheader --states=RUNNING --nodelist={fault.target}", "--format=%A %B %S"
    )
    for line in running.splitlines():
        job, batch_host, start = line.split()
        if batch_host != fault.target:
            continue
        ran = time.time() - time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S"))
        limit = int(ran // 60) + LEFT_MINUTES
        ask_client(twin, f"scontrol update JobId={job} TimeLimit={limit}")
        twin.faults.write(replace(fault, details={"job": job}))
        return
    raise TwinError(f"job-limit-lowered: no job's batch script runs on {fault.target}")


# ----------------------------------------------------------------------------- reservations and
# limits
def end_reservations(twin: Twin, _fault: InjectedFault) -> None:
    """End all of them, and wait until the controller has taken them away. Raises TwinError where
    there is none.
    """
    names = [name for name in _reservations(twin) if name != MAINTENANCE]
    if not names:
        raise TwinError(
            "reservation-ended: the twin has no reservation; `scontrol create reservation` makes one"
        )
    for name in names:
        soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 1))
        ask_client(twin, f"scontrol update ReservationName={name} EndTime={soon}")
    deadline = time.monotonic() + END_SECONDS
    while set(names) & set(_reservations(twin)):
        if time.monotonic() > deadline:
            raise TwinError(
                f"reservation-ended: {names[0]} is still there after {END_SECONDS:.0f} s"
            )
        time.sleep(0.2)


def _reservations(twin: Twin) -> list[str]:
    words = ask_client(twin, "scontrol --oneliner show reservation").split()
    return [word.partition("=")[2] for word in words if word.startswith("ReservationName=")]


def exhaust_limit(twin: Twin, _fault: InjectedFault) -> None:
    if not twin.plan.accounting:
        raise TwinError(
            "limit-exhausted: the twin has no accounting: make one with `tr11 twin up --accounting`"
        )
    _grant(twin, 0)


def lift_limit(twin: Twin, fault: InjectedFault) -> str:
    if twin.plan.accounting:
        _grant(twin, -1)
    return f"account {fault.target} has no limit"


def _grant(twin: Twin, minutes: int) -> None:
    """CPU minutes of the twin's account in all; -1: without a limit."""
    ask_client(twin, f"sacctmgr --immediate modify account {ACCOUNT} set GrpTRESMins=cpu={minutes}")


# ----------------------------------------------------------------------------- nodes
def set_aside(state: str) -> Break:
    """A break that puts the node into a state of an administrator's, DRAIN or FAIL, in another
    person's name.
    """

    def change(twin: Twin, fault: InjectedFault) -> None:
        now, reason = _node_facts(twin, fault.target)
        wanted = fault.details.get("reason") or FOREIGN_REASON
        if state in now and reason != wanted:
            raise TwinError(
                f"{fault.kind}: {fault.target} is {now} already ({reason or 'no reason given'}); that is left as it is"
            )
        twin.faults.write(replace(fault, details={"reason": wanted}))
        ask_client(
            twin, f"scontrol update NodeName={fault.target} State={state}", f"Reason={wanted}"
        )

    return change


def resume_from(state: str) -> Undo:
    """Take the node out of that state, unless someone else has put it there meanwhile."""

    def undo(twin: Twin, fault: InjectedFault) -> str:
        now, reason = _node_facts(twin, fault.target)
        if state not in now:
            return f"{fault.target} is not in {state} any more"
        if reason != fault.details.get("reason"):
            return f"{fault.target} stays in {state}: the reason is another one now ({reason})"
        retried(lambda: ask_client(twin, f"scontrol update NodeName={fault.target} State=RESUME"))
        return f"{fault.target} is resumed"

    return undo


def _node_facts(twin: Twin, node: str) -> tuple[str, str]:
    """State and reason of a node, as the controller says."""
    state = reason = ""
    for line in ask_client(twin, f"scontrol show node {node}").splitlines():
        words = line.strip()
        if words.startswith("State="):
            state = words.removeprefix("State=").split()[0]
        if words.startswith("Reason="):
            reason = words.removeprefix("Reason=").rsplit(" [", 1)[0]
    return state, reason


def remove_node(twin: Twin, fault: InjectedFault) -> None:
    """Refused where jobs run on it: Slurm would lose them, which is another fault (node-dead)."""
    if fault.target not in twin.plan.gpu_node_names:
        raise TwinError(f"node-removed: {fault.target} is no node of the GPU partition")
    removed = _removed(twin, fault) | {fault.target}
    if len(removed) >= twin.plan.nodes:
        raise TwinError("node-removed: it is the last node of its partition")
    slurmd = twin.process(fault.target)
    twin.faults.write(replace(fault, processes=(slurmd,)))
    _configure(twin, removed)
    end([slurmd], 5.0)


def put_node_back(twin: Twin, fault: InjectedFault) -> str:
    _configure(twin, _removed(twin, fault))
    if not twin.process(fault.target).is_alive:
        twin.start_daemon(fault.target)
    return f"{fault.target} is in the configuration again"


def _removed(twin: Twin, but: InjectedFault) -> frozenset[str]:
    """The nodes that other faults have removed."""
    others = (
        fault
        for fault in twin.faults.active()
        if fault.kind == but.kind and fault.identity != but.identity
    )
    return frozenset(fault.target for fault in others)


def _configure(twin: Twin, without: frozenset[str]) -> None:
    """The controller with a configuration that lacks these nodes; it answers when this returns."""
    twin.configure(without)
    end([twin.process("slurmctld")], 20.0)
    twin.start_daemon("slurmctld")
    retried(lambda: ask_client(twin, "scontrol show partitions"))
