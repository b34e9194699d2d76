"""What of a launch may have ended it: each sighting for what it is, without those that passed, are
echoes, or belong to another job. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tr11ops.diagnose.order import (
    OF_OTHERS,
    OF_PEERS,
    first_of,
    is_before,
    is_lost_gpu,
    is_of_peers,
    is_own_link,
    lines_below,
)
from tr11ops.diagnose.other_jobs import (
    FAILED,
    SECOND,
    comes_of_a_stuck_start,
    ended_the_job_before,
    is_of_an_earlier_day,
    is_of_an_earlier_job,
    is_refusal,
)
from tr11ops.diagnose.places import is_daemons_log
from tr11ops.diagnose.sighting import LogLaunch, Sighting
from tr11ops.diagnose.signature import FaultClass, NodeBlame, Role
from tr11ops.diagnose.topics import FAMILY as TOPICS
from trainer.contract.record import Record

AGAIN = 5  # seconds in which a warning is repeated where it is more than that
NEXT_LINES = 6
_ANSWERED = re.compile(r"\b[45]\d\d (?:Client|Server) Error\b")
CHAIN_LINES = 60  # from one exception of a chain to the next
_ECHOES = re.compile(  # and what a library of connections says of a service that its client names
    r"(?:^|\.)(?:CancelledError|CalledProcessError|Empty|BrokenBarrierError)$"
    r"|^(?:urllib3|httpcore|h11|anyio|http\.client)\."
)
_RAISED_BY_CONNECTIONS = re.compile(r"/(?:urllib3|httpcore|h11|anyio)/")
TIMES_BEFORE = 2  # that it trained on after the same line
_OF_CODES_BELOW = frozenset({"hccl-wrapped", "ascend-stream"})  # whose code says more
_LOOP = "end-loop"
_MAY_BE_SHORT = frozenset({_LOOP, "end-code", "end-returned"})  # which do not say how far it came
FINISHED = frozenset({"end-finished", _LOOP})
TOLD_TO_GO = "told-to-go"
TOLD = frozenset({"elastic-signal", "end-signal", TOLD_TO_GO})
_CLOSED = re.compile(r"RendezvousClosed|closed rendezvous|rendezvous.{0,80} has been closed")
_SHOWN = re.compile(r"[$#%>] (?:tail|cat|head|less|more) .*\S+\.(?:out|log|err|txt)\b")
_CABLE = re.compile(r"[Cc]able error|unsupported cable")  # no link comes up again for good
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
_REQUEUED = "slurm-requeued"
_NODE_LOST = "slurm-node-fail"
_TERMINAL_CLOSED = "terminal-closed"


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

    @property
    def all(self) -> list[Sighting]:
        """Each of them but consequences and short ends, the most telling kinds first."""
        return [
            *self.causes,
            *self.deaths,
            *self.stops,
            *self.symptoms,
            *self.summaries,
            *self.warnings,
            *self.ends,
        ]


_MAY_BE_ROOTS = frozenset({Role.CAUSE, Role.SYMPTOM, Role.STOP, Role.DEATH, Role.END})


def candidates_of(launches: Sequence[LogLaunch]) -> Candidates:
    left = [
        one
        for launch in launches
        for one in launch.sightings
        if _is_of_a_terminal(one, launch)
        or not (launch.has_overcome(one) or _is_usual(one, launch))
    ]
    left = [one for one in left if not _is_of_an_earlier_life(one, left, launches)]
    if any(one.signature.role in FAILED and not one.is_mild for one in left):
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
        is_of_an_earlier_job,
        _is_want_of_a_lost_node,
        _is_loss_of_a_taken_node,
        _is_of_a_second_try,
        _follows_from_a_loss,
    ):
        left = [one for one in left if not is_no_root(one, left)]
    ends_of_files = {launch.file: launch.last_time for launch in launches}
    left = [one for one in left if not ended_the_job_before(one, left, ends_of_files)]
    left = [
        replace(one, signature=replace(one.signature, role=Role.CONSEQUENCE))
        if comes_of_a_stuck_start(one, left, launches)
        else one
        for one in left
    ]
    # a pod that found no place at first has found one
    if any(launch.progress is not None for launch in launches):
        left = [one for one in left if one.signature.id != _NO_PLACE or one.progress is not None]
    ended = {launch.file: launch.last_time for launch in launches if launch.progress is None}
    left = [one for one in left if not is_of_an_earlier_day(one, left, ended.get(one.file))]
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
    if any(end.signature.id in FINISHED for end in ends):
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
    if not is_refusal(one) or one.progress is not None:
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
    if any(other.file in own and other.signature.role in FAILED for other in left):
        return False
    return any(
        other.signature.fault in OF_OTHERS
        and other.signature.role in FAILED
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
    return is_degraded and is_own_link(one) and any(is_of_peers(other) for other in left)


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
            and 0 < lines_below(other, one) <= NEXT_LINES
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
        and 0 < lines_below(other, one) <= CHAIN_LINES
        for other in left
    )


def _is_link_that_came_back(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a link was up again after a node's kernel told of its end: links come up late at each
    boot, and flap.

    One that broke just before peers missed it, in the log of the training, broke the training all
    the same.
    """
    if not is_own_link(one) or _CABLE.search(one.text) is not None:
        return False
    if any(other.file == one.file and is_of_peers(other) for other in left):
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
        other.signature.role in FAILED
        and (other.signature.family != TOPICS or other.raised is not None)
        for other in left
    )


def _is_missed_by_no_one(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether a link broke of which no rank speaks, while something else failed: links that are not
    used break too.
    """
    if not is_own_link(one):
        return False
    others = [
        other for other in left if other.signature.role in _MAY_BE_ROOTS and not is_own_link(other)
    ]
    others = [
        other for other in others if other.signature.role is not Role.END and not other.is_mild
    ]
    return bool(others) and not any(other.signature.fault in OF_PEERS for other in others)


def _is_vague_of_a_daemon(one: Sighting, left: Sequence[Sighting]) -> bool:
    """Whether it is a line of a kernel's or a daemon's log that no signature knows, while a log
    tells of a failure.
    """
    if one.signature.family != TOPICS or one.raised is not None or not is_daemons_log(one.file):
        return False
    return any(
        other.signature.role in FAILED and other.signature.family != TOPICS for other in left
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
            or (other.signature.family == KERNELS and is_lost_gpu(other))
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
    return any(is_before(other, one) for other in left if other.signature.id in TOLD)


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
    return any(0 < lines_below(other, one) <= NEXT_LINES for other in taken)


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
