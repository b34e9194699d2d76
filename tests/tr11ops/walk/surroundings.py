"""Rules of what happens around tr11: people change cards and clocks, the machine harms files."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.plugins.disk_fixture import in_memory
from tests.plugins.object_store_fixture import ObjectStore
from tests.tr11ops.backup.lose_it import Kind
from tests.tr11ops.walk.judge import Harm, Judge
from tests.tr11ops.walk.nursery import WalkNursery
from tests.tr11ops.walk.world import World
from trainer.contract.checkpoint_names import checkpoint_name

RUNS = st.sampled_from([0, 0, 0, 1])
NTH = st.integers(0, 40)
HOW = st.sampled_from(["flip", "cut", "gone"])
HOW_HERE = st.sampled_from(["flip", "cut", "gone", "stray"])
COUNTED: Counter[str] = Counter()  # of all walks of this process


class Surroundings(RuleBasedStateMachine):
    """A world of its own, and what happens to it without tr11. `kind`, `bucket` and `nursery` are
    set by `walk_of`.
    """

    kind: Kind = "folder"
    bucket: ObjectStore | None = None
    nursery: WalkNursery

    def __init__(self) -> None:
        super().__init__()
        COUNTED["walks"] += 1
        self._open = ExitStack()
        self.folder = self._open.enter_context(in_memory())
        bucket = self.bucket.another() if self.bucket is not None else None
        self.world = World(self.folder, self.kind, bucket, self.nursery)
        self.judge = Judge(self.world)

    def teardown(self) -> None:
        self._open.close()

    @invariant()
    def count(self) -> None:
        COUNTED["steps"] += 1

    # ------------------------------------------------------------------ what people change
    @rule(number=RUNS, keep=st.sampled_from([2, 3]), interval=st.sampled_from([100, 200]))
    def change_retention(self, number: int, keep: int, interval: int) -> None:
        run = self.world.runs[number]
        key = "backup__full_interval" if self.kind == "bucket" else "backup__store_interval"
        run.set(backup__keep_latest=str(keep), **{key: str(interval)})

    @rule(number=RUNS, which=st.sampled_from([0, 0, 1]))
    def change_archive(self, number: int, which: int) -> None:
        self.world.runs[number].set(
            **{self.world.key.replace(".", "__"): f'"{self.world.addresses[which]}"'}
        )

    @rule(number=RUNS, layers=st.sampled_from([2, 2, 4]))
    def change_model(self, number: int, layers: int) -> None:
        run = self.world.runs[number]
        run.layers = layers
        run.set(model__layers=str(layers))

    @rule(number=RUNS, days=st.sampled_from([-3000.0, -1.0, 0.0, 1.0, 40.0]))
    def set_clock(self, number: int, days: float) -> None:
        """This host's clock jumps; the file server's does not."""
        run = self.world.runs[number]
        run.skew = days * 86400
        run.set()

    # ------------------------------------------------------------------ harm
    @rule(number=RUNS, step=NTH, nth=NTH, how=HOW_HERE)
    def harm_here(self, number: int, step: int, nth: int, how: str) -> None:
        run = self.world.runs[number]
        steps = run.steps()
        if not steps:
            return
        chosen = steps[step % len(steps)]
        path = self.world.harm_here(run, chosen, nth, how)
        key = (number, checkpoint_name(chosen))
        if path and how != "stray":
            is_open = (
                how != "flip"
                or path == "manifest.json"
                or self._is_open(self.judge.harm_here.get(key))
            )
            self.judge.harm_here[key] = Harm(is_open)
        self.judge.harmed()

    @rule(place=NTH, nth=NTH, how=HOW)
    def harm_copy(self, place: int, nth: int, how: str) -> None:
        self._harm_copy(place, nth, how)
        self.judge.harmed()

    def _harm_copy(self, place: int, nth: int, how: str) -> None:
        copies = [
            (address, at) for address, found in self.judge.seen.copies.items() for at in found
        ]
        if not copies:
            return
        key = copies[place % len(copies)]
        name = self.world.harm_copy(*key, nth, how)
        self.judge.noted_harm(key, name, how)

    @rule(is_there=st.booleans())
    def mount(self, is_there: bool) -> None:
        self.world.mount(is_there)

    @rule(number=st.sampled_from([0, 1]))
    def purge(self, number: int) -> None:
        self.world.purge(self.world.runs[number])
        self.judge.harmed()

    @staticmethod
    def _is_open(harm: Harm | None) -> bool:
        return harm is not None and harm.is_open
