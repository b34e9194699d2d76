"""Which partition the small jobs of a chain run in: never one in which they wait behind the
training, unasked.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.cron.cards import card
from tr11ops.base.errors import NoPartition
from tr11ops.cluster.base import Node, Partition
from tr11ops.cron.chain import choose_placement

GPU = Partition("gpu_p5", None, ("g1",), is_default=True)
FREE, SHORT = Partition("prepost", None, ("c1",)), Partition("a_short", 600, ("c1",))
DOWN = Partition("a_down", None, ("c1",), is_up=False)
SHARED = Partition("cpu_all", None, ("c1", "c2"))
IDLE = frozenset({"idle"})
NODES = (
    Node("g1", IDLE, gpus=8),
    Node("c1", IDLE, memory_megabytes=4096),
    Node("c2", IDLE, memory_megabytes=1),
)


@pytest.mark.parametrize(
    ("changes", "partitions", "expected"),
    [
        ((), (GPU, SHORT, DOWN, FREE), ("prepost", 2048, False)),
        ((), (GPU, SHARED), ("cpu_all", None, False)),  # a node whose memory no one configured
        (("slurm.partition=prepost",), (GPU, FREE, SHARED), ("cpu_all", None, True)),
        (("cron.partition=gpu_p5",), (GPU, FREE), ("gpu_p5", None, False)),
        ((), (replace(FREE, is_default=True),), ("prepost", 2048, True)),
    ],
)
def test_a_chain_runs_beside_the_training(
    tmp_path: Path,
    changes: tuple[str, ...],
    partitions: tuple[Partition, ...],
    expected: tuple[str, int | None, bool],
) -> None:
    found = choose_placement(card(tmp_path, *changes), partitions, NODES, 7200)
    assert (found.partition, found.memory_megabytes, bool(found.note)) == expected


def test_where_only_gpus_are_a_person_is_asked(tmp_path: Path) -> None:
    with pytest.raises(NoPartition, match=r"a_short, gpu_p5\).*--way crontab.*cron.partition=NAME"):
        choose_placement(card(tmp_path), (GPU, SHORT), NODES, 7200)
