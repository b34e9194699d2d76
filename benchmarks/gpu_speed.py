"""Steps of large shapes on the device, each after its peer."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from gpu_courses import DROPOUT, DROPPING, LLAMA, small
from gpu_rows import SPARE_SECONDS, Row, left_out
from gpu_training import WARM_UP, in_child
from models import DECODER, Shape, card
from msgspec import to_builtins
from msgspec.structs import replace

from trainer.contract.record import Record
from trainer.metrics.throughput import utilization
from trainer.schedule.devices import peak_tflops

# of one system in a process of its own: 15 s until it computes, then compilation and 11 steps
CASE_SECONDS = 45.0
COMPILED_SECONDS = 60.0
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
