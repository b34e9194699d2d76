"""Synchronises in a process of its own each time it is asked: `python -m
tests.tr11ops.hub.sync_child ROOT URL`.

Everything is imported once; each line on stdin forks a process that does one round, whose number is
printed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import huggingface_hub.hf_api
import huggingface_hub.lfs  # noqa: F401  what a round would import

import tr11ops.hub.committing
import tr11ops.hub.transport  # noqa: F401
from tests.tr11ops.hub.sync_cases import PATTERNS, REPOSITORY
from tr11ops.hub.base import Repository, find_credentials, hub_retries
from tr11ops.hub.client import Hub
from tr11ops.hub.sync import sync_once
from tr11ops.hub.sync_round import SyncSettings
from tr11ops.rundir.claims import ClaimTaken
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.paths import RunPaths


def one_round(root: Path, url: str) -> None:
    setting = SyncSettings(
        hub=Hub(url, find_credentials(None, os.environ), hub_retries(5.0)),
        repository=Repository(REPOSITORY),
        directory=RunDirectory(RunPaths(root, "run", "main"), root / "kill-switch"),
        patterns=PATTERNS,
        private=True,
        status=lambda: None,
        clock=time.time,
        say=lambda text: print(text, file=sys.stderr),
    )
    try:
        sync_once(setting)
    except ClaimTaken as owner:
        print(f"busy: {owner}", file=sys.stderr)


def main() -> None:
    root, url = Path(sys.argv[1]), sys.argv[2]
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            one_round(root, url)
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
