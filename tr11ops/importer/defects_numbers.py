"""Defects of precision, DeepSpeed's file, schedule and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tr11ops.importer.case import Case
from tr11ops.importer.defects_table import defect
from tr11ops.importer.options import unquoted
from tr11ops.importer.results import Defect

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
        said, given = file.value(name), case.number(option)
        if isinstance(said, int | float) and given is not None and said != given:
            code, line = f"deepspeed-disagrees/{key}", file.line_of(name)
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
    file, dtype = case.deepspeed, case.card.value("precision.dtype")
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
    peak, floor = (
        case.card.number("schedule.learning_rate"),
        case.card.number("schedule.min_learning_rate"),
    )
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
        first, second = by_samples[0], by_iterations[0]
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
