"""`tr11 resume`: take kill switch, pause and holds away again, as far as tr11 put them there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from tr11ops.base.errors import Unobserved
from tr11ops.base.observed import known, observed
from tr11ops.cli.common import USUAL, hanging, plain_text, say
from tr11ops.cli.runner import DRY_RUN, JSON, REASON, SCHEDULER, YES, Change, Outcome, RunContext
from tr11ops.cli.stopping import StopContext, record, require_switch, run_to_stop, standing_lines
from tr11ops.cluster.arrays import covered, names_of, split
from tr11ops.cluster.base import Job
from tr11ops.cluster.pending_reasons import Cause, Wait, is_held, reason_of_job
from tr11ops.launch.resume import refused_starts, to_train_on
from tr11ops.observe.derived import is_left_over
from tr11ops.observe.jobs import held_jobs, record_of
from tr11ops.queue.held_jobs import can_modify, release
from tr11ops.queue.stop import StopView, leaving
from tr11ops.rundir.hold_store import HoldRecord, held_by_tr11, read_holds
from tr11ops.rundir.paths import RunDirectory, remove_stop_file
from trainer.contract.record import IterationRange, Record
from trainer.contract.recovery import read_recovery
from trainer.contract.requests import read_request

RESUME_SCHEMA = 1
LEAVING_SECONDS = 120.0  # for an attempt whose trainer has ended to hold what is queued, and end
POLL_SECONDS = 1.0


class Undoing(Record):
    """What stands in the run's way. `holds` name what tr11 has held; `foreign` are jobs that
    someone else holds; `others` jobs that tr11 holds and that only their owner may release;
    `left_over` those that tr11 holds and that have nothing left to do, because the training is
    finished; `refused` those that the trainer would refuse, and why.
    """

    switches: tuple[tuple[str, str], ...]  # (name, who set it and why)
    holds: tuple[str, ...]
    foreign: tuple[Job, ...]
    others: tuple[Job, ...]
    left_over: tuple[Job, ...] = ()
    refused: tuple[tuple[Job, str], ...] = ()
    # an attempt runs, whose controller releases what it held when the switch is gone
    is_led: bool = False
    # what the tasks to be released were held for, where the next would have met it too
    faults: tuple[str, ...] = ()
    skipped_since: tuple[IterationRange, ...] = ()  # what roll-backs after these holds pass over

    @property
    def is_empty(self) -> bool:
        return not (self.switches or self.holds)

    @property
    def left_held(self) -> tuple[Job, ...]:
        """What stays held whatever is released."""
        return (*self.foreign, *self.others, *self.left_over, *(job for job, _ in self.refused))


def resume(context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN, REASON]) -> Change:
    """Let a stopped or paused run go on: release the kill switch, the pause, and what tr11 holds in
    the queue.

    What someone else holds stays held, and so does what the trainer would refuse: the job's own
    card is compared with the checkpoint that it would start from, as `tr11 launch` does it. It says
    what starts next; and, where tasks were held for a fault that the next one would have met again,
    which one that is.

    An attempt that is leaving is waited for, up to two minutes: it may hold what is queued as its
    last step.

    Exit code 0: it goes on, or nothing is queued; 1: something stays held, or is held again, and
    who must release it is said; 3: the scheduler did not answer, so that what it holds is not
    released, or the run directory is not mounted here.

    Examples:
      tr11 resume --dry-run
      tr11 resume --reason "new data is in place"
    """
    plan = plan_resumption(run_to_stop(context, is_releasing=True), context)
    preview = plan.outcome("dry-run")
    return Change(plan.lines(), plan.question, plan.apply, preview, is_empty=plan.todo.is_empty)


def plan_resumption(run: StopContext, context: RunContext) -> Resumption:
    """What keeps the run from going on, seen once an attempt that is leaving has left. Raises
    Refusal.
    """
    view = run.look()
    require_switch(run, view, is_releasing=True)
    if not (context.dry_run or view.unread):
        view = _after_leaving(run, view)
    if view.unread:
        raise Unobserved(
            f"whether anything keeps the run from going on cannot be seen: {view.unread}",
        )
    return Resumption(run, view, run.read(lambda: _undoing(run, view)), context.reason)


class Resumption(Record):
    """What tr11 put in the run's way is taken away; what starts next is said."""

    run: StopContext
    view: StopView
    todo: Undoing
    why: str

    @property
    def question(self) -> str:
        """What is asked before anything is taken away."""
        if self.todo.is_empty:
            return ""
        if self.view.is_idle and self.view.finished is None:
            return "Nothing is queued: nothing trains before it is launched. Release it?"
        return "Let it go on?"

    def lines(self) -> list[str]:
        """What stands in the way, what becomes of it, and what starts next."""
        run, view, todo = self.run, self.view, self.todo
        slow = _slow_lines(run, view)
        next_line = f"next:       {_next(run, view, todo)}"
        return [
            *_lines(todo),
            *_fault_lines(run, todo),
            *slow,
            *standing_lines(run, view),
            next_line,
        ]

    def apply(self) -> Outcome:
        """Release what tr11 put there. Says what was done."""
        run, view, todo = self.run, self.view, self.todo
        if todo.is_empty:
            say(
                "nothing was changed"
                if todo.refused
                else "nothing stands in the way: nothing was changed"
            )
            return self.outcome("nothing", (), *_missing(run, view, todo, ()))
        directory = run.directory
        # The holds last: what starts must not find a switch.
        for name, _ in todo.switches:
            path = {"kill switch": directory.kill_switch, "pause": directory.paths.pause}[name]
            aside = remove_stop_file(path)
            say(
                f"{name} released: {path}"
                + (f" (it was a folder: it is now {aside})" if aside else "")
            )
        result = release(directory, todo.holds, run.edge)
        for number in result.done:
            say(f"released: job {number}")
        if result.unrecorded:
            later = "a later resume releases them again"
            say(f"tr11: it stays on record that tr11 holds them ({result.unrecorded}): {later}")
        if view.is_idle:
            say(_nothing_queued(run, view))
        if directory.exists:
            data = {"switches": [name for name, _ in todo.switches], "jobs": list(result.done)}
            record(directory, "resumed", why=self.why, data=data, who=run.who)
        missing = _missing(run, view, todo, result.refused)
        if not (missing[0] or view.read_error):
            missing = _held_again(run, result.done)
        return self.outcome("resumed", result.done, *missing)

    def outcome(
        self, action: str, released: tuple[str, ...] = (), missing: str = "", exit_code: int = 0
    ) -> Outcome:
        """The answer. `action`: resumed, nothing (nothing stood in the way), or dry-run.

        `missing` says what still keeps the run from going on; `exit_code` is 1 where a person is
        needed for it, 3 where the scheduler did not answer.
        """
        todo = self.todo
        document = {
            "schema": RESUME_SCHEMA,
            "action": action,
            "switches": [name for name, _ in todo.switches],
            "holds": list(todo.holds),
            "released": list(released),
            "left_held": [job.job_id for job in todo.left_held],
            "faults": list(todo.faults),
            "missing": missing or None,
            "run": self.run.card.run.name,
        }
        return Outcome(document, exit_code=exit_code, fault=missing)


def _after_leaving(run: StopContext, view: StopView) -> StopView:
    """What is seen once the attempts that are leaving have left: they may hold again what was
    released before.
    """
    until, names = (
        time.monotonic() + LEAVING_SECONDS,
        run.read(lambda: leaving(run.directory, view.running)),
    )
    if names:
        say(
            f"waiting:    job {', '.join(names)} is leaving; until it has left, it may hold what is queued"
        )
    while names and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        view = run.look()
        running = view.running
        names = run.read(lambda running=running: leaving(run.directory, running))  # type: ignore[misc]
    return view


def _held_again(run: StopContext, released: tuple[str, ...]) -> tuple[str, int]:
    """What of the released is held all the same, and the exit code for it; ("", 0) where nothing
    is.
    """
    view = run.look()
    again = [name for name in released if any(map(is_held, covered(name, view.queued)))]
    if again:
        return (
            f"job {', '.join(again)} is held again, by an attempt that was leaving or by a person: type this again",
            1,
        )
    still = run.read(lambda: leaving(run.directory, view.running))
    if still and view.queued:
        return (
            f"job {', '.join(still)} is still leaving and may hold what is queued: type this again when it has left",
            1,
        )
    return "", 0


def _missing(
    run: StopContext, view: StopView, todo: Undoing, refused: tuple[tuple[str, str], ...]
) -> tuple[str, int]:
    """What still keeps the run from going on, and the exit code for it: ("", 0) where nothing does."""
    if refused:
        return "; ".join(f"job {number} stays held: {text}" for number, text in refused), 1
    if view.read_error:
        held = []
        if run.directory.exists:
            held = sorted(held_by_tr11(run.directory))
        names = ", ".join(held)
        if held:
            return (f"job {names} may still be held: type this again when the scheduler answers", 3)
        return ("", 0)
    goes_on = (
        view.running
        or view.foreground
        or todo.holds
        or any(not is_held(job) for job in view.queued)
    )
    if not goes_on and todo.refused:
        job, why = todo.refused[0]
        card = run.command("launch --replace")
        return (
            f"nothing starts: the trainer would refuse job {job.job_id}: {why}; then `{card}` queues it again",
            1,
        )
    stuck = (*todo.foreign, *todo.others)
    if goes_on or not stuck:
        return "", 0
    names = ", ".join(job.job_id for job in stuck)
    by = stuck[0].user
    if todo.foreign:
        by = "whoever held it"
    release = ""
    if run.edge.name == "slurm" and len(stuck) == 1:
        release = f" (`scontrol release {names}`)"
    return f"nothing starts: job {names} stays held, and {by} must release it{release}", 1


def _undoing(run: StopContext, view: StopView) -> Undoing:
    directory = run.directory
    found = {
        "kill switch": read_request(directory.kill_switch, "kill"),
        "pause": read_request(directory.paths.pause, "pause"),
    }
    records = read_holds(directory, view.queued)
    held = held_jobs(view.queued, (record.job for record in records))
    left_over = tuple(job for job in held.ours if is_left_over(job, view.finished))
    ours = tuple(job for job in held.ours if job not in left_over)
    if directory.exists:
        refusals = refused_starts(directory, ours)
    else:
        refusals = {}
    refused = tuple((job, str(refusals[job.job_id])) for job in ours if job.job_id in refusals)
    ours = tuple(job for job in ours if job.job_id not in refusals)
    kept = (*held.others, *left_over, *(job for job, _ in refused))
    others = tuple(job for job in ours if not can_modify(job, run.user))
    mine = tuple(job for job in ours if can_modify(job, run.user))
    held_for = [
        one for job in mine if (one := record_of(job, records)) is not None and one.is_for_fault
    ]
    return Undoing(
        switches=tuple(
            (name, str(request)) for name, request in found.items() if request is not None
        ),
        holds=names_of(mine, (*kept, *others)),
        foreign=held.others,
        others=others,
        left_over=left_over,
        refused=refused,
        is_led=bool(view.running),
        faults=tuple(dict.fromkeys(one.why for one in held_for if one.why)),
        skipped_since=_skipped_since(directory, held_for),
    )


def _skipped_since(
    directory: RunDirectory, holds: Sequence[HoldRecord]
) -> tuple[IterationRange, ...]:
    """What roll-backs that were made after the newest of these holds pass over; nothing where that
    is not known.
    """
    times = [one.time for one in holds]
    if not times or None in times:
        return ()
    last = max(time for time in times if time is not None)
    try:
        events = read_recovery(directory.paths).events
    except (OSError, ValueError):
        return ()
    return tuple(event.skip for event in events if event.time > last and not event.skips_nothing)


def _lines(todo: Undoing) -> list[str]:
    lines = [f"{name + ':':<11} set by {who}: will be released" for name, who in todo.switches]
    lines += [f"held:       job {number}, by tr11: will be released" for number in todo.holds]
    lines += [f"held:       job {job.job_id}, not by tr11: stays held" for job in todo.foreign]
    lines += [
        f"held:       job {job.job_id}, by tr11: stays held, the training is finished"
        for job in todo.left_over
    ]
    would = "stays held, the trainer would refuse it"
    lines += [
        f"held:       job {job.job_id}, by tr11: {would}: {reason}" for job, reason in todo.refused
    ]
    if todo.is_led:
        who = "the running attempt releases it"
    else:
        who = "{user}, who owns it, must release it"
    lines += [
        f"held:       job {job.job_id}, by tr11: {who.format(user=job.user)}" for job in todo.others
    ]
    return lines


def _fault_lines(run: StopContext, todo: Undoing) -> list[str]:
    """What the tasks were held for: a release alone repairs nothing."""
    if not todo.faults:
        return []
    space = " " * len("because:    ")
    lines = [
        f"because:    {hanging(plain_text(why), len(space), piped=USUAL)}" for why in todo.faults
    ]
    look = f"`{run.command('diagnose')}` has the evidence, `tr11 runbook array-held` what helps"
    text = f"The same fault will return unless its cause is gone: {look}"
    if todo.skipped_since:
        ranges = ", ".join(str(one) for one in todo.skipped_since)
        gone = f"Since then a roll-back skips iterations {ranges}"
        text = f"{gone}: what their data had brought about is gone. {look}"
    return [*lines, space + hanging(text, len(space), piped=USUAL)]


def _slow_lines(run: StopContext, view: StopView) -> list[str]:
    """The nodes that the last attempt found slow, and that the next one may have again."""
    if view.running or view.unread or view.finished is not None:
        return []
    from tr11ops.launch.facts import read_slow_nodes

    found = run.read(
        lambda: observed(
            read_slow_nodes, run.card, run.directory, scheduler=run.edge.name, typed=run.typed
        )
    )
    space = len("slow node:  ")
    return [
        "slow node:  "
        + hanging(
            f"{one.title} ({one.evidence[0]}); before this, type `{one.fix}`", space, piped=USUAL
        )
        for one in known(found, ())
    ]


def _next(run: StopContext, view: StopView, todo: Undoing) -> str:
    if view.read_error:
        return f"unknown, the scheduler did not answer ({view.read_error})"
    released = [
        part
        for job in view.queued
        if is_held(job) and (part := split(job, todo.holds)[0]) is not None
    ]
    free = [*released, *(job for job in view.queued if not is_held(job))]
    queue = ", ".join(job.job_id for job in free)
    if view.running:
        names = ", ".join(job.job_id for job in view.running)
        if queue:
            return f"job {names} trains on; then {queue}"
        return f"job {names} trains on; nothing is queued behind it"
    blocked = [
        job for job in free if job not in released and reason_of_job(job).wait != Wait.PASSES
    ]
    if queue and len(blocked) == len(free):
        row = reason_of_job(blocked[0])
        who = "a person"
        if row.wait is Wait.SITE:
            who = "the site"
        return f"{queue} waits for {who} ({blocked[0].reason}: {row.meaning})"
    if queue:
        limited = next((job for job in free if reason_of_job(job).cause is Cause.LIMIT), None)
        why = ""
        if limited:
            why = f" waits ({limited.reason}: {reason_of_job(limited).meaning})"
        return queue + (why or ", as soon as nodes are free")
    if todo.left_held:
        over = ""
        if todo.left_over:
            over = f"; the training is finished: `{run.command('launch --repair')}` cancels it"
        return f"nothing: all that is queued stays held{over}"
    return _nothing_queued(run, view)


def _nothing_queued(run: StopContext, view: StopView) -> str:
    if view.finished is None:
        return f"nothing is queued: start it with `{run.launch()}`"
    return f"the training is finished: {to_train_on(run.card, run.launch())}"
