"""Logs of authors who had not seen the signatures; they are seen now, and must stay as good as they
became.
"""

from __future__ import annotations

import json
import runpy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.tr11ops.diagnose.diagnose_logs import diagnosed
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import if_it_goes_on
from tr11ops.diagnose.signature import NextStep

FOLDER = Path(__file__).parents[2] / "data" / "diagnose" / "blind"
BENCH = Path(__file__).parents[3] / "benchmarks" / "diagnose_bench"
CERTAIN = 0.9


class Most(NamedTuple):
    """How many incidents of a set may be wrong; accused: with someone accused who is not the guilty
    one.
    """

    wrong: int
    elsewhere: int
    accused: int
    restarts: int


@pytest.mark.parametrize("labels", ["set1.toml", "set2.toml", "set3.toml"])
def test_classes_lines_and_no_false_certainty(labels: str) -> None:
    known = tomllib.loads((FOLDER / labels).read_text(encoding="utf-8"))
    assert len(known) >= 80
    wrong, elsewhere, certain, lines = [], [], [], 0
    for name, label in known.items():
        found = diagnosed([FOLDER / f"{name}.log.gz"])[0]
        if found.fault.value != label["verdict"]:
            wrong.append(name)
            certain += [name] if found.confidence > CERTAIN else []
        lines += bool(label["lines"])
        if label["lines"] and (
            found.root_cause is None or found.root_cause.line_number not in label["lines"]
        ):
            elsewhere.append(name)
    assert len(wrong) <= 0.02 * len(known), wrong
    assert len(elsewhere) <= 0.03 * lines, elsewhere
    assert certain == []


@pytest.mark.parametrize(
    ("author", "count", "most"),
    [
        ("one", 91, Most(2, 4, 0, 1)),
        ("two", 75, Most(1, 1, 0, 1)),
        ("three", 70, Most(0, 3, 0, 0)),
        ("four", 104, Most(1, 4, 0, 2)),
        ("five", 124, Most(0, 3, 0, 0)),
        ("six", 130, Most(2, 4, 0, 5)),
        ("seven", 143, Most(4, 6, 0, 0)),
        ("eight", 115, Most(1, 5, 0, 1)),
        ("nine", 80, Most(0, 3, 0, 0)),
        ("ten", 72, Most(0, 1, 0, 0)),
        ("eleven", 72, Most(1, 4, 0, 3)),
        ("twelve", 64, Most(0, 2, 1, 0)),
        ("thirteen", 72, Most(2, 5, 2, 1)),
        ("fourteen", 72, Most(2, 1, 1, 2)),
        ("fifteen", 72, Most(1, 3, 0, 1)),
        ("sixteen", 72, Most(0, 5, 0, 0)),
        ("seventeen", 72, Most(0, 3, 0, 0)),
        ("eighteen", 72, Most(0, 0, 0, 0)),
        ("nineteen", 72, Most(0, 1, 0, 0)),
        ("twenty", 72, Most(2, 5, 1, 3)),  # as at first look
    ],
)
def test_incidents_of_a_stranger_with_nodes_and_restarts(
    author: str, count: int, most: Most
) -> None:
    """Class, line, who and restart of incidents of several files each; what they are now, they stay
    at least.
    """
    folder = FOLDER / author
    known = tomllib.loads((folder / "labels.toml").read_text(encoding="utf-8"))
    assert len(known) == count
    wrong, elsewhere, accused, excluded, restarts, certain = [], [], [], [], [], []
    for name, label in known.items():
        [found] = map(if_it_goes_on, diagnosed([folder / file for file in label["files"]]))
        accepted = {label["verdict"], *label["accepted_verdicts"]}
        if "clean_exit" in accepted:  # or it goes on well
            accepted.add("running")
        is_wrong = found.fault.value not in accepted
        wrong += [name] if is_wrong else []
        certain += [name] if is_wrong and found.confidence > CERTAIN else []
        elsewhere += [] if _is_at_a_line_of(label, found) else [name]
        guilty = {label["node"]} if "node" in label else set()
        accused += [] if set(found.accused.nodes) <= guilty else [name]
        is_exclusion = found.step is NextStep.EXCLUDE_AND_RESUBMIT
        excluded += [name] if is_exclusion and not set(found.accused.nodes) <= guilty else []
        restarts += (
            []
            if found.restart.answer.value in {label["restart"], *label["accepted_restarts"]}
            else [name]
        )
    assert excluded == [] and certain == []
    assert len(wrong) <= most.wrong, wrong
    assert len(elsewhere) <= most.elsewhere, elsewhere
    assert len(accused) <= most.accused, accused  # a pod's name is not yet its node's
    assert len(restarts) <= most.restarts, restarts


NEWEST = {
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
}  # nearly as they were at first look


def test_the_bench_excludes_no_innocent_node_and_says_nothing_wrong_with_certainty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All sets by the bench's own judgement, in this process, where most are diagnosed already."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr("programs.diagnose_files", diagnosed)
    monkeypatch.setattr("sys.argv", [str(BENCH), "--only", "tr11", "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH), run_name="__main__")
    assert not ended.value.code
    sets = json.loads(capsys.readouterr().out)
    assert len(sets) == 22
    for folder, programs in sets.items():
        found = programs["tr11"]
        assert found["excluded_innocent"] == found["confident_mistakes"] == 0, folder
        least = 0.94
        if Path(folder).name in NEWEST:
            least = 0.86
        for part in ("fault", "line", "restart", "goes_on"):
            assert found[part]["right"] >= least * found[part]["of"] > 0, (folder, part)


def _is_at_a_line_of(label: Mapping[str, Any], found: Diagnosis) -> bool:
    root, first = found.root_cause, label.get("root_cause")
    if first is None:
        return True
    lines = {(first["file"], first["line_number"])}
    lines |= {
        (file, line)
        for file, numbers in label.get("accepted_lines", {}).items()
        for line in numbers
    }
    return root is not None and (Path(root.file).name, root.line_number) in lines
