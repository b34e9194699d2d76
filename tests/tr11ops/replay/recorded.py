"""A run on a real twin as the replay is given it: its nodes, its faults and their moments, its times, when its
watchdog looked and a person came; and what tr11 decided and wrote to people there, in order.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from tr11ops.alerts.state import Message
from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.production import Production
from tr11ops.replay.run import SimulatedRun
from tr11ops.replay.traces import Fault, FaultSign, Window
from tr11ops.replay.watching import Watchdog
from tr11ops.replay.world import BEGIN, World
from tr11ops.rundir.exclusions import EXCLUDED, INCLUDED
from tr11ops.rundir.journal import JournalEntry, read_journal
from trainer.contract.record import Record

# how a fault of the twin shows itself to a training
SHOWN = {
    "worker-crash": FaultSign.CRASH,
    "black-hole": FaultSign.CRASH,
    "node-dead": FaultSign.LOSS,
    "half-dead": FaultSign.LOSS,
    "drain": FaultSign.DEGRADED,
    "bad-sample": FaultSign.DATA,
}
# what differs between a mail of a twin and one of a replay, and what stands in its place: where the run lies
# and who typed its commands, when things were, numbers of jobs, ranks and steps
DIFFERS = (
    (r"^ +cd \S+\n", ""), (r" +--run\s+\S+", ""), (r"\\$", ""), (r"\s+", " "), (r"(?<= )/\S+", "FOLDER"),
    (r"(?<=host )\w+(, in FOLDER)?", "HOST"), (r"^(\[\w+\]) \S+:", r"\1 RUN:"), (r"(?<=Run: )\S+,", "RUN,"),
    (r"\b[0-9a-f]{12}-[0-9a-f]+", "ALERT"), (r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "TIME"),
    (r"\b\d+ (d|h|min|s)( \d+ (h|min|s))?\b", "DURATION"), (r"\b\d+_(\d+|\[[^]]+\])", "JOB"),
    (r"(?<= is )(idle|allocated)(?=, and)", "STATE"), (r"(?<=JobHeld)(Admin|User)", ""), (r"(?<!\w)\d[\d,.]*\d|(?<!\w)\d", "N"),
)  # fmt: skip
LAUNCH_FAILED = "launch-failed"
HELD = "array-held"
INSTANT_SECONDS = 0.5
AFTERMATH_SECONDS = 60.0
NEVER = 1e9


class Course(Record):
    """What tr11 decided by itself, one line each; and the mails that it wrote: what each says of what,
    its subject, and its text, without what differs from one run to another.
    """

    decisions: tuple[str, ...]
    mails: tuple[str, ...]

    @classmethod
    def of(cls, entries: Iterable[JournalEntry], messages: Iterable[Message]) -> Course:
        """Of a journal, and of the messages in their order."""
        return cls(tuple(decisions(entries)), tuple(told_by(one) for one in messages))


class Recording(Record):
    """A run on a twin. Moments are in seconds since its first launch began: `looks` are those of the
    watchdog, `released` those at which a person let go what was held. `past_save`: steps from the last
    checkpoint to the data of which a worker died; None: not told, as it comes.
    """

    nodes: tuple[str, ...]
    train: int
    held: int
    step: float
    start_up: float
    interval: int
    lost_after: float
    changes: tuple[str, ...]
    faults: tuple[Fault, ...]
    looks: tuple[float, ...]
    released: tuple[float, ...]
    course: Course
    past_save: int | None = None

    def replayed(self, folder: Path) -> Course:
        """What the replay makes of the same faults, looks and releases at the same moments. `folder` is
        empty.
        """
        end = max(self.looks) + AFTERMATH_SECONDS
        spares = len(self.nodes) - self.train
        # the twin's site takes no node out of service by itself
        times = Parameters(
            step=self.step, save=self.step, interval=self.interval, start_up=self.start_up, load=0.0,
            lost_after=self.lost_after, ends_within=1.0, drained_after=NEVER, evaluation_interval=int(NEVER),
        )  # fmt: skip
        window = Window(self.nodes, end, self.faults, "recorded on a twin")
        world = RecordedWorld(window, Layout(self.train, spares, self.held), times)
        world.past_save = self.past_save
        tr11 = Production(world, folder, self.changes)
        tr11.watchdog = watchdog = RecordedWatchdog(tr11.run, self.looks, self.released)
        tr11.replay()
        entries = read_journal(tr11.run.directory.journal).entries
        return Course.of(entries, watchdog.messages)


class RecordedWorld(World):
    """Comes to the data as many steps after a checkpoint as the recorded run did: what is decided
    depends on it, and a step is not as long as another on a real machine.
    """

    past_save: int | None = None

    def _comes_to_data(self, fault: Fault, start: float, save_seconds: float | None) -> float:
        if self.past_save is None or fault.kind is not FaultSign.DATA or fault in self._spoilt:
            return super()._comes_to_data(fault, start, save_seconds)
        times = self.parameters
        trains = start + times.start_up + times.load
        seconds = max(0.0, fault.start - trains)
        while self.course(self.iteration, seconds).done % times.interval != self.past_save:
            seconds += times.step / 4
        return trains + seconds + times.step / 2


class RecordedWatchdog(Watchdog):
    """Looks when that of the recorded run did, and lets people come when they came."""

    def __init__(
        self, run: SimulatedRun, looks: Iterable[float], released: Iterable[float]
    ) -> None:
        super().__init__(run)
        self._looks = deque(looks)
        self._releases = deque(released)

    @property
    def next_wake(self) -> float:
        self._next_look = _next(self._looks)
        self._person_comes = _next(self._releases)
        return super().next_wake

    def wake(self) -> None:
        if self.next_wake == self._person_comes:
            self._releases.popleft()
        else:
            self._looks.popleft()
        super().wake()


def _next(moments: deque[float]) -> float:
    return BEGIN + moments[0] if moments else math.inf


def told_by(message: Message) -> str:
    """What a mail says of which detector's finding, such as `opened held`; its subject; its text."""
    kind = f"{', '.join(message.kinds or (message.kind,))} {message.detector}".rstrip()
    return "\n".join((kind, _alike(message.subject), _alike(message.body)))


def _decided(words: str) -> str:
    """Without the numbers of steps and ranks, which are others in a replay."""
    return re.sub(r"\b(step|iteration|rank) \d+", r"\1 N", words)


def _alike(words: str) -> str:
    for pattern, instead in DIFFERS:
        words = re.sub(pattern, instead, words, flags=re.MULTILINE)
    return words


def decisions(entries: Iterable[JournalEntry]) -> Iterator[str]:
    """Each launch that ended, its verdict and what followed; each node that was left out; each hold;
    none of people.
    """
    for entry in sorted(entries, key=_moment):
        if entry.who != "tr11":
            continue
        data = entry.data
        if entry.kind == LAUNCH_FAILED:
            yield (
                f"{data['cause']}: blamed {list(data['blamed'])}, suspected {list(data['suspects'])}; {_decided(data['decision'])}"
            )
        elif entry.kind in (EXCLUDED, INCLUDED):
            yield f"{entry.kind} {data['node']}"
        elif entry.kind == HELD:
            yield f"{HELD}: {_decided(entry.why)}"


def _moment(entry: JournalEntry) -> tuple[float, bool]:
    """Of what is written at one moment of the simulated clock, by two threads, the verdict comes first."""
    return entry.time, entry.kind != LAUNCH_FAILED


def usual(seconds: Iterable[float]) -> float:
    """The median, of three digits: the file is read by people."""
    return round(statistics.median(seconds), 3)
