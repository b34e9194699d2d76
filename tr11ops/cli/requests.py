"""`tr11 checkpoint-now`, `profile` and `compute-check`: what a running training is asked for while
it goes on.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from tr11ops.base.errors import Refusal, Unobserved
from tr11ops.base.units import counted, duration
from tr11ops.cli.common import say, timeout_option
from tr11ops.cli.runner import (
    DRY_RUN,
    JSON,
    REASON,
    SCHEDULER,
    YES,
    Change,
    Outcome,
    RunContext,
)
from tr11ops.cli.stopping import StopContext, put_request, record, run_to_stop, standing_lines
from tr11ops.queue.stop import StopView, acknowledgements, leaving
from trainer.contract.paths import read_attempt_label
from trainer.contract.record import Record
from trainer.contract.requests import Kind, Request, RequestAnswer, new_request, read_request

CHECKPOINT_NOW_SCHEMA = 1
POLL_SECONDS = 0.5
OPERATIONS_SECONDS = 15.0
MOST_STEPS = 10  # as trainer.contract.requests.MOST_PROFILED_STEPS, without loading it for --help
PatienceOption = Annotated[float | None, timeout_option("Give up waiting after this long.")]


class TrainingRequest(Record):
    """A running training that is asked for something. `seconds`: how long an answer is waited for."""

    run: StopContext
    view: StopView
    why: str
    seconds: float

    def lines(self, what: str) -> list[str]:
        """What trains, and `what` it will do."""
        paths = self.run.directory.paths
        labels = [read_attempt_label(paths, name) for name in self.view.attempts]
        running = [f"running:    attempt {label}: {what}" for label in labels]
        return [*running, *standing_lines(self.view)]

    def new_request(self, kind: Kind) -> Request:
        """A request of this user and this moment, which is not made yet."""
        return new_request(kind, self.run.user, self.why, self.run.directory.root)

    def ask(self, path: Path, request: Request, thing: str, entry: str, **facts: Any) -> None:
        """Put a request in place and on record. Raises Refusal: "`thing` could not be asked for"."""
        if not put_request(self.run, path, request):
            raise Refusal(
                f"{thing} could not be asked for: make room first, runbooks/filesystem-full.md"
            )
        record(
            self.run.directory,
            entry,
            why=self.why,
            data={"request": request.id, **facts},
            who=self.run.user,
        )

    def await_answer(self, request: Request) -> RequestAnswer | None:
        """The trainer's answer; None when it does not come in time, and then it is said which ranks
        were silent.
        """
        if not request.id:
            look = self.run.command("status")
            raise Refusal(
                f"that request was made by hand, so it has no receipt; look with `{look}`"
            )
        until, shown = time.monotonic() + self.seconds, ""
        while True:
            try:
                answer = RequestAnswer.read(self.run.directory.paths.answer(request.id))
            except (OSError, ValueError):
                answer = None  # being written by another node
            if answer is not None:
                return answer
            text = str(acknowledgements(self.run.directory, request.id, self.view.attempts))
            if text and text != shown:
                say(f"  {text}")
                shown = text
            if time.monotonic() >= until:
                return None
            time.sleep(POLL_SECONDS)

    def fault_of(self, answer: RequestAnswer | None, thing: str) -> str:
        """Why the training did not do what was asked: in its own words, or that no `thing` came; ""
        where it did.
        """
        if answer is None:
            return f"no {thing} came in time; look with `{self.run.command('logs')}`"
        if answer.step is None:
            return answer.message
        return ""

    def answered(self, request: Request, thing: str, label: str) -> Outcome:
        """Wait for the answer, which is shown behind the label. Raises Refusal where nothing came
        of it.
        """
        answer = self.await_answer(request)
        fault = self.fault_of(answer, thing)
        if answer is None or fault:
            raise Refusal(fault)
        return Outcome(lines=(f"{label}: {answer.message}",))


def _training_to_ask(
    context: RunContext, done: str, timeout: float | None, is_save: bool = False
) -> TrainingRequest:
    """The run and what of it trains. Raises CardError and Refusal as `run_to_stop`.

    Refused too where nothing of the run trains, so that nothing can be `done` ("saved"), or where
    that cannot be seen. An attempt may have left a moment ago: who asks for a save (`is_save`)
    hears what is saved. An answer is waited for as the user says, else as long as a stop may take.
    """
    run = run_to_stop(context)
    view = run.look()
    if view.unread:
        raise Unobserved(f"whether anything of this run is training cannot be seen: {view.unread}")
    if not (view.attempts or view.foreground or view.read_error or view.unclear):
        said, look = _saved(view) if is_save else "", run.command("status")
        raise Refusal(
            f"nothing of this run is training, so nothing can be {done}{said}; look with `{look}`"
        )
    if timeout is None:
        seconds = run.card.resilience.stop_within_minutes * 60
    else:
        seconds = timeout
    return TrainingRequest(run, view, context.reason, seconds)


def _require_job(training: TrainingRequest, job: str) -> None:
    """Raises Refusal where the attempt that a person means trains no more: the next one is not
    asked in its place. One that is leaving has saved what it will save.
    """
    run, view = training.run, training.view
    if view.unclear or view.read_error:
        return
    gone = run.read(partial(leaving, run.directory, view.running))
    living = {one.job_id: one.raw_id for one in view.running if one.job_id not in gone}
    if not view.running:  # the lease alone tells of it
        paths = run.directory.paths
        living = {read_attempt_label(paths, number): number for number in view.attempts}
    if job in living or job in living.values():
        return
    asked = ""
    if living:
        asked = f", and {', '.join(living)} was not asked"
    raise Refusal(f"job {job} trains no more{asked}{_saved(view)}")


def _saved(view: StopView) -> str:
    """How much of what was trained is in the newest whole checkpoint, as the end of a sentence; ""
    before any step.
    """
    if view.iteration is None:
        return ""
    if view.checkpoint is None:
        return f"; no checkpoint has any of its {counted(view.iteration, 'step')}"
    if view.checkpoint < view.iteration:
        return f"; its newest checkpoint is step {view.checkpoint}, and its last step was {view.iteration}"
    return f"; all that it trained is saved, in step {view.checkpoint}"


# ----------------------------------------------------------------------------- checkpoint-now
def checkpoint_now(
    context: Annotated[RunContext, SCHEDULER, JSON, YES, DRY_RUN, REASON],
    *,
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Only of this attempt, if it trains still."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the checkpoint, and name its step.")
    ] = False,
    timeout: Annotated[
        float | None, timeout_option("With --wait: give up after this long.")
    ] = None,
) -> Change:
    """Save a checkpoint at the next step, and train on. The receipt is the checkpoint's step.

    Examples:
      tr11 checkpoint-now --wait --reason "before the maintenance"
    """
    training = _training_to_ask(context, "saved", timeout, is_save=True)
    if job is not None:
        _require_job(training, job)
    before = read_request(training.run.directory.paths.checkpoint_request, "checkpoint")
    lines = training.lines("will save and train on")
    question = "Ask for a checkpoint?"
    if before is not None:
        lines.append(f"a checkpoint has been asked for already, by {before}")
        question = ""
    return Change(lines, question, partial(_checkpoint, training, before, wait))


def _checkpoint(training: TrainingRequest, before: Request | None, wait: bool) -> Outcome:
    """Ask for a checkpoint where it was not asked for before; with `wait`, until it is saved."""
    run, request = training.run, before
    if request is None:
        request = training.new_request("checkpoint")
        training.ask(
            run.directory.paths.checkpoint_request, request, "a checkpoint", "checkpoint-now"
        )
        say(
            f"asked for a checkpoint at the next step; `{run.command('status')}` shows it when it is there"
        )
    value = {"schema": CHECKPOINT_NOW_SCHEMA, "request": request.id}
    if not wait:
        return Outcome({**value, "answered": False, "checkpoint": None})
    answer = training.await_answer(request)
    step = None if answer is None else answer.step
    fault = training.fault_of(answer, "checkpoint")
    return Outcome(
        {**value, "answered": answer is not None, "checkpoint": step},
        () if fault else (f"saved: global_step{step}; the training goes on",),
        exit_code=1 if fault else 0,
        fault=fault,
    )


# ----------------------------------------------------------------------------- compute-check
def compute_check(
    context: Annotated[RunContext, SCHEDULER, YES, DRY_RUN, REASON],
    *,
    timeout: PatienceOption = None,
) -> Change:
    """Check every rank's arithmetic after the next step: one micro batch is computed twice and
    compared bit for bit.

    The training goes on, and no bit of it changes. It costs about two steps of one micro batch.
    Where results differ, the answer names rank and node, the exit code is 1, and `tr11 status`
    shows the finding until the node is excluded.

    Examples:
      tr11 compute-check --reason "the loss left its course"
    """
    training = _training_to_ask(context, "checked", timeout)
    lines = training.lines("one micro batch is computed twice after the next step")
    return Change(lines, "Ask for a check?", partial(_check, training))


def _check(training: TrainingRequest) -> Outcome:
    request = training.new_request("compute-check")
    training.ask(training.run.directory.paths.check_request, request, "a check", "compute-check")
    say(f"asked for; waiting for the answer, {duration(training.seconds)} at most")
    return training.answered(request, "answer", "checked")


# ----------------------------------------------------------------------------- profile
def profile(
    context: Annotated[RunContext, SCHEDULER, YES, DRY_RUN, REASON],
    *,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=MOST_STEPS, help="How many steps.")
    ] = 3,
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank that is traced.")] = 0,
    operations: Annotated[
        bool,
        typer.Option(
            "--operations",
            help="In place of a trace: every rank's last operations with the others.",
        ),
    ] = False,
    timeout: PatienceOption = None,
) -> Change:
    """Trace the next steps of one rank: kernels, calls, and on GPUs a snapshot of the memory.

    The file lands in the attempt's folder; open it with ui.perfetto.dev. The traced steps are
    slower. With --operations nothing is slowed: it also answers while the training hangs, and shows
    which rank is missing where.

    Examples:
      tr11 profile --steps 3
      tr11 profile --operations
    """
    training = _training_to_ask(context, "profiled", timeout)
    if operations:
        seconds = OPERATIONS_SECONDS if timeout is None else timeout
        what, apply = (
            "every rank's last operations",
            partial(_operations, replace(training, seconds=seconds)),
        )
    else:
        what, apply = (
            f"{counted(steps, 'step')} of rank {rank}",
            partial(_profile, training, steps, rank),
        )
    return Change(training.lines(what), "Ask for a profile?", apply)


def _profile(training: TrainingRequest, steps: int, rank: int) -> Outcome:
    """Trace the next steps of one rank."""
    request = replace(training.new_request("profile"), steps=steps, rank=rank)
    path, facts = training.run.directory.paths.profile_request, {"steps": steps, "rank": rank}
    training.ask(path, request, "a profile", "profile", **facts)
    done = f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} done"
    say(f"asked for; waiting until {done}, {duration(training.seconds)} at most")
    return training.answered(request, "profile", "profile")


def _operations(training: TrainingRequest) -> Outcome:
    """Ask every rank what it did last, wait until all that beat have written, then take the request
    back.
    """
    paths, request = training.run.directory.paths, training.new_request("operations")
    pattern = f"state/attempts/*/flight-recorder/*-request-{request.id}-rank-*.json"
    training.ask(paths.operations_request, request, "the operations", "profile", operations=True)
    wanted = len(list(paths.heartbeat(0).parent.glob("*.json")))
    until = time.monotonic() + training.seconds
    try:
        while True:
            written = sorted(paths.root.glob(pattern))
            if len(written) >= wanted or time.monotonic() >= until:
                break
            time.sleep(POLL_SECONDS)
    finally:
        paths.operations_request.unlink(missing_ok=True)
    if not written:
        late = f"no rank wrote its operations within {duration(training.seconds)}"
        raise Refusal(f"{late}: their machines or the disk do not answer")
    return Outcome(
        lines=(f"operations: {len(written)} of {counted(wanted, 'rank')}, in {written[0].parent}",)
    )
