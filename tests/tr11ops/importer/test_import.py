"""Whole imports: the 176B script against the shipped card, options and sections, what is told, hostile files."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tr11ops.importer.importing import import_script, import_text, read_script
from tr11ops.importer.options_table import OPTIMIZERS, RULES
from tr11ops.importer.results import Imported, LeftReason
from tr11ops.importer.sbatch import gpus_of, read_directives
from tr11ops.importer.traced import LARGEST_SCRIPT_BYTES, ScriptError
from tr11ops.runcard.card import RunCard, load_card, shipped_folder
from tr11ops.runcard.toml_writer import toml_value, write_card
from trainer.config.card import CardError
from trainer.config.model import OptimizerSection

SCRIPTS = Path(__file__).parents[2] / "data" / "slurm_scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.slurm"))
SITE = {f"six_ALL_CCFR{name}": f"/site/{name.lower()}" for name in ("WORK", "WORKSF", "SCRATCH", "STORE")}
SITE["TR11_ALERT_RECIPIENTS"] = "ana@site.org"


def imported(name: str, *overrides: str) -> Imported:
    return import_script(SCRIPTS / f"{name}.slurm", overrides)


def minimal(options: str = "", head: str = "#SBATCH --nodes=1", before: str = "") -> str:
    """The smallest script with a sound card, and more options."""
    return (
        f"#!/bin/bash\n#SBATCH --job-name=tiny\n#SBATCH --gres=gpu:2\n#SBATCH --time=1:00:00\n{head}\n{before}\n"
        "python -m torch.distributed.run --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
        "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
        "--global-batch-size 4 --train-samples 400 --lr 1e-3 --bf16 --pad-vocab-size-to 512 "
        "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path /t --data-path /d/a --save /r/checkpoints/main "
        f"--save-interval 5 --eval-iters 0 --exit-duration-in-mins 50 {options}\n"
    )


def value_at(tables: dict[str, Any], key: str) -> Any:
    found: Any = tables
    for part in key.split("."):
        found = found[part]
    return found


# ----------------------------------------------------------------------------- against the shipped card
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
    shipped = leaves(load_card(shipped_folder() / "tr11-176B-ml.toml", (), SITE).model_dump(mode="json"))
    differing = {key for key in ours.keys() | shipped.keys() if ours.get(key) != shipped.get(key)}
    operation = {
        key for key in differing if key.split(".")[0] in OPERATION or key in {"slurm.comment", "slurm.workers_per_node"}
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
    assert found.tables["slurm"]["master_port"] == 6001 and found.tables["logging"]["interval"] == 10


def test_curriculum_and_token_decay() -> None:
    tables = imported("curriculum").tables
    assert tables["curriculum"] == {"kind": "linear", "start_length": 64, "total_steps": 36_000, "step": 8}
    assert tables["schedule"]["decay_tokens"] == 126_953_125 * 2048 and "decay_samples" not in tables["schedule"]
    assert tables["batch"]["train_tokens"] == 300_000_000_000
    assert tables["tokenizer"] == {
        "type": "gpt2_bpe", "vocabulary_size": 50_257,
        "vocabulary_file": "$six_ALL_CCFRSCRATCH/data/gpt2-vocab.json",
        "merges_file": "$six_ALL_CCFRSCRATCH/data/gpt2-merges.txt",
    }  # fmt: skip
    assert tables["model"]["position_embedding"] == "absolute" and tables["parallel"]["partition"] == "type:transformer"
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
    assert found.tables["optimizer"]["type"] == "adam8bit" and found.tables["model"]["embedding_layernorm"] is True
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


# A job of the large-batch trainer, as its shell scripts have it: master, nodes, rank and rate are arguments.
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


@pytest.mark.parametrize("name", ["adam", "lamb", "mylamb", "mylamb2", "mylamb3", "lambtp", "ptadamw"])
def test_a_job_of_the_large_batch_trainer(name: str) -> None:
    alpha = "--alpha 1.0" if name == "mylamb3" else ""
    options = f"--optimizer {name} {alpha} --init-method-xavier-uniform"
    found = import_text(LARGE_BATCH.replace("@OPTIONS@", options), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert found.tables["model"]["family"] == "bert" and found.tables["model"]["init_method"] == "xavier"
    own = {"epsilon": 1e-6, "weight_decay": 1e-2, "clip_grad": 1.0, **({"embedding_alpha": 1.0} if alpha else {})}
    assert found.tables["optimizer"] == own | OPTIMIZERS[name]
    assert OptimizerSection.model_validate(found.tables["optimizer"]).type == OPTIMIZERS[name]["type"]
    assert not any(item.option in {"--alpha", "--optimizer"} for item in found.unplaced)


BERT_DATA = "--tokenizer-type BertWordPieceLowerCase --vocab-file /v.txt --mask-prob 0.2 --short-seq-prob 0.3"


def test_a_script_of_bert_gives_its_family_and_masking() -> None:
    script = minimal(f"{BERT_DATA} --bert-no-binary-head").replace("pretrain_gpt.py", "pretrain_bert.py")
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
    script = minimal(options).replace("pretrain_gpt.py", "pretrain_t5.py").replace("--tokenizer-name-or-path /t", "")
    found = import_text(script, "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    model = found.tables["model"]
    assert (model["family"], model["sequence_length"], model["decoder_sequence_length"]) == ("t5", 32, 16)
    assert found.tables["data"] == {
        "prefixes": ["/d/a"], "split": "969,30,1", "mask_probability": 0.2, "short_sequence_probability": 0.3,
        "extra_ids": 50,
    }  # fmt: skip
    (item,) = (item for item in found.unplaced if item.option == "--bert-no-binary-head")
    assert item.reason is LeftReason.NO_EFFECT


def test_programs_of_other_models_need_a_decision() -> None:
    found = import_text(minimal().replace("pretrain_gpt.py", "pretrain_ict.py"), "x")
    assert found.exit_code == 1 and any(
        "is none of pretrain_gpt.py, pretrain_bert.py, pretrain_t5.py" in d.why for d in found.decisions
    )


def test_alpha_does_nothing_to_other_optimizers() -> None:
    found = import_text(minimal("--optimizer mylamb --alpha 2.0"), "x")
    (item,) = (item for item in found.unplaced if item.option == "--alpha")
    assert item.reason is LeftReason.NO_EFFECT and "embedding_alpha" not in found.tables["optimizer"]


def test_weighted_prefixes_and_an_unknown_option() -> None:
    found = imported("left-over-width-fp16")
    assert found.tables["data"]["prefixes"] == ["$DATA/a_text_document", "$DATA/b_text_document"]
    assert found.tables["data"]["weights"] == [0.7, 0.3]
    assert "ramp" not in found.tables["batch"]
    assert [item.option for item in found.decisions] == ["--some-new-option", "--eval-only"]
    late = next(item for item in found.unplaced if item.option == "#SBATCH --qos")
    assert (late.line, late.reason) == (11, LeftReason.NO_EFFECT) and "quality_of_service" not in found.tables["slurm"]


# ----------------------------------------------------------------------------- the table of options
SPECIFIED = """
--num-layers --hidden-size --num-attention-heads --kv-channels --ffn-hidden-size --seq-length --encoder-seq-length
--max-position-embeddings --position-embedding-type --make-vocab-size-divisible-by --pad-vocab-size-to --layernorm-epsilon
--embed-layernorm --sync-tp-duplicated-parameters --kill-switch-path --micro-batch-size --global-batch-size
--rampup-batch-size --train-iters --train-samples --train-tokens --lr --min-lr --lr-decay-style --lr-decay-samples
--lr-decay-iters --lr-decay-tokens --lr-warmup-samples --lr-warmup-iters --lr-warmup-fraction --override-lr-scheduler
--use-checkpoint-lr-scheduler --clip-grad --weight-decay --adam-beta1 --adam-beta2 --adam-eps --attention-dropout
--hidden-dropout --init-method-std --use-bnb-optimizer --fp16 --bf16 --loss-scale --checkpoint-activations
--deepspeed-activation-checkpointing --partition-activations --abort-on-unmet-fused-kernel-constraints
--pp-partition-method --skip-train-iteration-range --exit-interval --exit-duration-in-mins --save --load --save-interval
--no-load-optim --no-load-rng --finetune --no-save-optim --no-save-rng --universal-checkpoint --eval-interval --eval-iters
--log-interval --log-params-norm --log-num-zeros-in-grad --tensorboard-dir --tensorboard-log-interval
--tensorboard-queue-size --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
--no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard --data-path --split --train-weighted-split-paths
--valid-weighted-split-paths --test-weighted-split-paths --train-weighted-split-paths-path
--valid-weighted-split-paths-path --test-weighted-split-paths-path --data-impl --num-workers --valid-num-workers
--dataloader-type --tokenizer-type --tokenizer-name-or-path --reset-position-ids --reset-attention-mask --eod-mask-loss
--zero-stage --eval-only --inference --log-level --log-level-replica --codecarbon-dir --seed --deepspeed
--deepspeed_config --distributed-backend --tensor-model-parallel-size --pipeline-model-parallel-size --optimizer
--vocab-file --merge-file --recompute-activations --recompute-granularity --recompute-method --recompute-num-layers
--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank --no-overlap-p2p-communication
--microbatch-group-size-per-virtual-pipeline-stage --overlap-p2p-communication-warmup-flush
"""
FOUR_LAYERS = "--num-layers 4 --pipeline-model-parallel-size 2"
BY_LAYERS = "--num-layers-per-virtual-pipeline-stage"
RECOMPUTE_BLOCK = "--recompute-granularity full --recompute-method block"


def test_every_option_has_a_rule_and_every_key_is_of_the_card() -> None:
    assert set(SPECIFIED.split()) - RULES.keys() == set()
    for rule in RULES.values():
        assert bool(rule.key) == bool(rule.convert) == (rule.reason is None), rule.option
        if rule.key:
            section, name = rule.key.split(".")
            schema = next(
                item
                for item in (RunCard.model_fields[section].annotation,)
                if isinstance(item, type) and issubclass(item, BaseModel)
            )
            assert name in schema.model_fields, rule.option
        else:
            assert rule.note


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("--kv-channels 32", "model.kv_channels", 32),
        ("--position-embedding-type rotary", "model.position_embedding", "rotary"),
        ("--no-bias-gelu-fusion", "model.activation", "gelu"),
        ("--lr-warmup-fraction 0.1", "schedule.warmup_fraction", 0.1),
        ("--attention-dropout=0", "model.attention_dropout", 0.0),
        ("--valid-weighted-split-paths 'v1: 1 0.9:0.95 /d/a, 2 0:1 /d/b' 'v2: 1 0:1 /d/c' --train-weighted-split-paths 't: 1 0:0.9 /d/a'",
         "data.valid_groups", ["v1: 1 0.9:0.95 /d/a, 2 0:1 /d/b", "v2: 1 0:1 /d/c"]),
        ("--train-weighted-split-paths t: 1 0:0.9 /d/a", "data.train_group", "t: 1 0:0.9 /d/a"),
        ("--split 969, 30, 1", "data.split", "969,30,1"),
        ("--exit-interval 10", "run.exit_interval", 10),
        ("--finetune --load /other/checkpoints/main", "checkpoint.load", "/other/checkpoints/main"),
        ("--no-save-rng", "checkpoint.save_random_state", False),
        ("--use-checkpoint-lr-scheduler", "schedule.on_resume", "checkpoint"),
        ("--dataloader-type cyclic", "data.order", "cyclic"),
        ("--initial-loss-scale 4096", "precision.initial_scale_power", 12),
        ("--no-log-learnig-rate-to-tensorboard", "logging.tensorboard_learning_rate", False),
        ("--seed 1 --seed 7", "run.seed", 7),
        ("--make-vocab-size-divisible-by 64", "tokenizer.divisible_by", 64),
        ("--recompute-activations", "model.activation_checkpointing", True),
        ("--recompute-activations", "model.recompute_granularity", "selective"),
        ("--recompute-granularity selective", "model.activation_checkpointing", True),
        (RECOMPUTE_BLOCK + " --recompute-num-layers 1", "model.recompute_granularity", "full"),
        (RECOMPUTE_BLOCK + " --recompute-num-layers 1", "model.recompute_blocks", 1),
        (RECOMPUTE_BLOCK + " --recompute-num-layers 99", "model.recompute_blocks", 2),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
         "model.activation_checkpointing", True),
        (f"{FOUR_LAYERS} {BY_LAYERS} 1", "parallel.virtual_stages", 2),
        (f"{FOUR_LAYERS} {BY_LAYERS} 1", "parallel.partition", "type:transformer"),
        (f"{FOUR_LAYERS} {BY_LAYERS} 1 --pp-partition-method 'type:transformer|embedding'",
         "parallel.partition", "type:transformer|embedding"),
        (f"{FOUR_LAYERS} {BY_LAYERS} 2", "parallel.virtual_stages", 1),
        (f"{FOUR_LAYERS} --num-virtual-stages-per-pipeline-rank 2", "parallel.virtual_stages", 2),
    ],
)  # fmt: skip
def test_options_become_keys(options: str, key: str, value: object) -> None:
    assert value_at(import_text(minimal(options), "x").tables, key) == value


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--seed $SEED", "${SEED} is only known when the script runs"),
        ("--seed ten", "it is not a whole number"),
        ("--weight-decay nan", "it is not a finite number"),
        ("--lr-decay-style step", "is none of constant, linear, cosine"),
        ("--skip-train-iteration-range 10", "is not a range"),
        ("--kill-switch-path /k/$SLURM_JOB_ID", "${SLURM_JOB_ID} is only known inside the job"),
        ("--kill-switch-path $(mktemp)", "is only known inside the job"),
        ("--data-path 0.5 /a 0.5", "neither one prefix nor pairs"),
        ("--initial-loss-scale 1000", "power of two"),
        ("--swiglu", "another model"),
        ("--num-layer 3", "did it mean --num-layers?"),
        ("--eval-only False", "use `tr11 eval`"),
        ("--recompute-granularity half", "is none of full, selective"),
        (RECOMPUTE_BLOCK + " --recompute-num-layers few", "give --set model.recompute_blocks=..."),
        (f"{FOUR_LAYERS} {BY_LAYERS} 3", "4 layers on 2 stages cannot be cut in parts of 3 layers"),
        (BY_LAYERS + " 0", "it must be at least 1: give --set parallel.virtual_stages=..."),
        ("-- stray", "belongs to no option"),
    ],
)
def test_what_cannot_be_placed_asks_for_a_decision(options: str, why: str) -> None:
    found = import_text(minimal(options), "x")
    assert any(why in item.why for item in found.decisions), found.decisions
    assert found.exit_code == 1


def test_interleaved_stages_make_a_sound_card() -> None:
    given = f"{FOUR_LAYERS} {BY_LAYERS} 1 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication"
    rounds = "--microbatch-group-size-per-virtual-pipeline-stage"
    found = import_text(minimal(f"{given} {rounds} 2"), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert {item.option: item.reason for item in found.unplaced if "p2p" in item.option or item.option == rounds} == {
        "--no-overlap-p2p-communication": LeftReason.DROPPED,
        rounds: LeftReason.ELSEWHERE,
    }
    other = import_text(minimal(f"{given} {rounds} 3"), "x").unplaced
    assert next(item.reason for item in other if item.option == rounds) is LeftReason.NO_COUNTERPART
    alone = import_text(minimal(f"{rounds} 2"), "x").unplaced
    assert next(item.reason for item in alone if item.option == rounds) is LeftReason.NO_EFFECT


def test_a_training_counted_in_iterations() -> None:
    text = minimal("--lr-decay-iters 90 --lr-warmup-iters 10").replace("--train-samples 400", "--train-iters 100")
    found = import_text(text, "x")
    assert found.problems == () and found.exit_code == 0
    assert found.tables["batch"] == {"micro_batch_size": 1, "global_batch_size": 4, "train_iterations": 100}
    assert found.tables["schedule"]["decay_iterations"] == 90 and found.tables["schedule"]["warmup_iterations"] == 10


def test_substitutions_are_told_and_the_known_ones_are_not() -> None:
    before = "A=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\nB=`pwd`\nC=$(wc -l < list)\nD=$((E * 2))"
    found = import_text(minimal(before=before), "x")
    told = [(item.option, item.line, item.why) for item in found.unplaced if item.why.startswith("in a value")]
    assert told == [
        ("$(wc -l < list)", 8, "in a value: is not evaluated"),
        ("$((E * 2))", 9, "in a value: E is not known"),
    ]


def test_the_minimal_script_leaves_nothing_open() -> None:
    found = import_text(minimal(), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert found.tables["logging"]["tensorboard"] is False and found.tables["schedule"]["decay_style"] == "linear"


def test_checkpoints_that_lie_in_the_save_folder_itself() -> None:
    text = minimal().replace("--save /r/checkpoints/main", "--save /r/old")
    found = import_text(text, "x")
    assert found.tables["run"]["directory"] == "/r/old" and [item.key for item in found.decisions] == [
        "checkpoint.load"
    ]
    assert import_text(text, "x", ["checkpoint.load=/r/old"]).exit_code == 0


def test_exported_variables_go_where_they_belong() -> None:
    before = "\n".join(
        [
            "export OMP_NUM_THREADS=1",
            "export PATH=/opt/bin:$PATH",
            "export WHERE=$TMPDIR/x",
            "export D=/used",
            "MASTER_PORT=7000",
        ]
    )
    found = import_text(minimal("--log-path $D", before=before), "x")
    assert found.tables["slurm"]["environment"] == {"OMP_NUM_THREADS": "1"}
    assert found.tables["slurm"]["setup"] == ['export PATH="/opt/bin:$PATH"', 'export WHERE="$TMPDIR/x"']
    assert found.tables["slurm"]["master_port"] == 7000


# ----------------------------------------------------------------------------- #SBATCH
def test_directives_in_all_their_forms() -> None:
    text = '#!/bin/bash\n#SBATCH -N4 -t 10 --gres gpu:a100:8 # remark\n#SBATCH -J "two words" --exclusive -p=x\n##SBATCH --qos=no\n# SBATCH --qos=no\nx\n#SBATCH -n 3\n'
    found = [(item.name, item.value, item.line, item.read) for item in read_directives(text)]
    assert found == [
        ("nodes", "4", 2, True), ("time", "10", 2, True), ("gres", "gpu:a100:8", 2, True),
        ("job-name", "two words", 3, True), ("exclusive", "", 3, True), ("partition", "x", 3, True),
        ("ntasks", "3", 7, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gres", "count"), [("gpu:8", 8), ("gpu:a100:4", 4), ("gpu", 1), ("shard:2,gpu:h100:2(S:0)", 2), ("tmp:1", None)]
)
def test_gpus_of_gres(gres: str, count: int | None) -> None:
    assert gpus_of(gres) == count


@pytest.mark.parametrize(
    ("head", "key", "value"),
    [
        ("#SBATCH --nodes=2-4", "slurm.nodes", 2),
        ("#SBATCH --nodes=1 --signal=B:USR1@600", "slurm.signal_seconds_before_limit", 600),
        ("#SBATCH --nodes=1 --exclude=n[1-3],n7", "slurm.exclude", ["n[1-3],n7"]),
        ("#SBATCH --nodes=1 --mail-user=a@b.c", "alerts.recipients", ["a@b.c"]),
        ("#SBATCH --nodes=1 --gpus-per-node=h100:2", "slurm.gpus_per_node", 2),
        ("#SBATCH --nodes=1 -J a/b", "run.name", "a-b"),
    ],
)
def test_directives_become_keys(head: str, key: str, value: object) -> None:
    found = import_text(minimal(head=head), "x")
    assert value_at(found.tables, key) == value and found.problems == ()


# ----------------------------------------------------------------------------- hostile files
def test_files_that_are_no_scripts(tmp_path: Path) -> None:
    contents = {
        "binary": (b"#!/bin/bash\n\0\1\2", "line 2: it is not text"),
        "latin": (b"#!/bin/bash\n# \xe9\n", "line 2: it is not UTF-8 text"),
        "huge": (b"#\n" * (LARGEST_SCRIPT_BYTES // 2 + 1), "it is larger than"),
        "empty": (b"", "no command in it starts a training"),
        "train": (b"source real.slurm\n", "line 1 sources real.slurm"),
    }
    for name, (content, words) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ScriptError) as caught:
            import_script(tmp_path / name)
        assert words in str(caught.value)
    with pytest.raises(ScriptError, match="folder"):
        read_script(tmp_path)
    with pytest.raises(ScriptError, match="does not exist"):
        read_script(tmp_path / "no")


@pytest.mark.parametrize(
    ("settings_text", "words"),
    [
        ("{", "are not JSON"),
        ("[1]", "are no JSON object"),
        ('{"a":' * 9000 + "1" + "}" * 9000, "nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "huge number"),
        ("{" + ",".join(f'"k{i}": 1' for i in range(1500)) + "}", "more than 1000 keys"),
    ],
)
def test_deepspeed_settings_that_are_none(settings_text: str, words: str) -> None:
    text = minimal("--deepspeed --deepspeed_config d.json", before=f"cat <<'E' > d.json\n{settings_text}\nE")
    with pytest.raises(ScriptError) as caught:
        import_text(text, "x")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_deepspeed_settings_with_unknown_parts() -> None:
    before = 'cat <<E > d.json\n{"train_batch_size": $N, "gradient_clipping": 1.0, "name": "$WHO"}\nE'
    found = import_text(minimal("--deepspeed --deepspeed_config d.json --clip-grad 1.0", before=before), "x")
    assert [item.option for item in found.decisions] == ["DeepSpeed name"]


def test_an_override_that_is_none_is_refused() -> None:
    with pytest.raises(CardError, match="is not a known key"):
        import_text(minimal(), "x", ["model.layerss=3"])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(NAMES), st.data())
def test_damaged_scripts_are_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    text = (SCRIPTS / f"{name}.slurm").read_text()
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 300))
    put = data.draw(st.text("$\"'`{}()\\\n#=- ab1\x1b\x7fé", max_size=12))
    damaged = text[:start] + put + text[start + length :]
    try:
        found = import_text(damaged, name)
    except ScriptError as error:
        assert "\n" not in str(error)
    else:
        assert tomllib.loads(found.text) == found.tables


# ----------------------------------------------------------------------------- the writer
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(KEYS, st.one_of(SCALARS, st.lists(SCALARS, max_size=4)), max_size=5), st.text(max_size=20))
def test_what_is_written_is_read_back(table: dict[str, Any], remark: str) -> None:
    tables = {"slurm": {"nodes": 1, "environment": table}, "batch": {"ramp": table}}
    remarks = {f"slurm.environment.{key}": remark for key in table} | {"slurm.nodes": remark, "batch.ramp": remark}
    assert tomllib.loads(write_card(tables, remarks, [remark])) == tables


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (220_000_000, "220_000_000"),
        (2048, "2048"),
        (6e-5, "6e-5"),
        (1e-8, "1e-8"),
        (0.1, "0.1"),
        (1.0, "1.0"),
        (1e300, "1e300"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert toml_value(value) == text
