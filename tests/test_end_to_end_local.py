"""One run on the embedded scheduler: stopped and resumed, it equals the run that was never stopped."""

import json
import os
import subprocess

import psutil
import pytest

from tests.end_to_end import TR11, Playground
from tests.pins.files import formats_of
from tests.pins.recording import EXPECTED
from tests.shared_tree import not_the_groups
from tr11ops.cluster.local import LocalScheduler


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run with spaces")  # a path that a careless script would split
    own = {
        "TR11_LOCAL_SCHEDULER": str(folder / "scheduler"),
        "TR11_LOCAL_NODES": "8",
        "COLUMNS": "80",
    }
    place = Playground(folder, {**os.environ, **own})
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
    playground.tr11(
        "launch", "--array", "1-2", "--scheduler", "local", "--run", card, *leave_at(6, "run")
    )
    refused = playground.tr11(
        "launch",
        "--array",
        "1",
        "--scheduler",
        "local",
        "--run",
        card,
        *leave_at(6, "run"),
        expect=1,
    )
    # a second launch is refused, and the fix is named
    assert "--after" in refused.stderr + refused.stdout
    playground.wait(lambda: len(playground.ends()) == 2, "two attempts")
    assert [(end.reason, end.iteration, end.checkpoint_step) for end in playground.ends()] == [
        ("exit-interval", 6, 6),
        ("exit-interval", 12, 12),
    ]

    playground.tr11("train", "--run", card, *leave_at(12, "straight"))
    straight, parts = playground.steps("straight"), playground.steps()
    assert [step["iteration"] for step in parts] == list(range(1, 13))
    for field in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples", "global_batch_size"):
        # bit for bit
        assert [step[field] for step in parts] == [step[field] for step in straight], field
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
    """Every key that the recorded run has; not what only its events, its card or its longer lists
    could show.
    """
    pinned, now = json.loads(EXPECTED.read_text())["formats"], formats_of(playground.paths().root)
    both = set(pinned) & set(now)
    assert {
        "checkpoints/main/global_step*/manifest.json",
        "state/attempts/*/end.json",
        "state/heartbeat/*.json",
    } < both
    gone = {(kind, path) for kind in both for path in pinned[kind] if path not in now[kind]}
    assert {
        (kind, path) for kind, path in gone if "[]" not in path and not path.startswith("data.")
    } == set()


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
    # no one else trained
    assert {step["job_id"] for step in playground.steps("killed")} == {first.job_id}
    scheduler = LocalScheduler(playground.folder / "scheduler")
    [waiting] = [job for job in scheduler.jobs() if not job.state.is_final]
    # held, not burned one by one
    assert (waiting.pending_tasks, waiting.reason) == ((2, 3), "JobHeldUser")
    # one that starts by mistake leaves, and the rest is held again
    scheduler.release(waiting.array_id)
    playground.wait(lambda: len(playground.ends("killed")) == 2, "the second attempt")
    assert playground.ends("killed")[1].reason == "kill-switch"
    assert {step["job_id"] for step in playground.steps("killed")} == {first.job_id}
    scheduler.cancel(waiting.array_id)
    playground.wait(lambda: all(job.state.is_final for job in scheduler.jobs()), "an empty queue")
    shown = playground.tr11("status", "--run", card, *directory).stdout
    assert "stopped" in shown.lower()
    refused = playground.tr11(
        "launch", "--array", "1", "--scheduler", "local", "--run", card, *directory, expect=1
    )
    assert "kill" in refused.stderr + refused.stdout
    playground.tr11("kill", "--run", card, *directory, "--release", "--yes")
    assert not playground.paths("killed").root.joinpath("kill-switch").exists()


def test_another_topology_resumes_and_another_model_is_refused(playground):
    card = playground.card("tr11.toml", nodes=1, workers=1, tensor=1)
    alone = ["--set", "parallel.pipeline=1"]
    # saved by two processes, resumed on one
    playground.tr11("train", "--run", card, *leave_at(14, "run"), *alone)
    resumed = [step for step in playground.steps() if step["iteration"] > 12]
    assert [step["iteration"] for step in resumed] == [13, 14]
    assert resumed[0]["lm_loss"] == pytest.approx(playground.steps()[11]["lm_loss"], abs=0.5)
    refused = playground.tr11(
        "train",
        "--run",
        card,
        *leave_at(16, "run"),
        *alone,
        "--set",
        "model.hidden_size=64",
        expect=None,
    )
    assert refused.returncode in (1, 2)
    assert "hidden_size" in refused.stdout + refused.stderr


def test_interrupting_a_foreground_training_saves(playground):
    import signal

    card = playground.card("tr11.toml", nodes=1, workers=2)
    arguments = [
        "train",
        "--run",
        card,
        "--set",
        "run.directory=interrupted",
        "--set",
        "parallel.pipeline=1",
    ]
    child = subprocess.Popen(
        [str(TR11), *arguments],
        cwd=playground.folder,
        env=dict(playground.environment),
        stdout=subprocess.DEVNULL,
    )
    playground.wait(lambda: len(playground.steps("interrupted")) >= 3, "three steps")
    child.send_signal(signal.SIGINT)
    child.wait(timeout=300)
    (end,) = playground.ends("interrupted")
    assert (end.reason, end.restart) == ("signal", True)
    assert playground.manifest(end.iteration, "interrupted") is not None


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_data_worker_that_is_killed_after_steps_ends_no_attempt(
    playground: Playground, nodes: int
) -> None:
    """It is of its node and its moment, as where memory is short: nothing in card or data is wrong."""
    name = f"worker-{nodes}"
    card = playground.card("tr11.toml", nodes=nodes, workers=2 // nodes, tensor=1)
    child = subprocess.Popen(
        [str(TR11), "train", "--run", card, *leave_at(30, name), "--set", "data.workers=1"],
        cwd=playground.folder, env=dict(playground.environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        playground.wait(lambda: len(playground.steps(name)) >= 7, "seven steps")
        below = psutil.Process(child.pid).children(recursive=True)
        next(one for one in below if "trainer.data.worker" in one.cmdline()).kill()
        shown, _ = child.communicate(timeout=600)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    [attempt] = playground.paths(name).attempts.iterdir()
    first, second = (
        json.loads((attempt / "launches" / f"{number}.json").read_text()) for number in (1, 2)
    )
    assert first["cause"] in {"node", "unknown"} and first["reached"] >= 7, shown
    assert "was killed (SIGKILL)" in first["summary"], first
    assert any(
        "no want of memory was seen" in line or "killed" in line for line in first["evidence"][1:]
    ), first
    assert first["decision"].startswith("starting again"), first
    assert second["iteration_after"] == 30 and playground.ends(name)[-1].reason == "exit-interval"


def test_a_sweep_of_three_cells_takes_up_the_one_that_was_killed(playground):
    """Three runs of one array train at once; one's agent is killed with -9, and `resume` finishes
    exactly that one.
    """
    card = playground.card("tr11.toml", nodes=1, workers=1, tensor=1)
    short = [
        "parallel.pipeline=1",
        "batch.ramp=none",
        "batch.train_samples=320",
        "checkpoint.interval=2",
    ]
    words = [word for text in short for word in ("--set", text)]
    done = playground.tr11("sweep", "--run", card, "--scheduler", "local", "--grid", "run.seed=1,2,3", "--at-once", "0",
                           "--directory", "study", "--json", *words)  # fmt: skip
    assert json.loads(done.stdout)["submitted"]

    scheduler = LocalScheduler(playground.folder / "scheduler")

    def is_idle() -> bool:
        return all(job.state.is_final for job in scheduler.jobs(name="small-sweep"))

    def states() -> dict[str, str]:
        shown = playground.tr11("sweep", "status", "study", "--json", expect=None).stdout
        return {cell["name"]: cell["state"] for cell in json.loads(shown)["cells"]}

    def saved() -> int:
        found = playground.folder.glob("study/seed2/checkpoints/*/latest")
        return max(
            (int(path.read_text().strip().removeprefix("global_step")) for path in found), default=0
        )

    playground.wait(lambda: saved() >= 2, "a checkpoint of the second cell")
    [attempt] = playground.folder.glob("study/seed2/state/attempts/*/attempt.json")
    psutil.Process(json.loads(attempt.read_text())["pid"]).kill()
    playground.wait(is_idle, "the end of all three")
    # the killed one's worker outlives the agent for as long as a last save takes, or does not
    before = states()
    assert before.pop("seed2") in {"failed", "stopped"} and before == {
        "seed1": "done",
        "seed3": "done",
    }

    again = json.loads(playground.tr11("sweep", "resume", "study", "--json").stdout)
    assert again["submitted"] and again["taken_up"] == ["seed2"]
    playground.wait(is_idle, "the second cell")
    assert set(states().values()) == {"done"}
    steps = {
        name: [json.loads(line) for path in playground.folder.glob(f"study/{name}/*-logs/logs/*/metrics.jsonl")
               for line in path.read_text().splitlines()]
        for name in ("seed1", "seed2", "seed3")
    }  # fmt: skip
    trained = {
        name: [one for one in found if one["kind"] == "step"] for name, found in steps.items()
    }
    assert {name: found[-1]["iteration"] for name, found in trained.items()} == dict.fromkeys(
        trained, 20
    )
    jobs = {name: len({one["job_id"] for one in found}) for name, found in trained.items()}
    assert jobs == {"seed1": 1, "seed2": 2, "seed3": 1}  # no one else trained again
    first = {one["job_id"] for one in trained["seed2"]}.difference({trained["seed2"][-1]["job_id"]})
    resumed = [one["iteration"] for one in trained["seed2"] if one["job_id"] not in first]
    assert 1 < resumed[0] <= 20  # from its checkpoint

    page = playground.folder / "study.html"
    shown = playground.tr11("sweep", "compare", "study", "--output", str(page), "--json").stdout
    assert {row["name"] for row in json.loads(shown)["cells"]} == {"seed1", "seed2", "seed3"}
    assert set(json.loads(shown)["compared"]) == {"samples", "hours"}
    # two axes, means and highest values
    assert page.read_text().count("<svg") == 4 and "://" not in page.read_text()
