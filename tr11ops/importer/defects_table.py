"""Every known defect as a row: severity, what it is, its cost, the fix. `{...}` is filled in where
one is found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tr11ops.importer.options import Defect, DefectSeverity

_ERROR = DefectSeverity.ERROR
_WARNING = DefectSeverity.WARNING
_NOTE = DefectSeverity.NOTE
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
        what="the training never leaves by itself",
        cost="Slurm ends every attempt without a last checkpoint: up to one save interval is lost each time",
        fix="--set {key}={advised}",
        key="run.exit_duration_minutes",
    ),
    _Row(
        "exit-minute-beyond-limit",
        _ERROR,
        what="--exit-duration-in-mins {minutes:g} is not below the time limit of {limit:g} minutes",
        cost="Slurm kills every attempt first: no last checkpoint, up to one save interval lost each time",
        fix="the card has {advised}; confirm with --set {key}={advised}",
        key="run.exit_duration_minutes",
    ),
    _Row(
        "exit-margin-short",
        _WARNING,
        what="{margin:g} minutes are left between the exit and the time limit, less than one evaluation may take",
        cost="an attempt that ends with an evaluation is killed before its last save",
        fix="--set {key}={advised}",
        key="run.exit_duration_minutes",
    ),
    _Row(
        "save-interval-beyond-limit",
        _ERROR,
        what="a save every {interval} iterations is one in {span}, more than the whole attempt ({basis})",
        cost="only the save at the exit is ever made: a crash loses the attempt",
        fix="--set {key}={advised}, or checkpoint.interval_minutes",
        key="checkpoint.interval",
    ),
    _Row(
        "save-interval-wide",
        _WARNING,
        what="a save every {interval} iterations is one in {span} ({basis})",
        cost="a crash loses up to {span} of {nodes} nodes",
        fix="--set {key}={advised}, or checkpoint.interval_minutes",
        key="checkpoint.interval",
    ),
    _Row(
        "evaluation-before-save",
        _NOTE,
        what="every {evaluate} iterations the original evaluates before it saves",
        cost="a hang in the evaluation loses the {save} iterations before it (it did, three times)",
        fix="nothing: tr11 saves first",
    ),
    _Row(
        "no-pipefail",
        _WARNING,
        what="the training is piped into {command} without `set -o pipefail`",
        cost="a crashed training ends the job as COMPLETED 0:0, so chains go on and no one is told",
        fix="nothing: tr11's job ends with the training's own status",
    ),
    _Row(
        "no-kill-on-bad-exit",
        _WARNING,
        what="srun is started without --kill-on-bad-exit=1 (and --wait)",
        cost="when one worker dies the others may wait for ever: up to 3 hours of all nodes, several times",
        fix="nothing: tr11's agent ends the step",
    ),
    _Row(
        "nodes-differ",
        _ERROR,
        what="the launcher is told {told} nodes, Slurm is asked for {asked} (line {other})",
        cost="the start waits for nodes that never come, or leaves nodes idle",
        fix="--set slurm.nodes=... says which is right",
        key="slurm.nodes",
    ),
    _Row(
        "nodes-written-twice",
        _NOTE,
        what="the number of nodes is written twice: for Slurm and for the launcher",
        cost="one change forgets the other",
        fix="nothing: slurm.nodes is the only place",
    ),
    _Row(
        "gpus-differ",
        _WARNING,
        what="{workers} workers a node, {gpus} GPUs a node (line {other})",
        cost="workers share a GPU, or GPUs stay idle",
        fix="--set slurm.workers_per_node=...",
        key="slurm.workers_per_node",
    ),
    _Row(
        "gpus-differ/shared",
        _ERROR,
        what="{workers} workers a node, {gpus} GPUs a node (line {other})",
        cost="workers share a GPU, or GPUs stay idle",
        fix="--set slurm.workers_per_node=...",
        key="slurm.workers_per_node",
    ),
    _Row(
        "tasks-per-node",
        _WARNING,
        what="{tasks} tasks a node: each would start a launcher of its own",
        cost="workers start twice and fight for GPUs",
        fix="nothing: tr11 starts one a node",
    ),
    _Row(
        "directive-too-late",
        _WARNING,
        what="#SBATCH {option} stands after the first command",
        cost="Slurm does not read it",
        fix="--set it in [slurm] if it was meant: {value}",
    ),
    _Row(
        "directive-with-variable",
        _ERROR,
        what="#SBATCH {option}={value} holds a variable",
        cost="Slurm takes it literally: no shell has run yet",
        fix="--set the value in [slurm]",
    ),
    _Row(
        "kill-switch-missing",
        _NOTE,
        what="no --kill-switch-path: the training cannot be stopped by a file",
        cost="only scancel stops it, without a save",
        fix="nothing: tr11's is in the run directory",
    ),
    _Row(
        "kill-switch-shared",
        _WARNING,
        what="the kill switch {path} {says}",
        cost="anyone who stops the other run stops this one too, and the next start leaves at once",
        fix="--set run.kill_switch=none: each run has its own",
        key="run.kill_switch",
    ),
    _Row(
        "launch-blocking",
        _NOTE,
        what="CUDA_LAUNCH_BLOCKING is on, as asked by --set",
        cost="0 to 7 % of the speed; without it jobs of 40 nodes and more hung after the first step",
        fix="{fix}",
        key="slurm.environment.CUDA_LAUNCH_BLOCKING",
    ),
    _Row(
        "continuation-broken",
        _ERROR,
        what="a blank follows the backslash at the end of the line: the line does not continue",
        cost="the options below may never reach the trainer",
        fix="remove the blank and import again",
    ),
    _Row(
        "options-commented-out",
        _ERROR,
        what="a # inside the launched text: {text!r} and all behind it is a comment there",
        cost="the options behind it never reach the trainer",
        fix="remove them from the script and import again",
    ),
    _Row(
        "not-exported",
        _ERROR,
        what="${name} is used by the launched shell, and is not exported to it",
        cost="it is empty there; the import took its value",
        fix="was it meant? then `export {name}`",
    ),
    _Row(
        "windows-line-ends",
        _WARNING,
        what="lines end as on Windows",
        cost="sbatch refuses the script",
        fix="nothing: the card has none",
    ),
    _Row(
        "from-environment",
        _NOTE,
        what="${name} is set nowhere in the script",
        cost="the card cannot be used where it is not exported",
        fix="export {name}=..., or repair its spelling",
    ),
    # -- the model's shape
    _Row(
        "ffn-left-over",
        _ERROR,
        what="--ffn-hidden-size {ffn} is not 4 x {hidden} = {meant}; was it left over from another model?",
        cost="the blocks hold {real_billion:.3g} billion parameters and not {meant_billion:.3g} "
        "(a 104B training was really one of 58B)",
        fix="--set {key}=none for 4 x hidden, or the same number to confirm it",
        key="model.ffn_hidden_size",
    ),
    _Row(
        "hidden-by-heads",
        _ERROR,
        what="hidden size {hidden} is not divisible by {heads} heads",
        cost=_REFUSED,
        fix="change one of them",
        key="model.hidden_size",
    ),
    _Row(
        "heads-by-tensor",
        _ERROR,
        what="{heads} attention heads are not divisible by {tensor} tensor ranks",
        cost=_REFUSED,
        fix="--set {key}=...",
        key="parallel.tensor",
    ),
    _Row(
        "layers-by-stages",
        _ERROR,
        what="{shown} = {units} is not divisible by {stages} pipeline stages",
        cost="some stages hold fewer blocks, and all others wait for the fullest at every step",
        fix="--set model.layers=... or parallel.pipeline=...",
        key="model.layers",
    ),
    _Row(
        "workers-by-shape",
        _ERROR,
        what="{world} workers are no multiple of tensor {tensor} x pipeline {stages} = {shape}",
        cost=_REFUSED,
        fix="--set slurm.nodes=...",
        key="slurm.nodes",
    ),
    _Row(
        "batch-by-replicas",
        _ERROR,
        what="global batch {full} is not divisible by micro batch {micro} x {degree} replicas = {chunk}",
        cost=_BATCH,
        fix="{near}",
        key="batch.global_batch_size",
    ),
    _Row(
        "ramp-without-levels",
        _ERROR,
        what="the ramp starts at the global batch {full}",
        cost="the original divides by zero at its start",
        fix="the card has no ramp: --set batch.ramp=none confirms it",
        key="batch.ramp",
    ),
    _Row(
        "ramp-increment",
        _ERROR,
        what="the increment {increment} does not divide {full} - {start} = {way}",
        cost=_REFUSED,
        fix="--set {key}=... to a divisor",
        key="batch.ramp.increment",
    ),
    *(
        _Row(
            f"ramp-{name}-by-replicas",
            _ERROR,
            what=f"the ramp's {name} {{value}} is not divisible by micro batch {{micro}} x {{degree}} "
            "replicas = {chunk}",
            cost=_BATCH,
            fix="{near}",
            key=f"batch.ramp.{name}",
        )
        for name in ("start", "increment")
    ),
    _Row(
        "init-std-too-large",
        _ERROR,
        what="initial weights of {std:g}{given} are large for {hidden} columns",
        cost="{cost}",
        fix="--set {key}={advice}",
        key="model.init_std",
    ),
    _Row(
        "fused-softmax",
        _NOTE,
        what="the original's fused softmax does not serve {heads} heads / {tensor} x micro batch {micro}, "
        "length {length}",
        cost="slower attention there",
        fix="nothing: tr11's attention has no such condition",
    ),
    # -- precision, DeepSpeed's file, schedule and data
    _Row(
        "deepspeed-file-unseen",
        _WARNING,
        what="the script does not write the DeepSpeed settings that it names",
        cost="clipping, loss scale and curriculum may be said there, and are not in the card",
        fix="compare the card with that file",
    ),
    _Row(
        "underscore-in-json",
        _WARNING,
        what="a number of the DeepSpeed settings holds an underscore, which JSON does not allow",
        cost="the trainer refuses the file at its start",
        fix="nothing: the number was read without it",
    ),
    *(
        _Row(
            f"deepspeed-disagrees/{key}",
            _ERROR,
            what="DeepSpeed {name} {said:g}, {option} {given:g} (line {other})",
            cost="DeepSpeed goes by its file, the rest of the trainer by the argument",
            fix="the card has {given:g}: --set {key}=... says which is right",
            key=key,
        )
        for key in ("batch.micro_batch_size", "batch.global_batch_size", "optimizer.clip_grad")
    ),
    _Row(
        "clipping-unset",
        _WARNING,
        what="the DeepSpeed settings have no gradient_clipping: --clip-grad had no effect",
        cost="gradients were not clipped",
        fix="the card clips as --clip-grad says; --set optimizer.clip_grad=0 does not",
    ),
    _Row(
        "zero-stage-differs",
        _NOTE,
        what="ZeRO stage {stage} in the DeepSpeed settings, --zero-stage {argument:g} on line {other}",
        cost="the file decided",
        fix=_SHARDS,
    ),
    _Row(
        "zero-stage-with-fp16",
        _WARNING,
        what="ZeRO stage 0 belongs to bf16; this training is fp16",
        cost="every replica keeps the whole optimizer state: 12 bytes a parameter that sharding would save",
        fix=f"{_SHARDS} (stage 1)",
    ),
    _Row(
        "zero-stage-with-bf16",
        _WARNING,
        what="ZeRO stage {stage} with bf16: the original's bf16 optimizer shards by itself and wants stage 0",
        cost="the training does not start, or not in bf16",
        fix=f"{_SHARDS} (stage 1)",
    ),
    _Row(
        "two-dtypes",
        _ERROR,
        what="--fp16 and --bf16 are both given",
        cost=_REFUSED,
        fix="--set precision.dtype=...",
        key="precision.dtype",
    ),
    _Row(
        "dtype-disagrees",
        _ERROR,
        what="DeepSpeed {block}.enabled is {enabled}, the arguments say {dtype} (--{block})",
        cost="weights and optimizer would be of two dtypes",
        fix="--set precision.dtype=...",
        key="precision.dtype",
    ),
    _Row(
        "loss-scale-ignored",
        _NOTE,
        what="--loss-scale {scale} had no effect: DeepSpeed reads the scale from its file",
        cost="none",
        fix="nothing: [precision] has what the file says; loss_scale there would fix the scale",
    ),
    _Row(
        "floor-above-peak",
        _ERROR,
        what="--min-lr {floor:g} is above --lr {peak:g}",
        cost=_REFUSED,
        fix="--set {key}=...",
        key="schedule.min_learning_rate",
    ),
    *(
        _Row(
            f"warmup-beyond-decay/{unit}",
            _ERROR,
            what=f"the warm-up of {{warmup:,.0f}} {unit} is not shorter than the decay of {{length:,.0f}}",
            cost=_REFUSED,
            fix="--set {key}=...",
            key=f"schedule.warmup_{unit}",
        )
        for unit in ("samples", "iterations")
    ),
    _Row(
        "two-ways-of-counting",
        _ERROR,
        what="{first} counts samples and {second} on line {other} counts iterations",
        cost="the original refuses to start",
        fix="keep one way: set the other's keys to none",
        key="batch.train_iterations",
    ),
    _Row(
        "two-schedulers",
        _ERROR,
        what="--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other",
        cost=_REFUSED,
        fix="--set {key}=...",
        key="schedule.on_resume",
    ),
    _Row(
        "train-tokens-unused",
        _WARNING,
        what="--train-tokens was accepted and never looked at: the original trained on until --train-samples",
        cost="the training was longer than planned; in the card it stops at that count",
        fix="--set {key}=none for the old length",
        key="batch.train_tokens",
    ),
    _Row(
        "token-decay-warmup",
        _NOTE,
        what="with --lr-decay-tokens the original noted the end of the warm-up only if a step ended exactly there",
        cost="the learning rate jumps a little at the end of the warm-up",
        fix="nothing",
    ),
    _Row(
        "ramp-with-curriculum",
        _WARNING,
        what="a batch ramp and a curriculum of lengths at once: both make the first steps small",
        cost="few tokens a step for long",
        fix="--set {key}=none",
        key="batch.ramp",
    ),
    _Row(
        "curriculum-start",
        _NOTE,
        what="the first length {start} is no multiple of 8",
        cost="slow kernels",
        fix="--set {key}=...",
        key="curriculum.start_length",
    ),
    _Row(
        "valid-workers",
        _WARNING,
        what="--valid-num-workers {workers}: workers forked at an evaluation can deadlock",
        cost=f"the {_HUNG}",
        fix="the card has 0",
        key="data.valid_workers",
    ),
    _Row(
        "valid-workers/default",
        _NOTE,
        what="--valid-num-workers is not given: the original starts 2 workers, which can deadlock at an evaluation",
        cost=f"a {_HUNG}",
        fix="nothing: tr11's default is 0",
    ),
    _Row(
        "skip-ranges",
        _WARNING,
        what="--skip-train-iteration-range skipped a micro batch for each global batch, and forgot it at a restart",
        cost="an experiment skipped 1,500 samples where 680,000 were meant",
        fix="nothing, if whole batches are meant: tr11 skips those",
        key="data.skip_ranges",
    ),
    _Row(
        "quotes-too-many",
        _WARNING,
        what="the quotes around {value} reach the trainer as characters",
        cost="the trainer does not know that word",
        fix="nothing: the card has it without quotes",
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
    return Defect(
        code.partition("/")[0], row.severity, line=line, what=what, cost=cost, fix=fix, key=row.key
    )
