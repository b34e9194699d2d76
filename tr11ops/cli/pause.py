"""`tr11 pause`: the attempt that trains now goes on to its limit, and nothing starts after it."""

from __future__ import annotations

from typing import Annotated

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import DryRunOption, YesOption, agree, say
from tr11ops.cli.context import JSON, SCHEDULER, RunContext
from tr11ops.cli.stopping import (
    ReasonOption,
    StopContext,
    hold_queued,
    is_all_held,
    put_request,
    queued_lines,
    record,
    run_to_stop,
    running_lines,
    standing_lines,
    way_on,
)
from trainer.contract.requests import new_request, read_request

PAUSE_SCHEMA = 1


def pause(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    why: ReasonOption = "",
) -> None:
    """Stop after this task: the running attempt trains to its limit, queued jobs are held.

    `tr11 resume` lets it go on. It works for another person's run too: rights to write in its directory are enough.

    Examples:
      tr11 pause --reason "new data on Monday"
      tr11 pause --dry-run
    """
    run = run_to_stop(context)
    paths, view = run.directory.paths, run.look(needs_directory=False)
    before = None if view.unmounted else run.read(lambda: read_request(paths.pause, "pause"))
    exempt = view.attempts[0] if view.attempts else ""
    lines = [*running_lines(view, "will train to its limit"), *queued_lines(view, run.user)]
    if view.read_error:
        lines.append(
            f"jobs:       unknown, the scheduler did not answer ({view.read_error}); the pause works without it"
        )
    if view.is_idle:
        lines.append("jobs:       nothing of this run is running or queued; a launch will leave untrained")
    for line in [*lines, *standing_lines(view)]:
        say(line)
    if view.unmounted and view.is_idle:
        raise Refusal(f"nothing was paused: {view.unmounted}", exit_code=3)
    if view.unmounted:
        say("instead:    no pause is set; what the scheduler shows as queued of this run is held")
    if before is not None:
        say(f"this run is already paused, by {before}")
    if dry_run:
        say("nothing was changed (--dry-run)")
        _print(context, run, "dry-run", exempt)
        return
    agree("Pause the run after this task?", yes or before is not None)
    is_paused = True
    if before is None:
        request = new_request("pause", run.user, why, run.directory.root, exempt)
        is_paused = not view.unmounted and put_request(run, paths.pause, request)
        record(run.directory, "pause", why, {"request": request.id, "exempt": exempt}, run.user, view.unmounted)
        if is_paused:
            say(f"paused: {paths.pause}")
    held = hold_queued(run, view, why or "pause", is_paused)
    if not is_paused and not is_all_held(run, view, held):
        raise Refusal("what is queued is not all held, and no file keeps it from training: hold it where it is queued")
    unknown = view.unread or view.unclear
    if not is_paused and unknown:
        raise Refusal(f"the run is not paused, and what else of it may start is not known: {unknown}", exit_code=3)
    say(way_on(run, view))
    _print(context, run, "already-paused" if before else "paused", before.exempt if before else exempt, held)


def _print(context: RunContext, run: StopContext, action: str, exempt: str, held: tuple[str, ...] = ()) -> None:
    value = {"schema": PAUSE_SCHEMA, "action": action, "pause": str(run.directory.paths.pause)}
    context.emit({**value, "trains_on": exempt or None, "held": list(held)})
