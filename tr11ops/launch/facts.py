"""Everything a launch must know before it submits, observed once. What could not be seen is `Unknown`, not absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tr11ops.cluster.base import Job, Node, Partition, Scheduler, SchedulerError
from tr11ops.cluster.grants import Grants
from tr11ops.cluster.site import SiteRules
from tr11ops.crontab.state import JobState, read_jobs
from tr11ops.evidence import cause, read_exclusions
from tr11ops.launch.archives import ArchiveFacts, look_at_archives
from tr11ops.launch.chain import Chain
from tr11ops.launch.datasets import DatasetFacts, look_at, prefixes_of
from tr11ops.launch.history import RunHistory, read_history
from tr11ops.launch.surroundings import (
    AccessFault,
    ClockFacts,
    Holder,
    clock_of_file_system,
    prefixes_without_maps,
    read_access,
    read_clocks,
    read_holder,
    read_pause,
    read_traces,
)
from tr11ops.launch.tokenizer import TokenizerFacts, look_at_tokenizer, workers_environment
from tr11ops.ownership import Ownership
from tr11ops.runcard import RunCard
from tr11ops.rundir import RunDirectory, Submission
from tr11ops.snapshot import Damage, Exclusion, Observed, Unknown, known
from tr11ops.state_files import find_damage
from tr11ops.switch_place import MARKED_FILE, SwitchPlace, look_at_switch
from tr11ops.twin.rehearsal import rehearsal_refusal
from trainer.checkpoint.catalogue import refusal
from trainer.checkpoint.resumable import CURSOR_FILE, ResumeNeed, Search, search, size_faults
from trainer.contract import checkpoint_steps, host_name, manifest_faults, now, read_json, read_latest
from trainer.data_match import DataRecord


@dataclass(frozen=True)
class LaunchRequest:
    """What the person asked for beyond the card. `array` is what Slurm is given (`1-10%1`), None for single jobs.

    `chain` says how the `tasks` attempts are queued, None where it was not asked. `read_digests`: compare every byte of
    the checkpoint with its manifest, not only the sizes. `beside_namesakes`: another run of the user with the same name
    may be queued or running. `replaces`: queued jobs, by the names that cancel them, in whose place this one comes.
    """

    array: str | None = None
    tasks: int = 1
    exclude: tuple[str, ...] = ()
    after: str | None = None
    on_scheduler: bool = True  # False for a foreground training
    chain: Chain | None = None
    read_digests: bool = False
    beside_namesakes: bool = False
    replaces: tuple[str, ...] = ()

    @property
    def awaited(self) -> tuple[str, ...]:
        """The jobs that must be over before this one starts: those it replaces too, should they not be cancelled."""
        numbers = (self.after or "", *(job.partition("_")[0] for job in self.replaces))
        return tuple(dict.fromkeys(filter(None, numbers)))


@dataclass(frozen=True)
class PlaceFacts:
    """Whether the run directory can be written to. `fault` is empty when it can, or could be made.

    `free_inodes` is None where the file system does not count them.
    """

    fault: str
    free_bytes: Observed[int]
    free_inodes: Observed[int | None] = None


@dataclass(frozen=True)
class KillSwitchFacts:
    """The stop file: set or not, by whom; whose place it is; and whether that was ever marked as this run's."""

    is_set: bool
    who: str = ""
    why: str = ""
    place: Observed[SwitchPlace] = field(default_factory=SwitchPlace)
    was_marked: bool = False


@dataclass(frozen=True)
class CheckpointFacts:
    """The run's checkpoints, judged and tried as the trainer does it (see `trainer.checkpoint.resumable`).

    `steps`: all that have a folder, ascending. `latest`: what that file names, None when it is missing. `refusal`: why
    the trainer would resume from none of them, "" when it would.
    """

    steps: tuple[int, ...]
    latest: Observed[int | None]
    found: Search
    refusal: str = ""
    verified: str = "sizes"
    data: DataRecord | None = None  # of the one that was found


@dataclass(frozen=True)
class LaunchFacts:
    """All observations of one moment (`time`, seconds since the epoch)."""

    time: float
    user: str
    jobs: Observed[tuple[Job, ...]]
    nodes: Observed[tuple[Node, ...]]
    partitions: Observed[tuple[Partition, ...]]
    after: Observed[Job | None]
    submissions: Observed[tuple[Submission, ...]]
    elsewhere: tuple[str, ...]  # what another scheduler still has of this run
    foreground: Observed[tuple[str, ...]]  # trainings without a scheduler that live on this machine
    exclusions: Observed[tuple[Exclusion, ...]]
    place: PlaceFacts
    kill_switch: KillSwitchFacts
    datasets: tuple[DatasetFacts, ...]
    tokenizer: TokenizerFacts
    checkpoints: Observed[CheckpointFacts]
    host: str = ""
    site: Observed[SiteRules | None] = None  # None: the scheduler has no such rules
    traces: Observed[Mapping[str, str]] = field(default_factory=dict)  # tag -> job that ran under it
    history: Observed[RunHistory] = field(default_factory=RunHistory)
    clocks: Observed[tuple[ClockFacts, ...]] = ()
    access: Observed[tuple[AccessFault, ...]] = ()
    pause: str | None = None
    holder: Observed[Holder | None] = None  # the living trainer that holds the run's lease
    without_maps: Observed[tuple[str, ...]] = ()
    archives: Observed[tuple[ArchiveFacts, ...]] = ()
    periodic_jobs: Observed[tuple[JobState, ...]] = ()  # that ever ran for the run
    scheduler: str = ""  # the kind that `jobs` are of
    damaged: Observed[tuple[Damage, ...]] = ()  # state files
    grants: Observed[Grants | None] = None  # None: nothing is granted or limited here
    rehearsal_refusal: str = ""  # why a card that trains nothing must not be launched here


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

    `scheduler` is None for a foreground training. `other_scheduler` opens the one that an older submission names.
    `site` asks for the site's rules, and `grants` for what it grants; None where there are none. The queue is asked
    before anything else: what an earlier launch left in doubt is found there, or in the attempts' records.
    """
    submissions = _observed(lambda: tuple(directory.read_submissions()))
    own = scheduler.name if scheduler else ""
    jobs = _observed(lambda: scheduler.jobs() if scheduler else ())

    def ask(read: Callable[[], Any]) -> Any:
        """One more question; none to a scheduler that was silent, for each would cost its whole time-out."""
        return jobs if isinstance(jobs, Unknown) else _observed(read)

    moment = now()
    has_data = card.rehearsal is None
    rules = ask(site) if site else None
    return LaunchFacts(
        time=moment,
        user=user,
        jobs=jobs,
        nodes=ask(lambda: scheduler.nodes() if scheduler else ()),
        partitions=ask(lambda: scheduler.partitions() if scheduler else ()),
        after=ask(lambda: scheduler.job(request.after) if scheduler and request.after else None),
        submissions=submissions,
        elsewhere=_elsewhere(directory, known(submissions, ()), own, other_scheduler),
        foreground=_observed(lambda: foreground_trainings(directory)),
        exclusions=read_exclusions(directory.exclusions),
        place=look_at_place(directory),
        kill_switch=_kill_switch(directory),
        datasets=tuple(look_at(prefix) for prefix in prefixes_of(card.data)) if has_data else (),
        tokenizer=look_at_tokenizer(card, workers_environment(card, os.environ)) if has_data else TokenizerFacts(),
        checkpoints=_observed(lambda: _checkpoints(card, directory, request.read_digests)),
        host=host_name(),
        site=rules,
        grants=ask(lambda: grants(rules)) if grants and isinstance(rules, SiteRules) else None,
        traces=_observed(lambda: read_traces(directory, known(submissions, ()))),
        history=_observed(lambda: read_history(directory.paths)),
        clocks=_observed(lambda: _clocks(directory, moment)),
        access=_observed(lambda: read_access(directory)),
        pause=read_pause(directory),
        holder=_observed(lambda: read_holder(directory.paths, now())),
        without_maps=_observed(lambda: prefixes_without_maps(card)) if has_data else (),
        archives=_observed(lambda: look_at_archives(card)),
        periodic_jobs=read_jobs(directory),
        scheduler=own,
        damaged=_observed(lambda: find_damage(directory)),
        rehearsal_refusal="" if has_data else rehearsal_refusal(os.environ),
    )


def _clocks(directory: RunDirectory, moment: float) -> tuple[ClockFacts, ...]:
    """Clocks that can be compared; on a run directory that is still to be made, or read-only, there is none of here."""
    found = list(read_clocks(directory.paths, moment))
    try:
        found.append(clock_of_file_system(directory.paths.state))
    except OSError:
        return tuple(found)  # no files without names on this file system: the nodes' heartbeats remain
    return tuple(found)


def _observed(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (SchedulerError, OSError, ValueError, KeyError, TypeError) as error:
        return Unknown(cause(error))


# ----------------------------------------------------------------------------- where it would run already
def _elsewhere(
    directory: RunDirectory, submissions: tuple[Submission, ...], own: str, other_scheduler: Callable[[str], Scheduler]
) -> tuple[str, ...]:
    """Jobs of this run that a scheduler other than ours still has, in words."""
    found = []
    for kind in sorted({entry.scheduler for entry in submissions} - {own, ""}):
        try:
            jobs = other_scheduler(kind).jobs()
        except (SchedulerError, OSError, ValueError):
            continue  # it is gone with its machine; the trainer's lease on the checkpoints still guards them
        ours = Ownership(directory, submissions, scheduler=kind)
        for job in jobs:
            if ours.has(job) and not job.state.is_final:
                found.append(f"job {job.job_id} ({kind}, {job.state})")
    return tuple(found)


def foreground_trainings(directory: RunDirectory) -> tuple[str, ...]:
    """Foreground trainings of this run that are alive on this machine, in words."""
    found = []
    for job_id in directory.attempt_ids():
        if not job_id.startswith("foreground"):
            continue
        folder = directory.paths.attempt(job_id)
        record = _observed(lambda folder=folder: read_json(folder / "attempt.json"))  # type: ignore[misc]
        if (
            not isinstance(record, dict)
            or (folder / "verdict.json").exists()
            or record.get("batch_host") != host_name()
        ):
            continue
        if _is_alive(record.get("pid"), record.get("start")):
            found.append(f"tr11 train, process {record['pid']} on {record['batch_host']}")
    return tuple(found)


def _is_alive(pid: object, started: object) -> bool:
    """True when the process that was alive at `started` (seconds since the epoch) still lives; ids are reused."""
    if not isinstance(pid, int) or not isinstance(started, float):
        return False
    try:
        return psutil.Process(pid).create_time() <= started + 1.0
    except psutil.Error:
        return False


# ----------------------------------------------------------------------------- the file system
def look_at_place(directory: RunDirectory) -> PlaceFacts:
    """Look at the folders that the run writes to, or at the nearest existing parent of those that are missing."""
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
    place = _nearest(paths.checkpoints)
    return PlaceFacts(fault, _observed(lambda: shutil.disk_usage(place).free), _observed(lambda: _free_inodes(place)))


def _free_inodes(place: Path) -> int | None:
    counted = os.statvfs(place)
    return counted.f_favail if counted.f_files else None


def _nearest(path: Path) -> Path:
    """The path itself if something is there, else its nearest parent that exists."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _kill_switch(directory: RunDirectory) -> KillSwitchFacts:
    held = directory.read_kill_switch()
    place = _observed(lambda: look_at_switch(directory))
    return KillSwitchFacts(
        is_set=directory.kill_switch_is_set(),
        who=str(held.get("who", "")),
        why=str(held.get("why", "")),
        place=place,
        was_marked=os.path.lexists(directory.paths.state / MARKED_FILE),
    )


def _checkpoints(card: RunCard, directory: RunDirectory, read_digests: bool) -> CheckpointFacts:
    folder = directory.paths.checkpoints
    steps = tuple(checkpoint_steps(folder))
    latest = _observed(lambda: read_latest(folder))
    faults_of = partial(manifest_faults, read_digests=True) if read_digests else size_faults
    found = search(folder, steps, latest if isinstance(latest, int) else None, ResumeNeed.of(card), faults_of)
    problem = refusal(folder, steps, found) if steps else ""
    data = None if found.step is None else _data_of(directory.paths.checkpoint(found.step) / CURSOR_FILE)
    return CheckpointFacts(steps, latest, found, problem, "digests" if read_digests else "sizes", data)


def _data_of(cursor: Path) -> DataRecord | None:
    value = _observed(lambda: read_json(cursor))
    return DataRecord.of(value) if isinstance(value, dict) else None
