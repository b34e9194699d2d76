"""The family of trainers that a command belongs to, and what its words say: output folder, last step,
saves, and how it is told to resume. By the words of the dialects, and by a log where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from tr11ops.dialects.dialect import Dialect, dialect_named, names
from tr11ops.dialects.reading import dialect_in, total_in, trainer_in
from tr11ops.importer.place_cluster import number_of
from tr11ops.importer.settings_files import SettingsFile, settings_file
from tr11ops.importer.traced import Traced
from tr11ops.importer.training_command import LauncherOption
from trainer.contract.record import Record

_HEAD = 4 << 20  # bytes of a log that are looked at


class Recognised(Record):
    """The families that a command or a log may be of; one alone is an answer."""

    names: tuple[str, ...] = ()

    @property
    def only(self) -> str:
        """The family, where there is but one."""
        if len(self.names) == 1:
            return self.names[0]
        return ""


class SeenLog(Record):
    """What a log says: the family of its lines, and the training's last step, where it tells it."""

    path: str
    family: Recognised
    total: int | None


class WordUse(Record):
    """One option among a trainer's words: where it stands, how many words it takes, its value."""

    place: int
    count: int
    option: LauncherOption

    @property
    def value(self) -> Traced:
        return self.option.value or Traced()


def family_of(text: str) -> Recognised:
    """The families with the most signs in a command's text."""
    best = 0
    found = []
    for name in names():
        command = dialect_named(name).command
        if command.never and re.search(command.never, text):
            continue
        count = sum(pattern.search(text) is not None for pattern in command.patterns)
        if count > best:
            best = count
            found = [name]
        elif count and count == best:
            found.append(name)
    return Recognised(tuple(found))


def look_at_log(path: Path) -> SeenLog:
    """Read the head of a log. Raises OSError."""
    with path.open("rb") as stream:
        text = stream.read(_HEAD)
    steps = dialect_in(text)
    said = trainer_in(text) or (steps.name if steps is not None else None)
    families = tuple(name for name in names() if said in {name, dialect_named(name).steps})
    return SeenLog(str(path), Recognised(families), total_in(text))


def uses_of(words: Sequence[Traced], options: Sequence[str]) -> Iterator[WordUse]:
    """Each use of one of these options, `--a=b`, `--a b` or `a.b=c`; dashes and underscores are one."""
    wanted = {_plain(option) for option in options}
    for place, word in enumerate(words):
        name, equals, _ = word.text.partition("=")
        if _plain(name) not in wanted or word.unknown_at(0):
            continue
        if equals:
            yield WordUse(place, 1, LauncherOption(name, (word,), word.cut(len(name) + 1)))
        elif place + 1 < len(words) and not words[place + 1].text.startswith("-"):
            following = words[place + 1]
            yield WordUse(place, 2, LauncherOption(name, (word, following), following))
        else:
            yield WordUse(place, 1, LauncherOption(name, (word,)))


def last_use(words: Sequence[Traced], options: Sequence[str]) -> WordUse | None:
    """The use that counts: of the strongest option that is there, the last one."""
    for option in options:
        found = list(uses_of(words, [option]))
        if found:
            return found[-1]
    return None


def settings_in(
    words: Sequence[Traced], options: Sequence[str], text_at: Callable[[str], str | None]
) -> SettingsFile | None:
    """The file of settings that a command names by one of these options, or, where one is an ending
    such as `*.yaml`, by a word of its own; None where it names none.
    """
    name = _named_file(words, options)
    if name is None:
        return None
    if not name.is_known:
        problem = "its name is only known in the job, so what it says is not known"
        return SettingsFile(name.for_shell(), name.line, problem=problem)
    return settings_file(name, text_at)


def _named_file(words: Sequence[Traced], options: Sequence[str]) -> Traced | None:
    use = last_use(words, [option for option in options if not option.startswith("*")])
    if use is not None and use.value:
        return use.value
    endings = tuple(option[1:] for option in options if option.startswith("*"))
    for before, word in pairwise(words):
        is_value = before.text.startswith("-") and "=" not in before.text
        if word.text.endswith(endings) and "=" not in word.text and not is_value:
            return word
    return None


def steps_between_saves(dialect: Dialect, use: WordUse | None, text: str) -> WordUse | None:
    """The `use` of the option of the steps between two saves, where it tells when the trainer saves."""
    command = dialect.command
    if command.if_saved and not re.search(command.if_saved, text):
        return None
    if command.unless_saved and re.search(command.unless_saved, text):
        return None
    if use is None or number_of(use.value) is None:
        return None
    return use


def _plain(option: str) -> str:
    return option.replace("_", "-")
