"""The attention kernel that a card's workers will use, known before there is a node. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tr11ops.runcard.card import RunCard
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
)
from trainer.schedule.devices import maker_of

SAY_WHICH = "set slurm.gpu_kind"


def attention_of(card: RunCard) -> KernelChoice:
    """The choice that the trainer makes on the card's nodes. On GPUs of an unknown kind
    (`gpu_is_unknown`) that of an A100: what says so must add that it is not known.
    """
    device = _device_of(card) or Device("cuda", AMPERE)
    data = card.data
    resets_attention = data.reset_attention_mask and data.end_of_document_id is not None
    return choose_kernel(card.model, resets_attention, card.precision.dtype, device)


def gpu_is_unknown(card: RunCard) -> bool:
    """Whether the card asks for GPUs and does not say which."""
    return _device_of(card) is None


def device_type(card: RunCard) -> Literal["cpu", "cuda"]:
    """The kind of device that the card's workers compute on, `cpu` or `cuda`."""
    if card.slurm.gpus_per_node:
        return "cuda"
    return "cpu"


def _device_of(card: RunCard) -> Device | None:
    """What the card's workers compute on; None for a GPU of a kind that it does not name."""
    if not card.slurm.gpus_per_node:
        return Device("cpu")
    gpu = gpu_of(card)
    if gpu is None:
        return None
    return Device("cuda", gpu.capability, maker=maker_of(gpu))


def _float8_checks(card: RunCard) -> Iterator[PreflightCheck]:
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


def attention_checks(card: RunCard) -> Iterator[PreflightCheck]:
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
