"""Tokenizers: the one way to load any kind."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer as Engine, decoders, models, normalizers, pre_tokenizers

from trainer.config.end_token import CONFIG_FILE, KNOWN_END_TOKENS, end_token_of
from trainer.config.hub_files import hub_file
from trainer.config.model import HUB_ID
from trainer.contract.errors import DataError, HubFileError
from trainer.contract.manifest import file_digest
from trainer.contract.record import Record
from trainer.contract.units import shortened

TOKENIZER_FILE = "tokenizer.json"


@dataclass
class Tokenizer:
    """A loaded tokenizer. `vocabulary_size` counts every id, special ones too; `eod_id` ends a
    document.
    """

    engine: Engine
    files: tuple[Path, ...]
    end_token: str
    eod_id: int

    def __post_init__(self) -> None:
        self.path = self.files[0]
        # The highest id decides, not the count: a tokenizer may leave ids unused.
        self.vocabulary_size = max(self.engine.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def vocab_size(self) -> int:
        """The same as `vocabulary_size`."""
        return self.vocabulary_size

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, special ones too."""
        return dict(self.engine.get_vocab(with_added_tokens=True))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without any special token that the text does not spell out."""
        return [
            encoding.ids
            for encoding in self.engine.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self.engine.decode(list(ids), skip_special_tokens=False))

    def digest(self) -> str:
        """Digest of the tokenizer's files and settings: what decides whether two tokenizations are
        the same.
        """
        if len(self.files) == 1 and self.path.name.endswith(".json"):
            return file_digest(self.path)
        parts = [
            *map(file_digest, self.files),
            str(self.engine.normalizer),
            str(self.engine.pre_tokenizer),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


TokenizerType = Literal["huggingface", "gpt2_bpe", "bert_wordpiece", "bert_wordpiece_lower"]


class TokenizerSpec(Record):
    """Which tokenizer, in the words of a run card.

    `huggingface`: `path`, a folder with tokenizer.json, that file, or OWNER/NAME on the hub.
    `gpt2_bpe`: `vocabulary_file` (vocab.json) and `merges_file` (merges.txt). `bert_wordpiece`,
    `bert_wordpiece_lower`: `vocabulary_file` (vocab.txt).
    """

    type: TokenizerType = "huggingface"
    path: str | None = None
    vocabulary_file: str | None = None
    merges_file: str | None = None


def load_tokenizer(what: str | Path | TokenizerSpec) -> Tokenizer:
    """The tokenizer that a path (of the type `huggingface`) or a spec names.

    Raises DataError when it is absent, is not a tokenizer, or has no token that ends a document.
    """
    if isinstance(what, TokenizerSpec):
        spec = what
    else:
        spec = TokenizerSpec(path=str(what))
    if spec.type == "huggingface":
        return _load_huggingface(_given(spec.path, "a path", spec))
    vocabulary = _given(spec.vocabulary_file, "a vocabulary file", spec)
    if spec.type == "gpt2_bpe":
        return _load_gpt2(vocabulary, _given(spec.merges_file, "a merges file", spec))
    return _load_bert(vocabulary, lowercase=spec.type == "bert_wordpiece_lower")


def _given(path: str | None, what: str, spec: TokenizerSpec) -> Path:
    if path is None:
        raise DataError(f"a tokenizer of type {spec.type} needs {what}; name it")
    return Path(path)


def _load_gpt2(vocabulary: Path, merges: Path) -> Tokenizer:
    """Byte-level BPE from OpenAI's two files. A text that spells out a special token does not
    become one.
    """
    engine = _read(
        (vocabulary, merges), lambda: Engine(models.BPE.from_file(str(vocabulary), str(merges)))
    )
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    engine.decoder = decoders.ByteLevel()
    return Tokenizer(engine, (vocabulary, merges), *end_token_of(vocabulary, engine.token_to_id))


def _load_bert(vocabulary: Path, lowercase: bool) -> Tokenizer:
    """WordPiece from a list of pieces, one a line; a document ends with [SEP]."""
    engine = _read(
        (vocabulary,),
        lambda: Engine(models.WordPiece.from_file(str(vocabulary), unk_token="[UNK]")),
    )
    if engine.token_to_id("[UNK]") is None:
        raise DataError(
            f"{vocabulary} has no [UNK], so it is not a vocabulary of WordPiece; name another file"
        )
    split_words(engine, lowercase)
    return Tokenizer(engine, (vocabulary,), *end_token_of(vocabulary, engine.token_to_id))


def split_words(engine: Engine, lowercase: bool) -> None:
    """Let WordPiece read words as BERT does."""
    engine.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece()


def _read(files: tuple[Path, ...], load: Callable[[], Engine]) -> Engine:
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} does not exist; give the path of the tokenizer's file")
    try:
        return load()
    except Exception as error:  # the library raises bare Exception for everything
        names = " and ".join(map(str, files))
        raise DataError(
            f"{names} cannot be read as a tokenizer: {_one_line(error)}; copy it again"
        ) from error


def _load_huggingface(path: Path) -> Tokenizer:
    if not path.exists() and HUB_ID.fullmatch(str(path)):
        try:
            path = hub_file(str(path), (TOKENIZER_FILE, CONFIG_FILE), os.environ)
        except HubFileError as error:
            raise DataError(str(error)) from error
    if path.is_dir():
        file = path / TOKENIZER_FILE
    else:
        file = path
    if not file.is_file():
        raise DataError(
            f"{file} does not exist; train a tokenizer with `tr11 data tokenizer` or give another path"
        )
    try:
        engine = Engine.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for everything
        raise DataError(
            f"{file} is not a tokenizer: {_one_line(error)}; train it again or copy it again"
        ) from error
    engine.no_padding()
    engine.no_truncation()
    return Tokenizer(engine, (file,), *end_token_of(file, engine.token_to_id))


def _one_line(error: Exception) -> str:
    return shortened(" ".join(str(error).split()), 200)


EFFECT = (
    "a training takes what follows it for another document: data.reset_attention_mask keeps the two apart,"
    " data.reset_position_ids counts from there again, data.mask_end_of_document_loss does not learn what comes next"
)
FIX = "take it out of the text, or spell it in another way, unless it does end a document"


def spelled_end_tokens(tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """What a text must not spell out: the tokenizer's own token, where its spelling becomes it;
    else all known ones.
    """
    if tokenizer is None:
        return KNOWN_END_TOKENS
    becomes_it = tokenizer.eod_id in tokenizer.encode_batch([f"a{tokenizer.end_token}a"])[0]
    if becomes_it:
        return (tokenizer.end_token,)
    return ()


def end_token_warning(token: str, documents: int, lines: Sequence[int]) -> str | None:
    """The warning of texts that spell out `token`, with the first of their lines; None when there
    are none.
    """
    if not documents:
        return None
    places = ", ".join(map(str, lines)) + (" ..." if documents > len(lines) else "")
    return (
        f"{documents:,} document(s) hold {token!r} in their text (line {places}): {EFFECT}; {FIX}"
    )
