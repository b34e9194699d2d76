"""`tr11 list`, `tr11 runbook`, `tr11 config show` and `explain`, typed in the folder of the
recorded run.
"""

from __future__ import annotations

import json
import re
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from tests.pins.commands import beside, typed
from tests.pins.recording import unpacked
from tests.tr11ops.status_cases import HOUR, NOW, beats, checkpoints, slowed, snapshot
from tr11ops.base.shipped import page_names, shipped
from tr11ops.cli.main import execute
from tr11ops.detect.registry import detect_all
from tr11ops.goodput import history
from tr11ops.goodput.history_values import AttemptHistory
from tr11ops.runcard.card import load_card
from tr11ops.serve.pages import Pages
from tr11ops.serve.poller import News
from tr11ops.serve.view import in_order, view_of
from tr11ops.status.assessment import status_of
from tr11ops.status.run_list import ListedRun, RunList, urgency
from tr11ops.status.run_list_screen import TITLES, list_lines
from tr11ops.status.run_use import RunUse, UseReader
from tr11ops.watchdog.verdict import VerdictWord, judge

LOCAL = ("--scheduler", "local")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("recorded").resolve())


def test_a_run_is_one_line_that_says_what_status_says(recorded: Path) -> None:
    with beside(recorded):
        code, text = typed(("list", *LOCAL))
        status = json.loads(typed(("status", "--json", *LOCAL))[1])
        [run] = json.loads(typed(("list", "run", "--json", *LOCAL))[1])["runs"]
    [_, line, *more] = text.splitlines()
    said, _, total = " ".join(map(str.strip, more)).partition("  All runs: ")
    assert run["watchdog_fault"] == status["watchdog_fault"] and total.endswith("0.1 node-hours")
    assert said == (
        f"{status['why']} {status['watchdog_fault']} alerts: 2 (checkpoint-unsound 38, clock-skew here) are"
        " not told yet: no watchdog looks, so no one will be told; 1 (exclusion-cap) is open: no one has"
        " taken it; 2 (down, held 4) are no longer found; 0.1 node-hours"
    )
    word, *_, step, loss, left, name = line.split()
    assert code == 0 and (word, step, left, name) == ("stopped", "38/6253", "-", "run")
    assert float(loss) == pytest.approx(run["loss"], abs=5e-5)
    assert max(map(len, text.splitlines())) <= 80
    shared = set(run) & set(status) - {"eta"}
    assert {key: run[key] for key in shared} == {key: status[key] for key in shared} and len(
        shared
    ) >= 5
    assert (run["directory"], run["name"], run["variant"]) == ("run", "small", "main")


def test_a_question_about_one_run_in_a_folder_of_runs_is_answered_for_all_of_them(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card of the recorded run does not count: it is asked from a folder without one."""

    def answer(*words: str) -> tuple[int, str, str]:
        code = execute([*words])
        out, err = capsys.readouterr()
        return code, re.sub(r" *\d+ d \d+ h", " TIME", out), err  # the clock goes on

    with beside(recorded):
        code, listed, _ = answer("list", *LOCAL)
        Path("tr11.toml").rename("other.toml")
        try:
            for words, more in ((("status",), LOCAL), (("alerts", "list"), ())):
                last = f"one of them: tr11 {' '.join(words)} --run {recorded / 'run'}\n"
                assert answer(*words, *more) == (code, listed, last)
                refused, text, said = answer(*words, "--json")
                assert refused == 2 and "`tr11 list`, also with --json," in said + text
            assert answer("status", "--set", "run.name=x", *LOCAL)[0] == 2
        finally:
            Path("other.toml").rename("tr11.toml")


def test_a_question_about_one_run_where_none_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert typed(("status", *LOCAL))[0] == typed(("alerts", "list"))[0] == 2


def test_what_a_starting_run_lost_is_no_progress() -> None:
    starting = snapshot(heartbeats=beats(phase="loading"), checkpoints=checkpoints(31200))
    for seen, words in ((starting, "31200/115311"), (snapshot(), "31219/115311")):
        run = ListedRun(Path("big"), status_of(seen, (), judge(seen, ())).document())
        [stop, _, line, *_] = list_lines(RunList.of([run]), seen.time)
        assert stop == "to stop one: tr11 kill --run big --wait"
        assert words in line and line.endswith(
            "  big  (19 iterations again)" if seen is starting else "  big"
        )
        assert run.document()["iteration"] == 31219 and (run.document()["done_again"] is None) is (
            seen is not starting
        )


def test_a_run_that_needs_a_person_says_why() -> None:
    seen = snapshot(heartbeats=(), steps=())
    run = ListedRun(Path("big"), status_of(seen, (), judge(seen, detect_all(seen))).document())
    _, line, *why = list_lines(RunList.of([run]), seen.time)
    assert run.exit_code == 1 and line.startswith("stalled ")
    assert "without any sign of life" in " ".join(why) and max(map(len, why)) <= 80


def test_a_run_that_is_slow_is_told_before_those_that_are_well_with_its_reason() -> None:
    listed = []
    for name, seen in (("well", snapshot()), ("slow", slowed())):
        found = detect_all(seen)
        told = status_of(seen, found, judge(seen, found))
        listed.append(ListedRun(Path(name), told.document()))
    well, slow = listed
    stopped = {**well.status, "verdict": "stopped"}
    shown = RunList.of([well, ListedRun(Path("off"), stopped), slow])
    assert [str(run.directory) for run in shown.runs] == ["slow", "off", "well"]
    assert shown.exit_code == 0
    lines = list(list_lines(shown, NOW))
    text = lines[lines.index(TITLES) + 1 :]
    assert text[0].startswith("slow ") and text[0].endswith("slow")
    assert text[1].startswith("  n02 holds the others back (its rank 1")
    views = [
        view_of(News(str(one.directory), one.directory, document=one.status), NOW)
        for one in (well, slow)
    ]
    assert [(one.key, one.tone) for one in in_order(views)] == [("slow", "warn"), ("well", "good")]


def test_a_run_that_no_watchdog_looks_at_is_told_as_that_wherever_runs_are_listed() -> None:
    seen = snapshot()
    told = status_of(seen, (), judge(seen, ())).document()
    fault = "the watchdog has not looked for 3 h (due every 5 min)"
    for word, given, shown in (
        ("healthy", fault, True),
        ("finished", fault, False),
        ("down", None, False),
    ):
        document = {**told, "verdict": word, "watchdog_fault": given}
        run = ListedRun(Path("big"), document)
        assert (f"  {fault}" in list_lines(RunList.of([run]), seen.time)) is shown
        assert run.document()["watchdog_fault"] == given
        view = view_of(News("big", Path("big"), document=document), seen.time)
        page = Pages().render(
            "list", is_part=True, runs=[view], troubles={}, roots=[], sums="", counts=""
        )
        assert ("The watchdog has not looked for 3 h" in page) is shown


def test_what_needs_a_person_is_first_by_one_order() -> None:
    seen = snapshot()
    healthy = status_of(seen, (), judge(seen, ())).document()
    told = (("healthy", 0), ("at risk", 1), ("finished", 0), ("unknown", 3), ("down", 1))
    runs = [
        ListedRun(Path(word), {**healthy, "verdict": word, "exit_code": code})
        for word, code in told
    ]
    shown = [str(run.directory) for run in RunList.of([*runs, ListedRun(Path("z"), None)]).runs]
    assert shown == ["down", "at risk", "unknown", "z", "healthy", "finished"]
    assert {urgency(word, 1) < urgency(VerdictWord.DOWN, 0) for word in VerdictWord} == {True}


def test_several_runs_say_whose_they_are_who_has_them_and_what_they_hold() -> None:
    down = snapshot(heartbeats=(), steps=())
    stalled = status_of(down, (), judge(down, detect_all(down))).document()
    seen = snapshot()
    healthy = status_of(seen, (), judge(seen, ())).document()
    excluded = [
        {"node": "bad1", "owner": "ana", "state": "exclude", "until": None, "why": "Xid 79"}
    ]
    alert = {"owner": "", "acknowledged_by": "ben@example.org"}
    six = RunUse("six", 100.0, 800.0, 1600.0, "EUR", 42.0)
    unpriced = RunUse("seven", 10.0)
    ana = {"who": ["ana@example.org"], "until": None, "taken": None}
    now = datetime.fromtimestamp(seen.time, UTC)
    cleo = {
        "who": ["cleo@example.org"],
        "until": (now + timedelta(hours=5)).isoformat(timespec="seconds"),
        "taken": now.isoformat(timespec="seconds"),
    }
    runs = RunList.of(
        (
            ListedRun(
                Path("b"), {**healthy, "exclusions": excluded, "on_call": cleo}, use=unpriced
            ),
            ListedRun(Path("a"), {**stalled, "exclusions": excluded, "on_call": ana}, use=six),
            ListedRun(Path("c"), {**stalled, "alerts": [alert], "on_call": ana}, use=six),
            ListedRun(Path("d"), None, "cannot be read"),
        )
    )
    lines = list(list_lines(runs, seen.time))
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80
    assert text.startswith(
        "4 runs: 2 need a person: a stalled (no alert yet), c stalled (ben@example.org has it);"
        " d unknown, b healthy to stop one: tr11 kill --run b --wait verdict"
    )
    assert (
        "All runs: 48 nodes" in text
        and "210.0 node-hours, 1,600.0 GPU-hours, 3,200.00 EUR, 84.0 kWh, without 1 run" in text
    )
    assert "on call: ana@example.org; six; " in text
    assert "alerts: 1 is open: ben@example.org has it; on call: ana@example.org; six; " in text
    assert "on call: cleo@example.org (took the shift, 5 h 00 min left); seven; " in text
    assert "100.0 node-hours; 800.0 GPU-hours; 1,600.00 EUR; 42.0 kWh" in text
    assert "seven: 1 run, " in text and "six: 2 runs, " in text
    assert "bad1: excluded by a, b" in text
    told = runs.document()
    assert told["shared_exclusions"] == {"bad1": ("a", "b")}
    assert [run["owners"] for run in told["runs"]][:2] == [[], ["ben@example.org"]]  # type: ignore[index]
    assert told["teams"]["six"]["cost"] == {"EUR": 3200.0}  # type: ignore[index]


def test_open_alerts_are_told_whatever_the_verdict_with_who_has_them() -> None:
    seen = snapshot()
    ana = {"who": ["ana@example.org"], "until": None, "taken": None}
    told = {**status_of(seen, (), judge(seen, ())).document(), "on_call": ana}
    warning = {
        "severity": "warning",
        "told": ["ana@example.org"],
        "detector": "slow-node",
        "subject": "n01",
    }
    other = {**warning, "subject": "n02"}
    for word in ("slow", "healthy", "stopped"):
        for alerts, wanted in (
            ([], "on call: ana@example.org"),
            (
                [warning],
                "alerts: 1 is open: no one has taken it; ana@example.org is on call and was told",
            ),
            (
                [warning, other],
                "alerts: 2 (slow-node n01, slow-node n02) are open: no one has taken them;"
                " ana@example.org is on call and was told",
            ),
            (
                [{**warning, "owner": "ben"}, other],
                "alerts: 1 (slow-node n01) is open: ben has it; 1 (slow-node n02) is open: no one has taken it;"
                " ana@example.org is on call and was told",
            ),
            (
                [warning, {**other, "told": []}],
                "alerts: 2 (slow-node n01, slow-node n02) are open: no one has taken them;"
                " ana@example.org is on call; on n",
            ),
            ([{**warning, "owner": "ben"}], "alerts: 1 is open: ben has it; on call: ana@"),
        ):
            run = ListedRun(Path("big"), {**told, "verdict": word, "alerts": alerts})
            lines = list(list_lines(RunList.of([run]), seen.time))
            text = " ".join(" ".join(lines).split())
            assert wanted in text and text.count("ana@example.org") == 1
            view = view_of(News("big", Path("big"), document=run.told), seen.time)
            said = wanted.removeprefix("alerts: ").partition("; on ")[0]
            assert not alerts or said in view.alerts_line


def test_what_a_run_has_held_is_counted_at_the_moment_of_each_look(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one function, whichever screen shows it: what is kept between two looks stands still for none."""
    held = AttemptHistory(
        "1000_7", "1000_7", "slurm", "", start=NOW - HOUR, ended=None, is_running=True,
        last_sign=NOW, nodes=("n1", "n2"),
    )  # fmt: skip
    read = Mock(return_value=(held,))
    monkeypatch.setattr(history, "read_attempts_alone", read)
    directory = Mock(exists=True, root=recorded, attempt_ids=list)
    card = load_card(recorded / "tr11.toml", (), {})
    uses, seen = UseReader(), snapshot()
    first = uses.read(card, directory, seen)
    later = replace(seen, time=seen.time + HOUR / 2)
    assert (first.node_hours, uses.read(card, directory, later).node_hours) == (2.0, 3.0)
    assert uses.read(card, directory, later) == UseReader().read(card, directory, later)
    assert read.call_count == 2, "once for each reader: the past is not read again for each look"
    read.return_value = (replace(held, ended=NOW, is_running=False),)
    over = replace(later, jobs=())
    assert uses.read(card, directory, over).node_hours == 2.0, "its job has ended meanwhile"


def test_the_price_is_that_of_the_card_and_left_out_without_one(recorded: Path) -> None:
    from tr11ops.base.observed import Unknown
    from tr11ops.status.run_use import use_of

    lines = ["slurm.gpus_per_node=8", "slurm.workers_per_node=2", "slurm.account=six"]
    priced = ["operation.gpu_hour_price=2.5", "operation.team=large models"]
    plain = use_of(load_card(recorded / "tr11.toml", lines, {}), 10.0, Unknown("not told"))
    assert (plain.team, plain.gpu_hours, plain.cost, plain.energy_kwh) == ("six", 80.0, None, None)
    card = load_card(recorded / "tr11.toml", [*lines, *priced], {})
    assert use_of(card, 10.0, 7.2e6).words == (
        "10.0 node-hours",
        "80.0 GPU-hours",
        "200.00 EUR",
        "2.0 kWh",
    )
    assert use_of(card, 10.0, 7.2e6).team == "large models"


def test_list_watch_is_looked_at_again_and_its_options_are_checked(recorded: Path) -> None:
    from rich.console import Console

    from tr11ops.cli.list_runs import _look_at_all

    with beside(recorded):
        uses = UseReader()
        frames = [_look_at_all([Path("run")], "local", uses) for _ in range(2)]
        assert typed(("list", "--every", "5"))[0] == 2
        assert typed(("list", "--watch", "--every", "0"))[0] == 2
    console = Console(width=80, height=24)
    drawn = [
        "".join(part.text for part in console.render(frame.screen(80, 22))) for frame in frames
    ]
    shown = [re.sub(r"\d+ s\b", "", text) for text in drawn]  # which pass between two looks
    assert "stopped" in shown[0] and shown[0] == shown[1] and frames[0].exit_code == 0


def test_an_unreadable_run_is_one_line_and_the_others_are_shown(
    recorded: Path, tmp_path: Path
) -> None:
    (tmp_path / "never" / "state" / "submissions").mkdir(parents=True)
    broken = tmp_path / "broken" / "state" / "submissions" / "20260101-000000-00000000"
    broken.mkdir(parents=True)
    (broken / "card.json").write_text("{")
    moved = tmp_path / "moved" / "state" / "submissions" / "20260101-000000-00000000"
    moved.mkdir(parents=True)
    card = next((recorded / "run" / "state" / "submissions").glob("*/card.json"))
    (moved / "card.json").write_bytes(card.read_bytes())
    with beside(recorded):
        code, text = typed(("list", str(tmp_path), "run", *LOCAL))
        runs = json.loads(typed(("list", str(tmp_path), "--json", *LOCAL))[1])["runs"]
    lines = text.splitlines()
    lines = lines[lines.index(TITLES) + 1 :]
    assert code == 3 and [line.split()[0] for line in lines[:4]] == ["unknown"] * 3 + ["stopped"]
    for line, why in zip(
        lines, ("card.json", "names another directory", "nothing was launched"), strict=False
    ):
        assert why in line
    assert [(run["verdict"], run["exit_code"], run["iteration"]) for run in runs] == [
        ("unknown", 3, None)
    ] * 3


def test_where_no_run_is_and_where_no_folder_is(recorded: Path, tmp_path: Path) -> None:
    with beside(recorded):
        assert typed(("list", str(tmp_path), *LOCAL)) == (0, "")
        assert typed(("list", str(tmp_path / "nothing"), *LOCAL))[0] == 2
        assert typed(("list", "--scheduler", "odd"))[0] == 2


# ----------------------------------------------------------------------------- the runbook
def test_each_page_is_listed_and_printed(recorded: Path) -> None:
    code, text = typed(("runbook",))
    head, *lines = text.splitlines()
    names = [line.strip() for line in lines]
    assert head == "Read one with `tr11 runbook NAME`:"
    assert code == 0 and names == list(page_names()) and "README" not in names
    assert set(names) == {path.stem for path in shipped("runbooks").glob("*.md")} - {"README"}
    assert [page["name"] for page in json.loads(typed(("runbook", "--json"))[1])["pages"]] == names
    code, text = typed(("runbook", "hung"))
    assert code == 0 and text.startswith("Hung\n") and "    tr11 status" in text.splitlines()
    for same in ("hung.md", "runbooks/hung.md"):
        assert typed(("runbook", same)) == (0, text)
    assert typed(("runbook", "loss-spike"))[1] == typed(("runbook", "spike"))[1], (
        "a detector's name finds its page"
    )
    for word, page in (
        ("nan", "spike"),
        ("NaN", "spike"),
        ("oom", "unfinished-end"),
        ("disk", "filesystem-full"),
    ):
        assert typed(("runbook", word))[1] == typed(("runbook", page))[1], word
    assert json.loads(typed(("runbook", "hung", "--json"))[1])["title"] == "Hung"


def test_an_unknown_page_is_wrong_usage_and_the_nearest_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert execute(["runbook", "hungg"]) == 2
    assert (
        capsys.readouterr().err == "tr11: NAME 'hungg': there is no such page; did you mean hung?\n"
    )
    assert execute(["runbook", "warm-up"]) == 2
    assert "there is no such page; these speak of it: " in capsys.readouterr().err
    assert execute(["runbook", "start"]) == 2
    assert "did you mean start-failed?" in capsys.readouterr().err


# ----------------------------------------------------------------------------- the card
def test_the_card_is_shown_as_written_and_as_resolved(recorded: Path) -> None:
    with beside(recorded):
        code, text = typed(("config", "show", "--set", "slurm.nodes=7"))
        assert code == 0 and tomllib.loads(text)["slurm"]["nodes"] == 7
        written = tomllib.loads((recorded / "tr11.toml").read_text())
        assert tomllib.loads(typed(("config", "show"))[1]) == written
        code, text = typed(("config", "show", "--resolved"))
        shown = tomllib.loads(text)
        document = json.loads(typed(("config", "show", "--resolved", "--json"))[1])
    assert code == 0 and shown["run"]["directory"] == str(recorded / "run")
    assert (
        shown["parallel"]["pipeline"] == written["parallel"]["pipeline"]
        and "step_timeout_minutes" in shown["parallel"]
    )
    assert (
        document["resolved"]
        and document["card"]["slurm"]["nodes"] == 2
        and document["derived"]["world_size"] == 4
    )
    # what is shown is a card that says the same
    (recorded / "again.toml").write_text(text)
    with beside(recorded):
        assert (
            typed(("config", "show", "--resolved", "--run", "again.toml"))[1].splitlines()[1:]
            == text.splitlines()[1:]
        )


def test_what_a_launch_would_refuse_in_a_card_is_said_where_it_is_shown(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with beside(recorded):
        code = execute(["config", "show", "--set", "resilience.adapt_save_interval=true"])
    out, err = capsys.readouterr()
    assert code == 0 and "adapt_save_interval = true" in out
    assert "`tr11 launch` refuses it: --set resilience.adapt_save_interval = true: " in err


@pytest.mark.parametrize(
    "secret",
    ["hub.endpoint=https://user:pass@hub.example", "slurm.environment.DB_PASSWORD=hunter2"],
)
def test_a_secret_in_a_card_is_not_shown(
    recorded: Path, secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with beside(recorded):
        code = execute(["config", "show", "--set", secret])
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert f"tr11.toml: {secret.partition('=')[0]}: " in err


def test_a_variable_that_refers_to_a_secret_is_shown(recorded: Path) -> None:
    with beside(recorded):
        code, text = typed(
            ("config", "show", "--set", 'slurm.environment.DB_PASSWORD="$DB_PASSWORD"')
        )
    assert code == 0 and 'DB_PASSWORD = "$DB_PASSWORD"' in text


# ----------------------------------------------------------------------------- what a key means
def test_a_key_is_explained_as_the_page_has_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "card" / "watch.md").read_text(
        encoding="utf-8"
    )
    told = json.loads(typed(("config", "explain", "watch.act", "--json"))[1])
    (key,) = told["keys"]
    assert (key["key"], key["default"], key["required"]) == ("watch.act", False, False)
    assert f"| `act` | true, false | `false` | {key['meaning']} |" in page
    code, text = typed(("config", "explain", "watch.act"))
    assert (
        code == 0
        and text.startswith("watch.act = true, false; default false\n")
        and key["meaning"] in text
    )
    assert typed(("config", "explain", "spare_nodes"))[1].startswith("slurm.spare_nodes = integer")
    assert "; required" in typed(("config", "explain", "run.name"))[1]


def test_every_key_and_section_is_explained_within_80_columns() -> None:
    told = json.loads(typed(("config", "explain", "--json"))[1])
    names = [section["name"] for section in told["sections"]]
    assert {"run", "watch", "batch.ramp", "filesystems"} <= set(names)
    for name in names:
        code, text = typed(("config", "explain", name))
        assert code == 0 and max(map(len, text.splitlines())) <= 80, name
        keys = json.loads(typed(("config", "explain", f"[{name}]", "--json"))[1])["keys"]
        assert keys and all(f"{key['key']} = " in text for key in keys)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("backup.stor", "did you mean backup.store"),
        ("spare_node", "did you mean slurm.spare_nodes"),
        ("wach", "did you mean watch"),
        ("xyzzy", "`tr11 config explain` lists the sections"),
    ],
)
def test_a_key_that_is_none_is_told_the_nearest(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["config", "explain", word]) == 2
    assert hint in capsys.readouterr().err


def _run(name: str, word: VerdictWord, exit_code: int, **told: object) -> ListedRun:
    return ListedRun(Path(name), {"verdict": word.value, "exit_code": exit_code, **told})


def test_runs_are_counted_by_the_verdicts_that_are_shown() -> None:
    stalled, stopped = (
        _run("a", VerdictWord.STALLED, 1, alerts=[]),
        _run("b", VerdictWord.STOPPED, 0),
    )
    well, unseen = _run("c", VerdictWord.HEALTHY, 0), ListedRun(Path("d"), None)
    no_alerts = _run("e", VerdictWord.STOPPED, 1)
    for runs, said in (
        ([well], "1 run: none needs a person; c healthy"),
        (
            [stopped, well, stalled],
            "3 runs: 1 needs a person: a stalled (no alert yet); b stopped, c healthy",
        ),
        ([well, unseen], "2 runs: none is known to need a person; d unknown, c healthy"),
        # one that is stopped may need a person all the same; what its copy does not tell is not known
        (
            [stopped, no_alerts],
            "2 runs: 1 needs a person: e stopped (not known who has it); b stopped",
        ),
        (
            [stalled, stalled],
            "2 runs: 2 need a person: a stalled (no alert yet), a stalled (no alert yet)",
        ),
        # of many those are named that someone has to act on
        (
            [well] * 5 + [stalled],
            "6 runs: 1 needs a person: a stalled (no alert yet); 5 healthy",
        ),
        (
            [stalled] * 7,
            f"7 runs: 7 need a person: {'a stalled (no alert yet), ' * 5}2 stalled",
        ),
    ):
        assert RunList.of(runs).sentence == said
    # as the screen calls it
    assert "; big / b healthy" in RunList.of([replace(well, title="big / b")]).sentence


def test_the_first_sentence_says_who_has_what_needs_a_person_and_who_was_told() -> None:
    both = {"told": ["ana@example.org", "ben@example.org"]}
    on_call = {"who": ["ana@example.org"]}
    gone = {"found": False, "owner": "cem"}
    for alerts, said in (
        ([both, gone], "no one has taken it; told: ana@example.org, ben@example.org"),
        ([{}], "no one has taken it; told: no one yet"),
        ([gone], "no alert yet"),
        ([{"owner": "ana (by ben)", **both}, {"acknowledged_by": "cem"}], "ana, cem has it"),
        (
            [{"owner": "ana"}, both],
            "no one has taken 1 of 2 alerts; told: ana@example.org, ben@example.org",
        ),
    ):
        down = _run("a", VerdictWord.DOWN, 1, alerts=alerts, on_call=on_call)
        assert RunList.of([down]).sentence == f"1 run: 1 needs a person: a down ({said})"
    # of several it is short
    assert "told" not in RunList.of([down, down]).sentence


def test_the_first_sentence_names_the_node_that_slows_a_run_as_far_as_it_is_known() -> None:
    for state, nodes, said in (
        ("named", ["n8"], "a slow (n8)"),
        ("named", ["n8", "n9", "n10", "n11"], "a slow (n8, n9 and 2 more)"),
        ("suspected", ["n8"], "a slow (perhaps n8)"),
        ("waiting", [], "a slow (node not known yet)"),
        ("none", [], "a slow (no single node)"),
    ):
        slow = {"state": state, "nodes": nodes, "text": ""}
        run = _run("a", VerdictWord.SLOW, 0, slow_nodes=slow)
        assert RunList.of([run]).sentence == f"1 run: none needs a person; {said}"
        # of many too
        many = RunList.of([run] + [_run("b", VerdictWord.HEALTHY, 0)] * 8)
        assert many.sentence == f"9 runs: none needs a person; {said}, 8 healthy"
        # a run that does not train on is not slow
        down = _run("a", VerdictWord.DOWN, 1, slow_nodes=slow, alerts=[])
        assert "n8" not in RunList.of([down]).sentence
    # at a new start, before the ranks are compared: by what was found of the attempt before
    told = {
        "slow_nodes": {"state": "unknown"},
        "findings": [{"detector": "slow-node", "subject": "n8"}],
    }
    again = RunList.of([_run("a", VerdictWord.SLOW, 0, **told)])
    assert again.sentence.endswith("; a slow (perhaps n8)")
    # a published copy does not tell nodes
    assert RunList.of([_run("a", VerdictWord.SLOW, 0)]).sentence.endswith("; a slow")
