"""Pieces of JSON lines -> token ids: what each process that tokenizes does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.record import Record
from trainer.data.indexed import dtype_for_vocabulary
from trainer.data.lines import MAX_LINE_MIB, BadLine, LineBlock, TextPosition, texts_of
from trainer.data.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer

FAULTS_SHOWN = 20
LINES_SHOWN = 5


class Encoded(Record):
    """A piece's sequences: tokens back to back, length of each, which of them end a document; and
    faulty lines.

    `ends_in_text`: numbers of the lines whose text spells out the token that ends a document.
    `end`: the place in the input behind the piece, `file_bytes` what was used of the file for it.
    """

    tokens: bytes
    lengths: npt.NDArray[np.int32]
    document_ends: npt.NDArray[np.int64]
    empty_texts: int
    faults: tuple[str, ...]
    ends_in_text: tuple[int, ...]
    end: TextPosition
    file_bytes: int


class PreprocessRequest(Record):
    """What is to be tokenized, with what, and to where.

    The pair is `<output_prefix>_<json_key>_document`, of one sequence for each text; when sentences
    are split, it is `..._sentence`, of one sequence for each sentence, and the texts are its
    documents.
    """

    input: Path
    tokenizer: Path | TokenizerSpec
    output_prefix: str
    workers: int = 1
    append_eod: bool = True
    json_key: str = "text"
    skip_bad_lines: bool = False
    sentences: bool = False
    keep_newlines: bool = False  # at the ends of sentences
    max_line_mib: int = MAX_LINE_MIB  # a longer line is a faulty one

    @property
    def prefix(self) -> str:
        """Prefix of the pair that is written."""
        return (
            f"{self.output_prefix}_{self.json_key}_{'sentence' if self.sentences else 'document'}"
        )


class Encoder(Record):
    """What a process that tokenizes holds for its whole life."""

    request: PreprocessRequest
    tokenizer: Tokenizer

    @classmethod
    def load(cls, request: PreprocessRequest) -> Encoder:
        """The encoder with a tokenizer of its own. Raises DataError when the tokenizer cannot be
        loaded.
        """
        return cls(request, load_tokenizer(request.tokenizer))


class EncodeTally(Record):
    """What was noticed in the pieces of an input so far, and the place behind them. The first few
    of each are told.
    """

    end: TextPosition = TextPosition()
    empty_texts: int = 0
    bad_lines: int = 0
    bad_line_reports: tuple[str, ...] = ()
    documents_with_end_token: int = 0
    end_token_lines: tuple[int, ...] = ()

    def and_of(self, encoded: Encoded) -> EncodeTally:
        """This tally with that of the next piece."""
        return EncodeTally(
            end=encoded.end,
            empty_texts=self.empty_texts + encoded.empty_texts,
            bad_lines=self.bad_lines + len(encoded.faults),
            bad_line_reports=(*self.bad_line_reports, *encoded.faults)[:FAULTS_SHOWN],
            documents_with_end_token=self.documents_with_end_token + len(encoded.ends_in_text),
            end_token_lines=(*self.end_token_lines, *encoded.ends_in_text)[:LINES_SHOWN],
        )


def encode_piece(encoder: Encoder, piece: LineBlock) -> Encoded:
    """Tokenize one piece. Blank lines are passed over, empty texts counted, faulty lines named by
    number.
    """
    request = encoder.request
    tokenizer = encoder.tokenizer
    texts: list[tuple[int, str]] = []
    faults: list[str] = []
    empty = 0
    for number, text in texts_of(piece, request.json_key):
        if isinstance(text, BadLine):
            faults.append(f"line {number}: {text.reason}")
        elif text:
            texts.append((number, text))
        else:
            empty += 1
    parts = [
        split_sentences(text, request.keep_newlines) if request.sentences else [text]
        for _, text in texts
    ]
    ids = iter(tokenizer.encode_batch([part for text in parts for part in text]))
    sequences: list[list[int]] = []
    document_ends: list[int] = []
    numbers: list[int] = []
    for (number, _), sentences in zip(texts, parts, strict=True):
        # A text that the tokenizer's normaliser empties is an empty text too.
        kept = [tokens for tokens in (next(ids) for _ in sentences) if tokens]
        if not kept:
            empty += 1
            continue
        if request.append_eod:
            kept[-1].append(tokenizer.eod_id)
        sequences += kept
        document_ends.append(len(sequences))
        numbers.append(number)
    dtype = dtype_for_vocabulary(tokenizer.vocabulary_size)
    tokens = np.concatenate(
        [np.array([], dtype), *(np.array(sequence, dtype=dtype) for sequence in sequences)]
    )
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    ends = np.array(document_ends, dtype=np.int64)
    spelled = _documents_with(
        tokens, lengths, ends, token=tokenizer.eod_id, is_appended=request.append_eod
    )
    return Encoded(
        tokens=tokens.tobytes(),
        lengths=lengths,
        document_ends=ends,
        empty_texts=empty,
        faults=tuple(faults),
        ends_in_text=tuple(numbers[document] for document in spelled),
        end=piece.end,
        file_bytes=piece.file_bytes,
    )


def _documents_with(
    tokens: npt.NDArray[Any],
    lengths: npt.NDArray[np.int32],
    ends: npt.NDArray[np.int64],
    token: int,
    is_appended: bool,
) -> list[int]:
    """Numbers of the documents that hold `token`; where it `is_appended` to each, its last place
    does not count.
    """
    places = np.flatnonzero(tokens == token)
    last = np.cumsum(lengths, dtype=np.int64)[ends - 1] - 1
    if is_appended:
        places = np.setdiff1d(places, last, assume_unique=True)
    found: list[int] = np.unique(np.searchsorted(last, places)).tolist()
    return found


_BOUNDARY = re.compile(r"(?:[.!?…]+[\"'”’»)\]]*(?P<gap>\s+)(?=[^\s])|[。！？]+[”’」』）]*)")


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """The sentences in order; none is empty. Spaces between them are left out, but line ends stay
    if asked for.

    Joined again, they are the text but for the spaces between them.
    """
    sentences = []
    begin = 0
    for match in _BOUNDARY.finditer(text):
        following = text[match.end() : match.end() + 1]
        if match["gap"] is not None and following.islower():
            continue
        sentences.append(_trimmed(text[begin : match.end()], keep_newlines))
        begin = match.end()
    sentences.append(_trimmed(text[begin:], keep_newlines))
    return [sentence for sentence in sentences if sentence.strip()]


def _trimmed(sentence: str, keep_newlines: bool) -> str:
    body = sentence.strip()
    if not keep_newlines:
        return body
    tail = sentence[len(sentence.rstrip()) :]
    return body + "\n" * tail.count("\n")
