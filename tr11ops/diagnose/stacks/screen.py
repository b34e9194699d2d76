"""The stacks of an attempt for people, in 80 columns: the verdict, a row for each group, the odd
one's stack. Pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tr11ops.base.units import counted, duration, first_few
from tr11ops.cluster.arrays import nodes_text
from tr11ops.diagnose.stacks.groups import StackGroup, ranks_text, ranks_words
from tr11ops.diagnose.stacks.look import StacksLook
from tr11ops.diagnose.stacks.waits import WaitKind
from tr11ops.diagnose.stacks.worker import WorkerStack

WIDTH = 80
MOST_ROWS = 12
MOST_FRAMES = 8  # shown of the odd group
_MOST = (16, 26, 12)  # columns of ranks, nodes, what they are in; the place has the rest


def lines(look: StacksLook, slow_nodes: Sequence[str] = ()) -> Iterator[str]:
    """The screen, line by line; with what is said of slow nodes."""
    groups, verdict = look.groups, look.verdict
    yield from _folded(verdict.sentence)
    yield from _table(look)
    odd = [group for group in groups if set(group.ranks) & set(verdict.ranks)]
    if odd and odd[0].frames and len(odd) < max(2, len(groups)):
        yield from _stack(odd[0])
    yield from _records(look, verdict.sentence)
    for sentence in slow_nodes:
        yield from ("", *_folded(sentence, "  "))
    for trouble in look.troubles[:4]:
        yield from _folded(f"not read: {trouble}", "  ")


def _table(look: StacksLook) -> Iterator[str]:
    """A row for each group; nodes and ranks have the room that the longest of them needs."""
    groups, silent = look.groups, look.collected.silent
    rows = [
        (ranks_text(group.ranks), nodes_text(group.nodes), group.wait.kind.value)
        for group in groups[:MOST_ROWS]
    ]
    if silent:
        rows.append(("?", nodes_text(silent), "no answer"))
    if not rows:
        return
    heads = ("RANKS", "NODES", "WAITS IN")
    widths = tuple(
        min(most, max(map(len, column)))
        for most, column in zip(_MOST, zip(heads, *rows, strict=True), strict=True)
    )
    yield ""
    yield _row(heads, widths, "WHERE", "")
    for cells, group in zip(rows, groups[:MOST_ROWS], strict=False):
        mark = ""
        if group.looks > 1:
            mark = f"same in {group.looks} looks"
        yield _row(cells, widths, _where(group), mark)
    if len(groups) > MOST_ROWS:
        left = groups[MOST_ROWS:]
        ranks = sum(len(group.workers) for group in left)
        yield f"and {counted(len(left), 'more group')} of {counted(ranks, 'rank')} (all with --json)"
    if silent:
        yield _row(rows[-1], widths, "", "")


def _where(group: StackGroup) -> str:
    if group.wait.kind in {WaitKind.DEAD, WaitKind.UNREAD}:
        return ""
    if group.wait.kind is WaitKind.FILE and " /" in group.wait.what:
        return group.wait.what
    if group.wait.frame is None:
        return ""
    return str(group.wait.frame)


def _row(cells: Sequence[str], widths: Sequence[int], where: str, mark: str) -> str:
    room = WIDTH - sum(wide + 2 for wide in widths)
    place = _cut_left(where, room - (len(mark) + 2 if mark else 0))
    padded = "  ".join(
        f"{_cut(text, wide):<{wide}}" for text, wide in zip(cells, widths, strict=True)
    )
    return f"{padded}  {place}{'  ' if mark and place else ''}{mark}".rstrip()


def _cut(text: str, wide: int) -> str:
    if len(text) <= wide:
        return text
    return f"{text[: wide - 2]}.."


def _cut_left(text: str, wide: int) -> str:
    """The function's name and the end of its file: what tells most."""
    if len(text) <= wide:
        return text
    function, _, file = text.partition(" (")
    room = wide - len(function) - 4
    if file and room >= 8:
        return f"{function} (..{file[-room:]}"
    return _cut(text, wide)


def _stack(group: StackGroup) -> Iterator[str]:
    yield ""
    yield _cut(
        f"{ranks_words(group.ranks)}, process {first_few([one.pid for one in group.workers], 2)}, innermost first:",
        WIDTH,
    )
    for frame in group.frames[:MOST_FRAMES]:
        yield _cut(f"  {frame}", WIDTH)
    if len(group.frames) > MOST_FRAMES:
        yield f"  and {counted(len(group.frames) - MOST_FRAMES, 'more frame')}"


def _records(look: StacksLook, said: str) -> Iterator[str]:
    records = look.records
    if records.time is None:
        return
    yield ""
    age = duration(look.time - records.time)
    if records.finding is None:
        sentence = "no operation was open"
    else:
        sentence = records.finding.sentence
    if sentence != said:
        yield from _folded(
            f"flight recorder ({counted(records.ranks, 'rank')}, {age} ago): {sentence}"
        )
    else:
        yield from _folded(
            f"told by the flight recorder of {counted(records.ranks, 'rank')}, {age} ago"
        )


def _folded(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def text_of(node: str, workers: Sequence[WorkerStack]) -> str:
    """What one node told, for the file that is kept of it before a hanging job is ended."""
    return (
        "\n".join("\n".join(_worker_lines(worker)) + "\n" for worker in workers)
        or f"{node}: no worker\n"
    )


def _worker_lines(worker: WorkerStack) -> Iterator[str]:
    facts = [f"rank {worker.rank}", f"process {worker.pid}", f"state {worker.state or '?'}"]
    if worker.call:
        facts.append(f"in {worker.call} {worker.path}".rstrip())
    yield ", ".join(facts) + (f" ({worker.trouble})" if worker.trouble else "")
    yield from (f"    {frame}" for frame in worker.frames)
    yield from (f"  {thread}" for thread in worker.threads)
