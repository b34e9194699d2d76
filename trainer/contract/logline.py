"""The lines of a step and of an evaluation in `main_log.txt`: how they are written.

They are read by `tr11ops/dialects`, the one table of how trainers print their steps.

Part of the run-directory contract, as `trainer.contract.paths` is. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.contract.record import Record

LOSS_SUFFIX = "_loss"


class StepRecord(Record):
    """What one training step (or the mean over a log interval) measured. Times in seconds, lengths
    in tokens.

    `other_losses`: name and mean of what is learned beside the words, such as BERT's order of
    sentences ("sop").
    """

    iteration: int
    total_iterations: int
    consumed_samples: int
    consumed_tokens: int
    seconds_per_iteration: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float
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

    def values(self) -> dict[str, Any]:
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
