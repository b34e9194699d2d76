"""What is unknown in a record follows from its fields: no list of names is kept by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from tr11ops.base.observed import Observed, Unknown, all_unknown, observed_fields, unknown_fields


@dataclass(frozen=True)
class Part:
    disk_use: Observed[int] = 0
    moment: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Whole(Part):
    jobs: Observed[tuple[str, ...]]
    drill: Observed[int | None] = field(default=None, metadata={"name": "restore drill"})
    seen_by: str = ""


def test_the_fields_that_may_be_unknown_by_their_annotation() -> None:
    assert observed_fields(Whole) == {"jobs": "jobs", "drill": "restore drill", "disk_use": "disk use"}


def test_each_cause_is_one_line() -> None:
    away, torn = Unknown("no answer"), Unknown("it is torn")
    assert list(unknown_fields(Whole(jobs=away, drill=torn, disk_use=away))) == [
        "jobs, disk use: no answer",
        "restore drill: it is torn",
    ]
    assert list(unknown_fields(Whole(jobs=()))) == []


def test_all_unknown_leaves_out_what_is_never_unknown() -> None:
    why = Unknown("not mounted")
    whole = Whole(**all_unknown(Whole, why), seen_by="ana")
    assert (whole.jobs, whole.drill, whole.disk_use, whole.moment) == (why, why, why, 0.0)
