"""Who reads ahead: data workers give the same samples in the same order and leave no way to hang or to be
left over; the next micro batch goes to a GPU while the present one computes, by what a mocked CUDA is asked.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from tests.trainer.cases import CPU, batches, tiny
from tests.trainer.data.data_helpers import ROOT, numbered_documents, write_pair
from tests.trainer.spawn import run_ranks
from tests.waiting import is_gone, until
from trainer.contract.errors import DataError, LostWorkerError
from trainer.data.dataset import NextTokenRow
from trainer.data.groups import parse_group
from trainer.data.prefetch import Batch, BatchesAhead
from trainer.data.sources import PlannedSource, ReadOptions, plan_groups
from trainer.data.stream import SampleStream
from trainer.data.workers import WorkerPool
from trainer.engine import Engine
from trainer.parallel.mesh import Mesh

LENGTH = 16
SECONDS = 60.0  # generous: all of what is waited for takes a moment


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, PlannedSource]:
    folder = tmp_path_factory.mktemp("data")
    a = write_pair(folder / "a", numbered_documents(300))
    b = write_pair(folder / "b", numbered_documents(200, seed=1), "int32")
    groups = {
        parse_group(f"train: 2 0:0.9 {a}, 1 0:0.9 {b}"): 900,
        parse_group(f"valid: 2 0.9:1 {a}, 1 0.9:1 {b}"): 24,
        parse_group(f"valid_b: 1 0.9:1 {b}"): 24,
    }
    return plan_groups(groups, ReadOptions(LENGTH, 7, cache_folder=folder / "cache"))


@pytest.fixture(scope="module")
def pools(plans: Mapping[str, PlannedSource]) -> Iterator[dict[int, WorkerPool]]:
    found = {count: WorkerPool(plans, count) for count in (1, 2, 3)}
    yield found
    for pool in found.values():
        pool.close()


@pytest.fixture
def pool(plans: Mapping[str, PlannedSource]) -> Iterator[WorkerPool]:
    with contextlib.closing(WorkerPool(plans, 2)) as made:
        yield made


@given(
    workers=st.sampled_from([1, 2, 3]),
    micro=st.integers(1, 5),
    replicas=st.integers(1, 3),
    order=st.sampled_from(["single", "cyclic"]),
    moves=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), min_size=1, max_size=5),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_number_of_workers_reads_what_one_process_reads(
    *,
    plans: Mapping[str, PlannedSource],
    pools: dict[int, WorkerPool],
    workers: int,
    micro: int,
    replicas: int,
    order: str,
    moves: list[tuple[int, int]],
) -> None:
    """Also after jumps, and after streams that were given up with requests under way."""
    share = {"dp_rank": replicas - 1, "dp_size": replicas, "order": order}
    theirs = SampleStream(pools[workers].reader("train"), micro, **share)
    ours = SampleStream(plans["train"].open(), micro, **share)
    for chunk, steps in moves:
        for stream in (theirs, ours):
            stream.skip_to(chunk * micro * replicas)
        for _ in range(steps):
            got, expected = next(theirs, None), next(ours, None)
            assert (got is None) == (expected is None)
            if got is not None and expected is not None:
                assert [part.tolist() for part in got] == [part.tolist() for part in expected]
        assert theirs.state() == ours.state()
    theirs.close()


def test_the_end_of_the_samples_is_the_same(
    plans: Mapping[str, PlannedSource], pool: WorkerPool
) -> None:
    whole = [tokens.tolist() for tokens, _ in SampleStream(plans["train"].open(), 7)]
    stream = SampleStream(pool.reader("train"), 7)
    assert [tokens.tolist() for tokens, _ in stream] == whole and len(whole) == 900 // 7
    assert next(stream, None) is None
    with pytest.raises(DataError, match="900 samples and 895 are consumed"):
        SampleStream(pool.reader("train"), 7, consumed_samples=895)


def test_evaluation_between_training_steps_hundreds_of_times(
    plans: Mapping[str, PlannedSource],
) -> None:
    """Workers for both, threads of all kinds in the rank, every set from its beginning each time:
    never a hang.
    """
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    expected = {
        name: [t.tolist() for t, _ in SampleStream(plans[name].open(), 2)] for name in plans
    }
    try:
        with (
            contextlib.closing(WorkerPool(plans, 2)) as train,
            contextlib.closing(WorkerPool(plans, 2)) as valid,
        ):
            stream = SampleStream(train.reader("train"), 2, order="cyclic")
            reference = SampleStream(plans["train"].open(), 2, order="cyclic")
            for step in range(400):
                assert next(stream)[0].tolist() == next(reference)[0].tolist()
                for name in ("valid", "valid_b"):
                    evaluation = SampleStream(valid.reader(name), 2)
                    count = 12 if step % 40 == 0 else step % 4  # some are broken off, as by a stop
                    assert [next(evaluation)[0].tolist() for _ in range(count)] == expected[name][
                        :count
                    ]
                    evaluation.close()
            ids = train.process_ids + valid.process_ids
            assert not any(is_gone(number) for number in ids)
    finally:
        stop.set()
    assert all(is_gone(number) for number in ids)


def test_a_killed_worker_is_one_clear_error(pool: WorkerPool) -> None:
    stream = SampleStream(pool.reader("train"), 2)
    next(stream)
    os.kill(pool.process_ids[1], signal.SIGKILL)
    with pytest.raises(
        LostWorkerError, match=r"data worker 1 \(process \d+\) was killed \(SIGKILL\), most likely"
    ) as caught:
        for _ in stream:
            pass
    assert "\n" not in str(caught.value)
    pool.close()
    assert all(is_gone(number) for number in pool.process_ids)


def test_a_worker_killed_before_its_first_answer(pool: WorkerPool) -> None:
    for number in pool.process_ids:
        os.kill(number, signal.SIGKILL)
    until(lambda: all(is_gone(number) for number in pool.process_ids))
    with pytest.raises(DataError, match="was killed"):
        next(SampleStream(pool.reader("train"), 2))


def test_a_stopped_worker_is_an_error_and_can_be_closed(plans: Mapping[str, PlannedSource]) -> None:
    pool = WorkerPool(plans, 1, stall_seconds=0.2)
    os.kill(pool.process_ids[0], signal.SIGSTOP)
    with pytest.raises(DataError, match=r"has not answered for 0\.2 s though it is alive"):
        next(SampleStream(pool.reader("train"), 2))
    pool.close()
    assert is_gone(pool.process_ids[0])


def test_a_rank_can_wait_for_a_steps_data_a_moment_at_a_time(
    plans: Mapping[str, PlannedSource],
) -> None:
    with contextlib.closing(WorkerPool(plans, 1)) as pool:
        stream = SampleStream(pool.reader("train"), 2)
        until(lambda: stream.wait(20, 0.1))  # more than is read ahead otherwise
        taken = [next(stream)[0].tolist() for _ in range(20)]
        assert (
            taken == [tokens.tolist() for tokens, _ in SampleStream(plans["train"].open(), 2)][:20]
        )
        until(lambda: stream.wait(1000, 0.1))  # as far as there are so many
        stream.skip_to(0)
        os.kill(pool.process_ids[0], signal.SIGSTOP)
        assert not stream.wait(1, 0.01)
        os.kill(pool.process_ids[0], signal.SIGCONT)
        until(lambda: stream.wait(1, 0.01))
        assert next(stream)[0].tolist() == taken[0]
    with contextlib.closing(WorkerPool(plans, 1, stall_seconds=0.2)) as pool:
        stream = SampleStream(pool.reader("train"), 2)
        os.kill(pool.process_ids[0], signal.SIGSTOP)
        with pytest.raises(DataError, match="though it is alive"):
            until(lambda: stream.wait(1, 0.05))
        os.kill(pool.process_ids[0], signal.SIGCONT)


def test_a_stop_signal_to_the_group_leaves_workers_to_the_rank(pool: WorkerPool) -> None:
    """The rank saves first, and may evaluate. Also at the very start of a worker."""
    for _ in range(2):
        for number in pool.process_ids:
            for name in (
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGUSR1,
                signal.SIGUSR2,
                signal.SIGHUP,
            ):
                os.kill(number, name)
        assert sum(1 for _ in SampleStream(pool.reader("train"), 2)) == 450
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_data_that_vanishes_or_is_cut_off_is_named(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", numbered_documents(100))
    plans = plan_groups({parse_group(f"train: 1 0:1 {prefix}"): 100}, ReadOptions(LENGTH, 7))
    os.truncate(f"{prefix}.bin", 10)
    with contextlib.closing(WorkerPool(plans, 2)) as pool:
        for _ in range(2):  # the worker lives on, and says it each time
            with pytest.raises(
                DataError, match=r"train data: .*a\.bin has 10: .*truncated"
            ) as caught:
                next(SampleStream(pool.reader("train"), 2))
            assert "\n" not in str(caught.value)
        assert not any(is_gone(number) for number in pool.process_ids)


def test_close_ends_workers_that_are_about_to_write(plans: Mapping[str, PlannedSource]) -> None:
    pool = WorkerPool(plans, 3)
    readers = [SampleStream(pool.reader("train"), 100) for _ in range(3)]
    for stream in readers:
        next(stream)
    pool.close()
    pool.close()
    assert all(is_gone(number) for number in pool.process_ids)


def test_pipes_full_on_both_sides_are_emptied(plans: Mapping[str, PlannedSource]) -> None:
    """Requests beyond what a pipe holds, while the answers fill the other one."""
    with contextlib.closing(WorkerPool(plans, 1)) as pool:
        reader, source = pool.reader("train"), plans["train"].open()
        numbers = SampleStream(source, 900)._order.numbers(0)
        assert numbers is not None
        tickets = [reader.ask(numbers) for _ in range(60)]  # 430 kB of requests, 7 MB of answers
        expected = [source[int(number)].tolist() for number in numbers]
        for ticket in tickets[::-1]:
            assert reader.take(ticket)[::99].tolist() == expected[::99]


@pytest.mark.parametrize("sibling", [False, True])
def test_a_rank_killed_outright_leaves_no_worker(
    plans: Mapping[str, PlannedSource], tmp_path: Path, sibling: bool
) -> None:
    """Even when another child of the rank, forked after them, holds the ends of their pipes open."""
    (tmp_path / "plans").write_bytes(pickle.dumps(dict(plans)))
    script = (
        "import os, pickle, sys, time\n"
        "from trainer.data.workers import WorkerPool\n"
        "from trainer.data.stream import SampleStream\n"
        "pool = WorkerPool(pickle.load(open(sys.argv[1], 'rb')), 2)\n"
        "stream = SampleStream(pool.reader('train'), 2); next(stream)\n"
        "other = os.fork() if sys.argv[2] == 'True' else None\n"
        "if other == 0: time.sleep(600)\n"
        "print(*pool.process_ids, other, flush=True); time.sleep(600)\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "plans"), str(sibling)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout is not None
    words = rank.stdout.readline().split()
    workers = [int(word) for word in words[:2]]
    try:
        assert not any(is_gone(number) for number in workers)
        rank.kill()
        rank.wait()
        until(lambda: all(is_gone(number) for number in workers))
    finally:
        rank.stdout.close()
        if sibling:
            os.kill(int(words[2]), signal.SIGKILL)


def test_workers_load_nothing_heavy(pool: WorkerPool) -> None:
    next(SampleStream(pool.reader("train"), 2))
    for number in pool.process_ids:
        loaded = {Path(entry.path).name for entry in psutil.Process(number).memory_maps()}
        assert not any("torch" in name for name in loaded)
        assert psutil.Process(number).memory_info().rss < 150e6


def test_no_shared_memory_is_used(pool: WorkerPool) -> None:
    next(SampleStream(pool.reader("train"), 2))
    for number in pool.process_ids:
        assert not any(
            entry.path.startswith("/dev/shm") for entry in psutil.Process(number).memory_maps()
        )


GPU = torch.device("cuda", 0)


@dataclass
class FakeCuda:
    """What the side stream, the training's own and their events were asked for, in order."""

    calls: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Stream", lambda device: "side")
        patch.setattr(torch.cuda, "stream", self.entered)
        patch.setattr(torch.cuda, "current_stream", lambda device: self)
        patch.setattr(torch.cuda, "Event", lambda: self)
        patch.setattr(
            Tensor, "record_stream", lambda tensor, stream: self.calls.append("kept for main")
        )
        patch.setattr("trainer.data.prefetch._copied", self.copied)

    @contextlib.contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        self.calls.append(f"enter {stream}")
        yield
        self.calls.append(f"leave {stream}")

    def copied(self, part: Tensor, device: torch.device) -> Tensor:
        assert device == GPU and self.calls[-1] in ("enter side", "copy")
        self.calls.append("copy")
        return part.clone()

    def record(self, stream: str) -> None:
        assert stream == "side"
        self.calls.append("record")

    def wait_event(self, event: Any) -> None:
        self.calls.append("wait")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def numbered(count: int, log: list[str], broken: int | None = None) -> Iterator[Batch]:
    for number in range(count):
        if number == broken:
            raise DataError("the samples cannot be read")
        log.append(f"read {number}")
        yield torch.tensor([number]), torch.tensor([-number])


def computed(ahead: BatchesAhead, source: Iterator[Batch], count: int, log: list[str]) -> list[int]:
    """What a stage does: take a batch, launch its forward pass."""
    forward: Callable[[int], None] = ahead.following(lambda number: log.append(f"forward {number}"))
    found = []
    taken = ahead.of(source, count)
    for _ in range(count):
        tokens, labels = next(taken)
        found.append(int(tokens))
        assert int(labels) == -int(tokens)
        forward(int(tokens))
    return found


def test_the_next_is_copied_behind_the_present_forward_pass(cuda: FakeCuda) -> None:
    ahead = BatchesAhead(GPU, True, False)
    assert computed(ahead, numbered(9, cuda.calls), 2, cuda.calls) == [0, 1]
    copy = ["enter side", "copy", "record", "leave side"]
    take = ["wait", "kept for main"]
    assert cuda.calls == ["read 0", *copy, *take, "forward 0", "read 1", *copy, *take, "forward 1"]


def test_nothing_is_read_beyond_a_step(cuda: FakeCuda) -> None:
    """The next step may have another size, or pass samples over: the stream's count is that of what
    was used.
    """
    ahead, source = BatchesAhead(GPU, True, True), SampleStream(Rows(), 2)
    first = [int(tokens[0, 0]) for tokens, _ in ahead.of(source, 3)]
    assert (first, source.state()) == ([0, 2, 4], 6)
    source.resize(1)
    second = [int(tokens[0, 0]) for tokens, _ in ahead.of(source, 2)]
    assert (second, source.state()) == ([6, 7], 8)
    source.skip_to(20)
    assert [int(tokens[0, 0]) for tokens, _ in ahead.of(source, 1)] == [20]
    resumed = SampleStream(Rows(), 1, consumed_samples=source.state())
    assert torch.equal(next(ahead.of(resumed, 1))[0], next(source)[0])


def test_errors_and_the_end_come_in_their_own_turn(cuda: FakeCuda) -> None:
    """Batch 1 cannot be read while batch 0 computes: batch 0 is computed, and the reader's own
    error follows.
    """
    ahead, log = BatchesAhead(GPU, True, True), []
    with pytest.raises(DataError, match="cannot be read"):
        computed(ahead, numbered(3, log, broken=1), 3, log)
    assert log == ["read 0", "forward 0"]
    with pytest.raises(StopIteration):
        computed(ahead, numbered(1, log), 2, log)
    assert log == ["read 0", "forward 0"] * 2
    assert computed(ahead, numbered(2, log), 2, log) == [0, 1]


def test_on_a_processor_the_batches_pass_as_they_are() -> None:
    ahead, log = BatchesAhead(CPU, True, True), []
    source = numbered(2, log)
    assert ahead.of(source, 2) is source and ahead.following(log.append) == log.append
    assert not log


class Rows:
    """Sample n is n, n + 1, n + 2, ..."""

    row = NextTokenRow(4)

    def __len__(self) -> int:
        return 40

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        out[:] = np.arange(index, index + 5)


def losses_with(fake: bool) -> list[float]:
    """Three steps and an evaluation, each stage's batches fetched ahead; to be run by `run_ranks`."""
    with pytest.MonkeyPatch.context() as patch:
        config = tiny(2, 1)
        mesh = Mesh.create(config.parallel, CPU)
        if fake:
            FakeCuda().install(patch)
            ahead = BatchesAhead
            patch.setattr("trainer.engine.BatchesAhead", lambda device, *needs: ahead(GPU, *needs))
        engine = Engine.build(config, mesh)
        losses = [
            engine.train_step(batches(config, mesh, step, size), size).loss
            for step, size in enumerate((8, 16, 16))
        ]
        losses.append(engine.measure(batches(config, mesh, 9, 16), 8).loss)
        engine.close()
    return losses


def test_a_training_is_the_same_with_and_without() -> None:
    assert run_ranks(losses_with, 2, True) == run_ranks(losses_with, 2, False)


def test_a_stage_between_the_first_and_the_last_reads_nothing(cuda: FakeCuda) -> None:
    ahead, log = BatchesAhead(GPU, False, False), []
    ahead.of(numbered(2, log), 2)
    ahead.following(log.append)("forward 0")
    assert log == ["forward 0"] and cuda.calls == []
