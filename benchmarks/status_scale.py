"""`tr11 status` on a real Slurm with a long queue and large logs: wall time, and how often Slurm is
asked.

    python benchmarks/status_scale.py [--tasks 10000] [--nodes 52] [--gigabytes 2] [--repeat 7] [--json]

A twin of `--nodes` nodes holds one running task and `--tasks` waiting ones, first as one array
record, then as so many records of their own, which is what a queue of single jobs is. Both logs of
the run have `--gigabytes` each. Needs Slurm, and free space for the logs in the temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import to_builtins

from tr11ops.cluster.base import BatchRequest, JobState
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.runcard.card import RunCard, load_card, shipped_folder
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from trainer.contract.attempt import Heartbeat, write_heartbeat
from trainer.contract.metrics_record import StepRecord, format_step
from trainer.contract.record import Record

BUDGET_SECONDS = 0.5
BUDGET_CALLS = 2
COMMAND = (sys.executable, "-c", "from tr11ops.cli.main import run; run()", "status")
PACE = 105.0
BLOCK_STEPS = 2000


class Place(Record):
    """A run on the twin, and what `tr11 status` needs to find both."""

    twin: Twin
    folder: Path
    card: RunCard

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.card.paths, self.card.kill_switch)

    @property
    def environment(self) -> dict[str, str]:
        root = str(Path(__file__).parent.parent)
        return {
            **os.environ,
            **self.twin.environment,
            "PYTHONPATH": root,
            "TR11_RUN": str(card_path()),
            "COLUMNS": "80",
        }


def card_path() -> Path:
    return shipped_folder() / "rehearsal.toml"


def record(iteration: int) -> StepRecord:
    return StepRecord(
        iteration=iteration, total_iterations=115_311, consumed_samples=2048 * iteration,
        consumed_tokens=2048 * 2048 * iteration, seconds_per_iteration=PACE, learning_rate=5.7e-5,
        global_batch_size=2048, lm_loss=2.3, grad_norm=0.17, samples_per_second=19.5, tflops=149.5,
    )  # fmt: skip


def write_logs(place: Place, job_id: str, gigabytes: float) -> None:
    """Both logs, filled with true lines; their ends are the last steps of the running task."""
    paths, now = place.card.paths, time.time()
    paths.logs.mkdir(parents=True, exist_ok=True)
    steps = [
        (now - PACE * (BLOCK_STEPS - number), record(number))
        for number in range(1, BLOCK_STEPS + 1)
    ]
    lines = "".join(format_step(step) + "\n" for _, step in steps)
    objects = "".join(
        json.dumps({"kind": "step", **to_builtins(step), "time": moment, "job_id": job_id}) + "\n"
        for moment, step in steps
    )
    for path, text in ((paths.main_log, lines), (paths.metrics, objects)):
        block = text.encode()
        with path.open("wb") as stream:
            for _ in range(max(1, round(gigabytes * 1e9 / len(block)))):
                stream.write(block)
    for rank in range(384):
        beat = Heartbeat(rank, "node", 100 + rank, "training", BLOCK_STEPS, now, job_id)
        write_heartbeat(paths.heartbeat(rank), beat)


def submit(place: Place, tasks: int) -> tuple[str, str]:
    """An array of one running task and `tasks` waiting ones; returns its number and that of the
    running task.
    """
    directory, tag = place.directory, new_tag()
    directory.root.mkdir(parents=True, exist_ok=True)
    slurm = SlurmScheduler(place.twin.environment)
    array = f"1-{tasks + 1}%1" if tasks < 10_000 else f"0-{tasks}%1"
    job_id = slurm.submit(
        BatchRequest(
            script="#!/bin/bash\nsleep 3600\n", name=place.card.run.name, nodes=min(48, place.twin.plan.nodes),
            time_limit_seconds=7200, output="/dev/null", working_directory=place.folder, array=array,
            comment=directory.comment(tag), partition="gpu_p5",
        )
    )  # fmt: skip
    entry = Submission(
        tag,
        job_id,
        "slurm",
        time.time(),
        "ana",
        "here",
        place.card.run.name,
        place.card.run.variant,
        array,
        48,
        "hash",
    )
    directory.write_submission(entry)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        running = [
            job for job in slurm.jobs(name=place.card.run.name) if job.state is JobState.RUNNING
        ]
        if running:
            return job_id, running[0].raw_id
        time.sleep(0.2)
    raise SystemExit("status_scale: no task started within 120 s")


def split(place: Place, job_id: str, tasks: int) -> int:
    """Make a record of its own of every waiting task; returns how many records the queue has then."""
    environment = {**os.environ, **place.twin.environment}
    command = ["scontrol", "update", f"JobId={job_id}_[2-{tasks}]", "Nice=1"]
    # says that the running task is left out
    subprocess.run(command, env=environment, capture_output=True, check=False)
    return len(SlurmScheduler(place.twin.environment).jobs(name=place.card.run.name))


@contextmanager
def counted(environment: dict[str, str], folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """An environment in which every call of a Slurm command is noted in a file."""
    shims, notes = folder / "shims", folder / "calls"
    shims.mkdir()
    for name in ("squeue", "scontrol", "sinfo", "sacct", "sprio"):
        real = shutil.which(name, path=environment["PATH"])
        if real is not None:
            (shims / name).write_text(f'#!/bin/sh\necho {name} >>"{notes}"\nexec {real} "$@"\n')
            (shims / name).chmod(0o755)
    yield {**environment, "PATH": f"{shims}:{environment['PATH']}"}, notes
    shutil.rmtree(shims)


def run_once(place: Place, environment: dict[str, str]) -> tuple[float, float]:
    """Wall time of one process, and the processor time of it and its children (squeue, scontrol)."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        COMMAND,
        env=environment,
        cwd=place.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if "HEALTHY" not in done.stdout.split("\n", 1)[0]:
        raise SystemExit(
            f"status_scale: not healthy ({done.returncode}):\n{done.stdout}\n{done.stderr}"
        )
    return seconds, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def measure_start(place: Place, repeat: int) -> float:
    """Best wall time of a process that imports only what every command does: what is no part of
    status itself.
    """
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run(
            (sys.executable, "-c", "import typer, rich.console, pydantic"),
            env=place.environment,
            check=True,
            timeout=60,
        )
        times.append(time.perf_counter() - start)
    return min(times)


def measure(place: Place, repeat: int) -> dict[str, float | int]:
    """Wall times of whole processes (after one that warms the caches), and calls of one."""
    run_once(place, place.environment)
    runs = [run_once(place, place.environment) for _ in range(repeat)]
    times, used = [wall for wall, _ in runs], min(processor for _, processor in runs)
    with counted(place.environment, place.folder) as (environment, notes):
        run_once(place, environment)
        calls = notes.read_text().split()
        notes.unlink()
    wall = {"best_seconds": min(times), "median_seconds": statistics.median(times)}
    return {**wall, "processor_seconds": used, "slurm_calls": len(calls)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=52)
    parser.add_argument(
        "--gigabytes", type=float, default=2.0, help="of main_log.txt, and of metrics.jsonl"
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float | int]] = {}
    with tempfile.TemporaryDirectory(prefix="tr11-status-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        plan = TwinPlan(name=f"scale-{os.getpid()}", nodes=arguments.nodes, gpus=8)
        with Twin.up(plan, folder / "twin") as twin:
            card = load_card(card_path(), (), {}, directory=folder)
            place = Place(twin, folder, card)
            job_id, raw_id = submit(place, arguments.tasks)
            write_logs(place, raw_id, arguments.gigabytes)
            start = measure_start(place, arguments.repeat)
            found["one array record"] = measure(place, arguments.repeat)
            records = split(place, job_id, arguments.tasks)
            found[f"{records} records"] = measure(place, arguments.repeat)
    within = all(
        row["best_seconds"] <= BUDGET_SECONDS and row["slurm_calls"] <= BUDGET_CALLS
        for row in found.values()
    )
    if arguments.json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "tasks": arguments.tasks,
                    "start_seconds": start,
                    "within_budget": within,
                    "results": found,
                }
            )
        )
        return
    print(
        f"{arguments.tasks} waiting tasks, {arguments.nodes} nodes, two logs of {arguments.gigabytes:g} GB"
    )
    for label, row in found.items():
        print(
            f"  {label:<18} best {row['best_seconds']:.2f} s, median {row['median_seconds']:.2f} s, "
            f"processor {row['processor_seconds']:.2f} s, {row['slurm_calls']} calls of Slurm"
        )
    print(f"  the libraries' own start: {start:.2f} s (typer, rich, pydantic)")
    print(
        f"  budget             {BUDGET_SECONDS:g} s, {BUDGET_CALLS} calls: {'kept' if within else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
