"""Where a rehearsal may run: on a twin and nowhere else, so that no real allocation ever trains
nothing.

A card with a [rehearsal] section starts the stand-in worker. It is refused at launch, and once more
on every node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_FIX = "use another card, or start a twin: tr11 twin up"


def rehearsal_refusal(environment: Mapping[str, str]) -> str:
    """Why a rehearsal may not run with this environment's scheduler; empty when that is a twin.

    A twin is known by its own record beside the slurm.conf in use (`tr11ops.twin.twin` writes it),
    which must agree with it on cluster, port and, on a node, on the node's name.
    """
    fault = _fault(environment)
    if fault:
        return f"a card with [rehearsal] trains nothing, so it runs on a twin alone, and {fault}: {_FIX}"
    return ""


def _fault(environment: Mapping[str, str]) -> str:
    if environment.get("TR11_SCHEDULER") == "local":
        return "this is the embedded scheduler"
    conf = Path(environment.get("SLURM_CONF") or "/etc/slurm/slurm.conf")
    try:
        record = json.loads((conf.parent / "twin.json").read_text(encoding="utf-8"))
        name = str(record["plan"]["name"])
        cluster = str(record["cluster"])
        nodes = list(record["nodes"])
        port = int(record["first_port"])
        lines = conf.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, TypeError, KeyError):
        return f"{conf} is not a twin's"
    node = environment.get("SLURMD_NODENAME")
    if f"ClusterName={cluster}" not in lines or f"SlurmctldPort={port}" not in lines:
        return f"{conf} is not what its twin wrote"
    if environment.get("SLURM_CLUSTER_NAME", cluster) != cluster:
        return f"this job is of cluster {environment['SLURM_CLUSTER_NAME']}"
    if node is not None and node not in nodes:
        return f"node {node} is not one of twin {name}"
    return ""
