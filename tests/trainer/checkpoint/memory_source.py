"""A small GPT's checkpoint in memory, as a source of tensors with known values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.trainer.checkpoint.synthetic import logical
from trainer.checkpoint.publishing import CheckpointInfo, Extras
from trainer.checkpoint.source import CheckpointFacts, Part, TensorFacts, TensorSource
from trainer.contract.record import Record


class Sizes(Record):
    """Sizes of a GPT; all are divisible by 4, for tensor parallelism."""

    layers: int = 3
    hidden: int = 8
    heads: int = 4
    vocabulary: int = 24
    positions: int | None = None
    embedding_norm: bool = True

    def shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, ffn = self.hidden, 4 * self.hidden
        found: dict[str, tuple[int, ...]] = {"embedding.word.weight": (self.vocabulary, hidden)}
        if self.positions is not None:
            found["embedding.position.weight"] = (self.positions, hidden)
        if self.embedding_norm:
            found |= {"embedding.norm.weight": (hidden,), "embedding.norm.bias": (hidden,)}
        for block in range(self.layers):
            inner = {
                "input_norm.weight": (hidden,), "input_norm.bias": (hidden,),
                "attention.query_key_value.weight": (3 * hidden, hidden), "attention.query_key_value.bias": (3 * hidden,),
                "attention.dense.weight": (hidden, hidden), "attention.dense.bias": (hidden,),
                "post_attention_norm.weight": (hidden,), "post_attention_norm.bias": (hidden,),
                "mlp.up.weight": (ffn, hidden), "mlp.up.bias": (ffn,),
                "mlp.down.weight": (hidden, ffn), "mlp.down.bias": (hidden,),
            }  # fmt: skip
            found |= {f"blocks.{block}.{name}": shape for name, shape in inner.items()}
        return found | {"final_norm.weight": (hidden,), "final_norm.bias": (hidden,)}


@dataclass
class MemorySource:
    """A TensorSource over dictionaries of whole tensors."""

    parts: Mapping[Part, Mapping[str, Tensor]]
    facts: CheckpointFacts

    def tensors(self, part: Part) -> Mapping[str, TensorFacts]:
        return {
            key: TensorFacts(tuple(value.shape), value.dtype)
            for key, value in self.parts[part].items()
        }

    def read(self, part: Part, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        window = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        return self.parts[part][key][window].clone()


def facts_of(sizes: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model.layers": sizes.layers,
        "model.hidden_size": sizes.hidden,
        "model.ffn_hidden_size": 4 * sizes.hidden,
        "model.attention_heads": sizes.heads,
        "model.position_embedding": "alibi" if sizes.positions is None else "absolute",
        "model.embedding_layernorm": sizes.embedding_norm,
        "tokenizer.padded_vocabulary_size": sizes.vocabulary,
        "precision.dtype": {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype],
    }
    if sizes.positions is not None:
        found["model.max_position_embeddings"] = sizes.positions
    return found


def memory_source(
    sizes: Sizes, step: int = 5, dtype: torch.dtype = torch.bfloat16, optimizer: bool = True
) -> MemorySource:
    """A checkpoint of `step`: the weights are the masters, rounded to `dtype`."""
    states = {
        f"{name}/{kind}": logical(name, kind, shape, step)
        for name, shape in sizes.shapes().items()
        for kind in ("fp32", "exp_avg", "exp_avg_sq")
    }
    weights = {name: states[f"{name}/fp32"].to(dtype) for name in sizes.shapes()}
    cursor = {
        "iteration": step,
        "consumed_samples": 8 * step,
        "consumed_tokens": 64 * step,
        "skipped": 1,
        "nan": 0,
    }
    topology = {"tensor": 1, "pipeline": 1, "data": 1}
    facts = CheckpointFacts(step, "tr11", topology, facts_of(sizes, dtype), cursor, step - 1)
    return MemorySource({"weights": weights, "optimizer": states if optimizer else {}}, facts)


def extras_of(source: TensorSource) -> Extras:
    return Extras(source.facts.cursor)


def info_of(source: TensorSource, topology: Mapping[str, int]) -> CheckpointInfo:
    return CheckpointInfo(topology, source.facts.model)


def differences(one: TensorSource, other: TensorSource) -> list[str]:
    """Keys that only one has, or whose values are not bitwise equal."""
    found = []
    parts: tuple[Part, ...] = ("weights", "optimizer")
    for part in parts:
        mine, theirs = one.tensors(part), other.tensors(part)
        found += sorted(set(mine) ^ set(theirs))
        for key in sorted(set(mine) & set(theirs)):
            values = [
                source.read(part, key, (0,) * len(mine[key].shape), mine[key].shape)
                for source in (one, other)
            ]
            if mine[key] != theirs[key] or not torch.equal(*values):
                found.append(f"{part}: {key}")
    return found
