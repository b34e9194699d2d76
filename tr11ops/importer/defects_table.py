"""Every known defect as a row: severity, what it is, its cost, the fix. `{...}` is filled in where
one is found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tr11ops.importer.results import Defect, DefectSeverity

_ERROR, _WARNING, _NOTE = DefectSeverity.ERROR, DefectSeverity.WARNING, DefectSeverity.NOTE
_REFUSED = "the training does not start"
_BATCH = "the training stops with an assertion when it reaches that batch"
_HUNG = "training hung at an evaluation three times: 18, 6 and 11 hours"
_SHARDS = "nothing: tr11 always shards the optimizer state"


class _Row(NamedTuple):
    """`code` may end in `/variant`, where one defect has two severities. `key`: of the card, which
    `--set` may give.
    """

    code: str
    severity: DefectSeverity
    what: str
    cost: str
    fix: str
    key: str = ""


_ROWS = (
    # -- the job around the training
    _Row(
        "exit-minute-missing",
        _WARNING,
        "the training never leaves by itself",
        "Slurm ends every attempt without a last checkpoint: up to one save interval is lost each time",
        "--set {key}={advised}",
        "run.exit_duration_minutes",
    ),
    _Row(
        "exit-minute-beyond-limit",
        _ERROR,
        "--exit-duration-in-mins {minutes:g} is not below the time limit of {limit:g} minutes",
        "Slurm kills every attempt first: no last checkpoint, up to one save interval lost each time",
        "the card has {advised}; confirm with --set {key}={advised}",
        "run.exit_duration_minutes",
    ),
    _Row(
        "exit-margin-short",
        _WARNING,
        "{margin:g} minutes are left between the exit and the time limit, less than one evaluation may take",
        "an attempt that ends with an evaluation is killed before its last save",
        "--set {key}={advised}",
        "run.exit_duration_minutes",
    ),
    _Row(
        "save-interval-beyond-limit",
        _ERROR,
        "a save every {interval} iterations is one in {span}, more than the whole attempt ({basis})",
        "only the save at the exit is ever made: a crash loses the attempt",
        "--set {key}={advised}, or checkpoint.interval_minutes",
        "checkpoint.interval",
    ),
    _Row(
        "save-interval-wide",
        _WARNING,
        "a save every {interval} iterations is one in {span} ({basis})",
        "a crash loses up to {span} of {nodes} nodes",
        "--set {key}={advised}, or checkpoint.interval_minutes",
        "checkpoint.interval",
    ),
    _Row(
        "evaluation-before-save",
        _NOTE,
        "every {evaluate} iterations the original evaluates before it saves",
        "a hang in the evaluation loses the {save} iterations before it (it did, three times)",
        "nothing: tr11 saves first",
    ),
    _Row(
        "no-pipefail",
        _WARNING,
        "the training is piped into {command} without `set -o pipefail`",
        "a crashed training ends the job as COMPLETED 0:0, so chains go on and no one is told",
        "nothing: tr11's job ends with the training's own status",
    ),
    _Row(
        "no-kill-on-bad-exit",
        _WARNING,
        "srun is started without --kill-on-bad-exit=1 (and --wait)",
        "when one worker dies the others may wait for ever: up to 3 hours of all nodes, several times",
        "nothing: tr11's agent ends the step",
    ),
    _Row(
        "nodes-differ",
        _ERROR,
        "the launcher is told {told} nodes, Slurm is asked for {asked} (line {other})",
        "the start waits for nodes that never come, or leaves nodes idle",
        "--set slurm.nodes=... says which is right",
        "slurm.nodes",
    ),
    _Row(
        "nodes-written-twice",
        _NOTE,
        "the number of nodes is written twice: for Slurm and for the launcher",
        "one change forgets the other",
        "nothing: slurm.nodes is the only place",
    ),
    _Row(
        "gpus-differ",
        _WARNING,
        "{workers} workers a node, {gpus} GPUs a node (line {other})",
        "workers share a GPU, or GPUs stay idle",
        "--set slurm.workers_per_node=...",
        "slurm.workers_per_node",
    ),
    _Row(
        "gpus-differ/shared",
        _ERROR,
        "{workers} workers a node, {gpus} GPUs a node (line {other})",
        "workers share a GPU, or GPUs stay idle",
        "--set slurm.workers_per_node=...",
        "slurm.workers_per_node",
    ),
    _Row(
        "tasks-per-node",
        _WARNING,
        "{tasks} tasks a node: each would start a launcher of its own",
        "workers start twice and fight for GPUs",
        "nothing: tr11 starts one a node",
    ),
    _Row(
        "directive-too-late",
        _WARNING,
        "#SBATCH {option} stands after the first command",
        "Slurm does not read it",
        "--set it in [slurm] if it was meant: {value}",
    ),
    _Row(
        "directive-with-variable",
        _ERROR,
        "#SBATCH {option}={value} holds a variable",
        "Slurm takes it literally: no shell has run yet",
        "--set the value in [slurm]",
    ),
    _Row(
        "kill-switch-missing",
        _NOTE,
        "no --kill-switch-path: the training cannot be stopped by a file",
        "only scancel stops it, without a save",
        "nothing: tr11's is in the run directory",
    ),
    _Row(
        "kill-switch-shared",
        _WARNING,
        "the kill switch {path} {says}",
        "anyone who stops the other run stops this one too, and the next start leaves at once",
        "--set run.kill_switch=none: each run has its own",
        "run.kill_switch",
    ),
    _Row(
        "launch-blocking",
        _NOTE,
        "CUDA_LAUNCH_BLOCKING is on, as asked by --set",
        "0 to 7 % of the speed; without it jobs of 40 nodes and more hung after the first step",
        "{fix}",
        "slurm.environment.CUDA_LAUNCH_BLOCKING",
    ),
    _Row(
        "continuation-broken",
        _ERROR,
        "a blank follows the backslash at the end of the line: the line does not continue",
        "the options below may never reach the trainer",
        "remove the blank and import again",
    ),
    _Row(
        "options-commented-out",
        _ERROR,
        "a # inside the launched text: {text!r} and all behind it is a comment there",
        "the options behind it never reach the trainer",
        "remove them from the script and import again",
    ),
    _Row(
        "not-exported",
        _ERROR,
        "${name} is used by the launched shell, and is not exported to it",
        "it is empty there; the import took its value",
        "was it meant? then `export {name}`",
    ),
    _Row(
        "windows-line-ends",
        _WARNING,
        "lines end as on Windows",
        "sbatch refuses the script",
        "nothing: the card has none",
    ),
    _Row(
        "from-environment",
        _NOTE,
        "${name} is set nowhere in the script",
        "the card cannot be used where it is not exported",
        "export {name}=..., or repair its spelling",
    ),
    # -- the model's shape
    _Row(
        "ffn-left-over",
        _ERROR,
        "--ffn-hidden-size {ffn} is not 4 x {hidden} = {meant}; was it left over from another model?",
        "the blocks hold {real_billion:.3g} billion parameters and not {meant_billion:.3g} "
        "(a 104B training was really one of 58B)",
        "--set {key}=none for 4 x hidden, or the same number to confirm it",
        "model.ffn_hidden_size",
    ),
    _Row(
        "hidden-by-heads",
        _ERROR,
        "hidden size {hidden} is not divisible by {heads} heads",
        _REFUSED,
        "change one of them",
        "model.hidden_size",
    ),
    _Row(
        "heads-by-tensor",
        _ERROR,
        "{heads} attention heads are not divisible by {tensor} tensor ranks",
        _REFUSED,
        "--set {key}=...",
        "parallel.tensor",
    ),
    _Row(
        "layers-by-stages",
        _ERROR,
        "{shown} = {units} is not divisible by {stages} pipeline stages",
        "some stages hold fewer blocks, and all others wait for the fullest at every step",
        "--set model.layers=... or parallel.pipeline=...",
        "model.layers",
    ),
    _Row(
        "workers-by-shape",
        _ERROR,
        "{world} workers are no multiple of tensor {tensor} x pipeline {stages} = {shape}",
        _REFUSED,
        "--set slurm.nodes=...",
        "slurm.nodes",
    ),
    _Row(
        "batch-by-replicas",
        _ERROR,
        "global batch {full} is not divisible by micro batch {micro} x {degree} replicas = {chunk}",
        _BATCH,
        "{near}",
        "batch.global_batch_size",
    ),
    _Row(
        "ramp-without-levels",
        _ERROR,
        "the ramp starts at the global batch {full}",
        "the original divides by zero at its start",
        "the card has no ramp: --set batch.ramp=none confirms it",
        "batch.ramp",
    ),
    _Row(
        "ramp-increment",
        _ERROR,
        "the increment {increment} does not divide {full} - {start} = {way}",
        _REFUSED,
        "--set {key}=... to a divisor",
        "batch.ramp.increment",
    ),
    *(
        _Row(
            f"ramp-{name}-by-replicas",
            _ERROR,
            f"the ramp's {name} {{value}} is not divisible by micro batch {{micro}} x {{degree}} replicas = {{chunk}}",
            _BATCH,
            "{near}",
            f"batch.ramp.{name}",
        )
        for name in ("start", "increment")
    ),
    _Row(
        "init-std-too-large",
        _ERROR,
        "initial weights of {std:g}{given} are large for {hidden} columns",
        "{cost}",
        "--set {key}={advice}",
        "model.init_std",
    ),
    _Row(
        "fused-softmax",
        _NOTE,
        "the original's fused softmax does not serve {heads} heads / {tensor} x micro batch {micro}, length {length}",
        "slower attention there",
        "nothing: tr11's attention has no such condition",
    ),
    # -- precision, DeepSpeed's file, schedule and data
    _Row(
        "deepspeed-file-unseen",
        _WARNING,
        "the script does not write the DeepSpeed settings that it names",
        "clipping, loss scale and curriculum may be said there, and are not in the card",
        "compare the card with that file",
    ),
    _Row(
        "underscore-in-json",
        _WARNING,
        "a number of the DeepSpeed settings holds an underscore, which JSON does not allow",
        "the trainer refuses the file at its start",
        "nothing: the number was read without it",
    ),
    *(
        _Row(
            f"deepspeed-disagrees/{key}",
            _ERROR,
            "DeepSpeed {name} {said:g}, {option} {given:g} (line {other})",
            "DeepSpeed goes by its file, the rest of the trainer by the argument",
            "the card has {given:g}: --set {key}=... says which is right",
            key,
        )
        for key in ("batch.micro_batch_size", "batch.global_batch_size", "optimizer.clip_grad")
    ),
    _Row(
        "clipping-unset",
        _WARNING,
        "the DeepSpeed settings have no gradient_clipping: --clip-grad had no effect",
        "gradients were not clipped",
        "the card clips as --clip-grad says; --set optimizer.clip_grad=0 does not",
    ),
    _Row(
        "zero-stage-differs",
        _NOTE,
        "ZeRO stage {stage} in the DeepSpeed settings, --zero-stage {argument:g} on line {other}",
        "the file decided",
        _SHARDS,
    ),
    _Row(
        "zero-stage-with-fp16",
        _WARNING,
        "ZeRO stage 0 belongs to bf16; this training is fp16",
        "every replica keeps the whole optimizer state: 12 bytes a parameter that sharding would save",
        f"{_SHARDS} (stage 1)",
    ),
    _Row(
        "zero-stage-with-bf16",
        _WARNING,
        "ZeRO stage {stage} with bf16: the original's bf16 optimizer shards by itself and wants stage 0",
        "the training does not start, or not in bf16",
        f"{_SHARDS} (stage 1)",
    ),
    _Row(
        "two-dtypes",
        _ERROR,
        "--fp16 and --bf16 are both given",
        _REFUSED,
        "--set precision.dtype=...",
        "precision.dtype",
    ),
    _Row(
        "dtype-disagrees",
        _ERROR,
        "DeepSpeed {block}.enabled is {enabled}, the arguments say {dtype} (--{block})",
        "weights and optimizer would be of two dtypes",
        "--set precision.dtype=...",
        "precision.dtype",
    ),
    _Row(
        "loss-scale-ignored",
        _NOTE,
        "--loss-scale {scale} had no effect: DeepSpeed reads the scale from its file",
        "none",
        "nothing: [precision] has what the file says; loss_scale there would fix the scale",
    ),
    _Row(
        "floor-above-peak",
        _ERROR,
        "--min-lr {floor:g} is above --lr {peak:g}",
        _REFUSED,
        "--set {key}=...",
        "schedule.min_learning_rate",
    ),
    *(
        _Row(
            f"warmup-beyond-decay/{unit}",
            _ERROR,
            f"the warm-up of {{warmup:,.0f}} {unit} is not shorter than the decay of {{length:,.0f}}",
            _REFUSED,
            "--set {key}=...",
            f"schedule.warmup_{unit}",
        )
        for unit in ("samples", "iterations")
    ),
    _Row(
        "two-ways-of-counting",
        _ERROR,
        "{first} counts samples and {second} on line {other} counts iterations",
        "the original refuses to start",
        "keep one way: set the other's keys to none",
        "batch.train_iterations",
    ),
    _Row(
        "two-schedulers",
        _ERROR,
        "--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other",
        _REFUSED,
        "--set {key}=...",
        "schedule.on_resume",
    ),
    _Row(
        "train-tokens-unused",
        _WARNING,
        "--train-tokens was accepted and never looked at: the original trained on until --train-samples",
        "the training was longer than planned; in the card it stops at that count",
        "--set {key}=none for the old length",
        "batch.train_tokens",
    ),
    _Row(
        "token-decay-warmup",
        _NOTE,
        "with --lr-decay-tokens the original noted the end of the warm-up only if a step ended exactly there",
        "the learning rate jumps a little at the end of the warm-up",
        "nothing",
    ),
    _Row(
        "ramp-with-curriculum",
        _WARNING,
        "a batch ramp and a curriculum of lengths at once: both make the first steps small",
        "few tokens a step for long",
        "--set {key}=none",
        "batch.ramp",
    ),
    _Row(
        "curriculum-start",
        _NOTE,
        "the first length {start} is no multiple of 8",
        "slow kernels",
        "--set {key}=...",
        "curriculum.start_length",
    ),
    _Row(
        "valid-workers",
        _WARNING,
        "--valid-num-workers {workers}: workers forked at an evaluation can deadlock",
        f"the {_HUNG}",
        "the card has 0",
        "data.valid_workers",
    ),
    _Row(
        "valid-workers/default",
        _NOTE,
        "--valid-num-workers is not given: the original starts 2 workers, which can deadlock at an evaluation",
        f"a {_HUNG}",
        "nothing: tr11's default is 0",
    ),
    _Row(
        "skip-ranges",
        _WARNING,
        "--skip-train-iteration-range skipped a micro batch for each global batch, and forgot it at a restart",
        "an experiment passed over 1,500 samples where 680,000 were meant",
        "nothing, if whole batches are meant: tr11 passes over those",
        "data.skip_ranges",
    ),
    _Row(
        "quotes-too-many",
        _WARNING,
        "the quotes around {value} reach the trainer as characters",
        "the trainer does not know that word",
        "nothing: the card has it without quotes",
    ),
)
_BY_CODE = {row.code: row for row in _ROWS}
CODES = frozenset(code.partition("/")[0] for code in _BY_CODE)


def defect(code: str, line: int, **values: Any) -> Defect:
    """The defect of that row on a line of the script, with the row's `{...}` filled in. `{key}` is
    the row's own.
    """
    row = _BY_CODE[code]
    what, cost, fix = (text.format(key=row.key, **values) for text in (row.what, row.cost, row.fix))
    return Defect(code.partition("/")[0], row.severity, line, what, cost, fix, row.key)
