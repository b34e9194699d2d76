"""What the words of one command say to a reader of shell text: its documents, its pipes, its options."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tr11ops.importer.lexer import Operator, ShellWord, Token
from tr11ops.importer.traced import Traced

SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
BREAKS = frozenset({"\n", ";", "&", "&&", "||", "|", "|&", "(", "((", ")", ";;", ";&", ";;&"})


def script_at(words: Sequence[Traced]) -> int | None:
    """The place of the shell script that a command starts; None where it starts none."""
    for index, word in enumerate(words):
        name = word.text.rpartition("/")[2]
        if name in SHELLS:
            rest = index + 1
            while rest < len(words) and re.fullmatch(r"-[eluxv]+", words[rest].text):
                rest += 1
            is_file = rest < len(words) and not words[rest].text.startswith("-")
            if is_file:
                return rest
            return None
        if name.endswith((".sh", ".bash")):
            return index
        if name.endswith(".py"):
            return None
    return None


def document(redirects: Sequence[tuple[Operator, ShellWord | None]]) -> Operator | None:
    """The operator that holds the command's here-document."""
    return next((operator for operator, _ in redirects if operator.body is not None), None)


def are_options(words: Sequence[str]) -> bool:
    return all(word.startswith("-") for word in words)


def stripped(text: Traced) -> Traced:
    """Without the blanks at both ends, which `read` drops."""
    body = text.text.strip(" \t\n")
    start = 0
    if body:
        start = text.text.index(body)
    return text.cut(start, start + len(body))


def _is_break(token: Token) -> bool:
    return isinstance(token, Operator) and token.text in BREAKS


def pipe_targets(tokens: Sequence[Token], index: int) -> tuple[str, ...]:
    """The first words of the commands that this one's output is piped into."""
    names: list[str] = []
    while index < len(tokens):
        token = tokens[index]
        if not isinstance(token, Operator) or token.text not in {"|", "|&"}:
            break
        following = None
        if index + 1 < len(tokens):
            following = tokens[index + 1]
        if isinstance(following, ShellWord):
            names.append(following.bare)
        index += 1
        while index < len(tokens) and not _is_break(tokens[index]):
            index += 1
    return tuple(names)


def shell_options(arguments: Sequence[str]) -> set[str]:
    """Names switched on by `set`: `-e` is errexit, `-o pipefail` is pipefail."""
    found: set[str] = set()
    take_name = False
    for argument in arguments:
        if take_name:
            found.add(argument)
            take_name = False
        elif argument.startswith("-"):
            found |= {"errexit" for letter in argument if letter == "e"}
            take_name = argument.endswith("o")
    return found
