"""`make trainer-faults`: ten faults for each trainer that knows nothing of tr11, each given for real to a
training of two nodes that `tr11 launch` started.

Each cell is judged by what the run left behind: no step lost of a whole checkpoint, no innocent node
excluded, the right end. What was found is kept, a file for each scheduler and trainer, in
`trainer_faults/`; the tables of docs/reference/ are written from it. A cell that is given again takes
its old one's place. Exit status 1 where one came out wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.tr11ops.trainers.faults.given import FAULTS
from tests.tr11ops.trainers.faults.outcome import Outcome, play
from tests.tr11ops.trainers.faults.run import FaultRun
from tests.tr11ops.trainers.faults.sites import SITES, Site
from tests.tr11ops.trainers.faults.table import (
    PAGES,
    keep,
    kept,
    table_lines,
    with_table,
)
from tests.tr11ops.trainers.faults.trainers import TRAINERS

KEPT = Path(__file__).with_name("trainer_faults")
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
console = Console(highlight=False)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", choices=[*SITES], default="local")
    parser.add_argument("--trainer", choices=[*TRAINERS], action="append")
    parser.add_argument("--fault", choices=[*FAULTS], action="append")
    parser.add_argument("--patience", type=float, default=1.0, help="on a busy machine: 2 or 3")
    parser.add_argument("--keep", action="store_true", help="keep the run directories")
    parser.add_argument("--docs", action="store_true", help="only write the table of the page")
    parser.add_argument("--into", type=Path, help="a trial: its cells go there, not to the page")
    asked = parser.parse_args(words)
    found: list[Outcome] = []
    if not asked.docs:
        found = _play_all(asked)
    if asked.into is not None:
        return int(any(one.wrong for one in found))
    for scheduler, name in PAGES.items():
        page = REFERENCE / name
        lines = table_lines(kept(KEPT), scheduler)
        page.write_text(with_table(page.read_text("utf-8"), lines), encoding="utf-8")
    return int(any(one.wrong for one in found))


def _play_all(asked: argparse.Namespace) -> list[Outcome]:
    with closing(SITES[asked.scheduler]()) as site:
        return _play_on(site, asked)


def _play_on(site: Site, asked: argparse.Namespace) -> list[Outcome]:
    cells = [
        (TRAINERS[trainer], FAULTS[fault])
        for trainer in asked.trainer or TRAINERS
        for fault in asked.fault or FAULTS
    ]
    found = []
    for number, (trainer, fault) in enumerate(cells, start=1):
        console.print(f"{number} of {len(cells)}: {trainer.name}, {fault.what} ...", end=" ")
        folder = Path(tempfile.mkdtemp(prefix=f"tr11-{trainer.name}-{fault.name}-"))
        outcome = play(FaultRun(trainer, site, folder, asked.patience), fault)
        found.append(outcome)
        keep(asked.into or KEPT, outcome)
        console.print(f"{'; '.join(outcome.wrong) or 'right'} ({outcome.seconds:.0f} s)")
        for act in outcome.acts:
            console.print(f"   {act}")
        if asked.keep or outcome.wrong:
            console.print(f"   its files: {folder}")
        else:
            shutil.rmtree(folder)
    _print(found)
    return found


def _print(found: Sequence[Outcome]) -> None:
    table = Table("trainer", "fault", "status", "end", "lost", "again", "excluded", "wrong")
    for one in found:
        table.add_row(
            one.trainer, one.fault, one.verdict, one.end, str(one.lost), str(one.again),
            " ".join(one.excluded), "\n".join(one.wrong),
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
