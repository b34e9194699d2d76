"""Random-number state survives a round trip, and new seeds are a fixed function."""

from __future__ import annotations

import io
import random

import numpy
import torch

from trainer.checkpoint import randomness


def draw(generator: torch.Generator) -> list[float]:
    mine = [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
    ]
    return [*mine, float(torch.rand(1)), float(torch.rand(1, generator=generator))]


def test_every_stream_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    for warm in range(
        3
    ):  # an odd number of normal deviates leaves one cached in Python and in NumPy
        draw(generator)
        buffer = io.BytesIO()
        torch.save(randomness.capture({"dropout": generator}), buffer)
        wanted = draw(generator)
        random.seed(warm)
        numpy.random.seed(warm)
        torch.manual_seed(warm)
        generator.manual_seed(warm)
        buffer.seek(0)
        randomness.restore(torch.load(buffer, weights_only=True), {"dropout": generator})
        assert draw(generator) == wanted
