"""Defects of a script: of the job around the training (time limits, exits, pipes, nodes, kill
switch, lost text), of precision, DeepSpeed's file, schedule and data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.complete import data_parallel, time_limit
from tr11ops.importer.defects_table import defect
from tr11ops.importer.expansion import Script
from tr11ops.importer.launch import DeepSpeedFile, ParsedLaunch
from tr11ops.importer.options import Builder, Defect, DefectSeverity, OptionUse, number, unquoted
from tr11ops.importer.sbatch import Directive
from tr11ops.runcard.rules import (
    LONG_ATTEMPT_SECONDS,
    MARGIN_WITH_EVALUATION_SECONDS,
    advised_exit_minutes,
)
from trainer.config.model import WHAT_IT_COST, std_advice
from trainer.contract.record import Record

# Everything that a look for defects may need: the script as it was read, and the keys as they were
# placed.


class Case(Record):
    """One script under examination; `card` holds the script's own values, before any was changed."""

    text: str
    directives: Sequence[Directive]
    script: Script
    launch: ParsedLaunch
    uses: Mapping[str, OptionUse]
    deepspeed: DeepSpeedFile | None
    card: Builder

    def has(self, option: str) -> bool:
        """Whether the option is given to the trainer."""
        return option in self.uses

    def line(self, option: str) -> int:
        """The line of an option; the launch's when it is not given."""
        use = self.uses.get(option)
        if use:
            return use.line
        return self.launch.line

    def number(self, option: str) -> float | None:
        """The option's value, when it is a known number."""
        use = self.uses.get(option)
        if use is None:
            return None
        try:
            return number(use.values)
        except ConversionProblem:
            return None

    def directive(self, name: str) -> Directive | None:
        """The last `#SBATCH` option of that name that Slurm reads."""
        return next(
            (item for item in reversed(self.directives) if item.name == name and item.read), None
        )


_FEWEST_NODES_FOR_BLOCKING = 40


def exit_minute(case: Case) -> Iterator[Defect]:
    """`--exit-duration-in-mins` beyond the time limit, too close to it, or missing."""
    limit = time_limit(case.card)
    minutes = case.card.number("run.exit_duration_minutes")
    if not limit:
        return
    line = case.line("--exit-duration-in-mins")
    advised = f"{advised_exit_minutes(limit):g}"
    if minutes is None:
        if not case.has("--exit-interval"):
            yield defect("exit-minute-missing", line, advised=advised)
        return
    if minutes * 60 >= limit:
        yield defect(
            "exit-minute-beyond-limit", line, minutes=minutes, limit=limit / 60, advised=advised
        )
        return
    margin = limit - minutes * 60
    evaluates = (case.card.number("evaluation.iterations") or 0) > 0
    if evaluates and limit >= LONG_ATTEMPT_SECONDS and margin < MARGIN_WITH_EVALUATION_SECONDS:
        yield defect("exit-margin-short", line, margin=margin / 60, advised=advised)


def evaluation_before_save(case: Case) -> Iterator[Defect]:
    """Evaluation and save at the same iteration: the original evaluates first."""
    save = case.card.integer("checkpoint.interval")
    evaluate = case.card.integer("evaluation.interval")
    if save and evaluate and evaluate % save == 0 and case.card.integer("evaluation.iterations"):
        yield defect(
            "evaluation-before-save", case.line("--eval-interval"), evaluate=evaluate, save=save
        )


def pipe_hides_the_end(case: Case) -> Iterator[Defect]:
    """`... | tee` without pipefail."""
    holders = [
        case.launch.command,
        *(c for c in case.script.commands if c.words is case.launch.command.outer),
    ]
    piped = next((command for command in holders if command.piped_into), None)
    if piped is not None and "pipefail" not in case.script.shell_options:
        yield defect("no-pipefail", piped.line, command=piped.piped_into[-1] or "a command")


def bad_exit(case: Case) -> Iterator[Defect]:
    """`srun` that lets a step live after a worker died."""
    words = [word.text for word in (*case.launch.command.outer, *case.launch.command.words)]
    if "srun" in words and not any(word.startswith(("--kill-on-bad-exit", "-K")) for word in words):
        yield defect("no-kill-on-bad-exit", case.launch.line)


def node_counts(case: Case) -> Iterator[Defect]:
    """The launcher's numbers against Slurm's."""
    nodes = case.directive("nodes")
    _, value = case.launch.nodes
    if nodes is not None and value is not None and value.is_known and value.line != nodes.line:
        asked = nodes.value.partition("-")[0]
        told = value.text.partition(":")[0]
        if asked != told:
            yield defect("nodes-differ", value.line, told=told, asked=asked, other=nodes.line)
        else:
            yield defect("nodes-written-twice", value.line)
    workers = case.card.integer("slurm.workers_per_node")
    gpus = case.card.integer("slurm.gpus_per_node")
    if workers and gpus and workers != gpus:
        code = "gpus-differ/shared" if workers > gpus else "gpus-differ"
        said = case.card.placed["slurm.workers_per_node"]
        line = said.value_line or said.line
        other = case.card.line("slurm.gpus_per_node")
        yield defect(code, line, workers=workers, gpus=gpus, other=other)
    tasks = case.directive("ntasks-per-node")
    if tasks is not None and tasks.value != "1" and case.launch.starts_workers:
        yield defect("tasks-per-node", tasks.line, tasks=tasks.value)


def directives_unread(case: Case) -> Iterator[Defect]:
    """`#SBATCH` lines that Slurm passes by, or that hold a variable."""
    for item in case.directives:
        if not item.read:
            yield defect("directive-too-late", item.line, option=item.spelled, value=item.value)
        elif "$" in item.value:
            yield defect(
                "directive-with-variable", item.line, option=item.spelled, value=item.value
            )


def kill_switch(case: Case) -> Iterator[Defect]:
    """No kill switch, or one that looks like another run's."""
    path = case.card.value("run.kill_switch")
    line = case.line("--kill-switch-path")
    if path is None:
        if not case.has("--kill-switch-path"):
            yield defect("kill-switch-missing", line)
        return
    name = str(path).rpartition("/")[2].lower()
    run = str(case.card.value("run.name", "")).lower()
    sizes = set(re.findall(r"\d+(?:\.\d+)?[bm]\b", name))
    own = set(re.findall(r"\d+(?:\.\d+)?[bm]\b", run))
    plain = name.replace("_", "-").strip("-") in {"kill-switch", "killswitch", "kill"}
    if plain and run not in str(path).lower():
        yield defect("kill-switch-shared", line, path=path, says="names no run")
    elif sizes and own and not sizes & own:
        yield defect(
            "kill-switch-shared", line, path=path, says=f"bears another run's name than {run}"
        )


def launch_blocking(case: Case) -> Iterator[Defect]:
    """`CUDA_LAUNCH_BLOCKING`, which an import leaves out, and all pay for."""
    key = "slurm.environment.CUDA_LAUNCH_BLOCKING"
    if case.card.value(key) not in {None, "0", ""}:
        needed = case.card.integer("slurm.nodes") >= _FEWEST_NODES_FOR_BLOCKING
        if needed:
            fix = "measure without it first"
        else:
            fix = f"--set {key}=0 below {_FEWEST_NODES_FOR_BLOCKING} nodes"
        yield defect("launch-blocking", case.card.line(key), fix=fix)


def lost_text(case: Case) -> Iterator[Defect]:
    """Text that no shell sees as it was meant: broken continuations, comments in arguments,
    unexported variables.
    """
    for line, written in enumerate(case.text.split("\n"), start=1):
        if re.search(r"(?<!\\)\\[ \t]+\r?$", written) and not written.lstrip().startswith("#"):
            yield defect("continuation-broken", line)
    for comment in case.script.lost_comments:
        yield defect("options-commented-out", comment.line, text=comment.text[:40].strip())
    for name, line in sorted(case.script.not_exported.items()):
        yield defect("not-exported", line, name=name)
    if "\r" in case.text:
        yield defect("windows-line-ends", case.text[: case.text.index("\r")].count("\n") + 1)


def environment_needed(case: Case) -> Iterator[Defect]:
    """Variables that must be exported where `tr11` is typed; a misspelt name shows up here."""
    names: dict[str, int] = {}
    for key, item in case.card.placed.items():
        if not key.startswith("slurm.setup"):
            for name in re.findall(r"(?<!\$)\$\{?([A-Za-z_]\w*)", str(item.value), re.ASCII):
                names.setdefault(name, item.value_line or item.line)
    for name, line in names.items():
        yield defect("from-environment", line, name=name)


JOB_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    exit_minute,
    evaluation_before_save,
    pipe_hides_the_end,
    bad_exit,
    node_counts,
    directives_unread,
    kill_switch,
    launch_blocking,
    lost_text,
    environment_needed,
)


# Defects of precision, DeepSpeed's file, schedule and data.

_COMPARED = (
    ("train_micro_batch_size_per_gpu", "--micro-batch-size", "batch.micro_batch_size"),
    ("train_batch_size", "--global-batch-size", "batch.global_batch_size"),
    ("gradient_clipping", "--clip-grad", "optimizer.clip_grad"),
)
_BY_SAMPLES = (
    "--train-samples",
    "--lr-decay-samples",
    "--lr-warmup-samples",
    "--rampup-batch-size",
)
_BY_ITERATIONS = ("--train-iters", "--lr-decay-iters", "--lr-warmup-iters")


def deepspeed_file(case: Case) -> Iterator[Defect]:
    """The file against the arguments."""
    file = case.deepspeed
    if file is None:
        if case.has("--deepspeed") and (
            case.has("--deepspeed_config") or case.has("--deepspeed-config")
        ):
            yield defect("deepspeed-file-unseen", case.line("--deepspeed_config"))
        return
    for line in file.underscored:
        yield defect("underscore-in-json", line)
    for name, option, key in _COMPARED:
        said = file.value(name)
        given = case.number(option)
        if isinstance(said, int | float) and given is not None and said != given:
            code = f"deepspeed-disagrees/{key}"
            line = file.line_of(name)
            yield defect(
                code,
                line,
                name=name,
                said=said,
                option=option,
                given=given,
                other=case.line(option),
            )
    if file.value("gradient_clipping") is None and case.has("--clip-grad"):
        yield defect("clipping-unset", file.line)


def zero_and_dtype(case: Case) -> Iterator[Defect]:
    """The stage that went with each dtype; two dtypes at once."""
    file = case.deepspeed
    dtype = case.card.value("precision.dtype")
    stage = None
    if file:
        stage = file.value("zero_optimization.stage")
    argument = case.number("--zero-stage")
    if file:
        line = file.line_of("zero_optimization.stage")
    else:
        line = case.line("--zero-stage")
    if stage is None:
        stage = argument
    elif argument is not None and argument != stage:
        yield defect(
            "zero-stage-differs",
            line,
            stage=stage,
            argument=argument,
            other=case.line("--zero-stage"),
        )
    if stage == 0 and dtype == "fp16":
        yield defect("zero-stage-with-fp16", line)
    elif stage not in {None, 0} and dtype == "bf16":
        yield defect("zero-stage-with-bf16", line, stage=stage)
    if case.has("--fp16") and case.has("--bf16"):
        yield defect("two-dtypes", case.line("--fp16"))
    if file is None:
        return
    for block in ("bf16", "fp16"):
        enabled = file.value(f"{block}.enabled")
        if enabled is not None and enabled != (dtype == block):
            line = file.line_of(f"{block}.enabled")
            yield defect(
                "dtype-disagrees", line, block=block, enabled=str(enabled).lower(), dtype=dtype
            )


def loss_scale(case: Case) -> Iterator[Defect]:
    """`--loss-scale` beside DeepSpeed."""
    if case.has("--loss-scale") and case.has("--deepspeed"):
        yield defect(
            "loss-scale-ignored", case.line("--loss-scale"), scale=case.uses["--loss-scale"].text
        )


def learning_rate(case: Case) -> Iterator[Defect]:
    """Peaks below floors, warm-ups beyond decays, two ways of counting."""
    peak = case.card.number("schedule.learning_rate")
    floor = case.card.number("schedule.min_learning_rate")
    if peak is not None and floor is not None and floor > peak:
        yield defect("floor-above-peak", case.line("--min-lr"), floor=floor, peak=peak)
    for unit in ("samples", "iterations"):
        warmup = case.card.number(f"schedule.warmup_{unit}")
        length = case.card.number(f"schedule.decay_{unit}", case.card.number(f"batch.train_{unit}"))
        tokens = case.card.value("schedule.decay_tokens")
        if warmup and length is not None and warmup >= length and tokens is None:
            line = case.card.line(f"schedule.warmup_{unit}")
            yield defect(f"warmup-beyond-decay/{unit}", line, warmup=warmup, length=length)
    by_samples, by_iterations = (
        [option for option in names if case.has(option)] for names in (_BY_SAMPLES, _BY_ITERATIONS)
    )
    if by_samples and by_iterations:
        first = by_samples[0]
        second = by_iterations[0]
        yield defect(
            "two-ways-of-counting",
            case.line(first),
            first=first,
            second=second,
            other=case.line(second),
        )
    if case.has("--override-lr-scheduler") and case.has("--use-checkpoint-lr-scheduler"):
        yield defect("two-schedulers", case.line("--override-lr-scheduler"))


def tokens(case: Case) -> Iterator[Defect]:
    """Token counts: one that did nothing, one that made the learning rate jump."""
    if case.has("--train-tokens"):
        yield defect("train-tokens-unused", case.line("--train-tokens"))
    if case.has("--lr-decay-tokens") and (case.card.number("schedule.warmup_samples") or 0) > 0:
        yield defect("token-decay-warmup", case.line("--lr-decay-tokens"))
    if "curriculum.kind" in case.card.placed and isinstance(case.card.value("batch.ramp"), dict):
        yield defect("ramp-with-curriculum", case.line("--rampup-batch-size"))
    start = case.card.integer("curriculum.start_length")
    if start and start % 8:
        yield defect("curriculum-start", case.card.line("curriculum.start_length"), start=start)


def data(case: Case) -> Iterator[Defect]:
    """Loaders that hang, ranges that skipped little, quotes that reach the trainer."""
    workers = case.card.integer("data.valid_workers")
    if workers > 0:
        yield defect("valid-workers", case.line("--valid-num-workers"), workers=workers)
    elif not case.has("--valid-num-workers") and case.card.integer("evaluation.iterations"):
        yield defect("valid-workers/default", case.launch.line)
    if case.has("--skip-train-iteration-range"):
        yield defect("skip-ranges", case.line("--skip-train-iteration-range"))
    for use in case.uses.values():
        for value in use.values:
            if unquoted(value) != value:
                yield defect("quotes-too-many", use.line, value=value.text[:40])


NUMBER_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    deepspeed_file,
    zero_and_dtype,
    loss_scale,
    learning_rate,
    tokens,
    data,
)


def width_left_over(case: Case) -> Iterator[Defect]:
    """`--ffn-hidden-size` that is not four times the hidden size, as after a change of the one
    alone.
    """
    hidden = case.card.integer("model.hidden_size")
    ffn = case.card.integer("model.ffn_hidden_size")
    # its width is another share, and seldom a round one
    is_gated = case.card.value("model.activation") == "swiglu"
    if not hidden or not ffn or ffn == 4 * hidden or is_gated:
        return
    layers = case.card.integer("model.layers")
    meant, real = (_blocks(layers, hidden, width) / 1e9 for width in (4 * hidden, ffn))
    line = case.line("--ffn-hidden-size")
    yield defect(
        "ffn-left-over",
        line,
        ffn=ffn,
        hidden=hidden,
        meant=4 * hidden,
        real_billion=real,
        meant_billion=meant,
    )


def _blocks(layers: int, hidden: int, ffn: int) -> int:
    """Parameters of all blocks: attention 4h^2 + 4h, feed-forward 2hf + f + h, two LayerNorms 4h."""
    return layers * (
        4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    )


def shapes(case: Case) -> Iterator[Defect]:
    """Heads, tensor ranks, stages and workers that do not divide."""
    hidden = case.card.integer("model.hidden_size")
    heads = case.card.integer("model.attention_heads")
    tensor = case.card.integer("parallel.tensor", 1)
    stages = case.card.integer("parallel.pipeline", 1)
    if hidden and heads and hidden % heads and "model.kv_channels" not in case.card.placed:
        yield defect("hidden-by-heads", case.line("--hidden-size"), hidden=hidden, heads=heads)
    if heads and tensor > 0 and heads % tensor:
        yield defect(
            "heads-by-tensor", case.line("--tensor-model-parallel-size"), heads=heads, tensor=tensor
        )
    layers = case.card.integer("model.layers")
    partition = str(case.card.value("parallel.partition", ""))
    if "embedding" in partition:
        units = layers + 2
        shown = "layers + 2"
    else:
        units = layers
        shown = "layers"
    if layers and stages > 1 and partition.startswith("type:") and units % stages:
        yield defect(
            "layers-by-stages", case.line("--num-layers"), shown=shown, units=units, stages=stages
        )
    workers = case.card.integer("slurm.workers_per_node") or case.card.integer(
        "slurm.gpus_per_node"
    )
    world = workers * case.card.integer("slurm.nodes")
    shape = tensor * stages
    if world and shape > 0 and world % shape:
        line = case.line("--pipeline-model-parallel-size")
        yield defect(
            "workers-by-shape", line, world=world, tensor=tensor, stages=stages, shape=shape
        )


def batches(case: Case) -> Iterator[Defect]:
    """The batch, its ramp, and micro batch x data-parallel degree."""
    degree = data_parallel(case.card)
    micro = case.card.integer("batch.micro_batch_size")
    full = case.card.integer("batch.global_batch_size")
    ramp = case.card.value("batch.ramp")
    chunk = degree * micro
    common = {"micro": micro, "degree": degree, "chunk": chunk}
    if chunk and full % chunk:
        yield defect(
            "batch-by-replicas",
            case.line("--global-batch-size"),
            full=full,
            near=_near(full, chunk),
            **common,
        )
    if not isinstance(ramp, dict):
        return
    line = case.line("--rampup-batch-size")
    start = ramp["start"]
    increment = ramp["increment"]
    if start == full:
        yield defect("ramp-without-levels", line, full=full)
        return
    if increment > 0 and (full - start) % increment:
        yield defect(
            "ramp-increment", line, increment=increment, full=full, start=start, way=full - start
        )
    for name, value in (("start", start), ("increment", increment)):
        if chunk and value % chunk:
            yield defect(
                f"ramp-{name}-by-replicas", line, value=value, near=_near(value, chunk), **common
            )


def _near(value: int, chunk: int) -> str:
    below = value // chunk * chunk
    above = -(-value // chunk) * chunk
    if below:
        return f"{below} or {above} would do, or another micro batch or number of nodes"
    return f"{above} would do, or fewer nodes"


def initial_weights(case: Case) -> Iterator[Defect]:
    """A standard deviation far above what the width bears."""
    hidden = case.card.integer("model.hidden_size")
    std = case.card.number("model.init_std", 0.02) or 0.0
    drawn = case.card.value("model.init_method", "normal") == "normal"
    advice = ""
    if hidden > 0 and drawn:
        advice = std_advice(std, hidden)
    if advice:
        line = case.line("--init-method-std")
        given = "" if case.has("--init-method-std") else " (the default)"
        yield defect(
            "init-std-too-large",
            line,
            std=std,
            given=given,
            hidden=hidden,
            cost=WHAT_IT_COST,
            advice=advice,
        )


def fused_softmax(case: Case) -> Iterator[Defect]:
    """The original's fused softmax had conditions on the shape."""
    heads = case.card.integer("model.attention_heads")
    tensor = case.card.integer("parallel.tensor", 1)
    micro = case.card.integer("batch.micro_batch_size")
    length = case.card.integer("model.sequence_length")
    if heads <= 0 or tensor <= 0 or heads % tensor or micro <= 0 or not length:
        return
    if (heads // tensor * micro) % 4 or length % 4 or not 16 < length <= 2048:
        line = case.line("--num-attention-heads")
        yield defect("fused-softmax", line, heads=heads, tensor=tensor, micro=micro, length=length)


MODEL_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    width_left_over,
    shapes,
    batches,
    initial_weights,
    fused_softmax,
)


# The known defects, one function each, and the order in which they are told.

_ORDER = {DefectSeverity.ERROR: 0, DefectSeverity.WARNING: 1, DefectSeverity.NOTE: 2}


def find_defects(case: Case) -> list[Defect]:
    """Every defect of the script, in order."""
    return in_order(
        defect for look in (*JOB_DEFECTS, *MODEL_DEFECTS, *NUMBER_DEFECTS) for defect in look(case)
    )


def in_order(defects: Iterable[Defect]) -> list[Defect]:
    """The most severe first, then by line."""
    return sorted(defects, key=lambda defect: (_ORDER[defect.severity], defect.line, defect.code))
