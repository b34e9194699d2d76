"""What becomes of the old trainer's options, and what is wrong with old scripts themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.tr11ops.importer.old_scripts import minimal, value_at
from tr11ops.cluster.sbatch_options import gpus_of
from tr11ops.importer.defects_table import CODES
from tr11ops.importer.importing import import_text
from tr11ops.importer.options import Defect, DefectSeverity, LeftReason
from tr11ops.importer.options_table import RULES
from tr11ops.importer.sbatch import read_directives
from tr11ops.runcard.card import OwnCard

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
                for item in (OwnCard.model_fields[section].annotation,)
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
        ("--position-embedding-type rope", "model.position_embedding", "rotary"),
        ("--position-embedding-type learned_absolute", "model.position_embedding", "absolute"),
        ("--use-rotary-position-embeddings", "model.position_embedding", "rotary"),
        ("--use-rotary-position-embeddings --rotary-base 500000", "model.rotary_base", 500000.0),
        ("--position-embedding-type rope --use-rope-scaling", "model.rotary_factor", 8.0),
        ("--position-embedding-type rope --use-rope-scaling", "model.rotary_original_length", 8192),
        ("--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 32", "model.rotary_factor", 32.0),
        ("--normalization RMSNorm", "model.norm", "rmsnorm"),
        ("--normalization rmsnorm --norm-epsilon 1e-6", "model.layernorm_epsilon", 1e-6),
        ("--normalization RMSNorm --qk-layernorm", "model.qk_norm", True),
        ("--disable-bias-linear", "model.linear_biases", False),
        ("--untie-embeddings-and-output-weights", "model.tied_embeddings", False),
        ("--swiglu --disable-bias-linear", "model.activation", "swiglu"),
        ("--swiglu --disable-bias-linear --hidden-size 256", "model.ffn_hidden_size", 640),
        ("--swiglu --disable-bias-linear --hidden-size 256 --ffn-hidden-size 1024", "model.ffn_hidden_size", 1024),
        ("--group-query-attention --num-query-groups 2", "model.key_value_heads", 2),
        ("--group-query-attention", "model.key_value_heads", 1),
        ("--num-key-value-heads 2", "model.key_value_heads", 2),
        ("--encoder-num-layers 2 --decoder-num-layers 2", "model.layers", 2),
        ("--lr-decay-style WSD --lr-wsd-decay-samples 40", "schedule.decay_style", "wsd"),
        ("--lr-decay-style WSD --lr-wsd-decay-samples 40", "schedule.cooldown_style", "exponential"),
        ("--lr-decay-style WSD --lr-wsd-decay-samples 40", "schedule.cooldown_samples", 40),
        ("--lr-decay-style WSD --lr-wsd-decay-style 1-sqrt --lr-wsd-decay-iters 9", "schedule.cooldown_style",
         "minus_sqrt"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 9", "schedule.cooldown_iterations", 9),
        ("--override-opt_param-scheduler", "schedule.on_resume", "override"),
        ("--fp8-format hybrid", "precision.float8", True),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /t2", "tokenizer.path", "/t2"),
        ("--vocab-size 500", "tokenizer.vocabulary_size", 500),
        ("--data-cache-path /c", "data.cache", "/c"),
        ("--exit-on-missing-checkpoint", "run.expect_resume", True),
        ("--train-data-path 0.3 /d/a 0.7 /d/b", "data.train_group", "train: 0.3 0:1 /d/a, 0.7 0:1 /d/b"),
        ("--valid-data-path /d/v", "data.valid_groups", ["valid: 1 0:1 /d/v"]),
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
        ("--lr-decay-style step", "is none of constant, linear, cosine, WSD"),
        ("--skip-train-iteration-range 10", "is not a range"),
        ("--kill-switch-path /k/$SLURM_JOB_ID", "${SLURM_JOB_ID} is only known inside the job"),
        ("--kill-switch-path $(mktemp)", "is only known inside the job"),
        ("--data-path 0.5 /a 0.5", "neither one prefix nor pairs"),
        ("--initial-loss-scale 1000", "power of two"),
        ("--swiglu", "the original's linear layers have biases"),
        ("--squared-relu", "another model"),
        ("--position-embedding-type rope --rotary-percent 0.25", "another model"),
        ("--no-position-embedding", "there is no model without positions"),
        ("--qk-layernorm", "always RMSNorm here"),
        ("--context-parallel-size 2", "a sequence is not cut over ranks"),
        ("--calculate-per-token-loss --eod-mask-loss", "each micro batch weighs the same"),
        (
            "--encoder-num-layers 2 --decoder-num-layers 3",
            "encoder and decoder have as many blocks here, not 2 and 3",
        ),
        ("--mock-data", "name data.prefixes"),
        ("--kill-switch-path <path>/stop", "<path> is a placeholder, to be filled in"),
        ("--seed '<ANY NUMBER>'", "<ANY NUMBER> is a placeholder, to be filled in"),
        ("--seed $3", "${3} is an argument of the script"),
        ("$@", "the options that are typed behind the script"),
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
    assert {
        item.option: item.reason
        for item in found.unplaced
        if "p2p" in item.option or item.option == rounds
    } == {
        "--no-overlap-p2p-communication": LeftReason.DROPPED,
        rounds: LeftReason.ELSEWHERE,
    }
    other = import_text(minimal(f"{given} {rounds} 3"), "x").unplaced
    assert next(item.reason for item in other if item.option == rounds) is LeftReason.NO_COUNTERPART
    alone = import_text(minimal(f"{rounds} 2"), "x").unplaced
    assert next(item.reason for item in alone if item.option == rounds) is LeftReason.NO_EFFECT


def test_a_training_counted_in_iterations() -> None:
    text = minimal("--lr-decay-iters 90 --lr-warmup-iters 10").replace(
        "--train-samples 400", "--train-iters 100"
    )
    found = import_text(text, "x")
    assert found.problems == () and found.exit_code == 0
    assert found.tables["batch"] == {
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "train_iterations": 100,
    }
    assert (
        found.tables["schedule"]["decay_iterations"] == 90
        and found.tables["schedule"]["warmup_iterations"] == 10
    )


def test_substitutions_are_told_and_the_known_ones_are_not() -> None:
    before = "A=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\nB=`pwd`\nC=$(wc -l < list)\nD=$((E * 2))"
    found = import_text(minimal(before=before), "x")
    told = [
        (item.option, item.line, item.why)
        for item in found.unplaced
        if item.why.startswith("in a value")
    ]
    assert told == [
        ("$(wc -l < list)", 8, "in a value: is not evaluated"),
        ("$((E * 2))", 9, "in a value: E is not known"),
    ]


def test_the_minimal_script_leaves_nothing_open() -> None:
    found = import_text(minimal(), "x")
    assert (found.exit_code, found.decisions, found.problems) == (0, (), ())
    assert (
        found.tables["logging"]["tensorboard"] is False
        and found.tables["schedule"]["decay_style"] == "linear"
    )


def test_checkpoints_that_lie_in_the_save_folder_itself() -> None:
    text = minimal().replace("--save /r/checkpoints/main", "--save /r/old")
    found = import_text(text, "x")
    assert found.tables["run"]["directory"] == "/r/old" and [
        item.key for item in found.decisions
    ] == ["checkpoint.load"]
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
    assert found.tables["slurm"]["setup"] == [
        'export PATH="/opt/bin:$PATH"',
        'export WHERE="$TMPDIR/x"',
    ]
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
    ("gres", "count"),
    [("gpu:8", 8), ("gpu:a100:4", 4), ("gpu", 1), ("shard:2,gpu:h100:2(S:0)", 2), ("tmp:1", None)],
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
        ("#SBATCH --nodes=1 --gpus-per-node=h100:2", "slurm.options", {"gpus-per-node": "h100:2"}),
        (
            "#SBATCH --nodes=1 --gres=gpu:a100:2,nic:1",
            "slurm.options",
            {"gres": "gpu:a100:2,nic:1"},
        ),
        (
            "#SBATCH --nodes=1 --mem=0 -L scratch --exclusive --switches=1@10",
            "slurm.options",
            {"mem": "0", "licenses": "scratch", "exclusive": True, "switches": "1@10"},
        ),
        (
            "#SBATCH --nodes=1 --wckey=x --segment=1",
            "slurm.options",
            {"wckey": "x", "segment": "1"},
        ),
        ("#SBATCH --nodes=1 -J a/b", "run.name", "a-b"),
    ],
)
def test_directives_become_keys(head: str, key: str, value: object) -> None:
    """Also those that the card passes through to sbatch."""
    found = import_text(minimal(head=head), "x")
    assert value_at(found.tables, key) == value and found.problems == ()


def test_options_that_cannot_be_passed_through_are_left() -> None:
    found = import_text(
        minimal(head="#SBATCH --nodes=1 --clusters=other --nodelist=n1 --parsable"), "x"
    )
    assert {item.option: item.reason for item in found.unplaced if item.option.startswith("#SBATCH")} == {
        "#SBATCH --clusters": LeftReason.DECISION, "#SBATCH --nodelist": LeftReason.DECISION,
        "#SBATCH --parsable": LeftReason.NO_COUNTERPART,
    }  # fmt: skip


# ---------------------------------------------------------------------------
# Known defects: each is found where it is, on its line, and nowhere else.


ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "tests" / "data" / "slurm_scripts"
BASE = (SCRIPTS / "large-bf16.slurm").read_text()
SMALL = (SCRIPTS / "small-twenty-hours.slurm").read_text()
CURRICULUM = (SCRIPTS / "curriculum.slurm").read_text()
ALWAYS = {"from-environment", "evaluation-before-save", "exit-margin-short", "no-pipefail"}


def defects(text: str) -> dict[str, Defect]:
    return {defect.code: defect for defect in import_text(text, "x").defects}


def test_the_176b_script_has_these_and_no_others() -> None:
    assert set(defects(BASE)) == ALWAYS


ERROR, WARNING, NOTE = DefectSeverity.ERROR, DefectSeverity.WARNING, DefectSeverity.NOTE
CASES = [
    # old text, new text, code, severity, words of the line that is named
    ("100 - 10))", "100))", "exit-minute-beyond-limit", ERROR, "--exit-duration-in-mins"),
    ("    --exit-duration-in-mins $((60 * 100 - 10)) \\\n", "", "exit-minute-missing", WARNING, "srun"),
    ("NNODES=$SLURM_NNODES", "NNODES=24", "nodes-differ", ERROR, "NNODES=24"),
    ("NNODES=$SLURM_NNODES", "NNODES=48", "nodes-written-twice", NOTE, "NNODES=48"),
    ("GPUS_PER_NODE=8", "GPUS_PER_NODE=4", "gpus-differ", WARNING, "GPUS_PER_NODE=4"),
    ("GPUS_PER_NODE=8", "GPUS_PER_NODE=16", "gpus-differ", ERROR, "GPUS_PER_NODE=16"),
    ("--ntasks-per-node=1", "--ntasks-per-node=8", "tasks-per-node", WARNING, "--ntasks-per-node"),
    ("--kill-on-bad-exit=1 ", "", "no-kill-on-bad-exit", WARNING, "rdzv_endpoint"),
    ("set -x -e\n", "set -x -e\n#SBATCH --nice=10000\n", "directive-too-late", WARNING, "--nice"),
    ("--qos=qos_gpu-gc", "--qos=$QOS", "directive-with-variable", ERROR, "--qos"),
    ("    --kill-switch-path $STOP_FILE \\\n", "", "kill-switch-missing", NOTE, "srun"),
    ("kill-switch-tr11-176B-exp1", "kill-switch-tr11-200B-exp1", "kill-switch-shared", WARNING, "--kill-switch-path"),
    ("code/tr11-176B-ml/kill-switch-tr11-176B-exp1", "kill-switch", "kill-switch-shared", WARNING, "--kill-switch-path"),
    ("--lr 6e-5 \\\n", "--lr 6e-5 \\  \n", "continuation-broken", ERROR, "--lr 6e-5"),
    ("    --lr 6e-5 \\\n", "    # --lr 6e-5 \\\n", "options-commented-out", ERROR, "# --lr"),
    ("--hidden-size $WIDTH", "--hidden-size 14300", "hidden-by-heads", ERROR, "--hidden-size"),
    ("HEADS=112", "HEADS=14", "heads-by-tensor", ERROR, "--tensor-model-parallel-size"),
    ("LAYERS=70", "LAYERS=72", "layers-by-stages", ERROR, "--num-layers"),
    ("#SBATCH --nodes=48", "#SBATCH --nodes=47", "workers-by-shape", ERROR, "--pipeline-model-parallel-size"),
    ("GLOBAL=2048", "GLOBAL=2040", "batch-by-replicas", ERROR, "--global-batch-size"),
    ("192 16 9_765_625", "2048 16 9_765_625", "ramp-without-levels", ERROR, "--rampup"),
    ("192 16 9_765_625", "192 96 9_765_625", "ramp-increment", ERROR, "--rampup"),
    ("192 16 9_765_625", "200 16 9_765_625", "ramp-start-by-replicas", ERROR, "--rampup"),
    ("MICRO=2", "MICRO=4", "ramp-increment-by-replicas", ERROR, "--rampup"),
    ("--init-method-std 0.0048", "--init-method-std 0.02", "init-std-too-large", ERROR, "--init-method-std"),
    ("    --init-method-std 0.0048 \\\n", "", "init-std-too-large", ERROR, "srun"),
    ("--hidden-size $WIDTH", "--hidden-size $WIDTH --ffn-hidden-size 20480", "ffn-left-over", ERROR, "--ffn-hidden-size"),
    ("LENGTH=2048", "LENGTH=4096", "fused-softmax", NOTE, "--num-attention-heads"),
    ('"train_batch_size": $GLOBAL', '"train_batch_size": 1024', "deepspeed-disagrees", ERROR, '"train_batch_size"'),
    ('"gradient_clipping": 1.0', '"gradient_clipping": 0.5', "deepspeed-disagrees", ERROR, '"gradient_clipping"'),
    ('  "gradient_clipping": 1.0,\n', "", "clipping-unset", WARNING, "cat <<EOT"),
    ("cat <<EOT > $config_json", "cat <<EOT", "deepspeed-file-unseen", WARNING, "--deepspeed_config"),
    ('"steps_per_print": 2000', '"steps_per_print": 2_000', "underscore-in-json", WARNING, "steps_per_print"),
    ("ZERO_STAGE=0", "ZERO_STAGE=1", "zero-stage-with-bf16", WARNING, '"stage"'),
    ('"stage": $ZERO_STAGE', '"stage": 1', "zero-stage-differs", NOTE, '"stage"'),
    ("    --bf16 \\\n", "    --bf16 --fp16 \\\n", "two-dtypes", ERROR, "--fp16"),
    ("    --bf16 \\\n", "    --fp16 \\\n", "dtype-disagrees", ERROR, '"enabled"'),
    ("    --bf16 \\\n", "    --bf16 --loss-scale 12 \\\n", "loss-scale-ignored", NOTE, "--loss-scale"),
    ("--min-lr 6e-6", "--min-lr 6e-4", "floor-above-peak", ERROR, "--min-lr"),
    ("LR_WARMUP_SAMPLES=183_105", "LR_WARMUP_SAMPLES=200_000_000", "warmup-beyond-decay", ERROR, "--lr-warmup-samples"),
    ("    --seed 42 \\\n", "    --seed 42 --lr-decay-iters 5 \\\n", "two-ways-of-counting", ERROR, "--train-samples"),
    ("    --seed 42 \\\n", "    --override-lr-scheduler --use-checkpoint-lr-scheduler \\\n", "two-schedulers", ERROR, "--override"),
    ("    --seed 42 \\\n", "    --train-tokens 9 \\\n", "train-tokens-unused", WARNING, "--train-tokens"),
    ("    --seed 42 \\\n", "    --lr-decay-tokens 999_999_999_999 \\\n", "token-decay-warmup", NOTE, "--lr-decay-tokens"),
    ("--valid-num-workers 0", "--valid-num-workers 2", "valid-workers", WARNING, "--valid-num-workers"),
    ("    --valid-num-workers 0 \\\n", "", "valid-workers", NOTE, "srun"),
    ("    --seed 42 \\\n", "    --skip-train-iteration-range 5-9 \\\n", "skip-ranges", WARNING, "--skip-train"),
    ("SAVE_EVERY=100", "SAVE_EVERY=2000", "save-interval-wide", WARNING, "--save-interval"),
    ("SAVE_EVERY=100", "SAVE_EVERY=9000", "save-interval-beyond-limit", ERROR, "--save-interval"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "code", "severity", "words"),
    CASES,
    ids=[f"{case[2]}-{i}" for i, case in enumerate(CASES)],
)
def test_each_defect_is_found_on_its_line(
    old: str, new: str, code: str, severity: DefectSeverity, words: str
) -> None:
    assert BASE.count(old) >= 1, old
    text = BASE.replace(old, new)
    found = defects(text)
    assert code in found, sorted(found)
    defect = found[code]
    assert defect.severity is severity
    assert (
        defect.what
        and defect.cost
        and defect.fix
        and "\n" not in defect.what + defect.cost + defect.fix
    )
    lines = text.split("\n")
    # a launch inside `bash -c` begins where its launcher's text was written
    if words in {"srun", "rdzv_endpoint"}:
        assert defect.line in {
            number for number, line in enumerate(lines, 1) if "srun" in line or "LAUNCHER" in line
        }
    else:
        assert words in lines[defect.line - 1], (defect.line, lines[defect.line - 1])


@pytest.mark.parametrize(
    ("base", "old", "new", "code"),
    [
        (SMALL, "", "", "zero-stage-with-fp16"),
        (CURRICULUM, '"min_difficulty": 64', '"min_difficulty": 63', "curriculum-start"),
        (CURRICULUM, "--fp16 ", "--fp16 --rampup-batch-size 16 16 6_000_000 ", "ramp-with-curriculum"),
        (CURRICULUM, "export CMD=", "CMD=", "not-exported"),
        (SMALL, "--pp-partition-method 'type:transformer|embedding'", "--pp-partition-method \"'type:transformer|embedding'\"", "quotes-too-many"),
        (SMALL, "\n", "\r\n", "windows-line-ends"),
    ],
)  # fmt: skip
def test_defects_of_other_scripts(base: str, old: str, new: str, code: str) -> None:
    assert code in defects(base.replace(old, new) if old else base)
    if old:
        assert code not in defects(base)


def test_a_pipe_with_pipefail_is_no_defect() -> None:
    assert "no-pipefail" not in defects(BASE.replace("set -x -e", "set -x -eo pipefail"))


def test_quotes_that_reached_the_trainer_are_taken_off() -> None:
    text = SMALL.replace(
        "--pp-partition-method 'type:transformer|embedding'",
        "--pp-partition-method \"'type:transformer|embedding'\"",
    )
    assert import_text(text, "x").tables["parallel"]["partition"] == "type:transformer|embedding"


def test_the_left_over_width_tells_the_size_of_the_model() -> None:
    """64 blocks, hidden 11,600, 20,480 wide: 58 billion and not 104, as the field found out."""
    text = CURRICULUM.replace("--hidden-size 11600", "--hidden-size 11600 --ffn-hidden-size 20480")
    cost = defects(text)["ffn-left-over"].cost
    blocks = [
        float(number)
        for number in re.findall(r"([0-9.]+) billion|not ([0-9.]+)", cost)[0]
        if number
    ]
    assert blocks[0] == pytest.approx(64 * (4 * 11600**2 + 2 * 11600 * 20480) / 1e9, rel=0.01)


def test_a_set_settles_an_error() -> None:
    text = BASE.replace("--init-method-std 0.0048", "--init-method-std 0.02")
    assert import_text(text, "x").exit_code == 1
    assert import_text(text, "x", ["model.init_std=0.006"]).exit_code == 0


def test_the_manual_lists_every_defect() -> None:
    manual = (ROOT / "docs" / "reference" / "import-defects.md").read_text()
    assert len(CODES) > 45
    assert {code for code in CODES if f"`{code}`" not in manual} == set()
