"""`tr11 stacks` on real Slurm: one rank of eight nodes is stopped, and one node cannot be reached."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.tr11ops.diagnose.stacks.processes import require_stacks
from tests.twin.operation import Operation
from tr11ops.rundir.attempts import stacks_folder
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from tr11ops.watchdog.pulse import WatchedRun, take_pulse
from tr11ops.watchdog.stacks import keep_stacks

NODES = 8
CHANGES = (
    "rehearsal.collective_seconds=80000",
    "batch.global_batch_size=64",
    'alerts.recipients=["ana@example.org"]',
)
HANGS_SECONDS = 4 * 3600.0  # a look from so much later: no silence is normal for so long
PATIENT = ("--timeout", "200s")  # on a machine that is busy with other tests


@pytest.fixture
def stacks_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    require_stacks()
    with Twin.up(
        TwinPlan(name="stacks", nodes=NODES, gpus=8, cpu_nodes=0, message_timeout_seconds=5),
        twin_home,
    ) as made:
        yield made
        assert not [healing.error for healing in heal(made) if healing.error]


def test_the_stopped_rank_of_eight_nodes_is_named(
    stacks_twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Operation(stacks_twin, tmp_path, nodes=NODES, spares=0, changes=CHANGES)
    run.launch()
    run.until_step(3)
    [job] = run.jobs()
    node = job.nodes[5]

    inject(stacks_twin, "worker-stop", node=node)
    run.until(
        lambda: stopped(run)["odd"]["ranks"] == [5] and waiting(stopped(run)) == 7,
        "rank 5 is named",
    )
    found = stopped(run)
    assert found["verdict"] == (
        f"rank 5 on node {node} is stopped (SIGSTOP); 7 ranks wait for it in the meeting of all ranks"
    )
    assert found["nodes"] == {"answered": sorted(job.nodes), "silent": []}
    shown = run.tr11("stacks", *PATIENT, expect=1).stdout
    assert shown.splitlines()[0].startswith(f"rank 5 on node {node} is stopped (SIGSTOP)")

    for name, value in stacks_twin.environment.items():
        monkeypatch.setenv(name, value)  # the watchdog's own srun
    watched = WatchedRun(run.card, RunDirectory(run.paths, run.card.kill_switch), run.slurm, "root")
    seen = take_pulse(watched, None, email=False, now=lambda: time.time() + HANGS_SECONDS)
    title = f"job {job.job_id} hangs: rank 5 on node {node} is stopped (SIGSTOP)"
    assert title in [finding.title for finding in seen.findings], seen.notes
    assert seen.alerts is not None
    (mail,) = (message for message in seen.alerts.messages if message.detector == "hung")
    assert title in mail.subject and f"nodes exclude {node}" in mail.body, mail.body

    inject(stacks_twin, "half-dead", node=job.nodes[2])  # its slurmd is gone, its worker waits on
    environment = {**os.environ, **stacks_twin.environment}
    with ThreadPoolExecutor() as beside:  # both wait for srun to give the lost node up
        kept = beside.submit(
            keep_stacks, run.paths, job.raw_id, job.nodes, NODES, environment, time.time()
        )
        lost = json.loads(run.tr11("stacks", "--json", *PATIENT, expect=1).stdout)
    assert lost["nodes"]["silent"] == [job.nodes[2]] and len(lost["nodes"]["answered"]) == 7
    assert lost["odd"]["ranks"] == [5], "what is certain comes first"

    told = kept.result()
    assert (
        told.startswith("the stacks of 7 nodes are in ")
        and f"rank 5 on node {node} is stopped" in told
    )
    assert (
        (stacks_folder(run.paths, job.raw_id) / f"{node}.txt")
        .read_text()
        .startswith("rank 5, process ")
    )
    run.tr11("kill", "--now", "--yes", "--reason", "the test is over")


def stopped(run: Operation) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.tr11("stacks", "--json", *PATIENT, expect=None).stdout)
    return found


def waiting(document: dict[str, Any]) -> int:
    return sum(len(group["ranks"]) for group in document["groups"] if group["kind"] == "collective")
