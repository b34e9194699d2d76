"""`tr11 drill` of a card of another trainer: a training that saves and stops in order is proved to, one that
does not is found out, and screens say which.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.trainers.kept import CARD, LIGHT, SCRIPTS, wait_until
from tests.tr11ops.trainers.launched import Launched
from tr11ops.dialects.settings import TrainerSettings, settings_of
from tr11ops.launch.stop_drill import NextSight, StopSight, judge_next, judge_stop
from tr11ops.trainers.checkpoints import FoundCheckpoint
from tr11ops.trainers.kept_files import StartOrder
from tr11ops.trainers.levels import standing_of
from tr11ops.trainers.proof import StopProof, proof_path, read_proof, stop_digest, write_proof
from tr11ops.trainers.start import TakenCheckpoint
from tr11ops.trainers.stopping import way_of
from trainer.contract.attempt import EndMarker
from trainer.contract.paths import RunPaths

MARKER = EndMarker(
    reason="signal", iteration=40, checkpoint_step=40, restart=True, message="asked", time=9.0, host="n1",
    job_id="7", launch=1,
)  # fmt: skip
SAVED = FoundCheckpoint("step-40", 40, "whole", bytes=9, changed=1.0)
STOPPED = StopSight(38, "signal TERM", 2.0, MARKER, left=5.0, checkpoint=SAVED, saved=4.0)
WENT_ON = NextSight(
    "8", StartOrder(1, 2, TakenCheckpoint(40, "/out/step-40", "step-40")), first_step=41
)


@pytest.mark.parametrize(
    ("change", "interval", "result", "said"),
    [
        ({}, None, "proved", ""),
        ({}, 500, "proved", ""),
        ({}, 20, "unclear", "was due at step 40 in any case"),
        ({"marker": None}, None, "failed", "did not leave within 15 min"),
        ({"marker": None, "checkpoint": None}, None, "failed", "saved nothing and did not leave"),
        ({"marker": None, "asked": None}, None, "unclear", "no order"),
        ({"checkpoint": None}, None, "failed", "without a whole checkpoint"),
        ({"iteration": 41}, None, "failed", "of step 40, and it was at step 41"),
        ({"marker": replace(MARKER, reason="finished")}, None, "unclear", "finished"),
    ],
)
def test_a_stop_is_judged_by_what_it_left_behind(
    change: dict[str, object], interval: int | None, result: str, said: str
) -> None:
    found, why = judge_stop(replace(STOPPED, **change), 15.0, interval)
    assert found == result and said in why


@pytest.mark.parametrize(
    ("change", "result", "said"),
    [
        ({}, "proved", ""),
        ({"order": StartOrder(1, 2, None), "first_step": 1}, "failed", "began from scratch"),
        ({"first_step": 40}, "failed", "trained step 40"),
        ({"first_step": None}, "unclear", "no launch was seen"),
        (
            {"first_step": None, "end": replace(MARKER, message="no such file")},
            "failed",
            "no such file",
        ),
        (
            {"order": StartOrder(1, 2, TakenCheckpoint(30, "/out/step-30", "step-30"))},
            "failed",
            "from step-30, not from step-40",
        ),
    ],
)
def test_what_follows_has_to_go_on_from_what_was_saved(
    change: dict[str, object], result: str, said: str
) -> None:
    found, why = judge_next(STOPPED, replace(WENT_ON, **change))
    assert found == result and said in why


# ----------------------------------------------------------------------------- what follows from it
def megatron(*words: str, folder: str = "/code") -> TrainerSettings:
    command = ["pretrain_gpt.py", "--exit-signal-handler", *words]
    table = {"dialect": "megatron", "command": command, "directory": folder}
    return settings_of(table, "a card")


def proof_of(settings: TrainerSettings, result: str = "proved", why: str = "") -> StopProof:
    digest = stop_digest(settings, 2)
    return StopProof("megatron", "signal TERM", digest, time=0.0, result=result, why=why)  # type: ignore[arg-type]


def test_the_third_level_is_reached_by_a_drill_alone() -> None:
    settings = megatron()
    unproved = standing_of(settings, 2)
    assert unproved.level == 2 and "which no drill has proved" in unproved.stop
    assert unproved.saves_when_asked is None
    proved = standing_of(settings, 2, proof_of(settings))
    assert proved.level == 3 and proved.saves_when_asked
    assert "as a drill proved on 1970-01-01" in proved.stop


def test_what_failed_a_drill_is_not_asked_again() -> None:
    settings = megatron()
    failed = proof_of(settings, "failed", "it left without a checkpoint")
    found = standing_of(settings, 2, failed)
    assert found.level == 2 and "it left without a checkpoint" in found.stop
    assert "a stop ends it after its next checkpoint" in found.stop
    assert way_of(settings, 2, failed) == "next checkpoint" and found.saves_when_asked is False
    for result in ("under way", "unclear", "proved"):
        assert way_of(settings, 2, proof_of(settings, result)) == "signal TERM"


@pytest.mark.parametrize(
    ("dialect", "word"),
    [("huggingface", "--enable_jit_checkpoint"), ("lightning", "save_on_exception")],
)
def test_ranks_that_do_not_agree_are_not_asked_but_one_alone_is(dialect: str, word: str) -> None:
    table = {"dialect": dialect, "command": ["t.py", word]}
    settings = settings_of(table, "a card")
    assert way_of(settings, 1) == "signal TERM"
    assert way_of(settings, 2) == "next checkpoint"
    assert "its ranks do not agree" in standing_of(settings, 2, proof_of(settings)).stop
    assert standing_of(settings, 2, proof_of(settings)).level == 2
    agreed = settings_of({**table, "stop": {"agrees": True}}, "a card")
    assert way_of(agreed, 2) == "signal TERM"


def test_a_proof_is_of_one_command(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "toy", "main")
    (tmp_path / "pretrain_gpt.py").write_text("train()\n", encoding="utf-8")
    settings = megatron(folder=str(tmp_path))
    write_proof(paths, proof_of(settings))
    found = read_proof(paths, stop_digest(settings, 2))
    assert found is not None and found.is_proved
    more = megatron("--seq-length", "4096", folder=str(tmp_path))
    assert read_proof(paths, stop_digest(more, 2)) is None
    assert read_proof(paths, stop_digest(settings, 4)) is None
    (tmp_path / "pretrain_gpt.py").write_text("train(handler=None)\n", encoding="utf-8")
    assert read_proof(paths, stop_digest(settings, 2)) is None


def test_a_damaged_record_proves_nothing(tmp_path: Path) -> None:
    paths, settings = RunPaths(tmp_path, "toy", "main"), megatron()
    digest = stop_digest(settings, 2)
    path = write_proof(paths, proof_of(settings))
    assert path == proof_path(paths, digest)
    path.write_text('{"dialect": "megat', encoding="utf-8")
    assert read_proof(paths, digest) is None


# ----------------------------------------------------------------------------- for real
class Drilled(Launched):
    """A run of the plain script, which saves each 1000 steps by itself. `polite`: it saves on TERM."""

    def write(self, *words: str) -> None:
        text = CARD.format(root=self.root, script=SCRIPTS / "plain_train.py", python=sys.executable)
        said = ", ".join(f'"{word}"' for word in ("2000", "1000", "0.2", *words))
        text = text.replace('"20", "5", "0.1", "die-once-at-8"', said)
        text = text.replace("command = [", f'start = "srun"\ncommand = ["{sys.executable}", ')
        text += '[trainer.stop]\nhow = "signal TERM"\n[resilience]\nstop_within_minutes = 1\n'
        text += f"[trainer.environment]\nPYTHONPATH = {json.dumps(LIGHT['PYTHONPATH'])}\n"
        self.card.write_text(text, encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Drilled]:
    drilled = Drilled(tmp_path)
    yield drilled
    drilled.close()


def test_one_that_saves_in_order_reaches_the_third_level(run: Drilled) -> None:
    run.write("polite")
    words = ("drill", "--launch", "--scheduler", "local", "--timeout", "200")
    plan = run.tr11(*words, "--dry-run")
    assert plan.returncode == 0 and not (run.root / "state" / "drills").exists()
    assert "may be lost" in plan.stderr and "2 tasks of the card submitted" in plan.stderr
    done = run.tr11(*words, "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    value = json.loads(done.stdout)
    assert (value["fine"], value["result"], value["how"]) == (True, "proved", "signal TERM")
    assert value["checkpoint_step"] >= value["iteration"] > 0
    assert value["went_on_at"] == value["checkpoint_step"] + 1
    assert value["signalled_after"] <= value["saved_after"] and value["left_after"] < 60
    assert "level 3: started, and stopped in order" in run.tr11("status").stdout
    assert "as a drill proved" in run.tr11("kill", "--dry-run").stderr
    run.write("polite", "another-word")
    assert "level 2" in run.tr11("status").stdout


def test_one_that_dies_of_the_signal_is_found_out(run: Drilled) -> None:
    run.write()
    run.tr11("launch", "--array", "1-2", "--scheduler", "local", "--yes")
    wait_until(lambda: len(run.steps()) >= 3)
    done = run.tr11("drill", "--yes", "--json", "--timeout", "100")
    assert done.returncode == 1, done.stdout + done.stderr
    value = json.loads(done.stdout)
    assert value["result"] == "failed" and "without a whole checkpoint" in value["why"]
    said = run.tr11("kill", "--dry-run").stderr
    assert "it did not stop in order when a drill asked it" in said
    assert "a stop ends it after its next checkpoint" in said


def test_nothing_is_asked_where_there_is_nothing_to_prove(run: Drilled) -> None:
    run.write("polite")
    run.card.write_text(
        run.card.read_text(encoding="utf-8").replace(
            'how = "signal TERM"', 'agrees = false\nhow = "signal TERM"'
        ),
        encoding="utf-8",
    )
    done = run.tr11("drill", "--launch", "--scheduler", "local", "--yes")
    assert done.returncode == 1 and "its ranks do not agree" in done.stderr
    assert "a stop ends it after its next checkpoint" in done.stderr
    assert not (run.root / "state" / "submissions").exists()
