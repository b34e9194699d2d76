"""The commands that make what a card's data lacks, for someone who has none yet: corpus, tokenizer, indexed dataset."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from tr11ops.runcard.card import RunCard
from tr11ops.rundir.datasets import prefixes_of
from tr11ops.rundir.tokenizer import TOKENIZER_FILE

SUFFIX = "_text_document"  # what `tr11 data preprocess` adds to its --output-prefix
MOST_DATASETS = 3  # a mixture of many is no one's first try


def data_commands(card: RunCard, current: Path) -> tuple[str, ...]:
    """Lines to be typed in `current`, in order; none where nothing is missing, or the data is not tr11's to make.

    Only what is not there at all is made: a damaged dataset is for a person to look at.
    """
    missing = [prefix for prefix in prefixes_of(card.data) if not _is_there(prefix)]
    tokenizer = card.tokenizer.path
    if card.rehearsal is not None or not 0 < len(missing) <= MOST_DATASETS:
        return ()
    if tokenizer is None or not all(prefix.endswith(SUFFIX) for prefix in missing):
        return ()
    return tuple(dict.fromkeys(_commands(card, missing, tokenizer, current)))


def _is_there(prefix: str) -> bool:
    return Path(f"{prefix}.idx").exists() or Path(f"{prefix}.bin").exists()


def _commands(card: RunCard, missing: list[str], tokenizer: str, current: Path) -> Iterator[str]:
    for prefix in missing:
        stem = prefix.removesuffix(SUFFIX)
        corpus = _shown(f"{stem}.jsonl", current)
        if not Path(f"{stem}.jsonl").exists():
            yield f"tr11 data corpus --output {corpus}"
        if Path(tokenizer).is_absolute() and not (Path(tokenizer) / TOKENIZER_FILE).exists():
            size = card.tokenizer.vocabulary_size or card.tokenizer.padded_vocabulary_size
            made = f"--vocab-size {size} --output {_shown(tokenizer, current)}"
            yield f"tr11 data tokenizer --corpus {_shown(f'{missing[0].removesuffix(SUFFIX)}.jsonl', current)} {made}"
        used = f"--tokenizer {_shown(tokenizer, current)} --output-prefix {_shown(stem, current)}"
        yield f"tr11 data preprocess --input {corpus} {used}"


def _shown(path: str, current: Path) -> str:
    """A path as one types it in `current`."""
    place = Path(path)
    return shlex.quote(str(place.relative_to(current) if place.is_relative_to(current) else place))
