"""The screen of a run as a laptop sees it: what the run said of itself, how old that is, what its
log proves. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace
from rich.console import Group, RenderableType

from tr11ops.base.units import capitalized, counted, duration, size, timestamp
from tr11ops.hub.log_end import LogEnd
from tr11ops.observe.forecast import Throughput
from tr11ops.observe.observations import CopyStatus
from tr11ops.status import rows
from tr11ops.status.document import (
    CardWishes,
    Finish,
    LossCourse,
    RunName,
    ShownCheckpoint,
    ShownFinding,
    Status,
    step_values,
)
from tr11ops.status.extra_observations import NodeUse
from tr11ops.status.published import RATE_UNITS, SEVERITIES, among, number, table
from tr11ops.status.remote import OutsideVerdict, RemoteView, judge_outside, time_of
from tr11ops.status.rows import Row, Screen
from tr11ops.status.screen import badge_style, copy_rows, heading, line, node_rows, table_of
from tr11ops.watchdog.verdict import MOVING, VerdictWord

# The status document of a run seen from outside: what it published, and the end of its log. Pure.
#
# What was published is from anyone: each value is a number, a moment or a word of a closed list, or
# it is left out. Ages and moments are by the reader's clock: what was two hours old an hour ago is
# three hours old.

NAMES_SHOWN = 20


def remote_status(view: RemoteView, verdict: OutsideVerdict) -> Status:
    """What may be said of the run at `view.time`. What the log proves counts more than what was
    published.
    """
    published: Mapping[str, Any] = view.published or {}
    if verdict.is_stale or verdict.word is None:
        word = VerdictWord.UNKNOWN
    else:
        word = verdict.word
    last = view.log.last if view.log is not None else None
    done = _count(published, "iteration"), None if last is None else last.iteration
    name = table(published.get("run")).get("name")
    status = Status(
        time=view.time,
        run=RunName(name if isinstance(name, str) else view.repository, view.variant),
        verdict=word,
        why=verdict.line,
        exit_code=verdict.exit_code,
        may_sleep=verdict.may_sleep,
        answer=verdict.answer,
        node_use=_node_use(table(published.get("nodes"))),
        iteration=max((value for value in done if value is not None), default=None),
        total_iterations=_count(published, "total_iterations")
        or (last.total_iterations if last is not None else None),
        loss=number(published.get("loss")),
        grad_norm=number(published.get("grad_norm")),
        seconds_per_iteration=_amount(published, "seconds_per_iteration"),
        throughput=_throughput(published, view.log),
        learning_rate=number(published.get("learning_rate")),
        global_batch_size=_count(published, "global_batch_size"),
        consumed_samples=_count(published, "consumed_samples"),
        consumed_tokens=_count(published, "consumed_tokens"),
        finish=_finish(table(published.get("finish")), view, word),
        last_checkpoint=_checkpoint(table(published.get("last_checkpoint")), verdict.age),
        backup=_backup(table(published.get("backup")), view.time, verdict.age),
        copies_missing=_count(published, "copies_missing"),
        copies_damaged=_count(published, "copies_damaged"),
        findings=tuple(_findings(published)),
        unknown=tuple(_unknown(view)),
    )
    if view.log is None:
        return status
    return _with_log(status, view.log)


def _with_log(status: Status, log: LogEnd) -> Status:
    """With what the log itself says of the last steps."""
    if status.seconds_per_iteration is None:
        status = replace(status, seconds_per_iteration=log.seconds_per_iteration)
    last = log.last
    if last is None:
        return status
    values = step_values(last)
    if last.grad_norm is None:
        values["grad_norm"] = status.grad_norm
    return replace(
        status,
        loss_course=LossCourse.of(log.steps),
        **values,
    )


# ----------------------------------------------------------------------------- the parts of what
# was published
def _amount(published: Mapping[str, Any], name: str) -> float | None:
    """A number of 0 or more."""
    value = number(published.get(name))
    if value is not None and value >= 0:
        return value
    return None


def _count(published: Mapping[str, Any], name: str) -> int | None:
    """A whole number of 0 or more."""
    value = _amount(published, name)
    if value is None:
        return None
    return int(value)


def _node_use(published: Mapping[str, Any]) -> NodeUse | None:
    used, spare = _count(published, "used"), _count(published, "spare")
    if used is None or spare is None:
        return None
    return NodeUse(used, spare, _count(published, "excluded"))


def _throughput(published: Mapping[str, Any], log: LogEnd | None) -> Throughput | None:
    speed = table(published.get("throughput"))
    current, unit = _amount(speed, "current"), among(speed.get("unit"), RATE_UNITS)
    if current is not None and unit is not None:
        return Throughput(current, _amount(speed, "best"), unit)
    if log is None or log.tflops is None:
        return None
    return Throughput(log.tflops, None, "TFLOPs")


def _finish(published: Mapping[str, Any], view: RemoteView, word: VerdictWord) -> Finish | None:
    """The range that the run forecast, else what the log's own pace comes to."""
    left = _amount(published, "earliest_seconds")
    if left is None:
        left = None if view.log is None else view.log.remaining_seconds
        if left is None:
            return None
        return Finish(None, None, left)
    first, last = time_of(published.get("earliest")), time_of(published.get("likely"))
    likely = _amount(published, "likely_seconds")
    if word in MOVING and first is not None:  # the end comes nearer while the news get older
        left = max(0.0, first - view.time)
        likely = None
        if last is not None:
            likely = max(left, last - view.time)
    share = _amount(published, "useful_share")
    return Finish(
        first,
        last,
        earliest_seconds=left,
        likely_seconds=likely,
        window_seconds=_amount(published, "window_seconds"),
        useful_share=share,
        usual_seconds=_amount(published, "usual_seconds"),
    )


def _checkpoint(published: Mapping[str, Any], news_age: float | None) -> ShownCheckpoint | None:
    step, age = _count(published, "step"), _amount(published, "age_seconds")
    if step is None:
        return None
    if age is None or news_age is None:
        now = None
    else:
        now = age + news_age
    return ShownCheckpoint(
        step,
        now,
        verified=None,
        bytes=_count(published, "bytes"),
        latest=None,
        count=_count(published, "count"),
    )


def _backup(published: Mapping[str, Any], now: float, news_age: float | None) -> CopyStatus | None:
    age = _amount(published, "age_seconds")
    if age is None or news_age is None:
        return None
    return CopyStatus(now - news_age - age, _count(published, "step"))


def _findings(published: Mapping[str, Any]) -> Iterator[ShownFinding]:
    found = published.get("findings")
    entries = []
    if isinstance(found, list):
        entries = [table(entry) for entry in found]
    for severity in SEVERITIES:
        for entry in entries:
            title, count = entry.get("title"), number(entry.get("count"))
            if entry.get("severity") == severity and isinstance(title, str):
                times = ""
                if count is not None and count > 1:
                    times = f" (x{count:.0f})"
                yield ShownFinding(
                    "",
                    severity,
                    title=title[:80] + times,
                    subject="",
                    evidence=(),
                    fix=None,
                    runbook=None,
                )


def _unknown(view: RemoteView) -> Iterator[str]:
    """What the look could not read, then what the run itself could not see."""
    if view.trouble:
        yield view.trouble
    unknown = (view.published or {}).get("unknown")
    names = []
    if isinstance(unknown, list):
        names = [name for name in unknown if isinstance(name, str)]
    if names:
        yield f"{', '.join(names[:NAMES_SHOWN])}: the run could not see it"
    elif view.published is None and view.log is None:
        yield "steps: there is no log in the repository"


def render_outside(view: RemoteView, screen: Screen) -> RenderableType:
    """The whole screen as one renderable of `screen.width` columns."""
    verdict = judge_outside(view)
    word, style = _badge(verdict)
    status = remote_status(view, verdict)
    head = heading(
        word,
        style,
        name=" / ".join(filter(None, (status.run.name, status.run.variant))),
        time=view.time,
        screen=screen,
    )
    said = ""
    if verdict.answer:
        said = f" {verdict.answer}."
    sentence = f"{_as_of(view, verdict, screen)}{said} {capitalized(verdict.line)}."
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
    if verdict.is_stale and verdict.word is not None:
        return f"{said}, it said {verdict.word.upper()}."
    return f"{said}."


def _rows(view: RemoteView, status: Status, screen: Screen) -> Iterator[Row]:
    published: Mapping[str, Any] = view.published or {}
    yield "", "", ""
    yield from rows.training(status, screen)
    yield from _step(status)
    yield from _queue(published)
    if status.node_use is not None:
        yield from node_rows(status)
    if status.last_checkpoint is not None:
        yield from rows.checkpoint(status)
    if status.backup is not None:
        yield from copy_rows(replace(status, card=CardWishes(copies=("backup",))))
    yield from _goodput(table(published.get("goodput")))
    yield from _log(view)
    yield "", "", ""
    for incident in rows.incidents_of(status.findings):
        yield from rows.incident_rows(incident)
    if view.facts.changed is None:
        changed = ""
    else:
        changed = f", of {timestamp(view.facts.changed, screen.zone)}"
    yield "hub", f"{view.repository} at commit {view.facts.commit[:8]}{changed}", "dim"
    yield from (row for row in rows.unknown_rows(status) if row[1])


def _step(status: Status) -> Iterator[Row]:
    parts = []
    if status.grad_norm is not None:
        parts = [f"gradient norm {status.grad_norm:.3f}"]
    parts += (
        [f"learning rate {status.learning_rate:.3g}"] if status.learning_rate is not None else []
    )
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
        fell = ""
        if faults is not None:
            fell = f"; {counted(int(faults), 'fault')} so far"
        yield "goodput", f"{100 * share:.1f} % of the held node time was useful{fell}", ""


def _log(view: RemoteView) -> Iterator[Row]:
    """What the log proves by itself, and how long it had been silent when the run was looked at."""
    if view.log is None:
        yield "log", "there is none in the repository", "yellow"
        return
    last = view.log.last
    what = "no step in its end"
    if last is not None:
        what = f"ends at iteration {last.iteration:,}"
    published = view.published or {}
    then, logged = time_of(published.get("time")), time_of(published.get("last_step_time"))
    silent = ""
    if then is not None and logged is not None:
        silent = f", {duration(max(0.0, then - logged))} before that look"
    stamped = ""
    if view.log.stamp:
        stamped = f"; last stamped line {view.log.stamp} (its cluster's clock)"
    yield "log", f"{what}{silent}{stamped}; {size(view.log.size)}", ""
