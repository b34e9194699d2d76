"""Attention on the device: each kernel against plain arithmetic, and kernels beside each other."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu_courses import DROPOUT, small
from gpu_rows import Row, fault_of
from gpu_training import WARM_UP
from models import card
from torch import Tensor
from torch.nn.attention import SDPBackend

from trainer.config.kernel_choice import HOPPER, choose_kernel
from trainer.contract.record import Record
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


def _relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs).norm() / theirs.norm())


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
