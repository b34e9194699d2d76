"""What a step may take on an H100, from parts that were measured there and from what a step is
counted to do now.

    python benchmarks/forecast.py [--results FILE]

A **forecast**, not a measurement: since the first H100 (`FIRST`, see RESULTS.md) the trainer's code
has changed, and no GPU has seen it. Counted is a whole step of the same model by the real engine on
meta tensors, in bf16 and in 8-bit floats. Three ways to add up show how far such a sum can be
trusted. The tables go into benchmarks/RESULTS.md; a test holds them to what this prints. `make gpu`
measures what is forecast here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
from gpu_rows import put_block
from models import Shape, card
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.trainer.counting import PRODUCTS, Counts
from tests.trainer.meta_world import meta_stage
from trainer.config.kernel_choice import Device
from trainer.contract.record import Record
from trainer.metrics.throughput import utilization
from trainer.schedule.flops import count_parameters

RESULTS = Path(__file__).with_name("RESULTS.md")
MARKS = ("<!-- forecast: begin -->", "<!-- forecast: end -->")
PEAK_TFLOPS = 989.4  # of an H100 SXM in bf16
GOAL, GOAL_FLOAT8 = 60.0, 750.0  # per cent of it; TFLOPs
MODEL = Shape(6, 4096, 32, 65536, 2048, 8, 1, "bf16")
SAVED = Shape(24, 1024, 16, 50304, 2048, 4, 2, "bf16")  # of the goal for saves
FLOAT8 = replace(MODEL, own=(("precision", "float8", True),))
HOPPER = Device("cuda", (9, 0))
STATE_BYTES = 14  # saved of a parameter: weight in bf16; master and two moments in fp32
PARAMETERS_176B, GPUS_176B, STEP_176B = 176.2e9, 384, 100.0  # seconds


class FirstH100(Record):
    """Milliseconds on one H100 of 80 GB, torch 2.11, of the model above: a step, its parts as
    profiled in it, and parts measured alone. `bandwidth`: bytes a second of AdamW, of the bytes
    that it is counted to move.
    """

    step: float = 287.7
    step_in_float8: float = 227.1  # with compiled blocks
    products: float = 193.0
    adamw: float = 16.0
    attention: float = 3.27  # of a block, alone
    attention_cudnn: float = 2.27  # of a block without ALiBi, alone
    rotary: float = 320.0  # a step
    block: float = 38.4  # alone, attention outside of the compiled parts
    block_whole: float = 34.6  # alone, compiled as one with flex attention inside
    head: float = 41.7  # with the loss, alone: one piece, compiled soft-max
    copy_of_a_gib: float = 21.0  # to pinned memory
    digest: float = 1.09  # GiB a second, SHA-256 on one core of its host
    saved_tflops: float = 363.0  # of a model as small as SAVED, through the whole command
    # What the code of then moved besides, and does not now: counted in RESULTS.md, "The loss" and
    # "What a step moves".
    loss_bytes: float = 17e9
    gradient_bytes: float = 12e9

    def milliseconds(self, moved: float, adamw_bytes: float) -> float:
        """Of so many bytes at AdamW's rate."""
        return moved / (adamw_bytes / self.adamw)


FIRST = FirstH100()


def counted(shape: Shape) -> Counts:
    """A step of one worker on meta tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.engine.device_facts", lambda _: HOPPER)
        with meta_stage(card(shape)) as worker:
            return worker.counted(shape.accumulated)


def flops_of_a_step(shape: Shape = MODEL) -> float:
    """That the model needs, which MFU counts."""
    samples = shape.micro * shape.accumulated
    used = utilization(card(shape), samples, 1.0, 1, PEAK_TFLOPS)
    return used.model_tflops


def parts(found: Counts) -> dict[str, list[tuple[str, float]]]:
    """Three sums, each of (what, milliseconds)."""
    adamw = found.bytes["_fused_adamw"]
    attention = sum(size for name, size in found.bytes.items() if name.startswith("flex_attention"))
    loss, gradients = (
        FIRST.milliseconds(size, adamw) for size in (FIRST.loss_bytes, FIRST.gradient_bytes)
    )
    rest = found.total_bytes - adamw - attention
    norm, copies = found.bytes["linalg_vector_norm"], found.bytes["copy"]
    return {
        "differences from the step of then": [
            ("the step of then, measured", FIRST.step),
            (
                "6 blocks compiled whole, by what one gained alone",
                6 * (FIRST.block_whole - FIRST.block),
            ),
            ("the loss: bytes that it moves no more, counted", -loss),
            ("gradients written over, not added: counted", -gradients),
        ],
        "parts measured alone": [
            ("6 blocks compiled whole", 6 * FIRST.block_whole),
            ("head and loss", FIRST.head),
            ("AdamW, as profiled", FIRST.adamw),
            ("norm of the gradients: bytes counted", FIRST.milliseconds(norm, adamw)),
            (
                "gradients into fp32 and other copies: bytes counted",
                FIRST.milliseconds(copies, adamw),
            ),
        ],
        "products as profiled, the rest by its bytes, nothing compiled": [
            ("matrix products, as profiled", FIRST.products),
            ("6 times flex attention, measured alone", 6 * FIRST.attention),
            ("AdamW, as profiled", FIRST.adamw),
            ("all else: bytes counted", FIRST.milliseconds(rest, adamw)),
        ],
    }


def share(milliseconds: float, shape: Shape = MODEL) -> float:
    """MFU in per cent."""
    return 100 * flops_of_a_step(shape) / (milliseconds / 1000) / PEAK_TFLOPS


class OtherGoal(Record):
    """A step that was measured then, in milliseconds, and what is wanted of it, in per cent."""

    name: str
    shape: Shape
    then: float
    goal: float


OTHER_GOALS = (
    OtherGoal("24 x 2048", Shape(24, 2048, 16, 50304, 2048, 8, 1, "bf16"), 296.1, 55.0),
    OtherGoal("one block of the 176B", Shape(1, 14336, 112, 4096, 2048, 2, 4, "bf16"), 472.4, 58.0),
)


def less(shape: Shape, adamw: float) -> tuple[float, float, float]:
    """Milliseconds that a step of this shape takes less than then: of its blocks, its loss and its
    gradients. By those of the model above: a block's grow as its activations do, the loss's as its
    logits, the gradients' as the parameters.
    """
    activations = shape.tokens * shape.hidden / (MODEL.tokens * MODEL.hidden)
    logits = shape.tokens * shape.vocabulary / (MODEL.tokens * MODEL.vocabulary)
    few, many = (count_parameters(card(one)).total for one in (shape, MODEL))
    return (
        shape.layers * activations * (FIRST.block - FIRST.block_whole),
        FIRST.milliseconds(FIRST.loss_bytes, adamw) * logits,
        FIRST.milliseconds(FIRST.gradient_bytes, adamw) * few / many,
    )


def other_goals(found: Counts) -> str:
    """What was measured then beside the model above."""
    adamw = found.bytes["_fused_adamw"]
    lines = [
        "| other goals, ms | then, **measured** | blocks, loss and gradients of now | forecast | MFU | goal |",
        "|---|---|---|---|---|---|",
    ]
    for one in OTHER_GOALS:
        gained = less(one.shape, adamw)
        now = one.then - sum(gained)
        listed = ", ".join(f"-{size:.1f}" for size in gained)
        lines.append(
            f"| {one.name} | {one.then:.1f} | {listed} | {now:.1f} | {share(now, one.shape):.1f} % | {one.goal:.0f} % |"
        )
    alibi = FIRST.step - sum(less(MODEL, adamw))
    rotary = alibi - MODEL.layers * (FIRST.attention - FIRST.attention_cudnn)
    lines.append(
        f"| rotary, its rotation in the block's graph, cuDNN | {FIRST.rotary:.1f} | attention beside ALiBi's"
        f" {rotary - alibi:.1f} | {rotary:.1f} | {share(rotary):.1f} % | ALiBi's {alibi:.1f} ms |"
    )
    return "\n".join([*lines, "", added_by_products(OTHER_GOALS[-1], adamw)])


def added_by_products(short: OtherGoal, adamw: float) -> str:
    """What is left to take where gradients of several micro batches are added."""
    moved, shape = counted(short.shape), short.shape
    count = count_parameters(card(shape)).total
    spared = 4 * (shape.accumulated - 1) * count  # a bf16 gradient, written and read
    now = short.then - sum(less(shape, adamw)) - FIRST.milliseconds(spared, adamw)
    return (
        f"What {short.name} falls short of its goal by is the sum of its gradients: {moved.bytes['add'] / 1e9:.1f} of"
        f" {moved.total_bytes / 1e9:.1f} GB that\nno product moves. A product that adds to the fp32 sum"
        f" by itself would spare {spared / 1e9:.1f} GB: {now:.1f} ms, {share(now, shape):.1f} %. Not built."
    )


def sums(found: Counts) -> str:
    """The sum of parts against the goal."""
    goal = 1000 * flops_of_a_step() / (GOAL / 100 * PEAK_TFLOPS)
    lines = [
        f"| forecast of a step, ms ({GOAL:.0f} % is {goal:.1f}) | parts | sum | MFU |",
        "|---|---|---|---|",
        f"| then, **measured** | | {FIRST.step:.1f} | {share(FIRST.step):.1f} % |",
    ]
    for name, entries in parts(found).items():
        total = sum(size for _, size in entries)
        listed = "; ".join(f"{what} {size:.1f}" for what, size in entries)
        lines.append(f"| {name} | {listed} | {total:.1f} | {share(total):.1f} % |")
    return "\n".join(lines)


def float8(wide: Counts, narrow: Counts) -> str:
    """What 8-bit floats change of a step, and what the step of then would take now."""
    products = sum(wide.operations[name] for name in PRODUCTS)
    scaled = narrow.operations["_scaled_mm"]
    left = sum(narrow.operations[name] for name in PRODUCTS) - scaled
    adamw = wide.bytes["_fused_adamw"]
    less = FIRST.milliseconds(FIRST.loss_bytes + FIRST.gradient_bytes, adamw)
    few = FIRST.step_in_float8 - less
    fewest = few + 6 * (FIRST.block_whole - FIRST.block)
    then, now, best = (
        1000 * flops_of_a_step() / milliseconds
        for milliseconds in (FIRST.step_in_float8, few, fewest)
    )
    rate = (
        f"then **measured** {then:.0f}; **forecast** {now:.0f} with the loss and gradients of now"
    )
    lines = [
        "| of a step | bf16 | float8 |",
        "|---|---|---|",
        f"| matrix products but attention's | {products} in bf16 | {scaled} in 8 bits, {left} in bf16: the head |",
        f"| operations for each product in 8 bits | | {extra_operations(wide, narrow):.0f}: scale and rounding |",
        f"| GB that no product moves, uncompiled | {wide.total_bytes / 1e9:.1f} | {narrow.total_bytes / 1e9:.1f} |",
        f"| TFLOPs, compiled blocks (goal {GOAL_FLOAT8:.0f}) | | {rate}, {best:.0f} if whole blocks gain as in bf16 |",
    ]
    return "\n".join(lines)


def extra_operations(wide: Counts, narrow: Counts) -> float:
    """Operations that each product in 8 bits brings along."""
    return (narrow.operations.total() - wide.operations.total()) / narrow.operations["_scaled_mm"]


class Save(Record):
    """A save in the background: GiB a GPU; milliseconds of the forward and backward passes that its
    copy runs beside, and of the update that waits for it.
    """

    name: str
    copied: float
    beside: float
    update: float

    @property
    def copying(self) -> float:
        return self.copied * FIRST.copy_of_a_gib

    @property
    def waits(self) -> float:
        """What the GPU waits for before the update."""
        return max(0.0, self.copying - self.beside)

    @property
    def waits_at_least(self) -> float:
        """If each piece were updated as soon as it is copied: the update then runs beside the copy
        too.
        """
        return max(0.0, self.waits - self.update)

    @property
    def line(self) -> str:
        left = self.waits / FIRST.copy_of_a_gib
        slower = self.waits / (1000 * self.copied / FIRST.digest)
        held = f"{left:.1f} GiB" if left else "none"
        return (
            f"| {self.name} | {self.copied:.1f} | {self.copying:.0f} | {self.beside:.0f} | {self.waits:.0f} |"
            f" {self.waits_at_least:.0f} | {held} | {100 * slower:.1f} % |"
        )


def saves_of(found: Counts) -> list[Save]:
    adamw = found.bytes["_fused_adamw"]
    step = sum(size for _, size in parts(found)["differences from the step of then"])
    update = FIRST.adamw + FIRST.milliseconds(found.bytes["linalg_vector_norm"], adamw)
    whole, few = (count_parameters(card(shape)).total for shape in (MODEL, SAVED))
    short, gib = update * few / whole, STATE_BYTES / 2**30
    step_of_few = 1000 * flops_of_a_step(SAVED) / FIRST.saved_tflops
    share = PARAMETERS_176B / GPUS_176B
    return [
        Save("the model of the goal for saves, on one GPU", gib * few, step_of_few - short, short),
        Save("the model above, on one GPU", gib * whole, step - update, update),
        Save(
            f"176B on {GPUS_176B} GPUs",
            gib * share,
            1000 * STEP_176B,
            update * share / whole,
        ),
    ]


def saves(found: Counts) -> str:
    """What a save in the background adds to the step behind it."""
    heads = (
        "a save in the background", "GiB a GPU", "its copy, ms", "forward and backward beside it", "the GPU then waits",
        "at least, updated in pieces", "to hide it: held twice on the GPU", "of the time that its digest takes",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(save.line for save in saves_of(found))])


def checks() -> str:
    """What is looked at before a save, while the training stands still."""
    with meta_stage(card(MODEL)) as worker:
        adamw = worker.counted(1).bytes["_fused_adamw"]
        worker.reads.clear()
        with Counts() as found:
            worker.engine.disagreeing_parameters()
            worker.engine.not_finite(worker.engine.sharded_state())
        read, milliseconds = (
            found.total_bytes / 1e9,
            FIRST.milliseconds(found.total_bytes, adamw),
        )
        return (
            "Before a save of the model above copies are compared and numbers looked at:"
            f" {read:.1f} GB are read, some {milliseconds:.0f} ms,\nin {found.operations.total()}"
            f" operations, and the host waits for {sum(worker.reads.values())} answers. With the end"
            " of the update before it\nand the planning that is all that a training stands still for."
        )


INTRODUCTION = """\
**A forecast, not a measurement** (`benchmarks/forecast.py`): parts that the first H100 was measured to take, and what a
step of today's code is counted to do on meta tensors: 1.48 billion parameters (6 x 4096), micro batch 8 x 2,048, bf16,
nothing recomputed, one GPU. Bytes are turned into time at the rate at which AdamW moved its own there. Of three sums
none is the truth: parts measured alone overlap less than in a step, and differences between them more. `make gpu`
measures the same."""


def tables() -> str:
    wide, narrow = counted(MODEL), counted(FLOAT8)
    return "\n\n".join(
        (
            INTRODUCTION,
            sums(wide),
            other_goals(wide),
            float8(wide, narrow),
            saves(wide),
            checks(),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    text = tables()
    print(text)
    put_block(options.results, text, MARKS, "A step on an H100, forecast")


if __name__ == "__main__":
    main()
