"""What an attempt has otherwise than the one before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tr11ops.agent.batch import MOST_LINES, changes_since_last
from tr11ops.rundir.attempts import CodeIdentity
from trainer.contract.documents import document
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths

CARD: dict[str, Any] = {
    "run": {"seed": 1},
    "data": {"split": "949,50,1"},
    "derived": {"card_hash": "a"},
}


def begun(paths: RunPaths, job: str, start: float, card: dict[str, Any], **record: Any) -> None:
    whole = {
        "start": start,
        "nodes": ["n1", "n2"],
        "python": "3.11.2",
        "versions": {"torch": "2.1"},
        **record,
    }
    write_json(paths.attempt(job) / "attempt.json", whole)
    write_json(paths.attempt(job) / "card.json", card)


def test_card_and_nodes_are_compared_with_the_newest_attempt(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    now = {"start": 30.0, "nodes": ["n1", "n3"], "python": "3.11.2", "versions": {"torch": "2.2"}}
    card = {**CARD, "data": {"split": "80,20,0"}, "derived": {"card_hash": "b"}}
    assert changes_since_last(paths, "30", now, card) == []
    begun(paths, "9", 10.0, {"run": {"seed": 99}})
    begun(paths, "20", 20.0, CARD)
    (paths.attempts / "torn").mkdir()
    (paths.attempts / "torn" / "attempt.json").write_text("{")
    assert changes_since_last(paths, "30", now, card) == [
        "since attempt 20: nodes: with n3, without n2",
        "since attempt 20: version of torch: 2.1 -> 2.2",
        "since attempt 20: card data.split: 949,50,1 -> 80,20,0",
    ]
    begun(paths, "30", card=card, **now)
    assert (
        changes_since_last(paths, "30", now, card)[0]
        == "since attempt 20: nodes: with n3, without n2"
    )
    assert changes_since_last(paths, "40", {**now, "start": 40.0}, card) == []


def test_another_commit_and_other_changes_to_it_are_told(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    first = CodeIdentity("/code", "a" * 40, "work")
    edited = CodeIdentity("/code", "a" * 40, "work", ("x.py",), 1, "f" * 64, "code.diff")
    now = {
        "start": 30.0,
        "nodes": ["n1", "n2"],
        "python": "3.11.2",
        "versions": {"torch": "2.1", "driver": "550"},
    }
    begun(paths, "9", 10.0, CARD)
    # the last one recorded less
    assert changes_since_last(paths, "30", {**now, "code": document(first)}, CARD) == []
    begun(paths, "20", 20.0, CARD, code=document(first), versions={"torch": "2.1", "driver": "535"})
    assert changes_since_last(paths, "30", {**now, "code": document(edited)}, CARD) == [
        "since attempt 20: version of driver: 535 -> 550",
        "since attempt 20: code: work aaaaaaaaaa -> work aaaaaaaaaa with 1 changed file (ffffffff); see code.diff",
    ]
    unknown = document(CodeIdentity(why="git is not installed on this machine"))
    assert changes_since_last(paths, "30", {**now, "code": unknown}, CARD)[1].endswith(
        "-> not known: git is not installed on this machine"
    )


def test_very_many_are_counted(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    begun(paths, "1", 1.0, {"run": {str(number): number for number in range(50)}})
    record = {"start": 2.0, "nodes": ["n1", "n2"], "python": "3.11.2", "versions": {"torch": "2.1"}}
    found = changes_since_last(paths, "2", record, {"run": {}})
    assert (
        len(found) == MOST_LINES and found[-1] == f"since attempt 1: and {50 - MOST_LINES + 1} more"
    )
