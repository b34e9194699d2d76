"""`tr11 cron install` and `remove`: the ways to have the periodic jobs run by themselves."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.errors import Refusal, TableError
from tr11ops.base.observed import known
from tr11ops.base.units import duration
from tr11ops.cli.common import card_path, directory_of, open_scheduler, say
from tr11ops.cli.context import DRY_RUN, JSON, YES, RunContext
from tr11ops.cli.runner import Change, Outcome, carry_out
from tr11ops.cluster.select import has_slurm
from tr11ops.cron.chain import ChainContext
from tr11ops.cron.chain import install as have_chain
from tr11ops.cron.chain import remove as end_chain
from tr11ops.cron.drop_ins import every_job
from tr11ops.cron.jobs import chain_schedule, of_chain
from tr11ops.cron.placement import Placement, choose_placement
from tr11ops.cron.runner import WAYS
from tr11ops.cron.schedule import Every
from tr11ops.cron.scripts import Invocation
from tr11ops.cron.table_programs import RunCrontab, is_installed, plan_install, plan_removal
from tr11ops.cron.table_programs import apply as apply_change
from tr11ops.runcard.card import resolved
from tr11ops.runcard.slurm_syntax import parse_time_limit
from tr11ops.rundir.cron_records import CHAINS, cron_folder, read_chains, read_job, read_jobs
from tr11ops.rundir.journal import Journal
from trainer.contract.files import host_name, write_json
from trainer.contract.sharing import make_shared

if TYPE_CHECKING:
    from tr11ops.cron.jobs import ChainName, PeriodicJob
    from tr11ops.cron.table_programs import Program, TableChange
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.paths import RunDirectory

SCHEMA = 1

WayOption = Annotated[
    str | None,
    typer.Option(
        "--way",
        metavar="crontab|slurm|scrontab",
        help="Default: the way in use, else crontab, else Slurm.",
    ),
]
RoundSecondsOption = Annotated[int | None, typer.Option("--round-seconds", hidden=True, min=1)]


def install(
    context: Annotated[RunContext, JSON, YES, DRY_RUN],
    way: WayOption = None,
    round_seconds: RoundSecondsOption = None,
) -> None:
    """Have the periodic jobs run by themselves. Type it again to repair what is broken.

    [bold]crontab[/bold]: a line in your crontab on this machine; on a login node it is the best
    way.

    [bold]slurm[/bold]: small jobs that queue themselves, in a partition without GPUs.

    [bold]scrontab[/bold]: lines in Slurm's own crontab, where the site has one.

    A fourth way needs no install: `tr11 cron run` in a terminal that stays open.

    Examples:
      tr11 cron install --dry-run
      tr11 cron install --way slurm
      tr11 cron install --way crontab --yes
    """
    invocation, directory, jobs = opened(context)
    if not directory.exists:
        raise Refusal(f"{directory.root} does not exist: launch the run first, or check --run")
    chosen = _way(way, directory, installing=True)
    if chosen == "slurm":
        carry_out(context, _chains_to_install(context, invocation, jobs, round_seconds))
        return
    crontab = _run_crontab(chosen, invocation, directory, jobs)
    change = _table_errors(lambda: plan_install(crontab, time.time()))
    changes = _changed_intervals(directory, jobs)
    carry_out(context, _crontab_change(context, crontab, change, "install", changes))


def remove(
    context: Annotated[RunContext, JSON, YES, DRY_RUN],
    way: WayOption = None,
) -> None:
    """Take back what `tr11 cron install` did. A job that runs at this moment runs to its end.

    Examples:
      tr11 cron remove --way crontab
    """
    invocation, directory, jobs = opened(context)
    chosen = _way(way, directory, installing=False)
    if chosen == "slurm":
        carry_out(context, _chains_to_end(context, invocation, jobs))
        return
    crontab = _run_crontab(chosen, invocation, directory, jobs)
    change = _table_errors(lambda: plan_removal(crontab))
    carry_out(context, _crontab_change(context, crontab, change, "remove", ()))


# ----------------------------------------------------------------------------- how
def opened(context: RunContext) -> tuple[Invocation, RunDirectory, tuple[PeriodicJob, ...]]:
    """What a command line means. Raises CardError."""
    card, folder = context.card, Path.cwd()
    invocation = Invocation(
        card, folder / context.card_path, context.overrides, folder, dict(os.environ)
    )
    return invocation, context.directory, jobs_of(card, context.run)


def jobs_of(card: RunCard, run: str | None) -> tuple[PeriodicJob, ...]:
    """Every periodic job of a card, and the scripts beside it and in the run directory. Raises
    CardError.
    """
    return every_job(card, directory_of(card), (Path.cwd() / card_path(run)).parent)


def _way(way: str | None, directory: RunDirectory, installing: bool) -> str:
    """The way that is meant. Raises Refusal for one that there is not."""
    if way is not None:
        if way not in WAYS:
            hint = "; `tr11 cron run` is the daemon, in the foreground" if way == "daemon" else ""
            raise Refusal(f"--way {way}: use {', '.join(WAYS)}{hint}", exit_code=2)
        return way
    if known(read_chains(directory), ()):
        return "slurm"
    used = [state for state in known(read_jobs(directory), ()) if state.way in WAYS]
    if used:
        return max(used, key=lambda state: state.started).way
    if not installing:
        raise Refusal(f"nothing tells which way is in use: add --way {'|'.join(WAYS)}", exit_code=2)
    if shutil.which("crontab"):  # no queue stands between it and the run
        return "crontab"
    if has_slurm():
        return "slurm"
    raise Refusal(
        "there is neither Slurm nor crontab on this machine: keep `tr11 cron run` running in a terminal"
    )


def chain_context(
    name: str,
    invocation: Invocation,
    directory: RunDirectory,
    jobs: tuple[PeriodicJob, ...],
    round_seconds: int | None,
    placement: Placement | None = None,
) -> ChainContext:
    """One chain. `placement` is where its links run; a link's own, where it is a link that asks."""
    chain: ChainName = "daily"
    if name == "hourly":
        chain = "hourly"
    rehearsal = ("--round-seconds", str(round_seconds)) if round_seconds else ()
    words = ("--kept-card", str(kept_card_path(directory)), *rehearsal)
    schedule = (
        Every(round_seconds) if round_seconds else chain_schedule(invocation.card, jobs, chain)
    )
    scheduler, where = open_scheduler("slurm"), placement or Placement()
    return ChainContext(
        chain, schedule, invocation, directory, scheduler, say, words=words, placement=where
    )


def _run_crontab(
    way: str, invocation: Invocation, directory: RunDirectory, jobs: tuple[PeriodicJob, ...]
) -> RunCrontab:
    program: Program = "crontab"
    if way == "scrontab":
        program = "scrontab"
    return RunCrontab(program, invocation, directory, jobs)


def in_crontab(context: RunContext) -> bool:
    """Whether the user's crontab on this machine has the run's lines; False where it cannot be
    read.
    """
    invocation, directory, jobs = opened(context)
    try:
        return is_installed(_run_crontab("crontab", invocation, directory, jobs))
    except TableError:
        return False


def kept_card_path(directory: RunDirectory) -> Path:
    """Where the card is kept for the day on which it cannot be read."""
    return cron_folder(directory) / "slurm" / "card.json"


def keep_card(invocation: Invocation, directory: RunDirectory) -> None:
    """Keep the card as it is now. Raises OSError as the file system does."""
    path = kept_card_path(directory)
    make_shared(path.parent)
    write_json(path, resolved(invocation.card))


def _chains_to_install(
    context: RunContext,
    invocation: Invocation,
    jobs: tuple[PeriodicJob, ...],
    round_seconds: int | None,
) -> Change:
    """Jobs that queue themselves, in a partition that takes them. Raises NoPartition,
    SchedulerError.
    """
    directory, placement = context.directory, _placement(invocation)
    every = [
        chain_context(name, invocation, directory, jobs, round_seconds, placement)
        for name in CHAINS
    ]
    chains = [chain for chain in every if of_chain(jobs, chain.name)]
    lines = []
    for chain in chains:
        names = ", ".join(job.name for job in of_chain(jobs, chain.name))
        lines.append(
            f"{chain.job_name}: {chain.schedule}, in partition {placement.partition}, runs {names}"
        )
    if placement.note:
        lines.append(f"  {placement.note}; a crontab on a login node does not: --way crontab")
    lines += _changed_intervals(directory, jobs)

    def apply() -> Outcome:
        if not chains:
            raise Refusal("the card wants no periodic job; see tr11 cron list")
        keep_card(invocation, directory)
        links = []
        for chain in chains:
            link = have_chain(chain)
            say(
                f"{chain.job_name}: job {link.job_id}"
                + ("" if link.is_new else ", it was there already")
            )
            links.append(link)
        new = [link.job_id for link in links if link.is_new]
        if new:
            _note(directory, "cron-installed", "slurm", {"jobs": new})
        return _outcome(
            context, "installed" if new else "unchanged", "slurm", [link.job_id for link in links]
        )

    question = "Have these jobs queue themselves?" if chains else ""
    return Change(lines, question, apply, _outcome(context, "would-install", "slurm"))


def _chains_to_end(
    context: RunContext, invocation: Invocation, jobs: tuple[PeriodicJob, ...]
) -> Change:
    """Both chains end."""
    directory = context.directory

    def apply() -> Outcome:
        cancelled: list[str] = []
        for name in CHAINS:
            cancelled += end_chain(chain_context(name, invocation, directory, jobs, None))
        for number in cancelled:
            say(f"cancelled: job {number}")
        _note(directory, "cron-removed", "slurm", {"cancelled": cancelled})
        return _outcome(context, "removed", "slurm", cancelled)

    lines = ["the hourly and the daily chain end: queued jobs are cancelled"]
    return Change(lines, "End both chains?", apply, _outcome(context, "would-remove", "slurm"))


def _placement(invocation: Invocation) -> Placement:
    """Where the chains' jobs shall run. Raises NoPartition where nothing tells,
    SchedulerUnreachable.
    """
    scheduler, section = open_scheduler("slurm"), invocation.card.cron
    seconds = max(
        parse_time_limit(section.hourly_time_limit), parse_time_limit(section.daily_time_limit)
    )
    return choose_placement(invocation.card, scheduler.partitions(), scheduler.nodes(), seconds)


def _changed_intervals(directory: RunDirectory, jobs: tuple[PeriodicJob, ...]) -> list[str]:
    """Which jobs have another interval now than in their last round."""
    lines = []
    for job in jobs:
        last = known(read_job(directory, job.name), None)
        if (
            last is not None
            and not job.unwanted
            and last.interval_seconds != job.schedule.period_seconds
        ):
            lines.append(
                f"{job.name}: {job.schedule} from now on; it was every {duration(last.interval_seconds)}"
            )
    return lines


def _crontab_change(
    context: RunContext, crontab: RunCrontab, change: TableChange, action: str, lines: Sequence[str]
) -> Change:
    """The table of the user becomes another, as it is shown. `action`: install, or remove."""
    program, past = crontab.program, {"install": "installed", "remove": "removed"}[action]
    if not change.difference:
        lines = [*lines, f"the {program} stays as it is"]
    else:
        print(change.difference, file=sys.stderr if context.as_json else sys.stdout)

    def apply() -> Outcome:
        _table_errors(lambda: apply_change(crontab, change))
        if not change.difference:
            return _outcome(context, "unchanged", program)
        _note(crontab.directory, f"cron-{past}", program, {})
        return _outcome(context, past, program)

    question = ""
    if change.difference:
        question = f"Change your {program}?"
    preview = _outcome(context, f"would-{action}" if change.difference else "unchanged", program)
    return Change(lines, question, apply, preview)


def _table_errors(act: Any) -> Any:
    try:
        return act()
    except (TableError, ValueError) as error:
        raise Refusal(str(error)) from None


def _note(directory: RunDirectory, kind: str, way: str, data: dict[str, Any]) -> None:
    if directory.exists:
        Journal(directory.journal).write(kind, "", {"way": way, "host": host_name(), **data})


def _outcome(context: RunContext, action: str, way: str, jobs: Sequence[str] = ()) -> Outcome:
    document = {"schema": SCHEMA, "action": action, "way": way, "jobs": list(jobs)}
    is_shown = not context.as_json and not action.startswith("would")
    return Outcome(document, notes=(f"{way}: {action}",) if is_shown else ())
