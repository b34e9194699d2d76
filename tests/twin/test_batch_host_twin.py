"""The batch host of a job dies, on real Slurm: no one is told to sleep meanwhile, and people hear
of one incident.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.small_run import SmallRun
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Message
from tr11ops.cli.main import execute
from tr11ops.twin.faults import inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

MAILS = (
    'alerts.recipients=["oncall@example.org"]',
    'alerts.smtp_host="127.0.0.1"',
    "alerts.smtp_port=9",
)


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
