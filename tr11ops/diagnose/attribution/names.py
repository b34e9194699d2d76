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
