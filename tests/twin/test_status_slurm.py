"""The verdict on a real Slurm: running, queued, held, a dead chain, hung, a controller that does
not answer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import until
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import BatchRequest, Job, JobState
from tr11ops.cluster.pending_reasons import Wait, reason_of_job
from tr11ops.cluster.slurm import SlurmScheduler
from tr11ops.detect.nodes_left import leaving_nodes
from tr11ops.detect.registry import detect_all
from tr11ops.observe import derived
from tr11ops.observe.look import observe
from tr11ops.observe.snapshot import RunFacts, Snapshot
from tr11ops.rundir.paths import RunDirectory, Submission, new_tag
from tr11ops.status.assessment import status_of
from tr11ops.status.screen import node_rows
from tr11ops.twin.twin import Twin
from tr11ops.watchdog.verdict import Verdict, VerdictWord, judge
from trainer.contract.attempt import Heartbeat, write_heartbeat
from trainer.contract.paths import RunPaths


class Run:
    """One run on the twin, watched as `tr11 status` watches it."""

    def __init__(self, folder: Path, slurm: SlurmScheduler):
        self.slurm = slurm
        self.directory = RunDirectory(RunPaths(folder, "watched", "main"), folder / "kill-switch")
        self.facts = RunFacts("watched", "main", folder, self.directory.kill_switch)

    def submit(self, script: str = "sleep 600", **changes: object) -> str:
        tag = new_tag()
        values = {
            "script": f"#!/bin/bash\n{script}\n", "name": "watched", "nodes": 1, "time_limit_seconds": 1200,
            "output": "/dev/null", "working_directory": self.directory.root, "comment": self.directory.comment(tag),
            "partition": "gpu_p5", **changes,
        }  # fmt: skip
        job_id = self.slurm.submit(BatchRequest(**values))  # type: ignore[arg-type]
        self.directory.write_submission(
            Submission(
                tag, job_id, "slurm", time.time(), "ana", "h", "watched", "main", None, 1, "hash"
            )
        )
        return job_id

    def look(self, later: float = 0.0) -> tuple[Snapshot, Verdict]:
        seen = observe(self.directory, self.facts, self.slurm, time.time() + later)
        return seen, judge(seen, detect_all(seen))

    def wait(self, enough: Callable[[Snapshot, Verdict], bool]) -> tuple[Snapshot, Verdict]:
        def seen_enough() -> tuple[Snapshot, Verdict] | None:
            found = self.look()
            return found if enough(*found) else None

        found = until(seen_enough, pause=0.5, context=self.look)
        assert found is not None
        return found

    def running(self) -> Job:
        seen, _ = self.wait(
            lambda seen, _: (
                bool(seen.jobs) and any(job.state is JobState.RUNNING for job in seen.jobs)
            )
        )
        assert not isinstance(seen.jobs, Unknown)
        return next(job for job in seen.jobs if job.state is JobState.RUNNING)


@pytest.fixture
def run(tmp_path: Path, slurm: SlurmScheduler) -> Run:
    return Run(tmp_path, slurm)


def test_an_array_runs_hangs_and_its_rest_is_held(run: Run, twin: Twin) -> None:
    job_id = run.submit(array="1-9000:9%1")
    job = run.running()
    assert run.look()[1].word is VerdictWord.STARTING
    write_heartbeat(
        run.directory.paths.heartbeat(0),
        Heartbeat(0, "x", 1, "training", 7, time.time(), job.raw_id),
    )
    seen, verdict = run.look()
    assert (verdict.word, "training at iteration 7" in verdict.why) == (
        VerdictWord.HEALTHY,
        True,
    ), verdict
    waiting = [job for job in seen.jobs if job.state is JobState.PENDING]  # type: ignore[union-attr]
    assert [len(job.pending_tasks) for job in waiting] == [999]
    assert seen.unknowns() == ()
    assert run.look(later=7200)[1].word is VerdictWord.STALLED

    # A controller that does not answer is no reason to wake anyone while the heartbeats are fresh.
    controller = twin.process("slurmctld").pid
    os.kill(controller, signal.SIGSTOP)
    try:
        write_heartbeat(
            run.directory.paths.heartbeat(0),
            Heartbeat(0, "x", 1, "training", 8, time.time(), job.raw_id),
        )
        blind, verdict = run.look()
        assert isinstance(blind.jobs, Unknown)
        assert (verdict.word, "scheduler unreachable" in verdict.why) == (
            VerdictWord.HEALTHY,
            True,
        ), verdict
        assert judge(blind, ()).word is VerdictWord.HEALTHY
        assert [finding.detector for finding in detect_all(blind)] == []
    finally:
        os.kill(controller, signal.SIGCONT)

    run.slurm.hold(job_id)
    run.slurm.cancel(f"{job_id}_1")
    # Held by User or Admin, depending on who runs the tests. Until task 1 has left its nodes, that
    # is said first.
    run.wait(lambda seen, verdict: verdict.word is VerdictWord.DOWN and " held" in verdict.why)
    run.slurm.release(job_id)
    run.wait(lambda seen, verdict: verdict.word in {VerdictWord.QUEUED, VerdictWord.STARTING})
    run.slurm.cancel(job_id)
    run.wait(
        lambda seen, verdict: (
            verdict.word is VerdictWord.DOWN and "nothing is queued" in verdict.why
        )
    )


def test_a_dead_chain_is_told_from_a_waiting_one(run: Run, twin: Twin) -> None:
    first = run.submit()
    run.running()
    second = run.submit(dependency=f"afterany:{first}")
    seen, verdict = run.look()
    assert verdict.word is VerdictWord.STARTING
    assert [job.reason for job in seen.jobs if job.job_id == second] == ["Dependency"]  # type: ignore[union-attr]
    run.slurm.cancel(second)
    # As someone else's script may submit it: a job that waits for a success that will never come.
    arguments = [
        "--job-name=watched",
        "--partition=gpu_p5",
        "--kill-on-invalid-dep=no",
        f"--dependency=afterok:{first}",
    ]
    comment = f"--comment={run.directory.comment(new_tag())}"
    subprocess.run(
        ["sbatch", *arguments, comment, "--output=/dev/null", "--wrap=true"], env=twin.environment, check=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    run.slurm.cancel(first)
    seen, verdict = run.wait(lambda seen, verdict: "DependencyNeverSatisfied" in verdict.why)
    assert verdict.word is VerdictWord.DOWN
    (finding,) = [finding for finding in detect_all(seen) if finding.detector == "dead-chain"]
    assert finding.fix == "tr11 launch --repair"


def test_a_drained_node_that_is_in_use_is_shown(run: Run, twin: Twin) -> None:
    run.submit(nodes=2)
    used = run.running().nodes[1]

    control(twin, f"nodename={used}", "state=drain", "reason=memory")
    try:
        seen, verdict = run.wait(lambda seen, _: bool(leaving_nodes(seen)))
        status = status_of(seen, detect_all(seen), verdict)
        [node] = status.leaving_nodes
        assert node.name == used and "drain" in node.states and node.reason.startswith("memory")
        assert any(f"{used} leaves when its job ends" in text for _, text, _ in node_rows(status))
    finally:
        control(twin, f"nodename={used}", "state=resume")


def test_a_start_in_three_days_is_remarked(run: Run, twin: Twin) -> None:
    number = run.submit(begin=time.time() + 3 * 86_400 + 600)
    seen, verdict = run.wait(
        lambda seen, _: any(job.start_time is not None for job in seen.pending_jobs)
    )
    assert (verdict.word, "expected to start in 3 d" in verdict.why) == (
        VerdictWord.QUEUED,
        True,
    ), verdict
    [finding] = [one for one in detect_all(seen) if one.detector == "queued-too-long"]
    assert finding.fix == f"scontrol update JobId={number} StartTime=now"
    subprocess.run(finding.fix.split(), env=twin.client_environment, check=True, timeout=60)
    run.running()


def test_tasks_moved_to_a_partition_without_their_nodes_are_no_cover(run: Run, twin: Twin) -> None:
    array = run.submit(array="1-3%1", gpus_per_node=8)
    run.running()
    control(twin, f"jobid={array}_[2-3]", "partition=compil")
    seen, _ = run.wait(lambda seen, _: {job.partition for job in seen.pending_jobs} == {"compil"})
    assert all(reason_of_job(job).wait is Wait.PASSES for job in seen.pending_jobs), (
        "the reason says nothing of it"
    )
    assert derived.startable_jobs(seen) == ()
    [finding] = [one for one in detect_all(seen) if one.detector == "limit-reached"]
    assert "asks for 1 node with 8 GPUs, partition compil has 0" in finding.evidence[0]
    control(twin, f"jobid={array}", "partition=gpu_p5")
    run.wait(lambda seen, _: derived.queued_tasks(derived.startable_jobs(seen)) == 2)


def test_a_partition_that_is_down_is_told_while_a_task_still_runs(run: Run, twin: Twin) -> None:
    run.submit(array="1-3%1")
    run.running()
    control(twin, "partitionname=gpu_p5", "state=DOWN")
    try:
        seen, _ = run.wait(lambda seen, _: not derived.sure_jobs(seen))
        [finding] = [one for one in detect_all(seen) if one.detector == "waits-for-site"]
        assert finding.title.startswith("nothing starts after job")
        assert finding.title.endswith("the site has closed partition gpu_p5")
        assert derived.queued_tasks(derived.startable_jobs(seen)) == 2, (
            "they start when the site is done"
        )
    finally:
        control(twin, "partitionname=gpu_p5", "state=UP")
    run.wait(lambda seen, _: derived.queued_tasks(derived.sure_jobs(seen)) == 2)


def control(twin: Twin, *words: str) -> None:
    """Newer versions say at times that a resource is unavailable for the moment."""
    command = ["scontrol", "update", *words]

    def is_taken() -> bool:
        done = subprocess.run(command, env=twin.client_environment, check=False, timeout=60)
        return done.returncode == 0

    until(is_taken, " ".join(command))
