"""Which ranks do not stand where the others stand: the first thing to know of a training that
hangs. Pure.
"""

from __future__ import annotations

from collections import Counter

from tr11ops.base.units import counted, duration, first_few
from trainer.contract.phases import Heartbeat
from trainer.contract.record import Record

# per iteration; heartbeats are a second apart at least, so ranks may then show different ones
QUICK_SECONDS = 2.0
# ranks that began the same last step have heartbeats no further apart than that
APART_SECONDS = 1.0


class RankProgress(Record):
    """All ranks' last heartbeats, and those of the odd ones out: fewer than half, behind or in
    another phase.
    """

    beats: tuple[Heartbeat, ...]
    odd: tuple[Heartbeat, ...]

    @property
    def rest(self) -> tuple[Heartbeat, ...]:
        odd = frozenset(self.odd)
        return tuple(beat for beat in self.beats if beat not in odd)


def standing(beats: tuple[Heartbeat, ...], pace: float | None) -> RankProgress:
    """Who is odd among ranks that should be together. `pace`: seconds per iteration, None where it
    is not known.
    """
    if not beats:
        return RankProgress((), ())
    top, newest = max(beat.iteration for beat in beats), max(beat.time for beat in beats)
    quick = pace is not None and pace < QUICK_SECONDS
    behind = tuple(
        beat
        for beat in beats
        if beat.iteration < top and (not quick or newest - beat.time > APART_SECONDS)
    )
    if not behind:
        usual = Counter(beat.phase for beat in beats).most_common(1)[0][0]
        behind = tuple(beat for beat in beats if beat.phase != usual)
    elif 2 * len(behind) >= len(beats):  # then a few are ahead
        behind = tuple(beat for beat in beats if beat not in behind)
    return RankProgress(beats, behind if 2 * len(behind) < len(beats) else ())


def nodes_of(beats: tuple[Heartbeat, ...]) -> str:
    """The nodes of these ranks, by name, shortened: `n07, n11`."""
    return first_few(sorted({beat.host for beat in beats}))


def describe(found: RankProgress, now: float, most: int = 3) -> tuple[str, ...]:
    """Evidence lines: first who is odd, or that no one is; then the ranks that stood still first."""
    shown = found.odd or found.beats
    if found.odd:
        count, rest = len(found.odd), found.rest
        if count == 1:
            who = f"rank {found.odd[0].rank} is"
        else:
            who = f"{count} of {counted(len(found.beats), 'rank')} are"
        first = f"{who} the odd one{'s' * (count > 1)} out, on {nodes_of(found.odd)}; the other {len(rest)}: "
        lines = [first + _place(rest)]
    elif len(found.beats) > 1:
        every = f"all {counted(len(found.beats), 'rank')}"
        lines = [f"{every} stand together ({_place(found.beats)}): their heartbeats name no node"]
    else:
        lines = []
    oldest = sorted(shown, key=lambda beat: (beat.iteration, beat.time))[:most]
    return (*lines, *(_line(beat, now) for beat in oldest))


def _place(beats: tuple[Heartbeat, ...]) -> str:
    phases = " or ".join(phase for phase, _ in Counter(beat.phase for beat in beats).most_common(2))
    low, high = min(beat.iteration for beat in beats), max(beat.iteration for beat in beats)
    return f"{phases}, iteration {low}" + (f" to {high}" if high > low else "")


def _line(beat: Heartbeat, now: float) -> str:
    age = duration(max(0.0, now - beat.time))
    return f"rank {beat.rank} on {beat.host}: {beat.phase}, iteration {beat.iteration}, {age} ago"
