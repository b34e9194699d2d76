"""torchrun's report on its workers, in the forms that it had over the years. Pure."""

from __future__ import annotations

import re

from msgspec.structs import replace

from tr11ops.diagnose.sighting import WorkerFailure

HEADS = ("Root Cause (first observed failure):", "Root Cause:", "Failures:", "Other Failures:")
_ENTRY = re.compile(r"^\[\d+\]:$")
_FIELD = re.compile(
    r"^(?P<key>time|host|rank|exitcode|error_file|traceback|msg|error)\s*: ?(?P<value>.*)$"
)
_RANK = re.compile(r"(\d+) \(local_rank: (\d+)\)")
_CODE = re.compile(r"(-?\d+)")
_TIME = re.compile(r"\d{4}-(\d\d-\d\d)[_ T](\d\d:\d\d:\d\d)")
_LINE = re.compile(r"^[=*-]{10,}\s*$")
LINES_AT_MOST = 4000


class ReportReader:
    """Takes the lines of a log in order, from a head on until the report ends."""

    def __init__(self) -> None:
        self.found: list[WorkerFailure] = []
        self._is_root: bool | None = None  # None: no report is open
        self._lines = 0

    @property
    def is_open(self) -> bool:
        return self._is_root is not None

    def feed(self, body: str, line_number: int) -> None:
        text = body.strip().strip("*").strip()
        if text in HEADS:
            self._is_root, self._lines = text.startswith("Root"), 0
            return
        if self._is_root is None:
            return
        self._lines += 1
        if _ENTRY.match(text):
            self.found.append(WorkerFailure(line_number, self._is_root))
        elif (match := _FIELD.match(text)) and self.found:
            self.found[-1] = _with(self.found[-1], match["key"], match["value"].strip())
            if match["key"] == "exitcode":
                self.found[-1] = replace(self.found[-1], line_number=line_number)
        elif self._lines > LINES_AT_MOST or (
            text and not _LINE.match(text) and not text.startswith("<NO_")
        ):
            self._is_root = None


def _with(failure: WorkerFailure, key: str, value: str) -> WorkerFailure:
    if key == "host":
        return replace(failure, host=value or None)
    if key == "rank" and (rank := _RANK.search(value)):
        return replace(failure, rank=int(rank[1]), local_rank=int(rank[2]))
    if key == "exitcode" and (code := _CODE.search(value)):
        return replace(failure, exit_code=int(code[1]))
    if key == "time" and (time := _TIME.search(value)):
        return replace(failure, time=f"{time[1]} {time[2]}")
    if key in {"traceback", "msg", "error"} and not value.startswith("To enable traceback"):
        return replace(failure, said=value)
    return failure
