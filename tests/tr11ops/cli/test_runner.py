"""The one way in which a command changes something: what is shown where, who is asked, what is
done.
"""

from __future__ import annotations

import contextlib
import json

import pytest
from msgspec.structs import replace

from tr11ops.base.errors import Refusal
from tr11ops.base.invocation import PLAN_MARK, mark_of_plan
from tr11ops.cli.runner import UNCHANGED, Change, Outcome, RunContext, answer, unasked

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

    def no_preview(self) -> Outcome:
        return Outcome(remarks=("would be done to another",))

    def change(self, **attributes: object) -> Change:
        return Change(("the plan",), "Do it?", self.apply, PREVIEW, **attributes)


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch) -> Thing:
    return Thing(monkeypatch)


def test_a_change_is_shown_proved_asked_and_applied_in_this_order(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(RunContext(yes=True), thing.change(prove=thing.prove))
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
    answer(RunContext(dry_run=True), thing.change(prove=thing.prove, **attributes))
    assert thing.events == []
    assert capsys.readouterr() == (out, err)


def test_with_json_the_document_is_all_of_standard_output(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(RunContext(yes=True, as_json=True), thing.change(is_answer=True))
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"done": True}
    assert shown.err == "the plan\na note\n"


def test_where_there_is_nothing_to_do_no_one_is_asked(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(RunContext(), thing.change(prove=thing.prove, nothing=NOTHING)) == 1
    assert thing.events == []
    assert capsys.readouterr().out == "nothing to do\n"


def test_a_plan_that_is_refused_is_shown_all_the_same(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Refusal, match="someone else's"):
        answer(RunContext(yes=True), thing.change(refusal=Refusal("it is someone else's")))
    assert thing.events == []
    assert capsys.readouterr().err == "the plan\n"


def test_nothing_long_begins_where_no_one_can_be_asked(thing: Thing) -> None:
    with pytest.raises(Refusal, match="add --yes"):
        answer(RunContext(), thing.change(prove=thing.prove))
    assert thing.events == []


@pytest.mark.parametrize(("dry_run", "out"), [(False, "done\n"), (True, "would be done\n")])
def test_a_preview_is_made_only_where_it_is_asked_for(
    thing: Thing, capsys: pytest.CaptureFixture[str], dry_run: bool, out: str
) -> None:
    def preview() -> Outcome:
        thing.events.append("previewed")
        return PREVIEW

    assert answer(RunContext(dry_run=dry_run), unasked(thing.apply, preview)) == 0
    assert thing.events == ["previewed" if dry_run else "applied"]
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("as_json", "out", "err"), [(False, "drawn\n", "remark\nnote\n"), (True, "{}\n", "note\n")]
)
def test_a_screen_and_remarks_are_for_a_person_alone(
    capsys: pytest.CaptureFixture[str], as_json: bool, out: str, err: str
) -> None:
    outcome = Outcome({}, notes=["note"], remarks=["remark"], screen=lambda: print("drawn"))
    assert answer(RunContext(as_json=as_json), outcome) == 0
    assert capsys.readouterr() == (out, err)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_missing_all_the_same_is_one_line_and_the_exit_code(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    outcome = Outcome({"seen": []}, exit_code=3, fault="nothing could be read")
    if as_json:  # one object is all of standard output
        assert answer(RunContext(as_json=True), outcome) == 3
        shown = capsys.readouterr()
        assert (json.loads(shown.out), shown.err) == ({"seen": []}, "tr11: nothing could be read\n")
        return
    with pytest.raises(Refusal, match="nothing could be read") as refused:
        answer(RunContext(), outcome)
    assert refused.value.exit_code == 3


def test_a_plan_that_was_shown_is_the_one_that_is_carried_out(
    thing: Thing, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(RunContext(dry_run=True, as_shown="?"), thing.change())
    [mark] = [line for line in capsys.readouterr().err.splitlines() if line.startswith(PLAN_MARK)]
    shown = RunContext(yes=True, as_shown=mark.removeprefix(PLAN_MARK))
    answer(shown, thing.change())
    assert thing.events == ["Do it?", "applied"]
    assert "the plan" not in capsys.readouterr().err, "who has read it reads what was done"
    with pytest.raises(Refusal, match="another one now"):
        answer(shown, replace(thing.change(), lines=("another plan",)))
    # what is done without a plan is known by its preview
    with pytest.raises(Refusal, match="another one now"):
        answer(shown, unasked(thing.apply, thing.no_preview))
    assert thing.events == ["Do it?", "applied"]


@pytest.mark.parametrize(
    "over",
    [
        {"is_empty": True},
        {"nothing": NOTHING},
        {"refusal": Refusal("it is someone else's")},
    ],
)
def test_a_plan_that_changes_nothing_has_no_mark_to_agree_to(
    thing: Thing, capsys: pytest.CaptureFixture[str], over: dict[str, object]
) -> None:
    with contextlib.suppress(Refusal):
        answer(RunContext(dry_run=True, as_shown="?"), thing.change(**over))
    assert PLAN_MARK not in capsys.readouterr().err


def test_a_plan_is_the_same_while_it_is_read_and_another_for_another_job() -> None:
    plan = "running:    job 4_1 on 2 nodes, 6 d 5 h: will save\niteration:  38\ncheckpoint: global_step38"
    later = plan.replace("6 d 5 h", "42 min").replace("38", "39")
    assert mark_of_plan([plan]) == mark_of_plan(later.splitlines())
    for other in (
        plan.replace("4_1", "4_2"),
        plan.replace("2 nodes", "3 nodes"),
        f"{plan}: finished",
    ):
        assert mark_of_plan([other]) != mark_of_plan([plan])
    launch = (
        "directory: /r: 73.4 GiB free\noutput: /r/20261129-185933-95d4411d/%x.out\nnodes: 2 free"
    )
    later = launch.replace("73.4", "9").replace("185933-95d4411d", "190001-00e07821")
    assert mark_of_plan([launch]) == mark_of_plan([later])
    assert mark_of_plan([launch]) != mark_of_plan([launch.replace("2 free", "3 free")])
