"""A run that holds the checkpoints of a foreign trainer's folder, for tests: the folder, laid out as several trainers do, and the moment of all looks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.tr11ops.trainers.folders import LATER, WHOLE_ARCHIVE, lay
from tr11ops.dialects.dialect import dialect_named
from tr11ops.rundir.checkpoint_scan import list_rows
from tr11ops.trainers.held import HoldPlace
from tr11ops.trainers.hold import Holder
from tr11ops.trainers.prepare import ResumePoint, prepare
from trainer.contract.manifest import Manifest
from trainer.contract.paths import RunPaths
from trainer.contract.resumable import ResumeNeed


def no_fence() -> None:
    """The lease is held."""


def quiet(line: str) -> None:
    """No one reads it."""


def noon() -> float:
    return LATER


def never(seconds: float) -> None:
    raise AssertionError("nothing is being written: nothing is waited for")


HUGGING_FACE = {
    "trainer_state.json": "{{}}",
    "rng_state_0.pth": WHOLE_ARCHIVE,
    "rng_state_1.pth": WHOLE_ARCHIVE,
    "pytorch_model.bin": "weights of step {step}",
    "optimizer.pt": WHOLE_ARCHIVE,
    "inner/part.bin": "more",
}
FILES: Mapping[str, Mapping[str, str]] = {
    "huggingface": {f"checkpoint-{{step}}/{name}": text for name, text in HUGGING_FACE.items()},
    "megatron": {
        "iter_{step:07d}/.metadata": "m",
        "iter_{step:07d}/__0_0.distcp": "weights of step {step}",
        "latest_checkpointed_iteration.txt": "{step}",
    },
    "lightning": {"epoch=0-step={step}.ckpt": WHOLE_ARCHIVE},
    "nanochat": {
        "model_{step:06d}.pt": WHOLE_ARCHIVE,
        "meta_{step:06d}.json": "{{}}",
        "optim_{step:06d}_rank0.pt": "optimizer of step {step}",
        "optim_{step:06d}_rank1.pt": "x",
    },
}
NAMES = {
    "huggingface": "checkpoint-{step}",
    "megatron": "iter_{step:07d}",
    "lightning": "epoch=0-step={step}.ckpt",
    "nanochat": "model_{step:06d}.pt",
}


TRACKER = "latest_checkpointed_iteration.txt"


class Bench:
    """A run directory, and beside it a trainer's folder with checkpoints of two ranks."""

    def __init__(self, root: Path, dialect: str = "huggingface"):
        rules = dialect_named(dialect).checkpoints
        assert rules is not None
        self.dialect, self.folder = dialect, root / "out"
        self.folder.mkdir()
        self.paths = RunPaths(root / "run", "r", "main")
        told = rules.newest == "told"
        self.place = HoldPlace(dialect, rules, self.folder, self.paths, ranks=2, told=told)
        self.said: list[str] = []

    def save(self, *steps: int) -> None:
        for step in steps:
            files = {
                name.format(step=step): text if text == WHOLE_ARCHIVE else text.format(step=step)
                for name, text in FILES[self.dialect].items()
            }
            lay(self.folder, files)

    def name(self, step: int) -> str:
        return NAMES[self.dialect].format(step=step)

    def hold(self, fence: Callable[[], None] = no_fence, seconds: float = 20.0) -> Holder:
        holder = Holder(self.place, fence, self.said.append, clock=noon)
        holder.start()
        try:
            holder.finish(seconds)
        finally:
            holder.stop()
        return holder

    def prepare(self) -> ResumePoint | None:
        return prepare(self.place, no_fence, self.said.append, clock=noon, pause=never)

    def manifest(self, step: int) -> Manifest:
        found = Manifest.read(self.paths.checkpoint(step))
        assert found is not None
        return found

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that are held and whole."""
        rows = list_rows(self.paths.checkpoints, None, ResumeNeed(trainer="foreign"))
        assert all(row.is_sound for row in rows)
        return [row.step for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def held_file(bench: Bench, step: int, file: str) -> Path:
    return bench.paths.checkpoint(step) / "foreign" / bench.name(step) / file


def write_over(path: Path, text: str, moment: float) -> None:
    """Write into a file as it lies there, so that each link to it holds the new bytes."""
    with path.open("r+") as stream:
        stream.write(text)
    os.utime(path, (moment, moment))


def no_link(*given: object, **named: object) -> None:
    """As between two file systems."""
    raise OSError(errno.EXDEV, "Invalid cross-device link")
