"""One run on the embedded scheduler: stopped and resumed, it equals the run that was never stopped."""

import json
import os

import psutil
import pytest

from tests.end_to_end import Playground
from tests.pins.files import formats_of
from tests.pins.recording import EXPECTED
from tests.shared_tree import not_the_groups
from tr11ops.cluster.local import LocalScheduler


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run with spaces")  # a path that a careless script would split
    place = Playground(folder, {**os.environ, "TR11_LOCAL_SCHEDULER": str(folder / "scheduler"), "COLUMNS": "80"})
    place.prepare()
    yield place
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        assert not any(str(folder) in word for word in words), f"left running: {words}"


def leave_at(iteration: int, directory: str) -> list[str]:
    return ["--set", f"run.exit_interval={iteration}", "--set", f"run.directory={directory}"]


@pytest.fixture
def private_umask():
    """Of a user who keeps the group out of all else."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("private_umask")
def test_array_resume_kill_equals_one_uninterrupted_run(playground):
    card = playground.card("tr11.toml", nodes=2, workers=1, tensor=1)
    playground.tr11("launch", "--array", "1-2", "--scheduler", "local", "--run", card, *leave_at(6, "run"))
    refused = playground.tr11(
        "launch", "--array", "1", "--scheduler", "local", "--run", card, *leave_at(6, "run"), expect=1
    )
    assert "--after" in refused.stderr + refused.stdout  # a second launch is refused, and the fix is named
    playground.wait(lambda: len(playground.ends()) == 2, "two attempts")
    assert [(end.reason, end.iteration, end.checkpoint_step) for end in playground.ends()] == [
        ("exit-interval", 6, 6),
        ("exit-interval", 12, 12),
    ]

    playground.tr11("train", "--run", card, *leave_at(12, "straight"))
    straight, parts = playground.steps("straight"), playground.steps()
    assert [step["iteration"] for step in parts] == list(range(1, 13))
    for field in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples", "global_batch_size"):
        assert [step[field] for step in parts] == [step[field] for step in straight], field  # bit for bit
    assert straight[-1]["lm_loss"] < straight[0]["lm_loss"]
    weights = {
        entry.path: entry.digest
        for entry in playground.manifest(12).files
        if entry.path.startswith(("weights", "optimizer"))
    }
    other = {
        entry.path: entry.digest
        for entry in playground.manifest(12, "straight").files
        if entry.path.startswith(("weights", "optimizer"))
    }
    assert {path: digest for path, digest in weights.items() if path.endswith(".distcp")} == {
        path: digest for path, digest in other.items() if path.endswith(".distcp")
    }


def test_what_a_run_writes_keeps_its_formats(playground):
    """Every key that the recorded run has; not what only its events, its card or its longer lists could show."""
    pinned, now = json.loads(EXPECTED.read_text())["formats"], formats_of(playground.paths().root)
    both = set(pinned) & set(now)
    assert {"checkpoints/main/global_step*/manifest.json", "state/attempts/*/end.json", "state/heartbeat/*.json"} < both
    gone = {(kind, path) for kind in both for path in pinned[kind] if path not in now[kind]}
    assert {(kind, path) for kind, path in gone if "[]" not in path and not path.startswith("data.")} == set()


def test_what_a_run_writes_is_the_groups(playground):
    assert not_the_groups(playground.paths().root) == []


def test_kill_stops_the_run_and_holds_every_queued_task(playground):
    card = playground.card("tr11.toml", nodes=2, workers=1, tensor=1)
    directory = ["--set", "run.directory=killed"]
    playground.tr11("launch", "--array", "1-3", "--scheduler", "local", "--run", card, *directory)
    playground.wait(lambda: len(playground.steps("killed")) >= 7, "seven steps")
    playground.tr11("kill", "--run", card, *directory, "--yes", "--wait", "--reason", "a test")
    playground.wait(lambda: len(playground.ends("killed")) == 1, "the first attempt")
    [first] = playground.ends("killed")
    assert first.reason == "kill-switch"
    assert first.checkpoint_step == first.iteration >= 7
    assert playground.manifest(first.iteration, "killed") is not None
    assert {step["job_id"] for step in playground.steps("killed")} == {first.job_id}  # no one else trained
    scheduler = LocalScheduler(playground.folder / "scheduler")
    [waiting] = [job for job in scheduler.jobs() if not job.state.is_final]
    assert (waiting.pending_tasks, waiting.reason) == ((2, 3), "JobHeldUser")  # held, not burned one by one
    scheduler.release(waiting.array_id)  # one that starts by mistake leaves, and the rest is held again
    playground.wait(lambda: len(playground.ends("killed")) == 2, "the second attempt")
    assert playground.ends("killed")[1].reason == "kill-switch"
    assert {step["job_id"] for step in playground.steps("killed")} == {first.job_id}
    scheduler.cancel(waiting.array_id)
    playground.wait(lambda: all(job.state.is_final for job in scheduler.jobs()), "an empty queue")
    shown = playground.tr11("status", "--run", card, *directory).stdout
    assert "stopped" in shown.lower()
    refused = playground.tr11("launch", "--array", "1", "--scheduler", "local", "--run", card, *directory, expect=1)
    assert "kill" in refused.stderr + refused.stdout
    playground.tr11("kill", "--run", card, *directory, "--release", "--yes")
    assert not playground.paths("killed").root.joinpath("kill-switch").exists()


def test_another_topology_resumes_and_another_model_is_refused(playground):
    card = playground.card("tr11.toml", nodes=1, workers=1, tensor=1)
    alone = ["--set", "parallel.pipeline=1"]
    playground.tr11("train", "--run", card, *leave_at(14, "run"), *alone)  # saved by two processes, resumed on one
    resumed = [step for step in playground.steps() if step["iteration"] > 12]
    assert [step["iteration"] for step in resumed] == [13, 14]
    assert resumed[0]["lm_loss"] == pytest.approx(playground.steps()[11]["lm_loss"], abs=0.5)
    refused = playground.tr11(
        "train", "--run", card, *leave_at(16, "run"), *alone, "--set", "model.hidden_size=64", expect=None
    )
    assert refused.returncode in (1, 2)
    assert "hidden_size" in refused.stdout + refused.stderr


def test_interrupting_a_foreground_training_saves(playground):
    import signal
    import subprocess

    from tests.end_to_end import TR11

    card = playground.card("tr11.toml", nodes=1, workers=2)
    arguments = ["train", "--run", card, "--set", "run.directory=interrupted", "--set", "parallel.pipeline=1"]
    child = subprocess.Popen(
        [str(TR11), *arguments], cwd=playground.folder, env=dict(playground.environment), stdout=subprocess.DEVNULL
    )
    playground.wait(lambda: len(playground.steps("interrupted")) >= 3, "three steps")
    child.send_signal(signal.SIGINT)
    child.wait(timeout=300)
    (end,) = playground.ends("interrupted")
    assert (end.reason, end.restart) == ("signal", True)
    assert playground.manifest(end.iteration, "interrupted") is not None
