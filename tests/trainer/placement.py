"""Where each tensor would lie on a machine with a GPU, on a machine without: what is pinned, copied
and mixed.

Inside `PretendedGpu` code may ask for tensors on `GPU`: they are made in host memory and marked,
and so is all that is computed of them. What CUDA would refuse is refused in its words: pinning what
lies on a GPU already, and operations on tensors of both places. What is made by C++ alone, as
gradients are, carries no mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)
HOST = torch.device("cpu")


def lies_on_gpu(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "would_lie_on_gpu", False))


@dataclass
class PretendedGpu(TorchFunctionMode):
    """`pinned`, `copied`: bytes that went into pinned memory, and from there to the GPU;
    `pageable`: not from there.
    """

    pinned: int = 0
    copied: int = 0
    pageable: int = 0
    streams: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Streams and events of CUDA, which do nothing here."""
        patch.setattr(torch.cuda, "Stream", lambda device: "side")
        patch.setattr(torch.cuda, "stream", lambda stream: self._Entered())
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self._Stream())
        patch.setattr(torch.cuda, "Event", self._Stream)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)

    class _Entered:
        def __enter__(self) -> None:
            return None

        def __exit__(self, *error: object) -> None:
            return None

    class _Stream:
        def wait_event(self, event: object) -> None:
            return None

        def record(self, stream: object) -> None:
            return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        given = list(_tensors((*args, *options.values())))
        if func is Tensor.pin_memory:
            return self._pin(given[0])
        asked = [
            item
            for item in (*args, *options.values())
            if isinstance(item, torch.device) and item.type == "cuda"
        ]
        if asked:
            args = tuple(HOST if isinstance(item, torch.device) else item for item in args)
            options = {
                name: HOST if isinstance(item, torch.device) else item
                for name, item in options.items()
            }
        elif len({lies_on_gpu(tensor) for tensor in given if tensor.dim()}) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            )
        result = func(*args, **options)
        if asked and isinstance(result, Tensor):
            result = self._copied(given[0] if given else None, result)
        elif any(map(lies_on_gpu, given)):
            for tensor in _tensors((result,)):
                tensor.would_lie_on_gpu = True  # type: ignore[attr-defined]
        return result

    def _pin(self, tensor: Tensor) -> Tensor:
        if lies_on_gpu(tensor):
            raise RuntimeError(
                "cannot pin 'torch.cuda.LongTensor' only dense CPU tensors can be pinned"
            )
        self.pinned += tensor.nbytes
        found = tensor.clone()
        found.is_pinned_here = True  # type: ignore[attr-defined]
        return found

    def _copied(self, source: Tensor | None, result: Tensor) -> Tensor:
        if source is not None and not lies_on_gpu(source):
            if getattr(source, "is_pinned_here", False):
                self.copied += source.nbytes
            else:
                self.pageable += source.nbytes
        found = result.clone()
        found.would_lie_on_gpu = True  # type: ignore[attr-defined]
        return found


def _tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
