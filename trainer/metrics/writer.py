"""One record per log interval: the log line, `metrics.jsonl`, and TensorBoard (tags of
Megatron-DeepSpeed).

Only the last rank writes, as in the original: it holds the loss. Reading these files back is
`trainer.contract.paths`'s work.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.config.card import TrainerConfig
from trainer.contract.attempt import tell
from trainer.contract.files import append_line, make_shared
from trainer.contract.metrics_record import (
    LAYER_NUMBERS,
    LAYERS,
    LOSS_SUFFIX,
    LayerMeasure,
    StepRecord,
    format_step,
    format_validation,
    perplexity_of,
)
from trainer.contract.record import JsonObject
from trainer.schedule.flops import counted_gigaflops
from trainer.schedule.path import Progress

LM = "lm"  # the loss of what is predicted, beside others of which the whole is the sum

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class Interval:
    """Running sums between two log lines. `tokens` counts what was trained on: cut samples count as
    cut. `zeros` is set once, at its end.
    """

    steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    skipped: int = 0
    nan: int = 0
    samples: int = 0
    tokens: int = 0
    zeros: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    timers: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        loss: float,
        seconds: float,
        samples: int,
        tokens: int,
        skipped: bool,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """One step. `parts`: the losses of which its loss is the sum, where there are several."""
        self.steps += 1
        for name, value in (parts or {}).items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        self.loss += loss
        self.seconds += seconds
        self.samples += samples
        self.tokens += tokens
        self.skipped += int(skipped)
        self.nan += int(not math.isfinite(loss))

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.tokens // max(1, self.samples)

    def losses(self) -> tuple[float, tuple[tuple[str, float], ...]]:
        """Means: of what is predicted, and of each other loss by name."""
        means = {name: value / self.steps for name, value in self.parts.items()}
        return means.pop(LM, self.loss / self.steps), tuple(means.items())

    def time(self, name: str, seconds: float) -> None:
        """Add to one of the timers, which TensorBoard shows per step."""
        self.timers[name] = self.timers.get(name, 0.0) + seconds


@dataclass
class MetricsWriter:
    """Writes the records of one attempt. `is_writer` is True on exactly one rank; elsewhere every
    call does nothing.

    After `open`, a file that cannot be written (disk full, folder gone) is said once and never ends
    a training: `metrics.jsonl` is tried again at every record, TensorBoard is left alone until the
    next attempt.
    """

    config: TrainerConfig
    job_id: str
    is_writer: bool
    world_size: int
    replicas: int
    _events: SummaryWriter | None = field(default=None, init=False)
    _marked_restart: bool = field(default=False, init=False)
    _complained: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.paths, self.logging = self.config.paths, self.config.logging

    def open(self) -> None:
        """Create the log folders and the event file. Raises OSError when the run directory refuses
        them.
        """
        if not self.is_writer:
            return
        make_shared(self.paths.logs)
        if self.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(
                log_dir=str(self.paths.tensorboard), max_queue=self.logging.tensorboard_queue
            )

    def settings(self, values: Mapping[str, Any], iteration: int) -> None:
        """Put every setting of the run card into the event file, as text."""
        with self._tensorboard() as events:
            if events is None:
                return
            for section, keys in values.items():
                if isinstance(keys, Mapping):
                    for key, value in keys.items():
                        name = f"{section}.{key}"
                        events.add_text(name, json.dumps(value), global_step=iteration)

    def step(
        self, record: StepRecord, extra: Mapping[str, Any], timers: Mapping[str, float]
    ) -> None:
        """Print the log line and append the record, with `extra`, to both machine-readable logs.
        `timers`: seconds per step, by name, for TensorBoard.
        """
        if not self.is_writer:
            return
        tell(format_step(record))
        self._append({"kind": "step", **record.values(), **extra})
        if record.iteration % self.logging.tensorboard_interval:
            return
        with self._tensorboard() as events:
            if events is not None:
                self._progress(events, record)
                self._rates(events, record, extra.get("mfu"), timers)

    def validation(
        self,
        group: str,
        progress: Progress,
        loss: float,
        prefix: str = "",
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """Report one validation group's mean loss; `prefix` names an evaluation out of turn in the
        log line.

        `parts`: the losses of which it is the sum, and scores ("lm accuracy"), where the model has
        them.
        """
        if not self.is_writer:
            return
        scores = {name: value for name, value in (parts or {}).items() if " " in name}
        others = {name: value for name, value in (parts or {}).items() if " " not in name}
        loss, iteration = others.pop(LM, loss), progress.iteration
        tell(
            format_validation(prefix or group, iteration, loss, other_losses=others, scores=scores)
        )
        perplexity = perplexity_of(loss)
        self._append(
            {
                "kind": "validation",
                "name": group,
                "iteration": iteration,
                "lm_loss": loss,
                "perplexity": perplexity,
            }
            | {f"{name}{LOSS_SUFFIX}": value for name, value in others.items()}
            | {name.replace(" ", "_"): value for name, value in scores.items()}
        )
        with self._tensorboard() as events:
            if events is None:
                return
            gigaflops = counted_gigaflops(self.config, progress.consumed_samples)
            values = [("lm loss validation", loss)]
            if self.logging.tensorboard_validation_perplexity:
                values.append(("lm loss validation ppl", perplexity))
            values += [(f"{name} loss validation", value) for name, value in others.items()]
            values += [(f"{name} validation", value) for name, value in scores.items()]
            for tag, value in values:
                full = f"lm-loss-validation/{group}/{tag}"
                events.add_scalar(full, value, iteration)
                events.add_scalar(f"{full} vs samples", value, progress.consumed_samples)
                events.add_scalar(f"{full} vs tokens", value, progress.consumed_tokens)
                events.add_scalar(f"{full} vs gigaflos (without embeddings)", value, gigaflops)

    def layers(self, iteration: int, samples: int, measure: LayerMeasure) -> None:
        """Report the norms of each layer at one step."""
        if not self.is_writer:
            return
        lists = {name: getattr(measure, name) for name in LAYER_NUMBERS}
        clean = {name: [_jsonable(value) for value in values] for name, values in lists.items()}
        self._append(
            {"kind": LAYERS, "iteration": iteration, "layers": list(measure.layers), **clean}
        )
        with self._tensorboard() as events:
            if events is None:
                return
            for name, values in lists.items():
                for layer, value in zip(measure.layers, values, strict=True):
                    if math.isfinite(value):
                        events.add_scalar(f"layers-{name}/{layer}", value, iteration)
                        events.add_scalar(f"layers-{name}/{layer} vs samples", value, samples)

    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append a record of another kind (a spike, a roll-back, a skipped range) to
        `metrics.jsonl`.
        """
        if self.is_writer:
            self._append({"kind": kind, **values})

    def close(self) -> None:
        """Flush and close the event file."""
        if self._events is not None:
            self._events.close()

    def _append(self, value: JsonObject) -> None:
        # NaN is not JSON: readers in other languages would refuse the whole line.
        clean = {key: _jsonable(item) for key, item in value.items()}
        line = json.dumps({**clean, "time": time.time(), "job_id": self.job_id}, allow_nan=False)
        try:
            append_line(self.paths.metrics, line)
        except OSError as error:
            if not self._complained:
                self._complained = True
                tell(f"tr11: WARNING: metrics cannot be written, the training goes on: {error}")

    @contextmanager
    def _tensorboard(self) -> Iterator[SummaryWriter | None]:
        """The event writer, or None. Its own thread meets the full disk; the fault comes up here,
        at a later record.
        """
        try:
            yield self._events
        except Exception as error:  # whatever the library raises
            self._events = None
            tell(
                f"tr11: WARNING: TensorBoard cannot be written and stops until the next attempt: {error}"
            )

    def _progress(self, events: SummaryWriter, record: StepRecord) -> None:
        add, iteration, logging = events.add_scalar, record.iteration, self.logging
        samples, tokens = record.consumed_samples, record.consumed_tokens
        add("steps-vs-samples/y=steps,x=samples", iteration, samples)
        add("steps-vs-samples/y=samples,x=steps", samples, iteration)
        add("steps-vs-tokens/y=steps,x=tokens", iteration, tokens)
        add("steps-vs-tokens/y=tokens,x=steps", tokens, iteration)
        values = {
            "learning-rate/learning-rate": record.learning_rate
            if logging.tensorboard_learning_rate
            else None,
            "batch-size/batch-size": record.global_batch_size
            if logging.tensorboard_batch_size
            else None,
            "lm-loss-training/lm loss": record.lm_loss,
            **{f"lm-loss-training/{name} loss": loss for name, loss in record.other_losses},
            "loss-scale/loss-scale": record.loss_scale if logging.tensorboard_loss_scale else None,
            "grad-norm/grad-norm": record.grad_norm,
            "num-zeros/num-zeros": record.num_zeros if logging.zeros_in_gradient else None,
            "params-norm/params-norm": record.params_norm,
        }
        for tag, value in values.items():
            if value is None:
                continue
            add(tag, value, iteration)
            add(f"{tag} vs samples", value, samples)
            if not tag.startswith("batch-size"):
                add(f"{tag} vs tokens", value, tokens)
        gigaflops = counted_gigaflops(self.config, samples)
        add("lm-loss-training/lm loss vs gigaflos (without embeddings)", record.lm_loss, gigaflops)
        if record.curriculum_length is not None:
            add("curriculum_seqlen", record.curriculum_length, iteration)

    def _rates(
        self,
        events: SummaryWriter,
        record: StepRecord,
        utilisation: float | None,
        timers: Mapping[str, float],
    ) -> None:
        add, iteration, replicas = events.add_scalar, record.iteration, self.replicas
        length = record.curriculum_length or self.config.model.sequence_length
        tokens_per_second = record.samples_per_second * length
        add("iteration-time/iteration-time", record.seconds_per_iteration, iteration)
        add(
            "iteration-time/iteration-time vs samples",
            record.seconds_per_iteration,
            record.consumed_samples,
        )
        add(
            "iteration-time/iteration-time vs tokens",
            record.seconds_per_iteration,
            record.consumed_tokens,
        )
        add("iteration-time/samples per second", record.samples_per_second, iteration)
        add(
            "iteration-time/samples per second per replica",
            record.samples_per_second / replicas,
            iteration,
        )
        add("iteration-time/tokens per second", tokens_per_second, iteration)
        add("iteration-time/tokens per second per replica", tokens_per_second / replicas, iteration)
        add("iteration-time/TFLOPs per gpu (estimated)", record.tflops, iteration)
        if utilisation is not None:
            add("iteration-time/model FLOPs utilisation", utilisation, iteration)
        if self.logging.tensorboard_timers:
            for name, seconds in timers.items():
                add(f"time/{name}-time", seconds, iteration)
        # The original's restart marker: the world size once, then zero at the next line.
        add("iteration-time/world_size", 0 if self._marked_restart else self.world_size, iteration)
        self._marked_restart = True


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
