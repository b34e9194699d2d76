"""Which node a text means: by rank, address or name, and none where it may be several."""

from __future__ import annotations

import pytest

from tr11ops.diagnose.attribution.names import NodeNames, unshared

NAMES = NodeNames(
    ("r6i1n0", "r6i1n1", "r6i1n10"),
    {0: "r6i1n0", 3: "r6i1n1"},
    {"10.148.3.13": "r6i1n1", "10.148.3.14": "r6i1n10", "fd00::2": "r6i1n0"},
)


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("RuntimeError: Connection closed by peer [10.148.3.13]:41264", "r6i1n1"),
        ("NCCL WARN socketProgressOpt: Call to recv from 10.148.3.14<53451> failed", "r6i1n10"),
        ("connect to [fd00::2]:29500 failed", "r6i1n0"),
        ("RankLost: no word from rank 3 on r6i1n1.cluster.local.", "r6i1n1"),
        ("no word from rank 3 within 30 s", "r6i1n1"),
        ("the client socket has failed to connect to R6I1N10:29500", "r6i1n10"),
        ("peers 10.148.3.13 and 10.148.3.14 are gone", None),
        ("version 10.148.3.13.1 of /r6i1n/libnccl.so", None),
        ("no word from rank 7", None),
        ("", None),
    ],
)
def test_a_text_names_one_node_or_none(text: str, node: str | None) -> None:
    assert NAMES.named_in(text) == node


def test_what_it_says_of_a_rank_counts_before_a_path() -> None:
    assert NAMES.named_in("no word from rank 3 (/scratch/r6i1n0/log)") == "r6i1n1"


def test_host_names_with_and_without_domain() -> None:
    assert NAMES.of_host("r6i1n1.jean-zay.idris.fr") == "r6i1n1"
    assert NodeNames(("a.x", "a.y")).of_host("a") is None  # it may be either
    assert NodeNames(("a.x", "a.y")).of_host("a.y") == "a.y"


def test_an_address_of_several_nodes_names_none() -> None:
    assert unshared({"n1": ["10.0.0.1", "172.17.0.1"], "n2": ["10.0.0.2", "172.17.0.1"]}) == {
        "10.0.0.1": "n1", "10.0.0.2": "n2",
    }  # fmt: skip
