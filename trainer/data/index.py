"""Documents -> shuffled samples of fixed length: the three index maps of GPT training, in numpy
alone.

* document index int32 [epochs * documents]: the documents of every epoch, shuffled.
* sample index int32 (int64 when needed) [samples + 1, 2]: where each sample begins, as (position in the document
  index, token in that document). A sample has `sequence_length + 1` tokens and shares the last one with its successor.
* shuffle index uint32 (int64 when needed) [samples]: the order in which samples are used.

The draws of randomness and every rounding follow Megatron's, so the same data and seed give the
same order of samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError
from trainer.contract.record import Record

# The last epoch is kept apart when less than this share of it is needed; Megatron's later versions
# use 0.80.
LAST_EPOCH_SHARE = 0.95
DOCUMENTS_AT_ONCE = 1 << 16

IntArray = npt.NDArray[Any]


class IndexMaps(Record):
    """The three maps, see the module. `len(samples) - 1 == len(shuffle)`."""

    documents: IntArray
    samples: IntArray
    shuffle: IntArray

    def __len__(self) -> int:
        """Samples in the maps: at least as many as were asked for."""
        return len(self.shuffle)


class EpochPlan(Record):
    """How often the data is passed through, and whether the last pass is shuffled by itself."""

    tokens_per_epoch: int
    epochs: int
    separate_last: bool
    samples_before_last: int


def plan_epochs(
    tokens_per_epoch: int,
    samples: int,
    sequence_length: int,
    last_epoch_share: float = LAST_EPOCH_SHARE,
) -> EpochPlan:
    """The least number of epochs that holds `samples`, and whether its last epoch is kept apart.

    Raises DataError when one epoch holds less than one sample, or no sample is asked for.
    """
    if samples < 1:
        raise DataError(f"{samples} samples asked of the data; ask for at least 1")
    if tokens_per_epoch < sequence_length + 1:
        raise DataError(
            f"the data has {tokens_per_epoch} tokens, one sample needs sequence_length + 1 = {sequence_length + 1}:"
            " give more data, a larger part of it, or a shorter sequence"
        )
    # Least n with (n * tokens - 1) // length >= samples.
    epochs = -(-(samples * sequence_length + 1) // tokens_per_epoch)
    if epochs == 1:
        return EpochPlan(tokens_per_epoch, 1, False, 0)
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // sequence_length
    needed_of_last = samples - before_last
    per_epoch = (tokens_per_epoch - 1) // sequence_length
    separate = needed_of_last < int(last_epoch_share * per_epoch)
    return EpochPlan(tokens_per_epoch, epochs, separate, before_last)


def build_document_index(
    documents: IntArray, epochs: int, random: np.random.RandomState, separate_last: bool
) -> npt.NDArray[np.int32]:
    """The documents of all epochs, shuffled together; the last epoch by itself if it is kept apart.

    documents: numbers of the documents of the split [n]. Returns int32 [epochs * n].
    """
    if separate_last and epochs > 1:
        first = build_document_index(documents, epochs - 1, random, False)
        return np.concatenate((first, build_document_index(documents, 1, random, False)))
    index = np.tile(np.asarray(documents, dtype=np.int32), epochs)
    random.shuffle(index)
    return index


def build_sample_index(sizes: IntArray, document_index: IntArray, sequence_length: int) -> IntArray:
    """Where each sample begins when the documents are laid end to end.

    sizes: tokens of every document of the data set, by document number. Returns [samples + 1, 2].
    Sample i begins at token i * sequence_length of the row of documents; each document holds as
    many beginnings as multiples of the sequence length fall into it, so counting them replaces the
    walk from sample to sample.
    """
    lengths = np.take(np.asarray(sizes), document_index)
    samples = (int(np.sum(lengths, dtype=np.int64)) - 1) // sequence_length
    longest = int(np.max(lengths))
    most = np.iinfo(np.int32).max
    result = np.empty(
        (samples + 1, 2), dtype=np.int32 if max(len(document_index), longest) <= most else np.int64
    )
    # Piece by piece, so that all stays in the caches, and in 32 bits, which halves the time.
    small = longest * DOCUMENTS_AT_ONCE + sequence_length <= most
    first = tokens = 0
    for document in range(0, len(lengths), DOCUMENTS_AT_ONCE):
        held = lengths[document : document + DOCUMENTS_AT_ONCE]
        ends = np.cumsum(held, dtype=np.int32 if small else np.int64)
        count = _begin_samples(
            result[first:], held, ends, begin=first * sequence_length - tokens, step=sequence_length
        )
        result[first : first + count, 0] += document
        first += count
        tokens += int(ends[-1])
    result[0] = 0  # the walk begins at the first document even when that one is empty
    return result


def _begin_samples(rows: IntArray, lengths: IntArray, ends: IntArray, begin: int, step: int) -> int:
    """Fill `rows` with (document, token) of the beginnings at `begin`, `begin + step`, ...; returns
    how many there are.

    lengths: tokens of some documents laid end to end; ends: where each ends. 0 <= begin < step.
    """
    count = max(0, -(-(int(ends[-1]) - begin) // step))
    if not count:
        return 0
    # For each document the number of the first beginning that is not in it, nor before it. A
    # beginning lies in the first document for which that number is larger, so it is enough to count
    # the numbers.
    beyond = ends + (step - 1 - begin)
    beyond //= step
    positions = np.cumsum(np.bincount(beyond, minlength=count)[:count])
    within = np.arange(begin, begin + count * step, step, dtype=ends.dtype)
    within -= ends.take(positions)
    within += lengths.take(positions)
    rows[:count, 0] = positions
    rows[:count, 1] = within
    return count


def build_shuffle_index(first: int, total: int, random: np.random.RandomState) -> IntArray:
    """A permutation of 0..first-1 followed by one of first..total-1 [total]."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    head = np.arange(first, dtype=dtype)
    random.shuffle(head)
    if first == total:
        return head
    tail = np.arange(first, total, dtype=dtype)
    random.shuffle(tail)
    return np.concatenate((head, tail))


def build_index_maps(
    sizes: IntArray,
    documents: range,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    last_epoch_share: float = LAST_EPOCH_SHARE,
) -> IndexMaps:
    """All three maps for a range of documents, holding at least `samples` samples.

    One generator, `RandomState(seed)`, shuffles the documents first and the samples after them.
    Raises DataError as `plan_epochs` does.
    """
    numbers = np.arange(documents.start, documents.stop, dtype=np.int32)
    tokens = int(np.sum(sizes[documents.start : documents.stop], dtype=np.int64))
    plan = plan_epochs(tokens, samples, sequence_length, last_epoch_share)
    random = np.random.RandomState(seed)
    document_index = build_document_index(numbers, plan.epochs, random, plan.separate_last)
    sample_index = build_sample_index(sizes, document_index, sequence_length)
    total = len(sample_index) - 1
    first = plan.samples_before_last if plan.separate_last else total
    return IndexMaps(document_index, sample_index, build_shuffle_index(first, total, random))
