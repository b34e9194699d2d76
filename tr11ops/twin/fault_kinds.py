"""The faults that a twin can be given, in one table: what each one breaks, what it needs, and how it is healed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Literal

from tr11ops.base.errors import TwinError
from tr11ops.twin import fault_files as files
from tr11ops.twin.fault_effects import (
    LOWERED_MINUTES,
    Break,
    Undo,
    batch_shells,
    befall_job,
    begin_maintenance,
    black_hole,
    change_partition,
    crash,
    daemon_of,
    empty_shared_memory,
    end_maintenance,
    end_reservations,
    end_slow_node,
    exhaust_limit,
    fill_shared_memory,
    keep,
    kill,
    kill_node,
    let_go_on,
    lift_limit,
    lower_job_limit,
    mend_data,
    nothing,
    of_files,
    one_worker,
    open_partition,
    put_node_back,
    remove_node,
    restart,
    restore_time_limit,
    resume_from,
    says,
    set_aside,
    slow_down,
    slurmd_of_half,
    spoil_data,
    start_controller,
    start_slurmd,
    stop,
    strike,
)
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.processes import StepWatch
from tr11ops.twin.twin import Twin
from trainer.contract.record import Record

Target = Literal[
    "node",
    "busy node",
    "batch host",
    "controller",
    "directory",
    "partition",
    "reservation",
    "account",
    "script",
]


class FaultKind(Record):
    """One kind of fault: what it does and how it is healed, in words and as functions.

    `repeat` is done again and again by a process beside the twin, which keeps the fault up, and returns the seconds
    until the next time; `has_reason`: it takes the site's reason.
    """

    name: str
    target: Target
    does: str
    heals: str
    breaks: Break = nothing
    undo: Undo = says("the training on {target} is well again")
    repeat: Callable[[StepWatch], float] | None = None
    has_reason: bool = False

    @property
    def is_instant(self) -> bool:
        """Whether it is over at once."""
        return self.heals == NOTHING_LEFT


NOTHING_LEFT = "nothing is left to heal"


def _take_away(twin: Twin, fault: InjectedFault) -> str:
    files.uncover(fault, twin.folders)
    return f"{fault.target} is as it was"


def _put_script_back(_twin: Twin, fault: InjectedFault) -> str:
    return (
        f"{fault.target} is {'as it was' if files.restore_script(fault) else 'as it was already'}"
    )


_KINDS = (
    FaultKind(
        "worker-crash",
        "busy node",
        "kills one worker of the node's job (SIGKILL)",
        NOTHING_LEFT,
        breaks=strike(one_worker, crash),
        undo=let_go_on,
    ),
    FaultKind(
        "worker-stop",
        "busy node",
        "stops one worker of the node's job (SIGSTOP): it hangs",
        "lets it go on",
        breaks=strike(one_worker, stop),
        undo=let_go_on,
    ),
    FaultKind(
        "black-hole",
        "node",
        "every task of a step on the node dies at once (SIGABRT); batch scripts live",
        "ends the killer",
        undo=says("tasks live on {target} again"),
        repeat=black_hole,
    ),
    FaultKind(
        "slow-node",
        "node",
        "the tasks of the node's steps get a fifth of their time (SIGSTOP, SIGCONT)",
        "lets them go on",
        undo=end_slow_node,
        repeat=slow_down,
    ),
    FaultKind(
        "slurmd-killed",
        "node",
        "kills the node's slurmd; what runs goes on",
        "starts slurmd again",
        breaks=strike(daemon_of, kill),
        undo=start_slurmd,
    ),
    FaultKind(
        "half-dead",
        "busy node",
        "kills the slurmd of a node with a job; its step daemon and tasks live",
        "starts slurmd again",
        breaks=strike(slurmd_of_half, kill),
        undo=start_slurmd,
    ),
    FaultKind(
        "node-dead",
        "node",
        "kills slurmd, step daemons and all tasks of the node at one moment",
        "starts slurmd again; what ran is lost",
        breaks=kill_node,
        undo=start_slurmd,
    ),
    FaultKind(
        "batch-host-dead",
        "batch host",
        "node-dead, for the node that runs a job's batch script",
        "starts slurmd again; what ran is lost",
        breaks=kill_node,
        undo=start_slurmd,
    ),
    FaultKind(
        "controller-frozen",
        "controller",
        "stops slurmctld (SIGSTOP): every client times out",
        "lets it go on",
        breaks=strike(daemon_of, stop),
        undo=let_go_on,
    ),
    FaultKind(
        "controller-killed",
        "controller",
        "kills slurmctld: every client is refused",
        "starts it again",
        breaks=strike(daemon_of, kill),
        undo=start_controller,
    ),
    FaultKind(
        "controller-restarted",
        "controller",
        "ends slurmctld in order and starts it again",
        NOTHING_LEFT,
        breaks=restart,
        undo=start_controller,
    ),
    FaultKind(
        "drain",
        "node",
        "drains the node in another person's name",
        "resumes it, if the reason is still it",
        breaks=set_aside("DRAIN"),
        undo=resume_from("DRAIN"),
        has_reason=True,
    ),
    FaultKind(
        "node-failing",
        "node",
        "sets the node to FAIL: what runs there goes on, nothing new starts there",
        "resumes it, if the reason is still it",
        breaks=set_aside("FAIL"),
        undo=resume_from("FAIL"),
        has_reason=True,
    ),
    FaultKind(
        "job-limit-lowered",
        "batch host",
        "leaves the job one to two minutes of its time limit",
        NOTHING_LEFT,
        breaks=lower_job_limit,
        undo=says("the job's limit stays"),
    ),
    FaultKind(
        "node-removed",
        "node",
        "takes the node out of the site's configuration: Slurm knows no such node",
        "puts it back",
        breaks=remove_node,
        undo=put_node_back,
    ),
    FaultKind(
        "partition-down",
        "partition",
        "sets the GPU partition DOWN: what is queued waits",
        "sets it UP",
        breaks=change_partition("State=DOWN"),
        undo=open_partition,
    ),
    FaultKind(
        "partition-closed",
        "partition",
        "sets the GPU partition INACTIVE: no job is taken, none is started",
        "sets it UP",
        breaks=change_partition("State=INACTIVE"),
        undo=open_partition,
    ),
    FaultKind(
        "time-limit-lowered",
        "partition",
        "lowers the GPU partition's MaxTime to five minutes",
        "sets it as it was",
        breaks=change_partition(f"MaxTime={LOWERED_MINUTES}"),
        undo=restore_time_limit,
    ),
    FaultKind(
        "maintenance",
        "partition",
        "keeps the GPU partition's nodes for maintenance, beside what runs",
        "ends the maintenance",
        breaks=begin_maintenance,
        undo=end_maintenance,
    ),
    FaultKind(
        "reservation-ended",
        "reservation",
        "ends every reservation now; what is queued in one is held",
        NOTHING_LEFT,
        breaks=end_reservations,
        undo=says("what has ended stays so"),
    ),
    FaultKind(
        "limit-exhausted",
        "account",
        "leaves your account no CPU minutes (needs a twin with --accounting)",
        "takes the limit away",
        breaks=exhaust_limit,
        undo=lift_limit,
    ),
    FaultKind(
        "disk-full",
        "directory",
        "a core dump fills the directory's disk: no byte can be written (ENOSPC) before one is removed",
        "takes the full disk away; what was changed stays",
        breaks=of_files(files.fill),
        undo=_take_away,
    ),
    FaultKind(
        "unmounted",
        "directory",
        "an empty file system hides the directory, as where its own is not mounted",
        "takes it away again",
        breaks=of_files(files.hide),
        undo=_take_away,
    ),
    FaultKind(
        "torn-state",
        "directory",
        "cuts the newest record of a submission below the run directory in half",
        NOTHING_LEFT,
        breaks=of_files(files.tear_state),
        undo=let_go_on,
    ),
    FaultKind(
        "read-only",
        "directory",
        "nothing can be changed below the directory (EROFS)",
        "ends that",
        breaks=of_files(files.make_read_only),
        undo=_take_away,
    ),
    FaultKind(
        "setup-fails",
        "script",
        "a script that slurm.setup sources returns 1",
        "puts the script back",
        breaks=of_files(files.spoil_script),
        undo=_put_script_back,
    ),
    FaultKind(
        "setup-hangs",
        "script",
        "a script that slurm.setup sources does not end",
        "puts the script back",
        breaks=of_files(files.spoil_script),
        undo=_put_script_back,
    ),
    FaultKind(
        "setup-breaks-python",
        "script",
        "a script that slurm.setup sources leaves a PATH and a PYTHONHOME of "
        "which no Python can live",
        "puts the script back",
        breaks=of_files(files.spoil_script),
        undo=_put_script_back,
    ),
    FaultKind(
        "batch-killed",
        "batch host",
        "kills a job's batch script (SIGKILL)",
        NOTHING_LEFT,
        breaks=strike(batch_shells, kill),
        undo=let_go_on,
    ),
    FaultKind(
        "shm-full",
        "node",
        "whatever starts on the node finds a /dev/shm that another job has filled; what runs there goes on",
        "starts slurmd again, with the machine's own /dev/shm",
        breaks=fill_shared_memory,
        undo=empty_shared_memory,
    ),
    FaultKind(
        "bad-sample",
        "directory",
        "a rank of the run there dies (SIGSEGV) of one iteration's data, in every "
        "launch that trains it, on any node; of stand-ins",
        "makes the data good",
        breaks=spoil_data,
        undo=mend_data,
    ),
    FaultKind(
        "step-hang",
        "busy node",
        "no step or evaluation of the node's job ends on it, without a word; of stand-ins",
        "lets the step go on",
        breaks=befall_job,
    ),
    FaultKind(
        "data-wait",
        "busy node",
        "the node's job waits for its data from the next step on; of stand-ins",
        "gives it the data",
        breaks=befall_job,
    ),
    FaultKind(
        "save-error",
        "node",
        "the workers there cannot write their part of a checkpoint (EIO); of stand-ins",
        "lets them write",
    ),
    FaultKind(
        "weights-drift",
        "node",
        "the workers there hold other weights than the others from the next step on; of stand-ins",
        "lets them train as the others do; what they hold stays wrong until it is loaded again",
    ),
    FaultKind(
        "slow-steps",
        "node",
        "the workers there take eight times as long for each step; of stand-ins",
        "lets them go on at full speed",
        breaks=keep(factor=8.0),
    ),
    FaultKind(
        "clock-ahead",
        "node",
        "the workers there see a clock that is five minutes ahead; of stand-ins",
        "sets it right",
        breaks=keep(seconds=300.0),
    ),
    FaultKind(
        "loss-spike",
        "directory",
        "from an iteration on, loss and gradient of the run there are wild, unless it "
        "skips data; of stand-ins",
        "ends that",
        breaks=spoil_data,
    ),
)
KINDS: Mapping[str, FaultKind] = {kind.name: kind for kind in _KINDS}


def find_kind(name: str) -> FaultKind:
    """The kind of that name. Raises TwinError with the nearest one, and all, when there is none."""
    if name in KINDS:
        return KINDS[name]
    near = difflib.get_close_matches(name, list(KINDS), n=1, cutoff=0.5)
    hint = ""
    if near:
        hint = f"did you mean {near[0]}? "
    raise TwinError(f"fault {name!r} is not known: {hint}there are {', '.join(KINDS)}")
