"""Keeps the stacks of a hanging job's workers before the job is ended: without them nobody learns why it hung.

    state/attempts/JOB/stacks/NODE.txt

One probe on each node, through `srun --overlap`, which works from outside the job (measured on Slurm 22.05). The probe
uses py-spy where the node has it; else it tells for every thread its state, and where in the kernel it waits.

    python -m tr11ops.stacks FOLDER HEARTBEATS JOB      the probe itself, for the workers of JOB on this node
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tr11ops.cluster.base import SchedulerError, SchedulerUnreachable
from tr11ops.cluster.slurm_command import CommandRunner, client_environment, run_command
from tr11ops.evidence import observed
from tr11ops.rundir import make_shared
from trainer.contract import Heartbeat, RunPaths, host_name, write_atomically

NODE_SECONDS = 60.0  # a node that has not answered by then is dead itself
SPY_SECONDS = 10.0  # for one worker
JOB_VARIABLE = "TR11_JOB_ID"  # what the node agent gives to all that it starts
WORKER_VARIABLE = "RANK"  # what torchrun gives to each worker, and to nothing else


def folder_of(paths: RunPaths, job_id: str) -> Path:
    """Where the stacks of an attempt are kept."""
    return paths.attempt(job_id) / "stacks"


def has_stacks(paths: RunPaths, job_id: str) -> bool:
    """Whether any were kept. Raises OSError when that cannot be seen."""
    try:
        return any(path.suffix == ".txt" for path in folder_of(paths, job_id).iterdir())
    except FileNotFoundError:
        return False


def keep_stacks(
    paths: RunPaths, job_id: str, node_count: int, environment: Mapping[str, str], runner: CommandRunner = run_command
) -> str:
    """Ask every node of a Slurm job for the stacks of its workers; returns in words what came.

    Raises SchedulerError when none came, SchedulerUnreachable when srun was silent, OSError for the folder.
    """
    folder = folder_of(paths, job_id)
    make_shared(folder)
    count = str(node_count)
    command = [
        "srun", f"--jobid={job_id}", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
        "--kill-on-bad-exit=0", "--immediate=30",
        sys.executable, "-m", "tr11ops.stacks", str(folder), str(paths.heartbeats), job_id,
    ]  # fmt: skip
    try:
        result = runner(
            command,
            standard_input="",
            environment=client_environment(environment),
            timeout_seconds=NODE_SECONDS,
            directory=folder,
        )
    except SchedulerUnreachable:
        if has_stacks(paths, job_id):  # the nodes that live have answered
            return _told(folder)
        raise
    if not has_stacks(paths, job_id):
        said = " ".join((result.stderr or result.stdout).split())[-300:]
        raise SchedulerError(
            f"no node told the stacks of its workers: {said or f'srun ended with {result.returncode}'}"
        )
    return _told(folder)


def _told(folder: Path) -> str:
    names = sorted(path.stem for path in folder.glob("*.txt"))
    return f"the stacks of {'1 node' if len(names) == 1 else f'{len(names)} nodes'} are in {folder}"


# ----------------------------------------------------------------------------- on the node
def workers_here(heartbeats: Path, job_id: str, node: str) -> Iterator[tuple[int, psutil.Process]]:
    """(rank, process) of the job's workers on this node: by their heartbeats, else by what their launcher gave them."""
    ranks = {beat.pid: beat.rank for beat in _beats(heartbeats) if beat.job_id == job_id}
    for process in psutil.process_iter():
        try:
            own = process.environ()
        except (psutil.Error, OSError):
            continue
        named = own.get("TR11_NODE_NAME") or own.get("SLURMD_NODENAME") or node
        rank = ranks.get(process.pid, own.get(WORKER_VARIABLE, ""))
        if own.get(JOB_VARIABLE) == job_id and named == node and str(rank).isdecimal():
            yield int(rank), process


def _beats(folder: Path) -> Iterator[Heartbeat]:
    for path in folder.glob("*.json"):
        beat = observed(lambda path=path: Heartbeat.read(path))  # type: ignore[misc]
        if isinstance(beat, Heartbeat):
            yield beat


def describe(rank: int, process: psutil.Process) -> str:
    """What one worker does: its Python stacks where py-spy can tell them, else its threads in the kernel's words."""
    head = f"rank {rank}, process {process.pid}"
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is not None:
        try:
            told = subprocess.run(
                [spy, "dump", "--nonblocking", "--pid", str(process.pid)],
                capture_output=True, text=True, errors="replace", timeout=SPY_SECONDS, check=False,
            )  # fmt: skip
            if told.returncode == 0:
                return f"{head}\n{told.stdout}"
            head += f" (py-spy: {' '.join(told.stderr.split())[-200:]})"
        except (OSError, subprocess.TimeoutExpired) as error:
            head += f" (py-spy: {error})"
    return "\n".join([head, *_threads(process.pid)]) + "\n"


def _threads(pid: int) -> Iterator[str]:
    tasks = Path(f"/proc/{pid}/task")
    for task in sorted(tasks.iterdir(), key=lambda path: int(path.name)):
        facts = []
        for name in ("comm", "wchan", "syscall", "stack"):
            try:
                text = " ".join((task / name).read_text(encoding="utf-8", errors="replace").split())
            except OSError:
                continue  # the kernel does not tell this user
            if text and text != "0":
                facts.append(f"{name} {text}")
        try:
            state = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue  # it has just ended
        yield f"  thread {task.name}: state {state}, {', '.join(facts)}"


def probe(folder: Path, heartbeats: Path, job_id: str, node: str) -> int:
    """Write this node's file; the exit status says whether there was a worker to tell of. Raises OSError."""
    found = sorted(workers_here(heartbeats, job_id, node), key=lambda one: one[0])
    texts = [describe(rank, process) for rank, process in found]
    if not texts:
        print(f"{node}: no worker of job {job_id} is here", file=sys.stderr)
        return 1
    write_atomically(folder / f"{node}.txt", "\n".join(texts))
    return 0


if __name__ == "__main__":
    place, beats, number = sys.argv[1:]
    sys.exit(probe(Path(place), Path(beats), number, os.environ.get("SLURMD_NODENAME") or host_name()))
