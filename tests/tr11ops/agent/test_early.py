"""An attempt whose agent never began: whose fault that is, by what it left and by where its record
could be written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from msgspec.structs import replace

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.agent import early
from tr11ops.agent.early import EarlyEnd, judge, last_lines
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.launch.plan import resolved_card
from tr11ops.runcard.card import load_card
from trainer.contract.end_marker import EXIT_REFUSED, EndMarker
from trainer.contract.files import write_json

SETUP = ["export A=1\nexport B=2", "module load cuda"]
END = EarlyEnd("setup", "n1", 7, 3, ("loading", "cuda: not found"))


def test_a_set_up_fault_names_line_status_and_last_words():
    found = judge(END, SETUP, 10)
    assert (found.kind, found.blamed) == (Kind.CONFIGURATION, ())
    assert (
        found.summary
        == "slurm.setup[2] (module load cuda) ended with exit status 7 on n1: cuda: not found"
    )
    assert judge(replace(END, line=2), SETUP, 10).summary.startswith(
        "slurm.setup[1] (export A=1 export B=2) ended"
    )
    for line in (None, 9):
        assert judge(replace(END, line=line, said=()), SETUP, 10).summary == (
            "slurm.setup ended with exit status 7 on n1"
        )
    late = judge(replace(END, what="late", status=137), SETUP, 10)
    assert late.summary.startswith(
        "slurm.setup[2] (module load cuda) did not end within 10 min on n1"
    )
    assert "SIGKILL" in judge(replace(END, status=137), SETUP, 10).summary


def test_the_same_fault_has_one_name_on_every_node():
    assert (
        judge(END, SETUP, 10).fault
        == judge(replace(END, host="n2", said=("other",)), SETUP, 10).fault
    )


def test_an_agent_that_does_not_begin_blames_set_up_or_node():
    agent = replace(
        END,
        what="agent",
        status=1,
        line=None,
        said=("ModuleNotFoundError: No module named 'x'", "<end>"),
    )
    assert judge(agent, SETUP, 10).kind is Kind.CONFIGURATION
    assert judge(agent, SETUP, 10).summary.endswith(
        "on n1: ModuleNotFoundError: No module named 'x'"
    )
    assert judge(agent, [], 10).kind is Kind.UNKNOWN
    node = judge(replace(agent, what="node"), [], 10)
    assert (node.kind, node.blamed) == (Kind.NODE, ("n1",))


def test_the_last_lines_are_the_jobs_own_and_hold_no_secret(tmp_path: Path):
    output = tmp_path / "out.txt"
    output.write_text("of a task before\n")
    printed = output.stat().st_size
    secret = "hf_" + "abcdefgh" * 4
    output.write_text(
        f"of a task before\nSTART TIME: now\nusing {secret}\n\ntr11: x\nslurm: line 9: 12 Killed start_agent\n"
    )
    assert last_lines(str(output), printed) == ("using ***",)
    assert last_lines("", 0) == last_lines(str(tmp_path), 0) == last_lines("pipe:[12]", 0) == ()
    assert last_lines(str(output), 10**9) == ()


def test_it_is_on_record_as_an_attempt_that_was_refused(tmp_path: Path, monkeypatch):
    card = load_card(
        write_card(tmp_path), ["slurm.setup=['module load cuda']"], {}, directory=tmp_path
    )
    path = tmp_path / "card.json"
    write_json(path, resolved_card(card))
    words = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "TR11_SCHEDULER": "local",
        "TR11_EARLY": str(tmp_path),
    }
    monkeypatch.setattr(
        os, "environ", {**os.environ, **words, "TR11_LOCAL_ROOT": str(tmp_path / "local")}
    )
    arguments = [
        "--what",
        "setup",
        "--host",
        "n1",
        "--status",
        "3",
        "--line",
        "1",
        "--submission",
        "",
        "--card",
    ]
    assert early.main([*arguments, str(path)]) == EXIT_REFUSED
    end = EndMarker.read(card.paths.end_marker("7"))
    assert end is not None and (end.reason, end.restart, end.launch) == ("refused", False, 0)
    assert end.message == "slurm.setup[1] (module load cuda) ended with exit status 3 on n1"
    verdict = json.loads((card.paths.attempt("7") / "verdict.json").read_text())
    assert (verdict["cause"], verdict["restart"], verdict["message"]) == (
        "configuration",
        False,
        end.message,
    )
    assert (card.paths.attempt("7") / "attempt.json").exists() and (tmp_path / "told").exists()
    assert early.main([*arguments, str(tmp_path / "none.json")]) == EXIT_REFUSED
