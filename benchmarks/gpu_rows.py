"""What `make gpu` finds: a row of its table, what a child process tells, and the table's place in RESULTS.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.contract.record import Record

BUDGET_SECONDS = 480.0
CHECK_SECONDS = 3600.0  # of a section on a processor
SPARE_SECONDS = 5.0  # a section must end by itself, or what it was about to find is lost
RESULTS = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- make gpu: begin -->", "<!-- make gpu: end -->"
FOUND = "found: "  # begins a line of a child that holds a row or a course


class Row(Record):
    """One line of the table. `fine`: None for a figure that is no check."""

    what: str
    found: str
    fine: bool | None = None
    figures: dict[str, Any] | None = None


def fault_of(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def found_in(output: str) -> list[Any]:
    """What a child has told so far, each on a line of its own."""
    return [
        json.loads(line.removeprefix(FOUND))
        for line in output.splitlines()
        if line.startswith(FOUND)
    ]


def tell(found: Any) -> None:
    print(f"{FOUND}{json.dumps(found)}", flush=True)


def left_out(what: str, seconds: float, left: float, fine: bool | None = None) -> Row:
    minutes = BUDGET_SECONDS / 60
    return Row(
        what,
        f"left out: it may take {seconds:.0f} s, {max(0.0, left):.0f} s of {minutes:g} minutes are left",
        fine,
    )


def table(title: str, rows: Sequence[Row]) -> str:
    """Markdown; what failed is marked."""
    marks = {None: "", True: "fine", False: "**failed**"}
    lines = [f"{title}", "", "| what | found | |", "|---|---|---|"]
    return "\n".join(
        [
            *lines,
            *(
                f"| {row.what} | {row.found.replace('|', '/')} | {marks[row.fine]} |"
                for row in rows
            ),
        ]
    )


def put_table(path: Path, text: str) -> None:
    put_block(path, text, (BEGIN, END), "On a GPU")


def put_block(path: Path, text: str, marks: tuple[str, str], heading: str) -> None:
    """Replace what stands between the marks, or add it with them at the end, under a heading."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    block = f"{marks[0]}\n{text}\n{marks[1]}"
    before, begin, rest = old.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    new = f"{old.rstrip()}\n\n## {heading}\n\n{block}\n".lstrip()
    if begin and end:
        new = f"{before}{block}{after}"
    path.write_text(new, encoding="utf-8")
