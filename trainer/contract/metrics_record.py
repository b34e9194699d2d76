"""The records of `metrics.jsonl`: how every reader understands a line, no matter who wrote it; and
how the lines of a step and of an evaluation are written in `main_log.txt`, which `tr11ops/dialects`
reads.

- A line without its newline is being written, a line that is no table of JSON was cut: neither is a record.
- A record without a `kind` is a step, as an older trainer wrote them. Keys that no one knows are left alone.
- What is no number, or not a finite one, was not measured: NaN, or no count. The trainer writes null for it.
- A step has an `iteration` and a `time`; what else it tells depends on its trainer.
- After a resume, or a roll-back, an iteration may be there twice: records are in the order
  in which they were trained, and where one of them is asked for, the last one counts.

Part of the run-directory contract, as `trainer.contract.paths` is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import open_for_reading

LOSS_SUFFIX = "_loss"


class MeasuredStep(Record):
    """What a reader knows of one training step (or of the mean over a log interval). Times in
    seconds, lengths in tokens.

    Only the `iteration` is sure: another trainer may tell nothing else. A count that is not told is
    None, a number NaN or None. `lm_loss` is None where none is told, NaN where it is told and no
    finite number. `other_losses`: name and mean of what is learned beside the words, such as BERT's
    order of sentences ("sop").
    """

    iteration: int
    total_iterations: int | None
    consumed_samples: int | None
    consumed_tokens: int | None
    seconds_per_iteration: float
    learning_rate: float
    global_batch_size: int | None
    lm_loss: float | None
    grad_norm: float | None
    samples_per_second: float
    tflops: float
    loss_scale: float | None = None
    params_norm: float | None = None
    num_zeros: float = 0.0
    curriculum_length: int | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    other_losses: tuple[tuple[str, float], ...] = ()

    @property
    def loss_is_finite(self) -> bool | None:
        """Whether the loss is a finite number; None where none is told."""
        if self.lm_loss is None:
            return None
        return math.isfinite(self.lm_loss)

    @property
    def has_bad_loss(self) -> bool:
        """Whether a loss is told that is no finite number."""
        return self.loss_is_finite is False


class StepRecord(MeasuredStep):
    """What our own trainer writes of a step: every count and its loss are known."""

    total_iterations: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    lm_loss: float

    def values(self) -> JsonObject:
        """Every number by its key in `metrics.jsonl`; another loss is NAME_loss."""
        found = {
            name: getattr(self, name) for name in self.__struct_fields__ if name != "other_losses"
        }
        return found | {f"{name}{LOSS_SUFFIX}": loss for name, loss in self.other_losses}


def format_step(record: StepRecord) -> str:
    """The per-iteration line of the original training, byte for byte.

    A NaN loss is printed as `nan`: the original dropped the field, which hid the fault.
    """
    parts = [
        f" iteration {record.iteration:8d}/{record.total_iterations:8d} |",
        f" consumed samples: {record.consumed_samples:12d} |",
        f" consumed tokens: {record.consumed_tokens:12d} |",
        f" elapsed time per iteration (s): {record.seconds_per_iteration:.2f} |",
        f" learning rate: {record.learning_rate:.3E} |",
        f" global batch size: {record.global_batch_size:5d} |",
        f" lm loss: {_scientific(record.lm_loss)} |",
        *(f" {name} loss: {_scientific(loss)} |" for name, loss in record.other_losses),
    ]
    if record.loss_scale is not None:
        parts.append(f" loss scale: {record.loss_scale:.1f} |")
    if record.grad_norm is not None:
        parts.append(f" grad norm: {record.grad_norm:.3f} |")
    parts.append(f" num zeros: {record.num_zeros:.1f} |")
    if record.params_norm is not None:
        parts.append(f" params norm: {record.params_norm:.3f} |")
    if record.curriculum_length is not None:
        parts.append(f" curriculum seqlen: {record.curriculum_length:5d} |")
    parts += [
        f" number of skipped iterations: {record.skipped_iterations:3d} |",
        f" number of nan iterations: {record.nan_iterations:3d} |",
        f" samples per second: {record.samples_per_second:.3f} |",
        f" TFLOPs: {record.tflops:.2f} |",
    ]
    return "".join(parts)


def _scientific(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.6E}"
    return f"{value}"


def perplexity_of(loss: float) -> float:
    """As the original has it: of a loss above 20 that of 20."""
    if math.isfinite(loss):
        return math.exp(min(20.0, loss))
    return math.nan


def format_validation(
    name: str,
    iteration: int,
    loss: float,
    other_losses: Mapping[str, float] | None = None,
    scores: Mapping[str, float] | None = None,
) -> str:
    """The three lines that report one validation group (dashes, values, dashes). `scores`: shares,
    by name.
    """
    line = f" {name} loss at iteration {iteration} |"
    for key, value in {"lm": loss, **(other_losses or {})}.items():
        line += f" {key} loss value: {_scientific(value)} | {key} loss PPL: {_scientific(perplexity_of(value))} |"
    line += "".join(f" {key}: {value:.4f} |" for key, value in (scores or {}).items()) + " "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


STEP, VALIDATION = "step", "validation"
# no checkpoint came about: `step`, `why`, and `node` where one alone is at fault
SAVE_FAILED = "save-failed"
# norms of each layer at a step: `layers` are names, and each of LAYER_NUMBERS a list beside it
LAYERS = "layers"
LAYER_NUMBERS = ("gradient", "update", "weight", "output")
LONGEST_LINE = 1 << 20  # bytes; a record has some 600
LARGEST = 1e18  # of a count: beyond all that a training counts
LARGEST_NUMBER = 1e300  # a larger whole number fits no float
_COUNTS = ("total_iterations", "consumed_samples", "consumed_tokens", "global_batch_size")
_NUMBERS = ("seconds_per_iteration", "learning_rate", "samples_per_second", "tflops")
_MAY_BE_ABSENT = ("grad_norm", "loss_scale", "params_norm")


class LayerMeasure(Record):
    """Of a step, one number for each of `layers` (`embedding`, `blocks.0`, ..., `final_norm`).

    Euclidean norms of the gradients before clipping, of the change of the fp32 masters, and of
    these after it. `output`: root mean square of what a block hands on; NaN for what is no block.
    """

    layers: tuple[str, ...]
    gradient: tuple[float, ...]
    update: tuple[float, ...]
    weight: tuple[float, ...]
    output: tuple[float, ...]


class MetricsRecord(Record):
    """One line. `time` (seconds since the epoch) is None where it is no finite number; `values` are
    all its keys.
    """

    kind: str
    time: float | None
    job_id: str
    values: JsonObject

    @property
    def iteration(self) -> int | None:
        return self.integer("iteration")

    @property
    def is_step(self) -> bool:
        return self.kind == STEP and self.iteration is not None

    def number(self, name: str) -> float:
        """A finite number, or NaN for everything else."""
        value = self.values.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) < LARGEST_NUMBER
        ):
            return math.nan
        return float(value)

    def integer(self, name: str) -> int | None:
        """A whole number from 0; None for everything else."""
        value = self.values.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < LARGEST
        ):
            return None
        return int(value)

    def other_losses(self) -> dict[str, float]:
        """The losses beside `lm_loss`, by name."""
        names = (key.removesuffix(LOSS_SUFFIX) for key in self.values if key.endswith(LOSS_SUFFIX))
        return {
            name: self.number(f"{name}{LOSS_SUFFIX}") for name in names if name not in ("", "lm")
        }

    def step(self) -> MeasuredStep | None:
        """What a step measured. None for another kind, and for one that holds something else than a
        number: it is of no trainer.
        """
        iteration = self.iteration
        if self.kind != STEP or iteration is None or not all(map(self._may_be_number, _MEASURED)):
            return None
        counts = {name: self.integer(name) for name in _COUNTS}
        numbers = {name: self.number(name) for name in _NUMBERS}
        optional = {name: self.number(name) for name in _MAY_BE_ABSENT}
        loss = None
        if "lm_loss" in self.values:
            loss = self.number("lm_loss")
        found: JsonObject = {
            "iteration": iteration,
            "lm_loss": loss,
            **counts,
            **numbers,
            **{name: None if math.isnan(value) else value for name, value in optional.items()},
            "num_zeros": self.number("num_zeros")
            if self.values.get("num_zeros") is not None
            else 0.0,
            "curriculum_length": self.integer("curriculum_length"),
            "skipped_iterations": self.integer("skipped_iterations") or 0,
            "nan_iterations": self.integer("nan_iterations") or 0,
            "other_losses": tuple(self.other_losses().items()),
        }
        return MeasuredStep(**found)

    def _may_be_number(self, name: str) -> bool:
        value = self.values.get(name)
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


_MEASURED = tuple(name for name in MeasuredStep.__struct_fields__ if name != "other_losses")


def parse_record(line: str | bytes) -> MetricsRecord | None:
    """One line of `metrics.jsonl`; None where it is not one. Invalid UTF-8 is replaced."""
    try:
        value = json.loads(line if isinstance(line, str) else line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    kind, time = value.get("kind", STEP), value.get("time")
    if not isinstance(kind, str):
        return None
    if isinstance(time, bool) or not isinstance(time, int | float) or not abs(time) < LARGEST:
        time = None
    return MetricsRecord(
        kind, None if time is None else float(time), str(value.get("job_id", "")), value
    )


def records(path: Path) -> Iterator[MetricsRecord]:
    """Every record of a file, one line in memory at a time; none of no file. Raises OSError as the
    file system does.
    """
    try:
        stream = open_for_reading(path)
    except FileNotFoundError:
        return
    with stream:
        is_whole = True
        while line := stream.readline(LONGEST_LINE):
            ends = line.endswith(b"\n")
            if ends and is_whole and (record := parse_record(line)) is not None:
                yield record
            is_whole = ends
