"""How nodes and queued tasks are named: host lists, array expressions, and parts of an array, which are
changed without the rest."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tr11ops.base.errors import ArraySyntaxError, HostlistError, SchedulerError
from tr11ops.cluster.arrays import (
    MAXIMUM_NAMES,
    compress,
    covers,
    expand,
    named_tasks,
    names_of,
    not_repeated,
    parse_array,
    split,
    task_numbers,
    tasks_of,
    without,
)
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.local_rules import array_of, parse_job_id
from tr11ops.runcard.card import CardError, parse_attempts
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


FAULTS = [
    "",
    "a",
    "5-1",
    "1-9:0",
    "1-4000001",
    "1-10001",
    "\u0661-\u0665",
    "1-999999999",
    "1,,2",
    "9" * 5000,
]


@pytest.mark.parametrize("text", FAULTS)
def test_what_is_no_array_is_none_to_everyone(text: str) -> None:
    with pytest.raises(ArraySyntaxError):
        parse_array(text)
    with pytest.raises(CardError):
        parse_attempts(text)
    with pytest.raises(SchedulerError):
        array_of(text)


@pytest.mark.parametrize(
    ("text", "tasks"), [("4000000", (4_000_000,)), ("100000-100002%1", (100_000, 100_001, 100_002))]
)
def test_an_array_of_the_card_is_one_of_the_embedded_scheduler(
    text: str, tasks: tuple[int, ...]
) -> None:
    assert parse_attempts(text).indices == array_of(text).indices == tasks == task_numbers(text)


def test_a_task_named_twice_counts_once_and_a_launch_refuses_it() -> None:
    assert array_of("1-3,2").indices == (1, 2, 3) and array_of("1-3,2").throttle is None
    with pytest.raises(CardError, match="names a task twice"):
        parse_attempts("1-3,2")


@pytest.mark.parametrize("name", ["7_[0-8:4]", "7_[0,4-8:4%1]", "7_[0,4,8%1]"])
def test_names_of_tasks_are_read_as_the_queue_shows_them(name: str) -> None:
    job = Job(name, "7", "7", None, "run", "ana", JobState.PENDING, pending_tasks=(0, 4, 8))
    assert covers(name, job) and parse_job_id(name).tasks == frozenset({0, 4, 8})
    assert not covers("7_[1-3,5-7]", job)


def test_a_queue_row_keeps_what_is_readable_but_for_the_name() -> None:
    assert task_numbers("1-3,5,...%1") == (1, 2, 3, 5)
    assert named_tasks("[1-3,5,...]") is None and parse_array("0-15:4").step == 4


TASKS = st.sets(st.integers(0, 12), min_size=1)


def array(tasks: set[int] | range, number: str = "7") -> Job:
    return Job(
        f"{number}_x",
        number,
        number,
        None,
        "run",
        "ana",
        JobState.PENDING,
        pending_tasks=tuple(sorted(tasks)),
    )


SINGLE = Job("9", "9", None, None, "run", "ana", JobState.PENDING)


def test_an_array_goes_by_its_number_unless_a_part_is_left_out() -> None:
    assert names_of((array(range(1, 4)), array({5}), SINGLE), ()) == ("7", "9")
    assert names_of((array({1, 2, 3}), array({5})), (array({4}), SINGLE)) == ("7_[1-3,5]",)
    assert names_of((array({0}),), (array({1}),)) == ("7_0",)
    # as Slurm shows a task on its own
    one = replace(array(()), job_id="7_3", raw_id="12", task_id=3)
    assert (
        names_of((one,), (array({1}),)) == ("7_3",) and covers("7_3", one) and not covers("12", one)
    )


def test_a_part_covers_what_it_names_and_leaves_the_rest() -> None:
    job = array(range(1, 6))
    assert split(job, ("7",)) == (job, None) == split(job, ("7_[1-9]",))
    assert split(job, ("8", "7_9", "no name")) == (None, job)
    ours, rest = split(job, ("7_2", "7_[4-5]"))
    assert ours is not None and (ours.job_id, tasks_of(ours), ours.task_id) == (
        "7_[2,4-5]",
        (2, 4, 5),
        None,
    )
    assert rest is not None and (rest.job_id, tasks_of(rest)) == ("7_[1,3]", (1, 3))
    first, _ = split(array({0, 1}), ("7_0",))
    assert first is not None and (first.job_id, first.task_id, tasks_of(first)) == ("7_0", 0, (0,))
    high = array(range(3_000_000, 3_000_003))  # as far as Slurm's arrays go
    assert split(high, names_of((high,), (array({1}),))) == (high, None)
    assert not covers("7_[1-9,,]", job) and not covers("7_[0-9999999]", job)
    assert covers("9", SINGLE) and not covers("9_1", SINGLE)


@pytest.mark.parametrize(
    ("names", "gone", "left"),
    [
        (("7", "9"), ("9",), ("7",)),
        (("7_[1-5]",), ("7_2", "7_3"), ("7_[1,4-5]",)),
        (("7_[1-5]",), ("7",), ()),
        (("7",), ("7_2",), ()),  # what is left of a whole array has no name: it counts for gone
        (("7_1",), ("8",), ("7_1",)),
    ],
)
def test_names_less_names(
    names: tuple[str, ...], gone: tuple[str, ...], left: tuple[str, ...]
) -> None:
    assert without(names, gone) == left


@pytest.mark.parametrize(
    ("names", "more", "left"),
    [
        (("7",), ("7_2",), ("7",)),
        (("7", "7_3"), ("7_[2-3]",), ("7",)),
        (("7", "7_3"), ("7",), ()),
        (("7_[1-5]",), ("7_2", "8"), ("7_[1,3-5]",)),
    ],
)
def test_names_that_are_named_again(
    names: tuple[str, ...], more: tuple[str, ...], left: tuple[str, ...]
) -> None:
    assert not_repeated(names, more) == left


@given(chosen=TASKS, left=TASKS, more=TASKS)
def test_what_is_named_is_what_was_chosen_and_nothing_else(
    chosen: set[int], left: set[int], more: set[int]
) -> None:
    left -= chosen
    names = names_of((array(chosen),), (array(left),) if left else ())
    ours, rest = split(array(chosen | left), names)
    assert ours is not None and set(tasks_of(ours)) == chosen
    assert (set() if rest is None else set(tasks_of(rest))) == left
    ours, _ = split(
        array(range(13)), without(("7_[0-12]",), (f"7_[{','.join(map(str, sorted(more)))}]",))
    )
    assert (set() if ours is None else set(tasks_of(ours))) == set(range(13)) - more
