"""`tr11 diagnose` after six faults, on a real Slurm: each answer is of its own attempt's last
launch.

Five of them befall one run, one after another, and each attempt has a worker killed before: so its
logs, and those of the run, are full of what earlier launches and earlier attempts have left.
"""

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
from tests.twin.small_run import SmallRun
from tr11ops.base.errors import TwinError
from tr11ops.cli.main import execute
from tr11ops.cluster.base import JobState
from tr11ops.diagnose.diagnosis import NowState, RunNow
from tr11ops.rundir.attempts import stacks_folder
from tr11ops.rundir.exclusions import read_version
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from tr11ops.watchdog.pulse import WatchedRun, take_pulse
from tr11ops.watchdog.stacks import keep_stacks

Capture = pytest.CaptureFixture[str]
NODES = 9
SLOW = (  # two launches a task, with steps that are slow enough for a fault at one of them
    "rehearsal.step_seconds=40", "rehearsal.collective_seconds=10", "resilience.launches_per_attempt=2",
    "resilience.exclusion_cap_percent=90", "resilience.most_tasks_per_fault=5",
)  # fmt: skip


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    """Nine nodes of its own: they are killed here, and Slurm has to notice within seconds."""
    require_slurm()
    plan = TwinPlan(
        name="diagnose",
        nodes=NODES,
        gpus=0,
        cpu_nodes=0,
        slurmd_timeout_seconds=6,
        message_timeout_seconds=5,
    )
    with Twin.up(plan, twin_home) as made:
        yield made


class Case:
    """The run that all faults befall."""

    def __init__(self, stage: SmallRun, capture: Capture) -> None:
        self.stage, self.capture = stage, capture
        self.attempt = ""

    def with_debris(self) -> list[str]:
        """The next attempt, in which a worker has been killed and a launch follows that trains; the
        nodes of that.
        """
        stage, before = self.stage, self.attempt
        stage.wait(lambda: stage.attempts() and stage.attempts()[-1] != before, "the next attempt")
        self.attempt = stage.attempts()[-1]
        stage.wait(lambda: stage.launches(self.attempt), "its launch")
        self.trains()
        inject(stage.twin, "worker-crash", node=self.nodes()[-1])
        stage.wait(lambda: len(stage.launches(self.attempt)) == 2, "the launch after it")
        self.trains()
        return self.nodes()

    def nodes(self) -> list[str]:
        """Of the attempt's last launch."""
        found: list[str] = self.stage.launches(self.attempt)[-1]["nodes"]
        return found

    def last_launch(self) -> int:
        number: int = self.stage.launches(self.attempt)[-1]["launch"]
        return number

    def trains(self) -> None:
        began = self.stage.launches(self.attempt)[-1]["start"]
        self.stage.wait(
            lambda: sum(step["time"] > began for step in self.stage.steps()) > 5, "its steps"
        )

    def is_over(self) -> bool:
        job = self.stage.slurm.job(self.attempt)
        return job is None or job.state.is_final

    def wait_for_hold(self) -> None:
        """Until the attempt has held what waits, and has left."""
        self.stage.wait(lambda: self.held() and self.is_over(), "the hold")

    def held(self) -> bool:
        return any(
            job.state is JobState.PENDING and job.reason.startswith("JobHeld")
            for job in self.stage.jobs()
        )

    def resume(self) -> None:
        assert execute(["resume", "--yes"]) == 0
        self.stage.wait(lambda: not self.held(), "the release")

    def is_told(
        self,
        verdict: str,
        action: str,
        kind: str,
        *named: str,
        words: str = "",
        of_run: bool = False,
    ) -> None:
        """What `diagnose` says of the attempt, and of the run where this is its newest."""
        for typed in ((), ("--job", self.attempt)) if of_run else (("--job", self.attempt),):
            self.capture.readouterr()
            code = execute(["diagnose", "--json", *typed])
            said = self.capture.readouterr()
            found: dict[str, Any] = json.loads(said.out)
            judged = found["attribution"]
            asked = action
            if self.needs_no_one(found, action):
                asked = "none"
            assert code == int(asked != "none"), said
            assert (found["launch"], found["launch_number"]) == (
                self.attempt,
                self.last_launch(),
            ), said.out
            assert (found["verdict"], found["action"], judged["kind"]) == (verdict, asked, kind), (
                said.out
            )
            # where it was met last, and no more
            suspects = () if kind == "software" else judged["suspects"]
            assert [*judged["blamed"], *suspects] == list(named), said.out
            assert words in found["explanation"], said.out
            self.check_quotes(found)

    def needs_no_one(self, found: dict[str, Any], action: str) -> bool:
        """Whether the next task goes on by itself, without the nodes that are proved to be at fault."""
        now = RunNow(NowState(found["now"]["state"]), found["now"]["text"])
        goes_on = now.goes_on and not found["now"]["commands"]
        listed = read_version(self.stage.directory.exclusions)
        is_kept_out = all(listed.find(node) for node in found["attribution"]["blamed"])
        return goes_on and is_kept_out and action in {"resubmit", "exclude_and_resubmit"}

    def check_quotes(self, found: dict[str, Any]) -> None:
        """Each quoted line is in the file that is named, and is of the last launch."""
        beginning = f"tr11: attempt {self.attempt} launch {self.last_launch()} on "
        quoted = [*filter(None, [found["root_cause"]]), *found["evidence"], *found["consequences"]]
        for line in quoted:
            lines = Path(line["file"]).read_text().splitlines()
            assert line["text"] in lines[line["line_number"] - 1]
            if not line["file"].endswith(".json"):
                begins = [
                    number for number, text in enumerate(lines, 1) if text.startswith(beginning)
                ]
                assert begins[-1:] < [line["line_number"]], line


def test_each_fault_is_told_by_its_own_launch(stage: SmallRun, capsys: Capture) -> None:
    stage.launch(12, *SLOW)
    case = Case(stage, capsys)

    hung = case.with_debris()[1]
    inject(stage.twin, "worker-stop", node=hung)
    stage.wait_for_verdict(case.attempt)
    heal(stage.twin)
    case.is_told("nccl_timeout", "resubmit", "unknown", hung, words="no word from")

    dead = case.with_debris()[1]
    inject(stage.twin, "node-dead", node=dead)
    stage.wait_for_verdict(case.attempt)
    case.is_told("slurm_node_fail", "exclude_and_resubmit", "node", dead)
    heal(stage.twin)

    host = case.with_debris()[0]
    inject(stage.twin, "batch-host-dead", node=host)
    stage.wait(lambda: host not in stage.running().nodes, "Slurm's notice")
    case.is_told(
        "slurm_node_fail",
        "exclude_and_resubmit",
        "node",
        host,
        words="which ran the batch script",
        of_run=True,
    )
    stage.slurm.cancel(case.attempt)  # as a person does
    stage.wait(case.is_over, "the end of the job")
    case.is_told(
        "slurm_node_fail", "exclude_and_resubmit", "node", host, words="which ran the batch script"
    )
    heal(stage.twin)

    nodes = case.with_debris()
    if not mounts(stage, "disk-full"):
        return
    inject(stage.twin, "worker-crash", node=nodes[1])
    case.wait_for_hold()
    heal(stage.twin)
    case.is_told("storage", "fix_storage", "storage", of_run=True)
    case.resume()

    case.with_debris()
    inject(stage.twin, "bad-sample", path=str(stage.paths.root))
    stage.wait(case.held, "the hold")
    case.attempt = stage.attempts()[-1]
    case.wait_for_hold()
    case.is_told(
        "user_code", "fix_config", "software", words="software or data, not the nodes", of_run=True
    )


def test_a_run_directory_that_is_not_mounted_is_told_as_storage(
    stage: SmallRun, capsys: Capture
) -> None:
    """The last save meets it: no record of the launch can be written, and what its workers have
    said is all there is.
    """
    stage.launch(4, *SLOW)
    case = Case(stage, capsys)
    case.with_debris()
    if not mounts(stage, "unmounted"):
        return
    stage.wait(case.is_over, "the end of the job")
    stage.clear()
    heal(stage.twin)
    case.is_told("storage", "fix_storage", "storage", of_run=True)


def mounts(stage: SmallRun, fault: str) -> bool:
    """Lay this fault over the run directory; False where that is not allowed here."""
    try:
        inject(stage.twin, fault, path=str(stage.paths.root))
    except TwinError as error:
        assert "needs the right to mount" in str(error)
        return False
    return True


# ---------------------------------------------------------------------------
# `tr11 stacks` on real Slurm: one rank of eight nodes is stopped, and one node cannot be
# reached.


NODES_STACKS = 8
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
        TwinPlan(name="stacks", nodes=NODES_STACKS, gpus=8, cpu_nodes=0, message_timeout_seconds=5),
        twin_home,
    ) as made:
        yield made
        assert not [healing.error for healing in heal(made) if healing.error]


def test_the_stopped_rank_of_eight_nodes_is_named(
    stacks_twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Operation(stacks_twin, tmp_path, nodes=NODES_STACKS, spares=0, changes=CHANGES)
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
            keep_stacks, run.paths, job.raw_id, job.nodes, NODES_STACKS, environment, time.time()
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
