"""The first loss of a training, where it is not that of an even guess. Pure, free of torch.

A tied output projection compares what comes out of the last block with the words' own vectors.
Where the embedding is normed, a word goes in as its own vector at full length, and little of it is
lost on the way: the word that gets the highest score is the one that was read. Its score is near h
* std / sqrt(1 + 0.8 * (h * std^2)^2), where the root is what the blocks put beside it: 19.2 for
1,024 columns and std 0.02 (measured: 19.1), 33.0 for 2,048 (31.8), 46.2 for 4,096 (41.6). An even
guess loses ln(vocabulary).
"""

from __future__ import annotations

import math

from trainer.config.card import TrainerConfig
from trainer.contract.record import Record

FAR = 1.0  # above an even guess; nearer to it no one wonders
# below ln(vocabulary) that score makes the first loss half a unit more than an even guess
NEAR = 0.43


class FirstLoss(Record):
    """About where the loss begins, that of an even guess, and the largest `model.init_std` that
    begins there.
    """

    expected: float
    even: float
    init_std: float

    def __str__(self) -> str:
        return (
            f"near {self.expected:.0f}, not ln(vocabulary) = {self.even:.1f}: with tied and normed embeddings each "
            f"token begins by predicting itself; model.init_std = {self.init_std:.2g} avoids it"
        )


def first_loss(config: TrainerConfig) -> FirstLoss | None:
    """What to expect of a training from random weights; None where it begins about as an even
    guess.
    """
    model, vocabulary = config.model, config.tokenizer.padded_vocabulary_size
    begins = config.optimizer.embedding_init or model.init_method
    if not (model.tied_embeddings and model.embedding_layernorm) or begins != "normal":
        return None
    size, std = float(model.hidden_size), model.init_std
    if model.position_embedding == "absolute":  # half of what goes in is the position's vector
        size = size / math.sqrt(2)
    own = size * std / math.sqrt(1 + 0.8 * (model.hidden_size * std**2) ** 2)
    even = math.log(vocabulary)
    expected = max(even, own) + math.log1p(math.exp(-abs(even - own)))
    if expected < even + FAR:
        return None
    return FirstLoss(expected, even, (even - NEAR) / size)
