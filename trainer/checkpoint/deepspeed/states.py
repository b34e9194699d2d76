"""Files of the original layout, opened without running anything that is in them and without reading
their tensors.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import CheckpointError
from trainer.contract.units import shortened


class Inert:
    """Stands for an object of any class that torch does not know (Megatron's arguments, DeepSpeed's
    addresses).

    Its attributes are those that were stored, `arguments` what its constructor was given. No code
    of the class runs.
    """

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({str(key): value for key, value in part.items()})


def open_states(path: Path) -> dict[Any, Any]:
    """The dictionary in one file of `torch.save`; its tensors are mapped, so only what is touched
    is read.

    Classes that torch does not allow by default become `Inert`. Raises CheckpointError, naming the
    file, when it is missing, truncated, or not such a file.
    """
    try:
        with _inert(torch.serialization.get_unsafe_globals_in_checkpoint(path)):
            states = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; copy the checkpoint again, or use another step"
        ) from None
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = shortened(" ".join(str(error).split()), 160) or type(error).__name__
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint file ({reason}); copy it again"
        ) from None
    if not isinstance(states, dict):
        raise CheckpointError(
            f"{path} holds a {type(states).__name__}, not a dictionary: it is not of this layout"
        )
    return states


@contextmanager
def _inert(names: Sequence[str]) -> Iterator[None]:
    with torch.serialization.safe_globals([(Inert, name) for name in names]):
        yield


class OpenFiles:
    """The files of one checkpoint folder, opened when first needed; the least recently used are
    closed again.
    """

    def __init__(self, folder: Path, most: int):
        self.folder = folder
        self.most = most
        self._open: OrderedDict[str, dict[Any, Any]] = OrderedDict()

    def __getstate__(self) -> tuple[Path, int]:
        return self.folder, self.most

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.folder, self.most = state
        self._open = OrderedDict()

    def states(self, name: str) -> dict[Any, Any]:
        """What the file `name` holds. Raises CheckpointError as `open_states` does."""
        found = self._open.pop(name, None)
        if found is None:
            found = open_states(self.folder / name)
        self._open[name] = found
        while len(self._open) > self.most:
            self._open.popitem(last=False)
        return found

    def tensor(self, name: str, keys: Sequence[Any]) -> Tensor:
        """The tensor under nested `keys` of a file. Raises CheckpointError, naming the file, when
        it is not there.
        """
        value: Any = self.states(name)
        for key in keys:
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                value = None
        if not isinstance(value, Tensor):
            shown = "/".join(map(str, keys))
            raise CheckpointError(
                f"{self.folder / name} lacks {shown}: it is of another checkpoint, or damaged"
            )
        return value


def attributes(value: Any) -> dict[str, Any]:
    """The stored attributes of an inert object, a namespace or a dictionary; empty for anything
    else.
    """
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return dict(getattr(value, "__dict__", {}))
