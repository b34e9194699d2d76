"""Faults of unchanged trainers of two nodes that `tr11 launch` started on the embedded scheduler: what is
done, what is lost, who is blamed. A covering few of the cells of `make trainer-faults`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.trainers.faults.given import FAULTS, Given, may_mount
from tests.tr11ops.trainers.faults.outcome import judged, play
from tests.tr11ops.trainers.faults.run import FaultRun
from tests.tr11ops.trainers.faults.sites import LocalSite
from tests.tr11ops.trainers.faults.table import BEGIN, END, PAGES, kept, table_lines
from tests.tr11ops.trainers.faults.trainers import (
    DCP,
    INTERVAL,
    PLAIN,
    STEPS,
    TRAINERS,
    FaultedTrainer,
)
from tests.tr11ops.trainers.kept import LIGHT
from trainer.contract.record import Record

HOUSE = Path(__file__).parents[3]
PATIENCE = 2.0  # other tests run beside these


# Each rank is started by its keeper, not by a torchrun beside it: half of a launch's start.
KEPT_WITH_TORCH, KEPT_DCP = (
    replace(one, tables=f'start = "srun"\n{one.tables}') for one in (PLAIN, DCP)
)
# Without torch too: most of the other half. Of a hang the stacks are read, in torch's collectives.
KEPT = replace(KEPT_WITH_TORCH, environment=LIGHT)
BY_KEEPERS = {one.name: one for one in (KEPT, KEPT_DCP)}


class Cell(Record):
    trainer: str
    fault: str
    pace: float = 0.2
    by_keepers: bool = False


CELLS = (
    Cell("plain", "nan", by_keepers=True),
    Cell("plain", "second-launch", pace=0.4, by_keepers=True),
    Cell("plain", "kill-switch", pace=1.0, by_keepers=True),
    Cell("plain", "node-dead"),
    Cell("plain", "disk-full", by_keepers=True),
    Cell("dcp", "broken-newest", pace=1.0, by_keepers=True),
)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.trainer}-{cell.fault}")
def test_a_fault_costs_no_step_that_was_saved_and_no_innocent_node(
    cell: Cell, tmp_path: Path
) -> None:
    if cell.fault == "disk-full" and not may_mount():
        pytest.skip("a small disk can be mounted by root alone")
    trainer = (BY_KEEPERS if cell.by_keepers else TRAINERS)[cell.trainer]
    run = FaultRun(trainer, LocalSite(), tmp_path, PATIENCE, cell.pace)
    outcome = play(run, FAULTS[cell.fault])
    assert outcome.wrong == (), outcome


def test_a_hang_is_ended_by_the_watchdog_and_the_next_task_goes_on(tmp_path: Path) -> None:
    """As in `make trainer-faults`, where a card says that a silence of 3 s is long enough."""
    watch = "least_silence_minutes = 0.05"
    run = FaultRun(KEPT_WITH_TORCH, LocalSite(), tmp_path, PATIENCE, pace=0.1, watch=watch)
    outcome = play(run, FAULTS["hang"])
    assert outcome.wrong == (), outcome


def test_before_the_time_limit_it_leaves_after_a_checkpoint_and_the_next_task_goes_on(
    tmp_path: Path,
) -> None:
    """The signal comes 20 s after the start, before the fifth step of 4 s: it has to be waited for."""
    run = FaultRun(KEPT.longer(2 * INTERVAL), LocalSite(), tmp_path, PATIENCE)
    try:
        run.write_card(4.0, "00:01:20", "signal_seconds_before_limit = 60")
        run.begin("--array", "1-4")
        run.until_idle()
        outcome = judged(run, FAULTS["time-limit"], Given(), (), 0.0)
    finally:
        run.close()
    assert outcome.wrong == (), outcome
    assert outcome.restarts and outcome.restarts[-1].whole == INTERVAL
    assert run.ends()[0].reason == "signal" and run.ends()[-1].reason == "finished"


@contextmanager
def dies_in_a_save(folder: Path, like: FaultedTrainer) -> Iterator[FaultRun]:
    """The plain script, of which a rank dies in the save of step 10 of its first launch, at its end."""
    trainer = replace(like, words=(*PLAIN.words, "die-once-in-save-10"))
    run = FaultRun(trainer, LocalSite(), folder, PATIENCE, pace=0.3)
    try:
        run.write_card()
        run.begin()
        run.until_idle()
        yield run
    finally:
        run.close()


def test_a_kill_in_the_save_is_held_for_a_person_where_the_dialect_does_not_say_what_is_taken(
    tmp_path: Path,
) -> None:
    untold = replace(KEPT, tables=KEPT.tables.replace("believes = []\n", ""))
    with dies_in_a_save(tmp_path, untold) as run:
        end = run.ends()[-1]
        assert (end.reason, end.restart) == ("refused", False)
        assert end.checkpoint_step in (None, INTERVAL)  # it may not be held yet, and stays whole
        assert len(list((run.root / "out" / f"step-{INTERVAL}").glob("rank_*.pt"))) == 2
        said = run.status()
        assert said.split()[0] == "DOWN" and "not known which checkpoint it takes next" in said
        assert "none excluded" in said
        assert [one.iteration for one in run.records()] == [*range(1, 11)]
        assert not (run.root / "out.set-aside").exists()


def test_what_a_kill_in_the_save_left_is_set_aside_where_the_dialect_says_that_it_would_be_taken(
    tmp_path: Path,
) -> None:
    with dies_in_a_save(tmp_path, PLAIN) as run:
        end = run.ends()[-1]
        assert (end.reason, end.launch, end.iteration) == ("finished", 2, STEPS)
        said = run.status()
        assert said.split()[0] == "FINISHED" and "none excluded" in said
        steps = [one.iteration for one in run.records()]
        assert steps == [*range(1, 11), *range(6, STEPS + 1)]
        assert (run.root / "out.set-aside").is_dir()


@pytest.mark.parametrize("scheduler", PAGES)
def test_the_page_shows_what_was_found(scheduler: str) -> None:
    page = (HOUSE / "docs" / "reference" / PAGES[scheduler]).read_text(encoding="utf-8")
    shown = page.split(BEGIN)[1].split(END)[0].strip().splitlines()
    assert shown == table_lines(kept(HOUSE / "benchmarks" / "trainer_faults"), scheduler)
