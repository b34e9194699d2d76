"""`tr11 launch`: check a card against what is there, show the plan, and submit it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SchedulerOption,
    SetOption,
    card_path,
    directory_of,
    open_scheduler,
    say,
)
from tr11ops.rundir import RunDirectory, Submission, new_tag

if TYPE_CHECKING:
    from tr11ops.cluster.base import Scheduler, TestResult
    from tr11ops.launch.check import Check
    from tr11ops.launch.facts import LaunchRequest
    from tr11ops.launch.plan import LaunchPlan
    from tr11ops.runcard import RunCard

LAUNCH_SCHEMA = 1
_MARKS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "refused": ("refused", "red"),
    "unknown": ("unknown", "magenta"),
}


def launch(
    *,
    run: RunOption = None,
    array: Annotated[
        str | None, typer.Option("--array", metavar="1-10", help="Array of attempts, one after another.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="LIST", help="Nodes not to use: names or ranges; may be repeated."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, metavar="N", help="Nodes of one attempt (slurm.nodes).")
    ] = None,
    after: Annotated[str | None, typer.Option("--after", metavar="JOB", help="Start when this job is over.")] = None,
    scheduler: SchedulerOption = "auto",
    why: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept in the journal.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and show the plan; submit and create nothing.")
    ] = False,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Check a run card, show the plan, and submit it.

    Nothing is submitted or created when a check refuses.

    Exit code 0: submitted; 1: something is in the way; 2: wrong card or option; 3: no answer from the scheduler.

    [bold]Examples[/bold]

      tr11 launch --array 1-10

      tr11 launch --array 1-3 --run demo --scheduler local --dry-run

      tr11 launch --array 1-10 --after 1728318 --exclude jean-zay-iam[37,52]
    """
    from tr11ops.launch.submit import launch_lock, submit

    job = _prepare(run, overrides or [], scheduler, array=array, exclude=exclude or [], nodes=nodes, after=after)
    view = _check(job)
    _show(view, dry_run, as_json)
    if view.exit_code:
        raise typer.Exit(view.exit_code)
    if dry_run:
        _print_json(view, None, dry_run, as_json)
        return
    with launch_lock(job.directory.launch_lock):
        again = _check(job, view.plan.tag if view.plan else None)  # what passed without the lock is looked at once more
        if again.exit_code or again.plan is None:
            _show(replace(again, checks=again.faults), dry_run, as_json)
            raise typer.Exit(again.exit_code)
        record = submit(again.plan, job.scheduler, card_toml=job.card_toml, user=job.user, why=why)
    _print_json(again, record, dry_run, as_json)
    if not as_json:
        typer.echo(
            f"submitted: job {record.job_id} ({record.scheduler}); watch it with `tr11 status`, or `tr11 logs -f`"
        )


@dataclass(frozen=True)
class LaunchJob:
    """A launch as the command line means it."""

    card: RunCard
    card_toml: str
    directory: RunDirectory
    request: LaunchRequest
    scheduler: Scheduler
    user: str


@dataclass(frozen=True)
class LaunchView:
    """What the checks said, and the plan where they let one be made."""

    checks: tuple[Check, ...]
    plan: LaunchPlan | None
    rows: tuple[tuple[str, str], ...]
    exit_code: int

    @property
    def faults(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.level in {"refused", "unknown"})


def _prepare(
    run: str | None,
    overrides: list[str],
    scheduler: str,
    *,
    array: str | None,
    exclude: list[str],
    nodes: int | None,
    after: str | None,
) -> LaunchJob:
    """Read the command line and the card. Raises CardError or Refusal with exit code 2."""
    import os

    from tr11ops.journal import user_name
    from tr11ops.launch.facts import LaunchRequest
    from tr11ops.runcard import load_card, parse_array

    path = card_path(run)
    if nodes is not None:
        overrides = [*overrides, f"slurm.nodes={nodes}"]
    card = load_card(path, overrides, os.environ)
    spec = parse_array(array) if array is not None else None
    if after is not None and not _is_job_id(after):
        raise Refusal(f"--after = {after!r}: is not a job id; use a number such as 1728318, or 1728318_2", exit_code=2)
    names = tuple(dict.fromkeys((*_expand(exclude, "--exclude"), *_expand(card.slurm.exclude, "slurm.exclude"))))
    request = LaunchRequest(str(spec) if spec else None, len(spec) if spec else 1, names, after)
    text = path.read_text(encoding="utf-8", errors="replace")
    if overrides:
        text += "\n# Overridden on the command line:\n" + "".join(f"# --set {item!r}\n" for item in overrides)
    return LaunchJob(card, text, directory_of(card), request, open_scheduler(scheduler), user_name())


def _is_job_id(text: str) -> bool:
    first, _, second = text.partition("_")
    return text.isascii() and first.isdecimal() and (second.isdecimal() or "_" not in text)


def _expand(lists: list[str], option: str) -> list[str]:
    from tr11ops.cluster.hostlist import expand

    names: list[str] = []
    for text in lists:
        try:
            names += expand(text)
        except ValueError as error:
            raise Refusal(
                f"{option} = {text!r}: is not a list of nodes ({error}); write it like node[1-3],node7", exit_code=2
            ) from None
    return names


def _check(job: LaunchJob, tag: str | None = None) -> LaunchView:
    """Observe, check, plan, and try the plan on the scheduler. Creates nothing."""
    from tr11ops.cluster.base import SchedulerError, SchedulerUnreachable
    from tr11ops.launch import preflight
    from tr11ops.launch.check import ok, refused, unknown, verdict
    from tr11ops.launch.facts import observe_launch
    from tr11ops.launch.plan import plan_launch, plan_lines

    facts = observe_launch(
        job.card,
        job.directory,
        job.request,
        scheduler=job.scheduler,
        other_scheduler=open_scheduler,
        user=job.user,
    )
    checks = list(preflight.preflight(job.card, job.directory, job.request, facts))
    code = verdict(checks)
    if code:
        return LaunchView(tuple(checks), None, (), code)
    excluded = preflight.excluded_nodes(job.request, facts)
    try:
        plan = plan_launch(job.card, job.directory, job.request, excluded, tag or new_tag())
        result: TestResult = job.scheduler.test(plan.test_request)
    except SchedulerUnreachable as error:
        checks.append(unknown("scheduler", f"it did not answer the trial ({error})"))
    except SchedulerError as error:
        checks.append(refused("scheduler", str(error), "change the card or the options"))
    except ValueError as error:
        raise Refusal(str(error), exit_code=2) from None
    else:
        if result.accepted:
            checks.append(ok("scheduler", f"{job.scheduler.name} would take it ({result.message})"))
            rows = tuple(plan_lines(plan, job.card, job.scheduler.name))
            return LaunchView(tuple(checks), plan, rows, 0)
        checks.append(
            refused("scheduler", f"{job.scheduler.name} refuses it: {result.message}", "change the card or the options")
        )
    return LaunchView(tuple(checks), None, (), verdict(checks))


# ----------------------------------------------------------------------------- words
def _show(view: LaunchView, dry_run: bool, as_json: bool) -> None:
    if as_json:
        if view.exit_code:
            _print_json(view, None, dry_run, as_json)
            for check in view.faults:
                say(f"tr11: {check}")
        return
    for check in view.checks:
        word, colour = _MARKS[check.level]
        line = f"{typer.style(f'{word:>8}', fg=colour)}  {check}"
        typer.echo(line, err=check.level in {"refused", "unknown"})
    if view.rows:
        typer.echo("")
        for name, value in view.rows:
            typer.echo(f"{name:>14}  {value}")
    if dry_run and not view.exit_code:
        typer.echo("\nnothing was submitted (--dry-run)")
    elif view.exit_code:
        say("nothing was submitted")


def _print_json(view: LaunchView, record: Submission | None, dry_run: bool, as_json: bool) -> None:
    if not as_json:
        return
    from tr11ops.launch.plan import plan_value

    value: dict[str, Any] = {
        "schema": LAUNCH_SCHEMA,
        "exit_code": view.exit_code,
        "dry_run": dry_run,
        "submitted": record is not None,
        "job_id": record.job_id if record else None,
        "scheduler": record.scheduler if record else None,
        "checks": [
            {"level": check.level.value, "name": check.name, "text": check.text, "fix": check.fix}
            for check in view.checks
        ],
        "plan": plan_value(view.plan) if view.plan else None,
    }
    typer.echo(json.dumps(value, indent=1))
