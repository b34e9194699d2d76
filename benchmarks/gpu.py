"""`make gpu`: on the first GPU at hand, in 8 minutes: is it right there, and how fast?

    python benchmarks/gpu.py [--device cuda|cpu] [--results FILE] [--json FOLDER] [SECTION ...]

Sections, the most important first, each with its own time and in a process of its own, so that one
that crashes or hangs costs no other:

    kernels    each attention kernel forward and backward against plain arithmetic
    losses     fp32, with dropout and of a Llama too, bf16, float8 and fp16 against the processor's
    resume     a save and a resume, bit for bit; the check of the arithmetic
    speed      the goals: 1.5 B parameters plain, compiled and compiled in float8, beside torch.compile
    saves      how long a save in the background stops the training, and steps while it writes
    attention  kernels without a bias beside each other: cuDNN, flash, flex
    large      24 x 2048 (1.3 B), and one block of the 176B
    profile    a trace of two steps
    kinds      rotary, Llama, dropout, fp16, float8, BERT, T5

Peers are measured in the same run: torch.compile, transformers, or our own plain GPT; compiled and
in float8 the last loss must be that of the plain one. What the time does not reach is said to be
left out, and what a section found before it crashed or ran out of time is kept; only a check that
was left out fails. The table goes into
benchmarks/RESULTS.md, with --json each figure and its peer's into files. Without a GPU it says so,
exit status 2; `--device cpu` runs the same code on small shapes to check it, and writes nothing
unless --results or --json names a place. Exit status 1: a check failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_training import WARM_UP, environment_of, in_child
from models import DECODER, Shape, card
from msgspec import to_builtins
from msgspec.structs import replace
from torch import Tensor
from torch.nn.attention import SDPBackend

from tr11ops.agent.allocation import free_port
from trainer.checkpoint import store
from trainer.checkpoint.publishing import CheckpointInfo, Extras, Finished
from trainer.checkpoint.writer import AsyncSaver
from trainer.config.card import TrainerConfig
from trainer.config.kernel_choice import HOPPER, choose_kernel, float8_obstacle
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.requests import Request, RequestAnswer
from trainer.debug.profile import StepProfiler
from trainer.engine import Engine, init_distributed
from trainer.model.kernels import (
    BACKENDS,
    CausalKernel,
    DenseKernel,
    FlexKernel,
    Kernel,
    PaddedKernel,
    device_facts,
)
from trainer.model.positions import alibi_slopes
from trainer.model.random import Drop
from trainer.parallel.mesh import Mesh, worker_device
from trainer.schedule.devices import peak_tflops
from trainer.schedule.utilization import utilization
from trainer.spikes.corruption_check import allow_repeatable_kernels, check_workers

BUDGET_SECONDS = 480.0
SPARE_SECONDS = 5.0  # a section must end by itself, or what it was about to find is lost
# of one system in a process of its own: 15 s until it computes, then compilation and 11 steps
CASE_SECONDS = 45.0
COMPILED_SECONDS = 60.0
RESULTS = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"
FOUND = "found: "  # begins a line of a child that holds a row or a course
STEPS = 8
DROPOUT = 0.1


class Row(Record):
    """One line of the table. `fine`: None for a figure that is no check."""

    what: str
    found: str
    fine: bool | None = None
    figures: dict[str, Any] | None = None


# ----------------------------------------------------------------------------- attention kernels
def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    kept: Tensor | float = 1.0,
    marks: Tensor | None = None,
) -> Tensor:
    """Attention as arithmetic, in fp64; its weights times `kept`. With `marks` [batch, keys] of
    padding (0) it looks ahead too.
    """
    query, key, value = query.double(), key.double(), value.double()
    shared = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    place = torch.arange(query.shape[2], device=query.device)
    distance = place[None, :] - place[:, None]
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * distance
    hidden = distance > 0 if marks is None else (marks == 0)[:, None, None, :]
    return (scores.masked_fill(hidden, -math.inf).softmax(dim=3) * kept) @ value


def drop_of_two(device: torch.device) -> Drop:
    """Dropout of two samples."""
    return Drop(DROPOUT, torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device))


def drops_the_same(
    device: torch.device,
    kernel: Kernel,
    slopes: Tensor | None,
    length: int,
    dtype: torch.dtype,
    marks: Tensor | None = None,
) -> Row:
    """Relative error of output and gradients with dropout, under the mask that its words make on
    this device.
    """
    heads = [
        torch.randn(2, 4, length, 64, device=device, dtype=dtype, requires_grad=True) for _ in "qkv"
    ]
    grain = torch.randn(2, 4, length, 64, device=device, dtype=dtype)
    drop = drop_of_two(device)
    mixed = kernel(heads[0], heads[1], heads[2], kernel.mask(heads[0], length, marks), drop)
    found = [mixed, *torch.autograd.grad(mixed, heads, grain)]
    ones = torch.ones(2, 4, length, length, dtype=torch.float64, device=device)
    kept = drop_of_two(device).dropped(ones)
    plain = [each.detach().double().requires_grad_() for each in heads]
    expected = reference(plain[0], plain[1], plain[2], slopes, kept, marks)
    wanted = [expected, *torch.autograd.grad(expected, plain, grain.double())]
    errors = [_relative(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)]
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    text = (
        f"{errors[0]:.1e} forward, {max(errors[1:]):.1e} backward, of {bound:g} allowed ({dtype})"
    )
    what = f"attention kernel flex{'' if marks is None else ', padded'} with dropout {DROPOUT:g}"
    return Row(what, text, max(errors) <= bound)


class Tried(Record):
    """A kernel with what it is compared by: ALiBi's slopes, heads of keys and values, marks of
    padding.
    """

    kernel: Kernel
    slopes: Tensor | None = None
    key_heads: int = 4
    marks: Tensor | None = None


def tried_kernels(device: torch.device, length: int) -> dict[str, Tried]:
    """All that the device has."""
    slopes = torch.tensor(alibi_slopes(4), device=device)
    on_gpu = device.type == "cuda"
    fused, efficient = ((BACKENDS[name] if on_gpu else ()) for name in ("causal", "efficient"))
    marks = half_padded(device, length)
    cases = {
        "causal": Tried(CausalKernel(fused)),
        "causal, shared heads": Tried(CausalKernel(fused[:1]), key_heads=2),
        "dense": Tried(DenseKernel(slopes, False, device), slopes),
        "padded": Tried(PaddedKernel(efficient), marks=marks),
    }
    if on_gpu:
        cases["efficient"] = Tried(DenseKernel(slopes, False, device, efficient), slopes)
        cases["flex"] = Tried(FlexKernel(slopes, False, compiled=True), slopes)
        facts = device_facts(device)
        if facts.maker == "nvidia" and facts.capability >= HOPPER:
            alone = CausalKernel((SDPBackend.CUDNN_ATTENTION,))
            # as a training takes it: flash is behind it
            either = CausalKernel(BACKENDS["cudnn"])
            cases |= {"cudnn": Tried(alone), "cudnn, shared heads": Tried(either, key_heads=2)}
    return cases


def half_padded(device: torch.device, length: int) -> Tensor:
    """Marks of two samples, the second with padding."""
    marks = torch.ones(2, length, dtype=torch.int64, device=device)
    marks[1, length // 2 :] = 0
    return marks


def kernels(device: torch.device) -> Iterator[Row]:
    """Relative error of output and gradients, of each kernel that the device has."""
    on_gpu = device.type == "cuda"
    dtype, bound = (torch.bfloat16, 2e-2) if on_gpu else (torch.float32, 1e-5)
    length = 1024 if on_gpu else 96
    for name, case in tried_kernels(device, length).items():
        generator = torch.Generator().manual_seed(1)
        heads = [
            torch.randn(2, count, length, 64, generator=generator)
            .to(device, dtype)
            .requires_grad_()
            for count in (4, case.key_heads, case.key_heads)
        ]
        grain = torch.randn(2, 4, length, 64, generator=generator).to(device, dtype)
        try:
            mask = case.kernel.mask(heads[0], length, case.marks)
            mixed = case.kernel(heads[0], heads[1], heads[2], mask, None)
            found = [mixed, *torch.autograd.grad(mixed, heads, grain)]
        except Exception as error:
            yield Row(f"attention kernel {name}", fault_of(error), False)
            continue
        plain = [head.detach().double().requires_grad_() for head in heads]
        expected = reference(plain[0], plain[1], plain[2], case.slopes, marks=case.marks)
        wanted = [expected, *torch.autograd.grad(expected, plain, grain.double())]
        errors = [_relative(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)]
        text = f"{errors[0]:.1e} forward, {max(errors[1:]):.1e} backward, of {bound:g} allowed ({dtype})"
        yield Row(f"attention kernel {name}", text, max(errors) <= bound)
    if on_gpu:
        slopes = torch.tensor(alibi_slopes(4), device=device)
        flex = FlexKernel(slopes, False, compiled=True)
        yield drops_the_same(device, flex, slopes, length, dtype)
        padded = PaddedKernel(flex=FlexKernel(None, False, compiled=True))
        marks = half_padded(device, length)
        yield drops_the_same(device, padded, None, length, dtype, marks)
    chosen = choose_kernel(
        card(small()).model, False, "bf16" if on_gpu else "fp32", device_facts(device)
    )
    yield Row("kernel of the benchmark's card", str(chosen), chosen.is_fused)


def fault_of(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs).norm() / theirs.norm())


# ----------------------------------------------------------------------------- training
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
    command = [sys.executable, __file__, "--losses", json.dumps(list(names)), "--device", kind]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment_of(kind)
    )
    found: dict[str, list[float] | str] = dict(found_in(done.stdout))
    if done.returncode and not found:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it says nothing"])[-1])
    return found


def found_in(output: str) -> list[Any]:
    """What a child has told so far, each on a line of its own."""
    return [
        json.loads(line.removeprefix(FOUND))
        for line in output.splitlines()
        if line.startswith(FOUND)
    ]


def tell(found: Any) -> None:
    print(f"{FOUND}{json.dumps(found)}", flush=True)


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
COMPILED = (("model", "compile_blocks", True),)
BESIDE_GPT = "tr11 gpt"
# of the last loss, beside that of the plain blocks in bf16
COMPILED_BOUND, FLOAT8_BOUND = 0.02, 0.05


class Case(Record):
    """What is timed. `peer`: system and name of what it is compared with, which is measured before
    it.

    `seconds`: of each of the two, at most. `goal`: what is wanted of an H100. `bound`: how far its
    last loss may be from that of BESIDE_GPT, which begins with the same weights.
    """

    what: str
    shape: Shape
    peer: str = BESIDE_GPT
    seconds: float = CASE_SECONDS
    goal: str = ""
    bound: float | None = None


def of_speed(on_gpu: bool) -> Iterator[Case]:
    """The goals at 1.5 B parameters."""
    base = usual(on_gpu)
    yield Case("gpt", base, "torch.compile gpt", COMPILED_SECONDS)
    if on_gpu:  # a processor compiles for minutes
        compiled = replace(base, own=COMPILED)
        peer = "torch.compile gpt"
        yield Case(
            "compiled blocks",
            compiled,
            peer,
            COMPILED_SECONDS,
            "MFU of 60 %, and ahead of its peer",
            COMPILED_BOUND,
        )
        fast = replace(base, own=(*COMPILED, ("precision", "float8", True)))
        yield Case(
            "float8, compiled blocks",
            fast,
            BESIDE_GPT,
            COMPILED_SECONDS,
            "750 TFLOPs",
            FLOAT8_BOUND,
        )


def of_large(on_gpu: bool) -> Iterator[Case]:
    """Other sizes, which have published figures or stand for the 176B."""
    base = usual(on_gpu)
    deep, wide = base, base
    if on_gpu:
        deep = replace(base, layers=24, hidden=2048, heads=16, vocabulary=50304, own=COMPILED)
        wide = Shape(1, 14336, 112, 4096, 2048, 2, 4, "bf16", own=COMPILED)
    yield Case("24 x 2048 (1.3 B), compiled blocks", deep, "", COMPILED_SECONDS, "MFU of 55 %")
    yield Case("one block of the 176B, compiled", wide, "", COMPILED_SECONDS, "MFU of 58 %")


def of_kinds(on_gpu: bool) -> Iterator[Case]:
    """Other models, each beside the plain GPT or transformers' model."""
    base = usual(on_gpu)
    llama = tuple(("model", key, value) for key, value in LLAMA.items())
    rotary = (("model", "position_embedding", "rotary"),)
    yield Case("rotary", replace(base, own=rotary), goal="not slower than its peer")
    yield Case(f"dropout {DROPOUT:g}", replace(base, own=DROPPING), goal="MFU of 45 %")
    yield Case("llama, positions stretched", replace(base, own=llama))
    masked = replace(small(), length=DECODER)
    if on_gpu:
        masked = Shape(24, 1024, 16, 30592, 512, 16, 2, "bf16")
    for family in ("bert", "t5"):
        yield Case(family, replace(masked, family=family), f"transformers {family}")
    yield Case("float8", replace(base, own=(("precision", "float8", True),)))
    if on_gpu:  # a processor computes no fp16
        yield Case("fp16", replace(base, own=(("precision", "dtype", "fp16"),)))


def usual(on_gpu: bool) -> Shape:
    """6 x 4096 with 65,536 words, 1.5 B parameters, in the micro batch that a card of 80 GB has
    room for.
    """
    if not on_gpu:
        return small("bf16")
    base = Shape(6, 4096, 32, 65536, 2048, 8, 1, "bf16")
    has_room = (
        not torch.cuda.is_available()
        or torch.cuda.get_device_properties(0).total_memory > 70 * 10**9
    )
    return base if has_room else replace(base, micro=2, accumulated=4)


CASES = {"speed": of_speed, "large": of_large, "kinds": of_kinds}


def compared(
    cases: Callable[[bool], Iterator[Case]],
    device: torch.device,
    seconds: float,
    measured: dict[str, float],
) -> Iterator[Row]:
    """Steps of each case after its peer, without recomputation; see `gpu_training.py`.

    What does not fit into the rest of `seconds` is left out, a peer before a case; a shorter one
    behind may still fit. `measured`: seconds of a step by what was measured before. A case with a
    `bound` follows the plain one in its section.
    """
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "processor"
    options = argparse.Namespace(steps=8 if on_gpu else 1, device=device.type)
    until = time.monotonic() + seconds - SPARE_SECONDS
    plain: float | None = None
    for case in cases(on_gpu):
        ours = f"tr11 {case.what}"
        for what in (case.peer, ours) if is_to_be_measured(case, measured) else (ours,):
            left, needed = until - time.monotonic(), case.seconds
            if what != ours:
                needed += case.seconds
            if left < needed:
                yield left_out(what, needed, left)
                continue
            system = what.removesuffix(f" {case.what}")
            found = in_child(system, case.shape, options, case.seconds)
            if isinstance(found, str):
                yield Row(what, found, False if what == ours else None)
                continue
            measured[what] = found["seconds"]
            if what == BESIDE_GPT:
                plain = found["loss"]
            beside = case.peer if what == ours else ""
            row = timed(what, case, found, name, (beside, measured.get(beside)))
            if what == ours and case.bound is not None and plain is not None:
                row = with_loss(row, abs(found["loss"] - plain), case.bound)
            yield row


def with_loss(row: Row, differs: float, bound: float) -> Row:
    """A measured step that is right, or is not, by its last loss."""
    text = f"{row.found}; its last loss differs from {BESIDE_GPT}'s by {differs:.1e} of {bound:g}"
    return replace(row, found=text, fine=differs <= bound)


def is_to_be_measured(case: Case, measured: dict[str, float]) -> bool:
    """Whether the peer is another system's step of this case."""
    return case.peer.endswith(f" {case.what}") and case.peer not in measured


def left_out(what: str, seconds: float, left: float, fine: bool | None = None) -> Row:
    minutes = BUDGET_SECONDS / 60
    return Row(
        what,
        f"left out: it may take {seconds:.0f} s, {max(0.0, left):.0f} s of {minutes:g} minutes are left",
        fine,
    )


def timed(
    what: str, case: Case, found: dict[str, float], device: str, peer: tuple[str, float | None]
) -> Row:
    """A measured step as a line, and its figures with those of its peer, where that came first."""
    shape = case.shape
    used = utilization(
        card(shape), shape.micro * shape.accumulated, found["seconds"], 1,
        peak_tflops(device, shape.dtype),
    )  # fmt: skip
    share = "peak not known" if used.mfu is None else f"MFU {100 * used.mfu:.1f} %"
    beside = "" if peer[1] is None else f", {peer[1] / found['seconds']:.2f}x {peer[0]}"
    text = f"{1000 * found['seconds']:.1f} ms a step, {shape.tokens / found['seconds']:,.0f} tokens/s, "
    text += f"{used.model_tflops:.1f} TFLOPs, {share}, {found['memory'] / 2**30:.1f} GiB{beside}"
    figures = {
        "seconds": found["seconds"], "tokens_per_second": shape.tokens / found["seconds"],
        "model_tflops": used.model_tflops, "mfu": used.mfu, "memory_bytes": found["memory"],
        "shape": to_builtins(shape), "peer": peer[0], "peer_seconds": peer[1],
    }  # fmt: skip
    goal = f"; goal: {case.goal}" if case.goal and what.startswith("tr11 ") else ""
    return Row(what, f"{text} (median, after {WARM_UP}){goal}", figures=figures)


# -------------------------------------------------------------------------- saves in the background
SAVED_STEPS = 12  # before the first save, and at most beside each


def saves(device: torch.device) -> Iterator[Row]:
    """What two saves in the background cost the training: the checks and the time in `start`, and
    of the steps until they have ended.

    As in a training: memory is got ahead, and the copies are waited for by the update alone.
    """
    shape = (
        Shape(24, 1024, 16, 50304, 2048, 4, 2, "bf16") if device.type == "cuda" else small("bf16")
    )
    config, draw = card(shape), torch.Generator().manual_seed(1)
    join(device)
    engine = Engine.build(config, Mesh.create(config.parallel, device))
    info = CheckpointInfo({"pipeline": 1, "data": 1, "tensor": 1}, {})
    with tempfile.TemporaryDirectory() as folder:
        saver = AsyncSaver(Path(folder), print, group=engine.mesh.cpu_group, is_held=True)
        engine.before_update(saver.hold)
        saver.reserve(engine.sharded_state())

        def one_step() -> float:
            windows = shape.windows(draw)
            began = time.perf_counter()
            batches = (
                (window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows
            )
            engine.train_step(batches, config.batch.global_batch_size)
            return time.perf_counter() - began

        alone = statistics.median([one_step() for _ in range(SAVED_STEPS)][WARM_UP:])
        for number, which in enumerate(("first", "second"), start=1):
            began = time.perf_counter()
            engine.disagreeing_parameters()
            state = engine.sharded_state()
            engine.not_finite(state)
            saver.start(
                number,
                state,
                Extras({"consumed_samples": number, "consumed_tokens": number}),
                info,
            )
            stall, outcome = time.perf_counter() - began, None
            beside: list[float] = []
            while len(beside) < BEHIND or (outcome is None and len(beside) < SAVED_STEPS):
                beside.append(one_step())
                outcome = outcome or saver.poll()
            outcome = outcome or saver.wait()[0]
            if not isinstance(outcome, Finished):
                yield Row(f"{which} save in the background", str(outcome.fault), False)
                break
            yield of_save(which, outcome, stall, beside, alone)
        saver.close()
    engine.close()


# The host leaves a step when the norm of its gradients has come. What the GPU then waits for before
# the update, the copies, it sees in the next one.
BEHIND = 2


def of_save(
    which: str, saved: Finished, stall: float, beside: Sequence[float], alone: float
) -> Row:
    """A save as a line. `alone`: seconds of a step without one."""
    slower = statistics.median(beside) / alone - 1.0
    later = sum(beside[:BEHIND]) - BEHIND * alone
    text = (
        f"{saved.bytes / 2**30:.2f} GiB: the training stood still for {stall:.3f} s (goal: 0.2 s), the {BEHIND} steps"
        f" behind it took {1000 * later:+.1f} ms more; steps while it was written, {len(beside)} of them,"
        f" {100 * slower:+.1f} % (goal: 3 %); {1000 * alone:.1f} ms a step alone"
    )
    figures = {
        "bytes": saved.bytes,
        "stall": stall,
        "steps_beside": list(beside),
        "step_alone": alone,
    }
    return Row(f"{which} save in the background", text, figures=figures)


# ------------------------------------------------------------------------- attention without a bias
def attention(device: torch.device) -> Iterator[Row]:
    """Forward and backward of causal attention without a bias, by each kernel that could serve a
    rotary model.
    """
    on_gpu = device.type == "cuda"
    size = (8, 32, 2048, 128) if on_gpu else (1, 2, 64, 16)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    ways: dict[str, Kernel] = {"torch's choice": CausalKernel(())}
    if on_gpu:
        slopes = torch.tensor(alibi_slopes(size[1]), device=device)
        ways = {
            "flex": FlexKernel(None, False, compiled=True),
            "cuDNN": CausalKernel((SDPBackend.CUDNN_ATTENTION,)),
            "flash": CausalKernel((SDPBackend.FLASH_ATTENTION,)),
            "flex with ALiBi": FlexKernel(slopes, False, compiled=True),
        }
    heads = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in "qkv"]
    grain = torch.randn(size, device=device, dtype=dtype)
    first: float | None = None
    for name, kernel in ways.items():
        try:
            mask = kernel.mask(heads[0], size[2], None)
            seconds = median_seconds(partial(there_and_back, kernel, heads, mask, grain), device)
        except Exception as error:
            yield Row(f"attention by {name}", fault_of(error))
            continue
        first = first or seconds
        text = f"{1000 * seconds:.2f} ms forward and backward, {first / seconds:.2f}x {next(iter(ways))}"
        yield Row(f"attention by {name}", text, figures={"seconds": seconds, "size": list(size)})


def there_and_back(kernel: Kernel, heads: Sequence[Tensor], mask: Any, grain: Tensor) -> None:
    torch.autograd.grad(kernel(heads[0], heads[1], heads[2], mask, None), list(heads), grain)


def median_seconds(action: Callable[[], None], device: torch.device, repeats: int = 10) -> float:
    """Of one call, after some that are not counted."""
    found = []
    for _ in range(WARM_UP + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[WARM_UP:])


def profiled(device: torch.device) -> Iterator[Row]:
    """A trace of two steps, as `tr11 profile` asks for it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder), "gpu", "main", "")
        profiler = StepProfiler(
            paths, AttemptIdentity("1", 1, paths.stop_request("1")), (0, 1), device
        )
        engine, _ = trained(card(small()), device, 1)
        profiler.start(Request("profile", id=1, steps=2, rank=0), 1)
        for number in (2, 3):
            step(engine, number)
            profiler.after_step(number)
        engine.close()
        answer = RequestAnswer.read(paths.answer(1))
        files = (
            sorted(paths.profiles("1").iterdir())
            if answer is not None and answer.step is not None
            else []
        )
        text = ", ".join(
            f"{file.suffixes[-2]}{file.suffixes[-1]} {file.stat().st_size / 1e6:.2f} MB"
            for file in files
        )
        yield Row(
            "profile of two steps", text or (answer.message if answer else "no answer"), bool(files)
        )


# ----------------------------------------------------------------------------- the whole
class Section(Record):
    """A part of the whole. It takes `seconds` at most and what those before it left of theirs, and
    is begun where `least` are left.

    `make`: its rows; None for one of `CASES`. `is_check`: left out, it counts as failed.
    """

    seconds: float
    least: float
    make: Callable[[torch.device], Iterator[Row]] | None = None
    is_check: bool = False


SECTIONS: dict[str, Section] = {
    "kernels": Section(80, 70, kernels, is_check=True),
    "losses": Section(110, 80, losses, is_check=True),
    "resume": Section(40, 40, resume, is_check=True),
    "speed": Section(190, COMPILED_SECONDS + SPARE_SECONDS, is_check=False),
    "saves": Section(60, 60, saves),
    "attention": Section(30, 30, attention),
    "large": Section(2 * COMPILED_SECONDS + SPARE_SECONDS, COMPILED_SECONDS + SPARE_SECONDS),
    "profile": Section(30, 30, profiled, is_check=True),
    "kinds": Section(BUDGET_SECONDS, CASE_SECONDS + SPARE_SECONDS),
}


def rows_of(
    name: str, device: torch.device, seconds: float, measured: dict[str, float]
) -> Iterator[Row]:
    """What a section finds, in this process."""
    make = SECTIONS[name].make
    return compared(CASES[name], device, seconds, measured) if make is None else make(device)


def run_section(
    name: str, kind: str, left: float, before: Sequence[Row] = (), spare: float = 0.0
) -> list[Row]:
    """One section in a process of its own, where `left` seconds are left of the whole. `before`:
    what was found. `spare`: what the sections before it left of their time.
    """
    section = SECTIONS[name]
    if left < section.least:
        return [left_out(name, section.least, left, False if section.is_check else None)]
    seconds = min(section.seconds + spare, left)
    measured = {
        row.what: row.figures["seconds"]
        for row in before
        if row.figures and "seconds" in row.figures
    }
    command = [
        sys.executable,
        __file__,
        "--section",
        name,
        "--device",
        kind,
        "--seconds",
        f"{seconds:.0f}",
    ]
    command += ["--measured", json.dumps(measured)]
    output, fault = with_its_children(command, seconds, environment_of(kind))
    rows = [Row(**row) for row in found_in(output)]
    return rows if fault is None else [*rows, Row(name, fault, False)]


def with_its_children(
    command: Sequence[str], seconds: float, environment: Mapping[str, str]
) -> tuple[str, str | None]:
    """Output of a program, and what is wrong with it. Out of time it ends with all that it started:
    a case that went on alone would take a part of the GPU from those behind it.
    """
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()[0], f"not done within {seconds:.0f} s"
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    if child.returncode:
        return output, (errors.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
    return output, None


def table(title: str, rows: Sequence[Row]) -> str:
    """Markdown; what failed is marked."""
    marks = {None: "", True: "fine", False: "**failed**"}
    lines = [f"{title}", "", "| what | found | |", "|---|---|---|"]
    return "\n".join(
        [
            *lines,
            *(
                f"| {row.what} | {row.found.replace('|', '/')} | {marks[row.fine]} |"
                for row in rows
            ),
        ]
    )


def put_table(path: Path, text: str) -> None:
    put_block(path, text, (BEGIN, END), "On a GPU")


def put_block(path: Path, text: str, marks: tuple[str, str], heading: str) -> None:
    """Replace what stands between the marks, or add it with them at the end, under a heading."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    block = f"{marks[0]}\n{text}\n{marks[1]}"
    before, begin, rest = old.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    new = f"{old.rstrip()}\n\n## {heading}\n\n{block}\n".lstrip()
    if begin and end:
        new = f"{before}{block}{after}"
    path.write_text(new, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path)
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="each figure and its peer's: SECTION.json"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--measured", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--losses", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU here: nothing was checked or measured (--device cpu runs the same code, to check it)"
        )
        return 2
    device = worker_device() if options.device == "cuda" else torch.device("cpu")
    if options.losses:
        tell_losses(json.loads(options.losses), device)
        return 0
    if options.section:
        measured = json.loads(options.measured)
        for row in rows_of(options.section, device, options.seconds, measured):
            tell(to_builtins(row))
        return 0
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    began, planned = time.monotonic(), 0.0
    rows: list[Row] = []
    for name in options.sections or SECTIONS:
        passed = time.monotonic() - began
        spare = max(0.0, planned - passed)
        found = run_section(name, options.device, BUDGET_SECONDS - passed, rows, spare)
        planned += SECTIONS[name].seconds
        if options.json is not None:
            options.json.mkdir(parents=True, exist_ok=True)
            (options.json / f"{name}.json").write_text(
                json.dumps([to_builtins(row) for row in found], indent=1) + "\n"
            )
        for row in found:
            rows.append(row)
            print(
                f"{ {None: '    ', True: 'fine', False: 'FAIL'}[row.fine] } {row.what}: {row.found}",
                flush=True,
            )
    name = (
        torch.cuda.get_device_name(device)
        if options.device == "cuda"
        else "this machine's processor (a check)"
    )
    title = f"{name}, torch {torch.__version__}, {time.strftime('%d %B %Y')}, {time.monotonic() - began:.0f} s:"
    results = options.results or (RESULTS if options.device == "cuda" else None)
    if results is not None:
        put_table(results, table(title, rows))
        print(f"written to {results}")
    return 1 if any(row.fine is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
