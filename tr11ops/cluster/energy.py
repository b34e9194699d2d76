"""What jobs have consumed, where the site's Slurm accounts energy (`AcctGatherEnergyType`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Observed, Unknown, cause
from tr11ops.cluster.slurm_command import ask_about_site

JOBS_AT_ONCE = 500  # in one command line
ACCOUNTING_SECONDS = 20.0  # of one question: the accounting is slower than the controller
NOT_TOLD = Unknown("the site's accounting tells no energy of these jobs")


def consumed_joules(job_ids: Sequence[str]) -> Observed[float]:
    """The energy of jobs (raw ids) that have ended steps, in joules, by `sacct`; Unknown where it
    cannot be asked, or tells none. A job that consumed nothing was not measured.
    """
    found: dict[str, float] = {}
    for first in range(0, len(job_ids), JOBS_AT_ONCE):
        names = ",".join(job_ids[first : first + JOBS_AT_ONCE])
        asked = ("sacct", "-nP", "--duplicates", f"--jobs={names}", "-oJobIDRaw,ConsumedEnergyRaw")
        try:
            said = ask_about_site(asked, ACCOUNTING_SECONDS)
        except (OSError, SchedulerError) as error:
            return Unknown(f"sacct: {cause(error)}")
        if said.returncode != 0:
            return Unknown(f"sacct: {' '.join(said.stderr.split())[:200]}")
        found |= joules_by_job(said.stdout)
    if not found:
        return NOT_TOLD
    return sum(found.values())


def joules_by_job(text: str) -> dict[str, float]:
    """The joules of each job in what `sacct -nP -o JobIDRaw,ConsumedEnergyRaw` prints: of the job
    itself, or of the step that took most of it, since steps of one job may count the same node.
    """
    jobs: dict[str, float] = {}
    steps: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        name, _, value = line.partition("|")
        if not (value.isascii() and value.isdigit()) or int(value) in {0, 2**64 - 2, 2**64 - 1}:
            continue
        job, dot, _ = name.partition(".")
        if dot:
            steps[job] = max(steps[job], float(value))
        else:
            jobs[job] = jobs.get(job, 0.0) + float(value)  # each start of a requeued job
    return {**steps, **jobs}
