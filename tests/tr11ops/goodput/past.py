"""Writes the files of a past that a test makes up: the same ones, by the same writers, that a real
run leaves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import to_builtins

from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory, Submission
from trainer.contract.attempt import EndMarker, PhaseWriter
from trainer.contract.files import append_line, write_json
from trainer.contract.paths import RunPaths

BEGIN = 1_790_000_000.0


class Past:
    """A run below `folder`. Times are seconds after BEGIN; one attempt and launch is written at a
    time.
    """

    def __init__(self, folder: Path, with_phases: bool = True) -> None:
        self.paths = RunPaths(folder / "run", "run", "main")
        self.directory = RunDirectory(self.paths, self.paths.root / "kill-switch")
        self.with_phases = with_phases
        self._job, self._launch, self._iteration = "", 1, 0
        self._nodes: tuple[str, ...] = ()
        self._phases: PhaseWriter | None = None

    # ------------------------------------------------------------------ around the attempts
    def submit(self, at: float, tag: str, nodes: int, array: str | None = None) -> None:
        self.directory.write_submission(
            Submission(
                tag, "1000", "slurm", BEGIN + at, "me", "login", "run", "main", array, nodes, "hash"
            )
        )

    def journal(self, at: float, kind: str, **data: object) -> None:
        Journal(self.directory.journal, "login-1").write(
            kind, "because", data, "me", when=BEGIN + at
        )

    # ------------------------------------------------------------------ an attempt
    def attempt(
        self,
        at: float,
        job_id: str,
        nodes: Sequence[str],
        tag: str = "",
        kind: str = "slurm",
        limit: str = "20:00:00",
    ) -> None:
        self._job, self._nodes = job_id, tuple(nodes)
        folder = self.paths.attempt(job_id)
        write_json(
            folder / "attempt.json",
            {"start": BEGIN + at, "nodes": list(nodes), "kind": kind, "submission": tag, "job_id": job_id,
             "array_id": "1000", "task_id": int(job_id) % 100},
        )  # fmt: skip
        write_json(
            folder / "card.json", {"slurm": {"time_limit": limit}, "checkpoint": {"interval": 5}}
        )

    def launch(self, at: float, number: int = 1, nodes: Sequence[str] | None = None) -> None:
        self._launch = number
        self._record = LaunchRecord(number, tuple(nodes or self._nodes), BEGIN + at)
        self._record.write(self.paths.attempt(self._job))
        os.utime(LaunchRecord.path(self.paths.attempt(self._job), number), (BEGIN + at, BEGIN + at))
        if self.with_phases:
            self._phases = PhaseWriter(self.paths.phases(self._job), number, print)

    def phase(self, at: float, name: str, iteration: int | None = None) -> None:
        self._iteration = self._iteration if iteration is None else iteration
        if self._phases is not None:
            self._phases.enter(name, self._iteration, BEGIN + at)

    def step(self, at: float, iteration: int, seconds: float, skew: float = 0.0) -> None:
        self._iteration = iteration
        line = {
            "kind": "step",
            "iteration": iteration,
            "seconds_per_iteration": seconds,
            "time": BEGIN + at + skew,
        }
        append_line(self.paths.metrics, json.dumps({**line, "job_id": self._job}))

    def steps(self, at: float, first: int, last: int, seconds: float, skew: float = 0.0) -> float:
        """Steps one after another; returns when the last was done."""
        for iteration in range(first, last + 1):
            at += seconds
            self.step(at, iteration, seconds, skew)
        return at

    def checkpoint(self, at: float, step: int) -> None:
        write_json(
            self.paths.checkpoint(step) / "manifest.json",
            {"created": BEGIN + at, "files": [], "step": step},
        )

    def save(self, at: float, until: float) -> None:
        self.phase(at, "saving")
        self.checkpoint(until, self._iteration)

    def failed(self, at: float, end: float, cause: str, blamed: Sequence[str] = ()) -> None:
        """The launch failed: the first sign, and when nothing of it was left."""
        record = to_builtins(self._record) | {
            "first_sign": BEGIN + at, "end": BEGIN + end, "cause": cause, "blamed": list(blamed), "exit_status": 1,
        }  # fmt: skip
        write_json(LaunchRecord.path(self.paths.attempt(self._job), self._launch), record)

    def ended(self, at: float, launch_end: float, reason: str, saved: int | None) -> None:
        """The trainer left as it should, and the launch with it."""
        marker = EndMarker(
            reason, self._iteration, saved, True, reason, BEGIN + at, "n1", self._job, self._launch
        )  # fmt: skip
        write_json(self.paths.end_marker(self._job), to_builtins(marker))
        record = to_builtins(self._record) | {
            "end": BEGIN + launch_end,
            "cause": "operator",
            "exit_status": 0,
        }
        write_json(LaunchRecord.path(self.paths.attempt(self._job), self._launch), record)

    def verdict(
        self,
        at: float,
        reason: str,
        saved: int | None = None,
        cause: str = "",
        restart: bool = True,
    ) -> None:
        AttemptVerdict(
            reason,
            self._iteration,
            saved,
            0,
            "",
            restart=restart,
            cause=cause,
            job_id=self._job,
            time=BEGIN + at,
        ).write(self.paths.attempt(self._job))
