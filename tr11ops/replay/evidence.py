"""What a simulated launch leaves in its attempt's folder, as real workers, agents and srun would: the
attribution of production reads it there. How each kind of fault shows itself is an assumption: the
traces do not tell (docs/explanation/replay.md).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tr11ops.agent.exit_records import HostFailure
from tr11ops.agent.step import LaunchWatch
from tr11ops.replay.traces import Fault, FaultSign
from tr11ops.replay.world import PlayedLaunch, World
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.documents import document
from trainer.contract.files import append_line, make_shared, write_atomically, write_json
from trainer.contract.paths import RunPaths

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
LOST = "DistBackendError: NCCL error: remote process exited or there was a network error: {node} closed"
WITNESSES = 3
GPUS = 8


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
        write_checkpoint(paths, end.saved)


def write_checkpoint(paths: RunPaths, step: int) -> None:
    """A folder for the newest checkpoint, and `latest`; nothing is in it."""
    make_shared(paths.checkpoint(step))
    write_atomically(paths.latest, checkpoint_name(step))


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
    rank = end.nodes.index(fault.node)
    exited = f"srun: error: {fault.node}: task {rank}: Exited with exit code 1"
    watch.status = 1
    watch.srun_lines = [exited]
    if fault.kind is FaultSign.HARDWARE and end.from_start:
        _leave_checks(folder, fault, end, launch)
    elif fault.kind is FaultSign.HARDWARE:
        _leave_failure(folder, fault.node, HostFailure(ECC, launch, rank * GPUS), end)
    elif fault.kind is FaultSign.CRASH:
        killed = HostFailure.killed("the worker", signal.SIGSEGV, launch, rank * GPUS)
        _leave_failure(folder, fault.node, killed, end)
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
