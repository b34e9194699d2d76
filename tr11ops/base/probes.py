"""Asking a program of this machine something: what it printed, or why it could not be asked."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from tr11ops.base.errors import Unanswered
from trainer.contract.record import Record


class ProbeOutput(Record):
    """How a command ended and what it wrote."""

    status: int
    text: str
    error: str = ""


class Commands(Protocol):
    """A machine on which programs can be run."""

    def command(self, arguments: Sequence[str], seconds: float) -> ProbeOutput:
        """Run a command. Raises FileNotFoundError when there is none, Unanswered when it takes too
        long.
        """


class LocalCommands:
    """`Commands` of this machine."""

    def command(self, arguments: Sequence[str], seconds: float) -> ProbeOutput:
        # A session of its own: what the command starts is ended with it, and holds no pipe open.
        process = subprocess.Popen(
            list(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: no one can end it
                process.communicate(timeout=1.0)
            raise Unanswered(f"{arguments[0]}: no answer within {seconds:g} s") from None
        return ProbeOutput(
            process.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
        )
