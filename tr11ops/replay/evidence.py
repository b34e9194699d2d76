"""What a simulated launch leaves in its attempt's folder, as real workers, agents and srun would: the
attribution of production reads it there. How each kind of fault shows itself is an assumption: the
traces do not tell (docs/explanation/replay.md).
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tr11ops.agent.exit_records import HostFailure
from tr11ops.agent.step import LaunchWatch
from tr11ops.base.now import now
from tr11ops.cluster.slurm_command import CommandResult
from tr11ops.diagnose.stacks.worker import Frame, NodeStacks, WorkerStack
from tr11ops.replay.traces import Fault, FaultSign
from tr11ops.replay.world import PlayedLaunch, World
from tr11ops.watchdog.stacks import keep_stacks
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_formats import CURSOR_FILE, WEIGHTS
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import document
from trainer.contract.files import append_line, make_shared, write_atomically, write_json
from trainer.contract.manifest import STAND_IN, FileEntry, Manifest
from trainer.contract.paths import RunPaths

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
LOST = "DistBackendError: NCCL error: remote process exited or there was a network error: {node} closed"
WITNESSES = 3
GPUS = 8
EMPTY = hashlib.sha256().hexdigest()


def leave_progress(paths: RunPaths, world: World, end: PlayedLaunch, job_id: str) -> None:
    """The last step that was logged, and the newest checkpoint."""
    if end.reached is not None:
        step = {
            "kind": "step",
            "job_id": job_id,
            "time": world.now - world.parameters.step,
            "iteration": end.reached,
            "total_iterations": None,
            "consumed_samples": None,
            "consumed_tokens": None,
            "global_batch_size": None,
            "learning_rate": 6e-5,
            "seconds_per_iteration": world.parameters.step,
            "lm_loss": 2.0,
            "grad_norm": 0.2,
            "samples_per_second": 0.0,
            "tflops": 0.0,
        }
        append_line(paths.metrics, json.dumps(step))
    if end.saved > end.before:
        for saved in end.kept:
            write_checkpoint(paths, saved)


def write_checkpoint(paths: RunPaths, step: int) -> None:
    """A checkpoint from which a training could resume, but for what its files hold: they are empty;
    and `latest`.
    """
    folder = paths.checkpoint(step)
    make_shared(folder / WEIGHTS)
    files = (f"{WEIGHTS}/{WEIGHTS}.bin", CURSOR_FILE)
    for name in files:
        (folder / name).touch()
    Manifest(
        step,
        consumed_samples=0,
        consumed_tokens=0,
        files=tuple(FileEntry(name, 0, EMPTY) for name in files),
        topology={},
        model={},
        run_card_hash="",
        created=now(),
        versions={STAND_IN: "replay"},
    ).write(folder)
    write_atomically(paths.latest, checkpoint_name(step))


def leave_stacks(
    paths: RunPaths, nodes: Sequence[str], hanging: Collection[str], job_id: str
) -> None:
    """What production's look at the workers of a job keeps, which train on `nodes`: those of the
    `hanging` ones get no data, and all others wait for them.
    """
    answers = [
        NodeStacks(node, (_stack_of(place * GPUS, node, node in hanging),))
        for place, node in enumerate(nodes)
    ]

    def srun(
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_seconds: float,
        on_line: Callable[[str], object],
    ) -> CommandResult:
        """Every node answers, whatever it is asked."""
        for line in (line for answer in answers for line in answer.lines()):
            on_line(line)
        return CommandResult(0, "", "")

    keep_stacks(paths, job_id, tuple(nodes), len(nodes), {}, now(), follow=srun)


def _stack_of(rank: int, node: str, hangs: bool) -> WorkerStack:
    """The place at which a worker stands: the same at each look."""
    frame = Frame("all_reduce", "torch/distributed/distributed_c10d.py", 1206)
    if hangs:
        frame = Frame("_try_get_data", "torch/utils/data/dataloader.py", 1291)
    return WorkerStack(rank, node, pid=100 + rank, state="S", frames=(frame,))


def leave_end(folder: Path, end: PlayedLaunch, launch: int, job_id: str) -> None:
    """The word of a trainer whose time was up."""
    marker = EndMarker(
        "exit-duration",
        end.after,
        end.saved,
        restart=True,
        message="the attempt's own time was up",
        time=end.end,
        host=end.nodes[0],
        job_id=job_id,
        launch=launch,
    )
    write_json(folder / "end.json", document(marker))


def leave_fault(folder: Path, end: PlayedLaunch, launch: int, watch: LaunchWatch) -> None:
    """What is to be seen of the fault that ended a launch."""
    fault = end.fault
    if fault is None:
        return
    if fault.kind is FaultSign.SHARED:
        watch.status = 1
        for place, node in enumerate(end.nodes[: WITNESSES + 1]):
            said = HostFailure(f"RuntimeError: {fault.what}", launch, place * GPUS)
            _leave_failure(folder, node, said, end)
        return
    if fault.kind is FaultSign.HANG:
        watch.status = 1
        for place, node in enumerate(_others(end.nodes, fault)):
            gave_up = HostFailure.killed("the worker", signal.SIGABRT, launch, place * GPUS)
            _leave_failure(folder, node, gave_up, end)
        return
    node = fault.node
    if fault.kind is FaultSign.DATA:
        node = end.nodes[:2][-1]  # any one; the second, which runs no batch script
    rank = end.nodes.index(node)
    exited = f"srun: error: {node}: task {rank}: Exited with exit code 1"
    watch.status = 1
    watch.srun_lines = [exited]
    if fault.kind is FaultSign.HARDWARE and end.from_start:
        _leave_checks(folder, fault, end, launch)
    elif fault.kind is FaultSign.HARDWARE:
        _leave_failure(folder, fault.node, HostFailure(ECC, launch, rank * GPUS), end)
    elif fault.kind in {FaultSign.CRASH, FaultSign.DATA}:
        by = signal.SIGKILL if fault.kind is FaultSign.CRASH else signal.SIGSEGV
        killed = HostFailure.killed("the worker", by, launch, rank * GPUS)
        _leave_failure(folder, node, killed, end)
    elif fault.kind is FaultSign.NETWORK:
        for place, node in enumerate(_others(end.nodes, fault)):
            word = HostFailure(LOST.format(node=fault.node), launch, place * GPUS)
            _leave_failure(folder, node, word, end)
        watch.srun_lines = []
    elif fault.kind is FaultSign.LOSS:
        watch.status = 137
        watch.srun_lines = [f"srun: error: Node failure on {fault.node}"]


def _others(nodes: Iterable[str], fault: Fault) -> list[str]:
    return [node for node in nodes if node != fault.node][:WITNESSES]


def _leave_failure(folder: Path, host: str, failure: HostFailure, end: PlayedLaunch) -> None:
    value: dict[str, Any] = {"host": host, "time": end.sign, **document(failure)}
    if failure.signal is None:
        del value["signal"]
    write_json(folder / "failures" / f"rank-{failure.rank}.json", value)


def _leave_checks(folder: Path, fault: Fault, end: PlayedLaunch, launch: int) -> None:
    """The bad node's health check finds what another node passes."""
    [other] = _others(end.nodes, fault)[:1]
    for node, result in ((fault.node, "bad"), (other, "fine")):
        check = {"name": "gpu-memory", "result": result, "why": fault.what}
        value = {"node": node, "launch": launch, "exit_status": 1, "checks": [check]}
        write_json(folder / "nodes" / f"{node}.json", value)
