"""The spike rule on the event of April 2022 and on healthy noise, roll-backs, the file that remembers
them, and what a spike makes of the checkpoints that are there.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.trainer.courses import card as course_card
from tests.trainer.schedule_cards import card
from trainer.config.card import RecoverySection
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.errors import NotFiniteError
from trainer.contract.paths import RunPaths
from trainer.contract.record import IterationRange
from trainer.contract.recovery import (
    RecoveryRecord,
    RollBack,
    Spike,
    read_recovery,
    recovery_path,
    write_recovery,
)
from trainer.schedule.rules import recovery_problems
from trainer.spikes.recovery import DroppedSteps, Flag, SpikeDetector, SpikeWatch, decide_recovery

Step = tuple[int, float, float | None]  # iteration, loss, gradient norm
ROLL_BACK = RecoverySection(on_spike="roll_back", roll_backs=2, skip_margin=10)


def healthy(first: int, count: int, seed: int = 1) -> list[Step]:
    """A noisy curve: losses around 2.2, norms around 0.2 with a heavy tail, and now and then one
    huge norm alone.
    """
    draw = random.Random(seed)
    steps: list[Step] = []
    for iteration in range(first, first + count):
        norm = 0.2 * math.exp(draw.gauss(0.0, 0.45))
        if draw.random() < 0.01 and not (steps and (steps[-1][2] or 0.0) > 2.0):
            norm = draw.uniform(4.0, 40.0)
        steps.append((iteration, 2.2 + draw.gauss(0.0, 0.08), norm))
    return steps


def watch(
    steps: Iterable[Step], detector: SpikeDetector | None = None
) -> tuple[SpikeDetector, list[Spike]]:
    detector, spikes = detector or SpikeDetector(RecoverySection()), []
    for iteration, loss, norm in steps:
        detector, spike = detector.observe(iteration, loss, norm)
        if spike is not None:
            spikes.append(spike)
    return detector, spikes


# Norms from 31214, and the loss at 31219, as in the log; the losses before it were not yet out of
# the ordinary.
EVENT: list[Step] = [
    (31_214, 2.20, 0.24),
    (31_215, 2.20, 0.95),
    (31_216, 2.21, 2.4),
    (31_217, 2.22, 15.9),
    (31_218, 2.6, 145.0),
    (31_219, 5.098124, 960.351),
]
RECOVERY: list[Step] = [
    (31_220 + step, 4.8 * 0.9**step + 2.1, 300 * 0.7**step + 0.2) for step in range(30)
]


def test_the_event_of_april_2022() -> None:
    quiet = [
        (iteration, loss, min(norm or 0.0, 0.4)) for iteration, loss, norm in healthy(31_000, 214)
    ]
    after = healthy(31_250, 2000, seed=3)
    detector, spikes = watch([*quiet, *EVENT, *RECOVERY, *after])
    assert [(spike.iteration, spike.kind) for spike in spikes] == [
        (31_217, "gradient norm"),
        (31_219, "loss"),
    ]
    assert {spike.first_sign for spike in spikes} == {31_216}
    assert spikes[0].value == 15.9 and 0.15 < spikes[0].median < 0.24
    assert (
        spikes[1].line
        == "tr11: SPIKE at iteration 31219: loss 5.098, its median is " + f"{spikes[1].median:.4g}"
    )
    assert detector.first_sign is None or detector.first_sign > 31_260


@pytest.mark.parametrize("seed", range(5))
def test_no_alarm_on_a_noisy_healthy_curve(seed: int) -> None:
    steps = healthy(1, 20_000, seed)
    assert sum((norm or 0.0) > 2.0 for _, _, norm in steps) > 100
    assert watch(steps)[1] == []


def test_no_alarm_while_the_loss_falls_from_the_start() -> None:
    steps = [
        (step, 2.0 + 9.0 * math.exp(-step / 80), 0.2 + 6.0 * math.exp(-step / 30))
        for step in range(1, 1000)
    ]
    assert watch(steps)[1] == []


def test_nothing_is_judged_before_enough_was_seen() -> None:
    assert watch([(1, 2.0, 0.2), (2, 50.0, 90.0), (3, 50.0, 90.0)])[1] == []


def test_the_median_is_of_the_window_alone() -> None:
    old, new = (
        [(step, 8.0, 5.0) for step in range(1, 200)],
        [(step, 2.0, 0.2) for step in range(200, 300)],
    )
    assert [spike.kind for spike in watch([*old, *new, (300, 4.1, 0.2)])[1]] == ["loss"]
    assert watch([*old, *new[:40], (300, 4.1, 0.2)])[1] == []


def test_two_spikes_are_two_reports_and_one_is_one() -> None:
    base = [(step, 2.0, 0.2) for step in range(1, 51)]
    high = [(step, 2.0, 9.0) for step in range(51, 56)]
    calm = [(step, 2.0, 0.2) for step in range(56, 80)]
    again = [(step, 2.0, 9.0) for step in range(80, 84)]
    spikes = watch([*base, *high, *calm, *again])[1]
    assert [(spike.iteration, spike.first_sign) for spike in spikes] == [(52, 51), (81, 80)]


def test_a_new_level_is_learnt_after_a_window() -> None:
    detector, spikes = watch([(step, 2.0, 0.2) for step in range(1, 51)])
    detector, spikes = watch([(step, 2.0, 9.0) for step in range(51, 400)], detector)
    assert [spike.iteration for spike in spikes] == [52]
    assert watch([(400, 2.0, 9.0)], detector)[0].first_sign is None


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 0.2), (math.inf, 0.2), (2.0, math.nan), (2.0, math.inf)]
)
def test_what_is_not_finite_is_a_spike_at_once(loss: float, norm: float) -> None:
    spikes = watch([(1, loss, norm)])[1]
    assert [(spike.kind, spike.lasting, spike.first_sign) for spike in spikes] == [
        ("not finite", True, 1)
    ]
    assert "loss or gradient norm" in spikes[0].line and "dropped" not in spikes[0].line


def test_dropped_updates() -> None:
    """fp16's own overflows are nothing; a NaN loss is flagged, and more than that when it stays."""
    detector, found = SpikeDetector(RecoverySection()), []
    for iteration, loss in enumerate([2.0, 2.0, math.nan, math.nan, math.nan, math.nan], start=1):
        detector, spike = detector.observe(iteration, loss, math.inf, update_dropped=True)
        if spike:
            found.append(spike)
    assert [(spike.iteration, spike.lasting, spike.first_sign) for spike in found] == [
        (3, False, 3),
        (5, True, 3),
    ]
    assert found[0].line.endswith("nan, its update was dropped")


def test_steps_without_a_norm_are_judged_by_their_loss() -> None:
    steps: list[Step] = [(step, 2.0, None) for step in range(1, 30)]
    assert watch(steps)[1] == []
    assert [spike.kind for spike in watch([*steps, (30, 4.5, None)])[1]] == ["loss"]


# ----------------------------------------------------------------------------- what follows
SPIKE = Spike(31_217, "gradient norm", 15.9, 0.21, 31_216)


def test_a_flag_is_all_by_default() -> None:
    assert decide_recovery(SPIKE, 0, [31_000], RecoverySection()) == Flag(SPIKE)


def test_going_back_to_before_the_first_sign() -> None:
    found = decide_recovery(SPIKE, 0, [31_000, 31_216, 31_200, 31_217], ROLL_BACK)
    assert found == RollBack(SPIKE, 31_200, IterationRange(31_206, 31_227))
    assert found.line.endswith(
        "median is 0.21; back to step 31200, iterations 31206 to 31227 skipped"
    )


def test_skipping_starts_after_the_checkpoint_at_the_earliest() -> None:
    found = decide_recovery(SPIKE, 1, [31_215], ROLL_BACK)
    assert isinstance(found, RollBack) and found.skip == IterationRange(31_216, 31_227)


@pytest.mark.parametrize(
    ("spike", "used", "steps", "why"),
    [
        (SPIKE, 2, [31_200], "all 2 of recovery.roll_backs are used"),
        (SPIKE, 0, [31_216], "no checkpoint is older than its first sign at iteration 31216"),
        (SPIKE, 0, [], "no checkpoint is older"),
        (
            Spike(5, "not finite", math.nan, math.nan, 5, lasting=False),
            0,
            [1],
            "the weights were not touched",
        ),
    ],
)
def test_a_roll_back_that_cannot_be_made_is_a_flag(
    spike: Spike, used: int, steps: list[int], why: str
) -> None:
    found = decide_recovery(spike, used, steps, ROLL_BACK)
    assert isinstance(found, Flag) and found.why.startswith(why)
    assert f"(no roll-back: {why}" in found.line


def test_after_a_roll_back_the_medians_are_kept() -> None:
    detector, spikes = watch([*healthy(31_114, 100), *EVENT])
    assert spikes
    again = detector.over()
    assert again.first_sign is None and again.norms == detector.norms
    assert [
        spike.iteration for spike in watch([(31_201, 2.2, 9.0), (31_202, 2.2, 9.0)], again)[1]
    ] == [31_202]


def test_settings_that_never_roll_back_are_refused() -> None:
    assert recovery_problems(card(recovery={"on_spike": "roll_back"})) == []
    bad = card(
        recovery={"on_spike": "roll_back", "roll_backs": 0}, checkpoint={"save_optimizer": False}
    )
    assert [problem.key for problem in recovery_problems(bad)] == [
        "recovery.roll_backs",
        "checkpoint.save_optimizer",
    ]
    assert recovery_problems(card(recovery={"roll_backs": 0})) == []


# ------------------------------------------------------------------------- remembered over restarts
def roll_back(first_sign: int, iteration: int, value: float = 15.9) -> RollBack:
    spike = Spike(iteration, "gradient norm", value, 0.21, first_sign)
    found = decide_recovery(spike, 0, range(0, first_sign, 100), ROLL_BACK)
    assert isinstance(found, RollBack)
    return found


def test_the_record_survives_and_knows_what_is_discarded(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "run", "main")
    assert read_recovery(paths) == RecoveryRecord()
    record = RecoveryRecord().with_roll_back(roll_back(216, 217), time=5.0)
    moves = (("global_step540", "global_step540.discarded"),)
    record = record.with_roll_back(roll_back(520, 530, math.inf), time=6.0, moves=moves)
    write_recovery(paths, record)
    assert read_recovery(paths) == record
    assert record.usable([539, 540, 541]) == [541], (
        "the old checkpoint of the range's end is to be set aside"
    )
    record = replace(record, pending=None)
    assert record.usable([226, 227, 539, 540]) == [227, 540], (
        "one that was saved there since is sound"
    )
    assert record.ranges == (IterationRange(206, 227), IterationRange(510, 540))
    assert record.usable([100, 200, 215, 216, 220, 228, 500, 519, 520, 541]) == [
        100,
        200,
        215,
        228,
        500,
        519,
        541,
    ]
    assert json.loads(recovery_path(paths).read_text())["schema"] == 1


def test_variants_do_not_see_each_other(tmp_path: Path) -> None:
    one, other = (RunPaths(tmp_path, "run", variant) for variant in ("main", "other"))
    write_recovery(one, RecoveryRecord().with_roll_back(roll_back(216, 217), time=5.0))
    assert read_recovery(other) == RecoveryRecord()
    write_recovery(other, RecoveryRecord())
    assert len(read_recovery(one).events) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"schema": 2, "variants": {}}',
        '{"schema": 1, "variants": {"main": [{"kind": "loss"}]}}',
        '{"schema": 1, "variants": {"main": 5}}',
    ],
)
def test_a_damaged_record_is_never_taken_for_none(tmp_path: Path, text: str) -> None:
    paths = RunPaths(tmp_path, "run", "main")
    recovery_path(paths).parent.mkdir(parents=True)
    recovery_path(paths).write_text(text)
    with pytest.raises(ValueError, match=r"recovery\.json"):
        read_recovery(paths)


def test_steps_that_change_nothing_are_counted_in_a_row() -> None:
    dropped = DroppedSteps(3)
    for loss, norm, skipped in (
        (math.nan, 1.0, True),
        (1.0, math.inf, False),
        (1.0, 1.0, False),
        (2.0, None, True),
    ):
        dropped = dropped.after(loss, norm, skipped)
        dropped.check(10, 5)
    assert dropped.count == 1
    dropped = dropped.after(math.inf, None, True).after(1.0, math.nan, True)
    with pytest.raises(
        NotFiniteError, match=r"the last 3 steps, up to iteration 12, .* resume from is step 5"
    ):
        dropped.check(12, 5)
    DroppedSteps(0, 10**6).check(12, None)


@pytest.mark.parametrize(("on_spike", "saves_finished"), [("roll_back", 1), ("flag", 0)])
def test_a_save_in_the_background_is_gone_back_to(
    on_spike: str, saves_finished: int, tmp_path: Path
) -> None:
    """It ends only when it is waited for, as on a slow file system."""
    config = course_card(tmp_path, recovery={"on_spike": on_spike, "skip_margin": 1})
    finished: list[int] = []

    def write(step: int) -> None:
        folder = config.paths.checkpoint(step)
        assert folder.name == checkpoint_name(step)
        folder.mkdir(parents=True)
        (folder / MANIFEST_FILE).touch()

    def finish_saves() -> None:
        finished.append(12)
        write(12)

    write(8)
    watch = SpikeWatch(config, None)
    watch._detector = SpikeDetector(RecoverySection(), losses=(1.0,) * 50, norms=(1.0,) * 50)
    steps = (watch.observe(step, 60.0, 60.0, False, finish_saves) for step in range(14, 20))
    action = next(found for found in steps if found is not None)
    assert len(finished) == saves_finished
    if on_spike == "flag":
        assert isinstance(action, Flag)
    else:
        assert isinstance(action, RollBack) and action.to_step == 12
