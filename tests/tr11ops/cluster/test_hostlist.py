"""Host lists: by rule, by random lists, and against Slurm's own reading."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tr11ops.base.errors import HostlistError
from tr11ops.cluster.hostlist import MAXIMUM_NAMES, compress, expand
from tr11ops.twin.twin import Twin

PREFIXES = st.sampled_from(["x", "jean-zay-iam", "r1n", "node-a-", "gpu_", "a9b"])
NUMBERS = st.one_of(
    st.integers(0, 120).map(str),
    st.integers(0, 120).map("{:03d}".format),
    st.integers(0, 9).map("{:02d}".format),
)
NAMES = st.one_of(
    st.builds("{}{}".format, PREFIXES, NUMBERS), st.sampled_from(["login", "head-node", "r1", "x"])
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("x1", ("x1",)),
        ("x[1-3]", ("x1", "x2", "x3")),
        ("x[08-11]", ("x08", "x09", "x10", "x11")),
        ("x[9-11]", ("x9", "x10", "x11")),
        ("a[1-2,5],b", ("a1", "a2", "a5", "b")),
        ("r[1-2]n[01-02]", ("r1n01", "r1n02", "r2n01", "r2n02")),
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
        (" x1 , x2 ", ("x1", "x2")),
    ],
)
def test_expand(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names


def test_the_names_of_the_main_run() -> None:
    names = expand("jean-zay-iam[01-26,28-49],x1")
    assert len(names) == 49
    assert "jean-zay-iam27" not in names
    assert compress(reversed(names)) == "jean-zay-iam[01-26,28-49],x1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x[1-3", "not closed"),
        ("x1-3]", "do not match"),
        ("x[[1]]", "do not match"),
        ("x[3-1]", "backwards"),
        ("x[a-b]", "neither a number nor a range"),
        ("x[]", "neither a number nor a range"),
        ("x1,,x2", "between two commas"),
        ("x 1", "blank"),
        ("x[0-999999999]", f"more than {MAXIMUM_NAMES}"),
        ("x[0-999]y[0-999]", f"more than {MAXIMUM_NAMES}"),
    ],
)
def test_what_is_no_host_list_gets_one_line(text: str, words: str) -> None:
    with pytest.raises(HostlistError, match=words) as caught:
        expand(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a[1]"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(HostlistError, match="no host name"):
        compress(["x1", name])


@given(st.lists(NAMES, max_size=60))
def test_compress_then_expand_gives_each_name_once(names: list[str]) -> None:
    text = compress(names)
    again = expand(text)
    assert sorted(again) == sorted(set(names))
    assert compress(again) == text


@given(st.integers(0, 500), st.integers(1, 200), st.sampled_from(["{}", "{:04d}"]))
def test_a_run_of_numbers_is_one_range(first: int, count: int, form: str) -> None:
    names = ["n" + form.format(number) for number in range(first, first + count)]
    text = compress(names)
    assert text.count("-") <= 1
    assert "," not in text
    assert list(expand(text)) == names


@given(st.text(alphabet="x1239-,[] ", max_size=14))
def test_any_text_gives_names_or_one_line(text: str) -> None:
    try:
        names = expand(text)
    except HostlistError:
        return
    assert all(name and "[" not in name and "," not in name for name in names)


def test_slurm_reads_our_lists_and_we_read_its(twin: Twin) -> None:
    lists = [
        ["jean-zay-iam01", "jean-zay-iam02", "jean-zay-iam04"],
        [f"n{number}" for number in (*range(1, 30), 31, 100, 101)],
        ["x1", "x01", "x001", "x2", "x02", "x10"],
        [f"r{row}n{node:02d}" for row in range(3) for node in range(8, 12)],
        ["login", "a9b1", "a9b2", "gpu_07"],
    ]
    for names in lists:
        ours = _scontrol(twin, "hostnames", compress(names)).split()
        assert sorted(ours) == sorted(names)
        theirs = _scontrol(twin, "hostlist", ",".join(names)).strip()
        assert sorted(expand(theirs)) == sorted(names)
    for text in ("r[1-2]n[01-03]", "x[08-11,3],y", "n[9-11]"):
        assert tuple(_scontrol(twin, "hostnames", text).split()) == expand(text)


def _scontrol(twin: Twin, what: str, text: str) -> str:
    done = subprocess.run(
        ["scontrol", "show", what, text],
        env={**os.environ, **twin.environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout
