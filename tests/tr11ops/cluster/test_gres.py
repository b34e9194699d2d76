"""Generic resources as Slurm prints them of nodes, and as people ask for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tr11ops.cluster.sbatch_options import Gres, gpu_count, gpu_kind_of, gpus_of, parse_gres
from tr11ops.cluster.slurm_text import nodes_from_scontrol


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("(null)", 0),
        ("", 0),
        ("gpu:8", 8),
        ("gpu:a100:8(S:0-1)", 8),
        ("gpu:a100:4,gpu:v100:2,nic:1", 6),
        ("gpu:3090:8", 8),  # a kind of digits alone
        ("gpu:3090:8(S:0-1)", 8),
        ("gpu:1g.10gb:7", 7),  # MIG
        ("gpu:a100_3g.20gb:2(S:0),gpu:a100:6(S:1)", 8),
        ("gpu:1g.5gb:7(IDX:0-3,5,6),gpu:h100:1(IDX:7)", 8),
        ("gpu:tesla:no_consume:4", 4),
        ("gres/gpu:a100:8", 8),
        ("gres:gpu:8", 8),
        ("nic:2", 0),
        ("mps:400,shard:16,gpu:2", 2),
        ("gpu:a:b:c:4,gpu:2", 2),  # of a newer Slurm: not counted
    ],
)
def test_gpus_of_a_node(text: str, count: int) -> None:
    assert gpu_count(text) == count
    shown = f"NodeName=n1 CPUTot=8\n   Gres={text}\n   State=IDLE\n"
    assert [node.gpus for node in nodes_from_scontrol(shown)] == [count]


def test_entries_of_a_list() -> None:
    assert parse_gres("gpu:3090:8(S:0-1),craynetwork:4,gpu:h100,gpu:4") == (
        Gres("gpu", "3090", 8), Gres("craynetwork", "", 4), Gres("gpu", "h100"), Gres("gpu", "", 4),
    )  # fmt: skip
    for text in (":8", "gpu:", "gpu:a:b", "gpu::8"):
        with pytest.raises(ValueError, match="is no generic resource"):
            parse_gres(text)


@pytest.mark.parametrize(
    ("text", "count", "kind"),
    [
        ("gpu:3090:8", 8, "3090"), ("gpu:1g.10gb:7", 7, "1g.10gb"), ("gpu:a100", 1, "a100"), ("gpu", 1, ""),
        ("gpu:8,nvme:1", 8, ""), ("gpu:a100:4,gpu:v100:4", 8, ""), ("nvme:1", None, ""), ("gpu:a:b", None, ""),
    ],
)  # fmt: skip
def test_gpus_that_are_asked_for_are_read_by_the_same_rule(
    text: str, count: int | None, kind: str
) -> None:
    assert (gpus_of(text), gpu_kind_of(text)) == (count, kind)


@given(st.text(alphabet="gpu:,()0123456789abSIDX-._/ \n", max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    assert gpu_count(text) >= 0
