"""Small trainings on the device: losses against the processor's, a resume bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_rows import Row, fault_of, found_in, tell
from gpu_training import environment_of
from models import Shape, card
from msgspec.structs import replace
from torch import Tensor

from tr11ops.agent.allocation import free_port
from trainer.checkpoint import store
from trainer.checkpoint.publishing import CheckpointInfo, Extras, Finished
from trainer.checkpoint.writer import AsyncSaver
from trainer.config.card import TrainerConfig
from trainer.config.kernel_choice import float8_obstacle
from trainer.contract.record import Record
from trainer.engine import Engine
from trainer.model.kernels import (
    device_facts,
)
from trainer.parallel.mesh import Mesh
from trainer.pipeline.library import init_distributed
from trainer.spikes.corruption_check import allow_repeatable_kernels, check_workers

STEPS = 8
DROPOUT = 0.1


def small(dtype: str = "fp32", *own: tuple[str, str, Any]) -> Shape:
    return Shape(2, 64, 4, 256, 32, 2, 2, dtype, own=own)


def trained(config: TrainerConfig, device: torch.device, steps: int) -> tuple[Engine, list[float]]:
    """An engine after so many steps of the same batches everywhere, and its losses. Close it."""
    join(device)
    engine = Engine.build(config, Mesh.create(config.parallel, device))
    return engine, [step(engine, number) for number in range(steps)]


def step(engine: Engine, number: int) -> float:
    return engine.train_step(
        micro_batches(number), engine.config.batch.global_batch_size, number
    ).loss


def micro_batches(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of one step, in host memory as a loader gives them: the engine pins them and brings
    them to the device.
    """
    windows = small().windows(torch.Generator().manual_seed(number % 2))
    return ((window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows)


def join(device: torch.device) -> None:
    if not dist.is_initialized():
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(place, MASTER_PORT=str(free_port()))
        init_distributed(device)


class Course(Record):
    """Losses of a small training. `like`: the course of the processor that they are those of within
    `bound`; it is in fp32.
    """

    shape: Shape
    like: str
    bound: float


FP32_BOUND, NARROW_BOUND = 2e-4, 5e-3
DROPPING = (("model", "attention_dropout", DROPOUT), ("model", "hidden_dropout", DROPOUT))


def courses(device: torch.device) -> dict[str, Course]:
    """What the device can train. Dropout is by place, so its masks are the processor's too."""
    llama = [("model", key, value) for key, value in {**LLAMA, "key_value_heads": 2}.items()]
    wide = {
        "fp32": small(),
        "fp32, dropout": small("fp32", *DROPPING),
        "fp32, llama": small("fp32", *llama),
    }
    found = {name: Course(shape, name, FP32_BOUND) for name, shape in wide.items()}
    found["bf16"] = Course(small("bf16"), "fp32", NARROW_BOUND)
    if float8_obstacle(device_facts(device)) is None:
        shape = small("bf16", ("precision", "float8", True))
        found["float8"] = Course(shape, "fp32", NARROW_BOUND)
    if device.type == "cuda":  # a processor computes no fp16
        found["fp16"] = Course(small("fp16"), "fp32", NARROW_BOUND)
    return found


def losses(device: torch.device) -> Iterator[Row]:
    """The same trainings on the device and, in a process of its own beside it, on the processor."""
    planned = courses(device)
    alike = sorted({course.like for course in planned.values()})
    with ThreadPoolExecutor(2) as threads:
        here = threads.submit(child_losses, list(planned), device.type)
        there = threads.submit(child_losses, alike, "cpu")
    for name, course in planned.items():
        yield compared_losses(name, course, here.result().get(name), there.result()[course.like])


def compared_losses(
    name: str, course: Course, mine: list[float] | str | None, theirs: list[float] | str | None
) -> Row:
    """A course against the processor's; either may be the fault that ended it."""
    what = f"losses in {name} against the processor's in {course.like}"
    for found in (mine, theirs):
        if not isinstance(found, list):
            return Row(what, found or "its process ended before", False)
    assert isinstance(mine, list) and isinstance(theirs, list)
    worst = max(abs(own - other) for own, other in zip(mine, theirs, strict=True))
    text = f"differ by {worst:.1e} of {course.bound:g} in {len(mine)} steps; last {mine[-1]:.4f}"
    return Row(what, text, worst <= course.bound and mine[-1] < mine[0])


def child_losses(names: Sequence[str], kind: str) -> dict[str, list[float] | str]:
    """Of these courses, the losses or the fault of each that was come to."""
    script = str(Path(__file__).with_name("gpu.py"))
    command = [sys.executable, script, "--losses", json.dumps(list(names)), "--device", kind]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment_of(kind)
    )
    found: dict[str, list[float] | str] = dict(found_in(done.stdout))
    if done.returncode and not found:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it says nothing"])[-1])
    return found


def tell_losses(names: Sequence[str], device: torch.device) -> None:
    planned = courses(device)
    for name in names:
        try:
            engine, found = trained(card(planned[name].shape), device, STEPS)
            engine.close()
        except Exception as error:
            tell((name, fault_of(error)))
            continue
        tell((name, found))


def resume(device: torch.device) -> Iterator[Row]:
    """Steps after a load from a file against the steps that went straight on; then a micro batch
    computed twice, as `tr11 compute-check` asks for it.
    """
    allow_repeatable_kernels()
    torch.use_deterministic_algorithms(True, warn_only=True)
    config = card(small("bf16" if device.type == "cuda" else "fp32"))
    info, half = CheckpointInfo({"pipeline": 1, "data": 1, "tensor": 1}, {}), STEPS // 2
    with tempfile.TemporaryDirectory() as folder:
        engine, _ = trained(config, device, half)
        saver = AsyncSaver(Path(folder), print, group=engine.mesh.cpu_group)
        extras = Extras({"consumed_samples": half, "consumed_tokens": half})
        saver.start(half, engine.sharded_state(), extras, info)
        straight = [step(engine, number) for number in range(half, STEPS)]
        outcome = saver.wait()[0]
        saver.close()
        engine.close()
        if not isinstance(outcome, Finished):
            yield Row("save", str(outcome.fault), False)
            return
        other, _ = trained(config, device, 1)
        state = other.sharded_state()
        loaded = store.load(Path(folder), half, state, info)
        other.finish_load(replace(state, optimizer_step=loaded.optimizer_step))
        resumed = [step(other, number) for number in range(half, STEPS)]
        (checked,) = check_workers(other.stage(), other.mesh, 1, STEPS)
        other.close()
    text = "bit for bit" if resumed == straight else f"{straight} without, {resumed} with it"
    yield Row(f"{STEPS - half} steps after a save and a load", text, resumed == straight)
    repeats = checked.first == checked.second and not checked.fault
    text = checked.fault or f"{len(checked.first)} results {'repeat' if repeats else 'differ'}"
    yield Row("a micro batch computed twice", text, repeats)


LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "swiglu", "key_value_heads": 4, "linear_biases": False, "tied_embeddings": False,
    "embedding_layernorm": False, "position_embedding": "rotary", "rotary_base": 5e5, "rotary_factor": 8.0,
    "rotary_original_length": 8192,
}  # fmt: skip
