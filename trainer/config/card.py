"""The run card as the trainer knows it, and its sections that say how the training runs (identity,
exits, checkpoints, logs, recovery, dumps): frozen models. Rules that span keys are in
`trainer.config.rules`.

`tr11ops.runcard.card` composes these with the operation's sections, so there is one schema and no copy.
Imports pydantic and the standard library only; never torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from trainer.config.base import (
    MOST_RAMP_LEVELS,
    AboveOne,
    CardError,
    Iterations,
    Positive,
    Problem,
    Section,
    SmallCount,
    StepCount,
    left_out,
    nearest,
    validate,
)
from trainer.config.data import (
    BatchSection,
    CurriculumSection,
    DataSection,
    EvaluationSection,
    IterationRange,
    RampSection,
    ScheduleSection,
)
from trainer.config.model import (
    DEFAULT_VOCABULARY_MULTIPLE,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PrecisionSection,
    TokenizerSection,
    is_cut_by_default,
)
from trainer.contract.paths import RunPaths


class RunSection(Section):
    """[run]: the training's identity, where it lives, and when one attempt ends."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """name of the run and of its Slurm job"""

    variant: str = Field(default="main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """experiment inside it"""

    directory: str = Field(min_length=1)
    """the run directory: checkpoints, logs, state"""

    seed: int = Field(default=1234, ge=0, lt=2**32)
    """seed of weights, dropout and data order"""

    kill_switch: str | None = None
    """path of the stop file; default: kill-switch in the directory"""

    exit_duration_minutes: Positive | None = None
    """save and leave after this long; default, without an early signal: so long before
    slurm.time_limit as a step, an evaluation and a save take
    """

    exit_interval: Iterations | None = None
    """save and leave at multiples of this iteration"""

    expect_resume: bool = False
    """refuse to start from random weights"""

    deterministic: bool = False
    """only kernels that repeat bit for bit: GPUs are slower in the backward pass of attention and
    embedding, and an operation without such a kernel ends the training
    """

    corruption_interval: Iterations | None = None
    """compare every worker's arithmetic with itself and other replicas every so many iterations, at
    the cost of some four micro batches; default: never
    """

    @property
    def stop_file(self) -> Path:
        """The kill switch: unique to the run unless the card names one."""
        if self.kill_switch:
            return Path(self.kill_switch)
        return Path(self.directory) / "kill-switch"


DEFAULT_INTERVAL_MINUTES = 60.0


class CheckpointSection(Section):
    """[checkpoint]: when to save and how, and where a training starts from. May be left out."""

    interval: Iterations | None = None
    """save every this many iterations"""

    interval_minutes: float | None = Field(default=None, gt=0, le=10**6)
    """save this long after the last save; this, interval, or both; 60 where neither is given"""

    format: Literal["tr11", "deepspeed"] = "tr11"
    """topology-free, or the layout of Megatron-DeepSpeed; both are always read"""

    asynchronous: bool = True
    """copy to host memory, train on, write in the background"""

    verify: Literal["digests", "sizes"] = "digests"
    """what is checked before a load"""

    save_optimizer: bool = True
    """false: weights only, which no training resumes from"""

    save_random_state: bool = True
    """false: random streams are derived again on resume"""

    load: str | None = None
    """folder of checkpoints to start from while this run has none of its own"""

    finetune: bool = False
    """with load: take the weights, start all counters at zero"""

    load_optimizer: bool = True
    """false: moments start at zero"""

    load_random_state: bool = True
    """false: random streams are derived again"""


class LoggingSection(Section):
    """[logging]: what is written, and how often."""

    interval: Iterations = 1
    """iterations per log line"""

    folder: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,94}-logs$")
    """name of the folder of logs in the run directory, ends in -logs; default: NAME-logs"""

    tensorboard: bool = True
    """write TensorBoard events"""

    tensorboard_queue: Iterations = 5
    """events kept before a flush"""

    params_norm: bool = False
    """log the norm of all weights"""

    zeros_in_gradient: bool = False
    """log how many gradient elements are zero"""

    layer_norms_interval: Iterations | None = None
    """every so many iterations the norms of each layer's gradients, update and weights, and what
    each block hands on; default: never
    """

    tensorboard_interval: Iterations = 1
    """iterations per TensorBoard record"""

    tensorboard_timers: bool = False
    """times of the step's parts"""

    tensorboard_batch_size: bool = True
    """the global batch size"""

    tensorboard_validation_perplexity: bool = True
    """perplexity beside validation loss"""

    tensorboard_learning_rate: bool = True
    """the learning rate"""

    tensorboard_loss_scale: bool = True
    """the loss scale of fp16"""


class RecoverySection(Section):
    """[recovery]: what a loss spike does. A spike is a gradient norm or a loss far above its own
    median.
    """

    on_spike: Literal["flag", "roll_back", "off"] = "flag"
    """say so in the log, or also go back and skip the data, or do not look"""

    gradient_factor: AboveOne = 10.0
    """gradient norm over its median, two steps in a row"""

    loss_factor: AboveOne = 2.0
    """loss over its median"""

    window: int = Field(default=100, ge=10, le=100_000)
    """steps that the medians are taken over"""

    roll_backs: SmallCount = 2
    """roll-backs of the whole run; then spikes are flagged"""

    dropped_steps: StepCount = 50
    """steps in a row that are not finite and change nothing, after which the training stops; 0 =
    never
    """

    skip_margin: StepCount = 10
    """iterations skipped beyond the spike, on each side"""


class DebugSection(Section):
    """[debug]: dumps of every parameter around a step, for `tr11 checkpoints diff`."""

    dump: Literal["off", "full", "fingerprint"] = "off"
    """whole tensors, or their least, largest and mean value, norm and digest"""

    iterations: list[IterationRange] = Field(default=[])
    """iterations that are dumped, both ends included: "805-806"; default: all"""


__all__ = [
    "MOST_RAMP_LEVELS",
    "BatchSection",
    "CardError",
    "CheckpointSection",
    "CurriculumSection",
    "DataSection",
    "DebugSection",
    "EvaluationSection",
    "LoggingSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "PrecisionSection",
    "Problem",
    "RampSection",
    "RecoverySection",
    "RunSection",
    "ScheduleSection",
    "Section",
    "TokenizerSection",
    "TrainerConfig",
    "load_trainer_config",
    "nearest",
    "validate",
]


class TrainerConfig(Section):
    """Everything the trainer reads: the training sections of one run card."""

    run: RunSection
    parallel: ParallelSection = left_out(ParallelSection)
    model: ModelSection
    batch: BatchSection
    optimizer: OptimizerSection = left_out(OptimizerSection)
    schedule: ScheduleSection
    curriculum: CurriculumSection | None = None
    precision: PrecisionSection = left_out(PrecisionSection)
    checkpoint: CheckpointSection = left_out(CheckpointSection)
    evaluation: EvaluationSection = left_out(EvaluationSection)
    data: DataSection
    tokenizer: TokenizerSection
    logging: LoggingSection = left_out(LoggingSection)
    recovery: RecoverySection = left_out(RecoverySection)
    debug: DebugSection = left_out(DebugSection)

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, tables: Any) -> Any:
        """Fill in what follows from other keys, or from their absence."""
        if isinstance(tables, Mapping):
            return derive_numbers(tables)
        return tables

    @property
    def paths(self) -> RunPaths:
        return RunPaths(
            Path(self.run.directory), self.run.name, self.run.variant, self.logging.folder or ""
        )

    @property
    def kill_switch(self) -> Path:
        """The stop file of this run; unique to it unless the card names one."""
        return self.run.stop_file

    @property
    def ordered_samples(self) -> int:
        """Length of the training that the order of its samples is made for."""
        return self.data.order_samples or self.batch.train_samples

    @property
    def tests_at_end(self) -> bool:
        """Whether the card names test data, a group or a share of `data.split`, and evaluates at
        all.
        """
        if self.evaluation.iterations == 0:
            return False
        if self.data.uses_groups:
            return bool(self.data.test_groups or self.data.test_groups_file)
        # three numbers, as the rules of the card make sure
        return float(self.data.split.split(",")[-1]) > 0

    def data_parallel(self, world_size: int) -> int:
        """Data-parallel degree on `world_size` workers (integer division)."""
        return world_size // (self.parallel.tensor * self.parallel.pipeline)


def load_trainer_config(path: Path) -> TrainerConfig:
    """Read a resolved card (JSON) as the launcher wrote it; sections the trainer does not know are
    passed over.

    Raises CardError when it cannot be read or breaks a rule.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CardError(
            str(path), [Problem("file", None, f"cannot be read ({error})", "give a resolved card")]
        ) from None
    if not isinstance(value, dict):
        raise CardError(
            str(path),
            [Problem("file", None, "does not hold a JSON object", "give a resolved card")],
        )
    known = {name: item for name, item in value.items() if name in TrainerConfig.model_fields}
    return validate(TrainerConfig, known, str(path))


def derive_numbers(tables: Mapping[str, Any]) -> dict[str, Any]:
    """`tables` with what a card may leave out and other keys give: numbers, when to save, sequence
    parallelism.

    train_samples = train_iterations x global_batch_size; the padded size is the vocabulary rounded
    up to a multiple of divisible_by x parallel.tensor (Megatron's rule). A card that does not say
    when to save saves by the clock. Sequence parallelism is on where it can be. Values of a wrong
    kind are left for the schema to refuse.
    """
    result = dict(tables)
    parallel = _table(tables, "parallel")
    sections = parallel, _table(tables, "model"), _table(tables, "curriculum")
    if parallel.get("sequence_parallel") is None and isinstance(
        tables.get("parallel", {}), Mapping | Section
    ):
        result["parallel"] = {**parallel, "sequence_parallel": is_cut_by_default(*sections)}
    checkpoint = tables.get("checkpoint", {})
    if (
        isinstance(checkpoint, Mapping)
        and checkpoint.get("interval") is checkpoint.get("interval_minutes") is None
    ):
        result["checkpoint"] = {**checkpoint, "interval_minutes": DEFAULT_INTERVAL_MINUTES}
    batch, tokenizer = _table(tables, "batch"), _table(tables, "tokenizer")
    if "train_samples" not in batch and _are_counts(batch, "train_iterations", "global_batch_size"):
        result["batch"] = {
            **batch,
            "train_samples": batch["train_iterations"] * batch["global_batch_size"],
        }
    if "padded_vocabulary_size" not in tokenizer and _are_counts(tokenizer, "vocabulary_size"):
        multiple = tokenizer.get("divisible_by") or DEFAULT_VOCABULARY_MULTIPLE
        tensor = _table(tables, "parallel").get("tensor", 1)
        if _are_counts({"multiple": multiple, "tensor": tensor}, "multiple", "tensor"):
            step = multiple * tensor
            size = -(-tokenizer["vocabulary_size"] // step) * step
            result["tokenizer"] = {**tokenizer, "padded_vocabulary_size": size}
    return result


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section as plain keys; empty when it is missing or no table."""
    value = tables.get(name, {})
    if isinstance(value, Section):
        return value.model_dump()
    if isinstance(value, Mapping):
        return value
    return {}


def _are_counts(table: Mapping[str, Any], *keys: str) -> bool:
    return all(type(table.get(key)) is int and table[key] > 0 for key in keys)
