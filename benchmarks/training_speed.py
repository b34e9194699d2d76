"""Tokens per second of one process on the CPU: our engine beside transformers' BLOOM and a plain PyTorch loop.

    python benchmarks/training_speed.py [--family gpt|bert] [--dtype fp32|bf16] [--steps 5] [--threads N] [--compiled]

`--family bert` compares BERT with transformers' Megatron-BERT: masked words and the order of sentences.
`--compiled` adds our engine with `model.compile_blocks`, and the time of its first step. All train the same model of
6.9 million parameters with the same optimizer. They take turns step by step, so that a busy moment of the machine falls
on all; medians are compared, and, since other programs may share the cores, the best steps by the processor time that
they took.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from models import Shape, card, engine_step, plain_loop, transformers_bert, transformers_bloom

from tr11ops.agent.allocation import free_port
from trainer.engine import init_distributed

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
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    device = torch.device("cpu")
    init_distributed(device)
    shape = Shape(**{**vars(SHAPE), "dtype": options.dtype, "family": options.family})
    steps = {
        "tr11": engine_step(card(shape), device),
        "transformers": (transformers_bert if options.family == "bert" else transformers_bloom)(shape, device),
    }
    if options.family == "gpt":
        steps["plain loop"] = plain_loop(shape, device)
    if options.compiled:
        config = card(shape)
        model = config.model.model_copy(update={"compile_blocks": True})
        steps["compiled"] = engine_step(config.model_copy(update={"model": model}), device)
    generator = torch.Generator().manual_seed(1)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.steps + 1):  # the first one warms up and is not counted
        windows = shape.batches(generator)
        for name, step in steps.items():
            began, used = time.perf_counter(), time.process_time()
            step(windows)
            if not turn and name == "compiled":
                print(f"first step of compiled blocks: {time.perf_counter() - began:.1f} s")
            if turn:
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - used)
    what = f"{options.family}, {options.dtype}, {options.threads} threads"
    print(f"{what}, {shape.tokens} tokens a step, {options.steps} steps each:")
    print(f"  {'':14} {'tokens/s':>10} {'tr11 is':>8}   {'tokens/processor second':>24} {'tr11 is':>8}")
    for name in steps:
        rate, speed = (statistics.median(seconds[key]) for key in (name, "tr11"))
        cost, ours_cost = (min(processor[key]) for key in (name, "tr11"))
        print(
            f"  {name:14} {shape.tokens / rate:10.0f} {rate / speed:7.2f}x   {shape.tokens / cost:24.0f}"
            f" {cost / ours_cost:7.2f}x"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
