"""Whether a model and a device can multiply in 8-bit floats: a rule asked at launch and on the node. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.kernel_choice import Device
from trainer.config.model import ModelSection

MULTIPLE = 16
"""Of both sizes of a factor: what torch's kernel can take."""

ADA = (8, 9)
OTHER_GPUS = "leave it out, or train on GPUs like L40, H100 or later"


def float8_obstacle(device: Device) -> str | None:
    """Why the device cannot; None when it can. A CPU can, slowly: that is for tests."""
    if device.kind == "cpu":
        return None
    if device.maker == "amd":
        return "the products are made for NVIDIA's formats of 8-bit floats"
    if device.capability < ADA:
        major, minor = device.capability
        return f"needs compute capability {ADA[0]}.{ADA[1]}, this is {major}.{minor}"
    return None


def odd_sizes(model: ModelSection, tensor: int) -> Iterator[tuple[str, int]]:
    """What of a block's matrices, cut over `tensor` ranks, is no multiple of MULTIPLE: (what, its size)."""
    sizes = {
        "model.hidden_size": model.hidden_size,
        "attention's width on a tensor rank": model.attention_heads * model.head_size // tensor,
        "the keys' width on a tensor rank": model.groups * model.head_size // tensor,
        "model.ffn_hidden_size on a tensor rank": model.ffn // tensor,
    }
    return ((what, size) for what, size in sizes.items() if size % MULTIPLE)
