"""The screen of a run as a laptop sees it: what the run said of itself, how old that is, what its log proves. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tr11ops.detect.finding import Severity
from tr11ops.hub.log_end import LogEnd
from tr11ops.hub.outside import RemoteView
from tr11ops.hub.published import SEVERITIES, number, table
from tr11ops.report.glyphs import bar, plain, sparkline
from tr11ops.report.outside_verdict import OutsideVerdict, judge_outside, time_of
from tr11ops.report.status import badge_style, heading
from tr11ops.report.status_care import Row
from tr11ops.report.status_rows import LABEL_WIDTH, SEVERITY_STYLES, Screen, clock
from tr11ops.units import duration, quantity, size
from tr11ops.verdict import Word
from trainer.contract import checkpoint_name

if TYPE_CHECKING:
    from rich.console import RenderableType

SPARK_WIDTH = 40
NEAR_SECONDS = 2 * 86400.0


def render_outside(view: RemoteView, screen: Screen) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(plain(words, screen.unicode), style=style, overflow="fold")

    verdict = judge_outside(view)
    word, style = _badge(verdict)
    head = heading(word, style, _title(view), view.time, screen)
    said = f" {verdict.answer}." if verdict.answer else ""
    sentence = f"{_as_of(view, verdict, screen)}{said} {verdict.line[:1].upper()}{verdict.line[1:]}."
    body = Table.grid(padding=(0, 1, 0, 0))
    body.add_column(width=LABEL_WIDTH, no_wrap=True)
    body.add_column(overflow="fold", width=screen.content_width)
    for label, line, row_style in _rows(view, verdict, screen):
        body.add_row(text(label, "dim"), text(line, row_style))
    return Group(head, text(sentence, "bold red" if verdict.exit_code else ""), body)


def _badge(verdict: OutsideVerdict) -> tuple[str, str]:
    if verdict.is_stale:
        return "STALE", "bold white on red"
    if verdict.word is None:
        return "LOG ONLY", "bold cyan"
    return verdict.word.upper(), badge_style(verdict.word, verdict.may_sleep)


def _title(view: RemoteView) -> str:
    run = table(view.published.get("run")) if view.published is not None else {}
    name = run.get("name")
    return " / ".join(filter(None, (name if isinstance(name, str) else view.repository, view.variant)))


def _as_of(view: RemoteView, verdict: OutsideVerdict, screen: Screen) -> str:
    if verdict.age is None:
        return "How old this is cannot be told."
    said = f"As of {clock(view.time - verdict.age, screen)}, {duration(verdict.age)} ago"
    return f"{said}, it said {verdict.word.upper()}." if verdict.is_stale and verdict.word is not None else f"{said}."


def _rows(view: RemoteView, verdict: OutsideVerdict, screen: Screen) -> Iterator[Row]:
    published: Mapping[str, Any] = view.published or {}
    yield "", "", ""
    yield from _progress(published, view.log, screen)
    yield from _forecast(published, view, verdict, screen)
    yield from _training(published, view.log, screen)
    yield from _operation(published)
    yield from _log(view)
    yield "", "", ""
    yield from _findings(published)
    yield "hub", f"{view.repository} at commit {view.facts.commit[:8]}" + _changed(view, screen), "dim"
    if view.trouble:
        yield "unknown", view.trouble, "magenta"
    unknown = published.get("unknown")
    names = [name for name in unknown if isinstance(name, str)] if isinstance(unknown, list) else []
    if names:
        yield "unknown", "the run could not see: " + ", ".join(names[:20]), "magenta"


def _changed(view: RemoteView, screen: Screen) -> str:
    return "" if view.facts.changed is None else f", of {clock(view.facts.changed, screen)}"


def _progress(published: Mapping[str, Any], log: LogEnd | None, screen: Screen) -> Iterator[Row]:
    last = log.last if log is not None else None
    done = _largest(number(published.get("iteration")), last.iteration if last else None)
    total = number(published.get("total_iterations")) or (last.total_iterations if last else None)
    if done is None or not total or total < 0 or done < 0:
        yield "progress", "no iteration yet" if published or log is not None else "unknown", ""
        return
    share = min(1.0, done / total)
    counts = f" {done:,.0f} / {total:,.0f}  {math.floor(share * 1000) / 10:.1f} %"
    yield "progress", bar(share, max(10, screen.content_width - len(counts)), screen.unicode) + counts, "green"


def _largest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _forecast(published: Mapping[str, Any], view: RemoteView, verdict: OutsideVerdict, screen: Screen) -> Iterator[Row]:
    """The range that the run forecast, else what the log's own pace comes to. Nothing where all is done."""
    finish = table(published.get("finish"))
    first, last = time_of(finish.get("earliest")), time_of(finish.get("likely"))
    moving = verdict.word in {None, Word.HEALTHY, Word.STARTING} and not verdict.is_stale
    if first is not None and moving:
        until = last if last is not None and last > first else first
        days = "%Y-%m-%d" if first - view.time > NEAR_SECONDS else "%m-%d %H:%M"
        words = dict.fromkeys(_date(moment, days, screen) for moment in (first, until))
        share = number(finish.get("useful_share"))
        basis = f" ({100 * share:.0f} % of its recent time was useful)" if share is not None else ""
        ahead = f", in {duration(first - view.time)}" if until == first else ""
        yield "ETA", " to ".join(words) + ahead + basis, ""
        return
    left = number(finish.get("earliest_seconds"))
    if left is None and view.log is not None:
        left = view.log.remaining_seconds
    if left is not None and left > 0:
        yield "ETA", f"{duration(left)} of training left, without waits and restarts", ""


def _date(moment: float, form: str, screen: Screen) -> str:
    try:
        return datetime.fromtimestamp(moment, tz=screen.zone).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "never"


def _training(published: Mapping[str, Any], log: LogEnd | None, screen: Screen) -> Iterator[Row]:
    last = log.last if log is not None else None
    loss = last.lm_loss if last is not None else number(published.get("loss"))
    if loss is not None:
        losses = [step.lm_loss for step in log.steps] if log is not None else []
        width = min(SPARK_WIDTH, screen.content_width - 24)
        spark = f" {sparkline(losses, width, screen.unicode)} last {len(losses)}" if len(losses) > 1 else ""
        yield "loss", f"{loss:<8.4f}{spark}".rstrip(), "" if math.isfinite(loss) else "bold red"
    norm = last.grad_norm if last is not None else number(published.get("grad_norm"))
    rate = last.learning_rate if last is not None else number(published.get("learning_rate"))
    parts = [f"gradient norm {norm:.3f}"] if norm is not None else []
    parts += [f"learning rate {rate:.3g}"] if rate is not None else []
    if parts:
        yield "step", ", ".join(parts), ""
    yield from _speed(published, log)
    samples = last.consumed_samples if last is not None else number(published.get("consumed_samples"))
    tokens = last.consumed_tokens if last is not None else number(published.get("consumed_tokens"))
    if samples is not None:
        yield "consumed", f"{quantity(samples)} samples" + (f", {quantity(tokens)} tokens" if tokens else ""), ""


def _speed(published: Mapping[str, Any], log: LogEnd | None) -> Iterator[Row]:
    pace = number(published.get("seconds_per_iteration"))
    if pace is None and log is not None:
        pace = log.seconds_per_iteration
    told = table(published.get("throughput"))
    current, percent, unit = number(told.get("current")), number(told.get("percent")), told.get("unit")
    if current is None and log is not None:
        current, unit = log.tflops, "TFLOPs"
    parts = [f"{pace:.2f} s/iteration"] if pace is not None else []
    if current is not None and isinstance(unit, str):
        best = f", {percent:.0f} % of its best" if percent is not None else ""
        parts.append(f"{current:.{1 if current >= 10 else 3}f} {unit[:20]}{best}")
    if parts:
        yield "speed", "; ".join(parts), ""


def _operation(published: Mapping[str, Any]) -> Iterator[Row]:
    """Attempts, nodes, what is saved and copied, goodput: all as the run said it, at its own time."""
    attempts, nodes = table(published.get("attempts")), table(published.get("nodes"))
    running, waiting, used = (
        number(attempts.get("running")), number(attempts.get("waiting")), number(nodes.get("used")),
    )  # fmt: skip
    if running is not None and waiting is not None:
        on = f" on {used:.0f} nodes" if used and running else ""
        yield "attempts", f"{running:.0f} running{on}, {waiting:.0f} waiting", ""
    saved = table(published.get("last_checkpoint"))
    step, age, bytes_ = number(saved.get("step")), number(saved.get("age_seconds")), number(saved.get("bytes"))
    if step is not None:
        old = f", {duration(age)} old then" if age is not None else ""
        large = f", {size(bytes_)}" if bytes_ is not None else ""
        yield "checkpoint", f"{checkpoint_name(int(step))}{old}{large}", ""
    copy = table(published.get("backup"))
    copied, copy_age = number(copy.get("step")), number(copy.get("age_seconds"))
    if copied is not None:
        when = f", {duration(copy_age)} before" if copy_age is not None else ""
        missing, damaged = number(published.get("copies_missing")), number(published.get("copies_damaged"))
        lacking = f"; {missing:.0f} not copied yet" if missing else ""
        broken = f"; {damaged:.0f} DAMAGED" if damaged else ""
        yield "backup", f"verified up to step {copied:.0f}{when}{lacking}{broken}", "red" if damaged else ""
    goodput = table(published.get("goodput"))
    share, faults = number(goodput.get("useful_share")), number(goodput.get("faults"))
    if share is not None:
        fell = f"; {faults:.0f} fault{'' if faults == 1 else 's'} so far" if faults is not None else ""
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


def _findings(published: Mapping[str, Any]) -> Iterator[Row]:
    found = published.get("findings")
    told = [table(entry) for entry in found] if isinstance(found, list) else []
    for severity in SEVERITIES:
        for entry in told:
            title, count = entry.get("title"), number(entry.get("count"))
            if entry.get("severity") == severity and isinstance(title, str):
                times = f" (x{count:.0f})" if count is not None and count > 1 else ""
                yield severity.upper(), title[:80] + times, SEVERITY_STYLES[Severity[severity.upper()]]
