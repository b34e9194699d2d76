"""`tr11 data`: make, index and look at training data. The work is done by `python -m trainer.data`, as a child."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="data",
    help="Make training data: corpus, tokenizer, indexed pairs, index maps; and look at it.",
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="The result as one JSON object.")]
Force = Annotated[bool, typer.Option("--force", help="Make it again even when it is up to date.")]
JsonKey = Annotated[str, typer.Option("--json-key", metavar="KEY", help="Key of the text in each JSON object.")]


def run_trainer_data(arguments: list[str]) -> int:
    """Run `python -m trainer.data` with this process's terminal; returns its exit code.

    An interrupt from the keyboard reaches the child too, which cleans up; this process waits for it.
    """
    child = subprocess.Popen([sys.executable, "-m", "trainer.data", *arguments])
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue
        return code if code >= 0 else 1


def _finish(arguments: list[str]) -> None:
    raise typer.Exit(run_trainer_data(arguments))


def _flag(name: str, value: bool) -> list[str]:
    return [name] if value else []


@app.command()
def corpus(
    out: Annotated[Path, typer.Option(help="File to write: one JSON object {text, source} a line.")],
    min_bytes: Annotated[int, typer.Option(min=1, help="Least UTF-8 bytes of text.")] = 20_000_000,
    force: Force = False,
    json: Json = False,
) -> None:
    """Build a real corpus from text that every Python installation carries.

    Documentation topics, docstrings and sources of the standard library, then of installed packages, without
    duplicates. The same installation gives the same file.

    Example: tr11 data corpus --out data/corpus.jsonl
    """
    _finish(
        ["corpus", "--out", str(out), "--min-bytes", str(min_bytes), *_flag("--force", force), *_flag("--json", json)]
    )


@app.command()
def tokenizer(
    *,
    corpus: Annotated[Path, typer.Option(help="JSON lines to learn from.")],
    out: Annotated[Path, typer.Option(help="Folder for tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(min=1, help="Tokens in all, special ones and bytes too.")] = 4096,
    json_key: JsonKey = "text",
    special_token: Annotated[list[str] | None, typer.Option(help="One more special token; may be repeated.")] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer (any text can be encoded; <|endoftext|> is id 0).

    Example: tr11 data tokenizer --corpus data/corpus.jsonl --vocab-size 4096 --out data/tokenizer
    """
    extra = [word for token in special_token or [] for word in ("--special-token", token)]
    _finish(
        [
            *("tokenizer", "--corpus", str(corpus), "--out", str(out), "--vocab-size", str(vocab_size)),
            *("--json-key", json_key, *extra, *_flag("--force", force), *_flag("--json", json)),
        ]
    )


@app.command()
def preprocess(
    *,
    input: Annotated[Path, typer.Option("--input", help="JSON lines.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder with tokenizer.json, or that file.")],
    output_prefix: Annotated[str, typer.Option(metavar="PREFIX", help="Writes PREFIX_KEY_document.bin and .idx.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; all cores if not given.")] = None,
    append_eod: Annotated[bool, typer.Option(help="End each document with the end-of-document token.")] = True,
    json_key: JsonKey = "text",
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave faulty lines out, and say so.")
    ] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Tokenize JSON lines into the memory-mapped format that Megatron reads, in the order of the lines.

    The pair appears whole or not at all, and is kept when it is up to date.

    Example: tr11 data preprocess --input data/corpus.jsonl --tokenizer data/tokenizer --output-prefix data/demo
    """
    _finish(
        [
            *("preprocess", "--input", str(input), "--tokenizer", str(tokenizer), "--output-prefix", output_prefix),
            *("--json-key", json_key, "--append-eod" if append_eod else "--no-append-eod"),
            *(["--workers", str(workers)] if workers is not None else []),
            *_flag("--skip-bad-lines", skip_bad_lines),
            *_flag("--force", force),
            *_flag("--json", json),
        ]
    )


@app.command()
def merge(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Pairs to join, in this order.")],
    output_prefix: Annotated[str, typer.Option(metavar="PREFIX", help="Prefix of the joined pair.")],
    json: Json = False,
) -> None:
    """Join indexed pairs of one token type into one.

    Example: tr11 data merge data/part0_text_document data/part1_text_document --output-prefix data/all_text_document
    """
    _finish(["merge", "--output-prefix", output_prefix, *_flag("--json", json), "--", *prefixes])


@app.command()
def index(
    *,
    data: Annotated[list[str], typer.Argument(metavar="PREFIX | WEIGHT PREFIX...", help="One pair, or a mixture.")],
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")],
    train_samples: Annotated[int, typer.Option(min=0, help="Samples of the whole training.")],
    valid_samples: Annotated[int, typer.Option(min=0)] = 0,
    test_samples: Annotated[int, typer.Option(min=0)] = 0,
    split: Annotated[str, typer.Option(help="Shares of training, validation, test.")] = "949,50,1",
    seed: Annotated[int, typer.Option(min=0)] = 1234,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Refuse tokens outside this vocabulary.")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for the maps; beside each pair if not given.")] = None,
    json: Json = False,
) -> None:
    """Build the index maps beforehand, so that no node of a large training waits for them.

    Example: tr11 data index data/demo_text_document --seq-length 128 --train-samples 50000
    """
    _finish(
        [
            *("index", "--seq-length", str(seq_length), "--train-samples", str(train_samples)),
            *("--valid-samples", str(valid_samples), "--test-samples", str(test_samples)),
            *("--split", split, "--seed", str(seed)),
            *(["--vocab-size", str(vocab_size)] if vocab_size is not None else []),
            *(["--cache-dir", str(cache_dir)] if cache_dir is not None else []),
            *_flag("--json", json),
            *("--", *data),
        ]
    )


@app.command()
def inspect(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="A pair, without .bin or .idx.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Decode the beginnings with it, check the vocabulary.")] = None,
    sequences: Annotated[int, typer.Option(min=0, help="Beginnings to show.")] = 3,
    json: Json = False,
) -> None:
    """Show what an indexed pair holds: type, sequences, documents, tokens, lengths, beginnings.

    Example: tr11 data inspect data/demo_text_document --tokenizer data/tokenizer
    """
    _finish(
        [
            *("inspect", "--sequences", str(sequences)),
            *(["--tokenizer", str(tokenizer)] if tokenizer is not None else []),
            *_flag("--json", json),
            *("--", prefix),
        ]
    )
