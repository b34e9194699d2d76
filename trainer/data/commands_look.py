"""The commands of `python -m trainer.data` that look at data, and those that share it out."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from trainer.config.data import data_set_name
from trainer.contract.documents import document
from trainer.contract.errors import DataError, UsageError, explain_os_errors
from trainer.contract.files import write_atomically
from trainer.contract.record import JsonObject, Record
from trainer.data.check import as_result, check_pairs, check_raw, describe_check
from trainer.data.check_rules import DocumentLimits
from trainer.data.commands_make import Command, tokenizer_spec
from trainer.data.groups import SPLITS, parse_groups, parse_split
from trainer.data.indexed import IndexedDataset, bin_path
from trainer.data.progress import inclusive_range, progress_bar, say
from trainer.data.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer, spelled_end_tokens

# Shares of data sets: the groups of a training from a list of ratios, and ratios from the sizes of
# data sets.
#
# A list of ratios is a JSON list of `{"dataset_path": PREFIX, "ratio": NUMBER}`. The folder of a
# prefix is named after the language of its text.

# Shares of every data set that training, validation and test read: none for a test, unless one is
# asked for.
SHARES = "950,50,0"
SHARES_WITH_TEST = "949,50,1"
# Sums of published lists differ from 1 by up to 1e-11; more than this is a list that was edited by
# hand.
SUM_TOLERANCE = 1e-6


class Ratio(Record):
    """One data set and its share of the training."""

    dataset_path: str
    ratio: float

    @property
    def language(self) -> str:
        """Name of the folder that holds the data set. Raises DataError when the path names none."""
        folder = data_set_name(self.dataset_path)
        if not folder:
            raise DataError(
                f"{self.dataset_path} has no folder, whose name is the language of its validation group; give the path"
                " with its folder"
            )
        return folder


def read_ratios(path: str | Path) -> tuple[Ratio, ...]:
    """The ratios in a file. Raises DataError that names the entry and what is wrong with it."""
    with explain_os_errors("reading", path):
        data = Path(path).read_bytes()
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); repair it") from None
    if not isinstance(entries, list) or not entries:
        raise DataError(
            f'{path} must hold a list of {{"dataset_path": ..., "ratio": ...}}, with at least one entry'
        )
    return tuple(
        _ratio(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, 1)
    )


def _ratio(entry: Any, where: str) -> Ratio:
    if not isinstance(entry, dict) or "dataset_path" not in entry or "ratio" not in entry:
        raise DataError(
            f'{where} is not of the form {{"dataset_path": ..., "ratio": ...}}; repair it'
        )
    path = entry["dataset_path"]
    ratio = entry["ratio"]
    if not isinstance(path, str) or not path:
        raise DataError(f"{where}: dataset_path {path!r} is not a path; repair it")
    if any(character.isspace() or character in ',"' for character in path):
        raise DataError(
            f"{where}: dataset_path {path!r} holds a space, a comma or a quote; rename the data set"
        )
    if (
        isinstance(ratio, bool)
        or not isinstance(ratio, int | float)
        or not math.isfinite(ratio)
        or ratio <= 0
    ):
        raise DataError(
            f"{where}: ratio {ratio!r} of {path} is not a number above 0; repair it, or take the entry out"
        )
    return Ratio(path, ratio)


def sum_warning(ratios: Sequence[Ratio]) -> str | None:
    """What is to be said when ratios do not sum to 1; they are normalised when they are used."""
    total = math.fsum(ratio.ratio for ratio in ratios)
    if abs(total - 1) <= SUM_TOLERANCE:
        return None
    return f"the {len(ratios)} ratios sum to {total!r}, not to 1: a data set may be missing or given twice"


def range_of(split: str, shares: str) -> str:
    """Which part START:END of every data set a split reads. Raises DataError when its share is
    zero.
    """
    parts = parse_split(shares)
    place = SPLITS.index(split)
    if parts[place] == 0:
        raise DataError(
            f"--shares {shares} leaves {split} no part of the data; give it a share, such as 949,50,1"
        )
    return f"{_bound(sum(parts[:place]))}:{_bound(sum(parts[: place + 1]))}"


def _bound(value: float) -> str:
    """A fraction as the original wrote it: three digits where they are enough."""
    value = round(value, 12)
    if value in (0, 1):
        if value == 0:
            return "0"
        return "1.0"
    if round(value, 3) == value:
        return f"{value:.3f}"
    return repr(value)


def groups_line(ratios: Sequence[Ratio], split: str, shares: str = SHARES) -> str:
    """The line of a file of groups: the mixture, and for `valid` each data set by itself as well.

    `shares` of training, validation and test, as `949,50,1`. Raises DataError for a split without a
    share, and when two data sets would share a name.
    """
    part = range_of(split, shares)
    mixture = ", ".join(f"{ratio.ratio} {part} {ratio.dataset_path}" for ratio in ratios)
    groups = [f"{split}: {mixture}"]
    if split == "valid":
        groups += [f"valid_{ratio.language}: 1 {part} {ratio.dataset_path}" for ratio in ratios]
    parse_groups(groups)  # what is written can be read
    return " ".join(f'"{group}"' for group in groups) + "\n"


def write_groups(ratios: Sequence[Ratio], split: str, output: Path, shares: str = SHARES) -> bool:
    """Write the file of groups in one step; False when it is there already, byte for byte. Raises
    DataError.

    Any number of processes may do so at once: a reader finds one whole file or another, and never a
    mixture.
    """
    line = groups_line(ratios, split, shares)
    with explain_os_errors("writing", output):
        if output.is_file() and output.read_bytes() == line.encode():
            return False
        write_atomically(output, line)
    return True


def sampling_probabilities(prefixes: Sequence[str], alpha: float) -> tuple[Ratio, ...]:
    """Share of each data set: its part p of all tokens, raised to `alpha`, and normalised.

    An alpha below 1 lifts small data sets; 1 keeps their sizes, 0 makes all equal. Raises
    DataError.
    """
    if not math.isfinite(alpha) or alpha < 0:
        raise DataError(f"alpha {alpha} must be a number of at least 0; 0.3 to 1 is usual")
    tokens = [IndexedDataset(prefix).token_count for prefix in prefixes]
    powers = [(count / sum(tokens)) ** alpha for count in tokens]
    return tuple(
        Ratio(prefix, power / math.fsum(powers))
        for prefix, power in zip(prefixes, powers, strict=True)
    )


def write_ratios(ratios: Sequence[Ratio], output: Path) -> None:
    """Write a list of ratios in one step. Raises DataError."""
    entries = [{"dataset_path": ratio.dataset_path, "ratio": ratio.ratio} for ratio in ratios]
    with explain_os_errors("writing", output):
        write_atomically(output, json.dumps(entries, indent=1) + "\n")


# What an indexed pair holds, for people and for machines.

TOKENS_SHOWN = 32  # of a sequence


class Peek(Record):
    """The beginning of one sequence: number, length, first token ids, and their text if it was
    asked for.
    """

    sequence: int
    tokens: int
    ids: tuple[int, ...]
    text: str | None


class Inspection(Record):
    """Facts of one pair. Lengths are in tokens; `largest_token` is over the whole file."""

    prefix: str
    kind: str
    dtype: str
    type_code: int
    sequences: int
    documents: int
    tokens: int
    bytes: int
    empty_sequences: int
    shortest: int
    median: float
    longest: int
    largest_token: int
    peeks: tuple[Peek, ...]


def inspect_pair(prefix: str | Path, tokenizer: Tokenizer | None, sequences: int) -> Inspection:
    """Open a pair, with all its checks, and describe it; reads every token once for the largest.

    Raises DataError for a damaged pair, or a token outside the tokenizer's vocabulary.
    """
    data = IndexedDataset(prefix)
    largest = int(data.tokens[0])
    for at in range(0, data.token_count, 1 << 22):
        largest = max(largest, int(data.tokens[at : at + (1 << 22)].max()))
        if tokenizer is None:
            continue
        foreign = data.foreign_token(at, at + (1 << 22), tokenizer.vocabulary_size)
        if foreign is not None:
            raise DataError(
                f"{foreign}; the vocabulary of {tokenizer.path} has {tokenizer.vocabulary_size}: the data was made with"
                " another tokenizer; give that one"
            )
    sizes = np.asarray(data.sizes)
    peeks = []
    for number in range(min(sequences, len(data))):
        ids = tuple(int(token) for token in data.get(number)[:TOKENS_SHOWN])
        peeks.append(
            Peek(
                number,
                int(sizes[number]),
                ids,
                None if tokenizer is None else tokenizer.decode(ids),
            )
        )
    return Inspection(
        prefix=str(prefix),
        kind=data.kind,
        dtype=str(data.dtype),
        type_code=data.code,
        sequences=len(data),
        documents=data.document_count,
        tokens=data.token_count,
        bytes=data.bytes,
        empty_sequences=int(np.count_nonzero(sizes == 0)),
        shortest=int(sizes.min()),
        median=float(np.median(sizes)),
        longest=int(sizes.max()),
        largest_token=largest,
        peeks=tuple(peeks),
    )


def describe(result: JsonObject) -> str:
    """An inspection as lines of text."""
    facts = {name: value for name, value in result.items() if name != "peeks"}
    width = max(map(len, facts))
    lines = [
        f"{name.replace('_', ' '):<{width}}  {_grouped(value)}" for name, value in facts.items()
    ]
    for peek in result["peeks"]:
        if peek["text"] is not None:
            shown = repr(peek["text"])
        else:
            shown = " ".join(map(str, peek["ids"]))
        lines.append(f"sequence {peek['sequence']} ({peek['tokens']:,} tokens): {shown}")
    return "\n".join(lines)


def _grouped(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,}"
    return str(value)


def show_pair(options: SimpleNamespace) -> JsonObject:
    """Describe a pair."""
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer)
    return document(inspect_pair(options.prefix, tokenizer, options.sequences))


def check(options: SimpleNamespace) -> JsonObject:
    """Check pairs, or one file of JSON lines."""
    spec = tokenizer_spec(options)
    if spec is None:
        tokenizer = None
    else:
        tokenizer = load_tokenizer(spec)
    size = options.vocab_size if tokenizer is None else tokenizer.vocabulary_size
    temporary = None
    if options.temporary is not None:
        temporary = Path(options.temporary)
    shared: JsonObject = {
        "limits": DocumentLimits(options.storm_length, options.storm_run, options.longest),
        "workers": options.workers or os.cpu_count() or 1,
        "temporary": temporary,
    }
    if options.raw:
        if len(options.prefixes) != 1 or options.vocab_size is not None:
            raise UsageError("--raw checks one file of JSON lines, without --vocab-size")
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


def show_text(options: SimpleNamespace) -> JsonObject:
    """The samples of a range of consumed samples, or of iterations."""
    if (options.samples is None) == (options.iterations is None):
        raise UsageError("give one of --samples and --iterations")
    first, last = inclusive_range(options.samples or options.iterations)

    # Below, for they load torch, which no other command needs.
    from trainer.config.card import CardError, load_trainer_config
    from trainer.data.samples import plan_data, wanted_data
    from trainer.data.text import read_samples, samples_of_iterations

    try:
        config = load_trainer_config(Path(options.card))
    except CardError as error:
        raise DataError(str(error)) from error
    if options.iterations is not None:
        first, last = samples_of_iterations(config, first, last)
    named = config.tokenizer
    tokenizer = None
    if not options.tokens:
        if named.path is None and named.vocabulary_file is None:
            raise DataError(
                "the card names no tokenizer, so there is no text; set tokenizer.path, or use --tokens"
            )
        tokenizer = load_tokenizer(
            TokenizerSpec(named.type, named.path, named.vocabulary_file, named.merges_file)
        )
    wanted = wanted_data(config)
    name = wanted.roles["train"][0]
    source = plan_data(config, wanted)[name].open()
    samples = read_samples(
        config, source, first, last, replicas=options.replicas, tokenizer=tokenizer
    )
    return {"first": first, "last": last, "samples": [document(sample) for sample in samples]}


def _texts(result: JsonObject) -> str:
    blocks = []
    for sample in result["samples"]:
        documents = ", ".join(map(str, sample["documents"]))
        head = f"=== sample {sample['consumed']}, {sample['data_set']}, document(s) {documents}"
        if sample["text"] is None:
            body = " ".join(map(str, sample["tokens"]))
        else:
            body = sample["text"]
        blocks.append(f"{head}\n{body}")
    return "\n".join(blocks)


def make_groups(options: SimpleNamespace) -> JsonObject:
    """Write the file of groups of one split."""
    output = Path(options.output)
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
    written = write_groups(ratios, options.split, output, shares)
    if not written:
        say(f"{output} is up to date")
    if options.split == "valid":
        groups = 1 + len(ratios)
    else:
        groups = 1
    return {
        "output": str(output),
        "groups": groups,
        "warning": warning,
        "already_complete": not written,
    }


def make_probabilities(options: SimpleNamespace) -> JsonObject:
    """Shares by size, to a file of ratios if one is named."""
    ratios = sampling_probabilities(options.prefixes, options.alpha)
    if options.output is not None:
        write_ratios(ratios, Path(options.output))
    return {"alpha": options.alpha, "ratios": [document(ratio) for ratio in ratios]}


def _probabilities(result: JsonObject) -> str:
    return "\n".join(f"{entry['ratio']:.6f}  {entry['dataset_path']}" for entry in result["ratios"])


def _groups_sentence(made: JsonObject) -> str:
    return f"{made['output']}: {made['groups']} group(s)"


COMMANDS: Mapping[str, Command] = {
    "inspect": (show_pair, describe),
    "check": (check, describe_check),
    "text": (show_text, _texts),
    "ratios": (make_groups, _groups_sentence),
    "probabilities": (make_probabilities, _probabilities),
}
