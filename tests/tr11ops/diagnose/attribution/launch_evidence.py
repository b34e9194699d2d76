"""What a launch of three nodes left behind, for the tests of attribution."""

from __future__ import annotations

from tr11ops.diagnose.attribution.evidence import Evidence, Failure
from tr11ops.diagnose.attribution.srun import parse_lines
from trainer.contract.attempt import EndMarker

NODES = ("jean-zay-iam01", "jean-zay-iam02", "jean-zay-iam03")
ONE, TWO, THREE = NODES

# Recorded: a worker of node 02 was killed (SIGKILL); the agent of node 01, whose workers lost it,
# was the first to end.
WORKER_KILLED = """\
srun: error: jean-zay-iam01: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=4.0
srun: error: jean-zay-iam03: task 2: Exited with exit code 1
srun: error: jean-zay-iam02: task 1: Exited with exit code 143"""

# Recorded: slurmd, step daemon and tasks of node 02 died at one moment; srun was ended before Slurm
# noticed.
NODE_DEAD = """\
srun: error: jean-zay-iam01: task 0: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=8.0
srun: error: jean-zay-iam03: task 2: Exited with exit code 1
srun: forcing job termination
srun: Job step aborted: Waiting up to 7 seconds for job step to finish."""


def evidence(lines: str = "", **changes: object) -> Evidence:
    values = {"nodes": NODES, "status": 1, "srun": parse_lines(lines.splitlines()), **changes}
    return Evidence(**values)  # type: ignore[arg-type]


def failure(
    host: str, rank: int | None, error: str, time: float = 1.0, signal: int | None = None
) -> Failure:
    return Failure(host, rank, time, error, signal)


OWN_WORD = "TimeoutError: reading /scratch/data/corpus.bin timed out"
LOST = "RankLost: connection closed by rank 2 on jean-zay-iam02"


def marker(reason: str, message: str = "words", restart: bool = True) -> EndMarker:
    return EndMarker(reason, 12, 10, restart, message, 1.0, ONE, "7", 1)
