"""Text -> token ids: JSON lines into a `.bin`/`.idx` pair, by several processes, in the order of
the input.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress

from msgspec.structs import replace

from trainer.contract.documents import document, record_of
from trainer.contract.errors import DataError, InputFault, explain_os_errors
from trainer.contract.record import JsonObject, Record
from trainer.data.encode import Encoder, PreprocessRequest, encode_piece
from trainer.data.indexed import dtype_for_vocabulary, pair_exists
from trainer.data.lines import MIB, PIECE_BYTES, piece_size, read_pieces
from trainer.data.pair_work import (
    SAVE_SECONDS,
    HalfMade,
    PairWork,
    PreprocessProgress,
    make_pair,
    pair_is_unchanged,
    pair_record,
)
from trainer.data.pool import PIECES_IN_FLIGHT, map_in_order
from trainer.data.text_file import TextFile
from trainer.data.tokenizer import Tokenizer, load_tokenizer


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
        done = None
        if not force:
            done = _up_to_date(request, described)
        if done is not None:
            half = HalfMade(request.prefix, described)
            with suppress(DataError):  # the pair is whole, whatever lies beside it
                if half.read()[0] is not None:  # it was killed between its last two steps
                    half.remove()
            return done

        def fill(pair: PairWork) -> JsonObject:
            progress = pair.progress
            if progress is not None:
                stream.pass_over(progress.tally.end.text_bytes)
                on_progress(stream.position, progress.mark.documents, 0)
                tell(
                    f"goes on behind line {progress.tally.end.lines:,}, where an earlier run was interrupted"
                )
            _tokenize(request, stream, pair, piece_bytes, on_progress=on_progress)
            return document(_report(request, pair, tokenizer.end_token))

        report = make_pair(
            request.prefix,
            described,
            dtype_for_vocabulary(tokenizer.vocabulary_size),
            fill,
            kept=_kept,
            force=force,
            tell=tell,
            save_seconds=save_seconds,
            can_go_on=request.input.is_file(),
        )
        return record_of(PreprocessReport, report)


def _tokenize(
    request: PreprocessRequest,
    stream: TextFile,
    pair: PairWork,
    piece_bytes: int,
    on_progress: Callable[[int, int, int], None],
) -> None:
    """All pieces from here on. Raises DataError."""
    most_bytes = request.max_line_mib * MIB
    pieces = map_in_order(
        encode_piece,
        read_pieces(stream, piece_bytes, most_bytes, pair.tally.end),
        set_up=Encoder.load,
        arguments=(request,),
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
            pair.writer.add_sequences(encoded.tokens, encoded.lengths, encoded.document_ends)
            pair.did(pair.tally.and_of(encoded))
            count = len(encoded.tokens) // pair.writer.dtype.itemsize
            on_progress(encoded.file_bytes, len(encoded.document_ends), count)
            pair.save_when_due()


def _report(request: PreprocessRequest, pair: PairWork, end_token: str) -> PreprocessReport:
    """What was written, by this life and those before it."""
    tally, seconds, mark = pair.tally, pair.seconds, pair.writer.mark
    return PreprocessReport(
        prefix=request.prefix,
        documents=mark.documents,
        sequences=mark.sequences,
        tokens=mark.tokens,
        input_bytes=tally.end.text_bytes,
        dtype=str(pair.writer.dtype),
        empty_texts=tally.empty_texts,
        bad_lines=tally.bad_lines,
        bad_line_reports=tally.bad_line_reports,
        seconds=round(seconds, 3),
        tokens_per_second=round(mark.tokens / max(seconds, 1e-9), 1),
        workers=request.workers,
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
        report = record_of(PreprocessReport, record["report"])
        # Records of before there was a limit do not name it; no line was left out for its length
        # then.
        is_same = {"max_line_mib": request.max_line_mib, **record["request"]} == described
        is_there = is_same and pair_exists(request.prefix)
        if is_there and pair_is_unchanged(request.prefix, record["report"]):
            return replace(report, already_complete=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
