"""Defects of shape: divisibility, left-over widths, initial weights too large, fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tr11ops.importer.case import Case
from tr11ops.importer.complete import data_parallel
from tr11ops.importer.results import Defect, Severity
from trainer.model.initial_std import WHAT_IT_COST, too_large

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_REFUSED = "the training does not start"


def width_left_over(case: Case) -> Iterator[Defect]:
    """`--ffn-hidden-size` that is not four times the hidden size, as after a change of the one alone."""
    hidden, ffn = case.card.integer("model.hidden_size"), case.card.integer("model.ffn_hidden_size")
    if not hidden or not ffn or ffn == 4 * hidden:
        return
    layers = case.card.integer("model.layers")
    meant, real = (_blocks(layers, hidden, width) / 1e9 for width in (4 * hidden, ffn))
    what = f"--ffn-hidden-size {ffn} is not 4 x {hidden} = {4 * hidden}; was it left over from another model?"
    cost = f"the blocks hold {real:.3g} billion parameters and not {meant:.3g} (a 104B training was really one of 58B)"
    fix = "--set model.ffn_hidden_size=none for 4 x hidden, or the same number to confirm it"
    yield Defect("ffn-left-over", _ERROR, case.line("--ffn-hidden-size"), what, cost, fix, "model.ffn_hidden_size")


def _blocks(layers: int, hidden: int, ffn: int) -> int:
    """Parameters of all blocks: attention 4h^2 + 4h, feed-forward 2hf + f + h, two LayerNorms 4h."""
    return layers * (4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden)


def shapes(case: Case) -> Iterator[Defect]:
    """Heads, tensor ranks, stages and workers that do not divide."""
    hidden, heads = case.card.integer("model.hidden_size"), case.card.integer("model.attention_heads")
    tensor, stages = case.card.integer("parallel.tensor", 1), case.card.integer("parallel.pipeline", 1)
    if hidden and heads and hidden % heads and "model.kv_channels" not in case.card.placed:
        what = f"hidden size {hidden} is not divisible by {heads} heads"
        yield Defect(
            "hidden-by-heads",
            _ERROR,
            case.line("--hidden-size"),
            what,
            _REFUSED,
            "change one of them",
            "model.hidden_size",
        )
    if heads and tensor > 0 and heads % tensor:
        what = f"{heads} attention heads are not divisible by {tensor} tensor ranks"
        yield Defect(
            "heads-by-tensor",
            _ERROR,
            case.line("--tensor-model-parallel-size"),
            what,
            _REFUSED,
            "--set parallel.tensor=...",
            "parallel.tensor",
        )
    layers = case.card.integer("model.layers")
    partition = str(case.card.value("parallel.partition", ""))
    units, shown = (layers + 2, "layers + 2") if "embedding" in partition else (layers, "layers")
    if layers and stages > 1 and partition.startswith("type:") and units % stages:
        what = f"{shown} = {units} is not divisible by {stages} pipeline stages"
        cost = "some stages hold fewer blocks, and all others wait for the fullest at every step"
        yield Defect(
            "layers-by-stages",
            _ERROR,
            case.line("--num-layers"),
            what,
            cost,
            "--set model.layers=... or parallel.pipeline=...",
            "model.layers",
        )
    workers = case.card.integer("slurm.workers_per_node") or case.card.integer("slurm.gpus_per_node")
    world = workers * case.card.integer("slurm.nodes")
    if world and tensor * stages > 0 and world % (tensor * stages):
        what = f"{world} workers are no multiple of tensor {tensor} x pipeline {stages} = {tensor * stages}"
        yield Defect(
            "workers-by-shape",
            _ERROR,
            case.line("--pipeline-model-parallel-size"),
            what,
            _REFUSED,
            "--set slurm.nodes=...",
            "slurm.nodes",
        )


def batches(case: Case) -> Iterator[Defect]:
    """The batch, its ramp, and micro batch x data-parallel degree."""
    degree, micro = data_parallel(case.card), case.card.integer("batch.micro_batch_size")
    full, ramp = case.card.integer("batch.global_batch_size"), case.card.value("batch.ramp")
    chunk = degree * micro
    cost = "the training stops with an assertion when it reaches that batch"
    if chunk and full % chunk:
        what = f"global batch {full} is not divisible by micro batch {micro} x {degree} replicas = {chunk}"
        yield Defect(
            "batch-by-replicas",
            _ERROR,
            case.line("--global-batch-size"),
            what,
            cost,
            _near(full, chunk),
            "batch.global_batch_size",
        )
    if not isinstance(ramp, dict):
        return
    line = case.line("--rampup-batch-size")
    start, increment = ramp["start"], ramp["increment"]
    if start == full:
        what = f"the ramp starts at the global batch {full}"
        yield Defect(
            "ramp-without-levels",
            _ERROR,
            line,
            what,
            "the original divides by zero at its start",
            "the card has no ramp: --set batch.ramp=none confirms it",
            "batch.ramp",
        )
        return
    if increment > 0 and (full - start) % increment:
        what = f"the increment {increment} does not divide {full} - {start} = {full - start}"
        yield Defect(
            "ramp-increment",
            _ERROR,
            line,
            what,
            _REFUSED,
            "--set batch.ramp.increment=... to a divisor",
            "batch.ramp.increment",
        )
    for name, value in (("start", start), ("increment", increment)):
        if chunk and value % chunk:
            what = f"the ramp's {name} {value} is not divisible by micro batch {micro} x {degree} replicas = {chunk}"
            yield Defect(
                f"ramp-{name}-by-replicas", _ERROR, line, what, cost, _near(value, chunk), f"batch.ramp.{name}"
            )


def _near(value: int, chunk: int) -> str:
    below, above = value // chunk * chunk, -(-value // chunk) * chunk
    return (
        f"{below} or {above} would do, or another micro batch or number of nodes"
        if below
        else f"{above} would do, or fewer nodes"
    )


def initial_weights(case: Case) -> Iterator[Defect]:
    """A standard deviation far above what the width bears."""
    hidden = case.card.integer("model.hidden_size")
    std = case.card.number("model.init_std", 0.02) or 0.0
    advice = too_large(std, hidden) if hidden > 0 else None
    if advice is None:
        return
    given = "" if case.has("--init-method-std") else " (the default)"
    what = f"initial weights of {std:g}{given} are large for {hidden} columns"
    fix = f"--set model.init_std={advice}"
    yield Defect(
        "init-std-too-large", _ERROR, case.line("--init-method-std"), what, WHAT_IT_COST, fix, "model.init_std"
    )


def fused_softmax(case: Case) -> Iterator[Defect]:
    """The original's fused softmax had conditions on the shape."""
    heads, tensor = case.card.integer("model.attention_heads"), case.card.integer("parallel.tensor", 1)
    micro, length = case.card.integer("batch.micro_batch_size"), case.card.integer("model.sequence_length")
    if heads <= 0 or tensor <= 0 or heads % tensor or micro <= 0 or not length:
        return
    if (heads // tensor * micro) % 4 or length % 4 or not 16 < length <= 2048:
        shape = f"{heads} heads / {tensor} x micro batch {micro}, length {length}"
        what = f"the original's fused softmax does not serve {shape}"
        yield Defect(
            "fused-softmax",
            _NOTE,
            case.line("--num-attention-heads"),
            what,
            "slower attention there",
            "nothing: tr11's attention has no such condition",
        )


MODEL_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    width_left_over, shapes, batches, initial_weights, fused_softmax,
)  # fmt: skip
