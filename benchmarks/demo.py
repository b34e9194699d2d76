"""`make demo`: the whole life of a training on this machine, with the commands that a person would
type.

Data is prepared, an array is launched; task 1 leaves by its exit duration, task 2 resumes and is
stopped by the kill switch, task 3 is held until the run may go on, and trains until the loss is
below 6. Then the whole is reported as a page, every claim is checked against the files of the run,
and the phases are timed. Exit status 0 when all of it happened.

Nothing that is claimed depends on how fast the machine is: where it is slow, each task gets more
time, and what one task does not reach the next one does. Phases end by iterations; only where none
comes for long is it a failure.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tr11ops.cluster.select import choose_scheduler
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import EndMarker
from trainer.contract.metrics_record import MetricsRecord, records
from trainer.contract.paths import RunPaths

TASKS = "1-9"  # three are enough but on a slow machine
EXIT_MINUTES = (
    1.25  # after which a task leaves, on a machine that needs PREPARE_SECONDS for the data
)
LIMIT_MINUTES = 4.0
PREPARE_SECONDS = 25.0
MOST_SLOWNESS = 3.0
LOSS = 6.0
LOSS_BY = 250  # iterations; some 80 are enough
SHOWN_STEPS = 5  # a loss is their mean
TR11 = str(Path(sys.executable).parent / "tr11")
console = Console(highlight=False)


class DemoFailed(Exception):
    """Something that the demo promises did not happen; the text says what."""


@dataclass
class Demo:
    """One run of the demo below `directory`, which must be the run directory that the card names."""

    card: str
    directory: Path
    scheduler: Literal["local", "slurm"]
    deadline_seconds: float
    phases: list[tuple[str, float]] = field(default_factory=list)
    checks: list[tuple[bool, str]] = field(default_factory=list)
    stopped: int = 1  # which of the attempts' ends the first kill switch brought about

    # -------------------------------------------------------------- phases
    def run(self) -> None:
        self._phase("corpus, tokenizer, index", self._prepare)
        began = time.monotonic()
        self._launch()
        self._phase("task 1: train, leave by exit duration", lambda: self._wait_for_end(1))
        first = self._ends()[0]
        self._phase(
            "task 2: resume, ten iterations", lambda: self._wait_for_iteration(first.iteration + 10)
        )
        self._tr11("status", "--run", self.card)
        self._phase(
            "kill switch: save and stop, hold queued jobs", lambda: self._stop("a look at the loss")
        )
        self.stopped = len(self._ends()) - 1
        self._tr11("status", "--run", self.card)
        self._tr11("resume", "--run", self.card, "--yes")
        self._phase(f"task 3: goes on until the loss is below {LOSS:g}", self._wait_for_loss)
        self._phase("kill switch once more", lambda: self._stop("the demo is over"))
        self.phases.append(("launch to end", time.monotonic() - began))
        end_earlier(self.directory, self.scheduler)  # tasks that were not needed
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

    def _launch(self) -> None:
        """Tasks whose time is right for this machine, as the preparation of the data has shown it
        to be.
        """
        slowness = min(MOST_SLOWNESS, max(1.0, self.phases[0][1] / PREPARE_SECONDS))
        seconds = round(LIMIT_MINUTES * 60 * slowness)
        limit = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        words = ["launch", "--array", TASKS, "--run", self.card, "--scheduler", self.scheduler]
        if slowness > 1:
            words += ["--set", f"run.exit_duration_minutes={EXIT_MINUTES * slowness:.2f}"]
            words += ["--set", f"slurm.time_limit={limit}"]
        self._tr11(*words)

    def _wait_for_iteration(self, iteration: int) -> None:
        """Until a task that goes on has reached the iteration, whichever it is."""
        self._watch(lambda: self._last_iteration() >= iteration and self._trains())

    def _wait_for_loss(self) -> None:
        """Until it has gone on, and its loss is low or too many iterations were not enough:
        `_judge` says which.
        """
        goes_on = self._ends()[self.stopped].iteration + SHOWN_STEPS

        def done() -> bool:
            last = self._last_iteration()
            return last >= goes_on and (loss_of(self._steps()) < LOSS or last >= LOSS_BY)

        self._watch(done)

    def _trains(self) -> bool:
        """Whether the task of the last step has not ended."""
        return self._steps()[-1]["job_id"] not in {end.job_id for end in self._ends()}

    def _watch(self, done: Callable[[], bool]) -> None:
        """Show the training's progress until `done()`; raises DemoFailed when it stands still or an
        attempt failed.
        """
        bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        seen, since = None, time.monotonic()
        with bar:
            shown = bar.add_task("waiting for the workers", total=400)
            while not done():
                steps = self._steps()
                if steps:
                    last = steps[-1]
                    pace = f"{last['seconds_per_iteration']:.2f} s/iteration"
                    text = f"iteration {last['iteration']:4d}  loss {last['lm_loss']:.3f}  {pace}"
                    bar.update(
                        shown,
                        completed=last["iteration"],
                        total=last["total_iterations"],
                        description=text,
                    )
                bad = [end for end in self._ends() if end.reason in {"error", "refused"}]
                if bad or self._failed_attempts():
                    raise DemoFailed(
                        f"an attempt failed: {bad[0].message if bad else self._failed_attempts()[0]}"
                    )
                now = (len(steps), len(self._ends()))
                seen, since = now, since if now == seen else time.monotonic()
                if time.monotonic() - since > self.deadline_seconds:
                    raise DemoFailed(
                        f"nothing for {self.deadline_seconds:.0f} s; read {self._main_log()}"
                    )
                time.sleep(0.5)

    # -------------------------------------------------------------- what the files of the run say
    def _logs(self) -> Path:
        return self.directory / "demo-logs" / "logs" / "main"

    def _main_log(self) -> Path:
        return self._logs() / "main_log.txt"

    def _records(self) -> list[MetricsRecord]:
        return list(records(self._logs() / "metrics.jsonl"))

    def _steps(self) -> list[Mapping[str, Any]]:
        return [record.values for record in self._records() if record.is_step]

    def _last_iteration(self) -> int:
        steps = self._steps()
        return int(steps[-1]["iteration"]) if steps else 0

    def _ends(self) -> list[EndMarker]:
        found = [
            EndMarker.read(path)
            for path in (self.directory / "state" / "attempts").glob("*/end.json")
        ]
        return sorted((end for end in found if end is not None), key=lambda end: end.time)

    def _failed_attempts(self) -> list[str]:
        verdicts = [
            json.loads(path.read_text())
            for path in (self.directory / "state" / "attempts").glob("*/verdict.json")
        ]
        return [str(verdict["message"]) for verdict in verdicts if verdict["exit_status"] != 0]

    # -------------------------------------------------------------- judgement
    def _judge(self) -> None:
        ends, steps = self._ends(), self._steps()
        first_job, second_job = ends[0].job_id, ends[1].job_id
        first = [step for step in steps if step["job_id"] == first_job]
        second = [step for step in steps if step["job_id"] == second_job]
        vocabulary = 4096
        start, lowest = first[0]["lm_loss"], loss_of(steps)
        stop = ends[self.stopped]
        self._check(
            abs(start - math.log(vocabulary)) < 0.5,
            f"the loss starts at ln({vocabulary}) = {math.log(vocabulary):.2f}: {start:.2f}",
        )
        self._check(
            lowest < LOSS,
            f"the loss ends below {LOSS:g}: {lowest:.2f} at iteration {steps[-1]['iteration']}",
        )
        self._check(
            ends[0].reason == "exit-duration" and ends[0].checkpoint_step == ends[0].iteration,
            f"task 1 left by its exit duration with checkpoint {ends[0].checkpoint_step}",
        )
        self._check(
            second[0]["iteration"] == ends[0].iteration + 1,
            f"task 2 went on at iteration {second[0]['iteration']}",
        )
        jump = second[0]["lm_loss"] - loss_of(first)
        self._check(abs(jump) < 0.5, f"the loss went on where it was (change {jump:+.2f})")
        self._check(
            stop.reason == "kill-switch" and stop.checkpoint_step == stop.iteration,
            f"the kill switch stopped task {self.stopped + 1} with checkpoint {stop.checkpoint_step}",
        )
        third = [step for step in steps if step["time"] > stop.time]
        self._check(
            third[0]["iteration"] == stop.iteration + 1,
            f"the next task waited until the run might go on, and went on at iteration {third[0]['iteration']}",
        )
        page = (self.directory / "report.html").read_text(encoding="utf-8")
        drawn = "<svg" in page and page.rstrip().endswith("</html>")
        self._check(drawn and len(page) < 1_500_000, "the run is reported as one page")

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


def loss_of(steps: Sequence[dict[str, Any]]) -> float:
    """The mean loss of the last few steps; infinite before the first."""
    last = [float(step["lm_loss"]) for step in steps[-SHOWN_STEPS:]]
    return sum(last) / len(last) if last else math.inf


def end_earlier(directory: Path, kind: Literal["local", "slurm"]) -> None:
    """Cancel what a demo in this folder that was interrupted has left in the queue, and wait until
    it is gone.
    """
    scheduler, mark = (
        choose_scheduler(kind),
        RunDirectory(RunPaths(directory, "demo", "main"), Path()).mark,
    )
    while left := [
        job for job in scheduler.jobs(name="demo") if mark in job.comment and not job.state.is_final
    ]:
        for number in {job.array_id or job.raw_id for job in left}:
            scheduler.cancel(number)
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--card", default="slurm/demo.toml")
    parser.add_argument("--scheduler", default="local", choices=["local", "slurm"])
    parser.add_argument(
        "--deadline", type=float, default=600, help="seconds without a new iteration"
    )
    options = parser.parse_args()
    directory = Path("demo-run")
    if (
        options.scheduler == "local"
    ):  # this machine plays the card's nodes, and a folder of its own says so
        os.environ.setdefault("TR11_LOCAL_SCHEDULER", str(directory.absolute() / "scheduler"))
        os.environ.setdefault("TR11_LOCAL_NODES", "4")
        folder = os.environ["TR11_LOCAL_SCHEDULER"]
        console.print(
            f"to look on from another terminal, type there first: export TR11_LOCAL_SCHEDULER={folder}"
        )
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
