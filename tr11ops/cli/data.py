"""`tr11 data`: make, index and look at training data. The work is done by `python -m trainer.data`,
as a child.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tr11ops.cli.runner import Outcome, RunContext
from tr11ops.cli.trainer_child import card_file, child_request, run_trainer_module
from tr11ops.runcard.card import own_card

app = typer.Typer(
    name="data",
    help="""Make training data: corpus, tokenizer, indexed pairs, index maps, shares; check it, and look at it.

    Examples:
      tr11 data corpus --output corpus.jsonl
      tr11 data tokenizer --corpus corpus.jsonl --output tokenizer
      tr11 data preprocess --input corpus.jsonl --tokenizer tokenizer --output-prefix demo
    """,
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="The result as one JSON object.")]
Force = Annotated[
    bool,
    typer.Option("--force", help="Also where it is up to date, or this command did not make it."),
]
JsonKey = Annotated[
    str, typer.Option("--json-key", metavar="KEY", help="Key of the text in each JSON object.")
]
TokenizerType = Annotated[
    Literal["huggingface", "gpt2_bpe", "bert_wordpiece", "bert_wordpiece_lower"],
    typer.Option(
        metavar="TYPE", help="huggingface, gpt2_bpe, bert_wordpiece or bert_wordpiece_lower."
    ),
]
LearntType = Annotated[
    Literal["huggingface", "bert_wordpiece", "bert_wordpiece_lower"],
    typer.Option(
        metavar="TYPE", help="huggingface (byte-level BPE), bert_wordpiece or bert_wordpiece_lower."
    ),
]
VocabFile = Annotated[
    Path | None, typer.Option(help="vocab.json of gpt2_bpe, vocab.txt of bert_wordpiece.")
]
MergeFile = Annotated[Path | None, typer.Option(help="merges.txt of gpt2_bpe.")]
MaxLine = Annotated[
    int,
    typer.Option(
        "--max-line-mib",
        metavar="MIB",
        min=1,
        help="Refuse longer lines; one takes 180 times its size.",
    ),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Processes; all cores if not given.")]


def _run(ctx: typer.Context, **instead: object) -> int:
    """The child's exit code is the command's."""
    return run_trainer_module("trainer.data", child_request(ctx, **instead))


@app.command()
def corpus(
    ctx: typer.Context,
    out: Annotated[
        Path,
        typer.Option(
            "--output", "-o", "--out", help="File to write: one JSON object {text, source} a line."
        ),
    ],
    min_bytes: Annotated[int, typer.Option(min=1, help="Least UTF-8 bytes of text.")] = 20_000_000,
    force: Force = False,
    as_json: Json = False,
) -> int:
    """Build a real corpus from text that every Python installation carries.

    Documentation topics, docstrings and sources of the standard library, then of installed
    packages, without duplicates. The same installation gives the same file.

    Examples:
      tr11 data corpus --output data/corpus.jsonl
    """
    return _run(ctx)


@app.command()
def tokenizer(
    ctx: typer.Context,
    *,
    corpus: Annotated[
        Path, typer.Option(help="JSON lines to learn from, plain or .gz, .xz, .zst.")
    ],
    out: Annotated[
        Path,
        typer.Option("--output", "-o", "--out", help="Folder for tokenizer.json or vocab.txt."),
    ],
    tokenizer_type: LearntType = "huggingface",
    vocab_size: Annotated[
        int, typer.Option(min=1, help="Tokens in all, special ones and bytes too.")
    ] = 4096,
    json_key: JsonKey = "text",
    special_token: Annotated[
        list[str] | None, typer.Option(help="One more special token; may be repeated.")
    ] = None,
    max_line_mib: MaxLine = 16,
    force: Force = False,
    as_json: Json = False,
) -> int:
    """Learn a tokenizer: byte-level BPE (any text can be encoded; <|endoftext|> is id 0), or
    WordPiece for BERT and T5.

    Examples:
      tr11 data tokenizer --corpus data/corpus.jsonl --vocab-size 4096 --output data/tokenizer
      tr11 data tokenizer --corpus data/corpus.jsonl --tokenizer-type bert_wordpiece_lower --output data/wordpiece
    """
    return _run(ctx)


@app.command()
def preprocess(
    ctx: typer.Context,
    *,
    input: Annotated[Path, typer.Option("--input", help="JSON lines, plain or .gz, .xz, .zst.")],
    output_prefix: Annotated[
        str, typer.Option(metavar="PREFIX", help="Writes PREFIX_KEY_document.bin and .idx.")
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json, or that file.")
    ] = None,
    tokenizer_type: TokenizerType = "huggingface",
    vocab_file: VocabFile = None,
    merge_file: MergeFile = None,
    workers: Workers = None,
    append_eod: Annotated[
        bool, typer.Option(help="End each document with the end-of-document token.")
    ] = True,
    json_key: JsonKey = "text",
    split_sentences: Annotated[
        bool,
        typer.Option(
            "--split-sentences", help="One sequence a sentence; writes PREFIX_KEY_sentence."
        ),
    ] = False,
    keep_newlines: Annotated[
        bool, typer.Option("--keep-newlines", help="Line ends stay with their sentence.")
    ] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave faulty lines out, and say so.")
    ] = False,
    max_line_mib: MaxLine = 16,
    force: Force = False,
    as_json: Json = False,
) -> int:
    """Tokenize JSON lines into the memory-mapped format that Megatron reads, in the order of the
    lines.

    The pair appears whole or not at all, and is kept when it is up to date. A line above
    --max-line-mib is faulty. After an interruption the same command goes on from what was finished.

    Examples:
      tr11 data preprocess --input data/corpus.jsonl --tokenizer data/tokenizer --output-prefix data/demo
      tr11 data preprocess --input dump.jsonl.zst --tokenizer data/tokenizer --output-prefix data/dump
    """
    return _run(ctx)


@app.command()
def merge(
    ctx: typer.Context,
    prefixes: Annotated[
        list[str], typer.Argument(metavar="PREFIX...", help="Pairs to join, in this order.")
    ],
    output_prefix: Annotated[
        str, typer.Option(metavar="PREFIX", help="Prefix of the joined pair.")
    ],
    force: Force = False,
    as_json: Json = False,
) -> int:
    """Join indexed pairs of one token type into one.

    Examples:
      tr11 data merge data/part0_text_document data/part1_text_document --output-prefix data/all_text_document
    """
    return _run(ctx)


@app.command()
def index(
    ctx: typer.Context,
    *,
    data: Annotated[
        list[str],
        typer.Argument(metavar="PREFIX | WEIGHT PREFIX...", help="One pair, or a mixture."),
    ],
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens in a sample.")],
    train_samples: Annotated[int, typer.Option(min=0, help="Samples of the whole training.")],
    valid_samples: Annotated[int, typer.Option(min=0)] = 0,
    test_samples: Annotated[int, typer.Option(min=0)] = 0,
    split: Annotated[str, typer.Option(help="Shares of training, validation, test.")] = "949,50,1",
    seed: Annotated[int, typer.Option(min=0)] = 1234,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Refuse tokens outside this vocabulary.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Folder for the maps; beside each pair if not given.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Build the index maps beforehand, so that no node of a large training waits for them.

    Examples:
      tr11 data index data/demo_text_document --seq-length 128 --train-samples 50000
    """
    return _run(ctx)


@app.command()
def inspect(
    ctx: typer.Context,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="A pair, without .bin or .idx.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Decode the beginnings with it, check the vocabulary.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=0, help="Beginnings to show.")] = 3,
    as_json: Json = False,
) -> int:
    """Show what an indexed pair holds: type, sequences, documents, tokens, lengths, beginnings.

    Examples:
      tr11 data inspect data/demo_text_document --tokenizer data/tokenizer
    """
    return _run(ctx)


@app.command()
def check(
    ctx: typer.Context,
    *,
    prefixes: Annotated[
        list[str], typer.Argument(metavar="PREFIX...", help="Pairs; with --raw one file of lines.")
    ],
    raw: Annotated[
        bool, typer.Option("--raw", help="Check JSON lines, before they are tokenized.")
    ] = False,
    json_key: JsonKey = "text",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Report tokens it lacks, and its end token in a text.")
    ] = None,
    tokenizer_type: TokenizerType = "huggingface",
    vocab_file: VocabFile = None,
    merge_file: MergeFile = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="The same, of a vocabulary of this size.")
    ] = None,
    storm_length: Annotated[
        int,
        typer.Option(
            min=1, help="Least length of a document that is reported for being mostly one symbol."
        ),
    ] = 64,
    storm_run: Annotated[
        int, typer.Option(min=1, help="Report one symbol so many times in a row.")
    ] = 512,
    longest: Annotated[
        int, typer.Option(min=1, help="Report documents of this length or more.")
    ] = 1_000_000,
    max_line_mib: MaxLine = 16,
    workers: Workers = None,
    temporary: Annotated[
        Path | None, typer.Option(help="Folder for digests, 28 bytes a document.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Look for what spoils a training: storms of one symbol (such as backslashes), documents that
    are there twice, empty ones and overlong ones, tokens outside the vocabulary, damaged files.

    Lengths are in tokens, with --raw in characters. Exit code 1 when something is found.

    Examples:
      tr11 data check data/demo_text_document --tokenizer data/tokenizer
      tr11 data check --raw data/corpus.jsonl.zst
    """
    return _run(ctx)


@app.command()
def text(
    ctx: typer.Context,
    context: RunContext,
    *,
    samples: Annotated[
        str | None,
        typer.Option(metavar="FIRST-LAST", help="Consumed samples, counted from 0, both included."),
    ] = None,
    iterations: Annotated[
        str | None,
        typer.Option(metavar="FIRST-LAST", help="Instead: iterations, as the log counts them."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--ids", "--tokens", help="Token ids, without the text.")
    ] = False,
    as_json: Json = False,
) -> Outcome:
    """Show what the training of a card read: text, data set and documents of each sample, by the
    training's own code.

    Examples:
      tr11 data text --iterations 31214-31219 --run my-card.toml
      tr11 data text --samples 0-3 --ids
    """
    card = own_card(context.card, "tr11 data")
    with card_file(card) as name:
        return Outcome(
            exit_code=_run(
                ctx,
                card=name,
                replicas=card.data_parallel_degree,
                samples=samples and samples.replace(":", "-"),
                iterations=iterations and iterations.replace(":", "-"),
            )
        )


@app.command()
def ratios(
    ctx: typer.Context,
    *,
    dataset_ratios_path: Annotated[
        Path, typer.Option(metavar="JSON", help="List of objects with dataset_path and ratio.")
    ],
    split: Annotated[
        Literal["train", "valid", "test"],
        typer.Option(metavar="train|valid|test", help="Whose file of groups."),
    ],
    shares: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Of training, validation, test in each set; else 950,50,0, and for a test 949,50,1.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="File of quoted groups, for data.*_groups_file.")
    ],
    as_json: Json = False,
) -> int:
    """Write the file of groups of a training or a test, or of a validation: the mixture, and each
    language by itself.

    The file appears whole, and several processes may write it at once. Where there is a test, give
    all three files the same --shares.

    Examples:
      tr11 data ratios --dataset-ratios-path ratios.json --split valid --output valid-splits.txt
    """
    return _run(ctx)


@app.command()
def probabilities(
    ctx: typer.Context,
    *,
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX...", help="Pairs.")],
    alpha: Annotated[
        float,
        typer.Option(help="Exponent of a set's part of all tokens; below 1 lifts small sets."),
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Write them as a list of ratios.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Shares of data sets in a mixture: each one's part of all tokens to the power of alpha,
    normalised.

    Examples:
      tr11 data probabilities --alpha 0.3 data/en_text_document data/fr_text_document --output ratios.json
    """
    return _run(ctx)
