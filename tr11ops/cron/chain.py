"""The self-resubmitting Slurm job, without drift and without doubles.

A chain is a token. Each of its jobs, a link, carries token and due time in its comment:

    tr11-cron:hourly:TOKEN:DUE@MARK

Only the token of the newest claim on the chain (`claims.py`) may go on: a link of any other leaves
at once. So two chains become one however they came to be, and an install that finds a living link
changes nothing.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec import field
from msgspec.structs import replace

from tr11ops.base.errors import NoPartition, SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import cause
from tr11ops.cluster.base import BatchRequest, Job, Node, Partition, Scheduler
from tr11ops.cluster.sbatch_options import of_any_job, options_of
from tr11ops.cron.jobs import ChainName, Schedule, slack
from tr11ops.cron.output import stamp
from tr11ops.cron.table_programs import Invocation, link_script
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.sections import parse_time_limit, requested
from tr11ops.rundir.claims import TOLERANCE_SECONDS, Claim, ClaimFolder
from tr11ops.rundir.cron_records import ChainState, chain_file, cron_folder, write_chain
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import make_shared
from trainer.contract.record import Record

# ----------------------------------------------------------------------------- where a chain runs
# On a partition without GPUs, beside the training and not behind it.

LINK_MEGABYTES = 2048  # a look, with one detector after another, takes a tenth of it


class JobPlacement(Record):
    """A partition (None: the scheduler's default) and what memory to ask for. `note`: what a person
    should know of it.

    Without a figure for memory some sites give a job a whole node's; where a node's memory is not
    configured, none can be asked for.
    """

    partition: str | None = None
    memory_megabytes: int | None = None
    note: str = ""


def choose_placement(
    card: RunCard, partitions: Sequence[Partition], nodes: Iterable[Node], seconds: int
) -> JobPlacement:
    """The card's partition, else the best without GPUs that takes a job of so many `seconds`.
    Raises NoPartition.
    """
    by_name = {node.name: node for node in nodes}
    default = next((one.name for one in partitions if one.is_default), None)
    training = card.slurm.partition or default
    if card.cron.partition is not None:
        chosen = next((one for one in partitions if one.name == card.cron.partition), None)
        return JobPlacement(card.cron.partition, _memory(chosen, by_name))
    fit = [one for one in partitions if _is_fit(one, by_name, seconds)]
    if not fit:
        seen = ", ".join(sorted(one.name for one in partitions)) or "none"
        raise NoPartition(
            f"no partition without GPUs takes a job of {seconds // 60} min (there are: {seen}), and elsewhere the "
            "watchdog waits behind the training: use `tr11 cron install --way crontab` on a login node, or name one "
            "with --set cron.partition=NAME"
        )
    trained_on = {name for one in partitions if one.name == training for name in one.node_names}
    best = min(
        fit,
        key=lambda one: (one.name == training, bool(trained_on & set(one.node_names)), one.name),
    )
    shared = bool(trained_on & set(best.node_names))
    if shared:
        note = (
            "its nodes are the training's: on a full cluster the watchdog waits behind the training"
        )
    else:
        note = ""
    return JobPlacement(best.name, _memory(best, by_name), note)


def _is_fit(partition: Partition, nodes: dict[str, Node], seconds: int) -> bool:
    members = [nodes[name] for name in partition.node_names if name in nodes]
    is_long_enough = partition.max_time_seconds is None or partition.max_time_seconds >= seconds
    return (
        partition.is_up
        and is_long_enough
        and bool(members)
        and not any(node.gpus for node in members)
    )


def _memory(partition: Partition | None, nodes: dict[str, Node]) -> int | None:
    if partition:
        sizes = [nodes[name].memory_megabytes for name in partition.node_names if name in nodes]
    else:
        sizes = []
    if sizes and min(sizes) >= LINK_MEGABYTES:
        return LINK_MEGABYTES
    return None


T = TypeVar("T")
LOOKUPS = 5
LOOKUP_PAUSE_SECONDS = 2.0
INSTALL_SECONDS = 300.0  # how long an install on another host may take before its claim is doubted
_COMMENT = re.compile(
    r"tr11-cron:(hourly|daily):([0-9a-f]{8}):(\d{1,15})@([0-9a-f]{12})(?![0-9a-f])"
)


class Link(Record):
    """One job of a chain that is not over. `due` is the point of the schedule that it is for (epoch
    seconds).
    """

    token: str
    due: int
    job: Job

    @property
    def number(self) -> int:
        return int(self.job.raw_id)


class ChainContext(Record):
    """One chain of a run, and where it lives. `words` are added to what each link runs."""

    name: ChainName
    schedule: Schedule
    invocation: Invocation
    directory: RunDirectory
    scheduler: Scheduler
    say: Callable[[str], None]
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    words: tuple[str, ...] = ()
    placement: JobPlacement = field(default_factory=JobPlacement)

    @property
    def job_name(self) -> str:
        """What its links are named in the queue."""
        return f"cron-{self.name}-{self.invocation.card.run.name}"

    @property
    def claims(self) -> ClaimFolder:
        return ClaimFolder(self.directory, f"chain-{self.name}")

    @property
    def time_limit_seconds(self) -> int:
        section = self.invocation.card.cron
        return parse_time_limit(
            section.hourly_time_limit if self.name == "hourly" else section.daily_time_limit
        )

    def links(self) -> tuple[Link, ...]:
        """Links of this chain, of any token, that are not over, by due time. Raises
        SchedulerUnreachable.
        """
        return links_of(self.scheduler.jobs(), self.directory.mark, self.name)


# ----------------------------------------------------------------------------- pure
def comment_of(directory: RunDirectory, chain: str, token: str, due: int) -> str:
    """What a link carries as its comment."""
    return f"tr11-cron:{chain}:{token}:{due}@{directory.mark}"


def links_of(jobs: Iterable[Job], mark: str, chain: str) -> tuple[Link, ...]:
    """The links of one run's chain among all jobs that the scheduler knows, less those that are
    over.
    """
    found = []
    for job in jobs:
        match = _COMMENT.search(job.comment)
        if (
            match
            and match[1] == chain
            and match[4] == mark
            and not job.state.is_final
            and job.raw_id.isdigit()
        ):
            found.append(Link(match[2], int(match[3]), job))
    return tuple(sorted(found, key=lambda link: (link.due, link.number)))


def due_after(schedule: Schedule, due: int, now: float) -> int:
    """The point for which the next link is queued: the first that lies behind this one's and is not
    over.

    A due time far in the future means that the clock was set back; the clock is then believed.
    """
    if due > now + TOLERANCE_SECONDS:
        latest = now
    else:
        latest = max(due, now)
    return round(schedule.after(latest + slack(schedule)))


def is_living(link: Link, token: str, schedule: Schedule, now: float) -> bool:
    """Whether a link carries its chain on: of the chain's own token, and not waiting for a time of
    another clock.
    """
    return link.token == token and link.due <= now + schedule.period_seconds + TOLERANCE_SECONDS


def must_leave(links: Iterable[Link], token: str, due: int, number: int) -> Link | None:
    """The link that stands for the same point and was there first; two come when sbatch's answer
    was lost.
    """
    return next(
        (
            link
            for link in links
            if link.token == token and link.due == due and link.number < number
        ),
        None,
    )


# ----------------------------------------------------------------------------- queueing a link
def _request(context: ChainContext, token: str, due: int, begin: float | None) -> BatchRequest:
    section = context.invocation.card.cron
    folder = cron_folder(context.directory) / "slurm"
    # else the run directory is not mounted: nothing is made in its place
    if cron_folder(context.directory).is_dir():
        with suppress(OSError):  # then its output is lost, and nothing else
            make_shared(folder)
    words = ("cron", "link", context.name, "--token", token, "--due", str(due), *context.words)
    request = BatchRequest(
        **{"partition": context.placement.partition, **requested(section)},
        script="",
        name=context.job_name,
        nodes=1,
        time_limit_seconds=context.time_limit_seconds,
        # the script opens its own: Slurm ends a job whose output cannot be opened
        output="/dev/null",
        working_directory=context.invocation.folder,
        comment=comment_of(context.directory, context.name, token, due),
        begin=begin,
        memory_megabytes=context.placement.memory_megabytes,
        requeue=True,  # its node may die before it could do anything
        options=of_any_job(options_of(context.invocation.card.slurm.options)),
    )
    return replace(
        request,
        script=link_script(
            context.invocation,
            context.name,
            request=request,
            command=context.invocation.command(words),
            folder=folder,
        ),
    )


def queue_link(
    context: ChainContext, token: str, due: int, begin: float | None, by: str = ""
) -> str:
    """Queue the link for a point unless it is there; returns its number. `by` is the link that
    queues it.

    Raises SchedulerUnreachable when that cannot be known: the answer was lost and the job is not
    found, but may come. Raises SchedulerError with the scheduler's reason, OSError.
    """
    found = _find(context, token, due, by)
    if found is not None:
        return found
    try:
        return context.scheduler.submit(_request(context, token, due, begin))
    except SchedulerUnreachable:
        found = find_lost(lambda: _find(context, token, due, by), context.pause)
        if found is None:
            raise
        return found


def find_lost(find: Callable[[], T | None], pause: Callable[[float], None]) -> T | None:
    """What `find` finds of a submission whose answer was lost: it may have been taken all the same.
    None: nothing.
    """
    for _ in range(LOOKUPS):
        pause(LOOKUP_PAUSE_SECONDS)
        with suppress(SchedulerUnreachable):
            found = find()
            if found is not None:
                return found
    return None


def _find(context: ChainContext, token: str, due: int, but: str) -> str | None:
    numbers = (
        link.job.raw_id for link in context.links() if (link.token, link.due) == (token, due)
    )
    return next((number for number in numbers if number != but), None)


def _record(context: ChainContext, number: str, due: int) -> None:
    write_chain(context.directory, ChainState(context.name, number, context.clock(), float(due)))


# ----------------------------------------------------------------------------- install and remove
class Installed(Record):
    """`is_new` is False when a living chain was found, and nothing was changed but, at most, its
    record.
    """

    job_id: str
    due: int
    is_new: bool


def install(context: ChainContext) -> Installed:
    """Have exactly one living chain, no matter who else does the same at this moment.

    Raises SchedulerError, SchedulerUnreachable (type it again: it is safe), OSError.
    """
    busy = f"others install the {context.name} chain at this moment: look again in a minute"
    for _ in range(LOOKUPS):
        newest = context.claims.newest()
        links = context.links()
        now = context.clock()
        if newest is not None and newest.held:
            living = [
                link for link in links if is_living(link, newest.token, context.schedule, now)
            ]
            if living:
                last = living[-1]
                _record(context, last.job.raw_id, last.due)
                return Installed(last.job.raw_id, last.due, is_new=False)
            if (
                newest.is_living(now)
                and not newest.data.get("queued")
                and newest.process.pid != os.getpid()
            ):
                busy = f"{newest} installs the {context.name} chain at this moment: look again in a minute"
                context.pause(LOOKUP_PAUSE_SECONDS)
                continue
        mine = context.claims.take(
            Claim.of_this_process(now, INSTALL_SECONDS, secrets.token_hex(4)), newest
        )
        if mine is not None:
            return _start(context, mine, links)
    raise SchedulerError(busy)


def _start(context: ChainContext, mine: Claim, old: tuple[Link, ...]) -> Installed:
    for link in old:  # they would leave by themselves; what waits for nothing is better not seen
        _cancel(context, link.job.raw_id)
    due = int(context.clock())
    try:
        number = queue_link(context, mine.token, due, None)
    except SchedulerUnreachable:
        # the job may exist: the claim stands, and anyone who installs next finds it, or replaces it
        raise
    except BaseException:
        context.claims.release(mine)
        raise
    _record(context, number, due)
    context.claims.write(replace(mine, data={"queued": number}))
    return Installed(number, due, is_new=True)


def remove(context: ChainContext) -> tuple[str, ...]:
    """End the chain: its queued jobs are cancelled, a running one leaves after its round. Returns
    the cancelled jobs.

    Raises SchedulerUnreachable when its jobs cannot be known; they then leave when they begin.
    Raises OSError.
    """
    for _ in range(LOOKUPS):
        newest = context.claims.newest()
        if newest is None or not newest.held:
            break
        gone: dict[str, Any] = {"removed": True}
        if context.claims.take(
            replace(Claim.of_this_process(context.clock(), 0.0, **gone), held=False), newest
        ):
            break
    chain_file(context.directory, context.name).unlink(missing_ok=True)
    waiting = [link for link in context.links() if not link.job.state.is_active]
    return tuple(link.job.raw_id for link in waiting if _cancel(context, link.job.raw_id))


def _cancel(context: ChainContext, number: str) -> bool:
    try:
        context.scheduler.cancel(number)
    except SchedulerError as error:
        context.say(
            f"job {number} could not be cancelled ({cause(error)}): it leaves when it begins"
        )
        return False
    return True


# ----------------------------------------------------------------------------- what a link does
# first
class Begun(Record):
    """`leave` says why this link must leave at once, "" when it goes on; `owed`: the next link is
    not queued yet.

    `unseen` says why the run directory seen here is not the one in which the chain was installed,
    "" where it is.
    """

    leave: str = ""
    owed: bool = False
    successor: str = ""
    next_due: int | None = None
    unseen: str = ""


def begin_link(context: ChainContext, token: str, due: int, number: str) -> Begun:
    """Queue the next link, before anything else can fail. Never raises for a scheduler that is
    silent or refuses.

    Where the run directory is not mounted the chain goes on, and nothing is made in its place.
    """
    leave = _why_leave(context, token)
    unseen = _why_unseen(context)
    if leave:
        return Begun(leave)
    try:
        links = [link for link in context.links() if link.token == token]
        first = must_leave(links, token, due, int(number))
        if first is not None:
            return Begun(f"job {first.job.raw_id} is the same link")
        later = next((link for link in links if link.due > due), None)
        if later is not None:
            next_point = later.due
            job_id = later.job.raw_id
        else:
            next_point = due_after(context.schedule, due, context.clock())
            job_id = queue_link(context, token, due=next_point, begin=next_point, by=number)
    except (SchedulerError, OSError, ValueError) as error:
        context.say(f"the next link is not queued yet: {cause(error)}")
        return Begun(owed=True, unseen=unseen)
    leave = _why_leave(context, token)  # it may have been removed meanwhile
    if leave:
        _cancel(context, job_id)
        return Begun(leave)
    if not unseen:
        try:
            _record(context, job_id, next_point)
        except OSError as error:
            context.say(f"the next link, job {job_id}, cannot be recorded: {cause(error)}")
        context.say(f"the next link is job {job_id}, at {stamp(next_point)}")
    return Begun(successor=job_id, next_due=next_point, unseen=unseen)


def _why_unseen(context: ChainContext) -> str:
    """A chain has a claim as long as its run directory is there: its removal leaves one too."""
    root = context.directory.root
    try:
        if context.claims.newest() is not None:
            return ""
    except OSError:
        return ""
    lack = "holds no record of this chain" if root.is_dir() else "is not there"
    return f"{root} {lack}: its file system is not mounted here, or it was removed (`tr11 cron remove` ends the chain)"


def _why_leave(context: ChainContext, token: str) -> str:
    try:
        newest = context.claims.newest()
    except OSError as error:
        context.say(f"whether this chain still counts is unknown, it goes on: {cause(error)}")
        return ""
    # None: not this directory; "": a claim that cannot be read
    if newest is None or newest.token in {token, ""}:
        return ""
    if newest.held:
        return f"{newest} has installed another chain"
    return "this chain was removed"
