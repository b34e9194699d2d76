"""One attempt cut into pieces of time, each with what it was spent on. Pure; all moments are whole
microseconds.

The trainer's own record of phases says it; where that is missing, it is unknown.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.goodput.history_values import AttemptHistory, StepMark, micro
from tr11ops.rundir.attempts import LaunchRecord
from trainer.contract.attempt import BAD_REASONS, STEPPING, EndMarker
from trainer.contract.record import Record

STALL_FACTOR = 10  # an iteration that takes so many usual ones stood still
STALL_FLOOR = 10_000_000  # and at least this long
SKEW = 1_000_000  # clocks of two ranks' nodes that differ by more are set right


class Bucket(StrEnum):
    """What a node-second was spent on; every one is in exactly one of these."""

    USEFUL = "useful"
    REDONE = "redone"
    SAVE = "save"
    EVALUATION = "evaluation"
    START_UP = "start-up"
    LOAD = "load"
    RESTART_GAP = "restart gap"
    HANG = "hang"
    NODE_LOST = "node lost"
    QUEUE = "queue"
    OPERATOR_PAUSE = "operator pause"
    UNKNOWN = "unknown"


# The phases of `trainer.contract.attempt`, and four that only the controller sees: before, teardown,
# between, unseen.
BUCKETS = {
    "before": Bucket.START_UP,
    "starting": Bucket.START_UP,
    "loading": Bucket.LOAD,
    "data-wait": Bucket.HANG,
    "saving": Bucket.SAVE,
    "evaluating": Bucket.EVALUATION,
    "ending": Bucket.RESTART_GAP,
    "ended": Bucket.RESTART_GAP,
    "teardown": Bucket.RESTART_GAP,
    "between": Bucket.RESTART_GAP,
    "paused": Bucket.OPERATOR_PAUSE,
}
ORDERLY = "operator"  # the controller's cause of an end that was no fault
NO_WORD = "no word"  # the cause of an end that no one recorded


class PhaseMark(NamedTuple):
    """From `at` on the attempt is in `phase`, with `iteration` done."""

    at: int
    phase: str
    iteration: int
    launch: int


class AttemptSegment(NamedTuple):
    """A stretch of one attempt, what it was spent on, and what caused the loss. Of training (`bucket`
    USEFUL) it is known which iterations it was spent on.

    These are `done` + 1 to `upto`; a piece that led to no whole iteration `is_partial`, and what it
    did is lost.
    """

    start: int
    end: int
    bucket: Bucket
    launch: int
    done: int = 0
    upto: int = 0
    is_partial: bool = False
    to_the_end: bool = False  # a hang that lasted until the launch ended
    cause: str = ""

    def judged(self, bucket: Bucket, cause: str = "") -> AttemptSegment:
        """Of a stretch of training, whether it was kept: which iterations it was does not matter
        then.
        """
        return AttemptSegment(self.start, self.end, bucket, self.launch, cause=cause)


class Start(Record):
    """Training began, or began again, at `iteration`: all that was done before beyond it is lost."""

    at: int
    iteration: int
    launch: int
    is_roll_back: bool


class EndCause(Record):
    """Why a launch ended, as one word; `is_fault` where no one meant it to."""

    cause: str
    is_fault: bool


def launch_end(attempt: AttemptHistory, launch: LaunchRecord) -> EndCause | None:
    """How a launch ended; None while it runs."""
    marker = attempt.marker
    if not isinstance(marker, EndMarker) or marker.launch != launch.launch:
        marker = None
    if marker is not None and marker.reason not in BAD_REASONS:
        return EndCause(marker.reason, False)
    if launch.cause:
        return EndCause(launch.cause, launch.cause != ORDERLY)
    if launch.end is None and attempt.is_running is not False and attempt.ended is None:
        return None
    if marker is not None:
        return EndCause(marker.reason, True)
    return end_without_word(attempt)


def end_without_word(attempt: AttemptHistory) -> EndCause:
    """The end of what left no word of its own: by its node, where others saw that it was lost."""
    return EndCause(Kind.NODE if attempt.lost_its_host else NO_WORD, True)


def launches_of(attempt: AttemptHistory) -> tuple[LaunchRecord, ...]:
    """The attempt's launches; one for all of it where the records are missing and something was
    trained.
    """
    if attempt.launches or not attempt.phases:
        return attempt.launches
    numbers = sorted({record.launch for record in attempt.phases})
    begins = {
        number: min(r.time for r in attempt.phases if r.launch == number) for number in numbers
    }
    return tuple(LaunchRecord(number, attempt.nodes, begins[number]) for number in numbers)


# ----------------------------------------------------------------------------- what happened when
def marks_of(attempt: AttemptHistory, steps: Sequence[StepMark], end: int) -> list[PhaseMark]:
    """The attempt's phases from its start to `end`, in order. A launch that trained and recorded
    none is unseen.
    """
    begin = min(micro(attempt.start), end)
    launches = launches_of(attempt)
    if not launches and not steps:
        marker = attempt.marker
        asked = isinstance(marker, EndMarker) and marker.reason in {"kill-switch", "pause"}
        return [PhaseMark(begin, "paused" if asked else "before", 0, 0)]
    if not launches:
        launches = (LaunchRecord(1, attempt.nodes, attempt.start, attempt.ended),)
    marks = [PhaseMark(begin, "before", 0, 0)]

    def add(mark: PhaseMark, latest: int) -> None:
        """Clocks jump and differ: no mark may come before the one before it, nor after what it is a
        part of.
        """
        marks.append(mark._replace(at=max(min(mark.at, latest), marks[-1].at)))

    for index, launch in enumerate(launches):
        number = launch.launch
        if index + 1 < len(launches):
            until = min(end, micro(launches[index + 1].start))
        else:
            until = end
        if launch.end is not None:
            closing = min(until, micro(launch.end))
        else:
            closing = until
        over = launch_end(attempt, launch)
        if over is not None and over.is_fault and launch.first_sign:
            failed = micro(launch.first_sign)
        else:
            failed = closing
        add(PhaseMark(micro(launch.start), "starting", 0, number), closing)
        found = [
            PhaseMark(micro(r.time), r.phase, r.iteration, number)
            for r in attempt.phases
            if r.launch == number
        ]
        begun = micro(launch.start)
        if not found and any(begun <= micro(step.time) <= closing for step in steps):
            found = [PhaseMark(begun, "unseen", 0, number)]
        for mark in found:
            add(mark, min(failed, closing))
        if failed < closing:
            add(PhaseMark(failed, "teardown", 0, number), closing)
        if closing < until or over is not None:
            add(PhaseMark(closing, "between", 0, number), until)
    return marks


# ----------------------------------------------------------------------------- training, iteration
# by iteration
def starts_of(marks: Sequence[PhaseMark]) -> Iterator[Start]:
    """Each time that training began at another iteration than it had come to."""
    launch = 0
    reached = -1
    for mark in marks:
        if mark.phase in STEPPING and (mark.launch != launch or mark.iteration < reached):
            yield Start(mark.at, mark.iteration, mark.launch, mark.launch == launch)
            launch = mark.launch
            reached = mark.iteration
        elif mark.iteration:
            reached = max(reached, mark.iteration)


def pieces_of(
    attempt: AttemptHistory,
    marks: Sequence[PhaseMark],
    steps: Sequence[StepMark],
    end: int,
    usual: int | None,
) -> Iterator[AttemptSegment]:
    """The attempt from its start to `end` without a gap. `usual`: an iteration's time, where the
    launch has few.
    """
    moments = _moments(marks, steps)
    runs = attempt.is_running is not False and attempt.ended is None
    for index, mark in enumerate(marks):
        until = marks[index + 1].at if index + 1 < len(marks) else end
        until = min(until, end)
        if until <= mark.at:
            continue
        if mark.phase not in STEPPING:
            yield AttemptSegment(
                mark.at, until, BUCKETS.get(mark.phase, Bucket.UNKNOWN), mark.launch
            )
            continue
        following = None
        if index + 1 < len(marks):
            following = marks[index + 1]
        still_runs = runs and following is None
        if mark.phase == "compiling" and (still_runs or _goes_on(following)):
            yield from _compiling(mark, until, following, usual)
        else:
            yield from _training(
                mark, until, following=following, moments=moments, usual=usual, runs=still_runs
            )


def _goes_on(following: PhaseMark | None) -> bool:
    """Whether the trainer itself came to the next phase: nothing broke, and it did not stand still
    to the end.
    """
    return following is not None and following.phase not in {
        "teardown",
        "between",
        "starting",
        "ended",
    }


def _compiling(
    mark: PhaseMark, until: int, following: PhaseMark | None, usual: int | None
) -> Iterator[AttemptSegment]:
    """Steps whose code was made in them: what they took beyond usual ones is start-up."""
    done = mark.iteration
    if following is None:
        upto = done
    else:
        upto = max(done, following.iteration)
    trained = min((usual or 0) * (upto - done), until - mark.at)
    if until - trained > mark.at:
        yield AttemptSegment(mark.at, until - trained, Bucket.START_UP, mark.launch)
    if trained:
        yield AttemptSegment(
            until - trained, until, bucket=Bucket.USEFUL, launch=mark.launch, done=done, upto=upto
        )


def _moments(marks: Sequence[PhaseMark], steps: Sequence[StepMark]) -> list[tuple[int, int]]:
    """(when, iteration) of the steps, by the clock of the phases: the last rank writes one, the
    first the other.
    """
    plain = [(micro(step.time), step.iteration) for step in steps]
    saves = {mark.iteration: mark.at for mark in marks if mark.phase in {"saving", "evaluating"}}
    offsets = [saves[iteration] - moment for moment, iteration in plain if iteration in saves]
    offset = 0
    if offsets:
        offset = int(median(offsets))
    if abs(offset) > SKEW:
        plain = [(moment + offset, iteration) for moment, iteration in plain]
    return sorted(plain)


def _training(
    mark: PhaseMark,
    until: int,
    following: PhaseMark | None,
    moments: Sequence[tuple[int, int]],
    usual: int | None,
    runs: bool,
) -> Iterator[AttemptSegment]:
    """One stretch of the phase `training`, cut at the steps in it; what stood still is a hang."""
    cuts = _cuts(mark, until, moments)
    rates = sorted(
        (b[0] - a[0]) // (b[1] - a[1]) for a, b in pairwise([(mark.at, mark.iteration), *cuts])
    )
    pace = rates[len(rates) // 2] if len(rates) >= 3 or (usual is None and rates) else usual
    at = mark.at
    done = mark.iteration
    for moment, iteration in cuts:
        yield from _steps(at, moment, done=done, upto=iteration, pace=pace, launch=mark.launch)
        at = moment
        done = iteration
    if at >= until:
        return
    in_order = _goes_on(following)
    # steps that were not logged
    if following is not None and in_order and following.iteration > done:
        yield from _steps(
            at, until, done=done, upto=following.iteration, pace=pace, launch=mark.launch
        )
    elif in_order:  # between a step's record and what follows it
        yield AttemptSegment(
            at, until, bucket=Bucket.USEFUL, launch=mark.launch, done=max(0, done - 1), upto=done
        )
    elif runs:
        yield from _steps(at, until, done=done, upto=done + 1, pace=pace, launch=mark.launch)
    else:
        working = until if pace is None else min(until, at + pace)
        yield AttemptSegment(
            at,
            working,
            bucket=Bucket.USEFUL,
            launch=mark.launch,
            done=done,
            upto=done + 1,
            is_partial=True,
        )
        if working < until:
            yield AttemptSegment(working, until, Bucket.HANG, mark.launch, to_the_end=True)


def _cuts(mark: PhaseMark, until: int, moments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The steps of this stretch that lead on, each later than the one before."""
    cuts: list[tuple[int, int]] = []
    at = mark.at
    done = mark.iteration
    first = bisect_right(moments, (at, sys.maxsize))
    last = bisect_right(moments, (until, sys.maxsize))
    for moment, iteration in moments[first:last]:
        if moment > at and iteration > done:
            cuts.append((moment, iteration))
            at = moment
            done = iteration
    return cuts


def _steps(
    start: int, end: int, done: int, upto: int, pace: int | None, launch: int
) -> Iterator[AttemptSegment]:
    expected = None
    if pace is not None:
        expected = pace * (upto - done)
    if expected is not None and end - start > max(STALL_FACTOR * expected, expected + STALL_FLOOR):
        yield AttemptSegment(start, end - expected, Bucket.HANG, launch)
        start = end - expected
    yield AttemptSegment(start, end, bucket=Bucket.USEFUL, launch=launch, done=done, upto=upto)
