"""Whole imports: the 176B script against the shipped card, options and sections, what is told,
hostile files.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.tr11ops.importer.old_scripts import (
    LLAMA,
    NAMES,
    PLACEHOLDERS,
    SCRIPTS,
    minimal,
    value_at,
)
from tr11ops.base.errors import ScriptError
from tr11ops.importer.importing import import_script, import_text
from tr11ops.importer.options import Imported, LeftReason
from tr11ops.importer.options_table import OPTIMIZERS
from tr11ops.runcard.card import load_card, shipped_folder
from trainer.config.model import OptimizerSection

SITE = {
    f"six_ALL_CCFR{name}": f"/site/{name.lower()}"
    for name in ("WORK", "WORKSF", "SCRATCH", "STORE")
}


SITE["TR11_ALERT_RECIPIENTS"] = "ana@site.org"


def imported(name: str, *overrides: str) -> Imported:
    return import_script(SCRIPTS / f"{name}.slurm", overrides)


# ------------------------------------------------------------------------- against the shipped card
# The script names files of groups where the shipped card lists the 28 prefixes; the rest are what only one of them says.
DIFFERENT = {
    "data.train_groups_file", "data.valid_groups_file", "data.prefixes", "data.weights", "data.split",
    "data.validate_each", "slurm.gpu_memory_gb", "slurm.setup", "slurm.spare_nodes",
    "slurm.signal_seconds_before_limit", "slurm.environment.HF_HUB_CACHE", "slurm.environment.HF_HUB_OFFLINE",
    "slurm.environment.HF_MODULES_CACHE", "slurm.environment.HF_METRICS_CACHE", "slurm.environment.HF_DATASETS_CACHE",
    "slurm.environment.TRANSFORMERS_CACHE", "tokenizer.path", "run.kill_switch",
    "batch.micro_batch_size", "batch.micro_batch_ramp",
}  # fmt: skip


OPERATION = {"hub", "backup", "alerts", "watch", "cron", "filesystems", "perms", "resilience"}


def leaves(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            name: item
            for part, inner in value.items()
            for name, item in leaves(inner, f"{key}.{part}" if key else part).items()
        }
    return {key: value}


def test_the_script_of_the_176b_training_gives_the_shipped_card(tmp_path: Path) -> None:
    found = imported("large-bf16")
    path = tmp_path / "card.toml"
    path.write_text(found.text, encoding="utf-8")
    ours = leaves(load_card(path, (), SITE).model_dump(mode="json"))
    shipped = leaves(
        load_card(shipped_folder() / "tr11-176B-ml.toml", (), SITE).model_dump(mode="json")
    )
    differing = {key for key in ours.keys() | shipped.keys() if ours.get(key) != shipped.get(key)}
    operation = {
        key
        for key in differing
        if key.split(".")[0] in OPERATION or key in {"slurm.comment", "slurm.workers_per_node"}
    }
    assert differing - operation <= DIFFERENT
    card = load_card(path, (), SITE)
    assert (card.world_size, card.data_parallel_degree, card.total_iterations) == (384, 8, 115_311)
    assert found.exit_code == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_script_gives_toml_and_says_what_was_placed(name: str) -> None:
    found = imported(name)
    assert tomllib.loads(found.text) == found.tables
    for item in found.placed:
        assert value_at(found.tables, item.key) == item.value
        lines = (SCRIPTS / f"{name}.slurm").read_text().count("\n")
        assert 0 <= item.line <= lines and 0 <= item.value_line <= lines
    for line in found.text.splitlines():
        assert line.isprintable()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "left-over-width-fp16"])
def test_every_sound_script_gives_a_card_that_loads(name: str, tmp_path: Path) -> None:
    found = imported(name)
    assert found.problems == ()
    path = tmp_path / "card.toml"
    path.write_text(found.text, encoding="utf-8")
    load_card(path, (), {**SITE, "DATA": "/data"})


# ----------------------------------------------------------------------------- what the others say
def test_the_20_hour_job_gets_an_exit_minute_inside_its_limit() -> None:
    found = imported("small-twenty-hours")
    assert found.tables["run"]["exit_duration_minutes"] == 1185
    assert {(item.key, item.script_value, item.card_value) for item in found.changed} == {
        ("run.exit_duration_minutes", 5990, 1185),
        ("data.valid_workers", 2, 0),
    }
    assert found.exit_code == 1
    decided = imported("small-twenty-hours", "run.exit_duration_minutes=1185")
    assert decided.exit_code == 0
    assert found.tables["precision"] == {
        "dtype": "fp16", "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
    }  # fmt: skip
    assert (
        found.tables["slurm"]["master_port"] == 6001 and found.tables["logging"]["interval"] == 10
    )


def test_curriculum_and_token_decay() -> None:
    tables = imported("curriculum").tables
    assert tables["curriculum"] == {
        "kind": "linear",
        "start_length": 64,
        "total_steps": 36_000,
        "step": 8,
    }
    assert (
        tables["schedule"]["decay_tokens"] == 126_953_125 * 2048
        and "decay_samples" not in tables["schedule"]
    )
    assert tables["batch"]["train_tokens"] == 300_000_000_000
    assert tables["tokenizer"] == {
        "type": "gpt2_bpe", "vocabulary_size": 50_257,
        "vocabulary_file": "$six_ALL_CCFRSCRATCH/data/gpt2-vocab.json",
        "merges_file": "$six_ALL_CCFRSCRATCH/data/gpt2-merges.txt",
    }  # fmt: skip
    assert (
        tables["model"]["position_embedding"] == "absolute"
        and tables["parallel"]["partition"] == "type:transformer"
    )
    assert tables["data"]["split"] == "949,50,1" and tables["run"]["variant"] == "cl"


def test_eight_bit_adam_resuming_from_another_run() -> None:
    found = imported("eight-bit")
    tables = found.tables
    assert tables["optimizer"]["type"] == "adam8bit" and tables["optimizer"]["epsilon"] == 1e-8
    assert [item.why for item in found.unplaced if item.option == "--optimizer"] == [
        "overruled on line 44 by --use-bnb-optimizer"
    ]
    assert tables["optimizer"]["embedding_init"] == "xavier"
    assert (
        tables["checkpoint"]["load"].endswith("/checkpoints/emb-norm")
        and tables["checkpoint"]["load_optimizer"] is False
    )
    assert tables["schedule"]["on_resume"] == "override"
    assert tables["data"]["skip_ranges"] == ["13251-14000", "16651-19500"]
    assert tables["slurm"]["setup"] == [". $six_ALL_CCFRWORK/start-prod", "module load git-lfs"]
    assert "abc123" not in found.text and "abc123" not in str(found.to_json(None))
    decisions = {item.option: item.key for item in found.decisions}
    assert decisions == {"EPS": "optimizer.epsilon", "export HUB_TOKEN": "slurm.setup"}
    assert imported("eight-bit", "optimizer.epsilon=1e-6", "slurm.setup=[]").exit_code == 0


@pytest.mark.parametrize("options", ["--use-bnb-optimizer", "--optimizer adam --use-bnb-optimizer"])
def test_eight_bit_adam_brings_the_layernorm_of_its_embedding(options: str) -> None:
    found = import_text(minimal(options), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert (
        found.tables["optimizer"]["type"] == "adam8bit"
        and found.tables["model"]["embedding_layernorm"] is True
    )
    assert import_text(minimal(), "x").tables["model"].get("embedding_layernorm") is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--optimizer lamb", {"type": "lamb", "lamb_variant": "apex"}),
        ("--optimizer mylamb", {"type": "lamb", "lamb_variant": "floored"}),
        ("--optimizer mylamb2", {"type": "lamb", "lamb_variant": "layer-noise"}),
        (
            "--optimizer mylamb3 --alpha 0.5",
            {"type": "lamb", "lamb_variant": "embedding-lr", "embedding_alpha": 0.5},
        ),
        ("--optimizer lambtp", {"type": "lamb", "lamb_variant": "paper", "lamb_norms": "local"}),
        ("--optimizer ptadamw", {"type": "adamw"}),
        ("--optimizer lamb --use-bnb-optimizer", {"type": "adam8bit", "embedding_init": "xavier"}),
    ],
)
def test_old_names_of_optimizers(options: str, expected: dict[str, object]) -> None:
    found = import_text(minimal(options), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert found.tables["optimizer"] == expected


# A job of the large-batch trainer, as its shell scripts have it: master, nodes, rank and rate are
# arguments.
LARGE_BATCH = """#!/bin/bash
#SBATCH --job-name=bert-4l
#SBATCH --nodes=2
#SBATCH --gres=gpu:8
#SBATCH --time=20:00:00
export LOCAL_WORLD_SIZE=8
MP_SIZE=1
GLOBAL_BATCH=1024
DISTRIBUTED_ARGS="--nproc_per_node $LOCAL_WORLD_SIZE --nnodes 2 --node_rank $SLURM_PROCID --master_addr a --master_port 6000"
BERT_ARGS="--num-layers 4 --hidden-size 128 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 \\
    --lr 1.4e-2 --lr-decay-style linear --lr-decay-iters 15840 --lr-warmup-fraction .02 --min-lr 1e-5 \\
    --train-iters 16000 --micro-batch-size 64 --global-batch-size $GLOBAL_BATCH --tensor-model-parallel-size $MP_SIZE \\
    --tokenizer-type BertWordPieceLowerCase --vocab-file /data/vocab.txt --vocab-extra-ids 0 --pad-vocab-size-to 30592 \\
    --data-path /data/my-bert_text_sentence --data-impl mmap --split 949,50,1 --fp16 --weight-decay 1e-2 --adam-eps 1e-6 \\
    --clip-grad 1.0 --eval-iters 10 --exit-duration-in-mins 1100"
OPTIMIZER="@OPTIONS@"
srun python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_bert.py $BERT_ARGS $OPTIMIZER \\
    --save /runs/bert-4l/checkpoints/main --save-interval 1000
"""


@pytest.mark.parametrize(
    "name", ["adam", "lamb", "mylamb", "mylamb2", "mylamb3", "lambtp", "ptadamw"]
)
def test_a_job_of_the_large_batch_trainer(name: str) -> None:
    alpha = "--alpha 1.0" if name == "mylamb3" else ""
    options = f"--optimizer {name} {alpha} --init-method-xavier-uniform"
    found = import_text(LARGE_BATCH.replace("@OPTIONS@", options), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert (
        found.tables["model"]["family"] == "bert"
        and found.tables["model"]["init_method"] == "xavier"
    )
    own = {
        "epsilon": 1e-6,
        "weight_decay": 1e-2,
        "clip_grad": 1.0,
        **({"embedding_alpha": 1.0} if alpha else {}),
    }
    assert found.tables["optimizer"] == own | OPTIMIZERS[name]
    assert (
        OptimizerSection.model_validate(found.tables["optimizer"]).type == OPTIMIZERS[name]["type"]
    )
    assert not any(item.option in {"--alpha", "--optimizer"} for item in found.unplaced)


BERT_DATA = "--tokenizer-type BertWordPieceLowerCase --vocab-file /v.txt --mask-prob 0.2 --short-seq-prob 0.3"


def test_a_script_of_bert_gives_its_family_and_masking() -> None:
    script = minimal(f"{BERT_DATA} --bert-no-binary-head").replace(
        "pretrain_gpt.py", "pretrain_bert.py"
    )
    found = import_text(script.replace("--tokenizer-name-or-path /t", ""), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert found.tables["model"]["family"] == "bert"
    assert found.tables["data"] == {
        "prefixes": ["/d/a"], "split": "969,30,1", "mask_probability": 0.2, "short_sequence_probability": 0.3,
        "binary_head": False,
    }  # fmt: skip


def test_masking_does_nothing_to_a_gpt() -> None:
    found = import_text(minimal("--mask-prob 0.2 --bert-no-binary-head"), "x")
    reasons = {item.option: item.reason for item in found.unplaced}
    assert reasons["--mask-prob"] is reasons["--bert-no-binary-head"] is LeftReason.NO_EFFECT
    assert "family" not in found.tables["model"] and "mask_probability" not in found.tables["data"]


def test_a_script_of_t5_gives_its_two_lengths_and_sentinels() -> None:
    options = f"{BERT_DATA} --encoder-seq-length 32 --decoder-seq-length 16 --vocab-extra-ids 50 --bert-no-binary-head"
    script = (
        minimal(options)
        .replace("pretrain_gpt.py", "pretrain_t5.py")
        .replace("--tokenizer-name-or-path /t", "")
    )
    found = import_text(script, "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    model = found.tables["model"]
    assert (model["family"], model["sequence_length"], model["decoder_sequence_length"]) == (
        "t5",
        32,
        16,
    )
    assert found.tables["data"] == {
        "prefixes": ["/d/a"], "split": "969,30,1", "mask_probability": 0.2, "short_sequence_probability": 0.3,
        "extra_ids": 50,
    }  # fmt: skip
    (item,) = (item for item in found.unplaced if item.option == "--bert-no-binary-head")
    assert item.reason is LeftReason.NO_EFFECT


def test_programs_of_other_models_need_a_decision() -> None:
    found = import_text(minimal().replace("pretrain_gpt.py", "pretrain_ict.py"), "x")
    assert found.exit_code == 1 and any(
        "is none of pretrain_gpt.py, pretrain_bert.py, pretrain_t5.py" in d.why
        for d in found.decisions
    )


def test_alpha_does_nothing_to_other_optimizers() -> None:
    found = import_text(minimal("--optimizer mylamb --alpha 2.0"), "x")
    (item,) = (item for item in found.unplaced if item.option == "--alpha")
    assert (
        item.reason is LeftReason.NO_EFFECT and "embedding_alpha" not in found.tables["optimizer"]
    )


def test_weighted_prefixes_and_an_unknown_option() -> None:
    found = imported("left-over-width-fp16")
    assert found.tables["data"]["prefixes"] == ["$DATA/a_text_document", "$DATA/b_text_document"]
    assert found.tables["data"]["weights"] == [0.7, 0.3]
    assert "ramp" not in found.tables["batch"]
    assert [item.option for item in found.decisions] == ["--some-new-option", "--eval-only"]
    late = next(item for item in found.unplaced if item.option == "#SBATCH --qos")
    assert (late.line, late.reason) == (
        11,
        LeftReason.NO_EFFECT,
    ) and "quality_of_service" not in found.tables["slurm"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("without", ["", "--pad-vocab-size-to", "--save"])
def test_only_what_is_in_the_script_is_reported_as_its_own(name: str, without: str) -> None:
    """A tokenizer's path was told as `--pad-vocab-size-to`, of scripts that have no such flag."""
    script = (SCRIPTS / f"{name}.slurm").read_text()
    if without:
        script = re.sub(rf"{without}[ =]\S+", "", script)
    lines = script.splitlines()
    for item in import_text(script, name).unplaced:
        is_said_missing = "is not given" in item.why
        assert is_said_missing or not item.option.startswith("--") or item.option in script, (
            item,
            without,
        )
        assert item.line <= len(lines)


def test_the_missing_size_of_a_vocabulary_is_asked_for_at_the_tokenizer() -> None:
    found = import_text(minimal().replace("--pad-vocab-size-to 512", ""), "x")
    (asked,) = [item for item in found.decisions if item.key == "tokenizer.vocabulary_size"]
    assert (asked.option, asked.value) == ("--tokenizer-name-or-path", "/t")
    assert "--tokenizer-name-or-path /t" in minimal().splitlines()[asked.line - 1]
    bert = (
        minimal(f"{BERT_DATA}")
        .replace("pretrain_gpt.py", "pretrain_bert.py")
        .replace("--pad-vocab-size-to 512", "")
    )
    found = import_text(bert.replace("--tokenizer-name-or-path /t", ""), "x")
    (asked,) = [item for item in found.decisions if item.key == "tokenizer.vocabulary_size"]
    assert (asked.option, asked.value) == ("--vocab-file", "/v.txt")


# ---------------------------------------------------------------------------
# Which options an import names: those of the script, as it spells them, or those marked as
# assumed.


TEXTS = {name: (SCRIPTS / f"{name}.slurm").read_text() for name in NAMES}
TEXTS |= {"llama": minimal(LLAMA), "placeholders": PLACEHOLDERS, "minimal": minimal()}
ABSENT = ("is not given", "no --", "without --")


def flags(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", text)


def without(script: str, option: str) -> str:
    """The script without an option and the word behind it, unless that is an option too."""
    return re.sub(rf"{option}(?![\w-])([ =](?!-)[^\s\\\"]+)?", "", script)


def check(script: str) -> None:
    """Each option that the report names stands in the script, on the line that is told, or is said
    to be absent.
    """
    found, given_there, lines = import_text(script, "x"), set(flags(script)), script.splitlines()
    for placed in found.placed:
        named = set(flags(placed.source))
        is_assumed = placed.line == 0 and "the original's default" in placed.note
        assert named <= given_there or is_assumed, placed
        if placed.line:
            assert named <= set(flags(lines[placed.line - 1])), placed
    for item in found.unplaced:
        named = set(flags(item.option))
        assert named <= given_there or "is not given" in item.why, item
        if item.line and named <= given_there and item.option.startswith("--"):
            assert named <= set(flags(lines[item.line - 1])), item
    for defect in found.defects:
        is_said_absent = any(word in defect.what for word in ABSENT)
        assert set(flags(defect.what)) <= given_there or is_said_absent, defect
        assert defect.line <= len(lines)


@pytest.mark.parametrize("name", TEXTS)
def test_a_report_names_the_options_of_its_script(name: str) -> None:
    check(TEXTS[name])


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.data())
def test_a_report_names_no_option_that_was_taken_away(data: st.DataObject) -> None:
    script = TEXTS[data.draw(st.sampled_from(sorted(TEXTS)))]
    for option in data.draw(
        st.sets(st.sampled_from(sorted(set(flags(script)))), min_size=1, max_size=4)
    ):
        script = without(script, option)
    try:
        check(script)
    except ScriptError:  # too little is left of it
        return
