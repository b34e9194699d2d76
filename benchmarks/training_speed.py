"""Tokens per second of one process on the CPU: our engine beside transformers' BLOOM and a plain
PyTorch loop.

    python benchmarks/training_speed.py [--family gpt|bert] [--dtype fp32|bf16] [--steps 5] [--threads N] [--compiled]

`--family bert` compares BERT with transformers' Megatron-BERT: masked words and the order of
sentences. `--compiled` adds our engine with `model.compile_blocks`, and the time of its first step.
All train the same model of 6.9 million parameters with the same optimizer. They take turns step by
step, so that a busy moment of the machine falls on all; medians are compared, and, since other
programs may share the cores, the best steps by the processor time that they took.
"""

from __future__ import annotations

import argparse
import os

import torch
from models import Shape, card, engine_step, plain_loop, transformers_bert, transformers_bloom
from msgspec.structs import replace
from training_turns import take_turns

from tr11ops.agent.allocation import free_port
from trainer.pipeline.library import init_distributed

SHAPE = Shape(layers=6, hidden=256, heads=8, vocabulary=8192, length=256, micro=4, accumulated=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=["gpt", "bert"], default="gpt")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    device = torch.device("cpu")
    init_distributed(device)
    shape = replace(SHAPE, dtype=options.dtype, family=options.family)
    steps = {
        "tr11": engine_step(card(shape), device),
        "transformers": (transformers_bert if options.family == "bert" else transformers_bloom)(
            shape, device
        ),
    }
    if options.family == "gpt":
        steps["plain loop"] = plain_loop(shape, device)
    if options.compiled:
        config = card(shape)
        model = config.model.model_copy(update={"compile_blocks": True})
        steps["compiled"] = engine_step(config.model_copy(update={"model": model}), device)
    generator = torch.Generator().manual_seed(1)

    def on_first(name: str, seconds: float) -> None:
        if name == "compiled":
            print(f"first step of compiled blocks: {seconds:.1f} s")

    what = f"{options.family}, {options.dtype}, {options.threads} threads"
    take_turns(steps, lambda: shape.batches(generator), options.steps, what, shape.tokens, on_first)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
