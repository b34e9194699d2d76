"""Running a part of the trainer, which loads torch, as a child that hears every signal that this
process hears.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from tr11ops.base.installed import MAKING_DATA, READING_CHECKPOINTS, require
from tr11ops.base.processes import die_with_parent
from tr11ops.cli.runner import RUN_NAMES
from tr11ops.runcard.card import RunCard, resolved
from trainer.contract.attempt import HELD_BACK

SHARD_SIZE = "5GB"  # of an exported file, where none is asked for
NEEDS = {"trainer.data": MAKING_DATA, "trainer.checkpoint": READING_CHECKPOINTS}
# It ends with its parent: an orphan would go on for hours beside its successor. Ctrl-C shows no
# traceback.
CHECKPOINT_CHILD = """
import runpy, signal, sys
from tr11ops.base.processes import die_with_parent
die_with_parent(signal.SIGTERM)
try:
    runpy.run_module("trainer.checkpoint", run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(1)
"""


@contextmanager
def card_file(card: RunCard) -> Generator[str]:
    """The name of a file that holds the resolved card meanwhile, for a child."""
    with tempfile.NamedTemporaryFile(
        "w", suffix=".json", prefix="tr11-card-", encoding="utf-8"
    ) as stream:
        stream.write(json.dumps(resolved(card)))
        stream.flush()
        yield stream.name


def child_request(ctx: typer.Context, **instead: object) -> str:
    """What was typed, for the child that does it: the command and the value of each parameter.

    `instead` gives the child's value of a parameter, or of one that it alone has; the options that
    name a run are this process's own.
    """
    values = {name: value for name, value in ctx.params.items() if name not in RUN_NAMES}
    return command_request(str(ctx.command.name), **{**values, **instead})


def command_request(command: str, **values: object) -> str:
    """The one argument of `python -m trainer.data` and `python -m trainer.checkpoint`."""
    return json.dumps({"command": command, **values}, default=str)


def run_trainer_module(module: str, request: str) -> int:
    """Run `python -m MODULE REQUEST` with this process's terminal; returns its exit code, 1 where a signal
    ended it. Raises Refusal where it needs what is not installed.

    The child has a process group of its own: so it hears the keyboard's interrupt once, through this process, as it
    hears a signal that was sent to this process alone (`timeout`, a closed terminal). It cleans up; this one waits.
    What comes before the module can answer in one line is held back until it can (`hear_signals`).
    When this process is killed, the kernel sends the child SIGTERM: it ends its own workers, and none is left.
    """
    require(NEEDS[module], "this command")
    here = os.getpid()

    def follow() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        die_with_parent(signal.SIGTERM)
        if os.getppid() != here:  # killed before the kernel was asked
            os._exit(1)

    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in HELD_BACK}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", module, request],
            process_group=0,
            preexec_fn=follow,  # noqa: PLW1509 - this process has one thread
        )
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code >= 0:
        return code
    return 1


def ask_checkpoint_module(command: str, **values: object) -> dict[str, Any] | None:
    """What the trainer answers to a command of its checkpoints; its bar and refusals go to stderr.

    None where it gives no JSON object: it was killed. Raises Refusal where it
    needs what is not installed.
    """
    require(READING_CHECKPOINTS, "a look at the tensors of a checkpoint")
    request = command_request(command, as_json=True, **values)
    # a Ctrl-C reaches it too
    with subprocess.Popen(
        [sys.executable, "-c", CHECKPOINT_CHILD, request], stdout=subprocess.PIPE, text=True
    ) as child:
        said, _ = child.communicate()
    try:
        value = json.loads(said)
    except ValueError:
        return None
    if isinstance(value, dict):
        return value
    return None
