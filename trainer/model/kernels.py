"""The inner part of attention: softmax of the scores, applied to the values, by the fastest kernel
that will do.

Three kernels compute the same of causal attention; `kernel_choice` says which. `CausalKernel` needs
no mask in memory, on any device, but knows neither ALiBi nor documents. `FlexKernel` knows both and
computes them where they are used, on a GPU. `DenseKernel` does it anywhere, and adds a mask that
lies in memory: [heads, sequence, sequence] once per worker, or once per micro batch with documents.
`PaddedKernel` is for attention that looks ahead.

On a GPU torch may take only the kernels that were chosen: it would fall back on its math kernel
without a word.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.config.card import CardError, ModelSection, Problem
from trainer.config.kernel_choice import (
    DROP_IT,
    SMALLEST_FLEX_HEAD,
    Device,
    KernelChoice,
    KernelName,
    choose_kernel,
    flash_obstacle,
)
from trainer.model.documents import DocumentRules
from trainer.model.matmul import compute_dtype
from trainer.model.positions import local_alibi_slopes
from trainer.model.random import Drop, is_kept, least_kept, row_words, scale_of_kept
from trainer.parallel.mesh import Mesh

# Words of the samples, threshold of the weights that are kept, and the worker's first head: of
# dropout's own number, a float, torch would make a tensor.
Dropped = tuple[Tensor, int, int]

STRIP, MOST_STRIPS = 64, 8
# in bf16 and fp16: lower ones cost torch's kernel, which packs the keys for each, more than they
# save
HALF_STRIP = 256


class Kernel(Protocol):
    """Mixes values: query, key, value [batch, heads, sequence, head size] -> the queries' shape.

    Keys and values may have fewer heads: the first is for the first so many heads of queries, and
    so on. `backends`: the only ones of torch's kernels that may be taken; empty: any.
    """

    backends: Sequence[SDPBackend]

    def mask(self, hidden: Tensor, length: int, documents: Tensor | None) -> Any:
        """What it needs beside the heads of sequences of `length`, in the dtype and on the device
        of `hidden`.

        Made once for all blocks, and before them: no compiled block makes it again. `documents`:
        numbers of the tokens' documents, or marks of padding, [batch, sequence].
        """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, drop: Drop | None
    ) -> Tensor: ...


Backends = tuple[SDPBackend, ...]
FUSED: Backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
BACKENDS: dict[KernelName, Backends] = {
    # Flash where cuDNN is not exact: its backward pass adds in any order, so torch refuses it under
    # run.deterministic.
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    "causal": FUSED,
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "math": (SDPBackend.MATH,),
}


def device_facts(device: torch.device) -> Device:
    """What the choice of a kernel depends on, of this machine."""
    if device.type != "cuda":
        return Device("cpu")
    has_triton = importlib.util.find_spec("triton") is not None
    maker: Literal["nvidia", "amd"] = "amd"
    if torch.version.hip is None:
        maker = "nvidia"
    return Device("cuda", torch.cuda.get_device_capability(device), has_triton, maker)


def kernel_for(
    model: ModelSection, mesh: Mesh, documents: DocumentRules | None, dtype: str
) -> KernelChoice:
    """The choice for this model on this worker."""
    stays_inside = documents is not None and documents.reset_attention
    return choose_kernel(model, stays_inside, dtype, device_facts(mesh.device))


def build_kernel(
    model: ModelSection, mesh: Mesh, documents: DocumentRules | None, dtype: str
) -> Kernel:
    """The chosen kernel for `precision.dtype`; one object serves all blocks of a worker.

    Raises CardError when the card does not allow it (`model.require_fused_attention`).
    """
    choice = kernel_for(model, mesh, documents, dtype)
    if choice.refusal is not None:
        raise CardError(
            "run card", [Problem("model.require_fused_attention", True, choice.refusal, DROP_IT)]
        )
    backends = _backends(model, choice, dtype, mesh.device)
    if model.looks_ahead:
        if choice.name == "flex":
            flex = FlexKernel(None, False, compiled=True)
        else:
            flex = None
        return PaddedKernel(backends, flex)
    slopes = None
    if model.position_embedding == "alibi":
        slopes = local_alibi_slopes(model.attention_heads, mesh)
    stays_inside = documents is not None and documents.reset_attention
    if choice.name == "flex":
        return FlexKernel(slopes, stays_inside, compiled=True)
    if slopes is None and not stays_inside:
        return CausalKernel(backends)
    return DenseKernel(slopes, stays_inside, mesh.device, backends)


def _backends(
    model: ModelSection, choice: KernelChoice, dtype: str, device: torch.device
) -> Backends:
    """The only ones of torch's kernels that may be taken; of those without a mask, flash reads
    groups as they are.
    """
    if device.type != "cuda":
        return ()
    grouped = model.groups != model.attention_heads
    if (
        choice.name == "causal"
        and grouped
        and flash_obstacle(model, dtype, device_facts(device)) is None
    ):
        return (SDPBackend.FLASH_ATTENTION,)
    return BACKENDS.get(choice.name, ())


def build_causal_kernel(model: ModelSection, mesh: Mesh, dtype: str) -> Kernel:
    """That of a decoder's own tokens, beside the kernel of `build_kernel` for a model that looks
    ahead.

    Padding stands behind all tokens, where causal attention does not look.
    """
    choice = kernel_for(model, mesh, None, dtype)
    if choice.name == "flex":
        return FlexKernel(None, False, compiled=True)
    if mesh.device.type != "cuda":
        return CausalKernel(())
    return CausalKernel(FUSED if choice.is_fused else BACKENDS["math"])


class CausalKernel:
    """Causal attention without any bias: torch's own fused kernels. `backends`: the only ones it
    may take.
    """

    def __init__(self, backends: Sequence[SDPBackend] = ()):
        self.backends = backends

    def mask(self, hidden: Tensor, length: int, documents: Tensor | None) -> None:
        return None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, drop: Drop | None
    ) -> Tensor:
        return _attend(query, key, value=value, mask=None, drop=drop, backends=self.backends)


class DenseKernel:
    """Attention with an additive mask: causal, ALiBi's slope x distance for the worker's heads,
    document borders.

    ALiBi is written as the distance to the query (0 on the diagonal, negative behind it), which
    equals slope x position under the softmax and stays exact in bf16 where it matters. `slopes`
    None: no ALiBi. `backends`: the only ones of torch's kernels that may be taken.
    """

    def __init__(
        self,
        slopes: Tensor | None,
        stays_inside: bool,
        device: torch.device,
        backends: Sequence[SDPBackend] = (),
    ):
        self.backends = backends
        if slopes is None:
            self.slopes = torch.zeros(1, device=device)
        else:
            self.slopes = slopes
        self.stays_inside = stays_inside
        self._made: dict[torch.dtype, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def mask(self, hidden: Tensor, length: int, documents: Tensor | None) -> Tensor:
        dtype = compute_dtype(hidden)
        if documents is None or not self.stays_inside:
            return self.bias(length, dtype)
        return self._bias_inside(documents, dtype)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, drop: Drop | None
    ) -> Tensor:
        return _attend_in_strips(
            query, key, value=value, mask=mask, drop=drop, backends=self.backends
        )

    def bias(self, length: int, dtype: torch.dtype) -> Tensor:
        """[1, heads of this worker or 1, length, length] of `dtype`: the beginning of the longest
        one made so far.

        Under a curriculum one of each length would take many times the memory of the longest.
        """
        found = self._made.get(dtype)
        if found is None or found.shape[-1] < length:
            self._made.pop(dtype, None)  # first: old and new together need not fit
            found = self._made[dtype] = self._make(length).to(dtype).unsqueeze(0)
        return found[..., :length, :length]

    def _make(self, length: int) -> Tensor:
        position = torch.arange(length, device=self.slopes.device)
        distance = (position[None, :] - position[:, None]).to(torch.float32)
        bias = self.slopes[:, None, None] * distance
        return bias.masked_fill_(distance > 0, -math.inf)

    def _bias_inside(self, documents: Tensor, dtype: torch.dtype) -> Tensor:
        """The bias with other documents hidden [batch, heads, length, length]; kept for the stage's
        next block.
        """
        if self._last is None or self._last[0] is not documents:
            elsewhere = documents[:, None, :, None] != documents[:, None, None, :]
            self._last = (
                documents,
                self.bias(documents.shape[1], dtype).masked_fill(elsewhere, -math.inf),
            )
        return self._last[1]


class PaddedKernel:
    """Attention to all tokens before and behind, but to no padding: tokens whose mark is 0. `flex`:
    by flex attention, where dropout is by place.
    """

    def __init__(self, backends: Sequence[SDPBackend] = (), flex: FlexKernel | None = None):
        self.backends, self.flex = backends, flex
        self._last: tuple[Tensor, Tensor] | None = None

    def mask(self, hidden: Tensor, length: int, documents: Tensor | None) -> Tensor:
        """[batch, 1, 1, length] to be added to the scores, for flex attention [batch, length]; kept
        for the stage's next block.

        Padding is hidden by a large number, not by infinity: a sample of nothing else must not
        become NaN.
        """
        if documents is None:
            raise ValueError("attention that looks ahead needs to know the padding")
        marks, dtype = documents, compute_dtype(hidden)
        if self._last is None or self._last[0] is not marks or self._last[1].dtype != dtype:
            added = torch.zeros(marks.shape, dtype=dtype, device=marks.device)
            added = added.masked_fill_(marks == 0, torch.finfo(dtype).min / 2)
            self._last = (marks, added if self.flex is not None else added[:, None, None, :])
        return self._last[1]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, drop: Drop | None
    ) -> Tensor:
        if self.flex is not None:
            return self.flex(query, key, value=value, mask=mask, drop=drop)
        return _attend(query, key, value=value, mask=mask, drop=drop, backends=self.backends)


class FlexKernel:
    """The same through torch's flex attention: bias, borders and dropout are computed inside the
    kernel, tile by tile.

    Flex attention changes scores before the soft-max; dropout changes weights behind it. So what is
    dropped gets no score, which makes the rest sum to one; then the result is scaled by the share
    that the rest has of all weights, the ratio of both sums of exponentials. A second pass, without
    dropout, is for its sum alone.

    Not `compiled` it runs anywhere, slowly and without gradients on the CPU: for tests.
    """

    def __init__(self, slopes: Tensor | None, stays_inside: bool, compiled: bool):
        from torch.nn.attention import flex_attention

        self.backends: Sequence[SDPBackend] = ()
        self._attention: Any = flex_attention.flex_attention
        self._block_mask: Any = flex_attention.create_block_mask
        self._with_sum = {"return_aux": flex_attention.AuxRequest(lse=True)}
        self._attend: Any = self._attend_as_is
        if compiled:
            self._attend = torch.compile(self._attend_as_is)
            self._block_mask = torch.compile(self._block_mask)
        self.stays_inside = stays_inside
        self.slopes = slopes
        self._made: dict[int, Any] = {}
        self._last: tuple[Tensor, Any] | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, drop: Drop | None
    ) -> Tensor:
        dropped = None
        if drop is not None:
            dropped = drop.words, least_kept(drop.probability), drop.first_head
        mixed: Tensor = self._attend(query, key, value, mask, dropped=dropped)
        return mixed

    def _attend_as_is(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropped: Dropped | None
    ) -> Tensor:
        padding = None
        if isinstance(mask, Tensor):  # of a PaddedKernel
            mask, padding = None, mask
        options = {
            "score_mod": _score(self.slopes, padding, None),
            "block_mask": mask,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if dropped is None:
            mixed: Tensor = self._attention(query, key, value, **options)
            return mixed
        # no one asks for what they would be mixed to
        few = value[..., :SMALLEST_FLEX_HEAD].detach()
        _, every = self._attention(query, key, few, **options, **self._with_sum)
        options["score_mod"] = _score(self.slopes, padding, dropped)
        mixed, kept = self._attention(query, key, value, **options, **self._with_sum)
        share = torch.exp(kept.lse - every.lse) * scale_of_kept(dropped[1])
        return (mixed * share.unsqueeze(3)).to(query.dtype)

    def mask(self, hidden: Tensor, length: int, documents: Tensor | None) -> Any:
        """Which tiles of the scores are needed; made once per length, or once per micro batch with
        documents.
        """
        device = hidden.device
        if documents is None or not self.stays_inside:
            if length not in self._made:
                self._made[length] = self._block_mask(
                    _is_behind, None, None, length, length, device=device
                )
            return self._made[length]
        if self._last is None or self._last[0] is not documents:
            inside = _is_behind_inside(documents)
            tiles = self._block_mask(
                inside, documents.shape[0], None, length, length, device=device
            )
            self._last = (documents, tiles)
        return self._last[1]


def _score(
    slopes: Tensor | None, padding: Tensor | None, dropped: Dropped | None
) -> Callable[..., Tensor] | None:
    if slopes is None and padding is None and dropped is None:
        return None

    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if slopes is not None:
            value = value + slopes[head] * (key - query)
        if padding is not None:
            value = value + padding[batch, key]
        if dropped is None:
            return value
        words, least, first_head = dropped
        row = row_words((words[batch, 0], words[batch, 1]), head + first_head, query)
        return torch.where(is_kept(row, key, least), value, -math.inf)

    return score


def _is_behind(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _is_behind_inside(documents: Tensor) -> Callable[..., Tensor]:
    def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    return inside


def _attend_in_strips(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    drop: Drop | None,
    backends: Sequence[SDPBackend],
) -> Tensor:
    """Attention under a causal mask, a strip of queries at a time: no strip is computed beyond its
    last query.

    Torch's kernels skip the future only where they make the causal mask themselves. On a GPU one
    kernel is faster. A compiled block has none: their number would make a graph of it for each
    length.
    """
    length, least = query.shape[2], STRIP if compute_dtype(query) == torch.float32 else HALF_STRIP
    if torch.compiler.is_compiling() or query.device.type != "cpu" or length < 2 * least:
        return _attend(query, key, value=value, mask=mask, drop=drop, backends=backends)
    height = max(least, -(-length // MOST_STRIPS))
    ends = range(height, length + height, height)
    strips = [
        _attend(
            query[:, :, end - height : end],
            key[:, :, :end],
            value=value[:, :, :end],
            mask=mask[:, :, end - height : end, :end],
            drop=drop and drop._replace(first_query=end - height),
            backends=backends,
        )
        for end in ends
    ]
    return torch.cat(strips, dim=2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    drop: Drop | None,
    backends: Sequence[SDPBackend],
) -> Tensor:
    wide = compute_dtype(query)
    shared = query.shape[1] // key.shape[1]
    drops_here = drop is not None and _is_plain(backends)
    # this torch kernel, and plain products, know no groups
    if shared > 1 and (drops_here or SDPBackend.EFFICIENT_ATTENTION in backends):
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        shared = 1
    if drop is not None and drops_here:
        return _attend_dropping(
            query.to(wide), key.to(wide), value.to(wide), mask=mask, drop=drop
        ).to(query.dtype)
    with _only(backends):
        mixed = functional.scaled_dot_product_attention(
            query.to(wide),
            key.to(wide),
            value.to(wide),
            attn_mask=mask,
            dropout_p=drop.probability if drop is not None else 0.0,
            is_causal=mask is None,
            enable_gqa=shared > 1,
        )
    return mixed.to(query.dtype)


def drops_by_place(kernel: Kernel) -> bool:
    """Whether dropout's masks are by place: not those of torch's own fused kernels on a GPU, which
    drop weights that no one else sees.
    """
    return _is_plain(kernel.backends)  # flex attention names none


def _is_plain(backends: Sequence[SDPBackend]) -> bool:
    return not backends or tuple(backends) == BACKENDS["math"]


def _attend_dropping(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, drop: Drop
) -> Tensor:
    """As torch's math kernel, which keeps the weights in memory too; as many heads of keys and
    values as of queries.
    """
    scores = (query * query.shape[3] ** -0.5) @ key.transpose(2, 3)
    if mask is None:
        ahead = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    else:
        scores = scores + mask
    return drop.dropped(scores.softmax(dim=3)) @ value


def _only(backends: Sequence[SDPBackend]) -> AbstractContextManager[Any]:
    """Torch takes the first of these that serves, and refuses in place of a slower one. None named:
    it may take any.
    """
    if backends:
        return sdpa_kernel(list(backends), set_priority=True)
    return nullcontext()
