"""Which node of a training this machine is, where no scheduler says so: by options, else by the
environment. Pure.

Containers and cloud launchers set MASTER_ADDR, MASTER_PORT, NNODES and NODE_RANK; a PyTorchJob sets
RANK and WORLD_SIZE (of nodes), an indexed Kubernetes Job JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.base.errors import RendezvousError
from tr11ops.base.units import counted
from trainer.contract.record import Record

# one of these alone means the whole environment
MEANT = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")
COUNTS = ("NNODES", "WORLD_SIZE")
RANKS = ("NODE_RANK", "JOB_COMPLETION_INDEX", "RANK")
LARGEST_COUNT = 100_000


class Rendezvous(Record):
    """Node `rank` of `nodes`; node 0 listens at `host`:`port`."""

    nodes: int
    rank: int
    host: str
    port: int

    @property
    def master(self) -> str:
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"


def read_rendezvous(
    nodes: int | None,
    rank: int | None,
    master: str | None,
    environment: Mapping[str, str],
    of_card: int,
) -> tuple[Rendezvous | None, tuple[str, ...]]:
    """This machine's place, None where nothing speaks of several machines; and what is to be said
    of the choice.

    Options win over the environment. `of_card`: slurm.nodes, the number of nodes where nothing else
    says it. Raises PlaceError.
    """
    is_meant = rank is not None or master is not None
    variables = {name: value for name, value in environment.items() if value.strip()}
    if not is_meant and not any(name in variables for name in MEANT):
        return None, ()
    if "LOCAL_RANK" in variables:
        text = f"LOCAL_RANK={variables['LOCAL_RANK']}: tr11 train starts all workers of its node"
        raise RendezvousError(
            f"{text}; start it once on each node, not once for each worker, and without torchrun"
        )
    said: list[str] = []
    count = _chosen("--nodes", nodes, names=COUNTS, variables=variables, least=1, said=said)
    number = _chosen("--node-rank", rank, names=RANKS, variables=variables, least=0, said=said)
    total = count if count is not None else of_card
    host, port = _master(master, variables, said)
    if total == 1 and not is_meant and not number:
        return None, tuple(said)  # a launcher of one container
    if number is None:
        raise _missing("--node-rank", "NODE_RANK", "which node this is", variables)
    if host is None or port is None:
        raise _missing(
            "--master HOST:PORT", "MASTER_ADDR and MASTER_PORT", "where node 0 is", variables
        )
    if number >= total:
        if nodes is not None:
            where = f"--nodes {total}"
        else:
            where = counted(total, "node")
        raise RendezvousError(
            f"node rank {number}: with {where} it must be 0 to {total - 1}; give each node its own"
        )
    return Rendezvous(total, number, host, port), tuple(said)


def _missing(option: str, names: str, what: str, variables: Mapping[str, str]) -> RendezvousError:
    there = ", ".join(name for name in MEANT if name in variables)
    if there:
        so_far = f"{there} set, but n"
    else:
        so_far = "n"
    return RendezvousError(
        f"{so_far}othing says {what}: give {option}, or set {names}"
        + (f", or unset {there}" * bool(there))
    )


def _chosen(
    option: str,
    given: int | None,
    names: tuple[str, ...],
    variables: Mapping[str, str],
    least: int,
    said: list[str],
) -> int | None:
    """The option's number, else that of the first variable that is set."""
    name = next((name for name in names if name in variables), None)
    if name is None:
        value = None
    else:
        value = _number(name, variables[name], least, LARGEST_COUNT)
    if given is not None and value is not None and value != given:
        said.append(f"{option} {given} is used, not {name}={value} of the environment")
    if given is not None:
        return given
    return value


def _number(name: str, text: str, least: int, most: int) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise RendezvousError(
            f"{name}={text!r}: must be a whole number from {least} to {most}; correct it, or unset it"
        )
    return int(text)


def _master(
    master: str | None, variables: Mapping[str, str], said: list[str]
) -> tuple[str | None, int | None]:
    address = variables.get("MASTER_ADDR")
    port = variables.get("MASTER_PORT")
    if master is None:
        if (address is None) != (port is None):
            if port is None:
                there = "MASTER_ADDR"
                absent = "MASTER_PORT"
            else:
                there = "MASTER_PORT"
                absent = "MASTER_ADDR"
            raise RendezvousError(
                f"{there} is set and {absent} is not: set both, or give --master HOST:PORT, or unset it"
            )
        if address is None or port is None:
            return (None, None)
        return (address.strip(), _port("MASTER_PORT", port))
    host, colon, number = master.rpartition(":")
    if not colon or not host.strip("[]"):
        raise RendezvousError(f"--master {master!r}: must be HOST:PORT, such as node1:29500")
    chosen = (host.strip("[]"), _port("--master", number))
    if address is not None and chosen != (
        address.strip(),
        _port("MASTER_PORT", port) if port else chosen[1],
    ):
        said.append(f"--master {master} is used, not MASTER_ADDR={address} of the environment")
    return chosen


def _port(name: str, text: str) -> int:
    return _number(f"{name}: port", text, 1, 65535)
