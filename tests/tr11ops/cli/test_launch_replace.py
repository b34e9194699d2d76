"""`tr11 launch --replace` on the embedded scheduler: the queue gets the new card in one act, or
stays as it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.base.errors import SchedulerUnreachable
from tr11ops.cluster.base import BatchRequest, Job
from tr11ops.cluster.local import LocalScheduler
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory, new_tag
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths
from trainer.contract.state_file import read_json


def directory_of(bench: LocalBench) -> RunDirectory:
    root = bench.folder / "run"
    return RunDirectory(RunPaths(root, "small", "main"), root / "kill-switch")


def own(bench: LocalBench) -> list[Job]:
    return [job for job in bench.living() if job.name == "small"]


def start_array(bench: LocalBench) -> str:
    """An array of three attempts of this run, of which the first one runs until it is cancelled."""
    tag = new_tag()
    directory_of(bench).submission(tag).folder.mkdir(parents=True)
    request = BatchRequest(
        script="#!/bin/bash\nexec sleep 600\n", name="small", nodes=2, time_limit_seconds=600, array="1-3%1",
        output=str(bench.folder / "%a.out"), working_directory=bench.folder,
        comment=directory_of(bench).comment(tag),
    )  # fmt: skip
    number = bench.scheduler.submit(request)
    bench.wait(lambda jobs: any(job.state.is_active for job in jobs))
    return number


def standing(bench: LocalBench) -> list[tuple[object, ...]]:
    """What a launch could change of the run's jobs; states and reasons move by themselves."""
    return [
        (job.job_id, job.pending_tasks, job.dependency, job.excluded, job.comment)
        for job in own(bench)
    ]


def edit_card(bench: LocalBench) -> None:
    bench.card.write_text(
        bench.card.read_text().replace("learning_rate = 1e-3", "learning_rate = 2e-3")
    )


def test_queued_attempts_get_the_new_card_behind_the_live_one(bench: LocalBench) -> None:
    old = start_array(bench)
    edit_card(bench)
    answer = bench.launch("--replace", "--yes", "--reason", "a smaller rate")
    assert answer.code == 0, answer
    assert answer.out.startswith(
        f"launch: 2 attempts behind job {old}\ncancel {old}_[2-3%1]: the new card takes its"
    )
    living, queued = own(bench)
    assert (living.job_id, living.state.is_active) == (f"{old}_1", True)
    assert queued.pending_tasks == (1, 2) and queued.dependency == f"afterany:{old}"
    [record] = directory_of(bench).read_submissions()
    card = read_json(directory_of(bench).submission(record.tag).card)
    assert card is not None and card["schedule"]["learning_rate"] == 2e-3
    entries = [
        (entry.kind, entry.why) for entry in read_journal(directory_of(bench).journal).entries
    ]
    assert entries == [(kind, "a smaller rate") for kind in ("launch", "submitted", "replaced")]


def test_a_queue_that_has_not_begun_is_replaced_more_than_once(bench: LocalBench) -> None:
    bench.block()
    assert bench.launch("--array", "1-3").code == 0
    for tasks in ((1, 2, 3), (1, 2)):
        [before] = own(bench)
        words = ["--array", "1-2"] if len(tasks) == 2 else []
        assert bench.launch("--replace", "--yes", *words).code == 0
        [queued] = own(bench)
        assert queued.array_id != before.array_id and queued.pending_tasks == tasks


def test_dry_run_shows_it_and_changes_nothing(bench: LocalBench) -> None:
    old = start_array(bench)
    before, files = standing(bench), set((bench.folder / "run").rglob("*"))
    answer = bench.launch("--replace", "--dry-run")
    assert (
        answer.code == 0
        and f"cancel {old}_[2-3%1]" in answer.out
        and "starts after  " + old in answer.out
    )
    assert answer.out.endswith("nothing was changed (--dry-run)\n")
    assert standing(bench) == before and set((bench.folder / "run").rglob("*")) == files
    shown = bench.launch("--replace", "--dry-run", "--json").json
    assert (shown["kind"], shown["resubmit"], shown["after"], shown["done"]) == (
        "replaced",
        2,
        old,
        False,
    )


def test_what_is_replaced_is_still_queued_and_named(bench: LocalBench) -> None:
    """Where the launch is refused it stays: that nothing is queued would be false."""
    bench.block()
    assert bench.launch("--array", "1-3").code == 0
    [old] = own(bench)
    shown = bench.launch("--replace", "--dry-run").out
    said = f"nothing of this run is queued or running but {old.job_id}, in whose place this comes"
    assert f"queue: {said}" in shown, shown


@pytest.mark.parametrize("fault", ["data", "kill switch", "scheduler"])
def test_a_refused_card_leaves_the_queue_as_it_was(
    bench: LocalBench, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_array(bench)
    before = standing(bench)
    words = {
        "data": ["data.prefixes=['none']"],
        "kill switch": [],
        "scheduler": ["slurm.constraint=a100"],
    }[fault]
    if fault == "kill switch":
        write_json(directory_of(bench).kill_switch, {"who": "ana"})
    answer = bench.launch(
        "--replace", "--yes", *(word for text in words for word in ("--set", text))
    )
    assert answer.code == 1 and answer.out.endswith(
        "nothing was submitted\nthe queue is as it was\n"
    )
    assert standing(bench) == before


def test_what_cannot_be_cancelled_is_waited_for(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler falls silent between the two: the new attempts come after the old ones, never
    beside them.
    """
    bench.block()
    assert bench.launch("--array", "1-3").code == 0
    [old] = own(bench)

    def silent(self: LocalScheduler, job_id: str) -> None:
        raise SchedulerUnreachable("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(LocalScheduler, "cancel", silent)
        answer = bench.launch("--replace", "--yes")
    assert answer.code == 1 and f"tr11: cancel {old.array_id}: timed out" in answer.err
    first, second = own(bench)
    assert first.pending_tasks == second.pending_tasks == (1, 2, 3)
    assert second.dependency == f"afterany:{old.array_id}"
    again = bench.launch("--replace", "--yes", "--array", "1-3")
    assert again.code == 0 and len(own(bench)) == 1


def test_a_queue_that_changes_while_looked_at_is_left_alone(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.block()
    assert bench.launch("--array", "1-3").code == 0
    [old] = own(bench)
    # someone is quicker than the person who is asked
    monkeypatch.setattr(
        "tr11ops.cli.runner.agree", lambda *_: bench.scheduler.cancel(f"{old.array_id}_2")
    )
    answer = bench.launch("--replace")
    assert (
        answer.code == 1 and "the queue has changed meanwhile, and nothing was done" in answer.err
    )
    assert [job.array_id for job in own(bench)] == [old.array_id]


def test_options_that_contradict_each_other(bench: LocalBench, tmp_path: Path) -> None:
    assert bench.launch("--replace", "--repair").code == 2
    assert bench.launch("--replace", "--after", "3").code == 2
    answer = bench.launch("--replace")
    assert answer.code == 1 and "no attempt of this run is queued" in answer.err
