"""Which attention kernel serves a model on a device: a pure rule, asked at launch and on the node.
Free of torch.

What torch's kernels can do was read in its `sdp_utils`: the flash kernel takes no mask; the
memory-efficient kernel takes a mask, and computes what it hides, too; the math kernel takes
everything and keeps the scores [batch, heads, sequence, sequence] in memory for the backward pass.
What flex attention lacks for dropout, `FlexKernel` adds.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator
from typing import Literal

from trainer.config.model import ModelSection
from trainer.contract.record import Record

SMALLEST_FLEX_HEAD = 16
LARGEST_FLASH_HEAD = 256
LARGEST_CUDNN_HEAD = 128
TENSOR_CORES, AMPERE, HOPPER = (7, 0), (8, 0), (9, 0)

KernelName = Literal["cudnn", "causal", "flex", "efficient", "dense", "math"]
WHAT: dict[KernelName, str] = {
    "cudnn": "cuDNN's causal kernel, no mask in memory",
    "causal": "torch's fused causal kernel, no mask in memory",
    "flex": "flex attention, no mask in memory",
    "efficient": "torch's memory-efficient kernel, its bias in memory",
    "dense": "torch's fused kernel for CPUs, its bias in memory",
    "math": "torch's math kernel: all scores in memory",
}

DROP_IT = "change that, or drop the key"


class Device(Record):
    """What a worker computes on. `capability`: CUDA compute capability (AMD: what torch reports);
    CPUs have none.
    """

    kind: Literal["cpu", "cuda"]
    capability: tuple[int, int] = (0, 0)
    has_triton: bool = True
    maker: Literal["nvidia", "amd"] = "nvidia"


class KernelChoice(Record):
    """The kernel, and why no better one serves. `refusal`: what the card forbids about it; None
    when it may train.
    """

    name: KernelName
    why: str = ""
    refusal: str | None = None

    @property
    def is_fused(self) -> bool:
        return self.name != "math"

    @property
    def is_compiled(self) -> bool:
        """Whether its code is made at the first step, by torch.compile."""
        return self.name == "flex"

    @property
    def what(self) -> str:
        return WHAT[self.name]

    def __str__(self) -> str:
        return f"{self.name}: {self.what}" + (f" ({self.why})" if self.why else "")


def choose_kernel(
    model: ModelSection, resets_attention: bool, dtype: str, device: Device
) -> KernelChoice:
    """The fastest kernel that computes what the card asks for.

    `resets_attention`: attention stays inside a document. `dtype`: the card's `precision.dtype`.
    """
    needs_bias = resets_attention or model.looks_ahead or model.position_embedding == "alibi"
    if device.kind == "cpu":
        chosen = _on_cpu(model, needs_bias)
    else:
        chosen = _on_gpu(model, needs_bias, dtype, device)
    if model.require_fused_attention and not chosen.is_fused:
        return KernelChoice(
            chosen.name,
            chosen.why,
            f"no kernel serves that keeps no scores in memory: {chosen.why}",
        )
    return chosen


def _on_cpu(model: ModelSection, needs_bias: bool) -> KernelChoice:
    if model.attention_dropout > 0.0:
        dropout = f"model.attention_dropout is {model.attention_dropout:g}"
        return KernelChoice("math", f"on CPUs no fused kernel knows dropout, {dropout}")
    return KernelChoice("dense" if needs_bias else "causal")


def _on_gpu(model: ModelSection, needs_bias: bool, dtype: str, device: Device) -> KernelChoice:
    efficient = efficient_obstacle(model, dtype, device)
    flex = flex_obstacle(model, device)
    # with dropout flex comes first too: its masks are by place
    if not needs_bias and (flex is not None or model.attention_dropout == 0.0):
        if cudnn_serves(model, dtype, device):
            return KernelChoice("cudnn")
        flash = flash_obstacle(model, dtype, device)
        if flash is None or efficient is None:
            return KernelChoice("causal")
        return KernelChoice("math", f"{flash}; {efficient}")
    if flex is None:
        return KernelChoice("flex")
    if efficient is None:
        return KernelChoice("efficient", flex)
    return KernelChoice("math", f"{flex}; {efficient}")


def flex_obstacle(model: ModelSection, device: Device) -> str | None:
    """Why flex attention cannot train this model on this GPU; None when it can."""
    if device.capability < AMPERE:
        return f"flex attention needs compute capability {_version(AMPERE)}, this is {_version(device.capability)}"
    if not device.has_triton:
        return "flex attention needs the triton package"
    if model.looks_ahead and model.attention_dropout == 0.0:
        return "flex attention is not used for padded samples without dropout"
    if model.head_size < SMALLEST_FLEX_HEAD:
        return f"flex attention needs heads of {SMALLEST_FLEX_HEAD} or more, {_head(model)}"
    return None


def cudnn_serves(model: ModelSection, dtype: str, device: Device) -> bool:
    """Whether cuDNN's kernel takes the place of flash: on Hopper and later, where it was measured
    to be faster.

    Forward and backward of 32 heads of 128, 8 x 2,048 tokens, on an H100: 2.27 ms in place of 4.13.
    """
    is_known = device.maker == "nvidia" and device.capability >= HOPPER and dtype != "fp32"
    fits = (
        model.head_size <= LARGEST_CUDNN_HEAD
        and model.head_size % _head_multiple(dtype, device) == 0
    )
    return is_known and fits and model.attention_dropout == 0.0


def flash_obstacle(model: ModelSection, dtype: str, device: Device) -> str | None:
    """Why torch's flash kernel cannot serve this model on this GPU, where it needs no mask; None
    when it can.
    """
    if device.capability < AMPERE:
        return f"flash needs compute capability {_version(AMPERE)}, this is {_version(device.capability)}"
    if dtype == "fp32":
        return "flash computes in 16 bits only"
    if model.head_size > LARGEST_FLASH_HEAD:
        return f"flash needs heads of {LARGEST_FLASH_HEAD} or less, {_head(model)}"
    return None


def efficient_obstacle(model: ModelSection, dtype: str, device: Device) -> str | None:
    """Why torch's memory-efficient kernel cannot serve this model on this GPU; None when it can."""
    if dtype == "bf16" and device.capability < AMPERE:
        needed = f"compute capability {_version(AMPERE)}"
        return f"the memory-efficient kernel needs {needed} for bf16, this is {_version(device.capability)}"
    multiple = _head_multiple(dtype, device)
    if model.head_size % multiple:
        return f"the memory-efficient kernel needs heads that are a multiple of {multiple}, {_head(model)}"
    return None


def _head_multiple(dtype: str, device: Device) -> int:
    """The head sizes that its loads are aligned to: 16 bytes where tensor cores are used."""
    if dtype != "fp32":
        if device.capability >= TENSOR_CORES:
            return 8
        return 1
    if device.capability >= AMPERE:
        return 4
    return 1


def _head(model: ModelSection) -> str:
    return f"the head size is {model.head_size}"


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


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
    """What of a block's matrices, cut over `tensor` ranks, is no multiple of MULTIPLE: (what, its
    size).
    """
    sizes = {
        "model.hidden_size": model.hidden_size,
        "attention's width on a tensor rank": model.attention_width // tensor,
        "the keys' width on a tensor rank": model.key_width // tensor,
        "model.ffn_hidden_size on a tensor rank": model.ffn // tensor,
    }
    return ((what, size) for what, size in sizes.items() if size % MULTIPLE)


CPU_COMPILERS, STUB_COMPILERS = ("g++", "clang++"), ("cc", "gcc", "clang")
INSTALL_IT = "install it, or set model.compile_blocks = false"


def compiler_obstacle(device_type: str) -> str | None:
    """What this machine lacks to compile for `device_type`; None when nothing is missing."""
    if device_type == "cpu":
        found = _first_program(os.environ.get("CXX"), CPU_COMPILERS)
        if found:
            return None
        return f"no C++ compiler is on this node: {_list(CPU_COMPILERS)}, or $CXX"
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    found = _first_program(os.environ.get("CC"), STUB_COMPILERS)
    if found:
        return None
    return f"triton needs a C compiler, and none is on this node: {_list(STUB_COMPILERS)}, or $CC"


def _first_program(chosen: str | None, usual: Iterable[str]) -> str | None:
    candidates = [chosen] if chosen else usual
    return next((found for name in candidates if (found := shutil.which(name.split()[0]))), None)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


Recomputed = Literal["nothing", "attention", "block"]


def recomputed_part(model: ModelSection, block: int) -> Recomputed:
    """What of block `block`, counted from 0 over the whole model."""
    if block * recomputed_blocks(model) % model.layers >= recomputed_blocks(model):
        return "nothing"
    if model.recompute_granularity == "selective":
        return "attention"
    return "block"


def recomputed_blocks(model: ModelSection) -> int:
    """Blocks of the whole model that are recomputed, wholly or in part."""
    if not model.activation_checkpointing:
        return 0
    if model.recompute_blocks is None:
        return model.layers
    return model.recompute_blocks


def recomputed_between(model: ModelSection, first: int, count: int) -> int:
    """How many of the `count` blocks from `first` on are recomputed."""
    return _recomputed_before(model, first + count) - _recomputed_before(model, first)


def _recomputed_before(model: ModelSection, block: int) -> int:
    chosen = recomputed_blocks(model)
    if block and chosen:
        return (block - 1) * chosen // model.layers + 1
    return 0
