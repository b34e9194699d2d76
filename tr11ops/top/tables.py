"""What the tables of `tr11 top` show, from one look at each run. Pure.

runs -> a run's attempts -> an attempt's nodes -> a node's ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tr11ops.base.observed import known
from tr11ops.base.units import counted, duration
from tr11ops.detect.node_progress import short_name
from tr11ops.status.run_list import urgency
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.cluster.base import Job
    from tr11ops.detect.node_progress import NodeProgress
    from tr11ops.status.assessment import Assessment
    from tr11ops.status.document import Status
    from trainer.contract.attempt import Heartbeat

DASH = "-"
LEAST_WIDTH = 8  # of the last column
PADDING = 2  # of each column: a space on both sides


class TopRow(Record):
    """A line: `key` is what Enter goes into, "" where nothing is below; `cells` are one text each
    for the table's columns.
    """

    key: str
    cells: tuple[str, ...]

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
        return TopTable(self.title, self.columns, rows, self.sentence)


def column_widths(table: TopTable, room: int) -> tuple[int, ...]:
    """How wide each column is, in characters, so that nothing is cut but the last one: that gets what
    is left of `room`, and at least LEAST_WIDTH.
    """
    widths = [
        max(len(text) for text in texts)
        for texts in zip(table.columns, *(row.cells for row in table.rows), strict=True)
    ]
    left = room - sum(width + PADDING for width in widths[:-1]) - PADDING
    widths[-1] = max(LEAST_WIDTH, min(widths[-1], left))
    return tuple(widths)


class LookedAt(Record):
    """One run below the folders that were given: its last look, None where there was none, and
    `why` then.
    """

    key: str
    name: str
    look: Assessment | None
    why: str = ""


def runs_table(runs: Sequence[LookedAt]) -> TopTable:
    """Every run, what needs a person first."""
    ordered = sorted(runs, key=_urgency)
    rows = tuple(TopRow(run.key, tuple(_run_cells(run))) for run in ordered)
    asking = sum(map(_needs_person, runs))
    sentence = counted(len(runs), "run")
    if asking:
        verb = "needs" if asking == 1 else "need"
        sentence += f", {asking} {verb} a person"
    return TopTable(
        "runs", ("run", "verdict", "for", "step", "loss", "left", "why"), rows, sentence
    )


def _urgency(run: LookedAt) -> tuple[tuple[int, int], str]:
    if run.look is None:
        return urgency(VerdictWord.UNKNOWN, 3), run.name
    return urgency(run.look.verdict.word, run.look.exit_code), run.name


def _needs_person(run: LookedAt) -> bool:
    return run.look is not None and run.look.exit_code == 1


def _run_cells(run: LookedAt) -> Iterator[str]:
    yield run.name
    if run.look is None:
        yield from ("unknown", DASH, DASH, DASH, DASH, run.why)
        return
    status = run.look.status
    yield status.verdict.value
    if status.verdict_since is None:
        yield DASH
    else:
        yield duration(status.age(status.verdict_since))
    yield _or_dash(status.iteration)
    if status.loss is None:
        yield DASH
    else:
        yield f"{status.loss:.4f}"
    if status.remaining_seconds is None:
        yield DASH
    else:
        yield duration(status.remaining_seconds)
    yield status.why


def attempts_table(run: LookedAt) -> TopTable:
    """What runs and waits of a run, then the attempts that have ended, the newest first."""
    title = f"{run.name}: attempts"
    columns = ("attempt", "state", "nodes", "end")
    if run.look is None:
        return TopTable(title, columns, (), run.why)
    status = run.look.status
    rows = []
    for job in sorted(status.jobs or (), key=_place_of):
        key = ""
        if job.nodes and _place_of(job) == 0:
            key = job.job_id
        rows.append(
            TopRow(key, (job.job_id, job.state.lower(), str(len(job.nodes)), job.reason or DASH))
        )
    shown = {row.cells[0] for row in rows}
    for attempt in status.last_attempts or ():
        if attempt.label not in shown:
            rows.append(TopRow("", (attempt.label, "ended", DASH, attempt.how or DASH)))
    return TopTable(title, columns, tuple(rows), _sentence(status))


def nodes_table(run: LookedAt, job_id: str) -> TopTable:
    """The nodes of a running attempt, the slow ones first: how far their ranks are, since when they
    say nothing, and how long the slowest rank computes for a step beside its peers.
    """
    title = f"{run.name}: {job_id}"
    columns = ("node", "ranks", "step", "phase", "silent", "s/step", "x usual", "list")
    if run.look is None:
        return TopTable(title, columns, (), run.why)
    status = run.look.status
    listed = {entry.node: entry.state for entry in status.exclusions or ()}
    found = sorted((one for one in status.node_progress if one.job == job_id), key=_slow_first)
    rows = tuple(TopRow(one.node, (*_node_cells(one), listed.get(one.node, ""))) for one in found)
    slow = [one.node for one in found if one.is_slow]
    sentence = _sentence(status)
    if slow:
        sentence = f"slow: {', '.join(slow)}; {sentence}"
    return TopTable(title, columns, rows, sentence)


def _node_cells(node: NodeProgress) -> Iterator[str]:
    yield node.node
    yield str(node.ranks or DASH)
    yield _or_dash(node.iteration)
    yield node.phase or DASH
    yield DASH if node.silent_seconds is None else duration(node.silent_seconds)
    if node.pace is None:
        yield from (DASH, DASH)
        return
    yield f"{node.pace.seconds:.3g}"
    times = DASH if node.pace.times_usual is None else f"{node.pace.times_usual:.2f}"
    yield f"{times} slow" if node.is_slow else times


def _slow_first(node: NodeProgress) -> tuple[bool, float, str]:
    times = 0.0
    if node.pace is not None:
        times = node.pace.times_usual or 0.0
    return not node.is_slow, -times, node.node


def ranks_table(run: LookedAt, node: str) -> TopTable:
    """What each rank of a node last said."""
    title = f"{run.name}: {node}"
    columns = ("rank", "step", "phase", "silent", "pid")
    if run.look is None:
        return TopTable(title, columns, (), run.why)
    status = run.look.status
    rows = tuple(
        TopRow(
            "",
            (
                _rank_name(rank),
                str(rank.iteration),
                rank.phase,
                duration(status.age(rank.time)),
                str(rank.pid),
            ),
        )
        for rank in sorted(_ranks_of(run.look, node), key=_number)
    )
    return TopTable(title, columns, rows, _sentence(status))


def _place_of(job: Job) -> int:
    """What runs first, what waits next, then what has ended."""
    if job.state.is_active:
        return 0
    return 1 if job.state == "PENDING" else 2


def _ranks_of(look: Assessment, node: str) -> list[Heartbeat]:
    short = short_name(node)
    beats = known(look.snapshot.heartbeats, ())
    return [beat for beat in beats if short_name(beat.host) == short]


def _number(beat: Heartbeat) -> int:
    return beat.rank


def _rank_name(beat: Heartbeat) -> str:
    told = beat.stands_for
    if len(told) == 1:
        return str(beat.rank)
    return f"{told.start}-{told.stop - 1}"


def _sentence(status: Status) -> str:
    return f"{status.verdict.value}: {status.why}"


def _or_dash(value: int | None) -> str:
    if value is None:
        return DASH
    return str(value)
