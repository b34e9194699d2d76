"""One small rehearsal in a folder on a twin: launched by tr11's commands, seen through its files
and Slurm.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.launch.run_inputs import write_dataset
from tests.twin.rehearsal_inputs import CARD, attempts_of, steps_of
from tests.waiting import Found, end_of_file, until
from tr11ops.cli.main import execute
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.launch.rehearse import card_text
from tr11ops.runcard.card import load_card
from tr11ops.rundir.paths import RunDirectory, new_tag
from tr11ops.twin.faults import heal
from tr11ops.twin.twin import Twin


class SmallRun:
    """A run of the card of 3 nodes, one of them spare or more, in the current folder, on the twin
    that the environment names.
    """

    def __init__(self, folder: Path, twin: Twin, *changes: str) -> None:
        self.folder, self.twin, self.slurm = folder, twin, SlurmScheduler(twin.environment)
        self.write_card(*changes)
        self.array = ""

    def write_card(self, *changes: str) -> None:
        """The card with changes as in `--set`."""
        path = self.folder / "tr11.toml"
        path.write_text(CARD)
        self.card = load_card(path, changes, {}, directory=self.folder)
        path.write_text(card_text(self.card, "a test"))
        self.paths, self.directory = (
            self.card.paths,
            RunDirectory(self.card.paths, self.card.kill_switch),
        )

    def launch(self, tasks: int, *changes: str) -> None:
        write_dataset(self.folder / "data" / "none")
        self.write_card(*changes)
        assert execute(["launch", "--array", f"1-{tasks}", "--scheduler", "slurm"]) == 0
        self.array = next(job.array_id or job.raw_id for job in self.living())

    def take_nodes(self, count: int) -> str:
        """Have a job of someone else's run on so many nodes; its number. It has them for itself:
        what asks for one processor of each would start beside any other.
        """
        script, alone = "#!/bin/bash\nsleep 600\n", (("exclusive", ""),)
        request = BatchRequest(
            script, "other", count, 1200, "/dev/null", self.folder, options=alone
        )
        number = self.slurm.submit(request)
        self.wait(
            lambda: (job := self.slurm.job(number)) is not None and job.state is JobState.RUNNING,
            "the other job",
        )
        return number

    # ------------------------------------------------------------------ what is seen
    def jobs(self) -> list[Job]:
        """All its jobs, also those that are over."""
        return [job for job in self.slurm.jobs() if job.name == self.card.run.name]

    def living(self) -> list[Job]:
        """Its jobs that are not over."""
        return [job for job in self.jobs() if not job.state.is_final]

    def queued(self) -> Job:
        return self._first_in(JobState.PENDING)

    def pending_tasks(self) -> set[int | None]:
        """The tasks of its array that wait, those that went back into the queue among them."""
        waiting = [job for job in self.jobs() if job.state is JobState.PENDING]
        return {task for job in waiting for task in job.pending_tasks or (job.task_id,)}

    def running(self) -> Job:
        return self._first_in(JobState.RUNNING)

    def _first_in(self, state: JobState) -> Job:
        """Of its jobs in this state; it is waited for: from one task of an array to the next there may
        be none.
        """
        return self.wait(
            lambda: next((job for job in self.jobs() if job.state is state), None),
            f"a job that is {state}",
        )

    def attempts(self) -> list[str]:
        """Numbers of the attempts that got as far as a folder, in the order of their starts."""
        return attempts_of(self.paths)

    def launches(self, attempt: str) -> list[dict[str, Any]]:
        return [
            _read(path)
            for path in sorted((self.paths.attempt(attempt) / "launches").glob("*.json"))
        ]

    def verdict(self, attempt: str) -> dict[str, Any]:
        return _read(self.paths.attempt(attempt) / "verdict.json")

    def steps(self) -> list[dict[str, Any]]:
        return steps_of(self.paths)

    def iteration(self, attempt: str = "") -> int:
        """The last step of an attempt, or of all."""
        return max(
            (step["iteration"] for step in self.steps() if attempt in {"", step["job_id"]}),
            default=0,
        )

    # ------------------------------------------------------------------ waiting
    def wait(self, condition: Callable[[], Found | None], what: str) -> Found:
        found = until(condition, what, pause=0.2, context=lambda: end_of_file(self.paths.main_log))
        assert found is not None
        return found

    def wait_for_verdict(self, attempt: str) -> None:
        self.wait(
            (self.paths.attempt(attempt) / "verdict.json").exists, f"the verdict of {attempt}"
        )

    def wait_for_hold(self) -> None:
        """Until what is queued is held and Slurm gives that as the reason: of an array's tasks it
        may give another one first, until the task that ran has left its nodes.
        """
        self.wait(lambda: self.queued().reason.startswith("JobHeld"), "the hold")

    def wait_for_excluded(self, *nodes: str) -> None:
        """Until what is queued excludes these nodes, and no others."""
        self.wait(lambda: set(self.queued().excluded) == set(nodes), "the queue's exclude list")

    def train(self, attempt: int = 0, beyond: int = 5) -> str:
        """Wait until the attempt of that order trains; returns its number."""
        self.wait(lambda: len(self.attempts()) > attempt, f"attempt {attempt}")
        name = self.attempts()[attempt]
        self.wait(lambda: self.iteration(name) > beyond, f"steps of attempt {attempt}")
        return name

    def clear(self) -> None:
        """Cancel everything on the twin, and wait until its nodes are idle."""
        for job in self.slurm.jobs():
            if not job.state.is_final:
                self.slurm.cancel(job.array_id or job.raw_id)
        self.wait(
            lambda: all(job.state.is_final for job in self.slurm.jobs()), "the end of all jobs"
        )


def job_in(slurm: SlurmScheduler, number: str, states: Sequence[JobState], folder: Path) -> Job:
    """The job once it is in one of these states; another end is none to wait for, and fails with what
    the jobs of the folder have said.
    """

    def seen() -> Job | None:
        job = slurm.job(number)
        if job is None or job.state in states:
            return job
        assert not job.state.is_final, (job, [end_of_file(log) for log in folder.glob("*.out")])
        return None

    return until(seen, f"{number}: {states}", pause=0.2, context=slurm.jobs)


def begin_again(job_id: str, environment: Mapping[str, str]) -> None:
    """Have a job that has gone back into the queue begin at once.

    In a later second than the one it was ended in: until then its nodes refuse it as "already
    killed" (seen in 22.05), and Slurm counts that as its end.
    """
    subprocess.run(
        ["scontrol", "update", f"JobId={job_id}", "StartTime=now+1"],
        env=environment,
        check=True,
        timeout=60,
    )


def recorded_comment(directory: RunDirectory) -> str:
    """What a job is given that `tr11 launch` queues from here: its submission's folder is there
    before it.
    """
    tag = new_tag()
    directory.submission(tag).folder.mkdir(parents=True)
    return directory.comment(tag)


@contextmanager
def on_stage(run: SmallRun) -> Iterator[SmallRun]:
    """The run for one test: then the twin is whole again, and nothing is queued."""
    yield run
    assert not [healing.error for healing in heal(run.twin) if healing.error]
    run.clear()
    run.wait(lambda: all(node.states == {"idle"} for node in run.slurm.nodes()), "an idle twin")


def enter(twin: Twin, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Commands that are typed from now on are typed in this folder, and reach the twin."""
    for name, value in twin.environment.items():
        patch.setenv(name, value)
    patch.chdir(folder)


def _read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value
