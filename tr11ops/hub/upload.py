"""Publishing a checkpoint as a model: an export in a work folder, the facts of its card, then one
commit that holds all of it.

    state/upload/global_stepN-IDENTITY-DTYPE/model/        what the export wrote
    state/upload/global_stepN-IDENTITY-DTYPE/export.json   its files with their digests; written when it is whole

The large files reach the hub first and the commit comes last, so the model appears whole or not at
all. After a kill at any point the same call goes on: a finished export is used again when its
digests hold, and the hub is not sent what it has.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from tr11ops.base.errors import HubConflict, HubMissing, Refusal
from tr11ops.base.units import size
from tr11ops.hub.base import Add, Delete, HubFile, Operation, Progress, Repository
from tr11ops.hub.client import Hub
from tr11ops.hub.model_card import UNKNOWN, Dataset, ModelFacts, Rows, TrainingHistory, identity_in
from trainer.config.data import data_set_name
from trainer.config.model import ModelSection
from trainer.contract.documents import record_of
from trainer.contract.files import make_shared, write_json
from trainer.contract.manifest import FileEntry, Manifest, file_digest
from trainer.contract.metrics_record import STEP, VALIDATION, records
from trainer.contract.record import JsonObject, Record
from trainer.schedule.flops import count_parameters

if TYPE_CHECKING:
    from tr11ops.runcard.card import OwnCard


# What a model's card says, read from the run: its card, its checkpoint's manifest, its metrics and
# its past.

LONGEST_GROUP_BYTES = 1 << 20
_POSITIONS = {"alibi": "ALiBi", "absolute": "learned", "rotary": "rotary"}


class Losses(Record):
    """The training loss of a step, and of each validation group the last one until it: name ->
    (step, loss).
    """

    train: float | None = None
    validation: Mapping[str, tuple[int, float]] = {}


def model_facts(
    card: OwnCard,
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


def datasets_of(card: OwnCard) -> tuple[Dataset, ...] | None:
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


def _architecture(card: OwnCard) -> Rows:
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
        ("parameters", f"{count_parameters(card).total:,}"),
        ("positions", _POSITIONS[model.position_embedding]),
        ("activation", model.activation),
        ("precision of the training", card.precision.dtype),
    )


def _hardware(card: OwnCard, topology: Mapping[str, int]) -> Rows:
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


def _hyperparameters(card: OwnCard) -> Rows:
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


CARD = "README.md"
CONFIG = "config.json"
EXPORT_FILE = "export.json"
MODEL_FOLDER = "model"
# What an earlier export may have left at the hub and this one does not write: a reader would mix
# the two.
OURS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
)
FOREIGN = ("*.safetensors", "*.bin", "*.msgpack", "*.h5", "*.gguf", CONFIG)
LARGEST_CARD_BYTES = 1 << 20
CONFLICTS = 5  # commits of others that are waited out
ROOM = 1.02  # of an export, over its tensors: configuration, tokenizer, headers
_SAFE = re.compile(r"[A-Za-z0-9._-]{1,200}")


class Work(Record):
    """The folder of one upload. `options` names what else than the checkpoint the export is made
    from.
    """

    folder: Path
    options: str = ""

    @property
    def model(self) -> Path:
        return self.folder / MODEL_FOLDER

    @property
    def record(self) -> Path:
        return self.folder / EXPORT_FILE

    def finished(self, advance: Callable[[int], None]) -> tuple[FileEntry, ...] | None:
        """The files of a finished export, every byte of which was read again; None when it has to
        be made again.

        `advance` is told bytes as they are read. Raises OSError as the file system does.
        """
        entries = self.recorded()
        if entries is None:
            return None
        for entry in entries:
            path = self.model / entry.path
            try:
                if path.stat().st_size != entry.bytes or file_digest(path) != entry.digest:
                    return None
            except FileNotFoundError:
                return None
            advance(entry.bytes)
        return entries

    def recorded(self) -> tuple[FileEntry, ...] | None:
        """The files as the record has them, unread; None when there is no record, or one of other
        options.
        """
        try:
            value = json.loads(self.record.read_text(encoding="utf-8"))
            if value["options"] == self.options:
                return files_of(value)
            return None
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def record_export(self, result: JsonObject) -> tuple[FileEntry, ...]:
        """Note that the export is whole. Raises Refusal when its result names no files, and
        OSError.
        """
        try:
            entries = files_of(result)
        except ValueError as error:
            raise Refusal(f"the export's result cannot be used: {error}") from None
        write_json(
            self.record, {"options": self.options, "files": [asdict(entry) for entry in entries]}
        )
        return entries

    def make(self, needed: int) -> None:
        """Make the folder, where `needed` bytes must be free. Raises Refusal and OSError."""
        make_shared(self.folder)
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise Refusal(
                f"{self.folder}: {size(free)} are free and the export takes {size(needed)}; --work names another folder"
            )

    def remove(self) -> None:
        """Remove what an upload makes, and the folder if nothing else is in it."""
        self.record.unlink(missing_ok=True)
        # and what killed exports left
        for path in (self.model, *self.folder.glob(f".{MODEL_FOLDER}.*")):
            shutil.rmtree(path, ignore_errors=True)
        try:
            self.folder.rmdir()
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST}:
                raise


def files_of(value: JsonObject) -> tuple[FileEntry, ...]:
    """The files that an export's result names. Raises ValueError when it is none."""
    try:
        found = record_of(tuple[FileEntry, ...], value["files"])
    except (ValueError, KeyError) as error:
        raise ValueError(f"it names no files ({type(error).__name__})") from None
    names = {entry.path for entry in found}
    if not found or not all(_SAFE.fullmatch(name) for name in names) or CONFIG not in names:
        raise ValueError("it names files that are not a model's")
    return found


def overwritten(hub: Hub, repository: Repository, identity: str) -> tuple[str | None, str]:
    """The destination's newest commit (None: it will be made), and what is there that is not of
    this run ("": nothing).

    Raises HubUnavailable and HubPermanentError.
    """
    try:
        head = hub.head(repository)
    except HubMissing:
        return None, ""
    tree = hub.list_tree(repository, head)
    card = tree.get(CARD)
    if card is not None:
        text = hub.read(repository, CARD, 0, LARGEST_CARD_BYTES, head).decode("utf-8", "replace")
        owner = identity_in(text)
        if owner == identity:
            return head, ""
        return (
            head,
            "a model of another run"
            if owner is not None
            else "a README.md that tr11 did not write",
        )
    foreign = sorted(
        path for path in tree if any(fnmatchcase(path, pattern) for pattern in FOREIGN)
    )
    return head, f"another model ({foreign[0]})" if foreign else ""


def stale(tree: Mapping[str, HubFile], files: Iterable[str]) -> tuple[str, ...]:
    """What an earlier export left in the repository and this one does not replace."""
    kept = set(files)
    return tuple(
        sorted(
            path
            for path in tree
            if path not in kept and any(fnmatchcase(path, pattern) for pattern in OURS)
        )
    )


def publish(
    hub: Hub,
    repository: Repository,
    work: Work,
    files: tuple[FileEntry, ...],
    card: str,
    message: str,
    progress: Progress | None = None,
) -> str:
    """Commit the model and its card as one, on a repository that is there; returns the commit's id.

    Raises HubUnavailable, HubPermanentError, FileChanged and OSError.
    """
    additions = [
        Add(entry.path, work.model / entry.path, entry.bytes, entry.digest) for entry in files
    ]
    for left in reversed(range(CONFLICTS)):
        head = hub.head(repository)
        tree = hub.list_tree(repository, head)
        gone = [Delete(path) for path in stale(tree, (CARD, *(entry.path for entry in files)))]
        operations: list[Operation] = [*additions, Add(CARD, card.encode("utf-8")), *gone]
        try:
            return hub.commit(repository, operations, message, parent=head, progress=progress)
        except HubConflict:
            if not left:
                raise
    raise AssertionError("unreachable")
