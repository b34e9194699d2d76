"""Defects of precision, DeepSpeed's file, schedule and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tr11ops.importer.case import Case
from tr11ops.importer.options import unquoted
from tr11ops.importer.results import Defect, Severity

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_COMPARED = (
    ("train_micro_batch_size_per_gpu", "--micro-batch-size", "batch.micro_batch_size"),
    ("train_batch_size", "--global-batch-size", "batch.global_batch_size"),
    ("gradient_clipping", "--clip-grad", "optimizer.clip_grad"),
)
_BY_SAMPLES = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--rampup-batch-size")
_BY_ITERATIONS = ("--train-iters", "--lr-decay-iters", "--lr-warmup-iters")


def deepspeed_file(case: Case) -> Iterator[Defect]:
    """The file against the arguments."""
    file = case.deepspeed
    if file is None:
        if case.has("--deepspeed") and (case.has("--deepspeed_config") or case.has("--deepspeed-config")):
            what = "the script does not write the DeepSpeed settings that it names"
            cost = "clipping, loss scale and curriculum may be said there, and are not in the card"
            yield Defect(
                "deepspeed-file-unseen",
                _WARNING,
                case.line("--deepspeed_config"),
                what,
                cost,
                "compare the card with that file",
            )
        return
    for line in file.underscored:
        what = "a number of the DeepSpeed settings holds an underscore, which JSON does not allow"
        yield Defect(
            "underscore-in-json",
            _WARNING,
            line,
            what,
            "the trainer refuses the file at its start",
            "nothing: the number was read without it",
        )
    for key, option, target in _COMPARED:
        said, given = file.value(key), case.number(option)
        if not isinstance(said, int | float) or given is None or said == given:
            continue
        what = f"DeepSpeed {key} {said:g}, {option} {given:g} (line {case.line(option)})"
        cost = "DeepSpeed goes by its file, the rest of the trainer by the argument"
        fix = f"the card has {given:g}: --set {target}=... says which is right"
        yield Defect("deepspeed-disagrees", _ERROR, file.line_of(key), what, cost, fix, target)
    if file.value("gradient_clipping") is None and case.has("--clip-grad"):
        what = "the DeepSpeed settings have no gradient_clipping: --clip-grad had no effect"
        yield Defect(
            "clipping-unset",
            _WARNING,
            file.line,
            what,
            "gradients were not clipped",
            "the card clips as --clip-grad says; --set optimizer.clip_grad=0 does not",
        )


def zero_and_dtype(case: Case) -> Iterator[Defect]:
    """The stage that went with each dtype; two dtypes at once."""
    file, dtype = case.deepspeed, case.card.value("precision.dtype")
    stage = file.value("zero_optimization.stage") if file else None
    argument = case.number("--zero-stage")
    line = file.line_of("zero_optimization.stage") if file else case.line("--zero-stage")
    if stage is None:
        stage = argument
    elif argument is not None and argument != stage:
        other = case.line("--zero-stage")
        what = f"ZeRO stage {stage} in the DeepSpeed settings, --zero-stage {argument:g} on line {other}"
        yield Defect(
            "zero-stage-differs",
            _NOTE,
            line,
            what,
            "the file decided",
            "nothing: tr11 always shards the optimizer state",
        )
    ours = "nothing: tr11 always shards the optimizer state (stage 1)"
    if stage == 0 and dtype == "fp16":
        cost = "every replica keeps the whole optimizer state: 12 bytes a parameter that sharding would save"
        yield Defect(
            "zero-stage-with-fp16", _WARNING, line, "ZeRO stage 0 belongs to bf16; this training is fp16", cost, ours
        )
    elif stage not in {None, 0} and dtype == "bf16":
        what = f"ZeRO stage {stage} with bf16: the original's bf16 optimizer shards by itself and wants stage 0"
        yield Defect("zero-stage-with-bf16", _WARNING, line, what, "the training does not start, or not in bf16", ours)
    if case.has("--fp16") and case.has("--bf16"):
        what = "--fp16 and --bf16 are both given"
        yield Defect(
            "two-dtypes",
            _ERROR,
            case.line("--fp16"),
            what,
            "the training does not start",
            "--set precision.dtype=...",
            "precision.dtype",
        )
    for block, option in (("bf16", "--bf16"), ("fp16", "--fp16")):
        enabled = file.value(f"{block}.enabled") if file else None
        if file is None or enabled is None or enabled == (dtype == block):
            continue
        what = f"DeepSpeed {block}.enabled is {str(enabled).lower()}, the arguments say {dtype} ({option})"
        line = file.line_of(f"{block}.enabled")
        yield Defect(
            "dtype-disagrees",
            _ERROR,
            line,
            what,
            "weights and optimizer would be of two dtypes",
            "--set precision.dtype=...",
            "precision.dtype",
        )


def loss_scale(case: Case) -> Iterator[Defect]:
    """`--loss-scale` beside DeepSpeed."""
    if case.has("--loss-scale") and case.has("--deepspeed"):
        what = f"--loss-scale {case.uses['--loss-scale'].text} had no effect: DeepSpeed reads the scale from its file"
        fix = "nothing: [precision] has what the file says; loss_scale there would fix the scale"
        yield Defect("loss-scale-ignored", _NOTE, case.line("--loss-scale"), what, "none", fix)


def learning_rate(case: Case) -> Iterator[Defect]:
    """Peaks below floors, warm-ups beyond decays, two ways of counting."""
    peak, floor = case.card.number("schedule.learning_rate"), case.card.number("schedule.min_learning_rate")
    if peak is not None and floor is not None and floor > peak:
        what = f"--min-lr {floor:g} is above --lr {peak:g}"
        yield Defect(
            "floor-above-peak",
            _ERROR,
            case.line("--min-lr"),
            what,
            "the training does not start",
            "--set schedule.min_learning_rate=...",
            "schedule.min_learning_rate",
        )
    for unit in ("samples", "iterations"):
        warmup = case.card.number(f"schedule.warmup_{unit}")
        length = case.card.number(f"schedule.decay_{unit}", case.card.number(f"batch.train_{unit}"))
        tokens = case.card.value("schedule.decay_tokens")
        if warmup and length is not None and warmup >= length and tokens is None:
            what = f"the warm-up of {warmup:,.0f} {unit} is not shorter than the decay of {length:,.0f}"
            key = f"schedule.warmup_{unit}"
            yield Defect(
                "warmup-beyond-decay",
                _ERROR,
                case.card.line(key),
                what,
                "the training does not start",
                f"--set {key}=...",
                key,
            )
    by_samples, by_iterations = (
        [option for option in names if case.has(option)] for names in (_BY_SAMPLES, _BY_ITERATIONS)
    )
    if by_samples and by_iterations:
        other = case.line(by_iterations[0])
        what = f"{by_samples[0]} counts samples and {by_iterations[0]} on line {other} counts iterations"
        yield Defect(
            "two-ways-of-counting",
            _ERROR,
            case.line(by_samples[0]),
            what,
            "the original refuses to start",
            "keep one way: set the other's keys to none",
            "batch.train_iterations",
        )
    if case.has("--override-lr-scheduler") and case.has("--use-checkpoint-lr-scheduler"):
        what = "--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other"
        yield Defect(
            "two-schedulers",
            _ERROR,
            case.line("--override-lr-scheduler"),
            what,
            "the training does not start",
            "--set schedule.on_resume=...",
            "schedule.on_resume",
        )


def tokens(case: Case) -> Iterator[Defect]:
    """Token counts: one that did nothing, one that made the learning rate jump."""
    if case.has("--train-tokens"):
        what = "--train-tokens was accepted and never looked at: the original trained on until --train-samples"
        cost = "the training was longer than planned; in the card it stops at that count"
        yield Defect(
            "train-tokens-unused",
            _WARNING,
            case.line("--train-tokens"),
            what,
            cost,
            "--set batch.train_tokens=none for the old length",
            "batch.train_tokens",
        )
    if case.has("--lr-decay-tokens") and (case.card.number("schedule.warmup_samples") or 0) > 0:
        what = "with --lr-decay-tokens the original noted the end of the warm-up only if a step ended exactly there"
        yield Defect(
            "token-decay-warmup",
            _NOTE,
            case.line("--lr-decay-tokens"),
            what,
            "the learning rate jumps a little at the end of the warm-up",
            "nothing",
        )
    if "curriculum.kind" in case.card.placed and isinstance(case.card.value("batch.ramp"), dict):
        what = "a batch ramp and a curriculum of lengths at once: both make the first steps small"
        yield Defect(
            "ramp-with-curriculum",
            _WARNING,
            case.line("--rampup-batch-size"),
            what,
            "few tokens a step for long",
            "--set batch.ramp=none",
            "batch.ramp",
        )
    start = case.card.integer("curriculum.start_length")
    if start and start % 8:
        line = case.card.line("curriculum.start_length")
        yield Defect(
            "curriculum-start",
            _NOTE,
            line,
            f"the first length {start} is no multiple of 8",
            "slow kernels",
            "--set curriculum.start_length=...",
            "curriculum.start_length",
        )


def data(case: Case) -> Iterator[Defect]:
    """Loaders that hang, ranges that skipped little, quotes that reach the trainer."""
    workers = case.card.integer("data.valid_workers")
    if workers > 0:
        what = f"--valid-num-workers {workers}: workers forked at an evaluation can deadlock"
        cost = "the training hung at an evaluation three times: 18, 6 and 11 hours"
        yield Defect(
            "valid-workers",
            _WARNING,
            case.line("--valid-num-workers"),
            what,
            cost,
            "the card has 0",
            "data.valid_workers",
        )
    elif not case.has("--valid-num-workers") and case.card.integer("evaluation.iterations"):
        what = "--valid-num-workers is not given: the original starts 2 workers, which can deadlock at an evaluation"
        cost = "a training hung at an evaluation three times: 18, 6 and 11 hours"
        yield Defect("valid-workers", _NOTE, case.launch.line, what, cost, "nothing: tr11's default is 0")
    if case.has("--skip-train-iteration-range"):
        what = "--skip-train-iteration-range skipped a micro batch for each global batch, and forgot it at a restart"
        cost = "an experiment passed over 1,500 samples where 680,000 were meant"
        yield Defect(
            "skip-ranges",
            _WARNING,
            case.line("--skip-train-iteration-range"),
            what,
            cost,
            "nothing, if whole batches are meant: tr11 passes over those",
            "data.skip_ranges",
        )
    for use in case.uses.values():
        for value in use.values:
            if unquoted(value) != value:
                what = f"the quotes around {value.text[:40]} reach the trainer as characters"
                yield Defect(
                    "quotes-too-many",
                    _WARNING,
                    use.line,
                    what,
                    "the trainer does not know that word",
                    "nothing: the card has it without quotes",
                )


NUMBER_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    deepspeed_file, zero_and_dtype, loss_scale, learning_rate, tokens, data,
)  # fmt: skip
