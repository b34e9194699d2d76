"""What a run says of itself in public: a small status.json on the hub, which `tr11 status --remote`
reads.

Nothing is taken out of the full status; a few fields are let in, and each must be a number, a
moment, or a word from a closed list. So no name of a node, a person, a host, a folder or a job can
be in it, whatever the observation holds. Pure; `tr11ops.status.publish` looks at the run and makes
the file.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from datetime import datetime
from typing import Any

from tr11ops.alerts.state import AlertCare, OnCall
from tr11ops.cluster.base import ACTIVE_STATES, JobState
from tr11ops.observe.snapshot import SNAPSHOT_NAMES
from tr11ops.status.answer import NEEDS
from tr11ops.status.document import unknown_names
from tr11ops.status.extra_observations import EXTRA_NAMES
from tr11ops.watchdog.verdict import STALLING, VerdictWord
from trainer.contract.record import LARGEST_NUMBER, Record
from trainer.contract.units import printable, shortened

SCHEMA = 1
MOST_ROWS = 60
LONGEST = 600
EXIT_CODES = frozenset({0, 1, 3})
SEVERITIES = ("critical", "warning", "info")
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:Z|[+-]\d\d:\d\d)", re.ASCII)
_NUMBERS = (
    "iteration",
    "total_iterations",
    "loss",
    "grad_norm",
    "learning_rate",
    "tflops",
    "seconds_per_iteration",
    "global_batch_size",
    "consumed_samples",
    "consumed_tokens",
    "remaining_seconds",
    "copies_missing",
    "copies_damaged",
)
RATE_UNITS = frozenset({"TFLOPs", "samples/s"})
# what may be unknown, by the names that an observation gives it
_OBSERVED = SNAPSHOT_NAMES | EXTRA_NAMES
_LINES = {
    VerdictWord.HEALTHY: "the training runs",
    VerdictWord.SLOW: "the training runs, slower than it could",
    VerdictWord.AT_RISK: "the training runs, and needs a person",
    VerdictWord.STARTING: "an attempt is starting",
    VerdictWord.QUEUED: "nothing runs now; the next attempt waits for its nodes",
    VerdictWord.STALLED: "an attempt holds its nodes, but the training does not move",
    VerdictWord.DOWN: "nothing trains, and nothing is about to",
    VerdictWord.STOPPING: "someone stopped it; it saves and leaves",
    VerdictWord.STOPPED: "someone stopped it",
    VerdictWord.FINISHED: "the training is finished",
    VerdictWord.UNKNOWN: "what it is doing could not be seen",
}


class GoodputSummary(Record):
    """Where the time went, in four numbers: shares 0..1, `held_node_hours`, and the number of
    faults so far.
    """

    useful_share: float | None
    effective_time_ratio: float | None
    held_node_hours: float
    faults: int


def published_status(
    document: Mapping[str, Any],
    detectors: Iterable[str],
    goodput: GoodputSummary | None = None,
    interval_seconds: float | None = None,
) -> dict[str, Any]:
    """The public part of a status document (docs/reference/status-json.md), as plain JSON values. Pure.

    `detectors` are the names that findings may have; another one is published as "other".
    `interval_seconds` is how often the repository is brought up to date. null means unknown, or
    that there is none, as in the document.
    """
    known_names = frozenset(detectors)
    findings = _findings(document.get("findings"), known_names)
    word = word_of(document.get("verdict"))
    code = document.get("exit_code")
    done, total = (number(document.get(name)) for name in ("iteration", "total_iterations"))
    unknown = _unknown(document.get("unknown"))
    if goodput is None:
        unknown = [*unknown, "goodput"]
    run = table(document.get("run"))
    return {
        "schema": SCHEMA,
        "time": stamp(document.get("time")),
        "interval_seconds": number(interval_seconds),
        "run": {"name": _name(run.get("name")), "variant": _name(run.get("variant"))},
        "verdict": word.value,
        "verdict_since": stamp(document.get("verdict_since")),
        "line": _line(word, findings),
        "exit_code": code if isinstance(code, int) and code in EXIT_CODES else 3,
        "may_sleep": document.get("may_sleep")
        if isinstance(document.get("may_sleep"), bool)
        else None,
        "sleep_needs": needs_of(document.get("sleep_needs")),
        **{name: number(document.get(name)) for name in _NUMBERS},
        "progress_percent": 100.0 * done / total if done is not None and total else None,
        "last_step_time": stamp(document.get("last_step_time")),
        "throughput": _throughput(document.get("throughput")),
        "finish": _finish(document.get("finish")),
        "last_checkpoint": numbers(
            document.get("last_checkpoint"), ("step", "age_seconds", "bytes", "count")
        ),
        "next_checkpoint": numbers(document.get("next_checkpoint"), ("step", "seconds")),
        "attempts": _attempts(document.get("jobs")),
        "nodes": _nodes(document.get("node_use")),
        "backup": numbers(document.get("backup"), ("step", "age_seconds")),
        "findings": findings,
        "goodput": None
        if goodput is None
        else {
            "useful_share": number(goodput.useful_share),
            "effective_time_ratio": number(goodput.effective_time_ratio),
            "held_node_hours": number(goodput.held_node_hours),
            "faults": goodput.faults,
        },
        "unknown": unknown,
    }


def _findings(found: object, known_names: frozenset[str]) -> list[dict[str, Any]]:
    """Detector, severity and how often; titles name nodes and jobs, so they are told from the
    detector's name.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for finding in list_of(found):
        told = table(finding)
        severity = among(told.get("severity"), SEVERITIES)
        if severity is not None:
            counts[severity, among(told.get("detector"), known_names) or "other"] += 1
    ordered = [key for severity in SEVERITIES for key in counts if key[0] == severity]
    return [
        {
            "severity": severity,
            "detector": detector,
            "title": detector.replace("-", " "),
            "count": counts[severity, detector],
        }
        for severity, detector in ordered
    ]


def _line(word: VerdictWord, findings: list[dict[str, Any]]) -> str:
    """One sentence for the verdict, without a full stop."""
    critical = [entry for entry in findings if entry["severity"] == "critical"]
    if word is VerdictWord.STALLED:
        critical = [entry for entry in critical if entry["detector"] in STALLING]
    elif word is not VerdictWord.AT_RISK:
        critical = []
    because = ", ".join(entry["title"] for entry in critical)
    if because:
        return f"{_LINES[word]}: {because}"
    return _LINES[word]


def _attempts(jobs: object) -> dict[str, int] | None:
    """How many attempts hold nodes, and how many wait."""
    if not isinstance(jobs, list):
        return None
    told = [table(job) for job in jobs]
    waiting = [
        number(job.get("tasks")) for job in told if among(job.get("state"), {JobState.PENDING})
    ]
    return {
        "running": sum(among(job.get("state"), ACTIVE_STATES) is not None for job in told),
        "waiting": sum(1 if tasks is None else int(tasks) for tasks in waiting),
    }


def _nodes(use: object) -> dict[str, float | None] | None:
    return numbers(use, ("used", "spare", "excluded"))


def _throughput(value: object) -> dict[str, Any] | None:
    rates = numbers(value, ("current", "best", "percent"))
    if rates is None:
        return None
    return {**rates, "unit": among(table(value).get("unit"), RATE_UNITS)}


def _finish(value: object) -> dict[str, Any] | None:
    spans = numbers(
        value,
        ("earliest_seconds", "likely_seconds", "window_seconds", "useful_share", "usual_seconds"),
    )
    if spans is None:
        return None
    told = table(value)
    return {"earliest": stamp(told.get("earliest")), "likely": stamp(told.get("likely")), **spans}


def _unknown(lines: object) -> list[str]:
    """What could not be observed, without the reasons: these name files and machines."""
    heads = [unknown_names(line) for line in list_of(lines) if isinstance(line, str)]
    return list(
        dict.fromkeys(name if name in _OBSERVED else "other" for names in heads for name in names)
    )


# ----------------------------------------------------------------------------- what is let in, and
# read again
def read_published(data: bytes) -> dict[str, Any]:
    """A status.json as someone else published it: a table with a table `run`; of all else nothing
    is sure.

    Raises ValueError for anything else, and for a schema of a later tr11.
    """
    try:
        value = json.loads(data, parse_constant=lambda word: None)
    except (ValueError, RecursionError):
        raise ValueError("is no JSON") from None
    if not isinstance(value, dict) or not isinstance(value.get("run"), dict):
        raise ValueError("is no status of a run")
    schema = value.get("schema")
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise ValueError("has a schema that this tr11 does not know; upgrade it")
    return value


def table(value: object) -> Mapping[str, Any]:
    """A table; an empty one for anything else."""
    if isinstance(value, Mapping):
        return value
    return {}


def rows(value: object, most: int = MOST_ROWS) -> list[Mapping[str, Any]]:
    """The tables in a list, not too many; none for anything else."""
    return [entry for entry in list_of(value)[:most] if isinstance(entry, Mapping)]


def list_of(value: object) -> list[Any]:
    """A list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def text(value: object, most: int = LONGEST) -> str:
    """A text on one line, not too long, that turns no direction of writing; "" for anything else."""
    if not isinstance(value, str):
        return ""
    return shortened(" ".join(printable(value, " ").split()), most)


def care_of(alert: Mapping[str, Any]) -> AlertCare:
    """Who looks after an alert of a document, whoever wrote it."""
    return AlertCare(
        text(alert.get("owner"), 60),
        text(alert.get("acknowledged_by"), 60),
        seconds_of(alert.get("snoozed_until")),
        tuple(text(name, 60) for name in list_of(alert.get("told"))[:MOST_ROWS]),
        is_found=alert.get("found") is not False,
        closes=seconds_of(alert.get("looks") or alert.get("closes")),
        is_told=alert.get("told", ()) is not None,
        subject=text(f"{alert.get('detector') or ''} {alert.get('subject') or ''}", 80),
    )


def cares_of(told: Mapping[str, Any]) -> tuple[AlertCare, ...]:
    """Who looks after what a document tells of: what no one was told of yet, then the open alerts."""
    return tuple(map(care_of, (*rows(told.get("untold")), *rows(told.get("alerts")))))


def on_call_of(value: object) -> OnCall | None:
    """Who is on call by a document, whoever wrote it; None where it does not tell."""
    told = table(value)
    who = tuple(text(name, 60) for name in list_of(told.get("who"))[:MOST_ROWS])
    if not isinstance(value, Mapping):
        return None
    return OnCall(who, seconds_of(told.get("until")), seconds_of(told.get("taken")))


def number(value: object) -> float | None:
    """A number of a sane size; None for anything else."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) < LARGEST_NUMBER
    ):
        return None
    return value


def numbers(value: object, names: Iterable[str]) -> dict[str, float | None] | None:
    """These numbers of a table; None for anything else."""
    if isinstance(value, Mapping):
        return {name: number(value.get(name)) for name in names}
    return None


def among(value: object, words: Container[str]) -> str | None:
    """The word, where it is one of these."""
    if isinstance(value, str) and value in words:
        return value
    return None


def stamp(value: object) -> str | None:
    """A moment in ISO 8601 with its zone; None for anything else."""
    if isinstance(value, str) and _STAMP.fullmatch(value):
        return value
    return None


def seconds_of(value: object) -> float | None:
    """A moment of a document in seconds since the epoch; None for anything else."""
    shown = stamp(value)
    try:
        return None if shown is None else datetime.fromisoformat(shown).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def word_of(value: object) -> VerdictWord:
    """One of the verdicts; UNKNOWN for anything else."""
    if isinstance(value, str) and value in set(VerdictWord):
        return VerdictWord(value)
    return VerdictWord.UNKNOWN


def needs_of(value: object) -> list[str]:
    """What is missing before a person may sleep, by its kind: from a status document, or as it was
    published.
    """
    kinds = [entry.get("kind") if isinstance(entry, Mapping) else entry for entry in list_of(value)]
    return [kind for kind in NEEDS if kind in kinds]


def _name(value: object) -> str | None:
    """The run's own name, which the repository's folders carry anyway."""
    if isinstance(value, str):
        return value
    return None
