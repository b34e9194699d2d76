"""One record per step: the log line, `metrics.jsonl`, and TensorBoard (tags of Megatron-DeepSpeed).

Only the last rank writes, as in the original: it holds the loss. Reading these files back is `trainer.contract`'s work.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.contract import RunPaths, StepRecord, append_line, format_step, format_validation
from trainer.lifecycle import tell

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass
class Interval:
    """Running sums between two log lines."""

    steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    skipped: int = 0
    nan: int = 0
    samples: int = 0

    def add(self, loss: float, seconds: float, samples: int, skipped: bool) -> None:
        self.steps += 1
        self.loss += loss
        self.seconds += seconds
        self.samples += samples
        self.skipped += int(skipped)
        self.nan += int(not math.isfinite(loss))


@dataclass
class MetricsWriter:
    """Writes the records of one attempt. `is_writer` is True on exactly one rank; elsewhere every call does nothing.

    After `open`, a file that cannot be written (disk full, folder gone) is said once and never ends a training:
    `metrics.jsonl` is tried again at every record, TensorBoard is left alone until the next attempt.
    """

    paths: RunPaths
    job_id: str
    is_writer: bool
    tensorboard: bool
    tensorboard_queue: int
    world_size: int
    _events: SummaryWriter | None = field(default=None, init=False)
    _marked_restart: bool = field(default=False, init=False)
    _complained: bool = field(default=False, init=False)

    def open(self) -> None:
        """Create the log folders and the event file. Raises OSError when the run directory refuses them."""
        if not self.is_writer:
            return
        self.paths.logs.mkdir(parents=True, exist_ok=True)
        if self.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(log_dir=str(self.paths.tensorboard), max_queue=self.tensorboard_queue)

    def step(self, record: StepRecord, data_parallel: int, sequence_length: int) -> None:
        """Print the log line and append the record to both machine-readable logs."""
        if not self.is_writer:
            return
        tell(format_step(record))
        self._append({"kind": "step", **asdict(record)})
        with self._tensorboard() as events:
            if events is not None:
                self._progress(events, record)
                self._rates(events, record, data_parallel, sequence_length)

    def validation(self, name: str, iteration: int, samples: int, tokens: int, loss: float) -> None:
        """Report one validation group's mean loss."""
        if not self.is_writer:
            return
        tell(format_validation(name, iteration, loss))
        perplexity = math.exp(min(20.0, loss)) if math.isfinite(loss) else math.nan
        self._append(
            {"kind": "validation", "name": name, "iteration": iteration, "lm_loss": loss, "perplexity": perplexity}
        )
        with self._tensorboard() as events:
            if events is None:
                return
            for tag, value in (("lm loss validation", loss), ("lm loss validation ppl", perplexity)):
                full = f"lm-loss-validation/{name}/{tag}"
                events.add_scalar(full, value, iteration)
                events.add_scalar(f"{full} vs samples", value, samples)
                events.add_scalar(f"{full} vs tokens", value, tokens)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._events is not None:
            self._events.close()

    def _append(self, value: dict[str, Any]) -> None:
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
        """The event writer, or None. Its own thread meets the full disk; the fault comes up here, at a later record."""
        try:
            yield self._events
        except Exception as error:  # whatever the library raises
            self._events = None
            tell(f"tr11: WARNING: TensorBoard cannot be written and stops until the next attempt: {error}")

    def _progress(self, events: SummaryWriter, record: StepRecord) -> None:
        add, iteration = events.add_scalar, record.iteration
        samples, tokens = record.consumed_samples, record.consumed_tokens
        add("steps-vs-samples/y=steps,x=samples", iteration, samples)
        add("steps-vs-samples/y=samples,x=steps", samples, iteration)
        add("steps-vs-tokens/y=steps,x=tokens", iteration, tokens)
        add("steps-vs-tokens/y=tokens,x=steps", tokens, iteration)
        values = {
            "learning-rate/learning-rate": record.learning_rate,
            "batch-size/batch-size": record.global_batch_size,
            "lm-loss-training/lm loss": record.lm_loss,
            "grad-norm/grad-norm": record.grad_norm,
            "params-norm/params-norm": record.params_norm,
        }
        for tag, value in values.items():
            if value is None:
                continue
            add(tag, value, iteration)
            add(f"{tag} vs samples", value, samples)
            if not tag.startswith("batch-size"):
                add(f"{tag} vs tokens", value, tokens)

    def _rates(self, events: SummaryWriter, record: StepRecord, data_parallel: int, sequence_length: int) -> None:
        add, iteration = events.add_scalar, record.iteration
        tokens_per_second = record.samples_per_second * sequence_length
        add("iteration-time/iteration-time", record.seconds_per_iteration, iteration)
        add("iteration-time/iteration-time vs samples", record.seconds_per_iteration, record.consumed_samples)
        add("iteration-time/iteration-time vs tokens", record.seconds_per_iteration, record.consumed_tokens)
        add("iteration-time/samples per second", record.samples_per_second, iteration)
        add("iteration-time/samples per second per replica", record.samples_per_second / data_parallel, iteration)
        add("iteration-time/tokens per second", tokens_per_second, iteration)
        add("iteration-time/tokens per second per replica", tokens_per_second / data_parallel, iteration)
        add("iteration-time/TFLOPs per gpu (estimated)", record.tflops, iteration)
        # The original's restart marker: the world size once, then zero at the next line.
        add("iteration-time/world_size", 0 if self._marked_restart else self.world_size, iteration)
        self._marked_restart = True


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
