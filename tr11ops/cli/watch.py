"""`tr11 watch`: a job that someone else submitted, operated as far as it can be from outside."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.console import Group, RenderableType

from tr11ops.api import Run
from tr11ops.base.errors import SchedulerError, Unobserved, WrongUsage
from tr11ops.base.observed import cause
from tr11ops.cli.common import drawing_console, lines_to_fill
from tr11ops.cli.progress import look_again
from tr11ops.cli.runner import JSON, NO_RUN, SCHEDULER, Outcome, RunContext
from tr11ops.cli.status import StatusResult, View
from tr11ops.cli.trainer import DialectOption, WorldSizeOption
from tr11ops.cluster.arrays import names_of
from tr11ops.cluster.base import Job, JobState, Scheduler
from tr11ops.dialects.dialect import Dialect, dialect_named, names
from tr11ops.launch.watched import fault_in, keep_attempt, make_run_directory
from tr11ops.observe.look import facts_of
from tr11ops.observe.readers import looking, open_scheduler
from tr11ops.runcard.card import ForeignCard, RunCard, load_card
from tr11ops.rundir.paths import RunDirectory
from tr11ops.trainers.guest import GuestHold
from tr11ops.trainers.held import HoldPlace
from tr11ops.trainers.kept_files import KeptFiles, KeptRun
from tr11ops.trainers.log import dialect_of_log
from tr11ops.trainers.trainer import NodePlaces
from tr11ops.trainers.watched import WatchedJob, Watcher, unknown_of, watched_file
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.documents import document
from trainer.contract.errors import UNOBSERVED
from trainer.contract.files import make_shared
from trainer.contract.record import Record
from trainer.contract.state_file import open_for_reading

SCHEMA = 1
_HEAD = 4 << 20  # bytes of a log in which its trainer is looked for
_LOCK = "watched.lock"
ALONE_SECONDS = 60.0  # far longer than a look; the log of months is read in less
_BEFORE = frozenset({JobState.PENDING, JobState.CONFIGURING})  # it prints nothing yet
_NAMED = 5  # tasks of an array that a refusal names


def watch(
    context: Annotated[RunContext, NO_RUN, "run", SCHEDULER, JSON],
    *,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOBID",
            help="The job, or an array's task: 12_3. With --run, that of this card.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            readable=False,  # that it cannot be read is said as of any other file
            help="What it prints; need not be there yet.",
        ),
    ] = None,
    dialect: DialectOption = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Its output folder: its checkpoints are looked at too.",
        ),
    ] = None,
    hold: Annotated[
        bool,
        typer.Option("--hold", help="Hold each whole checkpoint of --folder as the run's own."),
    ] = False,
    world_size: WorldSizeOption = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Its last step, where its log does not tell: then it is finished.",
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="DIR",
            help="The run directory to make. [tr11-watch-JOBID]",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, as for cron.")] = False,
    every: Annotated[
        float,
        typer.Option("--every", metavar="SECONDS", min=1, max=86400, help="Between two looks."),
    ] = 10.0,
) -> Outcome:
    """Operate a job that someone else submitted, from outside, by its log.

    Makes a run directory with a card, follows the log, and keeps steps, phases and the end on record,
    so that `tr11 status`, `alerts`, `goodput`, `diagnose` and `handover` work on it with --run. The job
    is never signalled, cancelled or started again, and nothing is written outside that directory.

    With --hold its checkpoints become the run's (level 1): by hard links, or by copies where there can
    be none, with the digest of each file, so that `checkpoints` and `backup` work on them.

    Exit code 0: healthy, or ended well; 1: it needs a person; 2: wrong usage; 3: the scheduler or the
    log could not be read, or the log does not tell (yet) which trainer writes it.

    Examples:
      tr11 watch 4711 --log slurm-4711.out
      tr11 watch 4711 --log slurm-4711.out --dialect megatron --folder ckpt --once
      tr11 watch 4711 --log slurm-4711.out --folder ckpt --hold
      tr11 watch --run tr11-watch-4711/tr11.toml --once
      tr11 status --run tr11-watch-4711/tr11.toml
    """
    if job is None:
        told, root = _recorded(context, (log, dialect, folder, directory))
    elif log is None:
        raise WrongUsage(f"--log FILE is missing: what job {job} prints")
    else:
        told = _told(job, log, dialect, folder)
        told = replace(told, hold=hold, world_size=world_size, steps=steps)
        root = (directory or Path(f"tr11-watch-{job}")).absolute()
    if hold and not told.folder:
        raise WrongUsage("--hold needs --folder DIR: where its checkpoints lie")
    watching = Watching(told, root, looking(open_scheduler(context.scheduler)), is_single=once)
    try:
        look = watching.look()  # that it cannot begin is said at once
        if once:
            return Outcome(look.document(), exit_code=look.exit_code, screen=look.draw)

        return look_again(watching.look, every, context.as_json)
    finally:
        watching.end()


def _told(job: str, log: Path, dialect: str | None, folder: Path | None) -> WatchedJob:
    """What the command line says. Raises WrongUsage."""
    if dialect is not None:
        dialect_named(dialect)
    place = ""
    if folder is not None:
        place = str(folder.absolute())
        if not folder.is_dir():
            raise WrongUsage(f"--folder {folder}: is no folder")
    if log.is_dir():
        raise WrongUsage(f"--log {log}: is a folder")
    return WatchedJob(
        job_id=job,
        log=str(log.absolute()),
        dialect=dialect or "",
        folder=place,
        since=time.time(),
    )


def _recorded(context: RunContext, given: tuple[object, ...]) -> tuple[WatchedJob, Path]:
    """The job that the card's run directory is of, and that directory. Raises WrongUsage."""
    if any(word is not None for word in given):
        raise WrongUsage(
            "JOBID is missing: without it, `tr11 watch --run CARD` goes on with a card's"
        )
    try:
        found = WatchedJob.read(context.card.paths)
    except (ValueError, OSError) as error:
        raise Unobserved(cause(error)) from None
    if found is None:
        raise WrongUsage(f"{context.card_path} watches no job: give JOBID and --log FILE")
    return found, context.card_path.absolute().parent


class HeldView(Record):
    """What this process holds. `newest` step of its checkpoints; `other` process that holds them
    instead; `said`: the last lines about it.
    """

    newest: int | None
    other: str
    said: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        if self.newest is not None:
            yield f"held up to step {self.newest:,}"
        if self.other:
            yield self.other
        yield from self.said


class WatchResult(Record):
    """One look, as it is printed. `waits`: why nothing can be told yet; "" where it can."""

    watched: WatchedJob
    lines: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    status: StatusResult | None = None
    fault: str = ""
    held: HeldView | None = None

    @property
    def exit_code(self) -> int:
        if self.status is None or self.fault:
            return UNOBSERVED
        return self.status.exit_code

    def document(self) -> dict[str, object]:
        status = None
        if self.status is not None:
            status = self.status.document()
        return {
            "schema": SCHEMA,
            "level": int(self.watched.hold),
            "job": self.watched.job_id,
            "log": self.watched.log,
            "dialect": self.watched.dialect or None,
            "fault": self.fault or None,
            "unknown": list(self.unknown),
            "held": document(self.held) if self.held is not None else None,
            "status": status,
        }

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType:
        from rich.text import Text

        shown = [*self.lines]
        if self.held is not None:
            shown += self.held.lines()
        shown += (f"not known: {line}" for line in self.unknown)
        if self.fault:
            shown.append(f"tr11: {self.fault}")
        text = Text("\n".join(shown))
        if self.status is None:
            return text
        left = None
        if height is not None:
            left = max(1, height - len(shown))
        return Group(text, self.status.screen(width, left))

    def draw(self) -> None:
        console = drawing_console()
        console.print(self.screen(console.width, lines_to_fill(console)))


class Watching:
    """Looks at one job again and again; the run directory is made once the job is seen and the log
    tells its trainer.
    """

    def __init__(self, told: WatchedJob, root: Path, scheduler: Scheduler, is_single: bool) -> None:
        self.told = replace(told, scheduler=scheduler.name)
        self.root, self.scheduler = root, scheduler
        self.card: RunCard | None = None
        self.card_path = root
        self.watcher: Watcher | None = None
        self.hold: GuestHold | None = None
        self.is_single = is_single

    def end(self) -> None:
        """Stop holding; what was begun is gone on with by the next."""
        if self.hold is not None:
            self.hold.end()

    def look(self) -> WatchResult:
        """One look. Raises Unobserved where the scheduler does not know the job at the first one,
        WrongUsage.
        """
        job, fault = self._job()
        if self.watcher is None:
            waits = self._begin(job, fault)
            if waits:
                return WatchResult(self.told, (self._title(), *self._level()), fault=waits)
        assert self.watcher is not None and self.card is not None
        watcher, paths = self.watcher, self.watcher.files.run.paths
        with _alone(paths.state / _LOCK):
            known = WatchedJob.read(paths)
            if known is not None:
                watcher.watched = known
            try:
                if job is not None:
                    keep_attempt(job, self.told, paths)
                watcher.look(job, time.time())
            except OSError as error:
                raise Unobserved(f"{self.root} cannot be written to: {cause(error)}") from None
        held = self._keep_holding(job)
        directory = RunDirectory(self.card.paths, self.card.kill_switch)
        facts = facts_of(self.card, str(self.card_path))
        view = View(Run(self.card, directory, facts, self.scheduler))
        unknown = unknown_of(watcher.dialect, watcher.course, watcher.watched.folder)
        return WatchResult(
            watcher.watched,
            (
                self._title(),
                *self._level(),
                f"everything else: tr11 COMMAND --run {self.card_path}",
            ),
            held=held,
            unknown=tuple(unknown),
            status=view.look(),
            fault=watcher.fault or fault,
        )

    def _keep_holding(self, job: Job | None) -> HeldView | None:
        """See to it that what is whole is held; of a single look, to the last digest."""
        hold = self.hold
        if hold is None:
            return None
        hold.keep_on()
        if self.is_single:
            hold.catch_up(job is not None and job.state.is_final)
        return HeldView(hold.newest, hold.other, tuple(hold.said))

    def _level(self) -> Iterator[str]:
        if self.hold is None:
            yield "level 0, watched: it is not started, stopped or relaunched by tr11"
        else:
            yield "level 1, copied: its checkpoints are held; it is not started, stopped or relaunched by tr11"

    def _title(self) -> str:
        dialect = self.told.dialect
        if self.watcher is not None:
            dialect = self.watcher.watched.dialect
        return f"job {self.told.job_id}, {dialect or 'of a trainer that is not known yet'}, by {self.told.log}"

    def _job(self) -> tuple[Job | None, str]:
        """The job as the scheduler shows it; and why it does not."""
        try:
            job = self.scheduler.job(self.told.job_id)
        except (SchedulerError, OSError) as error:
            return None, f"the scheduler does not answer: {cause(error)}"
        return job, ""

    def _begin(self, job: Job | None, fault: str) -> str:
        """Make the run directory, or find it; returns what it waits for, "" for nothing."""
        card = self.root / "tr11.toml"
        if not card.is_file():
            if job is None:
                raise Unobserved(fault or self._no_such_job())
            self._refuse_array(job)
            if job.state in _BEFORE:
                why = f" ({job.reason})" if job.reason else ""
                return f"job {job.job_id} is {job.state}{why}: it has not begun"
            waits = self._find_dialect()
            if waits:
                return waits
            card = self._make(job)
        self.card_path = card
        self.card = load_card(card, (), os.environ)
        found = WatchedJob.read(self.card.paths)
        if found is None or found.job_id != self.told.job_id:
            owner = "no job that is watched"
            if found is not None:
                owner = f"job {found.job_id}"
            raise WrongUsage(f"--directory {self.root}: is of {owner}; give another one")
        given = replace(
            found,
            world_size=self.told.world_size or found.world_size,
            steps=self.told.steps or found.steps,
        )
        if given != found:
            found = given
            found.write(self.card.paths)
        self.told = replace(self.told, world_size=found.world_size)
        self.watcher = self._watcher(found, job)
        self.hold = self._hold_of(self.card)
        return ""

    def _no_such_job(self) -> str:
        number = self.told.job_id
        if number.isdecimal() and Path("/proc", number).exists():
            return (
                f"{number} is a process of this machine, and no job of the scheduler ({self.scheduler.name}):"
                " only a job can be watched, since a scheduler tells how it ended. Start the training with"
                " `tr11 launch` (`tr11 adopt SCRIPT` makes its card), or read"
                f" `tr11 trainer check --log {self.told.log}`"
            )
        return f"the scheduler knows no job {number}: nothing was made; see --scheduler"

    def _refuse_array(self, job: Job) -> None:
        """Raises WrongUsage for an array: each of its tasks is a job with a log of its own."""
        number = self.told.job_id
        if job.array_id != number or job.job_id == number:
            return
        tasks = [one for one in self.scheduler.jobs() if one.array_id == number]
        tasks.sort(key=_is_waiting)
        typed = [(*names_of([one], [one]), one.state) for one in tasks[:_NAMED]]
        named = ", ".join(f"{name} ({state})" for name, state in typed)
        raise WrongUsage(f"job {number} is an array: watch one task of it: {named or job.job_id}")

    def _hold_of(self, card: RunCard) -> GuestHold | None:
        """As the card says. Raises WrongUsage where it cannot be as the command line says."""
        assert isinstance(card, ForeignCard)
        settings = card.settings
        if self.told.hold and not settings.hold:
            raise WrongUsage(
                f"--hold: {self.card_path} was made without it; set trainer.hold = true there, and trainer.folder"
            )
        if not settings.hold:
            return None
        ranks = self.told.world_size
        place = HoldPlace.of(settings, card.paths, ranks, card.digest, job_id=self.told.job_id)
        if place is None:
            raise WrongUsage(
                f"--hold: the dialect {settings.dialect.name} says nothing of checkpoints; --dialect FILE.toml"
                " with [checkpoints] does"
            )
        return GuestHold(RunDirectory(card.paths, card.kill_switch), place)

    def _make(self, job: Job) -> Path:
        try:
            card = make_run_directory(job, self.told, self.root)
            paths = load_card(card, (), os.environ).paths
            if not watched_file(paths).exists():
                self.told.write(paths)
        except OSError as error:
            raise Unobserved(f"--directory {self.root}: {cause(error)}") from None
        return card

    def _find_dialect(self) -> str:
        """Find the trainer by its log, where none was named; returns why that is not possible."""
        if self.told.dialect:
            return ""
        log = Path(self.told.log)
        try:
            with open_for_reading(log) as stream:
                found = dialect_of_log(stream.read(_HEAD))
        except FileNotFoundError:
            return f"{log} is not there yet"
        except OSError as error:
            return f"{log} cannot be read: {cause(error)}"
        if found is None:
            return (
                f"{log} does not tell (yet) which trainer writes it. Tried: {', '.join(names())}."
                " Give --dialect NAME, or --dialect FILE.toml with step_line = 'step (?P<step>\\d+)'"
            )
        self.told = replace(self.told, dialect=found.name)
        return ""

    def _watcher(self, found: WatchedJob, job: Job | None) -> Watcher:
        assert self.card is not None
        paths = self.card.paths
        number = next(iter(RunDirectory(paths, self.card.kill_switch).attempt_ids()), found.job_id)
        host = ""
        if job is not None:
            number, host = job.raw_id, next(iter(job.nodes), "")
        identity = AttemptIdentity(number, 1, paths.stop_request(number))
        places = NodePlaces(1, 0, workers=1, address="", port=0)
        files = KeptFiles(KeptRun(paths, self.card.kill_switch), identity, places, host)
        dialect: Dialect = dialect_named(found.dialect)
        return Watcher(found, dialect, files, fault_in)


def _is_waiting(job: Job) -> bool:
    return not job.state.is_active


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One look at a time, where the file system can lock. Raises Unobserved where another process does
    not end its own, frozen as it may be.
    """
    make_shared(lock.parent)
    with lock.open("a") as stream:
        until = time.monotonic() + ALONE_SECONDS
        while _is_taken(stream.fileno()):
            if time.monotonic() >= until:
                raise Unobserved(
                    f"another watcher has been at one look for {ALONE_SECONDS:.0f} s, and does not go on: {lock}"
                )
            time.sleep(0.1)
        yield


def _is_taken(descriptor: int) -> bool:
    """Whether another process is at a look; takes the turn where none is, or the file system cannot
    lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
