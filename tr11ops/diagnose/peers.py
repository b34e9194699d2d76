"""Whom the lines about broken links name. Pure.

Who prints such a line is a witness: a link has two ends. The peer that several of them name, and more than any other,
is the suspect; one word, or two ends that name each other, accuse no one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tr11ops.diagnose.places import LaunchPlaces
from tr11ops.diagnose.sighting import Sighting

FEWEST_WITNESSES = 2


def most_named_peer(sightings: Sequence[Sighting], places: LaunchPlaces) -> str | None:
    """The node or address that at least two others name, and no other as often; None where there is none."""
    words = [(peer, places.quoted(one).node, one) for one in sightings if (peer := places.peer_of(one)) is not None]
    are_placed = any(node is not None for _, node, _ in words)
    witnesses: dict[str, set[object]] = {}
    for peer, node, one in words:
        if node == peer or (are_placed and node is None):  # whose word that is, is not known: it may be told already
            continue
        witnesses.setdefault(peer, set()).add(node if are_placed else one.origin.writer)
    by_count = sorted(witnesses, key=lambda peer: len(witnesses[peer]), reverse=True)
    if not by_count or len(witnesses[by_count[0]]) < FEWEST_WITNESSES:
        return None
    if len(by_count) > 1 and len(witnesses[by_count[1]]) == len(witnesses[by_count[0]]):
        return None
    return by_count[0]
