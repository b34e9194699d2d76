"""What tr11 decides in a replay is what it decides on a real Slurm: the same faults at the same moments.

The recording that `tests/tr11ops/replay/test_recorded.py` replays was made here, with TR11_RECORD=FILE.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.tr11ops.replay.recorded import INSTANT_SECONDS, SHOWN, Course, Recording, usual
from tests.twin.fault_judge import MORE_STEPS, FaultJudge
from tests.twin.fault_scenario import read_scenario
from tests.twin.operation import Operation
from tests.twin.rehearsal_inputs import steps_of
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Message
from tr11ops.alerts.store import read_alert_state
from tr11ops.replay.traces import Fault, FaultSign
from tr11ops.rundir.journal import read_journal
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from trainer.contract.documents import document

SCENARIO = Path(__file__).parent / "scenarios" / "same-decisions.toml"
# no server takes a mail here: they stay where they are queued, and are read there
CHANGES = (
    "resilience.exclusion_cap_percent=50", 'alerts.recipients=["on-call@site.example"]', 'alerts.digest_time=""',
    'alerts.smtp_host="127.0.0.1"', "alerts.smtp_port=9", "checkpoint.interval=20",
)  # fmt: skip
PERSON_SECONDS = 10.0  # until someone does what a mail asks for
PLAN = TwinPlan(
    name="samedecisions", nodes=12, gpus=8, cpu_nodes=0, slurmd_timeout_seconds=5, kill_wait_seconds=2,
    message_timeout_seconds=5,
)  # fmt: skip


@dataclass
class Recorder(FaultJudge):
    """Plays a scenario, and lets no person take back what tr11 has decided. The watchdog looks after each
    event, and while everything is held; only then a person heals what is broken, and lets go what is held.
    """

    looks: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)

    def _include(self, node: str) -> None:
        """No one does."""

    def _heal(self) -> None:
        if self._is_held():
            time.sleep(PERSON_SECONDS)
            self.look()
        super()._heal()

    def _let_go(self) -> None:
        self.released.append(time.time())
        super()._let_go()

    def look(self) -> None:
        """One pass of the watchdog, once Slurm has every node that is well."""
        self.until(self._are_nodes_back, "the nodes that are healed are back")
        self.run.tr11("pulse", "--act", expect=None)
        looked = read_alert_state(self.directory).alert_state.looked
        assert looked is not None
        self.looks.append(looked)

    def _are_nodes_back(self) -> bool:
        return all(node.is_usable for node in self.run.slurm.nodes())

    def mails(self) -> Iterator[Message]:
        """What people were to read, in order."""
        for entry in waiting_entries(self.directory):
            yield entry.message


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
            recorder.look()
        recorder.trains_beyond(recorder.iteration() + MORE_STEPS)
        recorder.look()
        recording = recorded(twin, run, recorder)
    kept = os.environ.get("TR11_RECORD")
    if kept:
        Path(kept).write_text(json.dumps(document(recording), indent=1) + "\n")
    assert len(recording.course.decisions) >= len(recording.faults)
    folder = tmp_path / "replay"
    folder.mkdir()
    assert recording.replayed(folder) == recording.course


def recorded(twin: Twin, run: Operation, recorder: Recorder) -> Recording:
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
        looks=tuple(round(moment - began, 2) for moment in recorder.looks),
        released=tuple(round(moment - began, 2) for moment in recorder.released),
        course=Course.of(entries, recorder.mails()),
        past_save=_past_save(run),
    )


def _faults(run: Operation, began: float) -> list[Fault]:
    times = run.fault_times()
    healed = {one["identity"]: one["time"] for one in times if one["event"] == "healed"}
    return [
        Fault(
            "" if SHOWN[one["kind"]] is FaultSign.DATA else one["target"],
            start=round(_begins(run, one) - began, 2),
            end=round(healed.get(one["identity"], one["time"] + INSTANT_SECONDS) - began, 2),
            kind=SHOWN[one["kind"]],
            what=one["kind"],
        )
        for one in times
        if one["event"] == "broken"
    ]


def _past_save(run: Operation) -> int | None:
    """Steps from the last checkpoint to the data of which a worker died, where there were such."""
    begins = [_begins(run, one) for one in run.fault_times() if _is_of_data(one)]
    ended = (launch for launch in run.launches() if launch["first_sign"] in begins)
    return next((one["iteration_after"] - one["checkpoint_after"] for one in ended), None)


def _is_of_data(broken: Mapping[str, Any]) -> bool:
    return broken["event"] == "broken" and SHOWN[broken["kind"]] is FaultSign.DATA


def _begins(run: Operation, broken: Mapping[str, Any]) -> float:
    """When it first did harm: bad data, with the first launch that comes to them."""
    moment: float = broken["time"]
    if SHOWN[broken["kind"]] is not FaultSign.DATA:
        return moment
    ended = (launch for launch in run.launches() if launch["end"])
    signs = (float(launch["first_sign"] or launch["end"]) for launch in ended)
    return min(sign for sign in signs if sign > moment)
