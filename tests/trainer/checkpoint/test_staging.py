"""Page-locked staging, with a GPU that is mocked: its exact size, when it is made and released, and
that nothing is read too early nor changed while it is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.trainer.cases import CPU, batches, copy_state, tiny
from tests.trainer.checkpoint.synthetic import Model, Shape, differences, state
from tests.trainer.spawn import run_ranks
from trainer.checkpoint import files, store, writer
from trainer.checkpoint.files import copy_bytes
from trainer.checkpoint.publishing import CheckpointInfo, Extras, Finished
from trainer.checkpoint.staging import MemoryNeed, Staging, available_memory, shortage
from trainer.checkpoint.writer import AsyncSaver
from trainer.config.card import TrainerConfig
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh
from trainer.parallel.state import ShardedState

SHAPE, MODEL = Shape(), Model(2, 64, 64)
INFO = CheckpointInfo(SHAPE.topology, {})
EXTRAS = Extras({"consumed_samples": 1, "consumed_tokens": 1})


class Driver:
    """`torch.cuda.cudart()`, and a GPU of two streams. `events` is what happened, in order.

    Of all that a GPU may do it does the worst: copies when someone waits for them and not before,
    the rest at once.
    """

    def __init__(self, status: int = 0):
        self.status = status
        self.events: list[str] = []
        self.locked: dict[int, int] = {}
        self.error_pending = False
        self.is_beside = False
        self.waiting: list[Callable[[], None]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        if self.status == 0:
            self.locked[address] = size
        else:
            self.error_pending = True
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]

    def launch(self) -> None:
        """A kernel: torch raises, once, what an earlier call has left."""
        pending, self.error_pending = self.error_pending, False
        if pending:
            raise RuntimeError("CUDA error: out of memory")

    def copy(self, target: Tensor, source: files.Bytes) -> None:
        """In the stream of the copies it waits."""
        assert self.is_beside, "a copy that the computation waits for"
        self.waiting.append(lambda: copy_bytes(target, source))

    def run(self, event: str) -> None:
        self.events.append(event)
        for copy in self.waiting:
            self.events.append("copy")
            copy()
        self.waiting.clear()

    # The streams and their event.
    def wait_stream(self, other: Driver) -> None:
        self.events.append("copies wait for what came before")

    def wait_event(self, event: Driver) -> None:
        self.run("the computation waits for the copies")

    def record_event(self) -> Driver:
        return self

    def synchronize(self) -> None:
        self.run("the host waits for the copies")

    @contextmanager
    def stream(self, stream: Driver) -> Iterator[None]:
        self.is_beside = True
        yield
        self.is_beside = False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return mocked(monkeypatch)


def mocked(monkeypatch: pytest.MonkeyPatch) -> Driver:
    mock = Driver()
    monkeypatch.setattr("torch.cuda.cudart", lambda: mock)
    monkeypatch.setattr("torch.cuda.Stream", lambda: mock)
    monkeypatch.setattr("torch.cuda.stream", mock.stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: mock)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.set_device", lambda number: mock.events.append(f"GPU {number}"))
    monkeypatch.setattr("trainer.checkpoint.staging._launch", mock.launch)
    return mock


@pytest.fixture
def late(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """What is saved lies on that GPU."""
    return lying_there(driver, monkeypatch)


def lying_there(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    def copied(copies: Iterable[tuple[Tensor, files.Bytes]]) -> None:
        for target, source in copies:
            driver.copy(target, source)

    monkeypatch.setattr(writer, "copy_all", copied)
    monkeypatch.setattr(writer, "_lies_on_gpu", lambda parts: True)
    return driver


def test_as_much_is_locked_as_is_needed(driver: Driver) -> None:
    """Not the next power of two, and nothing is kept."""
    size = 3 * files.ALIGNMENT
    staging = Staging(size, on_gpu=True)
    assert driver.locked == {staging.memory.data_ptr(): size}
    staging.release()
    assert driver.locked == {}
    forgotten = Staging(size, on_gpu=True)
    assert len(driver.locked) == 1
    del forgotten
    assert driver.locked == {}
    assert len(Staging(0, on_gpu=True).memory) == 0
    Staging(size, on_gpu=False).settle()
    assert driver.locked == {} and driver.events == []


def test_torch_sees_that_the_memory_is_locked(driver: Driver) -> None:
    """It asks about the first byte of a view's storage; the locked range is the storage, in whole
    pages.
    """
    staging = Staging(3 * files.ALIGNMENT, on_gpu=True)
    storage = staging.memory[files.ALIGNMENT :].untyped_storage()
    assert driver.locked == {storage.data_ptr(): storage.nbytes()}
    assert storage.data_ptr() % files.ALIGNMENT == 0 and storage.nbytes() == 3 * files.ALIGNMENT


def test_a_refused_lock_leaves_no_error_for_the_next_kernel(driver: Driver) -> None:
    driver.status = 2
    with pytest.raises(RuntimeError, match="the driver locks no"):
        Staging(4000, on_gpu=True)
    driver.launch()


def test_a_driver_that_locks_nothing_makes_the_save_synchronous(
    driver: Driver, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.status = 2
    monkeypatch.setattr(writer, "_lies_on_gpu", lambda parts: True)
    said: list[str] = []
    saver = AsyncSaver(memory, said.append)
    saver.start(1, state(MODEL, SHAPE, 0, 1), EXTRAS, INFO)
    assert isinstance(saver.wait()[0], Finished) and "could not allocate the memory" in said[0]


# ------------------------------------------------------------------------- the state is of one step
def stale(target: ShardedState, value: float) -> None:
    """What an update does to the live tensors."""
    for weight in target.weights:
        weight.tensor.fill_(value)
    for fragment in target.fragments:
        for run in fragment.tensors.values():
            run.fill_(value)


def saved(saver: AsyncSaver, folder: Path, step: int) -> list[str]:
    """How the checkpoint differs from the state that was there when the save began."""
    assert isinstance(saver.wait()[0], Finished)
    found = state(MODEL, SHAPE, 0, None)
    store.load(folder, step, found, INFO)
    return differences(found, state(MODEL, SHAPE, 0, step))


def test_an_update_waits_for_the_copies_and_the_host_does_not(late: Driver, memory: Path) -> None:
    saver = AsyncSaver(memory, pytest.fail, is_held=True)
    live = state(MODEL, SHAPE, 0, 1)
    saver.start(1, live, EXTRAS, INFO)
    assert late.events[:1] == ["copies wait for what came before"]
    late.events.append("forward and backward")
    saver.hold()
    late.events.append("update")
    stale(live, 99.0)
    assert saved(saver, memory, 1) == []
    begin, waits = late.events.index("forward and backward"), late.events.index("update")
    if (
        "the host waits for the copies" not in late.events[:begin]
    ):  # the writer may come first: it waits for them too
        assert "copy" not in late.events[:begin]
    assert "copy" not in late.events[waits:]
    saver.close()
    assert late.locked == {}


def test_a_save_copies_each_byte_of_the_state_once_beside_the_computation(
    late: Driver, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it adds to the step behind it: weights, fp32 masters and moments. All of it is in the
    stream of the copies: `Driver.copy` accepts nothing else.
    """
    copied: list[int] = []
    plain = late.copy

    def noted(target: Tensor, source: files.Bytes) -> None:
        if isinstance(source, Tensor) and len(source) > files.ALIGNMENT:
            copied.append(len(source))
        plain(target, source)

    monkeypatch.setattr(late, "copy", noted)
    live = state(Model(2, 512, 64), SHAPE, 0, 1)
    own = sum(weight.tensor.nbytes for weight in live.weights)
    own += sum(tensor.nbytes for fragment in live.fragments for tensor in fragment.tensors.values())
    saver = AsyncSaver(memory, pytest.fail, is_held=True)
    saver.start(1, live, EXTRAS, INFO)
    assert 0.98 * own < sum(copied) <= own
    assert "the computation waits for the copies" not in late.events
    saver.wait()
    saver.close()


def test_an_owner_who_holds_nothing_waits_at_once(late: Driver, memory: Path) -> None:
    """The computation does, that is: what comes next may be the update."""
    saver = AsyncSaver(memory, pytest.fail)
    live = state(MODEL, SHAPE, 0, 1)
    saver.start(1, live, EXTRAS, INFO)
    stale(live, 99.0)
    assert saved(saver, memory, 1) == []
    assert "the computation waits for the copies" in late.events


def test_without_any_hold_the_update_would_be_saved(
    late: Driver, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above can fail."""
    gate = threading.Event()
    saver = AsyncSaver(memory, pytest.fail, is_held=True)
    saver._background.submit(gate.wait)
    live = state(MODEL, SHAPE, 0, 1)
    saver.start(1, live, EXTRAS, INFO)
    stale(live, 99.0)
    gate.set()
    assert saved(saver, memory, 1) != []


def test_memory_is_reserved_once_before_the_first_save(late: Driver, memory: Path) -> None:
    """In the background, for this rank's GPU; saves lock no more, and plan nothing again."""
    saver = AsyncSaver(memory, pytest.fail, is_held=True)
    saver.reserve(state(MODEL, SHAPE, 0, 1))
    assert saver._reserved is not None
    memory_of = saver._reserved.result().memory.data_ptr()
    assert late.events == ["GPU 3"] and list(late.locked) == [memory_of]
    late.cudaHostRegister = pytest.fail  # type: ignore[method-assign,assignment]
    for step in (1, 2):
        live = state(MODEL, SHAPE, 0, step)
        saver.start(step, live, EXTRAS, INFO)
        saver.hold()
        assert saved(saver, memory, step) == []
    assert list(late.locked) == [memory_of]


def test_memory_that_could_not_be_reserved_is_tried_again_and_told(
    late: Driver, memory: Path
) -> None:
    late.status = 2
    said: list[str] = []
    saver = AsyncSaver(memory, said.append)
    saver.reserve(state(MODEL, SHAPE, 0, 1))
    late.status = 0
    saver.start(1, state(MODEL, SHAPE, 0, 1), EXTRAS, INFO)
    assert saved(saver, memory, 1) == [] and said == []


def test_pages_are_there_before_the_first_copy(memory: Path) -> None:
    saver = AsyncSaver(memory, pytest.fail)
    saver.reserve(state(MODEL, SHAPE, 0, 1))
    saver.start(1, state(MODEL, SHAPE, 0, 1), EXTRAS, INFO)
    assert saved(saver, memory, 1) == [] and saver._reserved is None
    saver.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_engine_calls_before_its_update(dtype: str) -> None:
    """Behind all of a step's forward passes, before the first number changes. In fp32 each group
    has an update.
    """
    (seen,) = run_ranks(update_of_an_engine, 1, dtype)
    assert seen[:3] == ["forward", "forward", "as before the step"]
    assert set(seen[3:]) == {"changed"}


def update_of_an_engine(dtype: str) -> list[str]:
    config = tiny(dtype=dtype)
    mesh = Mesh.create(config.parallel, CPU)
    engine = Engine.build(config, mesh)
    held = engine.sharded_state()
    before = [weight.tensor.clone() for weight in held.weights]
    seen: list[str] = []

    def look() -> None:
        same = all(
            torch.equal(weight.tensor, old)
            for weight, old in zip(held.weights, before, strict=True)
        )
        seen.append("as before the step" if same else "changed")

    engine.before_update(look)
    counted = iter(batches(config, mesh, 0, 2 * config.batch.micro_batch_size))

    def told() -> Iterator[Any]:
        for batch in counted:
            seen.append("forward")
            yield batch

    engine.train_step(told(), 2 * config.batch.micro_batch_size)
    look()
    engine.close()
    return seen


# ------------------------------------------------------------- a training whose copies come late
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adam8bit": {"type": "adam8bit"},
    "lamb": {"type": "lamb", "lamb_variant": "layer-noise"},
}
STEP, BEHIND = 2, 2


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_is_of_one_step_whichever_optimizer_changes_what(
    kind: str, dtype: str, memory: Path
) -> None:
    """The invariant: all copies of a save have been made before the first number of it changes, and
    an update is all that changes one. So they may take as long as a forward and a backward pass.

    Each copy is made when the update asks for it, and not before; then a resume is bit for bit.
    Where the update asks too late, behind it, what is saved is of two steps. And a save that is
    waited for at once, as before the training leaves, needs no update.
    """
    value = tiny(dtype=dtype).model_dump(mode="json")
    value["optimizer"] |= OPTIMIZERS[kind]
    config = TrainerConfig.model_validate(value)
    (found,) = run_ranks(saves_with_late_copies, 1, config, memory)
    assert found == {"before": True, "at once": True, "behind": False}


def saves_with_late_copies(config: TrainerConfig, memory: Path) -> dict[str, bool]:
    """Whether state and losses behind a load are those of the training that went on."""
    found = {}
    for way in ("before", "at once", "behind"):
        with pytest.MonkeyPatch.context() as patch:
            lying_there(mocked(patch), patch)
            found[way] = goes_on_alike(config, memory / way, way)
    return found


def goes_on_alike(config: TrainerConfig, folder: Path, way: str) -> bool:
    folder.mkdir()
    mesh, size = Mesh.create(config.parallel, CPU), 2 * config.batch.micro_batch_size
    engine = Engine.build(config, mesh)

    def losses(first: int, last: int) -> list[float]:
        return [
            engine.train_step(batches(config, mesh, step, size), size, step).loss
            for step in range(first, last)
        ]

    losses(0, STEP)
    saver, gate = AsyncSaver(folder, pytest.fail, is_held=True), threading.Event()
    saver._background.submit(gate.wait)  # no writer asks for the copies before the update does
    if way == "behind":
        engine._trained[0].register_step_post_hook(lambda *_: saver.hold())
    else:
        engine.before_update(saver.hold)
    kept = copy_state(engine)
    saver.start(STEP, engine.sharded_state(), EXTRAS, INFO)
    if way == "at once":
        gate.set()
        assert isinstance(saver.wait()[0], Finished)
    straight = losses(STEP, STEP + BEHIND)
    gate.set()
    if way != "at once":
        assert isinstance(saver.wait()[0], Finished)
    state = engine.sharded_state()
    loaded = store.load(folder, STEP, state, INFO)
    engine.finish_load(replace(state, optimizer_step=loaded.optimizer_step))
    same = all(
        torch.equal(value, theirs.elements[kind])
        for mine, theirs in zip(copy_state(engine), kept, strict=True)
        for kind, value in mine.elements.items()
    )
    resumed = losses(STEP, STEP + BEHIND)
    saver.close()
    engine._pipeline.destroy()
    return same and resumed == straight


# ----------------------------------------------------------------------------- memory
# How much host memory there is for copies of checkpoints, as the kernel says it.

GIB = 1 << 30


def test_ranks_of_one_host_share_its_memory() -> None:
    one, other = MemoryNeed("n1", 4 * GIB, 10 * GIB), MemoryNeed("n2", 4 * GIB, 10 * GIB)
    assert shortage([one, one, other, other]) is None
    assert (
        shortage([one, one, one, other])
        == "n1 would need 12.0 GiB of memory for copies and can spare 8.0 GiB"
    )
    assert shortage([one, MemoryNeed("n1", GIB, 5 * GIB)]) is not None, (
        "the least that any rank saw counts"
    )
    assert shortage([MemoryNeed("n1", 0, 0)]) is None, (
        "nothing more is needed where the memory is held already"
    )


def machine(root: Path, group: str) -> tuple[Path, Path]:
    """A node with 10 GiB free; its cgroups are still to be made."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal:  99 kB\nMemAvailable:  {10 * GIB >> 10} kB\nHugePages_Total: 0\n"
    )
    (proc / "self" / "cgroup").write_text(f"{group}\n")
    cgroups.mkdir()
    return proc, cgroups


def limit(place: Path, most: str, current: int, cached: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "memory.max").write_text(f"{most}\n")
    (place / "memory.current").write_text(f"{current}\n")
    (place / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file {cached}\n")


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/slurm/job_7/step_0")
    assert available_memory(proc, cgroups) == 10 * GIB
    limit(cgroups / "slurm" / "job_7", str(6 * GIB), 5 * GIB, GIB // 2)
    limit(cgroups / "slurm" / "job_7" / "step_0", "max", 5 * GIB, 0)
    assert available_memory(proc, cgroups) == 2 * GIB
    limit(cgroups / "slurm", str(5 * GIB), 6 * GIB, 0)
    assert available_memory(proc, cgroups) == 0


def test_a_node_without_unified_cgroups(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "4:memory:/slurm")
    assert available_memory(proc, cgroups) == 10 * GIB


def test_this_machine() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total


def test_a_kernel_that_does_not_say(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        available_memory(tmp_path, tmp_path)
