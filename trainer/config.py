"""The training sections of the run card: frozen models. Rules that span keys are in `trainer.config_rules`.

`tr11ops.runcard` composes these with the operation's sections, so there is one schema and no copy.
Imports pydantic and the standard library only; never torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.contract import RunPaths

# Ceilings far beyond any training: they keep every derived number finite and every loop over levels or stages short.
MOST_WAYS = 100_000
MOST_LAYERS = 100_000
LARGEST_WIDTH = 10**7
LARGEST_BATCH = 10**7
MOST_RAMP_LEVELS = 10_000
MOST_SAMPLES = 10**15
MOST_ITERATIONS = 10**12


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a card: which key, what it holds, the rule it breaks, and how to mend it."""

    key: str
    value: Any
    rule: str
    fix: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        held = "" if self.value is None else f" = {shown}"
        line = f"{self.key}{held}: {self.rule}; {self.fix}"
        return "".join(character if character.isprintable() else " " for character in line)


class CardError(ValueError):
    """A run card that cannot be used. `problems` holds every fault found; the text is one line for each."""

    def __init__(self, source: str, problems: Iterable[Problem]):
        self.source = source
        self.problems = tuple(problems)
        shown = "".join(character if character.isprintable() else "?" for character in source)
        super().__init__("\n".join(f"{shown}: {problem}" for problem in self.problems))


class Section(BaseModel):
    """A table of the card. Unknown keys are refused; values are never silently converted from text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    """[run]: the training's identity, where it lives, and when one attempt ends."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="name of the run and of its Slurm job")
    variant: str = Field(
        default="main", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="experiment inside it"
    )
    directory: str = Field(min_length=1, description="the run directory: checkpoints, logs, state")
    seed: int = Field(default=1234, ge=0, lt=2**32, description="seed of weights, dropout and data order")
    kill_switch: str | None = Field(
        default=None, description="path of the stop file; default: kill-switch in the directory"
    )
    exit_duration_minutes: float | None = Field(default=None, gt=0, description="save and leave after this long")
    exit_interval: int | None = Field(
        default=None, gt=0, le=MOST_ITERATIONS, description="save and leave at multiples of this iteration"
    )
    expect_resume: bool = Field(default=False, description="refuse to start from random weights")


class ParallelSection(Section):
    """[parallel]: degrees of parallelism. The data-parallel degree follows from the number of workers."""

    tensor: int = Field(default=1, gt=0, le=MOST_WAYS, description="tensor-parallel degree")
    pipeline: int = Field(default=1, gt=0, le=MOST_WAYS, description="pipeline-parallel degree (stages)")
    partition: str = Field(
        default="type:transformer|embedding",
        description="how layers are dealt to stages: type:REGEX, uniform, parameters",
    )


class ModelSection(Section):
    """[model]: a pre-layer-norm GPT with tied input and output embedding."""

    layers: int = Field(gt=0, le=MOST_LAYERS, description="transformer blocks")
    hidden_size: int = Field(gt=0, le=LARGEST_WIDTH, description="width of the residual stream")
    attention_heads: int = Field(gt=0, le=LARGEST_WIDTH, description="must divide hidden_size")
    sequence_length: int = Field(gt=0, le=LARGEST_WIDTH, description="tokens in one sample")
    ffn_hidden_size: int | None = Field(default=None, gt=0, le=LARGEST_WIDTH, description="default: 4 x hidden_size")
    position_embedding: Literal["alibi", "absolute"] = Field(
        default="alibi", description="linear biases on the attention scores, or a learned table"
    )
    max_position_embeddings: int | None = Field(
        default=None, gt=0, le=LARGEST_WIDTH, description="default: sequence_length"
    )
    embedding_layernorm: bool = Field(default=False, description="LayerNorm after the word embedding")
    layernorm_epsilon: float = Field(default=1e-5, gt=0, description="added to the variance")
    attention_dropout: float = Field(default=0.1, ge=0, lt=1, description="on the attention probabilities")
    hidden_dropout: float = Field(default=0.1, ge=0, lt=1, description="on what each half of a block adds")
    init_std: float = Field(default=0.02, gt=0, description="sigma of the normal initial weights")
    activation_checkpointing: bool = Field(
        default=False, description="recompute block activations in the backward pass"
    )

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def positions(self) -> int:
        return self.max_position_embeddings or self.sequence_length

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.attention_heads


class RampSection(Section):
    """[batch.ramp]: the global batch grows from `start` by `increment` over the first `samples` samples."""

    start: int = Field(gt=0, le=LARGEST_BATCH, description="first global batch")
    increment: int = Field(gt=0, le=LARGEST_BATCH, description="added at each level")
    samples: int = Field(ge=0, le=MOST_SAMPLES, description="length of the ramp")


class BatchSection(Section):
    """[batch]: how many samples a step takes, and how many the whole training takes."""

    micro_batch_size: int = Field(gt=0, le=LARGEST_BATCH, description="samples of one forward pass of one replica")
    global_batch_size: int = Field(gt=0, le=LARGEST_BATCH, description="samples of one step, after the ramp")
    train_samples: int = Field(gt=0, le=MOST_SAMPLES, description="samples of the whole training")
    ramp: RampSection | None = Field(default=None, description="default: the full batch from the first step")


class OptimizerSection(Section):
    """[optimizer]: AdamW with decoupled weight decay."""

    type: Literal["adamw"] = Field(default="adamw", description="the optimizer")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the second moment")
    epsilon: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.01, ge=0, description="not applied to biases and LayerNorms")
    clip_grad: float = Field(default=1.0, ge=0, description="largest global gradient norm; 0 = no clipping")


class ScheduleSection(Section):
    """[schedule]: the learning rate as a function of consumed samples."""

    learning_rate: float = Field(gt=0, description="peak, reached at the end of the warm-up")
    min_learning_rate: float = Field(default=0.0, ge=0, description="floor, kept after the decay")
    decay_style: Literal["constant", "linear", "cosine"] = Field(default="cosine", description="way from peak to floor")
    decay_samples: int | None = Field(
        default=None, gt=0, le=MOST_SAMPLES, description="where the floor is reached; default: batch.train_samples"
    )
    warmup_samples: int = Field(default=0, ge=0, le=MOST_SAMPLES, description="linear rise from zero")


class PrecisionSection(Section):
    """[precision]: dtype of weights and activations. Gradients are always accumulated in fp32."""

    dtype: Literal["bf16", "fp32"] = Field(default="bf16", description="of weights and activations")


class CheckpointSection(Section):
    """[checkpoint]: when to save, and what a resume checks."""

    interval: int = Field(gt=0, le=MOST_ITERATIONS, description="save every this many iterations")
    verify: Literal["digests", "sizes"] = Field(default="digests", description="what is checked before a load")


class EvaluationSection(Section):
    """[evaluation]: validation loss during the training."""

    interval: int = Field(default=1000, gt=0, le=MOST_ITERATIONS, description="evaluate every this many iterations")
    iterations: int = Field(
        default=0, ge=0, le=MOST_ITERATIONS, description="global batches in one evaluation; 0 = never"
    )


class DataSection(Section):
    """[data]: indexed datasets (`PREFIX.bin`, `PREFIX.idx`), with weights when there are several."""

    prefixes: list[str] = Field(min_length=1, description="paths without extension")
    weights: list[float] | None = Field(default=None, description="one per prefix; default: by their sizes")
    split: str = Field(default="949,50,1", description="shares of train, validation, test")
    cache: str | None = Field(default=None, description="folder of the index maps; default: beside the data")


class TokenizerSection(Section):
    """[tokenizer]: the tokenizer, and the padded size of its vocabulary."""

    path: str | None = Field(default=None, description="folder with tokenizer.json")
    padded_vocabulary_size: int = Field(gt=0, le=LARGEST_WIDTH, description="rows of the embedding")


class LoggingSection(Section):
    """[logging]: what is written, and how often."""

    interval: int = Field(default=1, gt=0, le=MOST_ITERATIONS, description="iterations per log line")
    tensorboard: bool = Field(default=True, description="write TensorBoard events")
    tensorboard_queue: int = Field(default=5, gt=0, le=MOST_ITERATIONS, description="events kept before a flush")
    params_norm: bool = Field(default=False, description="log the norm of all weights")


class TrainerConfig(Section):
    """Everything the trainer reads: the training sections of one run card."""

    run: RunSection
    parallel: ParallelSection = ParallelSection()
    model: ModelSection
    batch: BatchSection
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection
    evaluation: EvaluationSection = EvaluationSection()
    data: DataSection
    tokenizer: TokenizerSection
    logging: LoggingSection = LoggingSection()

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.run.directory), self.run.name, self.run.variant)

    @property
    def kill_switch(self) -> Path:
        """The stop file of this run; unique to it unless the card names one."""
        return Path(self.run.kill_switch) if self.run.kill_switch else Path(self.run.directory) / "kill-switch"

    @property
    def decay_samples(self) -> int:
        return self.schedule.decay_samples or self.batch.train_samples

    def data_parallel(self, world_size: int) -> int:
        """Data-parallel degree on `world_size` workers (integer division)."""
        return world_size // (self.parallel.tensor * self.parallel.pipeline)


def load_trainer_config(path: Path) -> TrainerConfig:
    """Read a resolved card (JSON) as the launcher wrote it; sections the trainer does not know are passed over.

    Raises CardError when it cannot be read or breaks a rule.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CardError(
            str(path), [Problem("file", None, f"cannot be read ({error})", "give a resolved card")]
        ) from None
    if not isinstance(value, dict):
        raise CardError(str(path), [Problem("file", None, "does not hold a JSON object", "give a resolved card")])
    known = {name: item for name, item in value.items() if name in TrainerConfig.model_fields}
    return validate(TrainerConfig, known, str(path))


SectionType = TypeVar("SectionType", bound=BaseModel)


def validate(schema: type[SectionType], value: Mapping[str, Any], source: str) -> SectionType:
    """Build `schema` from plain tables; raises CardError with every problem, unknown keys with the nearest known."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise CardError(source, [_problem(schema, entry) for entry in error.errors()]) from None


def _problem(schema: type[BaseModel], entry: Any) -> Problem:
    key = ".".join(str(part) for part in entry["loc"]) or "card"
    context = entry.get("ctx", {})
    if entry["type"] == "extra_forbidden":
        near = nearest(str(entry["loc"][-1]), _fields_at(schema, entry["loc"][:-1]))
        fix = f"did you mean {near!r}?" if near else "remove it"
        return Problem(key, entry["input"], "is not a known key", fix)
    if entry["type"] == "missing":
        return Problem(key, None, "is required and missing", "add it to the card")
    if entry["type"] == "literal_error":
        return Problem(key, entry["input"], f"must be {context['expected']}", "choose one of these")
    if entry["type"] == "model_type":
        return Problem(key, entry["input"], "must be a table", f"write [{key}] and its keys below it")
    if entry["type"] == "too_short":
        return Problem(key, entry["input"], f"needs at least {context['min_length']} entry", "add what is missing")
    rule = entry["msg"][0].lower() + entry["msg"][1:]
    if entry["type"] == "string_pattern_mismatch":
        rule = f"must look like {context['pattern']} (a regular expression)"
    fix = "change it in the card or with --set " + key + "=VALUE"
    return Problem(key, entry["input"], rule, fix)


def _fields_at(schema: type[BaseModel], location: Iterable[Any]) -> list[str]:
    """Names of the keys allowed in the table at `location`."""
    current: Any = schema
    for part in location:
        annotation = current.model_fields[part].annotation if part in current.model_fields else None
        options = [annotation, *getattr(annotation, "__args__", ())]
        tables = [item for item in options if isinstance(item, type) and issubclass(item, BaseModel)]
        if not tables:
            return []
        current = tables[0]
    return list(current.model_fields)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to a misspelt one, or None when nothing is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return found[0] if found else None
