"""Samples and micro-batches: the right tokens, in an order that depends on consumed samples alone."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from data_helpers import numbered_documents, slow_maps, write_pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data.blend import build_blend, parse_group
from trainer.data.stream import DataError, SampleSource, SampleStream, open_groups, open_splits

LENGTH = 16


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair") / "numbers", numbered_documents(300))


@pytest.fixture(scope="module")
def train(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> SampleSource:
    splits = open_splits(
        [(1.0, prefix)],
        split="949,50,1",
        sequence_length=LENGTH,
        seed=7,
        train_samples=900,
        cache_folder=tmp_path_factory.mktemp("cache"),
    )
    return splits["train"]


def sample(source: SampleSource, index: int) -> list[int]:
    out = np.empty(source.sequence_length + 1, dtype=np.int64)
    source.read(index, out)
    return out.tolist()


def test_samples_are_the_tokens_of_the_maps(train: SampleSource) -> None:
    documents = numbered_documents(300)
    sizes = [len(document) for document in documents]
    order, rows, shuffle = slow_maps(sizes, range(285), samples=900, length=LENGTH, seed=7, share=0.95)
    tokens = [token for document in order for token in documents[document]]
    assert len(order) > 285, "the case is meant to span epochs"
    for index in range(len(train)):
        begin = shuffle[index] * LENGTH
        assert sample(train, index) == tokens[begin : begin + LENGTH + 1]
    assert rows[1] != (0, 0)
    for outside in (-1, len(train)):
        with pytest.raises(IndexError):
            sample(train, outside)


def test_a_micro_batch_is_tokens_and_the_next_tokens(train: SampleSource) -> None:
    stream = SampleStream(train, 3, dp_rank=1, dp_size=2, consumed_samples=6)
    tokens, labels = next(stream)
    assert tokens.shape == labels.shape == (3, LENGTH) and tokens.dtype == labels.dtype == torch.int64
    assert tokens.is_contiguous() and labels.is_contiguous()
    for row in range(3):
        expected = sample(train, 6 + 3 + row)
        assert tokens[row].tolist() == expected[:-1] and labels[row].tolist() == expected[1:]
    assert stream.state() == 12


@given(
    micro=st.integers(1, 4),
    replicas=st.integers(1, 4),
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    start=st.integers(0, 50),
    prefetch=st.sampled_from([0, 2]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_global_order_depends_on_consumed_samples_alone(
    *, train: SampleSource, micro: int, replicas: int, steps: list[int], start: int, prefetch: int
) -> None:
    """Steps of changing numbers of micro-batches, over any number of replicas, take consecutive samples."""
    streams = [
        SampleStream(
            train, micro, dp_rank=rank, dp_size=replicas, consumed_samples=start * micro * replicas, prefetch=prefetch
        )
        for rank in range(replicas)
    ]
    consumed = start * micro * replicas
    try:
        for accumulation in steps:
            size = accumulation * micro * replicas
            if consumed + size > len(train):
                break
            got = [row for _ in range(accumulation) for stream in streams for row in next(stream)[0].tolist()]
            assert got == [sample(train, index)[:-1] for index in range(consumed, consumed + size)]
            consumed += size
            assert {stream.state() for stream in streams} == {consumed}
    finally:
        for stream in streams:
            stream.close()


def test_a_stream_goes_on_where_its_state_says(train: SampleSource) -> None:
    whole = [tokens.tolist() for tokens, _ in SampleStream(train, 4)]
    first = SampleStream(train, 4)
    head = [next(first)[0].tolist() for _ in range(50)]
    rest = [tokens.tolist() for tokens, _ in SampleStream(train, 4, consumed_samples=first.state())]
    assert head + rest == whole and len(whole) == len(train) // 4


def test_the_last_incomplete_chunk_is_dropped_and_a_used_up_stream_refused(train: SampleSource) -> None:
    stream = SampleStream(train, 7, consumed_samples=len(train) - 10)
    assert len(list(stream)) == 1
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(DataError, match="900 samples and 895 are consumed"):
        SampleStream(train, 7, consumed_samples=895)
    for wrong in ({"dp_rank": 2, "dp_size": 2}, {"consumed_samples": -1}, {"prefetch": -1}):
        with pytest.raises(ValueError, match="must be positive"):
            SampleStream(train, 7, **wrong)


def test_the_reading_thread_ends(train: SampleSource) -> None:
    stream = SampleStream(train, 4, prefetch=3)
    next(stream)
    assert any(thread.name == "data-prefetch" for thread in threading.enumerate())
    stream.close()
    stream.close()
    assert not any(thread.name == "data-prefetch" for thread in threading.enumerate())
    assert stream.state() == 4
    assert len(list(SampleStream(train, 4, prefetch=3))) == 225
    assert not any(thread.name == "data-prefetch" for thread in threading.enumerate())


class _Failing:
    """A source whose disk fails at one sample."""

    sequence_length = LENGTH

    def __len__(self) -> int:
        return 100

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        if index == 8:
            raise OSError("the disk is gone")
        out[:] = index


def test_an_error_in_the_reading_thread_is_raised_where_the_data_is_taken() -> None:
    stream = SampleStream(_Failing(), 4, prefetch=2)
    assert next(stream)[0][0, 0] == 0 and next(stream)[0][0, 0] == 4
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    stream.close()


def test_mixture_takes_each_member_in_its_own_order(prefix: Path, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "other", [[60000 + token % 5000 for token in range(3000)]])
    options = {"split": "1", "sequence_length": LENGTH, "seed": 3, "cache_folder": tmp_path / "cache"}
    mixed = open_splits([(3.0, prefix), (1.0, other)], train_samples=200, **options)["train"]
    assert len(mixed) == 200
    alone = open_splits([(1.0, prefix)], train_samples=151, **options)["train"]
    sets, numbers = build_blend([3.0, 1.0], 200)
    for index in range(200):
        values = sample(mixed, index)
        assert (values[0] >= 60000) == (sets[index] == 1)
        if sets[index] == 0:
            assert values == sample(alone, int(numbers[index]))


def test_splits_share_no_document(prefix: Path, tmp_path: Path) -> None:
    splits = open_splits(
        [(1.0, prefix)],
        split="80,15,5",
        sequence_length=LENGTH,
        seed=1,
        train_samples=200,
        valid_samples=40,
        test_samples=10,
        cache_folder=tmp_path,
    )
    documents = numbered_documents(300)
    bounds = {"train": (0, 240), "valid": (240, 285), "test": (285, 300)}
    for name, source in splits.items():
        allowed = {token for document in documents[slice(*bounds[name])] for token in document}
        assert {token for index in range(len(source)) for token in sample(source, index)} <= allowed
    assert {name: len(source) for name, source in splits.items()} == {"train": 200, "valid": 40, "test": 10}


def test_groups_with_ranges(prefix: Path, tmp_path: Path) -> None:
    groups = {parse_group(f"valid_{name}: 1 {span} {prefix}"): 30 for name, span in (("a", "0:0.5"), ("b", "0.5:1"))}
    opened = open_groups(groups, sequence_length=LENGTH, seed=1, cache_folder=tmp_path)
    middle = numbered_documents(300)[150][0]
    assert set(opened) == {"valid_a", "valid_b"}
    assert all(max(sample(opened["valid_a"], index)) < middle for index in range(30))
    assert all(min(sample(opened["valid_b"], index)) >= middle for index in range(30))


def test_all_ranks_open_with_one_builder_and_one_barrier(prefix: Path, tmp_path: Path) -> None:
    barrier = threading.Barrier(3, timeout=60)
    crossings: list[int] = []
    found: dict[int, list[int]] = {}

    def cross() -> None:
        crossings.append(1)
        barrier.wait()

    def rank(number: int) -> None:
        splits = open_splits(
            [(1.0, prefix)],
            split="949,50,1",
            sequence_length=LENGTH,
            seed=7,
            train_samples=50,
            valid_samples=5,
            cache_folder=tmp_path,
            is_builder=number == 0,
            barrier=cross,
        )
        found[number] = sample(splits["train"], 0) + sample(splits["valid"], 0)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2] and len(crossings) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefixes": []}, "no data was named"),
        ({"prefixes": [(1.0, "/nowhere/data")]}, "/nowhere/data.idx is missing"),
        ({"prefixes": "two", "weights": (1.0, -1.0)}, "positive"),
        ({"sequence_length": 10**6}, "train data of .*one sample needs"),
        ({"vocabulary_size": 50}, "token [0-9]+, the vocabulary has 50"),
        ({"split": "1,x"}, "split"),
        ({"split": "1,0,0", "valid_samples": 4}, "valid data: the split gives it none"),
    ],
)
def test_refusals_reach_the_barrier_and_name_the_fault(
    prefix: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    options: dict[str, object] = {
        "prefixes": [(1.0, prefix)],
        "split": "949,50,1",
        "sequence_length": LENGTH,
        "seed": 1,
        "train_samples": 10,
        **changes,
    }
    if options["prefixes"] == "two":
        options["prefixes"] = [(weight, prefix) for weight in options.pop("weights")]  # type: ignore[attr-defined]
    reached: list[int] = []
    with pytest.raises(DataError, match=words) as caught:
        open_splits(options.pop("prefixes"), cache_folder=tmp_path, barrier=lambda: reached.append(1), **options)  # type: ignore[arg-type]
    assert reached == [1] and "\n" not in str(caught.value)


def test_float_data_is_no_text(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "floats", [[1] * 50], "float32")
    with pytest.raises(DataError, match="not tokens"):
        open_splits([(1.0, prefix)], split="1", sequence_length=4, seed=1, train_samples=2, vocabulary_size=10)
