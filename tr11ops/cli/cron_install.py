"""`tr11 cron install` and `remove`: the ways to have the periodic jobs run by themselves."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SetOption,
    YesOption,
    agree,
    card_path,
    directory_of,
    open_scheduler,
    read_card,
    say,
)

if TYPE_CHECKING:
    from tr11ops.crontab.chain import ChainPlace
    from tr11ops.crontab.jobs import ChainName, PeriodicJob
    from tr11ops.crontab.placement import Placement
    from tr11ops.crontab.scripts import Typed
    from tr11ops.crontab.table_programs import Program, TablePlace
    from tr11ops.runcard import RunCard
    from tr11ops.rundir import RunDirectory

SCHEMA = 1
WAYS = ("slurm", "crontab", "scrontab")

WayOption = Annotated[
    str | None,
    typer.Option("--way", metavar="crontab|slurm|scrontab", help="Default: the way in use, else crontab, else Slurm."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]
RoundSecondsOption = Annotated[int | None, typer.Option("--round-seconds", hidden=True, min=1)]


def install(
    run: RunOption = None,
    way: WayOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
    round_seconds: RoundSecondsOption = None,
) -> None:
    """Have the periodic jobs run by themselves. Type it again to repair what is broken.

    [bold]crontab[/bold]: a line in your crontab on this machine; on a login node it is the best way.

    [bold]slurm[/bold]: small jobs that queue themselves, in a partition without GPUs.

    [bold]scrontab[/bold]: lines in Slurm's own crontab, where the site has one.

    A fourth way needs no install: `tr11 cron run` in a terminal that stays open.

    [bold]Examples[/bold]

      tr11 cron install --dry-run

      tr11 cron install --way slurm

      tr11 cron install --way crontab --yes
    """
    typed, directory, jobs = opened(run, overrides)
    if not directory.exists:
        raise Refusal(f"{directory.root} does not exist: launch the run first, or check --run")
    chosen = _way(way, directory, installing=True)
    if chosen == "slurm":
        _install_chains(typed, directory, jobs, round_seconds, yes, dry_run, as_json)
    else:
        _install_lines(_table_place(chosen, typed, directory, jobs), yes, dry_run, as_json)


def remove(
    run: RunOption = None,
    way: WayOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Take back what `tr11 cron install` did. A job that runs at this moment runs to its end.

    [bold]Examples[/bold]

      tr11 cron remove --way crontab
    """
    from tr11ops.crontab.chain import remove as end_chain
    from tr11ops.crontab.state import CHAINS
    from tr11ops.crontab.table_programs import plan_removal

    typed, directory, jobs = opened(run, overrides)
    chosen = _way(way, directory, installing=False)
    if chosen == "slurm":
        say("the hourly and the daily chain end: what waits is cancelled")
        if dry_run:
            _finish("would-remove", chosen, as_json)
        agree("End both chains?", yes)
        cancelled: list[str] = []
        for name in CHAINS:
            cancelled += end_chain(chain_place(name, typed, directory, jobs, None))
        for number in cancelled:
            say(f"cancelled: job {number}")
        _note(directory, "cron-removed", chosen, {"cancelled": cancelled})
        _finish("removed", chosen, as_json, jobs=cancelled)
    place = _table_place(chosen, typed, directory, jobs)
    change = _table_errors(lambda: plan_removal(place))
    _apply(place, change, "remove", yes, dry_run, as_json)


# ----------------------------------------------------------------------------- how
def opened(run: str | None, overrides: list[str] | None) -> tuple[Typed, RunDirectory, tuple[PeriodicJob, ...]]:
    """What a command line means. Raises CardError."""
    from tr11ops.crontab.scripts import Typed

    card = read_card(run, overrides)
    folder = Path.cwd()
    typed = Typed(card, folder / card_path(run), tuple(overrides or ()), folder, dict(os.environ))
    return typed, directory_of(card), jobs_of(card, run)


def jobs_of(card: RunCard, run: str | None) -> tuple[PeriodicJob, ...]:
    """Every periodic job of a card, and the scripts beside it and in the run directory. Raises CardError."""
    from tr11ops.crontab.drop_ins import every_job

    return every_job(card, directory_of(card), (Path.cwd() / card_path(run)).parent)


def _way(way: str | None, directory: RunDirectory, installing: bool) -> str:
    """The way that is meant. Raises Refusal for one that there is not."""
    from tr11ops.cluster.select import has_slurm
    from tr11ops.crontab.state import read_chains, read_jobs
    from tr11ops.snapshot import known

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
    raise Refusal("there is neither Slurm nor crontab on this machine: keep `tr11 cron run` running in a terminal")


def chain_place(
    name: str,
    typed: Typed,
    directory: RunDirectory,
    jobs: tuple[PeriodicJob, ...],
    round_seconds: int | None,
    placement: Placement | None = None,
) -> ChainPlace:
    """One chain. `placement` is where its links run; a link's own, where it is a link that asks."""
    from tr11ops.crontab.chain import ChainPlace
    from tr11ops.crontab.jobs import chain_schedule
    from tr11ops.crontab.placement import Placement
    from tr11ops.crontab.schedule import Every

    chain: ChainName = "hourly" if name == "hourly" else "daily"
    rehearsal = ("--round-seconds", str(round_seconds)) if round_seconds else ()
    words = ("--kept-card", str(kept_card_path(directory)), *rehearsal)
    schedule = Every(round_seconds) if round_seconds else chain_schedule(typed.card, jobs, chain)
    scheduler, where = open_scheduler("slurm"), placement or Placement()
    return ChainPlace(chain, schedule, typed, directory, scheduler, say, words=words, placement=where)


def _table_place(way: str, typed: Typed, directory: RunDirectory, jobs: tuple[PeriodicJob, ...]) -> TablePlace:
    from tr11ops.crontab.table_programs import TablePlace

    program: Program = "scrontab" if way == "scrontab" else "crontab"
    return TablePlace(program, typed, directory, jobs)


def in_crontab(run: str | None, overrides: list[str] | None) -> bool:
    """Whether the user's crontab on this machine has the run's lines; False where it cannot be read."""
    from tr11ops.crontab.table_file import TableError
    from tr11ops.crontab.table_programs import is_installed

    typed, directory, jobs = opened(run, overrides)
    try:
        return is_installed(_table_place("crontab", typed, directory, jobs))
    except TableError:
        return False


def kept_card_path(directory: RunDirectory) -> Path:
    """Where the card is kept for the day on which it cannot be read."""
    from tr11ops.crontab.state import cron_folder

    return cron_folder(directory) / "slurm" / "card.json"


def keep_card(typed: Typed, directory: RunDirectory) -> None:
    """Keep the card as it is now. Raises OSError as the file system does."""
    from tr11ops.runcard import resolved
    from tr11ops.rundir import make_shared
    from trainer.contract import write_json

    path = kept_card_path(directory)
    make_shared(path.parent)
    write_json(path, resolved(typed.card))


def _install_chains(
    typed: Typed,
    directory: RunDirectory,
    jobs: tuple[PeriodicJob, ...],
    round_seconds: int | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    from tr11ops.crontab.chain import install as have_chain
    from tr11ops.crontab.jobs import of_chain
    from tr11ops.crontab.state import CHAINS

    placement = _placement(typed)
    every = [chain_place(name, typed, directory, jobs, round_seconds, placement) for name in CHAINS]
    places = [place for place in every if of_chain(jobs, place.name)]
    for place in places:
        names = ", ".join(job.name for job in of_chain(jobs, place.name))
        say(f"{place.job_name}: {place.schedule}, in partition {placement.partition}, runs {names}")
    if placement.note:
        say(f"  {placement.note}; a crontab on a login node does not: --way crontab")
    _say_changes(directory, jobs)
    if dry_run:
        _finish("would-install", "slurm", as_json)
    if not places:
        raise Refusal("the card wants no periodic job; see tr11 cron list")
    agree("Have these jobs queue themselves?", yes)
    keep_card(typed, directory)
    done = []
    for place in places:
        found = have_chain(place)
        say(f"{place.job_name}: job {found.job_id}" + ("" if found.is_new else ", it was there already"))
        done.append(found)
    new = [found.job_id for found in done if found.is_new]
    if new:
        _note(directory, "cron-installed", "slurm", {"jobs": new})
    _finish("installed" if new else "unchanged", "slurm", as_json, jobs=[found.job_id for found in done])


def _placement(typed: Typed) -> Placement:
    """Where the chains' jobs shall run. Raises Refusal where nothing tells, SchedulerUnreachable."""
    from tr11ops.crontab.placement import NoPartition, choose_placement
    from tr11ops.slurm_syntax import parse_time_limit

    scheduler, section = open_scheduler("slurm"), typed.card.cron
    seconds = max(parse_time_limit(section.hourly_time_limit), parse_time_limit(section.daily_time_limit))
    try:
        return choose_placement(typed.card, scheduler.partitions(), scheduler.nodes(), seconds)
    except NoPartition as error:
        raise Refusal(str(error), exit_code=2) from None


def _say_changes(directory: RunDirectory, jobs: tuple[PeriodicJob, ...]) -> None:
    """Which jobs have another interval now than in their last round."""
    from tr11ops.crontab.state import read_job
    from tr11ops.snapshot import known
    from tr11ops.units import duration

    for job in jobs:
        last = known(read_job(directory, job.name), None)
        if last is not None and not job.unwanted and last.interval_seconds != job.schedule.period_seconds:
            say(f"{job.name}: {job.schedule} from now on; it was every {duration(last.interval_seconds)}")


def _install_lines(place: TablePlace, yes: bool, dry_run: bool, as_json: bool) -> None:
    from tr11ops.crontab.table_programs import plan_install

    change = _table_errors(lambda: plan_install(place, time.time()))
    _say_changes(place.directory, place.jobs)
    _apply(place, change, "install", yes, dry_run, as_json)


def _apply(place: TablePlace, change: Any, action: str, yes: bool, dry_run: bool, as_json: bool) -> None:
    from tr11ops.crontab.table_programs import apply

    past = {"install": "installed", "remove": "removed"}[action]
    print(change.difference, file=None if not as_json else _stderr(), end="\n" if change.difference else "")
    if not change.difference:
        say(f"the {place.program} stays as it is")
    if dry_run:
        _finish(f"would-{action}" if change.difference else "unchanged", place.program, as_json)
    if change.difference:
        agree(f"Change your {place.program}?", yes)
    _table_errors(lambda: apply(place, change))
    if change.difference:
        _note(place.directory, f"cron-{past}", place.program, {})
    _finish(past if change.difference else "unchanged", place.program, as_json)


def _stderr() -> Any:
    import sys

    return sys.stderr


def _table_errors(act: Any) -> Any:
    from tr11ops.crontab.table_file import TableError

    try:
        return act()
    except (TableError, ValueError) as error:
        raise Refusal(str(error)) from None


def _note(directory: RunDirectory, kind: str, way: str, data: dict[str, Any]) -> None:
    from tr11ops.journal import Journal
    from trainer.contract import host_name

    if directory.exists:
        Journal(directory.journal).write(kind, "", {"way": way, "host": host_name(), **data})


def _finish(action: str, way: str, as_json: bool, jobs: list[str] | None = None) -> None:
    """Print the result, and end the command."""
    if as_json:
        print(json.dumps({"schema": SCHEMA, "action": action, "way": way, "jobs": jobs or []}, indent=1))
    elif not action.startswith("would"):
        say(f"{way}: {action}")
    else:
        say("nothing was changed (--dry-run)")
    raise typer.Exit(0)
