"""Faults of nodes and clocks, and of the training's numbers."""

from __future__ import annotations

import json
import time
from unittest.mock import patch

from tests.twin.runbook_scenarios import DAY, nodes_of, saved_now, scenario
from tests.twin.runbook_scene import Scene
from tr11ops.rundir.exclusions import exclude, read_version
from tr11ops.twin.faults import inject
from trainer.contract.files import append_line, write_json


@scenario("exclusion-cap", card=("resilience.exclusion_cap_percent=20",))
def exclusion_cap(scene: Scene) -> None:
    node = free_node(scene)
    # what a person just did is left alone
    assert exclude(scene.directory, node, why="a doubt", owner="tr11", days=14)
    if scene.by_mail:  # what one more may be is no mail
        assert exclude(
            scene.directory, free_node(scene, but=node), why="a doubt", owner="tr11", days=14
        )
    scene.treat("exclusion-cap", NODE=node)


@scenario("exclusion-due")
def exclusion_due(scene: Scene) -> None:
    node = free_node(scene)
    with patch("tr11ops.rundir.exclusions.time.time", return_value=time.time() - 20 * DAY):
        assert exclude(scene.directory, node, why="a doubt", owner="tr11", days=14)
    scene.treat("exclusion-due")


def free_node(scene: Scene, but: str = "") -> str:
    job = scene.train()
    return next(node for node in nodes_of(scene) if node not in {*job.nodes, but})


@scenario("check-failing", alone=True, card=("resilience.check_scripts=['../fans.sh']",))
def check_failing(scene: Scene) -> None:
    """A script of the site's breaks, and is repaired."""
    script = scene.folder.parent / "fans.sh"
    script.write_text("#!/bin/sh\necho 'no answer from the fans'\nexit 1\n")
    script.chmod(0o755)
    scene.train()
    assert not read_version(scene.directory.exclusions).exclusions
    scene.until(lambda: "check-failing" in scene.findings(), "the finding")
    script.write_text("#!/bin/sh\nexit 0\n")
    scene.treat("check-failing")
    scene.train()


@scenario("log-not-growing")
def log_not_growing(scene: Scene) -> None:
    """The log was replaced under the run's controller, as by an editor: what it writes goes to a
    file without name.
    """
    scene.train()
    log = scene.paths.main_log
    text = log.read_bytes()
    log.unlink()
    log.write_bytes(text)
    scene.touch(log, 900)
    scene.treat("log-not-growing")


@scenario("clock-skew")
def clock_skew(scene: Scene) -> None:
    last = scene.train().nodes[-1]
    inject(scene.twin, "clock-ahead", node=last)
    scene.treat("clock-skew", NODE=last)
    assert last not in scene.train().nodes


@scenario("silent-corruption")
def silent_corruption(scene: Scene) -> None:
    """A check of the arithmetic has found a worker that differs from itself."""
    job = scene.train()
    last = job.nodes[-1]
    record = scene.paths.corruptions / f"{job.raw_id}-1-2.json"
    suspect = {"rank": 3, "host": last, "gpu": "GPU 3", "how": "repeat"}
    write_json(
        record,
        {
            "time": time.time(),
            "job_id": job.raw_id,
            "launch": 1,
            "iteration": 2,
            "suspects": [suspect],
        },
    )
    scene.treat("silent-corruption", NODE=last)
    assert last not in scene.train().nodes
    record.unlink()


# --------------------------------------------------------------------------- the training's numbers
@scenario("loss-not-finite", "loss-spike", "gradient-norm")
def wild_numbers(scene: Scene) -> None:
    """Some data are poison: the training stays wild on every launch that does not pass over them."""
    before = saved_now(scene)
    job = scene.train(steps=12)
    first = int(
        inject(scene.twin, "loss-spike", path=str(scene.paths.root)).fault.details["iteration"]
    )
    scene.train(steps=8)
    assert saved_now(scene) > before
    words = {"STEP": str(before), "FIRST": str(first)}
    scene.treat("loss-not-finite", "loss-spike", "gradient-norm", **words)

    def steps_after() -> list[int]:
        return [step["iteration"] for step in scene.steps() if step["job_id"] != job.raw_id]

    scene.until(steps_after, "steps of the next launch")
    assert steps_after()[0] <= first


@scenario("validation-loss-rises", card=("evaluation.iterations=1",))
def evaluations_rise(scene: Scene) -> None:
    """Each evaluation since the newest checkpoint was worse than the one before."""
    before = saved_now(scene)
    scene.train(steps=8)
    now = scene.steps()[-1]
    for place, iteration in enumerate(range(before + 1, before + 4)):
        line = {
            "kind": "validation",
            "name": "valid",
            "iteration": iteration,
            "lm_loss": 2.0 + place,
        }
        append_line(
            scene.paths.metrics, json.dumps({**line, "time": now["time"], "job_id": now["job_id"]})
        )
    scene.treat("validation-loss-rises", STEP=str(before), FIRST=str(before + 1))
    scene.train()
    assert "validation-loss-rises" not in scene.findings(), "what was rolled back does not count"


# a jump shows in fifty lines: with steps of two seconds no load lets them pass before the mail
@scenario("counters-jump", card=("rehearsal.step_seconds=200",))
def counters_jump(scene: Scene) -> None:
    """The run goes on with another learning rate."""
    scene.train(steps=3)
    scene.shell("tr11 kill --wait --yes")
    scene.stop()
    scene.shell("tr11 kill --release --yes")
    scene.launch(
        "--array", "1-2", "--set schedule.learning_rate=1e-3 --set schedule.on_resume=override"
    )
    scene.treat("counters-jump")
    assert json.loads(scene.status("--json"))["verdict"] == "stopped"
