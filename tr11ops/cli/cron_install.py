"""`tr11 cron install` and `remove`: how the periodic jobs run; their rounds."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from msgspec.structs import replace

from tr11ops.base import deadline
from tr11ops.base.errors import Refusal, TableError
from tr11ops.base.observed import known
from tr11ops.base.stop_signals import StopEvent, obeying
from tr11ops.base.units import duration
from tr11ops.cli.common import card_path, directory_of, nothing_there, say
from tr11ops.cli.runner import DRY_RUN, JSON, YES, Change, Outcome, RunContext
from tr11ops.cluster.select import has_slurm
from tr11ops.cron.chain import (
    Begun,
    ChainContext,
    JobPlacement,
    begin_link,
    choose_placement,
    install as have_chain,
    remove as end_chain,
)
from tr11ops.cron.jobs import (
    ChainName,
    Every,
    PeriodicJob,
    chain_schedule,
    every_job,
    of_chain,
    script_command,
)
from tr11ops.cron.runner import (
    KEPT_CARD,
    LONGEST_KEPT_CARD,
    WAYS,
    CronContext,
    CronRound,
    child_environment,
    run_due,
    tr11_command,
)
from tr11ops.cron.table_programs import (
    Invocation,
    Program,
    RunCrontab,
    TableChange,
    apply as apply_change,
    is_installed,
    plan_install,
    plan_removal,
)
from tr11ops.observe.jobs import was_never_launched, why_not_there
from tr11ops.observe.readers import open_reader, open_scheduler
from tr11ops.runcard.card import CardError, RunCard, card_from_resolved, resolved
from tr11ops.runcard.sections import parse_time_limit
from tr11ops.rundir.cron_records import CHAINS, cron_folder, read_chains, read_job, read_jobs
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from tr11ops.sweep.watch import CellWatch
from trainer.contract.files import host_name, make_shared, write_json
from trainer.contract.state_file import read_json

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

OUTPUT_SECONDS = 14 * 86_400


def install(
    context: Annotated[RunContext, JSON, YES, DRY_RUN],
    way: WayOption = None,
    round_seconds: RoundSecondsOption = None,
) -> Change:
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
        return _chains_to_install(context, invocation, jobs, round_seconds)
    crontab = _run_crontab(chosen, invocation, directory, jobs)
    change = _table_errors(lambda: plan_install(crontab, time.time()))
    changes = _changed_intervals(directory, jobs)
    return _crontab_change(context, crontab, change=change, action="install", lines=changes)


def remove(
    context: Annotated[RunContext, JSON, YES, DRY_RUN],
    way: WayOption = None,
) -> Change:
    """Take back what `tr11 cron install` did. A job that runs at this moment runs to its end.

    Examples:
      tr11 cron remove --way crontab
    """
    invocation, directory, jobs = opened(context)
    chosen = _way(way, directory, installing=False)
    if chosen == "slurm":
        return _chains_to_end(context, invocation, jobs)
    crontab = _run_crontab(chosen, invocation, directory, jobs)
    change = _table_errors(lambda: plan_removal(crontab))
    return _crontab_change(context, crontab, change=change, action="remove", lines=())


# ----------------------------------------------------------------------------- how
def opened(context: RunContext) -> tuple[Invocation, RunDirectory, tuple[PeriodicJob, ...]]:
    """What a command line means. Raises CardError."""
    card, folder = context.card, Path.cwd()
    invocation = Invocation(
        card,
        folder / context.card_path,
        overrides=context.overrides,
        folder=folder,
        environment=dict(os.environ),
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
    placement: JobPlacement | None = None,
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
    scheduler, where = open_scheduler("slurm"), placement or JobPlacement()
    return ChainContext(
        chain,
        schedule,
        invocation=invocation,
        directory=directory,
        scheduler=scheduler,
        say=say,
        words=words,
        placement=where,
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
        chain_context(
            name,
            invocation,
            directory=directory,
            jobs=jobs,
            round_seconds=round_seconds,
            placement=placement,
        )
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
            "installed" if new else "unchanged", "slurm", [link.job_id for link in links]
        )

    question = "Have these jobs queue themselves?" if chains else ""
    return Change(lines, question, apply, _outcome("would-install", "slurm"))


def _chains_to_end(
    context: RunContext, invocation: Invocation, jobs: tuple[PeriodicJob, ...]
) -> Change:
    """Both chains end."""
    directory = context.directory

    def apply() -> Outcome:
        cancelled: list[str] = []
        for name in CHAINS:
            cancelled += end_chain(
                chain_context(name, invocation, directory=directory, jobs=jobs, round_seconds=None)
            )
        for number in cancelled:
            say(f"cancelled: job {number}")
        _note(directory, "cron-removed", "slurm", {"cancelled": cancelled})
        return _outcome("removed", "slurm", cancelled)

    lines = ["the hourly and the daily chain end: queued jobs are cancelled"]
    return Change(lines, "End both chains?", apply, _outcome("would-remove", "slurm"))


def _placement(invocation: Invocation) -> JobPlacement:
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
            return _outcome("unchanged", program)
        _note(crontab.directory, f"cron-{past}", program, {})
        return _outcome(past, program)

    question = ""
    if change.difference:
        question = f"Change your {program}?"
    preview = _outcome(f"would-{action}" if change.difference else "unchanged", program)
    return Change(lines, question, apply, preview)


def _table_errors(act: Any) -> Any:
    try:
        return act()
    except (TableError, ValueError) as error:
        raise Refusal(str(error)) from None


def _note(directory: RunDirectory, kind: str, way: str, data: dict[str, Any]) -> None:
    if directory.exists:
        Journal(directory.journal).write(kind, "", {"way": way, "host": host_name(), **data})


def _outcome(action: str, way: str, jobs: Sequence[str] = ()) -> Outcome:
    document = {"schema": SCHEMA, "action": action, "way": way, "jobs": list(jobs)}
    if action.startswith("would"):
        return Outcome(document)
    return Outcome(document, remarks=(f"{way}: {action}",))


LINK_MARGIN_SECONDS = 60.0  # of a link's time limit, for its own end
RETRY_SECONDS = 20.0


# ----------------------------------------------------------------------------- rounds
def cron_context_of(
    card: RunCard,
    path: Path,
    overrides: Sequence[str],
    way: str,
    must_end: StopEvent | None = None,
) -> CronContext:
    """Where rounds run. Raises Refusal where nothing was launched.

    One that is not there is watched all the same, unless nothing at all tells that there was one:
    whoever installed the periodic jobs has seen it.
    """
    directory = directory_of(card)
    if way not in WAYS and is_never_launched(directory):
        raise nothing_there(directory)
    environment = {**child_environment(os.environ), "TR11_RUN": str(path)}
    kept = json.dumps(resolved(card))
    if len(kept) < LONGEST_KEPT_CARD:
        environment[KEPT_CARD] = kept
    return CronContext(
        why_not_there=lambda: why_not_there(directory, open_reader(directory, "auto"), time.time()),
        must_end=must_end or StopEvent(),
        directory=directory,
        way=way,
        folder=Path.cwd(),
        environment=environment,
        command=lambda job: (
            tr11_command(job.words, path, overrides)
            if job.script is None
            else script_command(job.script)
        ),
    )


def is_never_launched(directory: RunDirectory) -> bool:
    """Whether nothing tells of a run: the scheduler is asked only where there is no directory, and
    no rounds of it. One whose file system does not answer may have been.
    """
    is_silent = deadline.is_silent(directory.root, deadline.SILENCE_SECONDS)
    if is_silent or directory.exists or existing_fallback(directory) is not None:
        return False
    return was_never_launched(directory, open_reader(directory, "auto"))


def run_rounds(
    cron_context: CronContext, jobs: tuple[PeriodicJob, ...], forced: bool = False
) -> tuple[CronRound, ...]:
    """Run what is due, or all of it. A signal ends what runs, which is recorded, and starts nothing
    more.
    """
    with obeying(cron_context.must_end.obey):
        return run_due(cron_context, jobs, forced)


# ----------------------------------------------------------------------------- the commands
def link(
    context: RunContext,
    chain: str,
    token: Annotated[str, typer.Option("--token")],
    due: Annotated[int, typer.Option("--due")],
    round_seconds: RoundSecondsOption = None,
    kept_card: Annotated[Path | None, typer.Option("--kept-card")] = None,
) -> Outcome | None:
    """What one link of a chain runs; the batch script of `tr11 cron install --way slurm` calls it.

    A run directory that is not mounted here ends no chain: exit code 3, and the next link looks
    again.
    """
    began = time.monotonic()
    invocation, directory, jobs = _opened_or_kept(context, kept_card)
    number = os.environ.get("SLURM_JOB_ID", "")
    if chain not in {"hourly", "daily"} or not number.isdigit():
        raise Refusal(
            "only the batch script of a chain calls this; see tr11 cron install", exit_code=2
        )
    memory = os.environ.get("SLURM_MEM_PER_NODE", "")
    here = JobPlacement(
        os.environ.get("SLURM_JOB_PARTITION") or None, int(memory) if memory.isdigit() else None
    )
    # the next link runs where this one does
    own = chain_context(
        chain,
        invocation,
        directory=directory,
        jobs=jobs,
        round_seconds=round_seconds,
        placement=here,
    )

    def seconds_left() -> float:
        return own.time_limit_seconds - LINK_MARGIN_SECONDS - (time.monotonic() - began)

    begun = begin_link(own, token, due, number)
    if begun.leave:
        say(f"leaving: {begun.leave}")
        return None
    rounds = replace(
        cron_context_of(invocation.card, invocation.card_path, context.overrides, "slurm"),
        seconds_left=seconds_left,
    )
    if begun.unseen:
        _watch_unseen(rounds, begun, of_chain(jobs, own.name))
    try:
        keep_card(invocation, directory)
    except OSError as error:
        say(f"the card could not be kept: {error}")
    done = run_rounds(rounds, of_chain(jobs, own.name))
    for one in done:
        say(one.line)
    if own.name == "hourly":

        def cell_context(card: RunCard, path: Path) -> CronContext:
            context = cron_context_of(card, path, (), "slurm", must_end=rounds.must_end)
            return replace(context, seconds_left=seconds_left)

        def report(name: str, one: CronRound) -> None:
            say(f"{name}: {one.line}")

        cells = CellWatch(
            invocation.card,
            invocation.card_path,
            cell_context,
            must_end=rounds.must_end,
            report=report,
        )
        with obeying(rounds.must_end.obey):
            cells.look(rounds.must_end)
            cells.wait()
    while begun.owed and not rounds.must_end.is_set() and seconds_left() > RETRY_SECONDS:
        time.sleep(RETRY_SECONDS)
        begun = begin_link(own, token, due, number)
    prune_outputs(directory, time.time())
    return Outcome(exit_code=1 if begun.owed else max((one.exit_code for one in done), default=0))


def _watch_unseen(rounds: CronContext, begun: Begun, jobs: tuple[PeriodicJob, ...]) -> NoReturn:
    """What only looks and tells is run, and recorded on this machine; nothing else is begun. Raises
    Refusal.
    """

    def why_not_there() -> str:
        return begun.unseen

    run_rounds(
        replace(rounds, why_not_there=why_not_there), tuple(job for job in jobs if job.watches)
    )
    follows = "the next link is not queued"
    if begun.successor:
        follows = f"the next link is job {begun.successor}"
    raise Refusal(f"{begun.unseen}; {follows}", exit_code=3)


def prune_outputs(directory: RunDirectory, now: float) -> None:
    """Remove the output files of links that are older than two weeks. What cannot be removed stays."""
    for path in (cron_folder(directory) / "slurm").glob("cron-*.out"):
        with suppress(OSError):
            if path.stat().st_mtime < now - OUTPUT_SECONDS:
                path.unlink()


def _opened_or_kept(
    context: RunContext, kept: Path | None
) -> tuple[Invocation, RunDirectory, tuple[PeriodicJob, ...]]:
    """As `opened`; a card that was broken by an edit must not end the chain, so its last good form
    stands in.

    The jobs read the card as it is, and fail: that is then a finding.
    """
    try:
        return opened(context)
    except CardError as error:
        value = None
        if kept is not None:
            value = read_json(kept)
        if kept is None or value is None:
            raise
        say(f"{error}\nthe chain goes on with the card as it last was: {kept}")
        card = card_from_resolved(value, str(kept))
        folder = Path.cwd()
        invocation = Invocation(
            card,
            folder / (context.run or ""),
            overrides=context.overrides,
            folder=folder,
            environment=dict(os.environ),
        )
        return (
            invocation,
            directory_of(card),
            every_job(card, directory_of(card), invocation.card_path.parent),
        )
