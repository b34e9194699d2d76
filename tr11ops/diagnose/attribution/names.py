"""Which node of a launch a text, a host name, an address or a rank means. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import field

from trainer.contract.record import Record

_ADDRESS = re.compile(
    r"(?<![\w.:])(\d{1,3}(?:\.\d{1,3}){3})(?![\w.])|\[([0-9a-fA-F:]*:[0-9a-fA-F:]+)\]"
)
_WORD = re.compile(r"[A-Za-z0-9][\w.-]*")
_RANK_ON = re.compile(r"\brank \d+ on ([^\s,:;()]+)")
_RANK = re.compile(r"\brank (?:#)?(\d+)\b")


# what names of a node's addresses on a fast network end with
_INTERFACE = re.compile(r"(?<=[\w])-(?:ib|hsn|opa|eth|en|bond|roce|mlx)\d*$", re.IGNORECASE)


# What a kernel, a driver, a container's runtime or a trainer calls things: of no machine, whatever its number.
_DEVICE = re.compile(
    r"(?:nvidia-)?nvswitch\d+|nvidia\d+|nvlink\d+|GPU-[0-9a-f-]{8,}|MIG-[0-9a-f-]{8,}|cuda:?\d+|card\d+"
    r"|renderD\d+|accel\d+|davinci\d+|npu[-_]?\d{1,2}|hl\d+|mlx\d+(?:_[\w:.]+)?|ib\d+|ibp\w+|ibs\d\w*|eth\d+|en[opsx]\d\w*"
    r"|bond\d+|docker\d+|veth\w+|br-?\d\w*|virbr\d+|cni\d+|cali\w+|flannel\.?\d*|hsn\d+|cxi\d+|hfi1?_?\d+|efa_?\d+|rdmap\w+"
    r"|roce\w*\d|bnxt_\w+|irdma\d+|opap\w+|tun\d+|tap\d+|lo\d?|nvme\d+(?:n\d+)?(?:p\d+)?|sd[a-z]{1,2}\d*|md\d+|dm-\d+|loop\d+"
    r"|zram\d+|raid\d+|ata\d+(?:\.\d+)?|scsi\d+|usb\d+|tty\w*\d|fb\d+|hwmon\d+|thermal\w*\d+|rtc\d+|numa\d+|mc\d+"
    r"|nfs\d|ext\d|xfs\d?|cgroups?\d|ipv?\d|tcp\d|udp\d|sha\d+|md5|crc\w*\d+|python\d[\d.]*|x86\w*|e1000e?|i40e|bnx2x?"
    r"|(?:rank|layer|step|epoch|iter(?:ation)?|stage|shard|bucket|batch|phase|attempt|expert|fold|seed)[-_]?\d+"
    r"|(?:[0-9a-f]{12}|[0-9a-f]{64})|[0-9a-f]{4}(?:[0-9a-f]{4})?:[0-9a-f]{2}:[0-9a-f]{2}(?:\.\d)?",
    re.IGNORECASE,
)
_OFTEN_DEVICE = re.compile(r"(?:gpu|cpu|task|device)[-_]?\d{1,2}", re.IGNORECASE)  # or a machine's
_POD = re.compile(  # a replica of a job, or of a deployment: a machine may have many
    r"[a-z0-9.-]+-(?:worker|master|launcher|replica|chief|ps|head|server|trainer|pytorchjob|job|node)-\d+(?:-\d+)*(?:-[a-z0-9]{5})?"
    r"|[a-z0-9-]+-[0-9a-f]{8,10}-[a-z0-9]{5}|[a-z0-9-]+-\d+-\d+-[a-z0-9]{5}"
)
_NUMERIC_ADDRESS = re.compile(
    r"\[?(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*:[0-9a-fA-F:.]*)\]?(?:[:<]\d+>?)?"
)


def is_device(name: str) -> bool:
    """Whether a name is of a device, an interface, a GPU or a container's identifier, and so of no
    machine.
    """
    return _DEVICE.fullmatch(name) is not None


def can_be_excluded(name: str, is_listed: bool = False) -> bool:
    """Whether a scheduler may know a machine by this name: no device's, no address, no pod's.

    `is_listed`: a list of nodes has it, and so `gpu3` may be one too.
    """
    return not (
        is_device(name)
        or (not is_listed and _OFTEN_DEVICE.fullmatch(name.partition(".")[0]) is not None)
        or "@" in name
        or _POD.fullmatch(name) is not None
        or _NUMERIC_ADDRESS.fullmatch(name) is not None
    )


def without_interface(host: str) -> str:
    """A node's name without that of one of its interfaces: `n7-ib0` is n7."""
    return _INTERFACE.sub("", host)


class NodeNames(Record):
    """The names of a launch's nodes. `ranks`: node by global rank. `addresses`: node by its own
    network address.
    """

    nodes: Sequence[str] = ()
    ranks: Mapping[int, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)

    def of_host(self, host: str) -> str | None:
        """The node that a host name means, be it short or with its domain; None where it is no
        node's or several's.
        """
        if host in self.nodes:
            return host
        short = without_interface(host.partition(".")[0].lower())
        found = [node for node in self.nodes if node.partition(".")[0].lower() == short]
        if len(found) == 1:
            return found[0]
        return None

    def named_in(self, text: str) -> str | None:
        """The one node that a text tells of: by its rank, its address or its name; None where it
        tells of several.

        What it says of a rank counts before addresses, those before names: paths may hold a name
        too.
        """
        told = [self.of_host(match[1].rstrip(".")) for match in _RANK_ON.finditer(text)]
        addresses = [self.addresses.get(match[1] or match[2]) for match in _ADDRESS.finditer(text)]
        ranks = [self.ranks.get(int(match[1])) for match in _RANK.finditer(text)]
        words = [self.of_host(match[0].rstrip(".")) for match in _WORD.finditer(text)]
        for found in (told, addresses, ranks, words):
            nodes = {node for node in found if node is not None}
            if nodes:
                if len(nodes) == 1:
                    return nodes.pop()
                return None
        return None


def unshared(of_node: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Node by address, where it is one node's alone: several that share one machine share its
    addresses.
    """
    owners: dict[str, set[str]] = {}
    for node, addresses in of_node.items():
        for address in addresses:
            owners.setdefault(address, set()).add(node)
    return {address: next(iter(nodes)) for address, nodes in owners.items() if len(nodes) == 1}
