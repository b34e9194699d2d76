"""What a line of Xid 144 to 150 means by its unit, sub-code and error status: whose fault it is.

`NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x025525c6 0x00000000 ...)`:
the sub-code is in bits 20 to 25 of the first word, the error status is the second word. The table
is `nvlink.toml`, with its source.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from tr11ops.diagnose.signature import FaultClass, FaultSignature, NextStep, NodeBlame, Proof, Role
from trainer.contract.record import Record

FILE: Final = Path(__file__).with_name("nvlink.toml")
CODES: Final = frozenset(f"xid-{code}" for code in range(144, 151))
_EVENT: Final = re.compile(
    r"\b1(?:4[4-9]|50), (?P<unit>[A-Z][A-Z0-9_]+) +(?P<severity>(?:Link )?[Ff]atal|[Nn]on-?[Ff]atal) +XC ?\d.{0,40}?"
    r"[(\[](?P<first>0x[0-9a-fA-F]{1,8})(?: (?P<status>0x[0-9a-fA-F]{1,8}))?"
)
_SUBCODE_SHIFT: Final = 20
_SUBCODE_MASK: Final = 0x3F


class NvlinkRule(Record):
    """Which lines are of one kind; an empty set stands for any. `who`: a key of the table's kinds."""

    units: frozenset[str]
    subcodes: frozenset[int]
    statuses: frozenset[int]
    who: str

    def fits(self, unit: str, subcode: int, status: int) -> bool:
        return (
            unit in self.units
            and (not self.subcodes or subcode in self.subcodes)
            and (not self.statuses or status in self.statuses)
        )


def nvlink_kind(text: str) -> str | None:
    """Whose fault a line of Xid 144 to 150 tells of, a key of the table; None for a line without
    these fields.
    """
    event = _EVENT.search(text)
    if event is None:
        return None
    subcode = int(event["first"], 16) >> _SUBCODE_SHIFT & _SUBCODE_MASK
    status = int(event["status"] or "0", 16)
    rule = next(
        (rule for rule in nvlink_rules() if rule.fits(event["unit"], subcode, status)), None
    )
    if rule is not None:
        return rule.who
    if event["severity"].lower().startswith("non"):
        return "none"
    return "own"


def of_nvlink(signature: FaultSignature, text: str) -> FaultSignature:
    """The signature of a line of Xid 144 to 150, as its fields have it."""
    who = nvlink_kind(text)
    if who is None:
        return signature
    return _told(signature, who)


@cache
def _told(signature: FaultSignature, who: str) -> FaultSignature:
    kind = nvlink_kinds()[who]
    role = Role(kind["role"])
    blame = NodeBlame(kind["node"])
    # without a proof this makes a suspect
    step = NextStep(kind.get("action", NextStep.EXCLUDE_AND_RESUBMIT))
    code = signature.meaning.partition(":")[0]
    return replace(
        signature,
        role=role,
        fault=FaultClass(kind.get("class", signature.fault)),
        step=step,
        blame=blame,
        confidence=kind["confidence"],
        proof=Proof(kind["proof"]) if "proof" in kind else None,
        meaning=f"{code}: {kind['says']}",
    )


@cache
def nvlink_rules() -> tuple[NvlinkRule, ...]:
    """The table's rules, in their order. Raises ValueError that names the file."""
    kinds = nvlink_kinds()
    rules = tuple(
        NvlinkRule(
            frozenset(rule["units"]),
            frozenset(rule.get("subcodes", ())),
            frozenset(rule.get("statuses", ())),
            rule["who"],
        )
        for rule in _document()["rule"]
    )
    unknown = [rule.who for rule in rules if rule.who not in kinds]
    if unknown:
        raise ValueError(f"{FILE.name}: {unknown[0]} is no kind of the table")
    return rules


def nvlink_kinds() -> Mapping[str, Any]:
    """Whose fault it may be, and what follows from each."""
    kinds: Mapping[str, Any] = _document()["who"]
    return kinds


@cache
def _document() -> Mapping[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))
