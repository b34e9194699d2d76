"""What a node could give when all is well with it: GPUs, cores, memory and features against what is
asked.
"""

from __future__ import annotations

import pytest

from tr11ops.cluster.base import Node
from tr11ops.cluster.pending_reasons import Lack, NodeNeed, lacking

NODES = (
    Node("n1", frozenset({"idle"}), "", 64, 8, 500_000, ("p",), frozenset({"a100", "ib"})),
    Node("n2", frozenset({"down", "drain"}), "", 64, 8, 500_000, ("p",), frozenset({"a100"})),
    Node("n3", frozenset({"idle"}), "", 32, 4, 250_000, ("p",), frozenset({"v100", "ib"})),
)


@pytest.mark.parametrize(
    ("need", "found"),
    [
        (NodeNeed(), {}),
        (NodeNeed(8, 64, 500_000, "a100"), {"n3": Lack.GPUS}),
        (NodeNeed(4, 33), {"n3": Lack.CORES}),
        (NodeNeed(4, 32, 250_001), {"n3": Lack.MEMORY}),
        (NodeNeed(constraint="a100&ib"), {"n2": Lack.FEATURES, "n3": Lack.FEATURES}),
        (NodeNeed(constraint="a100|v100"), {}),
        (NodeNeed(constraint="[rack1|rack2]*2"), {}),  # not judged
    ],
)
def test_what_each_node_lacks_whatever_its_state(need: NodeNeed, found: dict[str, Lack]) -> None:
    assert lacking(need, NODES) == found


def test_what_a_node_does_not_tell_is_not_held_against_it() -> None:
    assert lacking(NodeNeed(0, 64, 1000, "a100"), [Node("n1", frozenset({"idle"}))]) == {}
