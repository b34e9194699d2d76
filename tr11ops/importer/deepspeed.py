"""The DeepSpeed settings that a script writes for itself: JSON, read leniently, every value with
its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tr11ops.base.errors import ScriptError
from tr11ops.importer.launch import ParsedLaunch
from tr11ops.importer.reader import Script, WrittenFile
from tr11ops.importer.traced import DEEPEST_NESTING, Traced
from trainer.contract.record import Record

_NUMBER = re.compile(r"-?[0-9]+(?:_[0-9]+)+(?:\.[0-9]+)?")
_SIGNS = ("train_micro_batch_size_per_gpu", "zero_optimization", "train_batch_size")
MOST_KEYS = 1000


class DeepSpeedValue(Record):
    """One value of the file. `value` is None where only a running shell could tell it."""

    value: Any
    line: int


class DeepSpeedFile(Record):
    """The file's values by dotted key. `underscored` are lines on which a number holds `_`, which
    JSON refuses.
    """

    path: str
    line: int
    settings: Mapping[str, DeepSpeedValue]
    underscored: tuple[int, ...]

    def value(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key."""
        setting = self.settings.get(key)
        if setting is None or setting.value is None:
            return default
        return setting.value

    def line_of(self, key: str) -> int:
        """Its line; the file's first line where the key is not there."""
        setting = self.settings.get(key)
        if setting:
            return setting.line
        return self.line


def find_deepspeed(script: Script, launch: ParsedLaunch) -> DeepSpeedFile | None:
    """The file that the launched command names, or else the one that looks like it. None: the
    script writes none.

    Raises ScriptError when it is not JSON.
    """
    named = [
        use.values[0]
        for use in launch.options
        if use.option.replace("-", "_") == "__deepspeed_config" and use.values
    ]
    for file in reversed(script.files):
        if any(file.path.text == name.text for name in named):
            return _read(file)
    for file in reversed(script.files):
        if any(f'"{sign}"' in file.content.text for sign in _SIGNS):
            return _read(file)
    return None


def _read(file: WrittenFile) -> DeepSpeedFile:
    text, underscored = _mended(file.content)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = file.content.line_at(min(error.pos, len(file.content) - 1)) or file.line
        raise ScriptError(
            line, f"the DeepSpeed settings are not JSON: {error.msg}", "repair the script"
        ) from None
    except (RecursionError, ValueError):
        raise ScriptError(
            file.line,
            "the DeepSpeed settings are nested too deeply, or hold a huge number",
            "repair the script",
        ) from None
    if not isinstance(value, dict):
        raise ScriptError(
            file.line, "the DeepSpeed settings are no JSON object", "repair the script"
        )
    settings: dict[str, DeepSpeedValue] = {}
    _flatten(value, "", 0, file, settings)
    return DeepSpeedFile(file.path.for_shell(), file.line, settings, tuple(underscored))


def _mended(content: Traced) -> tuple[str, list[int]]:
    """JSON text of the same length, but for unknown parts and underscores; and the lines with
    underscores.
    """
    pieces: list[str] = []
    underscored: list[int] = []
    inside, index = False, 0
    while index < len(content):
        character = content.text[index]
        if inside:
            number = None
        else:
            number = _NUMBER.match(content.text, index)
        if content.unknown_at(index):
            start = index
            while index < len(content) and content.unknown_at(index):
                index += 1
            pieces.append("?" * (index - start) if inside else "null".ljust(index - start))
            continue
        if number is not None:
            underscored.append(content.line_at(index))
            pieces.append(number.group().replace("_", "").rjust(len(number.group())))
            index = number.end()
            continue
        if character == "\\" and inside:
            pieces.append(content.text[index : index + 2])
            index += 2
            continue
        inside ^= character == '"'
        pieces.append(character)
        index += 1
    return "".join(pieces), underscored


def _flatten(
    value: Any, prefix: str, start: int, file: WrittenFile, settings: dict[str, DeepSpeedValue]
) -> None:
    for name, item in value.items():
        key = f"{prefix}{name}"
        if key.count(".") > DEEPEST_NESTING:
            raise ScriptError(
                file.line, "the DeepSpeed settings are nested too deeply", "repair the script"
            )
        position = max(file.content.text.find(f'"{name}"', start), 0)
        if isinstance(item, dict):
            _flatten(item, key + ".", position, file, settings)
        else:
            settings[key] = DeepSpeedValue(item, file.content.line_at(position) or file.line)
        if len(settings) > MOST_KEYS:
            raise ScriptError(
                file.line,
                f"the DeepSpeed settings have more than {MOST_KEYS} keys",
                "repair the script",
            )
