"""The walk: rules that each do something with tr11 or the trainer, followed by the judge."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.lose_it import Kind
from tests.tr11ops.walk.nursery import REFUSED, WalkNursery
from tests.tr11ops.walk.run import Run
from tests.tr11ops.walk.surroundings import HOW, NTH, RUNS, Surroundings
from tests.tr11ops.walk.truth import prints_of
from trainer.contract.checkpoint_names import checkpoint_name, checkpoint_step

AT = st.integers(1, 150)


class Walk(Surroundings):
    """One walk through a world of its own."""

    @initialize()
    def begin(self) -> None:
        for _ in range(3):
            self.train(0, 1, True)
        self.round(0, "none")

    @rule(
        number=RUNS,
        gain=st.sampled_from([1, 1, 2]),
        optimizer=st.sampled_from([True, True, True, False]),
    )
    def train(self, number: int, gain: int, optimizer: bool) -> None:
        run, token = self.world.runs[number], self.world.token()
        before = self.judge.seen
        answer = self.world.train(run, token, gain, optimizer)
        assert answer is not None
        resumed = None if answer == REFUSED else answer - 1
        self.judge.note_saved(run, token, optimizer)
        self.judge.judged(run, "train")
        there = self.judge.resumable(before, run)
        doubtful = {step for step, saved in there.items() if self.judge.discarded(run, saved)}
        sure, latest = there.keys() - doubtful, before.latest[number]
        if resumed is None:
            foreign = [
                self.judge.at(before, run, step) for step in self._steps(before.folders[number])
            ]
            newer = [it.step for it in foreign if it is not None and it.layers != run.layers]
            best = _first(sure, latest)
            assert best is None or any(step > best for step in newer), (
                f"refused, and {best} is resumable"
            )
        elif resumed != 0 or sure:
            assert resumed in {_first(sure, latest), _first(set(there), latest)}, (
                f"resumed from {resumed}, not {sure}"
            )

    @rule(number=RUNS, at=AT)
    def train_killed(self, number: int, at: int) -> None:
        run, token = self.world.runs[number], self.world.token()
        self.world.train(run, token, 1, True, at)
        self.judge.note_saved(run, token, True)
        self.judge.judged(run, "train")

    @rule(number=RUNS, reading=st.sampled_from(["none", "share", "all"]))
    def round(self, number: int, reading: str) -> None:
        run = self.world.runs[number]
        done = self.world.round(run, reading)  # type: ignore[arg-type]
        self.judge.listed(
            run,
            done.exit_code != 3 and not self.world.is_away,
            reading == "all" and done.exit_code == 0,
        )
        self.judge.judged(run, "round")

    @rule(number=RUNS)
    def verify(self, number: int) -> None:
        """Everything is read again, here and there; then what is called sound is sound."""
        run = self.world.runs[number]
        self.world.verify_here(run)
        for (which, _), harm in self.judge.harm_here.items():
            if which == number:
                harm.seen.add(number)
        answer = self.world.type(run, "verify")
        has_read = answer.exit_code in (0, 1) and not self.world.is_away and self.judge.owns(run)
        self.judge.listed(run, has_read, has_read)
        self.judge.judged(run, "verify")
        if has_read:
            self.judge.copies_are_whole(run)

    @rule(
        number=RUNS, fault=st.sampled_from(["away", "refused", "full", "spoiled"]),
        what=st.sampled_from(["upload", "write", "finish", "put", "move", "look", "list", "read"]), skip=st.integers(0, 25),
    )  # fmt: skip
    def round_with_faults(self, number: int, fault: str, what: str, skip: int) -> None:
        run = self.world.runs[number]
        with self.world.fault(run, fault, what, skip):
            run.case.round(reading="share")
        self.judge.judged(run, "round with faults")

    @rule(number=RUNS, deed=st.sampled_from(["round", "prune", "restore"]), at=AT, nth=NTH)
    def killed(self, number: int, deed: str, at: int, nth: int) -> None:
        run = self.world.runs[number]
        line = (
            self._restore_line(run, nth, run.case.checkpoints, False) if deed == "restore" else ""
        )
        if (deed == "restore" and not line) or (self.kind == "bucket" and self.world.is_away):
            return
        self.world.killed(run, deed, at, line)
        self.judge.judged(run, deed)

    @rule(number=RUNS)
    def prune(self, number: int) -> None:
        run = self.world.runs[number]
        self.world.prune(run)
        self.judge.judged(run, "prune")

    @rule(number=RUNS, place=NTH, nth=NTH, how=HOW)
    def prune_beside_harm(self, number: int, place: int, nth: int, how: str) -> None:
        """A copy is harmed between the two looks that a prune takes at it."""
        run = self.world.runs[number]
        self.world.prune(run, meanwhile=lambda: self._harm_copy(place, nth, how))
        self.judge.judged(run, "prune")

    @rule(number=RUNS, nth=NTH)
    def remove(self, number: int, nth: int) -> None:
        run = self.world.runs[number]
        names = self._names(run, ".superseded") + [checkpoint_name(step) for step in run.steps()]
        if names:
            name = names[nth % len(names)]
            self.world.prune(run, name)
            self.judge.judged(run, "prune", name)

    @rule(number=RUNS, nth=NTH, latest=st.booleans())
    def restore(self, number: int, nth: int, latest: bool) -> None:
        """Into the run, as a person does who has lost a checkpoint."""
        run = self.world.runs[number]
        line = self._restore_line(run, nth, run.case.checkpoints, latest)
        if line:
            self.world.type(run, line)
            self.judge.judged(run, "restore")

    @rule(number=RUNS)
    def restore_all(self, number: int) -> None:
        """Each copy that status calls sound comes back, byte for byte."""
        run = self.world.runs[number]
        if self.world.is_away:
            return
        for place, saved, must in list(self.judge.sound_copies(run)):
            if saved is None:
                assert not must, f"{place} is called sound, and was never saved"
                continue
            into = Path(tempfile.mkdtemp(dir=self.folder))
            identity = f"--identity {saved.identity[:12]}"
            said = self.world.type(
                run, f"restore {saved.step} --from {run.case.archive} {identity} --into {into}"
            )
            home = into / checkpoint_name(saved.step)
            if said.exit_code == 0:
                assert saved.is_in(prints_of(home)), f"{place} was restored, and is not {saved}"
            else:
                assert not must, f"{place} is called sound, and cannot be restored: {said.text}"
                assert not home.exists()
            shutil.rmtree(into)
        self.judge.judged(run, "restore")

    @rule(number=RUNS, nth=NTH, is_pinned=st.booleans())
    def pin(self, number: int, nth: int, is_pinned: bool) -> None:
        run = self.world.runs[number]
        steps = run.steps()
        if steps:
            step = steps[nth % len(steps)]
            self.world.pin(run, step, is_pinned)
            (self.judge.pins.add if is_pinned else self.judge.pins.discard)((number, step))

    @rule(number=RUNS, nth=NTH, skip=st.sampled_from([None, 100, 100]))
    def roll_back(self, number: int, nth: int, skip: int | None) -> None:
        run = self.world.runs[number]
        steps = run.steps()
        if steps and self.world.roll_back(run, steps[nth % len(steps)], skip):
            self.judge.judged(run, "roll-back")

    @rule(number=RUNS, nth=NTH)
    def point(self, number: int, nth: int) -> None:
        run = self.world.runs[number]
        steps = sorted(self.judge.resumable(self.judge.seen, run))
        if steps:
            self.world.point(run, steps[nth % len(steps)])
            self.judge.judged(run, "point")

    @rule(number=RUNS)
    def undo(self, number: int) -> None:
        run = self.world.runs[number]
        if self.world.undo(run):
            self.judge.judged(run, "undo")

    @rule(number=RUNS)
    def adopt(self, number: int) -> None:
        """The run goes on as the one whose archive its card names."""
        run = self.world.runs[number]
        self.world.type(run, f"adopt {run.case.archive} --yes")
        self.judge.judged(run, "adopt")

    # ------------------------------------------------------------------ how
    def _names(self, run: Run, part: str) -> list[str]:
        return [
            name
            for name in self.judge.seen.folders[run.number]
            if part in name and not name.startswith(".")
        ]

    @staticmethod
    def _steps(names: Iterable[str]) -> list[int]:
        return [step for name in names if (step := checkpoint_step(name)) is not None]

    def _restore_line(self, run: Run, nth: int, into: Path, latest: bool) -> str:
        copies = [copy.identity for copy in self.judge.seen.copies[run.address].values()]
        there = [
            saved
            for identity in copies
            if (saved := self.judge.all_saved.get(identity)) is not None
        ]
        if not there:
            return ""
        saved = there[nth % len(there)]
        identity = f" --identity {saved.identity[:12]}" if nth % 2 else ""
        return f"restore {saved.step} --from {run.case.archive}{identity}{' --latest' if latest else ''} --into {into}"


def _first(steps: set[int], latest: int | None) -> int | None:
    """What a start takes: what `latest` names or the newest before it, else the newest."""
    older = [step for step in steps if latest is None or step <= latest]
    return max(older or steps, default=None)


def walk_of(kind: Kind, bucket: ObjectStore | None, nursery: WalkNursery) -> type[Walk]:
    """The walk through archives of one kind."""
    return type(
        f"{kind.title()}Walk", (Walk,), {"kind": kind, "bucket": bucket, "nursery": nursery}
    )
