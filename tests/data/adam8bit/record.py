"""Records what bitsandbytes' AdamW8bit makes of known gradients, for
tests/trainer/optim/test_adam8bit.py.

    pip install "bitsandbytes==0.50.2"
    python -m tests.data.adam8bit.record tests/data/adam8bit/bitsandbytes.npz

bitsandbytes is needed for this alone; 0.50 is the first with 8-bit optimizers on CPUs.
"""

from __future__ import annotations

import sys

import bitsandbytes  # type: ignore[import-not-found]
import numpy as np
import torch

from tests.data.adam8bit.inputs import (
    BETAS,
    ELEMENTS,
    EPSILON,
    KEPT_STEPS,
    LEARNING_RATE,
    STEPS,
    WEIGHT_DECAY,
    gradient,
    weights,
)

if __name__ == "__main__":
    parameter = torch.nn.Parameter(torch.from_numpy(weights()))
    optimizer = bitsandbytes.optim.AdamW8bit(
        [parameter], lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY
    )
    kept: dict[str, np.ndarray] = {}
    for step in range(1, STEPS + 1):
        parameter.grad = torch.from_numpy(gradient(step))
        optimizer.step()
        if step in KEPT_STEPS:
            state = optimizer.state[parameter]
            kept[f"weights_{step}"] = parameter.detach().numpy().copy()
            for ours, theirs in (("exp_avg", "1"), ("exp_avg_sq", "2")):
                assert (
                    state[f"state{theirs}"].dtype == torch.uint8
                    and len(state[f"state{theirs}"]) == ELEMENTS
                )
                kept[f"{ours}_codes_{step}"] = state[f"state{theirs}"].numpy().copy()
                kept[f"{ours}_scales_{step}"] = state[f"absmax{theirs}"].numpy().copy()
                kept[f"{ours}_values"] = state[f"qmap{theirs}"].numpy().copy()
    np.savez_compressed(sys.argv[1], version=np.array(bitsandbytes.__version__), **kept)
