"""The rules of which a dialect says when a checkpoint is whole: a closed list, each of a few words.

    has GLOB                   a file or folder below it has such a name
    lacks GLOB                 none has
    count GLOB = N             so many have; N is a number or {world_size}
    file NAME names {step}     the file beside the checkpoints holds its step, or its name
    beside NAME absent         nothing of this name lies beside it; {name} is the checkpoint's
    json NAME                  the file is whole JSON
    zip GLOB                   each such file is a whole archive, as torch.save writes it
    safetensors GLOB           each such file is as long as its header says
    index NAME                 each file of tensors that this index names is there, and is whole
    newer A B                  A was written last: no B is younger
    key WORD                   the metadata of a distributed checkpoint name such a tensor or value
    RULE or RULE               one of them holds

Everything is looked at on the disk, now. Nothing that lies in a checkpoint is run: a pickle is read
as a list of its words and never loaded.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tr11ops.base.units import counted
from trainer.contract.record import Record
from trainer.contract.state_file import read_bytes

PLACEHOLDER = re.compile(r"\{(?P<key>name|world_size|step(?=[}:]))(?::0(?P<width>[1-9]\d?)d)?\}")
BRACES = re.compile(r"\{[^}]*\}")
METADATA = ".metadata"  # of a distributed checkpoint of torch
_LARGEST_TRACKER = 1 << 16
_LARGEST_JSON = 256 << 20
_LARGEST_METADATA = 1 << 30
_LARGEST_HEADER = 100_000_000  # as the format allows


class CheckpointPlace(Record, dict=True):
    """A checkpoint on the disk: `root` is the folder of all, `name` its own name, `base` where its
    files lie (the root itself where it is no folder). `world_size`: how many ranks wrote it, None
    where no one says.
    """

    root: Path
    name: str
    base: Path
    step: int | None = None
    world_size: int | None = None

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """All files and folders below it, relative to `base`. Raises OSError."""
        return tuple(_walk(self.base))

    def found(self, pattern: str) -> list[str]:
        """Of those the ones that a pattern fits; `*` does not reach into folders."""
        return [path for path in self.paths if _fits(path, pattern)]


class RuleBroken(Exception):
    """A rule does not hold; the text says what is wrong with the checkpoint."""


class RuleDamaged(RuleBroken):
    """What the rule speaks of is there, and is damaged: that says more than what is missing."""


class RuleNotKnown(Exception):
    """Whether a rule holds cannot be told; the text says why."""


class CheckpointRule(Record):
    """One rule: its word, and what stands behind it."""

    word: str
    given: tuple[str, ...]

    def check(self, place: CheckpointPlace) -> None:
        """Raises RuleBroken, RuleNotKnown and OSError."""
        kind = _RULES[self.word]
        name = place.name
        if kind.is_pattern:
            name = glob.escape(name)
        try:
            given = [_filled(one, place, name) for one in self.given]
        except KeyError as error:
            raise RuleNotKnown(f"{error.args[0]} is not known") from None
        kind.check(place, *given)


class _Kind(Record):
    """A kind of rule: how it is written, and what looks at the checkpoint."""

    form: str
    check: Callable[..., None]
    is_pattern: bool = True


@cache
def parse_rule(text: str) -> tuple[CheckpointRule, ...]:
    """A rule, or those of which one must hold. Raises ValueError where it is none of the list."""
    return tuple(_parse_one(part.strip()) for part in re.split(r"\s+or\s+", text))


def check_rule(text: str, place: CheckpointPlace) -> None:
    """Raises RuleBroken where a rule does not hold of a checkpoint, RuleNotKnown where that cannot be told,
    and OSError.
    """
    faults: list[RuleBroken] = []
    unknown: list[str] = []
    for rule in parse_rule(text):
        try:
            rule.check(place)
        except RuleBroken as fault:
            faults.append(fault)
        except RuleNotKnown as fault:
            unknown.append(str(fault))
        else:
            return
    if unknown:
        raise RuleNotKnown("; ".join(unknown))
    for broken in faults:
        if isinstance(broken, RuleDamaged):
            raise broken
    raise faults[0]


_OF_CONTENT = frozenset({"has", "count", "json", "index", "zip", "safetensors", "newer"})


def files_named(texts: Iterable[str], place: CheckpointPlace) -> set[str]:
    """The files that rules name by the checkpoint's own name or step: of those that lie loose in one
    folder, the ones that belong to it. Raises OSError.
    """
    rules = [rule for text in texts for rule in parse_rule(text) if rule.word in _OF_CONTENT]
    words = [word for rule in rules for word in rule.given if "{name}" in word or "{step" in word]
    found: set[str] = set()
    for word in words:
        pattern = _filled(word, place, glob.escape(place.name))
        found.update(path for path in place.found(pattern) if (place.base / path).is_file())
    return found


def _parse_one(text: str) -> CheckpointRule:
    word = text.partition(" ")[0]
    kind = _RULES.get(word)
    if kind is None:
        raise ValueError(f"{text!r} is no rule: it begins with one of {', '.join(_RULES)}")
    match = re.fullmatch(kind.form, text)
    if match is None:
        raise ValueError(f"{text!r}: a rule of `{word}` is written otherwise")
    for braces in BRACES.findall(text):
        placeholder = PLACEHOLDER.fullmatch(braces)
        if placeholder is None or (placeholder["width"] and placeholder["key"] != "step"):
            raise ValueError(
                f"{text!r}: {braces} is none of {{name}}, {{step}}, {{step:06d}}, {{world_size}}"
            )
    return CheckpointRule(word, match.groups())


# ----------------------------------------------------------------------------- the list
def _has(place: CheckpointPlace, pattern: str) -> None:
    if not place.found(pattern):
        raise RuleBroken(f"no {pattern} in it")


def _lacks(place: CheckpointPlace, pattern: str) -> None:
    found = place.found(pattern)
    if found:
        raise RuleBroken(f"{found[0]} is in it")


def _count(place: CheckpointPlace, pattern: str, wanted: str) -> None:
    found = len(place.found(pattern))
    if found > int(wanted):
        raise RuleNotKnown(
            f"{counted(found, 'file')} {pattern} for {wanted}: is the world size right?"
        )
    if found < int(wanted):
        raise RuleBroken(f"{counted(found, 'file')} {pattern}, where {wanted} belong to it")


def _names(place: CheckpointPlace, file: str) -> None:
    try:
        text = read_tracker(place.root / file)
    except FileNotFoundError:
        raise RuleBroken(f"there is no {file}, which is written when a save is whole") from None
    if not text:
        raise RuleNotKnown(f"{file} is empty: a crash cut it")
    if text == place.name:
        return
    said = _leading_number(text)
    if said is None or place.step is None or place.step > said:
        raise RuleBroken(f"{file} names {text[:40]}, not this one")
    if place.step < said:
        raise RuleNotKnown(f"{file} names {text[:40]} by now, and says nothing of older ones")


def read_tracker(path: Path) -> str:
    """What a file says that names a checkpoint. Raises OSError, also where it is no plain file."""
    return read_bytes(path, _LARGEST_TRACKER).decode("utf-8", errors="replace").strip()


def _absent(place: CheckpointPlace, name: str) -> None:
    if os.path.lexists(place.root / name):
        raise RuleBroken(f"{name} lies beside it, which its trainer removes at the end of a save")


def _index(place: CheckpointPlace, name: str) -> None:
    content = _read_json(place, name)
    try:
        files = sorted({str(file) for file in content["weight_map"].values()})
    except (TypeError, KeyError, AttributeError):
        raise RuleDamaged(f"{name} is no index of tensors") from None
    for file in files:
        _safetensors(place, glob.escape(file))


def _read_json(place: CheckpointPlace, name: str) -> Any:
    path = place.base / name
    if not path.exists():
        raise RuleBroken(f"no {name} in it")
    if not path.is_file() or path.stat().st_size > _LARGEST_JSON:
        raise RuleNotKnown(f"{name} is no file that can be read")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise RuleDamaged(f"{name} is not whole JSON") from None


def _zip(place: CheckpointPlace, pattern: str) -> None:
    for path in _some(place, pattern):
        try:
            with zipfile.ZipFile(place.base / path) as archive:
                archive.infolist()
        except zipfile.BadZipFile:
            raise RuleDamaged(f"{path} was cut: it is no whole archive") from None


def _safetensors(place: CheckpointPlace, pattern: str) -> None:
    for path in _some(place, pattern):
        fault = _tensors_fault(place.base / path)
        if fault:
            raise RuleDamaged(f"{path} is not whole: {fault}")


def _tensors_fault(path: Path) -> str:
    """Why a file of safetensors is not as long as its header says; "" where it is. Raises OSError.

    It has the header's length in 8 bytes, the header (JSON), then the tensors without a gap. The
    format's own library needs numpy or torch for this.
    """
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LARGEST_HEADER:
            return f"its header would take {length} bytes"
        head = stream.read(length)
    try:
        header = json.loads(head)
        places = sorted(
            (int(begin), int(end))
            for name, entry in header.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its header was cut, or is none"
    reached = 0
    for begin, end in places:
        if begin != reached or end < begin:
            return f"its header leaves a gap behind byte {reached}"
        reached = end
    expected, there = 8 + length + reached, path.stat().st_size
    if expected != there:
        return f"{there} of {expected} bytes are there"
    return ""


def _newer(place: CheckpointPlace, last: str, others: str) -> None:
    for path in _some(place, last):
        moment = (place.base / path).stat().st_mtime_ns
        for other in place.found(others):
            if (place.base / other).stat().st_mtime_ns > moment:
                raise RuleDamaged(f"{other} was written after {path}: a save into it was cut")


def _key(place: CheckpointPlace, word: str) -> None:
    path = place.base / METADATA
    if not path.exists():
        raise RuleBroken(f"no {METADATA} in it")
    if not path.is_file() or path.stat().st_size > _LARGEST_METADATA:
        raise RuleNotKnown(f"{METADATA} is no file that can be read")
    if not any(_is_below(name, word) for name in _words_of(path)):
        raise RuleBroken(f"it holds no {word}")


_RULES: Mapping[str, _Kind] = {
    "has": _Kind(r"has (\S+)", _has),
    "lacks": _Kind(r"lacks (\S+)", _lacks),
    "count": _Kind(r"count (\S+) = (\d+|\{world_size\})", _count),
    "file": _Kind(r"file (\S+) names \{step\}", _names, is_pattern=False),
    "beside": _Kind(r"beside (\S+) absent", _absent, is_pattern=False),
    "json": _Kind(r"json (\S+)", _read_json, is_pattern=False),
    "index": _Kind(r"index (\S+)", _index, is_pattern=False),
    "zip": _Kind(r"zip (\S+)", _zip),
    "safetensors": _Kind(r"safetensors (\S+)", _safetensors),
    "newer": _Kind(r"newer (\S+) (\S+)", _newer),
    "key": _Kind(r"key (\S+)", _key),
}


# ----------------------------------------------------------------------------- reading
def _filled(text: str, place: CheckpointPlace, name: str) -> str:
    """A word of a rule with the checkpoint's own `name`, step and world size. Raises KeyError,
    which says what is not known.
    """
    values = {"name": name, "step": place.step, "world_size": place.world_size}
    titles = {"step": "its step", "world_size": "the number of ranks that wrote it (--world-size)"}

    def value(match: re.Match[str]) -> str:
        found = values[match["key"]]
        if found is None:
            raise KeyError(titles[match["key"]])
        if match["width"]:
            return f"{found:0{match['width']}d}"
        return str(found)

    return PLACEHOLDER.sub(value, text)


def _some(place: CheckpointPlace, pattern: str) -> list[str]:
    """The files that a pattern fits. Raises RuleBroken where there are none."""
    found = [path for path in place.found(pattern) if (place.base / path).is_file()]
    if not found:
        raise RuleBroken(f"no {pattern} in it")
    return found


def _fits(path: str, pattern: str) -> bool:
    return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)


def _walk(base: Path) -> Iterator[str]:
    """All below a folder; what cannot be looked into is an OSError, and not nothing."""
    for folder, folders, files in os.walk(base, onerror=_raise):
        for name in (*folders, *files):
            yield os.path.relpath(f"{folder}/{name}", base)


def _raise(error: OSError) -> None:
    raise error


def _leading_number(text: str) -> int | None:
    match = re.search(r"(?<!\d)\d{1,18}(?!\d)", text)
    if match is None:
        return None
    return int(match[0])


def step_in(path: Path, key: str) -> int | None:
    """The whole number that stands under a key in the pickle of a torch archive, which is not loaded;
    None where there is none. Raises OSError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
            if not names or archive.getinfo(names[0]).file_size > _LARGEST_METADATA:
                return None
            content = archive.read(names[0])
        return _number_after(key, content)
    except (zipfile.BadZipFile, ValueError):
        return None


def _number_after(key: str, content: bytes) -> int | None:
    """The first number that follows a key, or the memo of it, at once. Raises ValueError where it is no
    whole pickle.
    """
    memo: set[object] = set()  # the numbers under which the pickle remembers the key
    remembered = 0
    is_next = False
    for operation, argument, _ in pickletools.genops(content):
        if operation.name in _PUTS:
            if is_next:
                memo.add(remembered if argument is None else argument)
            remembered += 1
            continue
        if is_next and operation.name in _NUMBERS and isinstance(argument, int) and argument >= 0:
            return argument
        is_next = argument == key or (operation.name in _GETS and argument in memo)
    return None


_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_NUMBERS = frozenset({"INT", "LONG", "LONG1", "LONG4", "BININT", "BININT1", "BININT2"})


def _words_of(path: Path) -> Iterator[str]:
    """The texts in a pickle, which is not loaded. Raises RuleBroken where it was cut."""
    with path.open("rb") as file:
        try:
            for _, argument, _ in pickletools.genops(file):
                if isinstance(argument, str):
                    yield argument
        except ValueError:
            raise RuleDamaged(f"{path.name} was cut: it is no whole pickle") from None


def _is_below(name: str, word: str) -> bool:
    return name == word or name.startswith(f"{word}.")
