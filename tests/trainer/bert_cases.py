"""A tiny BERT for the tests of the trainer: its card, and samples as its data gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.trainer.cases import VOCABULARY, tiny
from trainer.config.card import TrainerConfig
from trainer.parallel.mesh import Mesh

PAD, CLS, SEP, MASK, FIRST = 0, 1, 2, 3, 4  # ids


def tiny_bert(
    pipeline: int = 1, tensor: int = 1, dtype: str = "fp32", **sections: dict[str, Any]
) -> TrainerConfig:
    """A card of a BERT that trains in milliseconds: 2 layers, 32 wide, 16 tokens, 64 words; no
    dropout.
    """
    value = tiny(pipeline, tensor, dtype).model_dump(mode="json")
    own = {"family": "bert", "position_embedding": "absolute", "embedding_layernorm": False}
    value["model"] |= own | sections.pop("model", {})
    for name, keys in sections.items():
        value[name] |= keys
    return TrainerConfig.model_validate(value)


def bert_samples(config: TrainerConfig, step: int, count: int) -> dict[str, Tensor]:
    """The fields of `count` samples of eight words, each but one in ten of them a function of the
    one before it.

    Two sentences of random lengths, then padding; 15 % of the words are masked, in every sample at
    least one.
    """
    generator = torch.Generator().manual_seed(step)
    length = config.model.sequence_length
    words = 8
    text = torch.randint(words, (count, length), generator=generator)
    for place in range(1, length):
        follow = torch.rand(count, generator=generator) < 0.9
        text[:, place] = torch.where(follow, (text[:, place - 1] * 3 + 1) % words, text[:, place])
    text = FIRST + text * ((VOCABULARY - FIRST) // words)  # from all over the vocabulary
    first = torch.randint(3, length // 2, (count, 1), generator=generator)
    last = torch.randint(length // 2 + 1, length, (count, 1), generator=generator)
    place = torch.arange(length).expand(count, -1)
    text = text.masked_fill(place == 0, CLS).masked_fill((place == first) | (place == last), SEP)
    types = ((place > first) & (place <= last)).long()
    padding_mask = (place <= last).long()
    text = text.masked_fill(padding_mask == 0, PAD)
    chosen = torch.rand(count, length, generator=generator) < 0.15
    chosen = (chosen | (place == 1)) & (text >= FIRST)
    return {
        "text": text.masked_fill(chosen, MASK),
        "types": types,
        "labels": text.masked_fill(~chosen, -1),
        "is_random": torch.randint(2, (count,), generator=generator),
        "loss_mask": chosen.float(),
        "padding_mask": padding_mask,
    }


def bert_batches(
    config: TrainerConfig, mesh: Mesh, step: int, count: int
) -> Iterator[dict[str, Tensor]]:
    """This replica's micro batches of global batch number `step`: the same samples whatever the
    topology.
    """
    return micro_batches(config, mesh, bert_samples(config, step, count))


def micro_batches(
    config: TrainerConfig, mesh: Mesh, drawn: dict[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """The shares of this replica, of the fields of a global batch."""
    count, size = len(next(iter(drawn.values()))), config.batch.micro_batch_size
    for index in range(mesh.data_rank, count // size, mesh.data):
        yield {name: field[index * size : (index + 1) * size] for name, field in drawn.items()}
