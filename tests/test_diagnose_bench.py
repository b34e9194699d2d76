"""The bench of diagnosis on a tiny set: it reads labels, judges answers, and lists what is wrong.

On all sets: tests/tr11ops/diagnose/test_blind_corpus.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "benchmarks" / "diagnose_bench"
TINY = Path(__file__).parent / "data" / "diagnose_bench"
PROGRAMS = "tr11,last-line"  # nvrx is installed from PyPI


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCH), *arguments], capture_output=True, text=True)


def test_tr11_and_the_last_error_line_on_the_tiny_set() -> None:
    done = bench("--set", str(TINY), "--only", PROGRAMS, "--json")
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout).values()
    assert set(found) == {"tr11", "last-line"}
    ours, plain = found["tr11"], found["last-line"]
    assert ours["incidents"] == 3
    assert ours["fault"] == ours["restart"] == ours["goes_on"] == {"right": 3, "of": 3}
    assert ours["line"] == {"right": 2, "of": 2} and ours["node"] == {"right": 1, "of": 1}
    assert ours["excluded_innocent"] == ours["confident_mistakes"] == 0
    assert sum(row["answers"] for row in ours["reliability"]["what"]) == 3
    assert plain["line"] == {"right": 0, "of": 2} and plain["goes_on"] == {"right": 1, "of": 3}
    assert "line 001-key.log:10, is 001-key.log:9" in plain["mistakes"]["001-key"]


def test_mistakes_are_listed_by_program_and_incident() -> None:
    done = bench("--set", str(TINY), "--only", PROGRAMS, "--mistakes")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(
        "3 incidents; restart is told by 3 labels, else it follows from the action"
    )
    assert "last-line: 003-end: restart go, is none" in lines
    assert max(len(line) for line in lines[1:4]) <= 110


def test_labels_of_one_object_a_line(tmp_path: Path) -> None:
    label = {
        "id": "1", "name": "key", "files": ["001-key.log"], "right_classes": ["user_code"], "acceptable_classes": [],
        "cause_file": "001-key.log", "cause_line": 9, "accepted_lines": [], "node": None,
        "sensible_actions": ["fix_config", "page"],
    }  # fmt: skip
    (tmp_path / "001-key.log").write_bytes((TINY / "001-key.log").read_bytes())
    (tmp_path / "labels.jsonl").write_text(f"{json.dumps(label)}\n")
    done = bench("--set", str(tmp_path), "--only", "tr11", "--json")
    [found] = json.loads(done.stdout).values()
    assert found["tr11"]["fault"] == found["tr11"]["line"] == {"right": 1, "of": 1}
    # to fix, or to look: not to start again
    assert found["tr11"]["goes_on"] == {"right": 1, "of": 1}


def test_what_cannot_be_used_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "labels.toml").write_text(
        '[a]\nfiles = ["a.log"]\nverdict = "unknown"\naction = "page"\n'
    )
    for arguments, words in (
        (("--set", str(tmp_path)), "a.log is not there"),
        (("--set", str(tmp_path / "labels.toml")), "neither labels.toml nor labels.jsonl is there"),
        (("--only", "oracle"), "--only oracle: there are tr11, nvrx, last-line"),
    ):
        done = bench(*arguments)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_log_that_ends_well_at_a_step_is_unknown_or_running(tmp_path: Path) -> None:
    steps = "".join(f"step {number} loss 2.{9 - number}\n" for number in range(8))
    (tmp_path / "steps.log").write_text(steps)
    label = '[steps]\nfiles = ["steps.log"]\nverdict = "unknown"\naction = "%s"\n'
    for action, right in (("none", 1), ("page", 0)):
        (tmp_path / "labels.toml").write_text(label % action)
        done = bench("--set", str(tmp_path), "--only", "tr11", "--json")
        [found] = json.loads(done.stdout).values()
        assert found["tr11"]["fault"] == {"right": right, "of": 1}
