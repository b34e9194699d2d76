"""The faults that runbooks treat: how one is registered, and what several of them need."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from tests.twin.runbook_scene import Scene
from tests.twin.small_run import recorded_comment
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.record import Record

DAY = 86400.0


class Scenario(Record):
    """How one fault comes about. `is_alone`: in a run of its own; else in the run that most share,
    which goes on.
    """

    detectors: tuple[str, ...]
    play: Callable[[Scene], None]
    changes: tuple[str, ...]
    is_alone: bool


SCENARIOS: list[Scenario] = []
MAIL_SCENARIOS: list[
    Scenario
] = []  # of faults whose page says more than the one cure that their mail has


def scenario(
    *detectors: str, card: tuple[str, ...] = (), alone: bool = False
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Registers the fault that these detectors find; `card` are changes of the run card."""

    def register(play: Callable[[Scene], None]) -> Callable[[Scene], None]:
        SCENARIOS.append(Scenario(detectors, play, card, alone))
        return play

    return register


def mail_scenario(
    *detectors: str, card: tuple[str, ...] = ()
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """Registers a fault, in a run of its own, that is cured by its mail alone."""

    def register(play: Callable[[Scene], None]) -> Callable[[Scene], None]:
        MAIL_SCENARIOS.append(Scenario(detectors, play, card, is_alone=True))
        return play

    return register


def submit(scene: Scene, *words: str, ours: bool = True) -> str:
    """A job with the run's name; `ours`: as if `tr11 launch` had queued it."""
    comment = [f"--comment={recorded_comment(scene.directory)}"] if ours else []
    common = [
        f"--job-name={scene.paths.name}",
        "--partition=gpu_p5",
        "--time=10",
        "--output=/dev/null",
    ]
    return subprocess.run(
        ["sbatch", "--parsable", *common, *comment, *words],
        capture_output=True, text=True, check=True, env=scene.environment, cwd=scene.folder,
    ).stdout.strip()  # fmt: skip


def nodes_of(scene: Scene) -> list[str]:
    return sorted(node.name for node in scene.slurm.nodes() if "gpu_p5" in node.partitions)


def set_node(scene: Scene, node: str, state: str, expect: tuple[int, ...] = (0,)) -> None:
    scene.shell(f"scontrol update NodeName={node} State={state} Reason='someone else'", expect)


def saved_now(scene: Scene) -> int:
    """The step of a checkpoint that is made now."""
    scene.train()
    scene.shell("tr11 checkpoint-now --wait --yes")
    newest = read_latest(scene.paths.checkpoints)
    assert newest is not None
    return newest
