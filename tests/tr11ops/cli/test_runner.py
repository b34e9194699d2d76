"""The one way in which a command changes something: what is shown where, who is asked, what is
done.
"""

from __future__ import annotations

import json

import pytest
import typer

from tr11ops.base.errors import Refusal
from tr11ops.cli.context import RunContext
from tr11ops.cli.runner import UNCHANGED, Change, Outcome, carry_out

DONE = Outcome({"done": True}, ("done",), ("a note",))
PREVIEW = Outcome({"done": False}, ("would be done",))
NOTHING = Outcome({"done": None}, ("nothing to do",), exit_code=1)


class Thing:
    """Something that a command changes, and whoever is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        monkeypatch.setattr("tr11ops.cli.runner.agree", self.agree)

    def agree(self, question: str, yes: bool) -> None:
        self.events.append(question)

    def apply(self) -> Outcome:
        self.events.append("applied")
        return DONE

    def prove(self) -> None:
        self.events.append("proved")

    def change(self, **attributes: object) -> Change:
        return Change(("the plan",), "Do it?", self.apply, PREVIEW, **attributes)


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch) -> Thing:
    return Thing(monkeypatch)


def test_a_change_is_shown_proved_asked_and_applied_in_this_order(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    carry_out(RunContext(yes=True), thing.change(prove=thing.prove))
    assert thing.events == ["proved", "Do it?", "applied"]
    assert capsys.readouterr() == ("done\n", "the plan\na note\n")


@pytest.mark.parametrize(
    ("attributes", "out", "err"),
    [
        ({}, "would be done\n", f"the plan\n{UNCHANGED}\n"),
        ({"unchanged": ""}, "would be done\n", "the plan\n"),
        ({"unchanged": "", "is_answer": True}, "the plan\nwould be done\n", ""),
        # a preview is the same whether there is something to do or not
        ({"unchanged": "", "nothing": NOTHING}, "would be done\n", "the plan\n"),
    ],
)
def test_a_dry_run_shows_the_plan_and_its_preview_alone(
    thing: Thing,
    capsys: pytest.CaptureFixture[str],
    attributes: dict[str, object],
    out: str,
    err: str,
) -> None:
    carry_out(RunContext(dry_run=True), thing.change(prove=thing.prove, **attributes))
    assert thing.events == []
    assert capsys.readouterr() == (out, err)


def test_with_json_the_document_is_all_of_standard_output(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    carry_out(RunContext(yes=True, as_json=True), thing.change(is_answer=True))
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"done": True}
    assert shown.err == "the plan\na note\n"


def test_where_there_is_nothing_to_do_no_one_is_asked(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        carry_out(RunContext(), thing.change(prove=thing.prove, nothing=NOTHING))
    assert (ended.value.exit_code, thing.events) == (1, [])
    assert capsys.readouterr().out == "nothing to do\n"


def test_a_plan_that_is_refused_is_shown_all_the_same(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Refusal, match="someone else's"):
        carry_out(RunContext(yes=True), thing.change(refusal=Refusal("it is someone else's")))
    assert thing.events == []
    assert capsys.readouterr().err == "the plan\n"


def test_nothing_long_begins_where_no_one_can_be_asked(thing: Thing) -> None:
    with pytest.raises(Refusal, match="add --yes"):
        carry_out(RunContext(), thing.change(prove=thing.prove))
    assert thing.events == []
