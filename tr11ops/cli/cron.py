"""`tr11 cron`: the periodic jobs of a run, and what has them run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SetOption,
    age,
    card_path,
    directory_of,
    read_card,
    say,
    typed_for_run,
)
from tr11ops.cli.cron_install import in_crontab, install, jobs_of, remove
from tr11ops.cli.cron_link import link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tr11ops.crontab.jobs import PeriodicJob
    from tr11ops.crontab.runner import Place, Round
    from tr11ops.crontab.status import ChainRow, CronView, JobRow
    from tr11ops.runcard import RunCard

SCHEMA = 1

app = typer.Typer(
    name="cron",
    help="The periodic jobs: list, run, install, status, remove. Four ways to have them run, all the same.",
    no_args_is_help=True,
)


# ----------------------------------------------------------------------------- list
@app.command("list")
def list_jobs(run: RunOption = None, as_json: JsonOption = False, overrides: SetOption = None) -> None:
    """Which periodic jobs the card wants, and when.

    [bold]Examples[/bold]

      tr11 cron list

      tr11 cron list --set 'cron.skip=["digest"]'
    """
    from tr11ops.cli.nodes_view import show
    from tr11ops.cli.nodes_view import table as screen
    from tr11ops.crontab.jobs import unknown_skips

    card = read_card(run, overrides, keep_undefined=True)
    jobs = jobs_of(card, run)
    for name in unknown_skips(card, jobs):
        say(f"cron.skip: {name!r} is no periodic job, there are {', '.join(job.name for job in jobs)}")
    if as_json:
        print(json.dumps({"schema": SCHEMA, "jobs": [_job_values(job) for job in jobs]}, indent=1))
        return
    made = screen("JOB", "WHEN", "COMMAND", "WHAT")
    for job in jobs:
        when = f"not: {job.unwanted}" if job.unwanted else str(job.schedule)
        made.add_row(job.name, when, job.command_words, job.what)
    show(made)


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
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="This job, now, whether it is due or not.")
    ] = None,
    run: RunOption = None,
    once: Annotated[bool, typer.Option("--once", help="Run what is due now, and leave; cron calls this.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only what went wrong.")] = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
    way: Annotated[str, typer.Option("--way", hidden=True)] = "",
    chain: Annotated[str, typer.Option("--chain", hidden=True)] = "",
) -> None:
    """Run the periodic jobs in the foreground, each when it is due, until Ctrl-C or TERM.

    The job that runs at that moment is waited for; a second signal ends it too.

    Several of these, on any hosts and beside the other ways, start each round once.

    Exit code of --once and NAME: 1 when a job failed. What a job found is its own.

    [bold]Examples[/bold]

      tr11 cron run

      tr11 cron run pulse

      tr11 cron run --once
    """
    from tr11ops.crontab.jobs import find_job, of_chain, wanted

    card = read_card(run, overrides)
    jobs = jobs_of(card, run)
    if name is not None and once:
        raise Refusal(f"NAME and --once: leave one out; `tr11 cron run {name}` runs it now", exit_code=2)
    place = round_place(card, card_path(run), overrides, way or ("once" if once else "hand" if name else "daemon"))
    if name is None and not once:
        _run_daemon(place, card, wanted(jobs), run, overrides)
        return
    if name is not None:
        try:
            chosen: tuple[PeriodicJob, ...] = (find_job(jobs, name),)
        except ValueError as error:
            raise Refusal(f"NAME: {error}", exit_code=2) from None
    else:
        chosen = of_chain(jobs, "daily" if chain == "daily" else "hourly") if chain else wanted(jobs)
    rounds = run_rounds(place, chosen, forced=name is not None)
    _show_rounds(rounds, place, quiet, as_json)
    raise typer.Exit(max((exit_code(done) for done in rounds), default=0))


def round_place(card: RunCard, path: Path, overrides: Sequence[str] | None, way: str) -> Place:
    """Where rounds run. Raises Refusal where the run has no directory."""
    from tr11ops.crontab.drop_ins import script_command
    from tr11ops.crontab.runner import Place, child_environment, tr11_command

    directory = directory_of(card)
    if not directory.exists:
        raise Refusal(f"{directory.root} does not exist: nothing was launched from this card here; check --run")
    return Place(
        directory=directory,
        way=way,
        folder=Path.cwd(),
        environment={**child_environment(os.environ), "TR11_RUN": str(path)},
        command=lambda job: (
            tr11_command(job.words, path, overrides or ()) if job.script is None else script_command(job.script)
        ),
    )


def run_rounds(place: Place, jobs: tuple[PeriodicJob, ...], forced: bool = False) -> tuple[Round, ...]:
    """Run what is due, or all of it. A signal ends what runs, which is recorded, and starts nothing more."""
    from tr11ops.crontab.daemon import stopping_on_signals
    from tr11ops.crontab.runner import run_due, run_job

    with stopping_on_signals(place.must_end.set):
        return tuple(run_job(place, job, forced=True) for job in jobs) if forced else run_due(place, jobs)


def exit_code(done: Round) -> int:
    """What a command that ran one round returns: 1 for a failure. What a job found is in the job's own record."""
    return 1 if done.result in {"failed", "not recorded"} else 0


def _run_daemon(
    place: Place, card: RunCard, jobs: tuple[PeriodicJob, ...], run: str | None, overrides: list[str] | None
) -> None:
    from tr11ops.crontab.daemon import Daemon, stopping_on_signals
    from tr11ops.crontab.output import stamp

    daemon = Daemon(place, jobs, lambda text: say(f"{stamp(time.time())} {text}"), _reloader(run, overrides))
    say(f"running {', '.join(job.name for job in jobs) or 'nothing'} of {card.run.name}; Ctrl-C ends it")
    with stopping_on_signals(daemon.stop):
        daemon.run()
    say("ended")


def _reloader(run: str | None, overrides: list[str] | None) -> Callable[[], tuple[PeriodicJob, ...] | None]:
    """Gives the jobs again after the card's file, or a script, has changed."""
    from tr11ops.crontab.jobs import wanted

    path = card_path(run)
    card = read_card(run, overrides)
    seen = [(path.stat().st_mtime_ns, card, wanted(jobs_of(card, run)))]

    def reload() -> tuple[PeriodicJob, ...] | None:
        [(before, card, jobs)] = seen
        now = path.stat().st_mtime_ns
        card = card if now == before else read_card(run, overrides)
        found = wanted(jobs_of(card, run))
        seen[:] = [(now, card, found)]
        return None if found == jobs else found

    return reload


def _show_rounds(rounds: Sequence[Round], place: Place, quiet: bool, as_json: bool) -> None:
    from tr11ops.crontab.daemon import round_line
    from tr11ops.crontab.state import cron_folder

    if as_json:
        values = [
            {"job": done.name, "result": done.result, "why": done.why, "exit_code": done.state and done.state.exit_code}
            for done in rounds
        ]
        print(json.dumps({"schema": SCHEMA, "rounds": values}, indent=1))
        return
    shown = [done for done in rounds if not quiet or exit_code(done)]
    for done in shown:
        for line in done.lines if place.way == "hand" else ():
            print(line)
        say(round_line(done))
        if done.state is not None:
            say(f"  its output: {cron_folder(place.directory) / f'{done.name}.log'}")
    if not rounds and not quiet:
        say("nothing is due")


# ----------------------------------------------------------------------------- status
@app.command()
def status(run: RunOption = None, as_json: JsonOption = False, overrides: SetOption = None) -> None:
    """Do the periodic jobs run? The verdict first, then one row for each.

    Exit code 0: they do; 1: a job failed, is overdue, or a chain is dead; 3: it could not be seen.

    [bold]Examples[/bold]

      tr11 cron status

      tr11 cron status --json
    """
    from tr11ops.cli.common import open_scheduler
    from tr11ops.crontab.looking import look

    card = read_card(run, overrides)
    now = time.time()
    seen = look(
        card, jobs_of(card, run), directory_of(card), lambda: open_scheduler("slurm"), now,
        lambda: in_crontab(run, overrides),
    )  # fmt: skip
    if as_json:
        print(json.dumps(_status_values(seen), indent=1))
    else:
        _show_status(seen, now)
    raise typer.Exit(seen.exit_code)


def _show_status(seen: CronView, now: float) -> None:
    from tr11ops.cli.nodes_view import plain_text, show
    from tr11ops.cli.nodes_view import table as screen

    print(plain_text(seen.verdict))
    for problem in seen.problems:
        print(plain_text(f"  {problem.text}" if len(seen.problems) > 1 else f"  type: {typed_for_run(problem.fix)}"))
        if len(seen.problems) > 1:
            print(plain_text(f"    type: {typed_for_run(problem.fix)}"))
    for text in seen.unknown if seen.problems else seen.unknown[1:]:  # the headline has the first
        print(plain_text(f"  unknown: {text}"))
    made = screen("JOB", "LAST", "TOOK", "RESULT", "NEXT", "BY")
    for row in seen.rows:
        made.add_row(*map(plain_text, _row_words(row, now)))
    for chain in seen.chains:
        made.add_row(*map(plain_text, _chain_words(chain, now)))
    show(made)


def _row_words(row: JobRow, now: float) -> tuple[str, ...]:
    state = row.state
    if row.job.unwanted:
        return row.job.name, "", "", "not wanted", "", row.job.unwanted
    due = "overdue" if row.is_overdue else "now" if row.next_due <= now else f"in {age(row.next_due - now)}"
    if state is None:
        return row.job.name, "never", "", "", due, ""
    took = "" if state.ended is None else age(state.ended - state.started)
    return (
        row.job.name,
        f"{age(now - state.started)} ago",
        took,
        row.result,
        due,
        state.way if state.way == "slurm" else f"{state.way} {state.host}",
    )


def _chain_words(row: ChainRow, now: float) -> tuple[str, ...]:
    name, due = f"{row.chain.name} chain", row.chain.next_due
    result = "dead" if row.fault and row.link is None else "stuck" if row.fault else "fine" if row.link else "unknown"
    when = f"in {age(due - now)}" if due > now else f"since {age(now - due)}"
    return name, f"{age(now - row.chain.time)} ago", "", result, when, f"job {row.chain.job_id}"


def _status_values(seen: CronView) -> dict[str, Any]:
    from dataclasses import asdict

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
                "last": None if row.state is None else asdict(row.state),
            }
            for row in seen.rows
        ],
        "chains": [
            {**asdict(row.chain), "state": row.link.job.state.lower() if row.link else None, "fault": row.fault}
            for row in seen.chains
        ],
        "problems": [{"text": problem.text, "command": typed_for_run(problem.fix)} for problem in seen.problems],
        "unknown": list(seen.unknown),
    }


# ----------------------------------------------------------------------------- install, remove
app.command()(install)
app.command()(remove)
app.command(hidden=True)(link)
