"""The four collectives of tensor parallelism, each with the right gradient.

`copy` and `reduce` are each other's gradient, so are `gather` and `scatter` (along the last dimension). A group of
None stands for one worker: the tensor is returned as it is. Reductions write into their argument, which must not be
used again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def copy_to_tensor_region(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Enter a region where each worker uses the same input differently: identity, gradients are summed."""
    return tensor if group is None else _Copy.apply(tensor, group)


def reduce_from_tensor_region(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leave such a region: partial results are summed, the gradient passes unchanged."""
    return tensor if group is None else _Reduce.apply(tensor, group)


def gather_from_tensor_region(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Join the workers' slices along the last dimension; the gradient is cut back."""
    return tensor if group is None else _Gather.apply(tensor, group)


def scatter_to_tensor_region(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Keep this worker's slice of the last dimension; the gradient is joined."""
    return tensor if group is None else _Scatter.apply(tensor, group)


def _all_reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, group=group)
    return tensor


def _join(tensor: Tensor, group: ProcessGroup) -> Tensor:
    tensor = tensor.contiguous()
    slices = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(slices, tensor, group=group)
    return torch.cat(slices, dim=-1)


def _cut(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return tensor.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_reduce(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(tensor.detach(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _join(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _cut(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _cut(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _join(gradient, ctx.group), None
