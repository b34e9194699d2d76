"""Whether the training finds its data: datasets, index maps, tokenizer. What is looked up, and the
checks of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.base.observed import Unknown
from tr11ops.base.units import counted, duration
from tr11ops.runcard.card import OwnCard
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning
from tr11ops.rundir.datasets import DatasetFacts, prefixes_of

if TYPE_CHECKING:
    from tr11ops.launch.facts import LaunchFacts


INDEX_RATE = 4e6  # documents and samples a second for which one core builds index maps


def data_checks(card: OwnCard, facts: LaunchFacts) -> Iterator[PreflightCheck]:
    tokens = documents = 0
    for dataset in facts.datasets:
        if dataset.unreadable:
            yield refused(
                "data.prefixes", dataset.unreadable, "make it readable for the run's user"
            )
        elif dataset.fault:
            yield refused(
                "data.prefixes",
                dataset.fault,
                "correct the path, or make the dataset (`tr11 data preprocess`)",
            )
        else:
            yield from _size_checks(card, dataset)
        tokens += dataset.tokens
        documents += dataset.documents
    if not any(dataset.fault or dataset.unreadable for dataset in facts.datasets):
        sizes = f"{counted(documents, 'document')}, {counted(tokens, 'token')}"
        yield ok("data", f"{counted(len(facts.datasets), 'indexed dataset')}, {sizes}")


def _size_checks(card: OwnCard, dataset: DatasetFacts) -> Iterator[PreflightCheck]:
    """One sample must fit. The parts of a split follow documents, so what they hold in tokens is an
    estimate here.
    """
    sample = card.model.sequence_length + 1
    need = f"one sample takes {sample:,} (model.sequence_length + 1)"
    if dataset.tokens < sample:
        rule = f"{dataset.prefix} has {dataset.tokens:,} tokens, {need}"
        yield refused("data.prefixes", rule, "give more data, or lower model.sequence_length", 2)
        return
    if card.data.uses_groups:
        return  # each group names its own parts; the trainer counts them exactly
    shares = [float(share) for share in card.data.split.split(",")]
    parts = [("training", shares[0])]
    if card.evaluation.iterations > 0:
        parts.append(("validation", shares[1]))
    for part, share in parts:
        tokens = int(dataset.tokens * share / sum(shares))
        if tokens < sample:
            rule = f"{card.data.split} leaves {part} about {tokens:,} tokens of {dataset.prefix}, {need}"
            yield warning("data.split", rule, "give more data, or a larger share")


def prefixes_without_maps(card: OwnCard) -> tuple[str, ...]:
    """The prefixes for which no index map of this card's sequence length and seed is there; they
    are built at start.
    """
    length = card.model.sequence_length
    seed = card.run.seed
    missing = []
    for prefix in prefixes_of(card.data):
        path = Path(prefix)
        if card.data.cache is None:
            folder = path.parent
        else:
            folder = Path(card.data.cache)
        start = f"{path.name}_"
        middle = f"ns_{length}sl_{seed}s_"
        try:
            names = [entry.name for entry in os.scandir(folder)]
        except (FileNotFoundError, NotADirectoryError):
            names = []
        if not any(
            name.startswith(start) and middle in name and name.endswith(".json") for name in names
        ):
            missing.append(prefix)
    return tuple(missing)


def map_checks(card: OwnCard, facts: LaunchFacts) -> Iterator[PreflightCheck]:
    """Index maps that are missing are built at the start of the training, by one worker while all
    others wait.
    """
    missing = facts.without_maps
    if isinstance(missing, Unknown):
        yield warning(
            "index maps",
            f"they could not be looked for ({missing.why}); they are built if they are missing",
        )
    elif missing:
        documents = sum(
            dataset.documents for dataset in facts.datasets if dataset.prefix in missing
        )
        seconds = (documents + card.batch.train_samples) / INDEX_RATE
        count = f"{len(missing)} of {len(facts.datasets)} data sets"
        yield ok(
            "index maps",
            f"{count} have none yet: built at the start, in about {duration(max(1.0, seconds))}",
        )
    else:
        yield ok("index maps", "there for every data set")


def tokenizer_checks(card: OwnCard, facts: LaunchFacts) -> Iterator[PreflightCheck]:
    tokenizer = facts.tokenizer
    rows = card.tokenizer.padded_vocabulary_size
    if tokenizer.fault:
        yield refused("tokenizer.path", tokenizer.fault, tokenizer.fix)
    elif tokenizer.size is not None and tokenizer.size > rows:
        rule = f"{rows} is below the tokenizer's {tokenizer.size} tokens"
        yield refused("tokenizer.padded_vocabulary_size", rule, f"use {tokenizer.size} or more", 2)
    elif tokenizer.end_fault and card.model.looks_ahead:
        rule = f"{tokenizer.end_fault}: the training would end there"
        yield refused("tokenizer", rule, tokenizer.end_fix)
    elif tokenizer.end_fault:
        rule = (
            f"{tokenizer.end_fault}: the training reads ids alone, but `tr11 data preprocess` and "
            "`tr11 checkpoints export` refuse it"
        )
        yield warning("tokenizer", rule, tokenizer.end_fix)
    elif tokenizer.size is not None:
        yield ok("tokenizer", f"{tokenizer.size:,} tokens in {rows:,} rows")
