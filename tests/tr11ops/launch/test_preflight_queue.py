"""Every refusal and warning of a launch about what is queued: its words, its fix and its exit code."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.tr11ops.launch.preflight_bench import Bench
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Job, JobState
from tr11ops.rundir.paths import BEING_SUBMITTED, SUPERSEDED, Submission, new_tag


def test_a_second_launch_is_refused_and_told_how_to_queue(bench: Bench) -> None:
    bench.changes = {
        "jobs": (
            bench.job("7", JobState.RUNNING),
            bench.job("9"),
            bench.job("3", JobState.COMPLETED),
        )
    }
    fix = "queue behind it with `--after 9`, or stop it with `tr11 kill`"
    assert bench.faults() == [
        f"refused: queue: this run is already running: job 7_1 (and 1 more); {fix}"
    ]
    assert bench.code() == 1


@pytest.mark.parametrize(
    ("changes", "words", "code"),
    [
        (
            {"comment": "", "user": "me"},
            "refused: namesake: your job 7_1 has this run's name and is queued",
            1,
        ),
        ({"comment": "", "user": "you"}, "warning: queue: job 7_1 of you has the same name", 0),
        (
            {"comment": f"tr11:{new_tag()}@000000000000", "working_directory": "/x/run"},
            "refused: namesake: your job 7_1 has this run's name and is queued in /x/run; if that is the run you mean",
            1,
        ),
        (
            {"comment": f"tr11:{new_tag()}@000000000000", "state": JobState.PENDING, "user": "you"},
            "warning: queue: job 7_1 of you has the same name",
            0,
        ),
        (
            {"state": JobState.UNKNOWN},
            "unknown: queue: the state of job 7_1 of this run is unknown",
            3,
        ),
        ({"name": "renamed"}, "refused: queue: this run is already queued", 1),
    ],
)
def test_whose_job_it_is(bench: Bench, changes: dict[str, Any], words: str, code: int) -> None:
    bench.changes = {"jobs": (bench.job("7", **changes),)}
    assert words in bench.faults()[0] and bench.code() == code


def test_a_namesake_of_ones_own_is_taken_when_told_so(bench: Bench) -> None:
    bench.changes = {"jobs": (bench.job("7", comment=f"tr11:{new_tag()}@000000000000"),)}
    assert bench.code() == 1
    bench.request = replace(bench.request, beside_namesakes=True)
    assert bench.faults() == [
        "warning: queue: job 7_1 of me has the same name, but is not of this run"
    ]
    assert bench.code() == 0


def after(bench: Bench, target: Job | None, jobs: tuple[Job, ...], number: str = "9") -> list[str]:
    bench.request = replace(bench.request, after=number)
    bench.changes = {"jobs": jobs, "after": target}
    return bench.faults()


def test_after_must_be_the_last_in_line(bench: Bench) -> None:
    first, second = (
        bench.job("7", JobState.RUNNING),
        bench.job("9", dependency="afterany:7_*(unfulfilled)"),
    )
    assert after(bench, second, (first, second)) == [] and bench.code() == 0
    assert (
        "job 9_1 of this run could run at the same time; use `--after 9`"
        in after(bench, first, (first, second), "7")[0]
    )
    apart = bench.job("9")
    assert (
        "job 7_1 of this run could run at the same time" in after(bench, apart, (first, apart))[0]
    )
    assert "could run at the same time" in after(bench, second, (first, second), "9_1")[0]
    assert bench.code() == 1


def test_after_a_stranger_or_nothing(bench: Bench) -> None:
    ours = bench.job("7")
    assert (
        "--after: the scheduler knows no job 9; jobs of this run: 7"
        in after(bench, None, (ours,))[0]
    )
    assert bench.code() == 2
    over = bench.job("9", JobState.FAILED)
    assert after(bench, over, ()) == [
        "warning: --after: job 9 is over: the new one may start at once"
    ]
    stranger = bench.job("9", JobState.RUNNING, name="x", comment="")
    assert after(bench, stranger, (stranger,)) == ["warning: --after: job 9 (x) is not of this run"]
    bench.changes = {"after": Unknown("timed out")}
    assert "whether job 9 exists (timed out)" in bench.faults()[0] and bench.code() == 3


def test_a_submission_whose_answer_was_lost_is_remembered(bench: Bench) -> None:
    tag = new_tag()
    lost = Submission(tag, None, "local", 1.0, "me", "here", "small", "main", None, 2, "hash")
    bench.changes = {"submissions": (lost,)}
    words = (
        f"warning: queue: the scheduler has no trace of submission {tag}, whose answer was lost; "
    )
    assert bench.faults() == [words + "if its job should come after all, it leaves at once"]
    bench.changes = {"submissions": (lost,), "traces": {tag: "12"}}
    assert bench.faults() == []
    bench.changes = {
        "submissions": (lost,),
        "jobs": (bench.job("7", JobState.FAILED, comment=bench.directory.comment(tag)),),
    }
    assert bench.faults() == []
    bench.changes = {"submissions": (replace(lost, note=f"{SUPERSEDED}{new_tag()}"),)}
    assert bench.faults() == []


def test_a_client_on_another_host_that_submits_is_waited_for(bench: Bench) -> None:
    facts = bench.facts()
    lost = Submission(
        new_tag(),
        None,
        "slurm",
        facts.time - 20,
        "ana",
        "far",
        "small",
        "main",
        None,
        2,
        "hash",
        note=BEING_SUBMITTED,
    )
    bench.changes = {"submissions": (lost,), "time": facts.time}
    assert (
        bench.faults()
        == [
            "refused: queue: ana has begun to launch this run on far 20 s ago; look again in 2 min 10 s"
        ]
        and bench.code() == 1
    )
    # its lock is ours: it is dead
    bench.changes = {"submissions": (replace(lost, host=facts.host),), "time": facts.time}
    assert bench.code() == 0 and "no trace" in bench.faults()[0]
