"""The recorded run in other states: what its files, its scheduler and the clock would say there.

Files alone are changed, in the formats that `tests/pins` keeps; no process is started. A job that
runs is one whose supervisor's lock is held: the test holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tests.pins.commands import WHEN
from tests.pins.recording import unpacked

# Eight characters end it whatever `mkdtemp` draws, so that no line breaks at another place on
# another machine.
PARENT, PREFIX, NAMED = Path("/tmp"), "tr11-", "/tmp/tr11-recorded"
# iteration 38 of job 5, task 1 of array 4
LAST_STEP = datetime(2026, 11, 22, 21, 21, 31, tzinfo=UTC)
SUBMISSION, JOB = 4, "5"


@dataclass
class Place:
    """A folder with the recorded run in one state, and the time at which it is looked at."""

    folder: Path
    when: datetime = WHEN
    locks: list[int] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def state(self) -> Path:
        return self.run / "state"

    @property
    def attempt(self) -> Path:
        return self.state / "attempts" / JOB

    def change(self, path: Path, change: Callable[[Any], None]) -> None:
        """Change a JSON file in place; its time stays."""
        value = json.loads(path.read_text())
        change(value)
        self.write(path, json.dumps(value))

    def change_queue(
        self, task: dict[str, Any], waiting: tuple[int, ...] = (), held: bool = False
    ) -> None:
        """What the scheduler says of the last array: its task that has started, and those that
        wait.
        """

        def change(submission: dict[str, Any]) -> None:
            submission["tasks"][0].update(task)
            submission["dropped"] = []
            submission["reason"] = "JobHeldUser" if held else "JobArrayTaskLimit"
            submission["waiting"] = (
                [{"task_ids": list(waiting), "held": held, "excluded": ["local-node3"]}]
                if waiting
                else []
            )

        self.change(self.folder / "scheduler" / "jobs" / str(SUBMISSION) / "state.json", change)
        if waiting or task.get("state") == "RUNNING":
            (self.folder / "scheduler" / "active" / str(SUBMISSION)).touch()
            lock = os.open(
                self.folder / "scheduler" / "jobs" / str(SUBMISSION) / "supervisor.lock", os.O_RDWR
            )
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locks.append(lock)

    def beat(self, phase: str, when: datetime) -> None:
        """The last heartbeats of the four workers."""
        for rank in range(4):
            # A process that no machine has: numbers end at 2**22.
            beat = {
                "phase": phase,
                "time": when.timestamp() - 0.1 * rank,
                "request": 0,
                "pid": 2**22 + 1 + rank,
            }
            self.change(
                self.state / "heartbeat" / f"{rank}.json",
                lambda value, beat=beat: value.update(beat),
            )

    def forget_the_stop(self) -> None:
        """As before the kill switch: neither it nor what came of it."""
        (self.run / "kill-switch").unlink()
        (self.state / "requests" / "holds.json").unlink()
        for name in ("end.json", "verdict.json", "launches/1.json"):
            (self.attempt / name).unlink()
        shutil.rmtree(self.state / "alerts")
        phases = self.attempt / "phases.jsonl"
        self.write(phases, "".join(phases.read_text().splitlines(keepends=True)[:-3]))
        for path in (
            *self.run.rglob("*.log"),
            *self.run.rglob("*.out"),
            *self.run.rglob("main_log.txt"),
        ):
            before, stop, _ = path.read_text().partition("[Detected kill switch")
            if stop:
                self.write(path, before.removesuffix("[default0]:"))

    def write(self, path: Path, text: str) -> None:
        """Replace a file's text; its time stays."""
        times = path.stat()
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def fill_checkpoints(self) -> None:
        """The tensors that the recording leaves out: those of the one that it has, else zeros of
        their length.
        """
        kept = self.run / "checkpoints" / "main" / "global_step18"
        for manifest in self.folder.glob("*/checkpoints/main/*/manifest.json"):
            for entry in json.loads(manifest.read_text())["files"]:
                path, like = manifest.parent / entry["path"], kept / entry["path"]
                if not path.exists():
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(
                        like.read_bytes() if like.stat().st_size == entry["bytes"] else b""
                    )
                    os.truncate(path, entry["bytes"])

    def settle(self) -> None:
        """What was changed has the time of the last step; modes are those of a run that its group
        may write.
        """
        last = LAST_STEP.timestamp()
        for path in (self.folder, *self.folder.rglob("*")):
            if not path.is_symlink():
                if path.stat().st_mtime > WHEN.timestamp():
                    os.utime(path, (last, last))
                if self.run in (path, *path.parents):
                    path.chmod(0o2775 if path.is_dir() else 0o664)


RUNNING = {"state": "RUNNING", "end_time": None, "exit_code": None, "reason": ""}


def stopped(place: Place) -> None:
    """As it was recorded: the kill switch is set, nothing runs, nothing is queued."""


def healthy(place: Place) -> None:
    """Four seconds after its last step, with two tasks queued."""
    place.forget_the_stop()
    place.change_queue(RUNNING, waiting=(2, 3))
    place.when = LAST_STEP + timedelta(seconds=4)
    place.beat("training", LAST_STEP + timedelta(seconds=2))


def stalled(place: Place) -> None:
    """No step and no heartbeat for two hours, while the scheduler says that it runs."""
    healthy(place)
    place.change(
        place.folder / "scheduler" / "jobs" / str(SUBMISSION) / "state.json",
        lambda submission: submission["request"].update(time_limit_seconds=36_000),
    )
    place.when = LAST_STEP + timedelta(hours=2)


def down(place: Place) -> None:
    """Its last task failed without an end marker, and nothing is queued."""
    place.forget_the_stop()
    place.beat("training", LAST_STEP)
    place.change_queue({"state": "FAILED", "exit_code": 1})
    log = place.attempt / "workers" / "local-node2" / "rank-3.log"
    place.write(
        log,
        log.read_text()
        + "RuntimeError: NCCL error: unhandled system error, remote process exited\n",
    )


def held(place: Place) -> None:
    """Its task has ended as planned, and its owner holds the next ones."""
    place.forget_the_stop()
    shutil.copy(place.state / "attempts" / "3" / "end.json", place.attempt / "end.json")
    end = {"job_id": JOB, "iteration": 38, "checkpoint_step": 38, "time": LAST_STEP.timestamp()}
    place.change(place.attempt / "end.json", lambda value: value.update(end))
    place.change_queue({"state": "COMPLETED"}, waiting=(2, 3), held=True)


def finished(place: Place) -> None:
    """All of its iterations are trained."""
    held(place)
    card = place.folder / "tr11.toml"
    card.write_text(card.read_text().replace("train_samples = 100_000", "train_samples = 560"))
    place.change(place.attempt / "end.json", lambda value: value.update(reason="finished"))
    place.change_queue({"state": "COMPLETED"})


def damaged(place: Place) -> None:
    """Files of most kinds are torn, empty or something else."""
    for name in (
        "exclusions.json",
        "exclusions.d/00000001.json",
        "heartbeat/2.json",
        "alerts/book.json",
    ):
        path = place.state / name
        path.write_text(path.read_text()[: path.stat().st_size // 2])
    (place.attempt / "end.json").write_text("")
    (place.state / "checkpoints" / "main" / "pins.json").write_text("[]\n")
    (place.run / "checkpoints" / "main" / "global_step38" / "manifest.json").write_text(
        '{"step": "many"}\n'
    )
    place.write(place.run / "kill-switch", "stop\n")
    metrics = place.run / "small-logs" / "logs" / "main" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind": "step", "iteration": 39, "lm_l')
    [journal] = (place.run / "journal").glob("*.jsonl")
    journal.write_text(journal.read_text() + "not JSON\n")


def older(place: Place) -> None:
    """As a tr11 left it that knew neither leases nor identities, verdicts, compute times and
    answers in heartbeats.
    """
    (place.state / "run.json").unlink()
    for name in ("lease", "acting", "alerts/book.d"):
        shutil.rmtree(place.state / name)
    for attempt in (place.state / "attempts").iterdir():
        shutil.rmtree(attempt / "compute", ignore_errors=True)
        (attempt / "verdict.json").unlink(missing_ok=True)
    for rank in range(4):
        place.change(place.state / "heartbeat" / f"{rank}.json", lambda value: value.pop("request"))
    for tag in (place.state / "submissions").iterdir():
        (tag / "versions.json").unlink()


FOREIGN_SECTIONS = """[trainer]
dialect = "torchtitan"
command = ["train.py"]

"""


def foreign(place: Place) -> None:
    """Healthy, and kept in the name of a trainer that tells the numbers and times of its steps, a loss
    now and then, and nothing else; no card or line says the last step.
    """
    healthy(place)
    card = place.folder / "tr11.toml"
    text = card.read_text()
    operation = text[text.index("[backup]") :]
    card.write_text(text[: text.index("[parallel]")] + FOREIGN_SECTIONS + operation)
    own = ("parallel", "model", "batch", "schedule", "checkpoint", "logging", "evaluation", "data")
    place.change(
        place.attempt / "card.json",
        lambda value: [value.pop(name, None) for name in (*own, "tokenizer", "optimizer")],
    )
    facts = {"foreign": {"dialect": "torchtitan", "name": "step", "layout": "folder"}, "model": {}}
    unknown = {"consumed_samples": 0, "consumed_tokens": 0, "topology": {}}
    for manifest in place.run.glob("checkpoints/main/*/manifest.json"):
        place.change(manifest, lambda value: value.update(facts | unknown))
    [metrics] = place.run.rglob("metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = [
        {name: step[name] for name in ("kind", "iteration", "time", "job_id")}
        | ({"lm_loss": step["lm_loss"]} if step["iteration"] % 5 == 0 else {})
        for step in steps
        if step["kind"] == "step"
    ]
    place.write(metrics, "".join(json.dumps(step) + "\n" for step in kept))
    for path in place.run.rglob("*"):
        if path.suffix == ".log" or path.name == "main_log.txt":
            lines = path.read_text().splitlines(keepends=True)
            place.write(path, "".join(line for line in lines if "iteration " not in line))
    for rank in (1, 3):
        (place.state / "heartbeat" / f"{rank}.json").unlink()
    for rank in (0, 2):
        place.change(
            place.state / "heartbeat" / f"{rank}.json", lambda value: value.update(ranks=2)
        )


STATES = {
    state.__name__: state
    for state in (stopped, healthy, stalled, down, held, finished, damaged, older, foreign)
}


# Cards with faults, in the folder `bad`: what is written in place of what.
BAD_CARDS = {
    "unknown-key": {"[model]\n": "[model]\nhidden_sise = 16\n"},
    "unknown-section": {"[model]\n": "[modell]\n"},
    "wrong-kind": {"nodes = 2": 'nodes = "two"'},
    "wrong-rule": {"tensor = 2": "tensor = 3"},
    "several": {
        "layers = 2": "layers = -1",
        'dtype = "fp32"': 'dtype = "fp33"',
        "interval = 5\n\n[eval": "[eval",
    },
    "missing-key": {'name = "small"\n': ""},
    "undefined-variable": {'directory = "run"': 'directory = "$NOWHERE/run"'},
    "not-toml": {"[run]": "[run"},
}


def _write_bad_cards(place: Place) -> None:
    card = (place.folder / "tr11.toml").read_text()
    (place.folder / "bad").mkdir()
    for name, changes in BAD_CARDS.items():
        text = card
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after, 1)
        (place.folder / "bad" / f"{name}.toml").write_text(text)


@contextlib.contextmanager
def place_in(state: str) -> Iterator[Place]:
    """The recorded run in that state, in a folder whose path is everywhere as long."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
    place = Place(folder)
    try:
        unpacked(folder)
        _own(place)
        _write_bad_cards(place)
        place.fill_checkpoints()
        STATES[state](place)
        place.settle()
        yield place
    finally:
        for lock in place.locks:
            os.close(lock)
        shutil.rmtree(folder)


def _own(place: Place) -> None:
    """The jobs are known as this folder's: their comments name its digest."""
    mark = hashlib.sha256(os.fsencode(os.path.realpath(place.run))).hexdigest()[:12]

    def change(submission: dict[str, Any]) -> None:
        request = submission["request"]
        request["comment"] = request["comment"].partition("@")[0] + f"@{mark}"

    for path in (place.folder / "scheduler" / "jobs").glob("*/state.json"):
        place.change(path, change)
