"""`tr11 cron`: the periodic jobs of a run, and what has them run."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.base.deadline import SILENCE_SECONDS, is_silent, keep_waiting
from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import for_this_card
from tr11ops.base.observed import cause
from tr11ops.base.stop_signals import StopEvent, obeying
from tr11ops.base.units import counted, duration
from tr11ops.cli.common import directory_of, in_time, plain_text, read_card, say, show, table
from tr11ops.cli.cron_install import (
    cron_context_of,
    in_crontab,
    install,
    is_never_launched,
    jobs_of,
    link,
    remove,
    run_rounds,
)
from tr11ops.cli.runner import JSON, Outcome, RunContext
from tr11ops.cron.jobs import PeriodicJob, find_job, of_chain, unknown_skips, wanted
from tr11ops.cron.output import stamp
from tr11ops.cron.runner import CronContext, CronRound
from tr11ops.cron.status import ChainRow, CronView, JobRow, look
from tr11ops.observe.readers import open_scheduler
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.cron_records import cron_folder
from tr11ops.sweep.watch import WATCHING, CellWatch
from trainer.contract.documents import document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


SCHEMA = 1
CELLS_SECONDS = 20.0  # between two looks for what is due of a study's cells

app = typer.Typer(
    name="cron",
    help="""The periodic jobs: list, run, install, status, remove. Four ways to have them run, all the same.

    Examples:
      tr11 cron install --dry-run
      tr11 cron status
    """,
    no_args_is_help=True,
)


# ----------------------------------------------------------------------------- list
@app.command("list")
def list_jobs(
    context: Annotated[RunContext, JSON],
) -> Outcome:
    """Which periodic jobs the card wants, and when.

    Examples:
      tr11 cron list
      tr11 cron list --set 'cron.skip=["digest"]'
    """
    card = context.card_with_undefined()
    in_time(lambda: directory_of(card).exists)  # else its scripts would be left out without a word
    jobs = in_time(partial(jobs_of, card, context.run))
    for name in unknown_skips(card, jobs):
        say(
            f"cron.skip: {name!r} is no periodic job, there are {', '.join(job.name for job in jobs)}"
        )
    made = table("JOB", "WHEN", "COMMAND", "WHAT")
    for job in jobs:
        if job.unwanted:
            when = f"not: {job.unwanted}"
        else:
            when = str(job.schedule)
        made.add_row(job.name, when, job.command_words, job.what)
    value = {"schema": SCHEMA, "jobs": [_job_values(job) for job in jobs]}
    return Outcome(value, screen=partial(show, made))


def _job_values(job: PeriodicJob) -> dict[str, Any]:
    return {
        "name": job.name,
        "command": ["tr11", *job.words] if job.script is None else [str(job.script)],
        "when": str(job.schedule),
        "period_seconds": job.schedule.period_seconds,
        "timeout_seconds": job.timeout_seconds,
        "chain": job.chain,
        "wanted": not job.unwanted,
        "why_not": job.unwanted,
    }


# ----------------------------------------------------------------------------- run
@app.command("run")
def run_jobs(
    context: Annotated[RunContext, JSON],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="This job, now, whether it is due or not."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Run what is due now, and leave; cron calls this.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what went wrong.")] = False,
    way: Annotated[str, typer.Option("--way", hidden=True)] = "",
    chain: Annotated[str, typer.Option("--chain", hidden=True)] = "",
) -> Outcome | None:
    """Run the periodic jobs in the foreground, each when it is due, until Ctrl-C or TERM.

    The job that runs at that moment is waited for; a second signal ends it too.

    The launched cells of a study of this card are watched too (`pulse --no-act`): `tr11 sweep
    resume` takes them up. A cell that shall have a run's other jobs too gets a `tr11 cron run --run
    CELL/tr11.toml` of its own.

    A run directory that is not mounted, or not there, is what a watchdog is for: `pulse` goes on,
    tells people, and is recorded on this machine; nothing is made in the directory's place, and the
    other jobs wait for it.

    Several of these, on any hosts and beside the other ways, start each round once.

    Exit code of --once and NAME: 1 when a job failed. What a job found is its own.

    Examples:
      tr11 cron run
      tr11 cron run pulse
      tr11 cron run --once
    """
    card = context.card
    jobs = jobs_of(card, context.run)
    if name is not None and once:
        raise Refusal(
            f"NAME and --once: leave one out; `tr11 cron run {name}` runs it now", exit_code=2
        )
    usual = "daemon"
    if once:
        usual = "once"
    elif name is not None:
        usual = "hand"
    way = way or usual
    must_end = StopEvent()

    of_cells: list[tuple[str, CronRound]] = []
    is_daemon = name is None and not once

    def report(cell: str, done: CronRound) -> None:
        of_cells.append((cell, done))
        if is_daemon:
            say(f"{stamp(time.time())} {cell}: {done.line}")

    def cell_context(card: RunCard, path: Path) -> CronContext:
        return cron_context_of(card, path, (), way, must_end=must_end)

    cells = CellWatch(
        card,
        context.card_path,
        cell_context,
        must_end=must_end,
        report=report,
        forced=name is not None,
    )
    if is_never_launched(directory_of(card)) and cells.names():
        cron_context = None  # the run itself was never launched, a study of its card was
    else:
        cron_context = cron_context_of(
            card, context.card_path, overrides=context.overrides, way=way, must_end=must_end
        )
    if is_daemon:
        _run_daemon(cron_context, card, jobs=wanted(jobs), context=context, cells=cells)
        return None
    if name is not None:
        try:
            chosen: tuple[PeriodicJob, ...] = (find_job(jobs, name),)
        except ValueError as error:
            raise Refusal(f"NAME: {error}", exit_code=2) from None
    elif chain:
        chosen = of_chain(jobs, "daily" if chain == "daily" else "hourly")
    else:
        chosen = wanted(jobs)
    rounds = (
        () if cron_context is None else run_rounds(cron_context, chosen, forced=name is not None)
    )
    if (name is None and chain != "daily") or name == WATCHING:
        with obeying(must_end.obey):
            cells.look(must_end)
            cells.wait()
    values = [
        *(_round_object(done, None) for done in rounds),
        *(_round_object(done, cell) for cell, done in of_cells),
    ]
    return Outcome(
        {"schema": SCHEMA, "rounds": values},
        screen=partial(_show_rounds, rounds, of_cells, cron_context, quiet=quiet),
        exit_code=max(
            (one.exit_code for one in (*rounds, *(one for _, one in of_cells))), default=0
        ),
    )


def _run_daemon(
    cron_context: CronContext | None,
    card: RunCard,
    jobs: tuple[PeriodicJob, ...],
    context: RunContext,
    cells: CellWatch,
) -> None:
    """Until a signal: the run's jobs where it has a directory, and the cells of its card's studies
    beside them.
    """
    keep_waiting()
    ended = StopEvent()
    beside = threading.Thread(target=_watch_cells, args=(cells, ended), name="cells")
    names = cells.names()
    if names:
        say(f"watching {counted(len(names), 'cell')} too: {', '.join(names)}")
    beside.start()
    try:
        if cron_context is None:
            say("Ctrl-C ends it")
            with obeying(ended.obey):
                ended.wait()
        else:
            _run_jobs(cron_context, card, jobs, context)
    finally:
        ended.set()
        beside.join()
        cells.wait()
    say("ended")


def _run_jobs(
    cron_context: CronContext, card: RunCard, jobs: tuple[PeriodicJob, ...], context: RunContext
) -> None:
    # its library costs more than a round, and nothing but the daemon needs it
    from tr11ops.cron.daemon import Daemon

    daemon = Daemon(
        cron_context, jobs, lambda text: say(f"{stamp(time.time())} {text}"), _reloader(context)
    )
    say(
        f"running {', '.join(job.name for job in jobs) or 'nothing'} of {card.run.name}; Ctrl-C ends it"
    )
    with obeying(lambda _: daemon.stop()):
        daemon.run()


def _watch_cells(cells: CellWatch, ended: StopEvent) -> None:
    """What is due of the cells, again and again; of studies that are made meanwhile too."""
    while not ended.is_set():
        try:
            cells.look(ended)
        except (OSError, ValueError) as error:
            say(f"{stamp(time.time())} the studies cannot be read: {cause(error)}")
        ended.wait(CELLS_SECONDS)


def _reloader(context: RunContext) -> Callable[[], tuple[PeriodicJob, ...] | None]:
    """Gives the jobs again after the card's file, or a script, has changed."""
    path, card = context.card_path, context.card
    seen = [(path.stat().st_mtime_ns, card, wanted(jobs_of(card, context.run)))]

    def reload() -> tuple[PeriodicJob, ...] | None:
        [(before, card, jobs)] = seen
        if any(is_silent(place, SILENCE_SECONDS) for place in (path, card.paths.root)):
            return None
        now = path.stat().st_mtime_ns
        if now != before:
            card = read_card(context.run, context.overrides)
        found = wanted(jobs_of(card, context.run))
        seen[:] = [(now, card, found)]
        if found == jobs:
            return None
        return found

    return reload


def _show_rounds(
    rounds: Sequence[CronRound],
    of_cells: Sequence[tuple[str, CronRound]],
    cron_context: CronContext | None,
    quiet: bool,
) -> None:
    shown = [done for done in rounds if not quiet or done.exit_code]
    for done in shown:
        assert cron_context is not None  # or there were no rounds of it
        for line in done.lines if cron_context.way == "hand" else ():
            print(line)
        say(done.line)
        if done.state is not None:
            say(f"  its output: {cron_folder(cron_context.directory) / f'{done.name}.log'}")
    for cell, done in of_cells:
        if not quiet or done.exit_code:
            say(f"{cell}: {done.line}")
    if not rounds and not of_cells and not quiet:
        say("nothing is due")


def _round_object(done: CronRound, cell: str | None) -> dict[str, Any]:
    """One round for --json; with `cell` where it is one of a study."""
    code = None if done.state is None else done.state.exit_code
    value = {"job": done.name, "result": done.result, "why": done.why, "exit_code": code}
    if cell is None:
        return value
    return {**value, "cell": cell}


# ----------------------------------------------------------------------------- status
@app.command()
def status(
    context: Annotated[RunContext, JSON],
) -> Outcome:
    """Do the periodic jobs run? The verdict first, then one row for each.

    Exit code 0: they do; 1: a job failed, is overdue, or a chain is dead; 3: it could not be seen.

    Examples:
      tr11 cron status
      tr11 cron status --json
    """
    card, directory = context.seen(missing=None)
    now = time.time()
    seen = look(
        card,
        jobs_of(card, context.run),
        directory=directory,
        open_scheduler=lambda: open_scheduler("slurm"),
        now=now,
        in_table=lambda: in_crontab(context),
    )
    shown = partial(_show_status, seen, now)
    return Outcome(_status_values(seen), screen=shown, exit_code=seen.exit_code)


def _show_status(seen: CronView, now: float) -> None:
    print(plain_text(seen.verdict))
    for text, fix in seen.problems:
        if len(seen.problems) > 1:
            print(plain_text(f"  {text}"))
            print(plain_text(f"    type: {for_this_card(fix)}"))
        else:
            print(plain_text(f"  type: {for_this_card(fix)}"))
    for text in seen.unknown if seen.problems else seen.unknown[1:]:  # the headline has the first
        print(plain_text(f"  unknown: {text}"))
    made = table("JOB", "LAST", "TOOK", "RESULT", "NEXT", "BY")
    for row in seen.rows:
        made.add_row(*map(plain_text, _row_words(row, now)))
    for chain in seen.chains:
        made.add_row(*map(plain_text, _chain_words(chain, now)))
    show(made)


def _row_words(row: JobRow, now: float) -> tuple[str, ...]:
    state = row.state
    if row.job.unwanted:
        return row.job.name, "", "", "not wanted", "", row.job.unwanted
    if row.is_overdue:
        due = "overdue"
    elif row.next_due <= now:
        due = "now"
    else:
        due = f"in {duration(row.next_due - now)}"
    if state is None:
        return row.job.name, "never", "", "", due, ""
    took = ""
    if state.ended is not None:
        took = duration(state.ended - state.started)
    return (
        row.job.name,
        f"{duration(now - state.started)} ago",
        took,
        row.result,
        due,
        state.way if state.way == "slurm" else f"{state.way} {state.host}",
    )


def _chain_words(row: ChainRow, now: float) -> tuple[str, ...]:
    name, due = f"{row.chain.name} chain", row.chain.next_due
    if row.fault and row.link is None:
        result = "dead"
    elif row.fault:
        result = "stuck"
    elif row.link:
        result = "fine"
    else:
        result = "unknown"
    if due > now:
        when = f"in {duration(due - now)}"
    else:
        when = f"since {duration(now - due)}"
    return (
        name,
        f"{duration(now - row.chain.time)} ago",
        "",
        result,
        when,
        f"job {row.chain.job_id}",
    )


def _status_values(seen: CronView) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "verdict": seen.verdict,
        "exit_code": seen.exit_code,
        "jobs": [
            {
                "name": row.job.name,
                "wanted": not row.job.unwanted,
                "result": row.result,
                "next_due": None if row.job.unwanted else row.next_due,
                "overdue": row.is_overdue,
                "last": None if row.state is None else document(row.state),
            }
            for row in seen.rows
        ],
        "chains": [
            {
                **document(row.chain),
                "state": row.link.job.state.lower() if row.link else None,
                "fault": row.fault,
            }
            for row in seen.chains
        ],
        "problems": [{"text": text, "command": for_this_card(fix)} for text, fix in seen.problems],
        "unknown": list(seen.unknown),
    }


# ----------------------------------------------------------------------------- install, remove
app.command()(install)
app.command()(remove)
app.command(hidden=True)(link)
