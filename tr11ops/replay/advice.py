"""What other settings would have given a run: its own record is replayed with more and fewer spares,
other days of exclusion and other save intervals, by the engine of `tr11 replay`.

First its settings of today, which must come near what happened (`TOO_FAR`). Each other one is then
replayed on the record. What the best of a kind gains must also hold in each of `DRAWS` resampled
records before it is recommended.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeAlias

from msgspec.structs import replace

from tr11ops.base.observed import Observed, Unknown
from tr11ops.base.units import counted, duration
from tr11ops.goodput.advise import Advice, CardSettings
from tr11ops.replay.own_record import RecordedRun
from tr11ops.replay.parameters import HOUR, Layout
from tr11ops.replay.production import production_score
from tr11ops.replay.traces import DAY, Window
from tr11ops.replay.world import Score
from tr11ops.runcard.save_interval import best_interval
from trainer.contract.record import Record

TOO_FAR = 3.0  # points of training time between a replay and what happened
SMALL_GAIN = 0.2  # percent: what is gained by less is not worth a change
DRAWS = 4
LONG = 7 * DAY  # a shorter record needs no second process
MOST_PROCESSES = 4
MOST_REPLAYS = 2 + 8 + 4 * DRAWS
SPARES = "spares"
EXCLUSION = "exclusion"
INTERVAL = "save interval"

Game: TypeAlias = tuple[RecordedRun, Window]
Play: TypeAlias = Callable[[Sequence[Game]], list[Score]]


class Gain(Record):
    """What a setting would have given against today's: percent of the time that trained what was
    kept, the node-hours that were held more, and those that the same training would have taken less.
    """

    percent: float
    held: float
    saved: float

    @classmethod
    def between(cls, run: RecordedRun, before: Score, after: Score) -> Gain:
        """Of two replays of a run."""
        held_before, held_after = (held_hours(run, score) for score in (before, after))
        same = 0.0
        if before.effective:
            same = held_before * after.effective / before.effective
        percent = after.percent - before.percent
        return cls(percent, held_after - held_before, saved=same - held_after)


def held_hours(run: RecordedRun, score: Score) -> float:
    """Node-hours held in a replay of a run."""
    return score.wasted + score.effective * run.seconds / HOUR * run.layout.nodes


class Setting(Record):
    """Another setting: its value in words, the card's line for it, the run with it, and what it
    gains on the record and on each resampled one, as far as it was tried.
    """

    topic: str
    value: str
    change: str
    run: RecordedRun
    gain: Gain = Gain(0.0, 0.0, 0.0)
    resampled: tuple[Gain, ...] = ()

    def __str__(self) -> str:
        gain = self.gain
        text = (
            f"{self.value}: {gain.percent:+.2f} % of the time, {gain.saved:+,.0f} node-hours saved"
        )
        if self.topic == SPARES:
            text += f" ({gain.held:+,.0f} held)"
        if self.resampled:
            shares = [one.percent for one in self.resampled]
            saved = [one.saved for one in self.resampled]
            text += (
                f"; in {DRAWS} resampled records {min(shares):+.2f} to {max(shares):+.2f} %, "
                f"{min(saved):+,.0f} to {max(saved):+,.0f} saved"
            )
        return text


class ReplayCheck(Record):
    """How near the replay of a record comes to it. `recorded` and `replayed`: percent of the time
    that trained what was kept; `left_out_hours`: in which the run waited for a person; `node_hours`:
    held in the replay.
    """

    recorded: float
    replayed: float
    days: float
    faults: int
    left_out_hours: float
    node_hours: float

    @property
    def difference(self) -> float:
        """Points by which the replay did better than the run."""
        return self.replayed - self.recorded

    @property
    def is_near(self) -> bool:
        """Whether other replays may be believed."""
        return abs(self.difference) <= TOO_FAR

    def __str__(self) -> str:
        past = f"{counted(self.faults, 'fault')} in {duration(86400 * self.days)}"
        text = (
            f"{past}; {self.recorded:.2f} % of the time trained what was kept, "
            f"{self.replayed:.2f} % when replayed"
        )
        if self.left_out_hours >= 1:
            text += f", both without {self.left_out_hours:,.0f} h of waiting for a person"
        return text


def replay_advice(
    run: Observed[RecordedRun], situation: CardSettings, done: Callable[[str], None]
) -> tuple[ReplayCheck | None, tuple[Advice, ...]]:
    """Replay a record with the settings of today and with others: advice on each kind of setting, and
    the check that it rests on; None where nothing could be replayed. `done` is called after each
    replay; there are at most `MOST_REPLAYS`.
    """
    if isinstance(run, Unknown):
        return None, tuple(_untold(situation, run.why))
    mtbf = situation.given_mtbf
    with _player(run, done) as play:
        [score] = play([(run, run.as_recorded())])
        check = _check(run, score)
        if not check.is_near:
            why = (
                f"replayed, the record is {abs(check.difference):.1f} points off what happened, and "
                f"{TOO_FAR:g} are allowed: something cost time here that the replay does not know"
            )
            return check, tuple(_untold(situation, why))
        if mtbf is not None:
            [score] = play([(run, run.resampled(0, mtbf))])
        tried = _on_record(run, score, play, mtbf)
        likely = [_best(tried, topic, check) for topic in (INTERVAL, SPARES, EXCLUSION)]
        sure = _resampled(run, [one for one in likely if one is not None], play, mtbf)
    told = (
        _advice(topic, tried, sure, check=check, situation=situation)
        for topic in (INTERVAL, SPARES, EXCLUSION)
    )
    return check, tuple(told)


# ----------------------------------------------------------------------------- replays
@contextmanager
def _player(run: RecordedRun, done: Callable[[str], None]) -> Iterator[Play]:
    """Plays replays, several at a time where the record is long."""
    if run.seconds < LONG:
        yield _noting(map, done)
        return
    count = min(MOST_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        yield _noting(pool.map, done)


def _noting(
    apply: Callable[[Callable[[Game], Score], Sequence[Game]], Iterable[Score]],
    done: Callable[[str], None],
) -> Play:
    def play(games: Sequence[Game]) -> list[Score]:
        scores = []
        for score in apply(_score, games):
            scores.append(score)
            done("")
        return scores

    return play


def _score(game: Game) -> Score:
    run, window = game
    return production_score(
        window, run.layout, parameters=run.parameters, overrides=run.card_overrides
    )


def _check(run: RecordedRun, score: Score) -> ReplayCheck:
    return ReplayCheck(
        100 * run.trained,
        score.percent,
        days=run.seconds / DAY,
        faults=len(run.faults),
        left_out_hours=run.left_out / HOUR,
        node_hours=held_hours(run, score),
    )


def _on_record(
    run: RecordedRun, before: Score, play: Play, mtbf: float | None
) -> tuple[Setting, ...]:
    """Each other setting with its gain on the record; where a rate is given, on one of that rate."""
    settings = tuple(settings_of(run, mtbf))
    games = [
        (one.run, one.run.as_recorded() if mtbf is None else one.run.resampled(0, mtbf))
        for one in settings
    ]
    return tuple(
        replace(one, gain=Gain.between(run, before, score))
        for one, score in zip(settings, play(games), strict=True)
    )


def _resampled(
    run: RecordedRun, settings: Sequence[Setting], play: Play, mtbf: float | None
) -> tuple[Setting, ...]:
    """The settings with their gains on resampled records; each is compared on the same ones."""
    if not settings:
        return ()
    seeds = range(1, DRAWS + 1)
    games = [
        (each, each.resampled(seed, mtbf)) for each in (run, *_runs(settings)) for seed in seeds
    ]
    scores = play(games)
    before = scores[:DRAWS]
    found = []
    for place, setting in enumerate(settings, 1):
        after = scores[place * DRAWS : (place + 1) * DRAWS]
        gains = (Gain.between(run, *pair) for pair in zip(before, after, strict=True))
        found.append(replace(setting, resampled=tuple(gains)))
    return tuple(found)


def _runs(settings: Iterable[Setting]) -> Iterator[RecordedRun]:
    for setting in settings:
        yield setting.run


# ----------------------------------------------------------------------------- what is tried
def settings_of(run: RecordedRun, mtbf: float | None = None) -> Iterator[Setting]:
    """The other settings that are tried: one spare less, one and two more; half and twice the days;
    half and twice the save interval, and Young's.
    """
    layout = run.layout
    times = run.parameters
    for held in sorted({layout.held - 1, layout.held + 1, layout.held + 2} - {-1}):
        spares = max(len(run.nodes) - layout.nodes, held)
        other = replace(run, layout=Layout(layout.nodes, spares, held))
        yield Setting(SPARES, f"{held}", f"slurm.spare_nodes = {held}", other)
    for days in sorted({run.days / 2, 2 * run.days}):
        change = f"resilience.exclusion_days = {days:g}"
        yield Setting(EXCLUSION, f"{days:g} d", change, replace(run, days=days))
    between = mtbf or run.seconds / len(run.faults)
    best = min(best_interval(between, times.save) - times.save, times.time_limit)
    steps = {
        max(1, each) for each in (times.interval // 2, 2 * times.interval, round(best / times.step))
    }
    for interval in sorted(steps - {times.interval}):
        yield Setting(
            INTERVAL,
            f"{interval} iterations ({duration(interval * times.step)})",
            change=f"checkpoint.interval = {interval}",
            run=replace(run, parameters=replace(times, interval=interval)),
        )


# ----------------------------------------------------------------------------- what is concluded
def is_gain(gain: Gain, node_hours: float) -> bool:
    """Whether it saves node-hours for the same training, which gets no slower by it."""
    return gain.saved > SMALL_GAIN / 100 * node_hours and gain.percent >= 0


def _best(tried: Iterable[Setting], topic: str, check: ReplayCheck) -> Setting | None:
    own = [one for one in tried if one.topic == topic and is_gain(one.gain, check.node_hours)]
    return max(own, key=_saved, default=None)


def _saved(setting: Setting) -> float:
    return setting.gain.saved


def _advice(
    topic: str,
    tried: Sequence[Setting],
    sure: Sequence[Setting],
    *,
    check: ReplayCheck,
    situation: CardSettings,
) -> Advice:
    own = [one for one in tried if one.topic == topic]
    best = next((one for one in sure if one.topic == topic), None)
    lines = [str(best if best is not None and one.value == best.value else one) for one in own]
    now = _today(situation, topic)
    if best is None:
        why = f"none trains as fast and saves more than {SMALL_GAIN:g} % of the node-hours"
        return Advice(topic, now, now, (*lines, why))
    if not all(is_gain(gain, check.node_hours) for gain in best.resampled):
        why = f"what {best.value} gains is within the noise: not each resampled record has it"
        return Advice(topic, now, now, (*lines, why))
    shares = [one.percent for one in best.resampled]
    return Advice(
        topic,
        now,
        better=best.value,
        why=tuple(lines),
        change=best.change,
        saved_node_hours=best.gain.saved,
        numbers={
            "gained_percent": best.gain.percent,
            "gained_percent_low": min(shares),
            "gained_percent_high": max(shares),
            "held_node_hours": best.gain.held,
        },
    )


def _today(situation: CardSettings, topic: str) -> str:
    """What the card says."""
    if topic == SPARES:
        return f"{situation.spares}"
    if topic == EXCLUSION:
        return f"{situation.exclusion_days:g} d"
    if situation.save_every is None:
        return "none"
    most = " at most" if situation.adapts else ""
    return f"{situation.save_every} iterations{most}"


def _untold(situation: CardSettings, why: str) -> Iterator[Advice]:
    for topic in (INTERVAL, SPARES, EXCLUSION):
        yield Advice(topic, _today(situation, topic), "cannot tell", (why,))
