"""The training sections of the run card: frozen models. Rules that span keys are in
`trainer.config.rules`.

`tr11ops.runcard.card` composes these with the operation's sections, so there is one schema and no copy.
Imports pydantic and the standard library only; never torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import model_validator

from trainer.config.base import (
    MOST_RAMP_LEVELS,
    CardError,
    Problem,
    Section,
    left_out,
    nearest,
    validate,
)
from trainer.config.data import (
    BatchSection,
    CurriculumSection,
    DataSection,
    EvaluationSection,
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
from trainer.config.run import (
    DEFAULT_INTERVAL_MINUTES,
    CheckpointSection,
    DebugSection,
    LoggingSection,
    RecoverySection,
    RunSection,
)
from trainer.contract.paths import RunPaths

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
        if self.run.kill_switch:
            return Path(self.run.kill_switch)
        return Path(self.run.directory) / "kill-switch"

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
