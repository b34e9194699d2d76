"""Which GPUs a node's workers see, where this machine plays the nodes or no scheduler gave any."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from tr11ops.base.nvidia import uuids, visible
from tr11ops.base.units import counted
from tr11ops.cluster.local_machine import DEVICES_VARIABLE, claim_free, look_at_gpus


def gpus_of_node(environment: Mapping[str, str], nodes: Sequence[str], name: str) -> dict[str, str]:
    """The variables of one of the nodes that this machine plays: its share of the attempt's GPUs.
    Pure.
    """
    devices = environment.get(DEVICES_VARIABLE, "").split(",")
    if len(nodes) < 2 or len(devices) % len(nodes):
        return {}
    each, place = len(devices) // len(nodes), list(nodes).index(name)
    return {DEVICES_VARIABLE: ",".join(devices[each * place : each * (place + 1)])}


def claim_gpus(
    count: int, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[socket.socket]]:
    """The environment of a training in the foreground that works with `count` GPUs, and the claims
    on these.

    Of those that CUDA_VISIBLE_DEVICES names, the first that no other run of this machine has. Where
    the driver does not list as many, nothing is chosen: the health checks say what is there. Raises
    RuntimeError where others have them.
    """
    seen = visible(look_at_gpus().gpus, environment.get(DEVICES_VARIABLE))
    if not count or len(seen) < count:
        return dict(environment), []
    held = claim_free(uuids(seen))
    chosen = list(held)[:count]
    for uuid in set(held) - set(chosen):
        held[uuid].close()
    if len(chosen) < count:
        for uuid in chosen:
            held[uuid].close()
        needed = counted(count, "GPU is", "GPUs are")
        raise RuntimeError(
            f"{needed} needed, free of {len(seen)}: {len(chosen)}; other runs have the rest"
        )
    return {**environment, DEVICES_VARIABLE: ",".join(chosen)}, [held[uuid] for uuid in chosen]
