"""Everything a launch must know before it submits, observed once. What could not be seen is
`Unknown`, not absent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from msgspec import field

from tr11ops.base.errors import SchedulerError
from tr11ops.base.installed import TRAINING, missing
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.cluster.base import Job, Node, Partition, Scheduler
from tr11ops.cluster.rehearsal import rehearsal_refusal
from tr11ops.cluster.select import start_of_watchdog
from tr11ops.cluster.site import Grants, SiteRules
from tr11ops.detect.detector import Finding
from tr11ops.detect.speed import held_back_before
from tr11ops.launch.container import ContainerFacts, look_at_container
from tr11ops.launch.data_checks import prefixes_without_maps
from tr11ops.launch.directory_checks import (
    AccessFault,
    ClockDifference,
    DirectoryFacts,
    archive_checks,
    compared_clocks,
    look_at_directory,
    read_access,
)
from tr11ops.launch.foreign import SeenTrainer, look_at_trainer
from tr11ops.launch.margins import next_interval, read_history
from tr11ops.launch.queue_checks import QueueChain, jobs_elsewhere
from tr11ops.launch.resume import LaunchCheckpoints, look_at_checkpoints, read_finished
from tr11ops.observe.files import read_exclusions, read_kill_switch
from tr11ops.observe.jobs import why_unmounted
from tr11ops.observe.lease import LeaseHolder, foreground_trainings, read_holder
from tr11ops.observe.look import facts_of, observe_node_speeds
from tr11ops.observe.snapshot import KillSwitch
from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.check import PreflightCheck
from tr11ops.runcard.gpu_memory import device_type
from tr11ops.runcard.load import unset_here
from tr11ops.runcard.save_interval import SaveInterval
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
from trainer.contract.files import host_name, now
from trainer.contract.record import Record

P = ParamSpec("P")
T = TypeVar("T")


class LaunchRequest(Record):
    """What the person asked for beyond the card. `array` is what Slurm is given (`1-10%1`), None
    for single jobs.

    `chain` says how the `tasks` attempts are queued, None where it was not asked. `read_digests`:
    compare every byte of the checkpoint with its manifest, not only the sizes. `beside_namesakes`:
    another run of the user with the same name may be queued or running. `replaces`: queued jobs, by
    the names that cancel them, in whose place this one comes. `open_questions`: what `tr11 adopt` or
    `tr11 import` has left to a person, as the card still says. `may_expedite`: its job may be one
    that starts again at once when it loses a node, where the site has that.
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
    open_questions: tuple[str, ...] = ()
    may_expedite: bool = True

    @property
    def awaited(self) -> tuple[str, ...]:
        """The jobs that must be over before this one starts: those it replaces too, should they not
        be cancelled.
        """
        numbers = (self.after or "", *(job.partition("_")[0] for job in self.replaces))
        return tuple(dict.fromkeys(filter(None, numbers)))


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
    saves: Observed[SaveInterval | None] = None  # what the next launch chooses, where it does
    clocks: Observed[tuple[ClockDifference, ...]] = ()
    access: Observed[tuple[AccessFault, ...]] = ()
    pause: str | None = None
    holder: Observed[LeaseHolder | None] = None  # the living trainer that holds the run's lease
    without_maps: Observed[tuple[str, ...]] = ()
    archives: Observed[tuple[PreflightCheck, ...]] = ()  # what is against the folders for copies
    periodic_jobs: Observed[tuple[PeriodicJobState, ...]] = ()  # that ever ran for the run
    start_of_watchdog: str = "cron install"  # the words of tr11 that start one on this machine
    scheduler: str = ""  # the kind that `jobs` are of
    damaged: Observed[tuple[Damage, ...]] = ()  # state files
    slow_nodes: Observed[tuple[Finding, ...]] = ()  # that the last attempt measured
    grants: Observed[Grants | None] = None  # None: nothing is granted or limited here
    rehearsal_refusal: str = ""  # why a card that trains nothing must not be launched here
    container: ContainerFacts | None = None  # None: the card has none
    # why the run directory is not the one that the jobs were queued from; "" where it is
    unmounted: str = ""
    # of the card's variables those that are read from one that is not set here
    unset: tuple[str, ...] = ()
    # what this machine lacks to compile the card's blocks, where it asks for that
    compiler_obstacle: str | None = None
    # of what tr11's own trainer needs, where the card is for it and no image brings it
    missing_packages: tuple[str, ...] = ()
    foreign: Observed[SeenTrainer | None] = None  # None: the trainer is tr11's own


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
    # whose data, tokenizer and kernels are looked at
    trained = card if isinstance(card, OwnCard) and not card.trains_nothing else None
    rules = None
    if site:
        rules = ask(site)
    history = _observed(read_history, directory.paths)
    measured = known(history, RunHistory())
    return LaunchFacts(
        time=moment,
        user=user,
        jobs=jobs,
        nodes=ask(scheduler.nodes) if scheduler else (),
        partitions=ask(scheduler.partitions) if scheduler else (),
        after=ask(scheduler.job, request.after) if scheduler and request.after else None,
        submissions=submissions,
        elsewhere=jobs_elsewhere(directory, known(submissions, []), own, other_scheduler),
        foreground=_observed(foreground_trainings, directory),
        exclusions=read_exclusions(directory.exclusions),
        directory=look_at_directory(directory),
        kill_switch=read_kill_switch(directory.kill_switch),
        switch_location=_observed(look_at_switch, directory),
        switch_was_marked=os.path.lexists(directory.paths.state / MARKED_FILE),
        datasets=tuple(look_at(prefix) for prefix in prefixes_of(trained.data)) if trained else (),
        tokenizer=look_at_tokenizer(trained, workers_environment(trained, os.environ))
        if trained
        else TokenizerFacts(),
        checkpoints=_observed(look_at_checkpoints, card, request.read_digests),
        finished=_observed(read_finished, directory),
        host=host_name(),
        site=rules,
        grants=ask(grants, rules) if grants and isinstance(rules, SiteRules) else None,
        traces=_observed(read_traces, directory, known(submissions, [])),
        history=history,
        saves=_observed(next_interval, card, directory.paths, measured),
        clocks=_observed(compared_clocks, directory, moment),
        access=_observed(read_access, directory),
        pause=read_pause(directory),
        holder=_observed(read_holder, directory.paths, now()),
        without_maps=_observed(prefixes_without_maps, trained) if trained else (),
        archives=_observed(lambda: tuple(archive_checks(card))),
        periodic_jobs=read_jobs(directory),
        start_of_watchdog=start_of_watchdog(),
        scheduler=own,
        container=look_at_container(card),
        damaged=_observed(find_damage, directory),
        slow_nodes=_observed(read_slow_nodes, card, directory, own),
        rehearsal_refusal=rehearsal_refusal(os.environ, own) if card.trains_nothing else "",
        unmounted=why_unmounted(directory, jobs, moment),
        unset=unset_here(card.slurm.environment, os.environ),
        compiler_obstacle=compiler_obstacle(device_type(trained))
        if trained and trained.model.compile_blocks
        else None,
        foreign=_observed(look_at_trainer, card),
        missing_packages=missing(TRAINING) if trained and card.slurm.container is None else (),
    )


def read_slow_nodes(
    card: RunCard, directory: RunDirectory, scheduler: str, typed: str = ""
) -> tuple[Finding, ...]:
    """The nodes that the last attempt measured as slow, and that the next one may have again; by the
    run's records alone. Of a machine that is all its nodes none can be exchanged. Raises OSError and
    ValueError.
    """
    if scheduler in {"", "local"} or not directory.exists:
        return ()
    return tuple(held_back_before(observe_node_speeds(directory, facts_of(card, typed), now())))


def _observed(read: Callable[P, T], *given: P.args, **named: P.kwargs) -> Observed[T]:
    """As `observed`; a scheduler may refuse too."""
    try:
        return observed(read, *given, **named)
    except SchedulerError as error:
        return Unknown(cause(error))
