"""The rounds of the periodic jobs, and one link of a Slurm chain, which runs them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from msgspec.structs import replace

from tr11ops.base.errors import Refusal
from tr11ops.base.stop_signals import StopEvent, obeying
from tr11ops.cli.common import directory_of, nothing_there, open_reader, read_card, say
from tr11ops.cli.context import RunContext
from tr11ops.cli.cron_install import RoundSecondsOption, chain_context, keep_card, opened
from tr11ops.cron.chain import begin_link
from tr11ops.cron.drop_ins import every_job, script_command
from tr11ops.cron.jobs import of_chain, wanted
from tr11ops.cron.jobs import table as job_table
from tr11ops.cron.placement import Placement
from tr11ops.cron.runner import WAYS, CronContext, child_environment, run_due, run_job, tr11_command
from tr11ops.cron.scripts import Invocation
from tr11ops.observe.mounted import was_never_launched, why_not_there
from tr11ops.runcard.card import CardError, card_from_resolved
from tr11ops.rundir.cron_records import cron_folder
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.sweep.find import studies_in
from tr11ops.sweep.manifest import CARD
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tr11ops.cron.chain import Begun
    from tr11ops.cron.jobs import PeriodicJob
    from tr11ops.cron.runner import CronContext, CronRound
    from tr11ops.runcard.card import RunCard
    from tr11ops.rundir.paths import RunDirectory

WATCHING = "pulse"
LINK_MARGIN_SECONDS = 60.0  # of a link's time limit, for its own end
RETRY_SECONDS = 20.0


# ----------------------------------------------------------------------------- rounds
def cron_context_of(
    card: RunCard,
    path: Path,
    overrides: Sequence[str] | None,
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
    return CronContext(
        why_not_there=lambda: why_not_there(directory, open_reader(directory, "auto"), time.time()),
        must_end=must_end or StopEvent(),
        directory=directory,
        way=way,
        folder=Path.cwd(),
        environment={**child_environment(os.environ), "TR11_RUN": str(path)},
        command=lambda job: (
            tr11_command(job.words, path, overrides or ())
            if job.script is None
            else script_command(job.script)
        ),
    )


def is_never_launched(directory: RunDirectory) -> bool:
    """Whether nothing tells of a run: the scheduler is asked only where there is no directory, and
    no rounds of it.
    """
    if directory.exists or existing_fallback(directory) is not None:
        return False
    return was_never_launched(directory, open_reader(directory, "auto"))


class WatchedCell(Record):
    """One launched cell of a study, and the job that watches it."""

    name: str
    context: CronContext
    jobs: tuple[PeriodicJob, ...]


def watched_cells(
    card: RunCard, path: Path, way: str, must_end: StopEvent
) -> Iterator[WatchedCell]:
    """The launched cells of every study that was planned from this card; one that is damaged is
    left out.

    They are looked for each time.
    A cell is watched by `pulse` alone, which only tells: what goes on in a study is decided by `tr11 sweep resume`.
    It has no archive and no hub (its card is planned without), and the rest would come once for each cell, of the same
    disks and nodes.
    Studies are looked for in the current folder and beside the card's run directory.
    """
    for folder, manifest in studies_in((Path.cwd(), card.paths.root.parent)):
        if os.path.realpath(manifest.card) != os.path.realpath(path):
            continue
        for cell in manifest.cells:
            cell_path = folder / cell.name / CARD
            try:
                cell_card = read_card(str(cell_path))
                launched = any(directory_of(cell_card).submissions.iterdir())
            except (CardError, OSError):
                continue
            if launched:
                jobs = tuple(
                    replace(job, words=(*job.words, "--no-act"))
                    for job in wanted(job_table(cell_card))
                    if job.name == WATCHING
                )
                context = cron_context_of(cell_card, cell_path, (), way, must_end)
                yield WatchedCell(f"{manifest.name}/{cell.name}", context, jobs)


def run_rounds(
    cron_context: CronContext, jobs: tuple[PeriodicJob, ...], forced: bool = False
) -> tuple[CronRound, ...]:
    """Run what is due, or all of it. A signal ends what runs, which is recorded, and starts nothing
    more.
    """
    with obeying(lambda _: cron_context.must_end.set()):
        return _rounds(cron_context, jobs, forced)


def run_cell_rounds(
    cells: Iterable[WatchedCell], forced: bool = False
) -> Iterator[tuple[str, CronRound]]:
    """The rounds of cells, each with the cell's name; `forced`: due or not."""
    for cell in cells:
        if cell.context.must_end.is_set():
            return
        for done in _rounds(cell.context, cell.jobs, forced):
            yield cell.name, done


def _rounds(
    cron_context: CronContext, jobs: tuple[PeriodicJob, ...], forced: bool
) -> tuple[CronRound, ...]:
    if forced:
        return tuple(run_job(cron_context, job, forced=True) for job in jobs)
    return run_due(cron_context, jobs)


def exit_code(done: CronRound) -> int:
    """What a command that ran one round returns: 1 for a failure. What a job found is in the job's
    own record.
    """
    if done.result in {"failed", "not recorded"}:
        return 1
    return 0


# ----------------------------------------------------------------------------- the commands
def link(
    context: RunContext,
    chain: str,
    token: Annotated[str, typer.Option("--token")],
    due: Annotated[int, typer.Option("--due")],
    round_seconds: RoundSecondsOption = None,
    kept_card: Annotated[Path | None, typer.Option("--kept-card")] = None,
) -> None:
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
    here = Placement(
        os.environ.get("SLURM_JOB_PARTITION") or None, int(memory) if memory.isdigit() else None
    )
    own = chain_context(
        chain, invocation, directory, jobs, round_seconds, here
    )  # the next link runs where this one does

    def seconds_left() -> float:
        return own.time_limit_seconds - LINK_MARGIN_SECONDS - (time.monotonic() - began)

    begun = begin_link(own, token, due, number)
    if begun.leave:
        say(f"leaving: {begun.leave}")
        return
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
        cells = (
            replace(cell, context=replace(cell.context, seconds_left=seconds_left))
            for cell in watched_cells(
                invocation.card, invocation.card_path, "slurm", rounds.must_end
            )
        )
        with obeying(lambda _: rounds.must_end.set()):
            for name, one in run_cell_rounds(cells):
                say(f"{name}: {one.line}")
    while begun.owed and not rounds.must_end.is_set() and seconds_left() > RETRY_SECONDS:
        time.sleep(RETRY_SECONDS)
        begun = begin_link(own, token, due, number)
    prune_outputs(directory, time.time())
    raise typer.Exit(1 if begun.owed else max((exit_code(one) for one in done), default=0))


def _watch_unseen(rounds: CronContext, begun: Begun, jobs: tuple[PeriodicJob, ...]) -> NoReturn:
    """What only looks and tells is run, and recorded on this machine; nothing else is begun. Raises
    Refusal.
    """

    def why_not_there() -> str:
        return begun.unseen

    run_rounds(
        replace(rounds, why_not_there=why_not_there), tuple(job for job in jobs if job.watches)
    )
    if begun.successor:
        follows = f"the next link is job {begun.successor}"
    else:
        follows = "the next link is not queued"
    raise Refusal(f"{begun.unseen}; {follows}", exit_code=3)


def prune_outputs(directory: RunDirectory, now: float, days: float = 14) -> None:
    """Remove the output files of links that are older than so many days. What cannot be removed
    stays.
    """
    for path in (cron_folder(directory) / "slurm").glob("cron-*.out"):
        with suppress(OSError):
            if path.stat().st_mtime < now - days * 86_400:
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
            card, folder / (context.run or ""), context.overrides, folder, dict(os.environ)
        )
        return (
            invocation,
            directory_of(card),
            every_job(card, directory_of(card), invocation.card_path.parent),
        )
