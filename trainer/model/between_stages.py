"""What travels between pipeline stages: of hidden states that all tensor ranks hold, each sends a
share.

Without sequence parallelism the tensor ranks of a stage hold the same hidden states, and the same
gradients of them. Each sends one of `tensor` parts over the network, as do the gradients on their
way back; the receiving stage joins the parts, where tensor ranks are neighbours. No bit changes.
With sequence parallelism what they hold is a share already.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.config.card import TrainerConfig
from trainer.config.model import sends_shares
from trainer.contract.record import Record
from trainer.model.documents import Stream, hidden_of, joined
from trainer.model.families import family_of
from trainer.parallel.comm import exchange, share_of, whole_of
from trainer.parallel.mesh import Mesh

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class StageBorders(Record):
    """The two ends of a worker's stage. `group` is None where whole hidden states are sent."""

    mesh: Mesh
    hidden_size: int
    group: ProcessGroup | None

    @classmethod
    def of(cls, mesh: Mesh, hidden_size: int) -> StageBorders:
        cuts = sends_shares(mesh.pipeline, mesh.tensor, mesh.sequence_parallel, hidden_size)
        return cls(mesh, hidden_size, mesh.tensor_group if cuts else None)

    def enter(self, stream: Stream) -> Stream:
        """What a stage's layers take, of what came from the stage before."""
        share, documents = hidden_of(stream)
        return joined(exchange(share, self.group, self._join, _cut), documents)

    def leave(self, stream: Stream) -> Stream:
        """What is sent to the next stage, of what a stage's layers gave."""
        hidden, documents = hidden_of(stream)
        return joined(exchange(hidden, self.group, _cut, self._join), documents)

    def _join(self, share: Tensor, group: ProcessGroup) -> Tensor:
        """The inverse of `_cut`."""
        batch, part = share.shape
        shape = batch, part * group.size() // self.hidden_size, self.hidden_size
        return whole_of(share, torch.Size(shape), group)


class MessageShape(Record):
    """What one micro batch's message consists of: shape and dtype of each tensor, hidden states
    first.
    """

    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(
        cls, borders: StageBorders, micro_batch: tuple[int, int], config: TrainerConfig
    ) -> MessageShape:
        """Of a micro batch of so many samples and tokens of each."""
        samples, length = micro_batch
        mesh = borders.mesh
        if mesh.sequence_parallel:
            own = length // mesh.tensor
        else:
            own = length
        hidden: tuple[int, ...] = (own, borders.hidden_size)
        if borders.group is not None:
            hidden = (own * borders.hidden_size // mesh.tensor,)
        found: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((samples, *hidden), DTYPES[config.precision.dtype])
        ]
        if family_of(config.model).plain_mark(config.data) is not None:
            found.append(((samples, length), torch.int32))
        return cls(tuple(found))

    def empty(self, device: torch.device) -> list[Tensor]:
        """Room for one message."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.shapes]


def _cut(hidden: Tensor, group: ProcessGroup) -> Tensor:
    """[batch, sequence, features] -> this rank's share of its elements, [batch, sequence x features
    / tensor].
    """
    return share_of(hidden, group).view(hidden.shape[0], -1)
