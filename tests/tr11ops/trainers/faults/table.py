"""What was found of all faults, kept in files, and the tables of docs/reference/ that are made of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.tr11ops.trainers.faults.given import FAULTS
from tests.tr11ops.trainers.faults.outcome import Outcome
from tr11ops.base.units import counted
from trainer.contract.documents import document, record_of

PAGES = {"local": "trainer-faults.md", "slurm": "trainer-faults-slurm.md"}
FIRST_CODE = "Which code each cell is of; before `a256536e` that was not kept, and it is the commit that brought the cell:"
BEGIN, END = "<!-- the table of faults -->", "<!-- its end -->"


def keep(folder: Path, outcome: Outcome) -> None:
    """Keep one cell, in its old one's place: a line each, so that two people's cells merge."""
    folder.mkdir(exist_ok=True)
    place = folder / f"{outcome.scheduler}-{outcome.trainer}.jsonl"
    cells = {one.fault: one for one in _read(place)} | {outcome.fault: outcome}
    lines = [json.dumps(document(cells[name])) for name in FAULTS if name in cells]
    place.write_text("\n".join(lines) + "\n", encoding="utf-8")


def kept(folder: Path) -> list[Outcome]:
    """All cells. Raises OSError, ValueError."""
    return [one for place in sorted(folder.glob("*.jsonl")) for one in _read(place)]


def _read(place: Path) -> list[Outcome]:
    if not place.exists():
        return []
    lines = place.read_text(encoding="utf-8").splitlines()
    return [record_of(Outcome, json.loads(line)) for line in lines]


def table_lines(cells: Iterable[Outcome], scheduler: str) -> list[str]:
    """A row for each cell of a scheduler, by fault."""
    found = [one for one in cells if one.scheduler == scheduler]
    lines = [
        "| fault | trainer | scheduler | `tr11 status`, meanwhile | at the end | what tr11 did | end | starts | steps trained again | of a whole checkpoint | excluded | a person |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for fault in FAULTS.values():
        of_fault = [one for one in found if one.fault == fault.name]
        lines += [_row(fault.what, one) for one in of_fault]
    return [*lines, "", FIRST_CODE, "", *_codes(found)]


def _codes(cells: Iterable[Outcome]) -> Iterator[str]:
    """Which code each cell is of, a line for each."""
    by_code: dict[str, dict[str, list[str]]] = {}
    for one in cells:
        of_code = by_code.setdefault(one.code, {})
        of_code.setdefault(f"{one.trainer} on {one.scheduler}", []).append(one.fault)
    for code, trainings in sorted(by_code.items()):
        count = sum(map(len, trainings.values()))
        told = "; ".join(f"{where}: {', '.join(faults)}" for where, faults in trainings.items())
        yield f"- `{code}`: {counted(count, 'cell')} ({told})"


def _row(what: str, one: Outcome) -> str:
    cells = (
        what, one.trainer, one.scheduler, one.during.partition(" toy ")[0] or "-", _verdict(one),
        "; ".join(_done(one.acts)) or "-", one.end or "none", str(one.starts),
        str(one.again), str(one.lost), " ".join(one.excluded) or "none", one.person or "nothing",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _verdict(one: Outcome) -> str:
    """The last verdict, with what was wrong."""
    if not one.wrong:
        return one.verdict
    return f"{one.verdict}. **Wrong**: {'; '.join(one.wrong)}"


_DECISION = re.compile(r"^\S+ launch \d+: \w+, (?P<what>.*?)(?:, (?:blamed|suspects) .*)?$")
_ENDS = {
    "signal": "ended after a checkpoint, before the limit",
    "kill-switch": "ended after a checkpoint",
    "exit-duration": "ended after a checkpoint, before the limit",
}
_ASIDE = re.compile(r"^(?P<what>\S+) is .*: it lies in \S+ now")


def _done(acts: Iterable[str]) -> Iterator[str]:
    """Of what tr11 did, what it decided after a launch, in what order it stopped one, and what it moved out
    of the trainer's way.
    """
    for act in acts:
        stopped = _ENDS.get(act.rpartition(": ")[2])
        if stopped is not None:
            yield stopped
        decided, moved = _DECISION.match(act), _ASIDE.match(act)
        if decided is not None and decided["what"] != "no decision":
            yield decided["what"]
        if moved is not None:
            yield f"{moved['what']} set aside"


def with_table(text: str, lines: Sequence[str]) -> str:
    """The page with the table in its place. Raises ValueError where the page has none."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{after}"
