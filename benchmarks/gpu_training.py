"""Training on a GPU: step time, TFLOPs, model-FLOPs utilisation and memory, beside transformers and
torch.compile.

    python benchmarks/gpu_training.py [--layers 6] [--hidden 4096] [--length 2048] [--steps 10] [--device cuda|cpu]

A BLOOM-like model in bf16, with and without activation checkpointing; each system in a process of
its own. Ours keeps fp32 masters, moments and accumulated gradients; the others keep all of these in
bf16, so they move less memory. TFLOPs count what the model needs, never what is recomputed, by the
same formula for all. Where there is no GPU, nothing is measured and the output says so; `--device
cpu` runs the same code on small shapes, to check it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from models import Shape, Step, card, engine_step, plain_loop, transformers_bert, transformers_bloom
from msgspec.structs import asdict, replace

from tr11ops.agent.allocation import free_port
from trainer.metrics.throughput import utilization
from trainer.parallel.mesh import worker_device
from trainer.pipeline.library import init_distributed
from trainer.schedule.devices import peak_tflops
from trainer.schedule.flops import count_parameters

SYSTEMS = ("tr11", "transformers", "torch.compile")
WARM_UP = 3


def measure(system: str, shape: Shape, steps: int, device: torch.device) -> dict[str, float]:
    """Median seconds of a step, the largest memory in bytes (0 on the CPU), and the last loss."""
    if system == "tr11":
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )
        init_distributed(device)
        step = our_step(shape, device)
    elif system == "transformers":
        step = transformers_step(shape, device)
    else:
        step = plain_loop(shape, device, compiled=device.type == "cuda")
    is_gpu = device.type == "cuda"
    generator = torch.Generator().manual_seed(1)
    seconds, loss = [], math.nan
    for turn in range(WARM_UP + steps):
        drawn = shape.batches(generator)
        if (
            system != "tr11"
        ):  # ours come from host memory, as a loader gives them: the engine brings them to the device
            drawn = [placed(batch, device) for batch in drawn]
        if is_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step(drawn)
        if is_gpu:
            torch.cuda.synchronize()
        if turn >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    memory = float(torch.cuda.max_memory_allocated()) if is_gpu else 0.0
    if system == "tr11":
        torch.distributed.destroy_process_group()
    return {"seconds": statistics.median(seconds), "memory": memory, "loss": loss}


def our_step(shape: Shape, device: torch.device) -> Step:
    """One step of our engine, of any family."""
    if shape.family != "t5":
        return engine_step(card(shape), device)
    from t5_step import ours  # with transformers, which the others do without

    return ours(card(shape), device)


def transformers_step(shape: Shape, device: torch.device) -> Step:
    """One step of transformers' model that is most like ours: BLOOM, Megatron-BERT, Blenderbot."""
    if shape.family == "gpt":
        return transformers_bloom(shape, device)
    if shape.family == "bert":
        return transformers_bert(shape, device)
    from t5_step import blenderbot_step

    return blenderbot_step(shape, device)


def placed(batch: Any, device: torch.device) -> Any:
    """A micro batch on the device, as a person who times a step would put it there beforehand."""
    if isinstance(batch, dict):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return batch.to(device)


def environment_of(kind: str) -> dict[str, str]:
    """Of a child that computes on `kind`. One for the processor sees no GPU: DeepSpeed takes any
    that it sees.
    """
    return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {})}


def in_child(
    system: str, shape: Shape, options: argparse.Namespace, seconds: float = 1800
) -> dict[str, float] | str:
    """`measure` in a process of its own; the last line of its complaint when it fails (out of
    memory, say).
    """
    request = json.dumps(
        {"system": system, "shape": asdict(shape), "steps": options.steps, "device": options.device}
    )
    command = [sys.executable, __file__, "--child", request]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=environment_of(options.device),
        )
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    measured: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def compare(shape: Shape, options: argparse.Namespace, device_name: str) -> None:
    """One line a system."""
    config = card(shape)
    samples = shape.micro * shape.accumulated
    peak = peak_tflops(device_name, shape.dtype)
    print(f"activation checkpointing {'on' if shape.recompute else 'off'}:", flush=True)
    ours: float | None = None
    for system in SYSTEMS:
        found = in_child(system, shape, options)
        if isinstance(found, str):
            print(f"  {system:14} not measured: {found}", flush=True)
            continue
        ours = found["seconds"] if system == "tr11" else ours
        used = utilization(config, samples, found["seconds"], 1, peak)
        share = "peak not known" if used.mfu is None else f"MFU {100 * used.mfu:4.1f} %"
        ratio = f"tr11 is {found['seconds'] / ours:.2f}x as fast" if ours else ""
        print(
            f"  {system:14} {1000 * found['seconds']:8.1f} ms a step, {shape.tokens / found['seconds']:9.0f} tokens/s, "
            f"{used.model_tflops:6.1f} TFLOPs, {share}, {found['memory'] / 2**30:5.1f} GiB  {ratio}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--micro", type=int, default=2)
    parser.add_argument("--accumulated", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asked = json.loads(options.child)
        device = worker_device() if asked["device"] == "cuda" else torch.device("cpu")
        print(json.dumps(measure(asked["system"], Shape(**asked["shape"]), asked["steps"], device)))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA device here: nothing was measured, and no figure of this benchmark exists for this machine"
        )
        return
    name = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else "this machine's processor (a check, no figure)"
    )
    shape = Shape(
        layers=options.layers,
        hidden=options.hidden,
        heads=max(1, options.hidden // 128),
        vocabulary=options.vocabulary,
        length=options.length,
        micro=options.micro,
        accumulated=options.accumulated,
        dtype="bf16" if options.device == "cuda" else "fp32",
    )
    parameters = count_parameters(card(shape)).total
    print(
        f"{name}, torch {torch.__version__}, {shape.dtype}, {parameters / 1e9:.2f} billion parameters, {shape}"
    )
    for recompute in (False, True):
        compare(replace(shape, recompute=recompute), options, name)


if __name__ == "__main__":
    main()
