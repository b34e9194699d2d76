"""Fingerprints: the numbers are NumPy's, and the digest tells any change apart, however the tensor
was cut.
"""

from __future__ import annotations

import itertools
import json
import math
import re

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trainer.checkpoint import fingerprint as module
from trainer.checkpoint.fingerprint import EMPTY, TABLE_HEAD, Fingerprint, fingerprint, table_row

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=50, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 99))
def test_numbers_are_those_of_numpy(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    tensor = drawn(shape, dtype, seed)
    found, exact = fingerprint(tensor), tensor.to(torch.float64).numpy()
    assert (found.minimum, found.maximum, found.count) == (exact.min(), exact.max(), exact.size)
    assert math.isclose(found.mean, exact.mean(), rel_tol=1e-12, abs_tol=1e-15)
    assert math.isclose(found.norm, numpy.linalg.norm(exact.ravel()), rel_tol=1e-12)
    assert found.non_finite == 0


@settings(max_examples=50, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 99), st.data())
def test_a_cut_tensor_has_the_fingerprint_of_the_whole(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor, dim = drawn(shape, dtype, seed), data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted(data.draw(st.sets(st.integers(0, shape[dim]))) | {0, shape[dim]})
    joined = EMPTY
    for low, high in itertools.pairwise(cuts):
        offsets = [low if inner == dim else 0 for inner in range(len(shape))]
        joined = joined.joined(fingerprint(tensor.narrow(dim, low, high - low), shape, offsets))
    whole = fingerprint(tensor)
    assert joined.digest == whole.digest
    assert (joined.count, joined.minimum, joined.maximum) == (
        whole.count,
        whole.minimum,
        whole.maximum,
    )
    assert math.isclose(joined.norm, whole.norm, rel_tol=1e-12)
    assert math.isclose(joined.mean, whole.mean, rel_tol=1e-9, abs_tol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 40), st.sampled_from(DTYPES), st.integers(0, 99), st.data())
def test_a_changed_bit_or_two_swapped_change_the_digest(
    size: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = drawn((size,), dtype, seed)
    before = fingerprint(tensor).digest
    bits = tensor.clone().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )
    place = data.draw(st.integers(0, size - 1))
    bits[place] ^= 1 << data.draw(st.integers(0, 8 * tensor.element_size() - 2))
    assert fingerprint(bits.view(dtype)).digest != before
    other = data.draw(st.integers(0, size - 1))
    if tensor[place] != tensor[other]:
        traded = tensor.clone()
        traded[place], traded[other] = tensor[other], tensor[place]
        assert fingerprint(traded).digest != before


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = drawn((9, 4), torch.bfloat16, 1)
    whole = fingerprint(tensor)
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 9)
    assert fingerprint(tensor).digest == whole.digest


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.inf, 2.0], []])
def test_what_is_not_finite_survives_json(values: list[float]) -> None:
    found = fingerprint(torch.tensor(values))
    again = Fingerprint.from_document(json.loads(json.dumps(found.document(), allow_nan=False)))
    assert again.digest == found.digest
    assert again.non_finite == found.non_finite == sum(not math.isfinite(value) for value in values)
    if any(map(math.isnan, values)):
        assert all(map(math.isnan, (found.minimum, found.maximum, found.mean, found.norm)))
        assert math.isnan(found.joined(fingerprint(torch.ones(3))).maximum)


def test_table_has_the_columns_of_the_original() -> None:
    assert TABLE_HEAD == "     min           max          mean        l2 norm    metadata"
    row = table_row("h.weight", fingerprint(torch.tensor([[-1.5, 2.0]])), (1, 2))
    assert row == "-1.500000e+00  2.000000e+00  2.500000e-01 2.500000e+00 h.weight [1, 2]"
    assert re.fullmatch(
        r"nan", table_row("x", fingerprint(torch.tensor([math.nan])), (1,)).split()[0]
    )
