"""Reading the log that Slurm keeps of ended jobs with `JobCompType=jobcomp/filetxt`: truth without accounting. Pure.

One line a job, once it has ended. A job that went on without a lost node leaves one more line before, in the state
RESIZING: that is no end. Times are in the controller's local time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tr11ops.cluster.base import Job
from tr11ops.cluster.slurm_text import (
    exit_pair,
    full_job_id,
    job_state,
    limit_seconds,
    node_names,
    shell_exit_code,
    text_value,
    time_stamp,
)

# a job's name and its folder may hold blanks and "=", so they end where the next key begins
_HEAD = (  # compiled where there is such a file
    r"JobId=(?P<id>\d+) UserId=(?P<user>[^\s(]*)\S* GroupId=\S* Name=(?P<name>.*?) JobState=(?P<state>[A-Z_]+) "
    r"Partition=(?P<partition>\S*) TimeLimit=(?P<limit>\S*) StartTime=(?P<start>\S*) EndTime=(?P<end>\S*) "
    r"NodeList=(?P<nodes>\S*) NodeCnt=(?P<count>\d*) ProcCnt=\d* WorkDir=(?P<directory>.*?) "
    r"(?P<rest>ReservationName=.*)"
)
_PAIR = re.compile(r"(\w+)=(\S*)")
_RESIZING = "RESIZING"


def ended_job(line: str) -> Job | None:
    """The job of one line; None for a line that tells of no end, or is of another form."""
    match = re.match(_HEAD, line)
    if match is None or match["state"] == _RESIZING:
        return None
    rest = dict(_PAIR.findall(match["rest"]))
    raw_id, task = match["id"], rest.get("ArrayTaskId", "")
    array_id = rest.get("ArrayJobId") if task.isdigit() else None
    code, signal = exit_pair(rest.get("ExitCode", ""))
    state = job_state(match["state"])
    if not state.is_final:
        return None
    return Job(
        job_id=full_job_id(raw_id, array_id, task),
        raw_id=raw_id,
        array_id=array_id,
        task_id=int(task) if array_id else None,
        name=match["name"],
        user=match["user"],
        state=state,
        partition=match["partition"],
        nodes=node_names(match["nodes"]),
        node_count=int(match["count"] or 0),
        submit_time=time_stamp(rest.get("SubmitTime", "")),
        start_time=time_stamp(match["start"]),
        end_time=time_stamp(match["end"]),
        time_limit_seconds=limit_seconds(match["limit"]),
        exit_code=code,
        exit_signal=signal,
        derived_exit_code=shell_exit_code(*exit_pair(rest.get("DerivedExitCode", ""))),
        working_directory=text_value(match["directory"]),
    )


def ended_jobs(lines: Iterable[str], name: str) -> tuple[Job, ...]:
    """The jobs called `name` in these lines, oldest first; the last line of a number holds."""
    found: dict[str, Job] = {}
    for line in lines:
        job = ended_job(line) if f" Name={name} " in line else None  # most lines of a site are of others
        if job is not None and job.name == name:
            found.pop(job.raw_id, None)
            found[job.raw_id] = job
    return tuple(found.values())
