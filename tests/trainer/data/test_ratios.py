"""Files of groups from ratios: the exact bytes, whole at any moment, and readable by the parser;
shares by size.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.trainer.child_requests import request_of
from tests.trainer.data.data_helpers import ROOT, numbered_documents, run_data, write_pair
from trainer.contract.errors import DataError
from trainer.data.commands_look import (
    Ratio,
    groups_line,
    range_of,
    read_ratios,
    sampling_probabilities,
    sum_warning,
    write_groups,
    write_ratios,
)
from trainer.data.groups import (
    DataGroup,
    Member,
    parse_group,
    parse_groups,
    parse_range,
    read_groups_file,
)
from trainer.data.sources import ReadOptions, plan_groups

ENTRIES = [
    {"dataset_path": "/data/ar/tok_ar_text_document", "ratio": 0.25},
    {"dataset_path": "/data/fr/tok_fr_text_document", "ratio": 0.7499998309128709},
    {"dataset_path": "/data/indic-as/tok_as_text_document", "ratio": 1.6908712906621913e-07},
]


def ratios_file(folder: Path, entries: object) -> Path:
    (folder / "ratios.json").write_text(json.dumps(entries))
    return folder / "ratios.json"


def test_the_training_line_byte_for_byte(tmp_path: Path) -> None:
    assert (
        write_groups(read_ratios(ratios_file(tmp_path, ENTRIES)), "train", tmp_path / "out.txt")
        is True
    )
    assert (tmp_path / "out.txt").read_bytes() == (
        b'"train: 0.25 0:0.950 /data/ar/tok_ar_text_document, '
        b"0.7499998309128709 0:0.950 /data/fr/tok_fr_text_document, "
        b'1.6908712906621913e-07 0:0.950 /data/indic-as/tok_as_text_document"\n'
    )


def test_the_validation_line_byte_for_byte(tmp_path: Path) -> None:
    write_groups(read_ratios(ratios_file(tmp_path, ENTRIES)), "valid", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_bytes() == (
        b'"valid: 0.25 0.950:1.0 /data/ar/tok_ar_text_document, '
        b"0.7499998309128709 0.950:1.0 /data/fr/tok_fr_text_document, "
        b'1.6908712906621913e-07 0.950:1.0 /data/indic-as/tok_as_text_document" '
        b'"valid_ar: 1 0.950:1.0 /data/ar/tok_ar_text_document" '
        b'"valid_fr: 1 0.950:1.0 /data/fr/tok_fr_text_document" '
        b'"valid_indic-as: 1 0.950:1.0 /data/indic-as/tok_as_text_document"\n'
    )
    assert len(read_groups_file(tmp_path / "out.txt")) == 4


@given(values=st.lists(st.floats(1e-12, 1.0), min_size=1, max_size=28))
def test_what_is_written_is_read_with_every_digit(values: list[float]) -> None:
    ratios = [Ratio(f"/d/l{n}/p", value) for n, value in enumerate(values)]
    for split in ("train", "valid"):
        groups = parse_groups(groups_line(ratios, split)[1:-2].split('" "'))
        assert [member.weight for member in groups[0].members] == values
        assert len(groups) == (1 if split == "train" else 1 + len(values))


def test_an_equal_file_is_left_alone(tmp_path: Path) -> None:
    ratios = read_ratios(ratios_file(tmp_path, ENTRIES))
    write_groups(ratios, "train", tmp_path / "out.txt")
    before = (tmp_path / "out.txt").stat()
    assert write_groups(ratios, "train", tmp_path / "out.txt") is False
    after = (tmp_path / "out.txt").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_many_writers_and_a_reader_that_never_sees_a_part(tmp_path: Path) -> None:
    """Two trainings of different ratios write one file: it is one's or the other's at every moment."""
    kinds = [[Ratio(f"/d/l{n}/{name * 50}", 1 / 400) for n in range(400)] for name in "ab"]
    expected = {groups_line(ratios, "valid") for ratios in kinds}
    output = tmp_path / "out.txt"
    write_groups(kinds[0], "valid", output)
    stop = threading.Event()

    def write(ratios: list[Ratio]) -> None:
        while not stop.is_set():
            write_groups(ratios, "valid", output)

    threads = [threading.Thread(target=write, args=(ratios,)) for ratios in (*kinds, *kinds)]
    for thread in threads:
        thread.start()
    seen = {output.read_text() for _ in range(300)}
    stop.set()
    for thread in threads:
        thread.join()
    assert seen <= expected and [path.name for path in tmp_path.iterdir()] == ["out.txt"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "at least one entry"),
        ({"a": 1}, "must hold a list"),
        ([{"ratio": 1}], "entry 1 is not of the form"),
        (
            [*ENTRIES, {"dataset_path": "/a/b", "ratio": "x"}],
            "entry 4: ratio 'x' of /a/b is not a number above 0",
        ),
        ([{"dataset_path": "/a/b", "ratio": 0}], "not a number above 0"),
        ([{"dataset_path": "/a/b", "ratio": True}], "not a number above 0"),
        ([{"dataset_path": "/a/my data", "ratio": 1}], "holds a space"),
        ([{"dataset_path": "", "ratio": 1}], "is not a path"),
    ],
)
def test_faulty_ratios_are_named(tmp_path: Path, entries: object, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        read_ratios(ratios_file(tmp_path, entries))
    assert "\n" not in str(caught.value)


def test_sums_are_checked(tmp_path: Path) -> None:
    assert sum_warning([Ratio("/a/b", 1.0000000000125007)]) is None
    assert "2 ratios sum to 0.75, not to 1" in str(
        sum_warning([Ratio("/a/b", 0.5), Ratio("/c/d", 0.25)])
    )
    with pytest.raises(DataError, match="group valid_ar is given 2 times"):
        groups_line([Ratio("/data/ar/one", 0.5), Ratio("/data/ar/two", 0.5)], "valid")
    with pytest.raises(DataError, match="has no folder"):
        groups_line([Ratio("one", 1.0)], "valid")


def test_the_command(tmp_path: Path) -> None:
    ratios = ratios_file(tmp_path, ENTRIES[:2])
    words = ["ratios", "--dataset-ratios-path", ratios, "--output", tmp_path / "out.txt", "--split"]
    done = run_data(*words, "valid", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["groups"] == 3
    assert "WARNING" not in done.stderr
    ratios_file(tmp_path, ENTRIES[:1])
    done = run_data(*words, "train")
    assert done.returncode == 0 and "the 1 ratios sum to 0.25, not to 1" in done.stderr
    done = run_data(*words, "test")
    assert done.returncode == 0 and "make train and valid with --shares 949,50,1 too" in done.stderr
    assert (
        tmp_path / "out.txt"
    ).read_text() == '"test: 0.25 0.999:1.0 /data/ar/tok_ar_text_document"\n'
    done = run_data(*words, "train", "--shares", "949,50,1")
    assert (
        tmp_path / "out.txt"
    ).read_text() == '"train: 0.25 0:0.949 /data/ar/tok_ar_text_document"\n'
    before = (tmp_path / "out.txt").read_bytes()
    done = run_data(*words, "test", "--shares", "950,50,0")
    assert (
        done.returncode == 1 and "--shares 950,50,0 leaves test no part of the data" in done.stderr
    )
    assert (tmp_path / "out.txt").read_bytes() == before


@given(shares=st.tuples(*(st.integers(1, 999) for _ in "abc")))
def test_ranges_meet_and_cover_everything(shares: tuple[int, int, int]) -> None:
    ranges = [
        range_of(split, ",".join(map(str, shares))).split(":")
        for split in ("train", "valid", "test")
    ]
    assert ranges[0][0] == "0" and float(ranges[2][1]) == 1
    assert ranges[0][1] == ranges[1][0] and ranges[1][1] == ranges[2][0]


def test_two_commands_at_once(tmp_path: Path) -> None:
    words = [
        "ratios",
        "--dataset-ratios-path",
        ratios_file(tmp_path, ENTRIES),
        "--split",
        "train",
        "--output",
    ]
    request = request_of("data", [*words, tmp_path / "out.txt"])
    command = [sys.executable, "-m", "trainer.data", request]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in "ab"
    ]
    assert [process.wait(300) for process in running] == [0, 0]
    assert read_groups_file(tmp_path / "out.txt")[0].name == "train"


def test_shares_by_size(tmp_path: Path) -> None:
    sizes = {"en": 4000, "fr": 1000, "ar": 10}
    prefixes = [
        str(write_pair(tmp_path / name / "p", [[1] * count])) for name, count in sizes.items()
    ]
    same = sampling_probabilities(prefixes, 1.0)
    assert [entry.ratio for entry in same] == pytest.approx([4000 / 5010, 1000 / 5010, 10 / 5010])
    assert [entry.ratio for entry in sampling_probabilities(prefixes, 0.0)] == pytest.approx(
        [1 / 3] * 3
    )
    lifted = sampling_probabilities(prefixes, 0.3)
    powers = [count**0.3 for count in sizes.values()]
    assert [entry.ratio for entry in lifted] == pytest.approx(
        [power / sum(powers) for power in powers]
    )
    assert math.fsum(entry.ratio for entry in lifted) == pytest.approx(1.0)
    write_ratios(lifted, tmp_path / "ratios.json")
    assert read_ratios(tmp_path / "ratios.json") == lifted
    with pytest.raises(DataError, match="alpha -1"):
        sampling_probabilities(prefixes, -1)
    done = run_data("probabilities", "--alpha", "0.3", *prefixes, "--json")
    assert [entry["ratio"] for entry in json.loads(done.stdout)["ratios"]] == [
        entry.ratio for entry in lifted
    ]
    done = run_data("probabilities", "--alpha", "0.3", *prefixes)
    assert done.stdout.splitlines()[2].split()[1] == prefixes[2]


# ----------------------------------------------------------------------------- groups
# Named groups: their spelling, files of them, and refusals that name group, part and field.


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
