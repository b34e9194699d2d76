"""A tiny T5 for the tests of the trainer: its card, and samples as its data gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.trainer.bert_cases import micro_batches
from tests.trainer.cases import VOCABULARY, tiny
from trainer.config.card import TrainerConfig
from trainer.parallel.mesh import Mesh

PAD, BEGIN, END, FIRST = 0, 1, 2, 8  # ids; sentinels lie between
SENTINELS = range(3, FIRST)
DECODER = 8


def tiny_t5(tensor: int = 1, dtype: str = "fp32", **sections: dict[str, Any]) -> TrainerConfig:
    """A card of a T5 that trains in milliseconds: 2 + 2 layers, 32 wide, 16 and 8 tokens, 64 words;
    no dropout.
    """
    value = tiny(1, tensor, dtype).model_dump(mode="json")
    own = {"family": "t5", "position_embedding": "absolute", "embedding_layernorm": False}
    own |= {"decoder_sequence_length": DECODER}
    value["model"] |= own | sections.pop("model", {})
    for name, keys in sections.items():
        value[name] |= keys
    return TrainerConfig.model_validate(value)


def t5_samples(config: TrainerConfig, step: int, count: int) -> dict[str, Tensor]:
    """The fields of `count` samples: in rows where each word follows from the one before it, one or
    two are cut out.

    The text is of random length; a run of one or two words is a sentinel in it, and the decoder is
    to say the run.
    """
    generator = torch.Generator().manual_seed(step)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    rows: dict[str, list[Tensor]] = {
        name: [] for name in ("text_enc", "text_dec", "labels", "enc_mask", "dec_mask")
    }
    length, decoder, words = config.model.sequence_length, config.model.decoder_sequence_length, 8
    for _ in range(count):
        text, long = [draw(0, words)], draw(8, length)
        while len(text) < long:
            text.append((text[-1] * 3 + 1) % words)
        ids = [FIRST + word * ((VOCABULARY - FIRST) // words) for word in text]
        at, many, sentinel = draw(1, len(ids) - 2), draw(1, 3), SENTINELS[0]
        spoken = [BEGIN, sentinel, *ids[at : at + many]]
        for name, tokens, room, filler in (
            ("text_enc", [*ids[:at], sentinel, *ids[at + many :]], length, PAD),
            ("text_dec", spoken, decoder, PAD),
            ("labels", [*spoken[1:], END], decoder, -1),
        ):
            rows[name].append(torch.tensor(tokens + [filler] * (room - len(tokens))))
        for name, side in (("enc_mask", "text_enc"), ("dec_mask", "text_dec")):
            rows[name].append((rows[side][-1] != PAD).long())
    found = {name: torch.stack(values) for name, values in rows.items()}
    return found | {"loss_mask": found["dec_mask"].clone()}


def t5_batches(
    config: TrainerConfig, mesh: Mesh, step: int, count: int
) -> Iterator[dict[str, Tensor]]:
    """This replica's micro batches of global batch number `step`: the same samples whatever the
    topology.
    """
    return micro_batches(config, mesh, t5_samples(config, step, count))
