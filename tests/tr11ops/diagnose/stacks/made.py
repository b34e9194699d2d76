"""Workers and stacks as nodes tell them, made by hand."""

from __future__ import annotations

from tr11ops.diagnose.stacks.worker import Frame, WorkerStack

LOOP = Frame("train", "trainer/loop.py", 120)
ALL_REDUCE = (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2810), LOOP)
BARRIER = (Frame("barrier", "torch/distributed/distributed_c10d.py", 4800), LOOP)
BROADCAST = (Frame("broadcast", "torch/distributed/distributed_c10d.py", 1076), LOOP)
SEND = (Frame("send", "deepspeed/runtime/pipe/p2p.py", 58), LOOP)
LOADER = (
    Frame("wait", "threading.py", 320),
    Frame("get", "queue.py", 171),
    Frame("_try_get_data", "torch/utils/data/dataloader.py", 1003),
    LOOP,
)
FORWARD = (Frame("linear", "torch/nn/functional.py", 125), LOOP)
SAVE = (Frame("_write_all", "trainer/checkpoint/files.py", 180), LOOP)
ELSEWHERE = (Frame("sleep_on_it", "plugin/odd.py", 3), LOOP)


def worker(
    rank: int, frames: tuple[Frame, ...] = ALL_REDUCE, *, per_node: int = 1, **more: str
) -> WorkerStack:
    """Rank r on node tw0(r / per_node)."""
    return WorkerStack(
        rank, f"tw{rank // per_node:02d}", 1000 + rank, more.pop("state", "S"), frames, **more
    )  # type: ignore[arg-type]


def ranks(
    count: int, frames: tuple[Frame, ...] = ALL_REDUCE, *, but: int | None = None, per_node: int = 1
) -> list[WorkerStack]:
    """Ranks 0 to count - 1 at one place, without one of them."""
    return [worker(rank, frames, per_node=per_node) for rank in range(count) if rank != but]
