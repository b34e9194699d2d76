"""The faults that a twin can be given: what each one breaks, what it needs, and how it is healed.
Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal

from tr11ops.base.errors import TwinError
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
    """One kind of fault.

    `needs_agent`: a process beside the twin keeps it up; `is_instant`: it is over at once;
    `has_reason`: it takes the site's reason.
    """

    name: str
    target: Target
    does: str
    heals: str
    needs_agent: bool = False
    is_instant: bool = False
    has_reason: bool = False


_KINDS = (
    FaultKind(
        "worker-crash",
        "busy node",
        "kills one worker of the node's job (SIGKILL)",
        "nothing is left to heal",
        is_instant=True,
    ),
    FaultKind(
        "worker-stop",
        "busy node",
        "stops one worker of the node's job (SIGSTOP): it hangs",
        "lets it go on",
    ),
    FaultKind(
        "black-hole",
        "node",
        "every task of a step on the node dies at once (SIGABRT); batch scripts live",
        "ends the killer",
        needs_agent=True,
    ),
    FaultKind(
        "slow-node",
        "node",
        "the tasks of the node's steps get a fifth of their time (SIGSTOP, SIGCONT)",
        "lets them go on",
        needs_agent=True,
    ),
    FaultKind(
        "slurmd-killed", "node", "kills the node's slurmd; what runs goes on", "starts slurmd again"
    ),
    FaultKind(
        "half-dead",
        "busy node",
        "kills the slurmd of a node with a job; its step daemon and tasks live",
        "starts slurmd again",
    ),
    FaultKind(
        "node-dead",
        "node",
        "kills slurmd, step daemons and all tasks of the node at one moment",
        "starts slurmd again; what ran is lost",
    ),
    FaultKind(
        "batch-host-dead",
        "batch host",
        "node-dead, for the node that runs a job's batch script",
        "starts slurmd again; what ran is lost",
    ),
    FaultKind(
        "controller-frozen",
        "controller",
        "stops slurmctld (SIGSTOP): every client times out",
        "lets it go on",
    ),
    FaultKind(
        "controller-killed",
        "controller",
        "kills slurmctld: every client is refused",
        "starts it again",
    ),
    FaultKind(
        "controller-restarted",
        "controller",
        "ends slurmctld in order and starts it again",
        "nothing is left to heal",
        is_instant=True,
    ),
    FaultKind(
        "drain",
        "node",
        "drains the node in another person's name",
        "resumes it, if the reason is still it",
        has_reason=True,
    ),
    FaultKind(
        "node-failing",
        "node",
        "sets the node to FAIL: what runs there goes on, nothing new starts there",
        "resumes it, if the reason is still it",
        has_reason=True,
    ),
    FaultKind(
        "job-limit-lowered",
        "batch host",
        "leaves the job one to two minutes of its time limit",
        "nothing is left to heal",
        is_instant=True,
    ),
    FaultKind(
        "node-removed",
        "node",
        "takes the node out of the site's configuration: Slurm knows no such node",
        "puts it back",
    ),
    FaultKind(
        "partition-down",
        "partition",
        "sets the GPU partition DOWN: what is queued waits",
        "sets it UP",
    ),
    FaultKind(
        "partition-closed",
        "partition",
        "sets the GPU partition INACTIVE: no job is taken, none is started",
        "sets it UP",
    ),
    FaultKind(
        "time-limit-lowered",
        "partition",
        "lowers the GPU partition's MaxTime to five minutes",
        "sets it as it was",
    ),
    FaultKind(
        "maintenance",
        "partition",
        "keeps the GPU partition's nodes for maintenance, beside what runs",
        "ends the maintenance",
    ),
    FaultKind(
        "reservation-ended",
        "reservation",
        "ends every reservation now; what is queued in one is held",
        "nothing is left to heal",
        is_instant=True,
    ),
    FaultKind(
        "limit-exhausted",
        "account",
        "leaves your account no CPU minutes (needs a twin with --accounting)",
        "takes the limit away",
    ),
    FaultKind(
        "disk-full",
        "directory",
        "a core dump fills the directory's disk: no byte can be written (ENOSPC) before one is removed",
        "takes the full disk away; what was changed stays",
    ),
    FaultKind(
        "unmounted",
        "directory",
        "an empty file system hides the directory, as where its own is not mounted",
        "takes it away again",
    ),
    FaultKind(
        "torn-state",
        "directory",
        "cuts the newest record of a submission below the run directory in half",
        "nothing is left to heal",
        is_instant=True,
    ),
    FaultKind(
        "read-only", "directory", "nothing can be changed below the directory (EROFS)", "ends that"
    ),
    FaultKind(
        "setup-fails",
        "script",
        "a script that slurm.setup sources returns 1",
        "puts the script back",
    ),
    FaultKind(
        "setup-hangs",
        "script",
        "a script that slurm.setup sources does not end",
        "puts the script back",
    ),
    FaultKind(
        "setup-breaks-python",
        "script",
        "a script that slurm.setup sources leaves a PATH and a PYTHONHOME of "
        "which no Python can live",
        "puts the script back",
    ),
    FaultKind(
        "batch-killed",
        "batch host",
        "kills a job's batch script (SIGKILL)",
        "nothing is left to heal",
        is_instant=True,
    ),
    FaultKind(
        "bad-sample",
        "directory",
        "a rank of the run there dies (SIGSEGV) of one iteration's data, in every "
        "launch that trains it, on any node; of stand-ins",
        "makes the data good",
    ),
    FaultKind(
        "step-hang",
        "busy node",
        "no step of the node's job ends on it, without a word; of stand-ins",
        "lets the step go on",
    ),
    FaultKind(
        "data-wait",
        "busy node",
        "the node's job waits for its data from the next step on; of stand-ins",
        "gives it the data",
    ),
    FaultKind(
        "save-error",
        "node",
        "the workers there cannot write their part of a checkpoint (EIO); of stand-ins",
        "lets them write",
    ),
    FaultKind(
        "slow-steps",
        "node",
        "the workers there take eight times as long for each step; of stand-ins",
        "lets them go on at full speed",
    ),
    FaultKind(
        "clock-ahead",
        "node",
        "the workers there see a clock that is five minutes ahead; of stand-ins",
        "sets it right",
    ),
    FaultKind(
        "loss-spike",
        "directory",
        "from an iteration on, loss and gradient of the run there are wild, unless it "
        "skips data; of stand-ins",
        "ends that",
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
