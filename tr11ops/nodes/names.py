"""Node names as people type them, in a command or a card: plain, as host lists, checked against the
cluster's nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tr11ops.base.errors import ExclusionError, HostlistError, NodeNameError
from tr11ops.cluster.hostlist import expand
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.exclusions import check_node_name
from trainer.config.card import nearest


def resolve(typed: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """The names behind `typed` (`jean-zay-iam[01-03]` is three), each once, in that order.

    Raises NodeNameError for what is no host list or no node name, and for names that are not in
    `known`.
    """
    names: list[str] = []
    for text in typed:
        try:
            found = expand(text)
        except HostlistError as error:
            raise NodeNameError(str(error)) from None
        if not found:
            raise NodeNameError("a node name is empty: leave it out, or name a node")
        names += found
    for name in names:
        try:
            check_node_name(name)
        except ExclusionError as error:
            raise NodeNameError(str(error)) from None
    strangers = [name for name in dict.fromkeys(names) if name not in known]
    if strangers:
        near = nearest(strangers[0], sorted(known))
        more = ""
        if strangers[1:]:
            more = f" (nor are {len(strangers) - 1} more)"
        if near:
            fix = f"did you mean {near!r}?"
        else:
            fix = "`tr11 nodes list --all` shows them"
        raise NodeNameError(f"{strangers[0]!r} is not a node of this cluster{more}: {fix}")
    return tuple(dict.fromkeys(names))


def card_exclusions(card: RunCard) -> tuple[str, ...]:
    """The nodes of slurm.exclude, host lists expanded; what is no host list is judged where the
    card is read.
    """
    names: list[str] = []
    for text in card.slurm.exclude:
        try:
            names += expand(text)
        except HostlistError:
            continue
    return tuple(names)
