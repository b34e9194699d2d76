"""What the commands share that ask a running training for something: whether one is there, the request, its answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr11ops.base.errors import Refusal
from tr11ops.cli.common import say
from tr11ops.cli.stopping import StopContext, put_request, record, run_to_stop, standing_lines
from tr11ops.queue.stop import acknowledgements
from trainer.contract.requests import RequestAnswer

if TYPE_CHECKING:
    from tr11ops.cli.context import RunContext
    from tr11ops.queue.stop import StopView
    from trainer.contract.requests import Request

POLL_SECONDS = 0.5


def training_to_ask(context: RunContext, done: str, what: str) -> tuple[StopContext, StopView]:
    """The run and what of it trains; says `what` each attempt will do. Raises CardError and Refusal as `run_to_stop`.

    Refused too where nothing of the run trains, so that nothing can be `done` ("saved"), or where that cannot be seen.
    """
    run = run_to_stop(context)
    view = run.look()
    if view.unread:
        raise Refusal(f"whether anything of this run is training cannot be seen: {view.unread}", exit_code=3)
    if not (view.attempts or view.foreground or view.read_error or view.unclear):
        raise Refusal(f"nothing of this run is training, so nothing can be {done}; look with `{run.command('status')}`")
    for line in (*(f"running:    attempt {name}: {what}" for name in view.attempts), *standing_lines(view)):
        say(line)
    return run, view


def ask_training(
    run: StopContext, path: Path, request: Request, what: str, kind: str, facts: Mapping[str, Any]
) -> None:
    """Put a request to the running training in place and on record; refused where "`what` could not be asked for"."""
    if not put_request(run, path, request):
        raise Refusal(f"{what} could not be asked for: make room first, runbooks/filesystem-full.md")
    record(run.directory, kind, request.why, {"request": request.id, **facts}, run.user)


def seconds_to_wait(run: StopContext, timeout: float | None) -> float:
    """How long an answer is waited for: as the user says, else as long as a stop may take."""
    return run.card.resilience.stop_within_minutes * 60 if timeout is None else timeout


def await_answer(run: StopContext, view: StopView, request: Request, seconds: float) -> RequestAnswer | None:
    """The trainer's answer; None when it does not come in time, and then it is said which ranks were silent."""
    if not request.id:
        raise Refusal(f"that request was made by hand, so it has no receipt; look with `{run.command('status')}`")
    until, said = time.monotonic() + seconds, ""
    while True:
        try:
            answer = RequestAnswer.read(run.directory.paths.answer(request.id))
        except (OSError, ValueError):
            answer = None  # being written by another node
        if answer is not None:
            return answer
        text = str(acknowledgements(run.directory, request.id, view.attempts))
        if text and text != said:
            say(f"  {text}")
            said = text
        if time.monotonic() >= until:
            return None
        time.sleep(POLL_SECONDS)


def require_answer(run: StopContext, answer: RequestAnswer | None, what: str) -> RequestAnswer:
    """The answer, where the training did what was asked. Raises Refusal with its words, or that `what` did not come."""
    if answer is None or answer.step is None:
        raise Refusal(answer.message if answer else f"no {what} came in time; look with `{run.command('logs')}`")
    return answer
