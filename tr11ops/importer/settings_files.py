"""Files of settings that a training's command names: the trainer's own (YAML, TOML, JSON), and those of
its launcher. They are read as data alone; what cannot be read says nothing, and why is told.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.traced import Traced
from trainer.contract.record import Record

_MOST_KEYS = 2000
_MOST_LOOKED_AT = 20_000
_DEEPEST = 8
_MOST_ALIASES = 20  # with which no merge of merges becomes large
# what OmegaConf, Jinja or a shell would fill in
_FILLED_IN_LATER = re.compile(r"\$\{|\{\{|\$\(")
_SUFFIX = re.compile(r"\.(ya?ml|json|toml)$", re.IGNORECASE)


class SettingsFile(Record):
    """A file of settings as it is named. `words`: its keys as words of a command, `--a.b=value`.
    `problem`: why nothing is known of it, "" where it was read.
    """

    name: str
    line: int
    content: Mapping[str, Any] = {}
    words: tuple[Traced, ...] = ()
    problem: str = ""


def settings_file(name: Traced, text_at: Callable[[str], str | None]) -> SettingsFile:
    """The file of this name. `text_at` gives its text, None where it is not at hand, and raises
    ConversionProblem where it cannot be read.
    """
    shown = name.text
    line = name.line
    try:
        text = text_at(shown)
        if text is None:
            raise ConversionProblem("is not at hand")
        content = read_settings(shown, text)
    except ConversionProblem as problem:
        return SettingsFile(shown, line, problem=f"it {problem}, so what it says is not known")
    return SettingsFile(shown, line, content, words=tuple(_words(content, line)))


def read_settings(name: str, text: str) -> Mapping[str, Any]:
    """Keys and values of a file, by the end of its name; YAML where that says nothing, as JSON is
    YAML too. Raises ConversionProblem with what is wrong.
    """
    suffix = _SUFFIX.search(name)
    kind = "yaml"
    if suffix is not None:
        kind = suffix[1].lower().replace("yml", "yaml")
    try:
        content = _READERS[kind](text)
    except RecursionError:
        raise ConversionProblem(f"is nested too deeply for {kind.upper()}") from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        what = " ".join(str(error).split())[:120]
        raise ConversionProblem(f"is no {kind.upper()} ({what})") from None
    if not isinstance(content, Mapping):
        raise ConversionProblem("holds no keys")
    return content


def whole_number(value: Any) -> int | None:
    """A number of a settings file, where it is a whole one above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return None
    return value


def _yaml(text: str) -> Any:
    """Raises ValueError for anything but plain data: other tags, and aliases that grow without end."""
    import yaml  # only a script with such a file needs it

    class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.aliases += self.check_event(yaml.AliasEvent)
            if self.aliases > _MOST_ALIASES:
                raise ValueError(f"it has more than {_MOST_ALIASES} aliases")
            return super().compose_node(parent, index)

    try:
        return yaml.load(text, Loader=PlainLoader)
    except yaml.MarkedYAMLError as error:
        place = ""
        if error.problem_mark is not None:
            place = f"line {error.problem_mark.line + 1}: "
        raise ValueError(f"{place}{error.problem or error}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


_READERS: Mapping[str, Callable[[str], Any]] = {
    "yaml": _yaml,
    "json": json.loads,
    "toml": tomllib.loads,
}


def _words(content: Mapping[str, Any], line: int) -> Iterator[Traced]:
    for key, value in islice(_flat(content), _MOST_KEYS):
        is_open = isinstance(value, str) and _FILLED_IN_LATER.search(value) is not None
        yield Traced.join(
            [Traced.of(f"--{key}=", line), Traced.of(str(value), line, unknown=is_open)]
        )


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, str | int | float]]:
    """Each value and the names that lead to it. What refers to itself, or to the same many times, is
    looked at to a certain depth and number.
    """
    looked_at = 0
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting and looked_at < _MOST_LOOKED_AT:
        looked_at += 1
        name, value, depth = waiting.pop()
        if isinstance(value, Mapping):
            if depth < _DEEPEST and len(value) <= _MOST_KEYS:
                inner = [
                    (f"{name}.{key}" if name else str(key), one, depth + 1)
                    for key, one in value.items()
                ]
                waiting += reversed(inner)
        elif isinstance(value, str | int | float):
            yield name, value
