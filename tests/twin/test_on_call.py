"""docs/how-to/on-call.md, typed block by block as it stands there, on a rehearsal of a real Slurm."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.twin.runbook_scene import CAPITALS, Scene, nodes_of, saved_now, submit
from tests.twin.runbook_shared_run import archived
from tr11ops.cluster.base import JobState
from tr11ops.handover.start import COMMANDS
from tr11ops.rundir.journal import read_journal
from tr11ops.twin.twin import Twin
from trainer.contract.checkpoint_names import read_latest
from trainer.contract.lease import trained_into

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "on-call.md").read_text(encoding="utf-8")
BLOCKS: dict[str, list[str]] = {
    title: re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}


@pytest.fixture
def scene(twin: Twin, tmp_path: Path) -> Iterator[Scene]:
    made = Scene(twin, tmp_path)
    yield made
    made.stop()


class Typist:
    """Types the page's blocks, and knows which were typed."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.typed: list[str] = []

    def type(self, title: str, number: int = 0, **words: str) -> str:
        block = BLOCKS[title][number]
        self.typed.append(block)
        for word, value in {"REASON": "as the page says", **words}.items():
            block = re.sub(rf"(?<![A-Z]){word}(?![A-Z])", value, block)
        left = CAPITALS.search(block)
        assert left is None, f"nothing was given for {left and left[0]} in\n{block}"
        return self.scene.shell(block)


def test_the_page_is_a_shift(scene: Scene) -> None:
    typist = Typist(scene)
    job = scene.train()
    theirs = submit(scene, "-N1", "--hold", "--job-name=of-another", "--wrap=sleep 600", ours=False)
    try:
        said = typist.type("Start of shift")
        assert said.startswith("# Start of shift: ") and "## Jobs of group root" in said
        assert f"- `{job.job_id}` of root: this run, RUNNING for " in said
        assert f"- `{theirs}` of root: of-another, PENDING (JobHeldUser), 1 node" in " ".join(
            said.split("\n")
        )
        assert not any(
            entry.kind == "handover" for entry in read_journal(scene.directory.journal).entries
        )
    finally:
        scene.slurm.cancel(theirs)
    typist.type("Start of shift", 1, NAME="oncall")
    assert "oncall@example.org" in scene.shell("tr11 alerts rota")
    typist.type("Five commands")
    typist.type("Five commands", 1)
    scene.train()

    spare = next(node for node in nodes_of(scene) if node not in scene.running().nodes)
    assert spare in typist.type("Leave a node out", NODE=spare)
    queued = [one for one in scene.jobs() if one.state is JobState.PENDING]
    assert queued and all(spare in one.excluded for one in queued)
    typist.type("Leave a node out", 1, NODE=spare)
    assert not any(spare in one.excluded for one in scene.jobs() if one.state is JobState.PENDING)

    first = saved_now(scene)
    archived(scene, first)
    scene.shell(f"tr11 backup run {first} --to store")
    assert saved_now(scene) > first
    began = time.time()
    typist.type("Roll back", STEP=str(first))
    scene.until(
        lambda: any(
            step["iteration"] == first + 1 and step["time"] > began for step in scene.steps()
        ),
        "the step after it, trained again",
    )

    scene.shell("tr11 kill --now --wait --yes")
    folder = scene.paths.checkpoints
    for path in list(folder.iterdir()):
        path.rename(scene.folder / f"lost-{path.name}")
    # killed before it could let go of its lease, a trainer counts as living for a few seconds
    scene.until(lambda: trained_into(folder, time.time()) == "", "the end of its lease")
    typist.type("Restore from a copy", STEP=str(first), FOLDER=str(folder))
    assert read_latest(folder) == first
    scene.shell("tr11 resume --yes")
    scene.train()

    scene.write_card("parallel.tensor=1", "parallel.pipeline=1", "slurm.nodes=4")
    typist.type("Change the topology")
    assert len(scene.train().nodes) == 4
    attempt = scene.paths.attempt(scene.running().raw_id)
    assert json.loads((attempt / "card.json").read_text())["parallel"]["pipeline"] == 1

    typist.type("Hand over")
    typist.type("Hand over", 1)
    assert (scene.folder / "handover.md").read_text().startswith("# Hand-over: ")
    assert any(entry.kind == "handover" for entry in read_journal(scene.directory.journal).entries)
    assert sorted(typist.typed) == sorted(block for blocks in BLOCKS.values() for block in blocks)


def test_the_page_has_the_commands_of_the_start() -> None:
    assert [words for words, _ in COMMANDS if f"| `tr11 {words}` |" not in PAGE] == []
