"""One worker of any training on meta tensors: the real engine, DeepSpeed's and all, at full size,
without the others.

Collectives and messages answer at once and change nothing. What is read of the device on the host
is answered too, and noted with the place that asked. Kernels are those of a GPU, where torch would
take others on a meta tensor.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.counting import Counts
from tests.trainer.flex_counted import take_flex
from tests.trainer.softmax_ways import COUNTED, take
from trainer.config.card import TrainerConfig
from trainer.config.kernel_choice import Device
from trainer.engine import Engine
from trainer.model import kernels
from trainer.model.random import Drop
from trainer.parallel.mesh import Mesh
from trainer.pipeline.library import deepspeed, get_accelerator
from trainer.schedule.flops import PIECE_ELEMENTS, SOFTMAX_ELEMENTS

META = torch.device("meta")
A100 = Device("cuda", (8, 0))


class _Alone(TorchDispatchMode):
    """Answers for the other workers and for the device. `reads`: by function, how often the host
    waited to read it.

    `copies`: copies to the host for which it did not wait. `order`: the functions of both, as they
    came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func.namespace == "c10d":
            work = Work.boxed(FakeWork())
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            asker = _asker()
            self.reads[asker] += 1
            self.order.append(asker)
            return 1.0 if args[0].dtype.is_floating_point else 0
        if func is torch.ops.aten.equal.default and args[0].is_meta:
            self.reads[_asker()] += 1
            return True
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].is_meta
            and options.get("device", META) != META
        ):
            asker = _asker()
            (self.copies if options.get("non_blocking") else self.reads)[asker] += 1
            self.order.append(asker)
            return torch.zeros(args[0].shape, dtype=options.get("dtype") or args[0].dtype)
        return func(*args, **options)


def _asker() -> str:
    """`module.function` of the innermost caller that is neither torch's nor a counter's."""
    frame: Any = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    drop: Drop | None,
    backends: Sequence[Any],
) -> Tensor:
    """The memory-efficient kernel as torch calls it on a GPU."""
    bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    dropout = 0.0 if drop is None else drop.probability
    mixed: Tensor = attend(query, key, value, bias, True, dropout, is_causal=mask is None)[0]
    return mixed


def _dropout(hidden: Tensor, words: Tensor, probability: float, stretch: int) -> Tensor:
    """The one kernel that is made of it on a GPU, which keeps a mask of one byte an element; torch's
    own moves as much.
    """
    dropped: Tensor = torch.native_dropout(hidden, probability, True)[0]
    return dropped


@contextlib.contextmanager
def _world(rank: int, size: int) -> Iterator[_Alone]:
    """In the block this process is rank `rank` of `size`, on a GPU of meta tensors."""
    with pytest.MonkeyPatch.context() as patch, _Alone() as alone:
        for name in ("device_name", "current_device_name"):
            patch.setattr(type(get_accelerator()), name, lambda *_: "meta")
        patch.setattr("trainer.engine.initialise_stage", lambda *_: None)
        patch.setattr(kernels, "device_facts", lambda _: A100)
        patch.setattr(kernels, "_attend", _efficient)
        take(COUNTED, patch)
        take_flex(patch)
        patch.setattr("trainer.model.random.dropout_for", lambda device: _dropout)
        for sizes in (PIECE_ELEMENTS, SOFTMAX_ELEMENTS):
            patch.setitem(sizes, "meta", sizes["cuda"])
        patch.setitem(vars(deepspeed.ops), "__compatible_ops__", {})
        patch.setenv("LOCAL_RANK", "0")
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            deepspeed.init_distributed(dist_backend="fake", verbose=False)
            yield alone
        finally:
            dist.destroy_process_group()


class MetaStage:
    """The worker of stage `stage`, of replica 0 and tensor rank 0, after its first step."""

    def __init__(self, config: TrainerConfig, mesh: Mesh, host: _Alone, replicas: int):
        self.config, self.mesh, self.reads, self.copies, self.order = (
            config,
            mesh,
            host.reads,
            host.copies,
            host.order,
        )
        self._replicas = replicas
        self.engine = Engine.build(config, mesh)
        pipeline: Any = self.engine._pipeline
        pipeline._send_tensor_meta = lambda *_: None
        pipeline._recv_tensor_meta = lambda _: self._received()
        self.counted(1)

    def counted(self, micro_batches: int) -> Counts:
        """One step of so many micro batches a replica. Nothing that waits for the garbage collector
        is freed in it.
        """
        gc.collect()
        gc.disable()
        for noted in (self.reads, self.copies, self.order):
            noted.clear()
        size = self.config.batch.micro_batch_at(self.config.batch.global_batch_size)
        try:
            with Counts() as counts:
                self.engine.train_step(self._batches(), micro_batches * size * self._replicas, 1)
        finally:
            gc.enable()
        return counts

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            tokens = torch.zeros(self._size, self.config.model.sequence_length, dtype=torch.int64)
            yield tokens, tokens

    def _received(self) -> Tensor:
        """What the stage before sends: all hidden states, a stretch of the sequence, or a share of
        the elements.
        """
        model, tensor, borders = (
            self.config.model,
            self.mesh.tensor,
            self.engine._pipeline.module.borders,
        )
        length = model.sequence_length // (tensor if self.mesh.sequence_parallel else 1)
        shape = (
            (length, model.hidden_size)
            if borders.group is None
            else (length * model.hidden_size // tensor,)
        )
        return torch.empty(
            self._size, *shape, dtype=torch.bfloat16, device=META, requires_grad=True
        )

    @property
    def _size(self) -> int:
        micro_batch: int = self.engine._pipeline.micro_batch_size
        return micro_batch


@contextlib.contextmanager
def meta_stage(config: TrainerConfig, stage: int = 0, replicas: int = 1) -> Iterator[MetaStage]:
    """The worker in a world of `replicas` copies of the card's model."""
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    with _world(stage * replicas * tensor, pipeline * replicas * tensor) as alone:
        yield MetaStage(config, Mesh.create(config.parallel, META), alone, replicas)
