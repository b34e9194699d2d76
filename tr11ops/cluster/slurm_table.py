"""Reading `squeue --Format` and `sinfo --Node --Format`: the one answer about jobs that is quick
for ten thousand of them and tells exit codes, and the one about nodes. Pure.

It tells all that scontrol's records do but the excluded nodes.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from typing import Any

from msgspec.structs import replace

from tr11ops.cluster.arrays import NO_TASK, task_numbers
from tr11ops.cluster.base import Job, Node
from tr11ops.cluster.node_states import state_words
from tr11ops.cluster.passed_options import gpu_count, gpu_kind_of
from tr11ops.cluster.slurm_text import (
    SEPARATOR,
    duration_seconds,
    exit_pair,
    gpus_per_node,
    job_state,
    node_names,
    shell_exit_code,
    text_value,
    time_stamp,
)

# Reading `sinfo --Node --Format`: in one answer all nodes, and which of their partitions start
# nothing. Pure.

_NODE_FIELDS = (
    "NodeList",
    "StateComplete",
    "PartitionName",
    "Available",
    "CPUs",
    "Gres",
    "Memory",
    "Features",
    "Reason",
    "Timestamp",
    "User",
)
# a colon without a size is "as wide as the value"; what follows it is printed behind the value
NODE_FORMAT = ",".join(f"{column}:{SEPARATOR}" for column in _NODE_FIELDS)


def _reason(reason: str, since: str, user: str) -> dict[str, Any]:
    """Why a node is as it is, since when and by whom; nothing where no reason is given."""
    if reason == "none" or not text_value(reason):
        return {}
    if user == "Unknown":
        by = ""
    else:
        by = text_value(user)
    return {"reason": text_value(reason), "reason_time": time_stamp(since), "reason_user": by}


def nodes_from_table(text: str) -> tuple[Node, ...] | None:
    """Nodes of `sinfo --all --noheader --Node --Format=NODE_FORMAT`, which has a row for each node
    and partition.

    None where this version of Slurm prints its table otherwise.
    """
    found: dict[str, Node] = {}
    for line in text.split(f"{SEPARATOR}\n"):
        if not line:
            continue
        fields = line.split(SEPARATOR)
        if len(fields) != len(_NODE_FIELDS) or not fields[4].isdigit():
            return None
        name, state, partition, available, cpus, gres, memory, features, reason, since, user = (
            fields
        )
        node = found.get(name)
        if node is None:
            node = Node(
                name=name,
                states=state_words(state),
                **_reason(reason, since, user),
                cpus=int(cpus),
                gpus=gpu_count(gres),
                gpu_kind=gpu_kind_of(gres),
                memory_megabytes=int(memory) if memory.isdigit() else 0,
                features=frozenset(filter(None, text_value(features).split(","))),
            )
        is_shut = available != "up"
        found[name] = replace(
            node,
            partitions=(*node.partitions, partition),
            shut_partitions=(*node.shut_partitions, partition) if is_shut else node.shut_partitions,
        )
    return tuple(found.values())


_FIELDS = (
    "JobArrayID",
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "Name",
    "UserName",
    "State",
    "Reason",
    "Partition",
    "NodeList",
    "NumNodes",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "EligibleTime",
    "TimeLimit",
    "Dependency",
    "exit_code",
    "DerivedEC",
    "STDOUT",
    "WorkDir",
    "PriorityLong",
    "tres-per-node",
    "Comment",
)
# a colon without a size is "as wide as the value"; what follows it is printed behind the value
FORMAT = ",".join(f"{heading}:{SEPARATOR}" for heading in _FIELDS)


def jobs_from_table(text: str) -> tuple[Job, ...] | None:
    """Jobs of `squeue --noheader --Format=FORMAT`; None where this version of Slurm prints its
    table otherwise.

    Thousands of waiting jobs repeat the same few values: each is read once.
    """
    state_of, names_of, limit_of = cache(job_state), cache(node_names), cache(duration_seconds)
    time_of, exit_of, value_of, place_of = (
        cache(time_stamp),
        cache(_exit),
        cache(text_value),
        cache(posixpath.join),
    )
    jobs = []
    for line in text.split(f"{SEPARATOR}\n"):
        if not line:
            continue
        fields = line.split(SEPARATOR)
        if len(fields) != len(_FIELDS) or not fields[1].isdigit() or not fields[10].isdigit():
            return None
        shown, raw_id, array, tasks, name, user, state, reason, partition, nodes, count = fields[
            :11
        ]
        submitted, started, ended, eligible, limit, dependency = fields[11:17]
        code, derived, output, directory, priority, resources, comment = fields[17:]
        in_array = tasks != "N/A" and text_value(tasks) != ""
        array_id = array if in_array else None
        task_id = None
        if tasks.isdigit():
            task_id = int(tasks)
        known_state = state_of(state)
        is_over = known_state.is_final
        pattern = value_of(output)
        if is_over:
            exit_code, exit_signal = exit_of(code)
        else:
            exit_code, exit_signal = (None, None)
        jobs.append(
            Job(
                job_id=shown,
                raw_id=raw_id,
                array_id=array_id,
                task_id=task_id,
                name=name,
                user=user,
                state=known_state,
                reason=value_of(reason),
                partition=partition,
                nodes=names_of(nodes),
                node_count=int(count),
                submit_time=time_of(submitted),
                start_time=time_of(started),
                end_time=time_of(ended),
                time_limit_seconds=limit_of(limit),
                exit_code=exit_code,
                exit_signal=exit_signal,
                derived_exit_code=shell_exit_code(*exit_of(derived)) if is_over else None,
                comment=value_of(comment),
                dependency=value_of(dependency),
                pending_tasks=task_numbers(tasks)
                if in_array and task_id is None and not is_over
                else (),
                working_directory=directory,
                output=_output(
                    pattern,
                    directory,
                    name=name,
                    user=user,
                    raw_id=raw_id,
                    array_id=array_id,
                    task_id=task_id,
                )
                if "%" in pattern
                else pattern and place_of(directory, pattern),
                eligible_time=time_of(eligible),
                priority=int(priority) if priority.isdigit() else None,
                gpus_per_node=gpus_per_node(resources),
            )
        )
    return tuple(jobs)


def _exit(text: str) -> tuple[int | None, int | None]:
    """Exit code and signal of a wait status, or of "3:0"."""
    if not text.isdecimal() or int(text) >= NO_TASK:  # one more: infinite
        return exit_pair(text)
    return int(text) >> 8, (int(text) & 0x7F) or None


def _output(
    pattern: str,
    directory: str,
    name: str,
    user: str,
    raw_id: str,
    array_id: str | None,
    task_id: int | None,
) -> str:
    """The file that a pattern such as "logs/%x-%A_%a.out" names; codes that say nothing here stay
    as they are.
    """
    known = {"%": "%", "x": name, "u": user, "A": array_id or raw_id}
    if array_id is None:
        known |= {"j": raw_id, "a": str(NO_TASK)}
    elif task_id is not None:
        known |= {"j": raw_id, "a": str(task_id)}
    return posixpath.join(
        directory, re.sub("%(.?)", lambda code: known.get(code[1], code[0]), pattern)
    )
