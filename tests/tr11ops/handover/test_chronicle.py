"""`tr11 handover --chronicle`: each fault with what was done about it and what it cost; the rest at
the end.
"""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.status_cases import HOUR, NOW
from tr11ops.cli.main import execute
from tr11ops.detect.detector import Severity
from tr11ops.goodput.account import AccountSpan, Goodput
from tr11ops.goodput.causes import Interruption
from tr11ops.goodput.timeline import Bucket
from tr11ops.handover.shift import (
    Handover,
    Happened,
    ShiftInterruption,
    ShiftProgress,
    Trouble,
    cost_of,
)
from tr11ops.handover.text import chronicle

FAULT = ShiftInterruption(
    NOW - 5 * HOUR, "1000_7", "uncorrectable ECC error", ("jean-zay-iam17",), "starting again without jean-zay-iam17",
    2 * HOUR, ("[default3]: CUDA error: uncorrectable ECC error encountered",),
    {"redone": 96.0, "restart gap": 24.0}, 57,
)  # fmt: skip


def entry(**changes: object) -> Handover:
    given = Handover(
        run="tr11-176B-ml", variant="main", since=NOW - 24 * HOUR, until=NOW, basis="the last 1d", verdict="healthy",
        answer="", why="", progress=ShiftProgress(419, 858_112, 1_757_413_376, 30_800, 31_219, 2.4, 2.3, 0.91, 1152.0),
        incidents=(), restarts=(FAULT,), ends=(), checkpoints=(31_000, 31_200), nodes=(), people=(), automatic=(),
        changes=(), open=(), coming=(), read_errors=(),
    )  # fmt: skip
    return replace(given, **changes)  # type: ignore[arg-type]


def told(**changes: object) -> str:
    return chronicle(entry(**changes), UTC)


def test_a_cause_that_names_its_node_names_it_once() -> None:
    lost = replace(FAULT, cause="jean-zay-iam17: lost to the scheduler")
    text = " ".join(told(restarts=(lost,)).split())
    assert "1000_7 failed: jean-zay-iam17: lost to the scheduler" in text


def test_what_a_short_fault_cost_is_not_rounded_to_nothing() -> None:
    short = replace(FAULT, node_hours={"redone": 0.02})
    assert "1 fault, 72 node-seconds lost." in " ".join(told(restarts=(short,)).split())


def test_a_fault_has_evidence_deeds_and_cost() -> None:
    lines = told().splitlines()
    assert lines[0].startswith("## ") and lines[0].endswith(": tr11-176B-ml / main")
    text = " ".join(told().split())
    assert "2 checkpoints made. 1 fault, 120.0 node-hours lost." in text
    assert "1000_7 failed on jean-zay-iam17: uncorrectable ECC error" in text
    assert "    [default3]: CUDA error: uncorrectable ECC error encountered" in lines
    assert "- then: starting again without jean-zay-iam17" in text
    assert (
        "trained on after 2 h 00 min. Cost: 120.0 node hours (96.0 redone, 24.0 restart gap); 57 iterations"
        in text
    )


def test_each_event_stands_where_it_belongs_once() -> None:
    during = Happened(NOW - 4 * HOUR, "jean-zay-iam17 excluded", "lena", "ECC")
    before = Trouble(NOW - 5 * HOUR - 60, Severity.CRITICAL, "a worker is gone", "", 60.0, 2 * HOUR)
    after = Happened(NOW - HOUR, "pinned checkpoint 31200", "lena")
    text = told(nodes=(during,), incidents=(before,), people=(after,))
    fault, _, rest = text.partition("### Besides")
    assert (
        "lena: jean-zay-iam17 excluded (ECC)" in fault
        and "alert CRITICAL: a worker is gone" in fault
    )
    assert "pinned checkpoint 31200" in rest and "pinned" not in fault
    assert text.count("excluded") == 1


def test_a_quiet_day_is_short() -> None:
    text = told(restarts=(), checkpoints=(), progress=None)
    assert text.splitlines()[2:] == ["No iteration is on record. No fault."]


def test_a_fault_that_is_not_over_says_so() -> None:
    assert "It has not trained since." in told(restarts=(replace(FAULT, down=None, node_hours={}),))


def test_no_text_of_a_log_becomes_a_heading() -> None:
    hostile = replace(FAULT, cause="x\n# owned", evidence=("a\n## b",), decision="c\n### d")
    headings = [line for line in told(restarts=(hostile,)).splitlines() if line.startswith("#")]
    assert len(headings) == 2


def test_cost_is_what_was_lost_to_that_fault() -> None:
    """What the failed launch had trained in vain, and everything that is not useful until it
    trained on.
    """

    def span(start: float, end: float, bucket: Bucket, job: str, launch: int) -> AccountSpan:
        return AccountSpan(int(start * 1e6), int(end * 1e6), bucket, 10, 0, True, job, launch, "")

    hour = 3600.0
    spans = (
        span(0, 4 * hour, Bucket.USEFUL, "7", 1),
        span(4 * hour, 5 * hour, Bucket.REDONE, "7", 1),
        span(5 * hour, 6 * hour, Bucket.RESTART_GAP, "7", 2),
        span(6 * hour, 9 * hour, Bucket.USEFUL, "7", 2),
        span(9 * hour, 10 * hour, Bucket.REDONE, "7", 2),
    )
    fault = Interruption(5 * hour, "node", "7", 1, 6 * hour)
    account = Goodput(0.0, 10 * hour, spans, (fault,))
    assert cost_of(account, fault, 6 * hour) == {"redone": 10.0, "restart gap": 10.0}
    assert cost_of(account, fault, 5.5 * hour) == {"redone": 10.0, "restart gap": 5.0}


def test_it_is_markdown_and_no_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert execute(["handover", "--chronicle", "--json"]) == 2
    assert "--chronicle is Markdown" in capsys.readouterr().err
