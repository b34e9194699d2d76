"""A run seen from a laptop, through its hub repository alone: what it published of itself, and the
end of its log.

All that is read in one look belongs to one commit. A repository without a status.json is told by
its log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from email.message import Message
from typing import IO, Any

from msgspec.structs import replace

from tr11ops.base.errors import HubPermanentError, HubUnavailable
from tr11ops.base.retry import RetryPolicy
from tr11ops.base.units import duration, finite, iso_time
from tr11ops.hub.base import FILE_NAME, HubRepo, host_of
from tr11ops.hub.log_end import LogEnd, end_of_log
from tr11ops.hub.remote_log import MISSING, TIMEOUT_SECONDS, RemoteLog, ask, until_answered
from tr11ops.status.answer import published_answer
from tr11ops.status.published import EXIT_CODES, needs_of, number, read_published, stamp, word_of
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.errors import Tr11Error
from trainer.contract.record import Record
from trainer.contract.units import shortened

LARGEST_FACTS_BYTES = 8 << 20  # some ten thousand files; parsed, it is twenty times as large
LARGEST_STATUS_BYTES = 1 << 20
TAIL_BYTES = (256 << 10, 4 << 20)  # the second where no step is in the first
MOST_VARIANTS = 8  # whose logs are compared to find the newest
NOT_CHANGED = 304
_MAIN_LOG = re.compile(r"(?:(?:logs/)?([^/]+)/)?main_log\.txt")


class NoSuchVariant(Tr11Error, LookupError):
    """The repository has no log of that variant, or too many to choose among. `variants` are those
    that it has.
    """

    def __init__(self, variants: tuple[str, ...]) -> None:
        super().__init__(variants)
        self.variants = variants


class Facts(Record):
    """What the hub says of a repository: its newest commit, when that was made, and the files in
    it.
    """

    commit: str
    changed: float | None
    files: tuple[str, ...]

    @property
    def logs(self) -> Mapping[str, str]:
        """The main logs by variant, in the order of their names."""
        found = ((match, name) for name in self.files if (match := _MAIN_LOG.fullmatch(name)))
        return {match[1] or "main": name for match, name in sorted(found, key=lambda pair: pair[1])}


class RemoteView(Record):
    """One look from outside, at `time`. `published` is None where the repository has no status of
    this variant; `trouble` then says what is wrong with one that is there. `log` is None where
    there is no log.
    """

    time: float
    repository: str
    facts: Facts
    variant: str
    published: Mapping[str, Any] | None
    trouble: str
    log_path: str
    log: LogEnd | None


class Outside:
    """Looks at a repository again and again; asks for little where nothing changed.

    `variant` is the one to look at; None: the one that the status is of, else the one whose log
    ends last.
    """

    def __init__(
        self,
        repo: HubRepo,
        token: str | None,
        retries: RetryPolicy,
        variant: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._repo = repo
        self._token = token
        self._retries = retries
        self._variant = variant
        self._timeout = timeout
        self._tag = ""  # of the last answer about the repository
        self._last: RemoteView | None = None

    def facts(self) -> Facts | None:
        """What is in the repository; None where nothing changed since the last time that there was
        a view.

        Raises HubPermanentError and HubUnavailable.
        """
        if self._tag and self._last is not None:
            headers = {"If-None-Match": self._tag}
        else:
            headers = {}
        address = self._repo.facts
        try:
            return until_answered(
                lambda: ask(
                    address,
                    self._token,
                    read=self._read_facts,
                    headers=headers,
                    timeout=self._timeout,
                    also={NOT_CHANGED},
                ),
                self._retries,
                host_of(address),
            )
        except HubPermanentError as error:
            if error.status != MISSING:
                raise
            text = f"{host_of(address)} answers 404: there is no such repository, or your token may not see it"
            raise HubPermanentError(text, MISSING) from None

    def _read_facts(self, stream: IO[bytes], status: int, headers: Message) -> Facts | None:
        if status == NOT_CHANGED:
            return None
        data = _whole(stream, headers, LARGEST_FACTS_BYTES)
        try:
            value = json.loads(data)
            commit, siblings = value["sha"], value.get("siblings") or []
            names = tuple(str(entry["rfilename"]) for entry in siblings)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise HubPermanentError(
                f"{host_of(self._repo.facts)} answers something that is no repository"
            ) from None
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise HubPermanentError("the repository is empty: nothing was ever synchronised to it")
        self._tag = headers.get("ETag", "")
        return Facts(commit, _moment(value.get("lastModified")), names)

    def look(self, now: float) -> RemoteView:
        """One look. Raises HubPermanentError, HubUnavailable and NoSuchVariant."""
        facts = self.facts()
        if self._last is not None and (facts is None or facts.commit == self._last.facts.commit):
            self._last = replace(self._last, time=now)
            return self._last
        if facts is None:
            raise HubUnavailable(f"{host_of(self._repo.facts)} answers 304 to a first question")
        published, trouble = self._published(facts)
        variant, path, log = self._choose(facts, published)
        told = None
        if published is not None:
            told = _variant_of(published)
        if told not in {None, variant}:
            published, trouble = None, f"{FILE_NAME} is of variant {told}"
        self._last = RemoteView(
            now,
            self._repo.name,
            facts=facts,
            variant=variant,
            published=published,
            trouble=trouble,
            log_path=path,
            log=log,
        )
        return self._last

    def _published(self, facts: Facts) -> tuple[Mapping[str, Any] | None, str]:
        """The status, and what is wrong with it where it cannot be used."""
        if FILE_NAME not in facts.files:
            return None, ""
        piece = self._file(FILE_NAME, facts).fetch(0, LARGEST_STATUS_BYTES)
        try:
            return read_published(piece.data), ""
        except ValueError as error:
            return None, f"{FILE_NAME} {error}"

    def _choose(
        self, facts: Facts, published: Mapping[str, Any] | None
    ) -> tuple[str, str, LogEnd | None]:
        """The variant to tell of, the path of its log, and the log's end."""
        logs = facts.logs
        told = None
        if published is not None:
            told = _variant_of(published)
        wanted = self._variant or told
        if wanted is not None and (wanted in logs or wanted == told):
            path = logs.get(wanted, "")
            return wanted, path, self._log_end(path, facts) if path else None
        if self._variant is not None or len(logs) > MOST_VARIANTS:
            raise NoSuchVariant(tuple(logs))
        if not logs:
            if published is None:
                where = "neither status.json nor logs/VARIANT/main_log.txt in it"
                raise HubPermanentError(
                    f"this is no repository of a training's logs: there is {where}", MISSING
                )
            return "", "", None
        ends = {variant: self._log_end(path, facts) for variant, path in logs.items()}
        newest = max(ends, key=lambda variant: ends[variant].order)
        return newest, logs[newest], ends[newest]

    def _log_end(self, path: str, facts: Facts) -> LogEnd:
        log = self._file(path, facts)
        size = log.size()
        for length in TAIL_BYTES:
            start = max(0, size - length)
            data = log.fetch(start, size - start).data if size else b""
            end = end_of_log(data, size, is_whole=start == 0)
            if end.last is not None or start == 0:
                break
        return end

    def _file(self, path: str, facts: Facts) -> RemoteLog:
        return RemoteLog(
            self._repo.file(path, facts.commit), self._token, self._retries, self._timeout
        )


def _variant_of(published: Mapping[str, Any]) -> str | None:
    name = published["run"]["variant"]
    if isinstance(name, str):
        return name
    return None


def _whole(stream: IO[bytes], headers: Message, most: int) -> bytes:
    """The whole answer. Raises HubUnavailable when the connection ended inside it,
    HubPermanentError when too large.
    """
    data = stream.read(most + 1)
    if len(data) > most:
        raise HubPermanentError(f"the answer is larger than {most >> 20} MiB")
    size = headers.get("Content-Length", "")
    if size.isdecimal() and len(data) < int(size):
        raise HubUnavailable("the answer was cut")
    return data


def _moment(value: object) -> float | None:
    """Seconds since the epoch of the hub's own time stamps (ISO 8601, UTC); None for anything else."""
    try:
        if isinstance(value, str):
            return datetime.fromisoformat(str(value)).timestamp()
        return None
    except (ValueError, OverflowError, OSError):
        return None


# ---------------------------------------------------------------- what may be concluded

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
        return OutsideVerdict(word, age, interval=interval, is_stale=stale, line=line, exit_code=1)
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
        return OutsideVerdict(None, age, interval=interval, is_stale=stale, line=line, exit_code=3)
    said, code = published.get("line"), published.get("exit_code")
    sentence = "the run says no more"
    if isinstance(said, str) and said:
        sentence = shortened(said, 200)
    exit_code = 3
    if isinstance(code, int) and code in EXIT_CODES and age is not None:
        exit_code = code
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
        "grad_norm": None if last is None else finite(last.grad_norm),
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
