"""Which files of a repository are kept as LFS, by its .gitattributes, and the rules that are
missing. Pure.

The hub refuses a file of more than 10 MB that is not LFS, and every log grows past that some day:
so all mirrored files are LFS from their first byte. Rules that are there stay as they are; ours
come after them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from posixpath import basename, splitext

from trainer.contract.record import Record

FILE_NAME = ".gitattributes"
RULE = "filter=lfs diff=lfs merge=lfs -text"
_PLAIN_SUFFIX = re.compile(r"\.[A-Za-z0-9_]+")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./=+,@%-]")
_FILTER = re.compile(r"([-!]?)filter(?:=(\S*))?")


class AttributeRule(Record):
    """One line: the files it is about, and whether it makes them LFS; only lines that speak of the
    filter count.
    """

    pattern: str
    is_lfs: bool


def parse(text: str) -> tuple[AttributeRule, ...]:
    """The lines that say whether files are LFS, in order."""
    found = []
    for line in text.splitlines():
        pattern, words = _split(line.strip())
        for word in words:
            match = _FILTER.fullmatch(word)
            if pattern and match is not None:
                found.append(AttributeRule(pattern, not match[1] and match[2] == "lfs"))
    return tuple(found)


def is_lfs(path: str, rules: Iterable[AttributeRule]) -> bool:
    """Whether a path is kept as LFS: the last rule about it says so."""
    answer = False
    for rule in rules:
        if rule.is_lfs != answer and _matches(rule.pattern, path):
            answer = rule.is_lfs
    return answer


def with_rules(text: str, paths: Iterable[str]) -> str:
    """The file's text with the rules that it lacks for these paths at its end; the same text where
    it lacks none.
    """
    rules = parse(text)
    lacking = sorted({pattern_of(path) for path in paths if not is_lfs(path, rules)})
    if not lacking:
        return text
    if not text or text.endswith("\n"):
        separator = ""
    else:
        separator = "\n"
    return text + separator + "".join(f"{pattern} {RULE}\n" for pattern in lacking)


def pattern_of(path: str) -> str:
    """The rule that is written for a file: of all files like it where its name allows that, else of
    itself.
    """
    name = basename(path)
    if "tfevents" in name:
        return "*tfevents*"
    suffix = splitext(name)[1]
    if _PLAIN_SUFFIX.fullmatch(suffix):
        return f"*{suffix}"
    return "/" + "".join(
        character if _PLAIN_PATH.fullmatch(character) else "?" for character in path
    )


def _split(line: str) -> tuple[str, list[str]]:
    if line.startswith('"'):
        pattern, quote, rest = line[1:].partition('"')
        if quote:
            return (pattern, rest.split())
        return ("", [])
    words = line.split()
    if not words or words[0].startswith(("#", "[attr]")):
        return "", []
    return words[0], words[1:]


def _matches(pattern: str, path: str) -> bool:
    if "/" not in pattern:
        return _compiled(pattern).fullmatch(basename(path)) is not None
    return _compiled(pattern.removeprefix("/")).fullmatch(path) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Git's wildcards: * and ? stop at slashes, ** does not."""
    parts, position = [], 0
    while position < len(pattern):
        for text, expression in (("**/", "(?:.*/)?"), ("**", ".*"), ("*", "[^/]*"), ("?", "[^/]")):
            if pattern.startswith(text, position):
                parts.append(expression)
                position += len(text)
                break
        else:
            if pattern[position] == "[":
                end = pattern.find("]", position + 2)
            else:
                end = -1
            if pattern.startswith("[[:space:]]", position):
                parts.append(r"\s")
                position += len("[[:space:]]")
            elif end > 0:
                inner = pattern[position + 1 : end].replace("\\", r"\\")
                parts.append(f"[^{inner[1:]}]" if inner.startswith(("!", "^")) else f"[{inner}]")
                position = end + 1
            else:
                position += pattern[position] == "\\" and position + 1 < len(pattern)
                parts.append(re.escape(pattern[position]))
                position += 1
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error:
        return re.compile(re.escape(pattern))
