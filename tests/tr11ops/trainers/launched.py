"""The plain script of two nodes as `tr11 launch` starts it on the embedded scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.plugins.command_server import tr11_command
from tests.tr11ops.trainers.kept import CARD, QUIET, SCRIPTS, wait_until
from tr11ops.cluster.local import LocalScheduler
from trainer.contract.attempt import EndMarker
from trainer.contract.metrics_record import records
from trainer.contract.paths import RunPaths


class Launched:
    """A run of the plain script, launched."""

    def __init__(self, folder: Path) -> None:
        self.root, self.card = folder / "run", folder / "tr11.toml"
        own = {"TR11_LOCAL_SCHEDULER": str(folder / "scheduler"), "TR11_LOCAL_NODES": "4"}
        self.environment = {**os.environ, **QUIET, **own, "COLUMNS": "200"}

    def close(self) -> None:
        """Nothing of it runs on, whatever a test came to."""
        scheduler = LocalScheduler(self.root.parent / "scheduler")
        for job in scheduler.jobs():
            if not job.state.is_final:
                scheduler.cancel(job.job_id)

    def tr11(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*tr11_command(), *words, "--run", str(self.card)],
            capture_output=True, text=True, timeout=120, env=self.environment, check=False,
        )  # fmt: skip

    def launch(self, fault: str = "", seconds: str = "0.1", more: str = "") -> None:
        script = SCRIPTS / "plain_train.py"
        text = CARD.format(root=self.root, script=script, python=sys.executable)
        text = text.replace('"0.1", "die-once-at-8"', f'"{seconds}", "{fault}"')
        self.card.write_text(text + more, encoding="utf-8")
        done = self.tr11("launch", "--scheduler", "local", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr

    def steps(self) -> list[int]:
        paths = RunPaths(self.root, "toy", "main")
        return [one.iteration or 0 for one in records(paths.metrics) if one.is_step]

    def end(self) -> EndMarker | None:
        found = [EndMarker.read(one) for one in self.root.glob("state/attempts/*/end.json")]
        return found[-1] if found else None

    def wait(self) -> EndMarker:
        """Its end, once the job has gone too."""
        wait_until(lambda: self.end() is not None)
        wait_until(lambda: "none running" in self.tr11("status").stdout)
        end = self.end()
        assert end is not None
        return end
