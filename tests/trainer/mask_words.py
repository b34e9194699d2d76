"""Words for dropout's masks where no engine gives them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trainer.model.random import DropoutPlaces
from trainer.parallel.mesh import Mesh


def give_words(
    stage: Iterable[tuple[str, nn.Module]], samples: int, key: str = "1/dropout/0"
) -> DropoutPlaces:
    """As in the only micro batch of a step of so many samples."""
    places = DropoutPlaces(Mesh(1, 1, 1, 0, torch.device("cpu")))
    places.locate(stage)
    places.begin(key, torch.arange(samples).unsqueeze(0))
    return places
