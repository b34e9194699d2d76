"""The periodic jobs, in one table, and when each is due: a new one is one entry in `table`."""

from __future__ import annotations

import math
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Literal, TypeAlias
from zoneinfo import ZoneInfo

from msgspec.structs import replace

from tr11ops.base.deadline import SILENCE_SECONDS, is_silent
from tr11ops.runcard.card import CardError, RunCard
from tr11ops.runcard.kinds import is_watched
from tr11ops.runcard.sections import parse_time_limit
from tr11ops.rundir.paths import RunDirectory
from trainer.config.card import Problem, nearest
from trainer.contract.record import Record

# ----------------------------------------------------------------------------- when a job is due
# When a periodic job is due: points on the wall clock, so that rounds never drift. Pure; `now`
# is an argument.
LARGEST_SLACK_SECONDS = 30.0
LARGEST_TOLERANCE_SECONDS = 600.0
DAY_SECONDS = 86_400.0


class Every(Record):
    """At whole multiples of so many seconds since the epoch: every hour is at minute 0."""

    seconds: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a job cannot run every {self.seconds!r} s")

    @property
    def period_seconds(self) -> float:
        return self.seconds

    def after(self, moment: float) -> float:
        """The first point later than `moment`."""
        count = math.floor(moment / self.seconds) + 1
        while count * self.seconds <= moment:  # the division was rounded
            count += 1
        return count * self.seconds

    def __str__(self) -> str:
        if self.seconds == 3600:
            return "hourly"
        for unit, name in ((DAY_SECONDS, "d"), (3600.0, "h"), (60.0, "min")):
            if self.seconds >= unit and self.seconds % unit == 0:
                return f"every {self.seconds / unit:.0f} {name}"
        return f"every {self.seconds:g} s"


class Daily(Record):
    """Each day at a time of day, "HH:MM", in a time zone. On the day that lacks it: as late as if
    the clock had stood.

    Raises ValueError for a zone that this machine does not know.
    """

    time: str
    zone: str

    def __post_init__(self) -> None:
        self._zone()

    @property
    def period_seconds(self) -> float:
        return DAY_SECONDS

    def after(self, moment: float) -> float:
        """The first point later than `moment`."""
        zone = self._zone()
        hour, minute = map(int, self.time.split(":"))
        day = datetime.fromtimestamp(moment, zone).date() - timedelta(days=1)
        while True:
            found = datetime.combine(day, time(hour, minute), zone).timestamp()
            if found > moment:
                return found
            day += timedelta(days=1)

    def _zone(self) -> ZoneInfo:
        try:
            return ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError):
            raise ValueError(
                f"{self.zone!r} is not a time zone; use a name such as Europe/Paris or UTC"
            ) from None

    def __str__(self) -> str:
        return f"daily {self.time} {self.zone}"


Schedule: TypeAlias = Every | Daily


def slack(schedule: Schedule) -> float:
    """How much before its point a round may start, in seconds: the scheduler's clock may be ahead
    of this node's.
    """
    return min(LARGEST_SLACK_SECONDS, schedule.period_seconds / 10)


def next_due(schedule: Schedule, started: float | None, now: float) -> float:
    """When the next round is due after one that started at `started`; `now` for a job that never
    ran.

    The result may be past: rounds that were missed are one round, not many. A start in the future
    (beyond what two machines' clocks may differ) means that the clock was set back: waiting for it
    could take years, so it is due now.
    """
    if started is None or started > now + min(schedule.period_seconds, LARGEST_TOLERANCE_SECONDS):
        return now
    return schedule.after(started + slack(schedule))


def is_due(schedule: Schedule, started: float | None, now: float) -> bool:
    """Whether a round should start now, after one that started at `started`."""
    return next_due(schedule, started, now) <= now + slack(schedule)


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
                schedule=Every(card.alerts.interval_minutes * 60),
                timeout_seconds=900,
                what="watches the run",
                # it has alarms of its own for a scheduler that does not answer
                answers=FINE_OR_PERSON | {3},
                watches=True,
            ),
            PeriodicJob(
                "nodes-check",
                ("nodes", "check", "--due"),
                schedule=Every(card.cron.node_check_hours * 3600),
                timeout_seconds=1800,
                what="checks excluded nodes",
            ),
            PeriodicJob(
                "digest",
                ("alerts", "digest", "--send"),
                schedule=daily(card, card.alerts.digest_time or "08:00"),
                timeout_seconds=300,
                what="sends the day's summary",
                unwanted="" if card.alerts.digest_time else 'alerts.digest_time = ""',
            ),
            PeriodicJob(
                "sync",
                ("sync", "--once"),
                schedule=Every(card.hub.interval_minutes * 60),
                timeout_seconds=7200,
                what="mirrors logs to the hub",
                # it has an alarm of its own for a hub that does not answer for long
                answers=FINE_OR_PERSON | {3},
                unwanted="" if card.hub.repository else "no hub.repository",
            ),
            PeriodicJob(
                "filesystems",
                ("fs-watchdog",),
                schedule=_each(card, card.cron.filesystem_hours),
                timeout_seconds=7200,
                what="how full the disks are",
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


def watching(card: RunCard, directory: RunDirectory) -> tuple[PeriodicJob, ...]:
    """Of a job that someone else submitted: the look at its log, without which the run's records stand
    still, and which holds its checkpoints where the card says so. Nothing for any other run.
    """
    if not is_watched(card):
        return ()
    from tr11ops.trainers.watched import watched_file

    job = PeriodicJob(
        "watch",
        ("watch", "--once"),
        schedule=Every(card.alerts.interval_minutes * 60),
        timeout_seconds=4 * 3600,  # a large checkpoint is read whole
        what="follows the job's log",
        answers=FINE_OR_PERSON | {3},
        unwanted="" if watched_file(directory.paths).exists() else "nothing is watched from here",
    )
    return (unless_skipped(job, card.cron.skip),)


def _backup(card: RunCard) -> PeriodicJob:
    """A round of copies: queued as a job of its own where [backup] says on which partition, else
    made on the spot.
    """
    backup = card.backup
    as_job = backup.partition is not None
    return PeriodicJob(
        "backup",
        ("backup", "run", "--submit") if as_job else ("backup", "run"),
        schedule=_each(card, backup.interval_hours),
        timeout_seconds=600 if as_job else parse_time_limit(backup.time_limit),
        what="copies checkpoints away",
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


# -------------------------------------------------------------------------- scripts of people's own
# Those in `cron.hourly` or `cron.daily` are periodic jobs as any other.
#
#     RUN DIRECTORY/cron.hourly/*.slurm     CARD'S FOLDER/cron.hourly/*.slurm     and cron.daily in both
#
# Of two of one name the run directory's counts. A script runs in the name of the user who has the
# rounds run, so it must be theirs alone to change, and so must its folder: run directories are often
# a group's. Those that tr11 ships (`tr11-pulse.slurm`) name jobs of the table, and are left out here.

FOLDERS: tuple[tuple[str, ChainName], ...] = (("cron.hourly", "hourly"), ("cron.daily", "daily"))
SUFFIX = ".slurm"
SHIPPED = "tr11-"
HEAD_BYTES = 8192
_TIME = re.compile(r"^#SBATCH\s+(?:--time[= ]|-t\s*)(\S+)", re.MULTILINE)


def every_job(card: RunCard, directory: RunDirectory, card_folder: Path) -> tuple[PeriodicJob, ...]:
    """The jobs of the table, then the scripts. Raises CardError as `table` does."""
    jobs = (*watching(card, directory), *table(card))
    taken = {job.name for job in jobs}
    found = {
        job.name: job
        for job in drop_ins(card, (card_folder, directory.root))
        if job.name not in taken
    }
    return (*jobs, *found.values())


def drop_ins(card: RunCard, roots: Iterable[Path]) -> tuple[PeriodicJob, ...]:
    """The scripts below these folders, in order; of a folder that cannot be listed there are none."""
    found = []
    for root in roots:
        if is_silent(root, SILENCE_SECONDS):
            continue
        for folder, chain in FOLDERS:
            fault = _folder_fault(root / folder)
            for path in _scripts(root / folder):
                found.append(_job(card, path, chain, fault or _fault(path)))
    return tuple(found)


def script_command(script: Path) -> list[str]:
    """How sbatch would run it: by the interpreter that its first line names, else by bash.

    Raises ValueError for a script that must not be run, though it was asked for by name, and for an
    odd first line.
    """
    fault = _folder_fault(script.parent) or _fault(script)
    if fault:
        raise ValueError(fault)
    first = _head(script).partition("\n")[0]
    try:
        if first.startswith("#!"):
            words = shlex.split(first[2:])
        else:
            words = []
    except ValueError as error:
        raise ValueError(f"the first line of {script} is no command: {error}") from None
    return [*(words or ["/bin/bash"]), str(script)]


def _scripts(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  a name is enough
    except OSError:
        return []
    return [
        folder / name
        for name in names
        if name.endswith(SUFFIX) and not name.startswith((".", SHIPPED))
    ]


def _job(card: RunCard, path: Path, chain: ChainName, unwanted: str) -> PeriodicJob:
    if chain == "hourly":
        limit = card.cron.hourly_time_limit
    else:
        limit = card.cron.daily_time_limit
    seconds = parse_time_limit(limit)
    if unwanted:
        asked = None
    else:
        asked = _TIME.search(_head(path))
    if asked:
        try:
            seconds = parse_time_limit(asked[1])
        except ValueError:
            unwanted = f"#SBATCH --time of {path} is no time limit"
    schedule = Every(3600) if chain == "hourly" else daily(card, card.cron.daily_time)
    job = PeriodicJob(
        _name(path),
        (),
        schedule=schedule,
        timeout_seconds=seconds,
        what=f"your script {path}",
        answers=frozenset({0}),
        chain=chain,
        unwanted=unwanted,
        script=path,
    )
    return unless_skipped(job, card.cron.skip)


def _name(path: Path) -> str:
    """A name that a record can have: `My Job_2.slurm` is my-job-2."""
    text = re.sub(r"[^a-z0-9]+", "-", path.name.removesuffix(SUFFIX).lower()).strip("-") or "script"
    return (text if text[0].isalpha() and not text.startswith("chain-") else f"script-{text}")[
        :64
    ].rstrip("-")


def _folder_fault(folder: Path) -> str:
    """Why no script of a folder is run, and what to type; "" when its scripts may be.

    Who can change a folder decides which script lies in it, and may put another user's private file
    there by a link.
    """
    try:
        status = folder.lstat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return f"{folder} is a link: make a folder of your own there (mkdir -m 755)"
    return _fault_of_rights(folder, status, "its scripts", "the folder")


def _fault(path: Path) -> str:
    """Why a script is not run, and what to type; "" when it may be. A link is not followed."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link: put the script itself there"
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a file"
    return _fault_of_rights(path, status, "it", "it")


def _fault_of_rights(path: Path, status: os.stat_result, runs: str, changed: str) -> str:
    """Why what lies at `path` is not one's own alone; "" when it is, or root's."""
    if status.st_uid not in {0, os.geteuid()}:
        return f"{path} belongs to another user: only their own rounds run {runs}"
    if status.st_mode & 0o022:
        return f"others may change {changed}: chmod go-w {shlex.quote(str(path))}"
    return ""


def _head(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
