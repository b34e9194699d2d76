"""Soaks on a real Slurm: the faults of a scenario, one after another, under a rehearsal that runs to its
end; and an hour of a clean run that is watched.

Without a scenario (TR11_SCENARIO, a file) one is drawn: TR11_FAULTS sets how many faults (200, an hour),
TR11_FAULT_SEED the draw. It is printed, and can be given again.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.excluding import exclude
from tests.plugins.twin_fixture import require_slurm
from tests.tr11ops.launch.run_inputs import write_dataset
from tests.twin.fault_judge import FaultJudge, InnocenceJudge
from tests.twin.fault_scenario import FaultScenario, drawn_scenario, read_scenario
from tests.twin.operation import Operation
from tr11ops.rundir.exclusion import NodeStanding
from tr11ops.rundir.exclusions import AUTOMATIC_OWNER, include
from tr11ops.rundir.paths import RunDirectory
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from trainer.contract.paths import RunPaths

GIVEN = os.environ.get("TR11_SCENARIO")
FAULTS = int(os.environ.get("TR11_FAULTS", "200"))
# As many as may go by from one fault to the next on a busy machine: none comes after the end.
STEPS_PER_FAULT, BATCH = (3000, 60)
STEPS_AFTER = 150  # the last one
PLAN = TwinPlan(
    name="soakfaults", nodes=12, gpus=8, cpu_nodes=0, slurmd_timeout_seconds=5, kill_wait_seconds=2,
    message_timeout_seconds=5,
)  # fmt: skip


def asked_scenario() -> FaultScenario:
    """The one of TR11_SCENARIO, or one that is drawn."""
    if GIVEN:
        return read_scenario(Path(GIVEN))
    seed = int(os.environ.get("TR11_FAULT_SEED") or random.randrange(10**6))
    return drawn_scenario(seed, FAULTS)


def shorten(run: Operation, steps: int) -> None:
    """Have the training end after so many steps, as a person does who needs no more of it."""
    run.overrides += [
        f"batch.train_samples={steps * BATCH}",
        f"schedule.decay_samples={steps * BATCH}",
    ]
    reason = ("--yes", "--reason", "the faults are over")
    run.tr11("launch", "--replace", "--yes")
    run.tr11("kill", "--wait", *reason)
    run.tr11("resume", *reason)


@pytest.mark.soak
@pytest.mark.timeout(FAULTS * 120 + 900)
def test_the_faults_of_a_scenario_under_a_rehearsal(
    twin_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_slurm()
    scenario = asked_scenario()
    kept = tmp_path / f"{scenario.name}.toml"
    kept.write_text(scenario.toml())
    count = len(scenario.events)
    longest = count * STEPS_PER_FAULT * BATCH
    check_fails = tmp_path / "check-fails"
    check = tmp_path / "check"
    check.write_text(
        f"#!/bin/sh\n[ ! -e {check_fails} ] || {{ echo 'the check has lost its tool'; exit 1; }}\n"
    )
    check.chmod(0o755)
    changes = (
        f"batch.train_samples={longest}", f"schedule.decay_samples={longest}", "schedule.warmup_samples=600",
        "rehearsal.collective_seconds=10", "resilience.launches_per_attempt=1000",
        f'resilience.check_scripts=["{check}"]', f"rehearsal.time_scale={scenario.time_scale:g}", *scenario.changes,
    )  # fmt: skip
    with capsys.disabled():
        print(f"\n# make chaos TR11_SCENARIO={kept}\n{scenario.toml()}", flush=True)
    with Twin.up(PLAN, twin_home) as twin:
        run = Operation(twin, tmp_path, nodes=4, spares=2, changes=changes)
        run.launch("--array", f"1-{2 * count + 20}")
        judge = FaultJudge(twin, run, check_fails)
        run.until_step(3)
        began = time.monotonic()
        try:
            for number, event in enumerate(scenario.events, 1):
                before = len(judge.done)
                judge.play(event)
                told = json.dumps(judge.done[before:] or "could not be made")
                with capsys.disabled():
                    print(f"{number}/{count} {told} {judge.wrong}", flush=True)
            seconds = time.monotonic() - began
            steps = judge.iteration() + STEPS_AFTER
            shorten(run, steps)
            run.until(
                lambda: any(end.reason == "finished" for end in run.ends()),
                "the end of the training",
            )
            judge.check_the_rest()
            judge.check_chain(BATCH)
            again = judge.check_resumes()
            figures = {
                "scenario": scenario.name, "faults": len(judge.done), "kinds": dict(Counter(one["kind"] for one in judge.done)),
                "seconds": round(seconds), "seconds_per_fault": round(seconds / max(1, len(judge.done)), 1),
                "launches": len(run.launches()),
                "tasks": len(run.attempts()), "asked_a_person": judge.resumed, "miscounted_arrays": judge.replaced, "zombies": judge.zombies,
                "most_steps_done_again": again, "innocents_avoided": judge.innocence.avoided, "wrong": judge.wrong,
            }  # fmt: skip
            with capsys.disabled():
                print(f"\nfaults of {scenario.name}: {json.dumps(figures)}")
            assert not judge.wrong
            assert run.ends()[-1].iteration == steps
        except BaseException as error:
            error.add_note(f"again: make chaos TR11_SCENARIO={kept}; wrong so far: {judge.wrong}")
            raise


# ---------------------------------------------------------------------------
# A clean run that is watched for an hour, a pulse a minute: no alert, no action, one line for
# each job of the queue.
#
# TR11_SOAK_SECONDS sets another length, TR11_SOAK_INTERVAL_SECONDS the time between two pulses.


LENGTH_SECONDS = float(os.environ.get("TR11_SOAK_SECONDS", "3600"))
INTERVAL_SECONDS = float(os.environ.get("TR11_SOAK_INTERVAL_SECONDS", "60"))


@pytest.mark.soak
@pytest.mark.timeout(int(LENGTH_SECONDS) + 900)
def test_an_hour_of_a_healthy_run_raises_no_alert(twin_home: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "rehearsal-run" / "data" / "none_text_document")
    # attempts of 25 minutes each: several ends and starts are in an hour
    changes = ("checkpoint.interval=200",)
    with Twin.up(TwinPlan(name="soak", nodes=4, gpus=8), twin_home) as twin:
        run = Operation(twin, tmp_path, 3, 1, changes)
        number = run.launch("--array", "1-8")
        run.until_step(3)
        bad: list[str] = []
        looks = 0
        until = time.monotonic() + LENGTH_SECONDS
        while time.monotonic() < until:
            began = time.monotonic()
            looks += 1
            done = run.tr11("pulse", "--act", "--json", expect=None)
            value = json.loads(done.stdout)
            clean = (
                value["state"] in {"running", "starting", "queued"}
                and not value["actions"] + value["withheld"]
            )
            if (
                done.returncode
                or not clean
                or value["alerts"]["open"]
                or value["alerts"]["messages"]
            ):
                bad.append(
                    f"{value['time']}: {value['state']}, {value['why']}; {value['findings']}; {value['lines']}"
                )
            time.sleep(max(0.0, INTERVAL_SECONDS - (time.monotonic() - began)))
        try:
            assert not bad, "\n".join(bad)
            pulses = [line for line in run.log().splitlines() if " PULSE: " in line]
            assert looks <= len(pulses) <= 2 * looks and not any("ALERT" in line for line in pulses)
            assert list((run.paths.root / "journal").glob("*.jsonl")), "the launch is on record"
        finally:
            run.slurm.cancel(number)


# ---------------------------------------------------------------------------
# The judge of the random faults: an innocent node that was excluded and taken back before
# anyone looked is told.


GUILTY = {"x01"}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(
        RunPaths(tmp_path / "run", "tr11", "main"), tmp_path / "run" / "kill-switch"
    )


def exclude_by_tr11(
    directory: RunDirectory, node: str, state: NodeStanding = NodeStanding.EXCLUDE
) -> None:
    assert exclude(directory, node, why="it was seen", owner=AUTOMATIC_OWNER, days=14, state=state)


def take_back(directory: RunDirectory, node: str) -> None:
    assert include(directory, node, why="it was another", owner=AUTOMATIC_OWNER)


def test_an_innocent_node_that_was_excluded_for_a_while_is_found(directory: RunDirectory) -> None:
    judge = InnocenceJudge(directory.exclusions)
    assert judge.excluded(GUILTY) == []
    exclude_by_tr11(directory, "x01")
    exclude_by_tr11(directory, "x02")
    take_back(directory, "x02")
    exclude(directory, "x03", why="a person wants it so", owner="anna", days=None)
    assert judge.excluded(GUILTY) == ["x02"]
    assert judge.excluded(GUILTY) == []  # told once


def test_a_node_that_was_guilty_before_is_innocent_after_its_repair(
    directory: RunDirectory,
) -> None:
    judge = InnocenceJudge(directory.exclusions)
    exclude_by_tr11(directory, "x01")
    take_back(directory, "x01")
    assert judge.excluded(GUILTY) == []
    exclude_by_tr11(directory, "x01")
    assert judge.excluded(set()) == ["x01"]


def test_innocents_that_were_only_avoided_are_listed_each_time(directory: RunDirectory) -> None:
    judge = InnocenceJudge(directory.exclusions)
    for _ in range(2):
        exclude_by_tr11(directory, "x02", NodeStanding.AVOID)
        exclude_by_tr11(directory, "x01", NodeStanding.AVOID)
        exclude_by_tr11(directory, "x03", NodeStanding.SUSPECT)  # left out for one task
        assert judge.excluded(GUILTY) == []
        for node in ("x01", "x02", "x03"):
            take_back(directory, node)
    assert judge.excluded(GUILTY) == []
    assert judge.avoided == ["x02", "x03", "x02", "x03"]


def test_one_that_was_avoided_and_then_excluded_is_found(directory: RunDirectory) -> None:
    judge = InnocenceJudge(directory.exclusions)
    exclude_by_tr11(directory, "x02", NodeStanding.AVOID)
    assert judge.excluded(GUILTY) == []
    exclude_by_tr11(directory, "x02")
    take_back(directory, "x02")
    assert judge.excluded(GUILTY) == ["x02"]


def test_versions_that_nobody_judged_are_no_proof_of_innocence(directory: RunDirectory) -> None:
    judge = InnocenceJudge(directory.exclusions)
    for _ in range(40):
        exclude_by_tr11(directory, "x02")
        take_back(directory, "x02")
    with pytest.raises(AssertionError, match="were never judged"):
        judge.excluded(GUILTY)


def launch(number: int, *blamed: str, end: float | None = 10.0) -> dict[str, Any]:
    return {"job_id": "7", "launch": number, "end": end, "blamed": list(blamed)}


def test_launches_that_blame_an_innocent_are_found_once_though_nothing_is_on_the_list(
    directory: RunDirectory,
) -> None:
    judge = InnocenceJudge(directory.exclusions)
    ended, running = [launch(1, "x01", "x04")], launch(2, end=None)
    assert judge.blamed([*ended, running], GUILTY) == ["x04"]
    assert judge.blamed([*ended, launch(2, "x05")], GUILTY) == ["x05"]
    assert judge.blamed([*ended, launch(2, "x05")], GUILTY) == []
