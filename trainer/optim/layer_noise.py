"""LAMB with two steps of each tensor: along the momentum, and along what the gradient differs from
it.

A large batch has less noise in its gradients. Here the noise is normalised by itself, tensor by
tensor, so that its step is as long whatever the batch. There is no paper of it; the rule is that of
the `mylamb2` optimizer.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from trainer.optim.interface import MOMENTS, NOISE, UpdateNumbers
from trainer.optim.lamb import Chunk, Lamb


class LayerNoiseLamb(Lamb):
    """A third number per element: the mean square of the noise.

    With m the momentum before this step, d = g - m: the directions are m and d, each over the root
    of its own mean square, with bias correction. The weight decays first, by itself. A tensor moves
    by at most twice the learning rate times its norm, which is taken before the decay.
    """

    state_names: ClassVar[tuple[str, ...]] = (*MOMENTS, NOISE)
    directions: ClassVar[int] = 2

    def advance(self, chunk: Chunk, numbers: UpdateNumbers) -> None:
        """Take gradient and noise into the mean squares; the momentum follows when the weights have
        moved.
        """
        mean, squares = (chunk.state[name] for name in MOMENTS)
        noise = chunk.gradient - mean
        squares.mul_(numbers.beta2).add_(
            (chunk.gradient * chunk.gradient).mul_(1.0 - numbers.beta2)
        )
        chunk.state[NOISE].mul_(numbers.beta2).add_(noise.mul_(noise).mul_(1.0 - numbers.beta2))

    def directions_of(self, chunk: Chunk, numbers: UpdateNumbers) -> tuple[Tensor, ...]:
        """Momentum and noise. The momentum is zero at the first step, and then goes nowhere."""
        mean, squares = (chunk.state[name] for name in MOMENTS)
        return numbers.scaled(mean, squares), numbers.scaled(
            chunk.gradient - mean, chunk.state[NOISE]
        )

    def hold(self, chunk: Chunk, directions: tuple[Tensor, ...]) -> None:
        """The gradient is needed once more: the directions are made again."""

    def held(self, chunk: Chunk, numbers: UpdateNumbers) -> tuple[Tensor, ...]:
        """The same directions, from the same numbers."""
        return self.directions_of(chunk, numbers)

    def move(
        self,
        chunk: Chunk,
        numbers: UpdateNumbers,
        directions: tuple[Tensor, ...],
        rates: list[Tensor],
    ) -> None:
        """Decay, move along both directions, and take the gradient into the momentum."""
        if numbers.decay:
            chunk.weights.mul_(1.0 - numbers.learning_rate * numbers.decay)
        super().move(chunk, numbers, directions, rates)
        mean = chunk.state[MOMENTS[0]]
        mean.mul_(numbers.beta1).add_(chunk.gradient * (1.0 - numbers.beta1))
