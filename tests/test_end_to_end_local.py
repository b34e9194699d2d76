"""One run on the embedded scheduler: stopped and resumed, it equals the run that was never stopped."""

import json
import os
import subprocess

import psutil
import pytest

from tests.end_to_end import TR11, Playground
from tests.pins.files import formats_of
from tests.pins.recording import EXPECTED
from tests.plugins.worker_server import worker_python
from tests.shared_tree import not_the_groups
from tr11ops.cluster.local import LocalScheduler

# what forks for each worker: it has the folder in its command line, and stays
SERVERS: set[int] = set()


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
        if process.pid in SERVERS:
            continue
        assert not any(str(folder) in word for word in words), f"left running: {words}"


@pytest.fixture(scope="module")
def quick(playground):
    """The same place, where workers are forked with torch loaded. That real ones start, resume and
    are started again is proved by the tests without it.
    """
    python, server = worker_python(playground.folder)
    SERVERS.add(server)
    return Playground(playground.folder, {**playground.environment, "PYTHON_EXEC": str(python)})


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


def test_kill_stops_the_run_and_holds_every_queued_task(quick):
    card = quick.card("tr11.toml", nodes=2, workers=1, tensor=1)
    directory = ["--set", "run.directory=killed"]
    quick.tr11("launch", "--array", "1-3", "--scheduler", "local", "--run", card, *directory)
    quick.wait(lambda: len(quick.steps("killed")) >= 7, "seven steps")
    quick.tr11("kill", "--run", card, *directory, "--yes", "--wait", "--reason", "a test")
    quick.wait(lambda: len(quick.ends("killed")) == 1, "the first attempt")
    [first] = quick.ends("killed")
    assert first.reason == "kill-switch"
    assert first.checkpoint_step == first.iteration >= 7
    assert quick.manifest(first.iteration, "killed") is not None
    # no one else trained
    assert {step["job_id"] for step in quick.steps("killed")} == {first.job_id}
    scheduler = LocalScheduler(quick.folder / "scheduler")
    [waiting] = [job for job in scheduler.jobs() if not job.state.is_final]
    # held, not burned one by one
    assert (waiting.pending_tasks, waiting.reason) == ((2, 3), "JobHeldUser")
    # one that starts by mistake leaves, and the rest is held again
    scheduler.release(waiting.array_id)
    quick.wait(lambda: len(quick.ends("killed")) == 2, "the second attempt")
    assert quick.ends("killed")[1].reason == "kill-switch"
    assert {step["job_id"] for step in quick.steps("killed")} == {first.job_id}
    scheduler.cancel(waiting.array_id)
    quick.wait(lambda: all(job.state.is_final for job in scheduler.jobs()), "an empty queue")
    shown = quick.tr11("status", "--run", card, *directory).stdout
    assert "stopped" in shown.lower()
    refused = quick.tr11(
        "launch", "--array", "1", "--scheduler", "local", "--run", card, *directory, expect=1
    )
    assert "kill" in refused.stderr + refused.stdout
    quick.tr11("kill", "--run", card, *directory, "--release", "--yes")
    assert not quick.paths("killed").root.joinpath("kill-switch").exists()


def test_another_topology_resumes_and_another_model_is_refused(quick):
    card = quick.card("tr11.toml", nodes=1, workers=1, tensor=1)
    alone = ["--set", "parallel.pipeline=1"]
    # saved by two processes, resumed on one
    quick.tr11("train", "--run", card, *leave_at(14, "run"), *alone)
    resumed = [step for step in quick.steps() if step["iteration"] > 12]
    assert [step["iteration"] for step in resumed] == [13, 14]
    assert resumed[0]["lm_loss"] == pytest.approx(quick.steps()[11]["lm_loss"], abs=0.5)
    refused = quick.tr11(
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


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_data_worker_that_is_killed_after_steps_ends_no_attempt(
    playground: Playground, quick: Playground, nodes: int
) -> None:
    """It is of its node and its moment, as where memory is short: nothing in card or data is wrong.
    Of two nodes the ranks are forked.
    """
    name, place = f"worker-{nodes}", {1: playground, 2: quick}[nodes]
    card = place.card("tr11.toml", nodes=nodes, workers=1, tensor=1)
    settings = ["--set", "data.workers=1", "--set", f"parallel.pipeline={nodes}"]
    child = subprocess.Popen(
        [str(TR11), "train", "--run", card, *leave_at(30, name), *settings],
        cwd=place.folder, env=dict(place.environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        place.wait(lambda: len(place.steps(name)) >= 7, "seven steps")
        tops = map(psutil.Process, (child.pid, *SERVERS))
        below = [one for top in tops for one in top.children(recursive=True)]
        next(one for one in below if "trainer.data.worker" in one.cmdline()).kill()
        shown, _ = child.communicate(timeout=600)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    [attempt] = place.paths(name).attempts.iterdir()
    first, second = (
        json.loads((attempt / "launches" / f"{number}.json").read_text()) for number in (1, 2)
    )
    assert first["cause"] in {"node", "unknown"} and first["reached"] >= 7, shown
    assert "was killed (SIGKILL)" in first["summary"], first
    assert any(
        "no want of memory was seen" in line or "killed" in line for line in first["evidence"][1:]
    ), first
    assert first["decision"].startswith("starting again"), first
    assert second["iteration_after"] == 30 and place.ends(name)[-1].reason == "exit-interval"


def test_a_sweep_takes_up_the_cell_that_was_killed(quick):
    """Two runs of one array train at once; one's agent is killed with -9, and `resume` finishes
    exactly that one.
    """
    card = quick.card("tr11.toml", nodes=1, workers=1, tensor=1)
    short = [
        "parallel.pipeline=1",
        "batch.ramp=none",
        "batch.train_samples=320",
        "checkpoint.interval=2",
    ]
    words = [word for text in short for word in ("--set", text)]
    done = quick.tr11("sweep", "--run", card, "--scheduler", "local", "--grid", "run.seed=1,2", "--at-once", "0",
                           "--directory", "study", "--json", *words)  # fmt: skip
    assert json.loads(done.stdout)["submitted"]

    scheduler = LocalScheduler(quick.folder / "scheduler")

    def is_idle() -> bool:
        return all(job.state.is_final for job in scheduler.jobs(name="small-sweep"))

    def states() -> dict[str, str]:
        shown = quick.tr11("sweep", "status", "study", "--json", expect=None).stdout
        return {cell["name"]: cell["state"] for cell in json.loads(shown)["cells"]}

    def saved() -> int:
        found = quick.folder.glob("study/seed2/checkpoints/*/latest")
        return max(
            (int(path.read_text().strip().removeprefix("global_step")) for path in found), default=0
        )

    quick.wait(lambda: saved() >= 2, "a checkpoint of the second cell")
    [attempt] = quick.folder.glob("study/seed2/state/attempts/*/attempt.json")
    psutil.Process(json.loads(attempt.read_text())["pid"]).kill()
    quick.wait(is_idle, "the end of both")
    # the killed one's worker outlives the agent for as long as a last save takes, or does not
    before = states()
    assert before.pop("seed2") in {"failed", "stopped"} and before == {"seed1": "done"}

    again = json.loads(quick.tr11("sweep", "resume", "study", "--json").stdout)
    assert again["submitted"] and again["taken_up"] == ["seed2"]
    quick.wait(is_idle, "the second cell")
    assert set(states().values()) == {"done"}
    steps = {
        name: [json.loads(line) for path in quick.folder.glob(f"study/{name}/*-logs/logs/*/metrics.jsonl")
               for line in path.read_text().splitlines()]
        for name in ("seed1", "seed2")
    }  # fmt: skip
    trained = {
        name: [one for one in found if one["kind"] == "step"] for name, found in steps.items()
    }
    assert {name: found[-1]["iteration"] for name, found in trained.items()} == dict.fromkeys(
        trained, 20
    )
    jobs = {name: len({one["job_id"] for one in found}) for name, found in trained.items()}
    assert jobs == {"seed1": 1, "seed2": 2}  # no one else trained again
    first = {one["job_id"] for one in trained["seed2"]}.difference({trained["seed2"][-1]["job_id"]})
    resumed = [one["iteration"] for one in trained["seed2"] if one["job_id"] not in first]
    assert 1 < resumed[0] <= 20  # from its checkpoint

    page = quick.folder / "study.html"
    shown = quick.tr11("sweep", "compare", "study", "--output", str(page), "--json").stdout
    assert {row["name"] for row in json.loads(shown)["cells"]} == {"seed1", "seed2"}
    assert set(json.loads(shown)["compared"]) == {"samples", "hours"}
    # two axes, means and highest values
    assert page.read_text().count("<svg") == 4 and "://" not in page.read_text()
