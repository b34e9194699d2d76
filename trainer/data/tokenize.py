"""Text -> token ids: JSON lines into a `.bin`/`.idx` pair, by several processes, in the order of the input."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainer.contract import write_json
from trainer.data.errors import DataError, explain_os_errors
from trainer.data.indexed import bin_path, dtype_for_vocabulary, pair_exists
from trainer.data.indexed_write import IndexedWriter
from trainer.data.tokenizer import Tokenizer, load_tokenizer

# Pieces of this size keep the processes busy and the hand-over cheap; memory is pieces in flight times a few of these.
PIECE_BYTES = 512 << 10
PIECES_IN_FLIGHT = 3  # for each worker
FAULTS_SHOWN = 20


@dataclass(frozen=True)
class PreprocessRequest:
    """What is to be tokenized, with what, and to where. The pair is `<output_prefix>_<json_key>_document`."""

    input: Path
    tokenizer: Path
    output_prefix: str
    workers: int = 1
    append_eod: bool = True
    json_key: str = "text"
    skip_bad_lines: bool = False

    @property
    def prefix(self) -> str:
        """Prefix of the pair that is written."""
        return f"{self.output_prefix}_{self.json_key}_document"


@dataclass(frozen=True)
class PreprocessReport:
    """What was written. Bad lines are those that were left out, of which the first few are told, with their numbers."""

    prefix: str
    documents: int
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
class Piece:
    """Whole lines of the input: the number of the first, their bytes."""

    first_line: int
    data: bytes


@dataclass(frozen=True)
class Encoded:
    """A piece's documents: tokens back to back, length of each, and what was wrong with which lines."""

    tokens: bytes
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    empty_texts: int
    faults: tuple[str, ...]
    input_bytes: int


def read_pieces(stream: IO[bytes], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a file of lines into pieces of whole lines of about `piece_bytes`; a longer line is a piece of its own."""
    line = 1
    while data := stream.read(piece_bytes):
        if not data.endswith(b"\n"):
            data += stream.readline()
        yield Piece(line, data)
        line += data.count(b"\n")


def encode_piece(tokenizer: Tokenizer, piece: Piece, json_key: str, append_eod: bool) -> Encoded:
    """Tokenize one piece. Blank lines are passed over, empty texts counted, faulty lines named by number."""
    texts: list[str] = []
    faults: list[str] = []
    empty = 0
    for number, line in enumerate(piece.data.split(b"\n"), piece.first_line):
        if not line.strip():
            continue
        try:
            text = _text_of(line, json_key)
        except ValueError as error:
            faults.append(f"line {number}: {error}")
            continue
        if text:
            texts.append(text)
        else:
            empty += 1
    dtype = dtype_for_vocabulary(tokenizer.vocabulary_size)
    tail = [tokenizer.eod_id] if append_eod else []
    ids = [np.array(encoded + tail, dtype=dtype) for encoded in tokenizer.encode_batch(texts)]
    # A text that the tokenizer's normaliser empties is an empty text too.
    kept = [tokens for tokens in ids if len(tokens) > len(tail)]
    return Encoded(
        tokens=np.concatenate(kept).tobytes() if kept else b"",
        lengths=np.array([len(tokens) for tokens in kept], dtype=np.int32),
        empty_texts=empty + len(ids) - len(kept),
        faults=tuple(faults),
        input_bytes=len(piece.data),
    )


def _text_of(line: bytes, json_key: str) -> str:
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, expected an object")
    if json_key not in value:
        raise ValueError(f"no key {json_key!r} (it has {', '.join(map(repr, list(value)[:5])) or 'no keys'})")
    text = value[json_key]
    if not isinstance(text, str):
        raise ValueError(f"{json_key!r} is a {type(text).__name__}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{json_key!r} holds half of a surrogate pair, which is no character") from None
    return text


def preprocess(
    request: PreprocessRequest,
    force: bool = False,
    on_progress: Callable[[int, int, int], None] = lambda input_bytes, documents, tokens: None,
    piece_bytes: int = PIECE_BYTES,
) -> PreprocessReport:
    """Tokenize a file of JSON lines into an indexed pair; documents keep the order of the lines.

    The pair appears whole or not at all; one that is up to date with input, tokenizer and options is kept unless
    `force`. `on_progress` hears, after each piece, of its bytes of input, documents and tokens.
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
        started = time.monotonic()
        empty = bad = size = 0
        shown: list[str] = []
        with IndexedWriter(request.prefix, dtype_for_vocabulary(tokenizer.vocabulary_size)) as writer:
            for encoded in _encode_all(request, tokenizer, read_pieces(stream, piece_bytes)):
                if encoded.faults and not request.skip_bad_lines:
                    raise DataError(
                        f"{request.input}, {encoded.faults[0]}; mend the line, or leave such lines out with"
                        " --skip-bad-lines"
                    )
                writer.add_documents(encoded.tokens, encoded.lengths)
                empty += encoded.empty_texts
                bad += len(encoded.faults)
                size += encoded.input_bytes
                shown += encoded.faults[: FAULTS_SHOWN - len(shown)]
                on_progress(encoded.input_bytes, len(encoded.lengths), len(encoded.tokens) // writer.dtype.itemsize)
    seconds = time.monotonic() - started
    report = PreprocessReport(
        prefix=request.prefix,
        documents=writer.sequence_count,
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
    with explain_os_errors("writing", record_path(request.prefix)):
        write_json(record_path(request.prefix), {"request": described, "report": asdict(report)})
    return report


def _encode_all(request: PreprocessRequest, tokenizer: Tokenizer, pieces: Iterator[Piece]) -> Iterator[Encoded]:
    """All pieces encoded, in order; by this process when it is the only worker, else by others with few in flight."""
    if request.workers == 1:
        for piece in pieces:
            yield encode_piece(tokenizer, piece, request.json_key, request.append_eod)
        return
    executor = ProcessPoolExecutor(
        max_workers=request.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(str(tokenizer.path), request.json_key, request.append_eod),
    )
    flying: deque[Future[Encoded]] = deque()
    try:
        for piece in pieces:
            flying.append(executor.submit(_work, piece))
            if len(flying) >= request.workers * PIECES_IN_FLIGHT:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            f"a worker that tokenizes {request.input} was killed, most likely for want of memory; nothing was written:"
            " run it again, with fewer --workers if memory is short"
        ) from None
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@dataclass
class _Worker:
    """What a worker process holds for its whole life."""

    tokenizer: Tokenizer
    json_key: str
    append_eod: bool


_workers: list[_Worker] = []  # filled once in each worker process, which has no other place to keep it


def _start_worker(tokenizer: str, json_key: str, append_eod: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears the keyboard too, and ends its workers itself
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Workers of a killed parent would wait for work for ever.
        threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    _workers.append(_Worker(load_tokenizer(tokenizer), json_key, append_eod))


def _leave_with(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _work(piece: Piece) -> Encoded:
    worker = _workers[0]
    return encode_piece(worker.tokenizer, piece, worker.json_key, worker.append_eod)


def record_path(prefix: Path | str) -> Path:
    """Where a pair keeps what it was made from."""
    return Path(f"{prefix}.report.json")


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
    }


def _up_to_date(request: PreprocessRequest, described: dict[str, Any]) -> PreprocessReport | None:
    """The report of a pair that is already there and was made from exactly this."""
    try:
        record = json.loads(record_path(request.prefix).read_text(encoding="utf-8"))
        report = record["report"]
        values = {**report, "bad_line_reports": tuple(report["bad_line_reports"]), "already_complete": True}
        expected = report["tokens"] * np.dtype(report["dtype"]).itemsize
        if record["request"] == described and pair_exists(request.prefix):
            return PreprocessReport(**values) if bin_path(request.prefix).stat().st_size == expected else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
