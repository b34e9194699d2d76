"""The models that the training benchmarks compare: our engine, transformers' BLOOM or BERT, and a
plain PyTorch model.

All three are the same network (but for the tied embedding's gradient path, which each library makes
in its own way) under the same optimizer. Not a measurement by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from trainer.config.card import TrainerConfig, validate
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.model.positions import alibi_slopes
from trainer.parallel.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Step = Callable[[list[Any]], float]
DECODER = 64  # tokens of a T5's decoder
# BERT's share of tokens that are predicted; what transformers leaves out
MASKED, IGNORED = (0.15, -100)


class Shape(Record):
    """What is trained, and how much of it in a step: `accumulated` micro batches of `micro` samples
    on each replica.

    `own`: further keys of the card, as (section, key, value).
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    micro: int
    accumulated: int
    dtype: str = "fp32"
    recompute: bool = False
    family: str = "gpt"
    own: tuple[tuple[str, str, Any], ...] = ()

    @property
    def tokens(self) -> int:
        """Of one replica's step."""
        return self.micro * self.accumulated * self.length

    def batches(self, generator: torch.Generator) -> list[Any]:
        """One step's micro batches in host memory, as a loader gives them: of the family's fields."""
        if self.family == "bert":
            return self.masked_samples(generator)
        longer = DECODER if self.family == "t5" else 0
        return replace(self, length=self.length + longer).windows(generator)

    def masked_samples(self, generator: torch.Generator) -> list[dict[str, Tensor]]:
        """One step's samples of BERT: two segments of half the length, nothing padded, 15 % of the
        words masked.
        """
        size, half = (self.micro, self.length), torch.arange(self.length) >= self.length // 2
        found = []
        for _ in range(self.accumulated):
            text = torch.randint(0, self.vocabulary, size, generator=generator)
            chosen = torch.rand(size, generator=generator) < MASKED
            found.append({
                "text": text.masked_fill(chosen, 0), "types": half.long().expand(size),
                "labels": text.masked_fill(~chosen, IGNORED), "loss_mask": chosen.float(),
                "is_random": torch.randint(0, 2, size[:1], generator=generator),
                "padding_mask": torch.ones(size, dtype=torch.int64),
            })  # fmt: skip
        return found

    def windows(
        self, generator: torch.Generator, device: torch.device | None = None
    ) -> list[Tensor]:
        """One step's token windows, each [micro, length + 1]."""
        size = (self.micro, self.length + 1)
        drawn = [
            torch.randint(0, self.vocabulary, size, generator=generator)
            for _ in range(self.accumulated)
        ]
        return [window.to(device) for window in drawn]


def card(shape: Shape, tensor: int = 1, pipeline: int = 1, data: int = 1) -> TrainerConfig:
    """The run card of such a training."""
    own: dict[str, Any] = {"embedding_layernorm": True}
    if shape.family == "bert":
        own = {"family": "bert", "position_embedding": "absolute", "activation": "gelu"}
    if shape.family == "t5":
        own = {"family": "t5", "position_embedding": "absolute", "decoder_sequence_length": DECODER}
    value: dict[str, Any] = {
        "run": {"name": "speed", "directory": "unused"},
        "parallel": {"tensor": tensor, "pipeline": pipeline},
        "model": {
            "layers": shape.layers,
            "hidden_size": shape.hidden,
            "attention_heads": shape.heads,
            "sequence_length": shape.length,
            **own,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "activation_checkpointing": shape.recompute,
        },
        "batch": {
            "micro_batch_size": shape.micro,
            "global_batch_size": shape.micro * shape.accumulated * data,
            "train_samples": 10**6,
        },
        "schedule": {"learning_rate": 1e-4},
        "precision": {"dtype": shape.dtype},
        "checkpoint": {"interval": 1000},
        "data": {"prefixes": ["unused"]},
        "tokenizer": {"padded_vocabulary_size": shape.vocabulary},
    }
    for section, key, own_value in shape.own:
        value.setdefault(section, {})[key] = own_value
    return validate(TrainerConfig, value, "benchmark")


def engine_step(config: TrainerConfig, device: torch.device) -> Step:
    """One step of our engine on micro batches in host memory; returns the loss. The process group
    must be up.
    """
    engine = Engine.build(config, Mesh.create(config.parallel, device))

    def step(batches: list[Any]) -> float:
        if config.model.family == "gpt":
            batches = [
                (window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in batches
            ]
        return engine.train_step(iter(batches), config.batch.global_batch_size).loss

    return step


def transformers_bloom(shape: Shape, device: torch.device) -> Step:
    """One step of transformers' BLOOM."""
    from transformers import (  # a second of processor time, which most callers do without
        BloomConfig,
        BloomForCausalLM,
    )

    config = BloomConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )
    model = BloomForCausalLM(config)
    if shape.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return loop(
        model,
        shape,
        device,
        lambda window: model(input_ids=window[:, :-1], labels=window[:, :-1]).loss,
    )


def transformers_bert(shape: Shape, device: torch.device) -> Step:
    """One step of transformers' Megatron-BERT, both heads."""
    from transformers import MegatronBertConfig, MegatronBertForPreTraining

    config = MegatronBertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.hidden,
        max_position_embeddings=shape.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = MegatronBertForPreTraining(config)

    def loss(drawn: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(
            drawn["text"],
            attention_mask=drawn["padding_mask"],
            token_type_ids=drawn["types"],
            labels=drawn["labels"],
            next_sentence_label=drawn["is_random"],
        ).loss
        return found

    return loop(model, shape, device, loss)


def plain_loop(shape: Shape, device: torch.device, compiled: bool = False) -> Step:
    """One step of the network as a person would write it in PyTorch: fused attention, torch's
    cross-entropy.
    """
    model = PlainModel(shape)

    def loss(window: Tensor) -> Tensor:
        return functional.cross_entropy(
            model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()
        )

    return loop(model, shape, device, torch.compile(loss) if compiled else loss)


def loop(
    model: nn.Module, shape: Shape, device: torch.device, loss: Callable[[Any], Tensor]
) -> Step:
    """torch's fused AdamW, gradients accumulated and clipped as ours are.

    In bf16 weights, gradients and moments are all bf16, which is less than our engine keeps (it has
    fp32 masters).
    """
    model.to(device, DTYPES[shape.dtype]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(windows: list[Any]) -> float:
        total = 0.0
        for window in windows:
            value = loss(window) / len(windows)
            value.backward()
            total += float(value.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


class PlainBlock(nn.Module):
    """Pre-layer-norm block with ALiBi."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.mixed, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = (
            self.mixed(self.norms[0](hidden))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(*parts.unbind(0), attn_mask=mask)
        hidden = hidden + self.dense(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(
            functional.gelu(self.up(self.norms[1](hidden)), approximate="tanh")
        )


class PlainModel(nn.Module):
    """The network in plain modules; token ids [batch, length] -> logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.recompute = shape.recompute
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.words.weight, std=0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.hidden) for _ in range(2))
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        place = torch.arange(shape.length)
        distance = (place[None] - place[:, None]).float()
        mask = torch.tensor(alibi_slopes(shape.heads))[:, None, None] * distance
        self.register_buffer("mask", mask.masked_fill(distance > 0, float("-inf"))[None])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Any = self.norms[0](self.words(tokens))
        for block in self.blocks:
            if self.recompute:
                hidden = torch.utils.checkpoint.checkpoint(
                    block, hidden, self.mask, use_reentrant=False
                )
            else:
                hidden = block(hidden, self.mask)
        return functional.linear(self.norms[1](hidden), self.words.weight)
