"""The attention kernel that a card's workers will use, known before there is a node. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.launch.check import Check, ok, refused, warning
from tr11ops.runcard import RunCard
from tr11ops.speed import gpu_of
from trainer.model.kernel_choice import AMPERE, DROP_IT, Device, KernelChoice, choose_kernel


def attention_of(card: RunCard) -> KernelChoice:
    """The choice that the trainer makes on the card's nodes; GPUs of an unknown kind are taken for A100."""
    device = Device("cpu")
    if card.slurm.gpus_per_node:
        gpu = gpu_of(card)
        device = Device("cuda", AMPERE if gpu is None else gpu.capability)
    data = card.data
    resets_attention = data.reset_attention_mask and data.end_of_document_id is not None
    return choose_kernel(card.model, resets_attention, card.precision.dtype, device)


def attention_checks(card: RunCard) -> Iterator[Check]:
    """Refuse what every node would refuse; on GPUs say which kernel it is."""
    choice = attention_of(card)
    if choice.refusal is not None:
        yield refused("model.require_fused_attention", choice.refusal, DROP_IT, 2)
    elif card.slurm.gpus_per_node:
        yield ok("attention", str(choice)) if choice.is_fused else warning("attention", str(choice))
