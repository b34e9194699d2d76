"""Failures in the words of public reports: what they are and what to do, alone and at the end of a
training's log.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.diagnose.diagnose_logs import HEAD, SHORT_STEPS, of_text
from tr11ops.diagnose.diagnosis import Diagnosis

FILE = Path(__file__).parents[2] / "data" / "diagnose" / "kinds" / "lines.toml"
LINES: list[dict[str, Any]] = [
    {**group, "text": text}
    for group in tomllib.loads(FILE.read_text(encoding="utf-8"))["group"]
    for text in group["texts"]
]
KINDS = sorted({line["kind"] for line in LINES})
DEBRIS = """\
W1016 18:20:31.2 2210 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 51 closing signal SIGTERM
E1016 18:20:31.3 2210 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 5)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
EXCEPTION = re.compile(r"[\w.]+(?:Error|Exception): [^\n]*")
NOTHING = {"clean_exit", "unknown"}


def is_right(found: Diagnosis, line: dict[str, Any]) -> bool:
    if found.fault.value not in line["verdicts"] or found.step.value not in line["actions"]:
        return False
    if found.root_cause is None:
        return not NOTHING.isdisjoint(line["verdicts"])
    return any(
        found.root_cause.text in said or said.strip() in found.root_cause.text
        for said in line["text"].split("\n")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_known_in_other_words(tmp_path: Path, kind: str) -> None:
    wrong = []
    for line in (one for one in LINES if one["kind"] == kind):
        said = HEAD + line["text"] if EXCEPTION.fullmatch(line["text"]) else line["text"]
        texts = (
            [said + "\n"]
            if line.get("alone")
            else [said + "\n", SHORT_STEPS + said + "\n" + DEBRIS]
        )
        for text in texts:
            found = of_text(tmp_path, text)
            if not is_right(found, line):
                root = found.root_cause and found.root_cause.text[:80]
                wrong.append((line["text"][:80], found.fault.value, found.step.value, root))
    assert wrong == []
