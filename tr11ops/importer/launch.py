"""The command that starts the training: which one it is, its launcher's options, its own options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tr11ops.base.errors import ScriptError
from tr11ops.importer.options import ALL_VALUES, OptionUse
from tr11ops.importer.options_table import RULES
from tr11ops.importer.reader import Script, ShellCommand
from tr11ops.importer.traced import Traced
from trainer.contract.record import Record

FEWEST_OPTIONS = 3  # of the trainer's, for a command to count as a training
_OPTION = re.compile(r"--?[A-Za-z]")
_LAUNCHERS = frozenset(
    {"torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "accelerate"}
)  # which start the workers of a node
_LAUNCHER_SWITCHES = frozenset(
    {"-u", "--standalone", "--no_python", "--use_env", "--no_python_module", "-m"}
)


class ParsedLaunch(Record):
    """The training's command, taken apart. `strays` are words among the options that belong to
    none.

    `launcher` has the launcher's options by name with `_`; `spelled` how the script writes each.
    """

    command: ShellCommand
    program: str
    launcher: Mapping[str, Traced]
    spelled: Mapping[str, Traced]
    options: tuple[OptionUse, ...]
    strays: tuple[Traced, ...]

    @property
    def line(self) -> int:
        return self.command.line

    @property
    def starts_workers(self) -> bool:
        """Whether a launcher starts the workers of a node; else each task of Slurm is one of them."""
        return any(word.text.rpartition("/")[2] in _LAUNCHERS for word in self.command.words)


def find_launch(script: Script) -> ParsedLaunch:
    """The command with the most options of the old trainer. Raises ScriptError when there is none."""
    best: tuple[int, ShellCommand] | None = None
    for command in script.commands:
        count = sum(word.text.partition("=")[0] in RULES for word in command.words)
        if count >= FEWEST_OPTIONS and (best is None or count >= best[0]):
            best = (count, command)
    if best is None:
        raise ScriptError(
            0, _nothing_found(script), "give the script that holds the training's own options"
        )
    return take_apart(best[1])


def _nothing_found(script: Script) -> str:
    outside = _settings_outside(script)
    if outside:
        return outside
    sourced = [
        command
        for command in script.commands
        if command.name in {"source", "."} and len(command.words) > 1
    ]
    if sourced:
        return f"no command in it starts a training; line {sourced[-1].line} sources {sourced[-1].words[1].text[:80]}"
    return "no command in it starts a training with options such as --num-layers"


def _settings_outside(script: Script) -> str:
    """The last command that starts another script, or a program with settings of another kind;
    empty: there is none.
    """
    for command in reversed(script.commands):
        words = [word.text for word in command.words]
        settings = next((word for word in words if re.search(r"\.ya?ml\b", word)), "")
        started = next((word for word in words[1:] if word.endswith(".sh")), "")
        program = next((word for word in words if word.endswith(".py")), "")
        if settings:
            return f"line {command.line} takes its settings from {settings[:80]}, which is not a Megatron command line"
        if program:
            return f"line {command.line} starts {program[:80]} without options such as --num-layers"
        if started:
            return f"no command in it starts a training; line {command.line} starts {started[:80]}"
    return ""


def take_apart(command: ShellCommand) -> ParsedLaunch:
    """Words before the program are the launcher's; those behind it are the trainer's."""
    words = command.words
    first = next((i for i, word in enumerate(words) if word.text.partition("=")[0] in RULES), 0)
    program_at = max((i for i in range(first) if words[i].text.endswith(".py")), default=-1)
    before = words[: program_at if program_at >= 0 else first]
    launcher = _launcher_options(before)
    spelled = {
        _launcher_key(word): word.cut(0, len(word.text.partition("=")[0]))
        for word in before
        if _is_option(word)
    }
    options, strays = _options(words[program_at + 1 if program_at >= 0 else first :])
    program = words[program_at].text if program_at >= 0 else ""
    return ParsedLaunch(command, program, launcher, spelled, tuple(options), tuple(strays))


def _options(words: Sequence[Traced]) -> tuple[list[OptionUse], list[Traced]]:
    options: list[OptionUse] = []
    strays: list[Traced] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_option(word):
            strays.append(word)
            continue
        name, equals, _ = word.text.partition("=")
        if equals:
            values = [word.cut(len(name) + 1)]
        else:
            values = []
        limit = RULES[name].count if name in RULES else ALL_VALUES
        while (
            position < len(words)
            and not _is_option(words[position])
            and (limit < 0 or len(values) < limit)
        ):
            values.append(words[position])
            position += 1
        options.append(OptionUse(name, tuple(values), word.line))
    return options, strays


def _is_option(word: Traced) -> bool:
    return bool(_OPTION.match(word.text)) and not word.unknown_at(0)


def _launcher_key(word: Traced) -> str:
    return word.text.partition("=")[0].lstrip("-").replace("-", "_")


def _launcher_options(words: Sequence[Traced]) -> dict[str, Traced]:
    """`--nnodes 48`, `--nproc_per_node=8`: names with `-` as `_`, without dashes before them."""
    found: dict[str, Traced] = {}
    for index, word in enumerate(words):
        if not _is_option(word):
            continue
        name, equals, _ = word.text.partition("=")
        key = _launcher_key(word)
        following = None
        if index + 1 < len(words):
            following = words[index + 1]
        if equals:
            found[key] = word.cut(len(name) + 1)
        elif following is not None and not _is_option(following) and name not in _LAUNCHER_SWITCHES:
            found[key] = following
        else:
            found[key] = Traced.of("", word.line)
    return found
