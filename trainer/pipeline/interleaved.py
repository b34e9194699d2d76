"""Interleaved 1F1B on DeepSpeed's pipeline engine: stages of several parts, and messages that are
sent without waiting.

On a GPU two ranks have one queue in each group for all that they send each other. So each kind of
message has a group of its own, and another where the ring of stages closes, since of two stages
both ways join the same ranks. Messages of a kind are taken in the order in which they are sent:
none stands in a queue behind one that goes the other way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from trainer.contract.record import Record
from trainer.model.between_stages import MessageShape
from trainer.parallel.mesh import Mesh
from trainer.pipeline.library import PipelineEngine, instructions
from trainer.schedule.interleaving import Pass, passes


class _Link(Record):
    """One way from this worker, or to it: the group, and the rank at the other end."""

    group: ProcessGroup | None
    peer: int


class Links(Record):
    """The four ways of a worker: `into` and `out`, each by whether it carries activations (True) or
    gradients.
    """

    into: dict[bool, _Link]
    out: dict[bool, _Link]

    @classmethod
    def of(cls, mesh: Mesh) -> Links:
        """Stages lie in a ring: the last one sends to the first one's next part. Collective."""
        groups = {
            (is_forward, closes): _own_group(mesh, f"{kind}{', ring' if closes else ''}")
            for is_forward, kind in ((True, "activations"), (False, "gradients"))
            for closes in (False, True)
        }
        ring, stage = mesh.pipeline_ranks, mesh.pipeline_rank
        before, after = ring[stage - 1], ring[(stage + 1) % len(ring)]
        into = {
            True: _Link(groups[True, mesh.is_first_stage], before),
            False: _Link(groups[False, mesh.is_last_stage], after),
        }
        out = {
            True: _Link(groups[True, mesh.is_last_stage], after),
            False: _Link(groups[False, mesh.is_first_stage], before),
        }
        return cls(into, out)


def _own_group(mesh: Mesh, purpose: str) -> ProcessGroup | None:
    """This worker's pipeline once more, for messages of one kind. Collective."""
    mine = None
    for replica in range(mesh.data):
        for part in range(mesh.tensor):
            ranks = [mesh.rank_at(stage, replica, part) for stage in range(mesh.pipeline)]
            mine = mesh.groups.of(ranks, purpose) or mine
    return mine


# by whether a pass is forward
ASKS = {True: instructions.RecvActivation, False: instructions.RecvGrad}
COMPUTES = {True: instructions.ForwardPass, False: instructions.BackwardPass}
SENDS = {True: instructions.SendActivation, False: instructions.SendGrad}


class Await(instructions.PipeInstruction):
    """Wait for the message that a pass needs."""


class Settle(instructions.PipeInstruction):
    """Let go of messages that have been taken."""


class InterleavedSchedule(instructions.PipeSchedule):
    """DeepSpeed's instructions for the passes of a stage in order. A pass's message is asked for
    one pass ahead.
    """

    def __init__(self, micro_batches: int, stages: int, stage: int, parts: int, trains: bool):
        super().__init__(micro_batches, stages, stage)
        self._parts, self._trains = parts, trains
        self._passes = passes(micro_batches, stages, parts, stage=stage, trains=trains)

    def num_pipe_buffers(self) -> int:
        return self._parts * self.micro_batches

    def steps(self) -> Iterator[list[Any]]:
        yield self._ask(self._passes[0])
        for place, current in enumerate(self._passes):
            following = self._passes[place + 1 : place + 2]
            found: list[Any] = []
            if current.taken:
                found.append(Settle(places=current.taken))
            for item in following:
                found += self._ask(item)
            yield found + self._do(place, current)
        ends: list[Any] = [Settle(places=None)]
        if self._trains:
            ends += [
                instructions.ReduceTiedGrads(),
                instructions.ReduceGrads(),
                instructions.OptimizerStep(),
            ]
        yield ends

    def _buffer(self, current: Pass) -> dict[str, int]:
        return {
            "buffer_id": current.part * self.micro_batches + current.micro_batch,
            "part": current.part,
        }

    def _takes(self, current: Pass) -> bool:
        """Whether a pass needs a message."""
        return not self._is_at_end(current.part, current.is_forward)

    def _gives(self, current: Pass) -> bool:
        return not self._is_at_end(current.part, not current.is_forward)

    def _is_at_end(self, part: int, first: bool) -> bool:
        """Whether the model begins (`first`) or ends with this part."""
        if first:
            return self.is_first_stage and part == 0
        return self.is_last_stage and part == self._parts - 1

    def _ask(self, current: Pass) -> list[Any]:
        if self._takes(current):
            return [ASKS[current.is_forward](**self._buffer(current))]
        return []

    def _do(self, place: int, current: Pass) -> list[Any]:
        buffer, found = self._buffer(current), []
        if self._takes(current):
            found.append(Await(**buffer, is_forward=current.is_forward))
        if current.is_forward and not (self._takes(current) and self._gives(current)):
            found.append(instructions.LoadMicroBatch(buffer_id=buffer["buffer_id"]))
        found.append(COMPUTES[current.is_forward](**buffer))
        if self._gives(current):
            found.append(SENDS[current.is_forward](**buffer, place=place))
        return found


class InterleavedEngine(PipelineEngine):
    """Runs a stage of several parts. `links` is set once it is made, `message` before each step of
    another shape.
    """

    _active: int | None = None
    links: Links
    message: MessageShape

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.pipe_buffers |= {"gradients": [], "losses": []}
        self._asked: dict[tuple[int, bool], tuple[Any, Any]] = {}
        self._sent: dict[int, list[tuple[Any, Tensor]]] = {}

    def is_last_stage(self) -> bool:
        """Whether what is computed gives the loss; outside of a pass, whether this worker has the
        part that does.
        """
        is_last: bool = super().is_last_stage()
        return is_last and self._active in (None, self.module.parts_count - 1)

    def _train_schedule(self) -> InterleavedSchedule:
        return self._schedule(self.micro_batches, True)

    def _inference_schedule(self, micro_batches: int) -> InterleavedSchedule:
        return self._schedule(micro_batches, False)

    def _schedule(self, micro_batches: int, trains: bool) -> InterleavedSchedule:
        return InterleavedSchedule(
            micro_batches,
            self.num_stages,
            self.stage_id,
            parts=self.module.parts_count,
            trains=trains,
        )

    @contextmanager
    def _in_part(self, part: int) -> Iterator[None]:
        self._active = part
        self.module.activate(part)
        try:
            yield
        finally:
            self._active = None

    # ------------------------------------------------------------------ passes
    def _exec_forward_pass(self, buffer_id: int, part: int) -> None:
        buffers = self.pipe_buffers
        with self._in_part(part):
            super()._exec_forward_pass(buffer_id)
            if self.is_last_stage():
                buffers["losses"][buffer_id] = self.loss
                buffers["outputs"][buffer_id] = buffers["labels"][buffer_id] = None
        if not torch.is_grad_enabled():
            buffers["inputs"][buffer_id] = buffers["losses"][buffer_id] = None

    def _exec_backward_pass(self, buffer_id: int, part: int) -> None:
        buffers = self.pipe_buffers
        self.loss, buffers["losses"][buffer_id] = buffers["losses"][buffer_id], None
        self.grad_layer, buffers["gradients"][buffer_id] = buffers["gradients"][buffer_id], None
        with self._in_part(part):
            super()._exec_backward_pass(buffer_id)
        self.grad_layer = None
        if self.is_first_stage() and part == 0:
            buffers["inputs"][buffer_id] = None  # of the others their gradient is sent first

    # ------------------------------------------------------------------ messages
    def _exec_recv_activations(self, buffer_id: int, part: int) -> None:
        self._ask(buffer_id, True, self.message.empty(self.device))

    def _exec_recv_grads(self, buffer_id: int, part: int) -> None:
        # document numbers have none
        self._ask(buffer_id, False, self.message.empty(self.device)[:1])

    def _ask(self, buffer_id: int, is_forward: bool, tensors: list[Tensor]) -> None:
        link = self.links.into[is_forward]
        self._asked[buffer_id, is_forward] = (
            [dist.irecv(tensor, link.peer, group=link.group) for tensor in tensors],
            tensors,
        )

    def _exec_await(self, buffer_id: int, part: int, is_forward: bool) -> None:
        works, tensors = self._asked.pop((buffer_id, is_forward))
        for work in works:
            work.wait()
        if is_forward:
            for tensor in tensors:
                tensor.requires_grad_(tensor.is_floating_point())
        if len(self.message.shapes) == 1:
            kept = tensors[0]
        else:
            kept = tuple(tensors)
        self.pipe_buffers["inputs" if is_forward else "gradients"][buffer_id] = kept

    def _exec_send_activations(self, buffer_id: int, part: int, place: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        self._send(place, True, [outputs] if torch.is_tensor(outputs) else list(outputs))
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer_id] = None

    def _exec_send_grads(self, buffer_id: int, part: int, place: int) -> None:
        inputs = self.pipe_buffers["inputs"][buffer_id]
        gradient = (inputs if torch.is_tensor(inputs) else inputs[0]).grad
        assert gradient is not None
        self._send(place, False, [gradient])
        self.pipe_buffers["inputs"][buffer_id] = None

    def _send(self, place: int, is_forward: bool, tensors: list[Tensor]) -> None:
        link = self.links.out[is_forward]
        self._sent[place] = [
            (dist.isend(tensor.detach(), link.peer, group=link.group), tensor) for tensor in tensors
        ]

    def _exec_settle(self, places: tuple[int, ...] | None) -> None:
        for place in list(self._sent) if places is None else places:
            for work, _ in self._sent.pop(place):
                work.wait()

    _INSTRUCTION_MAP = PipelineEngine._INSTRUCTION_MAP | {
        instructions.ForwardPass: _exec_forward_pass,
        instructions.BackwardPass: _exec_backward_pass,
        instructions.RecvActivation: _exec_recv_activations,
        instructions.RecvGrad: _exec_recv_grads,
        instructions.SendActivation: _exec_send_activations,
        instructions.SendGrad: _exec_send_grads,
        Await: _exec_await,
        Settle: _exec_settle,
    }
