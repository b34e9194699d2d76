"""The batch host of a job dies, on real Slurm: no one is told to sleep meanwhile, and people hear
of one incident.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.runbook_mails import MAILS
from tests.twin.small_run import SmallRun
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Message
from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job, JobState
from tr11ops.cluster.pending_reasons import is_held
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, read_version
from tr11ops.twin.faults import inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    plan = TwinPlan(name="batch-host", nodes=6, gpus=0, cpu_nodes=0, slurmd_timeout_seconds=10)
    with Twin.up(plan, twin_home) as made:
        yield made


@pytest.mark.parametrize("kind", ["half-dead", "node-dead"])
def test_a_lost_batch_host_is_one_thread_of_mails(
    stage: SmallRun, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.launch(6, *MAILS)
    first = stage.train()
    inject(stage.twin, kind, node=stage.running().nodes[0])

    def mails() -> list[Message]:
        return list(
            {entry.message.id: entry.message for entry in waiting_entries(stage.directory)}.values()
        )

    def is_over() -> bool:
        capfd.readouterr()
        execute(["status", "--json"])
        seen = json.loads(capfd.readouterr().out)
        if "workers have ended" in seen["why"]:
            assert seen["may_sleep"] is None, seen["why"]
        execute(["pulse"])
        return any(mail.subject.startswith("[OK]") for mail in mails())

    stage.wait(is_over, "the all-clear")
    assert stage.running().raw_id != first
    told = mails()
    assert len({name for mail in told for name in mail.alerts}) <= 2, [
        f"{mail.subject[:90]} {mail.alerts}" for mail in told
    ]
    assert len({mail.thread or mail.message_id for mail in told}) == 1, [
        f"{mail.subject[:90]} {mail.alerts}" for mail in told
    ]
    assert not any(
        "The job goes on without the node" in mail.body or "rank " in mail.subject for mail in told
    )
    assert sum(mail.subject.startswith("[OK]") for mail in told) == 1


def test_the_command_of_the_mail_excludes_the_host_that_the_last_task_was_lost_by(
    stage: SmallRun,
) -> None:
    """The mail of a watchdog that may not act promised the exclusion, and the command made none."""
    stage.launch(1, *MAILS)
    stage.train()
    host = stage.running().nodes[0]
    inject(stage.twin, "batch-host-dead", node=host)

    def of_host() -> list[Message]:
        execute(["pulse"])
        entries = waiting_entries(stage.directory)
        return [entry.message for entry in entries if f"{host}, which r" in entry.message.subject]

    stage.wait(
        lambda: any(mail.subject.startswith("[CRITICAL]") for mail in of_host()), "the alarm"
    )
    for mail in of_host():
        if mail.subject.startswith("[WARNING]"):
            said = " ".join(mail.body.split())
            assert "whether it is lost is not known yet" in said and "Type:" not in said
            assert "goes on" not in said.partition("Evidence:")[0]
        else:
            assert "tr11 launch --repair" in mail.body

    def is_repaired() -> bool:
        assert execute(["launch", "--repair", "--yes"]) == 0
        return not stage.living()

    stage.wait(is_repaired, "the end of the job without a host")
    (entry,) = read_version(stage.directory.exclusions).exclusions
    assert (entry.node, entry.owner) == (host, AUTOMATIC_OWNER)


def test_a_task_that_gave_way_while_the_run_was_stopped_is_there_after_resume(
    stage: SmallRun,
) -> None:
    """The next task of the array begins beside the one that trains, as it does where Slurm takes a
    job that lost a node for ended, and puts itself back into the queue. A stop typed meanwhile holds
    it and those after it, and `tr11 resume` releases them all. Which of them is the next Slurm says:
    it lets one that was put back wait for some minutes.
    """
    stage.launch(4, "slurm.nodes=2")
    stage.train()
    at_once(stage, 2)
    stage.wait(lambda: len(stage.attempts()) == 2, "the task beside it")
    second = stage.attempts()[1]
    stage.wait_for_verdict(second)
    assert (stage.verdict(second)["reason"], stage.launches(second)) == ("superseded", [])
    at_once(stage, 1)
    assert execute(["kill", "--wait", "--yes", "--reason", "a test", "--timeout", "120"]) == 0
    assert {job.state for job in stage.living()} == {JobState.PENDING}
    assert tasks(stage.living()) == tasks(filter(is_held, stage.living())) == {2, 3, 4}
    reached = stage.iteration()
    assert execute(["resume", "--yes"]) == 0
    stage.wait(lambda: stage.iteration() > reached + 5, "steps after the resumption")
    assert tasks(stage.living()) == {2, 3, 4} and not any(map(is_held, stage.living()))


def at_once(stage: SmallRun, number: int) -> None:
    """Let so many tasks of the array run beside each other."""
    words = ["scontrol", "update", f"JobId={stage.array}", f"ArrayTaskThrottle={number}"]
    subprocess.run(words, env=stage.twin.client_environment, check=True, timeout=60)


def tasks(jobs: Iterable[Job]) -> set[int | None]:
    return {task for job in jobs for task in job.pending_tasks or (job.task_id,)}
