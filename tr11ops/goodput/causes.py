"""What ended each launch, and so what caused the losses around it; which training was lost to it.
Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.goodput.history_values import AttemptHistory, micro
from tr11ops.goodput.timeline import (
    AttemptSegment,
    Bucket,
    EndCause,
    Start,
    end_without_word,
    launch_end,
    launches_of,
)
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord
from trainer.contract.attempt import BAD_REASONS, EndMarker
from trainer.contract.record import Record

# who gave a sign within these lives, where the scheduler does not say otherwise
FRESH_SECONDS = 120.0
FIRST_START = "first start"
ROLL_BACK = "roll-back"
STALL = "stall"
SUPERSEDED = "superseded"
OPERATOR = "operator"
NODE = "node"
UNSEEN = "unknown"
FAR = 1 << 62


class Settled(Record):
    """An attempt with its end: from `unseen` on nothing is known of it, though it may have held its
    nodes.
    """

    attempt: AttemptHistory
    begin: int
    end: int
    unseen: int


def settle(attempts: Sequence[AttemptHistory], now: float) -> list[Settled]:
    """Give every attempt an end. Two attempts cannot hold one node at once: the earlier one's end
    gives way.
    """
    settled: list[Settled] = []
    for index, attempt in enumerate(attempts):
        begin = min(micro(attempt.start), micro(now))
        following = attempts[index + 1 : index + 2]
        unseen = end = micro(now)
        shown = attempt
        if attempt.ended is not None:
            unseen = end = min(end, micro(attempt.ended))
        elif not (
            attempt.is_running
            or (attempt.is_running is None and now - attempt.last_sign <= FRESH_SECONDS)
        ):
            shown = replace(attempt, is_running=False)
            unseen = min(end, micro(attempt.last_sign))
            limits = [micro(other.start) for other in following]
            if attempt.limit is None or attempt.kind == "foreground":
                limits.append(unseen)
            else:
                limits.append(micro(attempt.start + attempt.limit))
            end = max(unseen, min(end, *limits))
        own = set(attempt.nodes)
        for other in islice(attempts, index + 1, None):
            if micro(other.start) >= end:
                break
            if not own.isdisjoint(other.nodes):
                end = micro(other.start)
        end = max(begin, end)
        settled.append(Settled(shown, begin, end, max(begin, min(unseen, end))))
    return settled


class Interruption(Record):
    """An end that no one meant, in seconds since the epoch. `cause`: the class of fault. `recovered`:
    when the training went on; None: not yet. `why`: what the records of its launch or attempt say of
    it, with the nodes that they blame or suspect; "" where there are none.
    """

    time: float
    cause: str
    job_id: str
    launch: int
    recovered: float | None
    why: str = ""

    @property
    def words(self) -> str:
        """What is known of it, and its class."""
        if self.why and self.cause not in self.why:
            return f"{self.why} ({self.cause})"
        return self.why or self.cause


class LaunchChain:
    """The launches of all attempts in their order: what ended each, and so what caused the next
    one's start.
    """

    def __init__(self, settled: Sequence[Settled], starts: Sequence[Sequence[Start]]) -> None:
        self.settled = settled
        self._starts = starts
        self._ends: list[dict[int, EndCause | None]] = []
        self._before: list[dict[int, str]] = []
        self._last: list[str] = []
        cause = FIRST_START
        for one in settled:
            ends: dict[int, EndCause | None] = {}
            before = {0: cause}
            for launch in launches_of(one.attempt):
                before[launch.launch] = cause
                ends[launch.launch] = end = launch_end(one.attempt, launch)
                cause = end.cause if end is not None else cause
            if not ends:
                word = _end_without_launch(one.attempt)
                cause = word.cause if word is not None else cause
            self._ends.append(ends)
            self._before.append(before)
            self._last.append(cause)

    def last_cause(self, index: int) -> str:
        """What ended that attempt; FIRST_START before the first."""
        if index >= 0:
            return self._last[index]
        return FIRST_START

    def starts(self) -> list[tuple[int, int, str]]:
        """(when, iteration, cause) of each time that training began, in the order of time."""
        return sorted(
            (
                start.at,
                start.iteration,
                ROLL_BACK if start.is_roll_back else self._before[index].get(start.launch, ""),
            )
            for index, own in enumerate(self._starts)
            for start in own
        )

    def takeovers(self) -> list[int]:
        """For each attempt, when a later one began to train: what it did from then on is lost."""
        found = [FAR]
        earliest = FAR
        for own in reversed(self._starts[1:]):
            earliest = min(earliest, own[0].at if own else FAR)
            found.append(earliest)
        return found[::-1]

    def named(self, index: int, pieces: Sequence[AttemptSegment]) -> list[AttemptSegment]:
        """The pieces, each with the cause of what it lost."""
        ends = self._ends[index]
        before = self._before[index]
        first = {start.launch: start.at for start in reversed(self._starts[index])}
        found = []
        for piece in pieces:
            own = ends.get(piece.launch)
            cause = piece.cause
            if piece.bucket is Bucket.LOAD and piece.start >= first.get(piece.launch, FAR):
                cause = ROLL_BACK
            elif piece.bucket in {Bucket.START_UP, Bucket.LOAD}:
                cause = before.get(piece.launch, "")
            elif piece.bucket is Bucket.RESTART_GAP:
                if own is not None:
                    cause = own.cause
                else:
                    cause = before.get(piece.launch, "")
            elif piece.bucket is Bucket.HANG:
                # what a person ended a hang by is its cure
                if own is not None and own.is_fault and piece.to_the_end:
                    cause = own.cause
                else:
                    cause = STALL
            elif piece.bucket is Bucket.OPERATOR_PAUSE:
                cause = OPERATOR
            elif piece.bucket is Bucket.UNKNOWN:
                cause = UNSEEN
            found.append(piece._replace(cause=cause))
        return found

    def faults(self) -> Iterator[Interruption]:
        """Every end that no one meant, in the order of time; not those of a card that could not
        work.
        """
        trained = sorted(start.at for own in self._starts for start in own)
        for one, ends in zip(self.settled, self._ends, strict=True):
            attempt = one.attempt
            found = [
                (
                    launch.first_sign or launch.end,
                    ends[launch.launch],
                    launch.launch,
                    _why_it_ended(attempt, launch),
                )
                for launch in launches_of(attempt)
            ]
            if not found:
                found = [(None, _end_without_launch(attempt), 0, _why_it_ended(attempt, None))]
            for when, end, number, why in found:
                if end is None or not end.is_fault or end.cause in {Kind.CONFIGURATION, "refused"}:
                    continue
                if when is not None:
                    moment = when
                else:
                    moment = one.unseen / 1e6
                place = bisect_right(trained, micro(moment))
                again = None
                if place < len(trained):
                    again = trained[place] / 1e6
                yield Interruption(
                    moment,
                    end.cause,
                    job_id=attempt.job_id,
                    launch=number,
                    recovered=again,
                    why=why,
                )


def _why_it_ended(attempt: AttemptHistory, launch: LaunchRecord | None) -> str:
    """The records' word on an end, and the nodes to which they point: the launch's own, else, of the
    last one or of an attempt without any (None), the trainer's and the batch script's; "" for none.
    """
    words = ""
    nodes = tuple[str, ...]()
    if launch is not None:
        words = launch.summary
        nodes = launch.blamed or launch.suspects
    is_last = launch is None or launch == launches_of(attempt)[-1]
    if not words and is_last and isinstance(attempt.verdict, AttemptVerdict):
        words = attempt.verdict.message
        nodes = attempt.verdict.blamed
    if not words and is_last and isinstance(attempt.marker, EndMarker):
        words = attempt.marker.message
    if not words:
        return ""
    return ", ".join((words, *(node for node in nodes if node not in words)))


def _end_without_launch(attempt: AttemptHistory) -> EndCause | None:
    """How an attempt ended that never started a worker; None while it lives."""
    if isinstance(attempt.marker, EndMarker):
        return EndCause(attempt.marker.reason, attempt.marker.reason in BAD_REASONS)
    if isinstance(attempt.verdict, AttemptVerdict):
        reason = attempt.verdict.reason
        return EndCause(attempt.verdict.cause or reason, reason in {"error", "unexplained"})
    if attempt.ended is None and attempt.is_running is not False:
        return None
    return end_without_word(attempt)


def judged(
    pieces: Sequence[Sequence[AttemptSegment]], chain: LaunchChain, kept: int
) -> list[list[AttemptSegment]]:
    """Tell training that was kept from training that was lost: backwards, for only what came later
    knows it.
    """
    order = sorted(
        (
            (piece.start, index, place)
            for index, own in enumerate(pieces)
            for place, piece in enumerate(own)
        ),
        reverse=True,
    )
    starts = chain.starts()
    low = kept
    cause = chain.last_cause(len(pieces) - 1)
    told: list[list[AttemptSegment]] = [[] for _ in pieces]
    takeovers = chain.takeovers()
    for start, index, place in order:
        while starts and starts[-1][0] > start:
            _, iteration, why = starts.pop()
            if iteration < low:
                low = iteration
                cause = why
        piece = pieces[index][place]
        if piece.bucket is not Bucket.USEFUL:
            told[index].append(piece)
        elif start >= takeovers[index]:
            told[index].append(piece.judged(Bucket.REDONE, SUPERSEDED))
        else:
            told[index] += reversed(list(_split(piece, low, cause)))
    return [_merged(reversed(own)) for own in told]


def _split(piece: AttemptSegment, low: int, cause: str) -> Iterator[AttemptSegment]:
    """A piece of training, divided between what was kept (up to iteration `low`) and what was lost."""
    useful = piece.judged(Bucket.USEFUL)
    lost = piece.judged(Bucket.REDONE, cause)
    if piece.is_partial:
        yield lost
        return
    count = piece.upto - piece.done
    if count <= 0 or piece.upto <= low:
        kept = count
    else:
        kept = max(0, low - piece.done)
    if kept == count:
        yield useful
        return
    middle = piece.start + (piece.end - piece.start) * kept // count
    if kept:
        yield useful._replace(end=middle)
    yield lost._replace(start=middle)


def _merged(pieces: Iterable[AttemptSegment]) -> list[AttemptSegment]:
    merged: list[AttemptSegment] = []
    for piece in pieces:
        if piece.start == piece.end:
            continue
        if merged and merged[-1][2:] == piece[2:] and merged[-1].end == piece.start:
            merged[-1] = merged[-1]._replace(end=piece.end)
        else:
            merged.append(piece)
    return merged
