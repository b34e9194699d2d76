"""The periodic jobs, in one table: a new one is one entry in `table`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec.structs import replace

from tr11ops.cron.schedule import DAY_SECONDS, Daily, Every, Schedule, is_due
from tr11ops.runcard.card import CardError, RunCard
from tr11ops.runcard.slurm_syntax import parse_time_limit
from trainer.config.card import Problem, nearest
from trainer.contract.record import Record

ChainName: TypeAlias = Literal["hourly", "daily"]
FINE_OR_PERSON = frozenset({0, 1})


class PeriodicJob(Record):
    """One periodic job: the words behind `tr11`, when it runs, and how long a round may take.

    `answers` are the exit codes with which it has done its work; any other is a failed round.
    `chain` is the chain of Slurm jobs that runs it. `unwanted` says why the card does not want it,
    "" when it does. One that `watches` runs even where the run directory cannot be written, and two
    hosts may then do it at once; others are left. `script` is what runs instead of `tr11 WORDS`.
    """

    name: str
    words: tuple[str, ...]
    schedule: Schedule
    timeout_seconds: float
    what: str
    answers: frozenset[int] = FINE_OR_PERSON
    chain: ChainName = "hourly"
    unwanted: str = ""
    watches: bool = False
    script: Path | None = None

    @property
    def command_words(self) -> str:
        """What it runs, for a person."""
        if self.script is None:
            return f"tr11 {' '.join(self.words)}"
        return str(self.script)


def table(card: RunCard) -> tuple[PeriodicJob, ...]:
    """Every periodic job as a card wants it, the most urgent first. Raises CardError for a time
    zone no one knows.
    """
    try:
        jobs = (
            PeriodicJob(
                "pulse",
                ("pulse",),
                Every(card.alerts.interval_minutes * 60),
                900,
                "watches the run",
                # it has alarms of its own for a scheduler that does not answer
                answers=FINE_OR_PERSON | {3},
                watches=True,
            ),
            PeriodicJob(
                "nodes-check",
                ("nodes", "check", "--due"),
                Every(card.cron.node_check_hours * 3600),
                1800,
                "checks excluded nodes",
            ),
            PeriodicJob(
                "digest",
                ("alerts", "digest", "--send"),
                daily(card, card.alerts.digest_time or "08:00"),
                300,
                "sends the day's summary",
                unwanted="" if card.alerts.digest_time else 'alerts.digest_time = ""',
            ),
            PeriodicJob(
                "sync",
                ("sync", "--once"),
                Every(card.hub.interval_minutes * 60),
                7200,
                "mirrors logs to the hub",
                # it has an alarm of its own for a hub that does not answer for long
                answers=FINE_OR_PERSON | {3},
                unwanted="" if card.hub.repository else "no hub.repository",
            ),
            PeriodicJob(
                "filesystems",
                ("fs-watchdog",),
                _each(card, card.cron.filesystem_hours),
                7200,
                "how full the disks are",
                unwanted="" if card.filesystems else "no [[filesystems]]",
                chain="daily" if card.cron.filesystem_hours >= 24 else "hourly",
                watches=True,
            ),
            _backup(card),
        )
    except ValueError as error:
        problem = Problem("alerts.time_zone", card.alerts.time_zone, "is unknown here", str(error))
        raise CardError("run card", [problem]) from None
    return tuple(unless_skipped(job, card.cron.skip) for job in jobs)


def _backup(card: RunCard) -> PeriodicJob:
    """A round of copies: queued as a job of its own where [backup] says on which partition, else
    made on the spot.
    """
    backup = card.backup
    as_job = backup.partition is not None
    return PeriodicJob(
        "backup",
        ("backup", "run", "--submit") if as_job else ("backup", "run"),
        _each(card, backup.interval_hours),
        600 if as_job else parse_time_limit(backup.time_limit),
        "copies checkpoints away",
        answers=frozenset({0}),  # what it could not copy, or found damaged, must be heard of
        chain="daily" if backup.interval_hours >= 24 else "hourly",
        unwanted="" if backup.store or backup.url else "neither backup.store nor backup.url",
    )


def wanted(jobs: Iterable[PeriodicJob]) -> tuple[PeriodicJob, ...]:
    """Those that the card wants."""
    return tuple(job for job in jobs if not job.unwanted)


def find_job(jobs: Iterable[PeriodicJob], name: str) -> PeriodicJob:
    """The job of that name. Raises ValueError, one line, with the nearest name."""
    known = {job.name: job for job in jobs}
    if name in known:
        return known[name]
    near = nearest(name, known)
    if near:
        hint = f"did you mean {near!r}?"
    else:
        hint = f"there are {', '.join(known)}"
    raise ValueError(f"{name!r} is no periodic job; {hint}")


def unknown_skips(card: RunCard, jobs: Iterable[PeriodicJob]) -> tuple[str, ...]:
    """Words of cron.skip that name no job."""
    known = {job.name for job in jobs}
    return tuple(name for name in card.cron.skip if name not in known)


def due(
    jobs: Iterable[PeriodicJob], started: Mapping[str, float], now: float
) -> tuple[PeriodicJob, ...]:
    """The jobs that should start now, in the order of the table; `started` is when each last did."""
    return tuple(job for job in wanted(jobs) if is_due(job.schedule, started.get(job.name), now))


def chain_schedule(card: RunCard, jobs: Iterable[PeriodicJob], chain: ChainName) -> Schedule:
    """When the links of a chain begin: daily at cron.daily_time, else with its most frequent job,
    hourly at least.

    A Slurm job costs the site something, so five minutes is the shortest.
    """
    if chain == "daily":
        return daily(card, card.cron.daily_time)
    periods = [job.schedule.period_seconds for job in wanted(jobs) if job.chain == "hourly"]
    return Every(max(300, min(3600, *periods)) if periods else 3600)


def of_chain(jobs: Iterable[PeriodicJob], chain: ChainName) -> tuple[PeriodicJob, ...]:
    """The wanted jobs that a chain runs."""
    return tuple(job for job in wanted(jobs) if job.chain == chain)


def daily(card: RunCard, time: str) -> Daily:
    """Each day at that time, in the card's zone. Raises ValueError for a zone that no one knows."""
    return Daily(time, card.alerts.time_zone)


def _each(card: RunCard, hours: float) -> Schedule:
    """Every so many hours; a day is the card's own, which begins with its daily jobs."""
    seconds = hours * 3600
    if seconds == DAY_SECONDS:
        return daily(card, card.cron.daily_time)
    return Every(seconds)


def unless_skipped(job: PeriodicJob, skip: Iterable[str]) -> PeriodicJob:
    """The job, unwanted where cron.skip names it."""
    if job.name not in skip or job.unwanted:
        return job
    return replace(job, unwanted="cron.skip")
