"""The status document of a run seen from outside: what it published, and the end of its log. Pure.

What was published is from anyone: each value is a number, a moment or a word of a closed list, or it is left out.
Ages and moments are by the reader's clock: what was two hours old an hour ago is three hours old.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from tr11ops.hub.log_end import LogEnd
from tr11ops.observe.forecast import Throughput
from tr11ops.observe.operation import CopyStatus
from tr11ops.status.document import Finish, LossCourse, RunName, ShownCheckpoint, ShownFinding, Status, step_values
from tr11ops.status.extra_observations import NodeUse
from tr11ops.status.published import RATE_UNITS, SEVERITIES, among, number, table
from tr11ops.status.remote import RemoteView
from tr11ops.status.remote_verdict import OutsideVerdict, time_of
from tr11ops.watchdog.verdict import VerdictWord

NAMES_SHOWN = 20
MOVING = frozenset({VerdictWord.HEALTHY, VerdictWord.AT_RISK, VerdictWord.STARTING})


def remote_status(view: RemoteView, verdict: OutsideVerdict) -> Status:
    """What may be said of the run at `view.time`. What the log proves counts more than what was published."""
    published: Mapping[str, Any] = view.published or {}
    word = VerdictWord.UNKNOWN if verdict.is_stale or verdict.word is None else verdict.word
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
        total_iterations=_count(published, "total_iterations") or (last.total_iterations if last is not None else None),
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
    return status if view.log is None else _with_log(status, view.log)


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
    return replace(status, loss_course=LossCourse.of({step.iteration: step.lm_loss for step in log.steps}), **values)


# ----------------------------------------------------------------------------- the parts of what was published
def _amount(published: Mapping[str, Any], name: str) -> float | None:
    """A number of 0 or more."""
    value = number(published.get(name))
    return value if value is not None and value >= 0 else None


def _count(published: Mapping[str, Any], name: str) -> int | None:
    """A whole number of 0 or more."""
    value = _amount(published, name)
    return None if value is None else int(value)


def _node_use(published: Mapping[str, Any]) -> NodeUse | None:
    used, spare = _count(published, "used"), _count(published, "spare")
    return None if used is None or spare is None else NodeUse(used, spare, _count(published, "excluded"))


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
        return None if left is None else Finish(None, None, left)
    first, last = time_of(published.get("earliest")), time_of(published.get("likely"))
    likely = _amount(published, "likely_seconds")
    if word in MOVING and first is not None:  # the end comes nearer while the news get older
        left = max(0.0, first - view.time)
        likely = None if last is None else max(left, last - view.time)
    share = _amount(published, "useful_share")
    return Finish(first, last, left, likely, _amount(published, "window_seconds"), share)


def _checkpoint(published: Mapping[str, Any], news_age: float | None) -> ShownCheckpoint | None:
    step, age = _count(published, "step"), _amount(published, "age_seconds")
    if step is None:
        return None
    now = None if age is None or news_age is None else age + news_age
    return ShownCheckpoint(step, now, None, _count(published, "bytes"), None, _count(published, "count"))


def _backup(published: Mapping[str, Any], now: float, news_age: float | None) -> CopyStatus | None:
    age = _amount(published, "age_seconds")
    if age is None or news_age is None:
        return None
    return CopyStatus(now - news_age - age, _count(published, "step"))


def _findings(published: Mapping[str, Any]) -> Iterator[ShownFinding]:
    found = published.get("findings")
    entries = [table(entry) for entry in found] if isinstance(found, list) else []
    for severity in SEVERITIES:
        for entry in entries:
            title, count = entry.get("title"), number(entry.get("count"))
            if entry.get("severity") == severity and isinstance(title, str):
                times = f" (x{count:.0f})" if count is not None and count > 1 else ""
                yield ShownFinding("", severity, title[:80] + times, "", (), None, None)


def _unknown(view: RemoteView) -> Iterator[str]:
    """What the look could not read, then what the run itself could not see."""
    if view.trouble:
        yield view.trouble
    unknown = (view.published or {}).get("unknown")
    names = [name for name in unknown if isinstance(name, str)] if isinstance(unknown, list) else []
    if names:
        yield f"{', '.join(names[:NAMES_SHOWN])}: the run could not see it"
    elif view.published is None and view.log is None:
        yield "steps: there is no log in the repository"
