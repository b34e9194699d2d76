"""One run and one archive of each kind, for scenarios in which data could be lost.

`Case.damage` and `Case.drop` do to a copy what a disk or a finger does; `Case.prune` is what a
person types.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from msgspec.structs import replace

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.round_cases import Rounds, flip
from tr11ops.backup.base import ARCHIVE_RETRIES
from tr11ops.backup.restorable import restorable
from tr11ops.backup.restore import restore_checkpoint
from tr11ops.backup.round_values import BackupContext, RoundResult
from tr11ops.base.errors import ArchivePermanentError
from tr11ops.checkpoints.catalogue import Catalogue, Clocks, read_catalogue
from tr11ops.checkpoints.prune import Pruner, PruneResult
from tr11ops.cli.main import execute
from tr11ops.rundir.copies import CopyRecord
from trainer.contract.checkpoint_names import checkpoint_steps
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.record import Record

Kind: TypeAlias = Literal["folder", "tar", "bucket"]
KINDS: tuple[Kind, ...] = ("folder", "tar", "bucket")
_ONLY_STORE = ("backup.full_interval=0", "backup.weights_interval=0")
_ONLY_URL = ("backup.store_interval=0", "backup.full_interval=100", "backup.weights_interval=0")


class Case(Rounds):
    """A run whose every 100th step is copied whole to one archive; prune keeps the newest two."""

    def __init__(self, folder: Path, kind: Kind, bucket: ObjectStore | None, *changes: str) -> None:
        self.kind, self.bucket = kind, bucket
        self.archive = "url" if kind == "bucket" else "store"
        keys = [*(_ONLY_URL if bucket is not None else _ONLY_STORE), "backup.keep_latest=2"]
        if kind == "tar":
            keys.append("backup.store_format=tar")
        if bucket is not None:
            keys.append(f"backup.url={bucket.url}")
            keys += [
                f"backup.options.{name}={json.dumps(value)}"
                for name, value in bucket.options.items()
            ]
        super().__init__(folder, *keys, *changes)
        self.now = time.time()

    def round(self, **changes: object) -> RoundResult:
        """A round of backup at the archive."""
        return self.run(self.archive, logs=False, **changes)  # type: ignore[arg-type]

    def prune(self, **changes: object) -> PruneResult:
        """Prune, agreed to."""
        return Pruner.of(self.card, "ana", **changes).run()  # type: ignore[arg-type]

    def here(self) -> list[int]:
        """Steps of the run directory."""
        return checkpoint_steps(self.checkpoints)

    def kept(self) -> dict[int, str]:
        """Why prune keeps what it keeps."""
        decisions = Pruner.of(self.card, "ana").plan().decisions
        return {decision.step: decision.why for decision in decisions if not decision.goes}

    def catalogue(self) -> Catalogue:
        """What `tr11 checkpoints list` shows."""
        return read_catalogue(self.directory, Clocks(time.time(), time.time()))

    def copy(self, step: int) -> CopyRecord:
        """The record of the step's copy."""
        return next(
            copy for copy in self.copies() if (copy.archive, copy.step) == (self.archive, step)
        )

    # ------------------------------------------------------------------ harm
    def damage(self, step: int, path: str) -> None:
        """One flipped bit in a file of the step's copy."""
        if self.bucket is not None:
            name = self._object(step, path)
            content = self.bucket.content(name)
            self.bucket.replace(name, bytes([content[0] ^ 1]) + content[1:])
        elif self.kind == "tar":
            receipt = json.loads(self.far(step, "").with_suffix(".copy.json").read_text())
            (offset,) = (file["offset"] for file in receipt["files"] if file["path"] == path)
            flip(self.far(step, "").with_suffix(".tar"), offset)
        else:
            flip(self.far(step, path), 0)

    def damage_data(self, unit: str, name: str) -> None:
        """One flipped bit in a file of a data set's copy."""
        path = next(path for path in self._names() if path.endswith(f"data/main/{unit}/{name}"))
        content = self._content(path)
        self._replace(path, bytes([content[0] ^ 1]) + content[1:])

    def drop(self, step: int, path: str) -> None:
        """A file of the step's copy goes; of a tar, all of it."""
        if self.bucket is not None:
            self.bucket.remove(self._object(step, path))
        elif self.kind == "tar":
            self.far(step, "").with_suffix(".tar").unlink()
        else:
            self.far(step, path).unlink()

    def drop_receipt(self, step: int) -> None:
        """The receipt of the step's copy goes."""
        if self.bucket is not None:
            self.bucket.remove(self._object(step, "").rstrip("/") + ".copy.json")
        else:
            self.far(step, "").with_suffix(".copy.json").unlink()

    def spoil_receipt(self, step: int) -> None:
        """The receipt of the step's copy holds none any more."""
        if self.bucket is not None:
            self.bucket.replace(self._object(step, "").rstrip("/") + ".copy.json", b"{")
        else:
            self.far(step, "").with_suffix(".copy.json").write_text("{")

    def forget_ids(self) -> None:
        """As an older tr11 left the archive: no id in its marker, nor in its receipts."""
        for name in self._names():
            if name.endswith((".copy.json", "tr11-archive.json")):
                value = json.loads(self._content(name))
                value.pop("id", None)
                value.pop("run_id", None)
                self._replace(name, json.dumps(value).encode())
            elif name.endswith("tr11-archive-id.json"):
                self._replace(name, b"{}")

    def _names(self) -> list[str]:
        if self.bucket is not None:
            return list(self.bucket.objects())
        return [
            path.relative_to(self.store).as_posix()
            for path in self.store.rglob("*")
            if path.is_file()
        ]

    def _content(self, name: str) -> bytes:
        return (
            self.bucket.content(name)
            if self.bucket is not None
            else (self.store / name).read_bytes()
        )

    def _replace(self, name: str, content: bytes) -> None:
        if self.bucket is not None:
            self.bucket.replace(name, content)
        else:
            (self.store / name).write_bytes(content)

    def place(self) -> BackupContext:
        """With tries enough for what passes."""
        return replace(
            super().place(), retries=replace(ARCHIVE_RETRIES, tries=4, first_seconds=0.0)
        )

    def restore(self, step: int, into: Path) -> Path:
        """The step's copy, in another folder."""
        archive = self.place().opened(self.archive)
        receipt = restorable(archive, self.card.run.variant, step, run=self.card.run.name).receipt
        return restore_checkpoint(archive, receipt, into, self.place().transfer(self.progress))

    def _object(self, step: int, path: str) -> str:
        return f"tr11-test/checkpoints/main/global_step{step}/{path}"


def copied(case: Case, *steps: int) -> None:
    """Steps that are saved and copied."""
    case.save(*steps)
    done = case.round()
    assert done.exit_code == 0 and [step for step, _ in case.copied(case.archive)] == list(steps), (
        done
    )


def faults_of(folder: Path) -> list[str]:
    manifest = Manifest.read(folder)
    assert manifest is not None
    return manifest_faults(folder, manifest, read_digests=True)


def refuse(case: Case, text: str) -> None:
    """Reading files of such a name is refused from now on, and nothing else is."""

    def on(what: str, path: str, position: int) -> None:
        if what == "read" and text in path:
            raise ArchivePermanentError(f"{path}: Permission denied")

    case.odd[case.archive] = {"on": on}


def second(case: Case, memory: Path) -> Case:
    """Another run directory with the same card: the same name, the same archive."""
    other = Case(memory / "other", case.kind, case.bucket)
    keys = {"store": case.card.backup.store, "url": case.card.backup.url}
    other.card = other.card.model_copy(update={"backup": other.card.backup.model_copy(update=keys)})
    other.store = case.store
    return other


class Answer(Record):
    """What a command printed, refusals too, and its exit code."""

    exit_code: int
    text: str


def invoke(case: Case, line: str) -> Answer:
    """`tr11 backup LINE` as a person types it, or `tr11 checkpoints ...`, on the case's card."""
    is_here = line.startswith("checkpoints ")
    group = "checkpoints" if is_here else "backup"
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        patch.setattr("tr11ops.cli.runner.read_card", lambda *_, **__: case.card)
        code = execute([group, *line.removeprefix("checkpoints ").split()])
    assert "an error of tr11 itself" not in said.getvalue(), said.getvalue()
    return Answer(code, said.getvalue())
