"""The screen of a run as a laptop sees it: what the run said of itself, how old that is, what its log proves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tr11ops.base.units import counted, duration, size, timestamp
from tr11ops.status import care, rows
from tr11ops.status.document import CardWishes, Status
from tr11ops.status.published import number, table
from tr11ops.status.remote import RemoteView
from tr11ops.status.remote_status import remote_status
from tr11ops.status.remote_verdict import OutsideVerdict, judge_outside, time_of
from tr11ops.status.rows import Row, Screen
from tr11ops.status.screen import badge_style, heading, line, table_of

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_outside(view: RemoteView, screen: Screen) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns."""
    from rich.console import Group

    verdict = judge_outside(view)
    word, style = _badge(verdict)
    status = remote_status(view, verdict)
    head = heading(word, style, " / ".join(filter(None, (status.run.name, status.run.variant))), view.time, screen)
    said = f" {verdict.answer}." if verdict.answer else ""
    sentence = f"{_as_of(view, verdict, screen)}{said} {verdict.line[:1].upper()}{verdict.line[1:]}."
    words = line(sentence, screen, "bold red" if verdict.exit_code else "")
    return Group(head, words, table_of(_rows(view, status, screen), screen))


def _badge(verdict: OutsideVerdict) -> tuple[str, str]:
    if verdict.is_stale:
        return "STALE", "bold white on red"
    if verdict.word is None:
        return "LOG ONLY", "bold cyan"
    return verdict.word.upper(), badge_style(verdict.word, verdict.may_sleep)


def _as_of(view: RemoteView, verdict: OutsideVerdict, screen: Screen) -> str:
    if verdict.age is None:
        return "How old this is cannot be told."
    said = f"As of {timestamp(view.time - verdict.age, screen.zone)}, {duration(verdict.age)} ago"
    return f"{said}, it said {verdict.word.upper()}." if verdict.is_stale and verdict.word is not None else f"{said}."


def _rows(view: RemoteView, status: Status, screen: Screen) -> Iterator[Row]:
    published: Mapping[str, Any] = view.published or {}
    yield "", "", ""
    yield from rows.training(status, screen)
    yield from _step(status)
    yield from _queue(published)
    if status.node_use is not None:
        yield from care.nodes(status)
    if status.last_checkpoint is not None:
        yield from rows.checkpoint(status)
    if status.backup is not None:
        yield from care.copies(replace(status, card=CardWishes(copies=("backup",))))
    yield from _goodput(table(published.get("goodput")))
    yield from _log(view)
    yield "", "", ""
    for incident in rows.incidents_of(status.findings):
        yield from rows.incident_rows(incident)
    changed = "" if view.facts.changed is None else f", of {timestamp(view.facts.changed, screen.zone)}"
    yield "hub", f"{view.repository} at commit {view.facts.commit[:8]}{changed}", "dim"
    yield from (row for row in rows.unknown_rows(status) if row[1])


def _step(status: Status) -> Iterator[Row]:
    parts = [f"gradient norm {status.grad_norm:.3f}"] if status.grad_norm is not None else []
    parts += [f"learning rate {status.learning_rate:.3g}"] if status.learning_rate is not None else []
    if parts:
        yield "step", ", ".join(parts), ""


def _queue(published: Mapping[str, Any]) -> Iterator[Row]:
    """What ran and was queued: names of jobs are not published."""
    published = table(published.get("attempts"))
    running, queued = number(published.get("running")), number(published.get("waiting"))
    if running is not None and queued is not None:
        yield "jobs", f"{running:.0f} running, {queued:.0f} queued", ""


def _goodput(published: Mapping[str, Any]) -> Iterator[Row]:
    share, faults = number(published.get("useful_share")), number(published.get("faults"))
    if share is not None:
        fell = f"; {counted(int(faults), 'fault')} so far" if faults is not None else ""
        yield "goodput", f"{100 * share:.1f} % of the held node time was useful{fell}", ""


def _log(view: RemoteView) -> Iterator[Row]:
    """What the log proves by itself, and how long it had been silent when the run was looked at."""
    if view.log is None:
        yield "log", "there is none in the repository", "yellow"
        return
    last = view.log.last
    what = "no step in its end" if last is None else f"ends at iteration {last.iteration:,}"
    published = view.published or {}
    then, logged = time_of(published.get("time")), time_of(published.get("last_step_time"))
    silent = (
        f", {duration(max(0.0, then - logged))} before that look" if then is not None and logged is not None else ""
    )
    stamped = f"; last stamped line {view.log.stamp} (its cluster's clock)" if view.log.stamp else ""
    yield "log", f"{what}{silent}{stamped}; {size(view.log.size)}", ""
