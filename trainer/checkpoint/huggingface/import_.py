"""A Hugging Face BLOOM folder as the source of a checkpoint: weights, masters equal to them, and empty moments."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.huggingface.export import CONFIG, INDEX, SINGLE, convert, used_rows
from trainer.checkpoint.huggingface.names import (
    DTYPES,
    HEAD,
    ROOT,
    WORDS,
    bloom_tensors,
    facts_of_bloom,
    shape_of_config,
)
from trainer.checkpoint.rewrite import row_blocks
from trainer.checkpoint.source import CheckpointFacts, Part, TensorFacts
from trainer.contract.checkpoints import CheckpointError
from trainer.parallel.agreement import one_line
from trainer.parallel.state import FRAGMENT_KINDS

TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_COMPARED_BYTES = 64 << 20
_FLOATS = {"BF16", "F16", "F32", "F64"}


class HuggingFaceModel:
    """A folder with a BLOOM, as a `TensorSource` of a training's first step (step 0)."""

    def __init__(self, folder: Path, dtype: str):
        """Open the folder; `dtype` (bf16, fp32, fp16) is what the weights shall have, masters are always fp32.

        Raises CheckpointError, naming the file, when it is not a BLOOM, incomplete, or damaged as far as headers tell.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give the folder of a Hugging Face model")
        self.shape = shape_of_config(_read_json(folder / CONFIG), str(folder / CONFIG))
        self._tensors = bloom_tensors(self.shape)
        self._dtype = DTYPES[dtype]
        self._files = _open_files(folder)
        self._stored_rows = self.shape.vocabulary_size
        self._names = self._match_names(folder)
        self._facts = CheckpointFacts(
            step=0,
            layout="huggingface",
            topology={"pipeline": 1, "data": 1, "tensor": 1},
            model={**facts_of_bloom(self.shape), "precision.dtype": dtype},
            cursor={},
            optimizer_step=0,
        )

    def with_rows(self, rows: int) -> Self:
        """The same model with `rows` rows of the vocabulary: padding is of zeros, and only zeros are cut off.

        The logits of the tokens are unchanged; those of padding are 0. Raises CheckpointError when a row that would
        be cut off is not empty.
        """
        if rows < self._stored_rows and (used := used_rows(self, rows)) > rows:
            raise CheckpointError(
                f"{self._files[self._names[WORDS]].path}: row {used - 1} of the vocabulary is not empty, and the run"
                f" card has {rows} rows; set tokenizer.padded_vocabulary_size = {self._stored_rows}"
            )
        padded = copy(self)
        padded.shape = replace(self.shape, vocabulary_size=rows)
        padded._tensors = bloom_tensors(padded.shape)
        padded._facts = replace(self._facts, model={**self._facts.model, **facts_of_bloom(padded.shape)})
        return padded

    @property
    def padding_rows(self) -> int:
        """Rows that were added to those of the files; negative where empty ones were cut off."""
        return self.shape.vocabulary_size - self._stored_rows

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
        stored = min(sizes[0], self._stored_rows - offsets[0]) if name == WORDS else sizes[0]
        if stored == sizes[0]:
            values = self._files[self._names[name]].read(self._names[name], offsets, sizes)
        else:
            values = torch.zeros(tuple(sizes))
            if stored > 0:
                values[:stored] = self.read("optimizer", f"{name}/fp32", offsets, (stored, *sizes[1:]))
        return convert(name, values, self._dtype if part == "weights" else torch.float32)

    def _match_names(self, folder: Path) -> dict[str, str]:
        """The name in the files of each of our tensors; checks names, shapes, and that the head is tied."""
        root = ROOT if any(name.startswith(ROOT) for name in self._files) else ""
        names = {ours: root + theirs.name for ours, theirs in self._tensors.items()}
        for ours, theirs in names.items():
            if theirs not in self._files:
                raise CheckpointError(f"{folder} has no tensor {theirs}; a part of the model is missing")
            found = self._files[theirs].shape(theirs)
            if found != self._tensors[ours].shape:
                raise CheckpointError(
                    f"{self._files[theirs].path}: {theirs} has shape {found}, {CONFIG} says {self._tensors[ours].shape}"
                )
        extra = sorted(set(self._files) - set(names.values()) - {HEAD})
        if extra:
            raise CheckpointError(f"{self._files[extra[0]].path}: {extra[0]} is no part of a BLOOM language model")
        if HEAD in self._files:
            self._check_tied(names[WORDS])
        return names

    def _check_tied(self, embedding: str) -> None:
        facts = TensorFacts(self._tensors[WORDS].shape, torch.float32)
        head, words = self._files[HEAD], self._files[embedding]
        if head.shape(HEAD) != facts.shape or not all(
            torch.equal(head.read(HEAD, *block), words.read(embedding, *block))
            for block in row_blocks(facts, _COMPARED_BYTES)
        ):
            raise CheckpointError(f"{head.path}: {HEAD} differs from {embedding}; they are one weight in this model")


class _TensorFile(Protocol):
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
            raise CheckpointError(f"{path} cannot be read ({one_line(error)}); copy it again") from None

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
        rectangle = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        return self._file.get_slice(name)[rectangle].clone(memory_format=torch.contiguous_format)


class _TorchFile:
    """One pytorch_model*.bin, mapped into memory; nothing in it can run code."""

    def __init__(self, path: Path):
        self.path = path
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is damaged, or of a torch before 1.6; copy it again, or convert it")
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # the unpickler raises almost anything over a damaged or foreign file
            raise CheckpointError(f"{path} cannot be read ({one_line(error)}); copy it again") from None
        if not isinstance(self._tensors, dict) or not all(isinstance(item, Tensor) for item in self._tensors.values()):
            raise CheckpointError(f"{path} holds something else than tensors by name; it is not a model's file")

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._tensors[name].is_floating_point():
            raise CheckpointError(f"{self.path}: {name} is {self._tensors[name].dtype}; only unquantised models fit")
        return tuple(self._tensors[name].shape)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        rectangle = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
        return self._tensors[name][rectangle].clone(memory_format=torch.contiguous_format)


def _open_files(folder: Path) -> dict[str, _TensorFile]:
    """The file of each tensor in the folder. Raises CheckpointError when one is missing or damaged."""
    for index, single, kind in ((INDEX, SINGLE, _SafetensorsFile), (TORCH_INDEX, TORCH_SINGLE, _TorchFile)):
        if (folder / index).is_file():
            return _open_indexed(folder, index, kind)
        if (folder / single).is_file():
            file: _TensorFile = kind(folder / single)
            return dict.fromkeys(file.names(), file)
    raise CheckpointError(f"{folder} has none of {SINGLE}, {INDEX}, {TORCH_SINGLE}, {TORCH_INDEX}; it holds no model")


def _open_indexed(folder: Path, index: str, kind: type[_SafetensorsFile] | type[_TorchFile]) -> dict[str, _TensorFile]:
    places = _read_json(folder / index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / index} has no weight_map; copy it again")
    opened: dict[str, _TensorFile] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{folder / index} names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing, {index} names it; copy it again")
        opened[name] = kind(folder / name)
    held = {name: set(file.names()) for name, file in opened.items()}
    for tensor, name in places.items():
        if tensor not in held[name]:
            raise CheckpointError(f"{folder / name} has no tensor {tensor}, {index} says it has; copy it again")
    return {tensor: opened[name] for tensor, name in places.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; copy it again")
    return value
