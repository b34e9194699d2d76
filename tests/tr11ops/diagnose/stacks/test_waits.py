"""What a worker waits in: every rule takes its examples and no other's, and the kernel's word
counts first.
"""

from __future__ import annotations

import re

import pytest

from tests.tr11ops.diagnose.stacks.made import (
    ALL_REDUCE,
    ELSEWHERE,
    FORWARD,
    LOADER,
    SAVE,
    SEND,
    worker,
)
from tr11ops.diagnose.stacks.waits import WaitKind, WaitRule, read_rule, rules, wait_of
from tr11ops.diagnose.stacks.worker import GONE, Frame


def parsed(text: str) -> Frame:
    match = re.fullmatch(r"(.*) \((.*):(\d+)\)", text)
    assert match is not None, text
    return Frame(match[1], match[2], int(match[3]))


MATCHING = [(rule, text) for rule in rules() for text in rule.match]
OTHERS = [(rule, text) for rule in rules() for text in rule.no_match]


@pytest.mark.parametrize(("rule", "text"), MATCHING, ids=[text for _, text in MATCHING])
def test_a_rule_decides_its_examples(rule: WaitRule, text: str) -> None:
    """It is the first that fits, so that no rule before it takes what is meant for it."""
    found = next(one for one in rules() if one.fits(parsed(text), True))
    assert found is rule
    assert wait_of(worker(0, (parsed(text),))).kind is rule.kind


@pytest.mark.parametrize(("rule", "text"), OTHERS, ids=[text for _, text in OTHERS])
def test_a_rule_leaves_the_others_alone(rule: WaitRule, text: str) -> None:
    assert not rule.fits(parsed(text), True)


def test_every_rule_has_examples_of_both_kinds() -> None:
    assert len(rules()) > 10 and all(rule.match and rule.no_match for rule in rules())


@pytest.mark.parametrize(
    ("frames", "kind", "what"),
    [
        (ALL_REDUCE, WaitKind.COLLECTIVE, "all-reduce"),
        (SEND, WaitKind.SEND_RECV, "send"),
        (LOADER, WaitKind.DATA_LOADER, "the data loader"),
        (SAVE, WaitKind.FILE, "_write_all, trainer/checkpoint/files.py:180"),
        (FORWARD, WaitKind.COMPUTE, "the step's own work"),
        (ELSEWHERE, WaitKind.OTHER, "sleep_on_it (plugin/odd.py:3)"),
    ],
)
def test_the_innermost_frame_that_is_known_decides(
    frames: tuple[Frame, ...], kind: WaitKind, what: str
) -> None:
    found = wait_of(worker(0, frames))
    assert (found.kind, found.what) == (kind, what)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("T", WaitKind.STOPPED),
        ("t", WaitKind.STOPPED),
        ("Z", WaitKind.DEAD),
        (GONE, WaitKind.DEAD),
        ("S", WaitKind.COLLECTIVE),
    ],
)
def test_the_kernel_knows_who_is_stopped_or_dead(state: str, kind: WaitKind) -> None:
    assert wait_of(worker(0, ALL_REDUCE, state=state)).kind is kind


def test_a_call_on_a_file_counts_before_the_place_in_the_program() -> None:
    reading = worker(0, LOADER, call="read", path="/fs/corpus.bin")
    assert (wait_of(reading).kind, wait_of(reading).what) == (WaitKind.FILE, "read /fs/corpus.bin")
    assert wait_of(worker(0, LOADER, call="read")).kind is WaitKind.DATA_LOADER, (
        "of a pipe or socket, it says nothing"
    )
    assert wait_of(worker(0, LOADER, call="futex")).kind is WaitKind.DATA_LOADER
    assert wait_of(worker(0, ALL_REDUCE, call="write", path="/x.log")).kind is WaitKind.COLLECTIVE


def test_a_wait_in_the_kernel_is_one_for_a_disk() -> None:
    assert wait_of(worker(0, ELSEWHERE, state="D")).kind is WaitKind.FILE
    assert wait_of(worker(0, (), state="D")).kind is WaitKind.FILE
    opening = worker(0, ELSEWHERE, state="D", call="openat")
    assert (wait_of(opening).kind, wait_of(opening).what) == (WaitKind.FILE, "openat")


def test_a_stack_that_was_not_read_says_why() -> None:
    found = wait_of(worker(0, (), trouble="py-spy did not end within 10 s"))
    assert (found.kind, found.what) == (WaitKind.UNREAD, "py-spy did not end within 10 s")


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ({"kind": "file", "match": []}, "needs function or file"),
        ({"kind": "naps", "file": "x", "match": []}, "'naps' is not a valid WaitKind"),
        ({"kind": "file", "file": "(", "match": []}, "entry 4: missing"),
        ({"kind": "file", "file": "x", "matches": []}, "unknown key 'matches'"),
        ({"kind": "file", "file": "x"}, "entry 4: 'match'"),
    ],
)
def test_a_wrong_rule_names_its_entry(entry: dict[str, object], wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong)) as error:
        read_rule(entry, 4)
    assert str(error.value).startswith("waits.toml, entry 4: ")
