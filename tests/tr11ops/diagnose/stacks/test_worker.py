"""What travels between a node and who asks: whole answers out of mixed lines, and py-spy's own
form.
"""

from __future__ import annotations

import json
import random

import pytest

from tests.tr11ops.diagnose.stacks.made import ranks, worker
from tr11ops.diagnose.stacks.worker import (
    MARK,
    PIECE_CHARACTERS,
    AnswerReader,
    Frame,
    NodeStacks,
    main_thread,
)


def big_answer(node: str, seed: int) -> NodeStacks:
    """One that needs several lines: numbers that do not pack well."""
    chance = random.Random(seed)
    frames = tuple(
        Frame(f"f{chance.random()}", f"a/{chance.random()}.py", number) for number in range(60)
    )
    return NodeStacks(node, (worker(seed, frames, call="read", path="/a b/é"),))


def test_answers_come_out_of_mixed_lines() -> None:
    sent = [big_answer("tw01", 1), big_answer("tw02", 2), NodeStacks("spare")]
    lines = [line for answer in sent for line in answer.lines()]
    assert len(lines) > 5 and max(map(len, lines)) < PIECE_CHARACTERS + 50
    random.Random(3).shuffle(lines)
    reader = AnswerReader()
    done = [reader.feed(line) for line in ["srun: a word of its own", *lines]]
    assert sum(answer is not None for answer in done) == 3
    read = reader.answers["tw01"].workers[0]
    assert read.frames == sent[0].workers[0].frames and (read.call, read.path) == ("read", "/a b/é")
    assert read.node == "tw01", "the node that answered, whatever its document says"
    assert reader.answers["spare"].workers == ()


@pytest.mark.parametrize("piece", ["!!!", "", "eJwrAAAA"])
def test_a_garbled_answer_is_no_answer(piece: str) -> None:
    reader = AnswerReader()
    assert reader.feed(f"{MARK} tw01 0 1 {piece}") is None
    assert reader.garbled == {"tw01"} and reader.answers == {}


def test_half_an_answer_is_no_answer() -> None:
    *lines, _ = big_answer("tw01", 1).lines()
    reader = AnswerReader()
    assert [reader.feed(line) for line in lines] == [None] * len(lines)
    assert reader.answers == {} and reader.garbled == set()


def dumped(*threads: dict[str, object]) -> str:
    return json.dumps([{"pid": 7, "frames": [], **one} for one in threads])


def frame(name: str) -> dict[str, object]:
    return {
        "name": name,
        "filename": f"/x/{name}.py",
        "short_filename": f"{name}.py",
        "line": 3,
        "module": None,
    }


def test_the_main_thread_is_the_one_with_the_process_number() -> None:
    other = {"os_thread_id": 9, "thread_name": "kill-now", "frames": [frame("watch")]}
    named = {"os_thread_id": 7, "thread_name": None, "frames": [frame("inner"), frame("outer")]}
    assert main_thread(dumped(other, named), 7) == (
        Frame("inner", "inner.py", 3),
        Frame("outer", "outer.py", 3),
    )
    unnumbered = {"os_thread_id": None, "thread_name": "MainThread", "frames": [frame("main")]}
    assert main_thread(dumped(other, unnumbered), 7) == (Frame("main", "main.py", 3),)


@pytest.mark.parametrize("text", ["", "[]", "{}", '[{"frames": 3}]', '[{"frames": []}]', "null"])
def test_what_is_no_stack_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"py-spy printed no stack|runs no Python"):
        main_thread(text, 7)


def test_all_of_a_large_node_fits() -> None:
    reader = AnswerReader()
    for line in NodeStacks("tw00", tuple(ranks(64, per_node=64))).lines():
        reader.feed(line)
    assert [one.rank for one in reader.answers["tw00"].workers] == list(range(64))
