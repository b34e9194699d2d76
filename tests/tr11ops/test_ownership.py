"""One answer to "is this job of this run?", for every command, whoever asks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tr11ops.job_queue import Queue
from tests.tr11ops.status_cases import NOW, pending, running
from tr11ops.agent.waiting import WaitingWork
from tr11ops.cluster.base import Job, JobState
from tr11ops.launch.facts import LaunchRequest, foreground_trainings, observe_launch
from tr11ops.observe import facts_of, observe
from tr11ops.ownership import Ownership, own_jobs
from tr11ops.runcard import RunCard, load_card
from tr11ops.rundir import RunDirectory, Submission, new_tag
from tr11ops.stop import look
from trainer.contract import RunPaths

NAME = "tr11-176B-ml"
SMALL = Path(__file__).parents[1] / "data" / "small-card.toml"
TAG = new_tag(NOW - 100)


def record(**changes: object) -> Submission:
    entry = Submission(TAG, "1000", "slurm", NOW - 100, "ana", "h", NAME, "main", "1-10", 48, "hash")
    return replace(entry, **changes)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    root = tmp_path / "run"
    root.mkdir()
    return RunDirectory(RunPaths(root, NAME, "main"), root / "kill-switch")


def by_hand(**changes: object) -> Job:
    return running(job_id="5", raw_id="5", array_id=None, task_id=None, comment="", **changes)


def cases(directory: RunDirectory, elsewhere: RunDirectory) -> list[tuple[str, Job, bool]]:
    root = str(directory.root)
    return [
        ("its mark", replace(by_hand(name="renamed"), comment=directory.comment(TAG)), True),
        (
            "the mark of another directory",
            replace(by_hand(working_directory=root), comment=elsewhere.comment(TAG)),
            False,
        ),
        ("by hand, in the run directory", by_hand(working_directory=root), True),
        ("by hand, in the run directory with a slash", by_hand(working_directory=root + "/"), True),
        ("by hand, in the run directory, another name", by_hand(working_directory=root, name="other"), False),
        ("by hand, of whoever looks, elsewhere", by_hand(working_directory="/home/ana"), False),
        ("by hand, of another user, in the run directory", by_hand(working_directory=root, user="ben"), True),
        ("a recorded number", running(comment="", submit_time=NOW - 90), True),
        ("a recorded number of long before", running(comment="", submit_time=NOW - 9 * 86400), False),
        ("a recorded number, another name", running(comment="", submit_time=NOW - 90, name="other"), False),
        ("tr11's own copy", replace(by_hand(working_directory=root), comment="tr11-backup@0"), False),
    ]


def test_the_rule(directory: RunDirectory, tmp_path: Path) -> None:
    elsewhere = RunDirectory(RunPaths(tmp_path / "other", NAME, "main"), tmp_path / "k")
    ownership = Ownership(directory, [record()])
    wrong = [name for name, job, is_ours in cases(directory, elsewhere) if ownership.has(job) is not is_ours]
    assert not wrong
    assert Ownership(directory, array_id="1000").has(running(comment="", name="renamed")), "the controller's own array"


def test_a_variant_counts_for_what_looks_at_one_and_a_number_for_its_own_scheduler(directory: RunDirectory) -> None:
    job = running(comment=directory.comment(TAG))
    other = [record(variant="ablation")]
    assert Ownership(directory, other).has(job), "it shares the lease and the kill switch"
    assert not Ownership(directory, other, "main").has(job)
    numbered = running(comment="", submit_time=NOW - 90)
    assert Ownership(directory, [record()], scheduler="slurm").has(numbered)
    assert not Ownership(directory, [record()], scheduler="local").has(numbered)


def test_a_link_to_the_run_directory_is_the_run_directory(directory: RunDirectory, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory.root)
    linked = RunDirectory(RunPaths(link, NAME, "main"), link / "kill-switch")
    assert Ownership(linked).has(by_hand(working_directory=str(directory.root)))


# ----------------------------------------------------------------------------- everyone asks it
def answers(card: RunCard, directory: RunDirectory, job: Job) -> dict[str, bool]:
    """What each command holds of one job that waits."""
    queue = Queue(job)
    seen = observe(directory, facts_of(card), queue, NOW)
    facts = observe_launch(
        card, directory, LaunchRequest(), scheduler=queue, other_scheduler=lambda _: queue, user=job.user,  # type: ignore[arg-type]
    )  # fmt: skip
    local = replace(record(), scheduler="local", job_id=None)
    directory.write_submission(local)
    elsewhere = observe_launch(
        card, directory, LaunchRequest(), scheduler=None, other_scheduler=lambda _: queue, user=job.user,  # type: ignore[arg-type]
    ).elsewhere  # fmt: skip
    held: list[str] = []
    hand = type("Hand", (Queue,), {"hold": lambda self, number: held.append(number)})(job)
    WaitingWork(hand, directory, None, lambda _: None).hold()
    return {
        "status": job in seen.jobs,  # type: ignore[operator]
        "kill": job in look(card, directory, queue).queued,  # type: ignore[arg-type]
        "launch": job in own_jobs(directory, facts.jobs, facts.submissions, "slurm")[0],  # type: ignore[arg-type]
        "launch elsewhere": bool(elsewhere),
        "controller": bool(held),
    }


@pytest.mark.parametrize(("place", "is_ours"), [("the run directory", True), ("another folder", False)])
def test_a_job_made_by_hand_is_the_same_to_every_command(tmp_path: Path, place: str, is_ours: bool) -> None:
    card = load_card(SMALL, ["run.directory=run"], {}, directory=tmp_path)
    directory = RunDirectory(card.paths, card.kill_switch)
    directory.root.mkdir()
    where = directory.root if is_ours else tmp_path
    job = pending(
        (), job_id="5", raw_id="5", array_id=None, name=card.run.name, working_directory=str(where), comment=""
    )
    assert job.state is JobState.PENDING and foreground_trainings(directory) == ()
    assert set(answers(card, directory, job).values()) == {is_ours}
