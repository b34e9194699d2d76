"""How often a fault may burn a task, and what is done to the queued jobs of the run; whose fault an attempt
is whose agent never began.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from tests.tr11ops.agent.queues import Queue, job
from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.agent import breaker, early
from tr11ops.agent.breaker import (
    NO_VERDICT,
    TIMED_OUT,
    Burned,
    has_trained_since,
    must_hold,
    read_burned,
    why_not_begin,
)
from tr11ops.agent.early import EarlyEnd, judge, last_lines
from tr11ops.agent.restarts import (
    EarlierStart,
    own_start_before,
    set_launches_aside,
    waiting_start_before,
)
from tr11ops.base.errors import SchedulerUnreachable
from tr11ops.cluster.base import Job, JobState
from tr11ops.diagnose.attribution.evidence import Kind
from tr11ops.launch.plan import resolved_card
from tr11ops.queue.queued_jobs import PendingChanges, PendingJobs
from tr11ops.runcard.card import load_card
from tr11ops.rundir.attempts import AttemptVerdict, LaunchRecord, of_failure, without_restart
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import EXIT_HELD, EXIT_REFUSED, EndMarker
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(
        RunPaths(tmp_path / "run", "small", "main"), tmp_path / "run" / "kill-switch"
    )


# ----------------------------------------------------------------------------- counting
def burn(*faults: str) -> tuple[Burned, ...]:
    return tuple(Burned(str(number), fault) for number, fault in enumerate(faults))


def test_one_fault_burns_two_tasks_and_different_ones_four():
    assert must_hold("a", (), 2) == ""
    assert must_hold("a", burn("a"), 2) == "2 tasks were ended by the same fault without progress"
    assert must_hold("a", burn("b"), 2) == ""
    assert must_hold("a", burn("b", "a", "b"), 2) == "4 tasks in a row ended without progress"
    assert must_hold("a", (), 1) == "1 task was ended by the same fault without progress"


@given(st.lists(st.sampled_from("abc")), st.integers(1, 4))
def test_no_course_of_faults_burns_more_than_allowed(course: list[str], most: int):
    burned: list[Burned] = []
    for fault in course:
        hold = must_hold(fault, burned, most)
        burned.insert(0, Burned("", fault))
        if hold:
            break
    assert len(burned) <= 2 * most
    longest = current = 0
    for index, entry in enumerate(burned):
        current = current + 1 if index and entry.fault == burned[index - 1].fault else 1
        longest = max(longest, current)
    assert longest <= most


def verdict(directory: RunDirectory, job_id: str, order: float, **changes: object) -> None:
    folder = directory.paths.attempt(job_id)
    replace(of_failure("words", 5, 5), fault="a", job_id=job_id, **changes).write(folder)  # type: ignore[arg-type]
    os.utime(folder / "verdict.json", (order, order))


def test_a_task_that_was_tried_has_trained_where_its_records_or_the_checkpoint_say_so(
    directory: RunDirectory,
):
    verdict(directory, "1", 1.0, progress=True)
    verdict(directory, "2", 2.0)  # the one that left suspects out of the next
    assert not has_trained_since(directory, "4", "2")
    verdict(directory, "3", 3.0, held=("7",))  # another fault, and a person released it
    assert not has_trained_since(directory, "4", "2")
    assert has_trained_since(directory, "4", "0")
    verdict(directory, "5", 5.0, progress=True)
    assert has_trained_since(directory, "9", "2")
    killed = directory.paths.attempt("6")
    LaunchRecord(1, ("x1",), 0.0, checkpoint_before=10).write(killed)
    os.utime(killed, (6.0, 6.0))
    assert not has_trained_since(directory, "9", "5")
    directory.paths.checkpoints.mkdir(parents=True)
    (directory.paths.checkpoints / "latest").write_text("global_step15")
    assert has_trained_since(directory, "9", "5")


def test_the_count_ends_at_progress_a_good_end_and_a_release(directory: RunDirectory):
    assert read_burned(directory, "9") == ()
    verdict(directory, "1", 1.0)
    verdict(directory, "2", 2.0)
    assert [entry.job_id for entry in read_burned(directory, "3")] == ["2", "1"]
    assert [entry.job_id for entry in read_burned(directory, "2")] == ["1"]
    verdict(directory, "3", 3.0, reason="superseded")
    assert [entry.job_id for entry in read_burned(directory, "4")] == ["2", "1"]
    for number, changes in enumerate(
        ({"progress": True}, {"reason": "exit-duration"}, {"held": ("7",)})
    ):
        verdict(directory, str(10 + number), 10.0 + number, **changes)
        assert read_burned(directory, "30") == ()
    verdict(directory, "20", 20.0)
    assert [entry.job_id for entry in read_burned(directory, "30")] == ["20"]


def killed(
    directory: RunDirectory, job_id: str, order: float, checkpoint_before: int | None
) -> None:
    """An attempt that began and was killed before it could leave a word."""
    folder = directory.paths.attempt(job_id)
    write_json(folder / "attempt.json", {"nodes": [f"n{job_id}"]})
    LaunchRecord(1, ("x1",), order, checkpoint_before=checkpoint_before).write(folder)
    os.utime(folder / "attempt.json", (order, order))


def save(directory: RunDirectory, step: int) -> None:
    directory.paths.checkpoints.mkdir(parents=True, exist_ok=True)
    directory.paths.latest.write_text(f"global_step{step}")


def test_an_attempt_without_a_word_is_burned_unless_it_saved(directory: RunDirectory):
    write_json(directory.paths.attempt("4") / "attempt.json", {})
    assert read_burned(directory, "5") == (Burned("4", NO_VERDICT),)
    killed(directory, "4", 4.0, None)
    killed(directory, "5", 5.0, None)
    assert [entry.job_id for entry in read_burned(directory, "6")] == ["5", "4"]
    save(directory, 20)  # by the fifth, whose successor began there
    assert read_burned(directory, "6") == ()
    killed(directory, "6", 6.0, 20)
    assert [entry.job_id for entry in read_burned(directory, "7")] == ["6"]
    killed(directory, "7", 7.0, 20)
    assert [entry.job_id for entry in read_burned(directory, "8")] == ["7", "6"]


class Ends:
    """A scheduler that still knows how these jobs ended."""

    def __init__(self, **states: JobState) -> None:
        self.states = {name.removeprefix("job"): state for name, state in states.items()}

    def job(self, job_id: str) -> Job | None:
        if job_id not in self.states:
            raise SchedulerUnreachable("no answer")
        return job(job_id, None, state=self.states[job_id])


def test_an_end_that_was_wanted_or_has_not_come_is_no_fault(directory: RunDirectory):
    for number in range(1, 6):
        killed(directory, str(number), float(number), None)
    ends = Ends(
        job1=JobState.TIMEOUT, job2=JobState.CANCELLED, job3=JobState.PREEMPTED, job4=JobState.NODE_FAIL,
        job5=JobState.RUNNING,
    )  # fmt: skip
    burned = read_burned(directory, "6", ends)  # type: ignore[arg-type]
    assert burned == (Burned("4", "node n4"), Burned("1", TIMED_OUT))
    assert why_not_begin(burned, 2) == ""  # another node is the cure
    assert why_not_begin((), 1) == ""


def test_a_job_that_still_gives_its_nodes_back_is_waited_for(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may start the next task before: it would not know that the one before it burned too."""
    killed(directory, "4", 4.0, None)
    ends = Ends(job4=JobState.COMPLETING)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            ends.states["4"] = JobState.NODE_FAIL

    monkeypatch.setattr(breaker.time, "sleep", sleep)
    assert read_burned(directory, "5", ends) == (Burned("4", "node n4"),)  # type: ignore[arg-type]
    assert len(waited) == 3
    ends.states["4"] = JobState.COMPLETING
    monkeypatch.setattr(breaker, "LEAVING_SECONDS", 0.0)
    assert read_burned(directory, "5", ends) == (), "one that never comes to its end is not known"  # type: ignore[arg-type]


def test_a_job_that_slurm_starts_again_is_known_by_the_nodes_it_had(directory: RunDirectory):
    """Also by the task that comes between: of an array, Slurm may start the next one first."""
    killed(directory, "4", 4.0, None)
    folder = directory.paths.attempt("4")
    assert own_start_before(folder, {}) is None
    assert own_start_before(folder, {"SLURM_RESTART_COUNT": "1"}) == EarlierStart("4", ("n4",))
    again = {"SLURM_RESTART_COUNT": "2"}
    assert own_start_before(directory.paths.attempt("9"), again) is None, "it had begun nothing"
    for state, found in (
        (JobState.PENDING, EarlierStart("4", ("n4",))),
        (JobState.RUNNING, None),
        (JobState.NODE_FAIL, None),
    ):
        assert waiting_start_before(directory, "5", Ends(job4=state)) == found  # type: ignore[arg-type]
    assert waiting_start_before(directory, "5", Ends()) is None, "Slurm is silent"  # type: ignore[arg-type]
    set_launches_aside(folder, 1)
    assert not LaunchRecord.path(folder, 1).exists()
    assert (folder / "launches-of-start-1" / "1.json").exists()


def test_what_was_killed_twice_is_held_by_the_next(directory: RunDirectory):
    why = "2 tasks were ended by the same fault without progress (it was killed at its time limit)"
    assert why_not_begin(burn(TIMED_OUT, TIMED_OUT), 2) == why
    assert why_not_begin(burn(TIMED_OUT), 2) == "" and why_not_begin(burn("a", "a"), 2) == ""


def test_records_survive_the_disk(directory: RunDirectory):
    folder = directory.paths.attempt("4")
    before = replace(
        without_restart(of_failure("words", 5, None)), held=("7",), blamed=("x1",), time=2.0
    )
    before.write(folder)
    assert AttemptVerdict.read(folder) == before
    assert (before.exit_status, before.restart) == (EXIT_HELD, False)
    LaunchRecord(1, ("x1",), 1.0).write(folder)
    assert LaunchRecord.path(folder, 1).exists()
    (folder / "verdict.json").write_text('{"reason": 1}')
    with pytest.raises(ValueError, match="not a verdict"):
        AttemptVerdict.read(folder)


# ----------------------------------------------------------------------------- the queued jobs


def work(
    queue: Queue, directory: RunDirectory, said: list[str], pauses: list[float], **changes: object
) -> PendingJobs:
    return PendingJobs(queue, directory, "7", said.append, pause=pauses.append, **changes)  # type: ignore[arg-type]


def test_only_this_runs_queued_jobs_is_touched(directory: RunDirectory):
    mine = directory.comment("20260101-000000-0123abcd")
    queue = Queue(
        job("7", "7"), job("8", "7", state=JobState.RUNNING), job("11", None, comment=mine),
        job("12", None), job("13", None, comment=mine.replace("@", "@f")),
    )  # fmt: skip
    said: list[str] = []
    waiting = work(queue, directory, said, [])
    assert waiting.hold() == PendingChanges(("7", "11"), ("7", "11"), True)
    assert waiting.run_after(queue, "8")
    assert [one.raw_id for one in queue.waiting.values() if one.dependency] == ["7"]
    waiting.release(["7"])
    assert [one.raw_id for one in queue.waiting.values() if one.reason == "JobHeldUser"] == ["11"]
    assert {one.raw_id for one in queue.waiting.values() if one.reason} == {"7", "11"}


def test_a_silent_scheduler_is_asked_again_with_growing_pauses(directory: RunDirectory):
    queue, said, pauses = Queue(job("7", "7")), [], []
    queue.silent = 4
    assert work(queue, directory, said, pauses).hold() == PendingChanges(("7",), ("7",), True)
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    queue.silent = 10**9
    assert work(queue, directory, said, pauses, give_up=lambda: True).hold() == PendingChanges(
        (), (), False
    )
    assert "does not list the queued jobs" in said[-1]


def test_an_answer_is_not_believed_against_the_job(directory: RunDirectory):
    # Slurm 22.05 refuses "job update not available right now" for a running task, and has held the
    # waiting ones.
    queue, said = Queue(job("7", "7")), []
    queue.refuses = {"7": True}
    assert work(queue, directory, said, []).hold() == PendingChanges(("7",), ("7",), True)
    queue = Queue(job("7", "7"))
    queue.refuses = {"7": False}
    assert work(queue, directory, said, []).hold() == PendingChanges((), (), False)
    assert said[-1] == "tr11: cannot hold the waiting tasks of job 7: refused"


@pytest.mark.parametrize("verb", ["hold", "release"])
def test_silence_is_never_taken_for_a_yes(directory: RunDirectory, verb: str):
    queue, said = Queue(job("7", "7", reason="" if verb == "hold" else "JobHeldUser")), []

    def fall_silent(job_id: str) -> None:
        queue.silent = 10**9
        queue.jobs()

    setattr(queue, verb, fall_silent)
    waiting = work(queue, directory, said, [], give_up=lambda: True)
    done = waiting.hold() if verb == "hold" else waiting.release(["7"])
    assert done == PendingChanges((), (), False)
    assert said[-1] == f"tr11: cannot {verb} the waiting tasks of job 7: no answer"


def test_what_a_person_holds_is_not_taken_for_a_hold_of_ours(directory: RunDirectory):
    queue, said = Queue(job("7", "7", reason="JobHeldUser")), []
    assert work(queue, directory, said, []).hold() == PendingChanges(("7",), (), True)
    assert said == []


def test_a_persons_part_of_an_array_is_not_held_nor_released(directory: RunDirectory):
    queue, said = (
        Queue(job("7", "7", pending_tasks=(3, 4)), job("9", "7", task_id=5, reason="JobHeldUser")),
        [],
    )
    queue.waiting["7"] = replace(queue.waiting["7"], job_id="7_[3-4]")
    waiting = work(queue, directory, said, [])
    assert waiting.hold() == PendingChanges(("7_[3-4]",), ("7_[3-4]",), True)
    assert [one.reason for one in queue.waiting.values()] == ["JobHeldUser", "JobHeldUser"]
    waiting.release(["7_[3-4]"])
    assert [one.reason for one in queue.waiting.values()] == ["Resources", "JobHeldUser"]
    assert said == [
        "tr11: the waiting tasks of job 7_[3-4] are held",
        "tr11: the waiting tasks of job 7_[3-4] are released",
    ]
    queue.refuses = {"7_[3-4]": True}  # refused in words, done in deed
    assert waiting.hold() == PendingChanges(("7_[3-4]",), ("7_[3-4]",), True)


SETUP = ["export A=1\nexport B=2", "module load cuda"]
END = EarlyEnd("setup", "n1", 7, 3, ("loading", "cuda: not found"))


def test_a_set_up_fault_names_line_status_and_last_words():
    found = judge(END, SETUP, 10)
    assert (found.kind, found.blamed) == (Kind.CONFIGURATION, ())
    assert (
        found.summary
        == "slurm.setup[2] (module load cuda) ended with exit status 7 on n1: cuda: not found"
    )
    assert judge(replace(END, line=2), SETUP, 10).summary.startswith(
        "slurm.setup[1] (export A=1 export B=2) ended"
    )
    for line in (None, 9):
        assert judge(replace(END, line=line, said=()), SETUP, 10).summary == (
            "slurm.setup ended with exit status 7 on n1"
        )
    late = judge(replace(END, what="late", status=137), SETUP, 10)
    assert late.summary.startswith(
        "slurm.setup[2] (module load cuda) did not end within 10 min on n1"
    )
    assert "SIGKILL" in judge(replace(END, status=137), SETUP, 10).summary


def test_the_same_fault_has_one_name_on_every_node():
    assert (
        judge(END, SETUP, 10).fault
        == judge(replace(END, host="n2", said=("other",)), SETUP, 10).fault
    )


def test_an_agent_that_does_not_begin_blames_set_up_or_node():
    agent = replace(
        END,
        what="agent",
        status=1,
        line=None,
        said=("ModuleNotFoundError: No module named 'x'", "<end>"),
    )
    assert judge(agent, SETUP, 10).kind is Kind.CONFIGURATION
    assert judge(agent, SETUP, 10).summary.endswith(
        "on n1: ModuleNotFoundError: No module named 'x'"
    )
    assert judge(agent, [], 10).kind is Kind.UNKNOWN
    node = judge(replace(agent, what="node"), [], 10)
    assert (node.kind, node.blamed) == (Kind.NODE, ("n1",))


def test_the_last_lines_are_the_jobs_own_and_hold_no_secret(tmp_path: Path):
    output = tmp_path / "out.txt"
    output.write_text("of a task before\n")
    printed = output.stat().st_size
    secret = "hf_" + "abcdefgh" * 4
    output.write_text(
        f"of a task before\nSTART TIME: now\nusing {secret}\n\ntr11: x\nslurm: line 9: 12 Killed start_agent\n"
    )
    assert last_lines(str(output), printed) == ("using ***",)
    assert last_lines("", 0) == last_lines(str(tmp_path), 0) == last_lines("pipe:[12]", 0) == ()
    assert last_lines(str(output), 10**9) == ()


def test_it_is_on_record_as_an_attempt_that_was_refused(tmp_path: Path, monkeypatch):
    card = load_card(
        write_card(tmp_path), ["slurm.setup=['module load cuda']"], {}, directory=tmp_path
    )
    path = tmp_path / "card.json"
    write_json(path, resolved_card(card))
    words = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "TR11_SCHEDULER": "local",
        "TR11_EARLY": str(tmp_path),
    }
    monkeypatch.setattr(
        os, "environ", {**os.environ, **words, "TR11_LOCAL_ROOT": str(tmp_path / "local")}
    )
    arguments = [
        "--what",
        "setup",
        "--host",
        "n1",
        "--status",
        "3",
        "--line",
        "1",
        "--submission",
        "",
        "--card",
    ]
    assert early.main([*arguments, str(path)]) == EXIT_REFUSED
    end = EndMarker.read(card.paths.end_marker("7"))
    assert end is not None and (end.reason, end.restart, end.launch) == ("refused", False, 0)
    assert end.message == "slurm.setup[1] (module load cuda) ended with exit status 3 on n1"
    verdict = json.loads((card.paths.attempt("7") / "verdict.json").read_text())
    assert (verdict["cause"], verdict["restart"], verdict["message"]) == (
        "configuration",
        False,
        end.message,
    )
    assert (card.paths.attempt("7") / "attempt.json").exists() and (tmp_path / "told").exists()
    assert early.main([*arguments, str(tmp_path / "none.json")]) == EXIT_REFUSED
