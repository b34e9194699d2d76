"""Tokens per second of one process on the CPU: our engine beside transformers' BLOOM and a plain PyTorch loop.

    python benchmarks/training_speed.py [--dtype fp32|bf16] [--steps 5] [--threads N]

All three train the same model with the same optimizer. They take turns step by step, so that a busy moment of the
machine falls on all; medians are compared, and, since other programs may share the cores, the best steps by the
processor time that they took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM

from tr11ops.agent.allocation import free_port
from trainer.config import TrainerConfig, validate
from trainer.engine import Engine, init_distributed
from trainer.mesh import Mesh
from trainer.model.positions import alibi_slopes

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH, MICRO, ACCUMULATED = 6, 256, 8, 8192, 256, 4, 2
TOKENS = MICRO * ACCUMULATED * LENGTH


def card(dtype: str) -> TrainerConfig:
    """The model of 6.9 million parameters that both train."""
    return validate(
        TrainerConfig,
        {
            "run": {"name": "speed", "directory": "unused"},
            "model": {
                "layers": LAYERS,
                "hidden_size": HIDDEN,
                "attention_heads": HEADS,
                "sequence_length": LENGTH,
                "embedding_layernorm": True,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
            },
            "batch": {
                "micro_batch_size": MICRO,
                "global_batch_size": MICRO * ACCUMULATED,
                "train_samples": 10**6,
            },
            "schedule": {"learning_rate": 1e-4},
            "precision": {"dtype": dtype},
            "checkpoint": {"interval": 1000},
            "data": {"prefixes": ["unused"]},
            "tokenizer": {"padded_vocabulary_size": VOCABULARY},
        },
        "benchmark",
    )


Step = Callable[[list[Tensor]], float]


def ours(dtype: str) -> Step:
    """One step of our engine on micro batches of token windows [MICRO, LENGTH + 1]; returns the loss."""
    config = card(dtype)
    engine = Engine.build(config, Mesh.create(config.parallel, torch.device("cpu")))

    def step(windows: list[Tensor]) -> float:
        batches = ((window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows)
        return engine.train_step(batches, config.batch.global_batch_size).loss

    return step


def transformers_bloom(dtype: str) -> Step:
    """One step of transformers' BLOOM."""
    config = BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = BloomForCausalLM(config)
    return loop(model, dtype, lambda window: model(input_ids=window[:, :-1], labels=window[:, :-1]).loss)


def plain_loop(dtype: str) -> Step:
    """One step of the same model as a person would write it in PyTorch: fused attention, torch's cross-entropy."""
    model = PlainModel()

    def loss(window: Tensor) -> Tensor:
        return functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    return loop(model, dtype, loss)


def loop(model: nn.Module, dtype: str, loss: Callable[[Tensor], Tensor]) -> Step:
    """torch's fused AdamW, gradients accumulated and clipped as ours are."""
    model = model.to(torch.bfloat16 if dtype == "bf16" else torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(windows: list[Tensor]) -> float:
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

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.mixed, self.dense = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.mixed(self.norms[0](hidden)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind(0), attn_mask=mask)
        hidden = hidden + self.dense(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        return hidden + self.down(functional.gelu(self.up(self.norms[1](hidden)), approximate="tanh"))


class PlainModel(nn.Module):
    """The benchmark's model in plain modules; token ids [batch, LENGTH] -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.words.weight, std=0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        place = torch.arange(LENGTH)
        distance = (place[None] - place[:, None]).float()
        mask = torch.tensor(alibi_slopes(HEADS))[:, None, None] * distance
        self.register_buffer("mask", mask.masked_fill(distance > 0, float("-inf"))[None])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norms[0](self.words(tokens))
        for block in self.blocks:
            hidden = block(hidden, self.mask)
        return functional.linear(self.norms[1](hidden), self.words.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    init_distributed(torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    makers = {"tr11": ours, "transformers": transformers_bloom, "plain loop": plain_loop}
    steps = {name: make(options.dtype) for name, make in makers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.steps + 1):  # the first one warms up and is not counted
        windows = [torch.randint(0, VOCABULARY, (MICRO, LENGTH + 1), generator=generator) for _ in range(ACCUMULATED)]
        for name, step in steps.items():
            began, used = time.perf_counter(), time.process_time()
            step(windows)
            if turn:
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - used)
    print(f"{options.dtype}, {options.threads} threads, {TOKENS} tokens a step, {options.steps} steps each:")
    print(f"  {'':14} {'tokens/s':>10} {'tr11 is':>8}   {'tokens/processor second':>24} {'tr11 is':>8}")
    for name in steps:
        rate, speed = (statistics.median(seconds[key]) for key in (name, "tr11"))
        cost, ours_cost = (min(processor[key]) for key in (name, "tr11"))
        print(
            f"  {name:14} {TOKENS / rate:10.0f} {rate / speed:7.2f}x   {TOKENS / cost:24.0f} {cost / ours_cost:7.2f}x"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
