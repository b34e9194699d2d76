"""A clean run that is watched for an hour, a pulse a minute: no alert, no action, one line for each
job of the queue.

TR11_SOAK_SECONDS sets another length, TR11_SOAK_INTERVAL_SECONDS the time between two pulses.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.tr11ops.launch.run_inputs import write_dataset
from tests.twin.operation import Operation
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

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
