"""The card of a run whose trainer is another than tr11's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tr11ops.cli.main import execute
from tr11ops.observe.look import facts_of
from tr11ops.runcard.card import CardError, ForeignCard, card_from_resolved, load_card, resolved
from tr11ops.runcard.kinds import OWN_SECTIONS

CARD = """
[run]
name = "hf"
directory = "run"

[slurm]
nodes = 2
gpus_per_node = 0
workers_per_node = 3
cpus_per_task = 1
time_limit = "00:10:00"

[trainer]
dialect = "huggingface"
command = ["train.py", "--output_dir", "{folder}"]
folder = "out"
needs = ["data"]
steps = 24
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tr11.toml"
    path.write_text(CARD, encoding="utf-8")
    return path


def faults(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(CardError) as fault:
        load_card(path, overrides)
    return str(fault.value).splitlines()


def test_it_is_a_card_without_a_model(path: Path) -> None:
    card = load_card(path)
    assert isinstance(card, ForeignCard)
    assert (card.world_size, card.total_iterations) == (6, 24)
    assert card.trainer.folder == str(path.parent / "out")
    assert card.trainer.needs == [str(path.parent / "data")]
    assert not card.uses_own_trainer and card.load_folder is None


def test_what_is_resolved_is_the_same_card(path: Path) -> None:
    card = load_card(path)
    value = json.loads(json.dumps(resolved(card)))
    assert card_from_resolved(value, "resolved") == card
    assert value["derived"]["card_hash"] == card.digest


def test_what_is_not_said_is_not_known(path: Path) -> None:
    facts = facts_of(load_card(path, ["trainer.steps=none"]))
    assert facts.total_iterations is None
    assert (facts.checkpoint_interval, facts.checkpoint_minutes) == (None, None)
    assert facts.course == () and facts.skip_ranges == ()


@pytest.mark.parametrize("section", OWN_SECTIONS)
def test_a_section_of_tr11s_own_trainer_is_refused_beside_it(path: Path, section: str) -> None:
    path.write_text(f"{CARD}\n[{section}]\n", encoding="utf-8")
    (line,) = faults(path)
    assert f"{section}: is tr11's own, but [trainer] names another trainer" in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.dialect=hf", "'hf' is no dialect"),
        ("trainer.start=mpirun", "trainer.start"),
        ("trainer.command=[]", "trainer.command"),
        ('trainer.stop={how="ask"}', "stop.how"),
        ('trainer.environment={"A-B"="1"}', "is not a name that a shell accepts"),
        ('trainer.environment={"HF_TOKEN"="hf_abcdefghijklmnopqrstuvwxyz0123456789"}', "secret"),
        ("trainer.steps=0", "trainer.steps"),
        ("trainer.fodler=x", "did you mean 'trainer.folder'?"),
    ],
)
def test_a_wrong_key_is_one_line(path: Path, override: str, said: str) -> None:
    lines = faults(path, override)
    assert any(said in line for line in lines), lines
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    "words",
    [("estimate",), ("data", "text", "--samples", "1-2"), ("launch", "--rehearse", "--dry-run")],
)
def test_what_is_only_for_tr11s_own_trainer_says_so(
    path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute([*words, "--run", str(path)]) == 1
    assert "only for tr11's own trainer" in capsys.readouterr().err


def test_weights_alone_are_copied_where_the_dialect_names_them(path: Path) -> None:
    url = "backup.url=gs://bucket/x"
    assert load_card(path, [url]).backup.weights_interval == 3000
    unnamed = [url, "trainer.dialect=megatron"]
    assert load_card(path, unnamed).backup.weights_interval == 0
    (line,) = faults(path, *unnamed, "backup.weights_interval=500")
    assert "backup.weights_interval = 500" in line and "which files they are" in line


def test_it_starts_in_the_cards_folder(path: Path) -> None:
    card = load_card(path)
    assert isinstance(card, ForeignCard) and card.trainer.directory == str(path.parent)
