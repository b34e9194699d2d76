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

import tests.plugins.ending  # noqa: F401  ended as by Ctrl-C: no twin is left behind
from tests.twin.chronicle import Chronicler, EventRow, chronicle
from tests.twin.fault_scenario import FaultEvent, FaultScenario, read_scenario
from tests.twin.history_page import KEPT, History, read_history, write_pages
from tr11ops.base.errors import TwinError
from tr11ops.twin.faults import heal
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin
from trainer.config.base import CardError
from trainer.contract.documents import document

SCENARIO = Path(__file__).parents[1] / "tests" / "twin" / "scenarios" / "tr11-176b.toml"
LATER_TASKS = 4  # of the array, where only some events are played
console = Console(highlight=False)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", type=Path, default=SCENARIO)
    parser.add_argument(
        "--nodes",
        type=int,
        help="on fewer nodes: with --only it says so on the page, else it is a trial without one",
    )
    parser.add_argument(
        "--trial",
        action="store_true",
        help="write no page: only tell whether all came out as expected",
    )
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument(
        "--only", action="append", metavar="TITLE",
        help="play the events with these words in their titles in a run of their own; may be repeated",
    )  # fmt: skip
    parser.add_argument("--tasks", type=int, default=LATER_TASKS, help="of the array, with --only")
    asked = parser.parse_args(words)
    if not asked.page:
        try:
            history = _play(_asked(asked))
        except (TwinError, CardError) as error:
            parser.error(str(error))
        if asked.trial:
            return int(bool(history.wrong))
        if asked.only:
            history = _with_again(read_history(), history, asked.nodes or 0)
        elif asked.nodes is not None:
            return int(bool(history.wrong))
        KEPT.write_text(json.dumps(document(history), indent=1) + "\n", encoding="utf-8")
    history = read_history()
    write_pages(history)
    return int(bool(history.wrong))


def _asked(asked: argparse.Namespace) -> FaultScenario:
    """Raises TwinError for what cannot be played."""
    scenario = read_scenario(asked.scenario)
    if asked.nodes is not None:
        if not 1 <= asked.nodes <= scenario.nodes:
            raise TwinError(
                f"--nodes {asked.nodes}: must be 1 to the {scenario.nodes} of the scenario"
            )
        scenario = replace(scenario, nodes=asked.nodes)
    if asked.only:
        events = tuple(
            one for one in scenario.events if any(words in one.title for words in asked.only)
        )
        if not events:
            raise TwinError(
                f"--only {asked.only[0]}: no event of {asked.scenario} has that in its title"
            )
        if asked.tasks < 1:
            raise TwinError(f"--tasks {asked.tasks}: must be 1 or more")
        scenario = replace(scenario, events=events, tasks=asked.tasks)
    return scenario


def _with_again(kept: History, again: History, nodes: int) -> History:
    """The history with these rows as they came out in a run of their own."""
    rows = {row.event.title: replace(row, is_alone=True, nodes=nodes) for row in again.rows}
    return replace(kept, rows=tuple(rows.get(row.event.title, row) for row in kept.rows))


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
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("history: interrupted; its twin is down")
