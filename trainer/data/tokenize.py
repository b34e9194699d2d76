"""Text -> token ids: JSON lines into a `.bin`/`.idx` pair, by several processes, in the order of the input."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.errors import DataError, explain_os_errors
from trainer.data.indexed import dtype_for_vocabulary, pair_exists
from trainer.data.indexed_write import IndexedWriter
from trainer.data.lines import PIECE_BYTES, Piece, read_pieces, text_of
from trainer.data.made import begin_record, check_pair, end_record, pair_is_unchanged, pair_record, recorded_pair
from trainer.data.pool import map_in_order
from trainer.data.sentences import split_sentences
from trainer.data.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer

FAULTS_SHOWN = 20


@dataclass(frozen=True)
class PreprocessRequest:
    """What is to be tokenized, with what, and to where.

    The pair is `<output_prefix>_<json_key>_document`, of one sequence for each text; when sentences are split, it is
    `..._sentence`, of one sequence for each sentence, and the texts are its documents.
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

    @property
    def prefix(self) -> str:
        """Prefix of the pair that is written."""
        return f"{self.output_prefix}_{self.json_key}_{'sentence' if self.sentences else 'document'}"


@dataclass(frozen=True)
class PreprocessReport:
    """What was written. Bad lines are those that were left out, of which the first few are told, with their numbers."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    input_bytes: int
    dtype: str
    empty_texts: int
    bad_lines: int
    bad_line_reports: tuple[str, ...]
    seconds: float
    tokens_per_second: float
    workers: int
    already_complete: bool = False


@dataclass(frozen=True)
class Encoded:
    """A piece's sequences: tokens back to back, length of each, which of them end a document; and faulty lines."""

    tokens: bytes
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    document_ends: np.ndarray[Any, np.dtype[np.int64]]
    empty_texts: int
    faults: tuple[str, ...]
    input_bytes: int


@dataclass(frozen=True)
class Encoder:
    """What a process that tokenizes holds for its whole life."""

    tokenizer: Tokenizer
    json_key: str = "text"
    append_eod: bool = True
    sentences: bool = False
    keep_newlines: bool = False

    @classmethod
    def of(cls, request: PreprocessRequest) -> Encoder:
        """The encoder of a request. Raises DataError when the tokenizer cannot be loaded."""
        tokenizer = load_tokenizer(request.tokenizer)
        return cls(tokenizer, request.json_key, request.append_eod, request.sentences, request.keep_newlines)


def encode_piece(encoder: Encoder, piece: Piece) -> Encoded:
    """Tokenize one piece. Blank lines are passed over, empty texts counted, faulty lines named by number."""
    texts: list[str] = []
    faults: list[str] = []
    empty = 0
    for number, line in enumerate(piece.data.split(b"\n"), piece.first_line):
        if not line.strip():
            continue
        try:
            text = text_of(line, encoder.json_key)
        except ValueError as error:
            faults.append(f"line {number}: {error}")
            continue
        if text:
            texts.append(text)
        else:
            empty += 1
    parts = [split_sentences(text, encoder.keep_newlines) if encoder.sentences else [text] for text in texts]
    ids = iter(encoder.tokenizer.encode_batch([part for text in parts for part in text]))
    sequences: list[list[int]] = []
    ends: list[int] = []
    for sentences in parts:
        # A text that the tokenizer's normaliser empties is an empty text too.
        kept = [tokens for tokens in (next(ids) for _ in sentences) if tokens]
        if not kept:
            empty += 1
            continue
        if encoder.append_eod:
            kept[-1] = [*kept[-1], encoder.tokenizer.eod_id]
        sequences += kept
        ends.append(len(sequences))
    dtype = dtype_for_vocabulary(encoder.tokenizer.vocabulary_size)
    return Encoded(
        tokens=np.concatenate([np.array(tokens, dtype=dtype) for tokens in sequences]).tobytes() if sequences else b"",
        lengths=np.array([len(tokens) for tokens in sequences], dtype=np.int32),
        document_ends=np.array(ends, dtype=np.int64),
        empty_texts=empty,
        faults=tuple(faults),
        input_bytes=len(piece.data),
    )


def preprocess(
    request: PreprocessRequest,
    force: bool = False,
    on_progress: Callable[[int, int, int], None] = lambda input_bytes, documents, tokens: None,
    piece_bytes: int = PIECE_BYTES,
) -> PreprocessReport:
    """Tokenize a file of JSON lines into an indexed pair; documents keep the order of the lines.

    The pair appears whole or not at all; one that is up to date with input, tokenizer and options is kept unless
    `force`, and one that this function did not make is replaced with `force` alone. `on_progress` hears, after each
    piece, of its bytes of input, documents and tokens.
    Raises DataError: input or tokenizer absent, a faulty line (unless they are to be skipped), nothing to write,
    a worker that was killed, another writer of the same prefix, no space.
    """
    if request.workers < 1:
        raise DataError(f"workers {request.workers} must be at least 1")
    tokenizer = load_tokenizer(request.tokenizer)
    with explain_os_errors("reading", request.input):
        described = _describe(request, tokenizer)
        stream = request.input.open("rb")
    with stream:
        done = None if force else _up_to_date(request, described)
        if done is not None:
            return done
        check_pair(request.prefix, force)
        started = time.monotonic()
        empty = bad = size = 0
        shown: list[str] = []
        pieces = map_in_order(
            encode_piece,
            read_pieces(stream, piece_bytes),
            set_up=Encoder.of,
            arguments=(request,),
            workers=request.workers,
            doing=f"tokenizing {request.input}",
        )
        dtype = dtype_for_vocabulary(tokenizer.vocabulary_size)
        with closing(pieces), recorded_pair(request.prefix), IndexedWriter(request.prefix, dtype) as writer:
            for encoded in pieces:
                if encoded.faults and not request.skip_bad_lines:
                    raise DataError(
                        f"{request.input}, {encoded.faults[0]}; mend the line, or leave such lines out with"
                        " --skip-bad-lines"
                    )
                writer.add_sequences(encoded.tokens, encoded.lengths, encoded.document_ends)
                empty += encoded.empty_texts
                bad += len(encoded.faults)
                size += encoded.input_bytes
                shown += encoded.faults[: FAULTS_SHOWN - len(shown)]
                on_progress(
                    encoded.input_bytes, len(encoded.document_ends), len(encoded.tokens) // writer.dtype.itemsize
                )
            if writer.token_count:  # else nothing appears
                begin_record(pair_record(request.prefix), described)
    seconds = time.monotonic() - started
    report = PreprocessReport(
        prefix=request.prefix,
        documents=writer.document_count,
        sequences=writer.sequence_count,
        tokens=writer.token_count,
        input_bytes=size,
        dtype=str(writer.dtype),
        empty_texts=empty,
        bad_lines=bad,
        bad_line_reports=tuple(shown),
        seconds=round(seconds, 3),
        tokens_per_second=round(writer.token_count / max(seconds, 1e-9), 1),
        workers=request.workers,
    )
    end_record(pair_record(request.prefix), described, asdict(report))
    return report


def _describe(request: PreprocessRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    status = request.input.stat()
    return {
        "input": str(request.input.resolve()),
        "input_bytes": status.st_size,
        "input_modified": status.st_mtime_ns,
        "tokenizer": tokenizer.digest(),
        "append_eod": request.append_eod,
        "json_key": request.json_key,
        "skip_bad_lines": request.skip_bad_lines,
        "sentences": request.sentences,
        "keep_newlines": request.keep_newlines,
    }


def _up_to_date(request: PreprocessRequest, described: dict[str, Any]) -> PreprocessReport | None:
    """The report of a pair that is already there and was made from exactly this."""
    try:
        record = json.loads(pair_record(request.prefix).read_text(encoding="utf-8"))
        report = record["report"]
        values = {**report, "bad_line_reports": tuple(report["bad_line_reports"]), "already_complete": True}
        if record["request"] == described and pair_exists(request.prefix):
            return PreprocessReport(**values) if pair_is_unchanged(request.prefix, report) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
