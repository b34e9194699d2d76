"""What the tables of `tr11 top` show, from one look at each run. Pure.

runs -> a run's attempts -> an attempt's nodes -> a node's ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.alerts.state import Alert, HeldVerdict, alerts_words
from tr11ops.base.observed import known
from tr11ops.base.units import duration
from tr11ops.detect.node_progress import NodeProgress, short_name
from tr11ops.status.published import word_of
from tr11ops.status.run_list import ListedRun, RunList, kept_words, unwatched
from tr11ops.watchdog.verdict import EXIT_CODES
from trainer.contract.record import Record
from trainer.contract.units import shortened

if TYPE_CHECKING:
    from tr11ops.cluster.base import Job
    from tr11ops.status.assessment import Assessment
    from tr11ops.status.document import Status
    from trainer.contract.attempt import Heartbeat

DASH = "-"
LEAST_WIDTH = 24  # of the last column, where it is cut
WHO_WIDTH = 16  # of who has an alert: in full below the table
SPARE = "spare: the running launch does without it; it takes the place of a node that fails"
PADDING = 2  # of each column: a space on both sides


class TopRow(Record):
    """A line: `key` is what Enter goes into, "" where nothing is below; `cells` are one text each
    for the table's columns. `more` is said in full of the line with the cursor, `page` is the
    runbook page that it has.
    """

    key: str
    cells: tuple[str, ...]
    more: str = ""
    page: str = ""

    def has(self, words: str) -> bool:
        """Whether each word is somewhere in it, in capitals or not."""
        text = " ".join(self.cells).lower()
        return all(word in text for word in words.lower().split())


class TopTable(Record):
    """A table with its columns' titles, and one sentence on what it is about."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[TopRow, ...]
    sentence: str = ""

    def filtered(self, words: str) -> TopTable:
        """The same with the rows that have the words."""
        rows = tuple(row for row in self.rows if row.has(words))
        return replace(self, rows=rows)


def column_widths(table: TopTable, room: int) -> tuple[int, ...]:
    """How wide each column is, in characters, so that nothing is cut but the last one: that gets what
    is left of `room`, and is left out where that is less than LEAST_WIDTH and not enough.
    """
    widths = [
        max(len(text) for text in texts)
        for texts in zip(table.columns, *(row.cells for row in table.rows), strict=True)
    ]
    last = widths.pop()
    left = room - sum(width + PADDING for width in widths) - PADDING
    if left >= min(last, LEAST_WIDTH):
        widths.append(min(last, left))
    return tuple(widths)


class LookedAt(Record, dict=True):
    """One run below the folders that were given: its last look, None where there was none. Then
    `why` is what kept it from being seen; "" where it was not looked at yet, and `before` is what
    the watchdog had concluded by `time`.
    """

    key: str
    name: str
    look: Assessment | None
    why: str = ""
    before: HeldVerdict | None = None
    time: float = 0.0

    @property
    def state(self) -> str:
        """How it is, or why that is not known."""
        if self.look is None:
            return self.why or f"{kept_words(self.before, self.time)}; looking"
        return f"{self.seen.status.verdict.value}: {self.seen.status.why}"

    @property
    def sentence(self) -> str:
        """The same with who has its alerts."""
        if self.look is None:
            return self.state
        status = self.look.status
        fault = unwatched(status.verdict, status.watchdog_fault)
        return "; ".join(filter(None, (self.state, fault, _alerts_sentence(status))))

    @property
    def seen(self) -> Assessment:
        """The look at a run that was looked at: ask for no other."""
        assert self.look is not None
        return self.look

    @cached_property
    def listed(self) -> ListedRun:
        """The same as lists of runs have it; before its first look, what is on record of it."""
        told = None
        if self.look is not None:
            told = self.look.document()
        elif self.before is not None:
            word = word_of(self.before.word)
            told = {"verdict": word, "exit_code": EXIT_CODES.get(word)}
        return ListedRun(Path(self.key), told, self.why, title=self.name)

    @property
    def is_awaited(self) -> bool:
        """Whether its first look is still to come."""
        return self.look is None and not self.why


def runs_table(runs: Sequence[LookedAt]) -> TopTable:
    """Every run, what needs a person first. What is on record only says so first, and how old it is."""
    ordered = sorted(runs, key=_urgency)
    rows = tuple(
        TopRow(run.key, tuple(_run_cells(run)), f"{run.name}: {run.sentence}") for run in ordered
    )
    sentence = RunList.of(run.listed for run in runs).sentence
    awaited = [run for run in runs if run.is_awaited]
    if awaited:
        ages = [run.time - run.before.judged for run in awaited if run.before is not None]
        age = duration(max(ages)) if ages else "an unknown time"
        sentence = f"{len(awaited)} still as of {age} ago, looking ...: {sentence}"
    return TopTable(
        "runs", ("run", "verdict", "for", "step", "loss", "left", "why"), rows, sentence
    )


def _urgency(run: LookedAt) -> tuple[tuple[int, int], str]:
    return run.listed.place[0], run.name


def _run_cells(run: LookedAt) -> Iterator[str]:
    yield run.name
    if run.look is None:
        yield from _unseen_cells(run)
        return
    status = run.seen.status
    mark = ""
    if unwatched(status.verdict, status.watchdog_fault):
        mark = ", unwatched"
    yield f"{status.verdict.value}{mark}"
    since = status.verdict_since
    yield _length(since and status.age(since))
    yield _or_dash(status.iteration)
    if status.loss is None:
        yield DASH
    else:
        yield f"{status.loss:.4f}"
    yield _length(status.remaining_seconds)
    yield status.why


def _unseen_cells(run: LookedAt) -> Iterator[str]:
    """What is on record is said as past."""
    before = run.before
    word = "unknown"
    length = DASH
    if before is not None and before.word:
        word = f"was {before.word}"
        if before.since is not None:
            length = duration(run.time - before.since)
    yield from (word, length, DASH, DASH, DASH, run.why or "looking")


def alerts_table(run: LookedAt) -> TopTable:
    """The open alerts of a run, those that close by themselves last, else the most severe first, and who
    has each; keys are their incidents.
    """
    title = f"{run.name}: alerts"
    columns = ("severity", "for", "who", "alert")
    status = run.seen.status
    if status.alerts is None:
        why = f"the alerts are unknown: {status.reason_unknown('alerts')}"
        return TopTable(title, columns, (), why)
    ordered = sorted(status.alerts, key=_closes_by_itself)
    rows = tuple(_alert_row(one, status) for one in ordered)
    return TopTable(title, columns, rows, _alerts_sentence(status))


def _closes_by_itself(alert: Alert) -> bool:
    return not alert.care.is_found


def _alerts_sentence(status: Status) -> str:
    """Who has its alerts and was told, and who is on call where that does not say it."""
    told = alerts_words(status.cares, status.on_call, status.time) or "none is open"
    if status.on_call is not None and status.on_call.names not in told:
        told += f"; on call: {status.on_call.words(status.time)}"
    return f"alerts: {told}"


def _alert_row(alert: Alert, status: Status) -> TopRow:
    """What an alert is; in full with who has it, what the watchdog does, and what is to be typed."""
    length = duration(status.age(alert.start))
    care = alert.care
    who = shortened(care.holder, WHO_WIDTH) or "no one"
    if not care.is_found:
        who = "no longer found"
    elif care.snooze_left(status.time):
        who += ", snoozed"
    typed = ""
    if alert.fix:
        typed = f"type {alert.fix}"
    said = (alert.title, care.words(status.on_call, status.time), alert.watchdog, typed)
    return TopRow(
        alert.incident,
        (alert.severity.name, length, who, alert.title),
        "; ".join(filter(None, said)),
        alert.runbook.removesuffix(".md"),
    )


def attempts_table(run: LookedAt) -> TopTable:
    """What runs and waits of a run, then the attempts that have ended, the newest first."""
    title = f"{run.name}: attempts"
    columns = ("attempt", "state", "nodes", "end")
    status = run.seen.status
    rows = []
    ended = {one.label: one.how or "" for one in status.last_attempts or ()}
    for job in sorted(status.jobs or (), key=_place_of):
        key = ""
        if job.nodes and job.state.is_active:
            key = job.job_id
        reason = job.reason
        if job.state.is_final:  # the scheduler's reason may be one for which it once waited
            reason = ended.get(job.job_id) or reason
        cells = (job.job_id, job.state.lower(), str(len(job.nodes)), reason or DASH)
        rows.append(TopRow(key, cells, reason))
    shown = {row.cells[0] for row in rows}
    for attempt in status.last_attempts or ():
        how = attempt.how or ""
        if attempt.label not in shown:
            rows.append(TopRow("", (attempt.label, "ended", DASH, how or DASH), how))
    return TopTable(title, columns, tuple(rows), run.state)


def nodes_table(run: LookedAt, job_id: str) -> TopTable:
    """The nodes of a running attempt, the slow ones first: how far their ranks are, since when they
    say nothing, and how long the slowest rank computes for a step beside its peers.
    """
    title = f"{run.name}: {job_id}"
    columns = ("node", "ranks", "step", "phase", "silent", "compute s", "x usual", "list")
    status = run.seen.status
    listed = {entry.node: entry.state for entry in status.exclusions or ()}
    found = sorted((one for one in status.node_progress if one.job == job_id), key=_slow_first)
    told = {one.node: SPARE for one in found if one.is_spare}
    told |= {one.subject: "; ".join((one.title, *one.evidence)) for one in status.findings}
    rows = tuple(
        TopRow(one.node, (*_node_cells(one), listed.get(one.node, "")), told.get(one.node, ""))
        for one in found
    )
    return TopTable(title, columns, rows, "; ".join((*status.slow_words, run.state)))


def _node_cells(node: NodeProgress) -> Iterator[str]:
    yield node.node
    yield str(node.ranks or DASH)
    yield _or_dash(node.iteration)
    yield _phase(node)
    yield _length(node.silent_seconds)
    if node.pace is None:
        yield from (DASH, DASH)
        return
    yield f"{node.pace.seconds:.3g}"
    times = DASH
    if node.pace.times_usual is not None:
        times = f"{node.pace.times_usual:.2f}"
    if node.is_slow:
        times += " slow"
    yield times


def _phase(node: NodeProgress) -> str:
    """What its ranks do; of a node without ranks, why."""
    if node.is_spare:
        return "spare, idle"
    return node.phase or "no word yet"


def _slow_first(node: NodeProgress) -> tuple[bool, bool, float, str]:
    times = 0.0
    if node.pace is not None:
        times = node.pace.times_usual or 0.0
    return not node.is_slow, node.is_spare, -times, node.node


def ranks_table(run: LookedAt, node: str) -> TopTable:
    """What each rank of a node last said."""
    title = f"{run.name}: {node}"
    columns = ("rank", "step", "phase", "silent", "pid")
    age = run.seen.status.age
    rows = []
    for beat in sorted(_ranks_of(run.seen, node), key=attrgetter("rank")):
        said = (beat.iteration, beat.phase, duration(age(beat.time)), beat.pid)
        rows.append(TopRow("", (_rank_name(beat), *map(str, said))))
    return TopTable(title, columns, tuple(rows), run.state)


def _place_of(job: Job) -> tuple[bool, bool]:
    """What runs first, what waits next, then what has ended."""
    return not job.state.is_active, job.state != "PENDING"


def _ranks_of(look: Assessment, node: str) -> list[Heartbeat]:
    short = short_name(node)
    beats = known(look.snapshot.heartbeats, ())
    return [beat for beat in beats if short_name(beat.host) == short]


def _rank_name(beat: Heartbeat) -> str:
    told = beat.stands_for
    if len(told) == 1:
        return str(beat.rank)
    return f"{told.start}-{told.stop - 1}"


def _or_dash(value: int | None) -> str:
    if value is None:
        return DASH
    return str(value)


def _length(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    return duration(seconds)
