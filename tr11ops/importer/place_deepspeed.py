"""What the DeepSpeed file says that no option does: fp16 scale, clipping, curriculum; and what it says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tr11ops.importer.builder import Builder
from tr11ops.importer.deepspeed import DeepSpeedFile
from tr11ops.importer.results import LeftReason

_SCALE_KEYS = {
    "fp16.initial_scale_power": "precision.initial_scale_power",
    "fp16.loss_scale_window": "precision.loss_scale_window",
    "fp16.hysteresis": "precision.hysteresis",
    "fp16.min_loss_scale": "precision.min_loss_scale",
}
# Read elsewhere, compared with the options, or without meaning for a card.
_READ = frozenset(
    {
        "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping", "zero_optimization.stage",
        "bf16.enabled", "bfloat16.enabled", "fp16.enabled", "fp16.loss_scale",
    }
)  # fmt: skip
_DROPPED = {
    "steps_per_print": "the log has one line a step",
    "wall_clock_breakdown": "times of the parts: logging.tensorboard_timers",
    "zero_allow_untested_optimizer": "the optimizers are tr11's own",
    "gradient_accumulation_steps": "follows from the global batch",
    "prescale_gradients": "not needed",
    "dump_state": "the resolved card is kept in the run directory",
    "communication_data_type": "gradients are reduced in fp32",
    "data_types.grad_accum_dtype": "gradients are accumulated in fp32",
}
_CURRICULUM = "curriculum_learning."
_KINDS = {"fixed_linear": "linear", "fixed_root": "root", "fixed_discrete": "discrete"}


def place_deepspeed(builder: Builder, file: DeepSpeedFile) -> None:
    """Place what the file adds; tell what becomes of the rest."""
    for key, target in _SCALE_KEYS.items():
        _whole(builder, file, key, target)
    scale = file.value("fp16.loss_scale", 0)
    if isinstance(scale, int | float) and scale and file.value("fp16.enabled") is True:
        _put(builder, file, "fp16.loss_scale", "precision.loss_scale", float(scale))
    clip = file.value("gradient_clipping")
    if isinstance(clip, int | float) and not isinstance(clip, bool) and "optimizer.clip_grad" not in builder.placed:
        _put(builder, file, "gradient_clipping", "optimizer.clip_grad", float(clip))
    _dtype(builder, file)
    _curriculum(builder, file)
    for key, setting in file.settings.items():
        if key in _READ or key in _SCALE_KEYS or key.startswith(_CURRICULUM):
            continue
        if key in _DROPPED:
            builder.leave(_shown(key), setting.value, setting.line, LeftReason.DROPPED, _DROPPED[key])
        elif key.startswith(("zero_optimization.", "fp16.", "bf16.", "activation_checkpointing.", "flops_profiler.")):
            builder.leave(_shown(key), setting.value, setting.line, LeftReason.DROPPED, "the trainer chooses it")
        else:
            why = "tr11 writes its own DeepSpeed settings and has no key for it"
            builder.leave(_shown(key), setting.value, setting.line, LeftReason.DECISION, why)


def _shown(key: str) -> str:
    return f"DeepSpeed {key}"


def _put(builder: Builder, file: DeepSpeedFile, key: str, target: str, value: Any) -> None:
    """Place a value of the file."""
    builder.put(target, value, _shown(key), file.line_of(key))


def _whole(builder: Builder, file: DeepSpeedFile, key: str, target: str) -> None:
    value = file.value(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and file.value("fp16.enabled") is True:
        _put(builder, file, key, target, value)


def _dtype(builder: Builder, file: DeepSpeedFile) -> None:
    """The dtype, where only the file says it."""
    if "precision.dtype" in builder.placed:
        return
    for block, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if file.value(f"{block}.enabled") is True:
            _put(builder, file, f"{block}.enabled", "precision.dtype", dtype)


def _curriculum(builder: Builder, file: DeepSpeedFile) -> None:
    if file.value(_CURRICULUM + "enabled") is not True:
        return
    line = file.line_of(_CURRICULUM + "enabled")
    kind = _KINDS.get(str(file.value(_CURRICULUM + "schedule_type")))
    by_length = file.value(_CURRICULUM + "curriculum_type", "seqlen") == "seqlen"
    if kind is None or not by_length:
        why = (
            "tr11's curriculum is by sequence length: fixed_linear, fixed_root or fixed_discrete; fill in [curriculum]"
        )
        builder.leave(_shown("curriculum_learning"), "", line, LeftReason.DECISION, why, "curriculum.kind")
        return
    for key, value, source in _curriculum_values(file, kind):
        _put(builder, file, source, f"curriculum.{key}", value)
    longest = file.value(_CURRICULUM + "max_difficulty")
    length = builder.value("model.sequence_length")
    if longest is not None and length is not None and longest != length:
        why = f"the curriculum ends at model.sequence_length ({length}) here"
        key = _CURRICULUM + "max_difficulty"
        builder.leave(_shown(key), longest, file.line_of(key), LeftReason.DECISION, why)


def _curriculum_values(file: DeepSpeedFile, kind: str) -> Iterator[tuple[str, Any, str]]:
    schedule = _CURRICULUM + "schedule_config."
    yield "kind", kind, _CURRICULUM + "schedule_type"
    names = (
        [("lengths", schedule + "difficulty"), ("until_steps", schedule + "max_step")]
        if kind == "discrete"
        else [
            ("start_length", _CURRICULUM + "min_difficulty"),
            ("total_steps", schedule + "total_curriculum_step"),
            ("step", schedule + "difficulty_step"),
        ]
    )
    if kind == "root":
        names.append(("root_degree", schedule + "root_degree"))
    for name, source in names:
        value = file.value(source)
        if value is not None:
            yield name, float(value) if name == "root_degree" and isinstance(value, int) else value, source
