"""Scenario files, without a twin: what is drawn can be given again, and a wrong file is one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.twin.fault_scenario import BAG, drawn_scenario, read_scenario
from tr11ops.base.errors import TwinError

FOLDER = Path(__file__).parent / "scenarios"


def test_a_drawn_scenario_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    drawn = drawn_scenario(seed=7, count=60)
    path = tmp_path / "drawn.toml"
    path.write_text(drawn.toml())
    assert read_scenario(path) == drawn == drawn_scenario(seed=7, count=60)
    assert drawn != drawn_scenario(seed=8, count=60)


def test_every_kind_comes_before_one_comes_too_often() -> None:
    size = sum(weight for weight, _ in BAG)
    drawn = drawn_scenario(seed=3, count=size).events
    for weight, event in BAG:
        alike = [one for one in drawn if (one.fault, one.target) == (event.fault, event.target)]
        assert len(alike) == weight and all(one.expect == event.expect for one in alike)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_the_scenarios_at_hand_are_read(path: Path) -> None:
    assert read_scenario(path).events


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "a"\n[[events]]\nfault = "node_dead"\n', "event 1: fault 'node_dead' is not known"),
        ('name = "a"\n[[events]]\nfault = "drain"\npick = 1.0\n', "event 1: pick = 1"),
        ('name = "a"\n[[events]]\nfault = "drain"\nnode = "x"\n', "unknown field `node`"),
        ('name = "a"\n[[events]]\nfault = "drain"\ntarget = "rack"\n', "target"),
        ("name = ", "scenario"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(TwinError) as raised:
        read_scenario(path)
    assert says in str(raised.value) and str(path) in str(raised.value)
