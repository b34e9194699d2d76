"""`export`: a checkpoint as a model that other libraries load."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from trainer.checkpoint.huggingface.export import (
    TokenizerFiles,
    is_export,
    parse_size,
    plan_export,
    tokenizer_files,
    write_export,
)
from trainer.checkpoint.huggingface.mapped import facts_of_card
from trainer.checkpoint.reader import check_digests, open_checkpoint, part_bytes
from trainer.checkpoint.whole_folder import check_target
from trainer.config.card import CardError, TrainerConfig, load_trainer_config
from trainer.config.hub_files import cached_file
from trainer.config.model import HUB_ID
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.documents import document
from trainer.contract.errors import CheckpointError, UsageError
from trainer.contract.record import JsonObject
from trainer.contract.units import size
from trainer.data.progress import progress_bar, say
from trainer.data.tokenizer import TOKENIZER_FILE


def run(options: SimpleNamespace) -> JsonObject:
    """Export one checkpoint."""
    place = Path(options.place).resolve()
    target = Path(options.output).absolute()
    check_target(target.resolve(), options.force, is_export)
    if target.resolve().is_relative_to(place):
        raise UsageError(f"-o {target}: lies inside the checkpoint; name another folder")
    try:
        shard_bytes = parse_size(options.max_shard_size)
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}") from None
    card = read_card(options.card)
    source = open_checkpoint(place)
    model = card.model if card else None
    if model:
        extra = {"seq_length": model.sequence_length, "initializer_range": model.init_std}
    else:
        extra = {}
    try:
        tokenizer, remarks = _tokenizer(options.tokenizer, card)
        plan = plan_export(
            source,
            dtype=options.dtype,
            max_shard_bytes=shard_bytes,
            tokenizer=tokenizer,
            card_facts=facts_of_card(card) if card else None,
            extra=extra,
            vocabulary_size=card.tokenizer.vocabulary_size if card else None,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{place} was not exported: {error}") from None
    for remark in (*remarks, *plan.remarks):
        say(f"tr11: {remark}")
    verify = options.verify and (place / MANIFEST_FILE).is_file()  # other tools write none
    with progress_bar() as bar:
        if verify:
            task = bar.add_task("verifying", total=part_bytes(place, "weights"))
            check_digests(place, "weights", partial(bar.advance, task))
        task = bar.add_task("exporting", total=plan.bytes)
        entries = write_export(
            plan, target, force=options.force, on_bytes=partial(bar.advance, task)
        )
    return {
        "checkpoint": str(place),
        "step": source.facts.step,
        "folder": str(target),
        "dtype": plan.config["dtype"],
        "parameters": plan.parameters,
        "tensor_bytes": plan.bytes,
        "shards": len(plan.shards),
        "verified": verify,
        "tokenizer": tokenizer is not None,
        "remarks": [*remarks, *plan.remarks],
        "files": [document(entry) for entry in entries],
    }


def describe(result: JsonObject) -> str:
    files = f"{result['shards']} file{'' if result['shards'] == 1 else 's'}"
    return (
        f"{result['folder']}: step {result['step']}, {result['parameters']:,} parameters in {result['dtype']}, "
        f"{size(result['tensor_bytes'])} in {files}"
    )


def read_card(path: str | None) -> TrainerConfig | None:
    """The resolved card, if there is one. Raises UsageError with every problem of it."""
    if path is None:
        return None
    try:
        return load_trainer_config(Path(path))
    except CardError as error:
        raise UsageError(str(error)) from None


def _tokenizer(
    path: str | None, card: TrainerConfig | None
) -> tuple[TokenizerFiles | None, list[str]]:
    """The tokenizer to write, and remarks. One that was asked for must be usable; the card's may be
    elsewhere.
    """
    if path is not None:
        return tokenizer_files(Path(path)), []
    named = card.tokenizer.path if card else None
    if named is None:
        return None, ["no tokenizer is known: none is written (--tokenizer PATH)"]
    if not Path(named).exists() and not _is_cached(named):
        return None, [
            f"the run card's tokenizer {named} is not there: none is written (--tokenizer PATH)"
        ]
    return tokenizer_files(Path(named)), []


def _is_cached(named: str) -> bool:
    """Whether it is a hub id whose files are on this disk: an export of a run asks no network."""
    return (
        HUB_ID.fullmatch(named) is not None
        and cached_file(named, TOKENIZER_FILE, os.environ) is not None
    )
