"""`tr11 checkpoint-now`, `profile`, `compute-check` and `stacks`: what a running training is asked for
while it goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace
from rich.console import Console, RenderableType

from tr11ops.api import Run, run_of
from tr11ops.base.errors import Refusal, Unobserved, WrongUsage
from tr11ops.base.units import counted, duration
from tr11ops.cli.common import AttemptOption, in_time, is_terminal, say, timeout_option
from tr11ops.cli.progress import look_again
from tr11ops.cli.runner import DRY_RUN, JSON, REASON, SCHEDULER, YES, Change, Outcome, RunContext
from tr11ops.cli.stopping import StopContext, put_request, record, run_to_stop, standing_lines
from tr11ops.cluster.base import Scheduler
from tr11ops.diagnose.stacks.collect import AskedAttempt, collect
from tr11ops.diagnose.stacks.look import StacksLook
from tr11ops.observe.jobs import read_own_jobs
from tr11ops.observe.readers import kind_to_watch, looking, open_scheduler
from tr11ops.queue.stop import StopView, acknowledgements, lease_holder, leaving
from tr11ops.runcard.card import own_card
from tr11ops.runcard.kinds import refuse_watched
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.files import host_name
from trainer.contract.paths import read_attempt_label
from trainer.contract.record import Record
from trainer.contract.requests import Kind, Request, RequestAnswer, new_request, read_request

if TYPE_CHECKING:
    from tr11ops.status.assessment import Assessment

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
        return [*running, *standing_lines(self.run, self.view)]

    def new_request(self, kind: Kind) -> Request:
        """A request of this user and this moment, which is not made yet."""
        return new_request(kind, self.run.who, self.why, self.run.directory.root)

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
            who=self.run.who,
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
    if not is_save:  # a trainer that speaks can be asked for that
        own_card(run.card, f"a training that is {done} while it trains")
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
    saved = ""
    if step is not None and not fault:
        saved = f"saved: {run.card.checkpoint_label(step)}; the training goes on"
    return Outcome(
        {**value, "answered": answer is not None, "checkpoint": step},
        (saved,) if saved else (),
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


WATCH_SECONDS = 10.0
# as tr11ops.diagnose.stacks.collect.NODE_SECONDS, without loading it for --help
NODE_SECONDS = 20.0


def stacks(
    context: Annotated[RunContext, SCHEDULER, JSON],
    *,
    seconds: Annotated[
        float | None,
        typer.Argument(
            metavar="SECONDS",
            min=1,
            max=86400,
            help="With --watch: between two looks [10].",
        ),
    ] = None,
    job: AttemptOption = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Again and again until Ctrl-C; says what has not moved."
        ),
    ] = False,
    timeout: Annotated[
        float | None, timeout_option("Give up on a node that is silent for this long [20].")
    ] = None,
) -> Outcome:
    """Say what every worker of the running attempt does now: which rank holds the others up, and
    where it hangs.

    Every node is asked at once (on Slurm with srun --overlap). Nothing is stopped, signalled or
    written. Workers with the same stack share a row, the odd ones on top. It tells waits apart:
    collective, send-recv, data-loader, file, host-sync (the GPU), compute, starting, stopped
    (SIGSTOP), dead.

    Exit code 0 where no rank or node stands out, 1 where one does, 3 where no stack could be read.

    Examples:
      tr11 stacks
      tr11 stacks --job 1234_7 --json
      tr11 stacks --watch 30
    """
    if seconds is not None and not watch:
        raise WrongUsage(
            f"SECONDS ({seconds:g}) goes with --watch: tr11 stacks --watch {seconds:g}"
        )
    card, directory = context.seen()
    refuse_watched(card)
    edge = looking(open_scheduler(kind_to_watch(directory, context.scheduler)))
    view = _View(
        run_of(card, context.run or "", reader=edge),
        edge,
        job,
        NODE_SECONDS if timeout is None else timeout,
        shows=not watch,
    )
    if watch:
        return look_again(view.look, seconds or WATCH_SECONDS, context.as_json)
    frame = view.look()
    return Outcome(frame.document(), frame.lines(), exit_code=frame.exit_code)


class _Frame(Record):
    """One look, as it is printed; `assessed` tells which node is slow."""

    seen: StacksLook
    assessed: Assessment

    @property
    def exit_code(self) -> int:
        return self.seen.exit_code

    def document(self) -> dict[str, object]:
        return {**self.seen.document(), "slow_nodes": self.assessed.document()["slow_nodes"]}

    def lines(self) -> list[str]:
        from tr11ops.diagnose.stacks.screen import lines

        return list(lines(self.seen, self.assessed.slow_node_lines))

    def screen(self, width: int | None = None, height: int | None = None) -> RenderableType:
        from rich.text import Text

        return Text("\n".join(self.lines()))


@dataclass
class _View:
    """Looks at the attempt that runs, again and again; a look knows the one before it."""

    run: Run
    edge: Scheduler
    job: str | None
    seconds: float
    shows: bool
    last: StacksLook | None = field(default=None)

    def look(self) -> _Frame:
        """Raises Refusal where nothing runs, SchedulerError where the scheduler refuses or is
        silent.
        """
        from tr11ops.diagnose.stacks.records import look_at_records

        directory = self.run.directory
        asked, name = in_time(lambda: attempt_to_ask(directory, self.edge, self.job))
        with _progress(name, max(1, len(asked.nodes)), self.shows) as advance:
            collected = collect(asked, os.environ, self.seconds, advance)
        paths = directory.paths
        records = in_time(
            lambda: look_at_records(
                paths.flight_records(asked.job_id), _launch(directory, asked.job_id)
            )
        )
        before = None
        if self.last is not None and self.last.job == name:
            before = self.last
        self.last = StacksLook.after(before, name, time.time(), collected, records)
        return _Frame(self.last, self.run.look())


def attempt_to_ask(
    directory: RunDirectory, edge: Scheduler, job: str | None
) -> tuple[AskedAttempt, str]:
    """The running attempt that is meant, and its number as people type it.

    Raises Refusal where none runs, or where it runs where it cannot be asked; SchedulerError.
    """
    found = read_own_jobs(directory, edge)
    running = [one for one in found.jobs if one.state.is_active]
    holder = lease_holder(directory)
    if job is not None:
        chosen = [one for one in running if job in {one.job_id, one.raw_id, one.array_id}]
    else:  # of several, the one that trains
        chosen = sorted(running, key=lambda one: holder is None or one.raw_id != holder.job_id)
    beats = directory.paths.heartbeats
    if chosen:
        one = chosen[0]
        count = len(one.nodes) or one.node_count or 1
        return AskedAttempt(
            one.raw_id, beats, nodes=one.nodes, is_local=edge.name != "slurm", node_count=count
        ), one.job_id
    # one in the foreground, of `tr11 train`
    if not running and holder is not None and job in {None, holder.job_id}:
        if holder.host != host_name():
            raise Refusal(
                f"this run trains in the foreground on {holder.host}: type `tr11 stacks` there"
            )
        return AskedAttempt(holder.job_id, beats, (), True), holder.job_id
    names = ", ".join(one.job_id for one in running)
    if job is not None:
        raise Refusal(
            f"--job {job}: is no running attempt of this run; {f'running: {names}' if names else 'none runs'}"
        )
    why_unclear = ""
    if found.why_unclear:
        why_unclear = f" ({found.why_unclear})"
    raise Refusal(
        f"no attempt of this run is running{why_unclear}; for one that has ended: `tr11 diagnose`"
    )


def _launch(directory: RunDirectory, job_id: str) -> int:
    """The newest launch of the attempt; 0 where it keeps no records of launches."""
    folder = directory.paths.attempt(job_id) / "launches"
    return max(
        (int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()), default=0
    )


@contextmanager
def _progress(name: str, nodes: int, shows: bool) -> Iterator[Callable[[int], None]]:
    """How many nodes have answered, where a person waits for it."""
    if not (shows and is_terminal()):
        yield lambda count: None
        return

    words = f"asking {counted(nodes, 'node')} of job {name}"
    with Console(stderr=True).status(words) as status:
        yield lambda count: status.update(f"{words}: {count} answered")
