"""The dialect of a trainer: what its lines, its checkpoints and its end mean, and how it is stopped.

One file of `families/` for each family of trainers, or a file of a person's own. What a dialect does
not say is not known of its trainer, and no act follows from it. Lines of steps are read by the table
of `tr11ops.dialects`, which a dialect names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from tr11ops.base.errors import WrongUsage
from tr11ops.dialects.rules import parse_rule
from tr11ops.dialects.table import dialects
from trainer.contract.documents import record_of
from trainer.contract.record import Amount, Count, JsonObject, Record

FAMILIES = Path(__file__).with_name("families")

Mark = Literal["loading", "resumed", "scratch", "saving", "saved", "evaluating"]
Ending = Literal["finished", "stopped", "loop-ended"]
Sequel = Literal["relaunch", "look", "hold"]
_STEP = re.compile(r"\{step(?::0(?P<width>[1-9]\d?)d)?\}")
_TRACKED = re.compile(r"file (?P<file>\S+) holds \{(?:step|name)\}")
_MOST_DIGITS = 15  # of a step
_STOPS = r"signal [A-Z0-9]+|file \S+|next checkpoint"


class CheckpointName(Record, dict=True):
    """How checkpoints are called: `step-{step}`, `iter_{step:07d}`, `*step={step}*.ckpt`.

    `*` stands for any text. A name without `{step}` is that of a checkpoint that does not say its
    step.
    """

    text: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What a name fits; the group `step` is the step's digits, where a name has them."""
        place = _STEP.search(self.text)
        if place is None:
            return re.compile(_with_stars(self.text))
        digits = r"\d+"
        if place["width"]:
            digits = rf"\d{{{place['width']},}}"
        before, after = self.text[: place.start()], self.text[place.end() :]
        return re.compile(f"{_with_stars(before)}(?P<step>{digits}){_with_stars(after)}")

    def of_step(self, step: int) -> str:
        """The name of a checkpoint of this step, "" where it holds more than the step."""
        place = _STEP.search(self.text)
        if place is None or "*" in self.text:
            return ""
        digits = f"{step:0{place['width'] or 1}d}"
        return f"{self.text[: place.start()]}{digits}{self.text[place.end() :]}"

    def label(self, step: int) -> str:
        """A checkpoint of this step as screens name it: by its name, with the step where that is not
        plain from it.
        """
        name = self.of_step(step)
        if not name:
            return f"step {step}"
        if name.endswith(f"-{step}"):
            return name
        return f"{name} (step {step})"

    @property
    def has_step(self) -> bool:
        return _STEP.search(self.text) is not None

    def fits(self, name: str) -> bool:
        """Whether a file or folder of this name is a checkpoint."""
        return self.pattern.fullmatch(name) is not None

    def step_of(self, name: str) -> int | None:
        """The step that a name says; None where it says none."""
        match = self.pattern.fullmatch(name)
        if match is None or not self.has_step:
            return None
        if len(match["step"]) > _MOST_DIGITS or not match["step"].isascii():
            return None
        return int(match["step"])


class CheckpointRules(Record, dict=True):
    """Where checkpoints lie, when one is whole, and which one the trainer takes.

    `layout`: a folder each, a file each, or several files of one folder that belong together, of
    which `name` is one. `folder`: below the trainer's own output folder. `complete`: rules (see
    `tr11ops.dialects.rules`), all of which hold for a whole one; `resumable`: which besides hold for
    one that a training can go on from. `quiet`: seconds without a change after which a whole one is
    taken to be written.

    `newest`: what the trainer itself resumes from: `highest`, the highest step; `only`, there is but
    one; `file NAME holds {step}` (or `{name}`), the one that this file names; `told`, the one its command names.
    `believes`: the rules that the trainer itself goes by when it looks for one to resume from; none
    where it takes whatever bears the name, None where that is not known. `deleted_by`: who deletes
    old ones. `rewritten`: a save overwrites the file of the one before, so that a link to it keeps
    nothing. `world_size`: whether it resumes on another number of ranks. `weights`: patterns of the
    names of files that hold its weights, or are needed to load them; none where one cannot tell.
    `step_key`: where the name says no step, under which key the file, an archive of torch, has it.
    """

    name: str
    complete: tuple[str, ...]
    layout: Literal["folder", "file", "files"] = "folder"
    folder: str = ""
    resumable: tuple[str, ...] = ()
    newest: str = "highest"
    believes: tuple[str, ...] | None = None
    deleted_by: Literal["trainer", "no one", "unknown"] = "unknown"
    rewritten: bool = False
    world_size: Literal["any", "same", "unknown"] = "unknown"
    quiet: Amount = 30.0
    weights: tuple[str, ...] = ()
    step_key: str = ""

    @cached_property
    def names(self) -> CheckpointName:
        return CheckpointName(self.name)

    @property
    def lacks_belief(self) -> bool:
        """Whether no one can tell which one it takes where the newest of several is broken."""
        return self.believes is None and self.newest == "highest"

    @property
    def tracker(self) -> str:
        """The name of the file that names the newest; "" where there is none."""
        match = _TRACKED.fullmatch(self.newest)
        if match is None:
            return ""
        return match["file"]

    def tracked(self, name: str, step: int | None) -> str:
        """What that file says where a checkpoint of this name and step is the newest."""
        if self.newest.endswith("{step}"):
            return str(step)
        return name


class StopRule(Record):
    """How the trainer is asked to save and leave.

    `how`: `signal NAME`, `file PATH`, or `next checkpoint`, which means that it cannot be asked: it
    is ended once its next checkpoint is whole. `needs`: a word that its command must hold for
    `how` to work; without it, it cannot be asked. `agrees`: whether the ranks agree on the step at
    which they stop.
    """

    how: str
    needs: str = ""
    agrees: bool | None = None


class ResumeWords(Record):
    """How a program of a family, whose command has the pattern `sign`, is told what to resume from."""

    sign: str
    resume: tuple[str, ...]


class CommandWords(Record, dict=True):
    """What the words of its command mean, for a card that is made of a script, or without one.

    `signs`: patterns by which the family is recognised; `never`: one by which it is not. `folder`,
    `steps`, `interval`: options of the output folder, the last step and the steps between two
    saves. `checkpoints`: options of the folder of checkpoints in the output folder. `if_saved`: a
    pattern without which, `unless_saved`: one with which `interval` does not tell when it saves.
    `resume`: options by which it is told what to begin with; `resumes_if`: a pattern of a command
    that resumes by itself. `devices`: an option of the workers on a node. `config`: options of a file of its
    settings, whose keys are those options; `*.yaml`: a word with that ending is one. `world`: options
    whose product is the number of ranks. `tools`: programs of the family that are told to resume in
    another way.

    `starts`: how tr11 starts it in the place of srun, which it would take for a supervisor.
    `example`: a command, for a card that is made without a script; `output`: the folder that it writes into.
    """

    signs: tuple[str, ...] = ()
    never: str = ""
    folder: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    interval: tuple[str, ...] = ()
    if_saved: str = ""
    unless_saved: str = ""
    resume: tuple[str, ...] = ()
    resumes_if: str = ""
    devices: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    world: tuple[str, ...] = ()
    tools: tuple[ResumeWords, ...] = ()
    starts: Literal["", "torchrun"] = ""
    example: tuple[str, ...] = ()
    output: str = ""

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """Those of `signs`."""
        return tuple(map(re.compile, self.signs))


class EndLine(Record):
    """A line that tells of an end. `loop-ended`: it is printed at the end of the loop, whether the
    training was finished or not.
    """

    line: str
    means: Ending


class Ends(Record):
    """What tells how a launch ended: lines, and exit codes that have a meaning of their own."""

    lines: tuple[EndLine, ...] = ()
    exit: Mapping[str, Sequel] = {}


class Example(Record):
    """For the tests: a line as it was printed, and the mark or the end that it is, or the number of the
    step as it stands there; or the files of a checkpoint with their text (`ZIP`: an archive as torch.save
    writes one; `PICKLE` and words: a pickle with them), and what it is with them.
    """

    line: str = ""
    step: Count | None = None
    mark: Mark | None = None
    end: Ending | None = None
    files: Mapping[str, str] = {}
    name: str = ""
    world_size: int | None = None
    state: Literal["whole", "broken", "weights only", "not known"] | None = None


class Dialect(Record, dict=True):
    """A family of trainers. `versions`: those it was read in; `source`: where.

    `steps`: its name in the table of step dialects. `step_line`: a pattern of its own in place of
    that table, with the groups `step` and, where the line has them, `total` and `loss`. `offset`:
    what is added to a step of its log to be the number of steps done. `printed_by`: the ranks that print
    the lines of steps: the first, the last, or all of them. `marks`: patterns of lines;
    `scratch` is where it begins with random weights, `resumed` may say after how many steps
    (`done`), or with which it begins (`next`).

    `first`, `resume`: words of its command where there is nothing to resume from, and where there
    is; `{path}` and `{step}` stand for what it resumes from,
    `{save}` for where this start saves. `scratch_if_missing`: it begins with
    random weights, without a word of complaint, where it finds no checkpoint. `command`: what the words
    of its command mean. `supervisors`: words of a command that start it again on its own.
    """

    name: str
    title: str
    versions: str = ""
    source: str = ""
    steps: str = ""
    step_line: str = ""
    offset: int = 0
    printed_by: Literal["first", "last", "all"] = "first"
    marks: Mapping[Mark, str] = {}
    checkpoints: CheckpointRules | None = None
    stop: StopRule | None = None
    ends: Ends = Ends()
    first: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    scratch_if_missing: bool | None = None
    command: CommandWords = CommandWords()
    supervisors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    examples: tuple[Example, ...] = ()

    @cached_property
    def step_pattern(self) -> re.Pattern[str]:
        return re.compile(self.step_line)

    @cached_property
    def mark_patterns(self) -> tuple[tuple[Mark, re.Pattern[str]], ...]:
        return tuple((mark, re.compile(text)) for mark, text in self.marks.items())

    @cached_property
    def end_patterns(self) -> tuple[tuple[Ending, re.Pattern[str]], ...]:
        return tuple((one.means, re.compile(one.line)) for one in self.ends.lines)


def names() -> tuple[str, ...]:
    """Of the shipped dialects, in the order of the alphabet."""
    return tuple(sorted(path.stem for path in FAMILIES.glob("*.toml")))


@cache
def dialect_named(name: str) -> Dialect:
    """A shipped dialect by its name, or one of a person's own by the path of its file.

    Raises WrongUsage where there is none, or where it is wrong.
    """
    return dialect_of(dialect_content(name), name)


def dialect_content(name: str) -> JsonObject:
    """What the file of a dialect says, by its name or its path. Raises WrongUsage where there is no
    such file, or where it is no TOML.
    """
    path = Path(name)
    if name in names():
        path = FAMILIES / f"{name}.toml"
    elif not name.endswith(".toml"):
        known = ", ".join(names())
        raise WrongUsage(f"{name!r} is no dialect: give one of {known}, or the path of a .toml")
    if path.exists() and not path.is_file():
        raise WrongUsage(f"{path}: is no file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongUsage(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise WrongUsage(f"{path}: is no TOML: {error}") from None


def dialect_of(content: JsonObject, where: str) -> Dialect:
    """The dialect that a table says; `where` it stands is for the message. Raises WrongUsage."""
    try:
        _refuse_unknown(content, Dialect, "")
        found = record_of(Dialect, content)
        _check(found)
    except re.error as error:
        raise WrongUsage(f"{where}: {error.pattern!r} is no pattern: {error}") from None
    except ValueError as error:
        raise WrongUsage(f"{where}: {error}") from None
    return found


_TABLES: Mapping[str, type[Record]] = {
    "checkpoints": CheckpointRules,
    "stop": StopRule,
    "command": CommandWords,
    "ends": Ends,
    "lines": EndLine,
    "examples": Example,
}


def _refuse_unknown(content: Mapping[str, object], kind: type[Record], at: str) -> None:
    """Raises ValueError for a key that says nothing here: a slip of the pen would be no rule."""
    for key, value in content.items():
        place = f"{at}.{key}".lstrip(".")
        if key not in kind.__struct_fields__:
            known = ", ".join(kind.__struct_fields__)
            raise ValueError(f"`{place}` is no key of a dialect; here stand: {known}")
        inner = _TABLES.get(key)
        if inner is None:
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                _refuse_unknown(item, inner, place)


def _check(found: Dialect) -> None:
    """Raises ValueError for what reads well and cannot work, re.error for a pattern that is none."""
    tables = {one.name for one in dialects()}
    if found.steps and found.steps not in tables:
        raise ValueError(f"`steps`: {found.steps!r} is none of {', '.join(sorted(tables))}")
    _ = found.mark_patterns, found.end_patterns, found.command.patterns
    command = found.command
    for text in (command.never, command.if_saved, command.unless_saved, command.resumes_if):
        re.compile(text)
    if found.step_line and "step" not in found.step_pattern.groupindex:
        raise ValueError("`step_line` has no group (?P<step>...)")
    if found.stop is not None and not re.fullmatch(_STOPS, found.stop.how):
        raise ValueError(
            f"`stop.how`: {found.stop.how!r} is none of signal NAME, file PATH, next checkpoint"
        )
    for code in found.ends.exit:
        if not re.fullmatch(r"\d{1,3}", code):
            raise ValueError(f"`ends.exit`: {code!r} is no exit code")
    rules = found.checkpoints
    if rules is None:
        return
    if len(_STEP.findall(rules.name)) > 1 or "{" in _STEP.sub("", rules.name):
        raise ValueError(
            f"`checkpoints.name`: {rules.name!r} may hold {{step}} or {{step:06d}}, once"
        )
    for rule in (*rules.complete, *rules.resumable, *(rules.believes or ())):
        parse_rule(rule)
    if rules.newest not in ("highest", "only", "told") and not rules.tracker:
        raise ValueError(
            f"`checkpoints.newest`: {rules.newest!r} is none of highest, only, told,"
            " file NAME holds {step}, file NAME holds {name}"
        )


def _with_stars(text: str) -> str:
    return re.escape(text).replace(r"\*", ".*?")
