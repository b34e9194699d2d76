"""Two runs of one name and their archives: every deed is done with the real code, every harm by
hand.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.lose_it import Answer, Kind, invoke
from tests.tr11ops.walk.nursery import WalkNursery
from tests.tr11ops.walk.run import Run
from tests.tr11ops.walk.truth import BucketShelf, FolderShelf, Shelf
from tr11ops.backup.round_values import Reading, RoundResult
from tr11ops.base.errors import ArchiveFull, ArchivePermanentError, ArchiveUnavailable, NotPossible
from tr11ops.checkpoints.prune import Pruner
from tr11ops.checkpoints.rollback import carry_out, claimed, plan_rollback, plan_undo
from tr11ops.checkpoints.verify import verify
from tr11ops.rundir.checkpoint_digests import put_on_record
from tr11ops.rundir.checkpoint_pins import pin, unpin
from tr11ops.rundir.claims import Clocks
from tr11ops.rundir.copies import CopyRecord
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name
from trainer.contract.files import write_atomically
from trainer.contract.recovery import read_recovery
from trainer.contract.resumable import model_facts

HOURS = 3600.0
STRAY = "notes.txt"  # a file that a person puts into a checkpoint
FAULTS: dict[str, Callable[[], Exception]] = {
    "away": lambda: ArchiveUnavailable("connection reset"),
    "refused": lambda: ArchivePermanentError("Permission denied"),
    "full": lambda: ArchiveFull("No space left on device"),
}


class World:
    """All there is. Methods are actions or harm; none of them judges."""

    def __init__(
        self, folder: Path, kind: Kind, bucket: ObjectStore | None, nursery: WalkNursery
    ) -> None:
        self.kind, self.bucket, self._nursery = kind, bucket, nursery
        self.shelves: dict[str, Shelf] = {}
        addresses = []
        for name in ("store", "store2"):
            if bucket is not None:
                addresses.append(f"gs://{bucket.bucket}/{name}")
                self.shelves[addresses[-1]] = BucketShelf(bucket, f"{name}/")
            else:
                (folder / name).mkdir()
                addresses.append(str(folder / name))
                self.shelves[addresses[-1]] = FolderShelf(folder / name)
        self.addresses = addresses
        self.key = "backup.url" if kind == "bucket" else "backup.store"
        self.runs = [
            Run(
                number, folder / f"run-{number}", kind, bucket, {self.key: json.dumps(addresses[0])}
            )
            for number in range(2)
        ]
        self.is_away = False
        self._tokens = 0

    def token(self) -> int:
        self._tokens += 1
        return self._tokens

    # ------------------------------------------------------------------ the training
    def train(self, run: Run, token: int, gain: int, optimizer: bool, at: int = 0) -> int | None:
        """One attempt, up to its first save; killed at a change of a file where `at` is not 0. See
        `nursery.train`.
        """
        run.launches += 1
        paths = run.case.directory.paths
        answer = self._nursery.do(
            "train", at, root=str(paths.root), name=paths.name, launch=run.launches, layers=run.layers,
            facts=model_facts(run.case.card), gain=gain * 100, token=token, optimizer=optimizer,
        )  # fmt: skip
        for claim in (paths.state / "lease").glob(
            "*.json"
        ):  # a while passes: a killed trainer is known to be dead
            os.utime(claim, (time.time() - HOURS,) * 2)
        return answer

    # ------------------------------------------------------------------ the operation
    def round(self, run: Run, reading: Reading) -> RoundResult:
        if self.is_away and self.bucket is not None:
            with self.fault(run, "away", "", 0):
                return run.case.round(reading=reading)
        return run.case.round(reading=reading)

    @contextmanager
    def fault(self, run: Run, fault: str, what: str, skip: int) -> Iterator[None]:
        """The archive fails for good at a call of some kind ("": of any), after some calls that do
        not.
        """
        left = [skip]

        def on(call: str, path: str, position: int) -> None:
            if what in ("", call):
                left[0] -= 1
                if left[0] < 0:
                    raise FAULTS[fault]()

        def spoil(path: str, content: bytes) -> bytes:
            left[0] -= 1
            return bytes([content[0] ^ 1]) + content[1:] if left[0] == -1 and content else content

        run.case.odd[run.case.archive] = {"spoil": spoil} if fault == "spoiled" else {"on": on}
        try:
            yield
        finally:
            run.case.odd.clear()

    def killed(self, run: Run, deed: str, at: int, line: str = "") -> None:
        """A round, a prune or a restore that is killed."""
        bucket = None
        if self.bucket is not None:
            bucket = {
                "url": self.bucket.url,
                "options": self.bucket.options,
                "state": str(self.bucket.state),
            }
        self._nursery.do(
            deed, at, folder=str(run.folder), kind=run.kind, bucket=bucket, changes=run.changes, now=run.case.now,
            line=line,
        )  # fmt: skip

    def prune(
        self, run: Run, only: str | None = None, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """A prune, of one folder alone where it is named. `meanwhile` happens once it has looked at
        a victim's copies.
        """
        names = None if only is None else frozenset({only})
        pruner = Pruner.of(
            run.case.card, "ana", only=names, look_at_clocks=lambda folder: run.clocks()
        )
        looks = itertools.count(1)

        def sight(copies: Iterable[CopyRecord], clocks: Clocks) -> Mapping[tuple[str, str], str]:
            found = pruner.sight(copies, clocks)
            if (
                next(looks) == 2
            ):  # the first was for the plan; the next is when the victim is hidden
                meanwhile()
            return found

        replace(pruner, sight=sight).run()

    def type(self, run: Run, line: str) -> Answer:
        """A command of `tr11 backup`; of a bucket that is unreachable, only that it is is said: a
        person waits for minutes.
        """
        if self.is_away and self.bucket is not None:
            return Answer(3, "away")
        return invoke(run.case, line)

    def verify_here(self, run: Run) -> None:
        """`tr11 checkpoints verify` of all."""
        for entry in run.catalogue().checkpoints:
            reading = verify(entry, 2, lambda count: None, run.case.stop)
            if reading.record is not None:
                put_on_record(run.case.directory, reading.record)

    def pin(self, run: Run, step: int, is_pinned: bool) -> None:
        if is_pinned:
            pin(run.case.directory, step, "ana", "for a paper", time.time())
        else:
            unpin(run.case.directory, step)

    def point(self, run: Run, step: int) -> None:
        """A person has `latest` name another checkpoint: what is newer stays, and is trained once
        more.
        """
        write_atomically(run.case.checkpoints / LATEST_FILE, checkpoint_name(step))

    def roll_back(self, run: Run, step: int, skip: int | None) -> bool:
        """Back to a step by hand, and some iterations passed over; False where that is refused."""
        directory, steps = run.case.directory, run.steps()
        try:
            with claimed(directory):
                before = read_recovery(directory.paths)
                plan = plan_rollback(
                    run.catalogue(), before, run.case.card, step, skip, "ana", max(steps)
                )
                carry_out(directory, plan, "", "ana")
        except NotPossible:
            return False
        run.ranges.append(
            (step + 1, step + (skip or 0), frozenset(saved.identity for saved in run.saved))
        )
        return True

    def undo(self, run: Run) -> bool:
        directory = run.case.directory
        try:
            with claimed(directory):
                plan = plan_undo(run.catalogue(), read_recovery(directory.paths), "ana")
                carry_out(directory, plan, "", "ana")
        except NotPossible:
            return False
        run.ranges.pop()
        return True

    # ------------------------------------------------------------------ harm
    def mount(self, is_there: bool) -> None:
        """All archives come or go, as a file system that is not mounted or a network that is down."""
        if is_there == (not self.is_away):
            return
        self.is_away = not is_there
        for shelf in self.shelves.values():
            if not isinstance(shelf, FolderShelf):  # of a bucket, see `fault`
                continue
            if self.is_away:
                shelf.root.rename(shelf.away)
                shelf.root.mkdir()
            else:
                shutil.rmtree(shelf.root)
                shelf.away.rename(shelf.root)

    def harm_here(self, run: Run, step: int, nth: int, how: str) -> str:
        """Harm to a file of a checkpoint; which one."""
        folder = run.case.checkpoints / checkpoint_name(step)
        files = sorted(
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        )
        if not files:
            return ""
        path = files[nth % len(files)]
        place = folder / path
        facts, content = place.stat(), place.read_bytes()
        changed = harmed(path, content, how)
        if how == "stray":
            (folder / STRAY).write_text("before the spike")
        elif changed is None:
            place.unlink()
        else:
            place.write_bytes(changed)
            os.utime(place, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        return path

    def harm_copy(self, address: str, place: str, nth: int, how: str) -> str:
        """Harm to one file of a copy, its receipt included; which one."""
        shelf = self.shelves[address]
        contents = shelf.contents()
        parts = (f"{place}/", f"{place}.tar", f"{place}.copy.json")
        files = sorted(name for name in contents if name == place or name.startswith(parts))
        name = files[nth % len(files)]
        changed = harmed(name, contents[name], how)
        if changed is None:
            shelf.remove(name)
        else:
            shelf.replace(name, changed)
        return name

    def purge(self, run: Run) -> None:
        """The folder of checkpoints goes, as by a purge of the file system."""
        shutil.rmtree(run.case.checkpoints)
        run.case.checkpoints.mkdir()


def harmed(name: str, content: bytes, how: str) -> bytes | None:
    """A file's bytes after harm; None: it is gone. "flip" changes a byte, of a JSON file so that it
    is none: it has no digest. No harm undoes an earlier one: a second "flip" of the same byte makes
    it a third one.
    """
    if how == "gone" or not content:
        return None
    if how == "cut":
        return content[: len(content) // 2]
    where = 0 if name.endswith(".json") else len(content) // 2
    return content[:where] + bytes([(content[where] + 1) % 256]) + content[where + 1 :]
