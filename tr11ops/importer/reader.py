"""The script read from top to bottom: assignments kept, commands and written files collected,
nothing run.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tr11ops.base.errors import ScriptError
from tr11ops.importer.expansion import Variables, expand_text, expand_word
from tr11ops.importer.lexer import REDIRECTIONS, Lexer, Literal, Operator, Part, ShellWord, Token
from tr11ops.importer.traced import Traced
from trainer.contract.record import Record

MOST_COMMANDS = 5000
DEEPEST_SHELL = 4  # bash -c inside bash -c
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^]]*\])?(\+?)=", re.ASCII)
_OPENERS = {
    "if": "fi",
    "while": "done",
    "until": "done",
    "for": "done",
    "select": "done",
    "case": "esac",
    "{": "}",
}
_CLOSERS = frozenset(_OPENERS.values())
# commands that give values to the names among their words
_SETTING = frozenset({"read", "mapfile", "readarray", "let", "printf", "getopts"})
_FILLERS = frozenset({"then", "else", "elif", "do", "!", "time", "function"})
_DECLARING = frozenset({"export", "declare", "typeset", "readonly", "local"})
_SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
_BREAKS = frozenset({"\n", ";", "&", "&&", "||", "|", "|&", "(", ")", ";;", ";&", ";;&"})


class Assignment(Record):
    """`NAME=value`. `applied` is false where it stands in a condition and the name already had a
    value.

    `added` is what `+=` adds, and `value` the whole then.
    """

    name: str
    value: Traced
    line: int
    exported: bool
    conditional: bool
    applied: bool = True
    added: Traced | None = None


class ShellCommand(Record):
    """One simple command, expanded. `outer` are the words of the command whose `bash -c` text this
    one stands in.
    """

    words: tuple[Traced, ...]
    line: int
    conditional: bool
    piped_into: tuple[str, ...] = ()
    outer: tuple[Traced, ...] = ()
    used: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The command's own name, without a path."""
        if self.words:
            return self.words[0].text.rpartition("/")[2]
        return ""


class WrittenFile(Record):
    """A file that the script writes itself: `cat <<EOT > FILE`, `echo ... > FILE`."""

    path: Traced
    content: Traced
    line: int


@dataclass
class Script:
    """Everything the reader found."""

    variables: Variables = field(default_factory=Variables)
    assignments: list[Assignment] = field(default_factory=list)
    commands: list[ShellCommand] = field(default_factory=list)
    files: list[WrittenFile] = field(default_factory=list)
    shell_options: set[str] = field(default_factory=set)
    # a `#` inside the text of a launched shell
    lost_comments: list[Traced] = field(default_factory=list)
    # used by a launched shell, and not given to it
    not_exported: dict[str, int] = field(default_factory=dict)


def read_shell(text: str, given: Mapping[str, Traced] | None = None) -> Script:
    """Read a whole script; `given` are variables that Slurm will set. Raises ScriptError when it
    cannot be read.
    """
    script = Script()
    for name, value in (given or {}).items():
        script.variables.assign(name, value, set())
        script.variables.exported.add(name)
    _Reader(script).read(Traced.script(text), outer=(), depth=0)
    return script


class _Context(Record):
    """Where a statement stands: see `ShellCommand`; `depth` counts the launched shells around it."""

    conditional: bool
    piped_into: tuple[str, ...]
    outer: tuple[Traced, ...]
    depth: int
    around: int  # so many `if`s and `case`s are around the text that it stands in


@dataclass
class _Branch:
    """The part of an `if` or `case` that a statement stands in: `number` counts its `then`, `elif`s
    and `else`.

    `asked`: what its condition came to, None where that is not known; `is_taken`: whether a shell
    is in this part, None where that is not known; `is_over`: a part before it is taken for
    certain; `is_clear`: all conditions so far are known.
    """

    block: int
    number: int = 0
    asked: bool | None = None
    is_taken: bool | None = None
    is_over: bool = False
    is_clear: bool = True

    def begin_part(self) -> None:
        """At `then`: the condition before it has been looked at."""
        if self.is_over:
            self.is_taken = False
            return
        self.is_clear = self.is_clear and self.asked is not None
        self.is_taken = self.asked
        if self.asked and not self.is_clear:
            self.is_taken = None  # one before it may have been taken

    def end_part(self) -> None:
        """At `elif` and `else`."""
        self.number += 1
        self.is_over = self.is_over or self.is_taken is True
        self.asked, self.is_taken = None, None

    def begin_rest(self) -> None:
        """At `else`, behind `end_part`."""
        if self.is_over:
            self.is_taken = False
        elif self.is_clear:
            self.is_taken = True


class _Reader:
    def __init__(self, script: Script):
        self.script = script
        self.variables = script.variables
        self.left = False
        # the `if`s and `case`s around the statement, the innermost last
        self.branches: list[_Branch] = []
        self.begun = 0
        # `if` and name -> which of its branches gave it a value
        self.given: dict[tuple[int, str], int] = {}
        # names whose values another environment or another branch may have made other ones
        self.unsure: set[str] = set()

    def read(self, source: Traced, outer: tuple[Traced, ...], depth: int) -> None:
        lexer = Lexer(source)
        tokens = lexer.tokens()
        if outer:
            self.script.lost_comments += [
                comment for comment in lexer.comments if "--" in comment.text
            ]
        blocks: list[str] = []
        around = len(self.branches)
        after = "\n"
        start = 0
        for index in range(len(tokens) + 1):
            if index < len(tokens):
                token = tokens[index]
            else:
                token = Operator("\n", 0)
            if not isinstance(token, Operator) or token.text not in _BREAKS:
                continue
            pieces = tokens[start:index]
            conditional = self.may_not_run(blocks, around) or after in {"&&", "||"}
            if pieces:
                self.statement(
                    pieces,
                    blocks,
                    _Context(
                        conditional,
                        _pipe_targets(tokens, index),
                        outer=outer,
                        depth=depth,
                        around=around,
                    ),
                )
            if self.left:
                return
            if token.text == "(":
                blocks.append(")")
            elif token.text == ")" and blocks and blocks[-1] == ")":
                blocks.pop()
            if token.text in {";;", ";&", ";;&"} and self.branches:
                self.branches[-1].number += 1
            after, start = token.text, index + 1

    def statement(self, pieces: Sequence[Token], blocks: list[str], context: _Context) -> None:
        """One simple command, behind the keywords before it."""
        rest, conditional = list(pieces), context.conditional
        is_asked = False
        while rest and isinstance(rest[0], ShellWord):
            keyword = rest[0].bare
            self.follow(keyword)
            is_asked = keyword in {"if", "elif"} or (is_asked and keyword != "!")
            if keyword in _OPENERS:
                blocks.append(_OPENERS[keyword])
                conditional = conditional or keyword != "{"
                if keyword in {"for", "select"}:
                    self.unsure.update(
                        word.bare for word in rest[1:2] if isinstance(word, ShellWord)
                    )
                if keyword in {"if", "while", "until", "{"}:
                    rest = rest[1:]
                else:
                    rest = []
            elif keyword in _CLOSERS:
                if keyword in blocks:
                    while blocks.pop() != keyword:
                        pass
                rest = rest[1:]
            elif keyword in _FILLERS:
                if keyword in {"then", "else"}:
                    conditional = self.may_not_run(blocks, context.around)
                conditional = conditional or keyword in {"elif", "do"}
                rest = rest[1:]
            else:
                break
        if not rest or self.is_dead():
            return
        if self.branches and self.branches[-1].is_taken is None:
            # more than one command decides, or what does is not read
            self.branches[-1].asked = None
        if is_asked and not self.may_not_run(blocks[:-1], context.around, but_last=True):
            self.branches[-1].asked = self.holds(rest)
        self.simple(rest, replace(context, conditional=conditional))

    def is_dead(self) -> bool:
        """Whether no shell comes here."""
        return any(branch.is_taken is False for branch in self.branches)

    def may_not_run(self, blocks: Sequence[str], around: int, but_last: bool = False) -> bool:
        """Whether a shell may pass over a statement in these blocks."""
        inner = self.branches[around:]
        if but_last:
            inner = inner[:-1]
        certain = sum(branch.is_taken is True for branch in inner)
        return len(blocks) > certain

    def holds(self, condition: Sequence[Token]) -> bool | None:
        """Whether a condition holds; None where it is no comparison of what the script itself has
        set.
        """
        words = [word for word in condition if isinstance(word, ShellWord)]
        if len(words) != len(condition) or len(words) < 2:
            return None
        ends = {"[[": "]]", "[": "]"}
        opener = words[0].bare
        if opener in ends and words[-1].bare == ends[opener]:
            words = words[1:-1]
        elif opener == "test":
            words = words[1:]
        else:
            return None
        before = set(self.variables.used)
        self.variables.used.clear()
        if opener == "[[":
            texts = [expand_text(word.parts, self.variables, word.line) for word in words]
        else:  # a command, whose words without quotes fall apart, and vanish where they are empty
            texts = [text for word in words for text in expand_word(word, self.variables)]
        used = set(self.variables.used)
        self.variables.used = before
        if not used or not self.are_sure(used) or not all(text.is_known for text in texts):
            return None
        return compared([text.text for text in texts], is_pattern=opener == "[[")

    def are_sure(self, names: set[str]) -> bool:
        """Whether these are the script's own, whatever the environment and the conditions before."""
        return all(name in self.variables.values and name not in self.unsure for name in names)

    def follow(self, keyword: str) -> None:
        """Keep account of the branches around the next statement."""
        if keyword in {"if", "case"}:
            self.begun += 1
            self.branches.append(_Branch(self.begun))
        elif keyword == "then" and self.branches:
            self.branches[-1].begin_part()
        elif keyword in {"elif", "else"} and self.branches:
            self.branches[-1].end_part()
            if keyword == "else":
                self.branches[-1].begin_rest()
        elif keyword in {"fi", "esac"} and self.branches:
            self.branches.pop()

    def is_of_another_branch(self, name: str) -> bool:
        """Whether another branch of an `if` around here has given `name` a value: a shell takes one
        of them.
        """
        return any(
            self.given.get((branch.block, name), branch.number) != branch.number
            for branch in self.branches
        )

    def simple(self, rest: list[Token], context: _Context) -> None:
        line = rest[0].line
        words: list[ShellWord] = []
        redirects: list[tuple[Operator, ShellWord | None]] = []
        position = 0
        while position < len(rest):
            token = rest[position]
            following = None
            if position + 1 < len(rest):
                following = rest[position + 1]
            if isinstance(token, ShellWord):
                redirected = isinstance(following, Operator) and following.text in REDIRECTIONS
                if not (redirected and token.bare in {"1", "2"}):
                    words.append(token)
            elif token.body is None and isinstance(following, ShellWord):
                redirects.append((token, following))
                position += 1
            else:
                redirects.append((token, None))
            position += 1
        while words and self.assignment(
            words[0], context.conditional, exported=False, alone=len(words) == 1
        ):
            words = words[1:]
        if words:
            self.command(words, redirects, line, context)

    # ------------------------------------------------------------------ assignments
    def assignment(
        self, word: ShellWord, conditional: bool, exported: bool, alone: bool = True
    ) -> bool:
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
        name, append = match.group(1), bool(match.group(2))
        before_used = set(self.variables.used)
        self.variables.used.clear()
        rest: tuple[Part, ...] = (Literal(first.text.cut(match.end()), False), *word.parts[1:])
        value: Traced | tuple[Traced, ...]
        if word.array is not None:
            value = tuple(
                item for inner in word.array for item in expand_word(inner, self.variables)
            )
        else:
            value = expand_text(rest, self.variables, word.line)
        made_from = set(self.variables.used)
        self.variables.used |= before_used
        added: Traced | None = None
        if append:
            if isinstance(value, Traced):
                added = value
            else:
                added = Traced.join(value, " ")
            value = self.appended(name, value)
            made_from |= {name} | self.variables.origins.get(name, set())
        if isinstance(value, Traced):
            shown = value
        else:
            shown = Traced.join(value, " ")
        self.variables.spend(len(shown), word.line)
        # In a condition the value is taken only where there is no other: which branch a shell takes
        # is not known.
        applied = append or not (conditional and name in self.variables.values)
        applied = applied and not self.is_of_another_branch(name)
        self.note_sure(name, not conditional and self.are_sure(made_from), append)
        if applied:
            self.variables.assign(name, value, made_from)
            for branch in self.branches:
                self.given.setdefault((branch.block, name), branch.number)
        if exported:
            self.variables.exported.add(name)
        record = Assignment(
            name,
            shown,
            line=word.line,
            exported=exported or name in self.variables.exported,
            conditional=conditional,
            applied=applied,
            added=added,
        )
        self.script.assignments.append(record)
        return True

    def note_sure(self, name: str, is_sure: bool, is_added: bool) -> None:
        """Keep account of whether a name's new value is the script's own, whatever is around it."""
        if is_sure and not (is_added and name in self.unsure):
            self.unsure.discard(name)
        else:
            self.unsure.add(name)

    def appended(
        self, name: str, value: Traced | tuple[Traced, ...]
    ) -> Traced | tuple[Traced, ...]:
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

    def declare(self, words: Sequence[ShellWord], conditional: bool) -> None:
        """`export`, `declare` and their like: assignments, or names alone."""
        keyword = words[0].bare
        flags = [word.bare for word in words[1:] if word.bare.startswith("-")]
        exported = keyword == "export" or any("x" in flag for flag in flags)
        for word in words[1:]:
            if word.bare.startswith("-") or self.assignment(word, conditional, exported):
                continue
            for name in expand_word(word, self.variables):
                if exported and _ASSIGNMENT.match(name.text + "="):
                    self.variables.exported.add(name.text)
                    value = self.variables.text(name.text)
                    if value is not None:
                        record = Assignment(
                            name.text, value, line=word.line, exported=True, conditional=conditional
                        )
                        self.script.assignments.append(record)

    # ------------------------------------------------------------------ commands
    def command(
        self,
        words: Sequence[ShellWord],
        redirects: Sequence[tuple[Operator, ShellWord | None]],
        line: int,
        context: _Context,
    ) -> None:
        if words[0].bare in _DECLARING:
            self.declare(words, context.conditional)
            return
        self.variables.used.clear()
        found = tuple(field for word in words for field in expand_word(word, self.variables))
        used = frozenset(self.variables.used)
        if not found:
            return
        if len(self.script.commands) >= MOST_COMMANDS:
            raise ScriptError(
                line, f"has more than {MOST_COMMANDS} commands", "this is not a batch script"
            )
        command = ShellCommand(
            found,
            line,
            conditional=context.conditional,
            piped_into=context.piped_into,
            outer=context.outer,
            used=used,
        )
        self.script.commands.append(command)
        self.effect(command, redirects, context.depth)

    def effect(
        self,
        command: ShellCommand,
        redirects: Sequence[tuple[Operator, ShellWord | None]],
        depth: int,
    ) -> None:
        """What a command does to the reader: options of the shell, names removed, files written,
        shells begun.
        """
        arguments = [word.text for word in command.words[1:]]
        if command.name in _SETTING:
            self.unsure.update(re.findall(r"[A-Za-z_]\w*", " ".join(arguments)))
        if command.name == "set":
            self.script.shell_options |= _shell_options(arguments)
        elif command.name == "unset":
            for name in arguments:
                if not command.conditional:
                    self.variables.remove(name)
        elif command.name in {"exit", "exec"} and not command.conditional and not command.outer:
            # one in a condition stops where something is amiss, which a person shall see
            self.left = not self.branches and (command.name == "exit" or len(command.words) > 1)
        elif command.name in {"cat", "echo", "printf", "tee", "read"}:
            self.written(command, redirects)
        self.launched_shell(command, depth)

    def written(
        self, command: ShellCommand, redirects: Sequence[tuple[Operator, ShellWord | None]]
    ) -> None:
        body = next((operator for operator, _ in redirects if operator.body is not None), None)
        content = None
        if body:
            content = expand_text(body.body or (), self.variables, body.line)
        if command.name == "read":
            if content is not None and not command.words[-1].text.startswith("-"):
                self.variables.assign(
                    command.words[-1].text, _stripped(content), set(self.variables.used)
                )
            return
        if content is None and command.name == "echo":
            plain = [word for word in command.words[1:] if word.text not in {"-e", "-n", "-E"}]
            content = Traced.join(plain, " ")
        target = next(
            (word for operator, word in redirects if word and operator.text in {">", ">>", ">|"}),
            None,
        )
        if target is not None:
            paths = expand_word(target, self.variables)
        elif command.name == "tee":
            paths = list(command.words[1:])
        else:
            paths = []
        if content is not None and paths:
            self.script.files.append(WrittenFile(paths[-1], content, command.line))

    def launched_shell(self, command: ShellCommand, depth: int) -> None:
        """`bash -c TEXT`, `LAUNCHER ... -c TEXT` and `eval TEXT` are read in their turn, with the
        same variables.
        """
        texts = [word.text for word in command.words]
        inner: Traced | None = None
        if command.name == "eval":
            inner = Traced.join(command.words[1:], " ")
        for index, text in enumerate(texts[:-2]):
            flag = texts[index + 1]
            name = text.rpartition("/")[2]
            is_shell = name in _SHELLS and flag.startswith("-") and flag.endswith("c")
            # Launchers of some clusters take the command so, too. Python's is no shell text.
            is_passed_on = (
                flag == "-c"
                and re.search(r"\s--", texts[index + 2]) is not None
                and not name.startswith("python")
            )
            if is_shell or is_passed_on:
                inner = command.words[index + 2]
                break
        if inner is None or not inner.text.strip():
            return
        if depth >= DEEPEST_SHELL:
            raise ScriptError(
                command.line, "shells are nested too deeply", "this is not a batch script"
            )
        before = len(self.script.commands)
        self.read(inner, outer=command.words, depth=depth + 1)
        if command.name != "eval":
            for started in self.script.commands[before:]:
                for name in started.used & self.variables.values.keys() - self.variables.exported:
                    self.script.not_exported.setdefault(name, started.line)


_UNARY = {"-n": True, "-z": False}  # whether what they ask for is a text
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


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


def _stripped(text: Traced) -> Traced:
    """Without the blanks at both ends, which `read` drops."""
    body = text.text.strip(" \t\n")
    start = 0
    if body:
        start = text.text.index(body)
    return text.cut(start, start + len(body))


def _is_break(token: Token) -> bool:
    return isinstance(token, Operator) and token.text in _BREAKS


def _pipe_targets(tokens: Sequence[Token], index: int) -> tuple[str, ...]:
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


def _shell_options(arguments: Sequence[str]) -> set[str]:
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
