"""One look at the periodic jobs of a run: their records, their claims, and the queue where a chain
is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, cause, known, observed
from tr11ops.cluster.base import Scheduler
from tr11ops.cron.chain import Link, links_of
from tr11ops.cron.jobs import PeriodicJob, chain_schedule
from tr11ops.cron.status import CronView, view
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.claims import Claim, ClaimFolder
from tr11ops.rundir.cron_records import read_chains, read_jobs
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.paths import RunDirectory


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
    states, chains = read_jobs(directory), read_chains(directory)
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
        chains,
        _links(directory, names, open_scheduler) if names else {},
        {
            "hourly": chain_schedule(card, jobs, "hourly"),
            "daily": chain_schedule(card, jobs, "daily"),
        },
        living,
        now,
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
