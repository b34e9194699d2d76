"""Tokenizers learnt from texts: byte-level BPE, or WordPiece for masked training. Each has a folder
of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Engine, decoders, models, pre_tokenizers, processors, trainers

from trainer.config.end_token import CONFIG_FILE, END_OF_DOCUMENT
from trainer.contract.errors import DataError, explain_os_errors
from trainer.contract.files import write_atomically, write_json
from trainer.contract.manifest import file_digest
from trainer.contract.record import JsonObject
from trainer.data.made import begin_record, check_replaceable
from trainer.data.tokenizer import (
    TOKENIZER_FILE,
    Tokenizer,
    TokenizerSpec,
    load_tokenizer,
    split_words,
)

LearntType = Literal["huggingface", "bert_wordpiece", "bert_wordpiece_lower"]
"""The tokenizer types that can be learnt; `huggingface` is byte-level BPE."""

VOCABULARY_FILE = "vocab.txt"
PADDING = "<|padding|>"
SPECIAL_TOKENS = (END_OF_DOCUMENT, PADDING)
WORDPIECE_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BYTES_ALPHABET = 256


def train_tokenizer(
    texts: Iterator[str],
    vocabulary_size: int,
    folder: str | Path,
    *,
    kind: LearntType = "huggingface",
    extra_special_tokens: Sequence[str] = (),
    request: JsonObject | None = None,
    on_learning: Callable[[], None] = lambda: None,
    force: bool = False,
) -> Tokenizer:
    """Learn a tokenizer from `texts` and save it to `folder` (`tokenizer.json` or `vocab.txt` is
    written last).

    Special tokens come first: of BPE `<|endoftext|>` and `<|padding|>`, then the 256 bytes, so that
    any text can be encoded; of WordPiece `[PAD] [UNK] [CLS] [SEP] [MASK]`. `request` is saved
    beside it, see `is_trained`; with it, a tokenizer that this function did not make is replaced
    with `force` alone. `on_learning` is called when all texts have been read. Raises DataError when
    the size is too small, or larger than what the texts can teach, or another tokenizer is there.
    """
    target = Path(folder)
    main = target / main_file(kind)
    is_bpe = kind == "huggingface"
    if request is not None:
        check_replaceable(
            (main, target / CONFIG_FILE) if is_bpe else (main,),
            request_path(target),
            lambda record: bool(record["digest"] == file_digest(main)),
            force,
        )
    check_vocabulary_size(vocabulary_size, kind, len(extra_special_tokens))
    if is_bpe:
        engine, trainer = _byte_level(vocabulary_size, extra_special_tokens)
    else:
        engine, trainer = _wordpiece(
            vocabulary_size, extra_special_tokens, lowercase=kind == "bert_wordpiece_lower"
        )

    def read_all() -> Iterator[str]:
        yield from texts
        on_learning()

    engine.train_from_iterator(read_all(), trainer=trainer)
    _check_learnt(engine.get_vocab_size(with_added_tokens=True), vocabulary_size)
    with explain_os_errors("writing the tokenizer to", target):
        if request is not None:
            begin_record(request_path(target), request)
        if is_bpe:
            write_json(target / CONFIG_FILE, _config())
            write_atomically(main, engine.to_str(pretty=False))
        else:
            pieces = engine.get_vocab(with_added_tokens=True)
            write_atomically(
                main, "".join(f"{piece}\n" for piece in sorted(pieces, key=pieces.__getitem__))
            )
        if request is not None:
            write_json(request_path(target), {"request": request, "digest": file_digest(main)})
    return load_learnt(target, kind)


def _byte_level(vocabulary_size: int, extra: Sequence[str]) -> tuple[Engine, Any]:
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    engine.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[*SPECIAL_TOKENS, *extra],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    return engine, trainer


def _wordpiece(vocabulary_size: int, extra: Sequence[str], lowercase: bool) -> tuple[Engine, Any]:
    engine = Engine(models.WordPiece(unk_token="[UNK]"))
    split_words(engine, lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[*WORDPIECE_TOKENS, *extra],
        continuing_subword_prefix="##",
        show_progress=False,
    )
    return engine, trainer


def _check_learnt(learnt: int, asked: int) -> None:
    if learnt < asked:
        raise DataError(
            f"the corpus teaches only {learnt} tokens, {asked} were asked; use a larger corpus or --vocab-size {learnt}"
        )
    if learnt > asked:  # WordPiece keeps every character that it saw
        raise DataError(
            f"vocabulary size {asked} must be {learnt} or more: the corpus's characters and special tokens"
        )


def _config() -> JsonObject:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_DOCUMENT,
        "bos_token": END_OF_DOCUMENT,
        "unk_token": END_OF_DOCUMENT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
    }


def check_vocabulary_size(vocabulary_size: int, kind: LearntType, extra_tokens: int) -> None:
    """Raise DataError unless the size has room for the special tokens and, of BPE, for all bytes."""
    is_bpe = kind == "huggingface"
    if is_bpe:
        least = BYTES_ALPHABET + len(SPECIAL_TOKENS)
    else:
        least = len(WORDPIECE_TOKENS) + 1
    if vocabulary_size < least + extra_tokens:
        if is_bpe:
            what = "all bytes and the special tokens"
        else:
            what = "the special tokens and a piece"
        raise DataError(
            f"vocabulary size {vocabulary_size} must be at least {least + extra_tokens}: {what}"
        )


def main_file(kind: LearntType) -> str:
    """The file that is the tokenizer, written last."""
    if kind == "huggingface":
        return TOKENIZER_FILE
    return VOCABULARY_FILE


def load_learnt(folder: Path, kind: LearntType) -> Tokenizer:
    """The tokenizer that `train_tokenizer` left in a folder. Raises DataError."""
    if kind == "huggingface":
        return load_tokenizer(folder)
    return load_tokenizer(TokenizerSpec(kind, vocabulary_file=str(folder / VOCABULARY_FILE)))


def request_path(folder: Path) -> Path:
    """Where a trained tokenizer keeps what it was trained from."""
    return folder / "training.json"


def is_trained(folder: Path, request: JsonObject, kind: LearntType = "huggingface") -> bool:
    """True when `folder` holds, unchanged, the tokenizer that `request` describes."""
    try:
        record = json.loads(request_path(folder).read_text(encoding="utf-8"))
        return bool(
            record["request"] == request
            and record["digest"] == file_digest(folder / main_file(kind))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
