"""Planning a study: grids, the rules of the batch size, and cells as whole cards; nothing is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.base.errors import SweepError
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.sweep.plan import (
    MOST_CELLS,
    SweepPlan,
    SweepRequest,
    cells_of,
    equal_overrides,
    parse_axis,
    plan_sweep,
    rule_overrides,
)
from trainer.schedule.path import path_of, warmup_samples_of

BATCH = "batch.global_batch_size"


def planned(folder: Path, *grid: str, given: Sequence[str] = (), **options: object) -> SweepPlan:
    path = folder / "small.toml" if (folder / "small.toml").exists() else write_card(folder)

    def load(overrides: Sequence[str]) -> RunCard:
        return load_card(path, (*given, *overrides))

    named = tuple(text.partition("=")[0] for text in given)
    axes = tuple(map(parse_axis, grid))
    return plan_sweep(load, SweepRequest(axes, "study", folder / "study", named=named, **options))  # type: ignore[arg-type]


def in_steps(folder: Path) -> Path:
    """A card that counts in steps."""
    path = write_card(folder)
    path.write_text(path.read_text().replace("train_samples = 64", "train_iterations = 100"))
    return path


def card(folder: Path, *overrides: str) -> RunCard:
    return load_card(write_card(folder), overrides)


# ----------------------------------------------------------------------------- the grid
def test_every_combination_is_a_cell_with_a_name() -> None:
    cells = cells_of([parse_axis(f"{BATCH}=512,1024"), parse_axis("optimizer.type=adamw,lamb")])
    assert [(cell.number, cell.name) for cell in cells] == [
        (1, "batch512-adamw"), (2, "batch512-lamb"), (3, "batch1024-adamw"), (4, "batch1024-lamb"),
    ]  # fmt: skip
    assert cells[3].overrides == (f"{BATCH}=1024", "optimizer.type=lamb")


def test_a_value_may_be_a_list_or_a_table() -> None:
    axis = parse_axis("batch.ramp={ start = 8, increment = 8, samples = 48 },none")
    assert axis.values == ("{ start = 8, increment = 8, samples = 48 }", "none")
    assert parse_axis("data.weights=[1, 2],[3, 4]").values == ("[1, 2]", "[3, 4]")


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["batch"], "must be SECTION.KEY=VALUE"),
        ([f"{BATCH}="], "must be SECTION.KEY=VALUE"),
        ([f"{BATCH}=8,,16"], "a value is empty"),
        ([f"{BATCH}=8,"], "a value is empty"),
        (["data.weights=[1,2"], "no end"),
        ([f"{BATCH}=8,16,8"], "the value 8 stands twice"),
        ([f"{BATCH}=8", f"{BATCH}=16"], "stands twice; give all its values in one --grid"),
        (["run.name=a,b"], "each cell has its own"),
        (["slurm.nodes=1,2"], "one array"),
        (["run.seed=" + ",".join(map(str, range(MOST_CELLS + 1)))], f"at most {MOST_CELLS}"),
        (["tokenizer.path=a/b,ab"], "two cells would be called pathab"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_be_is_refused(texts: list[str], said: str) -> None:
    with pytest.raises(SweepError) as caught:
        cells_of([parse_axis(text) for text in texts])
    assert said in str(caught.value) and "\n" not in str(caught.value)


# ----------------------------------------------------------------------------- the rules
@pytest.mark.parametrize("times", [2, 4, 16])
def test_rate_grows_with_the_root_and_warmup_with_the_batch(tmp_path: Path, times: int) -> None:
    base = card(tmp_path, "batch.train_samples=100_000", "schedule.warmup_samples=200")
    found = rule_overrides(base, 8 * times, "sqrt")
    assert found["schedule.learning_rate"] == pytest.approx(1e-3 * math.sqrt(times), rel=1e-5)
    assert found["schedule.warmup_samples"] == 200 * times
    assert rule_overrides(base, 8 * times, "linear")["schedule.learning_rate"] == pytest.approx(
        1e-3 * times
    )
    assert rule_overrides(base, 8 * times, "none") == {} == rule_overrides(base, 8, "sqrt")


def test_the_published_rates_of_t5_come_out(tmp_path: Path) -> None:
    """Batch 512: 2.83e-3 and 1 % of warm-up; 2,048: 5.66e-3 and 4 %; 16,384: 11.3e-3 and 32 %."""
    base = card(tmp_path, f"{BATCH}=512", "batch.train_samples=52_428_800", "schedule.learning_rate=2.83e-3",
                "schedule.warmup_fraction=0.01")  # fmt: skip
    for batch, rate, share in ((2048, 5.66e-3, 0.04), (16384, 11.3e-3, 0.32)):
        found = rule_overrides(base, batch, "sqrt")
        assert found["schedule.learning_rate"] == pytest.approx(rate, rel=5e-3)
        assert found["schedule.warmup_samples"] == pytest.approx(share * 52_428_800)
        assert found["schedule.warmup_fraction"] is None
    assert rule_overrides(base, 65536, "sqrt")["schedule.warmup_samples"] == pytest.approx(
        0.64 * 52_428_800, abs=1
    )


def test_a_smaller_batch_keeps_its_floor_below_its_peak(tmp_path: Path) -> None:
    base = card(tmp_path, "schedule.min_learning_rate=9e-4")
    found = rule_overrides(base, 2, "sqrt")
    assert found["schedule.learning_rate"] == found["schedule.min_learning_rate"] == 5e-4


def test_equal_samples_end_and_save_at_the_same_places(tmp_path: Path) -> None:
    write_card(tmp_path)
    batches = ("8", "16", "24")
    plan = planned(tmp_path, f"{BATCH}={','.join(batches)}", equal_samples=True,
                   given=["batch.train_samples=1000", "evaluation.iterations=6"])  # fmt: skip
    assert {path_of(cell.card).end.consumed_samples for cell in plan.cells} == {960}
    assert [cell.card.evaluation.iterations for cell in plan.cells] == [6, 3, 2]
    assert [cell.card.checkpoint.interval for cell in plan.cells] == [10, 5, 3]


def test_a_card_in_steps_becomes_one_in_samples(tmp_path: Path) -> None:
    base = load_card(
        in_steps(tmp_path), ["schedule.decay_iterations=80", "schedule.warmup_iterations=10"]
    )
    found = equal_overrides(base, 16, (8, 16))
    assert (found["batch.train_samples"], found["schedule.decay_samples"]) == (800, 640)
    assert found["schedule.warmup_samples"] == 80
    assert {key for key, value in found.items() if value is None} == {
        "batch.train_iterations", "schedule.decay_iterations", "schedule.warmup_iterations"
    }  # fmt: skip


# ----------------------------------------------------------------------------- cells
def test_a_cell_is_a_whole_card_with_a_place_of_its_own(tmp_path: Path) -> None:
    plan = planned(tmp_path, f"{BATCH}=8,32", "optimizer.type=adamw,lamb")
    roots = [cell.card.paths.root for cell in plan.cells]
    assert len(set(roots)) == 4 and all(root.parent == tmp_path / "study" for root in roots)
    assert {cell.card.run.name for cell in plan.cells} == {"study"}
    assert [cell.card.run.variant for cell in plan.cells] == [cell.name for cell in plan.cells]
    assert len({cell.card.kill_switch for cell in plan.cells}) == 4
    assert [cell.card.schedule.learning_rate for cell in plan.cells] == [1e-3, 1e-3, 2e-3, 2e-3]
    assert not (tmp_path / "study").exists()


def test_what_is_named_no_rule_changes(tmp_path: Path) -> None:
    by_grid = planned(tmp_path, f"{BATCH}=32", "schedule.learning_rate=1e-4,2e-4")
    assert [cell.card.schedule.learning_rate for cell in by_grid.cells] == [1e-4, 2e-4]
    by_set = planned(
        tmp_path,
        f"{BATCH}=8,32",
        given=["schedule.learning_rate=5e-4", "schedule.warmup_samples=8"],
    )
    assert [cell.card.schedule.learning_rate for cell in by_set.cells] == [5e-4, 5e-4]
    assert [warmup_samples_of(cell.card) for cell in by_set.cells] == [8, 8]


def refused(folder: Path, *grid: str, given: Sequence[str] = (), **options: object) -> str:
    with pytest.raises(SweepError) as caught:
        planned(folder, *grid, given=given, **options)
    assert caught.value.exit_code == 2 and not (folder / "study").exists()
    return str(caught.value)


def test_faults_of_cells_are_said_once_and_name_them(tmp_path: Path) -> None:
    write_card(tmp_path)
    assert refused(tmp_path, "batch.globalbatch=8,16").startswith(
        "every cell: batch.globalbatch: is not a known key"
    )
    said = refused(tmp_path, f"{BATCH}=8,9,11")
    assert [line.partition(":")[0] for line in said.splitlines()] == ["cell batch9", "cell batch11"]
    assert refused(tmp_path, "optimizer.beta1=0.9,1.5").startswith(
        "cell beta11.5: optimizer.beta1 = 1.5"
    )
    assert "is not a number of samples" in refused(tmp_path, f"{BATCH}=8,many")


def test_cells_that_say_the_same_are_refused(tmp_path: Path) -> None:
    assert "say the same" in refused(tmp_path, "schedule.learning_rate=1e-3,0.001")
    assert len(planned(tmp_path, "run.seed=1,2").cells) == 2


def test_equal_samples_that_cannot_be_are_refused(tmp_path: Path) -> None:
    write_card(tmp_path)
    wide = ["batch.train_samples=640", "batch.ramp={ start = 4, increment = 4, samples = 36 }"]
    said = refused(tmp_path, f"{BATCH}=8,16", equal_samples=True, given=wide)
    assert "end at different samples" in said and "batch.ramp=none" in said
    in_steps(tmp_path)
    assert "add --equal-samples" in refused(tmp_path, f"{BATCH}=8,16")
