"""The lines of a step and of an evaluation in `main_log.txt`: how they are written, and how any training's are read.

Part of the run-directory contract, as `trainer.contract.paths` is. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from trainer.contract.record import Record

LOSS_SUFFIX = "_loss"


class StepRecord(Record):
    """What one training step (or the mean over a log interval) measured. Times in seconds, lengths in tokens.

    `other_losses`: name and mean of what is learned beside the words, such as BERT's order of sentences ("sop").
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
        found = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "other_losses"}
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
    return f"{value:.6E}" if math.isfinite(value) else f"{value}"


_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|")
_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"
_FIELDS: dict[str, tuple[str, type]] = {
    "consumed_samples": (r"consumed samples:\s*(\d+) \|", int),
    "consumed_tokens": (r"consumed tokens:\s*(\d+) \|", int),
    "seconds_per_iteration": (rf"elapsed time per iteration \(s\):\s*{_NUMBER} \|", float),
    "milliseconds_per_iteration": (rf"elapsed time per iteration \(ms\):\s*{_NUMBER} \|", float),
    "learning_rate": (rf"learning rate:\s*{_NUMBER} \|", float),
    "global_batch_size": (r"global batch size:\s*(\d+) \|", int),
    "lm_loss": (rf"lm loss:\s*{_NUMBER} \|", float),
    "loss_scale": (rf"loss scale:\s*{_NUMBER} \|", float),
    "grad_norm": (rf"grad norm:\s*{_NUMBER} \|", float),
    "num_zeros": (rf"num zeros:\s*{_NUMBER} \|", float),
    "params_norm": (rf"params norm:\s*{_NUMBER} \|", float),
    "curriculum_length": (r"curriculum seqlen:\s*(\d+) \|", int),
    "skipped_iterations": (r"number of skipped iterations:\s*(\d+) \|", int),
    "nan_iterations": (r"number of nan iterations:\s*(\d+) \|", int),
    "samples_per_second": (rf"samples per second:\s*{_NUMBER} \|", float),
    "tflops": (rf"TFLOPs:\s*{_NUMBER} \|", float),
}


@cache
def _compiled_fields() -> tuple[tuple[str, re.Pattern[str], type], ...]:
    """Compiled by the first who reads a line: most who import this read metrics or write lines."""
    return tuple((name, re.compile(pattern), kind) for name, (pattern, kind) in _FIELDS.items())


@cache
def _other_loss() -> re.Pattern[str]:
    return re.compile(rf"(?<=\| )(?!lm\b)(\w+) loss:\s*{_NUMBER} (?=\|)")


def parse_step(line: str) -> StepRecord | None:
    """Read one per-iteration line of this or of an older training; None if the line is not one.

    Accepts launcher prefixes (`[default7]:`), the millisecond form, and lines without tokens or throughput.
    A missing `lm loss` is read as NaN, because the original omitted the field exactly then.
    """
    head = _ITERATION.search(line)
    if head is None:
        return None
    found: dict[str, Any] = {}
    for name, pattern, kind in _compiled_fields():
        match = pattern.search(line)
        if match:
            found[name] = kind(match.group(1))
    if "consumed_samples" not in found or "learning_rate" not in found:
        return None
    milliseconds = found.pop("milliseconds_per_iteration", None)
    if milliseconds is not None:
        found.setdefault("seconds_per_iteration", milliseconds / 1000.0)
    for name in ("seconds_per_iteration", "lm_loss", "samples_per_second", "tflops"):
        found.setdefault(name, math.nan)
    found.setdefault("consumed_tokens", 0)
    found.setdefault("global_batch_size", 0)
    found.setdefault("grad_norm", None)
    if others := _other_loss().findall(line):
        found["other_losses"] = tuple((name, float(value)) for name, value in others)
    return StepRecord(iteration=int(head.group(1)), total_iterations=int(head.group(2)), **found)


def perplexity_of(loss: float) -> float:
    """As the original has it: of a loss above 20 that of 20."""
    return math.exp(min(20.0, loss)) if math.isfinite(loss) else math.nan


def format_validation(
    name: str,
    iteration: int,
    loss: float,
    other_losses: Mapping[str, float] | None = None,
    scores: Mapping[str, float] | None = None,
) -> str:
    """The three lines that report one validation group (dashes, values, dashes). `scores`: shares, by name."""
    line = f" {name} loss at iteration {iteration} |"
    for key, value in {"lm": loss, **(other_losses or {})}.items():
        line += f" {key} loss value: {_scientific(value)} | {key} loss PPL: {_scientific(perplexity_of(value))} |"
    line += "".join(f" {key}: {value:.4f} |" for key, value in (scores or {}).items()) + " "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"
