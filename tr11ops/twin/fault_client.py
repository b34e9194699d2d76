"""Slurm's own commands on a twin, as a site's administrator types them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from tr11ops.base.errors import TwinError
from tr11ops.twin.twin import Twin

CLIENT_SECONDS = 30.0
# a controller that has just come back refuses much until the nodes have spoken
RETRY_SECONDS = 10.0


def ask_client(twin: Twin, *words: str) -> str:
    """What a command answers. Raises TwinError with its last words where it fails."""
    try:
        done = subprocess.run(
            words,
            env=twin.client_environment,
            capture_output=True,
            text=True,
            timeout=CLIENT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise TwinError(
            "the controller does not answer: heal that first (tr11 twin heal)"
        ) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise TwinError(
            f"{words[0]} {words[1]}: {said[-1] if said else f'exit status {done.returncode}'}"
        )
    return done.stdout


def retried(action: Callable[[], object]) -> None:
    """Do it again while it is refused, for a while. Raises the last TwinError."""
    until = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            action()
        except TwinError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
        else:
            return
