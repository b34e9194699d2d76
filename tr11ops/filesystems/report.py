"""What one look at the file systems means, and how it is told. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tr11ops.base.observed import Observed, Unknown
from tr11ops.base.units import counted, quantity, size
from tr11ops.detect.storage import filling, full, when
from tr11ops.filesystems.look import FilesystemResult
from tr11ops.runcard.watching import FilesystemSection
from tr11ops.rundir.disk_usage import DAY_SECONDS, Forecast, Kind, Usage, forecast
from tr11ops.rundir.permissions import PermissionTally
from trainer.contract.documents import document
from trainer.contract.record import JsonObject, Record

SCHEMA = 1
EXIT_FINE, EXIT_NEEDS_PERSON, EXIT_UNOBSERVED = 0, 1, 3


class Judged(Record):
    """One file system: what was seen of it, which of its limits are passed, and when it will be
    full.
    """

    look: FilesystemResult
    full: tuple[str, ...] = ()
    filling: str = ""
    forecast: Forecast = Forecast()


class HeldBytes(Record):
    """What a run holds of another trainer's checkpoints: how many, their bytes, and of these what the
    trainer has no more, which pruning frees.
    """

    count: int
    bytes: int
    alone: int


class FilesystemReport(Record):
    """One look at all watched file systems. `drift` is None when the rights were not looked at, `held`
    where nothing of another trainer's is held.
    """

    run: str
    time: float
    systems: tuple[Judged, ...]
    drift: Observed[PermissionTally] | None = None
    held: HeldBytes | None = None

    @property
    def exit_code(self) -> int:
        """1 if one is full; 3 if nothing could be observed; else 0."""
        if any(one.full for one in self.systems):
            return EXIT_NEEDS_PERSON
        unknown = [isinstance(one.look.usage, Unknown) for one in self.systems]
        if unknown and all(unknown):
            return EXIT_UNOBSERVED
        return EXIT_FINE


def judge(
    run: str,
    rules: Sequence[FilesystemSection],
    looks: Sequence[FilesystemResult],
    history: Sequence[Usage],
    now: float,
) -> FilesystemReport:
    """Compare each look with its rule; `history` holds the earlier samples of all of them."""
    systems = []
    for rule, look in zip(rules, looks, strict=True):
        if isinstance(look.usage, Unknown):
            systems.append(Judged(look))
            continue
        samples = [*(sample for sample in history if sample.name == rule.name), look.usage]
        found = forecast(samples, now)
        systems.append(Judged(look, full(look.usage, rule), filling(found, rule, now), found))
    return FilesystemReport(run, now, tuple(systems))


# ----------------------------------------------------------------------------- for people
def lines(report: FilesystemReport, debug: bool = False) -> Iterator[str]:
    """What is told: the alerts first, or that all is well; then what deserves a look. With `debug`
    every measure.
    """
    if debug:
        for one in report.systems:
            yield from _measures(one, report.time)
    alerts = [line for one in report.systems for line in _alerts(one)]
    if alerts:
        yield f"[ALERT] {report.run} filesystem is getting close to being full"
        yield from alerts
    else:
        yield _all_is_well(report)
    for one in report.systems:
        if one.filling:
            yield one.filling
        yield from (f"{one.look.name}: {note}" for note in one.look.notes)
    for one in report.systems:
        if isinstance(one.look.usage, Unknown):
            yield f"{one.look.name} is unknown: {one.look.usage.why}"
    if report.held is not None:
        yield _held(report.held)
    yield from _rights(report.drift)


def _held(held: HeldBytes) -> str:
    count = counted(held.count, "checkpoint")
    return (
        f"{count} of its trainer's held, {size(held.bytes)}: {size(held.alone)} of it are here alone, the rest are"
        " links; `tr11 checkpoints prune --dry-run` says which the card's [backup] lets go, and why"
    )


def _alerts(one: Judged) -> Iterator[str]:
    yield from one.full
    if one.full and one.look.report:
        yield from (f"    {line}" for line in one.look.report.splitlines())


def _all_is_well(report: FilesystemReport) -> str:
    if not report.systems:
        return "No file system is watched: add [[filesystems]] tables to the card"
    seen = sum(not isinstance(one.look.usage, Unknown) for one in report.systems)
    if seen == 0:
        return "No file system could be observed"
    if seen == len(report.systems):
        return "All file systems are in good standing"
    return (
        f"{seen} of {len(report.systems)} file systems are in good standing, the others are unknown"
    )


def _measures(one: Judged, now: float) -> Iterator[str]:
    usage = one.look.usage
    if isinstance(usage, Unknown):
        return
    yield f"{usage.name} ({usage.source}{f' {usage.path}' if usage.path else ''})"
    yield f"  bytes   {_measure(usage, 'bytes')}"
    yield f"  inodes  {_measure(usage, 'inodes')}"
    if usage.bytes_free is not None:
        yield f"  free    {size(usage.bytes_free)}"
    yield f"  full    {when(one.forecast, now)}"


def _measure(usage: Usage, kind: Kind) -> str:
    used, limit = usage.counts(kind)
    show = size if kind == "bytes" else quantity
    percent = usage.percent(kind)
    if percent is None:
        share = ""
    else:
        share = f"{percent:.1f}%"
    if used is None:
        return share or "not known"
    if limit:
        of_limit = f"{show(used)} of {show(limit)}"
    else:
        of_limit = f"{show(used)}, no limit known"
    if share:
        return f"{share} ({of_limit})"
    return of_limit


def _rights(drift: Observed[PermissionTally] | None) -> Iterator[str]:
    if isinstance(drift, Unknown):
        yield f"Rights of the run's files are unknown: {drift.why}"
    elif drift is not None and drift.wrong:
        if drift.is_complete:
            looked = f"{drift.entries:,}"
        else:
            looked = f"the first {drift.entries:,}"
        wrong = counted(drift.wrong, "file is", "files are")
        yield f"{wrong} not usable for the run's group, of {looked}: tr11 perms check"


# ----------------------------------------------------------------------------- for programs
def value(report: FilesystemReport) -> JsonObject:
    """The report for --json; times in seconds since the epoch, sizes in bytes."""
    return {
        "schema": SCHEMA,
        "run": report.run,
        "time": report.time,
        "exit_code": report.exit_code,
        "filesystems": [_system(one, report.time) for one in report.systems],
        "rights": _drift_value(report.drift),
    }


def _system(one: Judged, now: float) -> JsonObject:
    usage = one.look.usage
    if isinstance(usage, Unknown):
        return {"name": one.look.name, "unknown": usage.why}
    found = one.forecast
    return {
        **document(usage),
        "unknown": None,
        "bytes_percent": usage.percent("bytes"),
        "inodes_percent": usage.percent("inodes"),
        "full": list(one.full),
        "filling": one.filling or None,
        "forecast": {
            "of": found.kind,
            "full_at": found.full_at,
            "days": None if found.full_at is None else (found.full_at - now) / DAY_SECONDS,
            "not_before": found.not_before,
            "percent_per_day": found.per_day,
            "why": found.why or None,
        },
        "notes": list(one.look.notes),
        "report": one.look.report or None,
    }


def _drift_value(drift: Observed[PermissionTally] | None) -> JsonObject | None:
    if drift is None:
        return None
    if isinstance(drift, Unknown):
        return {"unknown": drift.why}
    return {"entries": drift.entries, "wrong": drift.wrong, "complete": drift.is_complete}
