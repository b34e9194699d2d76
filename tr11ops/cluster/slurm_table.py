"""Reading `squeue --Format` and `sinfo --Node --Format`: the one answer about jobs that is quick
for ten thousand of them and tells exit codes, and the one about nodes. Pure.

Each column has the name that the same value has in a record of `scontrol show`, so that one reader
makes a job or a node of either. The tables tell all that the records do but the excluded nodes.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

from msgspec.structs import replace

from tr11ops.cluster.arrays import NO_TASK
from tr11ops.cluster.base import Job, Node
from tr11ops.cluster.slurm_text import SEPARATOR, job_from_record, node_from_record, text_value

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
