"""A place to type `tr11 status` in, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.plugins.command_server import tr11_command
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.local import LocalScheduler
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from trainer.contract.paths import RunPaths

ROOT = Path(__file__).parents[3]


TR11 = [sys.executable, "-c", "from tr11ops.cli.main import run; run()"]
COMMAND = [*TR11, "status", "--run", "demo"]


@dataclass
class Place:
    """A folder in which `--run demo` means its own run, with its own embedded scheduler."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("TR11_", "SLURM_", "LC_"))
        }
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "TR11_LOCAL_SCHEDULER": str(self.folder / "scheduler"),
            "TR11_LOCAL_NODES": "8",
            "LANG": "C.UTF-8",
            "TERM": "xterm",
            "COLUMNS": "80",
        }

    @property
    def directory(self) -> RunDirectory:
        root = self.folder / "demo-run"
        return RunDirectory(RunPaths(root, "demo", "main"), root / "kill-switch")

    def status(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # How its output is encoded is settled when a Python starts.
        command = COMMAND if "LANG" in environment else [*tr11_command(), "status", "--run", "demo"]
        return self.typed([*command, *arguments], **environment)

    def typed(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        """What a command says that is typed in this folder; never a traceback."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return done

    def submit(self, scheduler: LocalScheduler) -> str:
        """A real job of this run on the embedded scheduler, recorded as `tr11 launch` records it."""
        tag = new_tag()
        request = BatchRequest(
            script="#!/bin/bash\nsleep 300\n",
            name="demo",
            nodes=4,
            time_limit_seconds=600,
            output="%x-%A_%a.out",
            working_directory=self.folder,
            array="1-3%1",
            comment=self.directory.comment(tag),
        )
        job_id = scheduler.submit(request)
        self.directory.write_submission(
            Submission(
                tag, job_id, "local", time.time(), "ana", "here", "demo", "main", "1-3%1", 4, "hash"
            )
        )
        return job_id
