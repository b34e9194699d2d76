"""The rehearsal of a card: valid for every shipped one, away from the run, and told in its
differences.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tr11ops.launch.rehearse import (
    as_options,
    card_text,
    differences,
    is_rehearsal_card,
    rehearsal_overrides,
)
from tr11ops.runcard.card import RunCard, load_card, shipped_cards, shipped_folder

VARIABLES = {
    f"six_ALL_CCFR{name}": f"/{name}/a$b" for name in ("SCRATCH", "WORK", "WORKSF", "STORE")
}
VARIABLES["TR11_ALERT_RECIPIENTS"] = "ana@site.org"


def rehearsal(name: str) -> tuple[RunCard, RunCard]:
    path = shipped_folder() / f"{name}.toml"
    main = load_card(path, (), VARIABLES)
    return main, load_card(path, as_options(rehearsal_overrides(main)), VARIABLES)


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
    told = {key: (first, second) for key, first, second in differences(main, other)}
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
    assert differences(main, main) == ()


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
    assert is_rehearsal_card(main) and [key for key, *_ in differences(main, other)] == [
        "run.exit_interval"
    ]
