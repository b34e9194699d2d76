"""The grid of workers: who is where in pipeline x data x tensor, and the process groups along each
axis.

Rank order is pipeline (slowest), data, tensor (fastest), so tensor-parallel neighbours are adjacent
ranks and usually share a node. DeepSpeed's `PipeModelDataParallelTopology` numbers its ranks in the
same way.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from msgspec import field
from torch.distributed import ProcessGroup

from trainer.config.card import ParallelSection
from trainer.contract.record import Record
from trainer.parallel.groups import Groups


def worker_device() -> torch.device:
    """This worker's GPU, by LOCAL_RANK, or the CPU. Always with an index: a bare "cuda" is
    whichever is current.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


class Mesh(Record):
    """One worker's view of the grid. Passed to whatever needs it; `groups` makes its process
    groups.

    `pipeline`, `data` and `tensor` are the degrees. A group is None where its degree is 1:
    collectives over one worker do nothing. `model_group` joins the workers that hold one copy of
    the model (pipeline x tensor). `cpu_group` joins all workers for objects in host memory; None
    where the default group does that already. `sequence_parallel`: between tensor regions each
    tensor rank holds its own stretch of the sequence.
    """

    pipeline: int
    data: int
    tensor: int
    rank: int
    device: torch.device
    pipeline_group: ProcessGroup | None = None
    data_group: ProcessGroup | None = None
    tensor_group: ProcessGroup | None = None
    model_group: ProcessGroup | None = None
    cpu_group: ProcessGroup | None = None
    sequence_parallel: bool = False
    groups: Groups = field(default_factory=Groups)

    @classmethod
    def create(
        cls, parallel: ParallelSection, device: torch.device, groups: Groups | None = None
    ) -> Mesh:
        """Build the grid over all workers of the default process group, which must be initialised.
        Collective.

        `groups`: where its groups come from; made here by default, with the card's timeout.
        Raises ValueError when the number of workers is not a multiple of tensor x pipeline.
        """
        world = dist.get_world_size()
        shape = parallel.tensor * parallel.pipeline
        if world % shape:
            raise ValueError(
                f"parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} = {shape} does not divide the "
                f"number of workers ({world}); change the degrees or the number of workers"
            )
        if groups is None:
            groups = Groups.create(device, timedelta(minutes=parallel.start_timeout_minutes))
        pipeline, data, tensor = parallel.pipeline, world // shape, parallel.tensor
        rank = dist.get_rank()

        def at(stage: int, replica: int, part: int) -> int:
            return (stage * data + replica) * tensor + part

        def group(keys: list[list[int]]) -> ProcessGroup | None:
            """Every worker takes part in making every group, in the same order; keeps the one it
            belongs to.
            """
            mine = None
            for ranks in keys:
                made = None
                if len(ranks) > 1:
                    made = groups.of(ranks)
                if rank in ranks:
                    mine = made
            return mine

        stages, replicas, parts = range(pipeline), range(data), range(tensor)
        return cls(
            pipeline=pipeline,
            data=data,
            tensor=tensor,
            rank=rank,
            device=device,
            pipeline_group=group([[at(s, d, t) for s in stages] for d in replicas for t in parts]),
            data_group=group([[at(s, d, t) for d in replicas] for s in stages for t in parts]),
            tensor_group=group([[at(s, d, t) for t in parts] for s in stages for d in replicas]),
            model_group=group([[at(s, d, t) for s in stages for t in parts] for d in replicas]),
            cpu_group=groups.control,
            sequence_parallel=bool(parallel.sequence_parallel) and tensor > 1,
            groups=groups,
        )

    @classmethod
    def single(cls, device: torch.device) -> Mesh:
        """The grid of one worker; needs no process group."""
        return cls(pipeline=1, data=1, tensor=1, rank=0, device=device)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor % self.data

    @property
    def pipeline_rank(self) -> int:
        return self.rank // (self.tensor * self.data)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Global ranks of this worker's pipeline, first stage first."""
        return tuple(
            self.rank_at(stage, self.data_rank, self.tensor_rank) for stage in range(self.pipeline)
        )

    def rank_at(self, pipeline_rank: int, data_rank: int, tensor_rank: int) -> int:
        """Global rank of the worker at the given coordinates."""
        return (pipeline_rank * self.data + data_rank) * self.tensor + tensor_rank

    def degrees(self) -> dict[str, int]:
        """The three degrees by name, as a checkpoint's manifest records them."""
        return {"pipeline": self.pipeline, "data": self.data, "tensor": self.tensor}
