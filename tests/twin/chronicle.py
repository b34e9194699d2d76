"""Plays the history of a training on a twin, with the watchdog at work beside it, and tells of each event
what came of it, from what the run itself has written down.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.plugins.faulty_hub import FaultyHub
from tests.twin.fault_judge import MORE_STEPS, FaultJudge
from tests.twin.fault_scenario import (
    CHECKPOINT_CUT,
    NOT_PLAYED,
    OF_SITE,
    SHARED_MEMORY_FULL,
    TYPED,
    FaultEvent,
    FaultScenario,
)
from tests.twin.operation import Operation
from tests.twin.runbook_mails import MAILS
from tests.twin.site_incidents import Copies, Site, site_beside
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.rundir.journal import read_journal
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.stand_in.checkpoint import rank_file
from tr11ops.twin.twin import Twin
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

LOOK_SECONDS = 12.0  # between two passes of the watchdog
LOOKS_PER_MIRROR, LOOKS_PER_COPY = 4, 7  # the logs go to the hub, checkpoints to the STORE
ALSO_SECONDS = 4.0  # a fault of the site lasts so much longer than the job that it caught
LOAD_SECONDS = 60.0  # of the real training: a checkpoint is read before each launch
DIGEST = "digest"


class EventRow(Record):
    """What came of one event. `redone`: iterations that were trained a second time; `seen` and
    `restarted`: seconds from the fault to the end of the launch, and from there to the next one, as
    they were on the twin; `lost_now`: hours of the real training. `wrong`: what is otherwise than
    the scenario expects. `is_alone`: it was played in a run of its own, on `nodes` of them; 0: on as
    many as the others. `copies`: where they lay once
    it was over. `notes`: what else was seen.
    """

    event: FaultEvent
    cause: str = ""
    summary: str = ""
    decision: str = ""
    node: str = ""
    redone: int = 0
    launches: int = 0
    seen: float | None = None
    restarted: float | None = None
    lost_now: float | None = None
    mails: tuple[str, ...] = ()
    acts: tuple[str, ...] = ()
    done: tuple[str, ...] = ()  # by tr11, as its journal says
    nodes_after: int = 0  # that train
    wrong: tuple[str, ...] = ()
    is_alone: bool = False
    nodes: int = 0
    copies: Copies | None = None
    notes: tuple[str, ...] = ()


class Pulses(threading.Thread):
    """Types what the periodic jobs would, as often as they would."""

    def __init__(self, run: Operation) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._over = threading.Event()

    def run(self) -> None:
        looks = 0
        while not self._over.wait(LOOK_SECONDS):
            self._run.tr11("pulse", "--act", expect=None)
            looks += 1
            if looks % LOOKS_PER_MIRROR == 0:
                self._run.tr11("sync", "--once", expect=None)
            if looks % LOOKS_PER_COPY == 0:
                self._run.tr11("backup", "run", expect=None)

    def stop(self) -> None:
        self._over.set()
        self.join()


@dataclass
class Chronicler(FaultJudge):
    """Plays the events of a history. What a person does is counted, and is done only where tr11 asks
    for it: what is queued, ended and repaired is left to the watchdog.
    """

    site: Site = field(kw_only=True)
    acts: list[str] = field(default_factory=list)
    rows: list[EventRow] = field(default_factory=list)
    told: set[str] = field(default_factory=set)  # mails that were counted

    def tell(self, event: FaultEvent) -> EventRow:
        """Play an event, and say what came of it."""
        if event.fault == NOT_PLAYED:
            row = EventRow(event)
        else:
            for heard in (self.acts, self.wrong, self.site.notes):
                heard.clear()
            launches, began = len(self.run.launches()), time.time()
            if event.fault == TYPED:
                self._type(event)
                self.trains_beyond(self.iteration() + MORE_STEPS, event)
            elif event.fault in OF_SITE:
                self.site.play(event.fault)
                self.trains_beyond(self.iteration() + MORE_STEPS, event)
            else:
                self.play(event)
            # once more, so that a mail is counted where it belongs
            self.run.tr11("pulse", "--act", expect=None)
            row = self._row(event, launches, began)
        self.rows.append(row)
        return row

    # ------------------------------------------------------------------ what differs from chaos
    def _inject(self, event: FaultEvent, where: dict[str, Any]) -> str:
        if event.fault == CHECKPOINT_CUT:
            self._cut_newest()
            return inject(self.twin, "worker-crash", **where).fault.target
        if event.fault == SHARED_MEMORY_FULL:
            return self._fill_shared_memory(where["node"])
        step = self._newest_step() if event.typed else None
        first = self.iteration() + 1
        target = super()._inject(event, where)
        if event.typed:
            time.sleep(event.lasts or 0.0)
            self._type(event, step=step, first=first)
        if event.also:
            inject(self.twin, event.also)
            launches = len(self.run.launches())
            self.until(
                lambda: self.run.launches()[launches - 1]["end"] is not None, "the job's end"
            )
            time.sleep(ALSO_SECONDS)
            self._heal_site(event.fault)
        return target

    def _fill_shared_memory(self, node: str) -> str:
        """Of one node, while killed workers have left files in the machine's; then a worker dies on
        another one, so that the nodes are checked.
        """
        others = [name for name in self.run.launches()[-1]["nodes"] if name != node]
        left = leave_in_shared_memory()
        try:
            inject(self.twin, SHARED_MEMORY_FULL, node=node)
            launches = len(self.run.launches())
            inject(self.twin, "worker-crash", node=others[-1])
            self.until(lambda: len(self.run.launches()) > launches, "the next launch")
            self.until(lambda: not any(path.exists() for path in left), "the files are removed")
        finally:
            for path in left:
                path.unlink(missing_ok=True)
        self.site.notes.append(
            f"Before the next launch {len(left)} files of dead workers were removed from /dev/shm."
        )
        return node

    def _newest_step(self) -> int:
        """Of the newest checkpoint. What needs one waits for the first save."""
        folder = self.run.paths.checkpoints
        self.until(lambda: read_latest(folder) is not None, "the first save")
        newest = read_latest(folder)
        assert newest is not None
        return newest

    def _cut_newest(self) -> None:
        path = self.run.paths.checkpoint(self._newest_step()) / rank_file(0)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def _heal_site(self, kind: str) -> None:
        self.until(
            lambda: all(not one.error for one in heal(self.twin, kind=kind)), f"the end of {kind}"
        )

    def _type(self, event: FaultEvent, **places: int | None) -> None:
        for line in event.typed:
            words = line.format(**places)
            verb, _, rest = words.partition(" ")
            if verb == "set":
                self.run.overrides += shlex.split(rest)
                continue
            done = self.run.tr11(*shlex.split(words), expect=None)
            self.acts.append(f"tr11 {words}")
            if done.returncode not in event.exits:
                self.wrong.append(
                    f"tr11 {words}: exit {done.returncode}: {done.stdout}{done.stderr}"
                )
        self.trains_beyond(self.iteration() + 3, event)

    def _is_held(self) -> bool:
        """Also where nothing is queued that could be held, and the last attempt asked for a person."""
        if super()._is_held():
            return True
        verdict = read_json(self.run.paths.attempt(self.run.attempts()[-1]) / "verdict.json")
        return not self.jobs() and bool((verdict or {}).get("held_because"))

    def _let_go(self) -> None:
        self.acts.append("tr11 resume")
        super()._let_go()
        if not self.jobs():
            self._launch_more()

    def _include(self, node: str) -> None:
        self.acts.append(f"tr11 nodes include {node}, once the site had repaired it")
        super()._include(node)

    def _exclude_as_its_page_says(self, node: str) -> None:
        self.acts.append(f"tr11 nodes exclude {node}, tr11 kill, tr11 resume, as its mail says")
        super()._exclude_as_its_page_says(node)
        if not self.jobs():
            self._launch_more()

    def _launch_more(self) -> None:
        """Nothing was queued behind the job that a person has stopped: so `tr11 resume` says."""
        self.acts.append("tr11 launch --array 1-3, since nothing was queued any more")
        self.run.launch("--array", "1-3")

    def _replace_what_is_miscounted(self) -> None:
        """The watchdog's."""

    def _end_a_zombie(self) -> None:
        """The watchdog's."""

    # ------------------------------------------------------------------ what came of it
    def _row(self, event: FaultEvent, before: int, began: float) -> EventRow:
        launches = self.run.launches()
        ended = launches[before - 1]
        count = len(launches) - before
        is_fault = event.fault != TYPED and event.fault not in OF_SITE and bool(self.done)
        at = self.done[-1]["began"] if is_fault else began
        seen = restarted = None
        if count and ended["end"] is not None:
            seen = max(0.0, ended["end"] - at)
            restarted = max(0.0, launches[before]["start"] - ended["end"])
        redone = 0
        node = ""
        if is_fault:
            redone, node = self.done[-1]["redone"], self.done[-1]["node"]
        return EventRow(
            event,
            cause=ended["cause"] if count else "",
            summary=ended["summary"] if count else "",
            decision=ended["decision"] if count else "",
            node=node,
            redone=redone,
            launches=count,
            seen=seen,
            restarted=restarted,
            lost_now=self._lost(event, redone, count, restarted),
            mails=self._new_mails(),
            acts=tuple(self.acts),
            done=tuple(self._journaled(began)),
            nodes_after=len(launches[-1]["nodes"]),
            wrong=tuple(self.wrong),
            copies=self.site.copies(),
            notes=(*self._later_ends(launches[before - 1 : -1]), *self.site.notes),
        )

    @staticmethod
    def _later_ends(ended: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Of several launches that ended one after another, what was found of those behind the first."""
        told = {one["summary"] for one in ended[:1]}
        for one in ended[1:]:
            if one["summary"] not in told:
                told.add(one["summary"])
                yield f"Then: {one['summary']}; {one['decision']}."

    def _lost(
        self, event: FaultEvent, redone: int, launches: int, restarted: float | None
    ) -> float:
        """Hours of the real training: work done again, what its site takes to notice, and each start."""
        pace = self.run.card.rehearsal
        assert pace is not None
        seconds = redone * pace.step_seconds + launches * (pace.start_seconds + LOAD_SECONDS)
        if launches:
            seconds += event.unseen + (restarted or 0.0)
        return seconds / 3600

    def _new_mails(self) -> tuple[str, ...]:
        """The subjects of the mails that were written since the last event, but the digest's."""
        found = [
            entry.message
            for entry in waiting_entries(self.directory)
            if entry.message.id not in self.told and entry.message.kind != DIGEST
        ]
        self.told.update(message.id for message in found)
        return tuple(message.subject for message in found)

    def _journaled(self, began: float) -> Iterator[str]:
        """What tr11 wrote down of its own acts since a moment."""
        for entry in read_journal(self.directory.journal).entries:
            if entry.time >= began and entry.who != "tests":
                subject = entry.data.get("node") or entry.data.get("subject") or ""
                yield f"{entry.kind} {subject}".strip()


def leave_in_shared_memory(count: int = 3) -> list[Path]:
    """Files as torch makes them, of a process that has ended, an hour old."""
    maker = subprocess.Popen(["true"])
    maker.wait()
    left = [Path(f"/dev/shm/torch_{maker.pid}_{number}_0") for number in range(count)]
    for path in left:
        path.write_bytes(bytes(4096))
        hour_ago = time.time() - 3600.0
        os.utime(path, (hour_ago, hour_ago))
    return left


@contextmanager
def chronicle(twin: Twin, folder: Path, scenario: FaultScenario) -> Iterator[Chronicler]:
    """A run of the scenario's size that trains, watched, until the events have been told."""
    with site_beside(folder) as (hub, of_site):
        yield from _chronicle(twin, folder, scenario, hub, of_site)


def _chronicle(
    twin: Twin, folder: Path, scenario: FaultScenario, hub: FaultyHub, of_site: tuple[str, ...]
) -> Iterator[Chronicler]:
    changes = (
        *MAILS, *of_site, f'cron.partition="{twin.plan.cpu_partition}"', f"rehearsal.time_scale={scenario.time_scale:g}", "rehearsal.collective_seconds=10",
        "watch.act=true", "watch.exclusions_per_day=100", "watch.cancellations_per_day=100",
        "watch.resubmissions_per_day=100", "resilience.launches_per_attempt=1000", *scenario.changes,
    )  # fmt: skip
    run = Operation(twin, folder, scenario.nodes, scenario.spares, changes)
    run.launch("--array", f"1-{scenario.tasks or 3}")
    run.until_step(3)
    pulses = Pulses(run)
    pulses.start()
    try:
        site = Site(run, hub, folder / "store")
        chronicler = Chronicler(twin, run, folder / "check-fails", site=site)
        site.acts, site.wrong = chronicler.acts, chronicler.wrong
        yield chronicler
    finally:
        pulses.stop()
