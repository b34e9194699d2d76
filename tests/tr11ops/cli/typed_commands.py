"""A command typed for a run on the embedded scheduler, and what came of it."""

from __future__ import annotations

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from trainer.contract.attempt import Heartbeat, write_heartbeat


def tr11(bench: LocalBench, *words: str) -> Answer:
    return bench.tr11(words[0], "--run", str(bench.card), "--scheduler", "local", *words[1:])


def held(bench: LocalBench) -> list[str]:
    return [job.job_id for job in bench.scheduler.jobs() if job.reason == "JobHeldUser"]


def write_beats(
    bench: LocalBench, job_id: str, answered: int, request: int, ranks: int = 4
) -> None:
    for rank in range(ranks):
        given = request if rank < answered else 0
        beat = Heartbeat(rank, f"node-{rank // 2}", 1, "saving", 7, 1.0, job_id, given)
        write_heartbeat(run_directory(bench).paths.heartbeat(rank), beat)
