"""What a model's card says, read from the run: its card, its checkpoint's manifest, its metrics and
its past.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import field

from tr11ops.hub.model_card import UNKNOWN, Dataset, ModelFacts, Rows, TrainingHistory
from trainer.config.data import data_set_name
from trainer.contract.manifest import Manifest
from trainer.contract.metrics_record import STEP, VALIDATION, records
from trainer.contract.record import Record
from trainer.schedule.flops import count_parameters

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard
    from trainer.config.model import ModelSection

LONGEST_GROUP_BYTES = 1 << 20
_POSITIONS = {"alibi": "ALiBi", "absolute": "learned", "rotary": "rotary"}


class Losses(Record):
    """The training loss of a step, and of each validation group the last one until it: name ->
    (step, loss).
    """

    train: float | None = None
    validation: Mapping[str, tuple[int, float]] = field(default_factory=dict)


def model_facts(
    card: RunCard,
    manifest: Manifest,
    losses: Losses,
    training_history: TrainingHistory,
    repository: str,
    revision: str,
    version: str,
) -> ModelFacts:
    """Everything together. Pure but for a file that the card names for its data."""
    return ModelFacts(
        name=card.run.name,
        variant=card.paths.variant,
        step=manifest.step,
        total_steps=card.total_iterations or None,
        consumed_samples=manifest.consumed_samples,
        consumed_tokens=manifest.consumed_tokens,
        architecture=_architecture(card),
        kind=model_kind(card.model),
        datasets=datasets_of(card),
        hyperparameters=_hyperparameters(card),
        hardware=_hardware(card, manifest.topology),
        training_history=training_history,
        train_loss=losses.train,
        validation_losses=tuple(
            (name, *losses.validation[name]) for name in sorted(losses.validation)
        ),
        repository=repository,
        revision=revision,
        license=card.hub.license,
        languages=tuple(card.hub.languages),
        identity=hashlib.sha256(f"{card.run.name}\0{card.paths.variant}".encode()).hexdigest()[:16],
        card_hash=manifest.run_card_hash,
        version=version,
    )


def datasets_of(card: RunCard) -> tuple[Dataset, ...] | None:
    """The training mixture by the last part of each path, since the rest says whose disk it is on;
    None: unknown.

    Where data sets are validated by the names of their folders, they are called by these.
    """
    data = card.data
    if data.prefixes:
        weights = data.weights
        total = 0.0
        if weights:
            total = sum(weights)
        shares = (
            [weight / total for weight in weights]
            if weights and total > 0
            else [None] * len(data.prefixes)
        )
        if data.validate_each:
            names = [data_set_name(prefix) for prefix in data.prefixes]
        else:
            names = [Path(prefix).name for prefix in data.prefixes]
        return tuple(Dataset(name, share) for name, share in zip(names, shares, strict=True))
    text = data.train_group
    if text is None and data.train_groups_file is not None:
        try:
            with Path(data.train_groups_file).open(encoding="utf-8") as stream:
                text = stream.read(LONGEST_GROUP_BYTES).strip().strip('"').partition('"')[0]
        except (OSError, UnicodeDecodeError):
            return None
    if text:
        return _of_group(text)
    return None


def _of_group(text: str) -> tuple[Dataset, ...] | None:
    """`NAME: WEIGHT START:END PREFIX, ...`: names and shares; None for what is written otherwise."""
    entries = [entry.split() for entry in text.partition(":")[2].split(",")]
    try:
        weighted = [(Path(words[2]).name, float(words[0])) for words in entries if len(words) == 3]
    except ValueError:
        return None
    total = sum(weight for _, weight in weighted)
    if not weighted or len(weighted) != len(entries) or not (math.isfinite(total) and total > 0):
        return None
    return tuple(Dataset(name, weight / total) for name, weight in weighted)


def model_kind(model: ModelSection) -> str:
    """By its name on the hub: which architecture of `transformers` an export of it is."""
    if model.family != "gpt":
        return {"bert": "megatron-bert", "t5": "blenderbot"}[model.family]
    if model.norm != "rmsnorm" and not model.is_gated:
        return "bloom"
    if model.qk_norm:
        return "qwen3"
    return "llama"


def _architecture(card: RunCard) -> Rows:
    model, vocabulary = card.model, card.tokenizer.padded_vocabulary_size
    shared = (
        ()
        if model.groups == model.attention_heads
        else (("heads of keys and values", f"{model.groups:,}"),)
    )
    return (
        ("layers", f"{model.layers:,}"),
        ("hidden size", f"{model.hidden_size:,}"),
        ("attention heads", f"{model.attention_heads:,}"),
        *shared,
        ("sequence length", f"{model.sequence_length:,}"),
        ("vocabulary, padded", f"{vocabulary:,}"),
        ("parameters", f"{count_parameters(model, vocabulary).total:,}"),
        ("positions", _POSITIONS[model.position_embedding]),
        ("activation", model.activation),
        ("precision of the training", card.precision.dtype),
    )


def _hardware(card: RunCard, topology: Mapping[str, int]) -> Rows:
    own = {
        "tensor": card.parallel.tensor,
        "pipeline": card.parallel.pipeline,
        "data": card.data_parallel_degree,
    }
    gpus = card.slurm.nodes * card.slurm.gpus_per_node
    return (
        ("nodes", f"{card.slurm.nodes:,}"),
        ("GPUs", f"{gpus:,}" if gpus else UNKNOWN),
        (
            "parallel",
            " x ".join(f"{int(topology.get(axis, degree))} {axis}" for axis, degree in own.items()),
        ),
    )


def _hyperparameters(card: RunCard) -> Rows:
    batch, schedule, optimizer = card.batch, card.schedule, card.optimizer
    ramp = batch.ramp
    if ramp is None:
        grown = ""
    else:
        grown = f", from {ramp.start:,} by {ramp.increment:,} over {ramp.samples:,} samples"
    decay = schedule.decay_tokens, schedule.decay_samples
    if decay[0]:
        until = f"{decay[0]:,} tokens"
    else:
        until = f"{decay[1] or batch.train_samples:,} samples"
    moments = f"beta1 {optimizer.beta1}, beta2 {optimizer.beta2}, epsilon {optimizer.epsilon}"
    way = f"{schedule.decay_style}, to {schedule.min_learning_rate} at {until}"
    return (
        ("optimizer", f"{optimizer.type}, {moments}"),
        ("weight decay", f"{optimizer.weight_decay}"),
        ("gradient clipping", f"{optimizer.clip_grad}" if optimizer.clip_grad else "none"),
        ("learning rate", f"{schedule.learning_rate}, {way}"),
        ("warm-up", f"{schedule.warmup_samples:,} samples"),
        ("batch", f"{batch.global_batch_size:,} samples{grown}"),
        (
            "dropout",
            f"attention {card.model.attention_dropout}, hidden {card.model.hidden_dropout}",
        ),
        ("seed", f"{card.run.seed}"),
    )


def read_losses(metrics: Path, step: int) -> Losses:
    """The losses of `metrics.jsonl` at a step; where it was trained twice, of the later time.
    Raises OSError.
    """
    train: float | None = None
    validation: dict[str, tuple[int, float]] = {}
    for record in records(metrics):
        iteration, loss, name = (
            record.iteration,
            record.number("lm_loss"),
            record.values.get("name"),
        )
        if iteration is None or iteration > step or math.isnan(loss):
            continue
        if record.kind == STEP and iteration == step:
            train = loss
        elif record.kind == VALIDATION and isinstance(name, str):
            validation[name] = (iteration, loss)
    return Losses(train, validation)
