"""How many of an allocation's nodes a launch takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.agent.allocation import Allocation, SchedulerKind
from tr11ops.agent.place import AttemptContext, AttemptObservations
from tr11ops.agent.step import LineTee
from tr11ops.runcard.card import load_card, shipped_folder

NODES = tuple(f"n{number}" for number in range(1, 6))


@pytest.mark.parametrize("kind", ["slurm", "local", "foreground"])
@pytest.mark.parametrize(("held", "needed"), [(5, 4), (4, 4)])
def test_spare_nodes_do_not_train(tmp_path: Path, kind: SchedulerKind, held: int, needed: int) -> None:
    card = load_card(shipped_folder() / "demo.toml", [f"run.directory={tmp_path}", "slurm.spare_nodes=1"], {})
    place = AttemptContext(card, Allocation(kind, "7", None, None, NODES[:held]), {}, "t")
    assert AttemptObservations(place, LineTee(tmp_path / "log.txt")).situation().needed == needed
