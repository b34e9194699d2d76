"""Running rounds of the periodic jobs, for `tr11 cron run` and for a link of a chain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.base.stop_signals import obeying
from tr11ops.cli.common import directory_of, nothing_there
from tr11ops.cron.drop_ins import script_command
from tr11ops.cron.runner import CronContext, child_environment, run_due, run_job, tr11_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tr11ops.cron.jobs import PeriodicJob
    from tr11ops.cron.runner import CronRound
    from tr11ops.runcard.card import RunCard


def cron_context_of(card: RunCard, path: Path, overrides: Sequence[str] | None, way: str) -> CronContext:
    """Where rounds run. Raises Refusal where the run has no directory."""
    directory = directory_of(card)
    if not directory.exists:
        raise nothing_there(directory)
    return CronContext(
        directory=directory,
        way=way,
        folder=Path.cwd(),
        environment={**child_environment(os.environ), "TR11_RUN": str(path)},
        command=lambda job: (
            tr11_command(job.words, path, overrides or ()) if job.script is None else script_command(job.script)
        ),
    )


def run_rounds(cron_context: CronContext, jobs: tuple[PeriodicJob, ...], forced: bool = False) -> tuple[CronRound, ...]:
    """Run what is due, or all of it. A signal ends what runs, which is recorded, and starts nothing more."""
    with obeying(lambda _: cron_context.must_end.set()):
        return tuple(run_job(cron_context, job, forced=True) for job in jobs) if forced else run_due(cron_context, jobs)


def exit_code(done: CronRound) -> int:
    """What a command that ran one round returns: 1 for a failure. What a job found is in the job's own record."""
    return 1 if done.result in {"failed", "not recorded"} else 0
