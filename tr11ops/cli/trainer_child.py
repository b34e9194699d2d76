"""Running a part of the trainer, which loads torch, as a child that hears every signal that this process hears."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_trainer_module(module: str, arguments: list[str]) -> int:
    """Run `python -m MODULE` with this process's terminal; returns its exit code, 1 where a signal ended it.

    The child has a process group of its own: so it hears the keyboard's interrupt once, through this process, as it
    hears a signal that was sent to this process alone (`timeout`, a closed terminal). It cleans up; this one waits.
    When this process is killed, the kernel sends the child SIGTERM: it ends its own workers, and none is left.
    """
    from tr11ops.agent.processes import die_with_parent

    here = os.getpid()

    def follow() -> None:
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

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            process_group=0,
            preexec_fn=follow,  # noqa: PLW1509 - this process has one thread
        )
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 1
