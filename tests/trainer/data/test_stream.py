"""Samples and micro-batches: the right tokens, in an order that depends on consumed samples alone; and the
streams that a card asks for: groups and splits, workers and none, ranks that read nothing.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.trainer.data.data_helpers import numbered_documents, slow_maps, write_pair
from tests.trainer.data.sample_cases import card, opened
from trainer.contract.errors import DataError
from trainer.data import sources
from trainer.data.blend import build_blend
from trainer.data.dataset import NextTokenRow, SampleSource
from trainer.data.groups import parse_group, split_groups
from trainer.data.samples import Samples, missing_test_share, wanted_data
from trainer.data.sources import ReadOptions, plan_groups
from trainer.data.stream import EmptyStream, SampleStream
from trainer.schedule.rules import data_problems

LENGTH = 16


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair") / "numbers", numbered_documents(300))


def open_splits(
    prefixes: Any, split: str, samples: Any, reading: ReadOptions, **options: Any
) -> dict[str, SampleSource]:
    plans = plan_groups(split_groups(prefixes, split, samples), reading, **options)
    return {name: plan.open() for name, plan in plans.items()}


@pytest.fixture(scope="module")
def train(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> SampleSource:
    splits = open_splits(
        [(1.0, prefix)],
        "949,50,1",
        {"train": 900},
        ReadOptions(LENGTH, 7, cache_folder=tmp_path_factory.mktemp("cache")),
    )
    return splits["train"]


def sample(source: SampleSource, index: int) -> list[int]:
    out = np.empty(source.row.length, dtype=np.int64)
    source.read(index, out)
    return out.tolist()


def test_samples_are_the_tokens_of_the_maps(train: SampleSource) -> None:
    documents = numbered_documents(300)
    sizes = [len(document) for document in documents]
    order, rows, shuffle = slow_maps(
        sizes, range(285), samples=900, length=LENGTH, seed=7, share=0.95
    )
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
    assert (
        tokens.shape == labels.shape == (3, LENGTH) and tokens.dtype == labels.dtype == torch.int64
    )
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
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_global_order_depends_on_consumed_samples_alone(
    *, train: SampleSource, micro: int, replicas: int, steps: list[int], start: int
) -> None:
    """Steps of changing numbers of micro-batches, over any number of replicas, take consecutive
    samples.
    """
    consumed = start * micro * replicas
    streams = [
        SampleStream(train, micro, dp_rank=rank, dp_size=replicas, consumed_samples=consumed)
        for rank in range(replicas)
    ]
    for accumulation in steps:
        size = accumulation * micro * replicas
        if consumed + size > len(train):
            break
        got = [
            row
            for _ in range(accumulation)
            for stream in streams
            for row in next(stream)[0].tolist()
        ]
        assert got == [sample(train, index)[:-1] for index in range(consumed, consumed + size)]
        consumed += size
        assert {stream.state() for stream in streams} == {consumed}


def test_a_stream_goes_on_where_its_state_says(train: SampleSource) -> None:
    whole = [tokens.tolist() for tokens, _ in SampleStream(train, 4)]
    first = SampleStream(train, 4)
    head = [next(first)[0].tolist() for _ in range(50)]
    rest = [tokens.tolist() for tokens, _ in SampleStream(train, 4, consumed_samples=first.state())]
    assert head + rest == whole and len(whole) == len(train) // 4


def test_a_short_last_chunk_is_dropped_an_empty_stream_refused(train: SampleSource) -> None:
    stream = SampleStream(train, 7, consumed_samples=len(train) - 10)
    assert len(list(stream)) == 1
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(DataError, match="900 samples and 895 are consumed"):
        SampleStream(train, 7, consumed_samples=895)
    for wrong in ({"dp_rank": 2, "dp_size": 2}, {"consumed_samples": -1}):
        with pytest.raises(ValueError, match=r"must be positive|must not be negative"):
            SampleStream(train, 7, **wrong)


@given(jumps=st.lists(st.tuples(st.integers(0, 224), st.integers(0, 3)), min_size=1, max_size=12))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_jumps_go_anywhere(*, train: SampleSource, jumps: list[tuple[int, int]]) -> None:
    stream = SampleStream(train, 4)
    for chunk, taken in jumps:
        stream.skip_to(4 * chunk)
        for step in range(min(taken, 225 - chunk)):
            expected = [sample(train, 4 * (chunk + step) + row)[:-1] for row in range(4)]
            assert next(stream)[0].tolist() == expected
    stream.skip_to(900)
    assert next(stream, None) is None and stream.state() == 900
    with pytest.raises(DataError, match="900 samples and 904 are consumed"):
        stream.skip_to(904)
    assert stream.state() == 900
    stream.skip_to(0)
    assert next(stream)[0].tolist()[0] == sample(train, 0)[:-1]


def test_a_jump_reads_nothing_between() -> None:
    class Counting:
        row = NextTokenRow(LENGTH)
        read_numbers: ClassVar[list[int]] = []

        def __len__(self) -> int:
            return 10**12

        def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
            self.read_numbers.append(index)
            out[:] = index

    stream = SampleStream(Counting(), 2)
    next(stream)
    stream.skip_to(10**11)
    assert next(stream)[0][1, 0] == 10**11 + 1 and Counting.read_numbers == [
        0,
        1,
        10**11,
        10**11 + 1,
    ]


def test_the_stream_of_a_rank_without_data_keeps_count() -> None:
    stream = EmptyStream(5)
    stream.skip_to(9)
    assert list(stream) == [] and stream.state() == 9


def cyclic_by_rule(samples: int, micro: int, replicas: int, epochs: int) -> list[list[int]]:
    """Numbers of each micro-batch of every replica, epoch after epoch: buckets permuted by a
    generator of the epoch.
    """
    bucket = samples // (micro * replicas) * micro
    batches = []
    for epoch in range(epochs):
        generator = torch.Generator()
        generator.manual_seed(epoch)
        permutation = torch.randperm(bucket, generator=generator).tolist()
        for first in range(0, bucket, micro):
            batches += [
                [rank * bucket + number for number in permutation[first : first + micro]]
                for rank in range(replicas)
            ]
    return batches


class _Numbers:
    """Sample i is made of i."""

    row = NextTokenRow(LENGTH)

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int, out: npt.NDArray[np.int64]) -> None:
        assert 0 <= index < self.samples
        out[:] = index


@given(
    samples=st.integers(12, 60),
    micro=st.integers(1, 4),
    replicas=st.integers(1, 3),
    begin=st.integers(0, 30),
)
@settings(max_examples=60, deadline=None)
def test_cyclic_order(*, samples: int, micro: int, replicas: int, begin: int) -> None:
    """Each epoch takes every sample of a replica's bucket once, in an order of its own, from any
    point on.
    """
    expected = cyclic_by_rule(samples, micro, replicas, 75)
    chunk = micro * replicas
    streams = [
        SampleStream(
            _Numbers(samples),
            micro,
            dp_rank=rank,
            dp_size=replicas,
            consumed_samples=begin * chunk,
            order="cyclic",
        )
        for rank in range(replicas)
    ]
    got = [next(stream)[0][:, 0].tolist() for _ in range(40) for stream in streams]
    assert got == expected[begin * replicas : begin * replicas + len(got)]
    per_epoch = samples // chunk
    assert sorted(number for batch in expected[: per_epoch * replicas] for number in batch) == list(
        range(per_epoch * chunk)
    )


def test_a_cyclic_order_that_changed_its_chunk_is_refused() -> None:
    with pytest.raises(DataError, match="micro-batch size or the number of replicas has changed"):
        SampleStream(_Numbers(100), 4, dp_size=2, consumed_samples=12, order="cyclic")
    with pytest.raises(DataError, match="fewer than one micro-batch"):
        SampleStream(_Numbers(7), 4, dp_size=2, order="cyclic")


def test_mixture_takes_each_member_in_its_own_order(prefix: Path, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "other", [[60000 + token % 5000 for token in range(3000)]])
    reading = ReadOptions(LENGTH, 3, cache_folder=tmp_path / "cache")
    mixed = open_splits([(3.0, prefix), (1.0, other)], "1", {"train": 200}, reading)["train"]
    assert len(mixed) == 200
    alone = open_splits([(1.0, prefix)], "1", {"train": 151}, reading)["train"]
    sets, numbers = build_blend([3.0, 1.0], 200)
    for index in range(200):
        values = sample(mixed, index)
        assert (values[0] >= 60000) == (sets[index] == 1)
        if sets[index] == 0:
            assert values == sample(alone, int(numbers[index]))


def test_splits_share_no_document(prefix: Path, tmp_path: Path) -> None:
    splits = open_splits(
        [(1.0, prefix)],
        "80,15,5",
        {"train": 200, "valid": 40, "test": 10},
        ReadOptions(LENGTH, 1, cache_folder=tmp_path),
    )
    documents = numbered_documents(300)
    bounds = {"train": (0, 240), "valid": (240, 285), "test": (285, 300)}
    for name, source in splits.items():
        allowed = {token for document in documents[slice(*bounds[name])] for token in document}
        assert {token for index in range(len(source)) for token in sample(source, index)} <= allowed
    assert {name: len(source) for name, source in splits.items()} == {
        "train": 200,
        "valid": 40,
        "test": 10,
    }


def test_groups_with_ranges(prefix: Path, tmp_path: Path) -> None:
    groups = {
        parse_group(f"valid_{name}: 1 {span} {prefix}"): 30
        for name, span in (("a", "0:0.5"), ("b", "0.5:1"))
    }
    plans = plan_groups(groups, ReadOptions(LENGTH, 1, cache_folder=tmp_path))
    opened = {name: plan.open() for name, plan in plans.items()}
    middle = numbered_documents(300)[150][0]
    assert set(opened) == {"valid_a", "valid_b"}
    assert all(max(sample(opened["valid_a"], index)) < middle for index in range(30))
    assert all(min(sample(opened["valid_b"], index)) >= middle for index in range(30))


def test_all_ranks_open_with_one_builder_and_one_barrier(prefix: Path, tmp_path: Path) -> None:
    barrier = threading.Barrier(3, timeout=300)
    crossings: list[int] = []
    found: dict[int, list[int]] = {}

    def cross() -> None:
        crossings.append(1)
        barrier.wait()

    def rank(number: int) -> None:
        splits = open_splits(
            [(1.0, prefix)],
            "949,50,1",
            {"train": 50, "valid": 5},
            ReadOptions(LENGTH, 7, cache_folder=tmp_path),
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
        (
            {"vocabulary_size": 50},
            "document [0-9]+ holds token [0-9]+ at its place [0-9]+, the vocabulary has 50",
        ),
        ({"split": "1,x"}, "split"),
        ({"split": "1,0,0", "samples": {"valid": 4}}, "valid data: the split gives it none"),
    ],
)
def test_refusals_reach_the_barrier_and_name_the_fault(
    prefix: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    options = {
        "prefixes": [(1.0, prefix)],
        "split": "949,50,1",
        "sequence_length": LENGTH,
        "samples": {},
        **changes,
    }
    if options["prefixes"] == "two":
        options["prefixes"] = [(weight, prefix) for weight in options["weights"]]
    reached: list[int] = []
    with pytest.raises(DataError, match=words) as caught:
        open_splits(
            options["prefixes"],
            options["split"],
            {"train": 10, **options["samples"]},
            ReadOptions(options["sequence_length"], 1, options.get("vocabulary_size"), tmp_path),
            barrier=lambda: reached.append(1),
        )
    assert reached == [1] and "\n" not in str(caught.value)


def test_float_data_is_no_text(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "floats", [[1] * 50], "float32")
    with pytest.raises(DataError, match="not tokens"):
        open_splits([(1.0, prefix)], "1", {"train": 2}, ReadOptions(4, 1, 10))


@pytest.mark.parametrize("token", [64, -1])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_token_outside_the_vocabulary_is_read_where_the_look_at_the_start_has_missed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: int, workers: int
) -> None:
    """A sample of a large file stands for nothing: here it sees only the first token of each
    sixteen.
    """
    monkeypatch.setattr(sources, "FULL_TOKEN_CHECK_BYTES", 0)
    monkeypatch.setattr(sources, "TOKEN_CHECK_PARTS", 4)
    monkeypatch.setattr(sources, "TOKEN_CHECK_PART", 1)
    documents = [[3] * 16 for _ in range(4)]
    documents[2][5] = token
    prefix = write_pair(tmp_path / "late", documents, "int32")
    plan = plan_groups(split_groups([(1.0, prefix)], "1", {"train": 40}), ReadOptions(4, 1, 64))[
        "train"
    ]
    samples = Samples({"train": plan}, {"train": ("train",)}, 1, 0, 1, workers=workers)
    with contextlib.closing(samples), pytest.raises(DataError) as caught:
        list(samples.train(0, 1))
    words = f"{prefix}.bin: document 2 holds token {token} at its place 5, the vocabulary has 64"
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples")
    write_pair(path / "a", numbered_documents(300))
    write_pair(path / "b", numbered_documents(200, seed=1))
    return path


def groups(folder: Path) -> dict[str, Any]:
    return {
        "train_group": f"train: 2 0:0.9 {folder}/a, 1 0:0.9 {folder}/b",
        "valid_groups": [
            f"valid: 2 0.9:1 {folder}/a, 1 0.9:1 {folder}/b",
            f"valid_b: 1 0.9:0.95 {folder}/b",
        ],
        "test_groups": [f"test_b: 1 0.95:1 {folder}/b"],
    }


def test_groups_of_a_card(folder: Path) -> None:
    with contextlib.closing(
        opened(card(folder, groups(folder) | {"workers": 2, "valid_workers": 1}))
    ) as samples:
        assert samples.valid_groups() == ("valid", "valid_b") and samples.test_groups() == ()
        assert sum(1 for _ in samples.train(0)) == 200
        for name in samples.valid_groups():
            first, again = (
                [tokens.tolist() for tokens, _ in samples.valid(name)] for _ in range(2)
            )
            assert len(first) == 4 and first == again
        assert {int(t.max()) for t, _ in samples.valid("valid_b")} <= set(
            range(numbered_documents(200, seed=1)[190][-1])
        )
        with pytest.raises(DataError, match="no data named 'valid_c'"):
            samples.valid("valid_c")
        with pytest.raises(DataError, match="no data named 'x'; there are train, valid, valid_b"):
            samples.source("x")


def test_workers_change_nothing(folder: Path) -> None:
    found = []
    for workers in (0, 2):
        config = card(folder, groups(folder) | {"workers": workers, "valid_workers": workers})
        with contextlib.closing(opened(config, replica=1, replicas=2)) as samples:
            train = [tokens.tolist() for tokens, _ in samples.train(40)]
            found.append((train, [tokens.tolist() for tokens, _ in samples.valid("valid")]))
    assert found[0] == found[1]


def test_groups_from_files_are_the_same_as_in_the_card(folder: Path, tmp_path: Path) -> None:
    written = groups(folder)
    (tmp_path / "train.txt").write_text(f'"{written["train_group"]}"\n')
    (tmp_path / "valid.txt").write_text(
        " ".join(f'"{text}"' for text in written["valid_groups"]) + "\n"
    )
    files = {
        "train_groups_file": str(tmp_path / "train.txt"),
        "valid_groups_file": str(tmp_path / "valid.txt"),
    }
    written.pop("test_groups")
    assert wanted_data(card(folder, files)) == wanted_data(card(folder, written))
    (tmp_path / "train.txt").write_text(f'"{written["train_group"]}" "other: 1 0:1 {folder}/a"\n')
    with pytest.raises(
        DataError, match=r"train.txt holds 2 groups, and the training reads exactly one"
    ):
        wanted_data(card(folder, files))


def test_test_data_on_demand(folder: Path) -> None:
    with contextlib.closing(opened(card(folder, groups(folder)), test=True, workers=0)) as samples:
        assert samples.test_groups() == ("test_b",) and sum(1 for _ in samples.test("test_b")) == 4
    prefixes = {"prefixes": [f"{folder}/a"], "split": "80,10,10"}
    with contextlib.closing(opened(card(folder, prefixes), test=True, workers=0)) as samples:
        assert sum(1 for _ in samples.test()) == 4
        assert (samples.valid_groups(), samples.test_groups()) == (("valid",), ("test",))


def test_prefixes_without_weights_are_mixed_by_size(folder: Path) -> None:
    config = card(folder, {"prefixes": [f"{folder}/a", f"{folder}/b"]})
    tokens = [
        sum(map(len, numbered_documents(300))),
        sum(map(len, numbered_documents(200, seed=1))),
    ]
    train = next(group for group in wanted_data(config).groups if group.name == "train")
    assert [member.weight for member in train.members] == tokens
    with contextlib.closing(opened(config, workers=0)) as samples:
        assert len(samples.source("train")) == 400 and sum(1 for _ in samples.valid()) == 4
    assert (
        opened(card(folder, {"prefixes": [f"{folder}/a"]}, evaluations=0), workers=0).valid_groups()
        == ()
    )


def test_one_name_for_two_purposes_is_refused(folder: Path) -> None:
    twice = groups(folder) | {"valid_groups": [f"train: 1 0.9:1 {folder}/a"]}
    with pytest.raises(DataError, match="group train is used for two purposes"):
        wanted_data(card(folder, twice))


def test_a_rank_that_reads_nothing_starts_nothing(folder: Path) -> None:
    wanted = wanted_data(card(folder, groups(folder)))
    samples = Samples({}, wanted.roles, 2, 0, 1, workers=2, valid_workers=2)
    assert samples.valid_groups() == ("valid", "valid_b")
    stream = samples.train(8)
    assert list(stream) == [] and stream.state() == 8 and list(samples.valid("valid_b")) == []
    samples.close()


def test_cyclic_is_for_training_alone(folder: Path) -> None:
    config = card(folder, groups(folder) | {"order": "cyclic"}, train_samples=40)
    with contextlib.closing(opened(config, workers=0)) as samples:
        stream = samples.train(0)
        epochs = [[row for _ in range(20) for row in next(stream)[0].tolist()] for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
        stream.skip_to(4000)
        next(stream)
        assert sum(1 for _ in samples.valid("valid")) == 4


def test_each_data_set_is_validated_apart_when_the_card_says_so(tmp_path: Path) -> None:
    for name, count in (("fr", 300), ("en", 200)):
        write_pair(tmp_path / name / "text", numbered_documents(count, seed=count))
    prefixes = [str(tmp_path / name / "text") for name in ("fr", "en")]
    data = {
        "prefixes": prefixes,
        "weights": [0.7, 0.3],
        "split": "80,10,10",
        "validate_each": True,
        "workers": 0,
    }
    each, plain = card(tmp_path, data), card(tmp_path, data | {"validate_each": False})
    with (
        contextlib.closing(opened(each, test=True)) as found,
        contextlib.closing(opened(plain, test=True)) as usual,
    ):
        assert found.valid_groups() == (
            "valid",
            "valid_fr",
            "valid_en",
        ) and found.test_groups() == ("test",)
        assert [t.tolist() for t, _ in found.train(0)] == [t.tolist() for t, _ in usual.train(0)]
        assert [t.tolist() for t, _ in found.valid()] == [t.tolist() for t, _ in usual.valid()]
        assert [t.tolist() for t, _ in found.test()] == [t.tolist() for t, _ in usual.test()]
        english = numbered_documents(200, seed=200)
        own = {token for document in english[160:180] for token in document}
        assert {
            int(token) for tokens, _ in found.valid("valid_en") for token in tokens.flatten()
        } <= own
    assert missing_test_share(each) == "" and "test" in missing_test_share(
        card(tmp_path, data | {"split": "90,9.9,0.1"})
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"prefixes": ["/d/fr/a", "/d/fr/b"]},
            "two are in folders called 'fr'; keep each data set in a folder",
        ),
        ({"prefixes": ["/a"]}, "one of them has no such name"),
        (
            {"train_group": "t: 1 0:1 /d/fr/a", "valid_groups": ["v: 1 0:1 /d/fr/a"]},
            "belongs to data.prefixes",
        ),
    ],
)
def test_validation_sets_are_named_after_their_folders(
    tmp_path: Path, data: dict[str, Any], words: str
) -> None:
    (problem,) = data_problems(card(tmp_path, data | {"validate_each": True}))
    assert problem.key == "data.validate_each" and words in str(problem)
