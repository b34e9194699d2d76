"""`tr11 resume`: take kill switch, pause and holds away again, as far as tr11 put them there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from tr11ops.cli.common import JsonOption, Refusal, RunOption, SchedulerOption, SetOption, YesOption, agree, say
from tr11ops.cli.stopping import DryRunOption, ReasonOption, Scene, record, require_switch, scene, standing_lines

if TYPE_CHECKING:
    from tr11ops.cluster.base import Job
    from tr11ops.stop import StopView

RESUME_SCHEMA = 1


@dataclass(frozen=True)
class Undoing:
    """What stands in the run's way. `holds` are numbers that tr11 has held; `foreign` jobs somebody else holds;
    `others` jobs that tr11 holds and that only their owner may release."""

    switches: tuple[tuple[str, str], ...]  # (name, who set it and why)
    holds: tuple[str, ...]
    foreign: tuple[Job, ...]
    others: tuple[Job, ...]
    is_led: bool = False  # an attempt runs, whose controller releases what it held when the switch is gone

    @property
    def is_empty(self) -> bool:
        return not (self.switches or self.holds)


def resume(
    *,
    run: RunOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    why: ReasonOption = "",
    scheduler: SchedulerOption = "auto",
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Let a stopped or paused run go on: release the kill switch, the pause, and what tr11 holds in the queue.

    What somebody else holds stays held. It says what starts next.

    Exit code 0: it goes on, or nothing is queued; 1: something stays held, and who must release it is said; 3: the
    scheduler did not answer, so that what it holds is not released.

    [bold]Examples[/bold]

      tr11 resume --dry-run

      tr11 resume --reason "new data is in place"
    """
    place = scene(run, overrides, scheduler, is_releasing=True)
    done = let_go_on(place, why, yes, dry_run)
    if as_json:
        typer.echo(json.dumps({"schema": RESUME_SCHEMA, **done.value(), "run": place.card.run.name}, indent=1))
    done.leave()


@dataclass(frozen=True)
class Resumed:
    """What was released. `action`: resumed, nothing (nothing stood in the way), or dry-run.

    `missing` says what still keeps the run from going on, "" for nothing; `exit_code` is 1 where a person is needed
    for it, 3 where the scheduler did not answer.
    """

    action: str
    todo: Undoing
    released: tuple[str, ...] = ()
    missing: str = ""
    exit_code: int = 0

    def value(self) -> dict[str, Any]:
        """For --json."""
        return {
            "action": self.action,
            "switches": [name for name, _ in self.todo.switches],
            "holds": list(self.todo.holds),
            "released": list(self.released),
            "left_held": [job.job_id for job in (*self.todo.foreign, *self.todo.others)],
            "missing": self.missing or None,
        }

    def leave(self) -> None:
        """Raises Refusal with the exit code where something is missing."""
        if self.missing:
            raise Refusal(self.missing, self.exit_code)


def let_go_on(place: Scene, why: str, yes: bool, dry_run: bool) -> Resumed:
    """Show what keeps the run from going on, ask, and release what tr11 put there. Says what starts next."""
    from tr11ops.holds import release
    from tr11ops.rundir import remove_stop_file

    directory, view = place.directory, place.look()
    require_switch(place, view, is_releasing=True)
    todo = _undoing(place, view)
    for line in [*_lines(todo), *standing_lines(view), f"next:       {_next(place, view, todo)}"]:
        say(line)
    if todo.is_empty or dry_run:
        say("nothing was changed (--dry-run)" if dry_run else "nothing stands in the way: nothing was changed")
        action = "dry-run" if dry_run else "nothing"
        return Resumed(action, todo) if dry_run else Resumed(action, todo, (), *_missing(place, view, todo, ()))
    agree("Let it go on?", yes)
    # The holds last: what starts must not find a switch.
    for name, _ in todo.switches:
        path = {"kill switch": directory.kill_switch, "pause": directory.paths.pause}[name]
        aside = remove_stop_file(path)
        say(f"{name} released: {path}" + (f" (it was a folder: it is now {aside})" if aside else ""))
    result = release(directory, todo.holds, place.edge)
    for number in result.done:
        say(f"released: job {number}")
    if view.is_idle:
        say(f"to start it: {place.command('launch --array 1-10')}")
    if directory.exists:
        data = {"switches": [name for name, _ in todo.switches], "jobs": list(result.done)}
        record(directory, "resumed", why, data, place.user)
    return Resumed("resumed", todo, result.done, *_missing(place, view, todo, result.refused))


def _missing(place: Scene, view: StopView, todo: Undoing, refused: tuple[tuple[str, str], ...]) -> tuple[str, int]:
    """What still keeps the run from going on, and the exit code for it: ("", 0) where nothing does."""
    from tr11ops.detect.signs import is_held
    from tr11ops.holds import held_by_tr11

    if refused:
        return "; ".join(f"job {number} stays held: {text}" for number, text in refused), 1
    if view.doubt:
        held = sorted(held_by_tr11(place.directory)) if place.directory.exists else []
        names = ", ".join(held)
        return (f"job {names} may still be held: type this again when the scheduler answers", 3) if held else ("", 0)
    goes_on = view.running or view.foreground or todo.holds or any(not is_held(job) for job in view.queued)
    stuck = (*todo.foreign, *todo.others)
    if goes_on or not stuck:
        return "", 0
    names = ", ".join(job.job_id for job in stuck)
    by = "whoever held it" if todo.foreign else stuck[0].user
    release = f" (`scontrol release {names}`)" if place.edge.name == "slurm" and len(stuck) == 1 else ""
    return f"nothing starts: job {names} stays held, and {by} must release it{release}", 1


def _undoing(place: Scene, view: StopView) -> Undoing:
    from tr11ops.detect.signs import is_held
    from tr11ops.holds import held_by_tr11, may_steer
    from tr11ops.launch.queue import array_number
    from trainer.requests import read_request

    directory = place.directory
    found = {
        "kill switch": read_request(directory.kill_switch, "kill"),
        "pause": read_request(directory.paths.pause, "pause"),
    }
    ours = held_by_tr11(directory)
    held = [job for job in view.queued if is_held(job)]
    mine = [job for job in held if array_number(job) in ours]
    return Undoing(
        switches=tuple((name, str(request)) for name, request in found.items() if request is not None),
        holds=tuple(dict.fromkeys(array_number(job) for job in mine if may_steer(job, place.user))),
        foreign=tuple(job for job in held if array_number(job) not in ours),
        others=tuple(job for job in mine if not may_steer(job, place.user)),
        is_led=bool(view.running),
    )


def _lines(todo: Undoing) -> list[str]:
    lines = [f"{name + ':':<11} set by {who}: will be released" for name, who in todo.switches]
    lines += [f"held:       job {number}, by tr11: will be released" for number in todo.holds]
    lines += [f"held:       job {job.job_id}, not by tr11: stays held" for job in todo.foreign]
    who = "the running attempt releases it" if todo.is_led else "{user}, who owns it, must release it"
    lines += [f"held:       job {job.job_id}, by tr11: {who.format(user=job.user)}" for job in todo.others]
    return lines


def _next(place: Scene, view: StopView, todo: Undoing) -> str:
    from tr11ops.cluster.pending import Wait, reason_of_job
    from tr11ops.detect.signs import is_held
    from tr11ops.launch.queue import array_number

    if view.doubt:
        return f"unknown, the scheduler did not answer ({view.doubt})"
    free = [job for job in view.queued if not is_held(job) or array_number(job) in todo.holds]
    queue = ", ".join(job.job_id for job in free)
    if view.running:
        names = ", ".join(job.job_id for job in view.running)
        return f"job {names} trains on" + (f"; then {queue}" if queue else "; nothing is queued behind it")
    blocked = [job for job in free if array_number(job) not in todo.holds and reason_of_job(job).wait != Wait.PASSES]
    if queue and len(blocked) == len(free):
        row = reason_of_job(blocked[0])
        who = "the site" if row.wait is Wait.SITE else "a person"
        return f"{queue} waits for {who} ({blocked[0].reason}: {row.meaning})"
    if queue:
        return f"{queue}, as soon as nodes are free"
    if todo.foreign or todo.others:
        return "nothing: all that is queued stays held"
    return f"nothing is queued: start it with `{place.command('launch --array 1-10')}`"
