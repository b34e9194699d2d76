"""Everything a launch must know before it submits, observed once. What could not be seen is
`Unknown`, not absent.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from msgspec import field
from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.cluster.base import Job, Node, Partition, Scheduler
from tr11ops.cluster.rehearsal import rehearsal_refusal
from tr11ops.cluster.select import start_of_watchdog
from tr11ops.cluster.site import Grants, SiteRules
from tr11ops.launch.chain import QueueChain
from tr11ops.launch.container import ContainerFacts, look_at_container
from tr11ops.launch.extra_observations import (
    AccessFault,
    ArchiveFacts,
    ClockFacts,
    clock_of_file_system,
    look_at_archives,
    prefixes_without_maps,
    read_access,
    read_clocks,
)
from tr11ops.launch.margins import read_history
from tr11ops.observe.derived import finish_time, newest_marker
from tr11ops.observe.files import (
    read_attempts,
    read_exclusions,
    read_kill_switch,
    read_steps,
    read_steps_and_latest,
)
from tr11ops.observe.lease import LeaseHolder, foreground_trainings, read_holder
from tr11ops.observe.ownership import Ownership, why_unmounted
from tr11ops.observe.snapshot import KillSwitch
from tr11ops.runcard.attention import device_type
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.load import unset_here
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.cron_records import PeriodicJobState, read_jobs
from tr11ops.rundir.datasets import (
    DatasetFacts,
    TokenizerFacts,
    look_at,
    look_at_tokenizer,
    prefixes_of,
    workers_environment,
)
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.rundir.kill_switch import MARKED_FILE, SwitchLocation, look_at_switch, read_pause
from tr11ops.rundir.paths import RunDirectory, Submission, read_traces
from tr11ops.rundir.state_files import Damage, find_damage
from trainer.config.kernel_choice import compiler_obstacle
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.checkpoints import refusal
from trainer.contract.files import host_name, now
from trainer.contract.manifest import manifest_faults
from trainer.contract.origin import Origin
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.resumable import CURSOR_FILE, ResumeSearch, foreign_step, search, size_faults
from trainer.contract.state_file import read_json
from trainer.schedule.path import START, Position
from trainer.schedule.progress import Progress
from trainer.schedule.start import StartSource, loaded_source, own_source

P = ParamSpec("P")
T = TypeVar("T")


class LaunchRequest(Record):
    """What the person asked for beyond the card. `array` is what Slurm is given (`1-10%1`), None
    for single jobs.

    `chain` says how the `tasks` attempts are queued, None where it was not asked. `read_digests`:
    compare every byte of the checkpoint with its manifest, not only the sizes. `beside_namesakes`:
    another run of the user with the same name may be queued or running. `replaces`: queued jobs, by
    the names that cancel them, in whose place this one comes.
    """

    array: str | None = None
    tasks: int = 1
    exclude: tuple[str, ...] = ()
    after: str | None = None
    on_scheduler: bool = True  # False for a foreground training
    chain: QueueChain | None = None
    read_digests: bool = False
    beside_namesakes: bool = False
    replaces: tuple[str, ...] = ()

    @property
    def awaited(self) -> tuple[str, ...]:
        """The jobs that must be over before this one starts: those it replaces too, should they not
        be cancelled.
        """
        numbers = (self.after or "", *(job.partition("_")[0] for job in self.replaces))
        return tuple(dict.fromkeys(filter(None, numbers)))


class DirectoryFacts(Record):
    """Whether the run directory can be written to. `fault` is empty when it can, or could be made.

    `free_inodes` is None where the file system does not count them. `missing_parents`: folders
    above the run directory that are not there, the highest first; a launch makes them.
    """

    fault: str
    free_bytes: Observed[int]
    free_inodes: Observed[int | None] = None
    missing_parents: tuple[Path, ...] = ()


class LaunchCheckpoints(Record):
    """The checkpoints that the training would start from, judged and tried as the trainer does it
    (see `trainer.contract.resumable`): the run's own, and where it has none, those that
    `checkpoint.load` names.

    `steps`: all that have a folder, ascending. `latest`: what that file names, None when it is
    missing. `refusal`: why the trainer would resume from none of them, "" when it would. `foreign`:
    the step that it would take of those that another tool wrote, without manifests. `cursor`: of
    the one that was found; None where its layout keeps it among tensors, which nothing here reads.
    `origin`: what the run itself had begun with.
    """

    source: StartSource
    steps: tuple[int, ...]
    latest: Observed[int | None]
    found: ResumeSearch
    refusal: str = ""
    verified: str = "sizes"
    foreign: int | None = None
    cursor: Observed[Mapping[str, Any] | None] = None
    # whether the attempt that saved it had sequence parallelism; None: not recorded
    cut_sequences: bool | None = None
    origin: Observed[Origin | None] = None

    @property
    def start(self) -> Position:
        """Where the training goes on, as far as is known without reading tensors; the beginning
        where it is fresh.
        """
        if self.source.is_fresh:
            return START
        if isinstance(self.cursor, Mapping):
            return Progress.from_cursor(self.cursor).position
        manifest = self.found.manifest
        if manifest is not None:
            return Position(manifest.step, manifest.consumed_samples, manifest.consumed_tokens)
        return START


class LaunchFacts(Record):
    """All observations of one moment (`time`, seconds since the epoch)."""

    time: float
    user: str
    jobs: Observed[tuple[Job, ...]]
    nodes: Observed[tuple[Node, ...]]
    partitions: Observed[tuple[Partition, ...]]
    after: Observed[Job | None]
    submissions: Observed[Sequence[Submission]]
    elsewhere: tuple[str, ...]  # what another scheduler still has of this run
    foreground: Observed[tuple[str, ...]]  # trainings without a scheduler that live on this machine
    exclusions: Observed[tuple[Exclusion, ...]]
    directory: DirectoryFacts
    kill_switch: Observed[KillSwitch | None]
    switch_location: Observed[SwitchLocation]
    datasets: tuple[DatasetFacts, ...]
    tokenizer: TokenizerFacts
    checkpoints: Observed[LaunchCheckpoints]
    # when the training was finished, by its own word; None while it is not
    finished: Observed[float | None]
    switch_was_marked: bool = False
    host: str = ""
    site: Observed[SiteRules | None] = None  # None: the scheduler has no such rules
    # tag -> job that ran under it
    traces: Observed[Mapping[str, str]] = field(default_factory=dict)
    history: Observed[RunHistory] = RunHistory()
    clocks: Observed[tuple[ClockFacts, ...]] = ()
    access: Observed[tuple[AccessFault, ...]] = ()
    pause: str | None = None
    holder: Observed[LeaseHolder | None] = None  # the living trainer that holds the run's lease
    without_maps: Observed[tuple[str, ...]] = ()
    archives: Observed[tuple[ArchiveFacts, ...]] = ()
    periodic_jobs: Observed[tuple[PeriodicJobState, ...]] = ()  # that ever ran for the run
    start_of_watchdog: str = "cron install"  # the words of tr11 that start one on this machine
    scheduler: str = ""  # the kind that `jobs` are of
    damaged: Observed[tuple[Damage, ...]] = ()  # state files
    grants: Observed[Grants | None] = None  # None: nothing is granted or limited here
    rehearsal_refusal: str = ""  # why a card that trains nothing must not be launched here
    container: ContainerFacts | None = None  # None: the card has none
    # why the run directory is not the one that the jobs were queued from; "" where it is
    unmounted: str = ""
    # of the card's variables those that are read from one that is not set here
    unset: tuple[str, ...] = ()
    # what this machine lacks to compile the card's blocks, where it asks for that
    compiler_obstacle: str | None = None


def observe_launch(
    card: RunCard,
    directory: RunDirectory,
    request: LaunchRequest,
    *,
    scheduler: Scheduler | None,
    other_scheduler: Callable[[str], Scheduler],
    user: str,
    site: Callable[[], SiteRules] | None = None,
    grants: Callable[[SiteRules], Grants] | None = None,
) -> LaunchFacts:
    """Look at the scheduler and the file system; changes nothing and leaves nothing.

    `scheduler` is None for a foreground training. `other_scheduler` opens the one that an older
    submission names. `site` asks for the site's rules, and `grants` for what it grants; None where
    there are none. The queue is asked before anything else: what an earlier launch left in doubt is
    found there, or in the attempts' records.
    """
    submissions = _observed(directory.read_submissions)
    own = scheduler.name if scheduler else ""
    jobs = _observed(scheduler.jobs) if scheduler else ()

    def ask(read: Callable[P, T], *given: P.args, **named: P.kwargs) -> Observed[T]:
        """One more question; none to a scheduler that was silent, for each would cost its whole
        time-out.
        """
        if isinstance(jobs, Unknown):
            return jobs
        return _observed(read, *given, **named)

    moment = now()
    has_data = card.rehearsal is None
    rules = None
    if site:
        rules = ask(site)
    return LaunchFacts(
        time=moment,
        user=user,
        jobs=jobs,
        nodes=ask(scheduler.nodes) if scheduler else (),
        partitions=ask(scheduler.partitions) if scheduler else (),
        after=ask(scheduler.job, request.after) if scheduler and request.after else None,
        submissions=submissions,
        elsewhere=_elsewhere(directory, known(submissions, []), own, other_scheduler),
        foreground=_observed(foreground_trainings, directory),
        exclusions=read_exclusions(directory.exclusions),
        directory=look_at_directory(directory),
        kill_switch=read_kill_switch(directory.kill_switch),
        switch_location=_observed(look_at_switch, directory),
        switch_was_marked=os.path.lexists(directory.paths.state / MARKED_FILE),
        datasets=tuple(look_at(prefix) for prefix in prefixes_of(card.data)) if has_data else (),
        tokenizer=look_at_tokenizer(card, workers_environment(card, os.environ))
        if has_data
        else TokenizerFacts(),
        checkpoints=_observed(look_at_checkpoints, card, request.read_digests),
        finished=_observed(_finished, directory),
        host=host_name(),
        site=rules,
        grants=ask(grants, rules) if grants and isinstance(rules, SiteRules) else None,
        traces=_observed(read_traces, directory, known(submissions, [])),
        history=_observed(read_history, directory.paths),
        clocks=_observed(_clocks, directory, moment),
        access=_observed(read_access, directory),
        pause=read_pause(directory),
        holder=_observed(read_holder, directory.paths, now()),
        without_maps=_observed(prefixes_without_maps, card) if has_data else (),
        archives=_observed(look_at_archives, card),
        periodic_jobs=read_jobs(directory),
        start_of_watchdog=start_of_watchdog(),
        scheduler=own,
        container=look_at_container(card),
        damaged=_observed(find_damage, directory),
        rehearsal_refusal="" if has_data else rehearsal_refusal(os.environ),
        unmounted=why_unmounted(directory, jobs, moment),
        unset=unset_here(card.slurm.environment, os.environ),
        compiler_obstacle=compiler_obstacle(device_type(card))
        if card.model.compile_blocks
        else None,
    )


def _clocks(directory: RunDirectory, moment: float) -> tuple[ClockFacts, ...]:
    """Clocks that can be compared; on a run directory that is still to be made, or read-only, there
    is none of here.
    """
    found = list(read_clocks(directory.paths, moment))
    try:
        found.append(clock_of_file_system(directory.paths.state))
    except OSError:
        # no files without names on this file system: the nodes' heartbeats remain
        return tuple(found)
    return tuple(found)


def _observed(read: Callable[P, T], *given: P.args, **named: P.kwargs) -> Observed[T]:
    """As `observed`; a scheduler may refuse too."""
    try:
        return observed(read, *given, **named)
    except SchedulerError as error:
        return Unknown(cause(error))


# ----------------------------------------------------------------------------- where it would run
# already
def _elsewhere(
    directory: RunDirectory,
    submissions: Sequence[Submission],
    own: str,
    other_scheduler: Callable[[str], Scheduler],
) -> tuple[str, ...]:
    """Jobs of this run that a scheduler other than ours still has, in words."""
    found = []
    for kind in sorted({entry.scheduler for entry in submissions} - {own, ""}):
        try:
            jobs = other_scheduler(kind).jobs()
        except (SchedulerError, OSError, ValueError):
            # it is gone with its machine; the trainer's lease on the checkpoints still guards them
            continue
        ours = Ownership(directory, submissions, scheduler=kind)
        for job in jobs:
            if ours.has(job) and not job.state.is_final:
                found.append(f"job {job.job_id} ({kind}, {job.state})")
    return tuple(found)


# ----------------------------------------------------------------------------- the file system
def look_at_directory(directory: RunDirectory) -> DirectoryFacts:
    """Look at the folders that the run writes to, or at the nearest existing parent of those that
    are missing.
    """
    paths = directory.paths
    fault = ""
    for wanted in (directory.root, paths.state, paths.checkpoints, paths.logs, directory.journal):
        folder = _nearest(wanted)
        if not folder.is_dir():
            fault = f"{folder} is not a folder"
        elif not os.access(folder, os.W_OK | os.X_OK):
            fault = f"{folder} cannot be written to"
        if fault:
            break
    nearest = _nearest(paths.checkpoints)
    free = _observed(lambda: shutil.disk_usage(nearest).free)
    missing = tuple(
        parent for parent in reversed(directory.root.parents) if not os.path.lexists(parent)
    )
    return DirectoryFacts(fault, free, _observed(_free_inodes, nearest), missing)


def _free_inodes(path: Path) -> int | None:
    counted = os.statvfs(path)
    if counted.f_files:
        return counted.f_favail
    return None


def _nearest(path: Path) -> Path:
    """The path itself if something is there, else its nearest parent that exists."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _finished(directory: RunDirectory) -> float | None:
    steps = known(read_steps(directory.paths), ())
    iteration = steps[-1].record.iteration if steps else None
    return finish_time(newest_marker(known(read_attempts(directory.paths), ())), iteration)


def look_at_checkpoints(card: RunCard, read_digests: bool = False) -> LaunchCheckpoints:
    """Look where the trainer would look, in its order. Raises OSError as the file system does."""
    own = own_source(card)
    found = _look_in(own, read_digests)
    other = loaded_source(card)
    if other is not None and not found.steps and found.latest is None:
        found = _look_in(other, read_digests)
    return replace(found, origin=_observed(Origin.read, card.paths))


def _look_in(source: StartSource, read_digests: bool) -> LaunchCheckpoints:
    folder = source.folder
    steps, latest = read_steps_and_latest(folder)
    foreign = foreign_step(folder)
    if foreign is not None:
        return LaunchCheckpoints(source, steps, latest, ResumeSearch(None, None), foreign=foreign)
    faults_of = partial(manifest_faults, read_digests=True) if read_digests else size_faults
    found = search(
        folder,
        steps,
        latest=latest if isinstance(latest, int) else None,
        need=source.need,
        faults_of=faults_of,
    )
    problem = ""
    if steps:
        problem = refusal(folder, steps, found)
    cursor: Observed[Mapping[str, Any] | None] = None
    if found.step is not None:
        place = folder / checkpoint_name(found.step)
        cursor = _observed(read_json, place / CURSOR_FILE)
    if found.manifest is None:
        was_cut = None
    else:
        was_cut = _sequences_were_cut(folder, found.manifest.job_id)
    verified = "digests" if read_digests else "sizes"
    return LaunchCheckpoints(
        source,
        steps,
        latest=latest,
        found=found,
        refusal=problem,
        verified=verified,
        foreign=None,
        cursor=cursor,
        cut_sequences=was_cut,
    )


def _sequences_were_cut(folder: Path, job_id: str) -> bool | None:
    """By the resolved card of the attempt that saved into `folder`, which says it whether or not
    the card did.
    """
    paths = RunPaths.of_checkpoints(folder)
    if paths is None:
        value = None
    else:
        value = _observed(read_json, paths.attempt(job_id) / "card.json")
    parallel = None
    if isinstance(value, dict):
        parallel = value.get("parallel")
    said = None
    if isinstance(parallel, dict):
        said = parallel.get("sequence_parallel")
    if isinstance(said, bool):
        return said
    return None
