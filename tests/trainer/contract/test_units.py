"""Sentences in less room than they need, and the names of signals."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trainer.contract.units import (
    GAP,
    LEAST_ROOM,
    shortened,
    signal_name,
    signal_number,
    signal_of_status,
)

NO_START = (
    "attempt 3_2 could not start: slurm.setup is broken, after it the agent ended with exit status 1"
    " on jean-zay-iam01, ModuleNotFoundError, No module named 'encodings'"
)
CAME_BACK = (
    "the last 2 attempts failed: software or data, not the nodes, the same fault came back after"
    " iteration 31219 on jean-zay-iam01 and jean-zay-iam02, SIGSEGV"
)
RANK = "rank 1 on jean-zay-iam04"
FAILED_RANK = (
    "attempt 3_1 failed: software or data, not the nodes: the same fault came back after iteration"
    f" 31219 on jean-zay-iam01 and jean-zay-iam02: {RANK}: it was ended by SIGSEGV"
)
INDEX = FAILED_RANK.replace(
    "it was ended by SIGSEGV", "index 512 is out of bounds for axis 0 with size 512"
)
FOLDER = "/gpfsscratch/rech/six/commun/checkpoints/tr11-176B-ml/checkpoints/main/global_step1200"


@pytest.mark.parametrize(
    ("text", "most", "kept"),
    [
        ("whole", 16, "whole"),
        (NO_START, 90, "attempt 3_2 could not start: slurm.setup is broken ... No module named 'encodings'"),
        (CAME_BACK, 90, "the last 2 attempts failed: software or data, not the nodes ... SIGSEGV"),
        (CAME_BACK, 60, "the last 2 attempts failed: software or data ... SIGSEGV"),
        (f"no room in {FOLDER}: 3 TiB are needed", 80, "no room in .../main/global_step1200: 3 TiB are needed"),
        ("it lists (one, two, three, four, five, six), and is over: done", 32, "it lists, and is over: done"),
        ("it lists [one, two, three, four, five, six], and is over: done", 32, "it lists ... and is over: done"),
        # whose fault it is stands behind the first colon, and the rank that showed it comes after it
        (FAILED_RANK, 98, "attempt 3_1 failed: software or data, not the nodes ... it was ended by SIGSEGV"),
        (FAILED_RANK, 78, "attempt 3_1 failed: software or data, not the nodes ... was ended by SIGSEGV"),
        (INDEX, 98, "attempt 3_1 failed: software or data, not the nodes ... is out of bounds for axis 0 with size 512"),
        # a clause alone is too long: its words
        ("rank 4 was ended while it was saving a checkpoint by signal SIGSEGV", 40, "rank 4 was ended ... by signal SIGSEGV"),
    ],
)  # fmt: skip
def test_its_beginning_and_its_end_stay(text: str, most: int, kept: str) -> None:
    assert shortened(text, most) == kept


@pytest.mark.parametrize("most", range(40, 160, 7))
@pytest.mark.parametrize("text", [NO_START, CAME_BACK])
def test_it_never_breaks_off_at_a_word_that_leads_on(text: str, most: int) -> None:
    said = shortened(text, most)
    assert said.endswith(("'encodings'", "SIGSEGV"))
    head = said.partition(GAP)[0]
    assert text.startswith(head)
    if head != said:
        assert head.split()[-1] not in {
            "after",
            "on",
            "with",
            "or",
            "not",
            "the",
            "and",
            "is",
            "it",
        }
        assert not head.endswith((",", ":", ";"))


@given(st.text(), st.integers(min_value=0, max_value=200))
def test_it_fits_whatever_it_says(text: str, most: int) -> None:
    said = shortened(text, most)
    assert len(said) <= most
    if len(text) <= most:
        assert said == text
    elif most >= LEAST_ROOM:
        assert "..." in said


@pytest.mark.parametrize(
    ("number", "name"),
    [(9, "SIGKILL"), (34, "SIGRTMIN"), (37, "SIGRTMIN+3"), (64, "SIGRTMAX"), (99, "signal 99")],
)
def test_every_signal_has_a_name(number: int, name: str) -> None:
    assert signal_name(number) == name
    assert signal_number(name) == (number if number < 65 else None)


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (0, ""),
        (1, ""),
        (128, ""),
        (134, "SIGABRT"),
        (137, "SIGKILL"),
        (170, ""),
        (192, ""),
        (255, ""),
    ],
)
def test_a_shells_status_tells_of_a_signal_where_none_is_likelier(status: int, name: str) -> None:
    assert signal_of_status(status) == name
