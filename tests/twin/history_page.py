"""The page that tells a history again: what was lost then, what is lost now, and what tr11 did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.twin.chronicle import EventRow
from tests.twin.fault_scenario import NOT_PLAYED, TYPED
from trainer.contract.documents import record_of
from trainer.contract.record import Record

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "history.json"
FOLDER = ROOT / "docs" / "explanation"
PAGE = "tr11-again.md"
# the events are told on pages of their own, each until this one, and without it
PARTS = (
    ("tr11-again-march.md", "March and early April", "A GPU dies, once a week"),
    ("tr11-again-may.md", "April and May", "A DataLoader dies of a bus error"),
    ("tr11-again-july.md", "files, quotas and July", ""),
)
NOT_KNOWN = "not written down"
_FOLDER = re.compile(r"/[^\s`]*/(?=rehearsal-run)")  # where the run lay
JOURNALED = {  # what is worth telling of the journal
    "node-excluded": "excluded",
    "node-included": "may be used again:",
    "submitted": "submitted more tasks",
    "launch-failed": "wrote down why the launch had ended",
    "array-held": "held what was queued",
}

NOTE = "<!-- Written by `make history` from benchmarks/history.json. -->"
INTRODUCTION = f"""\
# The 176-billion training, played again

{NOTE}

From March to July 2022 the 176-billion model trained on 48 nodes of eight GPUs, watched by people day and night, who wrote down what
befell it. `make history` gives the same troubles, in the same order, to a training of stand-ins on a [twin](../how-to/twin.md): a real
Slurm of {{nodes}} nodes on one machine, {{scale:g}} times as fast, with tr11 at work in it, and its watchdog looking as often as it would each
hour. No hand touches it but where this page says so. The run wrote this page, from its own journal.

The file that it plays is `tests/twin/scenarios/tr11-176b.toml`. [The chronicles in miniature](../tutorial/chronicles.md) tell another story: the
experiments of the 104-billion model.
"""

COUNTED = """\
## Where the copies lay

The last three columns were counted once each trouble was over: the checkpoints on scratch, and those in the STORE, of which every byte was read and
found as its manifest says; and the last iteration whose line the mirror of the logs at the hub had. The STORE gets each hundredth step; old
checkpoints stay on scratch until the site's purge takes them, or a person's `tr11 checkpoints prune`.

## How the hours are counted

In hours of the real training, whose iteration took 105 s. Lost now are the iterations that the twin's training did a second time; for each launch
that had to begin, 300 s of start-up and 60 s to load; what passed on the twin between two launches, as it was; and until the fault is noticed, the
time-outs of a usual site (10 minutes of silence in a collective, 5 minutes until Slurm gives a node up, an hour between two looks of the
watchdog), in place of the twin's own, which are shorter. Queueing is not in it: the nodes of the twin are no one else's. Nor is the start of
processes on two cores.

"Then" is what the people who were there wrote down; where they gave no figure, none is given here. In April the training saved each 100
iterations, at first each 250; here it saves each 50.
"""


class History(Record):
    """What a run that played a history wrote down."""

    rows: tuple[EventRow, ...]
    iterations: int
    launches: int
    nodes: int
    time_scale: float

    @property
    def wrong(self) -> list[str]:
        """What came out otherwise than the scenario expects."""
        return [f"{row.event.title}: {wrong}" for row in self.rows for wrong in row.wrong]


def read_history() -> History:
    """The one that was kept."""
    return record_of(History, json.loads(KEPT.read_text(encoding="utf-8")))


def pages(history: History) -> dict[str, str]:
    """The page with the figures, and those that tell one event after another; by name."""
    head = INTRODUCTION.format(nodes=history.nodes, scale=history.time_scale)
    parts = [
        head,
        *_sums(history),
        *_links(),
        *_table(history.rows),
        *_uncounted(history.rows),
        COUNTED.rstrip("\n"),
        "",
    ]
    found = {PAGE: "\n".join(parts)}
    rows = list(history.rows)
    for name, title, until in PARTS:
        titles = [row.event.title for row in rows]
        end = titles.index(until) if until else len(rows)
        lines = [
            f"# The 176-billion training, played again: {title}\n",
            NOTE,
            "",
            *_told(rows[:end]),
        ]
        found[name] = _FOLDER.sub("", "\n".join(lines))
        rows = rows[end:]
    return found


def write_pages(history: History) -> None:
    """Put them into the documentation."""
    for name, text in pages(history).items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def _links() -> Iterator[str]:
    told = ", ".join(f"[{title}]({name})" for name, title, _ in PARTS)
    yield f"One after another they are told in {told}.\n"


def _acts(row: EventRow) -> tuple[str, ...]:
    """What people had to do; where the trouble itself is that someone typed something, and it was
    refused, that is none.
    """
    if row.event.typed and 0 not in row.event.exits:
        return ()
    return row.acts


def _played(rows: Iterable[EventRow]) -> list[EventRow]:
    return [row for row in rows if row.event.fault != NOT_PLAYED]


def _sums(history: History) -> Iterator[str]:
    rows = _played(history.rows)
    known = [row for row in rows if row.event.lost_then is not None]
    then = sum(row.event.lost_then or 0.0 for row in known)
    now = sum(row.lost_now or 0.0 for row in known)
    acts = sum(len(_acts(row)) for row in rows)
    mails = sum(len(row.mails) for row in rows)
    yield (
        f"Of the {len(history.rows)} troubles {len(rows)} were played. The {len(known)} of them whose cost was written down took **{then:.1f} hours then, and\n"
        f"{now:.1f} hours now**. The run on all nodes reached iteration {history.iterations:,} in {history.launches} launches; tr11 wrote {mails} mails, and people did {acts} things.\n"
    )
    alone = sum(row.is_alone for row in rows)
    if alone:
        was = "one was played in a run of its own"
        if alone > 1:
            was = f"{alone} were played in runs of their own, some on fewer nodes"
        yield f"Of these {was}, as the chapter says.\n"
    for wrong in history.wrong:
        yield f"Otherwise than it should be: {wrong}\n"


def _table(rows: Iterable[EventRow]) -> Iterator[str]:
    yield "| when | what | hours lost then | lost now | iterations done again | mails | acts of people | scratch | STORE | hub |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        event = row.event
        then = NOT_KNOWN if event.lost_then is None else f"{event.lost_then:g}"
        if event.fault == NOT_PLAYED:
            yield f"| {event.date} | {event.title} | {then} | not played | | | | | | |"
            continue
        yield (
            f"| {event.date} | {event.title} | {then} | {row.lost_now or 0:.1f} | {row.redone} | {len(row.mails)} | {len(_acts(row))} "
            f"| {_copies(row)} |"
        )
    yield ""


def _uncounted(rows: Iterable[EventRow]) -> Iterator[str]:
    if any(row.copies is None for row in _played(rows)):
        yield "Where the last three cells are empty, the trouble was played before copies were counted.\n"


def _copies(row: EventRow) -> str:
    """The last cells of a row; empty where a run did not count them."""
    if row.copies is None:
        return " | | "
    return f"{row.copies.scratch} | {row.copies.store} | {row.copies.hub}"


def _told(rows: Iterable[EventRow]) -> Iterator[str]:
    for row in rows:
        event = row.event
        yield f"## {event.title}\n"
        yield f"Then ({event.date}): {event.then}\n"
        if event.fault == NOT_PLAYED:
            yield f"Not played. {event.why}\n"
            continue
        if event.why:
            yield f"{event.why}\n"
        if row.is_alone:
            size = f"{row.nodes} nodes" if row.nodes else "as many nodes"
            yield f"Played in a run of its own, on {size}.\n"
        yield from _facts(row)
        yield ""


def _facts(row: EventRow) -> Iterator[str]:
    if row.node:
        yield f"- Given to: `{row.node}`."
    if row.summary:
        yield f"- Found: {row.summary} (cause: {row.cause})."
    if row.decision:
        yield f"- Decided: {row.decision}."
    if row.seen is not None and row.restarted is not None:
        yield (
            f"- Times on the twin: all workers gone after {row.seen:.1f} s, the next launch {row.restarted:.1f} s later."
        )
    if row.event.fault == TYPED and row.launches:
        yield f"- Afterwards {row.nodes_after} nodes train."
    if row.launches:
        yield f"- Lost: {row.redone} iterations done again, {row.lost_now or 0:.1f} hours in all."
    else:
        yield "- Lost: nothing; the training ran on."
    done = [
        f"{JOURNALED[kind]} {rest}".strip()
        for kind, _, rest in (line.partition(" ") for line in row.done)
        if kind in JOURNALED
    ]
    if done:
        yield f"- By itself tr11 {', '.join(dict.fromkeys(done))}."
    yield from (f"- {note}" for note in row.notes)
    for mail in row.mails:
        yield f"- Mail: {mail}"
    if not _acts(row) and row.acts:
        yield f"- Refused: `{row.acts[0]}`"
    for act in _acts(row):
        yield f"- By hand: {act}."
