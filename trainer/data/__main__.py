"""`python -m trainer.data`: make, index and look at training data. Progress on stderr, one line of result on stdout."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.data.blend import parse_split
from trainer.data.corpus import DEFAULT_MIN_BYTES, build_corpus
from trainer.data.errors import DataError, explain_os_errors
from trainer.data.indexed import IndexedDataset
from trainer.data.indexed_write import merge
from trainer.data.inspect import Inspection, Peek, describe, inspect_pair
from trainer.data.progress import progress_bar, say
from trainer.data.sources import Reading, open_splits
from trainer.data.tokenize import PreprocessRequest, preprocess
from trainer.data.tokenizer import check_vocabulary_size, is_trained, load_tokenizer, train_tokenizer

EXIT_FINE = 0
EXIT_NEEDS_PERSON = 1
EXIT_USAGE = 2


class UsageError(Exception):
    """Options that cannot be meant; the text is one line."""


def make_corpus(options: argparse.Namespace) -> dict[str, Any]:
    """Build the corpus of this Python installation's own text."""
    with progress_bar() as bar:
        task = bar.add_task("corpus", total=options.min_bytes)
        report = build_corpus(
            options.out, options.min_bytes, options.force, on_bytes=lambda count: bar.advance(task, count)
        )
        bar.update(task, completed=report.text_bytes, total=report.text_bytes)
    if report.already_complete:
        say(f"{options.out} is complete already ({report.text_bytes:,} bytes of text); --force builds it again")
    return asdict(report)


def make_tokenizer(options: argparse.Namespace) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer."""
    try:
        check_vocabulary_size(options.vocab_size)
    except DataError as error:
        raise UsageError(f"--vocab-size: {error}") from error
    corpus: Path = options.corpus
    with explain_os_errors("reading", corpus):
        status = corpus.stat()
    request = {
        "corpus": str(corpus.resolve()),
        "corpus_bytes": status.st_size,
        "corpus_modified": status.st_mtime_ns,
        "vocabulary_size": options.vocab_size,
        "special_tokens": options.special_token,
        "json_key": options.json_key,
    }
    kept = not options.force and is_trained(options.out, request)
    if kept:
        say(f"{options.out} is trained from this corpus already; --force trains it again")
        tokenizer = load_tokenizer(options.out)
    else:
        with progress_bar() as bar:
            task = bar.add_task("reading", total=status.st_size)
            tokenizer = train_tokenizer(
                _texts(corpus, options.json_key, lambda count: bar.advance(task, count)),
                options.vocab_size,
                options.out,
                extra_special_tokens=options.special_token,
                request=request,
                on_learning=lambda: bar.update(task, description="learning"),
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


def _texts(corpus: Path, json_key: str, on_bytes: Any) -> Iterator[str]:
    with explain_os_errors("reading", corpus), corpus.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            on_bytes(len(line))
            if not line.strip():
                continue
            try:
                text = json.loads(line)[json_key]
            except (ValueError, KeyError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise DataError(
                    f"{corpus}, line {number}: not a JSON object with a text under {json_key!r}; mend the line"
                )
            yield text


def make_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Tokenize JSON lines into an indexed pair."""
    request = PreprocessRequest(
        input=options.input,
        tokenizer=options.tokenizer,
        output_prefix=options.output_prefix,
        workers=options.workers,
        append_eod=options.append_eod,
        json_key=options.json_key,
        skip_bad_lines=options.skip_bad_lines,
    )
    total = options.input.stat().st_size if options.input.is_file() else None
    with progress_bar("{task.fields[documents]:,} documents", "{task.fields[rate]:,.0f} tokens/s") as bar:
        task = bar.add_task("tokenizing", total=total, documents=0, rate=0.0)
        done = {"documents": 0, "tokens": 0}

        def on_progress(input_bytes: int, documents: int, tokens: int) -> None:
            done["documents"] += documents
            done["tokens"] += tokens
            seconds = bar.tasks[task].elapsed or 1e-9
            bar.update(task, advance=input_bytes, documents=done["documents"], rate=done["tokens"] / seconds)

        report = preprocess(request, options.force, on_progress)
        if report.already_complete:
            bar.update(task, completed=total, documents=report.documents, rate=report.tokens_per_second)
    if report.already_complete:
        say(f"{report.prefix} is up to date ({report.tokens:,} tokens); --force makes it again")
    for fault in report.bad_line_reports:
        say(f"left out: {fault}")
    return asdict(report)


def merge_pairs(options: argparse.Namespace) -> dict[str, Any]:
    """Join several pairs into one."""
    total = sum(IndexedDataset(prefix).bytes for prefix in options.prefixes)
    with progress_bar() as bar:
        task = bar.add_task("merging", total=total)
        tokens = merge(options.prefixes, options.output_prefix, lambda count: bar.advance(task, count))
    return {"prefix": options.output_prefix, "tokens": tokens, "inputs": len(options.prefixes)}


def make_index(options: argparse.Namespace) -> dict[str, Any]:
    """Build the index maps that a training with these settings will read."""
    try:
        prefixes = _weighted(options.data)
        parse_split(options.split)
    except (DataError, ValueError) as error:
        raise UsageError(str(error)) from error
    splits = open_splits(
        prefixes,
        options.split,
        {"train": options.train_samples, "valid": options.valid_samples, "test": options.test_samples},
        Reading(options.seq_length, options.seed, options.vocab_size, options.cache_dir),
    )
    return {"sequence_length": options.seq_length, "samples": {name: len(source) for name, source in splits.items()}}


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


def show_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Describe a pair."""
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
    return asdict(inspect_pair(options.prefix, tokenizer, options.sequences))


def sentence(command: str, result: dict[str, Any]) -> str:
    """What a person wants to know of a command's result."""
    if command == "corpus":
        return f"{result['path']}: {result['documents']:,} documents, {result['text_bytes']:,} bytes of text"
    if command == "tokenizer":
        return f"{result['path']}: {result['vocabulary_size']:,} tokens, end of document is {result['eod_id']}"
    if command == "preprocess":
        rate = f"{result['tokens_per_second']:,.0f} tokens/s with {result['workers']} worker(s)"
        return f"{result['prefix']}.bin, .idx: {result['documents']:,} documents, {result['tokens']:,} tokens; {rate}"
    if command == "merge":
        return f"{result['prefix']}.bin, .idx: {result['tokens']:,} tokens of {result['inputs']} pairs"
    if command == "index":
        return "index maps are ready: " + ", ".join(
            f"{count:,} {name} samples" for name, count in result["samples"].items()
        )
    return describe(Inspection(**{**result, "peeks": tuple(Peek(**peek) for peek in result["peeks"])}))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} must not be negative")
    return value


def build_parser() -> argparse.ArgumentParser:
    """The command line; the same commands and options as `tr11 data`."""
    parser = argparse.ArgumentParser(prog="python -m trainer.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("corpus", help="a real corpus from this Python installation's own text")
    command.set_defaults(run=make_corpus)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--min-bytes", type=_positive, default=DEFAULT_MIN_BYTES)
    command.add_argument("--force", action="store_true")

    command = commands.add_parser("tokenizer", help="train a byte-level BPE tokenizer")
    command.set_defaults(run=make_tokenizer)
    command.add_argument("--corpus", type=Path, required=True)
    command.add_argument("--vocab-size", type=_positive, default=4096)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--json-key", default="text")
    command.add_argument("--special-token", action="append", default=[])
    command.add_argument("--force", action="store_true")

    command = commands.add_parser("preprocess", help="tokenize JSON lines into PREFIX_KEY_document.bin and .idx")
    command.set_defaults(run=make_pair)
    command.add_argument("--input", type=Path, required=True)
    command.add_argument("--tokenizer", type=Path, required=True)
    command.add_argument("--output-prefix", required=True)
    command.add_argument("--workers", type=_positive, default=os.cpu_count() or 1)
    command.add_argument("--append-eod", action=argparse.BooleanOptionalAction, default=True)
    command.add_argument("--json-key", default="text")
    command.add_argument("--skip-bad-lines", action="store_true")
    command.add_argument("--force", action="store_true")

    command = commands.add_parser("merge", help="join pairs of one token type into one")
    command.set_defaults(run=merge_pairs)
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")
    command.add_argument("--output-prefix", required=True)

    command = commands.add_parser("index", help="build the index maps of a training beforehand")
    command.set_defaults(run=make_index)
    command.add_argument("data", nargs="+", metavar="PREFIX | WEIGHT PREFIX")
    command.add_argument("--seq-length", type=_positive, required=True)
    command.add_argument("--train-samples", type=_count, required=True)
    command.add_argument("--valid-samples", type=_count, default=0)
    command.add_argument("--test-samples", type=_count, default=0)
    command.add_argument("--split", default="949,50,1")
    command.add_argument("--seed", type=_count, default=1234)
    command.add_argument("--vocab-size", type=_positive)
    command.add_argument("--cache-dir", type=Path)

    command = commands.add_parser("inspect", help="what a pair holds")
    command.set_defaults(run=show_pair)
    command.add_argument("prefix", metavar="PREFIX")
    command.add_argument("--tokenizer", type=Path)
    command.add_argument("--sequences", type=_count, default=3)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="the result as one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 fine, 1 needs a person, 2 wrong usage; a refusal is one line on stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    options = build_parser().parse_args(arguments)
    try:
        result = options.run(options)
        shown = json.dumps(result, ensure_ascii=False) if options.json else sentence(options.command, result)
        sys.stdout.write(shown + "\n")
        sys.stdout.flush()
    except UsageError as error:
        say(f"tr11 data: {error}")
        return EXIT_USAGE
    except DataError as error:
        say(f"tr11 data: {error}")
        return EXIT_NEEDS_PERSON
    except KeyboardInterrupt:
        say("stopped; nothing was left half-written")
        return EXIT_NEEDS_PERSON
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader is gone: say nothing more to it
        return EXIT_NEEDS_PERSON
    return EXIT_FINE


if __name__ == "__main__":
    sys.exit(main())
