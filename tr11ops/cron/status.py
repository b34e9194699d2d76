"""Do the periodic jobs run? One look at what is on record, and its judgement (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.base.units import duration
from tr11ops.cluster.base import Scheduler
from tr11ops.cluster.pending_reasons import Wait, is_held, reason_of_job
from tr11ops.cron.chain import Link, links_of
from tr11ops.cron.jobs import ChainName, PeriodicJob, Schedule, chain_schedule, next_due
from tr11ops.cron.runner import CUT_OFF
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.claims import TOLERANCE_SECONDS, Claim, ClaimFolder
from tr11ops.rundir.cron_records import ChainState, PeriodicJobState, read_chains, read_jobs
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.errors import NEEDS_PERSON, UNOBSERVED
from trainer.contract.record import Record

LEAST_GRACE_SECONDS = 300.0
LONGEST_GRACE_SECONDS = 7200.0


class JobRow(Record):
    """One job on the screen. `state` is None for one that never ran; `result` is one word or two."""

    job: PeriodicJob
    state: PeriodicJobState | None
    result: str
    next_due: float
    is_overdue: bool = False


class ChainRow(Record):
    """One chain: its record, and its next link where the scheduler knows it."""

    chain: ChainState
    link: Link | None
    fault: str = ""


class CronView(Record):
    """All of it. `problems`: what is wrong, and the command to type. `unknown` is what could not be
    seen; nothing is concluded from that.
    """

    rows: tuple[JobRow, ...]
    chains: tuple[ChainRow, ...]
    problems: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One line."""
        if self.problems:
            more = len(self.problems) - 1
            return f"NEEDS A PERSON: {self.problems[0][0]}" + (
                f" (and {more} more)" if more else ""
            )
        if self.unknown:
            return f"UNKNOWN: {self.unknown[0]}"
        wanted = [row for row in self.rows if not row.job.unwanted]
        if wanted and all(row.state is None for row in wanted):
            return "FINE: the periodic jobs are installed, and wait for their first round"
        if wanted:
            return "FINE: the periodic jobs run"
        return "FINE: the card wants no periodic job"

    @property
    def exit_code(self) -> int:
        if self.problems:
            return NEEDS_PERSON
        if self.unknown:
            return UNOBSERVED
        return 0


def grace(schedule: Schedule) -> float:
    """How much later than its point a round may start before that is a fault: half a period, 5
    minutes to 2 hours.
    """
    return max(LEAST_GRACE_SECONDS, min(schedule.period_seconds / 2, LONGEST_GRACE_SECONDS))


def view(
    jobs: Sequence[PeriodicJob],
    states: Observed[tuple[PeriodicJobState, ...]],
    chains: Observed[tuple[ChainState, ...]],
    links: Mapping[str, Observed[tuple[Link, ...]]],
    schedules: Mapping[ChainName, Schedule],
    living: Mapping[str, bool],
    now: float,
    is_installed: bool = False,
    fallback: str = "",
) -> CronView:
    """Judge what is on record. `links` are the queue's by chain, `living` which jobs' owners still
    live.

    `is_installed`: something is there that will start the jobs, so that none of them ever ran is no
    fault yet. `fallback`: where rounds were recorded because the run directory could not be
    written, "" where none was.
    """
    if isinstance(states, Unknown):
        unknown = [f"the records of the jobs: {states.why}"]
    else:
        unknown = []
    unknown += [f"the records of the chains: {chains.why}"] if isinstance(chains, Unknown) else []
    found = known(chains, ())
    chain_rows = tuple(
        _chain_row(chain, links.get(chain.name, Unknown("not asked")), schedules, now)
        for chain in found
    )
    for chain in found:
        queue = links.get(chain.name)
        if isinstance(queue, Unknown):
            unknown.append(f"whether the {chain.name} chain lives: {queue.why}")
    problems = [(row.fault, _chain_fix(row)) for row in chain_rows if row.fault]
    if fallback:
        text = f"the run directory could not be written: rounds are recorded in {fallback}, on this machine"
        problems.append((text, "tr11 pulse"))
    rows: tuple[JobRow, ...] = ()
    if not isinstance(states, Unknown):
        by_name = {state.name: state for state in states}
        rows = tuple(
            _job_row(job, by_name.get(job.name), living.get(job.name, False), now) for job in jobs
        )
        problems += _job_problems(
            rows, now, is_installed or any(not row.fault for row in chain_rows)
        )
    return CronView(rows, chain_rows, tuple(problems), tuple(unknown))


def _job_row(
    job: PeriodicJob, state: PeriodicJobState | None, is_alive: bool, now: float
) -> JobRow:
    if job.unwanted:
        return JobRow(job, state, "not wanted", 0.0)
    due = next_due(job.schedule, state.started if state else None, now)
    if state is None:
        return JobRow(job, None, "never ran", due)
    late = now > due + grace(job.schedule)
    if state.is_running:
        return JobRow(
            job,
            state,
            result="running" if is_alive else "cut off",
            next_due=due,
            is_overdue=late and not is_alive,
        )
    if state.message:
        return JobRow(job, state, result="failed", next_due=due, is_overdue=late)
    return JobRow(
        job,
        state,
        result={0: "fine", 1: "needs a person"}.get(state.exit_code or 0, "not observed"),
        next_due=due,
        is_overdue=late,
    )


def _job_problems(rows: Sequence[JobRow], now: float, is_installed: bool) -> list[tuple[str, str]]:
    wanted = [row for row in rows if not row.job.unwanted]
    states = [row.state for row in wanted if row.state is not None]
    if wanted and not states:
        if is_installed:
            return []
        return [("no periodic job ever ran", "tr11 cron install")]
    # just after an install the jobs have their first rounds one after another
    is_new = all(state.runs == 1 and now < state.started + LEAST_GRACE_SECONDS for state in states)
    found = []
    for row in wanted:
        name = row.job.name
        state = row.state
        if state is None:
            if not is_new:
                found.append((f"{name} never ran", f"tr11 cron run {name}"))
        elif row.is_overdue:
            late = duration(now - row.next_due)
            found.append((f"{name} is {late} overdue: nothing starts it", _start_again(state.way)))
        elif row.result in {"failed", "cut off"}:
            times = ""
            if state.failures_in_a_row > 1:
                times = f", {state.failures_in_a_row} times in a row"
            why = state.message if row.result == "failed" else CUT_OFF
            found.append((f"{name} failed{times}: {why}", f"tr11 cron run {name}"))
    return found


def _start_again(way: str) -> str:
    if way in {"crontab", "scrontab", "slurm"}:
        return f"tr11 cron install --way {way}"
    if way == "daemon":
        return "tr11 cron run"
    return "tr11 cron install"


def _chain_row(
    chain: ChainState,
    links: Observed[tuple[Link, ...]],
    schedules: Mapping[ChainName, Schedule],
    now: float,
) -> ChainRow:
    if isinstance(links, Unknown):
        return ChainRow(chain, None)
    link = next((link for link in reversed(links) if link.job.raw_id == chain.job_id), None)
    # between the queueing of a link and its record, or the first that could not be recorded
    if link is None:
        link = None
        if links:
            link = links[-1]
    if link is None:
        return ChainRow(
            chain,
            None,
            f"the {chain.name} chain is dead: job {chain.job_id} is not in the queue any more",
        )
    name: ChainName = "daily"
    if chain.name == "hourly":
        name = "hourly"
    if link.due > now + schedules[name].period_seconds + TOLERANCE_SECONDS:
        why = "its interval is shorter now, or a clock was set back"
        return ChainRow(chain, link, f"the {name} chain waits too long: {why}")
    if is_held(link.job):
        return ChainRow(
            chain, link, f"the {name} chain is held: job {link.job.raw_id} ({link.job.reason})"
        )
    if reason_of_job(link.job).wait in {Wait.PERSON, Wait.NEVER}:
        return ChainRow(
            chain, link, f"the {name} chain cannot go on: job {link.job.raw_id} ({link.job.reason})"
        )
    return ChainRow(chain, link)


def _chain_fix(row: ChainRow) -> str:
    if row.link is not None and is_held(row.link.job):
        return f"scontrol release {row.link.job.raw_id}"
    return "tr11 cron install --way slurm"


# ----------------------------------------------------------------------------- the look
# Records, claims, and the queue where a chain is installed.


def look(
    card: RunCard,
    jobs: Sequence[PeriodicJob],
    directory: RunDirectory,
    open_scheduler: Callable[[], Scheduler],
    now: float,
    in_table: Callable[[], bool],
) -> CronView:
    """What is on record, judged. The scheduler is asked, once, only where a chain is installed.

    `in_table` says whether this machine's cron has the run's lines; it is asked only where no job
    ever ran.
    """
    states = read_jobs(directory)
    chains = read_chains(directory)
    local = existing_fallback(directory)
    names = [chain.name for chain in known(chains, ())]
    living = {
        state.name: _lives(directory, state.name, now)
        for state in known(states, ())
        if state.is_running
    }
    return view(
        jobs,
        states,
        chains=chains,
        links=_links(directory, names, open_scheduler) if names else {},
        schedules={
            "hourly": chain_schedule(card, jobs, "hourly"),
            "daily": chain_schedule(card, jobs, "daily"),
        },
        living=living,
        now=now,
        is_installed=states == () and in_table(),
        fallback=str(local.root)
        if local is not None and (local.paths.state / "cron").is_dir()
        else "",
    )


def _lives(directory: RunDirectory, name: str, now: float) -> bool:
    """Whether the owner of a running round may still be at it; an owner that cannot be read may."""
    claim = observed(ClaimFolder(directory, name).newest)
    return isinstance(claim, Unknown) or (claim is not None and claim.is_living(now))


def _links(
    directory: RunDirectory, names: Sequence[str], open_scheduler: Callable[[], Scheduler]
) -> dict[str, Observed[tuple[Link, ...]]]:
    try:
        jobs = open_scheduler().jobs()
    except SchedulerError as error:
        return {name: Unknown(cause(error)) for name in names}
    found: dict[str, Observed[tuple[Link, ...]]] = {}
    for name in names:
        claim = observed(ClaimFolder(directory, f"chain-{name}").newest)
        if isinstance(claim, Unknown):
            found[name] = claim
        else:
            links = links_of(jobs, directory.mark, name)
            found[name] = tuple(
                link for link in links if isinstance(claim, Claim) and link.token == claim.token
            )
    return found
