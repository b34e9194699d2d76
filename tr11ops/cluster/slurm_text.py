"""Reading what Slurm's commands print: `scontrol show ...`, the tables of `squeue` and `sinfo`, the
values in all of them (times, states), and the log of ended jobs. Pure.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import HostlistError
from tr11ops.cluster.arrays import NO_TASK, expand, task_numbers
from tr11ops.cluster.base import Job, JobState, Node, Partition, state_words
from tr11ops.cluster.sbatch_options import gpu_count, gpu_kind_of, gpus_of

SEPARATOR = "\x1f"
MOST_KEPT = 4096  # readings of texts: thousands of waiting jobs repeat the same few
_NO_VALUE = {
    "",
    "(null)",
    "N/A",
    "n/a",
    "None",
    "Unknown",
    "UNLIMITED",
    "NOT_SET",
    "INVALID",
    "Partition_Limit",
}

# Slurm has more job states than tr11 needs to tell apart
_STATES = {
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "EXPEDITING": JobState.PENDING,
    "POWER_UP_NODE": JobState.CONFIGURING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.SUSPENDED,
    "STAGE_OUT": JobState.COMPLETING,
    "LAUNCH_FAILED": JobState.FAILED,
    "REVOKED": JobState.CANCELLED,
}


def job_state(name: str) -> JobState:
    """The state of a job from Slurm's name."""
    return _STATES.get(name) or JobState.__members__.get(name, JobState.UNKNOWN)


@lru_cache(MOST_KEPT)
def duration_seconds(text: str) -> int | None:
    """Seconds of "4-04:00:00", "1:00:00", "10:00" or "INVALID"; None where there is no number."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@lru_cache(MOST_KEPT)
def limit_seconds(text: str) -> int | None:
    """Seconds of a limit that is printed in whole minutes, or as D-HH:MM:SS; None for no limit."""
    if text.isdigit():
        return int(text) * 60
    return duration_seconds(text)


def time_stamp(text: str) -> float | None:
    """Seconds since the epoch, from a number (SLURM_TIME_FORMAT=%s) or from local time as Slurm
    prints it.
    """
    if text.isdigit():
        return float(text) or None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


@lru_cache(MOST_KEPT)
def node_names(text: str) -> tuple[str, ...]:
    """Names of a host list in a reply; none for an empty value. A form we cannot read stays one
    name, as it is.
    """
    if text.strip() in _NO_VALUE:
        return ()
    try:
        return expand(text)
    except HostlistError:
        return (text.strip(),)


def text_value(text: str) -> str:
    """A value without Slurm's ways to say "none"."""
    if text.strip() in {"", "(null)", "N/A", "n/a"}:
        return ""
    return text.strip()


_WHOLE_LINES = (
    "Command",
    "WorkDir",
    "StdErr",
    "StdIn",
    "StdOut",
    "Comment",
    "AdminComment",
    "SystemComment",
    "Reason",
    "OS",
)


def records(text: str, first_key: str) -> list[dict[str, str]]:
    """The records of `scontrol show`: each begins with `first_key=` at the start of a line.

    Values with blanks stand alone on their line, or last on the first (JobName).
    """
    found: list[dict[str, str]] = []
    for line in text.split("\n"):
        rest = line.strip()
        if line.startswith(first_key + "="):
            found.append({})
            rest, _, name = rest.partition(" JobName=")
            if name:
                found[-1]["JobName"] = name
        if not found:
            continue
        key, _, value = rest.partition("=")
        if key in _WHOLE_LINES:
            found[-1].setdefault(key, value)
        else:
            for word in rest.split():
                name, equals, value = word.partition("=")
                if equals:
                    found[-1].setdefault(name, value)
    return found


def job_from_record(record: Mapping[str, str]) -> Job:
    """A Job of one record of `scontrol show job`."""
    state = job_state(record.get("JobState", ""))
    code, signal = exit_pair(record.get("ExitCode", ""))
    derived = exit_pair(record.get("DerivedExitCode", ""))
    tasks = record.get("ArrayTaskId", "").replace(
        str(NO_TASK), ""
    )  # all that waited were cancelled
    raw_id = record["JobId"]
    array_id = record.get("ArrayJobId")
    waiting = bool(tasks) and not tasks.isdigit()
    output = text_value(record.get("StdOut", ""))
    return Job(
        job_id=full_job_id(raw_id, array_id, tasks),
        raw_id=raw_id,
        array_id=array_id,
        task_id=int(tasks) if tasks.isdigit() else None,
        name=record.get("JobName", ""),
        user=record.get("UserId", "").partition("(")[0],
        state=state,
        reason=_job_reason(record, state),
        partition=text_value(record.get("Partition", "")),
        nodes=node_names(record.get("NodeList", "")),
        node_count=_node_count(record, state),
        submit_time=time_stamp(record.get("SubmitTime", "")),
        start_time=time_stamp(record.get("StartTime", "")),
        end_time=time_stamp(record.get("EndTime", "")),
        time_limit_seconds=limit_seconds(record.get("TimeLimit", "")),
        exit_code=code if state.is_final else None,
        exit_signal=signal if state.is_final else None,
        derived_exit_code=shell_exit_code(*derived) if state.is_final else None,
        comment=text_value(record.get("Comment", "")),
        dependency=text_value(record.get("Dependency", "")),
        excluded=node_names(record.get("ExcNodeList", "")),
        pending_tasks=task_numbers(tasks) if waiting and not state.is_final else (),
        working_directory=text_value(record.get("WorkDir", "")),
        # for waiting tasks Slurm fills in its number for "none"
        output=output.replace(str(NO_TASK), "%a") if waiting else output,
        eligible_time=time_stamp(record.get("EligibleTime", "")),
        priority=int(record["Priority"]) if record.get("Priority", "").isdigit() else None,
        gpus_per_node=gpus_per_node(record.get("TresPerNode", "")),
        may_requeue=(record.get("Requeue"), record.get("BatchFlag")) == ("1", "1"),
        is_expedited=record.get("ExpeditedRequeue") == "Yes",
        preempt_time=time_stamp(record.get("PreemptTime", "")),
    )


def _job_reason(record: Mapping[str, str], state: JobState) -> str:
    """Why a job waits, or how it ended; "" for Slurm's "None", and for a hold that it has outlived."""
    reason = text_value(record.get("Reason", ""))
    is_outlived = state is not JobState.PENDING and reason.startswith("JobHeld")
    if reason == "None" or is_outlived:
        return ""
    return reason


def _node_count(record: Mapping[str, str], state: JobState) -> int:
    """The nodes of a job; of one that waits those without which it does not start.

    Of one that asks for a range `NumNodes` is what Slurm thinks that it will get (22.05): its
    resources say the least.
    """
    told = re.match(r"\d*", record.get("NumNodes", ""))
    count = int(told[0]) if told and told[0] else 0
    asked = re.search(r"\bnode=(\d+)", record.get("ReqTRES") or record.get("TRES") or "")
    if state is JobState.PENDING and asked:
        return min(count, int(asked[1]))
    return count


@lru_cache(MOST_KEPT)
def gpus_per_node(resources: str) -> int:
    """GPUs that a job asks for on each node: of "gres:gpu:8" (22.05), or "gres/gpu:a100:8"; 0 for
    none.
    """
    return gpus_of(resources) or 0


def full_job_id(raw_id: str, array_id: str | None, tasks: str) -> str:
    """The id as people type it: "12", "12_3", or "12_[4-10%1]" for the waiting tasks of an array."""
    if not array_id or not tasks:
        return raw_id
    if tasks.isdigit():
        return f"{array_id}_{tasks}"
    return f"{array_id}_[{tasks}]"


def shell_exit_code(code: int | None, signal: int | None) -> int | None:
    """One number for both, as a shell tells it: 134 for a step that ended by signal 6."""
    return code or (128 + signal if signal else code)


@lru_cache(MOST_KEPT)
def exit_pair(text: str) -> tuple[int | None, int | None]:
    """Exit code and signal of "3:0", or of a wait status; no signal where it is 0."""
    if text.isdecimal() and int(text) < NO_TASK:  # one more: infinite
        return int(text) >> 8, (int(text) & 0x7F) or None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match:
        return (int(match[1]), int(match[2]) or None)
    return (None, None)


def node_reason(text: str) -> dict[str, Any]:
    """Why a node is as it is, since when and by whom, of "fan 3 [root@2026-01-01T10:00:00]";
    nothing of "".
    """
    if not text:
        return {}
    found = re.fullmatch(r"(.*?)\s*\[([^@\[\]]*)@([^\]]*)\]", text, re.DOTALL)
    if found is None:
        return {"reason": text}
    reason, user, since = found.groups()
    return {"reason": reason, "reason_time": time_stamp(since), "reason_user": user}


def nodes_from_scontrol(text: str) -> tuple[Node, ...]:
    """Nodes of `scontrol show nodes`."""
    return tuple(map(node_from_record, records(text, "NodeName")))


def node_from_record(record: Mapping[str, str]) -> Node:
    """A Node of one record of `scontrol show nodes`."""
    memory = record.get("RealMemory", "")
    return Node(
        name=record["NodeName"],
        states=state_words(record.get("State", "UNKNOWN")),
        **node_reason(text_value(record.get("Reason", ""))),
        cpus=int(record.get("CPUTot", "0")),
        gpus=gpu_count(record.get("Gres", "")),
        gpu_kind=gpu_kind_of(record.get("Gres", "")),
        memory_megabytes=int(memory) if memory.isdigit() else 0,
        partitions=tuple(filter(None, text_value(record.get("Partitions", "")).split(","))),
        features=frozenset(
            filter(None, text_value(record.get("AvailableFeatures", "")).split(","))
        ),
    )


def partitions_from_scontrol(text: str) -> tuple[Partition, ...]:
    """Partitions of `scontrol show partitions`."""
    return tuple(
        Partition(
            name=record["PartitionName"],
            max_time_seconds=duration_seconds(record.get("MaxTime", "")),
            node_names=node_names(record.get("Nodes", "")),
            is_up=record.get("State", "") == "UP",
            is_default=record.get("Default", "") == "YES",
            is_closed=record.get("State", "") in {"INACTIVE", "DRAIN"},
        )
        for record in records(text, "PartitionName")
    )


# Reading the log that Slurm keeps of ended jobs with `JobCompType=jobcomp/filetxt`: truth without
# accounting. Pure.
#
# One line a job, once it has ended. A job that went on without a lost node leaves one more line
# before, in the state RESIZING: that is no end. Times are in the controller's local time.

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


# ----------------------------------------------------------------------------- tables
# Reading `squeue --Format` and `sinfo --Node --Format`: the one answer about jobs that is quick
# for ten thousand of them and tells exit codes, and the one about nodes. Pure. Each column has
# the name that the same value has in a record of `scontrol show`, so that one reader makes a job
# or a node of either. The tables tell all that the records do but the excluded nodes.
JOB_COLUMNS = {  # of squeue
    "JobID": "JobId",
    "ArrayJobID": "ArrayJobId",
    "ArrayTaskID": "ArrayTaskId",
    "Name": "JobName",
    "UserName": "UserId",
    "State": "JobState",
    "Reason": "Reason",
    "Partition": "Partition",
    "NodeList": "NodeList",
    "NumNodes": "NumNodes",
    "SubmitTime": "SubmitTime",
    "StartTime": "StartTime",
    "EndTime": "EndTime",
    "EligibleTime": "EligibleTime",
    "TimeLimit": "TimeLimit",
    "Dependency": "Dependency",
    "exit_code": "ExitCode",
    "DerivedEC": "DerivedExitCode",
    "STDOUT": "StdOut",
    "WorkDir": "WorkDir",
    "PriorityLong": "Priority",
    "tres-per-node": "TresPerNode",
    "tres-alloc": "TRES",  # of one that waits: what it asks for
    "Comment": "Comment",
}
NODE_COLUMNS = {  # of sinfo, with a row for each node and partition
    "NodeList": "NodeName",
    "StateComplete": "State",
    "PartitionName": "Partition",
    "Available": "Available",
    "CPUs": "CPUTot",
    "Gres": "Gres",
    "Memory": "RealMemory",
    "Features": "AvailableFeatures",
    "Reason": "Reason",
    "Timestamp": "Since",
    "User": "User",
}


def format_of(columns: Mapping[str, str]) -> str:
    """The columns as `--Format` takes them, each as wide as its values, with a separator behind."""
    return ",".join(f"{column}:{SEPARATOR}" for column in columns)


def _rows(text: str, columns: Mapping[str, str], *numbers: str) -> list[dict[str, str]] | None:
    """The rows of a table, whose `numbers` are such; None where this version of Slurm prints it
    otherwise.
    """
    found = []
    for line in filter(None, text.split(f"{SEPARATOR}\n")):
        values = line.split(SEPARATOR)
        row = dict(zip(columns.values(), values, strict=False))
        if len(values) != len(columns) or not all(row[name].isdigit() for name in numbers):
            return None
        found.append(row)
    return found


def nodes_from_table(text: str) -> tuple[Node, ...] | None:
    """Nodes of `sinfo --all --noheader --Node --Format`, with those of their partitions that start
    nothing.

    None where this version of Slurm prints its table otherwise.
    """
    rows = _rows(text, NODE_COLUMNS, "CPUTot")
    if rows is None:
        return None
    found: dict[str, Node] = {}
    for row in rows:
        name = row["NodeName"]
        partition = (row["Partition"],)
        if name not in found:
            found[name] = node_from_record({**row, "Reason": _reason(row)})
        node = found[name]
        shut = node.shut_partitions
        if row["Available"] != "up":
            shut += partition
        found[name] = replace(node, partitions=node.partitions + partition, shut_partitions=shut)
    return tuple(found.values())


def _reason(row: Mapping[str, str]) -> str:
    """Why a node is as it is, since when and by whom, as scontrol says it."""
    if row["Reason"] == "none" or not text_value(row["Reason"]):
        return ""
    by = text_value(row["User"]).replace("Unknown", "")
    return f"{text_value(row['Reason'])} [{by}@{row['Since']}]"


def jobs_from_table(text: str) -> tuple[Job, ...] | None:
    """Jobs of `squeue --noheader --Format`; None where this version of Slurm prints its table
    otherwise.
    """
    rows = _rows(text, JOB_COLUMNS, "JobId", "NumNodes")
    if rows is None:
        return None
    for row in rows:
        row["ArrayTaskId"] = text_value(row["ArrayTaskId"])
        if not row["ArrayTaskId"]:
            del row["ArrayJobId"]
        row["StdOut"] = _output(row)
    return tuple(map(job_from_record, rows))


def _output(row: Mapping[str, str]) -> str:
    """The file that a pattern such as "logs/%x-%A_%a.out" names; codes that say nothing here stay
    as they are.
    """
    pattern = text_value(row["StdOut"])
    number = row["JobId"]
    task = row["ArrayTaskId"]
    if "%" not in pattern:
        return pattern and posixpath.join(row["WorkDir"], pattern)
    known = {"%": "%", "x": row["JobName"], "u": row["UserId"], "A": row.get("ArrayJobId", number)}
    if not task:
        known |= {"j": number, "a": str(NO_TASK)}
    elif task.isdigit():
        known |= {"j": number, "a": task}
    name = re.sub("%(.?)", lambda code: known.get(code[1], code[0]), pattern)
    return posixpath.join(row["WorkDir"], name)
