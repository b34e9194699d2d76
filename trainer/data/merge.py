"""Several pairs -> one pair, in the given order, byte for byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError
from trainer.contract.sharing import make_shared
from trainer.data.errors import explain_os_errors
from trainer.data.half_made import HalfMade, PreprocessProgress
from trainer.data.indexed import IndexedDataset, bin_path, idx_path
from trainer.data.indexed_resume import ResumableWriter
from trainer.data.indexed_write import partial_path
from trainer.data.made import begin_record, check_pair, end_record, pair_record, recorded_pair
from trainer.data.pair_work import SAVE_SECONDS, PairWork

COPY_BYTES = 8 << 20

# Of one source: tokens back to back, length of each sequence, and which of them end a document.
Block = tuple[bytes, npt.NDArray[np.int32], npt.NDArray[np.int64]]


def merge(
    prefixes: Sequence[Path | str],
    output: Path | str,
    on_bytes: Callable[[int], None] = lambda n: None,
    force: bool = False,
    *,
    tell: Callable[[str], None] = lambda line: None,
    save_seconds: float = SAVE_SECONDS,
) -> int:
    """Join pairs, in the given order, into one; returns its tokens. All inputs are checked before any writing.

    A pair at `output` that neither this function nor `preprocess` made is replaced with `force` alone. What is
    finished is brought to disk every `save_seconds`; after an interruption of any kind the same merge goes on from
    there, unless `force`. `on_bytes` hears of the bytes of tokens that are there, `tell` what a person should know of
    an interruption.
    Raises DataError: an input is absent or damaged, types differ, no space, another writer of the same prefix.
    """
    sources = _sources(prefixes, output)
    check_pair(output, force)
    described = _describe(prefixes)
    half = HalfMade(str(output), described)
    if not force and (published := half.published()) is not None:
        return _finish(output, described, half, published)
    _check_space(sources, output)
    total = sum(source.token_count for source in sources)

    def of_all(progress: PreprocessProgress) -> str:
        return f"{progress.mark.tokens:,} of {total:,} tokens"

    with recorded_pair(output), ResumableWriter(output, sources[0].dtype) as writer:
        work = PairWork(half, writer, save_seconds)
        progress = work.begin(force, tell)
        if progress is not None:
            tell(f"goes on behind {of_all(progress)}, where an earlier run was interrupted")
        with work.kept_on_failure(tell, of_all):
            on_bytes(writer.token_count * writer.dtype.itemsize)
            for tokens, lengths, document_ends in _blocks(sources, writer.sequence_count):
                writer.add_sequences(tokens, lengths, document_ends)
                work.did(work.tally)
                on_bytes(len(tokens))
                work.save_when_due()
            report = {"tokens": writer.token_count, "dtype": str(writer.dtype)}
            work.save(report)
        begin_record(pair_record(output), described)
    return _finish(output, described, half, report)


def _finish(output: Path | str, described: Mapping[str, Any], half: HalfMade, report: Mapping[str, Any]) -> int:
    end_record(pair_record(output), described, report)
    half.remove()
    return int(report["tokens"])


def _sources(prefixes: Sequence[Path | str], output: Path | str) -> list[IndexedDataset]:
    if not prefixes:
        raise DataError("nothing to merge: name at least one prefix")
    if Path(output) in {Path(prefix) for prefix in prefixes}:
        raise DataError(f"{output} is both an input and the output of the merge; choose another output prefix")
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    for source in sources:
        if source.dtype != sources[0].dtype:
            raise DataError(
                f"{source.prefix} holds {source.dtype} tokens, {sources[0].prefix} {sources[0].dtype}: only pairs of"
                " one type can be merged; prepare it again with the tokenizer of the others"
            )
    return sources


def _describe(prefixes: Sequence[Path | str]) -> dict[str, Any]:
    with explain_os_errors("reading", prefixes[0]):
        states = [path(prefix).stat() for prefix in prefixes for path in (bin_path, idx_path)]
    return {
        "merged": [str(Path(prefix).resolve()) for prefix in prefixes],
        "input_bytes": [state.st_size for state in states],
        "input_modified": [state.st_mtime_ns for state in states],
    }


def _check_space(sources: Sequence[IndexedDataset], output: Path | str) -> None:
    folder, half_made = Path(output).parent, partial_path(bin_path(output))
    with explain_os_errors("looking for space in", folder):
        make_shared(folder)
        free = shutil.disk_usage(folder).free
        free += half_made.stat().st_size if half_made.is_file() else 0
    needed = sum(source.bytes for source in sources)
    if free < needed:
        raise DataError(f"{output} needs {needed} bytes and the disk has {free}; free space or choose another folder")


def _blocks(sources: Sequence[IndexedDataset], done: int) -> Iterator[Block]:
    """What is behind the first `done` sequences of all: some MiB of whole sequences at a time. Raises DataError."""
    for source in sources:
        if done < len(source):
            yield from _blocks_of(source, done)
        done = max(0, done - len(source))


def _blocks_of(source: IndexedDataset, first: int) -> Iterator[Block]:
    ends = np.cumsum(source.sizes, dtype=np.int64)
    documents = np.asarray(source.documents[1:])
    width = source.dtype.itemsize
    with explain_os_errors("reading", source.path), source.path.open("rb") as stream:
        begin = int(ends[first - 1]) if first else 0
        stream.seek(begin * width)
        while first < len(source):
            stop = max(first + 1, int(np.searchsorted(ends, begin + COPY_BYTES // width, side="right")))
            size = (int(ends[stop - 1]) - begin) * width
            tokens = stream.read(size)
            if len(tokens) != size:
                raise DataError(f"{source.path} became shorter while it was read; make the pair again")
            # Documents without a sequence at the very beginning belong to the first block.
            low, high = np.searchsorted(documents, [first, stop], side="right")
            ended = documents[low if first else 0 : high] - first
            yield tokens, np.asarray(source.sizes[first:stop], dtype=np.int32), ended
            first, begin = stop, int(ends[stop - 1])
