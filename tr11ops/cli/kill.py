"""`tr11 kill`: save and stop a run through its kill switch, whoever started it; `--release` lets it run again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tr11ops.cli.common import (
    JsonOption,
    Refusal,
    RunOption,
    SchedulerOption,
    SetOption,
    age,
    agree,
    directory_of,
    open_scheduler,
    read_card,
    say,
)

if TYPE_CHECKING:
    from tr11ops.rundir import RunDirectory
    from tr11ops.stop import Ending, StopView

KILL_SCHEMA = 1
POLL_SECONDS = 1.0


def kill(
    *,
    run: RunOption = None,
    release: Annotated[
        bool, typer.Option("--release", help="Remove the kill switch, so that launches train again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the running job has saved and ended.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="With --wait: give up after this long.")
    ] = 3600,
    why: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Kept in the kill switch and in the journal.")
    ] = "",
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Save and stop a run, with all that is queued of it; nothing is lost.

    The running job saves a checkpoint at its next iteration and leaves. Queued tasks start, see the switch, and leave
    at once without training, until it is released.

    [bold]Examples[/bold]

      tr11 kill --reason "loss spike, rolling back" --wait

      tr11 kill --release
    """
    card = read_card(run, overrides)
    directory = directory_of(card)
    if release:
        _release(directory, why, yes, as_json)
        return
    _guard(directory)
    from tr11ops.journal import user_name
    from tr11ops.observe import scheduler_kind
    from tr11ops.stop import look, wait_for_end

    # What was launched on one scheduler is stopped there, whatever else this machine has.
    edge = open_scheduler((scheduler_kind(directory) if scheduler == "auto" else None) or scheduler)
    view = look(card, directory, edge, user_name())
    was_set = directory.kill_switch_is_set()
    for line in _lines(directory, view, was_set):
        say(line)
    if not was_set:
        agree("Set the kill switch?", yes)
        _set(directory, why)
        say(f"kill switch set: {directory.kill_switch}")
    endings: tuple[Ending, ...] = ()
    if wait and view.running:
        endings = wait_for_end(directory, view.running, edge, _pause(timeout), lambda text: say(f"  {text}"))
    code = _report(endings, as_json)
    if as_json:
        typer.echo(json.dumps(_value("already-set" if was_set else "set", directory, view, endings), indent=1))
    if wait and view.doubt:
        raise Refusal(f"it is not known whether anything still runs: {view.doubt}", exit_code=3)
    raise typer.Exit(code)


def _guard(directory: RunDirectory) -> None:
    """Refuse to stop something else than what was meant. Raises Refusal."""
    from tr11ops.launch.facts import owner_of_kill_switch

    if not directory.exists:
        raise Refusal(
            f"{directory.root} does not exist: nothing was launched from this card here; check --run and the folder"
        )
    other = owner_of_kill_switch(directory)
    if other:
        raise Refusal(
            f"{directory.kill_switch} belongs to another run, {other}: leave run.kill_switch out of the card",
            exit_code=2,
        )


def _lines(directory: RunDirectory, view: StopView, was_set: bool) -> list[str]:
    """What is there and what will happen, for a person."""
    lines = []
    for job in view.running:
        since = f", {age(time.time() - job.start_time)}" if job.start_time else ""
        count = job.node_count or len(job.nodes)
        place = f"{count} node" if count == 1 else f"{count} nodes"
        lines.append(f"running:    job {job.job_id} of {job.user} on {place}{since}: will save and leave")
    lines += [f"running:    {text}: will save and leave" for text in view.foreground]
    if view.queued:
        names = ", ".join(job.job_id for job in view.queued)
        tasks = "1 task" if view.queued_tasks == 1 else f"{view.queued_tasks} tasks"
        lines.append(f"queued:     {tasks} of {names}: will start, see the switch, and leave untrained")
    if view.doubt:
        lines.append(f"jobs:       unknown, the scheduler did not answer ({view.doubt}); the switch works without it")
    if view.is_idle:
        lines.append(
            "jobs:       nothing of this run is running or queued; launches are refused until the switch is released"
        )
    lines.append(f"iteration:  {'none yet' if view.iteration is None else view.iteration}")
    lines.append(f"checkpoint: {'none yet' if view.checkpoint is None else f'global_step{view.checkpoint}'}")
    if was_set:
        held = directory.read_kill_switch()
        by = f" by {held['who']}" if held.get("who") else ""
        reason = f" ({held['why']})" if held.get("why") else ""
        lines.append(f"the kill switch is already set{by}{reason}: {directory.kill_switch}")
    return lines


def _set(directory: RunDirectory, why: str) -> None:
    from tr11ops.journal import Journal, user_name
    from trainer.contract import host_name

    who = user_name()
    value = {"who": who, "host": host_name(), "time": time.time(), "why": why, "directory": str(directory.root)}
    directory.set_kill_switch(value)
    _journal(Journal(directory.journal), "kill-switch-set", why, directory, who)


def _release(directory: RunDirectory, why: str, yes: bool, as_json: bool) -> None:
    from tr11ops.journal import Journal, user_name

    was_set = directory.kill_switch_is_set()
    if was_set:
        _guard(directory)
        held = directory.read_kill_switch()
        by = f" by {held['who']}" if held.get("who") else " by hand"
        reason = f": {held['why']}" if held.get("why") else ""
        say(f"the kill switch was set{by}{reason}")
        agree("Release it?", yes)
        was_set = directory.release_kill_switch()
        _journal(Journal(directory.journal), "kill-switch-released", why, directory, user_name())
    say(f"kill switch {'released' if was_set else 'was not set'}: {directory.kill_switch}")
    if as_json:
        action = "released" if was_set else "not-set"
        typer.echo(
            json.dumps({"schema": KILL_SCHEMA, "action": action, "kill_switch": str(directory.kill_switch)}, indent=1)
        )


def _journal(journal: Any, kind: str, why: str, directory: RunDirectory, who: str) -> None:
    """Record it. The switch is what counts: a journal that cannot be written is said, and stops nothing."""
    try:
        journal.write(kind, why, {"kill_switch": str(directory.kill_switch)}, who)
    except OSError as error:
        say(f"tr11: the journal could not be written: {error}")


def _pause(timeout: float) -> Callable[[], bool]:
    deadline = time.monotonic() + timeout

    def pause() -> bool:
        time.sleep(POLL_SECONDS)
        return time.monotonic() < deadline

    return pause


def _report(endings: tuple[Ending, ...], as_json: bool) -> int:
    """Say how the jobs ended; returns the exit code."""
    code = 0
    for ending in endings:
        marker = ending.marker
        if not ending.is_over:
            text, fine = "is still there: it did not end in time; look with `tr11 status`, or wait longer", False
        elif marker is None:
            text, fine = "ended without a word of the trainer: the last checkpoint is what `tr11 status` shows", False
        else:
            saved = (
                "nothing to save"
                if marker.checkpoint_step is None
                else f"checkpoint global_step{marker.checkpoint_step}"
            )
            text, fine = f"ended ({marker.reason}) at iteration {marker.iteration}: {saved}", marker.reason != "error"
        code = code if fine else 1
        print(f"job {ending.job_id} {text}", file=sys.stderr if as_json else sys.stdout)
    return code


def _value(action: str, directory: RunDirectory, view: StopView, endings: tuple[Ending, ...]) -> dict[str, Any]:
    return {
        "schema": KILL_SCHEMA,
        "action": action,
        "kill_switch": str(directory.kill_switch),
        "running": [job.job_id for job in view.running],
        "foreground": list(view.foreground),
        "queued_tasks": None if view.doubt else view.queued_tasks,
        "iteration": view.iteration,
        "checkpoint": view.checkpoint,
        "unknown": view.doubt or None,
        "ended": [
            {
                "job_id": ending.job_id,
                "is_over": ending.is_over,
                "reason": ending.marker.reason if ending.marker else None,
                "iteration": ending.marker.iteration if ending.marker else None,
                "checkpoint": ending.marker.checkpoint_step if ending.marker else None,
            }
            for ending in endings
        ],
    }
