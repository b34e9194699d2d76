"""The commands that make what a card's data lacks, for someone who has none yet: corpus, tokenizer,
indexed dataset.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from tr11ops.runcard.card import RunCard
from tr11ops.rundir.datasets import prefixes_of
from tr11ops.rundir.tokenizer import TOKENIZER_FILE

# what `tr11 data preprocess` adds to its --output-prefix
DOCUMENTS, SENTENCES = "_text_document", "_text_sentence"
MOST_DATASETS = 3  # a mixture of many is no one's first try


def data_commands(card: RunCard, current: Path) -> tuple[str, ...]:
    """Lines to be typed in `current`, in order; none where nothing is missing, or the data is not
    tr11's to make.

    Only what is not there at all is made: a damaged dataset is for a person to look at.
    """
    missing = [prefix for prefix in prefixes_of(card.data) if not _is_there(prefix)]
    if card.rehearsal is not None or not 0 < len(missing) <= MOST_DATASETS:
        return ()
    suffix = dataset_suffix(card.model.family)
    if _tokenizer_file(card) is None or not all(prefix.endswith(suffix) for prefix in missing):
        return ()
    return tuple(
        dict.fromkeys(_commands(card, [prefix.removesuffix(suffix) for prefix in missing], current))
    )


def dataset_suffix(family: str) -> str:
    """How the name ends that `tr11 data preprocess` gives to what a family of models reads."""
    if family == "gpt":
        return DOCUMENTS
    return SENTENCES


def _tokenizer_file(card: RunCard) -> Path | None:
    """The file that `tr11 data tokenizer` would make; None where it makes none of this type, or the
    card names none.
    """
    tokenizer = card.tokenizer
    if tokenizer.type == "huggingface":
        if tokenizer.path is None:
            return None
        return Path(tokenizer.path) / TOKENIZER_FILE
    file = tokenizer.vocabulary_file
    if file is not None and tokenizer.type.startswith("bert_"):
        return Path(file)
    return None


def _is_there(prefix: str) -> bool:
    return Path(f"{prefix}.idx").exists() or Path(f"{prefix}.bin").exists()


def _commands(card: RunCard, stems: list[str], current: Path) -> Iterator[str]:
    file = _tokenizer_file(card)
    assert file is not None
    is_wordpiece = card.tokenizer.type != "huggingface"
    kind = ""
    if is_wordpiece:
        kind = f"--tokenizer-type {card.tokenizer.type} "
        used = f"{kind}--vocab-file {_shown(str(file), current)}"
    else:
        used = f"--tokenizer {_shown(str(card.tokenizer.path), current)}"
    sentences = (
        "--split-sentences --no-append-eod "
        if dataset_suffix(card.model.family) == SENTENCES
        else ""
    )
    for stem in stems:
        corpus = _shown(f"{stem}.jsonl", current)
        if not Path(f"{stem}.jsonl").exists():
            yield f"tr11 data corpus --output {corpus}"
        if file.is_absolute() and not file.exists():
            size = card.tokenizer.vocabulary_size or card.tokenizer.padded_vocabulary_size
            made = f"{kind}--vocab-size {size} --output {_shown(str(file.parent), current)}"
            yield f"tr11 data tokenizer --corpus {_shown(f'{stems[0]}.jsonl', current)} {made}"
        yield f"tr11 data preprocess --input {corpus} {used} {sentences}--output-prefix {_shown(stem, current)}"


def _shown(path: str, current: Path) -> str:
    """A path as one types it in `current`."""
    place = Path(path)
    return shlex.quote(str(place.relative_to(current) if place.is_relative_to(current) else place))
