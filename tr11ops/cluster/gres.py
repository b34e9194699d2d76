"""Generic resources as Slurm writes them, of a node and of a request: `gpu:8`,
`gpu:3090:8(S:0-1),nic:2`. Pure.

An entry is NAME[:KIND][:COUNT]; a kind may begin with a digit (`3090`, MIG's `1g.10gb`), so that
only the last part is a count. What stands in parentheses says where they are: sockets `(S:0-1)`,
numbers `(IDX:0-3,6)`.
"""

from __future__ import annotations

import re

from trainer.contract.record import Record

_WHERE = re.compile(r"\([^()]*\)")
_NONE = {"", "(null)", "N/A", "n/a"}


class Gres(Record):
    """One entry. `count` is None where it does not say how many: a request for one."""

    name: str
    kind: str = ""
    count: int | None = None


def parse_gres(text: str) -> tuple[Gres, ...]:
    """The entries of a list. Raises ValueError for one that is none."""
    if text.strip() in _NONE:
        return ()
    return tuple(_entry(entry) for entry in _WHERE.sub("", text).split(",") if entry.strip())


def _entry(text: str) -> Gres:
    name, *rest = text.strip().removeprefix("gres/").removeprefix("gres:").split(":")
    rest = [part for part in rest if part != "no_consume"]
    count = None
    if rest and rest[-1].isascii() and rest[-1].isdigit():
        count = int(rest.pop())
    if not name or len(rest) > 1 or not all(rest):
        raise ValueError(f"{text!r} is no generic resource: NAME[:KIND][:COUNT]")
    return Gres(name, rest[0] if rest else "", count)


def gpu_count(text: str) -> int:
    """GPUs of a node's list; MIG slices count each. An entry that cannot be read counts none."""
    found = 0
    for entry in _WHERE.sub("", text).split(","):
        try:
            found += sum(gres.count or 0 for gres in parse_gres(entry) if gres.name == "gpu")
        except ValueError:
            continue
    return found


def gpu_kind_of(gres: str) -> str:
    """The one kind of GPU that a list names: "a100" of `gpu:a100:8`; "" for none, or for several."""
    try:
        kinds = {entry.kind for entry in parse_gres(gres) if entry.name == "gpu" and entry.kind}
    except ValueError:
        return ""
    if len(kinds) == 1:
        return kinds.pop()
    return ""
