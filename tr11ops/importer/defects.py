"""The known defects, one function each in three files, and the order in which they are told."""

from __future__ import annotations

from collections.abc import Iterable

from tr11ops.importer.case import Case
from tr11ops.importer.defects_job import JOB_DEFECTS
from tr11ops.importer.defects_model import MODEL_DEFECTS
from tr11ops.importer.defects_numbers import NUMBER_DEFECTS
from tr11ops.importer.results import Defect, DefectSeverity

_ORDER = {DefectSeverity.ERROR: 0, DefectSeverity.WARNING: 1, DefectSeverity.NOTE: 2}


def find_defects(case: Case) -> list[Defect]:
    """Every defect of the script, in order."""
    return in_order(defect for look in (*JOB_DEFECTS, *MODEL_DEFECTS, *NUMBER_DEFECTS) for defect in look(case))


def in_order(defects: Iterable[Defect]) -> list[Defect]:
    """The most severe first, then by line."""
    return sorted(defects, key=lambda defect: (_ORDER[defect.severity], defect.line, defect.code))
