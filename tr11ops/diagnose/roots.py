"""Which line of a launch is the first cause: the candidates, each for what it is, and the order
among them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.diagnose.places import is_daemons_log
from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import SURE_END, FaultClass, NextStep, NodeBlame, Role
from tr11ops.diagnose.topics import FAMILY as TOPICS
from trainer.contract.record import Record

STRONG = 0.75  # a cause with this confidence says more than a bare exception
PLAIN = 0.65  # the least of an exception; a line that only holds the words of an error has less
CLEAR = 0.7  # a symptom with this confidence says as much as a death
SURELY_BROKEN = 0.88
SURELY_OWN = 0.85
AGAIN = 5  # seconds in which a warning is repeated where it is more than that
DAYS = 1
SECOND = len("MM-DD HH:MM:SS")
_NO_DEVICE = "invalid device ordinal"
_JOBS_NUMBER = re.compile(r"(?<!\d)\d{3,9}(?!\d)")
_KILLED_LOADER = re.compile(r"DataLoader worker .{0,40}killed by signal: Killed")
_ECHO_OF_PICKLING = "EOFError: Ran out of input"  # of the process that was to take the pickle
_PICKLING = re.compile(r"[Cc]an(?:'|no)t pickle|cannot pickle|PicklingError")
_OF_A_LOST_GPU = frozenset(
    {"nan-check", "cuda-illegal-access", "cuda-launch-failed", "cuda-library", "cuda-start-oom"}
)
_OF_A_LOST_PEER = frozenset({"nccl-peer", "nccl-connect", "network-slingshot"})
# whose reason stands in the next lines
_SAID_BELOW = {
    "hub-unavailable": frozenset({"hub-denied", "hub-offline"}),
    "nccl-usage": frozenset({"nccl-same-gpu"}),
}
NEXT_LINES = 6
_ANSWERED = re.compile(r"\b[45]\d\d (?:Client|Server) Error\b")
CHAIN_LINES = 60  # from one exception of a chain to the next
_ECHOES = re.compile(  # and what a library of connections says of a service that its client names
    r"(?:^|\.)(?:CancelledError|CalledProcessError|Empty|BrokenBarrierError)$"
    r"|^(?:urllib3|httpcore|h11|anyio|http\.client)\."
)
_RAISED_BY_CONNECTIONS = re.compile(r"/(?:urllib3|httpcore|h11|anyio)/")
TIMES_BEFORE = 2  # that it trained on after the same line
_OF_OTHERS = frozenset(
    {FaultClass.NCCL_NETWORK, FaultClass.NCCL_TIMEOUT, FaultClass.RENDEZVOUS, FaultClass.UNKNOWN}
)
_WRAPPER = "checkpoint-wrapper"
_OF_CODES_BELOW = frozenset({"hccl-wrapped", "ascend-stream"})  # whose code says more
REPLAYED_ELSEWHERE = "replayed-elsewhere"
_SAYS_WHY: Mapping[str, frozenset[str]] = {  # whose reason another line of the launch gives
    **dict.fromkeys(
        ("slurm-launch", "slurm-submit", "slurm-submit-error", "slurm-empty-answer"),
        frozenset({"slurm-auth"}),
    ),
    "slurm-controller": frozenset({"slurm-submit"}),
    "storage-gone": frozenset({"storage-own-disk"}),
    "storage-io": frozenset({"storage-own-disk"}),
    "container-start": frozenset({"container-hook", "image-refused", "image-busy", "storage-full"}),
    "kubernetes-refused": frozenset({"kubernetes-image-refused", "kubernetes-image-busy"}),
    "oom-kernel-chose": frozenset({"oom-killed"}),
}
_LOOP = "end-loop"
_MAY_BE_SHORT = frozenset({_LOOP, "end-code", "end-returned"})  # which do not say how far it came
_FINISHED = frozenset({"end-finished", _LOOP})
_STEP_CANCELLED = "step-cancelled"
TOLD_TO_GO = "told-to-go"
_TOLD = frozenset({"elastic-signal", "end-signal", TOLD_TO_GO})
_CLOSED = re.compile(r"RendezvousClosed|closed rendezvous|rendezvous.{0,80} has been closed")
_GOING = _TOLD | {"srun-ending"}
_ORDERED_ENDS = frozenset({FaultClass.SLURM_TIME_LIMIT, FaultClass.SLURM_PREEMPTED})
_OF_PEERS = frozenset({FaultClass.NCCL_NETWORK, FaultClass.NCCL_TIMEOUT, FaultClass.RENDEZVOUS})
_ENDS_OF_JOBS = _ORDERED_ENDS | {FaultClass.SLURM_NODE_FAIL, FaultClass.SLURM_USER_CANCEL}
_OF_SUBMISSIONS = frozenset({FaultClass.SLURM_SUBMIT, FaultClass.SLURM_AUTH})
_SUBMITS = re.compile(r"\b(?:sbatch|bsub|qsub)\b|[Jj]ob submission failed|SUBMIT_BATCH_JOB")
_SHOWN = re.compile(r"[$#%>] (?:tail|cat|head|less|more) .*\S+\.(?:out|log|err|txt)\b")
_CABLE = re.compile(r"[Cc]able error|unsupported cable")  # no link comes up again for good
_KERNELS_WORD = re.compile(r"\bkernel: |NVRM: |nvidia-nvswitch")
_NEVER_ENDED = re.compile("Kill task failed|NOT ENDING")  # a node that is lost because a job hung
_TOO_FEW = "ray-resources"
_TASK_FAILED = "ray-task-error"
_NAME_TAKEN = "ray-name-taken"
_NO_PLACE = "kubernetes-no-place"
KERNELS = "xid"
_AGE = re.compile(r"\s*(?:\d+[dhms]){1,3}(?: \(x\d+ over \w+\))?\s+(?:Normal|Warning)\s")
_NAMED_NODE = re.compile(r"\b[Nn]ode[ /](?P<node>(?=[\w.-]*\d)[\w.-]*\w)")
_LINK_BACK = "link-back"
_DEGRADED = "port-monitor-down"
_SERVER_BACK = "storage-back"
_REQUEUED, _NODE_LOST, _TERMINAL_CLOSED = "slurm-requeued", "slurm-node-fail", "terminal-closed"
_CANCELLED: Any = {  # what a step's end is where nothing came before it
    "role": Role.STOP,
    "fault": FaultClass.SLURM_USER_CANCEL,
    "step": NextStep.NONE,
    "confidence": 0.7,
    "meaning": "someone cancelled the step, and nothing had failed before",
}


class Candidates(Record):
    """What of a launch may have ended it, each in the order of the log."""

    causes: tuple[Sighting, ...]
    stops: tuple[Sighting, ...]
    deaths: tuple[Sighting, ...]
    symptoms: tuple[Sighting, ...]
    summaries: tuple[Sighting, ...]
    warnings: tuple[Sighting, ...]
    consequences: tuple[Sighting, ...]
    ends: tuple[Sighting, ...]
    short_ends: tuple[Sighting, ...] = ()  # of a loop that had not come to its last step


_FAILED = frozenset({Role.CAUSE, Role.SYMPTOM, Role.DEATH})
_MAY_BE_ROOTS = frozenset({Role.CAUSE, Role.SYMPTOM, Role.STOP, Role.DEATH, Role.END})


# ----------------------------------------------------------------------------- candidates
def candidates_of(launches: Sequence[LogLaunch]) -> Candidates:
    left = [
        one
        for launch in launches
        for one in launch.sightings
        if _is_of_a_terminal(one, launch)
        or not (launch.has_overcome(one) or _is_usual(one, launch))
    ]
    left = [one for one in left if not _is_of_an_earlier_life(one, left, launches)]
    if any(one.signature.role in _FAILED and not one.is_mild for one in left):
        left = [
            one
            for launch in launches
            for one in launch.sightings
            if not launch.has_overcome(one)
            or _has_an_age(one)
            or _is_still_degraded(one, left)
            or _is_of_a_terminal(one, launch)
        ]
    surest = max(
        (
            one.signature.confidence
            for one in left
            if not one.is_retried and one.signature.role in _MAY_BE_ROOTS
        ),
        default=0.0,
    )
    for is_no_root in (_is_link_that_came_back, _is_missed_by_no_one, _is_outdone, _is_echo):
        left = [one for one in left if not is_no_root(one, left)]
    left = [one for one in left if one.signature.id != _LINK_BACK]
    left = [one for one in left if not _was_tried_again(one, left, surest)]
    for is_no_root in (
        _is_closed_by_order,
        _is_server_that_came_back,
        _is_vague_of_a_daemon,
        _is_of_an_earlier_job,
        _is_want_of_a_lost_node,
        _is_loss_of_a_taken_node,
        _is_of_a_second_try,
        _follows_from_a_loss,
    ):
        left = [one for one in left if not is_no_root(one, left)]
    ends_of_files = {launch.file: launch.last_time for launch in launches}
    left = [one for one in left if not _ended_the_job_before(one, left, ends_of_files)]
    left = [
        replace(one, signature=replace(one.signature, role=Role.CONSEQUENCE))
        if _comes_of_a_stuck_start(one, left, launches)
        else one
        for one in left
    ]
    # a pod that found no place at first has found one
    if any(launch.progress is not None for launch in launches):
        left = [one for one in left if one.signature.id != _NO_PLACE or one.progress is not None]
    ended = {launch.file: launch.last_time for launch in launches if launch.progress is None}
    left = [one for one in left if not _is_of_an_earlier_day(one, left, ended.get(one.file))]
    last = {
        launch.file: launch.progress.line_number
        for launch in launches
        if launch.progress is not None
    }
    left = [one for one in left if not _is_vague_and_passed(one, left, last)]
    short = tuple(one for one in left if one.signature.role is Role.END and _is_short(one))
    left = [one for one in left if one not in short]
    ends = tuple(one for one in left if one.signature.role is Role.END)
    # then one step more is enough to have overcome it
    if any(end.signature.id in _FINISHED for end in ends):
        left = [
            one for one in left if one.signature.lasting or one.line_number > last.get(one.file, 0)
        ]

    def of(role: Role) -> tuple[Sighting, ...]:
        return tuple(one for one in left if one.signature.role is role)

    return Candidates(
        of(Role.CAUSE),
        of(Role.STOP),
        deaths=of(Role.DEATH),
        symptoms=of(Role.SYMPTOM),
        summaries=of(Role.SUMMARY),
        warnings=of(Role.WARNING),
        consequences=of(Role.CONSEQUENCE),
        ends=ends,
        short_ends=short,
    )


def _was_tried_again(one: Sighting, left: Sequence[Sighting], surest: float) -> bool:
    """Whether what failed was tried once more, and a surer line says what ended it, or a line of the
    same kind what the server answered at last.
    """
    if not (one.is_retried and _may_fail_once(one)):
        return False
    return one.signature.confidence < surest or any(
        not other.is_retried
        and other.signature.id == one.signature.id
        and _ANSWERED.search(other.text) is not None
        for other in left
    )


def _is_of_a_terminal(one: Sighting, launch: LogLaunch) -> bool:
    """Whether the scheduler refused a job at a terminal where later a file of another one was shown: the
    steps in that are not of what was refused.
    """
    if not _is_refusal(one) or one.progress is not None:
        return False
    return any(
        head.file == one.file
        and any(
            number > one.line_number and _SHOWN.search(line)
            for number, line in enumerate(head.text.splitlines(), head.first_line)
        )
        for head in launch.heads
    )


def _is_usual(one: Sighting, launch: LogLaunch) -> bool:
    """Whether a training that runs on has printed the same before, and trained on after it."""
    if not launch.runs_on or one.signature.lasting or one.signature.blame is NodeBlame.NODE:
        return False
    alike = [
        other
        for other in launch.sightings
        if other.signature.id == one.signature.id
        and other.text == one.text
        and launch.has_overcome(other)
    ]
    is_below = launch.progress is not None and launch.progress.line_number < one.line_number
    return len(alike) >= TIMES_BEFORE and not is_below


def _is_of_an_earlier_life(
    one: Sighting, left: Sequence[Sighting], launches: Sequence[LogLaunch]
) -> bool:
    """Whether it is the scheduler's word, with its age and no time, of a lost node, and each training
    runs on and at least one has lost a peer before and trained on.
    """
    trained = [launch for launch in launches if launch.progress is not None]
    if not _has_an_age(one) or not all(launch.runs_on for launch in trained):
        return False
    own = {launch.file for launch in trained}
    if any(other.file in own and other.signature.role in _FAILED for other in left):
        return False
    return any(
        other.signature.fault in _OF_OTHERS
        and other.signature.role in _FAILED
        and launch.has_overcome(other)
        for launch in trained
        for other in launch.sightings
    )


def _has_an_age(one: Sighting) -> bool:
    """Whether it is the scheduler's word of a lost node with its age and no time, as `kubectl get
    events` lists it: where it stands says nothing of when that was.
    """
    return one.signature.fault is FaultClass.SLURM_NODE_FAIL and _AGE.match(one.text) is not None


def _is_still_degraded(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a node's link had become slower, or its cable broke, before ranks missed each other: steps
    that are made meanwhile do not mend it.
    """
    is_degraded = one.signature.id == _DEGRADED or _CABLE.search(one.text) is not None
    return is_degraded and _is_own_link(one) and any(_is_of_peers(other) for other in left)


def _is_short(end: Sighting) -> bool:
    """Whether it is the end of a loop or of a program, and the step before it was not the last one
    of the training.
    """
    if end.signature.id not in _MAY_BE_SHORT or end.progress is None:
        return False
    return end.progress.is_last is False


def _is_outdone(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a mere warning need not be the cause: something else failed, or nothing did."""
    if not _may_fail_once(one):
        return False
    graver = [
        other for other in left if other.signature.role in _MAY_BE_ROOTS and not other.is_mild
    ]
    if one.signature.restart:  # it began anew, unasked: the cause where nothing failed
        return any(
            other.signature.role is not Role.END and not other.signature.restart for other in graver
        )
    if not one.is_mild or one.signature.lasting:
        return False
    failed = any(other.signature.role in {Role.SUMMARY, Role.CONSEQUENCE} for other in left)
    return bool(graver) or not (failed or _comes_again(one, left))


def _is_echo(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether an exception only says that something else was ended or failed, and what its program
    raised of it follows; or that a collective of HCCL did, and its code follows.
    """
    if one.signature.id in _OF_CODES_BELOW:
        return any(
            other.signature.family == one.signature.family
            and other.signature.confidence > one.signature.confidence
            and 0 < _lines_below(other, one) <= NEXT_LINES
            for other in left
        )
    if one.raised is None:
        return False
    raised_in = "".join(one.raised.frames[-1:])
    if not (_ECHOES.search(one.raised.name) or _RAISED_BY_CONNECTIONS.search(raised_in)):
        return False
    return any(
        other.raised is not None
        and other.raised.follows
        and other.origin.writer == one.origin.writer
        and 0 < _lines_below(other, one) <= CHAIN_LINES
        for other in left
    )


def _is_link_that_came_back(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a link was up again after a node's kernel told of its end: links come up late at each
    boot, and flap.

    One that broke just before peers missed it, in the log of the training, broke the training all
    the same.
    """
    if not _is_own_link(one) or _CABLE.search(one.text) is not None:
        return False
    if any(other.file == one.file and _is_of_peers(other) for other in left):
        return False
    later = [other for other in left if other.signature.id == _LINK_BACK and other.file == one.file]
    return any(
        other.line_number > one.line_number and other.origin.node == one.origin.node
        for other in later
    )


def _is_vague_and_passed(one: Sighting, left: Sequence[Sighting], last: Mapping[str, int]) -> bool:
    """Whether it is a mere line with the words of an error, a step was made after it, and something
    else failed.
    """
    if (
        one.signature.family != TOPICS
        or one.raised is not None
        or one.line_number >= last.get(one.file, 0)
    ):
        return False
    return any(
        other.signature.role in _FAILED
        and (other.signature.family != TOPICS or other.raised is not None)
        for other in left
    )


def _is_missed_by_no_one(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a link broke of which no rank speaks, while something else failed: links that are not
    used break too.
    """
    if not _is_own_link(one):
        return False
    others = [
        other for other in left if other.signature.role in _MAY_BE_ROOTS and not _is_own_link(other)
    ]
    others = [
        other for other in others if other.signature.role is not Role.END and not other.is_mild
    ]
    return bool(others) and not any(other.signature.fault in _OF_PEERS for other in others)


def _is_vague_of_a_daemon(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether it is a line of a kernel's or a daemon's log that no signature knows, while a log
    tells of a failure.
    """
    if one.signature.family != TOPICS or one.raised is not None or not is_daemons_log(one.file):
        return False
    return any(
        other.signature.role in _FAILED and other.signature.family != TOPICS for other in left
    )


def _is_server_that_came_back(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a node's kernel had a file server back before it told of a GPU that broke for good, or
    of the storage once more.
    """
    if one.signature.fault is not FaultClass.STORAGE or not is_daemons_log(one.file):
        return False
    later = [other for other in left if other.file == one.file and is_before(one, other)]
    back = first_of([other for other in later if other.signature.id == _SERVER_BACK])
    if back is None:
        return False
    return any(
        is_before(back, other)
        and (
            other.signature.fault is FaultClass.STORAGE
            or (other.signature.family == KERNELS and _is_lost_gpu(other))
        )
        for other in later
        if other is not back and other.signature.id != _SERVER_BACK
    )


def _is_closed_by_order(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a launcher left its rendezvous closed because it had been told to go, which others
    only see.
    """
    if one.signature.fault is not FaultClass.RENDEZVOUS or _CLOSED.search(one.text) is None:
        return False
    return any(is_before(other, one) for other in left if other.signature.id in _TOLD)


def _is_of_an_earlier_job(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether it is how a job before ended, in the log of one that was never accepted."""
    if one.signature.fault not in _ENDS_OF_JOBS:
        return False
    refused = [other for other in left if _is_refusal(other) and is_before(one, other)]
    if one.progress is None:
        return any(other.progress is None for other in refused)
    is_order = one.signature.role is Role.STOP and one.signature.fault in _ORDERED_ENDS
    is_quoted = one.text[:1].isspace()  # by who submits the next one
    return is_order and is_quoted and bool(refused)


def _is_want_of_a_lost_node(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether Ray has too few GPUs because it lost a node before, with which there were enough."""
    if one.signature.id != _TOO_FEW:
        return False
    return any(
        other.signature.fault is FaultClass.SLURM_NODE_FAIL and is_before(other, one)
        for other in left
    )


def _is_loss_of_a_taken_node(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a node did not answer because the cloud had taken it back, as an event of it says, or one
    of a pod that names no other node.
    """
    if one.signature.fault is not FaultClass.SLURM_NODE_FAIL or one.signature.proof is not None:
        return False
    for other in left:
        if other.file != one.file or other.signature.fault is not FaultClass.SLURM_PREEMPTED:
            continue
        taken = _NAMED_NODE.search(other.text)
        if taken is None or one.named.get("node", taken["node"]) == taken["node"]:
            return True
    return False


def _follows_from_a_loss(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a job was put back into the queue because a node of it was lost, or a terminal was
    closed because the machine at its other end was taken back.
    """
    if one.signature.id == _REQUEUED:
        losses = [other for other in left if other.signature.id == _NODE_LOST]
        return any("node" in other.named for other in losses)
    if one.signature.id == _TERMINAL_CLOSED:
        return any(other.signature.fault is FaultClass.SLURM_PREEMPTED for other in left)
    return False


def _is_of_a_second_try(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a task of Ray failed only because what its first try left behind still has its name."""
    if one.signature.id != _TASK_FAILED:
        return False
    taken = [other for other in left if other.signature.id == _NAME_TAKEN]
    return any(0 < _lines_below(other, one) <= NEXT_LINES for other in taken)


def _ended_the_job_before(
    one: Sighting, left: Sequence[Sighting], ends: Mapping[str, str | None]
) -> bool:
    """Whether it is how the scheduler ended a job, and the log of the next one goes on until a
    program fails in it.
    """
    if one.signature.fault not in _ORDERED_ENDS or one.signature.role is not Role.STOP:
        return False
    began_later = {
        file for file, end in ends.items() if file != one.file and _is_after(end, one.origin.time)
    }
    failed = [
        other
        for other in left
        if other.raised is not None
        and (
            (other.file in began_later and other.progress is None)
            or _is_of_a_later_job(other.file, one.file)
        )
    ]
    return any(
        other.signature.role is Role.CAUSE and other.signature.confidence >= STRONG
        for other in failed
    )


def _comes_of_a_stuck_start(
    one: Sighting, left: Sequence[Sighting], launches: Sequence[LogLaunch]
) -> bool:
    """Whether it is the end of the time of a job that had made no step, and another log tells of a
    fault on a line without a time, above one that was said before.
    """
    is_limit = (
        one.signature.fault is FaultClass.SLURM_TIME_LIMIT and one.signature.role is Role.STOP
    )
    if not is_limit or any(launch.progress is not None for launch in launches):
        return False
    timed = {
        launch.file: launch.last_timed_line
        for launch in launches
        if launch.file != one.file and _is_after(one.time, launch.last_time)
    }
    return any(
        other.signature.role is Role.CAUSE
        and other.signature.confidence >= STRONG
        and not (other.is_mild or other.is_retried)
        and other.time is None
        and other.line_number < timed.get(other.file, 0)
        for other in left
    )


def _is_after(end: str | None, time: str | None) -> bool:
    return end is not None and time is not None and end[:SECOND] > time[:SECOND]


def _is_of_a_later_job(file: str, other: str) -> bool:
    """Whether two logs are of jobs, by names that differ in nothing but a job's number, and the first
    one's is higher.
    """
    names = [Path(one).name for one in (file, other)]
    numbers = [_JOBS_NUMBER.findall(name) for name in names]
    shapes = {_JOBS_NUMBER.sub("#", name) for name in names}
    return len(shapes) == 1 and [*map(int, numbers[0])] > [*map(int, numbers[1])]


def _is_of_an_earlier_day(one: Sighting, left: Sequence[Sighting], end: str | None) -> bool:
    """Whether a log without steps, as a kernel's, went on for days after this line, and another
    tells of a failure.

    A GPU that had an error two weeks ago, and a program that fails today, have nothing to do with
    each other.
    """
    time = one.origin.time
    if end is None or time is None or one.signature.role not in _FAILED:
        return False
    failed = any(
        other.file != one.file and other.signature.role in _FAILED and not other.is_mild
        for other in left
    )
    return failed and _day(end) - _day(time) > DAYS


def _day(time: str) -> int:
    """The day of a time `MM-DD ...`, as one of a year in which each month has 31."""
    return 31 * int(time[:2]) + int(time[3:5])


def _is_refusal(one: Sighting) -> bool:
    """Whether the scheduler did not take a job."""
    return _SUBMITS.search(one.text) is not None and one.signature.fault in _OF_SUBMISSIONS


def _comes_again(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a warning is repeated for a while: what it tells of is tried again and again, and
    does not succeed.
    """
    alike = [
        other
        for other in left
        if other.signature.id == one.signature.id and other.origin.time is not None
    ]
    return len({str(other.origin.time)[:SECOND] for other in alike}) >= AGAIN


def _may_fail_once(one: Sighting) -> bool:
    return one.signature.role in {Role.CAUSE, Role.SYMPTOM}


def root_of(found: Candidates) -> Sighting | None:
    """The first cause; None where no line tells of one."""
    hung = [one for one in found.symptoms if one.signature.fault is FaultClass.NCCL_TIMEOUT]
    if hung:  # what cannot be ended then, hangs; that Slurm drains its node comes of it
        found = replace(
            found, causes=tuple(one for one in found.causes if not _NEVER_ENDED.search(one.text))
        )
    if _has_lost_a_node(found):
        found = _without_words_of_peers(found)
    strong = first_of([one for one in found.causes if one.signature.confidence >= STRONG])
    cause = strong and _plainest(strong, found.causes)
    cause = cause or first_of([one for one in found.causes if one.signature.confidence >= PLAIN])
    stop, told = (
        first_of(found.stops),
        first_of(
            [
                one
                for one in found.consequences
                if one.signature.id == _STEP_CANCELLED and "DUE TO" not in one.text
            ]
        ),
    )
    end = _end(found, stop)
    failed = [
        one for one in (cause, *found.deaths) if one is not None and not one.signature.lasting
    ]
    if end is not None and not any(
        is_before(one, end) or _is_of_another_job(one, end) for one in failed
    ):
        return _failed_after(end, found) or end
    clear = [one for one in found.symptoms if one.signature.confidence >= CLEAR]
    died, lost = _earlier(first_of(found.deaths), first_of(clear)), first_of(found.symptoms)
    if (
        stop is None
        and told is not None
        and found.consequences[0] is told
        and _is_first(told, [*failed, *found.symptoms, *found.summaries])
    ):
        return replace(told, signature=replace(told.signature, **_CANCELLED))
    if stop is None:
        begun = None
    else:
        begun = _earlier(_earlier(stop, told), _notice_of(stop, found))
    if stop is not None and stop.signature.fault in _ORDERED_ENDS and not clear:
        lost = None  # peers that are gone when the time is up are gone because of it
    vague = first_of([one for one in found.causes if one.signature.fault is not FaultClass.UNKNOWN])
    if begun is not None:  # a process that dies when it was told to go is no cause
        going = first_of([one for one in found.consequences if one.signature.id in _GOING])
        first_order = _earlier(begun, going) or begun
        if not (died is not None and is_before(died, first_order)):
            died = None
        if not (lost is not None and is_before(lost, first_order)):
            lost = None
    for one in (
        cause,
        died if stop is not None else _earlier(died, vague),
        lost if stop is not None else vague,
        lost,
    ):
        if one is not None and (begun is None or is_before(one, begun)):
            return one
    return stop or cause or _earlier(died, vague) or lost


def _is_of_another_job(one: Sighting, end: Sighting) -> bool:
    """Whether a GPU was lost in one log, and another log without times tells of a clean end: a GPU that is
    broken is none the better for it.
    """
    return one.file != end.file and None in (one.time, end.time) and _is_lost_gpu(one)


def _notice_of(stop: Sighting, found: Candidates) -> Sighting | None:
    """The signal by which the scheduler told the program of the end that it then carried out: what a
    handler of it raises is no cause.
    """
    if stop.signature.fault not in _ORDERED_ENDS:
        return None
    return first_of([one for one in found.consequences if one.signature.id == TOLD_TO_GO])


def _has_lost_a_node(found: Candidates) -> bool:
    """Whether a scheduler says that it lost a node of the job, or took one away."""
    told = [
        one
        for one in (*found.causes, *found.deaths)
        if one.signature.fault is FaultClass.SLURM_NODE_FAIL
    ]
    taken = [one for one in found.stops if one.signature.fault is FaultClass.SLURM_PREEMPTED]
    return bool(taken) or any(
        one.signature.confidence >= STRONG and not _NEVER_ENDED.search(one.text) and not one.is_mild
        for one in told
    )


def _without_words_of_peers(found: Candidates) -> Candidates:
    """Without what ranks see of one that is gone: they see it before the scheduler does, and say it
    first.
    """
    return replace(
        found,
        causes=tuple(one for one in found.causes if not _is_of_peers(one)),
        symptoms=tuple(one for one in found.symptoms if not _is_of_peers(one)),
    )


def _is_of_peers(one: Sighting) -> bool:
    """Whether a line tells of another one that did not answer, and not of a fault of who prints it."""
    return (
        one.signature.fault in _OF_PEERS
        and one.signature.blame is not NodeBlame.NODE
        and not one.signature.own
    )


def _is_first(one: Sighting, others: Sequence[Sighting]) -> bool:
    return not any(is_before(other, one) or other.line_number < one.line_number for other in others)


def _end(found: Candidates, stop: Sighting | None) -> Sighting | None:
    """The clean end; None where it was one only because the job was told to go."""
    sure = [one for one in found.ends if one.signature.confidence >= SURE_END]
    end = next(iter([*sure, *found.ends]), None)
    if end is not None and not sure:
        missed = [
            one
            for one in found.symptoms
            if one.signature.confidence >= CLEAR or not is_before(end, one)
        ]
        others = (found.causes, found.deaths, found.stops, missed, found.summaries)
        if not any(others):
            return end
        return None
    if end is None or stop is None or stop.signature.fault not in _ORDERED_ENDS:
        return end
    told = [one for one in (*found.consequences, *found.ends) if one.signature.id in _TOLD]
    is_told = any(is_before(one, end) or one is end for one in told)
    # what a program that is not done does when its time is up is no end of its own
    is_told = is_told or (is_before(stop, end) and not _is_done(end))
    if is_told:
        return None
    return end


def _is_done(end: Sighting) -> bool:
    """Whether an end says that all was done, or came at the last step."""
    return end.signature.id in _FINISHED or (
        end.progress is not None and end.progress.is_last is True
    )


def _plainest(strong: Sighting, causes: Sequence[Sighting]) -> Sighting:
    """The first strong cause; in place of what NCCL saw of it, an error of the same class that says
    it more surely.

    A program that does not find its GPU, or whose kernel fails, says what a GPU that is lost does
    to it; a step that Slurm does not start, what daemons do that refuse each other's credentials.
    Which line comes first is by chance. Who gathers the errors of all ranks says less than theirs,
    and who lost a peer less than the peer.
    """
    deeper = _deeper(strong, causes) or _raised_after(strong, causes)
    if deeper is not None:
        return deeper
    if strong.raised is not None or "Cuda failure" not in strong.text:
        return strong
    return next(
        (
            one
            for one in causes
            if "Cuda failure" not in one.text
            and "what():" not in one.text  # which repeats the same at the end of a process
            and one.signature.fault is strong.signature.fault
            and one.signature.confidence >= strong.signature.confidence
        ),
        strong,
    )


def _raised_after(strong: Sighting, causes: Sequence[Sighting]) -> Sighting | None:
    """The exception that ended a program which had gone on after a line about something else that it
    lacked: `cannot plot: No module named 'x'`.
    """
    is_mere_line = strong.raised is None and strong.signature.fault is FaultClass.USER_CODE
    if not is_mere_line:
        return None
    return first_of(
        [
            one
            for one in causes
            if one.raised is not None
            and one.signature.confidence >= STRONG
            and _lines_below(one, strong) > NEXT_LINES
            and one.signature.fault not in {FaultClass.USER_CODE, *_OF_OTHERS}
        ]
    )


def _deeper(strong: Sighting, causes: Sequence[Sighting]) -> Sighting | None:
    return first_of([one for one in causes if one is not strong and _says_more(one, strong)])


def _says_more(one: Sighting, strong: Sighting) -> bool:
    """Whether a line tells of what the strong one only had of it."""
    signature = strong.signature
    is_deeper = False
    is_programs_xid = signature.family == KERNELS and signature.blame is NodeBlame.PROGRAM
    if signature.id in _OF_A_LOST_GPU or is_programs_xid or _NO_DEVICE in strong.text:
        is_deeper = _is_lost_gpu(one)
    elif signature.id in _OF_A_LOST_PEER and one.raised is not None and _is_surely_its_own(one):
        is_deeper = True
    elif signature.id == _WRAPPER:
        is_deeper = is_before(strong, one) and one.signature.confidence >= STRONG
    elif signature.id in _SAID_BELOW:
        is_deeper = (
            one.signature.id in _SAID_BELOW[signature.id]
            and 0 < _lines_below(one, strong) <= NEXT_LINES
        )
    elif signature.id in _SAYS_WHY:
        is_deeper = one.signature.id in _SAYS_WHY[signature.id] and not one.is_mild
    elif (
        signature.fault is FaultClass.GPU_HARDWARE
        and signature.family != KERNELS
        and not _is_kernels(strong)
    ):
        is_deeper = one.signature.family == KERNELS and _is_lost_gpu(one)
    elif signature.fault is FaultClass.NUMERICS:
        is_deeper = one.signature.id == REPLAYED_ELSEWHERE
    elif _is_of_peers(strong):
        is_deeper = _is_own_link(one) or _is_programs_own(one, strong)
        is_deeper = is_deeper or (_is_lost_gpu(one) and not is_before(strong, one))
    elif _KILLED_LOADER.search(strong.text) is not None:
        is_deeper = one.signature.fault is FaultClass.HOST_OOM and not one.is_mild
    elif _ECHO_OF_PICKLING in strong.text:
        is_deeper = _PICKLING.search(one.text) is not None and is_before(one, strong)
    return is_deeper


def _is_programs_own(one: Sighting, strong: Sighting) -> bool:
    """Whether a program raised something of its own before others said that they lost a peer: that is
    what they lost it of, however ordinary it is.
    """
    if one.raised is None or one.raised.follows or one.is_mild:
        return False
    is_own = one.signature.fault not in _OF_OTHERS and one.signature.confidence >= PLAIN
    if one.file != strong.file and None in (one.time, strong.time):
        return is_own  # which came first is not told, and who lost a peer raises nothing of its own
    return is_own and one.origin.writer != strong.origin.writer and is_before(one, strong)


def _is_kernels(one: Sighting) -> bool:
    return _KERNELS_WORD.search(one.text) is not None


def _lines_below(one: Sighting, other: Sighting) -> int:
    """How many lines a line of the same file stands below another; 0 in another file."""
    if one.file == other.file:
        return one.line_number - other.line_number
    return 0


def _is_surely_its_own(one: Sighting) -> bool:
    """Whether what ended a process has nothing to do with others: they lose it, and say so at once."""
    return one.signature.confidence >= SURELY_OWN and one.signature.fault not in _OF_OTHERS


def _is_own_link(one: Sighting) -> bool:
    """Whether a node tells of its own broken link to the others, and no one of another's."""
    is_nodes = (
        one.signature.fault is FaultClass.NCCL_NETWORK and one.signature.blame is NodeBlame.NODE
    )
    return is_nodes and not one.is_mild


def _is_lost_gpu(one: Sighting) -> bool:
    is_surely = one.signature.confidence >= SURELY_BROKEN and not one.is_mild
    return (
        one.signature.fault is FaultClass.GPU_HARDWARE
        and one.signature.blame is NodeBlame.NODE
        and is_surely
    )


def _failed_after(end: Sighting, found: Candidates) -> Sighting | None:
    """What the program raised once the training had come to its end: a copy, an upload, an
    evaluation that failed; or hung, where the launcher says that it failed of it.
    """
    raised = [
        one for one in found.causes if one.raised is not None and one.signature.confidence >= STRONG
    ]
    failed = first_of([one for one in raised if is_before(end, one)])
    if failed is not None:
        return _deeper(failed, found.causes) or failed
    hung = [one for one in found.symptoms if one.signature.fault is FaultClass.NCCL_TIMEOUT]
    if not found.summaries:
        return None
    return first_of(
        [one for one in hung if one.signature.confidence >= CLEAR and is_before(end, one)]
    )


def _earlier(one: Sighting | None, other: Sighting | None) -> Sighting | None:
    if one is None or other is None:
        return one or other
    if is_before(other, one):
        return other
    return one


def first_of(sightings: Sequence[Sighting]) -> Sighting | None:
    """The first one by the log, or by the times where they are of several files."""
    if not sightings:
        return None
    first = sightings[0]
    for one in sightings[1:]:
        if is_before(one, first) or (one.file == first.file and _is_earlier(one, first)):
            first = one
    return first


def _is_earlier(one: Sighting, other: Sighting) -> bool:
    """Whether a later line of a log tells of an earlier time; its writers need not take turns."""
    times = one.origin.time, other.origin.time
    return (
        None not in times
        and one.origin.writer != other.origin.writer
        and str(times[0])[:14] < str(times[1])[:14]
    )


def is_before(one: Sighting, other: Sighting) -> bool:
    if one.file == other.file:
        return one.line_number < other.line_number
    if one.time is None or other.time is None:
        return False
    return one.time < other.time
