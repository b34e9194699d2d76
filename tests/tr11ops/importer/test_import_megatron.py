"""Scripts of newer trainers, and of other sites: own small ones that hold the constructs of
published scripts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.importer.old_scripts import LLAMA, PLACEHOLDERS, minimal
from tr11ops.base.errors import ScriptError
from tr11ops.importer.importing import import_text
from tr11ops.importer.options import Imported, LeftReason
from tr11ops.runcard.card import load_card
from trainer.config.model import ModelSection


def reasons(found: Imported) -> dict[str, LeftReason]:
    return {item.option: item.reason for item in found.unplaced}


def test_a_llama_of_megatron_makes_a_sound_card(tmp_path: Path) -> None:
    found = import_text(minimal(LLAMA), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert not any(defect.code == "ffn-left-over" for defect in found.defects)
    path = tmp_path / "card.toml"
    path.write_text(found.text, encoding="utf-8")
    expected = ModelSection(
        layers=2, hidden_size=64, attention_heads=4, key_value_heads=2, sequence_length=32, ffn_hidden_size=192,
        activation="swiglu", linear_biases=False, norm="rmsnorm", tied_embeddings=False, position_embedding="rotary",
        rotary_base=500_000.0, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    assert load_card(path, (), {}).model == expected


@pytest.mark.parametrize(
    "options",
    [
        f"{LLAMA} --qk-layernorm",
        "--lr-decay-style WSD --lr-wsd-decay-samples 40",
        "--train-data-path 0.3 /d/a 0.7 /d/b --valid-data-path /d/v",
        "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-param-gather",
    ],
)
def test_what_newer_options_say_makes_a_sound_card(options: str) -> None:
    script = minimal(options)
    if "--train-data-path" in options:
        script = script.replace("--data-path /d/a --save", "--save")
    found = import_text(script, "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())


def test_a_width_that_is_four_times_the_hidden_one_is_kept_beside_a_gate() -> None:
    """Without it the card would mean 8/3 of it."""
    gated = "--swiglu --disable-bias-linear --hidden-size 256 --ffn-hidden-size"
    assert import_text(minimal(f"{gated} 1024"), "x").tables["model"]["ffn_hidden_size"] == 1024
    assert "ffn_hidden_size" not in import_text(minimal(f"{gated} 768"), "x").tables["model"]


def test_options_that_say_nothing_without_another() -> None:
    options = (
        "--rotary-base 500000 --rotary-percent 0.5 --num-query-groups 2 --lr-wsd-decay-samples 40"
    )
    options += " --rope-scaling-factor 8"
    found = import_text(minimal(options), "x")
    given = options.split()[::2]
    assert {option: reasons(found)[option] for option in given} == dict.fromkeys(
        given, LeftReason.NO_EFFECT
    )
    assert found.exit_code == 0


# ----------------------------------------------------------------------------- placeholders
def test_a_placeholder_is_one_value_and_swallows_no_flag() -> None:
    found = import_text(PLACEHOLDERS, "x")
    assert (
        found.tables["precision"]["dtype"] == "fp16" and found.tables["checkpoint"]["interval"] == 5
    )
    assert found.tables["model"]["activation_checkpointing"] is True
    asked = {item.option: (item.value, item.key) for item in found.decisions}
    assert asked == {
        "#SBATCH": ("<SITE OPTIONS>", ""),
        "#SBATCH --partition": ("<your_partition>", "slurm.partition"),
        "--vocab-file": ("<PATH TO vocab.json>", "tokenizer.vocabulary_file"),
        "--merge-file": ("<PATH TO merges.txt>", "tokenizer.merges_file"),
        "--data-path": ("0.2 <PATH TO THE FIRST SET> 0.8 /d/b", "data.prefixes"),
        "--save": ("<FOLDER>", "run.directory"),
        "${@}": ("", ""),
    }
    assert found.tables["slurm"]["nodes"] == 2 and "partition" not in found.tables["slurm"]


def test_what_only_a_person_knows_is_no_setup_and_no_environment() -> None:
    """It went into slurm.setup as it stood, for a shell that would read from a file of that name."""
    before = "source <path>/activate\nexport HF_HOME=<CACHE FOLDER>\nexport WHERE=$1\nsource $2/more\nexport A=1\nmodule load x"
    found = import_text(minimal(before=before), "x")
    assert found.tables["slurm"]["setup"] == ["module load x"] and found.tables["slurm"][
        "environment"
    ] == {"A": "1"}
    assert {(item.option, item.key) for item in found.decisions} == {
        ("source", "slurm.setup"), ("export HF_HOME", "slurm.environment.HF_HOME"),
        ("export WHERE", "slurm.environment.WHERE"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "redirected",
    [
        "<in >/dev/null",
        "<in>out",
        "< in > out",
        "<in 2>err",
        "<in 2> err",
        "<in >out 2>&1",
        "<<E\nx\nE",
        "<in>/dev/null",
    ],
)
def test_what_a_shell_reads_and_writes_is_no_placeholder(redirected: str) -> None:
    found = import_text(minimal(before=f"sort {redirected}"), "x")
    assert found.exit_code == 0
    assert [item.value for item in found.unplaced if item.option == "sort"] == [""]


# ------------------------------------------------------------------------ the run's folder and name
@pytest.mark.parametrize(
    ("save", "directory", "variant", "name"),
    [
        ("./checkpoints", ".", None, None),
        ("checkpoints", ".", None, None),
        ("checkpoints/big", ".", "big", None),
        ("../checkpoints/big", "..", "big", None),
        ("'/r/two words'", "/r/two words", None, None),
        ("/r/small/checkpoints", "/r/small", None, "small"),
        ("/checkpoints", "/checkpoints", None, "checkpoints"),
    ],
)
def test_a_run_is_named_by_its_folder_or_asks(
    save: str, directory: str, variant: str | None, name: str | None
) -> None:
    script = minimal().replace("#SBATCH --job-name=tiny\n", "").replace("/r/checkpoints/main", save)
    found = import_text(script, "x")
    run = found.tables["run"]
    assert (run["directory"], run.get("variant"), run.get("name")) == (directory, variant, name)
    asked = [(item.option, item.value) for item in found.decisions if item.key == "run.name"]
    assert asked == ([] if name else [("--save", directory)])


# --------------------------------------------------------------------------- launchers and programs
def test_tasks_that_are_the_workers_themselves() -> None:
    """`srun python pretrain_gpt.py`, without a launcher of its own: Slurm starts the workers."""
    head = "#SBATCH --nodes=1 --ntasks-per-node=2"
    plain = minimal(head=head).replace(
        "python -m torch.distributed.run --nproc_per_node 2", "srun -K1 --wait=60 python"
    )
    found = import_text(plain, "x")
    assert found.tables["slurm"]["gpus_per_node"] == 2 and found.exit_code == 0
    assert not any(defect.code == "tasks-per-node" for defect in found.defects)
    assert any(
        defect.code == "tasks-per-node" for defect in import_text(minimal(head=head), "x").defects
    )
    other = import_text(plain.replace("#SBATCH --gres=gpu:2\n", ""), "x")
    assert other.tables["slurm"]["workers_per_node"] == 2


def test_nodes_that_only_the_launcher_is_told() -> None:
    found = import_text(
        minimal(head="").replace("--nproc_per_node 2", "--nproc_per_node 2 --nnodes 2:4"), "x"
    )
    assert found.tables["slurm"]["nodes"] == 2 and found.exit_code == 0


def test_nodes_that_deepspeed_s_launcher_is_told() -> None:
    """It was not read, and the card was refused for want of it."""
    script = minimal(head="").replace(
        "--nproc_per_node 2", "--num_gpus=2 --num_nodes=3 --hostfile /job/hosts"
    )
    found = import_text(script, "x")
    assert found.tables["slurm"]["nodes"] == 3
    head = "#SBATCH --nodes=4\n#SBATCH --gres=gpu:2\n#SBATCH --time=1:00:00"
    both = import_text(
        minimal(head=head).replace("--nproc_per_node 2", "--num_gpus=2 --num_nodes=3"), "x"
    )
    assert "nodes-differ" in {defect.code for defect in both.defects}


def test_what_only_megatron_deepspeed_has_is_known_by_its_name() -> None:
    options = "--lr-warmup-tokens 100 --moe-loss-coeff 0.01 --ds-sequence-parallel-size 1"
    left = {one.option: one for one in import_text(minimal(options), "x").unplaced}
    for option in options.split()[::2]:
        assert left[option].reason == "needs a decision"
        assert "not known" not in left[option].why, option


def test_a_script_that_asks_slurm_for_nothing_asks_what_a_node_has() -> None:
    """Its card would have asked for nodes without GPUs."""
    script = "\n".join(line for line in minimal().splitlines() if not line.startswith("#SBATCH"))
    found = import_text(script.replace("--nproc_per_node 2", "--nproc_per_node 2 --nnodes 1"), "x")
    asked = [item.option for item in found.decisions if item.key == "slurm.gpus_per_node"]
    assert asked == ["no #SBATCH line"]
    assert not any(
        item.key == "slurm.gpus_per_node" for item in import_text(minimal(), "x").decisions
    )


def test_workers_by_what_slurm_tells_the_job() -> None:
    head = "#SBATCH --nodes=2 --gpus-per-node=2"
    script = minimal(head=head).replace("#SBATCH --gres=gpu:2\n", "")
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        found = import_text(script.replace("--nproc_per_node 2", f"--nproc_per_node ${name}"), "x")
        assert (found.exit_code, found.decisions) == (0, ())


def test_a_launcher_that_takes_its_command_as_text() -> None:
    before, launched = minimal().strip().rsplit("\n", 1)
    launched = launched.replace(" --", " \\\n--")
    found = import_text(f"{before}\nclusterrun -n 2 --env 'A=1' -c '{launched}'\n", "x")
    assert found.tables["model"]["layers"] == 2 and found.exit_code == 0


@pytest.mark.parametrize(
    ("program", "assumed"), [("bert", "bert_wordpiece_lower"), ("gpt", "gpt2_bpe")]
)
def test_the_tokenizer_that_a_program_assumes(program: str, assumed: str) -> None:
    """GPT-2's was put into the card of a BERT, with its 50,257 entries."""
    script = (
        minimal()
        .replace("pretrain_gpt.py", f"pretrain_{program}.py")
        .replace("--tokenizer-type PretrainedFromHF", "")
    )
    found = import_text(
        script.replace("--tokenizer-name-or-path /t", "").replace("--pad-vocab-size-to 512", ""),
        "x",
    )
    assert found.tables["tokenizer"]["type"] == assumed
    asked = [
        (item.option, item.value)
        for item in found.decisions
        if item.key == "tokenizer.vocabulary_size"
    ]
    assert asked == ([("the tokenizer", assumed)] if program == "bert" else [])


def test_options_of_a_condition_are_taken_from_one_branch_and_told() -> None:
    before = (
        "MORE=(--seed 1)\nif [[ $KIND == mock ]]; then\n MORE+=(--finetune)\nelse\n MORE+=(--log-params-norm)\nfi\n"
        "if [ $FAST ]; then EXTRA=--log-num-zeros-in-grad; fi"
    )
    found = import_text(minimal("${MORE[@]} $EXTRA", before=before), "x")
    assert (
        found.tables["checkpoint"]["finetune"] is True
        and found.tables["logging"]["zeros_in_gradient"] is True
    )
    assert "params_norm" not in found.tables["logging"]
    assert [(item.option, item.value, item.why.partition("; ")[2]) for item in found.decisions] == [
        ("MORE", "--log-params-norm", "the value before it was taken"),
        ("EXTRA", "--log-num-zeros-in-grad", "it was taken"),
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "srun python train.py configs/7b.yaml --run_name=x",
            "line 2 takes its settings from configs/7b.yaml",
        ),
        (
            "srun python main.py trainer.num_nodes=2",
            "line 2 starts main.py without options such as --num-layers",
        ),
        ("srun bash train/run.sh", "line 2 starts train/run.sh"),
    ],
)
def test_a_training_whose_options_are_elsewhere_says_where(command: str, words: str) -> None:
    with pytest.raises(ScriptError) as caught:
        import_text(f"#!/bin/bash\n{command}\n", "x")
    assert words in str(caught.value)
