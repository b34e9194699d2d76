"""Trials of a run: the rehearsal of a card, away from the run and told in its differences; and what a drill
concludes from what it saw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tr11ops.launch.drill import NAMES, Sight, judge
from tr11ops.launch.rehearse import (
    as_options,
    card_text,
    is_rehearsal_card,
    rehearsal_overrides,
)
from tr11ops.runcard.card import RunCard, differences, load_card, shipped_cards, shipped_folder
from trainer.contract.attempt import DRILL_PHASES, EndMarker
from trainer.control.control_signals import LONGEST_SECONDS, PhaseHold, hold_from

VARIABLES = {
    f"six_ALL_CCFR{name}": f"/{name}/a$b" for name in ("SCRATCH", "WORK", "WORKSF", "STORE")
}
VARIABLES["TR11_ALERT_RECIPIENTS"] = "ana@site.org"


def rehearsal(name: str) -> tuple[RunCard, RunCard]:
    path = shipped_folder() / f"{name}.toml"
    main = load_card(path, (), VARIABLES)
    return main, load_card(path, as_options(rehearsal_overrides(main)), VARIABLES)


def changes(main: RunCard, other: RunCard) -> list[tuple[str, Any, Any]]:
    return list(differences(main.model_dump(mode="json"), other.model_dump(mode="json")))


@pytest.mark.parametrize("name", shipped_cards())
def test_every_shipped_card_has_one_that_can_be_read_again(name: str, tmp_path: Path) -> None:
    main, other = rehearsal(name)
    assert (
        other.slurm.nodes <= 2
        and other.time_limit_seconds <= 1800
        and other.run.exit_interval == 10
    )
    assert (
        other.slurm.spare_nodes == 0
        and other.world_size % (other.parallel.tensor * other.parallel.pipeline) == 0
    )
    for same in ("setup", "environment", "partition", "account", "constraint", "reservation"):
        assert getattr(other.slurm, same) == getattr(main.slurm, same)
    assert other.data == main.data and other.tokenizer == main.tokenizer
    if not is_rehearsal_card(main):
        assert other.paths.root != main.paths.root and other.kill_switch != main.kill_switch
        assert (
            not other.kill_switch.is_relative_to(main.paths.root)
            and other.run.name != main.run.name
        )
        assert (other.hub.repository, other.backup.store, other.backup.url) == (None, None, None)
    path = tmp_path / "rehearsal.toml"
    path.write_text(card_text(other, main.run.name), encoding="utf-8")
    assert load_card(path, (), dict(os.environ)) == other


def test_the_differences_are_all_there_are() -> None:
    main, other = rehearsal("tr11-176B-ml")
    told = {key: (first, second) for key, first, second in changes(main, other)}
    assert (
        told["slurm.nodes"] == (48, 2)
        and told["model.layers"] == (70, 2)
        and told["run.exit_interval"] == (None, 10)
    )
    assert "slurm.setup" not in told and "data.prefixes" not in told
    changed = main.model_dump(mode="json")
    for key, (_, second) in told.items():
        *sections, last = key.split(".")
        table = changed
        for section in sections:
            table = table[section]
        table[last] = second
    assert changed == other.model_dump(mode="json")
    assert not changes(main, main)


@pytest.mark.parametrize(("groups", "expected"), [(28, 4), (4, 4), (112, 8)])
def test_shared_keys_and_values_stay_shared(groups: int, expected: int) -> None:
    """Of eight heads in place of 112: as many share one as in the card, or a tensor rank of four
    has one at least.
    """
    path, changes = shipped_folder() / "tr11-176B-ml.toml", (f"model.key_value_heads={groups}",)
    main = load_card(path, changes, VARIABLES)
    other = load_card(path, (*changes, *as_options(rehearsal_overrides(main))), VARIABLES)
    assert (other.model.attention_heads, other.model.groups, other.parallel.tensor) == (
        8,
        expected,
        4,
    )


def test_micro_batches_that_grow_stay_only_where_the_ramp_does() -> None:
    path = shipped_folder() / "tr11-176B-ml.toml"
    main = load_card(path, (), VARIABLES)
    other = load_card(path, as_options(rehearsal_overrides(main)), VARIABLES)
    assert (other.batch.ramp is None) == (not other.batch.micro_batch_ramp)


def test_the_shipped_rehearsal_only_leaves_early() -> None:
    main, other = rehearsal("setup-test-n2")
    assert is_rehearsal_card(main) and [key for key, *_ in changes(main, other)] == [
        "run.exit_interval"
    ]


END = EndMarker("signal", 7, 7, True, "", 1.0, "here", "12", 1)
GOOD = Sight(
    "12", sent=100.0, sent_in="training", marker=END, left=103.0, checkpoint=7, saved=102.0
)
START = replace(
    GOOD,
    sent_in="starting",
    marker=replace(END, iteration=0, checkpoint_step=None),
    checkpoint=None,
)


def test_every_phase_has_a_name() -> None:
    assert set(NAMES) == set(DRILL_PHASES)


def test_a_good_end_is_measured_from_the_signal() -> None:
    result = judge("training", GOOD, 45.0, 5)
    assert (result.fault, result.saved_after, result.left_after, result.iteration) == (
        "",
        2.0,
        3.0,
        7,
    )
    start = judge("starting", START, 45.0, None)
    assert (start.fault, start.saved_after, start.left_after) == ("", None, 3.0)


@pytest.mark.parametrize(
    ("phase", "sight", "before", "words"),
    [
        (
            "training",
            replace(GOOD, sent=None, marker=None, sent_in="loading"),
            5,
            "never reached (last seen: loading",
        ),
        (
            "training",
            replace(GOOD, sent=None, marker=None, verdict="no GPU"),
            5,
            "it ended: no GPU",
        ),
        ("training", replace(GOOD, marker=None), 5, "left no exit record"),
        (
            "training",
            replace(GOOD, marker=replace(END, reason="error", message="boom")),
            5,
            "another reason: error",
        ),
        (
            "training",
            replace(GOOD, faults=("weights/x is 3 bytes short",)),
            5,
            "not whole: weights/x",
        ),
        ("training", replace(GOOD, checkpoint=5), 5, "iteration 7 was not saved (newest: 5)"),
        ("training", replace(GOOD, checkpoint=None), None, "iteration 7 was not saved"),
        ("training", replace(GOOD, saved=146.0), 5, "too late: 46.0 s after the signal"),
        ("starting", replace(START, left=190.0), None, "too late: 90.0 s"),
        ("starting", replace(START, checkpoint=3, saved=101.0), None, "from nowhere"),
    ],
)
def test_every_bad_end_is_named(phase: str, sight: Sight, before: int | None, words: str) -> None:
    assert words in judge(phase, sight, 45.0, before).fault


class Signal:
    """A signal that comes at a time of the test's own clock."""

    def __init__(self, at: float) -> None:
        self.now, self.at = 0.0, at

    def came(self) -> bool:
        return self.now >= self.at

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def held(phase: str, signal: Signal) -> PhaseHold:
    return PhaseHold(phase, signal.came, lambda: signal.now, signal.sleep)


def test_the_trainer_is_held_in_its_phase_alone() -> None:
    signal = Signal(at=10.0)
    hold = held("saving", signal)
    hold.enter("training", 0)
    hold.enter("evaluating", 2)
    assert signal.now == 0.0
    hold.enter("saving", 3)
    assert signal.now >= 10.0


def test_a_training_is_held_once_it_has_done_a_step() -> None:
    signal = Signal(at=10.0)
    hold = held("training", signal)
    hold.enter("training", 5)
    assert signal.now == 0.0
    hold.enter("training", 6)
    assert signal.now >= 10.0


def test_data_are_kept_away_until_the_signal() -> None:
    signal = Signal(at=10.0)
    hold = held("data-wait", signal)
    assert not hold.keeps_data_away(5)  # nothing was trained yet
    hold.enter("training", 5)
    assert not hold.keeps_data_away(5)
    assert hold.keeps_data_away(6)
    signal.now = 10.0
    assert not hold.keeps_data_away(6)


def test_a_signal_that_never_comes_does_not_hold_for_ever() -> None:
    signal = Signal(at=float("inf"))
    held("evaluating", signal).enter("evaluating", 1)
    assert LONGEST_SECONDS <= signal.now < LONGEST_SECONDS + 1


@pytest.mark.parametrize(
    ("environment", "phase"),
    [
        ({}, None),
        ({"TR11_DRILL": "saving"}, "saving"),
        ({"TR11_DRILL": "starting,saving", "SLURM_ARRAY_TASK_ID": "2"}, "saving"),
        ({"TR11_DRILL": "starting,saving", "SLURM_ARRAY_TASK_ID": "3"}, None),
        ({"TR11_DRILL": "starting", "SLURM_ARRAY_TASK_ID": "4294967294"}, None),
        ({"TR11_DRILL": "dancing"}, None),
    ],
)
def test_only_a_drills_job_is_held(environment: dict[str, str], phase: str | None) -> None:
    hold = hold_from(environment, lambda: True)
    assert (hold.phase if hold else None) == phase
