"""One trainer at a time: the lease, and its protocol under every interleaving. Real trainers: see
test_stops.py.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from tests.leases import read_lease
from trainer.checkpoint.publishing import CheckpointInfo, Extras, make_manifest, publish
from trainer.contract.checkpoints import fence_off, partial_path
from trainer.contract.errors import CheckpointError, LeaseLost
from trainer.contract.lease import (
    WATCH_SECONDS,
    HolderWatch,
    Lease,
    LeaseClaim,
    LeaseFolder,
    trained_into,
)
from trainer.contract.manifest import FileEntry, file_digest
from trainer.contract.paths import RunPaths

ROOT = Path(__file__).parents[3]


def paths_of(folder: Path) -> RunPaths:
    return RunPaths(folder, "run", "main")


def claim(job: str, launch: int = 1) -> LeaseClaim:
    return replace(LeaseClaim.of_this_process(job, launch), host=f"node-{job}")


class Hands:
    """A clock that a test moves; while someone waits, `meanwhile` is called."""

    def __init__(self) -> None:
        self.now = 100.0
        self.meanwhile: Any = lambda: None

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


def lease(folder: Path, job: str, hands: Hands, launch: int = 1) -> Lease:
    return Lease(paths_of(folder), claim(job, launch), lambda: hands.now, hands.pause)


# ----------------------------------------------------------------------------- the protocol
def test_the_first_one_takes_it_and_the_file_says_who(tmp_path: Path) -> None:
    mine = lease(tmp_path, "1", Hands())
    assert mine.take() is None
    mine.check()
    held = read_lease(paths_of(tmp_path))
    assert held is not None
    assert (held.epoch, held.job_id, held.host, held.pid, held.held) == (
        1,
        "1",
        "node-1",
        os.getpid(),
        True,
    )
    shown = json.loads((tmp_path / "state" / "lease.json").read_text())
    assert {"epoch", "job_id", "launch", "host", "pid", "user", "renewed"} <= set(shown)
    mine.release()
    after = read_lease(paths_of(tmp_path))
    assert after is not None and not after.held


def test_a_living_holder_wins(tmp_path: Path) -> None:
    hands, folder = Hands(), LeaseFolder(paths_of(tmp_path))
    assert folder.claim(1, replace(claim("1"), epoch=1))
    counts = iter(range(1, 1000))
    hands.meanwhile = lambda: folder.renew(1, next(counts))
    holder = lease(tmp_path, "2", hands).take()
    assert holder is not None
    assert holder.job_id == "1"
    assert hands.now - 100 < WATCH_SECONDS  # it need not wait for the whole watch
    assert folder.newest()[0] == 1


def test_a_silent_holder_is_superseded_and_fenced(tmp_path: Path) -> None:
    hands = Hands()
    folder = LeaseFolder(paths_of(tmp_path))
    dead = Lease(paths_of(tmp_path), claim("1"))
    assert folder.claim(1, replace(dead.me, epoch=1))
    dead.me = replace(dead.me, epoch=1)
    dead.check()
    new = lease(tmp_path, "2", hands)
    assert new.take() is None
    assert hands.now - 100 >= WATCH_SECONDS
    assert new.me.epoch == 2
    with pytest.raises(LeaseLost, match=r"job 2 \(launch 1\) of .* on node-2.*epoch 2, ours was 1"):
        dead.check()
    assert dead.lost and not dead.lost_to_own_job()
    dead.release()  # it has nothing to let go of any more
    held = read_lease(paths_of(tmp_path))
    assert held is not None and held.held and held.job_id == "2"
    new.release()


@pytest.mark.parametrize(
    ("job", "launch", "waits"), [("1", 2, False), ("1", 1, True), ("2", 2, True)]
)
def test_only_a_later_launch_of_the_same_job_need_not_watch(
    tmp_path: Path, job: str, launch: int, waits: bool
) -> None:
    hands, folder = Hands(), LeaseFolder(paths_of(tmp_path))
    assert folder.claim(1, replace(claim("1"), epoch=1))
    new = lease(tmp_path, job, hands, launch)
    assert new.take() is None
    assert (hands.now - 100 >= WATCH_SECONDS) is waits
    new.release()
    third = lease(tmp_path, "9", hands := Hands())  # and after a clean end no one watches
    assert third.take() is None and hands.now == 100
    third.release()


def test_a_folder_that_was_emptied_by_hand_fences_everyone(tmp_path: Path) -> None:
    mine = lease(tmp_path, "1", Hands())
    assert mine.take() is None
    for path in (tmp_path / "state" / "lease").iterdir():
        path.unlink()
    with pytest.raises(
        LeaseLost, match=r"is not in .*/state/lease any more \(unmounted, or removed by hand\)"
    ):
        mine.check()
    mine.release()


def test_what_is_not_known_publishes_nothing(tmp_path: Path) -> None:
    mine = lease(tmp_path, "1", Hands())
    assert mine.take() is None
    (tmp_path / "state" / "lease").rename(tmp_path / "state" / "away")
    (tmp_path / "state" / "lease").write_text("in the way")
    with pytest.raises(OSError, match="Not a directory"):
        mine.check()
    assert not mine.lost
    mine.release()


def test_an_unfinished_claim_counts_as_a_silent_holder(tmp_path: Path) -> None:
    hands = Hands()
    (tmp_path / "state" / "lease").mkdir(parents=True)
    (tmp_path / "state" / "lease" / "7.json").write_text('{"job_id"')
    new = lease(tmp_path, "2", hands)
    assert new.take() is None and new.me.epoch == 8 and hands.now - 100 >= WATCH_SECONDS
    new.release()


def test_links_that_the_file_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder = LeaseFolder(paths_of(tmp_path))
    assert folder.claim(1, replace(claim("1"), epoch=1)) and not folder.claim(
        1, replace(claim("2"), epoch=1)
    )
    held = read_lease(paths_of(tmp_path))
    assert held is not None and held.job_id == "1"


def test_an_answer_that_was_lost_is_not_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def lose_the_answer(source: Any, target: Any) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", lose_the_answer)
    assert LeaseFolder(paths_of(tmp_path)).claim(1, replace(claim("1"), epoch=1))


def whole_checkpoint(folder: Path, step: int, content: str) -> tuple[Path, Any]:
    """A written folder that may be published, and its manifest."""
    partial = partial_path(folder, step, content)
    partial.mkdir(parents=True)
    (partial / "data").write_text(content)
    entry = FileEntry("data", len(content), file_digest(partial / "data"))
    extras = Extras({"consumed_samples": 0, "consumed_tokens": 0})
    return partial, make_manifest(step, extras, CheckpointInfo({}, {}), (entry,))


def test_a_fenced_trainer_does_not_move_anothers_checkpoint(tmp_path: Path) -> None:
    partial, manifest = whole_checkpoint(tmp_path, 5, "old")

    def overtaken() -> None:
        fence_off(tmp_path)
        publish(tmp_path, *whole_checkpoint(tmp_path, 5, "new"))

    with pytest.raises(FileNotFoundError):
        publish(tmp_path, partial, manifest, fence=overtaken)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step5", "latest"]
    assert (tmp_path / "global_step5" / "data").read_text() == "new"


def test_what_lost_bytes_after_it_was_written_is_not_published(tmp_path: Path) -> None:
    partial, manifest = whole_checkpoint(tmp_path, 5, "all of it")
    (partial / "data").write_text("all of")
    with pytest.raises(CheckpointError, match="data: 6 bytes, the manifest says 9"):
        publish(tmp_path, partial, manifest)
    assert [path.name for path in tmp_path.iterdir()] == [partial.name]


def test_a_refused_publication_leaves_latest_and_no_draft_of_it(tmp_path: Path) -> None:
    partial, manifest = whole_checkpoint(tmp_path, 5, "x")
    publish(tmp_path, partial, manifest)
    partial, manifest = whole_checkpoint(tmp_path, 6, "y")

    def refuse() -> None:
        raise LeaseLost("gone")

    with pytest.raises(LeaseLost):
        publish(tmp_path, partial, manifest, fence=refuse)
    assert (tmp_path / "latest").read_text() == "global_step5"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        partial.name,
        "global_step5",
        "latest",
    ]


FOREIGN = {
    "newer": lambda manifest: {**manifest, "schema": 99},
    "other-model": lambda manifest: {**manifest, "model": {"model.layers": 70}},
    "more-parts": lambda manifest: {**manifest, "files": [{"path": f"{part}/x", "bytes": 0, "digest": ""} for part in
                                                          ("weights", "optimizer", "cursor.json")]},
    "no-manifest": lambda manifest: None,
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_of_another_training_is_set_aside_not_replaced(tmp_path: Path, kind: str) -> None:
    info, extras = (
        CheckpointInfo({}, {"model.layers": 4}),
        Extras({"consumed_samples": 0, "consumed_tokens": 0}),
    )
    publish(tmp_path, *whole_checkpoint(tmp_path, 5, "theirs"))
    path = tmp_path / "global_step5" / "manifest.json"
    theirs = FOREIGN[kind](json.loads(path.read_text()))
    path.write_text(json.dumps(theirs)) if theirs else path.unlink()
    partial, manifest = whole_checkpoint(tmp_path, 5, "ours")
    said: list[str] = []
    publish(tmp_path, partial, make_manifest(5, extras, info, manifest.files), report=said.append)
    assert (tmp_path / "global_step5" / "data").read_text() == "ours"
    assert (tmp_path / "global_step5.set-aside" / "data").read_text() == "theirs"
    assert len(said) == 1 and "global_step5.set-aside" in said[0]


class Contenders(RuleBasedStateMachine):
    """Four trainers take the protocol's steps in any order, each frozen for any time between any
    two of them.
    """

    who = st.integers(0, 3)

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(prefix="lease-")
        self.paths = paths_of(Path(self.place.name))
        self.folder, self.checkpoints = LeaseFolder(self.paths), self.paths.checkpoints
        self.checkpoints.mkdir(parents=True)
        self.clock, self.step = 0.0, 0
        self.leases = [Lease(self.paths, claim(str(job))) for job in range(4)]
        self.watches: list[HolderWatch | None] = [None] * 4
        self.counts, self.partials = [0] * 4, [Path()] * 4
        # the newest holder, and what it read when it began
        self.newest, self.found = (-1, (frozenset[str](), ""))

    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.clock += seconds

    @rule(me=who)
    def look(self, me: int) -> None:
        seen = self.folder.newest()
        watch = self.watches[me]
        if watch is None:
            watch = self.watches[me] = HolderWatch(*seen, self.clock)
        watch.see(*seen, self.clock)

    @rule(me=who)
    def claim_if_the_holder_looks_dead(self, me: int) -> None:
        watch, mine = self.watches[me], self.leases[me].me
        if mine.epoch or watch is None or not watch.verdict(mine, self.clock):
            return
        mine = replace(mine, epoch=watch.epoch + 1)
        self.watches[me] = None
        if not self.folder.claim(mine.epoch, mine):
            return
        self.leases[me].me = mine
        if self.folder.is_newest(mine.epoch):
            fence_off(self.checkpoints)
            self.newest, self.found = me, self.published()

    @rule(me=who)
    def show_life(self, me: int) -> None:
        self.counts[me] += 1
        if self.leases[me].me.epoch:
            self.folder.renew(self.leases[me].me.epoch, self.counts[me])

    @precondition(lambda self: self.holders)
    @rule(which=who)
    def write_a_checkpoint(self, which: int) -> None:
        self.write(self.holders[which % len(self.holders)])

    @precondition(lambda self: self.holders)
    @rule(which=who, other=who, frozen=st.sampled_from([0.0, 1.0, WATCH_SECONDS + 1]))
    def publish_and_freeze_behind_the_fence(self, which: int, other: int, frozen: float) -> None:
        """The fence lets it pass; then it is frozen, and another one may take over before it goes
        on.
        """
        me = self.holders[which % len(self.holders)]

        def fence() -> None:
            self.leases[me].check()
            self.look(other)
            self.clock += frozen
            self.look(other)
            self.claim_if_the_holder_looks_dead(other)

        if not self.partials[me].name:
            self.write(me)
        partial, self.partials[me] = self.partials[me], Path()
        if not (partial / "owner").is_file():
            return  # it was taken away
        entry = FileEntry("owner", 1, file_digest(partial / "owner"))
        step = int(partial.name.split("step")[1].split(".")[0])
        extras = Extras({"consumed_samples": 0, "consumed_tokens": 0})
        before = self.published()
        manifest = make_manifest(step, extras, CheckpointInfo({}, {}), (entry,))
        try:
            publish(self.checkpoints, partial, manifest, fence=fence)
        except (LeaseLost, OSError):
            assert self.published() == before
        else:
            assert self.newest == me

    @property
    def holders(self) -> list[int]:
        return [number for number, one in enumerate(self.leases) if one.me.epoch]

    def write(self, me: int) -> None:
        self.step += 1
        self.partials[me] = partial_path(self.checkpoints, self.step, str(me))
        self.partials[me].mkdir()
        (self.partials[me] / "owner").write_text(str(me))

    def published(self) -> tuple[frozenset[str], str]:
        latest = self.checkpoints / "latest"
        names = frozenset(path.name for path in self.checkpoints.glob("global_step*"))
        return names, latest.read_text() if latest.exists() else ""

    @invariant()
    def at_most_one_may_publish(self) -> None:
        epochs = [one.me.epoch for one in self.leases if one.me.epoch]
        assert sum(self.folder.is_newest(epoch, surely=False) for epoch in epochs) <= 1

    @invariant()
    def what_the_newest_holder_found_is_changed_by_itself_alone(self) -> None:
        names, latest = self.published()
        fresh = names - self.found[0]
        assert {(self.checkpoints / name / "owner").read_text() for name in fresh} <= {
            str(self.newest)
        }
        assert latest == self.found[1] or latest in fresh

    def teardown(self) -> None:
        self.place.cleanup()


TestContenders = Contenders.TestCase
TestContenders.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("hours", [-5.0, 0.0, 5.0])
def test_a_wrong_clock_of_this_host_ends_no_life(tmp_path: Path, hours: float) -> None:
    paths = paths_of(tmp_path)
    assert LeaseFolder(paths).claim(1, replace(claim("1"), epoch=1))
    assert "is being trained by job 1" in trained_into(
        paths.checkpoints, time.time() + hours * 3600
    )


def test_a_checkpoint_folder_behind_a_link_is_still_its_runs(tmp_path: Path) -> None:
    paths = paths_of(tmp_path)
    big = tmp_path / "big" / "checkpoints"
    big.mkdir(parents=True)
    paths.checkpoints.parent.parent.mkdir(parents=True, exist_ok=True)
    paths.checkpoints.parent.symlink_to(big)
    paths.checkpoints.mkdir()
    assert trained_into(paths.checkpoints, 1.0) == ""
    assert LeaseFolder(paths).claim(1, replace(claim("1"), epoch=1))
    assert "is being trained by job 1" in trained_into(paths.checkpoints, time.time())
