"""`tr11 init`: a card from what the scheduler says, which loads, passes the doctor, and never overwrites."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.cluster.base import Node, Partition
from tr11ops.cluster.site import SiteRules
from tr11ops.launch.starter import Answers, example_tables, places, proposed_nodes, starter_tables, starter_text
from tr11ops.runcard import load_card, shipped_cards, shipped_folder

GPU = Partition("gpu", 20 * 3600, tuple(f"g{number}" for number in range(1, 9)), is_default=True)
CPU = Partition("cpu", None, tuple(f"c{number}" for number in range(1, 31)))
DOWN = Partition("big", None, ("b1",), is_up=False)
NODES = (
    *(Node(name, frozenset({"idle"}), cpus=40, gpus=4) for name in GPU.node_names),
    *(Node(name, frozenset({"idle"}), cpus=20) for name in CPU.node_names),
    Node("b1", frozenset({"idle"}), cpus=1, gpus=99),
)


def test_a_card_is_written_loads_and_passes_the_doctor(bench: LocalBench) -> None:
    known = ("--set", f"data.prefixes=['{bench.folder}/data/corpus']",
             "--set", f"tokenizer.path={bench.folder}/data/tokenizer", "--set", "model.sequence_length=16")  # fmt: skip
    answer = bench.tr11("init", "--scheduler", "local", "--yes", *known)
    assert answer.code == 0 and "written: tr11.toml" in answer.err, answer.err
    text = (bench.folder / "tr11.toml").read_text()
    assert all("#" in line for line in text.split("[slurm]")[1].splitlines() if line.startswith("nodes"))
    doctor = bench.tr11("doctor", "--scheduler", "local")
    assert doctor.code == 0, doctor.err
    again = bench.tr11("init", "--scheduler", "local", "--yes")
    assert again.code == 1 and "tr11.toml is there: nothing was written" in again.err
    assert (bench.folder / "tr11.toml").read_text() == text
    assert bench.tr11("init", "--scheduler", "local", "--yes", "--force", "--set", "run.name=other").code == 0
    assert load_card(bench.folder / "tr11.toml").run.name == "other"


def test_what_a_rehearsal_leaves_behind_is_said(bench: LocalBench) -> None:
    words = ("init", "--scheduler", "local", "--yes", "--set", "model.sequence_length=16")
    answer = bench.tr11(*words, "--from", "rehearsal", "-o", "copy.toml")
    assert answer.code == 0 and "[rehearsal] of rehearsal.toml is left out: this card trains" in answer.err
    assert "\n[rehearsal]" not in (bench.folder / "copy.toml").read_text()
    assert "[rehearsal]" not in bench.tr11(*words).err


def test_nobody_to_ask_and_wrong_answers(bench: LocalBench) -> None:
    words = ("init", "--scheduler", "local")
    assert "add --yes" in bench.tr11(*words).err
    assert bench.tr11(*words, "--yes", "--set", "slurm.partition=no").code == 2
    answer = bench.tr11(*words, "--yes", "--set", "model.hiden_size=3")
    assert answer.code == 2 and "did you mean" in answer.err
    assert bench.tr11(*words, "--yes", "--set", "model.attention_heads=7").code == 2  # a card that would not load
    assert not (bench.folder / "tr11.toml").exists()
    assert not [path for path in bench.folder.iterdir() if path.name.startswith(".tr11")]


def test_the_partition_with_most_gpus_that_is_up_comes_first() -> None:
    found = places((CPU, DOWN, GPU), NODES)
    assert [place.partition.name for place in found] == ["gpu", "cpu"]
    assert (found[0].nodes, found[0].gpus, found[0].cpus) == (8, 4, 40)


@pytest.mark.parametrize("name", shipped_cards())
@pytest.mark.parametrize("partition", [GPU, CPU], ids=["gpu", "cpu"])
def test_every_shipped_card_fits_a_cluster_that_it_was_not_made_for(
    name: str, partition: Partition, tmp_path: Path
) -> None:
    base = example_tables(shipped_folder() / f"{name}.toml")
    [place] = places((partition,), NODES)
    answers = Answers("mine", "mine-run", place, proposed_nodes(place, base), "six@a100")
    site = SiteRules(accounts=("six@a100", "six@v100"), qualities=("normal",))
    path = tmp_path / "card.toml"
    path.write_text(starter_text(starter_tables(base, answers), answers, site, name))
    card = load_card(path, keep_undefined=True)
    assert (card.slurm.partition, card.slurm.gpus_per_node) == (partition.name, place.gpus)
    assert card.slurm.allocated_nodes <= place.nodes and card.slurm.account == "six@a100"
    assert partition.max_time_seconds is None or card.time_limit_seconds <= partition.max_time_seconds
    assert card.run.kill_switch is None and card.slurm.constraint is None
    assert "# who pays; yours: six@a100, six@v100" in path.read_text()
