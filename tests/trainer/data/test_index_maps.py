"""Index maps, mixtures and splits: the vectors of the definition, independent walks, exact arithmetic,
results of Megatron, the cache on disk, and what is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from msgspec.structs import replace

from tests.trainer.data.data_helpers import slow_maps
from trainer.contract.errors import DataError
from trainer.data import blend, index
from trainer.data.blend import advance, build_blend, member_samples, normalised
from trainer.data.groups import parse_split, split_documents
from trainer.data.index import (
    IndexMaps,
    build_index_maps,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from trainer.data.index_cache import (
    BlendKey,
    IndexMapsKey,
    digest_sizes,
    ensure_arrays,
    load_arrays,
    wait_for_arrays,
)

SIZES = np.random.RandomState(5).randint(1, 30, 200).astype(np.int32)


def key(**changes: Any) -> IndexMapsKey:
    values = {
        "data_set": "demo_text_document",
        "name": "train",
        "samples": 500,
        "sequence_length": 16,
        "seed": 1234,
        "first_document": 10,
        "end_document": 190,
        "sizes_digest": digest_sizes(SIZES, range(10, 190)),
    }
    return IndexMapsKey(**(values | changes))


def arrays(maps: IndexMaps) -> list[Any]:
    return [maps.documents.tolist(), maps.samples.tolist(), maps.shuffle.tolist()]


def ensure(folder: Path) -> bool:
    return ensure_arrays(folder, key(), partial(key().build, SimpleNamespace(sizes=SIZES)))


def kept(folder: Path) -> list[Any]:
    return [part.tolist() for part in wait_for_arrays(folder, key())]


def test_sample_index_of_the_definition() -> None:
    rows = build_sample_index(
        np.array([5, 7, 3, 10], dtype=np.int32), np.arange(4, dtype=np.int32), 4
    )
    assert rows.tolist() == [[0, 0], [0, 4], [1, 3], [2, 0], [3, 1], [3, 5], [3, 9]]
    assert rows.dtype == np.int32


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    bounds=st.tuples(st.integers(0, 29), st.integers(1, 30)),
    samples=st.integers(1, 200),
    length=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.95, 0.80]),
)
@settings(max_examples=300, deadline=None)
def test_maps_equal_the_slow_walk(
    *, sizes: list[int], bounds: tuple[int, int], samples: int, length: int, seed: int, share: float
) -> None:
    documents = range(min(bounds[0], len(sizes) - 1), min(bounds[1], len(sizes)))
    assume(sum(sizes[n] for n in documents) >= length + 1)
    maps = build_index_maps(
        np.array(sizes, dtype=np.int32),
        documents,
        samples=samples,
        sequence_length=length,
        seed=seed,
        last_epoch_share=share,
    )
    order, rows, shuffle = slow_maps(
        sizes, documents, samples=samples, length=length, seed=seed, share=share
    )
    assert maps.documents.tolist() == order
    assert [tuple(row) for row in maps.samples.tolist()] == rows
    assert maps.shuffle.tolist() == shuffle
    assert (maps.documents.dtype, maps.samples.dtype, maps.shuffle.dtype) == (
        np.int32,
        np.int32,
        np.uint32,
    )
    # Enough samples, each used once; every epoch uses each document once.
    assert len(maps) >= samples and sorted(shuffle) == list(range(len(maps)))
    epochs = len(order) // len(documents)
    assert sorted(order) == sorted(list(documents) * epochs)
    tokens = sum(sizes[n] for n in documents)
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // length < samples


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    length=st.integers(1, 30),
    at_once=st.integers(1, 9),
    wide=st.booleans(),
)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_pieces_of_the_documents_make_the_same_index(
    *, monkeypatch: pytest.MonkeyPatch, sizes: list[int], length: int, at_once: int, wide: bool
) -> None:
    assume(sum(sizes) >= length + 1)
    order = np.arange(len(sizes), dtype=np.int32)
    whole = build_sample_index(np.array(sizes, dtype=np.int32), order, length)
    monkeypatch.setattr(index, "DOCUMENTS_AT_ONCE", at_once)
    pieces = build_sample_index(
        np.array(sizes, dtype=np.int64 if wide else np.int32), order, length
    )
    assert pieces.tolist() == whole.tolist()


def test_documents_beyond_32_bits_together() -> None:
    sizes = np.array([2**31 - 1, 2**31 - 1, 5], dtype=np.int64)
    rows = build_sample_index(sizes, np.arange(3, dtype=np.int32), 2**30)
    assert rows.tolist() == [[0, 0], [0, 2**30], [1, 1], [1, 2**30 + 1], [2, 2]]


# Digests of the maps that megatron-core 0.16.1 builds (its last-epoch share is 0.80), over types,
# shapes and values: documents, least length, length bound, first and end document, samples,
# sequence length, seed.
MEGATRON = [
    ((1000, 1, 400, 0, 949, 500, 128, 1234), "1ebf96ef0f7e8cab"),
    ((1000, 1, 400, 0, 949, 2000, 128, 1234), "302196eb483fe06a"),
    ((1000, 1, 400, 949, 999, 900, 128, 42), "23bc5a04c5466a95"),
    ((50, 0, 20, 3, 47, 1000, 16, 7), "876394b60293be62"),
    ((4, 5, 6, 0, 4, 3, 4, 0), "c273871cdbb330dc"),
]


@pytest.mark.parametrize(("case", "expected"), MEGATRON)
def test_maps_equal_megatron(case: tuple[int, ...], expected: str) -> None:
    count, low, high, first, end, samples, length, seed = case
    sizes = np.random.RandomState(count + samples).randint(low, high, count).astype(np.int32)
    maps = build_index_maps(
        sizes,
        range(first, end),
        samples=samples,
        sequence_length=length,
        seed=seed,
        last_epoch_share=0.80,
    )
    digest = hashlib.blake2b(digest_size=8)
    for array in (maps.documents, maps.samples, maps.shuffle):
        digest.update(str(array.dtype).encode() + str(array.shape).encode() + array.tobytes())
    assert digest.hexdigest() == expected


@pytest.mark.parametrize(
    ("samples", "epochs", "apart", "before"),
    # 1,001 tokens, sequence 10: 100 samples in one epoch, 200 in two, 300 in three.
    [
        (100, 1, False, 0),
        (101, 2, True, 100),
        (194, 2, True, 100),
        (195, 2, False, 100),
        (200, 2, False, 100),
    ],
)
def test_last_epoch_is_kept_apart_below_the_share(
    samples: int, epochs: int, apart: bool, before: int
) -> None:
    plan = plan_epochs(1001, samples, 10)
    assert (plan.epochs, plan.separate_last, plan.samples_before_last) == (epochs, apart, before)


def test_separated_epoch_comes_last() -> None:
    shuffle = build_shuffle_index(7, 10, np.random.RandomState(0))
    assert sorted(shuffle[:7].tolist()) == list(range(7)) and sorted(shuffle[7:].tolist()) == [
        7,
        8,
        9,
    ]


def test_too_little_data_is_refused() -> None:
    with pytest.raises(DataError, match="16 tokens, one sample needs sequence_length \\+ 1 = 17"):
        plan_epochs(16, 1, 16)
    with pytest.raises(DataError, match="0 samples"):
        plan_epochs(100, 0, 16)


def test_name_holds_everything() -> None:
    base = key()
    changes = {
        "data_set": "other",
        "name": "valid",
        "samples": 501,
        "sequence_length": 17,
        "seed": 1,
        "first_document": 11,
        "end_document": 191,
        "sizes_digest": "0",
        "last_epoch_share": 0.8,
        "revision": 2,
    }
    stems = {base.stem} | {replace(base, **{name: value}).stem for name, value in changes.items()}
    assert len(stems) == 11
    assert set(changes) == set(base.__struct_fields__), "a field of the key is not tried here"
    assert base.stem.startswith("demo_text_document_train_indexmap_500ns_16sl_1234s_")


def test_digest_depends_on_the_range_alone() -> None:
    other = SIZES.copy()
    other[5] += 1
    assert digest_sizes(other, range(10, 190)) == digest_sizes(
        SIZES.astype(np.int64), range(10, 190)
    )
    other[10] += 1
    assert digest_sizes(other, range(10, 190)) != digest_sizes(SIZES, range(10, 190))


def test_built_once_and_read_after(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert load_arrays(folder, key(), check_digests=True) is None
    assert ensure(folder) is True
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ensure(folder) is False
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    assert sorted(times) == sorted(
        [f"{key().stem}.json", *(f"{key().stem}_{part}_idx.npy" for part in key().parts)]
    )
    fresh = build_index_maps(SIZES, range(10, 190), samples=500, sequence_length=16, seed=1234)
    assert kept(folder) == arrays(fresh)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("victim", [*IndexMapsKey.parts, "record"])
def test_damage_is_found_and_repaired(tmp_path: Path, damage: Any, victim: str) -> None:
    ensure(tmp_path)
    sound = kept(tmp_path)
    if victim == "record":
        damage(key().record_path(tmp_path))
    else:
        damage(key().part_path(tmp_path, victim))
    assert ensure(tmp_path) is True
    assert kept(tmp_path) == sound


def test_maps_that_never_appear_are_an_error_and_no_hang(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did not appear"):
        wait_for_arrays(tmp_path, key(), seconds=0.0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"writing index maps to .*file/cache"):
        ensure(tmp_path / "file" / "cache")


def blend_key(**changes: Any) -> BlendKey:
    return BlendKey(**({"name": "train", "weights": (0.5, 0.3, 0.2), "samples": 100} | changes))


def test_the_order_of_a_mixture_is_kept_and_named_after_it(tmp_path: Path) -> None:
    blend = blend_key()
    assert ensure_arrays(tmp_path, blend, blend.build) is True
    assert ensure_arrays(tmp_path, blend, blend.build) is False
    sets, numbers = wait_for_arrays(tmp_path, blend)
    fresh = build_blend([0.5, 0.3, 0.2], 100)
    assert sets.tolist() == fresh[0].tolist() and numbers.tolist() == fresh[1].tolist()
    others = [{"name": "valid"}, {"weights": (0.5, 0.2, 0.3)}, {"samples": 101}, {"revision": 2}]
    assert len({blend_key().stem} | {blend_key(**change).stem for change in others}) == 5
    assert {name for change in others for name in change} == set(BlendKey.__struct_fields__)
    for part in blend.parts:
        flip(blend.part_path(tmp_path, part))
        assert ensure_arrays(tmp_path, blend, blend.build) is True
    assert wait_for_arrays(tmp_path, blend)[1].tolist() == fresh[1].tolist()


WEIGHTS = st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=8)


def slow_blend(weights: list[float], samples: int) -> list[int]:
    """The greedy rule in plain Python floats, which are numpy's."""
    once = np.array(normalised(weights))
    shares = (once / np.sum(once)).tolist()
    counts = [0] * len(weights)
    chosen = []
    for place in range(samples):
        behind = [
            share * max(place, 1) - count for share, count in zip(shares, counts, strict=True)
        ]
        best = behind.index(max(behind))
        counts[best] += 1
        chosen.append(best)
    return chosen


def test_blend_of_the_definition() -> None:
    sets, numbers = build_blend([0.5, 0.3, 0.2], 10)
    assert sets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert numbers.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert sets.dtype == np.uint8 and numbers.dtype == np.int64


@given(weights=WEIGHTS, samples=st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_blend_is_the_greedy_rule(weights: list[float], samples: int) -> None:
    sets, numbers = build_blend(weights, samples)
    assert sets.tolist() == slow_blend(weights, samples)
    seen: Counter[int] = Counter()
    for chosen, number in zip(sets.tolist(), numbers.tolist(), strict=True):
        assert number == seen[chosen]
        seen[chosen] += 1
    for member, share in enumerate(normalised(weights)):
        assert seen[member] <= share * samples + 1
        # No member is asked for more than was prepared of it.
        assert seen[member] <= member_samples(weights, samples)[member]


@given(
    weights=st.lists(st.floats(1e-5, 1.0), min_size=2, max_size=6),
    samples=st.integers(500, 2500),
    block=st.integers(300, 3000),
    segments=st.integers(1, 40),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_segments_side_by_side_make_the_sequential_choices(
    *,
    monkeypatch: pytest.MonkeyPatch,
    weights: list[float],
    samples: int,
    block: int,
    segments: int,
) -> None:
    monkeypatch.setattr(blend, "BLEND_WARM_UP", 1)
    monkeypatch.setattr(blend, "BLEND_SEGMENTS", segments)
    monkeypatch.setattr(blend, "BLEND_BLOCK", block)
    assert build_blend(weights, samples)[0].tolist() == slow_blend(weights, samples)


def test_wrong_guesses_are_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_the_first(
        shares: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], at_least: object = None
    ) -> npt.NDArray[np.float64]:
        return np.stack([positions.astype(float), *[np.zeros(len(positions))] * (len(shares) - 1)])

    monkeypatch.setattr(blend, "BLEND_WARM_UP", 1)
    monkeypatch.setattr(blend, "_guess", all_of_the_first)
    assert build_blend([0.2, 0.5, 0.3], 1500)[0].tolist() == slow_blend([0.2, 0.5, 0.3], 1500)


def test_rare_members_are_found_whatever_the_segments_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [1e-4] * 4 + [0.31, 0.27, 0.2, 0.13, 0.05]
    expected = slow_blend(weights, 30_000)
    # so that whole rows of segments begin before and after the moment it is taken
    assert expected.count(0) >= 2
    for segments in (3, 100, 1 << 14):
        monkeypatch.setattr(blend, "BLEND_SEGMENTS", segments)
        assert build_blend(weights, 30_000)[0].tolist() == expected


@given(weights=WEIGHTS, samples=st.integers(1, 200), more=st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_a_longer_mixture_only_appends(weights: list[float], samples: int, more: int) -> None:
    short, long = build_blend(weights, samples), build_blend(weights, samples + more)
    assert (
        short[0].tolist() == long[0][:samples].tolist()
        and short[1].tolist() == long[1][:samples].tolist()
    )


# Digests of the choices of megatron-core 0.16.1's compiled code, the members as int16: weights,
# samples.
def uneven(seed: int, count: int) -> list[float]:
    return (np.random.RandomState(seed).pareto(1.0, count) + 1e-4).tolist()


MEGATRON_BLENDS = [
    ([0.5, 0.3, 0.2], 100_000, "81e3962a7a22392d"),
    ([1.0, 1.0, 1.0, 1.0], 20_000, "88125b4e53ffd22b"),
    ([1e-6, 0.3, 1e-6, 0.7], 100_000, "9617fe403e98f08a"),
    (uneven(1, 28), 200_000, "14b6ad0baf02f645"),
    (uneven(2, 28), 200_000, "b502ba19a4e29646"),
    (uneven(3, 3), 100_000, "015b23bd979d39d5"),
    (uneven(4, 250), 100_000, "feeb298a9f96e217"),
]


@pytest.mark.parametrize(("weights", "samples", "expected"), MEGATRON_BLENDS)
def test_blends_equal_megatron(weights: list[float], samples: int, expected: str) -> None:
    sets, numbers = build_blend(weights, samples)
    digest = hashlib.blake2b(sets.astype(np.int16).tobytes() + numbers.tobytes(), digest_size=8)
    assert digest.hexdigest() == expected


def test_more_members_than_a_byte_holds() -> None:
    sets, _ = build_blend([1.0] * 300, 600)
    assert Counter(sets.tolist()) == dict.fromkeys(range(300), 2)


def test_members_are_asked_for_their_share_and_a_little_more() -> None:
    assert member_samples([3.0], 1000) == (1000,)
    assert member_samples([0.5, 0.5], 1000) == (503, 503)
    assert member_samples([1.0, 999.0], 1000) == (2, 1004)


@pytest.mark.parametrize(
    "weights", [[], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]]
)
def test_weights_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(DataError, match="positive"):
        normalised(weights)


@pytest.mark.parametrize(
    ("split", "count", "bounds"),
    [
        ("949,50,1", 1000, (949, 999, 1000)),
        ("949,50,1", 1949, (1850, 1947, 1949)),
        ("969, 30, 1", 100, (97, 100, 100)),
        ("1", 7, (7, 7, 7)),
        ("1,1,1", 4, (2, 3, 4)),
        (
            "50,50",
            3,
            (1, 3, 3),
        ),  # both round 1.5 up to 2; the excess of 1 comes off all but the first boundary
    ],
)
def test_split_rule(split: str, count: int, bounds: tuple[int, ...]) -> None:
    assert tuple(part.stop for part in split_documents(split, count)) == bounds


@given(
    shares=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    count=st.integers(0, 5000),
)
@settings(deadline=None)
def test_splits_cover_everything_once(shares: list[int], count: int) -> None:
    parts = split_documents(",".join(map(str, shares)), count)
    assert [number for part in parts for number in part] == list(range(count))
    for part, share in zip(parts, [*shares, 0, 0], strict=False):
        assert abs(len(part) - Fraction(share, sum(shares)) * count) <= 2


@pytest.mark.parametrize("split", ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1", "inf,1"])
def test_malformed_splits_are_refused(split: str) -> None:
    with pytest.raises(DataError, match="split"):
        parse_split(split)


# ----------------------------------------------------------------------------- greedy
# The greedy rule in fixed point and in float64: the same choices, also where two members are
# equally far behind.

Columns = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def plain(
    shares: list[float], counts: list[int], sample: int, steps: int
) -> tuple[list[int], list[int]]:
    """The rule of one column in Python's floats: members and how often each was taken before."""
    held, chosen, taken = list(counts), [], []
    for place in range(sample, sample + steps):
        behind = [share * max(place, 1) - count for share, count in zip(shares, held, strict=True)]
        best = behind.index(max(behind))
        chosen.append(best)
        taken.append(held[best])
        held[best] += 1
    return chosen, taken


@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=40)
    | st.lists(st.integers(1, 9), min_size=1, max_size=9),
    first=st.integers(0, 2**36),
    steps=st.integers(1, 200),
)
@settings(max_examples=60, deadline=None)
def test_every_column_follows_the_rule(weights: list[float], first: int, steps: int) -> None:
    shares = np.array(weights, dtype=np.float64) / np.sum(weights)
    positions = first + np.arange(5) * 77
    counts = blend._guess(shares, positions)
    begins = counts.copy()
    sets, numbers = np.empty((5, steps), np.uint8), np.empty((5, steps), np.int64)
    advance(shares, counts, positions, steps, sets, numbers)
    for column, position in enumerate(positions.tolist()):
        chosen, taken = plain(
            shares.tolist(), begins[:, column].astype(int).tolist(), position, steps
        )
        assert sets[column].tolist() == chosen and numbers[column].tolist() == taken
    added = [np.bincount(row, minlength=len(shares)) for row in sets]
    assert np.array_equal(counts, begins + np.stack(added, axis=1))


@given(
    shift=st.lists(st.integers(-40, 40), min_size=4, max_size=4),
    position=st.integers(1000, 10**9),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_counts_far_from_any_plausible_ones(shift: list[int], position: int) -> None:
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    counts = np.maximum(np.floor(shares * position) + shift, 0)[:, None]
    sets, numbers = np.empty((1, 90), np.uint8), np.empty((1, 90), np.int64)
    expected = plain(shares.tolist(), counts[:, 0].astype(int).tolist(), position, 90)
    advance(shares, counts, np.array([position]), 90, sets, numbers)
    assert (sets[0].tolist(), numbers[0].tolist()) == expected


def test_clear_choices_are_made_in_fixed_point_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made_exactly = []
    real = blend._Exactly.advance

    def counted(self: blend._Exactly, *arguments: Any) -> None:
        made_exactly.append(self.columns)
        real(self, *arguments)

    monkeypatch.setattr(blend._Exactly, "advance", counted)
    shares = np.array([0.31830988, 0.36787944, 0.31381068])
    positions = np.arange(1000, 201_000, 1000)
    advance(shares, blend._guess(shares, positions), positions, 128)
    assert sum(made_exactly) < 20  # of 400 columns' tiles
    made_exactly.clear()
    advance(
        np.array([0.5, 0.3, 0.2]),
        blend._guess(np.array([0.5, 0.3, 0.2]), positions),
        positions,
        128,
    )
    assert sum(made_exactly) == 400
