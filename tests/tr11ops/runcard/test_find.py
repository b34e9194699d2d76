"""Where a card's relative paths begin: one rule, whatever folder a command is typed in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.runcard import load
from tr11ops.runcard.card import (
    CardError,
    PathBase,
    RunCard,
    find_card,
    load_card,
    load_with_base,
    shipped_folder,
)
from trainer.contract.files import write_json


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a card of relative paths."""
    folder = tmp_path / "cards"
    folder.mkdir()
    write_card(folder, directory=Path("run"))
    return folder


def card_of(home: Path) -> Path:
    return home / "small.toml"


def keep_run(folder: Path, name: str) -> None:
    """What a launch into `folder`/run leaves of its card."""
    write_json(
        folder / "run" / "state" / "submissions" / "20260101-000000-00000000" / "card.json",
        {"run": {"name": name}},
    )


def test_the_folder_of_the_command_does_not_matter(home: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = {
        load_card(path, (), {}, directory=folder).run.directory
        for path, folder in (
            (card_of(home), elsewhere), (card_of(home), home), (home / "../elsewhere/../cards/small.toml", elsewhere),
        )
    }  # fmt: skip
    assert found == {str(home / "run")}


def test_relative_paths_begin_there_absolute_and_home_ones_stay(home: Path, tmp_path: Path) -> None:
    words = '[[filesystems]]\nname = "here"\nsource = "df"\npath = "disk"\n[alerts]\nurls_file = "urls"\n'
    card_of(home).write_text(
        card_of(home).read_text().replace("[data]", '[data]\ncache = "cache"')
        + words + '[hub]\ncredentials_file = "~/hub.json"\n[backup]\nstore = "/archive"\n'
    )  # fmt: skip
    card = load_card(card_of(home), (), {"HOME": "/home/me"}, directory=tmp_path)
    assert (card.data.cache, card.alerts.urls_file) == (str(home / "cache"), str(home / "urls"))
    assert card.filesystems[0].path == str(home / "disk")
    assert (card.hub.credentials_file, card.backup.store) == ("/home/me/hub.json", "/archive")


def test_what_the_command_line_sets_begins_where_it_is_typed(home: Path, tmp_path: Path) -> None:
    words = ["run.directory=other", "data.prefixes=['a', 'b']", "data.train_group=x: 1 0:1 p"]
    card = load_card(card_of(home), words[:2], {}, directory=tmp_path)
    assert card.run.directory == str(tmp_path / "other")
    assert card.data.prefixes == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert card.kill_switch == tmp_path / "other" / "kill-switch"


def test_a_link_to_a_card_is_the_same_run(home: Path, tmp_path: Path) -> None:
    link = tmp_path / "mine.toml"
    link.symlink_to(card_of(home))
    assert load_card(link, (), {}, directory=tmp_path).run.directory == str(home / "run")


@pytest.mark.parametrize("named", ["by name", "by path"])
def test_a_shipped_card_begins_where_the_command_is_typed(named: str, tmp_path: Path) -> None:
    path = find_card("demo", {}, tmp_path) if named == "by name" else shipped_folder() / "demo.toml"
    card, base = load_with_base(path, (), {}, directory=tmp_path)
    assert base == PathBase(tmp_path, "shipped")
    assert card.run.directory == str(tmp_path / "demo-run")


def test_a_copy_of_a_shipped_card_is_a_card_as_any_other(home: Path, tmp_path: Path) -> None:
    copy = home / "demo.toml"
    copy.write_bytes((shipped_folder() / "demo.toml").read_bytes())
    assert load_card(copy, (), {}, directory=tmp_path).run.directory == str(home / "demo-run")


# ------------------------------------------------------------------- runs that were launched before
def old_run(home: Path, tmp_path: Path, name: str = "small") -> tuple[RunCard, PathBase]:
    """The card, read in a folder below which a run of `name` was launched."""
    folder = tmp_path / "scratch"
    keep_run(folder, name)
    return load_with_base(card_of(home), (), {}, directory=folder)


def test_a_run_below_the_current_folder_goes_on_where_it_is(home: Path, tmp_path: Path) -> None:
    card, base = old_run(home, tmp_path)
    assert base == PathBase(tmp_path / "scratch", "recorded")
    assert card.run.directory == str(tmp_path / "scratch" / "run")


def test_what_a_command_line_overrides_moves_no_other_path(home: Path, tmp_path: Path) -> None:
    """As a rehearsal and a drill do: another name, another directory, the same data."""
    old_run(home, tmp_path)
    card_of(home).write_text(card_of(home).read_text().replace("[data]", '[data]\ncache = "cache"'))
    folder = tmp_path / "scratch"
    card = load_card(card_of(home), ["run.name=other", "run.directory=/x"], {}, directory=folder)
    assert (card.run.directory, card.data.cache) == ("/x", str(folder / "cache"))


def test_a_run_beside_the_card_comes_first(home: Path, tmp_path: Path) -> None:
    keep_run(home, "small")
    assert old_run(home, tmp_path)[1] == PathBase(home, "card")


def test_another_runs_directory_of_that_name_is_not_taken(home: Path, tmp_path: Path) -> None:
    assert old_run(home, tmp_path, "other")[1] == PathBase(home, "card")


def test_what_cannot_be_read_of_an_older_run_does_not_hide_it(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scratch" / "run" / "state" / "submissions" / "20260102-000000-00000000"
    folder.mkdir(parents=True)
    for text in ("{", "[]"):
        (folder / "card.json").write_text(text)
        assert old_run(home, tmp_path)[1].reason == "recorded"


def test_a_folder_that_cannot_be_looked_at_holds_no_run(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.is_dir raises for what it may not see, or for too long a name, before Python 3.13."""
    is_dir = Path.is_dir

    def strict(path: Path) -> bool:
        if path == home / "run" / "state":
            raise PermissionError(13, "Permission denied", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", strict)
    assert old_run(home, tmp_path)[1].reason == "recorded"


def test_other_uses_of_an_undefined_variable_are_counted() -> None:
    use = (("run", "directory"), "$A/x")
    words = [load._undefined_problem("A", [use] * count).rule for count in (1, 2, 3)]
    ends = ["", " (1 more use)", " (2 more uses)"]
    assert words == [f"the environment variable $A is not defined{end}" for end in ends]


# ----------------------------------------------------------------------------- folders that are no card
def refusal_in(folder: Path, named: str | None = None) -> str:
    with pytest.raises(CardError) as refused:
        load_card(find_card(named, {}, folder), (), {}, directory=folder)
    assert refused.value.exit_code == 2
    return str(refused.value)


def test_the_folder_of_all_runs_names_them(home: Path, tmp_path: Path) -> None:
    """The card of a run where one lies, and not its run directory too."""
    (home / "small.toml").rename(home / "tr11.toml")
    keep_run(home, "with-a-card")
    keep_run(tmp_path / "all of team a", "launched")
    said = refusal_in(tmp_path)
    runs = "--run cards/tr11.toml, --run 'all of team a/run'"
    assert (
        f"`tr11 list`, also with --json, shows all that were launched; for one of them give {runs}"
        in said
    )
    assert len(said.splitlines()) == 1


def test_a_run_directory_is_its_run(tmp_path: Path) -> None:
    keep_run(tmp_path, "launched")
    assert "for one of them give --run ." in refusal_in(tmp_path / "run")
    assert "tr11 init" in refusal_in(tmp_path / "run" / "state" / "submissions")


def test_many_runs_are_not_all_named(tmp_path: Path) -> None:
    for number in range(9):
        keep_run(tmp_path / f"run-{number}", "launched")
    assert refusal_in(tmp_path).count("--run run-") == 4


def test_a_folder_with_a_card_names_it(home: Path, tmp_path: Path) -> None:
    assert "no tr11.toml lies in it either" in refusal_in(tmp_path, str(home))
    (home / "small.toml").rename(home / "tr11.toml")
    said = refusal_in(tmp_path, str(home))
    assert f"was launched; give the card that lies in it: {home}/tr11.toml" in said
