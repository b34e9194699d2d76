"""What may be concluded of a run from outside, by what it published and by the end of its log.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tr11ops.base.units import duration, finite, iso_time
from tr11ops.hub.log_end import LogEnd
from tr11ops.status.answer import published_answer
from tr11ops.status.published import EXIT_CODES, needs_of, number, stamp, word_of
from tr11ops.status.remote import RemoteView
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.record import Record

SCHEMA = 1
USUAL_INTERVAL_SECONDS = 3600.0
MOST_INTERVAL_SECONDS = 30 * 86400.0
MISSED_INTERVALS = 3  # after so many no one synchronises any more


class OutsideVerdict(Record):
    """The word (None where only the log speaks), how old the news is, whether it is too old, and
    what it comes to.

    `age` in seconds, None where nothing says; `line` is a sentence without a full stop. `may_sleep`
    and `answer` are the run's own; None and "" where it published none, or where it is too old to
    go by.
    """

    word: VerdictWord | None
    age: float | None
    interval: float
    is_stale: bool
    line: str
    exit_code: int
    may_sleep: bool | None = None
    answer: str = ""


def judge_outside(view: RemoteView) -> OutsideVerdict:
    """What may be concluded from outside. What is older than three intervals of the synchronisation
    is no news, but of a run that is finished or stopped none is expected.
    """
    published = view.published
    since, interval, word = view.facts.changed, USUAL_INTERVAL_SECONDS, None
    if published is not None:
        told_at = time_of(published.get("time"))
        since = since if told_at is None else told_at
        asked = number(published.get("interval_seconds"))
        if asked is not None and asked > 0:
            interval = min(asked, MOST_INTERVAL_SECONDS)
        word = word_of(published.get("verdict"))
    age = None
    if since is not None:
        age = max(0.0, view.time - since)
    over = word is VerdictWord.FINISHED or (
        word is None and view.log is not None and view.log.is_finished
    )
    stale = (
        not over
        and word is not VerdictWord.STOPPED
        and age is not None
        and age > MISSED_INTERVALS * interval
    )
    if stale and age is not None:
        line = f"nothing was synchronised for {duration(age)}: the run's sync is dead, or its cluster is"
        return OutsideVerdict(word, age, interval, stale, line, 1)
    if over:
        return OutsideVerdict(
            word, age, interval, stale, "the training is finished", 0, *_answer(published)
        )
    if published is None:
        why = view.trouble or "the run publishes no status"
        if view.log is not None:
            line = f"{why}: its log alone tells, and not how the run is"
        else:
            line = f"{why}, and no log"
        return OutsideVerdict(None, age, interval, stale, line, 3)
    said, code = published.get("line"), published.get("exit_code")
    if isinstance(said, str) and said:
        sentence = said[:200]
    else:
        sentence = "the run says no more"
    if isinstance(code, int) and code in EXIT_CODES and age is not None:
        exit_code = code
    else:
        exit_code = 3
    if word is VerdictWord.UNKNOWN and not exit_code:  # a word of a later version, or none
        exit_code = 3
    return OutsideVerdict(word, age, interval, stale, sentence, exit_code, *_answer(published))


def _answer(published: Mapping[str, Any] | None) -> tuple[bool | None, str]:
    """What the run answered to "may I sleep?"; an older tr11, which asked for less, published no
    needs: no answer.
    """
    if published is None or "sleep_needs" not in published:
        return None, ""
    status_document = published.get("may_sleep")
    may_sleep = status_document if isinstance(status_document, bool) else None
    return may_sleep, published_answer(
        may_sleep, word_of(published.get("verdict")), needs_of(published["sleep_needs"])
    )


def outside_document(view: RemoteView) -> dict[str, Any]:
    """`tr11 status --remote --json`: plain JSON values; null means unknown, or that there is none."""
    verdict, log = judge_outside(view), view.log
    return {
        "schema": SCHEMA,
        "time": iso_time(view.time),
        "repository": view.repository,
        "commit": view.facts.commit,
        "changed": iso_time(view.facts.changed),
        "variant": view.variant or None,
        "variants": list(view.facts.logs),
        "verdict": None if verdict.word is None else verdict.word.value,
        "line": verdict.line,
        "may_sleep": verdict.may_sleep,
        "answer": verdict.answer or None,
        "age_seconds": verdict.age,
        "interval_seconds": verdict.interval,
        "is_stale": verdict.is_stale,
        "exit_code": verdict.exit_code,
        "published": None if view.published is None else dict(view.published),
        "log": None if log is None else {"path": view.log_path, **_log_document(log)},
        "unknown": [view.trouble] if view.trouble else [],
    }


def _log_document(log: LogEnd) -> dict[str, Any]:
    last = log.last
    return {
        "bytes": log.size,
        "last_stamp": log.stamp or None,
        "iteration": None if last is None else last.iteration,
        "total_iterations": None if last is None else last.total_iterations,
        "loss": None if last is None else finite(last.lm_loss),
        "grad_norm": None if last is None or last.grad_norm is None else finite(last.grad_norm),
        "learning_rate": None if last is None else finite(last.learning_rate),
        "consumed_samples": None if last is None else last.consumed_samples,
        "consumed_tokens": None if last is None else last.consumed_tokens or None,
        "seconds_per_iteration": log.seconds_per_iteration,
        "tflops": log.tflops,
        "remaining_seconds": log.remaining_seconds,
    }


def time_of(value: object) -> float | None:
    """A published moment in seconds since the epoch; None for anything else."""
    text = stamp(value)
    try:
        if text is None:
            return None
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
