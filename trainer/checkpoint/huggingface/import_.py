"""A Hugging Face folder as the source of a checkpoint: weights, masters equal to them, and empty
moments. The inverse of the export.
"""

from __future__ import annotations

import json
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.huggingface.export import convert, used_rows
from trainer.checkpoint.huggingface.mapped import (
    ROWS_KEY,
    VOCABULARY,
    WORDS,
    Architecture,
    MappedTensor,
    shape_of,
)
from trainer.checkpoint.rewrite import row_blocks
from trainer.checkpoint.source import DTYPES, CheckpointFacts, Part, TensorFacts
from trainer.contract.checkpoint_formats import (
    HF_CONFIG,
    HF_INDEX,
    HF_SINGLE,
    HF_TORCH_INDEX,
    HF_TORCH_SINGLE,
    HUGGING_FACE,
)
from trainer.contract.errors import CheckpointError
from trainer.contract.record import JsonObject, Record
from trainer.parallel.agreement import one_line
from trainer.parallel.state import FRAGMENT_KINDS

_FLOATS = {"BF16", "F16", "F32", "F64"}


class TensorFile(Record):
    """One file of tensors by name. `part_of`: what gives the shape, the type and parts of one, as a
    tensor does; nothing in the file can run code.
    """

    path: Path
    names: tuple[str, ...]
    part_of: Callable[[str], Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError for anything but floating-point numbers."""
        found = self.part_of(name)
        if isinstance(found, Tensor):
            dtype = str(found.dtype)
            shape = found.shape
            is_float = found.is_floating_point()
        else:
            dtype = found.get_dtype()
            shape = found.get_shape()
            is_float = dtype in _FLOATS
        if not is_float:
            raise CheckpointError(
                f"{self.path}: {name} is {dtype}; only unquantised models can be imported"
            )
        return tuple(shape)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A copy of this part of a tensor."""
        part = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        found: Tensor = self.part_of(name)[part].clone(memory_format=torch.contiguous_format)
        return found


def _open_safetensors(path: Path) -> TensorFile:
    """Checks that the file's length is what its header says."""
    try:
        file = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({one_line(error)}); copy it again") from None
    return TensorFile(path, tuple(file.keys()), file.get_slice)


def _open_torch(path: Path) -> TensorFile:
    """One pytorch_model*.bin, mapped into memory."""
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is damaged, or of a torch before 1.6; copy it again, or convert it"
        )
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the unpickler raises almost anything over a damaged file
        raise CheckpointError(f"{path} cannot be read ({one_line(error)}); copy it again") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(item, Tensor) for item in tensors.values()
    ):
        raise CheckpointError(
            f"{path} holds something else than tensors by name; it is not a model's file"
        )
    return TensorFile(path, tuple(tensors), tensors.__getitem__)


def open_files(folder: Path) -> dict[str, TensorFile]:
    """The file of each tensor in the folder. Raises CheckpointError when one is missing or damaged."""
    for index, single, open_file in (
        (HF_INDEX, HF_SINGLE, _open_safetensors),
        (HF_TORCH_INDEX, HF_TORCH_SINGLE, _open_torch),
    ):
        if (folder / index).is_file():
            return _open_indexed(folder, index, open_file)
        if (folder / single).is_file():
            file = open_file(folder / single)
            return dict.fromkeys(file.names, file)
    raise CheckpointError(
        f"{folder} has none of {', '.join(HUGGING_FACE.marks)}; it holds no model"
    )


def _open_indexed(
    folder: Path, index: str, open_file: Callable[[Path], TensorFile]
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
        opened[name] = open_file(folder / name)
    held = {name: set(file.names) for name, file in opened.items()}
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


class HuggingFaceFolder:
    """A folder with a model, as a `TensorSource` of a training's first step (step 0)."""

    def __init__(self, folder: Path, theirs: Architecture, dtype: str):
        """Open the folder of a model that is `theirs`; `dtype` (bf16, fp32, fp16) is what the
        weights shall have, masters are always fp32.

        Raises CheckpointError, naming the file, when it is another model, incomplete, or damaged as
        far as headers say.
        """
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder; give the folder of a Hugging Face model"
            )
        assert theirs.facts is not None
        facts = theirs.facts(read_json(folder / HF_CONFIG), str(folder / HF_CONFIG))
        self._theirs = theirs
        self._dtype = DTYPES[dtype]
        self._files = open_files(folder)
        self._tensors = _tensors_of(theirs, facts, self._files)
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

    def with_rows(self, rows: int) -> Self:
        """The same model with `rows` rows of the vocabulary: padding is of zeros, and only zeros
        are cut off.

        The logits of the tokens are unchanged; those of padding are 0. Raises CheckpointError when
        a row that would be cut off is not empty.
        """
        used = max(used_rows(self, rows, key) for key in VOCABULARY if key in self._tensors)
        if rows < self._stored_rows and used > rows:
            path = self._files[self._tensors[WORDS].names[0]].path
            raise CheckpointError(
                f"{path}: row {used - 1} of the vocabulary is not empty, and the run"
                f" card has {rows} rows; set tokenizer.padded_vocabulary_size = {self._stored_rows}"
            )
        padded = copy(self)
        padded._tensors = {
            key: replace(tensor, shape=(rows, *tensor.shape[1:])) if key in VOCABULARY else tensor
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
        if name in VOCABULARY:
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
        pieces = []
        row = offsets[0]
        end = offsets[0] + sizes[0]
        while row < end:
            group, within = divmod(row, ends[-1])
            which = bisect_right(ends, within)
            height = size * tensor.counts[which]
            rows = min(ends[which] - within, end - row)
            name = tensor.names[which]
            begin = (group + 1) * height - (ends[which] - within)
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
                    f"{self._files[name].path}: {name} has shape {found}, {HF_CONFIG} says {shape}"
                )
        copies = {name: key for name, key in self._theirs.copies.items() if name not in wanted}
        extra = sorted(
            name
            for name in self._files.keys() - wanted.keys() - copies.keys()
            if not name.endswith(self._theirs.ignored)
        )
        if extra:
            raise CheckpointError(
                f"{self._files[extra[0]].path}: {extra[0]} is no part of a {self._theirs.kind}"
            )
        for name, key in copies.items():
            if name in self._files:
                self._check_tied(name, key)

    def _check_tied(self, repeated: str, key: str) -> None:
        own = self._tensors[key].names[0]
        facts = TensorFacts(self._tensors[key].shape, torch.float32)
        head = self._files[repeated]
        words = self._files[own]
        if head.shape(repeated) != facts.shape or not all(
            torch.equal(head.read(repeated, *block), words.read(own, *block))
            for block in row_blocks(facts, _COMPARED_BYTES)
        ):
            raise CheckpointError(
                f"{head.path}: {repeated} differs from {own}; they are one weight in this model"
            )


def _tensors_of(
    theirs: Architecture, facts: Mapping[str, Any], present: Iterable[str]
) -> dict[str, ImportedTensor]:
    """Our tensors by name, given the names in the files."""
    root = ""
    if not any(name.startswith(theirs.root) for name in present):
        root = theirs.root
    parts: dict[str, dict[str, MappedTensor]] = {}
    for name, item in theirs.tensors(facts).items():
        parts.setdefault(item.key, {})[name.removeprefix(root)] = item
    groups = facts.get("model.key_value_heads", facts["model.attention_heads"])
    return {
        key: ImportedTensor(
            shape_of(key, facts),
            tuple(own),
            0 if any(item.is_stacked for item in own.values()) else groups,
            tuple(item.count for item in own.values()),
        )
        for key, own in parts.items()
    }
