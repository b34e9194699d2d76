"""A trainer that knows nothing of tr11, two ranks under a keeper: what stands in the run directory while
it trains and after it, however it ends.
"""

from __future__ import annotations

import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from tests.tr11ops.trainers.kept import PATIENCE, PLAIN, KeptTraining, wait_until
from tr11ops.base.processes import is_living
from tr11ops.trainers import tr11_beat
from trainer.contract.attempt import ExitTime, request_stop
from trainer.contract.documents import write_record
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.requests import RequestAnswer, new_request


@pytest.fixture
def run(tmp_path: Path) -> KeptTraining:
    return KeptTraining(tmp_path / "run")


def ranks_of(pid: int) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if "plain_train.py" in " ".join(child.cmdline()) and "torch.distributed.run" not in " ".join(child.cmdline())
    ]  # fmt: skip


def test_kill_now_waits_for_no_checkpoint(run: KeptTraining) -> None:
    run.plain(400, 1000, "hang-at-3")
    with run.kept() as process:
        wait_until(lambda: run.iteration() >= 3)
        request = new_request("kill-now", "a tester", "", run.root)
        request.write(run.root / "kill-switch")
        assert process.wait(timeout=PATIENCE) == 0
    end = run.end()
    assert end is not None and (end.reason, end.iteration) == ("kill-switch", 3)
    assert end.checkpoint_step is None


def test_a_silent_trainer_shows_no_life(run: KeptTraining) -> None:
    run.plain(400, 1000, "hang-at-3")
    with run.kept():
        wait_until(lambda: run.iteration() >= 3)
        beat = run.beat()
        assert beat is not None
        with pytest.raises(AssertionError):
            wait_until(lambda: run.beat() != beat, seconds=4.0)


def test_a_launch_that_its_agent_ends_says_nothing_of_it(run: KeptTraining) -> None:
    run.with_torch(400, 1000)
    with run.kept() as process:
        wait_until(lambda: run.iteration() >= 2)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 128 + signal.SIGTERM
        assert not any(psutil.pid_exists(one.pid) for one in ranks)
    assert run.end() is None


def test_a_loss_that_is_no_number_is_told(run: KeptTraining) -> None:
    run.plain(6, 3, "nan-at-5")
    assert run.run() == 0
    losses = {one.iteration: one.values["lm_loss"] for one in run.steps()}
    assert losses[5] is None and losses[4] == 2.5


def test_a_start_from_random_weights_is_ended_at_once(run: KeptTraining) -> None:
    run.plain(8, 4)
    assert run.run() == 0
    run.plain(400, 4, "forget", seconds=0.3)
    assert run.run(job="4712") == 2
    end = run.end("4712")
    assert end is not None and (end.reason, end.restart) == ("refused", False)
    assert "started from random weights although step-8 of step 8 exists" in end.message
    # the checkpoints that were there are there
    assert {path.name for path in run.out.iterdir()} == {"step-4", "step-8"}


def test_a_resume_whose_words_the_script_refuses_is_held_at_once(run: KeptTraining) -> None:
    """The first launch is fine; each later one would end in the script's own parser."""
    script = run.root / "own_parser.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    run.write_card([str(script), "--resume_from_checkpoint", "/out/x"], dialect="huggingface")
    assert run.run() == 2, run.said()
    end = run.end()
    assert end is not None and (end.reason, end.restart) == ("refused", False)
    assert "error: unrecognized arguments: --resume_from_checkpoint /out/x" in end.message
    assert "trainer.resume = []" in end.message


def test_an_end_that_nothing_explains_is_tried_once_more(run: KeptTraining) -> None:
    for job, restart in (("4711", True), ("4712", False)):
        run.write_card("for n in 1 2 3; do echo at $n/8 loss=1.0; done", start="node", **PLAIN)
        assert run.run(job=job) == 0, run.said()
        end = run.end(job)
        assert end is not None and (end.reason, end.restart) == ("unexplained", restart)


def test_a_launch_without_a_step_is_held(run: KeptTraining) -> None:
    run.write_card("true", start="node")
    assert run.run() == 0
    end = run.end()
    assert end is not None and (end.reason, end.restart) == ("unexplained", False)


def test_a_launch_after_the_last_step_has_nothing_left(run: KeptTraining) -> None:
    """The one before was ended in the moment of its last save, and told no end."""
    run.plain(4, 4)
    assert run.run() == 0
    run.paths.end_marker("4711").unlink()
    assert run.run(job="4712") == 0, run.said()
    end = run.end("4712")
    assert end is not None and (end.reason, end.iteration, end.restart) == ("finished", 4, False)
    assert "took no step, as step-4 of step 4 is of its last one" in end.message


def test_a_second_supervisor_is_refused(run: KeptTraining) -> None:
    run.write_card(["torchrun", "--max-restarts=3", "train.py"], start="node")
    assert run.run() == 2
    end = run.end()
    assert end is not None and end.reason == "refused" and "--max-restarts=3" in end.message


def test_a_time_limit_ends_it(run: KeptTraining) -> None:
    run.plain(4000, 1000, "polite", run={"exit_duration_minutes": 600})
    with run.kept() as process:
        wait_until(lambda: run.iteration() >= 3)
        # the agent has seen that the job's limit was moved
        write_record(run.paths.exit_time("4711"), ExitTime(time.time() - 1.0))
        assert process.wait(timeout=PATIENCE) == 0, run.said()
    end = run.end()
    assert end is not None and (end.reason, end.restart) == ("exit-duration", True)
    assert end.checkpoint_step is not None


def test_a_full_disk_ends_no_training(run: KeptTraining) -> None:
    run.plain(8, 4)
    run.paths.logs.mkdir(parents=True)
    run.paths.metrics.symlink_to("/dev/full")
    assert run.run() == 0
    assert "metrics cannot be written, the training goes on" in run.said()
    end = run.end()
    assert end is not None and end.reason == "finished"


# ----------------------------------------------------------------------------- several nodes
def test_all_nodes_are_signalled_at_one_moment(run: KeptTraining) -> None:
    run.with_torch(4000, 10000, "polite")
    with run.kept(nodes=2, workers=1) as first, run.kept(nodes=2, node_rank=1, workers=1) as second:
        wait_until(lambda: run.iteration() >= 5)
        wait_until(lambda: (beat := run.beat(1)) is not None and beat.iteration >= 5)
        request_stop(run.paths.stop_request("4711"), "a test")
        assert first.wait(timeout=PATIENCE) == 0, run.said()
        assert second.wait(timeout=PATIENCE) == 0, run.said()
    # a rank that left with the others, who were asked an instant before, needs no signal
    assert run.said().count("TERM to 1 rank of this node") in (1, 2)
    end = run.end()
    assert end is not None and end.reason == "signal" and end.checkpoint_step is not None
    assert [one.iteration for one in run.steps()] == list(range(1, end.iteration + 1))
    beat = run.beat(1)
    assert beat is not None and (beat.phase, beat.rank) == ("ended", 1)


def test_the_node_whose_ranks_print_writes_the_steps(run: KeptTraining) -> None:
    progress = {**PLAIN["progress"], "printed_by": "last"}
    run.plain(30, 10, "last-prints", progress=progress)
    with run.kept(nodes=2, workers=1) as first, run.kept(nodes=2, node_rank=1, workers=1) as second:
        assert first.wait(timeout=PATIENCE) == 0, run.said()
        assert second.wait(timeout=PATIENCE) == 0
    assert [one.iteration for one in run.steps()] == list(range(1, 31))
    end = run.end()
    assert end is not None and (end.reason, end.iteration) == ("finished", 30)


def test_another_launch_ends_the_workers_of_this_one(run: KeptTraining) -> None:
    run.plain(4000, 10000)
    with run.kept(nodes=2, workers=1) as first, run.kept(nodes=2, node_rank=1, workers=1) as second:
        wait_until(lambda: run.iteration() >= 5)
        claim = LeaseClaim.of_this_process("4712", 1)
        assert LeaseFolder(run.paths).claim(2, replace(claim, epoch=2))
        assert first.wait(timeout=PATIENCE) == 2, run.said()
        assert second.wait(timeout=PATIENCE) == 2
    assert run.said().count("another launch has taken the run over: ending the workers") == 2
    end = run.end()
    assert end is not None and (end.reason, end.restart) == ("superseded", False)


def test_a_frozen_launch_that_wakes_after_its_successor_began_writes_nothing(
    run: KeptTraining,
) -> None:
    run.with_torch(
        4000, 10, "polite", seconds=0.2
    )  # on TERM it would save, into its successor's folder
    after = KeptTraining(run.root)
    with run.kept() as frozen:
        wait_until(lambda: run.iteration() >= 13)
        parts = [psutil.Process(frozen.pid), *psutil.Process(frozen.pid).children(recursive=True)]
        for part in parts:
            part.suspend()
        with after.kept(job="4712") as process:
            wait_until(lambda: any(one.job_id == "4712" for one in run.steps()))
            for part in parts:
                part.resume()
            assert frozen.wait(timeout=PATIENCE) == 2, run.said()
            assert process.poll() is None
            end = run.end()
            assert end is not None and (end.reason, end.restart) == ("superseded", False)
            assert not any(is_living(part) for part in parts)
            saved = {int(one.name.removeprefix("step-")) for one in run.out.glob("step-*")}
            assert saved and all(step % 10 == 0 for step in saved)


def test_each_way_to_start(run: KeptTraining) -> None:
    run.with_torch(6, 3, start="srun")
    assert run.run() == 0, run.said()
    assert [one.iteration for one in run.steps()] == list(range(1, 7))
    assert "[default0]:at 6/6" in run.said()
    # a launcher of their own; a line for a shell; the first node alone
    line = f"echo begin after step 6; for n in 7 8; do echo at $n/8 loss=1.0; sleep 0.1; done; echo {'{step}'}"
    run.write_card(line, start="command", **{**PLAIN, "first": [], "resume": []})
    with (
        run.kept(job="4712", nodes=2, node_rank=1, workers=1) as second,
        run.kept(job="4712", nodes=2, workers=1) as first,
    ):
        assert first.wait(timeout=PATIENCE) == 0, run.said()
        assert second.wait(timeout=PATIENCE) == 0
    end = run.end("4712")
    assert end is not None and (end.reason, end.iteration) == ("finished", 8)


def test_a_worker_of_ours_that_fails_takes_the_others_along(run: KeptTraining) -> None:
    run.with_torch(400, 100, "die-at-3", start="srun")
    assert run.run() == 128 + signal.SIGKILL
    assert "tr11: worker 1 (process " in run.said() and "ended by SIGKILL" in run.said()
    assert run.end() is None


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_torchrun_that_is_ended_from_outside_is_told_apart_from_an_end(
    run: KeptTraining, name: str
) -> None:
    """Its ranks save and leave as if they had been asked, or say nothing at all."""
    run.with_torch(4000, 1000, "polite")
    with run.kept() as process:
        wait_until(lambda: run.iteration() >= 2)
        [launcher] = [
            child
            for child in psutil.Process(process.pid).children()
            if "torch.distributed.run" in child.cmdline()
        ]
        ranks = ranks_of(process.pid)
        launcher.send_signal(signal.Signals[name])
        assert process.wait(timeout=PATIENCE) != 0
        for rank in ranks:  # a node's agent, which is not here, would end those that are left
            with suppress(psutil.NoSuchProcess):
                rank.kill()
    assert len(ranks) == 2
    assert (
        f"failed: the launcher was ended by {name}, and no one on record had sent that"
        in run.said()
    )
    assert run.end() is None


# ----------------------------------------------------------------------------- a trainer that speaks
def test_ranks_that_speak_are_heard_and_hear(run: KeptTraining) -> None:
    shutil.copy(tr11_beat.__file__, run.root)
    run.plain(4000, 10000, "speaks", seconds=0.1)
    with run.kept() as process:
        wait_until(lambda: run.iteration() >= 10)
        wait_until(lambda: (beat := run.beat(1)) is not None and beat.iteration >= 10)
        request = new_request("checkpoint", "a tester", "", run.root)
        request.write(run.paths.checkpoint_request)
        wait_until(lambda: not run.paths.checkpoint_request.exists())
        request_stop(run.paths.stop_request("4711"), "a test")
        assert process.wait(timeout=PATIENCE) == 0, run.said()
    end = run.end()
    assert end is not None and (end.reason, end.restart) == ("signal", True)
    assert end.checkpoint_step is not None and end.checkpoint_step >= 10
    steps = run.steps()
    assert steps and steps[0].integer("total_iterations") == 4000
    beat = run.beat(1)
    assert beat is not None and beat.phase == "ended"


def test_what_cannot_be_asked_for_is_answered(run: KeptTraining) -> None:
    run.plain(400, 1000, "polite")
    with run.kept():
        wait_until(lambda: run.iteration() >= 3)
        request = new_request("checkpoint", "a tester", "", run.root)
        request.write(run.paths.checkpoint_request)
        wait_until(lambda: run.paths.answer(request.id).exists())
        answer = RequestAnswer.read(run.paths.answer(request.id))
        assert answer is not None and answer.step is None and "cannot be asked" in answer.message


def test_ranks_that_wake_save_where_no_start_goes_on_from(run: KeptTraining) -> None:
    """Their keeper is still frozen, and does not end them: each start has its own folder, and theirs is closed."""
    run.plain(4000, 5, seconds=0.1, saves_to="{save}")
    out, job = run.out, "4712"
    with run.kept() as frozen:
        wait_until(lambda: (out / "start-1" / "step-10").is_dir() and run.iteration() >= 12)
        keeper = psutil.Process(frozen.pid)
        ranks = keeper.children(recursive=True)
        for part in (keeper, *ranks):
            part.suspend()
        try:
            with KeptTraining(run.root).kept(job=job):
                wait_until(lambda: any(one.job_id == job for one in run.steps()))
                for part in ranks:
                    part.resume()
                wait_until((out / "start-1" / "step-25").is_dir)  # they do train on
        finally:
            for part in (*ranks, keeper):
                with suppress(psutil.NoSuchProcess):
                    part.kill()
    shutil.copytree(
        out / "start-1" / "step-25", out / "start-1" / "step-900"
    )  # whole, and the newest
    (out / "start-1" / "step-901").mkdir()  # broken
    with KeptTraining(run.root).kept(job="4713"):
        wait_until(lambda: run.said().count("begin after step") == 3)
    begun = [int(line.split()[-1]) for line in run.said().splitlines() if "begin after" in line]
    saved = {int(one.name.removeprefix("step-")) for one in (out / "current").glob("step-*")}
    trained = [one.iteration or 0 for one in run.steps() if one.job_id == job]
    assert begun[0] == 0 and 10 <= begun[1] <= begun[2] <= max(trained), (begun, trained)
    assert {5, 10, begun[2]} <= saved and not {900, 901} & saved
    assert {"step-25", "step-900"} <= {one.name for one in (out / "start-1").iterdir()}
