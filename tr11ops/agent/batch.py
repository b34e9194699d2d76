"""The batch controller: what the batch script runs. Starts the workers on the allocation and judges how they ended.

Everything about the attempt is kept in `state/attempts/JOBID/`; the workers' lines go to `main_log.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tr11ops.agent.allocation import Allocation, free_port, master_address, read_allocation
from tr11ops.agent.step import Launch, LineTee, StopFlag, run_launch
from tr11ops.agent.verdict import AttemptVerdict, conclude, first_failure
from tr11ops.cluster.hostlist import compress
from tr11ops.runcard import RunCard, card_from_resolved
from trainer.config import CardError, Problem
from trainer.contract import EXIT_FINE, EXIT_REFUSED, EndMarker, RunPaths, host_name, read_latest, write_json

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def run_attempt(card: Path, submission: str, foreground_nodes: int | None, environment: Mapping[str, str]) -> int:
    """Run one attempt to its end; returns the batch script's exit status (0 fine, 1 failed, 2 refused)."""
    stop = StopFlag()
    stop.install(STOP_SIGNALS)
    config = read_resolved(card)
    allocation = read_allocation(environment, foreground_nodes)
    paths = config.paths
    attempt = paths.attempt(allocation.job_id)
    tee = LineTee(paths.main_log)
    for stale in (paths.end_marker(allocation.job_id), paths.stop_request(allocation.job_id)):
        stale.unlink(missing_ok=True)  # a requeued job comes back under the same number
    write_json(attempt / "attempt.json", _attempt_record(allocation, card, submission))
    (attempt / "card.json").write_bytes(card.read_bytes())
    if os.path.lexists(config.kill_switch):
        return _refuse_to_start(config, paths, allocation, tee)
    launch = Launch(
        number=1,
        attempt=attempt,
        card=attempt / "card.json",
        job_id=allocation.job_id,
        nodes=allocation.nodes,
        workers_per_node=config.slurm.workers,
        master_address=master_address(allocation),
        master_port=config.slurm.master_port or free_port(),
    )
    nodes = f"{len(launch.nodes)} nodes: {compress(launch.nodes)}"
    tee.line(f"tr11: attempt {allocation.job_id} launch {launch.number} on {nodes}")
    srun_lines: deque[str] = deque(maxlen=50)

    def keep(line: bytes) -> None:
        if line.startswith((b"srun: error:", b"slurmstepd: error:")):
            srun_lines.append(line.decode("utf-8", "replace").strip())

    status = run_launch(launch, allocation, {**environment, "TR11_JOB_ID": allocation.job_id}, tee, stop, keep)
    marker = _end_marker(paths, allocation)
    return _finish(attempt, conclude(marker, status, first_failure(attempt), tuple(srun_lines)), tee)


def read_resolved(path: Path) -> RunCard:
    """The card of this attempt, as `tr11 launch` resolved it. Raises CardError when it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CardError(str(path), [Problem("file", None, f"cannot be read ({error})", "launch again")]) from None
    if not isinstance(value, dict):
        raise CardError(str(path), [Problem("file", None, "does not hold a JSON object", "launch again")])
    return card_from_resolved(value, str(path))


def _refuse_to_start(config: RunCard, paths: RunPaths, allocation: Allocation, tee: LineTee) -> int:
    """The kill switch is set: leave without starting a worker, as each later array task must."""
    stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    line = f"[Detected kill switch at {config.kill_switch}. Exiting] datetime: {stamp} "
    tee.line(line)
    try:
        step = read_latest(paths.checkpoints)
    except ValueError:
        step = None
    marker = EndMarker(
        reason="kill-switch", iteration=step or 0, checkpoint_step=step, restart=False, message=line.strip(),
        time=time.time(), host=host_name(), job_id=allocation.job_id, launch=0,
    )  # fmt: skip
    write_json(paths.end_marker(allocation.job_id), asdict(marker))
    return _finish(paths.attempt(allocation.job_id), conclude(marker, 0, None, ()), tee)


def _finish(attempt: Path, verdict: AttemptVerdict, tee: LineTee) -> int:
    try:
        write_json(attempt / "verdict.json", {**asdict(verdict), "time": time.time()})
    except OSError as error:
        tee.line(f"tr11: the verdict could not be recorded: {error}")
    saved = f", checkpoint {verdict.checkpoint_step}" if verdict.checkpoint_step is not None else ""
    where = f" at iteration {verdict.iteration}{saved}" if verdict.iteration is not None else ""
    detail = f": {verdict.message}" if verdict.exit_status != EXIT_FINE else ""
    tee.line(f"tr11: attempt {attempt.name} ended: {verdict.reason}{where}{detail}")
    return verdict.exit_status


def _end_marker(paths: RunPaths, allocation: Allocation) -> EndMarker | None:
    try:
        return EndMarker.read(paths.end_marker(allocation.job_id))
    except (OSError, ValueError) as error:
        print(f"tr11: the end marker cannot be read: {error}", file=sys.stderr, flush=True)
        return None


def _attempt_record(allocation: Allocation, card: Path, submission: str) -> dict[str, Any]:
    return {
        **asdict(allocation), "submission": submission, "card": str(card), "batch_host": host_name(),
        "pid": os.getpid(), "start": time.time(), "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in ("tr11", "torch", "deepspeed")},
    }  # fmt: skip


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tr11ops.agent.batch", description=__doc__.split("\n")[0])
    parser.add_argument("--card", type=Path, required=True, help="resolved card (JSON)")
    parser.add_argument("--submission", default="", help="tag of the submission this attempt belongs to")
    parser.add_argument(
        "--foreground-nodes", type=int, default=None, help="play this many nodes here, without a scheduler"
    )
    options = parser.parse_args(arguments)
    try:
        return run_attempt(options.card, options.submission, options.foreground_nodes, os.environ)
    except CardError as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_REFUSED
    except (OSError, RuntimeError) as error:
        print(f"tr11: the attempt could not be run: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
