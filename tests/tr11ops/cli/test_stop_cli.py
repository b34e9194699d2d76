"""`tr11 kill`, `pause`, `resume` and `checkpoint-now`: what they say, what they hold, and what they
undo.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.trainings import END, running, trainer_script
from tests.tr11ops.cli.typed_commands import held, tr11, write_beats
from tests.tr11ops.launch.preflight_bench import MODEL
from tests.tr11ops.launch.run_inputs import write_checkpoint
from tests.tr11ops.status_cases import save_slow_attempt
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.local import LocalScheduler
from tr11ops.queue.stop import Acknowledgements, acknowledgements, wait_for_lease
from tr11ops.rundir.attempts import SUPERSEDED, AttemptVerdict
from tr11ops.rundir.fallback import RESERVE_FILE, keep_reserve
from tr11ops.rundir.hold_store import held_by_tr11
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.versioned import VersionedFile
from trainer.contract.attempt import EndMarker
from trainer.contract.files import write_json
from trainer.contract.lease import LIVING_SECONDS, LeaseClaim, LeaseFolder, trained_into
from trainer.contract.recovery import RecoveryEvent, RecoveryRecord, write_recovery
from trainer.contract.requests import new_request, read_request


# ----------------------------------------------------------------------------- kill
def test_queued_jobs_are_held_at_once_and_resume_releases_them(bench: LocalBench) -> None:
    directory = run_directory(bench)
    bench.block()
    bench.launch("--array", "1-10")
    foreign = bench.submit("true", 1, "small", directory.comment("20260101-000000-00000000"))
    bench.scheduler.hold(foreign)  # by a person, past tr11
    hers = ("--yes", "--reason", "new data", "--acting-for", "ana", "--json")
    answer = tr11(bench, "kill", *hers)
    assert answer.json["held"] == ["2"] and "10 tasks of 2_[1-10%1]: held at once" in answer.err
    assert set(held(bench)) == {"2_[1-10%1]", foreign}
    assert held_by_tr11(directory) == {"2"}
    shown = tr11(bench, "resume", "--dry-run")
    assert (
        "nothing was changed" in shown.err
        and directory.kill_switch_is_set()
        and len(held(bench)) == 2
    )
    assert "job 2, by tr11: will be released" in shown.err
    assert f"job {foreign}, not by tr11: stays held" in shown.err
    done = tr11(bench, "resume", *hers)
    assert (done.json["released"], done.json["left_held"]) == (["2"], [foreign])
    assert held(bench) == [foreign] and not directory.kill_switch_is_set()
    assert "next:       2_[1-10%1], as soon as nodes are free" in done.err
    assert tr11(bench, "resume", "--json").json["action"] == "nothing"
    kept = [(entry.kind, entry.who) for entry in read_journal(directory.journal).entries]
    assert kept[-3:] == [("kill-switch-set", "ana"), ("held", "ana"), ("resumed", "ana")]


@pytest.mark.parametrize("stop", ["pause", "kill"])
def test_the_part_of_an_array_that_a_person_holds_stays_held(bench: LocalBench, stop: str) -> None:
    """Twice: what the first resume released is on no record that the second could take the person's
    part by.
    """
    bench.block()
    bench.launch("--array", "1-10")
    bench.scheduler.hold("2_5")  # by a person, past tr11
    part = "2_[1-4,6-10]"
    for _ in range(2):
        answer = tr11(bench, stop, "--yes", "--json")
        assert answer.json["held"] == [part] and held_by_tr11(run_directory(bench)) == {part}
        assert held(bench) == ["2_[1-10%1]"]
        shown = tr11(bench, "resume", "--dry-run").err
        assert (
            f"job {part}, by tr11: will be released" in shown
            and "job 2_5, not by tr11: stays held" in shown
        )
        assert f"next:       {part}, as soon as nodes are free" in shown
        done = tr11(bench, "resume", "--yes", "--json")
        assert (done.code, done.json["released"], done.json["left_held"]) == (0, [part], ["2_5"])
        assert held(bench) == ["2_5"] and held_by_tr11(run_directory(bench)) == frozenset()


def test_a_refusal_is_not_believed_against_the_queue(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm answers for an array's ended tasks with an error, and holds or releases those that wait
    all the same.
    """
    bench.block()
    bench.launch("--array", "1-10")
    for name in ("hold", "release"):
        real = getattr(LocalScheduler, name)

        def change_and_refuse(
            edge: LocalScheduler, job_id: str, real: Callable[..., None] = real
        ) -> None:
            real(edge, job_id)
            raise SchedulerError(
                "Job update not available right now, the DB index is being set, try again in a bit"
            )

        monkeypatch.setattr(LocalScheduler, name, change_and_refuse)
    stopped = tr11(bench, "kill", "--yes", "--json")
    assert (stopped.code, stopped.json["held"], len(held(bench))) == (0, ["2"], 1)
    done = tr11(bench, "resume", "--yes", "--json")
    assert (done.code, done.json["released"], held(bench)) == (0, ["2"], [])
    assert held_by_tr11(run_directory(bench)) == frozenset() and "stays held" not in done.err


def test_what_is_released_on_a_full_disk_comes_off_the_record(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.block()
    bench.launch("--array", "1-3")
    assert tr11(bench, "kill", "--yes").code == 0 and held_by_tr11(run_directory(bench)) == {"2"}
    keep_reserve(run_directory(bench))
    reserve = run_directory(bench).paths.state / RESERVE_FILE

    whole = VersionedFile.put

    def put(self: VersionedFile, number: int, text: str) -> bool:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(self.file(number)))
        return whole(self, number, text)

    monkeypatch.setattr(VersionedFile, "put", put)
    done = tr11(bench, "resume", "--yes", "--json")
    assert (done.code, done.json["released"], held(bench)) == (0, ["2"], [])
    assert held_by_tr11(run_directory(bench)) == frozenset()


def test_kill_release_lets_what_was_held_start_again(bench: LocalBench) -> None:
    directory = run_directory(bench)
    bench.block()
    bench.launch("--array", "1-3")
    killed = tr11(bench, "kill", "--yes")
    assert (
        held(bench) == ["2_[1-3%1]"]
        and f"to let it go on: `tr11 resume --run {bench.card}`" in killed.err
    )
    done = tr11(bench, "kill", "--release", "--yes", "--json")
    assert (done.code, done.json["action"], done.json["released"], done.json["missing"]) == (
        0,
        "released",
        ["2"],
        None,
    )
    assert (
        held(bench) == []
        and not directory.kill_switch_is_set()
        and held_by_tr11(directory) == frozenset()
    )
    assert "next:       2_[1-3%1], as soon as nodes are free" in done.err


def test_a_finished_training_is_not_said_to_go_on(bench: LocalBench) -> None:
    end = run_directory(bench).paths.attempts / "1" / "end.json"
    end.parent.mkdir(parents=True)
    end.write_text(json.dumps({**END, "reason": "finished", "job_id": "1"}))
    said = tr11(bench, "kill", "--yes").err
    assert "the training is finished" in said and "nothing is left to train" in said
    assert "to let it go on" not in said


def test_resume_names_the_node_that_the_last_attempt_measured_as_slow(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = run_directory(bench).paths
    save_slow_attempt(paths, EndMarker(**{**END, "job_id": "1"}))
    tr11(bench, "kill", "--yes")
    assert "slow node:" not in tr11(bench, "resume", "--dry-run").err, "all nodes are this machine"
    monkeypatch.setattr(LocalScheduler, "name", "slurm")
    shown = " ".join(tr11(bench, "resume", "--dry-run").err.split())
    assert "slow node: n2 held the others back in the last attempt" in shown
    assert "before this, type `tr11 nodes exclude --run " in shown


def test_resume_says_that_the_fault_for_which_it_is_held_will_return(bench: LocalBench) -> None:
    directory = run_directory(bench)
    bench.block()
    bench.launch("--array", "1-3")
    bench.scheduler.hold("2")
    why = "software or data, not the nodes: the same fault came back after iteration 8 on n1 and n2: SIGSEGV"
    attempt = directory.paths.attempt("1")
    attempt.mkdir(parents=True)
    verdict = AttemptVerdict("error", 8, 5, 3, "SIGSEGV", held=("2",), held_because=why, time=1.0)
    verdict.write(attempt)
    asked = tr11(bench, "resume", "--dry-run", "--json")
    shown = " ".join(asked.err.split())
    assert f"held: job 2, by tr11: will be released because: {why}" in shown
    assert "The same fault will return unless its cause is gone:" in shown
    assert "diagnose" in shown and "runbook array-held" in shown
    assert asked.json["faults"] == [why]
    write_recovery(
        directory.paths, RecoveryRecord((RecoveryEvent("by-hand", 0, 0, 8, 8, 5, 9, 9, 0.5),))
    )
    before = " ".join(tr11(bench, "resume", "--dry-run").err.split())
    assert "will return unless" in before, "a roll-back from before the hold did not help"
    write_recovery(
        directory.paths, RecoveryRecord((RecoveryEvent("by-hand", 0, 0, 8, 8, 5, 9, 9, 2.0),))
    )
    since = " ".join(tr11(bench, "resume", "--dry-run").err.split())
    assert "Since then a roll-back skips iterations 9-9" in since and "will return" not in since
    assert tr11(bench, "resume", "--yes", "--json").json["released"] == ["2"]
    assert tr11(bench, "resume", "--dry-run", "--json").json["faults"] == []


def test_what_the_trainer_would_refuse_is_not_released(bench: LocalBench) -> None:
    """The queued job's own card counts: the checkpoint was trained with another learning rate."""
    directory = run_directory(bench)
    bench.block()
    bench.launch("--array", "1-3")
    tr11(bench, "kill", "--yes")
    save_with_rate(directory.paths.checkpoints, 5e-4)
    shown = tr11(bench, "resume", "--dry-run").err
    held_back = "job 2_[1-3%1], by tr11: stays held, the trainer would refuse it: schedule.on_resume: global_step10 "
    assert held_back in shown
    done = tr11(bench, "resume", "--yes", "--json")
    assert (done.code, done.json["released"], done.json["left_held"]) == (1, [], ["2_[1-3%1]"])
    assert (
        "value from checkpoint (0.0005) is not equal to the card's (0.001)" in done.json["missing"]
    )
    assert "--replace` queues it again" in done.json["missing"] and held(bench) == ["2_[1-3%1]"]
    assert not directory.kill_switch_is_set()  # nothing but the job's card is in the way now
    repair = bench.launch("--repair", "--yes")
    assert "job 2_[1-3%1] stays held, the trainer would refuse it: schedule.on_resume" in " ".join(
        repair.out.split()
    )
    assert held(bench) == ["2_[1-3%1]"]
    again = tr11(bench, "resume", "--yes")
    assert again.code == 1 and "nothing stands in the way" not in again.err
    shutil.rmtree(directory.paths.checkpoints)
    save_with_rate(directory.paths.checkpoints, 1e-3)
    assert tr11(bench, "resume", "--yes", "--json").json["released"] == ["2"] and held(bench) == []


def save_with_rate(folder: Path, rate: float) -> None:
    """A checkpoint of step 10 that says with which learning rate it was trained."""
    place = write_checkpoint(folder, 10, MODEL)
    cursor = json.loads((place / "cursor.json").read_text())
    write_json(place / "cursor.json", {**cursor, "schedule": {"learning_rate": rate}})
    manifest = json.loads((place / "manifest.json").read_text())
    for entry in manifest["files"]:
        entry["bytes"] = (place / entry["path"]).stat().st_size
    write_json(place / "manifest.json", manifest)


def test_pause_too_is_released_by_either_command(bench: LocalBench) -> None:
    bench.block()
    bench.launch("--array", "1-3")
    assert f"to let it go on: `tr11 resume --run {bench.card}`" in tr11(bench, "pause", "--yes").err
    assert tr11(bench, "kill", "--release", "--yes").code == 0
    assert held(bench) == [] and not run_directory(bench).paths.pause.exists()


@pytest.mark.parametrize("words", [("resume", "--yes"), ("kill", "--release", "--yes")])
def test_what_only_another_may_release_is_no_success(
    bench: LocalBench, words: tuple[str, ...]
) -> None:
    directory = run_directory(bench)
    bench.block()
    foreign = bench.submit("true", 1, "small", directory.comment("20260101-000000-00000000"))
    bench.scheduler.hold(foreign)
    write_json(directory.kill_switch, {})
    done = tr11(bench, *words)
    assert done.code == 1 and f"nothing starts: job {foreign} stays held" in done.err
    # one document
    assert tr11(bench, *words, "--json").json["missing"].startswith("nothing starts: ")
    assert not directory.kill_switch_is_set()
    assert tr11(bench, *words).code == 1  # and as long as that is so


def test_a_silent_scheduler_leaves_what_is_held_and_says_so(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: object, name: str | None = None) -> tuple[Job, ...]:
        raise SchedulerError("no answer")

    bench.block()
    bench.launch("--array", "1-3")
    tr11(bench, "kill", "--yes")
    with monkeypatch.context() as patched:
        patched.setattr("tr11ops.cluster.local.LocalScheduler.jobs", silent)
        done = tr11(bench, "kill", "--release", "--yes")
    assert done.code == 3 and "job 2 may still be held: type this again" in done.err
    assert tr11(bench, "kill", "--release", "--yes").code == 0 and held(bench) == []


def test_a_switch_from_before_the_first_launch_can_be_released(bench: LocalBench) -> None:
    switch = bench.folder / "stop-all"
    switch.touch()
    option = ("--set", f"run.kill_switch={switch}")
    assert tr11(bench, "resume", "--yes", *option).code == 0 and not switch.exists()
    assert not run_directory(bench).root.exists()


def test_a_dry_run_of_an_end_at_once_says_what_would_be_lost(bench: LocalBench) -> None:
    directory = run_directory(bench)
    write_checkpoint(directory.paths.checkpoints, 40)
    directory.paths.logs.mkdir(parents=True)
    step = {
        "iteration": 52, "total_iterations": 100, "consumed_samples": 1, "consumed_tokens": 1, "lm_loss": 2.0,
        "seconds_per_iteration": 105.0, "learning_rate": 0.1, "global_batch_size": 1, "grad_norm": 1.0,
        "samples_per_second": 1.0, "tflops": 1.0, "time": 1.0,
    }  # fmt: skip
    directory.paths.metrics.write_text(json.dumps(step) + "\n")
    answer = tr11(bench, "kill", "--now", "--dry-run", "--json")
    assert "lost:       12 iterations since global_step40, about 21 min of training" in answer.err
    write_checkpoint(directory.paths.checkpoints, 51)
    said = tr11(bench, "kill", "--now", "--dry-run").err
    assert "lost:       1 iteration since global_step51, about 1 min 45 s of training" in said
    write_checkpoint(directory.paths.checkpoints, 52)
    said = tr11(bench, "kill", "--now", "--dry-run").err
    assert "lost:       nothing: no iteration has ended since global_step52" in said
    assert answer.json["iterations_at_risk"] == 12 and not directory.kill_switch_is_set()
    assert tr11(bench, "kill", "--yes", "--json").json["kind"] == "kill"
    # and a switch that is set can be sharpened
    second = tr11(bench, "kill", "--now", "--yes", "--json")
    assert (second.json["action"], second.json["kind"]) == ("set", "kill-now")
    held_now = read_request(directory.kill_switch, "kill")
    assert held_now is not None and held_now.kind == "kill-now"


def test_receipts_name_the_ranks_that_are_missing(bench: LocalBench) -> None:
    number = running(bench, "exec sleep 600")
    directory = run_directory(bench)
    request = new_request("kill", "ana", "", directory.root)
    write_json(directory.kill_switch, to_builtins(request))
    write_beats(bench, number, 2, request.id)
    answer = tr11(bench, "kill", "--wait", "--timeout", "0", "--json")
    assert answer.json["receipts"]["missing"] == [
        {"rank": 2, "host": "node-1"},
        {"rank": 3, "host": "node-1"},
    ]
    assert "2 of 4 ranks have answered; missing: rank 2 on node-1, rank 3 on node-1" in answer.err
    assert str(acknowledgements(directory, request.id, ["another"])) == ""
    many = Acknowledgements((), tuple((rank, "n") for rank in range(384)))
    assert str(many) == "none of 384 ranks has answered yet"
    some = Acknowledgements(((384, "n"),), many.missing)
    assert (
        str(some)
        == "1 of 385 ranks have answered; missing: rank 0 on n, rank 1 on n, rank 2 on n and 381 more"
    )


def test_a_wait_says_for_whom_and_what_ends_a_job_that_cannot_save(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = running(bench, "exec sleep 600")
    directory = run_directory(bench)
    request = new_request("kill", "ana", "", directory.root)
    write_json(directory.kill_switch, to_builtins(request))
    write_beats(bench, number, 2, request.id)
    monkeypatch.setattr("tr11ops.queue.stop.QUIET_SECONDS", 0.0)
    said = tr11(bench, "kill", "--wait", "--timeout", "3").err
    assert (
        said.count("it waits for rank 2 on node-1: ")
        == said.count("it waits for rank 3 on node-1: ")
        == 1
    )
    assert "it waits for rank 0" not in said and "it waits for rank 1" not in said
    assert (
        f"a rank that hangs cannot save; to end it unsaved, type Ctrl-C, then: tr11 kill --run {bench.card}"
        in said
    )
    assert "--now --wait (what has not ended after 30 min is cancelled)" in said
    now = tr11(bench, "kill", "--yes", "--now", "--wait", "--timeout", "3").err
    assert (
        "a rank that hangs cannot save; what has not ended after 1 min is cancelled" in now
        and "Ctrl-C" not in now
    )


def test_what_does_not_stop_in_time_is_cancelled_by_who_may(bench: LocalBench) -> None:
    number = running(bench, "exec sleep 600")
    answer = tr11(
        bench, "kill", "--yes", "--wait", "--set", "resilience.stop_within_minutes=0.0001"
    )
    assert f"job {number} has not stopped within 0.0001 min: cancelling it" in answer.err
    assert answer.code == 1 and f"job {number} ended without a word of the trainer" in answer.out
    assert "stop-fallback" in [
        entry.kind for entry in read_journal(run_directory(bench).journal).entries
    ]


@pytest.mark.parametrize(
    ("launches", "code", "said"),
    [
        (0, 0, "trained nothing, as another job of the run did: it is back in the queue"),
        (1, 1, "ended without a word of the trainer"),
    ],
)
def test_a_job_that_is_back_in_the_queue_is_not_waited_for(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch, launches: int, code: int, said: str
) -> None:
    """A task that began beside one that lives on without a lost node puts itself back."""
    number = running(bench, "exec sleep 600")
    attempt = run_directory(bench).paths.attempt(number)
    AttemptVerdict(SUPERSEDED, None, None, 0, "another one trains", launches=launches).write(
        attempt
    )
    in_the_states(monkeypatch, JobState.RUNNING, JobState.PENDING)
    answer = tr11(bench, "kill", "--yes", "--wait", "--timeout", "20", "--json")
    assert (answer.code, answer.json["ended"][0]["is_over"]) == (code, True)
    assert f"job {number} {said}" in answer.err


def test_what_has_gone_back_into_the_queue_is_not_cancelled(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where the scheduler tells of it only when the time to stop is over."""
    number = running(bench, "exec sleep 600")
    in_the_states(monkeypatch, JobState.RUNNING, JobState.UNKNOWN, JobState.PENDING)
    limit = "resilience.stop_within_minutes=0.03"
    answer = tr11(bench, "kill", "--yes", "--wait", "--timeout", "20", "--set", limit)
    assert "cancelling" not in answer.err
    assert any(job.raw_id == number for job in bench.living())


def test_a_wait_for_the_scheduler_alone_says_what_that_says(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tr11ops.queue.stop.QUIET_SECONDS", 0.5)
    number = running(bench, trainer_script(bench, END))
    in_the_states(monkeypatch, JobState.RUNNING, JobState.COMPLETING)
    answer = tr11(bench, "kill", "--yes", "--wait", "--timeout", "4")
    assert f"it waits for the scheduler, to which job {number} is COMPLETING" in answer.err
    assert answer.code == 1 and f"job {number} is still there" in answer.out


def test_a_scheduler_that_falls_silent_ends_no_wait(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall_silent(edge: LocalScheduler, job_id: str) -> Job | None:
        raise SchedulerError("no answer within 10 s")

    number = running(bench, trainer_script(bench, END))
    monkeypatch.setattr(LocalScheduler, "job", fall_silent)
    answer = tr11(bench, "kill", "--yes", "--wait", "--timeout", "2")
    assert answer.code == 1 and f"job {number} is still there" in answer.out


def test_a_kill_sees_the_lease_of_what_it_killed_out(bench: LocalBench) -> None:
    """It is as old as it needs to be but for 3 s when the job is over; `latest` may be moved at once then."""
    directory = run_directory(bench)
    lease = LeaseFolder(directory.paths)
    number = running(
        bench,
        f"{trainer_script(bench, END)}\ntouch -d '-{LIVING_SECONDS - 3:.0f} seconds' {lease.file(1)}",
    )
    assert lease.claim(1, LeaseClaim.of_this_process(number, 1))
    answer = tr11(bench, "kill", "--yes", "--now", "--wait")
    assert answer.code == 0, answer.err
    assert trained_into(directory.paths.checkpoints, time.time()) == ""


def test_a_wait_for_a_lease_says_so_and_ends(bench: LocalBench) -> None:
    directory = run_directory(bench)
    lease, said, moments = LeaseFolder(directory.paths), list[str](), [0.0, 5.0, 20.0]
    assert lease.claim(1, LeaseClaim.of_this_process("7", 1))

    def pause() -> bool:
        moments.pop(0)
        os.utime(lease.file(1), (time.time() - moments[0], time.time() - moments[0]))
        return True

    assert wait_for_lease(directory, ["7"], pause, said.append) is None
    assert moments == [20.0] and len(said) == 1
    assert "did not let go of the run's lease: for 15 s it counts as alive" in said[0]
    # another's is not waited for, and one that is renewed though its job is over is told of
    lease.claim(2, LeaseClaim.of_this_process("8", 1))
    assert wait_for_lease(directory, ["7"], pause, said.append) is None
    clock = iter([time.time(), *[time.time() + 100.0] * 9])
    lease.file(2).touch()
    kept = wait_for_lease(directory, ["8"], pause, said.append, clock.__next__)
    assert kept is not None and kept.job_id == "8"


def in_the_states(monkeypatch: pytest.MonkeyPatch, *states: JobState) -> None:
    """The embedded scheduler says of a job, when asked for it alone, one of these after another,
    the last for ever.
    """
    real, left = LocalScheduler.job, list(states)

    def job(edge: LocalScheduler, job_id: str) -> Job | None:
        found = real(edge, job_id)
        assert found is not None
        return replace(found, state=left.pop(0) if left[1:] else left[0])

    monkeypatch.setattr(LocalScheduler, "job", job)


def test_who_may_not_cancel_is_told_whom_to_call(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = running(bench, "exec sleep 600")
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    monkeypatch.setattr("tr11ops.cli.stopping.user_name", lambda: "oncall")
    words = (
        "kill",
        "--yes",
        "--wait",
        "--timeout",
        "3",
        "--set",
        "resilience.stop_within_minutes=0.0001",
    )
    answer = tr11(bench, *words)
    owner = bench.scheduler.jobs()[0].user
    assert answer.code == 1 and f"call {owner}, who owns it" in answer.err
    assert any(job.raw_id == number and job.state.is_active for job in bench.scheduler.jobs())


def test_another_persons_queue_is_left_to_the_runs_controller(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.block()
    bench.launch("--array", "1-3")
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    monkeypatch.setattr("tr11ops.cli.stopping.user_name", lambda: "oncall")
    answer = tr11(bench, "kill", "--yes", "--json")
    assert answer.json["held"] == [] and held(bench) == []
    assert (
        "the run's own controller holds it" in answer.err
        and run_directory(bench).kill_switch_is_set()
    )


def test_a_scheduler_that_refuses_a_hold_stops_no_kill(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, job_id: str) -> None:
        raise SchedulerError("Access/permission denied")

    bench.block()
    bench.launch("--array", "1-3")
    monkeypatch.setattr("tr11ops.cluster.local.LocalScheduler.hold", refuse)
    answer = tr11(bench, "kill", "--yes", "--json")
    assert answer.code == 0 and run_directory(bench).kill_switch_is_set()
    assert "not held: job 2 (Access/permission denied)" in answer.err


def test_kill_waits_for_the_end_and_no_task_starts(
    bench: LocalBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The switch is set before the queue is held: here the training needs longer to end than that
    takes.
    """
    is_held, hold_for_real = tmp_path / "is-held", LocalScheduler.hold

    def hold(self: LocalScheduler, job_id: str) -> None:
        hold_for_real(self, job_id)
        is_held.touch()

    monkeypatch.setattr(LocalScheduler, "hold", hold)
    wait = f"while [ ! -e {is_held} ]; do sleep 0.05; done"
    number = running(bench, f"{wait}\n{trainer_script(bench, END)}")
    bench.launch("--array", "1-3", "--after", number)
    answer = tr11(bench, "kill", "--yes", "--wait", "--json")
    assert answer.code == 0 and answer.json["ended"][0]["reason"] == "kill-switch"
    time.sleep(2)
    assert [job.state for job in bench.scheduler.jobs() if job.array_id] == [JobState.PENDING]
