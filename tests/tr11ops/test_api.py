"""tr11 from Python: it sees what `tr11 status` sees, and changes a run by the command itself."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pins.commands import beside, typed
from tests.pins.recording import unpacked
from tr11ops import api
from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.status.run_list import newest_card
from trainer.config.card import CardError

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
# what two looks tell alike, whenever they are made
TOLD = (
    "verdict",
    "why",
    "iteration",
    "loss",
    "jobs",
    "exclusions",
    "alerts",
    "kill_switch",
    "unknown",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the recorded run, in which everything is typed."""
    found = unpacked(tmp_path_factory.mktemp("recorded").resolve())
    with beside(found):
        yield found


def test_a_look_is_that_of_tr11_status(folder: Path) -> None:
    said = json.loads(typed(("status", "--json", "--scheduler", "local"))[1])
    run = api.open_run("tr11.toml", scheduler="local")
    seen = run.look()
    told = seen.document()
    assert said.keys() == told.keys()
    assert {key: said[key] for key in TOLD} == {key: told[key] for key in TOLD}
    assert (run.name, seen.exit_code, str(run.verdict().word)) == ("small", 0, said["verdict"])
    assert seen.status.command("resume") == "tr11 resume --run tr11.toml"


def test_steps_come_in_their_order_with_their_numbers(folder: Path) -> None:
    steps = list(api.open_run("tr11.toml", scheduler="local").steps())
    assert [step.iteration for step in steps] == [*range(1, 39)]
    assert steps[-1].number("lm_loss") == pytest.approx(2.7689, abs=1e-4)


def test_a_run_directory_stands_for_what_was_launched_from_it(folder: Path) -> None:
    run = api.open_run(folder / "run", scheduler="local")
    launched = newest_card(folder / "run")
    assert run.card == launched and not run.is_copy
    code, text = typed(("status", "--run", "run", "--json", "--scheduler", "local"))
    assert code == 0 and json.loads(text)["card"]["name"] == "run"
    with pytest.raises(CardError, match="is a folder"):
        api.open_run(folder / "scheduler")


def test_a_change_is_the_command_and_is_previewed(folder: Path) -> None:
    run = api.open_run(folder / "run", scheduler="local")
    journal = sorted((folder / "run" / "journal").iterdir())
    plan = run.kill("new data", dry_run=True)
    assert (plan.exit_code, plan.document["action"]) == (0, "dry-run")
    assert plan.lines[-1] == "nothing was changed (--dry-run)" and plan.checked() is plan
    assert sorted((folder / "run" / "journal").iterdir()) == journal
    refused = run.exclude(["nowhere1"], "a try", dry_run=True)
    assert refused.exit_code and "nowhere1" in refused.lines[-1]
    with pytest.raises(Refusal, match="nowhere1") as told:
        refused.checked()
    assert told.value.exit_code == refused.exit_code


def test_a_copy_is_seen_where_it_is_and_never_changed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "copy")
    [run] = api.runs_below(tmp_path)
    assert isinstance(run, api.Run) and run.is_copy
    assert run.directory.root == tmp_path / "copy" and run.look().status.iteration == 38
    assert len(list(run.steps())) == 38
    with pytest.raises(Refusal, match="is a copy"):
        run.pause()


def test_runs_below_a_folder_come_with_those_that_cannot_be_read(
    folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken" / "state" / "submissions" / "20260101-000000-00000000"
    broken.mkdir(parents=True)
    (broken / "card.json").write_text("{")
    [found] = api.runs_below(tmp_path)
    assert isinstance(found, Refusal) and str(found).startswith(f"{tmp_path / 'broken'}: ")
    assert [one.name for one in api.runs_below(folder) if isinstance(one, api.Run)] == ["small"]


def test_another_scheduler_is_refused(folder: Path) -> None:
    with pytest.raises(WrongUsage, match="must be one of"):
        api.open_run("tr11.toml", scheduler="pbs")


def test_the_example_of_the_page_runs_as_it_stands(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [example] = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(DOCS), "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith("stopped ") and "nothing was changed (--dry-run)" in said
