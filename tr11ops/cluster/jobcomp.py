"""Reading the log that Slurm keeps of ended jobs with `JobCompType=jobcomp/filetxt`: truth without
accounting. Pure.

One line a job, once it has ended. A job that went on without a lost node leaves one more line
before, in the state RESIZING: that is no end. Times are in the controller's local time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tr11ops.cluster.base import Job
from tr11ops.cluster.slurm_text import job_from_record

# scontrol's keys; a job's name and its folder may hold blanks and "=", so they end where the next
# key begins
_HEAD = (  # compiled where there is such a file
    r"JobId=(?P<JobId>\d+) UserId=(?P<UserId>\S*) GroupId=\S* Name=(?P<JobName>.*?) JobState=(?P<JobState>[A-Z_]+) "
    r"Partition=(?P<Partition>\S*) TimeLimit=(?P<TimeLimit>\S*) StartTime=(?P<StartTime>\S*) EndTime=(?P<EndTime>\S*) "
    r"NodeList=(?P<NodeList>\S*) NodeCnt=(?P<NumNodes>\d*) ProcCnt=\d* WorkDir=(?P<WorkDir>.*?) "
    r"(?P<rest>ReservationName=.*)"
)
_PAIR = re.compile(r"(\w+)=(\S*)")


def ended_job(line: str) -> Job | None:
    """The job of one line; None for a line that tells of no end, or is of another form."""
    match = re.match(_HEAD, line)
    if match is None:
        return None
    record = dict(_PAIR.findall(match["rest"])) | match.groupdict()
    if not record.get("ArrayTaskId", "").isdigit():
        record.pop("ArrayJobId", None)
    job = job_from_record(record)
    if job.state.is_final:
        return job
    return None


def ended_jobs(lines: Iterable[str], name: str) -> tuple[Job, ...]:
    """The jobs called `name` in these lines, oldest first; the last line of a number holds."""
    found: dict[str, Job] = {}
    for line in lines:
        # most lines of a site are of others
        job = None
        if f" Name={name} " in line:
            job = ended_job(line)
        if job is not None and job.name == name:
            found.pop(job.raw_id, None)
            found[job.raw_id] = job
    return tuple(found.values())
