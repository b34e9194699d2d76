"""`tr11 doctor`: everything that a launch would look at, and this machine besides; nothing is launched.
`tr11 drill`: prove on this cluster, with this card, that a stop signal saves in whatever phase it
comes; of another trainer, that it saves and stops in order when it is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from rich.table import Table

from tr11ops.base.errors import Refusal, SchedulerError, WrongUsage
from tr11ops.base.observed import known
from tr11ops.base.units import counted
from tr11ops.cli.common import USUAL, directory_of, drawing_console, say, timeout_option
from tr11ops.cli.launch import VerifyOption, prepare
from tr11ops.cli.launch_view import check_lines, checks_value, first_data_lines
from tr11ops.cli.runner import DRY_RUN, JSON, SCHEDULER, YES, Change, Outcome, RunContext
from tr11ops.cli.stop_drill import drill_of
from tr11ops.launch.drill import NAMES, Drill, PhaseResult, overrides_for, phases_of, proof
from tr11ops.launch.environment import environment_checks, setup_checks
from tr11ops.launch.session import LaunchJob, check_launch
from tr11ops.observe.readers import open_scheduler
from tr11ops.runcard.card import ForeignCard, load_card, own_card
from tr11ops.runcard.check import Level, PreflightCheck, ok, unknown, verdict
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import make_shared, write_json
from trainer.contract.record import JsonObject

DOCTOR_SCHEMA = 1


def doctor(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    array: Annotated[
        str | None,
        typer.Option("--array", metavar="1-10", help="As if so many attempts were launched."),
    ] = None,
    verify: VerifyOption = False,
) -> Outcome:
    """Is everything in place to launch a card from here? Nothing is launched, and nothing left
    behind.

    Without a card, this machine and its scheduler alone are looked at.

    Exit code 0: all is well, or there are warnings; 1: something is in the way; 2: wrong card or
    option; 3: no answer from the scheduler.

    Examples:
      tr11 doctor
      tr11 doctor --run tr11-176B-ml --array 1-10 --verify --json
    """
    job, checks = _look(context, array, verify)
    code = verdict(checks)
    value = {
        "schema": DOCTOR_SCHEMA,
        "exit_code": code,
        "card": job.card.run.name if job else None,
        "checks": checks_value(checks),
    }
    lines = list(check_lines(checks, USUAL))
    if job is not None and code:
        lines += first_data_lines(job.card)
    counts = {level: sum(check.level is level for check in checks) for level in Level}
    said = [f"{count} {level}" for level, count in counts.items() if count]
    return Outcome(value, [*lines, "", ", ".join(said)], exit_code=code)


def _look(
    context: RunContext, array: str | None, verify: bool
) -> tuple[LaunchJob | None, list[PreflightCheck]]:
    """The launch that a card means, None where no card is known, and all checks."""
    if not context.has_card:
        edge = open_scheduler(context.scheduler)
        checks = [*environment_checks(edge.name == "slurm", None), _answers(context.scheduler)]
        return None, checks
    job = prepare(context.run, context.overrides, context.scheduler, array=array, verify=verify)
    view = check_launch(job)
    site = known(view.facts.site, None)
    uses_slurm = job.scheduler.name == "slurm"
    machine = environment_checks(uses_slurm, job.directory.root, site.version if site else "")
    setup = setup_checks(job.card, uses_slurm, os.environ)
    # A run that is under way is no fault of anything; a launch of it would be refused all the same.
    healthy = (
        replace(check, level=Level.WARNING)
        if check.name == "queue" and check.level is Level.REFUSED
        else check
        for check in view.checks
    )
    return job, [*machine, *setup, *healthy]


def _answers(kind: str) -> PreflightCheck:
    """Whether the scheduler answers, and what it has."""
    edge = open_scheduler(kind)
    try:
        nodes, partitions = edge.nodes(), edge.partitions()
    except SchedulerError as error:
        return unknown("scheduler", str(error))
    usable = sum(node.is_usable for node in nodes)
    return ok(
        "scheduler",
        f"{edge.name}: {counted(len(partitions), 'partition')}, {usable} of {counted(len(nodes), 'node')} usable",
    )


LAUNCH_SECONDS = 600.0


def drill(
    context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN],
    *,
    time_limit: Annotated[
        str,
        typer.Option("--time-limit", metavar="HH:MM:SS", help="Of each of the rehearsal's tasks."),
    ] = "00:30:00",
    timeout: Annotated[float, timeout_option("Give up after this long, queueing included.")] = 7200,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the rehearsal's checkpoints.")] = False,
    launch: Annotated[
        bool,
        typer.Option(
            "--launch",
            help="Of another trainer: submit the tasks that the drill needs and are not there.",
        ),
    ] = False,
) -> Change:
    """Prove that a stop signal saves in every phase, before the scheduler would kill.

    Submits a short rehearsal of the card, in a directory of its own beside the run's: one array
    task for each phase (start-up, training, evaluation, saving, data wait). Each is held in its
    phase until the signal has come, and must then leave a whole checkpoint within
    slurm.signal_seconds_before_limit. The proof is kept in state/drills.

    A card of another trainer: the training itself is asked to save and stop, in its own way. It
    must leave a whole checkpoint within resilience.stop_within_minutes, and the next task must go
    on from it. That is level 3 of the run, as long as its command stays as it is.

    Exit code 0: proved; 1: it failed; 2: wrong card or option; 3: what was seen does not tell.

    Examples:
      tr11 drill --run setup-test-n2
      tr11 drill --launch --dry-run      another trainer: what is interrupted, what may be lost
      tr11 drill --set slurm.nodes=2 --dry-run
    """
    path = context.card_path
    found = load_card(path, context.overrides, os.environ)
    if isinstance(found, ForeignCard):
        tasks = partial(_launch, path, list(context.overrides), scheduler=context.scheduler)
        return drill_of(context, found, may_launch=launch, timeout=timeout, launch=tasks)
    if launch:
        raise WrongUsage("--launch is for another trainer's card: this drill is a job of its own")
    card = own_card(found, "a drill")
    main = directory_of(card)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    place = main.root.with_name(f"{main.root.name}-drill") / stamp
    phases, left_out = phases_of(card)
    margin = card.slurm.signal_seconds_before_limit
    if not margin:
        raise WrongUsage(
            "slurm.signal_seconds_before_limit is not set, so no signal comes before the kill",
        )
    changes = [*(context.overrides), *overrides_for(place, phases, time_limit)]
    lines = [
        f"rehearsal: {counted(card.slurm.nodes, 'node')}, {counted(len(phases), 'task')}, in {place}"
    ]
    for phase in phases:
        lines.append(
            f"  {NAMES[phase]}: USR1 to the batch script; a whole checkpoint within {margin} s"
        )
    lines += [f"  {NAMES[phase]}: left out, {why}" for phase, why in left_out.items()]

    def apply() -> Outcome:
        job_id, kind = _launch(path, changes, len(phases), context.scheduler)
        say(f"submitted: job {job_id} ({kind})")
        directory = RunDirectory(load_card(path, changes, os.environ).paths, place / "kill-switch")
        edge = open_scheduler(kind)
        began = time.time()
        results: tuple[PhaseResult, ...] = ()
        try:
            results = Drill(
                directory, edge, submission=job_id, phases=phases, margin=float(margin), say=say
            ).run(began + timeout)
        finally:
            if len(results) < len(phases) or not all(result.is_fine for result in results):
                _cancel(edge, job_id)
        results += tuple(PhaseResult(phase, skipped=why) for phase, why in left_out.items())
        facts = {
            "time": began,
            "seconds": time.time() - began,
            "job_id": job_id,
            "scheduler": kind,
        }
        value = proof(card, results, facts)
        kept = main.paths.state / "drills" / f"{stamp}.json"
        make_shared(kept.parent)
        write_json(kept, value)
        is_fine = all(result.is_fine for result in results)
        if not keep and is_fine:
            shutil.rmtree(directory.paths.checkpoints, ignore_errors=True)
        return Outcome(
            {**value, "proof": str(kept)},
            exit_code=0 if is_fine else 1,
            screen=partial(_table, results, kept, place),
        )

    unchanged = "nothing was submitted (--dry-run)"
    return Change(lines, "Submit the rehearsal?", apply, unchanged=unchanged)


def _launch(path: Path, changes: list[str], tasks: int, scheduler: str) -> tuple[str, str]:
    """Submit the rehearsal as `tr11 launch` does; returns the job's number and the scheduler.
    Raises Refusal.
    """
    command = [
        sys.executable,
        "-c",
        "from tr11ops.cli.main import run; run()",
        "launch",
        "--run",
        str(path),
    ]
    command += ["--array", f"1-{tasks}", "--scheduler", scheduler, "--reason", "drill", "--json"]
    command += [word for change in changes for word in ("--set", change)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LAUNCH_SECONDS,
        check=False,
        env=_environment(),
    )
    try:
        value: JsonObject = json.loads(done.stdout)
    except ValueError:
        value = {}
    if done.returncode or not value.get("submitted"):
        faults = [
            f"{check['name']}: {check['text']}"
            for check in value.get("checks", ())
            if check["level"] in {"refused", "unknown"}
        ]
        why = "; ".join(faults) or " ".join(done.stderr.split()) or "no reason was given"
        raise Refusal(f"the rehearsal was not submitted: {why}", exit_code=done.returncode or 1)
    return str(value["job_id"]), str(value["scheduler"])


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
    }


def _cancel(edge: Any, job_id: str) -> None:
    """Leave nothing of the rehearsal behind, however the drill ended. A task that is over is not
    touched.
    """
    try:
        edge.cancel(job_id)
    except SchedulerError as error:
        say(f"tr11: the rest of job {job_id} could not be cancelled: {error}")


def _table(results: tuple[PhaseResult, ...], kept: Path, place: Path) -> None:
    table = Table(title="A stop signal in each phase", title_justify="left")
    for name in ("phase", "left at", "checkpoint", "saved", "left", "allowed", "verdict"):
        table.add_column(
            name, justify="left" if name in {"phase", "verdict"} else "right", no_wrap=True
        )
    for result in results:
        if result.skipped:
            words = "left out"
        elif result.is_fine:
            words = "ok"
        else:
            words = "FAILED"
        table.add_row(
            NAMES[result.phase],
            _shown(result.iteration),
            "none due"
            if result.phase == "starting" and result.is_fine
            else _shown(result.checkpoint),
            _seconds(result.saved_after),
            _seconds(result.left_after),
            _seconds(result.margin or None),
            words,
        )
    drawing_console(markup=True).print(table)
    for result in results:
        if result.fault or result.skipped:
            typer.echo(f"{NAMES[result.phase]}: {result.fault or result.skipped}")
    typer.echo(f"proof: {kept}")
    if any(result.fault for result in results):
        typer.echo(f"the rehearsal's logs are kept in {place}")


def _shown(number: int | None) -> str:
    if number is None:
        return "-"
    return str(number)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s"
