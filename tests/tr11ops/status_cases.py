"""Snapshots and run directories for the tests of observation, detectors and the status screen."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from tr11ops.cluster.base import Job, JobState, Node
from tr11ops.observe.snapshot import Attempt, Checkpoint, Checkpoints, RunFacts, Snapshot, Step
from tr11ops.runcard.exit_duration import ExitPlan
from tr11ops.runcard.watching import AlertsSection, WatchSection
from tr11ops.rundir import cron_records as periodic
from trainer.contract.attempt import EndMarker, Heartbeat
from trainer.contract.compute_record import ComputeTimes
from trainer.contract.documents import document
from trainer.contract.files import write_json
from trainer.contract.manifest import FileEntry, Manifest, file_digest
from trainer.contract.metrics_record import MeasuredStep, StepRecord
from trainer.contract.paths import RunPaths

NOW = 1_651_406_400.0  # 2022-05-01 12:00:00 UTC
HOUR = 3600.0
DAY = 86400.0


def record(iteration: int = 31219, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "iteration": iteration,
        "total_iterations": 115311,
        "consumed_samples": 2048 * iteration,
        "consumed_tokens": 2048 * 2048 * iteration,
        "seconds_per_iteration": 105.0,
        "learning_rate": 5.7e-5,
        "global_batch_size": 2048,
        "lm_loss": 2.3,
        "grad_norm": 0.17,
        "samples_per_second": 19.5,
        "tflops": 149.5,
    }
    return StepRecord(**{**values, **changes})


@functools.cache  # they cannot be changed, and most snapshots have the same
def steps(
    count: int = 60, last: int = 31219, job_id: str = "1007", age: float = 30.0, pace: float = 105.0
) -> tuple[Step, ...]:
    return tuple(
        Step(
            record(
                last - back,
                lm_loss=2.3 + 0.004 * back + 0.02 * (back % 3),
                seconds_per_iteration=pace,
            ),
            time=NOW - age - back * pace,
            job_id=job_id,
        )
        for back in reversed(range(count))
    )


def told_little(given: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same steps of a trainer that tells their numbers and times, and a loss now and then."""
    none = dict.fromkeys(
        ("total_iterations", "consumed_samples", "consumed_tokens", "global_batch_size")
    )
    nan = dict.fromkeys(
        ("seconds_per_iteration", "learning_rate", "samples_per_second", "tflops"), math.nan
    )
    return tuple(
        replace(
            step,
            record=MeasuredStep(
                **none,
                **nan,
                iteration=step.record.iteration,
                lm_loss=None if index % 5 else step.record.lm_loss,
                grad_norm=None,
            ),
        )
        for index, step in enumerate(given)
    )


def running(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "job_id": "1000_7",
        "raw_id": "1007",
        "array_id": "1000",
        "task_id": 7,
        "name": "tr11-176B-ml",
        "user": "ana",
        "state": JobState.RUNNING,
        "nodes": tuple(f"n{number:02d}" for number in range(1, 49)),
        "node_count": 48,
        "submit_time": NOW - 9 * DAY,
        "start_time": NOW - 12 * HOUR,
        "time_limit_seconds": 360_000,
    }
    return Job(**{**values, **changes})


def pending(tasks: tuple[int, ...] = (8, 9, 10), **changes: Any) -> Job:
    shown = (
        f"1000_[{tasks[0]}-{tasks[-1]}%1]"
        if len(tasks) > 1
        else f"1000_{tasks[0]}"
        if tasks
        else "1000"
    )
    values: dict[str, Any] = {
        "job_id": shown,
        "raw_id": "1000",
        "array_id": "1000",
        "task_id": None,
        "name": "tr11-176B-ml",
        "user": "ana",
        "state": JobState.PENDING,
        "reason": "JobArrayTaskLimit",
        "node_count": 48,
        "pending_tasks": tasks,
        "submit_time": NOW - 9 * DAY,
        "time_limit_seconds": 360_000,
    }
    return Job(**{**values, **changes})


def beats(
    age: float = 20.0,
    phase: str = "training",
    iteration: int = 31219,
    job_id: str = "1007",
    ranks: int = 4,
) -> tuple[Heartbeat, ...]:
    return tuple(
        Heartbeat(rank, f"n{rank + 1:02d}", 100 + rank, phase, iteration, NOW - age - rank, job_id)
        for rank in range(ranks)
    )


def ended(
    job_id: str = "1006", age: float = 12.1 * HOUR, reason: str = "exit-duration", **changes: Any
) -> Attempt:
    values: dict[str, Any] = {
        "reason": reason,
        "iteration": 30800,
        "checkpoint_step": 30800,
        "restart": True,
        "message": "",
        "time": NOW - age,
        "host": "n01",
        "job_id": job_id,
    }
    marker = EndMarker(**{**values, **changes})
    return Attempt(job_id, marker.time, marker, label=f"1000_{int(job_id) - 1000}")


def wordless(job_id: str = "1006", age: float = HOUR, failure: str = "") -> Attempt:
    return Attempt(job_id, NOW - age, None, label=f"1000_{int(job_id) - 1000}", failure=failure)


def checkpoints(step: int = 31200, age: float = 2000.0, **changes: Any) -> Checkpoints:
    newest = Checkpoint(step, True, NOW - age, 2_463_000_000_000, "sizes")
    values: dict[str, Any] = {
        "steps": (step - 200, step - 100, step),
        "latest": step,
        "examined": (newest,),
    }
    return Checkpoints(**{**values, **changes})


def cron_job(name: str = "pulse", **changes: Any) -> periodic.PeriodicJobState:
    values: dict[str, Any] = {
        "name": name, "way": "daemon", "host": "login1", "started": NOW - 600, "ended": NOW - 590, "exit_code": 0,
        "message": "", "interval_seconds": HOUR, "runs": 9, "failures_in_a_row": 0, "next_due": NOW + 3000,
    }  # fmt: skip
    return periodic.PeriodicJobState(**{**values, **changes})


def facts_with(facts: RunFacts, **changes: Any) -> RunFacts:
    """The facts with others in them; what is worked out of a card may be stated instead."""
    fields = {name: changes.pop(name) for name in facts.__struct_fields__ if name in changes}
    changed = replace(facts, **fields)
    vars(changed).update(vars(facts) | changes)
    return changed


def snapshot(**changes: Any) -> Snapshot:
    """A healthy, watched moment of a large run; each test changes what it is about."""
    facts = RunFacts(
        name="tr11-176B-ml",
        variant="main",
        directory=Path("/scratch/tr11"),
        kill_switch=Path("/scratch/tr11/kill-switch"),
        nodes=48,
        total_iterations=115311,
        checkpoint_interval=100,
        watch=WatchSection(act=True, resubmissions_per_day=0),
        alerts=AlertsSection(recipients=["ann@example.org"]),
    )
    facts = facts_with(facts, exit_plan=ExitPlan(5990.0), start_of_watchdog="cron install")
    values: dict[str, Any] = {
        "time": NOW,
        "run": facts,
        "scheduler": "slurm",
        "jobs": (running(), pending()),
        "nodes": tuple(Node(f"n{number:02d}", frozenset({"allocated"})) for number in range(1, 49)),
        "steps": steps(),
        "heartbeats": beats(),
        "attempts": (Attempt("1007", NOW - 12 * HOUR, None, "1000_7"), ended()),
        "checkpoints": checkpoints(),
        "kill_switch": None,
        "exclusions": (),
        "submissions": (),
    }
    return changed(Snapshot(**values), **{"periodic_jobs": (cron_job(),), **changes})


def without_slow_node(own_steps: int) -> Snapshot:
    """The last task of the queue has so many steps of its own, each of 40 s, on other nodes than the
    attempt before it, which had a slow one.
    """
    slow = steps(job_id="1006", age=400.0)
    fast = tuple(
        Step(record(31219 + index, seconds_per_iteration=40.0), NOW, "1007")
        for index in range(1, own_steps + 1)
    )
    job = running(start_time=NOW - 60.0)
    before = replace(ended("1006", age=300.0), nodes=("n60", *job.nodes[1:]))
    now = Attempt("1007", NOW - 60.0, None, "1000_7", nodes=job.nodes)
    return snapshot(jobs=(job,), steps=slow + fast, attempts=(now, before))


def slowed(**changes: Any) -> Snapshot:
    """It trains, and a rank of n02 computes three times as long as its peers on n01, n03 and n04."""
    times = tuple(
        ComputeTimes(
            rank, f"n{rank + 1:02d}", 1, NOW, 31219, 10, {"forward": seconds}, seconds, 0, 0
        )
        for rank, seconds in enumerate((1.0, 3.0, 1.0, 1.0))
    )
    spare = tuple(Node(f"n{number:02d}", frozenset({"allocated"})) for number in range(1, 61))
    return snapshot(**{"compute_times": times, "nodes": spare, **changes})


def changed(given: Snapshot, **changes: Any) -> Snapshot:
    """The snapshot with other values: of itself and of its parts, by name (`phases`, or as needs
    say, `training.phases`).
    """
    changes = {
        name.removeprefix("training.").removeprefix("operation."): value
        for name, value in changes.items()
    }
    parts = {}
    for name in ("training", "operation"):
        part = getattr(given, name)
        own = {key: changes.pop(key) for key in part.__struct_fields__ if key in changes}
        parts[name] = replace(part, **own)
    return replace(given, **parts, **changes)


def idle(**changes: Any) -> Snapshot:
    """The same run with nothing running and nothing queued, a day after its last attempt."""
    values: dict[str, Any] = {
        "jobs": (),
        "steps": steps(age=DAY),
        "heartbeats": beats(age=DAY, phase="ended"),
        "attempts": (ended("1007", age=DAY),),
    }
    return snapshot(**{**values, **changes})


def with_facts(given: Snapshot, **changes: Any) -> Snapshot:
    return replace(given, run=facts_with(given.run, **changes))


def save_checkpoint(paths: RunPaths, step: int, created: float, latest: bool = True) -> Path:
    """A small but true checkpoint folder: files, manifest, `latest`."""
    folder = paths.checkpoint(step)
    (folder / "weights").mkdir(parents=True)
    content = folder / "weights" / "part.bin"
    content.write_bytes(bytes(range(256)) * 4)
    entries = [FileEntry("weights/part.bin", 1024, file_digest(content))]
    (folder / "optimizer").mkdir()
    for name in ("optimizer/part.bin", "cursor.json"):
        (folder / name).touch()
        entries.append(FileEntry(name, 0, file_digest(folder / name)))
    Manifest(step, 8 * step, 1024 * step, tuple(entries), {"tensor": 1}, {}, "hash", created).write(
        folder
    )
    if latest:
        paths.latest.write_text(f"global_step{step}\n")
    return folder


def save_slow_attempt(paths: RunPaths, marker: EndMarker) -> None:
    """An attempt that has ended, in which n2 computed three times as long as its peers."""
    save_marker(paths, marker)
    for rank, seconds in enumerate((1.0, 3.0, 1.0, 1.0)):
        times = ComputeTimes(
            rank, f"n{rank + 1}", 1, 1.0, 20, 10, {"forward": seconds}, seconds, 0, 0
        )
        path = paths.compute(marker.job_id, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document(times))


def save_marker(paths: RunPaths, marker: EndMarker) -> None:
    write_json(paths.end_marker(marker.job_id), to_builtins(marker))
