"""`tr11 top` over a recorded healthy run, driven by keys as a person presses them, at 80x24."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.pins.commands import beside
from tests.pins.states import Place, place_in
from tests.tr11ops.status_cases import snapshot
from tests.tr11ops.top.screen import (
    drive,
    head,
    more,
    needs_textual,
    sentence,
    settled,
    shown,
    text,
)
from tests.waiting import PATIENCE_SECONDS
from tr11ops import api
from tr11ops.alerts.state import HeldVerdict
from tr11ops.base.errors import SchedulerError
from tr11ops.base.observed import Unknown
from tr11ops.base.processes import LocalCommands, ProbeOutput
from tr11ops.cluster.base import JobState
from tr11ops.detect.detector import Finding, Severity
from tr11ops.detect.node_progress import NodeProgress, SlowNodes
from tr11ops.observe import readers
from tr11ops.rundir.exclusions import read_version
from tr11ops.rundir.journal import read_journal, user_name
from tr11ops.status.assessment import status_of
from tr11ops.status.document import ShownFinding
from tr11ops.top.commands import exclusion, words_of
from tr11ops.top.looks import RunLooks
from tr11ops.top.tables import (
    LookedAt,
    TopRow,
    TopTable,
    attempts_table,
    column_widths,
    nodes_table,
    runs_table,
)
from tr11ops.watchdog.verdict import Verdict, VerdictWord, judge


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with place_in("healthy") as made, beside(made.folder):
        yield made


# ----------------------------------------------------------------------------- tables
def test_what_needs_a_person_comes_first_and_what_is_not_seen_next(place: Place) -> None:
    (run,) = api.runs_below(place.folder, "local")
    assert isinstance(run, api.Run)
    # the recorded run was healthy long ago: seen now, it stalls
    stalled = LookedAt("z", "z/main", run.look())
    unseen = LookedAt("b", "b/main", None, "its card cannot be read")
    table = runs_table((unseen, stalled))
    assert table.rows[0].cells[:2] == ("z/main", "stalled, unwatched")
    assert "; no watchdog looks at the run; " in table.rows[0].more
    assert table.sentence == (
        "2 runs: 1 needs a person: z/main stalled (no one was told yet); b/main unknown"
    )
    assert table.rows[1].cells[1:] == ("unknown", "-", "-", "-", "-", "its card cannot be read")


def test_the_line_of_a_node_has_since_when_it_is_slow_or_why_it_is_idle_in_full(
    place: Place,
) -> None:
    (run,) = api.runs_below(place.folder, "local")
    assert isinstance(run, api.Run)
    look = run.look()
    node = look.status.node_progress[0]
    slow = ShownFinding(
        "slow-node", "warning", "n1 is slow", node.node, ("since step 300",), fix="", runbook=""
    )
    unheard = (NodeProgress("n8", node.job, is_spare=True), NodeProgress("n9", node.job))
    progress = (*unheard, *look.status.node_progress)
    status = replace(look.status, findings=(slow,), node_progress=progress)
    seen: Any = SimpleNamespace(status=status)
    table = nodes_table(LookedAt("k", "k/main", seen), node.job)
    assert table.rows[-1].cells[:4] == ("n8", "-", "-", "spare, idle")
    assert table.rows[-1].more.startswith("spare: the running launch does without it")
    assert ("n9", "no word yet") in {(row.key, row.cells[3]) for row in table.rows}
    assert {row.more for row in table.rows if row.key == node.node} == {
        "n1 is slow; since step 300"
    }


def test_an_attempt_that_has_ended_says_how_and_not_for_what_it_once_waited() -> None:
    seen = snapshot()
    status = status_of(seen, (), judge(seen, ()))
    [job, *_] = status.jobs or ()
    over = replace(job, state=JobState.COMPLETED, reason="JobHeldAdmin")
    saved = SimpleNamespace(label=job.job_id, how="kill-switch at iteration 121 (saved)")
    for attempts, how in (((saved,), saved.how), ((), "JobHeldAdmin")):
        shown_now = replace(status, jobs=(over,), last_attempts=attempts)
        run = LookedAt("big", "big/main", SimpleNamespace(status=shown_now))  # type: ignore[arg-type]
        [row] = attempts_table(run).rows
        assert row.cells == (job.job_id, "completed", str(len(job.nodes)), how)


def test_what_the_watchdog_found_is_shown_before_the_first_look_as_past(place: Place) -> None:
    kept = HeldVerdict("healthy", 100.0, 400.0)
    waiting = LookedAt("b", "b/main", None, before=kept, time=460.0)
    late = LookedAt("c", "c/main", None, before=HeldVerdict("down", 100.0, 340.0), time=460.0)
    table = runs_table((LookedAt("a", "a/main", None), waiting, late))
    assert table.sentence == (
        "3 still as of 2 min ago, looking ...: 3 runs: 1 needs a person: c/main down "
        "(not known who has it); a/main unknown, b/main healthy"
    )
    assert [row.cells[1] for row in table.rows] == ["was down", "unknown", "was healthy"]
    assert table.rows[2].cells[2] == "6 min", "since when, as it was known then"
    assert {row.cells[-1] for row in table.rows} == {"looking"}
    assert table.rows[2].more == "b/main: the watchdog found it healthy 1 min ago; looking"
    assert table.rows[1].more == "a/main: no watchdog has looked yet; looking"
    (run,) = api.runs_below(place.folder, "local")
    assert isinstance(run, api.Run)
    seen = LookedAt("c", "c/main", run.look())
    assert runs_table((seen, waiting)).sentence.startswith("1 still as of 1 min ago, looking ...: ")
    assert runs_table((seen,)).sentence.startswith("1 run: ")


def test_a_run_is_named_by_its_records_and_by_its_look_alike(place: Place) -> None:
    looks = RunLooks((place.folder,), "local")
    [known], [seen] = looks.on_record(), looks.each()
    assert known.is_awaited and not seen.is_awaited
    assert (known.key, known.name) == (seen.key, seen.name) == (str(place.run), "small/main")


def test_a_folder_without_a_card_hides_no_other_run(place: Place, tmp_path: Path) -> None:
    (tmp_path / "broken" / "state" / "submissions").mkdir(parents=True)
    broken, seen = RunLooks((tmp_path, place.folder), "local").each()
    assert broken.name == "broken" and broken.why and seen.look is not None


def test_a_filter_takes_words_in_any_order() -> None:
    table = TopTable("t", ("a",), (TopRow("", ("n01", "Excluded")), TopRow("", ("n02", ""))))
    assert [row.cells[0] for row in table.filtered("excl 01").rows] == ["n01"]
    assert table.filtered("").rows == table.rows


def test_no_cell_is_cut_but_the_last_which_gets_what_is_left() -> None:
    table = TopTable(
        "t", ("id", "why"), (TopRow("", ("4_[2-3%1]", "w" * 99)), TopRow("", ("1", "")))
    )
    assert column_widths(table, 80) == (9, 80 - 9 - 4)
    assert column_widths(table, 36) == (9,), "a few characters of a reason tell nothing"
    assert column_widths(TopTable("t", ("id", "why"), ()), 80) == (2, 3)


# ----------------------------------------------------------------------------- commands
def test_the_words_of_a_command_are_those_behind_the_card() -> None:
    line = "tr11 launch --run '/a b/run' --array 1-3 --scheduler local"
    assert words_of(line) == ["launch", "--array", "1-3", "--scheduler", "local"]
    assert words_of("ask the site's people") == words_of("") == []


@pytest.mark.parametrize(
    "words", [["resume"], ["launch", "--array", "1-3"], ["nodes", "exclude", "n1"], ["diagnose"]]
)
def test_what_is_typed_has_the_environment_of_whoever_types_it_and_so_has_a_job(
    place: Place, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Nothing that tr11 sets for its own screen reaches a job that is submitted from it."""
    given: list[dict[str, str]] = []

    def typed(self: LocalCommands, line: list[str], seconds: float, own: dict[str, str]) -> Any:
        given.append(own)
        return ProbeOutput(0, "")

    monkeypatch.setattr(LocalCommands, "command", typed)
    run = RunLooks((place.folder,), "local").open(place.run)
    run.output_of(words)
    run.command(words, as_text=True)
    found = {"PYTHONPATH"}  # where tr11 itself is found; a trainer's workers are without it
    for own in given:
        assert {
            name for name in own.keys() | os.environ.keys() if own.get(name) != os.environ.get(name)
        } <= found
    assert len(given) == 2


def test_a_node_is_excluded_as_the_look_says_to_type_it() -> None:
    fix = "tr11 nodes exclude --run r n1 --force --reason 'it holds the others back'"
    slow = Finding("slow-node", Severity.WARNING, "n1 is slow", subject="n1", fix=fix)
    verdict = SimpleNamespace(word=VerdictWord.SLOW, exit_code=0)
    status = SimpleNamespace(slow_nodes=SlowNodes("suspected", ("n2",), "n2 may be slow"))
    look: Any = SimpleNamespace(verdict=verdict, findings=(slow,), status=status)
    named = ["nodes", "exclude", "n1", "--force"], "it holds the others back"
    assert exclusion(look) == exclusion(look, "n1") == named
    assert exclusion(look, "n3") == (["nodes", "exclude", "n3"], "")
    look.findings = ()
    assert exclusion(look) == (["nodes", "exclude", "n2"], "")
    status.slow_nodes = None
    assert exclusion(look) == ([], "")


# ----------------------------------------------------------------------------- looks
class Counted:
    """A scheduler that writes down what it is asked; None of it is there where it `fails`."""

    name = "local"

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[str] = []
        self.fails = fails

    def jobs(self, name: str | None = None) -> tuple[Any, ...]:
        self.asked.append(f"jobs {name}")
        return ()

    def nodes(self) -> tuple[Any, ...]:
        self.asked.append("nodes")
        if self.fails:
            raise SchedulerError("it does not answer")
        return ()


def test_runs_that_are_looked_at_together_share_a_schedulers_answers(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = api.runs_below(place.folder, "local")
    assert isinstance(run, api.Run)
    opened: list[Counted] = []

    def opens(kind: str) -> Counted:
        opened.append(Counted(fails=len(opened) > 1))
        return opened[-1]

    monkeypatch.setattr(readers, "open_scheduler", opens)
    shared = readers.SharedReaders("local")
    first = shared.of(run.directory)
    assert shared.of(run.directory) is first and not isinstance(first, Unknown)
    for name in ("small", "small", "other"):
        assert first.nodes() == first.jobs(name) == ()
    assert [one.asked for one in opened] == [["nodes", "jobs small", "jobs other"]]
    brief = readers.SharedReaders("local", seconds=-1.0)  # over as soon as they are given
    brief.of(run.directory)
    failing = brief.of(run.directory)
    assert len(opened) == 3 and not isinstance(failing, Unknown)
    for _ in range(2):
        with pytest.raises(SchedulerError):
            failing.nodes()
    assert opened[2].asked == ["nodes"], "what does not answer is not asked again for each run"


def test_a_round_of_looks_opens_a_scheduler_once_and_the_next_one_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, opens = [], readers.open_scheduler

    def counted(kind: str) -> Any:
        opened.append(kind)
        return opens(kind)

    monkeypatch.setattr(readers, "open_scheduler", counted)
    looks = RunLooks((place.folder, place.run), "local")
    assert [seen.name for seen in looks.each()] == ["small/main"] * 2 and opened == ["local"]
    assert all(seen.look is not None for seen in looks.each()) and opened == ["local"] * 2


# ----------------------------------------------------------------------------- keys
@needs_textual
def test_a_round_of_looks_that_lasts_is_not_joined_by_another(place: Place) -> None:
    go_on = threading.Event()

    async def keys(app: Any, pilot: Any) -> None:
        finder, begun = app._finder, []

        def slow() -> Iterator[LookedAt]:
            begun.append(True)
            assert go_on.wait(PATIENCE_SECONDS)
            yield from finder.each()

        app._finder = SimpleNamespace(each=slow)
        await pilot.press("r", "r", "r")
        assert len(app.workers) == 1
        go_on.set()
        await settled(app, pilot)
        assert len(begun) == 1 and [row[0] for row in shown(app)] == ["small/main"]
        await pilot.press("r")
        await settled(app, pilot)
        assert len(begun) == 2, "the next one comes when it is over"

    drive(place, keys)


@needs_textual
def test_a_long_sentence_below_the_table_is_whole_at_80_columns(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        below, table = app.query_one("#more"), app.query_one("DataTable")
        for words, lines in (("healthy", 4), ("ranks wait for one another; " * 19, 7)):
            below.update(words)
            await pilot.pause()
            assert below.size.height == lines and table.size.height >= 8

    drive(place, keys)


@needs_textual
def test_the_cursor_stays_with_its_run_when_another_comes_before_it(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        down = HeldVerdict("down", 100.0, 400.0)
        app._looks |= {"a": LookedAt("a", "a/main", None, before=down, time=460.0)}
        before = app._target()
        app._draw()
        assert [row[0] for row in shown(app)] == ["a/main", "small/main"]
        assert app._target() == before == str(place.run)

    drive(place, keys)


@needs_textual
@pytest.mark.parametrize("key", ["", "up"])
def test_in_the_first_round_the_cursor_is_with_the_worst_run_until_a_key_is_pressed(
    place: Place, key: str
) -> None:
    """The run that was healthy when the watchdog looked is down now, and so comes first."""
    go_on = threading.Event()

    async def keys(app: Any, pilot: Any) -> None:
        found = app._looks[str(place.run)]
        other = replace(found, key="z", name="z/main")
        fine = replace(found, look=replace(found.look, verdict=Verdict(VerdictWord.HEALTHY, "", 0)))

        def first_round() -> Iterator[LookedAt]:
            yield fine
            assert go_on.wait(PATIENCE_SECONDS)
            yield other

        app._looks = {}
        app._is_untouched = True
        app._finder = SimpleNamespace(
            on_record=lambda: (fine, replace(fine, key="z", name="z/main")), each=first_round
        )
        app.action_look()
        await pilot.pause()
        assert app._target() == str(place.run)
        if key:
            await pilot.press(key)
        go_on.set()
        await settled(app, pilot)
        assert [row[0] for row in shown(app)] == ["z/main", "small/main"]
        assert app._target() == (str(place.run) if key else "z")

    drive(place, keys)


@needs_textual
def test_of_a_run_that_was_not_seen_it_is_said_why(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        unseen = LookedAt("u", "u/main", None, "its card cannot be read")
        app._looks, app._path = {"u": unseen}, ["u", "1"]
        app._draw()
        assert (shown(app), sentence(app)) == ([], unseen.why)
        await pilot.press("a")
        assert (shown(app), sentence(app)) == ([], unseen.why)
        await pilot.press("escape", "x")
        assert "No node is known" in sentence(app)

    drive(place, keys)


@needs_textual
def test_enter_goes_from_runs_to_ranks_and_escape_back(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        assert [row[:2] for row in shown(app)] == [("small/main", "stalled, unwatched")]
        assert more(app).startswith("small/main: stalled: ") and "; on call: no one named" in more(
            app
        )
        await pilot.press("enter")
        assert "small/main: attempts" in head(app)
        assert shown(app)[0][1:] == ("running", "2", "-")
        ends = [row.cells[-1] for row in app._shown.rows]
        told = next(line for line, end in enumerate(ends) if end != "-")
        await pilot.press(*["down"] * told)
        assert more(app) == ends[told], "in full"
        await pilot.press("escape", "enter")
        assert app._target() and app._chosen().key, "at the first line, which has nodes below"
        await pilot.press("enter")
        nodes = shown(app)
        assert {row[0] for row in nodes} == set(app._looks[str(place.run)].look.status.nodes)
        await pilot.press("enter")
        assert shown(app), "ranks"
        place_of_keys = head(app)
        await pilot.press("enter")
        assert head(app) == place_of_keys
        assert "Nothing is below this line" in str(app.query_one("#why").render())
        assert app._shown.columns == ("rank", "step", "phase", "silent", "pid")
        for _ in range(3):
            await pilot.press("escape")
        assert [row[0] for row in shown(app)] == ["small/main"]

    drive(place, keys)


@needs_textual
def test_the_filter_narrows_and_escape_shows_all(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("slash", *"nothing")
        assert shown(app) == []
        await pilot.press("escape")
        assert len(shown(app)) == 1
        await pilot.press("slash", *"small", "enter", "enter")
        assert "attempts" in head(app)

    drive(place, keys)


@needs_textual
def test_kill_shows_the_commands_own_preview_and_nothing_else_happens(place: Place) -> None:
    switch = Path(place.run) / "kill-switch"

    async def keys(app: Any, pilot: Any) -> None:
        fault = app._looks[app._target()].look.status.main_fault
        await pilot.press("k")
        assert fault and f"because: {fault}_" in text(app)
        await settled(app, pilot)
        assert app.screen.head == "small/main: tr11 kill" and "--dry-run" not in text(app)
        assert f"Type Enter, then {app.screen.keys} to do it" in text(app)
        await pilot.press(*"mine")
        assert "because: mine_\n" in text(app), "what is typed takes its place"
        await pilot.press("enter")
        assert f"Type {app.screen.keys} to do it" in text(app)
        await pilot.press("y", "y", "n")
        await settled(app, pilot)
        assert len(app.screen_stack) == 1
        assert not switch.exists()

    drive(place, keys)


@needs_textual
def test_a_stopped_run_is_let_go_on_by_its_plans_keys(place: Place) -> None:
    switch = Path(place.run) / "kill-switch"

    async def keys(app: Any, pilot: Any) -> None:
        for key in ("k", "u"):
            app._who = "ana@example.org"  # who has taken the shift here
            await pilot.press(key, *"its fan", "enter")
            await settled(app, pilot)
            assert "to do it" in text(app)
            await pilot.press(*app.screen.keys)
            await settled(app, pilot)
            assert switch.exists() is (key == "k")
            last = read_journal(Path(place.run) / "journal").entries[-1]
            assert (last.who, last.why) == ("ana@example.org", "its fan")
            look = app._looks[str(place.run)]
            assert text(app).startswith(f"{look.state}\n\n"), "how it is then"
            await pilot.press("escape")
        for given in ("u", "aA"):  # nothing stands in its way now, and no alert is open
            await pilot.press(*given)
            await settled(app, pilot)
            assert "Esc goes back" in text(app) and "to do it" not in text(app)
            await pilot.press("escape")

    drive(place, keys)


@needs_textual
def test_a_run_that_is_stopped_is_followed_until_it_has_saved(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tr11ops.top.app.FOLLOW_SECONDS", 0.0)
    monkeypatch.setattr(api.Run, "command", lambda *_, **__: api.Answer(0, {}, ("asked",), "12"))

    async def keys(app: Any, pilot: Any) -> None:
        found, said = app._looks[app._target()], []
        steps = [(VerdictWord.STOPPING, "it saves")] * 2
        steps += [(VerdictWord.STOPPED, "asked by ana (fan); it has saved")]
        looks = iter(
            replace(found, look=replace(found.look, verdict=Verdict(word, why, 0)))
            for word, why in steps
        )
        app._finder = SimpleNamespace(
            look=lambda folder: next(looks), open=app._finder.open, each=tuple
        )
        came = app._came

        def shown_then(screen: Any, words: str, *plan: Any) -> None:
            said.append(words)
            came(screen, words, *plan)

        monkeypatch.setattr(app, "_came", shown_then)
        await pilot.press("k", *"fan", "enter")
        await settled(app, pilot)
        await pilot.press(*app.screen.keys)
        await settled(app, pilot)
        assert text(app) == "stopped: asked by ana; it has saved\n\nasked"
        assert said[1:] == ["asked", *["stopping: it saves\n\nasked"] * 2, text(app)]

    drive(place, keys)


@needs_textual
def test_a_node_is_excluded_for_a_reason_that_is_asked_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TR11_LOCAL_NODES", "9")

    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("x")
        assert "No node is known to be slow or accused" in sentence(app)
        await pilot.press("enter", "enter", "x")
        node = app._chosen().key
        assert app.screen.head == f"small/main: tr11 nodes exclude {node}"
        await pilot.press("enter")
        await settled(app, pilot)
        assert "because: _\n\nType why, Enter, then y" in text(app), "until there is one"
        await pilot.press("escape")
        assert len(app._path) == 2 and len(app.screen_stack) == 1
        await pilot.press("x", *"its fan", "enter")
        await settled(app, pilot)
        assert f"exclude {node} for 14 days" in text(app)
        await pilot.press(*app.screen.keys)
        await settled(app, pilot)
        assert f"excluded: {node}" in text(app)
        found = {one.node: one for one in read_version(place.state / "exclusions.json").exclusions}
        assert (found[node].owner, found[node].why) == (user_name(), "its fan")

    drive(place, keys)


@needs_textual
def test_a_run_with_nothing_queued_is_launched_as_it_was_last() -> None:
    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("u")
        await settled(app, pilot)
        assert "nothing is queued" in text(app) and "array 1-3" in text(app)
        assert f"tr11 launch --run {place.run} --array 1-3" in text(app)
        assert app.screen.keys in text(app)

    with place_in("down") as place, beside(place.folder):
        drive(place, keys)


@needs_textual
def test_what_lets_a_stopped_run_go_on_is_said_behind_an_exclusion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        monkeypatch.setenv("TR11_LOCAL_NODES", "9")
        app._plan(["nodes", "exclude", "local-node1"], "because", "slow")
        await settled(app, pilot)
        await pilot.press("enter", *app.screen.keys)
        await settled(app, pilot)
        ways = [line.removeprefix("next: ") for line in text(app).splitlines() if "next: " in line]
        assert [words_of(line)[0] for line in ways] == ["resume", "launch"]

    with place_in("stopped") as place, beside(place.folder):
        drive(place, keys)


@needs_textual
def test_a_key_pressed_again_asks_for_no_second_plan_and_y_counts_once(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        await pilot.press("k", "k", "k", "enter", "k", "k")
        await settled(app, pilot)
        assert len(app.screen_stack) == 2, "one plan"
        await pilot.press("n")
        await pilot.press("k", *"why", "enter")
        await settled(app, pilot)
        plan, done = app.screen, []
        plan.apply = lambda screen, reason: done.append(reason)
        await pilot.press("y", *plan.keys, *plan.keys)
        await settled(app, pilot)
        assert done == ["why"]

    drive(place, keys)


@needs_textual
def test_log_diagnosis_and_help_are_read_and_left(place: Place) -> None:
    async def keys(app: Any, pilot: Any) -> None:
        for key, part in (("l", "iteration"), ("d", "verdict"), ("question_mark", "tr11 kill")):
            await pilot.press(key)
            await settled(app, pilot)
            assert part in text(app), key
            await pilot.press("escape")
            assert len(app.screen_stack) == 1

    drive(place, keys)
