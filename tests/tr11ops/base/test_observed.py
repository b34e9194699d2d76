"""What is unknown in a record follows from its fields: no list of names is kept by hand."""

from __future__ import annotations

from typing import ClassVar

from tr11ops.base.observed import Observed, Unknown, all_unknown, observed_fields, unknown_fields
from trainer.contract.record import Record


class Part(Record):
    disk_use: Observed[int] = 0
    moment: float = 0.0


class Whole(Record, kw_only=True):
    NAMES: ClassVar[dict[str, str]] = {"drill": "restore drill"}
    jobs: Observed[tuple[str, ...]]
    drill: Observed[int | None] = None
    part: Part = Part()
    seen_by: str = ""


def test_the_fields_that_may_be_unknown_by_their_annotation() -> None:
    assert observed_fields(Whole, Part) == {
        "jobs": "jobs",
        "drill": "restore drill",
        "disk_use": "disk use",
    }


def test_each_cause_is_one_line() -> None:
    away, torn = Unknown("no answer"), Unknown("it is torn")
    assert list(unknown_fields(Whole(jobs=away, drill=torn), Part(disk_use=away))) == [
        "jobs, disk use: no answer",
        "restore drill: it is torn",
    ]
    assert list(unknown_fields(Whole(jobs=()))) == []


def test_all_unknown_leaves_out_what_is_never_unknown() -> None:
    why = Unknown("not mounted")
    whole = Whole(**all_unknown(Whole, why), seen_by="ana", part=Part(**all_unknown(Part, why)))
    assert (whole.jobs, whole.drill, whole.part, whole.seen_by) == (why, why, Part(why, 0.0), "ana")
