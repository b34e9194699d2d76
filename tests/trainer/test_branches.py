"""A branch of a stable training cools down beside it, and each run knows what it began with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.trainer.courses import card, curve, run
from trainer.config.card import TrainerConfig
from trainer.contract.files import write_json
from trainer.contract.manifest import Manifest
from trainer.contract.origin import BranchOrigin

HALF, WHOLE = 10, 20  # iterations of 16 samples
PEAK, FLOOR = 1e-2, 1e-3
RATE = 4  # of a curve's values


def named(
    folder: Path, name: str, end: int, cooldown: int, **changes: dict[str, Any]
) -> TrainerConfig:
    """A run that trains to iteration `end`; the last `cooldown` of them cool down."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": name, "directory": str(folder / name)},
        "batch": {"train_samples": 16 * end},
        "schedule": {
            "decay_style": "wsd", "cooldown_style": "minus_sqrt", "learning_rate": PEAK, "min_learning_rate": FLOOR,
            "warmup_samples": 32, "decay_samples": 16 * end, "cooldown_samples": 16 * cooldown,
        },
    }  # fmt: skip
    for section, keys in changes.items():
        sections[section] = sections.get(section, {}) | keys
    return card(folder, **sections)


def from_other(
    folder: Path, name: str, end: int, cooldown: int, other: TrainerConfig
) -> TrainerConfig:
    """A run with the trunk's order of samples, of which there are 11 epochs: a shorter training has
    another.
    """
    load = {"load": str(other.paths.checkpoints)}
    made = named(
        folder, name, end, cooldown, checkpoint=load, data={"order_samples": other.ordered_samples}
    )
    write_json(other.paths.run_record, {"run": other.run.name})  # as a launch does
    return made.model_copy(
        update={"schedule": made.schedule.model_copy(update={"on_resume": "override"})}
    )


def test_a_branch_cools_down_and_the_trunk_goes_on(tmp_path: Path) -> None:
    until_half = named(tmp_path, "trunk", 100, 5, run={"exit_interval": HALF})
    assert run(until_half, 1) == ("exit-interval", HALF)

    branch = from_other(tmp_path, "branch", 16, 4, until_half)
    assert run(branch, 1)[1] == 16
    trunk = named(tmp_path, "trunk", 100, 5, run={"exit_interval": WHOLE})
    assert run(trunk, 2) == ("exit-interval", WHOLE)

    stable, cooled = curve(trunk), curve(branch)
    assert min(cooled) == HALF + 1
    # until the cooldown begins the two are one training, to the bit: loss, norm, samples, tokens,
    # rate
    same = [step for step in cooled if step <= 12]
    assert [cooled[step] for step in same] == [stable[step] for step in same]
    assert [values[RATE] for step, values in stable.items() if step > 2] == [
        pytest.approx(PEAK)
    ] * (WHOLE - 2)
    expected = [
        FLOOR + (PEAK - FLOOR) * (1 - math.sqrt((step - 12) / 4)) for step in (13, 14, 15, 16)
    ]
    after = [cooled[step][RATE] for step in (13, 14, 15, 16)]
    assert after == pytest.approx(expected)


def test_a_branch_of_a_branch_knows_both(tmp_path: Path) -> None:
    trunk = named(tmp_path, "trunk", 100, 5, run={"exit_interval": 5})
    run(trunk, 1)
    branch = from_other(tmp_path, "branch", 10, 4, trunk)
    run(branch, 1)
    last = from_other(tmp_path, "last", 15, 4, branch)
    run(last, 1)
    origin = BranchOrigin.read(last.paths)
    assert origin is not None
    assert origin.lineage == (
        "branch/main step 10 (weights and optimizer); that run with trunk/main step 5"
    )
    # a restored run directory without the record has it from its own checkpoint
    last.paths.origin.unlink()
    run(
        last.model_copy(update={"batch": last.batch.model_copy(update={"train_samples": 16 * 16})}),
        2,
    )
    restored = BranchOrigin.read(last.paths)
    assert restored == origin
    assert Manifest.read(last.paths.checkpoints / "global_step15") is not None


def test_status_of_a_branch_says_where_it_left_the_trunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trunk = named(tmp_path, "trunk", 100, 5, run={"exit_interval": 5})
    assert run(trunk, 1) == ("exit-interval", 5)
    branch = from_other(tmp_path, "branch", 9, 4, trunk)
    assert run(branch, 1) == ("finished", 9)
    rates = [values[RATE] for _, values in sorted(curve(branch).items())]
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(FLOOR)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    bench = LocalBench(tmp_path, capsys)
    words = ("status", "--run", str(bench.card), "--scheduler", "local")
    words = (*words, "--set", "run.name=branch", "--set", f"run.directory={tmp_path / 'branch'}")
    left = "trunk/main step 5 (weights and optimizer)"
    assert f"began with {left}" in " ".join(bench.tr11(*words).out.split())
    told = bench.tr11(*words, "--json").json["origin"]
    assert (told["text"], told["run"], told["step"]) == (left, "trunk/main", 5)
