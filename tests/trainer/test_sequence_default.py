"""Sequence parallelism of cards that do not say: on where it can be, and what was written down
keeps its meaning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tr11ops.runcard.card import load_card, resolved
from tr11ops.runcard.rules import card_warnings
from trainer.config.card import load_trainer_config

# tensor 2, 128 tokens; it does not say
CARD = Path(__file__).parents[1] / "data" / "small-card.toml"
LINEAR = ["curriculum.start_length=8", "curriculum.total_steps=5"]
DISCRETE = ["curriculum.kind=discrete", "curriculum.until_steps=[5]"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["parallel.sequence_parallel=false"], False),
        (["parallel.tensor=1", "slurm.workers_per_node=1"], False),
        (["parallel.tensor=4", "parallel.pipeline=1"], True),
        (["model.sequence_length=127"], False),
        (["model.partition_activations=true"], False),
        (LINEAR, True),
        ([*LINEAR, "curriculum.step=1"], False),
        ([*DISCRETE, "curriculum.lengths=[64, 128]"], True),
        ([*DISCRETE, "curriculum.lengths=[63, 128]"], False),
    ],
    ids=str,
)
def test_it_is_on_where_tensor_ranks_can_cut_every_length(
    overrides: list[str], expected: bool
) -> None:
    card = load_card(CARD, overrides, {})
    assert card.parallel.sequence_parallel is expected
    assert resolved(card)["parallel"]["sequence_parallel"] is expected


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.sequence_length=127"], "model.sequence_length = 127"),
        ([*DISCRETE, "curriculum.lengths=[63, 128]"], "curriculum.lengths = 63"),
    ],
)
def test_a_length_that_keeps_it_off_is_named(overrides: list[str], key: str) -> None:
    (line,) = (
        str(found)
        for found in card_warnings(load_card(CARD, overrides, {}))
        if "sequence_par" in str(found)
    )
    assert line.startswith(
        f"{key}: is not divisible by parallel.tensor (2): parallel.sequence_parallel is off; use mul"
    )
    assert not any("sequence_par" in str(found) for found in card_warnings(load_card(CARD, [], {})))


def test_a_resolved_card_keeps_what_it_was_resolved_to(tmp_path: Path) -> None:
    """Also one of before the default: resolving has always written every key."""
    value: dict[str, Any] = resolved(load_card(CARD, [], {}))
    value["parallel"]["sequence_parallel"] = False
    path = tmp_path / "card.json"
    path.write_text(json.dumps(value))
    assert load_trainer_config(path).parallel.sequence_parallel is False
