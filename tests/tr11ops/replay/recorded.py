"""A run on a real twin as the replay is given it: its nodes, its faults and their moments, its times; and what
tr11 decided there, in order.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from tr11ops.replay.parameters import Layout, Parameters
from tr11ops.replay.production import Production
from tr11ops.replay.traces import Fault, FaultSign, Window
from tr11ops.replay.world import World
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
}
LAUNCH_FAILED = "launch-failed"
HELD = "array-held"
INSTANT_SECONDS = 0.5
AFTERMATH_SECONDS = 60.0
NEVER = 1e9


class Recording(Record):
    """A run on a twin. Moments are in seconds since its first launch began. `decisions`: what tr11
    decided by itself, one line each.
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
    decisions: tuple[str, ...]

    def replayed(self, folder: Path) -> tuple[str, ...]:
        """What the replay decides of the same faults at the same moments. `folder` is empty."""
        end = max(fault.start for fault in self.faults) + AFTERMATH_SECONDS
        spares = len(self.nodes) - self.train
        # the twin's site takes no node out of service by itself
        times = Parameters(
            step=self.step, save=self.step, interval=self.interval, start_up=self.start_up, load=0.0,
            lost_after=self.lost_after, ends_within=1.0, drained_after=NEVER, evaluation_interval=int(NEVER),
        )  # fmt: skip
        window = Window(self.nodes, end, self.faults, "recorded on a twin")
        tr11 = Production(
            World(window, Layout(self.train, spares, self.held), times), folder, self.changes
        )
        tr11.replay()
        return tuple(decisions(read_journal(tr11.run.directory.journal).entries))


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
                f"{data['cause']}: blamed {list(data['blamed'])}, suspected {list(data['suspects'])}; {data['decision']}"
            )
        elif entry.kind in (EXCLUDED, INCLUDED):
            yield f"{entry.kind} {data['node']}"
        elif entry.kind == HELD:
            yield HELD


def _moment(entry: JournalEntry) -> tuple[float, bool]:
    """Of what is written at one moment of the simulated clock, by two threads, the verdict comes first."""
    return entry.time, entry.kind != LAUNCH_FAILED


def usual(seconds: Iterable[float]) -> float:
    """The median, of three digits: the file is read by people."""
    return round(statistics.median(seconds), 3)
