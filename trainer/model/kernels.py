"""The inner part of attention: softmax of the scores, applied to the values, by the fastest kernel that will do.

Three kernels compute the same. `CausalKernel` needs no mask in memory, on any device, but knows neither ALiBi nor
documents. `FlexKernel` knows both and computes them where they are used, on a GPU. `DenseKernel` knows both and adds a
mask that lies in memory: [heads, sequence, sequence] once per worker, or once per micro batch with documents.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trainer.config import ModelSection
from trainer.mesh import Mesh
from trainer.model.documents import DocumentRules
from trainer.model.matmul import compute_dtype
from trainer.model.positions import local_alibi_slopes

SMALLEST_FLEX_HEAD = 16
FLEX_CAPABILITY = (8, 0)
STRIP, MOST_STRIPS = 64, 8


class Kernel(Protocol):
    """Mixes values: query, key, value [batch, heads, sequence, head size] -> the same shape."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, dropout: float
    ) -> Tensor: ...


def build_kernel(model: ModelSection, mesh: Mesh, documents: DocumentRules | None) -> Kernel:
    """The kernel for this model on this worker; one object serves all its blocks.

    Raises ValueError when `model.require_fused_attention` asks for more than there is.
    """
    slopes = local_alibi_slopes(model.attention_heads, mesh) if model.position_embedding == "alibi" else None
    stays_inside = documents is not None and documents.reset_attention
    if slopes is None and not stays_inside:
        return CausalKernel()
    obstacle = flex_obstacle(model, mesh.device)
    if obstacle is None:
        return FlexKernel(slopes, stays_inside, compiled=True)
    if model.require_fused_attention:
        raise ValueError(
            f"model.require_fused_attention: attention without a mask in memory is not possible: {obstacle}; "
            "change that or drop the key"
        )
    return DenseKernel(slopes, stays_inside, mesh.device)


def flex_obstacle(model: ModelSection, device: torch.device) -> str | None:
    """Why `FlexKernel` cannot train this model on this device; None when it can."""
    if device.type != "cuda":
        return f"it needs a GPU, the device is {device.type}"
    if torch.cuda.get_device_capability(device) < FLEX_CAPABILITY:
        return f"it needs compute capability {FLEX_CAPABILITY[0]}.{FLEX_CAPABILITY[1]} or newer"
    if importlib.util.find_spec("triton") is None:
        return "it needs the triton package"
    if model.attention_dropout > 0.0:
        return f"it knows no dropout, model.attention_dropout is {model.attention_dropout}"
    if model.head_size < SMALLEST_FLEX_HEAD:
        return f"it needs heads of at least {SMALLEST_FLEX_HEAD}, the head size is {model.head_size}"
    return None


class CausalKernel:
    """Causal attention without any bias: torch's own fused kernels."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, dropout: float) -> Tensor:
        return _attend(query, key, value, None, dropout)


class DenseKernel:
    """Attention with an additive mask: causal, ALiBi's slope x distance for the worker's heads, document borders.

    ALiBi is written as the distance to the query (0 on the diagonal, negative behind it), which equals slope x
    position under the softmax and stays exact in bf16 where it matters. `slopes` None: no ALiBi.
    """

    def __init__(self, slopes: Tensor | None, stays_inside: bool, device: torch.device):
        self.slopes = torch.zeros(1, device=device) if slopes is None else slopes
        self.stays_inside = stays_inside
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, dropout: float) -> Tensor:
        dtype = compute_dtype(query)
        if documents is None or not self.stays_inside:
            mask = self.bias(query.shape[2], dtype)
        else:
            mask = self._bias_inside(documents, dtype)
        return _attend_in_strips(query, key, value, mask, dropout)

    def bias(self, length: int, dtype: torch.dtype) -> Tensor:
        """[1, heads of this worker or 1, length, length] of `dtype`; made once per length and kept."""
        found = self._made.get((length, dtype))
        if found is None:
            position = torch.arange(length, device=self.slopes.device)
            distance = (position[None, :] - position[:, None]).to(torch.float32)
            bias = self.slopes[:, None, None] * distance
            bias.masked_fill_(distance > 0, -math.inf)
            found = self._made[(length, dtype)] = bias.to(dtype).unsqueeze(0)
        return found

    def _bias_inside(self, documents: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias with other documents hidden [batch, heads, length, length]; kept for the stage's next block."""
        if self._last is None or self._last[0] is not documents:
            elsewhere = documents[:, None, :, None] != documents[:, None, None, :]
            self._last = (documents, self.bias(documents.shape[1], dtype).masked_fill(elsewhere, -math.inf))
        return self._last[1]


class FlexKernel:
    """The same through torch's flex attention: bias and borders are computed inside the kernel, tile by tile.

    Not `compiled` it runs anywhere, slowly and without gradients on the CPU: that is for tests.
    """

    def __init__(self, slopes: Tensor | None, stays_inside: bool, compiled: bool):
        from torch.nn.attention import flex_attention

        self._attention: Any = flex_attention.flex_attention
        self._block_mask: Any = flex_attention.create_block_mask
        if compiled:
            self._attention = torch.compile(self._attention)
            self._block_mask = torch.compile(self._block_mask)
        self.stays_inside = stays_inside
        self._score = None if slopes is None else _alibi_score(slopes)
        self._made: dict[int, Any] = {}
        self._last: tuple[Tensor, Any] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, dropout: float) -> Tensor:
        if dropout > 0.0:
            raise ValueError("flex attention knows no dropout")
        tiles = self._tiles(query.shape[2], query.device, documents if self.stays_inside else None)
        return self._attention(query, key, value, score_mod=self._score, block_mask=tiles)

    def _tiles(self, length: int, device: torch.device, documents: Tensor | None) -> Any:
        """Which tiles of the scores are needed; made once per length, or once per micro batch with documents."""
        if documents is None:
            if length not in self._made:
                self._made[length] = self._block_mask(_is_behind, None, None, length, length, device=device)
            return self._made[length]
        if self._last is None or self._last[0] is not documents:
            inside = _is_behind_inside(documents)
            tiles = self._block_mask(inside, documents.shape[0], None, length, length, device=device)
            self._last = (documents, tiles)
        return self._last[1]


def _alibi_score(slopes: Tensor) -> Callable[..., Tensor]:
    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return value + slopes[head] * (key - query)

    return score


def _is_behind(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _is_behind_inside(documents: Tensor) -> Callable[..., Tensor]:
    def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return inside


def _attend_in_strips(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Attention under a causal mask, a strip of queries at a time: no strip is computed beyond its last query.

    Torch's kernels skip the future only where they make the causal mask themselves. On a GPU one kernel is faster.
    """
    length = query.shape[2]
    if query.device.type != "cpu" or length < 2 * STRIP:
        return _attend(query, key, value, mask, dropout)
    height = max(STRIP, -(-length // MOST_STRIPS))
    ends = range(height, length + height, height)
    strips = [
        _attend(
            query[:, :, end - height : end],
            key[:, :, :end],
            value[:, :, :end],
            mask[:, :, end - height : end, :end],
            dropout,
        )
        for end in ends
    ]
    return torch.cat(strips, dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    wide = compute_dtype(query)
    mixed = functional.scaled_dot_product_attention(
        query.to(wide), key.to(wide), value.to(wide), attn_mask=mask, dropout_p=dropout, is_causal=mask is None
    )
    return mixed.to(query.dtype)
