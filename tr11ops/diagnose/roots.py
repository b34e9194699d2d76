"""Which line of a launch is the first cause: the candidates, each for what it is, and the order
among them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from tr11ops.diagnose.candidates import FINISHED, KERNELS, NEXT_LINES, TOLD, TOLD_TO_GO, Candidates
from tr11ops.diagnose.order import (
    OF_OTHERS,
    STRONG,
    earlier,
    first_of,
    is_before,
    is_kernels,
    is_lost_gpu,
    is_of_peers,
    is_own_link,
    is_surely_its_own,
    lines_below,
)
from tr11ops.diagnose.other_jobs import ORDERED_ENDS, is_of_another_job
from tr11ops.diagnose.sighting import Sighting
from tr11ops.diagnose.signature import SURE_END, FaultClass, NextStep, NodeBlame, Role

PLAIN = 0.65  # the least of an exception; a line that only holds the words of an error has less
CLEAR = 0.7  # a symptom with this confidence says as much as a death
_NO_DEVICE = "invalid device ordinal"
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
_WRAPPER = "checkpoint-wrapper"
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
_STEP_CANCELLED = "step-cancelled"
_GOING = TOLD | {"srun-ending"}
_NEVER_ENDED = re.compile("Kill task failed|NOT ENDING")  # a node that is lost because a job hung
_CANCELLED: Any = {  # what a step's end is where nothing came before it
    "role": Role.STOP,
    "fault": FaultClass.SLURM_USER_CANCEL,
    "step": NextStep.NONE,
    "confidence": 0.7,
    "meaning": "someone cancelled the step, and nothing had failed before",
}


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
        is_before(one, end) or is_of_another_job(one, end) for one in failed
    ):
        return _failed_after(end, found) or end
    clear = [one for one in found.symptoms if one.signature.confidence >= CLEAR]
    died = earlier(first_of(found.deaths), first_of(clear))
    lost = first_of(found.symptoms)
    if (
        stop is None
        and told is not None
        and found.consequences[0] is told
        and _is_first(told, [*failed, *found.symptoms, *found.summaries])
    ):
        return replace(told, signature=replace(told.signature, **_CANCELLED))
    begun = None
    if stop is not None:
        begun = earlier(earlier(stop, told), _notice_of(stop, found))
    if stop is not None and stop.signature.fault in ORDERED_ENDS and not clear:
        lost = None  # peers that are gone when the time is up are gone because of it
    vague = first_of([one for one in found.causes if one.signature.fault is not FaultClass.UNKNOWN])
    if begun is not None:  # a process that dies when it was told to go is no cause
        going = first_of([one for one in found.consequences if one.signature.id in _GOING])
        first_order = earlier(begun, going) or begun
        if not (died is not None and is_before(died, first_order)):
            died = None
        if not (lost is not None and is_before(lost, first_order)):
            lost = None
    for one in (
        cause,
        died if stop is not None else earlier(died, vague),
        lost if stop is not None else vague,
        lost,
    ):
        if one is not None and (begun is None or is_before(one, begun)):
            return one
    return stop or cause or earlier(died, vague) or lost


def _notice_of(stop: Sighting, found: Candidates) -> Sighting | None:
    """The signal by which the scheduler told the program of the end that it then carried out: what a
    handler of it raises is no cause.
    """
    if stop.signature.fault not in ORDERED_ENDS:
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
        causes=tuple(one for one in found.causes if not is_of_peers(one)),
        symptoms=tuple(one for one in found.symptoms if not is_of_peers(one)),
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
    if end is None or stop is None or stop.signature.fault not in ORDERED_ENDS:
        return end
    told = [one for one in (*found.consequences, *found.ends) if one.signature.id in TOLD]
    is_told = any(is_before(one, end) or one is end for one in told)
    # what a program that is not done does when its time is up is no end of its own
    is_told = is_told or (is_before(stop, end) and not _is_done(end))
    if is_told:
        return None
    return end


def _is_done(end: Sighting) -> bool:
    """Whether an end says that all was done, or came at the last step."""
    return end.signature.id in FINISHED or (
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
            and lines_below(one, strong) > NEXT_LINES
            and one.signature.fault not in {FaultClass.USER_CODE, *OF_OTHERS}
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
        is_deeper = is_lost_gpu(one)
    elif signature.id in _OF_A_LOST_PEER and one.raised is not None and is_surely_its_own(one):
        is_deeper = True
    elif signature.id == _WRAPPER:
        is_deeper = is_before(strong, one) and one.signature.confidence >= STRONG
    elif signature.id in _SAID_BELOW:
        is_deeper = (
            one.signature.id in _SAID_BELOW[signature.id]
            and 0 < lines_below(one, strong) <= NEXT_LINES
        )
    elif signature.id in _SAYS_WHY:
        is_deeper = one.signature.id in _SAYS_WHY[signature.id] and not one.is_mild
    elif (
        signature.fault is FaultClass.GPU_HARDWARE
        and signature.family != KERNELS
        and not is_kernels(strong)
    ):
        is_deeper = one.signature.family == KERNELS and is_lost_gpu(one)
    elif signature.fault is FaultClass.NUMERICS:
        is_deeper = one.signature.id == REPLAYED_ELSEWHERE
    elif is_of_peers(strong):
        is_deeper = is_own_link(one) or _is_programs_own(one, strong)
        is_deeper = is_deeper or (is_lost_gpu(one) and not is_before(strong, one))
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
    is_own = one.signature.fault not in OF_OTHERS and one.signature.confidence >= PLAIN
    if one.file != strong.file and None in (one.time, strong.time):
        return is_own  # which came first is not told, and who lost a peer raises nothing of its own
    return is_own and one.origin.writer != strong.origin.writer and is_before(one, strong)


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
