"""Tokens per second of one process on the CPU: our engine beside transformers' BLOOM, the same model and optimizer.

    python benchmarks/training_speed.py [--dtype fp32|bf16] [--steps 5] [--threads N]

The two take turns step by step, so that a busy moment of the machine falls on both; medians are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from transformers import BloomConfig, BloomForCausalLM

from tr11ops.agent.allocation import free_port
from trainer.config import TrainerConfig, validate
from trainer.engine import Engine, init_distributed
from trainer.mesh import Mesh

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


def ours(dtype: str) -> Callable[[list[torch.Tensor]], float]:
    """One step of our engine on micro batches of token windows [MICRO, LENGTH + 1]; returns the loss."""
    config = card(dtype)
    engine = Engine.build(config, Mesh.create(config.parallel, torch.device("cpu")))

    def step(windows: list[torch.Tensor]) -> float:
        batches = ((window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows)
        return engine.train_step(batches, config.batch.global_batch_size).loss

    return step


def theirs(dtype: str) -> Callable[[list[torch.Tensor]], float]:
    """One step of transformers' BLOOM with torch's AdamW, gradients accumulated and clipped likewise."""
    config = BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = BloomForCausalLM(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(windows: list[torch.Tensor]) -> float:
        total = 0.0
        for window in windows:
            loss = model(input_ids=window[:, :-1], labels=window[:, :-1]).loss / len(windows)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


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
    steps = {"tr11": ours(options.dtype), "transformers": theirs(options.dtype)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.steps + 1):  # the first one warms up and is not counted
        windows = [torch.randint(0, VOCABULARY, (MICRO, LENGTH + 1), generator=generator) for _ in range(ACCUMULATED)]
        for name, step in steps.items():
            began = time.perf_counter()
            step(windows)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    rates = {name: TOKENS / statistics.median(values) for name, values in seconds.items()}
    print(f"{options.dtype}, {options.threads} threads, {TOKENS} tokens a step, median of {options.steps}:")
    for name, rate in rates.items():
        print(f"  {name:14} {rate:8.0f} tokens/s")
    print(f"  ratio          {rates['tr11'] / rates['transformers']:8.2f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
