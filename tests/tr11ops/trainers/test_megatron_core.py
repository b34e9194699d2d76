"""A checkpoint that megatron-core itself has written is whole by the dialect, and one that it was
killed in is not.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tr11ops.trainers.folders import LATER, age
from tr11ops.dialects.dialect import dialect_named
from tr11ops.trainers.checkpoints import CheckpointSurvey, survey

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed"
)

# The library asks for a GPU in two places, to wait for it and to add up failures of nodes.
SAVE = """
import os, sys
import torch

def main(folder):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    meeting = f"file://{folder}.meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    os.makedirs(folder)
    weight = ShardedTensor.from_rank_offsets("model.weight", torch.ones(4, 4), (0, 0, 1))
    dist_checkpointing.save({"weight": weight, "iteration": 10}, folder)

if __name__ == "__main__":  # it starts processes that load this file
    main(sys.argv[1])
    os._exit(0)
"""
PARTS = {".metadata", "__0_0.distcp", "common.pt", "metadata.json"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a step, as megatron-core leaves it."""
    root = tmp_path_factory.mktemp("megatron")
    script = root / "save.py"
    script.write_text(SAVE, encoding="utf-8")
    folder = root / "iter_0000010"
    with (root / "output").open("wb") as output:
        saving = subprocess.Popen(
            [sys.executable, str(script), str(folder)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            assert saving.wait(timeout=300) == 0, (root / "output").read_text(encoding="utf-8")
        finally:
            os.killpg(saving.pid, signal.SIGKILL)  # its own workers outlive it
    return folder


def laid(root: Path, written: Path, step: int, *without: str) -> None:
    folder = shutil.copytree(written, root / f"iter_{step:07d}")
    for name in without:
        (folder / name).unlink()


def look(root: Path) -> CheckpointSurvey:
    rules = dialect_named("megatron").checkpoints
    assert rules is not None
    age(root)
    return survey(rules, root, 1, LATER)


def test_what_it_writes_is_whole_and_what_it_was_killed_in_is_not(
    tmp_path: Path, written: Path
) -> None:
    assert {path.name for path in written.iterdir()} == PARTS
    laid(tmp_path, written, 10)
    laid(tmp_path, written, 20, ".metadata", "metadata.json")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10", encoding="utf-8")
    found = look(tmp_path)
    assert {one.step: one.state for one in found.found} == {10: "whole", 20: "broken"}
    assert found.taken is not None and found.taken.step == 10
    assert found.wanted is not None and found.wanted.step == 10


def test_a_tracker_that_names_a_step_it_was_killed_in_is_a_conflict(
    tmp_path: Path, written: Path
) -> None:
    laid(tmp_path, written, 10)
    laid(tmp_path, written, 20, ".metadata", "metadata.json")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20", encoding="utf-8")
    found = look(tmp_path)
    assert "it would take iter_0000020" in found.conflict
    assert found.wanted is not None and found.wanted.step == 10
