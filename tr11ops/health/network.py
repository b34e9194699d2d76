"""Is the network up: an interface at all, and every InfiniBand port that has a cable in it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr11ops.base.errors import Unanswered
from tr11ops.base.units import first_few
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements

if TYPE_CHECKING:
    from tr11ops.health.system import System

_INTERFACES = "/sys/class/net"
_DEVICES = "/sys/class/infiniband"


def check_network(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when no interface is up, or a cabled port is not active; a warning when a port is slower
    than its peers.

    A warning too where an interface that the ranks shall use is not there.
    """
    states = {name: _state(system, name) for name in system.names(_INTERFACES) if name != "lo"}
    known = {name: state for name, state in states.items() if state}
    # unknown: the driver does not tell
    up = [name for name, state in known.items() if state in {"up", "unknown"}]
    ports = _ports(system)
    active = [name for name, (state, _, _) in ports.items() if state == "ACTIVE"]
    dead = [
        f"{name} is {state}"
        for name, (state, link, _) in ports.items()
        if state != "ACTIVE" and link == "LinkUp"
    ]
    if ports and not active:
        return (
            CheckOutcome.BAD,
            f"no InfiniBand port is active: {first_few(f'{name} is {ports[name][0]}' for name in ports)}",
        )
    if dead:
        return CheckOutcome.BAD, f"cabled InfiniBand ports are not active: {first_few(dead)}"
    if known and not up and not active:
        return (
            CheckOutcome.BAD,
            f"no network interface is up: {first_few(f'{name} is {known[name]}' for name in known)}",
        )
    if not known and not ports:
        raise Unanswered("no network interface can be seen")
    rates = {name: ports[name][2] for name in active if ports[name][2] > 0}
    absent = [name for name in wanted.interfaces if name not in states and name != "lo"]
    if absent:  # the card may be wrong, so it does not condemn the node
        return (
            CheckOutcome.WARNING,
            f"GLOO_SOCKET_IFNAME: no interface {first_few(absent)} here, there are {first_few(states)}",
        )
    slow = [f"{name}: {rate:g} Gb/s" for name, rate in rates.items() if rate < max(rates.values())]
    if slow:
        return (
            CheckOutcome.WARNING,
            f"InfiniBand ports slower than {max(rates.values()):g} Gb/s: {first_few(slow)}",
        )
    return CheckOutcome.FINE, f"up: {first_few([*up, *active], 6)}"


def _state(system: System, name: str) -> str:
    try:
        return system.read(f"{_INTERFACES}/{name}/operstate").strip()
    except OSError:
        return ""  # such as bonding_masters, which is a file and no interface


def _ports(system: System) -> dict[str, tuple[str, str, float]]:
    """State, physical state and rate (Gb/s) of every port, such as {"mlx5_0/1": ("ACTIVE",
    "LinkUp", 100.0)}.
    """
    found = {}
    for device in system.names(_DEVICES):
        for port in system.names(f"{_DEVICES}/{device}/ports"):
            folder = f"{_DEVICES}/{device}/ports/{port}"
            state, link = (
                system.read(f"{folder}/{name}").strip().rpartition(": ")[2]
                for name in ("state", "phys_state")
            )
            rate = system.read(f"{folder}/rate").split()
            found[f"{device}/{port}"] = (state, link, float(rate[0]) if rate else 0.0)
    return found
