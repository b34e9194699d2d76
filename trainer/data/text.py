"""What a training read: the samples of a range of consumed samples, as tokens and as text.

The samples come from the card through the very code that feeds the training, so they are what it
saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import numpy as np

from trainer.config.card import TrainerConfig
from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data.dataset import BlendedDataset, DocumentSource, SampleSource, read_rows
from trainer.data.masked.of_card import masked_task
from trainer.data.stream import ReplicaShare, make_order
from trainer.data.tokenizer import Tokenizer
from trainer.schedule.path import path_of


class ReadSample(Record):
    """One sample: its place among the consumed ones, where it is from, its tokens, and their text
    if asked for.
    """

    consumed: int
    data_set: str
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None


def samples_of_iterations(config: TrainerConfig, first: int, last: int) -> tuple[int, int]:
    """The first and the last consumed sample (from 0) of iterations (from 1). Raises DataError
    outside the training.
    """
    path = path_of(config)
    if not 1 <= first <= last <= path.total_iterations:
        raise DataError(
            f"iterations {first}-{last} are not all in the training, which has 1-{path.total_iterations}"
        )
    return path.after_iteration(first - 1).consumed_samples, path.after_iteration(
        last
    ).consumed_samples - 1


def read_samples(
    config: TrainerConfig,
    source: SampleSource,
    first: int,
    last: int,
    *,
    replicas: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Iterator[ReadSample]:
    """Samples `first` to `last` of the training, in the order of consumption.

    The cyclic order depends on the number of data-parallel replicas, which the card does not hold.
    Raises DataError: a range outside the data, or no `replicas` for the cyclic order.
    """
    if config.data.order == "cyclic" and replicas is None:
        raise DataError(
            "data.order is cyclic: what was read depends on the number of replicas; give --replicas"
        )
    if config.data.order == "single" and last >= len(source):
        raise DataError(
            f"samples {first}-{last} are not all in the data, which has 0-{len(source) - 1}"
        )
    if tokenizer is None:
        task = None
    else:
        task = masked_task(config)
    names = {} if task is None else task.vocabulary.added
    cyclic = config.data.order == "cyclic"
    if cyclic:
        micro, count = (config.batch.micro_batch_size, replicas or 1)
    else:
        micro, count = (1, 1)
    shares = [ReplicaShare(len(source), micro, replica, count) for replica in range(count)]
    orders = [make_order(config.data.order, share) for share in shares]
    chunk = shares[0].chunk
    for begin in range(first // chunk * chunk, last + 1, chunk):
        parts = [order.numbers(begin) for order in orders]
        numbers = np.concatenate([part for part in parts if part is not None])
        for consumed, number in enumerate(numbers.tolist(), begin):
            if first <= consumed <= last:
                yield _read(source, consumed, number, tokenizer=tokenizer, names=names)


def _text(tokens: list[int], tokenizer: Tokenizer, names: Mapping[int, str]) -> str:
    """The tokens' text; what masked training adds to the vocabulary stands there by its name."""
    runs = groupby(tokens, key=names.__contains__)
    parts = []
    for is_added, run in runs:
        if is_added:
            parts += [names[token] for token in run]
        else:
            parts.append(tokenizer.decode(list(run)))
    return " ".join(parts)


def _read(
    source: SampleSource,
    consumed: int,
    number: int,
    tokenizer: Tokenizer | None,
    names: Mapping[int, str],
) -> ReadSample:
    tokens = source.row.tokens(read_rows(source, np.array([number]))[0]).tolist()
    member: SampleSource | DocumentSource = source
    place = number
    if isinstance(source, BlendedDataset):
        member, place = source.members[int(source.sets[number])], int(source.numbers[number])
    if not isinstance(member, DocumentSource):
        raise TypeError(f"{type(member).__name__} has no documents")
    documents = tuple(member.documents_of(place))
    if tokenizer is None:
        text = None
    else:
        text = _text(tokens, tokenizer, names)
    return ReadSample(consumed, member.prefix, documents, tokens=tuple(tokens), text=text)
