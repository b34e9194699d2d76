"""`make demo`: the whole life of a training on this machine, with the commands that a person would type.

Data is prepared, an array of three tasks is launched; task 1 leaves by its exit duration, task 2 resumes and is
stopped by the kill switch, task 3 is held until the run may go on, and does. Then the whole is reported as a page,
every claim is checked against the files of the run, and the phases are timed. Exit status 0 when all of it happened.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tr11ops.cluster.select import choose_scheduler
from tr11ops.rundir import RunDirectory
from trainer.contract import EndMarker, RunPaths

TR11 = str(Path(sys.executable).parent / "tr11")
console = Console(highlight=False)


class DemoFailed(Exception):
    """Something that the demo promises did not happen; the text says what."""


@dataclass
class Demo:
    """One run of the demo below `directory`, which must be the run directory that the card names."""

    card: str
    directory: Path
    scheduler: str
    deadline_seconds: float
    phases: list[tuple[str, float]] = field(default_factory=list)
    checks: list[tuple[bool, str]] = field(default_factory=list)

    # -------------------------------------------------------------- phases
    def run(self) -> None:
        self._phase("corpus, tokenizer, index", self._prepare)
        began = time.monotonic()
        self._tr11("launch", "--array", "1-3", "--run", self.card, "--scheduler", self.scheduler)
        self._phase("task 1: train, leave by exit duration", lambda: self._wait_for_end(1))
        first = self._ends()[0]
        self._phase("task 2: resume, ten iterations", lambda: self._wait_for_iteration(2, first.iteration + 10))
        self._tr11("status", "--run", self.card)
        self._phase("kill switch: save and stop, hold what waits", lambda: self._stop("a look at the loss"))
        second = self._ends()[1]
        self._tr11("status", "--run", self.card)
        self._tr11("resume", "--run", self.card, "--yes")
        self._phase("task 3: goes on, five iterations", lambda: self._wait_for_iteration(3, second.iteration + 5))
        self._phase("kill switch once more", lambda: self._stop("the demo is over"))
        self.phases.append(("launch to end", time.monotonic() - began))
        self._tr11("goodput", "--run", self.card)
        self._tr11("report", "--run", self.card, "-o", str(self.directory / "report.html"))
        self._judge()

    def _prepare(self) -> None:
        data = self.directory / "data"
        self._tr11("data", "corpus", "--out", str(data / "corpus.jsonl"))
        self._tr11(
            "data",
            "tokenizer",
            "--corpus",
            str(data / "corpus.jsonl"),
            "--vocab-size",
            "4096",
            "--out",
            str(data / "tokenizer"),
        )
        self._tr11(
            "data", "preprocess", "--input", str(data / "corpus.jsonl"), "--tokenizer", str(data / "tokenizer"),
            "--output-prefix", str(data / "corpus"), "--workers", "2",
        )  # fmt: skip

    def _wait_for_end(self, count: int) -> None:
        self._watch(lambda: len(self._ends()) >= count)

    def _stop(self, reason: str) -> None:
        self._tr11("kill", "--run", self.card, "--yes", "--reason", reason, "--wait")

    def _wait_for_iteration(self, task: int, iteration: int) -> None:
        def reached() -> bool:
            if len(self._ends()) >= task:
                raise DemoFailed(
                    f"task {task} was over before iteration {iteration}: this machine is busy, or slower than two cores"
                )
            return self._last_iteration() >= iteration

        self._watch(reached)

    def _watch(self, done: Callable[[], bool]) -> None:
        """Show the training's progress until `done()`; raises DemoFailed at the deadline or when an attempt failed."""
        bar = Progress(
            TextColumn("  {task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console
        )
        until = time.monotonic() + self.deadline_seconds
        with bar:
            shown = bar.add_task("waiting for the workers", total=400)
            while not done():
                steps = self._steps()
                if steps:
                    last = steps[-1]
                    pace = f"{last['seconds_per_iteration']:.2f} s/iteration"
                    text = f"iteration {last['iteration']:4d}  loss {last['lm_loss']:.3f}  {pace}"
                    bar.update(shown, completed=last["iteration"], total=last["total_iterations"], description=text)
                bad = [end for end in self._ends() if end.reason in {"error", "refused"}]
                if bad or self._failed_attempts():
                    raise DemoFailed(f"an attempt failed: {bad[0].message if bad else self._failed_attempts()[0]}")
                if time.monotonic() > until:
                    raise DemoFailed(f"nothing within {self.deadline_seconds:.0f} s; read {self._main_log()}")
                time.sleep(0.5)

    # -------------------------------------------------------------- what the files of the run say
    def _logs(self) -> Path:
        return self.directory / "demo-logs" / "logs" / "main"

    def _main_log(self) -> Path:
        return self._logs() / "main_log.txt"

    def _records(self) -> list[dict[str, Any]]:
        path = self._logs() / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _steps(self) -> list[dict[str, Any]]:
        return [record for record in self._records() if record["kind"] == "step"]

    def _last_iteration(self) -> int:
        steps = self._steps()
        return int(steps[-1]["iteration"]) if steps else 0

    def _ends(self) -> list[EndMarker]:
        found = [EndMarker.read(path) for path in (self.directory / "state" / "attempts").glob("*/end.json")]
        return sorted((end for end in found if end is not None), key=lambda end: end.time)

    def _failed_attempts(self) -> list[str]:
        verdicts = [
            json.loads(path.read_text()) for path in (self.directory / "state" / "attempts").glob("*/verdict.json")
        ]
        return [str(verdict["message"]) for verdict in verdicts if verdict["exit_status"] != 0]

    # -------------------------------------------------------------- judgement
    def _judge(self) -> None:
        ends, steps = self._ends(), self._steps()
        first_job, second_job = ends[0].job_id, ends[1].job_id
        first = [step for step in steps if step["job_id"] == first_job]
        second = [step for step in steps if step["job_id"] == second_job]
        vocabulary = 4096
        start, end = first[0]["lm_loss"], sum(step["lm_loss"] for step in steps[-5:]) / 5
        self._check(
            abs(start - math.log(vocabulary)) < 0.5,
            f"the loss starts at ln({vocabulary}) = {math.log(vocabulary):.2f}: {start:.2f}",
        )
        self._check(end < 6, f"the loss ends below 6: {end:.2f}")
        self._check(
            ends[0].reason == "exit-duration" and ends[0].checkpoint_step == ends[0].iteration,
            f"task 1 left by its exit duration with checkpoint {ends[0].checkpoint_step}",
        )
        self._check(
            second[0]["iteration"] == ends[0].iteration + 1, f"task 2 went on at iteration {second[0]['iteration']}"
        )
        jump = second[0]["lm_loss"] - sum(step["lm_loss"] for step in first[-10:]) / 10
        self._check(abs(jump) < 0.5, f"the loss went on where it was (change {jump:+.2f})")
        self._check(
            ends[1].reason == "kill-switch" and ends[1].checkpoint_step == ends[1].iteration,
            f"the kill switch stopped task 2 with checkpoint {ends[1].checkpoint_step}",
        )
        third = [step for step in steps if step["job_id"] == ends[2].job_id]
        self._check(
            third[0]["time"] > ends[1].time and third[0]["iteration"] == ends[1].iteration + 1,
            f"task 3 waited until the run might go on, and went on at iteration {third[0]['iteration']}",
        )
        self._check((self.directory / "report.html").stat().st_size > 1_000_000, "the run is reported as one page")

    def _check(self, passed: bool, text: str) -> None:
        self.checks.append((passed, text))

    # -------------------------------------------------------------- showing
    def _phase(self, name: str, action: Callable[[], object]) -> None:
        console.rule(f"[bold]{name}", align="left")
        began = time.monotonic()
        action()
        self.phases.append((name, time.monotonic() - began))

    def _tr11(self, *arguments: str) -> None:
        console.print(f"[bold cyan]$ tr11 {' '.join(arguments)}")
        done = subprocess.run([TR11, *arguments], check=False)
        if done.returncode != 0:
            raise DemoFailed(f"`tr11 {arguments[0]}` ended with status {done.returncode}")

    def summary(self) -> bool:
        console.rule("[bold]what happened", align="left")
        for passed, text in self.checks:
            console.print(f"  [green]ok[/]    {text}" if passed else f"  [red]FALSE[/] {text}")
        table = Table("phase", "seconds", box=None, pad_edge=False)
        for name, seconds in self.phases:
            table.add_row(name, f"{seconds:7.1f}")
        console.print(table)
        return bool(self.checks) and all(passed for passed, _ in self.checks)


def end_earlier(directory: Path, kind: Literal["local", "slurm"]) -> None:
    """Cancel what a demo in this folder that was interrupted has left in the queue, and wait until it is gone."""
    scheduler, mark = choose_scheduler(kind), RunDirectory(RunPaths(directory, "demo", "main"), Path()).mark
    while left := [job for job in scheduler.jobs(name="demo") if mark in job.comment and not job.state.is_final]:
        for number in {job.array_id or job.raw_id for job in left}:
            scheduler.cancel(number)
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--card", default="slurm/demo.toml")
    parser.add_argument("--scheduler", default="local", choices=["local", "slurm"])
    parser.add_argument("--deadline", type=float, default=600, help="seconds that one phase may take")
    options = parser.parse_args()
    directory = Path("demo-run")
    # A demo starts from nothing but its data; only what the demo itself makes is removed.
    end_earlier(directory, options.scheduler)
    for name in ("checkpoints", "demo-logs", "state", "journal", "kill-switch"):
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    demo = Demo(options.card, directory, options.scheduler, options.deadline)
    try:
        demo.run()
    except DemoFailed as error:
        console.print(f"[red]the demo failed:[/] {error}")
        return 1
    return 0 if demo.summary() else 1


if __name__ == "__main__":
    sys.exit(main())
