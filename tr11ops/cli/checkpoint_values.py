"""The numbers of checkpoints looked at by the trainer's own reader, in a child: this process never loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tr11ops.base.errors import Refusal
from tr11ops.cli.trainer_child import ask_checkpoint_module
from trainer.contract.record import Record

SHOWN = 3  # tensors that are named
NOT_LOOKED_AT = "bytes were compared, numbers were not looked at: --values finds NaN and infinity"


class ValuesFound(Record):
    """What the numbers of one checkpoint are. `not_finite`: part and name of each tensor with NaN or infinity.

    `fault`: why it could not be looked at, in one line.
    """

    tensors: int
    not_finite: tuple[tuple[str, str], ...] = ()
    fault: str = ""

    @property
    def is_sound(self) -> bool:
        return not self.not_finite and not self.fault

    def __str__(self) -> str:
        if self.fault:
            return f"numbers could not be looked at: {self.fault}"
        if not self.not_finite:
            return f"numbers finite, {self.tensors} tensors"
        named = ", ".join(f"{name} ({part})" for part, name in self.not_finite[:SHOWN])
        more = f" and {len(self.not_finite) - SHOWN} more" if len(self.not_finite) > SHOWN else ""
        return f"NaN or infinity in {named}{more}: no training goes on well from it; go back to an older one"

    def to_json(self) -> dict[str, Any]:
        return {
            "tensors": self.tensors,
            "not_finite": [{"part": part, "tensor": name} for part, name in self.not_finite],
            "fault": self.fault,
        }


def look_at_values(places: Sequence[Path]) -> Mapping[Path, ValuesFound]:
    """Every number of these checkpoints, with a bar on a terminal. Raises Refusal where the child gives no answer."""
    if not places:
        return {}
    answer = ask_checkpoint_module(["values", "--json", "--", *map(str, places)])
    if answer is None or "checkpoints" not in answer:
        raise Refusal("the numbers could not be looked at (see above)")
    found = {}
    for one in answer["checkpoints"]:
        bad = tuple((str(part), str(name)) for part, name in one["not_finite"])
        found[Path(one["place"])] = ValuesFound(int(one["tensors"]), bad, str(one["fault"]))
    return found
