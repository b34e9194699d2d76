"""Reading `sinfo --Node --Format`: in one answer all nodes, and which of their partitions start
nothing. Pure.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tr11ops.cluster.base import Node
from tr11ops.cluster.gres import gpu_count, gpu_kind_of
from tr11ops.cluster.node_states import state_words
from tr11ops.cluster.slurm_text import SEPARATOR, text_value, time_stamp

_FIELDS = (
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
FORMAT = ",".join(f"{name}:{SEPARATOR}" for name in _FIELDS)


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
    """Nodes of `sinfo --all --noheader --Node --Format=FORMAT`, which has a row for each node and
    partition.

    None where this version of Slurm prints its table otherwise.
    """
    found: dict[str, Node] = {}
    for line in text.split(f"{SEPARATOR}\n"):
        if not line:
            continue
        fields = line.split(SEPARATOR)
        if len(fields) != len(_FIELDS) or not fields[4].isdigit():
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
