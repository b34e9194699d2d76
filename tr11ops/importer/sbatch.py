"""`#SBATCH` lines: what Slurm reads before the first command, long and short, with `=`, a blank or
nothing between.
"""

from __future__ import annotations

import re

from tr11ops.importer.traced import placeholder_at
from trainer.contract.record import Record

_LINE = re.compile(r"#SBATCH(?=\s|$)(.*)")
_SHORT = {
    "A": "account",
    "a": "array",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "O": "overcommit",
    "p": "partition",
    "q": "qos",
    "Q": "quiet",
    "s": "oversubscribe",
    "S": "core-spec",
    "t": "time",
    "v": "verbose",
    "W": "wait",
    "w": "nodelist",
    "x": "exclude",
    "h": "help",
    "V": "version",
}
_WITHOUT_VALUE = frozenset(
    {
        "contiguous",
        "help",
        "hold",
        "ignore-pbs",
        "no-kill",
        "no-requeue",
        "overcommit",
        "parsable",
        "quiet",
        "requeue",
        "reboot",
        "spread-job",
        "test-only",
        "use-min-nodes",
        "usage",
        "verbose",
        "version",
        "wait",
        "exclusive",
        "oversubscribe",
        "get-user-env",
        "nice",
        "propagate",
    }
)


class Directive(Record):
    """One option of an `#SBATCH` line, by its long name, and as it is `spelled` there.

    `read` is false where Slurm passes it by: it stands after a command.
    """

    name: str
    value: str
    line: int
    read: bool = True
    spelled: str = ""


def read_directives(text: str) -> list[Directive]:
    """Every option of every `#SBATCH` line, in order; unknown short letters keep their letter as
    the name.
    """
    found: list[Directive] = []
    commands_begun = False
    for number, line in enumerate(text.split("\n"), start=1):
        match = _LINE.match(line)
        if match is None:
            stripped = line.strip()
            commands_begun = commands_begun or (bool(stripped) and not stripped.startswith("#"))
            continue
        found += [
            Directive(name, value, number, not commands_begun, spelled)
            for name, value, spelled in _options(match.group(1))
        ]
    return found


def _options(text: str) -> list[tuple[str, str, str]]:
    """Long name, value, and the option as it is spelled."""
    words = _words(text)
    found: list[tuple[str, str, str]] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        following = None
        if position < len(words):
            following = words[position]
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            spelled = f"--{name}"
            if (
                not equals
                and name not in _WITHOUT_VALUE
                and following is not None
                and not following.startswith("-")
            ):
                value = following
                position += 1
        elif word.startswith("-") and len(word) > 1:
            name, value = _SHORT.get(word[1], word[1]), word[2:].removeprefix("=")
            spelled = word[:2]
            if (
                not value
                and name not in _WITHOUT_VALUE
                and following is not None
                and not following.startswith("-")
            ):
                value = following
                position += 1
        else:
            name, value, spelled = "", word, ""
        found.append((name, value, spelled))
    return found


def _words(text: str) -> list[str]:
    """Words of one line as Slurm splits it: quotes group, a backslash protects, `#` begins a
    comment.
    """
    words: list[str] = []
    current, started, quote = "", False, ""
    index = 0
    while index < len(text):
        character = text[index]
        if quote:
            if character == quote:
                quote = ""
            else:
                current += character
        elif character in "'\"":
            quote, started = character, True
        elif character == "\\" and index + 1 < len(text):
            index += 1
            current, started = current + text[index], True
        elif character.isspace():
            if started:
                words.append(current)
            current, started = "", False
        elif character == "#" and not started:
            break
        elif (end := placeholder_at(text, index)) > index:
            current, started = current + text[index:end], True
            index = end - 1
        else:
            current, started = current + character, True
        index += 1
    if started:
        words.append(current)
    return words
