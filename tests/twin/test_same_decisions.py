"""What tr11 decides in a replay is what it decides on a real Slurm: the same faults at the same moments.

The recording that `tests/tr11ops/replay/test_recorded.py` replays was made here, with TR11_RECORD=FILE.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.tr11ops.replay.recorded import INSTANT_SECONDS, SHOWN, Recording, decisions, usual
from tests.twin.fault_judge import FaultJudge
from tests.twin.fault_scenario import read_scenario
from tests.twin.operation import Operation
from tests.twin.rehearsal_inputs import steps_of
from tr11ops.replay.traces import Fault
from tr11ops.rundir.journal import read_journal
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from trainer.contract.documents import document

SCENARIO = Path(__file__).parent / "scenarios" / "same-decisions.toml"
CHANGES = ("resilience.exclusion_cap_percent=50",)
PLAN = TwinPlan(
    name="samedecisions", nodes=12, gpus=8, cpu_nodes=0, slurmd_timeout_seconds=5, kill_wait_seconds=2,
    message_timeout_seconds=5,
)  # fmt: skip


class Recorder(FaultJudge):
    """Plays a scenario, and lets no person take back what tr11 has decided."""

    def _include(self, node: str) -> None:
        """No one does."""


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_twin_and_the_replay_decide_the_same(twin_home: Path, tmp_path: Path) -> None:
    require_slurm()
    scenario = read_scenario(SCENARIO)
    with Twin.up(PLAN, twin_home) as twin:
        run = Operation(twin, tmp_path, scenario.nodes, scenario.spares, CHANGES)
        run.launch("--array", "1-9")
        run.until_step(3)
        recorder = Recorder(twin, run, tmp_path / "check-fails")
        for event in scenario.events:
            recorder.play(event)
        recording = recorded(twin, run)
    kept = os.environ.get("TR11_RECORD")
    if kept:
        Path(kept).write_text(json.dumps(document(recording), indent=1) + "\n")
    assert len(recording.decisions) >= len(recording.faults)
    folder = tmp_path / "replay"
    folder.mkdir()
    assert recording.replayed(folder) == recording.decisions


def recorded(twin: Twin, run: Operation) -> Recording:
    """What a run of which nothing is expected any more has left."""
    launches, steps = run.launches(), steps_of(run.paths)
    began = launches[0]["start"]
    first_steps = [
        min((step["time"] for step in steps if step["time"] > launch["start"]), default=0.0)
        - launch["start"]
        for launch in launches
    ]
    entries = read_journal(run.paths.root / "journal").entries
    return Recording(
        twin.plan.gpu_node_names,
        train=run.nodes,
        held=run.spares,
        step=usual(step["seconds_per_iteration"] for step in steps),
        start_up=usual(first_steps),
        interval=run.card.checkpoint.interval,
        lost_after=PLAN.slurmd_timeout_seconds,
        changes=CHANGES,
        faults=tuple(_faults(run, began)),
        decisions=tuple(decisions(entries)),
    )


def _faults(run: Operation, began: float) -> list[Fault]:
    times = run.fault_times()
    healed = {one["identity"]: one["time"] for one in times if one["event"] == "healed"}
    return [
        Fault(
            one["target"],
            start=round(one["time"] - began, 2),
            end=round(healed.get(one["identity"], one["time"] + INSTANT_SECONDS) - began, 2),
            kind=SHOWN[one["kind"]],
            what=one["kind"],
        )
        for one in times
        if one["event"] == "broken"
    ]
