"""The commands of `python -m trainer.data` that make something: corpus, tokenizer, indexed pairs,
index maps.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from trainer.contract.documents import document
from trainer.contract.errors import DataError, InputFault, UsageError, explain_os_errors
from trainer.contract.files import make_shared
from trainer.contract.record import JsonObject
from trainer.data.corpus import build_corpus, record_path
from trainer.data.encode import PreprocessRequest
from trainer.data.groups import parse_split, split_groups
from trainer.data.indexed import IndexedDataset, bin_path, idx_path
from trainer.data.indexed_write import partial_path
from trainer.data.learn_tokenizer import (
    LearntType,
    check_vocabulary_size,
    is_trained,
    load_learnt,
    request_path,
    train_tokenizer,
)
from trainer.data.lines import MIB, BadLine, read_pieces, texts_of
from trainer.data.made import was_interrupted
from trainer.data.pair_work import SAVE_SECONDS, PairWork, PreprocessProgress, make_pair
from trainer.data.progress import progress_bar, say
from trainer.data.sources import ReadOptions, plan_groups
from trainer.data.text_file import TextFile
from trainer.data.tokenize import preprocess
from trainer.data.tokenizer import TokenizerSpec, end_token_warning

Command = tuple[Callable[[SimpleNamespace], JsonObject], Callable[[JsonObject], str]]

# Several pairs -> one pair, in the given order, byte for byte.

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
    """Join pairs, in the given order, into one; returns its tokens. All inputs are checked before
    any writing.

    A pair at `output` that neither this function nor `preprocess` made is replaced with `force` alone. What is
    finished is brought to disk every `save_seconds`; after an interruption of any kind the same merge goes on from
    there, unless `force`. `on_bytes` hears of the bytes of tokens that are there, `tell` what a person should know of
    an interruption.
    Raises DataError: an input is absent or damaged, types differ, no space, another writer of the same prefix.
    """
    sources = _sources(prefixes, output)
    total = sum(source.token_count for source in sources)

    def of_all(progress: PreprocessProgress) -> str:
        return f"{progress.mark.tokens:,} of {total:,} tokens"

    def fill(pair: PairWork) -> JsonObject:
        writer = pair.writer
        _check_space(sources, output)
        if pair.progress is not None:
            tell(f"goes on behind {of_all(pair.progress)}, where an earlier run was interrupted")
        on_bytes(writer.mark.tokens * writer.dtype.itemsize)
        for tokens, lengths, document_ends in _blocks(sources, writer.mark.sequences):
            writer.add_sequences(tokens, lengths, document_ends)
            pair.did(pair.tally)
            on_bytes(len(tokens))
            pair.save_when_due()
        return {"tokens": writer.mark.tokens, "dtype": str(writer.dtype)}

    report = make_pair(
        str(output),
        _describe(prefixes),
        sources[0].dtype,
        fill,
        kept=of_all,
        force=force,
        tell=tell,
        save_seconds=save_seconds,
    )
    return int(report["tokens"])


def _sources(prefixes: Sequence[Path | str], output: Path | str) -> list[IndexedDataset]:
    if not prefixes:
        raise DataError("nothing to merge: name at least one prefix")
    if Path(output) in {Path(prefix) for prefix in prefixes}:
        raise DataError(
            f"{output} is both an input and the output of the merge; choose another output prefix"
        )
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    for source in sources:
        if source.dtype != sources[0].dtype:
            raise DataError(
                f"{source.prefix} holds {source.dtype} tokens, {sources[0].prefix} {sources[0].dtype}: only pairs of"
                " one type can be merged; prepare it again with the tokenizer of the others"
            )
    return sources


def _describe(prefixes: Sequence[Path | str]) -> JsonObject:
    with explain_os_errors("reading", prefixes[0]):
        states = [path(prefix).stat() for prefix in prefixes for path in (bin_path, idx_path)]
    return {
        "merged": [str(Path(prefix).resolve()) for prefix in prefixes],
        "input_bytes": [state.st_size for state in states],
        "input_modified": [state.st_mtime_ns for state in states],
    }


def _check_space(sources: Sequence[IndexedDataset], output: Path | str) -> None:
    folder = Path(output).parent
    half_made = partial_path(bin_path(output))
    with explain_os_errors("looking for space in", folder):
        make_shared(folder)
        free = shutil.disk_usage(folder).free
        free += half_made.stat().st_size if half_made.is_file() else 0
    needed = sum(source.bytes for source in sources)
    if free < needed:
        raise DataError(
            f"{output} needs {needed} bytes and the disk has {free}; free space or choose another folder"
        )


def _blocks(sources: Sequence[IndexedDataset], done: int) -> Iterator[Block]:
    """What is behind the first `done` sequences of all: some MiB of whole sequences at a time.
    Raises DataError.
    """
    for source in sources:
        if done < len(source):
            yield from _blocks_of(source, done)
        done = max(0, done - len(source))


def _blocks_of(source: IndexedDataset, first: int) -> Iterator[Block]:
    ends = np.cumsum(source.sizes, dtype=np.int64)
    documents = np.asarray(source.documents[1:])
    width = source.dtype.itemsize
    with explain_os_errors("reading", source.path), source.path.open("rb") as stream:
        begin = 0
        if first:
            begin = int(ends[first - 1])
        stream.seek(begin * width)
        while first < len(source):
            stop = max(
                first + 1, int(np.searchsorted(ends, begin + COPY_BYTES // width, side="right"))
            )
            size = (int(ends[stop - 1]) - begin) * width
            tokens = stream.read(size)
            if len(tokens) != size:
                raise DataError(
                    f"{source.path} became shorter while it was read; make the pair again"
                )
            # Documents without a sequence at the very beginning belong to the first block.
            low, high = np.searchsorted(documents, [first, stop], side="right")
            ended = documents[low if first else 0 : high] - first
            yield tokens, np.asarray(source.sizes[first:stop], dtype=np.int32), ended
            first = stop
            begin = int(ends[stop - 1])


def tokenizer_spec(options: SimpleNamespace) -> TokenizerSpec | None:
    """The tokenizer that the options name; None when they name none. Raises UsageError when they do
    not fit.
    """
    if options.tokenizer_type == "huggingface":
        if options.vocab_file or options.merge_file:
            raise UsageError(
                "--vocab-file and --merge-file need --tokenizer-type gpt2_bpe or bert_wordpiece"
            )
        if options.tokenizer is None:
            return None
        return TokenizerSpec(path=options.tokenizer)
    if options.tokenizer is not None:
        raise UsageError(
            f"--tokenizer is for the type huggingface; {options.tokenizer_type} needs --vocab-file"
        )
    if options.vocab_file is None or (
        options.tokenizer_type == "gpt2_bpe" and options.merge_file is None
    ):
        files = "--vocab-file"
        if options.tokenizer_type == "gpt2_bpe":
            files += " and --merge-file"
        raise UsageError(f"--tokenizer-type {options.tokenizer_type} needs {files}")
    return TokenizerSpec(options.tokenizer_type, None, options.vocab_file, options.merge_file)


def make_corpus(options: SimpleNamespace) -> JsonObject:
    """Build the corpus of this Python installation's own text."""
    out = Path(options.out)
    _tell_of_interruption(record_path(out))
    with progress_bar() as bar:
        task = bar.add_task("corpus", total=options.min_bytes)
        report = build_corpus(
            out, options.min_bytes, options.force, on_bytes=partial(bar.advance, task)
        )
        bar.update(task, completed=report.text_bytes, total=report.text_bytes)
    if report.already_complete:
        say(
            f"{out} is complete already ({report.text_bytes:,} bytes of text); --force builds it again"
        )
    return document(report)


def _tell_of_interruption(record: Path) -> None:
    if was_interrupted(record):
        say(
            "an earlier run was interrupted, and has nothing finished to go on from: starting from the beginning"
        )


def make_tokenizer(options: SimpleNamespace) -> JsonObject:
    """Learn a tokenizer from a corpus."""
    kind: LearntType = options.tokenizer_type
    special_tokens: list[str] = options.special_token or []
    try:
        check_vocabulary_size(options.vocab_size, kind, len(special_tokens))
    except DataError as error:
        raise UsageError(f"--vocab-size: {error}") from error
    corpus = Path(options.corpus)
    out = Path(options.out)
    with explain_os_errors("reading", corpus):
        status = corpus.stat()
    request = {
        "corpus": str(corpus.resolve()),
        "corpus_bytes": status.st_size,
        "corpus_modified": status.st_mtime_ns,
        "vocabulary_size": options.vocab_size,
        "special_tokens": special_tokens,
        "json_key": options.json_key,
        **({} if kind == "huggingface" else {"type": kind}),
    }
    _tell_of_interruption(request_path(out))
    kept = not options.force and is_trained(out, request, kind)
    if kept:
        say(f"{out} is trained from this corpus already; --force trains it again")
        tokenizer = load_learnt(out, kind)
    else:
        with progress_bar() as bar:
            task = bar.add_task("reading", total=status.st_size)
            tokenizer = train_tokenizer(
                _texts(corpus, options.json_key, options.max_line_mib, partial(bar.advance, task)),
                options.vocab_size,
                out,
                kind=kind,
                extra_special_tokens=special_tokens,
                request=request,
                force=options.force,
                on_learning=partial(bar.update, task, description="learning"),
            )
            bar.update(task, description="tokenizer")
    return {
        "path": str(tokenizer.path),
        "vocabulary_size": tokenizer.vocabulary_size,
        "end_of_document": tokenizer.end_token,
        "eod_id": tokenizer.eod_id,
        "digest": tokenizer.digest(),
        "already_complete": kept,
    }


def _texts(
    corpus: Path, json_key: str, max_line_mib: int, on_bytes: Callable[[int], None]
) -> Iterator[str]:
    with TextFile(corpus) as stream:
        for piece in read_pieces(stream, max_line_bytes=max_line_mib * MIB):
            on_bytes(piece.file_bytes)
            for number, text in texts_of(piece, json_key):
                if isinstance(text, BadLine):
                    raise InputFault(f"{corpus}, line {number}: {text.reason}; repair the line")
                yield text


def tokenize(options: SimpleNamespace) -> JsonObject:
    """Tokenize JSON lines into an indexed pair."""
    spec = tokenizer_spec(options)
    if spec is None:
        raise UsageError("give --tokenizer, or --tokenizer-type with its files")
    source = Path(options.input)
    request = PreprocessRequest(
        input=source,
        tokenizer=spec,
        output_prefix=options.output_prefix,
        workers=options.workers or os.cpu_count() or 1,
        append_eod=options.append_eod,
        json_key=options.json_key,
        skip_bad_lines=options.skip_bad_lines,
        sentences=options.split_sentences,
        keep_newlines=options.keep_newlines,
        max_line_mib=options.max_line_mib,
    )
    total = source.stat().st_size if source.is_file() else None
    with progress_bar(
        "{task.fields[documents]:,} documents", "{task.fields[rate]:,.0f} tokens/s"
    ) as bar:
        task = bar.add_task("tokenizing", total=total, documents=0, rate=0.0)
        done = {"documents": 0, "tokens": 0}

        def on_progress(input_bytes: int, documents: int, tokens: int) -> None:
            done["documents"] += documents
            done["tokens"] += tokens
            seconds = bar.tasks[task].elapsed or 1e-9
            bar.update(
                task,
                advance=input_bytes,
                documents=done["documents"],
                rate=done["tokens"] / seconds,
            )

        report = preprocess(request, options.force, on_progress, tell=_teller(bar))
        if report.already_complete:
            bar.update(
                task, completed=total, documents=report.documents, rate=report.tokens_per_second
            )
    if report.already_complete:
        say(f"{report.prefix} is up to date ({report.tokens:,} tokens); --force makes it again")
    for fault in report.bad_line_reports:
        say(f"left out: {fault}")
    warning = end_token_warning(
        report.end_token, report.documents_with_end_token, report.end_token_lines
    )
    if warning is not None:
        say(f"tr11 data: WARNING: {source}: {warning}")
    return document(report)


def _teller(bar: Progress) -> Callable[[str], None]:
    """Lines for people above a bar."""

    def tell(line: str) -> None:
        bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    return tell


def merge_pairs(options: SimpleNamespace) -> JsonObject:
    """Join several pairs into one."""
    total = sum(IndexedDataset(prefix).bytes for prefix in options.prefixes)
    with progress_bar() as bar:
        task = bar.add_task("merging", total=total)
        tokens = merge(
            options.prefixes,
            options.output_prefix,
            partial(bar.advance, task),
            options.force,
            tell=_teller(bar),
        )
    return {"prefix": options.output_prefix, "tokens": tokens, "inputs": len(options.prefixes)}


def make_index(options: SimpleNamespace) -> JsonObject:
    """Build the index maps that a training with these settings will read."""
    try:
        prefixes = _weighted(options.data)
        parse_split(options.split)
    except (DataError, ValueError) as error:
        raise UsageError(str(error)) from error
    cache = None
    if options.cache_dir is not None:
        cache = Path(options.cache_dir)
    samples = {
        "train": options.train_samples,
        "valid": options.valid_samples,
        "test": options.test_samples,
    }
    splits = plan_groups(
        split_groups(prefixes, options.split, samples),
        ReadOptions(options.seq_length, options.seed, options.vocab_size, cache),
    )
    return {
        "sequence_length": options.seq_length,
        "samples": {name: len(plan.open()) for name, plan in splits.items()},
    }


def _weighted(words: Sequence[str]) -> list[tuple[float, str | Path]]:
    """`PREFIX`, or `WEIGHT PREFIX WEIGHT PREFIX ...`."""
    if len(words) == 1:
        return [(1.0, words[0])]
    if len(words) % 2:
        raise ValueError("data must be one PREFIX, or pairs WEIGHT PREFIX")
    pairs: list[tuple[float, str | Path]] = []
    for weight, prefix in zip(words[::2], words[1::2], strict=True):
        try:
            pairs.append((float(weight), prefix))
        except ValueError:
            raise ValueError(f"weight of {prefix}: {weight!r} is not a number") from None
    return pairs


def _corpus_sentence(made: JsonObject) -> str:
    return f"{made['path']}: {made['documents']:,} documents, {made['text_bytes']:,} bytes of text"


def _tokenizer_sentence(made: JsonObject) -> str:
    return (
        f"{made['path']}: {made['vocabulary_size']:,} tokens, end of document is {made['eod_id']}"
    )


def _pair_sentence(made: JsonObject) -> str:
    rate = f"{made['tokens_per_second']:,.0f} tokens/s with {made['workers']} worker(s)"
    return f"{made['prefix']}.bin, .idx: {made['documents']:,} documents, {made['tokens']:,} tokens; {rate}"


def _merge_sentence(made: JsonObject) -> str:
    return f"{made['prefix']}.bin, .idx: {made['tokens']:,} tokens of {made['inputs']} pairs"


def _index_sentence(made: JsonObject) -> str:
    return "index maps are ready: " + ", ".join(
        f"{count:,} {name} samples" for name, count in made["samples"].items()
    )


# What does each command, and its result as text.
COMMANDS: Mapping[str, Command] = {
    "corpus": (make_corpus, _corpus_sentence),
    "tokenizer": (make_tokenizer, _tokenizer_sentence),
    "preprocess": (tokenize, _pair_sentence),
    "merge": (merge_pairs, _merge_sentence),
    "index": (make_index, _index_sentence),
}
