"""What the job of `tr11 nodes bench` runs: on each of its nodes the measurements, all at once, and
what they said.

Each node has a step of its own, so that one which never answers delays no other; its answer is
appended to a file when it is there, so that what was measured is known although the job dies.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Scheduler
from tr11ops.nodes.bench_outliers import NodeAnswer, is_sample, read_answer
from tr11ops.nodes.check import POLL_SECONDS, EndedJobs, JobSettings, submit_to
from tr11ops.nodes.group_job import START_SECONDS
from trainer.contract.documents import document, record_of_text
from trainer.contract.record import Record

ANSWERS = "answers.jsonl"
END_SECONDS = 10.0  # for a step to end when it is asked to
STEP = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--kill-on-bad-exit=1")
REPEAT = "for turn in {turns}; do sh -c {command} || exit $?; done"


class BenchRequest(Record):
    """What to measure on which nodes. Plain values, for JSON. `folder`: one that all nodes see, for
    the answers.

    `seconds` is for how long a node may take in all, `sample_seconds` of one sample. `disk`: a
    folder of each node to write in, or empty. `command`: what is run `repeats` times in place of
    our own measurements, and prints samples.
    """

    nodes: tuple[str, ...]
    folder: str
    repeats: int = 5
    sample_seconds: float = 0.5
    seconds: float = 300.0
    disk: str = ""
    command: str = ""
    on_slurm: bool = True

    def words(self, rank: int) -> list[str]:
        """The command line of the node of this rank."""
        if self.on_slurm:
            step = [*STEP, f"--nodelist={self.nodes[rank]}"]
        else:
            step = []
        if self.command:
            turns = " ".join(map(str, range(self.repeats)))
            return [
                *step,
                "sh",
                "-c",
                REPEAT.format(turns=turns, command=shlex.quote(self.command)),
            ]
        # of one machine there is no one to talk to
        if self.on_slurm:
            size = len(self.nodes)
        else:
            size = 1
        return [
            *step,
            sys.executable,
            "-m",
            "trainer.debug.node_bench",
            f"--rank={rank}",
            f"--size={size}",
            f"--meet={self.folder}",
            f"--disk={self.disk}",
            f"--repeats={self.repeats}",
            f"--seconds={self.sample_seconds:g}",
        ]


def run_bench(request: Mapping[str, Any]) -> int:
    """Run a BenchRequest (as a mapping) inside the allocation; how many nodes have ended. Raises
    OSError.
    """
    asked = BenchRequest(**{**request, "nodes": tuple(request["nodes"])})
    with ThreadPoolExecutor(len(asked.nodes)) as pool:
        for done in as_completed(
            [pool.submit(measure, asked, rank) for rank in range(len(asked.nodes))]
        ):
            add_answer(Path(asked.folder), done.result())
    return len(asked.nodes)


def measure(asked: BenchRequest, rank: int) -> NodeAnswer:
    """One node's answer; what it had said before it failed, or was given up, counts."""
    node = asked.nodes[rank]
    words = asked.words(rank)
    if asked.on_slurm:
        environment = dict(os.environ)
    else:
        environment = {**os.environ, "SLURMD_NODENAME": node}
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return NodeAnswer(node, why=f"{words[0]}: {error.strerror}")
    late = False
    try:
        text, _ = process.communicate(timeout=asked.seconds)
    except subprocess.TimeoutExpired:
        late = True
        text = _ended(process)
    finally:
        # what a command left behind, or all of it when we are interrupted
        _signal(process, signal.SIGKILL)
    lines = text.splitlines()
    if late:
        return read_answer(node, lines, f"did not end within {asked.seconds:g} s")
    if process.returncode != 0:
        return read_answer(node, lines, f"{_status(process.returncode)}{_last_words(lines)}")
    answer = read_answer(node, lines)
    if answer.samples:
        return answer
    return replace(answer, why=f"it printed no sample{_last_words(lines)}")


def add_answer(folder: Path, answer: NodeAnswer) -> None:
    """Append an answer, in one write. Raises OSError."""
    with (folder / ANSWERS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(document(answer)) + "\n")


def read_answers(folder: Path) -> Iterator[NodeAnswer]:
    """The answers so far; none where the file is not there yet. A line that is half there is left
    for later.
    """
    try:
        text = (folder / ANSWERS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            yield record_of_text(NodeAnswer, line)


def _ended(process: subprocess.Popen[str]) -> str:
    """End a process that runs, and its session; what it had printed. srun ends its step when it is
    asked to.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=END_SECONDS)[0]
    return ""


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _status(code: int) -> str:
    if code > 0:
        return f"exit status {code}"
    return f"ended by signal {-code}"


def _last_words(lines: Sequence[str]) -> str:
    """The program's own last line, or srun's first one."""
    words = [line.strip() for line in lines if line.strip() and not is_sample(line)]
    own = [line for line in words if not line.startswith(("srun: ", "slurmstepd"))][-1:]
    said = own or [line.removeprefix("srun: error: ") for line in words][:1]
    if said:
        return f": {said[0]}"
    return ""


# ---------------------------------------------------------------------------
# Runs `tr11 nodes bench`: one job of submitit's on all nodes at once; or processes here, one after
# the other.

LATE_SECONDS = 30.0  # for late steps to be ended, and for the job to leave
Progress = Callable[[NodeAnswer], None]


class SlurmBench(Record):
    """The measurements as one job that has its nodes to itself. It is cancelled when its time is
    over.
    """

    scheduler: Scheduler
    settings: JobSettings
    request: BenchRequest

    @property
    def minutes(self) -> int:
        """The job's time limit."""
        return math.ceil((self.request.seconds + LATE_SECONDS) / 60)

    @property
    def deadline(self) -> float:
        """Seconds after which the job is given up, in the queue or not."""
        return START_SECONDS + self.request.seconds + LATE_SECONDS

    def __call__(self, progress: Progress) -> tuple[NodeAnswer, ...]:
        """Every node's answer, in the order of the request; `progress` gets each as it comes."""
        nodes = self.request.nodes
        found = dict[str, NodeAnswer]()
        try:
            job = submit_to(
                self.settings, nodes, self.minutes, run_bench, document(self.request), is_alone=True
            )
        except Exception as error:  # a refusal of sbatch comes as submitit's own kind of error
            why = f"no job could be started: {' '.join(str(error).split())}"
            return tuple(NodeAnswer(node, why=why) for node in nodes)
        try:
            why = self._wait(job.job_id, found, progress)
        finally:
            with suppress(SchedulerError):  # it has a short time limit of its own
                self.scheduler.cancel(job.job_id)
        return tuple(found.get(node) or NodeAnswer(node, why=why) for node in nodes)

    def _wait(self, job_id: str, found: dict[str, NodeAnswer], progress: Progress) -> str:
        """Wait for the answers; why those that are missing are."""
        ends = EndedJobs(self.scheduler)
        deadline = time.monotonic() + self.deadline
        while time.monotonic() < deadline:
            for answer in read_answers(Path(self.request.folder)):
                if answer.node not in found:
                    found[answer.node] = answer
                    progress(answer)
            if len(found) == len(self.request.nodes):
                return ""
            if (ended := ends.of(job_id)) is not None:
                return f"the job ended without its answer: {ended}"
            time.sleep(POLL_SECONDS)
        return f"no answer: the job did not start, or not end, within {self.deadline:g} s"


class LocalBench(Record):
    """The measurements as processes of this machine, which plays every node: one at a time, or each
    would slow the other down.
    """

    request: BenchRequest

    def __call__(self, progress: Progress) -> tuple[NodeAnswer, ...]:
        asked = replace(self.request, on_slurm=False)
        answers = []
        for rank in range(len(asked.nodes)):
            answers.append(measure(asked, rank))
            progress(answers[-1])
        return tuple(answers)
