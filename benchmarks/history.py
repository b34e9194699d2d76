"""`make history`: what befell the 176-billion training, in order, on a twin of 52 nodes; the page
docs/explanation/tr11-again.md is written from what the run itself put on record.

The scenario is tests/twin/scenarios/tr11-176b.toml. About half an hour on two cores. Exit status 1 where
an event came out otherwise than the scenario expects.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from tests.twin.chronicle import Chronicler, EventRow, chronicle
from tests.twin.fault_scenario import FaultEvent, FaultScenario, read_scenario
from tests.twin.history_page import KEPT, History, read_history, write_pages
from tr11ops.base.errors import TwinError
from tr11ops.twin.faults import heal
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from trainer.contract.documents import document

SCENARIO = Path(__file__).parents[1] / "tests" / "twin" / "scenarios" / "tr11-176b.toml"
LATER_TASKS = 4  # of the array, where only the last events are played
console = Console(highlight=False)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", type=Path, default=SCENARIO)
    parser.add_argument("--nodes", type=int, help="a trial on fewer nodes; it writes no page")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument(
        "--last", type=int, help="play so many of the last events in a run of their own"
    )
    asked = parser.parse_args(words)
    if not asked.page:
        history = _play(_asked(asked))
        if asked.nodes is not None:
            return int(bool(history.wrong))
        if asked.last is not None:
            history = _with_last(read_history(), history)
        KEPT.write_text(json.dumps(document(history), indent=1) + "\n", encoding="utf-8")
    history = read_history()
    write_pages(history)
    return int(bool(history.wrong))


def _asked(asked: argparse.Namespace) -> FaultScenario:
    scenario = read_scenario(asked.scenario)
    if asked.nodes is not None:
        scenario = replace(scenario, nodes=asked.nodes)
    if asked.last is not None:
        scenario = replace(scenario, events=scenario.events[-asked.last :], tasks=LATER_TASKS)
    return scenario


def _with_last(kept: History, again: History) -> History:
    """The history with its last rows as they came out in a run of their own."""
    rows = [replace(row, is_alone=True) for row in again.rows]
    return replace(kept, rows=(*kept.rows[: -len(rows)], *rows))


def _play(scenario: FaultScenario) -> History:
    plan = TwinPlan(
        name="history", nodes=scenario.nodes + scenario.spares + 2, gpus=8, cpu_nodes=1,
        slurmd_timeout_seconds=20, kill_wait_seconds=5, message_timeout_seconds=10,
    )  # fmt: skip
    rows: list[EventRow] = []
    with tempfile.TemporaryDirectory(prefix="tr11-history-") as folder:
        home = Path(folder)
        (home / "run").mkdir()
        with Twin.up(plan, home / "twins") as twin, chronicle(twin, home / "run", scenario) as told:
            for event in scenario.events:
                row = _told(told, event)
                rows.append(row)
                lost = "" if row.lost_now is None else f"{row.lost_now:.2f} h"
                console.print(
                    f"{event.title}: {row.cause} {row.node} redone {row.redone}, {row.launches} launches, {lost}\n"
                    f"  {row.summary}\n  {row.decision}\n  mails {list(row.mails)}\n  acts {list(row.acts)}\n"
                    f"  journal {list(row.done)}\n  wrong {list(row.wrong)}",
                    soft_wrap=True,
                )
            reached, launches = told.iteration(), len(told.run.launches())
    return History(
        tuple(rows), iterations=reached, launches=launches, nodes=len(plan.gpu_node_names),
        time_scale=scenario.time_scale,
    )  # fmt: skip


def _told(told: Chronicler, event: FaultEvent) -> EventRow:
    """What came of an event; one that does not come to its end is said to be wrong, and healed."""
    try:
        return told.tell(event)
    except (AssertionError, OSError, TwinError) as error:
        said = str(error).splitlines()[0]
        heal(told.twin)
        return EventRow(event, wrong=(f"not played to its end: {said}",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
