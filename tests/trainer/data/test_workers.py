"""Data workers: the same samples in the same order, evaluation between, and no way to hang or to be
left over.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer.data.data_helpers import ROOT, numbered_documents, write_pair
from tests.waiting import is_gone, until
from trainer.contract.errors import DataError, LostWorkerError
from trainer.data.groups import parse_group
from trainer.data.sources import PlannedSource, ReadOptions, plan_groups
from trainer.data.stream import SampleStream
from trainer.data.workers import WorkerPool

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
