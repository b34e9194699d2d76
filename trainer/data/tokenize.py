"""Text -> token ids: JSON lines into a `.bin`/`.idx` pair, by several processes, in the order of
the input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainer.contract.documents import document
from trainer.contract.errors import DataError, InputFault
from trainer.contract.record import JsonObject, Record
from trainer.data.encode import Encoder, encode_piece
from trainer.data.errors import explain_os_errors
from trainer.data.half_made import HalfMade, PreprocessProgress
from trainer.data.indexed import dtype_for_vocabulary, pair_exists
from trainer.data.indexed_resume import ResumableWriter
from trainer.data.lines import MAX_LINE_MIB, MIB, PIECE_BYTES, piece_size, read_pieces
from trainer.data.made import (
    begin_record,
    check_pair,
    end_record,
    pair_is_unchanged,
    pair_record,
    recorded_pair,
)
from trainer.data.pair_work import SAVE_SECONDS, PairWork
from trainer.data.pool import PIECES_IN_FLIGHT, map_in_order
from trainer.data.text_file import TextFile
from trainer.data.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer


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


class PreprocessReport(Record):
    """What was written. Bad lines are those that were left out, of which the first few are told,
    with their numbers.

    `documents_with_end_token`: how many texts spell out `end_token`, which ends a document; the
    first of their lines.
    """

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
    end_token: str = ""
    documents_with_end_token: int = 0
    end_token_lines: tuple[int, ...] = ()


def preprocess(
    request: PreprocessRequest,
    force: bool = False,
    on_progress: Callable[[int, int, int], None] = lambda input_bytes, documents, tokens: None,
    piece_bytes: int = PIECE_BYTES,
    *,
    tell: Callable[[str], None] = lambda line: None,
    save_seconds: float = SAVE_SECONDS,
) -> PreprocessReport:
    """Tokenize a file of JSON lines into an indexed pair; documents keep the order of the lines.

    The pair appears whole or not at all; one that is up to date with input, tokenizer and options is kept unless
    `force`, and one that this function did not make is replaced with `force` alone. `on_progress` hears, after each
    piece, of its bytes of input, documents and tokens; `tell` what a person should know of an interruption.
    What is finished is brought to disk every `save_seconds`. After an interruption of any kind the same request goes on
    from there, unless `force`; where it cannot, it says why and starts from the beginning.
    Raises DataError: input or tokenizer absent, a faulty line (unless they are to be skipped), nothing to write,
    a worker that was killed, another writer of the same prefix, no space.
    """
    if request.workers < 1:
        raise DataError(f"workers {request.workers} must be at least 1")
    tokenizer = load_tokenizer(request.tokenizer)
    with TextFile(request.input) as stream:
        with explain_os_errors("reading", request.input):
            described = _describe(request, tokenizer)
        half = HalfMade(request.prefix, described)
        if force:
            done = None
        else:
            done = _up_to_date(request, described)
        if done is not None:
            with suppress(DataError):  # the pair is whole, whatever lies beside it
                if half.read()[0] is not None:  # it was killed between its last two steps
                    half.remove()
            return done
        check_pair(request.prefix, force)
        if not force and (published := half.published()) is not None:
            return _finish(request, described, half, _as_report(published))
        with (
            recorded_pair(request.prefix),
            ResumableWriter(
                request.prefix, dtype_for_vocabulary(tokenizer.vocabulary_size)
            ) as writer,
        ):
            pair = PairWork(half, writer, save_seconds, can_go_on=request.input.is_file())
            work = _Work(request, writer, pair)
            work.begin(stream, force, tell, on_progress)
            with pair.kept_on_failure(tell, _kept):
                work.tokenize(stream, piece_bytes, on_progress)
                pair.save(document(work.report(tokenizer.end_token)))
            if writer.token_count:  # else nothing appears
                begin_record(pair_record(request.prefix), described)
            else:
                pair.forget()
        return _finish(request, described, half, work.report(tokenizer.end_token))


def _finish(
    request: PreprocessRequest, described: JsonObject, half: HalfMade, report: PreprocessReport
) -> PreprocessReport:
    end_record(pair_record(request.prefix), described, document(report))
    half.remove()
    return report


@dataclass
class _Work:
    """One life of a preprocess: the pieces that are left, and what the lives before it noticed."""

    request: PreprocessRequest
    writer: ResumableWriter
    pair: PairWork

    def begin(
        self,
        stream: TextFile,
        force: bool,
        tell: Callable[[str], None],
        on_progress: Callable[[int, int, int], None],
    ) -> None:
        """Go on from what an interrupted run left, or start from the beginning, and say which."""
        progress = self.pair.begin(force, tell)
        if progress is not None:
            stream.pass_over(progress.tally.end.text_bytes)
            on_progress(stream.position, progress.mark.documents, 0)
            tell(
                f"goes on behind line {progress.tally.end.lines:,}, where an earlier run was interrupted"
            )

    def tokenize(
        self, stream: TextFile, piece_bytes: int, on_progress: Callable[[int, int, int], None]
    ) -> None:
        """All pieces from here on. Raises DataError."""
        request, writer = self.request, self.writer
        most_bytes = request.max_line_mib * MIB
        tally = self.pair.tally
        pieces = map_in_order(
            encode_piece,
            read_pieces(stream, piece_bytes, most_bytes, tally.end),
            set_up=Encoder.load,
            arguments=(
                request.tokenizer,
                request.json_key,
                request.append_eod,
                request.sentences,
                request.keep_newlines,
            ),
            workers=request.workers,
            doing=f"tokenizing {request.input}",
            size_of=piece_size,
            most_bytes=max(most_bytes, request.workers * PIECES_IN_FLIGHT * piece_bytes),
        )
        with closing(pieces):
            for encoded in pieces:
                if encoded.faults and not request.skip_bad_lines:
                    raise InputFault(
                        f"{request.input}, {encoded.faults[0]}; repair the line, or leave such lines out with"
                        " --skip-bad-lines"
                    )
                writer.add_sequences(encoded.tokens, encoded.lengths, encoded.document_ends)
                tally = tally.and_of(encoded)
                self.pair.did(tally)
                count = len(encoded.tokens) // writer.dtype.itemsize
                on_progress(encoded.file_bytes, len(encoded.document_ends), count)
                self.pair.save_when_due()

    def report(self, end_token: str) -> PreprocessReport:
        """What was written, by this life and those before it."""
        tally, seconds = self.pair.tally, self.pair.seconds
        return PreprocessReport(
            prefix=self.request.prefix,
            documents=self.writer.document_count,
            sequences=self.writer.sequence_count,
            tokens=self.writer.token_count,
            input_bytes=tally.end.text_bytes,
            dtype=str(self.writer.dtype),
            empty_texts=tally.empty_texts,
            bad_lines=tally.bad_lines,
            bad_line_reports=tally.bad_line_reports,
            seconds=round(seconds, 3),
            tokens_per_second=round(self.writer.token_count / max(seconds, 1e-9), 1),
            workers=self.request.workers,
            end_token=end_token,
            documents_with_end_token=tally.documents_with_end_token,
            end_token_lines=tally.end_token_lines,
        )


def _kept(progress: PreprocessProgress) -> str:
    return f"{progress.mark.documents:,} documents, up to line {progress.tally.end.lines:,}"


def _describe(request: PreprocessRequest, tokenizer: Tokenizer) -> JsonObject:
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
        "max_line_mib": request.max_line_mib,
    }


def _up_to_date(request: PreprocessRequest, described: JsonObject) -> PreprocessReport | None:
    """The report of a pair that is already there and was made from exactly this."""
    try:
        record = json.loads(pair_record(request.prefix).read_text(encoding="utf-8"))
        report = dict(record["report"])
        done = replace(_as_report(report), already_complete=True)
        # Records of before there was a limit do not name it; no line was left out for its length
        # then.
        if {"max_line_mib": request.max_line_mib, **record["request"]} == described and pair_exists(
            request.prefix
        ):
            if pair_is_unchanged(request.prefix, report):
                return done
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _as_report(value: Mapping[str, Any]) -> PreprocessReport:
    """A report as a record holds it. Raises TypeError."""
    known: JsonObject = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value.items()
    }
    return PreprocessReport(**known)
