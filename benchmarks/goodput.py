"""How long the account of a four-month training takes: 115,000 iterations, 60 attempts on 48 + 4
nodes, faults and all.

python benchmarks/goodput.py [--iterations 115000]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from msgspec import to_builtins

from tr11ops.goodput.account import account
from tr11ops.goodput.history import read_history
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord
from tr11ops.rundir.paths import RunDirectory, Submission
from trainer.contract.attempt import EndMarker, PhaseRecord
from trainer.contract.files import write_json
from trainer.contract.metrics_record import StepRecord
from trainer.contract.paths import RunPaths

BEGIN = 1_646_900_000.0
STEP_SECONDS, SAVE_SECONDS, SAVE_EVERY, EVALUATE_EVERY = 88.0, 40.0, 100, 1000
START_SECONDS, LOAD_SECONDS, QUEUE_SECONDS, TASK_SECONDS = 300.0, 60.0, 1800.0, 72_000.0
FAULT_EVERY_TASKS = 4
NODES = tuple(f"jean-zay-iam{number:02d}" for number in range(1, 53))


def write_past(directory: RunDirectory, iterations: int) -> int:
    """The files of such a training; returns the number of its attempts. Times are those of BLOOM's."""
    paths, at, done, attempt = directory.paths, BEGIN, 0, 0
    paths.logs.mkdir(parents=True)
    with paths.metrics.open("w", encoding="utf-8") as metrics:
        while done < iterations:
            attempt += 1
            if attempt % 10 == 1:
                tag = f"20220311-{attempt:06d}-0000000a"
                directory.write_submission(
                    Submission(
                        tag,
                        str(attempt),
                        "slurm",
                        at,
                        "me",
                        "login",
                        "run",
                        "main",
                        "1-10%1",
                        len(NODES),
                        "",
                    )
                )
            at += QUEUE_SECONDS
            job, fails = str(100_000 + attempt), attempt % FAULT_EVERY_TASKS == 0
            folder = paths.attempt(job)
            start, phases = at, list[PhaseRecord]()
            write_json(
                folder / "attempt.json", {"start": start, "nodes": NODES, "kind": "slurm", "submission": tag}
            )  # fmt: skip
            phases.append(PhaseRecord(at + 20, "starting", 0, 1))
            phases.append(PhaseRecord(at + START_SECONDS, "loading", 0, 1))
            at += START_SECONDS + LOAD_SECONDS
            phases.append(PhaseRecord(at, "training", done, 1))
            saved = done
            while done < iterations and at < start + TASK_SECONDS:
                at, done = at + STEP_SECONDS, done + 1
                step = StepRecord(
                    done, iterations, done * 2048, done * 2048 * 2048, STEP_SECONDS, 6e-5, 2048, 2.5, 0.1, 23.0, 150.0
                )  # fmt: skip
                value = {
                    "kind": "step",
                    **to_builtins(step),
                    "device": "A100",
                    "time": at,
                    "job_id": job,
                }
                metrics.write(json.dumps(value) + "\n")
                if done % SAVE_EVERY == 0:
                    phases.append(PhaseRecord(at, "saving", done, 1))
                    at, saved = at + SAVE_SECONDS, done
                    if done % EVALUATE_EVERY == 0:
                        phases.append(PhaseRecord(at, "evaluating", done, 1))
                        at += 60
                    phases.append(PhaseRecord(at, "training", done, 1))
            launch = LaunchRecord(1, NODES[:48], start + 5, at + 130, at + 100 if fails else None)
            if fails:
                done = saved
                launch = LaunchRecord(
                    1, NODES[:48], start + 5, at + 130, at + 100, 1, "node", blamed=(NODES[attempt % 48],)
                )  # fmt: skip
                verdict = AttemptVerdict(
                    "error", done, saved, 1, "a node", job_id=job, time=at + 140
                )
            else:
                phases += [
                    PhaseRecord(at, "saving", done, 1),
                    PhaseRecord(at + SAVE_SECONDS, "ending", done, 1),
                ]
                marker = EndMarker(
                    "exit-duration", done, done, True, "", at + SAVE_SECONDS + 1, NODES[0], job, 1
                )
                write_json(paths.end_marker(job), to_builtins(marker))
                verdict = AttemptVerdict(
                    "exit-duration", done, done, 0, "", job_id=job, time=at + 140
                )
            launch.write(folder)
            verdict.write(folder)
            paths.phases(job).write_text(
                "".join(json.dumps(to_builtins(record)) + "\n" for record in phases)
            )
            at += 140
    return attempt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=115_000)
    iterations = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(
            RunPaths(Path(folder), "run", "main"), Path(folder) / "kill-switch"
        )
        attempts = write_past(directory, iterations)
        size = directory.paths.metrics.stat().st_size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        history = read_history(directory, ())
        read = time.perf_counter() - began
        goodput = account(history, history.attempts[-1].ended + 1)  # type: ignore[union-attr]
        total = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"goodput of {iterations:,} iterations in {attempts} attempts ({size / 1e6:.0f} MB of records)"
    )
    print(
        f"read {read:.2f} s, account {total - read:.2f} s, in all {total:.2f} s, {used / 1024:.0f} MiB of memory"
    )
    useful, held = 100 * (goodput.useful_of_held or 0), goodput.total.held_micros / 3.6e9
    print(f"useful {useful:.1f} % of {held:,.0f} node-hours held")


if __name__ == "__main__":
    main()
