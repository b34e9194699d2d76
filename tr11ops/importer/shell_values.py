"""The variables of a script while it is read: what they are for certain, and what a condition may
have made of them.
"""

from __future__ import annotations

import glob
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from tr11ops.importer.expansion import (
    SOURCING,
    Assignment,
    Script,
    Value,
    calculated,
    expand_text,
    expand_word,
)
from tr11ops.importer.lexer import Literal, Part, ShellWord, Token
from tr11ops.importer.traced import Traced

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^]]*\])?(\+?)=", re.ASCII)
_CHANGE = re.compile(
    r"\s*(\+\+|--)?([A-Za-z_]\w*)\s*(?:([-+*/%&|^]|<<|>>)?=(?!=)([^=,]+)|(\+\+|--))?\s*", re.ASCII
)

_UNARY = {"-n": True, "-z": False}  # whether what they ask for is a text
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


class ShellValues:
    """Takes assignments, and answers conditions from them. `here` is whether a shell comes to the
    place that is read, None where only a shell could tell.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.variables = script.variables
        # the words of the commands whose texts are being read, the innermost last
        self.outer: tuple[Traced, ...] = ()
        # whether a shell comes to this part, and whether it has not left the function before
        self.reached: bool | None = True
        self.stays: bool | None = True
        self.locals: set[str] = set()
        # the parts of `if`s and `case`s around the statement: which one, and which part of it
        self.branches: list[tuple[int, int]] = []
        # `if` and name -> which of its branches gave it a value
        self.given: dict[tuple[int, str], int] = {}
        # names whose values another environment or another branch may have made other ones
        self.unsure: set[str] = set()

    # ------------------------------------------------------------------ places
    @property
    def here(self) -> bool | None:
        """Whether a shell comes to this place."""
        return all_hold((self.reached, self.stays))

    @property
    def is_sourced(self) -> bool:
        return any(words.text in SOURCING for words in self.outer[:1])

    @contextmanager
    def where(self, answer: bool | None) -> Iterator[None]:
        """What is read meanwhile is run only if `answer` is true."""
        before = self.reached
        self.reached = all_hold((before, answer))
        yield
        self.reached = before

    @contextmanager
    def part(self, block: int, number: int, answer: bool | None) -> Iterator[None]:
        """As `where`, for one of several parts of which a shell takes one."""
        self.branches.append((block, number))
        with self.where(answer):
            yield
        self.branches.pop()

    @contextmanager
    def subshell(self) -> Iterator[None]:
        """What is set meanwhile is gone afterwards."""
        values = self.variables
        kept = dict(values.values), set(values.removed), set(values.exported), set(self.unsure)
        yield
        values.values, values.removed, values.exported, self.unsure = kept

    # ------------------------------------------------------------------ conditions
    def are_sure(self, names: set[str]) -> bool:
        """Whether these are the script's own, whatever the environment and the conditions before."""
        return all(name in self.variables.values and name not in self.unsure for name in names)

    def known(self, tokens: Sequence[Token], is_split: bool = False) -> list[Traced] | None:
        """Words expanded; None where they are not made of what the script itself has set, for
        certain. `is_split`: those without quotes fall apart, and vanish where they are empty.
        """
        words = [word for word in tokens if isinstance(word, ShellWord)]
        if len(words) != len(tokens) or self.here is not True:
            return None
        outside = self.variables.used
        self.variables.used = set()
        texts = [text for word in words for text in expand_word(word, self.variables, is_split)]
        used = self.variables.used
        self.variables.used = outside
        if not used or not self.are_sure(used) or not all(text.is_known for text in texts):
            return None
        return texts

    def holds(self, condition: Sequence[Token], is_pattern: bool) -> bool | None:
        """Whether a comparison holds; None where it is not one of what the script itself has set."""
        words = self.known(condition, is_split=not is_pattern)
        if words is None:
            return None
        return compared([word.text for word in words], is_pattern)

    def fits(self, value: Traced, patterns: Sequence[Token]) -> bool | None:
        """Whether one of a part's patterns matches."""
        answers: list[bool | None] = []
        for pattern in patterns:
            if isinstance(pattern, ShellWord):
                answers.append(self.matches(value, pattern))
            elif pattern.text != "|":
                return None
        return inverse(all_hold(map(inverse, answers)))

    def matches(self, value: Traced, pattern: ShellWord) -> bool | None:
        text = ""
        for part in pattern.parts:
            if isinstance(part, Literal) and not part.quoted:
                if re.search(r"[\[\\+@!]", part.text.text):
                    return None
                text += part.text.text
                continue
            expanded = expand_text((part,), self.variables, pattern.line)
            if not expanded.is_known or not part.quoted:
                return None
            text += glob.escape(expanded.text)
        return fnmatchcase(value.text, text)

    def calculate(self, text: Traced) -> bool | None:
        """`((TEXT))`: the status, and the one value that it may set."""
        if self.here is False:
            return None
        change = _CHANGE.fullmatch(text.text)
        name = ""
        expression = text
        if change is not None and text.is_known and any(change.group(1, 4, 5)):
            before, name, sign, rest, after = change.groups()
            step = (before or after or "")[:1]
            if step or sign:
                expression = Traced.of(f"{name} {step or sign} ({rest or 1})", text.line)
            else:
                expression = text.cut(change.start(4))
        elif re.search(r"(?<![=!<>])=(?!=)|\+\+|--|,", text.text):
            self.forget(re.findall(r"[A-Za-z_]\w*", text.text), text.line)
            return None
        outside = self.variables.used
        self.variables.used = set()
        value = calculated(expression, f"$(({expression.text.strip()}))", self.variables)
        used = self.variables.used
        self.variables.used = outside | self.variables.used
        if name:
            self.keep(name, value, used, text.line)
        if not value.is_known or self.here is not True or not self.are_sure(used):
            return None
        return value.text != "0"

    # ------------------------------------------------------------------ assignments
    def assignment(self, word: ShellWord, exported: bool, alone: bool = True) -> bool:
        """Keep `NAME=value`; false for any other word. Before a command (`alone=False`) it is
        passed by.
        """
        first = None
        if word.parts:
            first = word.parts[0]
        if not isinstance(first, Literal) or first.quoted:
            return False
        match = _ASSIGNMENT.match(first.text.text)
        if match is None:
            return False
        if not alone and word.array is None and not exported:
            return True
        name = match.group(1)
        append = bool(match.group(2))
        outside = self.variables.used
        self.variables.used = set()
        rest: tuple[Part, ...] = (Literal(first.text.cut(match.end()), False), *word.parts[1:])
        value: Value
        if word.array is not None:
            value = tuple(
                item for inner in word.array for item in expand_word(inner, self.variables)
            )
        else:
            value = expand_text(rest, self.variables, word.line)
        made_from = self.variables.used
        self.variables.used = outside | self.variables.used
        added: Traced | None = None
        if append:
            added = _joined(value)
            value = self.appended(name, value)
            made_from = made_from | {name} | self.variables.origins.get(name, set())
        if exported:
            self.variables.exported.add(name)
        self.keep(name, value, made_from, word.line, added=added)
        return True

    def keep(
        self,
        name: str,
        value: Value,
        made_from: set[str],
        line: int,
        added: Traced | None = None,
    ) -> None:
        """Take a value, and note it. In a condition it is taken only where there is no other: which
        branch a shell takes is not known.
        """
        conditional = self.here is not True
        shown = _joined(value)
        self.variables.spend(len(shown), line)
        applied = added is not None or not (conditional and name in self.variables.values)
        applied = applied and not self.is_of_another_branch(name)
        self.note_sure(name, not conditional and self.are_sure(made_from), added is not None)
        if applied:
            self.variables.assign(name, value, made_from)
            for branch, part in self.branches:
                self.given.setdefault((branch, name), part)
        self.note(name, shown, line, applied=applied, added=added)

    def note(
        self,
        name: str,
        value: Traced,
        line: int,
        applied: bool = True,
        added: Traced | None = None,
    ) -> None:
        """What a sourced file exports, the set-up exports too."""
        record = Assignment(
            name,
            value,
            line=line,
            exported=name in self.variables.exported and not self.is_sourced,
            conditional=self.here is not True,
            applied=applied,
            added=added,
        )
        self.script.assignments.append(record)

    def note_sure(self, name: str, is_sure: bool, is_added: bool) -> None:
        """Keep account of whether a name's new value is the script's own, whatever is around it."""
        if is_sure and not (is_added and name in self.unsure):
            self.unsure.discard(name)
        else:
            self.unsure.add(name)

    def appended(self, name: str, value: Value) -> Value:
        current = self.variables.values.get(name)
        if not isinstance(value, tuple) and not isinstance(current, tuple):
            return Traced.join([current or Traced(), value])
        if current is None:
            current = ()
        elif not isinstance(current, tuple):
            current = (current,)
        if isinstance(value, tuple):
            added = value
        else:
            added = (value,)
        return (*current, *added)

    def declare(self, words: Sequence[ShellWord]) -> None:
        """`export`, `declare` and their like: assignments, or names alone."""
        keyword = words[0].bare
        flags = [word.bare for word in words[1:] if word.bare.startswith("-")]
        exported = keyword == "export" or any("x" in flag for flag in flags)
        for word in words[1:]:
            if word.bare.startswith("-"):
                continue
            if self.assignment(word, exported):
                if keyword in {"local", "declare", "typeset"}:
                    self.locals.add(self.script.assignments[-1].name)
                continue
            for name in expand_word(word, self.variables):
                if exported and _ASSIGNMENT.match(name.text + "="):
                    self.variables.exported.add(name.text)
                    value = self.variables.text(name.text)
                    if value is not None:
                        self.note(name.text, value, word.line)

    def forget(self, names: Iterable[str], line: int) -> None:
        """These have values now that only a shell could tell; where it may not come here, those
        before may be right.
        """
        for name in names:
            if self.here is not False:
                self.unsure.add(name)
            if self.here is None and name.isidentifier() and name in self.variables.values:
                self.note(name, Traced.of(f"${name}", line, unknown=True), line, applied=False)
            if self.here is True:
                self.variables.values.pop(name, None)
                self.variables.removed.discard(name)

    def is_of_another_branch(self, name: str) -> bool:
        """Whether another branch of an `if` around here has given `name` a value: a shell takes one
        of them.
        """
        return any(self.given.get((block, name), part) != part for block, part in self.branches)


def _joined(value: Value) -> Traced:
    if isinstance(value, Traced):
        return value
    return Traced.join(value, " ")


# What a condition comes to: true, false, or None where only a shell could tell.


def compared(words: Sequence[str], is_pattern: bool) -> bool | None:
    """What `[ WORDS ]` comes to; None for what is not read here: files, patterns, several at once.
    `is_pattern`: the right side may be one, as in `[[`.
    """
    if words and words[0] == "!":
        found = compared(words[1:], is_pattern)
        if found is None:
            return None
        return not found
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in _UNARY:
        return bool(words[1]) == _UNARY[words[0]]
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in _NUMBERS:
        if not (re.fullmatch(r"-?[0-9]{1,18}", left) and re.fullmatch(r"-?[0-9]{1,18}", right)):
            return None
        return _NUMBERS[sign](int(left), int(right))
    if sign not in {"=", "==", "!="} or (is_pattern and re.search(r"[*?\[\\(]", right)):
        return None
    return (left == right) != (sign == "!=")


def all_hold(answers: Iterable[bool | None]) -> bool | None:
    """Whether all are true; None where it depends on one that is not known."""
    found = set(answers)
    if False in found:
        return False
    if None in found:
        return None
    return True


def inverse(answer: bool | None) -> bool | None:
    """The opposite; what is not known stays so."""
    if answer is None:
        return None
    return not answer
