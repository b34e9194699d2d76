"""Mail addresses that a card takes from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.runcard.card import load_card
from trainer.config.card import CardError

SMALL = Path(__file__).parents[2] / "data" / "small-card.toml"
SET = ["alerts.recipients=['$TEAM', 'boss@site.org']", "alerts.rota=['${ROTA}']"]


def refusal(environment: dict[str, str]) -> str:
    with pytest.raises(CardError) as caught:
        load_card(SMALL, SET, environment)
    return str(caught.value)


def test_one_variable_may_hold_several() -> None:
    card = load_card(SMALL, SET, {"TEAM": " ana@site.org, ben@site.org,", "ROTA": "cem@site.org"})
    assert card.alerts.recipients == ["ana@site.org", "ben@site.org", "boss@site.org"]
    assert card.alerts.rota == ["cem@site.org"]


def test_an_undefined_one_is_said_once() -> None:
    (line,) = refusal({"ROTA": "cem@site.org"}).splitlines()
    assert "alerts.recipients.0" in line and "$TEAM is not defined; export TEAM=" in line


def test_an_empty_one_is_no_list_of_no_one() -> None:
    (line,) = refusal({"TEAM": " , ", "ROTA": "cem@site.org"}).splitlines()
    assert "alerts.recipients = '$TEAM': names no mail address; export TEAM=ana@site.org" in line


def test_what_is_no_address_is_refused_as_in_the_card() -> None:
    assert "alerts.recipients.1" in refusal({"TEAM": "ana@site.org,ben", "ROTA": "cem@site.org"})


def test_commands_that_need_no_address_go_on_without() -> None:
    card = load_card(SMALL, SET, {}, keep_undefined=True)
    assert card.alerts.recipients == ["boss@site.org"] and card.alerts.rota == []
