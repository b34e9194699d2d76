"""Options of sbatch that the card passes through: which may be, what becomes of GPUs, and which job takes
which; generic resources as people ask for them and as Slurm prints them of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.sbatch_options import (
    TAKEN,
    Gres,
    gpu_count,
    gpu_fault,
    gpu_kind_of,
    gpus_of,
    memory_megabytes,
    of_any_job,
    of_chosen_nodes,
    option_fault,
    options_of,
    parse_gres,
    sbatch_options,
    script_options,
    segment_fault,
    with_gpus,
)
from tr11ops.cluster.slurm_text import nodes_from_scontrol

CARD = options_of(
    {
        "licenses": "scratch:1",
        "exclusive": True,
        "switches": "1@10:00",
        "mem": "500G",
        "nice": 5,
        "reboot": False,
    }
)


def request(**changes: object) -> BatchRequest:
    return BatchRequest(**{"script": "", "name": "r", "nodes": 2, "time_limit_seconds": 60, "output": "o",
                           "working_directory": Path("/"), **changes})  # type: ignore[arg-type]  # fmt: skip


def test_they_are_rendered_with_tr11s_own() -> None:
    rendered = sbatch_options(request(options=CARD, gpus_per_node=8))
    assert [word for word in rendered if word.partition("=")[0][2:] in {*dict(CARD), "gres", "reboot"}] == [
        "--gres=gpu:8", "--licenses=scratch:1", "--exclusive", "--switches=1@10:00", "--mem=500G", "--nice=5",
    ]  # fmt: skip
    assert "--mem=100M" in sbatch_options(request(options=CARD, memory_megabytes=100))
    assert "--mem=500G" not in sbatch_options(request(options=CARD, memory_megabytes=100))
    assert '--extra="a b=c"' in script_options(request(options=(("extra", "a b=c"),)))
    assert "--exclusive" in script_options(request(options=CARD))


@pytest.mark.parametrize(
    ("options", "gpus", "rendered"),
    [
        ({"gres": "gpu:a100:8"}, 8, {"gres": "gpu:a100:8"}),
        ({"gres": "gpu:a100:8,nic:2"}, 4, {"gres": "gpu:a100:4,nic:2"}),
        ({"gres": "gpu:a100:8,nic:2"}, 0, {"gres": "nic:2"}),
        ({"gres": "nic:2"}, 8, {"gres": "gpu:8,nic:2"}),
        ({"gpus-per-node": "h100:8"}, 8, {"gpus-per-node": "h100:8"}),
        (
            {"gpus-per-node": "h100:8", "gres": "nic:1"},
            2,
            {"gpus-per-node": "h100:2", "gres": "nic:1"},
        ),
        ({"gres": "gpu:a100:4,gpu:v100:4"}, 8, {"gres": "gpu:a100:4,gpu:v100:4"}),
        ({}, 8, {"gres": "gpu:8"}),
        ({}, 0, {}),
    ],
)
def test_gpus_are_asked_for_once_and_of_the_kind_that_is_named(
    options: dict[str, str], gpus: int, rendered: dict[str, str]
) -> None:
    assert dict(with_gpus(options_of(options), gpus)) == rendered


@pytest.mark.parametrize("name", [*TAKEN, "part", "exclud", "n", "Licenses", "--mem", "core_spec"])
def test_what_tr11_sets_is_refused_in_every_form(name: str) -> None:
    assert option_fault(name, "1") is not None


@pytest.mark.parametrize(
    "name", ["exclusive", "mem", "time-min", "wait-all-nodes", "gres", "gpus-per-node", "segment"]
)
def test_all_else_is_passed_through(name: str) -> None:
    assert option_fault(name, "1") is None
    assert option_fault(name, "1\n#SBATCH --uid=0") is not None


@pytest.mark.parametrize(
    ("least", "most", "rule"),
    [
        (12, 12, ""),
        (10, 10, "does not divide the 10 nodes of the job"),
        (8, 12, "lets Slurm give 8 to 12 nodes"),
    ],
)
def test_segments_are_of_a_fixed_number_of_nodes(least: int, most: int, rule: str) -> None:
    fault = segment_fault(options_of({"segment": 4}), least, most)
    if rule:
        assert fault is not None and rule in fault[0]
    else:
        assert fault is None


def test_the_number_of_gpus_must_be_the_cards() -> None:
    assert gpu_fault(options_of({"gres": "gpu:a100:8"}), 8) is None
    assert gpu_fault(options_of({"gres": "nic:1"}), 8) is None
    assert gpu_fault(options_of({"gres": "gpu:a100:4"}), 8) == (
        "gres", "asks for 4 GPUs a node, slurm.gpus_per_node for 8", "make the two equal",
    )  # fmt: skip
    twice = gpu_fault(options_of({"gres": "gpu:8", "gpus-per-node": 8}), 8)
    assert twice is not None and twice[0] == "gpus-per-node"


def test_which_of_the_other_jobs_take_which() -> None:
    assert dict(of_chosen_nodes(CARD)) == {
        "licenses": "scratch:1",
        "exclusive": "",
        "mem": "500G",
        "nice": "5",
    }
    assert dict(of_any_job(CARD)) == {"licenses": "scratch:1", "nice": "5"}


@pytest.mark.parametrize(
    ("text", "found"), [("500G", 512_000), ("100", 100), ("0", 0), ("1T", 2**20), ("x", 0)]
)
def test_memory(text: str, found: int) -> None:
    assert memory_megabytes((("mem", text),)) == found


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
