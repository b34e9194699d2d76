"""What watches the run and can be seen of it: periodic jobs, health checks, clocks; directories and
switches that are not there, damaged files, and namesakes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tr11ops.base.observed import known, seen
from tr11ops.base.units import counted, duration, first_few
from tr11ops.cluster.base import JobState
from tr11ops.detect.detector import HELD_FOR_FAULT, Finding, Severity, detector
from tr11ops.detect.nodes_left import exclude_command, start_again
from tr11ops.observe import derived
from tr11ops.observe.clock import skews
from tr11ops.observe.liveness import UNLEARNED_SECONDS
from tr11ops.observe.snapshot import Snapshot
from tr11ops.rundir.hold_store import marked_holds
from trainer.contract.units import shortened

if TYPE_CHECKING:
    from tr11ops.rundir.cron_records import PeriodicJobState


IN_A_ROW = 3
LONGEST_MESSAGE = 300
WATCHDOG = "pulse"  # while it fails, nothing else is noticed


@detector(
    "periodic-job-failed",
    needs=("operation.periodic_jobs",),
    bound="once; three times in a row",
    severities="INFO, WARNING; the watchdog's own: WARNING, CRITICAL",
)
def periodic_job_failed(snapshot: Snapshot) -> Iterator[Finding]:
    """A periodic job failed: the watchdog, the copy of the logs, the check of the nodes. Its silence is
    no good news.

    One finding for each job whose last round failed: INFO, and WARNING from the third in a row
    on.

    The watchdog's own: WARNING, and CRITICAL from the third in a row on. A job that the card skips
    does not count.
    """
    for job in seen(snapshot.operation.periodic_jobs):
        if job.failures_in_a_row < 1 or not is_wanted(snapshot, job):
            continue
        if job.failures_in_a_row == 1:
            times = ""
        else:
            times = f" {job.failures_in_a_row} times in a row"
        yield Finding(
            periodic_job_failed.name,
            severity_of_job(job),
            f"the periodic job {job.name} failed{times}",
            subject=job.name,
            identity=(job.name,),
            evidence=tuple(_evidence(snapshot, job)),
            fix=derived.command(snapshot, f"cron run {job.name}"),
        )


def is_wanted(snapshot: Snapshot, job: PeriodicJobState) -> bool:
    """Whether the card wants this job at all: records of others stay behind."""
    wanted = snapshot.run.periodic_jobs
    return wanted is None or job.name in wanted


def severity_of_job(job: PeriodicJobState) -> Severity:
    """How loud a failed job is."""
    again = job.failures_in_a_row >= IN_A_ROW
    if job.name == WATCHDOG:
        if again:
            return Severity.CRITICAL
        return Severity.WARNING
    if again:
        return Severity.WARNING
    return Severity.INFO


def _evidence(snapshot: Snapshot, job: PeriodicJobState) -> Iterator[str]:
    if job.exit_code is None:
        code = ""
    else:
        code = f", exit code {job.exit_code}"
    yield f"last round {duration(snapshot.time - job.started)} ago on {job.host}{code}"
    if job.message:
        yield shortened(" ".join(job.message.split()), LONGEST_MESSAGE)


INTERVALS = {"hourly": derived.HOUR, "daily": derived.DAY}  # of the chains
SHORTEST_GRACE_SECONDS = 15 * derived.MINUTE
LONGEST_GRACE_SECONDS = 6 * derived.HOUR
CHAIN_WAY = "slurm"
ALONE = "no watchdog looks at the run"
BY_HAND = frozenset({"hand", "once"})  # nothing was installed that could die


def round_grace(interval_seconds: float) -> float:
    """How late a round may begin: its own interval, at least a quarter of an hour, at most six
    hours.
    """
    return min(LONGEST_GRACE_SECONDS, max(SHORTEST_GRACE_SECONDS, interval_seconds))


@detector(
    "cron-dead",
    uses=("operation.periodic_jobs", "operation.chains"),
    bound="an interval, from 15 minutes to 6 hours",
    severities="WARNING, CRITICAL for the watchdog",
)
def cron_dead(snapshot: Snapshot) -> Iterator[Finding]:
    """The periodic jobs are not run any more: their daemon, crontab or chain of jobs is gone, and no
    one was told.

    One finding for each dead chain, else for each way in which jobs are overdue; silent where
    none was ever run.

    WARNING; CRITICAL when the watchdog is among them. A round that still runs is overdue after two
    intervals.
    """
    dead_chains = False
    fix, then = (
        derived.command(snapshot, "cron install"),
        derived.command(snapshot, "cron run --once"),
    )
    for chain in known(snapshot.operation.chains, ()):
        late = snapshot.time - chain.next_due
        if late > round_grace(INTERVALS.get(chain.name, derived.DAY)):
            dead_chains = True
            yield Finding(
                cron_dead.name,
                Severity.CRITICAL if chain.name == "hourly" else Severity.WARNING,
                f"the {chain.name} periodic jobs stopped: the next round should have begun {duration(late)} ago",
                subject=f"chain-{chain.name}",
                identity=(f"chain-{chain.name}",),
                evidence=(f"job {chain.job_id} was to begin it",),
                fix=fix,
                then=(then,),
            )
    overdue: dict[str, list[PeriodicJobState]] = {}
    for job in known(snapshot.operation.periodic_jobs, ()):
        if is_overdue(job, snapshot.time) and is_wanted(snapshot, job):
            overdue.setdefault(job.way, []).append(job)
    for way, jobs in sorted(overdue.items()):
        if way == CHAIN_WAY and dead_chains:
            continue  # said above
        names = ", ".join(job.name for job in jobs)
        yield Finding(
            cron_dead.name,
            Severity.CRITICAL if any(job.name == WATCHDOG for job in jobs) else Severity.WARNING,
            f"periodic jobs are not run any more ({way}): {names}",
            subject=way,
            identity=(way,),
            evidence=tuple(
                f"{job.name}: due {duration(snapshot.time - job.next_due)} ago, last run on {job.host}"
                for job in jobs[:4]
            ),
            fix=fix,
            then=(then,),
        )


def is_overdue(job: PeriodicJobState, now: float) -> bool:
    """Whether a job's next round should have begun long ago."""
    if job.way in BY_HAND or now - job.next_due <= round_grace(job.interval_seconds):
        return False
    return not job.is_running or now - job.started > 2 * job.interval_seconds + round_grace(
        job.interval_seconds
    )


def watchdog_fault(jobs: Iterable[PeriodicJobState], now: float) -> str:
    """Why nothing looks at the run regularly; "" where a watchdog lives: its last round is on
    record, it did not fail, and by its own interval the next one is not overdue. A look that a
    person made is no watchdog.
    """
    watchdog = next((job for job in jobs if job.name == WATCHDOG), None)
    if watchdog is None or watchdog.way in BY_HAND:
        return ALONE
    if is_overdue(watchdog, now):
        silent, every = duration(now - watchdog.started), duration(watchdog.interval_seconds)
        return f"the watchdog has not looked for {silent} (due every {every})"
    if watchdog.failures_in_a_row:
        return "the watchdog's last look failed"
    return ""


@detector(
    "check-failing",
    needs=("jobs", "training.launch_ends"),
    bound="at once, until the next attempt makes it again",
    severities="WARNING",
)
def check_failing(snapshot: Snapshot) -> Iterator[Finding]:
    """A health check fails everywhere, so that the running attempt goes on without it: nothing looks
    for that fault now.

    One finding for the attempt that runs, by the records of its launches that have ended.
    """
    for job in snapshot.active_jobs:
        names = derived.identifiers(job)
        ends = [
            end
            for end in seen(snapshot.training.launch_ends)
            if end.job_id in names and end.failing_checks
        ]
        if ends:
            last = max(ends, key=lambda end: end.launch)
            yield Finding(
                check_failing.name,
                Severity.WARNING,
                f"a health check fails everywhere and is left out: {', '.join(last.failing_checks)}",
                subject=job.job_id,
                evidence=tuple(last.failing_checks.values()),
                identity=tuple(sorted(last.failing_checks)),
                fix=derived.command(snapshot, "nodes check"),
            )


RECENT_SECONDS = derived.HOUR  # an older file may be a copy, with the time of the copying


@detector(
    "clock-skew",
    uses=("operation.clocks", "clock_ahead"),
    bound="`watch.clock_skew_seconds` (30)",
    severities="WARNING",
)
def clock_skew(snapshot: Snapshot) -> Iterator[Finding]:
    """Clocks differ between machines: deadlines and the order of events cannot be trusted, least of all
    leases.

    Ages are judged by the run's clock, whatever is wrong here: see observe/clock.py.

    WARNING for each host whose writes and the file system's time of them differ by over
    watch.clock_skew_seconds.

    Also for this machine's own clock, in both directions. Only files of the last hour count. A host
    is behind only if all its files say so, since one of them may have been written slowly.
    """
    bound = snapshot.run.watch.clock_skew_seconds
    recent = [
        entry
        for entry in known(snapshot.operation.clocks, ())
        if snapshot.time - entry.stamped <= RECENT_SECONDS
    ]
    nodes = {node.name for node in known(snapshot.nodes, ())}
    for host, skew in sorted(skews(recent, bound).items(), key=lambda pair: -abs(pair[1])):
        entry = next(entry for entry in recent if entry.host == host)
        yield Finding(
            clock_skew.name,
            Severity.WARNING,
            f"the clock of {host} is {_signed(skew, 'ahead of')} the file system's",
            subject=host,
            identity=(host,),
            evidence=(f"{entry.what}: {host} wrote {_signed(entry.written - entry.stamped)}",),
            fix=exclude_command(snapshot, host, "its clock is wrong") if host in nodes else "",
            then=start_again(snapshot, host),
        )
    own = known(snapshot.clock_ahead, 0.0)
    if abs(own) > bound:
        yield Finding(
            clock_skew.name,
            Severity.WARNING,
            f"this machine's clock is {_signed(own, 'ahead of')} the run's: ages are shown by the run's clock",
            subject="here",
            identity=("this machine",),
            evidence=("what was written here meanwhile carries the wrong time",),
        )


def _signed(seconds: float, ahead: str = "ahead") -> str:
    return f"{duration(abs(seconds))} {ahead if seconds > 0 else 'behind'}"


@detector(
    "directory-unseen",
    needs=("jobs",),
    bound="at once",
    severities="CRITICAL, WARNING while a job runs, which may see it on its own nodes",
)
def directory_unseen(snapshot: Snapshot) -> Iterator[Finding]:
    """The run directory that is seen here is not the one that the run's jobs were queued from: it is
    not mounted, or its file system does not answer.

    A job carries the directory's mark, and no launch is on record there: nothing that is read
    there is the run's.
    """
    if not snapshot.unmounted:
        return
    directory = shlex.quote(str(snapshot.run.directory))
    lack, look = "is not mounted here", f"findmnt --target {directory}"
    there = "a task that starts on a node without it ends at once and holds the rest"
    if snapshot.is_silent:
        lack, look = "does not answer here", f"timeout -s KILL 10 df {directory}"
        there = "where it does not answer on the nodes either, what trains waits at its next save"
    title = f"the run directory {lack}: where the run stands is not known"
    evidence = [snapshot.unmounted]
    then, fault = [derived.command(snapshot, "pulse")], ""
    # what a task held that could not start says so in the queue itself
    held = [hold for hold in marked_holds(snapshot.pending_jobs, ()) if hold.is_for_fault]
    if held and not snapshot.active_jobs:
        title = f"the run directory {lack}: nothing trains, and what is queued is held"
        since = min(hold.time or snapshot.time for hold in held)
        age = max(0.0, snapshot.time - since)
        evidence.append(f"what is queued is held, for {duration(age)} now: {held[0].why}")
        then.insert(0, derived.command(snapshot, "resume"))
        fault = HELD_FOR_FAULT
    yield Finding(
        directory_unseen.name,
        Severity.WARNING if snapshot.active_jobs else Severity.CRITICAL,
        title,
        evidence=(
            *evidence,
            f"{there}; what is held stays held",
            "nothing was changed, and `tr11 launch` and `tr11 resume` refuse until it is there again",
        ),
        fix=look,
        then=tuple(then),
        fault=fault,
    )


@detector(
    "switch-unseen",
    needs=("switch_fault",),
    bound="at once",
    severities="WARNING",
)
def switch_unseen(snapshot: Snapshot) -> Iterator[Finding]:
    """The kill switch cannot be seen from here: its file system is not mounted, or what lies there is
    not the run's.

    WARNING: the run trains on, but `tr11 kill` does not reach it from here, and nothing is known
    of a stop.
    """
    fault = seen(snapshot.switch_fault)
    if not fault:
        return
    yield Finding(
        switch_unseen.name,
        Severity.WARNING,
        "the kill switch cannot be seen from here: whether the run was stopped is not known",
        evidence=(fault, "`tr11 kill` sets nothing here, and says how else the run is stopped"),
        fix=derived.command(snapshot, "kill --dry-run"),
    )


# a queued job keeps its place in the queue for as long; sites do not like it for ever
FORGOTTEN_SECONDS = derived.DAY


@detector(
    "kill-switch-left-on",
    needs=("kill_switch", "jobs"),
    bound="20 s; held work: a day; a running job: an hour",
    severities="WARNING, CRITICAL",
)
def kill_switch_left_on(snapshot: Snapshot) -> Iterator[Finding]:
    """The kill switch is set while work is queued, or the training runs on in spite of it.

    WARNING while queued tasks would start and leave at once, one after another, or while work
    has waited for a day.

    CRITICAL when a job runs on long after the switch was set.
    """
    switch = seen(snapshot.kill_switch)
    if switch is None:
        return
    release = derived.command(snapshot, "resume")
    evidence = (
        f"{switch.path}: set by {switch.who or 'someone'}"
        + (f", because: {switch.why}" if switch.why else ""),
    )
    age = None if switch.time is None else snapshot.time - switch.time
    queued = derived.queued_tasks(derived.startable_jobs(snapshot))
    if queued and (age is None or age > derived.HOLDING_SECONDS):
        yield Finding(
            kill_switch_left_on.name,
            Severity.WARNING,
            f"the kill switch is set: {counted(queued, 'queued task')} will leave at once",
            evidence=evidence,
            fix=release,
        )
    held = snapshot.pending_jobs
    tasks = counted(derived.queued_tasks(held), "task")
    if not queued and held and age is not None and age > FORGOTTEN_SECONDS:
        yield Finding(
            kill_switch_left_on.name,
            Severity.WARNING,
            f"the kill switch has been set for {duration(age)} and work of the run ({tasks}) is held",
            evidence=evidence,
            fix=release,
        )
    for job in snapshot.active_jobs:
        if job.state is JobState.RUNNING and age is not None and age > UNLEARNED_SECONDS:
            yield Finding(
                kill_switch_left_on.name,
                Severity.CRITICAL,
                f"job {job.job_id} still runs {duration(age)} after the kill switch was set",
                subject=job.job_id,
                identity=("still runs",),
                evidence=evidence,
                fix=derived.command(snapshot, "logs"),
            )


MOST_NAMED = 3


@detector(
    "damaged-state",
    needs=("damaged_files",),
    bound="at once",
    severities="WARNING",
)
def damaged_state(snapshot: Snapshot) -> Iterator[Finding]:
    """A state file of the run directory is damaged: what it said is missing, and nothing says so but
    this.

    WARNING, one for all files, as long as one is damaged.
    """
    damaged = sorted(seen(snapshot.damaged_files), key=lambda entry: entry.is_newer)
    if not damaged:
        return
    more = ""
    if len(damaged) > 1:
        more = f" and {len(damaged) - 1} more"
    head = "a state file:" if damaged[0].is_newer else "a state file is damaged:"
    lines = [f"{entry.path} {entry.what}: {entry.without}" for entry in damaged[:MOST_NAMED]]
    is_moved = any(entry.is_set_aside for entry in damaged)
    yield Finding(
        damaged_state.name,
        Severity.WARNING,
        f"{head} {damaged[0].path} {damaged[0].what}{more}",
        evidence=tuple(lines),
        fix=derived.command(snapshot, "pulse --act --no-email") if is_moved else "",
    )


NAMED = 3


@detector(
    "namesake",
    uses=("jobs",),
    bound="at once",
    severities="INFO",
)
def namesake(snapshot: Snapshot) -> Iterator[Finding]:
    """A job carries this run's name but does not belong to it: easily mistaken for the run, by people
    and by tools.

    One remark for all jobs of that name that still run or wait, which count for nothing else;
    and one for those of the run that train another variant of it: they hold its lease, and its kill
    switch stops them.
    """
    for job_id, variant in list(derived.other_variants(snapshot).items())[:1]:
        yield Finding(
            namesake.name,
            Severity.INFO,
            f"job {job_id} trains variant {variant} of this run: its log and checkpoints are that variant's",
            subject=job_id,
        )
    strangers = [job for job in snapshot.namesakes if not job.state.is_final]
    if strangers:
        named = first_few((f"{job.job_id} of {job.user}" for job in strangers), NAMED)
        yield Finding(
            namesake.name,
            Severity.INFO,
            f"not of this run, though of its name: {named}",
            subject=strangers[0].job_id,
            evidence=tuple(
                f"{job.job_id}: {job.working_directory or job.comment or 'no directory'}"
                for job in strangers[:NAMED]
            ),
        )
