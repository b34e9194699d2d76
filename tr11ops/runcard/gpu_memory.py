"""What a card asks of its GPUs: which attention kernel its workers will use, whether it fits their
memory, and which of its keys would make it fit. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tr11ops.base.units import counted, size
from tr11ops.runcard.card import OwnCard, broken_rules
from tr11ops.runcard.check import PreflightCheck, ok, refused, warning
from tr11ops.runcard.speed import gpu_of
from trainer.config.kernel_choice import (
    AMPERE,
    DROP_IT,
    OTHER_GPUS,
    Device,
    KernelChoice,
    choose_kernel,
    float8_obstacle,
    recomputed_blocks,
)
from trainer.schedule.devices import maker_of
from trainer.schedule.memory import MemoryShape, WorkerMemory, worker_memory

# ----------------------------------------------------------------------------- the attention kernel
# The attention kernel that a card's workers will use, known before there is a node. Pure.
SAY_WHICH = "set slurm.gpu_kind"


def attention_of(card: OwnCard) -> KernelChoice:
    """The choice that the trainer makes on the card's nodes. On GPUs of an unknown kind
    (`gpu_is_unknown`) that of an A100: what says so must add that it is not known.
    """
    device = _device_of(card) or Device("cuda", AMPERE)
    data = card.data
    resets_attention = data.reset_attention_mask and data.end_of_document_id is not None
    return choose_kernel(card.model, resets_attention, card.precision.dtype, device)


def gpu_is_unknown(card: OwnCard) -> bool:
    """Whether the card asks for GPUs and does not say which."""
    return _device_of(card) is None


def device_type(card: OwnCard) -> Literal["cpu", "cuda"]:
    """The kind of device that the card's workers compute on, `cpu` or `cuda`."""
    if card.slurm.gpus_per_node:
        return "cuda"
    return "cpu"


def _device_of(card: OwnCard) -> Device | None:
    """What the card's workers compute on; None for a GPU of a kind that it does not name."""
    if not card.slurm.gpus_per_node:
        return Device("cpu")
    gpu = gpu_of(card)
    if gpu is None:
        return None
    return Device("cuda", gpu.capability, maker=maker_of(gpu))


def _float8_checks(card: OwnCard) -> Iterator[PreflightCheck]:
    """8-bit floats on GPUs without them. Of a kind that the card does not name only the node can
    tell.
    """
    if not card.precision.float8:
        return
    device = _device_of(card)
    if device is None:
        obstacle = None
    else:
        obstacle = float8_obstacle(device)
    if obstacle is not None:
        yield refused("precision.float8", obstacle, OTHER_GPUS, 2)
    elif device is None:
        yield warning(
            "precision.float8", "the card does not say which GPUs: not all can", SAY_WHICH
        )
    elif device.kind == "cpu":
        yield warning("precision.float8", "CPUs only imitate it, slower than bf16")


def attention_checks(card: OwnCard) -> Iterator[PreflightCheck]:
    """Refuse what every node would refuse; on GPUs of a known kind say which kernel it is."""
    yield from _float8_checks(card)
    choice = attention_of(card)
    if choice.refusal is not None:
        yield refused("model.require_fused_attention", choice.refusal, DROP_IT, 2)
    elif gpu_is_unknown(card):
        yield warning(
            "attention",
            f"the card does not say which GPUs: unknown; on an A100: {choice}",
            SAY_WHICH,
        )
    elif card.slurm.gpus_per_node:
        yield ok("attention", str(choice)) if choice.is_fused else warning("attention", str(choice))


MOST_CHANGES = 6
TIGHT_SHARE = 0.95  # above it fragments of the allocator may decide


# ----------------------------------------------------------------------------- memory
# Other values of a few keys, as a person writes them in the card, and the card with them.
CardChange = tuple[str, OwnCard]


def shape_of(card: OwnCard) -> MemoryShape:
    """What the memory of the card's workers depends on."""
    return MemoryShape(card, card.data_parallel_degree, attention_of(card).name, device_type(card))


def memory_of(card: OwnCard) -> WorkerMemory | None:
    """The peak of the worker that needs most; None where only the engine knows the stages."""
    return worker_memory(shape_of(card))


def least_recomputed(card: OwnCard) -> int | None:
    """The fewest blocks, of the card's own granularity, whose recomputation lets the workers fit
    without being tight.

    None where all do not suffice, or where the card does not say how large its GPUs are.
    """
    stated, layers = card.slurm.gpu_memory_gb, card.model.layers
    if not card.slurm.gpus_per_node or stated is None or memory_of(card) is None:
        return None
    limit = TIGHT_SHARE * stated * 2**30
    if _total(_recomputing(card, None)) > limit:
        return None
    return next(
        (blocks for blocks in range(layers + 1) if _total(_recomputing(card, blocks)) <= limit),
        None,
    )


def _recomputing(card: OwnCard, blocks: int | None) -> OwnCard:
    """The card with so many recomputed blocks; None: all."""
    return _with(
        card, "model", activation_checkpointing=blocks != 0, recompute_blocks=blocks or None
    )


def memory_checks(card: OwnCard) -> Iterator[PreflightCheck]:
    """Refuse a card whose workers cannot fit, with the fewest recomputed blocks that would; say
    where it is unknown.
    """
    stated, found = card.slurm.gpu_memory_gb, memory_of(card)
    if not card.slurm.gpus_per_node or found is None:
        return
    if stated is None:
        rule = f"the memory of the GPUs is unknown: whether the {size(found.total)} of a worker fit is not judged"
        yield warning("slurm.gpu_memory_gb", rule, "set it to the GiB of one GPU")
        return
    limit = int(stated * 2**30)
    largest = f"the largest part: {found.largest.name}, {size(found.largest.bytes)}"
    rule = f"a worker of stage {found.stage} needs {size(found.total)} of {stated:g} GiB; {largest}"
    if found.total > TIGHT_SHARE * limit:
        rule += f"; {_recomputation(card)}"
    if found.total > limit:
        yield refused("slurm.gpu_memory_gb", rule, advice(card, limit), 2)
    elif found.total > TIGHT_SHARE * limit:
        yield warning("slurm.gpu_memory_gb", rule, advice(card, int(TIGHT_SHARE * limit)))
    else:
        yield ok("GPU memory", rule)


def _recomputation(card: OwnCard) -> str:
    least = least_recomputed(card)
    if least is None:
        return "recomputing every block would not do"
    return f"recomputing {_of_all(card, least)} would fit"


def _of_all(card: OwnCard, blocks: int) -> str:
    return f"{blocks} of {counted(card.model.layers, 'block')}"


def advice(card: OwnCard, limit: int) -> str:
    """The changes that make the card fit `limit` bytes, each alone; else the first few that do
    together.
    """
    alone = [text for text, changed in changes(card) if _total(changed) <= limit]
    if alone:
        return f"set {' or '.join(alone[:3])}"
    taken: list[str] = []
    while _total(card) > limit:
        needed = _total(card)
        better = next((change for change in changes(card) if _total(change[1]) < needed), None)
        if better is None or len(taken) == MOST_CHANGES:
            return "use GPUs with more memory, or a smaller model"
        text, card = better
        taken.append(text)
    return f"set {', '.join(taken)} together"


def changes(card: OwnCard) -> Iterator[CardChange]:
    """Sound cards near this one that need less, the cheapest in speed first."""
    return (change for change in _candidates(card) if not broken_rules(change[1]))


def _candidates(card: OwnCard) -> Iterator[CardChange]:
    batch, parallel = card.batch, card.parallel
    if max([batch.micro_batch_size, *(entry.size for entry in batch.micro_batch_ramp)]) > 1:
        ramp = " without a micro_batch_ramp" if batch.micro_batch_ramp else ""
        fewer = _with(card, "batch", micro_batch_size=1, micro_batch_ramp=[])
        yield f"batch.micro_batch_size = 1{ramp}", fewer
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield "parallel.sequence_parallel = true", _with(card, "parallel", sequence_parallel=True)
    least = least_recomputed(card)
    if least is not None and least > recomputed_blocks(card.model):
        if card.model.activation_checkpointing:
            switch = ""
        else:
            switch = "model.activation_checkpointing = true with "
        yield f"{switch}model.recompute_blocks = {least}", _recomputing(card, least)
    elif recomputed_blocks(card.model) < card.model.layers:
        text = "model.activation_checkpointing = true"
        if card.model.recompute_blocks is not None:
            text += " without model.recompute_blocks"
        yield text, _recomputing(card, None)
    # tensor ranks of several nodes would wait for the network
    if 2 * parallel.tensor <= card.slurm.workers:
        tensor = 2 * parallel.tensor
        yield f"parallel.tensor = {tensor}", _with(card, "parallel", tensor=tensor)
    deeper = _with(card, "parallel", pipeline=2 * parallel.pipeline)
    if memory_of(deeper) is not None:
        yield f"parallel.pipeline = {2 * parallel.pipeline}", deeper
    nodes = 2 * card.slurm.nodes
    yield f"slurm.nodes = {nodes}", _with(card, "slurm", nodes=nodes)
    if card.optimizer.type != "adam8bit":
        yield 'optimizer.type = "adam8bit"', _with(card, "optimizer", type="adam8bit")


def _with(card: OwnCard, section: str, **values: object) -> OwnCard:
    return card.model_copy(update={section: getattr(card, section).model_copy(update=values)})


def _total(card: OwnCard) -> int:
    found = memory_of(card)
    assert found is not None, "no change makes the stages unknown"
    return found.total
