"""A Hugging Face folder as the source of a checkpoint: weights, masters equal to them, and empty moments.

What is common to all architectures, and BLOOM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import Tensor

from trainer.checkpoint.huggingface.export import CONFIG, convert, used_rows
from trainer.checkpoint.huggingface.names import (
    DTYPES,
    HEAD,
    ROOT,
    ROWS_KEY,
    WORDS,
    bloom_tensors,
    facts_of_bloom,
    shape_of_config,
)
from trainer.checkpoint.huggingface.tensor_files import open_files, read_json
from trainer.checkpoint.rewrite import row_blocks
from trainer.checkpoint.source import CheckpointFacts, Part, TensorFacts
from trainer.contract.errors import CheckpointError
from trainer.contract.record import Record
from trainer.parallel.state import FRAGMENT_KINDS

_COMPARED_BYTES = 64 << 20


class ImportedTensor(Record):
    """One of our tensors: its whole shape, and the names of the files' tensors that it is made of.

    Of several (query, key and value) its rows are [groups, parts, head size], of which each has so many as `counts`
    says. Without groups they are matrices that lie one behind the other.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    groups: int = 0
    counts: tuple[int, ...] = ()

    def stored(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each of theirs."""
        if len(self.names) == 1:
            yield self.names[0], self.shape
        elif not self.groups:
            yield from ((name, self.shape[1:]) for name in self.names)
        else:
            unit = self.shape[0] // sum(self.counts)
            for name, count in zip(self.names, self.counts, strict=True):
                yield name, (count * unit, *self.shape[1:])


class HuggingFaceFolder(ABC):
    """A folder with a model, as a `TensorSource` of a training's first step (step 0)."""

    kind: str
    vocabulary: frozenset[str] = frozenset({WORDS})
    """Our tensors whose rows are those of the vocabulary."""

    def __init__(self, folder: Path, dtype: str):
        """Open the folder; `dtype` (bf16, fp32, fp16) is what the weights shall have, masters are always fp32.

        Raises CheckpointError, naming the file, when it is another model, incomplete, or damaged as far as headers say.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder of a Hugging Face model")
        facts = self.describe(read_json(folder / CONFIG), str(folder / CONFIG))
        self._dtype = DTYPES[dtype]
        self._files = open_files(folder)
        self._tensors = self.tensors_of(facts, set(self._files))
        self._stored_rows: int = facts[ROWS_KEY]
        self._facts = CheckpointFacts(
            step=0,
            layout="huggingface",
            topology={"pipeline": 1, "data": 1, "tensor": 1},
            model={**facts, "precision.dtype": dtype},
            cursor={},
            optimizer_step=0,
        )
        self._check_names(folder)

    @abstractmethod
    def describe(self, config: dict[str, Any], path: str) -> dict[str, Any]:
        """The model's facts, under the card's keys, of its config.json. Raises CheckpointError for another model."""

    @abstractmethod
    def tensors_of(self, facts: Mapping[str, Any], present: set[str]) -> dict[str, ImportedTensor]:
        """Our tensors by name, given the names in the files."""

    @abstractmethod
    def copies(self) -> dict[str, str]:
        """Names in the files of tensors that may repeat one of ours, which is tied."""

    def is_passed_over(self, name: str) -> bool:
        """Whether a tensor of the files is no weight."""
        return False

    def with_rows(self, rows: int) -> Self:
        """The same model with `rows` rows of the vocabulary: padding is of zeros, and only zeros are cut off.

        The logits of the tokens are unchanged; those of padding are 0. Raises CheckpointError when a row that would
        be cut off is not empty.
        """
        used = max((used_rows(self, rows, key) for key in self.vocabulary), default=0)
        if rows < self._stored_rows and used > rows:
            raise CheckpointError(
                f"{self._path_of(WORDS)}: row {used - 1} of the vocabulary is not empty, and the run"
                f" card has {rows} rows; set tokenizer.padded_vocabulary_size = {self._stored_rows}"
            )
        padded = copy(self)
        padded._tensors = {
            key: replace(tensor, shape=(rows, *tensor.shape[1:])) if key in self.vocabulary else tensor
            for key, tensor in self._tensors.items()
        }
        padded._facts = replace(self._facts, model={**self._facts.model, ROWS_KEY: rows})
        return padded

    @property
    def rows(self) -> int:
        """Rows of the vocabulary, padding included."""
        return self._tensors[WORDS].shape[0]

    @property
    def padding_rows(self) -> int:
        """Rows that were added to those of the files; negative where empty ones were cut off."""
        return self.rows - self._stored_rows

    @property
    def facts(self) -> CheckpointFacts:
        return self._facts

    def tensors(self, part: Part) -> Mapping[str, TensorFacts]:
        if part == "weights":
            return {key: TensorFacts(tensor.shape, self._dtype) for key, tensor in self._tensors.items()}
        return {
            f"{key}/{kind}": TensorFacts(tensor.shape, torch.float32)
            for key, tensor in self._tensors.items()
            for kind in FRAGMENT_KINDS
        }

    def read(self, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        name, _, kind = key.partition("/")
        if part == "optimizer" and kind != "fp32":
            return torch.zeros(tuple(sizes))
        tensor = self._tensors[name]
        stored = min(sizes[0], self._stored_rows - offsets[0]) if name in self.vocabulary else sizes[0]
        if tensor.groups and len(tensor.names) > 1:
            values = self._read_fused(tensor, offsets, sizes)
        elif len(tensor.names) > 1:
            values = self._read_stacked(tensor, offsets, sizes)
        elif stored == sizes[0]:
            values = self._files[tensor.names[0]].read(tensor.names[0], offsets, sizes)
        else:
            values = torch.zeros(tuple(sizes))
            if stored > 0:
                values[:stored] = self.read("optimizer", f"{name}/fp32", offsets, (stored, *sizes[1:]))
        return convert(name, values, self._dtype if part == "weights" else torch.float32)

    def _read_fused(self, tensor: ImportedTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Rows of ours, [groups, parts, head size], from those of theirs, [groups, some parts, head size] each."""
        size = tensor.shape[0] // (tensor.groups * sum(tensor.counts))
        ends = [size * end for end in accumulate(tensor.counts)]
        pieces, row, end = [], offsets[0], offsets[0] + sizes[0]
        while row < end:
            group, within = divmod(row, ends[-1])
            which = bisect_right(ends, within)
            height = size * tensor.counts[which]
            rows = min(ends[which] - within, end - row)
            name, begin = tensor.names[which], (group + 1) * height - (ends[which] - within)
            pieces.append(self._files[name].read(name, (begin, *offsets[1:]), (rows, *sizes[1:])))
            row += rows
        return torch.cat(pieces)

    def _read_stacked(self, tensor: ImportedTensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        names = tensor.names[offsets[0] : offsets[0] + sizes[0]]
        return torch.stack([self._files[name].read(name, offsets[1:], sizes[1:]) for name in names])

    def _check_names(self, folder: Path) -> None:
        """Names and shapes, that nothing else is there, and that what is tied is the same."""
        wanted = {name: shape for tensor in self._tensors.values() for name, shape in tensor.stored()}
        for name, shape in wanted.items():
            if name not in self._files:
                raise CheckpointError(f"{folder} has no tensor {name}; a part of the model is missing")
            found = self._files[name].shape(name)
            if found != shape:
                raise CheckpointError(f"{self._files[name].path}: {name} has shape {found}, {CONFIG} says {shape}")
        copies = self.copies()
        extra = sorted(
            name for name in self._files if name not in wanted and name not in copies and not self.is_passed_over(name)
        )
        if extra:
            raise CheckpointError(f"{self._files[extra[0]].path}: {extra[0]} is no part of a {self.kind}")
        for name, key in copies.items():
            if name in self._files:
                self._check_tied(name, key)

    def _check_tied(self, repeated: str, key: str) -> None:
        own = self._tensors[key].names[0]
        facts = TensorFacts(self._tensors[key].shape, torch.float32)
        head, words = self._files[repeated], self._files[own]
        if head.shape(repeated) != facts.shape or not all(
            torch.equal(head.read(repeated, *block), words.read(own, *block))
            for block in row_blocks(facts, _COMPARED_BYTES)
        ):
            raise CheckpointError(f"{head.path}: {repeated} differs from {own}; they are one weight in this model")

    def _path_of(self, key: str) -> Path:
        return self._files[self._tensors[key].names[0]].path


class HuggingFaceModel(HuggingFaceFolder):
    """A BLOOM."""

    kind = "BLOOM language model"

    def describe(self, config: dict[str, Any], path: str) -> dict[str, Any]:
        self.shape = shape_of_config(config, path)
        return facts_of_bloom(self.shape)

    def tensors_of(self, facts: Mapping[str, Any], present: set[str]) -> dict[str, ImportedTensor]:
        root = ROOT if any(name.startswith(ROOT) for name in present) else ""
        return {
            ours: ImportedTensor(theirs.shape, (root + theirs.name,))
            for ours, theirs in bloom_tensors(self.shape).items()
        }

    def copies(self) -> dict[str, str]:
        return {HEAD: WORDS}
