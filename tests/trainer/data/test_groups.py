"""Named groups: their spelling, files of them, and refusals that name group, part and field."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.data.data_helpers import numbered_documents, write_pair
from trainer.contract.errors import DataError
from trainer.data.groups import (
    DataGroup,
    Member,
    parse_group,
    parse_groups,
    parse_range,
    read_groups_file,
)
from trainer.data.sources import ReadOptions, plan_groups


def test_groups_as_the_original_spells_them() -> None:
    group = parse_group("train: 0.25 0:0.95 data/a_text_document, 0.75 0.5:1 data/b_text_document")
    assert group.name == "train"
    assert group.members == (
        Member(0.25, "data/a_text_document", 0.0, 0.95),
        Member(0.75, "data/b_text_document", 0.5, 1.0),
    )
    # Half to even: 0.5 * 5 = 2.5 is 2, 0.5 * 7 = 3.5 is 4.
    assert group.members[1].documents(5) == range(2, 5) and group.members[1].documents(7) == range(
        4, 7
    )


MEMBERS = st.builds(
    lambda weight, bounds, prefix: Member(weight, prefix, min(bounds), max(bounds)),
    weight=st.floats(1e-9, 1e6),
    bounds=st.lists(st.floats(0, 1), min_size=2, max_size=2, unique=True),
    prefix=st.text("abz/_-.:0", min_size=1, max_size=12),
)


@given(
    name=st.from_regex(r"[a-z][a-z0-9_-]{0,9}", fullmatch=True),
    members=st.lists(MEMBERS, min_size=1, max_size=4),
)
def test_a_group_is_read_as_it_is_written(name: str, members: list[Member]) -> None:
    group = DataGroup(name, tuple(members))
    assert parse_group(str(group)) == group


@given(bounds=st.tuples(st.integers(0, 1000), st.integers(0, 1000)), count=st.integers(0, 10**6))
def test_ranges_that_meet_share_no_document(bounds: tuple[int, int], count: int) -> None:
    low, high = sorted(bounds)
    edges = [0.0, low / 1000, high / 1000, 1.0]
    parts = [Member(1.0, "p", start, end).documents(count) for start, end in pairwise(edges)]
    assert [part.stop for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert parts[0].start == 0 and parts[-1].stop == count
    assert abs(parts[0].stop - Fraction(low, 1000) * count) <= Fraction(1, 2) + Fraction(1, 10**6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.5 0:1 a", "group '0.5 0': the name .* must be letters"),
        ("train 1 a", "has no name"),
        ("a/b: 1 0:1 p", "the name .* must be letters"),
        ("train: 0.5 a", "group train, part 1: '0.5 a' has 2 fields, expected 3"),
        (
            "train: 1 0:1 a, 1 0:1 my data",
            "group train, part 2: .* has 4 fields, .* no space and no comma",
        ),
        ("train: 1 0:1 a,", "group train, part 2: '' has 0 fields"),
        ("train: x 0:1 a", "group train, part 1, weight of a: 'x' is not a number"),
        ("train: nan 0:1 a", "weight of a: 'nan' is not a number"),
        ("train: 1 0:1 a, 0 0:1 b", "group train, part 2, weight of b: 0 must be more than 0"),
        ("train: -1 0:1 a", "must be more than 0"),
        (
            "train: 1 0.5:0.5 a",
            "group train, part 1, data range '0.5:0.5' must have 0 <= START < END <= 1",
        ),
        ("train: 1 0.9:0.5 a", "START < END"),
        ("train: 1 0:1.5 a", "START < END"),
        ("train: 1 0:x a", "range '0:x': 'x' is not a number"),
        ("train: 1 1 a", "must be START:END"),
        (": 1 0:1 a", "no name"),
    ],
)
def test_malformed_groups_are_refused(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        parse_group(text)
    assert "\n" not in str(caught.value)


def test_a_name_is_used_once() -> None:
    with pytest.raises(DataError, match="group valid is given 2 times"):
        parse_groups(["valid: 1 0:1 a", "valid: 1 0:1 b"])


def test_ranges() -> None:
    assert parse_range("0.949:0.999") == (0.949, 0.999)
    with pytest.raises(DataError, match="must be START:END"):
        parse_range("0.5")


def test_a_file_of_groups(tmp_path: Path) -> None:
    file = tmp_path / "splits.txt"
    file.write_text('"valid: 0.5 0.95:1.0 a, 0.5 0.95:1.0 b" "valid_ar: 1 0.95:1.0 a"\n')
    assert [group.name for group in read_groups_file(file)] == ["valid", "valid_ar"]
    assert read_groups_file(file)[1].members == (Member(1.0, "a", 0.95, 1.0),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "exactly one line"),
        (b'"train: 1 0:1 a"', "exactly one line"),
        (b'"train: 1 0:1 a"\n"valid: 1 0:1 a"\n', "exactly one line"),
        (b"train: 1 0:1 a\n", "begins and ends with a double quote"),
        (b'"\n', "double quote"),
        (b'"train: 1 0:1 a" "train: 1 0:1 b"\n', "splits.txt: data group train is given 2 times"),
        (b'"train: 1 0:1 a"  "valid: 1 0:1 b"\n', r"splits.txt: data group train, part 1"),
        (b'"train: 1 0:1 \xff"\n', "is not text"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "splits.txt").write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_groups_file(tmp_path / "splits.txt")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(DataError, match=r"reading /nowhere/splits.txt: there is no such file"):
        read_groups_file("/nowhere/splits.txt")


def test_members_are_planned_with_their_share_and_range(tmp_path: Path) -> None:
    a = write_pair(tmp_path / "a", numbered_documents(100))
    b = write_pair(tmp_path / "b", numbered_documents(61, seed=1))
    groups = {
        parse_group(f"train: 3 0:0.5 {a}, 1 0.5:1 {b}"): 1000,
        parse_group(f"valid_a: 7 0.5:1 {a}"): 40,
    }
    plans = plan_groups(groups, ReadOptions(8, 1, cache_folder=tmp_path / "cache"))
    train, valid = plans["train"], plans["valid_a"]
    # ceil of 1,000 x share x 1.005
    assert [member.key.samples for member in train.members] == [754, 252]
    assert [member.key.samples for member in valid.members] == [40] and valid.blend is None
    assert [(member.key.first_document, member.key.end_document) for member in train.members] == [
        (0, 50),
        (30, 61),
    ]
    assert len(train.open()) == 1000 and len(valid.open()) == 40


def test_another_range_or_weight_never_reuses_a_map(tmp_path: Path) -> None:
    """Of one name, number of samples, length and seed: the original's file names do not tell these
    apart.
    """
    a = write_pair(tmp_path / "a", numbered_documents(100))
    b = write_pair(tmp_path / "b", numbered_documents(100, seed=1))
    seen = []
    for text in (
        f"1 0:0.5 {a}, 1 0:1 {b}",
        f"1 0.5:1 {a}, 1 0:1 {b}",
        f"1 0:0.5 {a}, 1.00001 0:1 {b}",
    ):
        plan = plan_groups(
            {parse_group(f"train: {text}"): 200}, ReadOptions(8, 1, cache_folder=tmp_path / "cache")
        )
        source = plan["train"].open()
        rows = np.empty((200, 9), np.int64)
        for index in range(200):
            source.read(index, rows[index])
        seen.append((plan["train"].members[0].key.stem, plan["train"].blend, rows.tobytes()))
    assert len({stem for stem, _, _ in seen}) == 2 and len({rows for _, _, rows in seen}) >= 2
    assert seen[0][1] == seen[1][1] != seen[2][1]
