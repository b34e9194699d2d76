"""Known defects: each is found where it is, on its line, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tr11ops.importer.defects_table import CODES
from tr11ops.importer.importing import import_text
from tr11ops.importer.results import Defect, DefectSeverity

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
    manual = (ROOT / "docs" / "import.md").read_text()
    assert len(CODES) > 45
    assert {code for code in CODES if f"`{code}`" not in manual} == set()
