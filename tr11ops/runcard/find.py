"""Which card a command line means, and the folder that the card's relative paths are taken from:
one rule for all.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tr11ops.base.shipped import shipped
from trainer.config.card import CardError, Problem, nearest
from trainer.contract.record import JsonObject, Record
from trainer.contract.state_file import read_json

CARD_FILE = "tr11.toml"
SUBMISSIONS = Path("state") / "submissions"  # every run that was launched has it
DEEPEST = 4  # folders below a root in which run directories are looked for
RUNS_NAMED = 4  # by a refusal
DEEPEST_NAMED = 2  # of them: a search for the sake of a refusal is a short one


def shipped_folder() -> Path:
    """The folder of the cards that come with tr11: inside the package when installed, `slurm/` in a
    checkout.
    """
    return shipped("slurm")


def shipped_cards() -> tuple[str, ...]:
    """Names that `--run NAME` knows anywhere."""
    return tuple(sorted(path.stem for path in shipped_folder().glob("*.toml")))


def find_card(option: str | None, environment: Mapping[str, str], directory: Path) -> Path:
    """The card to use: `--run`, else $TR11_RUN, else tr11.toml in `directory`.

    The first two may be a path (a run directory stands for what was launched from it last) or the
    name of a shipped card; a path wins. Raises CardError when
    there is none.
    """
    # an unset variable of a script; the default card may be another run, which no one meant
    if option == "":
        raise CardError(
            "command line",
            [Problem("--run", option, "is empty", "give a path, or leave --run out")],
        )
    named = option or environment.get("TR11_RUN")
    origin = "--run" if option else "$TR11_RUN"
    if not named:
        default = directory / CARD_FILE
        if default.is_file():
            return default
        rule = "there is no tr11.toml here and neither --run nor $TR11_RUN is given"
        fix = f"write one with `tr11 init`, use --run PATH, or {_shipped_names()}"
        if runs := _runs_in(directory):
            names = ", --run ".join(runs)
            fix = f"`tr11 list`, also with --json, shows all that were launched; for one of them give --run {names}"
        raise CardError(str(directory), [Problem("run card", None, rule, fix)])
    if "\0" not in named and (directory / named).exists():
        return directory / named
    stem = named.removesuffix(".toml")
    if stem in shipped_cards():
        return shipped_folder() / f"{stem}.toml"
    near = nearest(stem, shipped_cards())
    if near:
        fix = f"did you mean {near!r}?"
    else:
        fix = f"{_to_make(named)}give another path, or {_shipped_names()}"
    raise CardError(
        "command line", [Problem(origin, named, "is neither a file nor a shipped card", fix)]
    )


def run_directories(root: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """The run directories at and below `root`, by name; none inside another. Raises OSError for a
    folder unread.
    """
    if (root / SUBMISSIONS).is_dir():
        yield root
        return
    if deepest == 0:
        return
    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in folders:
        if not name.startswith("."):
            yield from run_directories(root / name, deepest - 1)


def _runs_in(folder: Path) -> list[str]:
    """What `--run` takes of the runs in a folder's folders: their cards, then the run directories
    that no card lies beside.
    """
    found = sorted(folder.glob(f"*/{CARD_FILE}"))
    homes = {card.parent for card in found}
    with suppress(OSError):
        for run in run_directories(folder, DEEPEST_NAMED):
            if homes.isdisjoint((run, *run.parents)):
                found.append(run)
    return [shlex.quote(str(path.relative_to(folder))) for path in found[:RUNS_NAMED]]


def _to_make(named: str) -> str:
    """How to get a card that is named like a file and is not there; the name is shown with the key
    already.
    """
    if named.endswith(".toml"):
        return "write one with `tr11 init -o PATH`, "
    return ""


def _shipped_names() -> str:
    return "a shipped card: " + ", ".join(shipped_cards())


# ----------------------------------------------------------------------------- relative paths
class PathBase(Record):
    """The folder that a card's relative paths are taken from, and why that one.

    card: it holds the card. shipped: the card comes with tr11, so it is where the command is typed.
    recorded: a run of this card was launched from the current folder when paths were taken from
    there, and goes on where it is.
    """

    folder: Path
    reason: Literal["card", "shipped", "recorded"]


def base_of(card: Path, tables: Mapping[str, Any], current: Path) -> PathBase:
    """Where the relative paths of `card` begin for a command that is typed in `current`.

    `tables` is what the card itself says, its variables replaced: what a command line overrides moves no other path.
    The folder of a card that is a link is the folder of the
    file behind it, so that one card is one run. A shipped card is the same by its name and by its path.
    """
    folder = _folder_of(card, current)
    if os.path.realpath(folder) == os.path.realpath(shipped_folder()):
        return PathBase(current, "shipped")
    run = tables.get("run")
    if isinstance(run, Mapping):
        name, directory = (run.get("name"), run.get("directory"))
    else:
        name, directory = (None, None)
    if (
        isinstance(name, str)
        and isinstance(directory, str)
        and "\0" not in directory
        and not Path(directory).is_absolute()  # else both are one, which need not answer
        and os.path.realpath(folder) != os.path.realpath(current)
        and not _is_folder(folder / directory / "state")
        and _has_run(current / directory, name)
    ):
        return PathBase(current, "recorded")
    return PathBase(folder, "card")


def _folder_of(card: Path, current: Path) -> Path:
    """The card's folder, as it was named where that is plain."""
    path = current / card
    if path.is_symlink() or ".." in path.parts:
        path = Path(os.path.realpath(path))
    return path.parent


def _is_folder(path: Path) -> bool:
    """Whether it is a folder that can be seen; a path that is not allowed, or too long, is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _has_run(directory: Path, name: str) -> bool:
    """Whether a run of this name was launched into `directory`, by the newest submission that can
    be read.
    """
    run = (newest_launch(directory) or {}).get("run")
    return isinstance(run, dict) and run.get("name") == name


def newest_launch(directory: Path) -> JsonObject | None:
    """The resolved card of the newest launch from a run directory whose card can be read; None
    where there is none.
    """
    with suppress(OSError):
        for path in sorted((directory / SUBMISSIONS).glob("*/card.json"), reverse=True):
            with suppress(OSError, ValueError):
                card = read_json(path)
                if card is not None:
                    return card
    return None
