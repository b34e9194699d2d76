"""Hugging Face's own Trainer under a keeper, unchanged: ended after its next checkpoint, wherever that is in a
step or a save, and gone on with.

It is not asked by its signal here: its ranks do not agree on the step at which they stop, so that with
steps of a few milliseconds they lose each other.
"""

from __future__ import annotations

from pathlib import Path

from tests.tr11ops.trainers.kept import SCRIPTS, KeptTraining, wait_until
from trainer.contract.attempt import request_stop


def write_card(run: KeptTraining, steps: int) -> None:
    words = (
        "--output_dir", "{folder}", "--use_cpu", "--max_steps", str(steps), "--save_steps", "100",
        "--per_device_train_batch_size", "2", "--logging_steps", "2", "--report_to", "none",
    )  # fmt: skip
    # the script finds its last checkpoint itself
    run.write_card(
        [str(SCRIPTS / "hf_train.py"), *words],
        dialect="huggingface",
        resume=[],
        checkpoints={"quiet": 0.5},
    )


def test_it_is_ended_after_a_checkpoint_and_goes_on_from_it(tmp_path: Path) -> None:
    run = KeptTraining(tmp_path / "run")
    write_card(run, 200000)
    with run.kept() as process:
        wait_until(lambda: run.iteration() >= 20)
        request_stop(run.paths.stop_request("4711"), "a test")
        assert process.wait(timeout=180) == 0, run.said()[-3000:]
    end = run.end()
    assert end is not None and (end.reason, end.restart) == ("signal", True)
    saved = end.checkpoint_step
    assert saved is not None and saved % 100 == 0 and saved <= end.iteration
    write_card(run, saved + 40)
    assert run.run(job="4712") == 0, run.said()[-3000:]
    end = run.end("4712")
    assert end is not None and (end.reason, end.iteration) == ("finished", saved + 40)
    first = next(one for one in run.steps() if one.job_id == "4712")
    # a bar that is drawn ten times a second at most may leave the first steps out
    assert first.iteration is not None and saved < first.iteration
    assert any("lm_loss" in one.values for one in run.steps())
    assert (run.paths.checkpoint(saved) / "manifest.json").exists()
