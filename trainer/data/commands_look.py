"""The commands of `python -m trainer.data` that look at data, and those that share it out."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainer.contract.documents import document
from trainer.contract.errors import DataError, DataUsageError
from trainer.data.check import as_result, check_pairs, check_raw, describe_check
from trainer.data.check_rules import DocumentLimits
from trainer.data.commands_make import add_line_limit, add_tokenizer_options, tokenizer_spec
from trainer.data.indexed import bin_path
from trainer.data.inspect import Inspection, Peek, describe, inspect_pair
from trainer.data.progress import Commands, count, inclusive_range, positive, progress_bar, say
from trainer.data.ratios import (
    SHARES,
    SHARES_WITH_TEST,
    range_of,
    read_ratios,
    sampling_probabilities,
    sum_warning,
    write_groups,
    write_ratios,
)
from trainer.data.sources import SPLITS
from trainer.data.tokenizer import TokenizerSpec, load_tokenizer, spelled_end_tokens


def add_commands(commands: Commands) -> None:
    """Declare the commands."""
    command = commands.add_parser("inspect", help="what a pair holds")
    command.set_defaults(run=show_pair, sentence=_inspection)
    command.add_argument("prefix", metavar="PREFIX")
    command.add_argument("--tokenizer", type=Path)
    command.add_argument("--sequences", type=count, default=3)

    command = commands.add_parser("check", help="storms, duplicates, empty and overlong documents, foreign tokens")
    command.set_defaults(run=check, sentence=describe_check, is_fine=lambda result: result["clean"])
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")
    command.add_argument("--raw", action="store_true")
    command.add_argument("--json-key", default="text")
    add_tokenizer_options(command)
    command.add_argument("--vocab-size", type=positive)
    limits = DocumentLimits()
    command.add_argument("--storm-length", type=positive, default=limits.storm_length)
    command.add_argument("--storm-run", type=positive, default=limits.storm_run)
    command.add_argument("--longest", type=positive, default=limits.longest)
    add_line_limit(command)
    command.add_argument("--workers", type=positive, default=os.cpu_count() or 1)
    command.add_argument("--temporary", type=Path)

    command = commands.add_parser("text", help="what a training read at some samples or iterations")
    command.set_defaults(run=show_text, sentence=_texts)
    command.add_argument("--card", type=Path, required=True)
    command.add_argument("--replicas", type=positive)
    command.add_argument("--samples", metavar="FIRST-LAST")
    command.add_argument("--iterations", metavar="FIRST-LAST")
    command.add_argument("--ids", "--tokens", dest="tokens", action="store_true")

    command = commands.add_parser("ratios", help="the file of groups of a training from a list of ratios")
    command.set_defaults(run=make_groups, sentence=lambda made: f"{made['output']}: {made['groups']} group(s)")
    command.add_argument("--dataset-ratios-path", type=Path, required=True, metavar="JSON")
    command.add_argument("--split", choices=SPLITS, required=True)
    command.add_argument("--shares", metavar="A,B,C")
    command.add_argument("--output", type=Path, required=True)

    command = commands.add_parser("probabilities", help="shares of data sets by their sizes, small ones lifted")
    command.set_defaults(run=make_probabilities, sentence=_probabilities)
    command.add_argument("prefixes", nargs="+", metavar="PREFIX")
    command.add_argument("--alpha", type=float, required=True)
    command.add_argument("--output", type=Path)


def show_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Describe a pair."""
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
    return document(inspect_pair(options.prefix, tokenizer, options.sequences))


def _inspection(result: dict[str, Any]) -> str:
    return describe(Inspection(**{**result, "peeks": tuple(Peek(**peek) for peek in result["peeks"])}))


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Check pairs, or one file of JSON lines."""
    spec = tokenizer_spec(options)
    tokenizer = None if spec is None else load_tokenizer(spec)
    size = options.vocab_size if tokenizer is None else tokenizer.vocabulary_size
    shared: dict[str, Any] = {
        "limits": DocumentLimits(options.storm_length, options.storm_run, options.longest),
        "workers": options.workers,
        "temporary": options.temporary,
    }
    if options.raw:
        if len(options.prefixes) != 1 or options.vocab_size is not None:
            raise DataUsageError("--raw checks one file of JSON lines, without --vocab-size")
        path = Path(options.prefixes[0])
        with _bytes_bar(path.stat().st_size if path.is_file() else None) as on_bytes:
            report = check_raw(
                path,
                json_key=options.json_key,
                end_tokens=spelled_end_tokens(tokenizer),
                max_line_mib=options.max_line_mib,
                on_bytes=on_bytes,
                **shared,
            )
        return as_result(report)
    bins = [bin_path(prefix) for prefix in options.prefixes]
    with _bytes_bar(sum(path.stat().st_size for path in bins if path.is_file())) as on_bytes:
        report = check_pairs(
            options.prefixes,
            vocabulary_size=size,
            end_token=None if tokenizer is None else tokenizer.eod_id,
            on_bytes=on_bytes,
            **shared,
        )
    return as_result(report)


@contextmanager
def _bytes_bar(total: int | None) -> Iterator[Any]:
    with progress_bar() as bar:
        task = bar.add_task("checking", total=total)
        yield partial(bar.advance, task)


def show_text(options: argparse.Namespace) -> dict[str, Any]:
    """The samples of a range of consumed samples, or of iterations."""
    if (options.samples is None) == (options.iterations is None):
        raise DataUsageError("give one of --samples and --iterations")
    first, last = inclusive_range(options.samples or options.iterations)

    # Below, for they load torch, which no other command needs.
    from trainer.config.card import CardError, load_trainer_config
    from trainer.data.samples import plan_data, wanted_data
    from trainer.data.text import read_samples, samples_of_iterations

    try:
        config = load_trainer_config(options.card)
    except CardError as error:
        raise DataError(str(error)) from error
    if options.iterations is not None:
        first, last = samples_of_iterations(config, first, last)
    named = config.tokenizer
    tokenizer = None
    if not options.tokens:
        if named.path is None and named.vocabulary_file is None:
            raise DataError("the card names no tokenizer, so there is no text; set tokenizer.path, or use --tokens")
        tokenizer = load_tokenizer(TokenizerSpec(named.type, named.path, named.vocabulary_file, named.merges_file))
    wanted = wanted_data(config)
    name = wanted.roles["train"][0]
    source = plan_data(config, wanted)[name].open()
    samples = read_samples(config, source, first, last, replicas=options.replicas, tokenizer=tokenizer)
    return {"first": first, "last": last, "samples": [document(sample) for sample in samples]}


def _texts(result: dict[str, Any]) -> str:
    blocks = []
    for sample in result["samples"]:
        documents = ", ".join(map(str, sample["documents"]))
        head = f"=== sample {sample['consumed']}, {sample['data_set']}, document(s) {documents}"
        body = " ".join(map(str, sample["tokens"])) if sample["text"] is None else sample["text"]
        blocks.append(f"{head}\n{body}")
    return "\n".join(blocks)


def make_groups(options: argparse.Namespace) -> dict[str, Any]:
    """Write the file of groups of one split."""
    ratios = read_ratios(options.dataset_ratios_path)
    warning = sum_warning(ratios)
    if warning is not None:
        say(f"tr11 data: WARNING: {options.dataset_ratios_path}: {warning}")
    shares = options.shares or (SHARES_WITH_TEST if options.split == "test" else SHARES)
    if options.split == "test" and options.shares is None:
        part = range_of("test", shares)
        say(
            f"tr11 data: WARNING: the test reads {part}: make train and valid with --shares {shares} too, or they do so"
        )
    written = write_groups(ratios, options.split, options.output, shares)
    if not written:
        say(f"{options.output} is up to date")
    groups = 1 + len(ratios) if options.split == "valid" else 1
    return {"output": str(options.output), "groups": groups, "warning": warning, "already_complete": not written}


def make_probabilities(options: argparse.Namespace) -> dict[str, Any]:
    """Shares by size, to a file of ratios if one is named."""
    ratios = sampling_probabilities(options.prefixes, options.alpha)
    if options.output is not None:
        write_ratios(ratios, options.output)
    return {"alpha": options.alpha, "ratios": [document(ratio) for ratio in ratios]}


def _probabilities(result: dict[str, Any]) -> str:
    return "\n".join(f"{entry['ratio']:.6f}  {entry['dataset_path']}" for entry in result["ratios"])
