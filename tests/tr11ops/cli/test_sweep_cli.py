"""`tr11 sweep` on the embedded scheduler, whose nodes are taken: what it makes, submits, shows,
refuses and cancels.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import asdict

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tr11ops.rundir.paths import parse_comment
from tr11ops.sweep import manifest
from trainer.contract.attempt import EndMarker
from trainer.contract.files import write_json
from trainer.contract.lease import LeaseClaim, LeaseFolder
from trainer.contract.paths import RunPaths

BATCH = "batch.global_batch_size"
FAR = 4e9  # a time that no test reaches
NAMES = ["batch8", "batch16", "batch32"]


def sweep(bench: LocalBench, *words: str) -> Answer:
    return bench.tr11(
        "sweep", "--run", str(bench.card), "--scheduler", "local", "--directory", "study", *words
    )


@pytest.fixture
def waiting(bench: LocalBench) -> LocalBench:
    """A study of three cells that wait, because all nodes are taken."""
    bench.block()
    done = sweep(bench, "--grid", f"{BATCH}=8,16,32")
    assert done.code == 0, done.out + done.err
    return bench


def end(bench: LocalBench, name: str, reason: str, iteration: int, job_id: str = "77") -> None:
    """Let an attempt of a cell have ended so."""
    attempt = bench.folder / "study" / name / "state" / "attempts" / job_id
    attempt.mkdir(parents=True, exist_ok=True)
    marker = EndMarker(reason, iteration, iteration, True, "", 2e9, "host", job_id)
    write_json(attempt / "end.json", asdict(marker))


def cells(bench: LocalBench) -> dict[str, str]:
    return {
        cell["name"]: cell["state"]
        for cell in bench.tr11("sweep", "status", "study", "--json").json["cells"]
    }


def test_a_dry_run_shows_every_cell_and_makes_nothing(bench: LocalBench) -> None:
    before = sorted(bench.folder.iterdir())
    shown = sweep(bench, "--grid", f"{BATCH}=8,16,32", "--dry-run")
    assert shown.code == 0 and "nothing was submitted" in shown.out
    rows = [line.split() for line in shown.out.splitlines() if line.startswith("batch")]
    assert [(row[0], row[2]) for row in rows] == [
        ("batch8", "0.001"),
        ("batch16", "0.001414"),
        ("batch32", "0.002"),
    ]
    told = sweep(bench, "--grid", f"{BATCH}=8,16,32", "--dry-run", "--json").json
    assert [cell["name"] for cell in told["cells"]] == NAMES == list(told["checks"])
    assert (told["submitted"], told["exit_code"]) == (False, 0)
    assert sorted(bench.folder.iterdir()) == before and len(bench.scheduler.jobs()) == 0


def test_one_array_of_runs_of_their_own(waiting: LocalBench) -> None:
    jobs = [job for job in waiting.living() if job.name == "small-sweep"]
    # of one array, one at a time
    assert [job.job_id for job in jobs] == [f"2_{number}" for number in (1, 2, 3)]
    assert len({parse_comment(job.comment) for job in jobs}) == 3
    known = manifest.require_manifest(waiting.folder / "study")
    assert [array.job_id for array in known.arrays] == ["2"] and len(
        set(known.arrays[0].tags.values())
    ) == 3
    for number, name in enumerate(NAMES, 1):
        root = waiting.folder / "study" / name
        [record] = [
            json.loads(path.read_text())
            for path in root.glob("state/submissions/*/submission.json")
        ]
        assert (record["job_id"], record["tag"]) == (
            f"2_{number}",
            known.arrays[0].tags[str(number)],
        )
        told = waiting.tr11(
            "status", "--run", str(root / "tr11.toml"), "--scheduler", "local", "--json"
        ).json
        assert (told["verdict"], [job["id"] for job in told["jobs"]]) == ("queued", [f"2_{number}"])
        assert not [alert for alert in told.get("findings", []) if alert["detector"] == "namesake"]
    assert cells(waiting) == dict.fromkeys(NAMES, "queued")


def test_killing_one_cell_leaves_the_others_queued(waiting: LocalBench) -> None:
    card = str(waiting.folder / "study" / "batch16" / "tr11.toml")
    assert waiting.tr11("kill", "--run", card, "--scheduler", "local", "--yes").code == 0
    held = {job.job_id: job.reason for job in waiting.living() if job.name == "small-sweep"}
    assert held.pop("2_2") == "JobHeldUser" and set(held) == {"2_1", "2_3"}
    assert "JobHeldUser" not in held.values()


def test_stop_cancels_and_resume_takes_up_what_is_open(waiting: LocalBench) -> None:
    end(waiting, "batch32", "finished", 2)
    assert cells(waiting) == {"batch8": "queued", "batch16": "queued", "batch32": "done"}
    nothing = waiting.tr11("sweep", "resume", "study")
    assert nothing.code == 0 and "nothing to take up" in nothing.out
    waiting.scheduler.cancel("2_3")
    assert waiting.tr11("sweep", "stop", "study", "--dry-run").out.count("cancel") == 2
    assert waiting.tr11("sweep", "stop", "study").code == 2  # no one can be asked here
    assert waiting.tr11("sweep", "stop", "study", "--yes", "--json").json["asked"] == ["2_1", "2_2"]
    end(waiting, "batch8", "exit-duration", 1)
    assert cells(waiting) == {"batch8": "stopped", "batch16": "not begun", "batch32": "done"}
    shown = waiting.tr11("sweep", "resume", "study", "--dry-run", "--json").json
    assert (shown["taken_up"], shown["submitted"]) == (["batch8", "batch16"], False)
    again = waiting.tr11("sweep", "resume", "study", "--json").json
    assert (again["taken_up"], again["submitted"]) == (["batch8", "batch16"], True)
    jobs = [job.job_id for job in waiting.living() if job.name == "small-sweep"]
    assert jobs == [f"{again['job_id']}_1", f"{again['job_id']}_2"]
    known = manifest.require_manifest(waiting.folder / "study")
    assert [sorted(array.tags) for array in known.arrays] == [["1", "2", "3"], ["1", "2"]]


def living(bench: LocalBench, name: str, job_id: str) -> None:
    """Let a trainer of a cell hold its lease and show life, in an attempt of that number, for as
    long as a test is.
    """
    folder = bench.folder / "study" / name
    (folder / "state" / "attempts" / job_id).mkdir(parents=True)
    claim = LeaseClaim(job_id, 0, "elsewhere", 1, "someone", 1.0, "token")
    leases = LeaseFolder(RunPaths(folder, "small-sweep", name))
    assert leases.claim(1, claim)
    os.utime(leases.file(1), (FAR, FAR))


def test_a_cell_that_another_scheduler_runs_is_no_failed_one(waiting: LocalBench) -> None:
    for number in (1, 2, 3):
        waiting.scheduler.cancel(f"2_{number}")
    [over] = [job.raw_id for job in waiting.scheduler.jobs() if job.job_id == "2_2"]
    living(waiting, "batch8", "77")  # a number that this scheduler never gave
    # killed a moment ago: the scheduler knows that its job is over
    living(waiting, "batch16", over)
    # no trainer in it yet
    begun = waiting.folder / "study" / "batch32" / "state" / "attempts" / "78"
    begun.mkdir(parents=True)
    os.utime(begun, (FAR, FAR))
    told = waiting.tr11("sweep", "status", "study", "--json")
    assert [cell["state"] for cell in told.json["cells"]] == [
        "running",
        "failed",
        "unknown",
    ] and told.code == 1
    assert (
        "job 77" in told.json["cells"][0]["why"]
        and "not known to the local scheduler" in told.json["cells"][0]["why"]
    )
    assert "nothing was submitted" in waiting.tr11("sweep", "resume", "study").err
    end(waiting, "batch32", "exit-duration", 1, "78")
    assert waiting.tr11("sweep", "resume", "study", "--dry-run", "--json").json["taken_up"] == [
        "batch16",
        "batch32",
    ]
    stopped = waiting.tr11("sweep", "stop", "study", "--yes")
    assert (
        stopped.code,
        "cell batch8 is not stopped" in stopped.err,
        "tr11 kill --run" in stopped.err,
    ) == (
        1,
        True,
        True,
    )
    told_of = waiting.tr11("sweep", "stop", "study", "--yes", "--json").json
    assert [one["job_id"] for one in told_of["refused"]] == ["77"] and told_of["asked"] == []


def test_a_failed_cell_is_said_and_needs_a_person(waiting: LocalBench) -> None:
    end(waiting, "batch8", "error", 3)
    for number in (1, 2, 3):
        waiting.scheduler.cancel(f"2_{number}")
    told = waiting.tr11("sweep", "status", "study")
    assert told.code == 1 and "failed" in told.out and max(map(len, told.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("spoil", "said", "code"),
    [
        (lambda path: path.write_text(path.read_text() + "x = ["), "is not TOML", 3),
        (lambda path: path.unlink(), "there is no card; if planning was cut short, remove", 3),
        (
            lambda path: path.write_text(
                path.read_text().replace("global_batch_size = 16", "global_batch_size = 4")
            ),
            f"{BATCH} = 4 where 16 was planned",
            0,
        ),
        (
            lambda path: path.write_text(path.read_text().replace("study/batch16", "study/batch8")),
            "study/batch8, not the folder that it is in",
            0,
        ),
    ],
)
def test_a_spoilt_card_hides_no_other_cell(
    waiting: LocalBench, spoil: Callable[[Path], object], said: str, code: int
) -> None:
    spoil(waiting.folder / "study" / "batch16" / "tr11.toml")
    shown = waiting.tr11("sweep", "status", "study")
    assert (shown.code, shown.out.count("queued"), shown.err.count("\n")) == (
        code,
        3,
        1,
    ) and said in shown.err
    told = waiting.tr11("sweep", "status", "study", "--json").json["cells"]
    assert [said in (cell["card_fault"] or "") for cell in told] == [False, True, False]
    assert waiting.tr11("sweep", "compare", "study").code == 0
    assert "2_3" in waiting.tr11("sweep", "stop", "study", "--yes", "--json").json["asked"]
    refused(waiting.tr11("sweep", "resume", "study", "--json"), said, 2)


# ----------------------------------------------------------------------------- what is refused
def refused(answer: Answer, said: str, code: int) -> None:
    assert (answer.code, answer.err.count("\n")) == (code, 1), answer.out + answer.err
    assert said in answer.err


def test_folders_that_are_taken_are_refused(waiting: LocalBench) -> None:
    refused(
        sweep(waiting, "--grid", f"{BATCH}=8,16,32"), "is this very sweep; `tr11 sweep resume", 1
    )
    refused(sweep(waiting, "--grid", f"{BATCH}=8,16"), "is another sweep, small-sweep", 1)
    path = waiting.folder / "study" / "sweep.d" / "00000002.json"
    path.write_text(
        path.read_text().replace(f'"user": "{manifest.user_name()}"', '"user": "someone"', 1)
    )
    refused(sweep(waiting, "--grid", f"{BATCH}=8,16,32"), "is sweep small-sweep of someone", 1)
    shutil.rmtree(waiting.folder / "study" / "sweep.d")
    (waiting.folder / "study" / "sweep.json").write_text("{")
    refused(sweep(waiting, "--grid", f"{BATCH}=8,16,32"), "is not the manifest of a sweep", 1)
    refused(waiting.tr11("sweep", "status", "study"), "is not the manifest of a sweep", 1)
    (waiting.folder / "study" / "sweep.json").unlink()
    refused(sweep(waiting, "--grid", f"{BATCH}=8,16,32"), "is not empty, and no sweep", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give what to vary: --grid"),
        (("--grid", "batch.globalbatch=8"), "every cell: batch.globalbatch: is not a known key"),
        (("--grid", f"{BATCH}=8,9"), f"cell batch9: {BATCH} = 9: must be divisible"),
        (("--grid", f"{BATCH}=8", "--grid", f"{BATCH}=16"), "stands twice"),
        (("--grid", "tokenizer.path=a/b,ab"), "two cells would be called pathab"),
        (("--grid", f"{BATCH}=8,16", "--name", "a b"), "run.name = 'a b'"),
    ],
)
def test_a_wrong_grid_is_one_line_and_makes_nothing(
    bench: LocalBench, words: tuple[str, ...], said: str
) -> None:
    refused(sweep(bench, *words), said, 2)
    assert not (bench.folder / "study").exists() and not bench.scheduler.jobs()


def test_a_cell_that_a_launch_would_refuse_stops_all(bench: LocalBench) -> None:
    shutil.rmtree(bench.folder / "data" / "tokenizer")
    answer = sweep(bench, "--grid", f"{BATCH}=8,16")
    assert answer.code == 1 and "every cell" in answer.out and "nothing was submitted" in answer.out
    assert not (bench.folder / "study").exists() and not bench.scheduler.jobs()


@pytest.mark.parametrize("command", ["status", "resume", "stop", "compare"])
def test_what_is_no_study_is_said(bench: LocalBench, command: str) -> None:
    refused(
        bench.tr11("sweep", command, str(bench.folder)), "is no sweep: there is no sweep.json", 2
    )
    refused(
        bench.tr11("sweep", command, "nowhere"),
        "nowhere: is neither a folder nor the name of a study; name",
        2,
    )


@pytest.mark.parametrize("command", ["status", "resume --dry-run", "stop --dry-run", "compare"])
def test_a_study_goes_by_its_name_too(waiting: LocalBench, command: str) -> None:
    """The plan, the queue and the jobs show the name, and `sweep status NAME` was "not a folder"."""
    verb, *words = command.split()
    by_folder = waiting.tr11("sweep", verb, "study", *words, "--json")
    by_name = waiting.tr11("sweep", verb, "small-sweep", *words, "--json")
    assert (by_name.code, by_name.json) == (by_folder.code, by_folder.json), by_name.err
    refused(waiting.tr11("sweep", verb, "smal-sweep", *words), "here are: small-sweep (", 2)
    shutil.copytree(waiting.folder / "study", waiting.folder / "again")
    refused(
        waiting.tr11("sweep", verb, "small-sweep", *words),
        "2 studies have this name: name a folder",
        2,
    )


# ----------------------------------------------------------------------------- comparison
def log(root: Path, name: str, batch: int, losses: list[float]) -> None:
    path = root / "small-sweep-logs" / "logs" / name / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    lines = [
        {"kind": "step", "time": 1e9 + step, "job_id": "1", "iteration": step, "total_iterations": len(losses),
         "consumed_samples": step * batch, "consumed_tokens": step * batch * 16, "seconds_per_iteration": 1.0,
         "learning_rate": 1e-3, "global_batch_size": batch, "lm_loss": loss, "grad_norm": 1.0,
         "samples_per_second": float(batch), "tflops": 0.1}
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    lines.extend(
        {
            "kind": "validation",
            "name": name,
            "time": 2e9,
            "job_id": "1",
            "iteration": len(losses),
            "lm_loss": loss,
        }
        for name, loss in (("valid", losses[-1] + 1), ("other", 1.0), ("test", 2.0))
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_cells_are_compared_at_equal_samples(waiting: LocalBench) -> None:
    log(waiting.folder / "study" / "batch8", "batch8", 8, [8 - 0.01 * step for step in range(400)])
    log(
        waiting.folder / "study" / "batch16",
        "batch16",
        16,
        [7 - 0.02 * step for step in range(200)],
    )
    told = waiting.tr11("sweep", "compare", "study", "--json", "--output", "page.html").json
    # the lowest loss first
    assert [row["name"] for row in told["cells"]] == ["batch16", "batch8", "batch32"]
    best = told["cells"][0]
    # the mean of the last twenty lines
    assert best["loss"] == pytest.approx(7 - 0.02 * 189.5, abs=1e-9)
    assert best["validation_loss"] == pytest.approx(7 - 0.02 * 199 + 1) and best[
        "hours"
    ] == pytest.approx(200 / 3600)
    assert told["cells"][2]["loss"] is None and told["compared"]["samples"]["cells"] == [
        "batch8",
        "batch16",
    ]
    last = told["compared"]["samples"]["rows"][-1]
    assert (
        last["x"] == 3200
        and last["differences"] == pytest.approx([-0.895], abs=1e-9)
        and last["sure"] == [True]
    )
    page = (waiting.folder / "page.html").read_text()
    assert (
        "loss by samples" in page
        and "loss by hours" in page
        and "batch16" in page
        and "<svg" in page
    )
    shown = waiting.tr11("sweep", "compare", "study").out
    assert (
        max(map(len, shown.splitlines())) <= 80
        and "batch16 is 0.895 below batch8 at samples 3,200" in shown
    )
    alone = waiting.tr11("sweep", "compare", "study", "--cell", "batch8", "--json").json
    assert [row["name"] for row in alone["cells"]] == ["batch8"] and alone["compared"] == {}
    refused(
        waiting.tr11("sweep", "compare", "study", "--cell", "batch9"),
        "--cell batch9: is no cell",
        2,
    )
    window = waiting.tr11(
        "sweep", "compare", "study", "--from", "1600samples", "--to", "2400samples", "--json"
    ).json
    rows = window["compared"]["samples"]["rows"]
    assert (rows[0]["x"], rows[-1]["x"]) == (1680, 2400) and window["to"] == {
        "value": 2400,
        "unit": "samples",
    }
    assert window["cells"] == told["cells"]  # what each cell came to stays as it is
    refused(
        waiting.tr11("sweep", "compare", "study", "--from", "soon"),
        "--from: 'soon' is no place in a training",
        2,
    )
    refused(
        waiting.tr11("sweep", "compare", "study", "--from", "9Msamples"),
        "batch8: holds no finite value from 9,000",
        3,
    )
