"""Random-number state: captured per rank, restored bitwise on the same topology, derived again on
another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor


def capture() -> dict[str, Tensor]:
    """The state of torch (CPU and the current GPU), Python and NumPy, as tensors."""
    states = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore(states: Mapping[str, Tensor]) -> None:
    """Put back what `capture` returned."""
    torch.set_rng_state(states["torch"])
    version, *words, gauss_kept, gauss = states["python"].tolist()
    inner = tuple(int(word) for word in words)
    random.setstate((int(version), inner, gauss if gauss_kept else None))
    numpy_words = states["numpy"]
    position, kept, cached = numpy_words[-3:].tolist()
    key = numpy_words[:-3].to(torch.int64).numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", key, int(position), int(kept), float(cached)))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _python_state() -> Tensor:
    version, inner, gauss = random.getstate()
    return torch.tensor([version, *inner, gauss is not None, gauss or 0.0], dtype=torch.float64)


def _numpy_state() -> Tensor:
    _, key, position, kept, cached = numpy.random.get_state(legacy=True)
    return torch.tensor([*(int(word) for word in key), position, kept, cached], dtype=torch.float64)
