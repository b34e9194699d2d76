"""The script read from top to bottom: assignments kept, commands and written files collected,
nothing run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress

from msgspec.structs import replace

from tr11ops.base.errors import ScriptError
from tr11ops.importer.expansion import (
    SOURCING,
    Script,
    ShellCommand,
    Value,
    WrittenFile,
    expand_text,
    expand_word,
)
from tr11ops.importer.lexer import REDIRECTIONS, Lexer, Operator, ShellWord, Token
from tr11ops.importer.shell_values import ShellValues, all_hold, inverse
from tr11ops.importer.shell_words import (
    BREAKS,
    SHELLS,
    are_options,
    document,
    pipe_targets,
    script_at,
    shell_options,
    stripped,
)
from tr11ops.importer.traced import DEEPEST_NESTING, Traced

MOST_COMMANDS = 5000
DEEPEST_SHELL = 4  # bash -c inside bash -c
# commands that give values to the names among their words
_SETTING = frozenset({"read", "mapfile", "readarray", "getopts"})
_PLACES = ("@", *map(str, range(1, 10)))  # arguments of a function
_DECLARING = frozenset({"export", "declare", "typeset", "readonly", "local"})
_CLOSERS = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}", "]]"})
_STRAY = _CLOSERS | BREAKS - {"(", "(("}  # where a command should begin


def read_shell(
    text: str,
    given: Mapping[str, Traced] | None = None,
    file_at: Callable[[Traced], str | None] | None = None,
    follows: bool = False,
) -> Script:
    """Read a whole script; `given` are variables that Slurm will set, and `file_at` gives the text
    of a sourced file, None where it is not at hand. `follows`: scripts that it starts with a shell
    are read too. Raises ScriptError when it cannot be read.
    """
    script = Script()
    for name, value in (given or {}).items():
        script.variables.assign(name, value, set())
        script.variables.exported.add(name)
    _Reader(script, file_at, follows).read(Lexer(Traced.script(text)).tokens(), outer=())
    return script


class _Reader(ShellValues):
    """Follows the grammar of a shell over the tokens. Every reader of a command returns its status:
    whether it succeeds, None where only a shell could tell.
    """

    def __init__(
        self, script: Script, file_at: Callable[[Traced], str | None] | None, follows: bool
    ):
        super().__init__(script)
        self.file_at = file_at
        self.follows = follows
        self.loops = 0
        self.tokens: Sequence[Token] = ()
        self.position = 0
        self.shells = 0
        self.depth = 0
        self.count = 0
        self.left = False
        # name -> its body, and whether it is defined for certain
        self.functions: dict[str, tuple[Sequence[Token], bool | None]] = {}
        self.calls: list[str] = []
        self.begun = 0
        self.compounds: Mapping[str, Callable[[], bool | None]] = {
            "if": self.read_if,
            "case": self.read_case,
            "while": self.read_loop,
            "until": self.read_loop,
            "for": self.read_for,
            "select": self.read_for,
            "{": self.read_group,
            "(": self.read_subshell,
            "((": self.read_arithmetic,
            "[[": self.read_test,
            "function": self.read_function,
        }

    def read(self, tokens: Sequence[Token], outer: tuple[Traced, ...]) -> None:
        """All statements of one text."""
        before = self.tokens, self.position, self.outer, self.stays
        self.tokens = tokens
        self.position = 0
        self.outer = outer
        self.statements(frozenset())
        self.tokens, self.position, self.outer, self.stays = before

    # ------------------------------------------------------------------ grammar
    @property
    def is_over(self) -> bool:
        return self.position >= len(self.tokens)

    def peek(self) -> str:
        """The next operator, or word without quotes; empty for any other word, and at the end."""
        if self.is_over:
            return ""
        token = self.tokens[self.position]
        if isinstance(token, Operator):
            return token.text
        return token.bare

    def take(self) -> str:
        text = self.peek()
        self.position += 1
        return text

    def skip(self, *texts: str) -> None:
        while not self.is_over and self.peek() in texts:
            self.position += 1

    def statements(self, ends: Set[str]) -> bool | None:
        """Statements up to one of `ends`, which is not taken."""
        status: bool | None = True
        while not self.is_over and not self.left and self.peek() not in ends:
            if self.peek() in {"\n", ";", "&"}:
                self.position += 1
            else:
                status = self.chain()
        return status

    def chain(self) -> bool | None:
        """Pipelines joined by `&&` and `||`."""
        status = self.pipeline()
        while self.peek() in {"&&", "||"}:
            is_and = self.take() == "&&"
            self.skip("\n")
            if not is_and:
                status = inverse(status)
            with self.where(status):
                following = self.pipeline()
            if is_and:
                status = all_hold((status, following))
            else:
                status = inverse(all_hold((status, inverse(following))))
        return status

    def pipeline(self) -> bool | None:
        is_inverted = False
        while self.peek() in {"!", "time"}:
            is_inverted ^= self.take() == "!"
        status = self.command()
        while self.peek() in {"|", "|&"}:
            self.position += 1
            self.skip("\n")
            with self.subshell():
                self.command()
            status = None
        if is_inverted:
            return inverse(status)
        return status

    def command(self) -> bool | None:
        opener = self.peek()
        if opener in _STRAY:
            self.position += 1
            return None
        if self.is_over:
            return None
        line = self.tokens[self.position].line
        before = len(self.script.commands)
        self.depth += 1
        if self.depth > DEEPEST_NESTING:
            raise ScriptError(line, "it is nested too deeply", "this is not a batch script")
        if opener in self.compounds:
            self.position += 1
            status = self.compounds[opener]()
            while self.peek() in {*REDIRECTIONS, "1", "2"}:
                has_target = self.take() not in {"<<", "<<-", "1", "2"}
                self.position += has_target
        else:
            status = self.simple()
        self.depth -= 1
        targets = pipe_targets(self.tokens, self.position)
        for index in range(before, len(self.script.commands)):
            command = self.script.commands[index]
            piped = command.piped_into or targets
            self.script.commands[index] = replace(command, piped_into=piped)
        return status

    def read_if(self) -> None:
        self.begun += 1
        block = self.begun
        number = 0
        opener = "if"
        reached: bool | None = True
        while opener in {"if", "elif"}:
            with self.where(reached):
                holds = self.statements({"then"})
            self.skip("then")
            with self.part(block, number, all_hold((reached, holds))):
                self.statements({"elif", "else", "fi"})
            reached = all_hold((reached, inverse(holds)))
            number += 1
            opener = self.take()
        if opener == "else":
            with self.part(block, number, reached):
                self.statements({"fi"})
            self.position += 1

    def read_case(self) -> None:
        value = None
        if not self.is_over:
            value = self.known(self.tokens[self.position : self.position + 1])
        self.position += 1
        self.skip("\n")
        self.skip("in")
        self.begun += 1
        block = self.begun
        number = 0
        reached: bool | None = True
        while True:
            self.skip("\n", ";")
            if self.is_over or self.peek() == "esac":
                break
            self.skip("(")
            start = self.position
            while not self.is_over and self.peek() not in {")", "\n"}:
                self.position += 1
            fits = None
            if value:
                fits = self.fits(value[0], self.tokens[start : self.position])
            self.position += 1
            with self.part(block, number, all_hold((reached, fits))):
                self.statements({";;", ";&", ";;&", "esac"})
            reached = all_hold((reached, inverse(fits)))
            if self.peek() in {";&", ";;&"}:  # the next part may be run too
                value = None
                reached = None
            self.skip(";;", ";&", ";;&")
            number += 1
        self.position += 1

    def read_loop(self) -> None:
        self.loops += 1  # its condition is run again and again too
        self.statements({"do"})
        self.skip("do")
        with self.where(None):
            self.statements({"done"})
        self.loops -= 1
        self.position += 1

    def read_for(self) -> None:
        if self.peek() != "((":
            self.forget([self.peek()], self.tokens[self.position - 1].line)
        while not self.is_over and self.peek() not in {"do", ";", "\n"}:
            self.position += 1
        self.read_loop()

    def read_group(self) -> bool | None:
        status = self.statements({"}"})
        self.position += 1
        return status

    def read_subshell(self) -> bool | None:
        with self.subshell():
            status = self.statements({")"})
        self.position += 1
        return status

    def read_function(self) -> None:
        """`function NAME {`, or what follows `NAME`; the body is read where it is called."""
        name = self.take()
        self.skip("(")
        self.skip(")", "\n")
        start = self.position
        with self.where(False):
            self.command()
        if self.here is not False:
            body = self.tokens[start : self.position]
            self.functions[name] = body, self.here
            if body:
                self.script.uncalled[name] = body[0].line

    def call(self, words: Sequence[Traced], made_from: set[str]) -> None:
        """A function of the script, with its arguments."""
        name = words[0].text
        self.script.uncalled.pop(name, None)
        if name in self.calls or len(self.calls) >= DEEPEST_SHELL:
            return
        before = self.locals
        values = dict(self.variables.values)
        names = set(_PLACES)
        self.locals = names
        is_sure = self.here is True and self.are_sure(made_from)
        self.forget(names, words[0].line)
        given: tuple[Value, ...] = (tuple(words[1:]), *words[1:])
        for place, value in zip(_PLACES, given, strict=False):
            self.variables.assign(place, value, made_from)
            self.note_sure(place, is_sure, is_added=False)
        body, is_defined = self.functions[name]
        self.calls.append(name)
        with self.where(is_defined):
            self.read(body, self.outer)
        self.calls.pop()
        self.locals = before
        for local in names:
            self.variables.values.pop(local, None)
            if local in values:
                self.variables.values[local] = values[local]

    def read_arithmetic(self) -> bool | None:
        token = self.tokens[self.position - 1]
        assert isinstance(token, Operator)
        return self.calculate(expand_text(token.body or (), self.variables, token.line))

    def read_test(self) -> bool | None:
        """`[[ ... ]]`, with one kind of `&&` and `||`."""
        terms: list[list[Token]] = [[]]
        signs: set[str] = set()
        while not self.is_over and self.peek() != "]]":
            token = self.tokens[self.position]
            if self.peek() in {"&&", "||"}:
                signs.add(self.peek())
                terms.append([])
            elif self.peek() != "\n":
                terms[-1].append(token)
            self.position += 1
        self.position += 1
        answers = [self.holds(term, is_pattern=True) for term in terms]
        if len(signs) > 1:
            return None
        if "||" in signs:
            return inverse(all_hold(map(inverse, answers)))
        return all_hold(answers)

    def simple(self) -> bool | None:
        """A simple command, or `NAME () {`."""
        start = self.position
        words: list[ShellWord] = []
        redirects: list[tuple[Operator, ShellWord | None]] = []
        while not self.is_over and self.peek() not in BREAKS:
            token = self.tokens[self.position]
            self.position += 1
            following = None
            if not self.is_over:
                following = self.tokens[self.position]
            if isinstance(token, ShellWord):
                redirected = isinstance(following, Operator) and following.text in REDIRECTIONS
                if not (redirected and token.bare in {"1", "2"}):
                    words.append(token)
            elif token.body is None and isinstance(following, ShellWord):
                redirects.append((token, following))
                self.position += 1
            else:
                redirects.append((token, None))
        if self.peek() == "(" and len(words) == 1:
            self.position = start
            self.read_function()
            return True
        if self.here is False:
            return None
        status: bool | None = True
        given: list[Traced] = []
        while words and self.assignment(words[0], exported=False, alone=len(words) == 1):
            if len(words) > 1:
                given += expand_word(words[0], self.variables, split=False)
                words = words[1:]
                continue
            status = all_hold((status, self.script.assignments[-1].value.is_known or None))
            words = words[1:]
        if words:
            return self.run(words, redirects, tuple(given))
        return status

    # ------------------------------------------------------------------ commands
    def run(
        self,
        words: Sequence[ShellWord],
        redirects: Sequence[tuple[Operator, ShellWord | None]],
        given: tuple[Traced, ...] = (),
    ) -> bool | None:
        """Keep a command, with what it does to the reader. Nothing is run."""
        line = words[0].line
        keyword = words[0].bare
        self.count += 1
        if self.count > MOST_COMMANDS:
            raise ScriptError(
                line, f"has more than {MOST_COMMANDS} commands", "this is not a batch script"
            )
        if keyword in _DECLARING:
            self.declare(words)
            return True
        self.variables.used.clear()
        found = tuple(field for word in words for field in expand_word(word, self.variables))
        used = frozenset(self.variables.used)
        if not found:
            return None
        if found[0].text in self.functions:
            self.call(found, set(used))
            return None
        command = ShellCommand(
            found,
            line,
            conditional=self.here is not True,
            outer=self.outer,
            used=used,
            looped=self.loops > 0,
            given=given,
        )
        self.script.commands.append(command)
        status = None
        if keyword == "test":
            status = self.holds(words[1:], is_pattern=False)
        elif keyword == "[" and words[-1].bare == "]":
            status = self.holds(words[1:-1], is_pattern=False)
        elif keyword == "let":
            for text in found[1:]:
                status = self.calculate(text)
        elif keyword in {"true", ":", "false"}:
            status = keyword != "false"
        self.effect(command, redirects)
        return status

    def effect(
        self, command: ShellCommand, redirects: Sequence[tuple[Operator, ShellWord | None]]
    ) -> None:
        """What a command does to the reader: options of the shell, names removed, files written,
        shells begun.
        """
        arguments = [word.text for word in command.words[1:]]
        if command.name in _SETTING:
            self.forget(filter(str.isidentifier, arguments), command.line)
        elif command.name == "printf" and arguments[:1] == ["-v"]:
            self.forget(arguments[1:2], command.line)
        if command.name == "set":
            self.script.shell_options |= shell_options(arguments)
        if command.name == "shift" or arguments[:1] == ["--"]:
            self.forget(_PLACES, command.line)
        elif command.name == "unset":
            for name in arguments:
                if not command.conditional:
                    self.variables.remove(name)
        elif command.name == "return" and (self.calls or self.is_sourced):
            self.stays = None
            if not command.conditional:
                self.stays = False
        elif command.name in {"exit", "exec"} and not command.conditional and not command.outer:
            # one in a condition stops where something is amiss, which a person shall see
            self.left = not self.branches and (command.name == "exit" or len(command.words) > 1)
        elif command.name in {"cat", "echo", "printf", "tee", "read"}:
            self.written(command, redirects)
        elif command.name in SOURCING and arguments:
            self.source(command)
        self.launched_shell(command, document(redirects))
        if self.follows:
            self.started_script(command)

    def started_script(self, command: ShellCommand) -> None:
        """`bash FILE ARGUMENTS` and `./FILE.sh ARGUMENTS`, with any launcher before them: read in its
        turn where the file is at hand or was written by this script.
        """
        place = script_at(command.words)
        if command.name in SOURCING or place is None or self.shells >= DEEPEST_SHELL:
            return
        path = command.words[place]
        text = next(
            (one.content for one in reversed(self.script.files) if one.path.text == path.text), None
        )
        if text is None and self.file_at is not None:
            found = self.file_at(path)
            text = None if found is None else Traced.of(found, command.line)
        if text is None:
            self.script.not_read.append((path.text, command.line))
            return
        with suppress(ScriptError):
            tokens = Lexer(text).tokens()
            self.shells += 1
            with self.subshell():
                given = command.words[place + 1 :]
                arguments: tuple[Value, ...] = (tuple(given), *given)
                for name, value in zip(_PLACES, arguments, strict=False):
                    self.variables.assign(name, value, set())
                self.read(tokens, command.words)
            self.shells -= 1

    def source(self, command: ShellCommand) -> None:
        """A sourced file that is at hand is read; all of it counts as the line that sources it."""
        text = None
        if self.file_at is not None and self.shells < DEEPEST_SHELL:
            text = self.file_at(command.words[1])
        tokens = None
        if text is not None:
            # it may hold what a whole script may not
            with suppress(ScriptError):
                tokens = Lexer(Traced.of(text, command.line)).tokens()
        if tokens is None:
            self.script.not_read.append((command.words[1].text, command.line))
            return
        self.shells += 1
        self.read(tokens, command.words)
        self.shells -= 1

    def written(
        self, command: ShellCommand, redirects: Sequence[tuple[Operator, ShellWord | None]]
    ) -> None:
        body = document(redirects)
        content = None
        if body:
            content = expand_text(body.body or (), self.variables, body.line)
        if command.name == "read":
            if content is not None and not command.words[-1].text.startswith("-"):
                self.variables.assign(
                    command.words[-1].text, stripped(content), set(self.variables.used)
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

    def launched_shell(self, command: ShellCommand, document: Operator | None) -> None:
        """`bash -c TEXT`, `LAUNCHER ... -c TEXT`, `bash <<END`, `sbatch <<END` and `eval TEXT` are
        read in their turn, with the same variables.
        """
        texts = [word.text for word in command.words]
        inner: Traced | None = None
        if command.name == "eval":
            inner = Traced.join(command.words[1:], " ")
        for index, text in enumerate(texts):
            behind = texts[index + 1 :]
            flag, argument = (*behind, "", "")[:2]
            name = text.rpartition("/")[2]
            is_shell = name in SHELLS
            # Launchers of some clusters take the command so, too. Python's is no shell text.
            is_passed_on = (
                flag == "-c"
                and re.search(r"\s--", argument) is not None
                and not name.startswith("python")
            )
            if argument and ((is_shell and re.fullmatch("-.*c", flag)) or is_passed_on):
                inner = command.words[index + 2]
                document = None
                break
            is_read = is_shell and (flag == "-s" or are_options(behind))
            if document is not None and (is_read or texts == ["sbatch"]):
                inner = expand_text(document.body or (), self.variables, document.line)
                if not is_shell:
                    self.script.submitted = "\n" * document.line + inner.text
                break
        if inner is None or not inner.text.strip():
            return
        if self.shells >= DEEPEST_SHELL:
            raise ScriptError(
                command.line, "shells are nested too deeply", "this is not a batch script"
            )
        before = len(self.script.commands)
        lexer = Lexer(inner)
        tokens = lexer.tokens()
        if document is None:
            lost = [comment for comment in lexer.comments if "--" in comment.text]
            self.script.lost_comments += lost
        self.shells += 1
        if command.name == "eval":
            self.read(tokens, command.words)
        else:
            with self.subshell():
                self.read(tokens, command.words)
        self.shells -= 1
        if command.name != "eval":
            for started in self.script.commands[before:]:
                for name in started.used & self.variables.values.keys() - self.variables.exported:
                    self.script.not_exported.setdefault(name, started.line)
