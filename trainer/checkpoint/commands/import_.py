"""`import`: a Hugging Face BLOOM, Llama, Qwen3 or Megatron-BERT as the first checkpoint of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from msgspec.structs import asdict

from trainer.checkpoint.commands.export import read_card
from trainer.checkpoint.huggingface.bloom import BLOOM
from trainer.checkpoint.huggingface.export import architecture_of
from trainer.checkpoint.huggingface.import_ import HuggingFaceFolder
from trainer.checkpoint.huggingface.mapped import facts_of_card
from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint
from trainer.checkpoint.rewrite import source_bytes, write_checkpoint
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import read_card_hash
from trainer.contract.checkpoint_names import LATEST_FILE, checkpoint_name, checkpoint_steps
from trainer.contract.errors import CheckpointError
from trainer.contract.record import JsonObject
from trainer.contract.units import size
from trainer.data.progress import progress_bar
from trainer.schedule.path import Progress

STEP = 0


def run(options: SimpleNamespace) -> JsonObject:
    """Import one model: weights in the card's precision, fp32 masters, zero moments, step 0."""
    card = read_card(options.card)
    assert card is not None
    folder = Path(options.folder).resolve()
    target = card.paths.checkpoints
    source = open_for(folder, card)
    check_new(target)
    info = CheckpointInfo(
        topology=source.facts.topology,
        model=source.facts.model,
        run_card_hash=read_card_hash(Path(options.card)),
        versions={"torch": torch.__version__},
    )
    with progress_bar() as bar:
        task = bar.add_task("importing", total=source_bytes(source))
        place = write_checkpoint(
            NewCheckpoint(target, STEP, Extras(asdict(Progress())), info),
            source,
            on_bytes=partial(bar.advance, task),
        )
    weights = source.tensors("weights").values()
    return {
        "source": str(folder),
        "checkpoint": str(place),
        "step": STEP,
        "dtype": card.precision.dtype,
        "parameters": sum(torch.Size(facts.shape).numel() for facts in weights),
        "padding_rows": source.padding_rows,
        "bytes": sum(path.stat().st_size for path in place.rglob("*") if path.is_file()),
    }


def describe(result: JsonObject) -> str:
    return (
        f"{result['checkpoint']}: {result['parameters']:,} parameters in {result['dtype']}, "
        f"{_padding(result['padding_rows'])}{size(result['bytes'])} with the optimizer's masters and empty "
        "moments; a launch of the run starts from it"
    )


def _padding(rows: int) -> str:
    if rows == 0:
        return ""
    if rows > 0:
        return f"{rows} rows of zeros added as padding, "
    return f"{-rows} empty rows of padding left out, "


def open_for(folder: Path, card: TrainerConfig) -> HuggingFaceFolder:
    """Open a Hugging Face model and check that it is the card's. Raises CheckpointError with the
    first difference.
    """
    wanted = facts_of_card(card)
    theirs = architecture_of(wanted)
    if theirs.facts is None:
        theirs = BLOOM  # which says what it is that no model there has
    try:
        theirs.config(wanted, card.precision.dtype)
    except CheckpointError as error:
        raise CheckpointError(f"the run card's model: {error}") from None
    source = HuggingFaceFolder(folder, theirs, card.precision.dtype)
    found = source.rows
    tokens = card.tokenizer.vocabulary_size
    if tokens is not None and tokens > found:
        raise CheckpointError(
            f"{folder} has {found} rows of the vocabulary, and tokenizer.vocabulary_size is {tokens}: name the"
            " tokenizer that the model was trained with"
        )
    if tokens is not None and card.tokenizer.padded_vocabulary_size != found:
        source = source.with_rows(card.tokenizer.padded_vocabulary_size)
    for key, value in wanted.items():
        found = source.facts.model.get(key, value)
        if found != value:
            raise CheckpointError(
                f"{folder} is of another model: {key} is {found!r} there and {value!r} in the run card; "
                f"set {key} = {found!r}"
            )
    return source


def check_new(target: Path) -> None:
    """Raise CheckpointError when the run has been trained already: an import is where a training
    begins.
    """
    steps = checkpoint_steps(target)
    if steps or (target / LATEST_FILE).exists():
        if steps:
            what = checkpoint_name(steps[-1])
        else:
            what = LATEST_FILE
        raise CheckpointError(
            f"{target} holds {what} already, and an import begins a training; use another run.variant or run.directory"
        )
