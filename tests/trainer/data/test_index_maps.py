"""Index maps: the definition's vector, an independent walk, Megatron's own results, and the cache
on disk.
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.trainer.data.data_helpers import slow_maps
from trainer.contract.errors import DataError
from trainer.data import index
from trainer.data.blend import build_blend
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
