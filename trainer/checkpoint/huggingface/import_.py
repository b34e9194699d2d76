"""A Hugging Face folder as the source of a checkpoint: weights, masters equal to them, and empty
moments.

What is common to all architectures, and BLOOM.
"""

from __future__ import annotations

import json
import zipfile
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.huggingface.export import CONFIG, INDEX, SINGLE, convert, used_rows
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
from trainer.checkpoint.rewrite import row_blocks
from trainer.checkpoint.source import CheckpointFacts, Part, TensorFacts
from trainer.contract.errors import CheckpointError
from trainer.contract.record import JsonObject, Record
from trainer.parallel.agreement import one_line
from trainer.parallel.state import FRAGMENT_KINDS

# The files of a Hugging Face folder: its JSON, and each tensor in safetensors or torch's own
# format, one or many.

TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_FLOATS = {"BF16", "F16", "F32", "F64"}


class TensorFile(Protocol):
    path: Path

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor: ...


class _SafetensorsFile:
    """One .safetensors file; opening it checks that its length is what its header says."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({one_line(error)}); copy it again"
            ) from None

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._file.get_slice(name)
        if found.get_dtype() not in _FLOATS:
            raise CheckpointError(
                f"{self.path}: {name} is {found.get_dtype()}; only unquantised models can be imported"
            )
        return tuple(found.get_shape())

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return _rectangle(self._file.get_slice(name), offsets, sizes)


def _rectangle(source: Any, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A copy of this part of a tensor, or of what gives parts of one as a tensor does."""
    part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
    copy: Tensor = source[part].clone(memory_format=torch.contiguous_format)
    return copy


class _TorchFile:
    """One pytorch_model*.bin, mapped into memory; nothing in it can run code."""

    def __init__(self, path: Path):
        self.path = path
        if not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path} is damaged, or of a torch before 1.6; copy it again, or convert it"
            )
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (
            Exception
        ) as error:  # the unpickler raises almost anything over a damaged or foreign file
            raise CheckpointError(
                f"{path} cannot be read ({one_line(error)}); copy it again"
            ) from None
        if not isinstance(self._tensors, dict) or not all(
            isinstance(item, Tensor) for item in self._tensors.values()
        ):
            raise CheckpointError(
                f"{path} holds something else than tensors by name; it is not a model's file"
            )

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._tensors[name].is_floating_point():
            raise CheckpointError(
                f"{self.path}: {name} is {self._tensors[name].dtype}; only unquantised models fit"
            )
        return tuple(self._tensors[name].shape)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return _rectangle(self._tensors[name], offsets, sizes)


def open_files(folder: Path) -> dict[str, TensorFile]:
    """The file of each tensor in the folder. Raises CheckpointError when one is missing or damaged."""
    for index, single, kind in (
        (INDEX, SINGLE, _SafetensorsFile),
        (TORCH_INDEX, TORCH_SINGLE, _TorchFile),
    ):
        if (folder / index).is_file():
            return _open_indexed(folder, index, kind)
        if (folder / single).is_file():
            file: TensorFile = kind(folder / single)
            return dict.fromkeys(file.names(), file)
    raise CheckpointError(
        f"{folder} has none of {SINGLE}, {INDEX}, {TORCH_SINGLE}, {TORCH_INDEX}; it holds no model"
    )


def _open_indexed(
    folder: Path, index: str, kind: type[_SafetensorsFile] | type[_TorchFile]
) -> dict[str, TensorFile]:
    places = read_json(folder / index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / index} has no weight_map; copy it again")
    opened: dict[str, TensorFile] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointError(
                f"{folder / index} names {name!r}, which is not a file of this folder"
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing, {index} names it; copy it again")
        opened[name] = kind(folder / name)
    held = {name: set(file.names()) for name, file in opened.items()}
    for tensor, name in places.items():
        if tensor not in held[name]:
            raise CheckpointError(
                f"{folder / name} has no tensor {tensor}, {index} says it has; copy it again"
            )
    return {tensor: opened[name] for tensor, name in places.items()}


def read_json(path: Path) -> JsonObject:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; give the folder of a Hugging Face model"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; copy it again")
    return value


_COMPARED_BYTES = 64 << 20


class ImportedTensor(Record):
    """One of our tensors: its whole shape, and the names of the files' tensors that it is made of.

    Of several (query, key and value) its rows are [groups, parts, head size], of which each has so
    many as `counts` says. Without groups they are matrices that lie one behind the other.
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
        """Open the folder; `dtype` (bf16, fp32, fp16) is what the weights shall have, masters are
        always fp32.

        Raises CheckpointError, naming the file, when it is another model, incomplete, or damaged as
        far as headers say.
        """
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder; give the folder of a Hugging Face model"
            )
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
    def describe(self, config: JsonObject, path: str) -> JsonObject:
        """The model's facts, under the card's keys, of its config.json. Raises CheckpointError for
        another model.
        """

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
        """The same model with `rows` rows of the vocabulary: padding is of zeros, and only zeros
        are cut off.

        The logits of the tokens are unchanged; those of padding are 0. Raises CheckpointError when
        a row that would be cut off is not empty.
        """
        used = max((used_rows(self, rows, key) for key in self.vocabulary), default=0)
        if rows < self._stored_rows and used > rows:
            path = self._files[self._tensors[WORDS].names[0]].path
            raise CheckpointError(
                f"{path}: row {used - 1} of the vocabulary is not empty, and the run"
                f" card has {rows} rows; set tokenizer.padded_vocabulary_size = {self._stored_rows}"
            )
        padded = copy(self)
        padded._tensors = {
            key: replace(tensor, shape=(rows, *tensor.shape[1:]))
            if key in self.vocabulary
            else tensor
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
            return {
                key: TensorFacts(tensor.shape, self._dtype) for key, tensor in self._tensors.items()
            }
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
        if name in self.vocabulary:
            stored = min(sizes[0], self._stored_rows - offsets[0])
        else:
            stored = sizes[0]
        if tensor.groups and len(tensor.names) > 1:
            values = self._read_fused(tensor, offsets, sizes)
        elif len(tensor.names) > 1:
            values = self._read_stacked(tensor, offsets, sizes)
        elif stored == sizes[0]:
            values = self._files[tensor.names[0]].read(tensor.names[0], offsets, sizes)
        else:
            values = torch.zeros(tuple(sizes))
            if stored > 0:
                values[:stored] = self.read(
                    "optimizer", f"{name}/fp32", offsets, (stored, *sizes[1:])
                )
        return convert(name, values, self._dtype if part == "weights" else torch.float32)

    def _read_fused(
        self, tensor: ImportedTensor, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        """Rows of ours, [groups, parts, head size], from those of theirs, [groups, some parts, head
        size] each.
        """
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

    def _read_stacked(
        self, tensor: ImportedTensor, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Tensor:
        names = tensor.names[offsets[0] : offsets[0] + sizes[0]]
        return torch.stack([self._files[name].read(name, offsets[1:], sizes[1:]) for name in names])

    def _check_names(self, folder: Path) -> None:
        """Names and shapes, that nothing else is there, and that what is tied is the same."""
        wanted = {
            name: shape for tensor in self._tensors.values() for name, shape in tensor.stored()
        }
        for name, shape in wanted.items():
            if name not in self._files:
                raise CheckpointError(
                    f"{folder} has no tensor {name}; a part of the model is missing"
                )
            found = self._files[name].shape(name)
            if found != shape:
                raise CheckpointError(
                    f"{self._files[name].path}: {name} has shape {found}, {CONFIG} says {shape}"
                )
        copies = self.copies()
        extra = sorted(
            name
            for name in self._files
            if name not in wanted and name not in copies and not self.is_passed_over(name)
        )
        if extra:
            raise CheckpointError(
                f"{self._files[extra[0]].path}: {extra[0]} is no part of a {self.kind}"
            )
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
            raise CheckpointError(
                f"{head.path}: {repeated} differs from {own}; they are one weight in this model"
            )


class HuggingFaceModel(HuggingFaceFolder):
    """A BLOOM."""

    kind = "BLOOM language model"

    def describe(self, config: JsonObject, path: str) -> JsonObject:
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
