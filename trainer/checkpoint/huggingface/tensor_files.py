"""The files of a Hugging Face folder: its JSON, and each tensor in safetensors or torch's own format, one or many."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.huggingface.export import INDEX, SINGLE
from trainer.contract.errors import CheckpointError
from trainer.parallel.agreement import one_line

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


def open_files(folder: Path) -> dict[str, TensorFile]:
    """The file of each tensor in the folder. Raises CheckpointError when one is missing or damaged."""
    for index, single, kind in ((INDEX, SINGLE, _SafetensorsFile), (TORCH_INDEX, TORCH_SINGLE, _TorchFile)):
        if (folder / index).is_file():
            return _open_indexed(folder, index, kind)
        if (folder / single).is_file():
            file: TensorFile = kind(folder / single)
            return dict.fromkeys(file.names(), file)
    raise CheckpointError(f"{folder} has none of {SINGLE}, {INDEX}, {TORCH_SINGLE}, {TORCH_INDEX}; it holds no model")


def _open_indexed(folder: Path, index: str, kind: type[_SafetensorsFile] | type[_TorchFile]) -> dict[str, TensorFile]:
    places = read_json(folder / index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{folder / index} has no weight_map; copy it again")
    opened: dict[str, TensorFile] = {}
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


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; copy it again")
    return value
