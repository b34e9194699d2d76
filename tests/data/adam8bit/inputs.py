"""The tensor and the gradients of the recorded reference: functions of nothing, the same on every
machine.
"""

from __future__ import annotations

import numpy as np

ELEMENTS = 17 * 256 + 40  # the last block is a short one
STEPS, KEPT_STEPS = 30, (1, 2, 30)
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


def weights() -> np.ndarray:
    """Where the weights begin, float32 [ELEMENTS]."""
    return np.random.RandomState(1).standard_normal(ELEMENTS).astype(np.float32)


def gradient(step: int) -> np.ndarray:
    """The gradient of step number `step`, float32 [ELEMENTS]: a part that stays, noise, and scales
    that differ.
    """
    steady = np.random.RandomState(2).standard_normal(ELEMENTS)
    noise = np.random.RandomState(100 + step).standard_normal(ELEMENTS)
    scale = 10.0 ** (np.arange(ELEMENTS) // 256 % 6 - 5.0) * (1.0 + np.arange(ELEMENTS) % 7)
    return ((0.3 * steady + noise) * scale).astype(np.float32)
