"""Does a health check fail for the nodes' sake, or does it fail everywhere? Pure.

A check that one node fails and the others pass tells something of that node. One that fails on node
after node, and that hardly any node passes, tells something of itself (a script that is broken, a
service that it asks) or of what all nodes share.
"""

from __future__ import annotations

from collections.abc import Collection

ENOUGH = 2  # nodes that fail a check, where none passes it
ENOUGH_BESIDE_OTHERS = 3  # nodes that fail it, where fewer pass it


def fails_everywhere(failed: Collection[str], passed: Collection[str]) -> bool:
    """Whether a check that these nodes failed and those passed tells nothing of the nodes that
    failed it.
    """
    needed = ENOUGH_BESIDE_OTHERS if passed else ENOUGH
    return len(failed) >= needed and len(failed) > len(passed)
