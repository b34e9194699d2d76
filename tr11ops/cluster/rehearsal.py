"""Where a rehearsal may run: on a twin and nowhere else, so that no real allocation ever trains
nothing.

A card with a [rehearsal] section starts the stand-in worker. It is refused at launch, and once more
on every node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

REHEARSAL_FIX = (
    "take the section out of the card to train here, or rehearse on a twin: "
    '`tr11 twin up`, then `eval "$(tr11 twin env)"`'
)


def rehearsal_refusal(environment: Mapping[str, str], scheduler: str = "") -> str:
    """Why a rehearsal may not run with this environment's scheduler; empty when that is a twin. REHEARSAL_FIX
    says what to do about it.

    `scheduler`: the one that was chosen, where it is not the environment's to say.

    A twin is known by its own record beside the slurm.conf in use (`tr11ops.twin.twin` writes it),
    which must agree with it on cluster, port and, on a node, on the node's name.
    """
    fault = _fault(environment, scheduler or environment.get("TR11_SCHEDULER", ""))
    if fault:
        return (
            f"a card with a [rehearsal] section trains nothing, and runs on a twin alone; {fault}"
        )
    return ""


def _fault(environment: Mapping[str, str], scheduler: str) -> str:
    if scheduler == "local":
        return "the embedded scheduler (--scheduler local) is none"
    conf = Path(environment.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    try:
        record = json.loads((conf.parent / "twin.json").read_text(encoding="utf-8"))
        name = str(record["plan"]["name"])
        cluster = str(record["cluster"])
        nodes = list(record["nodes"])
        port = int(record["first_port"])
        lines = conf.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, TypeError, KeyError):
        return f"Slurm's configuration {conf} is not a twin's"
    node = environment.get("SLURMD_NODENAME")
    if f"ClusterName={cluster}" not in lines or f"SlurmctldPort={port}" not in lines:
        return f"Slurm's configuration {conf} is not what its twin wrote"
    if environment.get("SLURM_CLUSTER_NAME", cluster) != cluster:
        return f"this job is of cluster {environment['SLURM_CLUSTER_NAME']}"
    if node is not None and node not in nodes:
        return f"node {node} is not one of twin {name}"
    return ""
