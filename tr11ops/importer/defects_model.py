"""Defects of shape: divisibility, left-over widths, initial weights too large, fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tr11ops.importer.case import Case
from tr11ops.importer.complete import data_parallel
from tr11ops.importer.defects_table import defect
from tr11ops.importer.results import Defect
from trainer.config.initial_std import WHAT_IT_COST, too_large


def width_left_over(case: Case) -> Iterator[Defect]:
    """`--ffn-hidden-size` that is not four times the hidden size, as after a change of the one alone."""
    hidden, ffn = case.card.integer("model.hidden_size"), case.card.integer("model.ffn_hidden_size")
    is_gated = case.card.value("model.activation") == "swiglu"  # its width is another share, and seldom a round one
    if not hidden or not ffn or ffn == 4 * hidden or is_gated:
        return
    layers = case.card.integer("model.layers")
    meant, real = (_blocks(layers, hidden, width) / 1e9 for width in (4 * hidden, ffn))
    line = case.line("--ffn-hidden-size")
    yield defect(
        "ffn-left-over", line, ffn=ffn, hidden=hidden, meant=4 * hidden, real_billion=real, meant_billion=meant
    )


def _blocks(layers: int, hidden: int, ffn: int) -> int:
    """Parameters of all blocks: attention 4h^2 + 4h, feed-forward 2hf + f + h, two LayerNorms 4h."""
    return layers * (4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden)


def shapes(case: Case) -> Iterator[Defect]:
    """Heads, tensor ranks, stages and workers that do not divide."""
    hidden, heads = case.card.integer("model.hidden_size"), case.card.integer("model.attention_heads")
    tensor, stages = case.card.integer("parallel.tensor", 1), case.card.integer("parallel.pipeline", 1)
    if hidden and heads and hidden % heads and "model.kv_channels" not in case.card.placed:
        yield defect("hidden-by-heads", case.line("--hidden-size"), hidden=hidden, heads=heads)
    if heads and tensor > 0 and heads % tensor:
        yield defect("heads-by-tensor", case.line("--tensor-model-parallel-size"), heads=heads, tensor=tensor)
    layers = case.card.integer("model.layers")
    partition = str(case.card.value("parallel.partition", ""))
    units, shown = (layers + 2, "layers + 2") if "embedding" in partition else (layers, "layers")
    if layers and stages > 1 and partition.startswith("type:") and units % stages:
        yield defect("layers-by-stages", case.line("--num-layers"), shown=shown, units=units, stages=stages)
    workers = case.card.integer("slurm.workers_per_node") or case.card.integer("slurm.gpus_per_node")
    world, shape = workers * case.card.integer("slurm.nodes"), tensor * stages
    if world and shape > 0 and world % shape:
        line = case.line("--pipeline-model-parallel-size")
        yield defect("workers-by-shape", line, world=world, tensor=tensor, stages=stages, shape=shape)


def batches(case: Case) -> Iterator[Defect]:
    """The batch, its ramp, and micro batch x data-parallel degree."""
    degree, micro = data_parallel(case.card), case.card.integer("batch.micro_batch_size")
    full, ramp = case.card.integer("batch.global_batch_size"), case.card.value("batch.ramp")
    chunk = degree * micro
    common = {"micro": micro, "degree": degree, "chunk": chunk}
    if chunk and full % chunk:
        yield defect(
            "batch-by-replicas", case.line("--global-batch-size"), full=full, near=_near(full, chunk), **common
        )
    if not isinstance(ramp, dict):
        return
    line = case.line("--rampup-batch-size")
    start, increment = ramp["start"], ramp["increment"]
    if start == full:
        yield defect("ramp-without-levels", line, full=full)
        return
    if increment > 0 and (full - start) % increment:
        yield defect("ramp-increment", line, increment=increment, full=full, start=start, way=full - start)
    for name, value in (("start", start), ("increment", increment)):
        if chunk and value % chunk:
            yield defect(f"ramp-{name}-by-replicas", line, value=value, near=_near(value, chunk), **common)


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
    drawn = case.card.value("model.init_method", "normal") == "normal"
    advice = too_large(std, hidden) if hidden > 0 and drawn else None
    if advice is not None:
        line, given = case.line("--init-method-std"), "" if case.has("--init-method-std") else " (the default)"
        yield defect("init-std-too-large", line, std=std, given=given, hidden=hidden, cost=WHAT_IT_COST, advice=advice)


def fused_softmax(case: Case) -> Iterator[Defect]:
    """The original's fused softmax had conditions on the shape."""
    heads, tensor = case.card.integer("model.attention_heads"), case.card.integer("parallel.tensor", 1)
    micro, length = case.card.integer("batch.micro_batch_size"), case.card.integer("model.sequence_length")
    if heads <= 0 or tensor <= 0 or heads % tensor or micro <= 0 or not length:
        return
    if (heads // tensor * micro) % 4 or length % 4 or not 16 < length <= 2048:
        line = case.line("--num-attention-heads")
        yield defect("fused-softmax", line, heads=heads, tensor=tensor, micro=micro, length=length)


MODEL_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    width_left_over, shapes, batches, initial_weights, fused_softmax,
)  # fmt: skip
