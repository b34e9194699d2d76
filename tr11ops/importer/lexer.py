"""Shell text into words and operators. Quoting, continuations, comments, here-documents; nothing is
expanded here.
"""

from __future__ import annotations

import re

from tr11ops.base.errors import ScriptError
from tr11ops.importer.traced import DEEPEST_NESTING, Traced, placeholder_at
from trainer.contract.record import Record

_OPERATORS = (
    "&>>",
    "<<<",
    "<<-",
    ";;&",
    "&&",
    "||",
    ";;",
    ";&",
    "|&",
    "<<",
    ">>",
    ">&",
    "<&",
    "&>",
    ">|",
    "<>",
    ";",
    "&",
    "|",
    "(",
    ")",
    "<",
    ">",
)
REDIRECTIONS = frozenset({"&>>", "<<<", "<<-", "<<", ">>", ">&", "<&", "&>", ">|", "<>", "<", ">"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ARRAY_START = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=", re.ASCII)
_PARAMETER = re.compile(
    r"(?:([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])(?:\[([0-9]+|[@*])\])?)(:?[-=+?])?", re.ASCII
)
_SPECIAL = re.compile(r"[0-9@*#?$!-]")
_WORD_ENDS = " \t\n\r\\'\"$`&|;()<>"
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "\r", "a": "\a", "e": "\x1b"}


class Literal(Record):
    """Text as it stands; `quoted` text is never split, and makes a word even when empty."""

    text: Traced
    quoted: bool


class Parameter(Record):
    """`$NAME`, `${NAME}`, `${NAME[@]}`, `${NAME:-default}`."""

    name: str
    index: str | None
    operator: str | None
    default: tuple[Part, ...]
    quoted: bool
    line: int


class Arithmetic(Record):
    """`$((...))`: its inside, as between double quotes."""

    body: tuple[Part, ...]
    source: str
    quoted: bool
    line: int


class Substitution(Record):
    """What only a shell could find out: `$(...)`, backquotes, `${NAME%suffix}` and their like. Kept
    as written.
    """

    source: str
    quoted: bool
    line: int


Part = Literal | Parameter | Arithmetic | Substitution


class ShellWord(Record):
    """One word before expansion. `array`: the words of `NAME=(...)`."""

    parts: tuple[Part, ...]
    line: int
    array: tuple[ShellWord, ...] | None = None

    @property
    def bare(self) -> str:
        """The text of a word without quotes or expansions; empty for any other."""
        plain = all(isinstance(part, Literal) and not part.quoted for part in self.parts)
        if plain:
            return "".join(part.text.text for part in self.parts if isinstance(part, Literal))
        return ""


class Operator(Record):
    """`;`, `|`, a newline, a redirection. `body` is the here-document of `<<`, or what is inside
    `((`.
    """

    text: str
    line: int
    body: tuple[Part, ...] | None = None


Token = ShellWord | Operator


class Lexer:
    """One pass over shell text. `comments` collects what each `#` removed."""

    def __init__(self, source: Traced):
        self.source = source
        self.text = source.text
        self.position = 0
        self.depth = 0
        self.comments: list[Traced] = []

    # ------------------------------------------------------------------ tokens
    def tokens(self, closing: str = "") -> list[Token]:
        """All tokens, or those before `closing`. Raises ScriptError for quotes or here-documents
        without an end.
        """
        found: list[Token] = []
        # index of the operator, delimiter, quoted, strip tabs
        pending: list[tuple[int, str, bool, bool]] = []
        started = self.line()
        while True:
            self.skip_blanks()
            if self.position >= len(self.text):
                if pending:
                    self.read_documents(found, pending)
                if closing:
                    raise ScriptError(
                        started, f"the list is not closed with {closing!r}", "repair the script"
                    )
                return found
            line = self.line()
            if self.plain() and self.text[self.position] == "\n":
                self.position += 1
                found.append(Operator("\n", line))
                self.read_documents(found, pending)
                pending = []
                continue
            operator = self.operator()
            if operator is None:
                found.append(self.word())
                continue
            if operator == "(" and not closing:
                inside = self.double_parentheses(self.position)
                if inside is not None:
                    found.append(Operator("((", line, inside))
                    continue
            self.position += len(operator)
            if closing and operator == closing:
                return found
            found.append(Operator(operator, line))
            if operator in {"<<", "<<-"}:
                self.skip_blanks()
                delimiter = self.word()
                texts = [part.text.text for part in delimiter.parts if isinstance(part, Literal)]
                quoted = any(isinstance(part, Literal) and part.quoted for part in delimiter.parts)
                pending.append((len(found) - 1, "".join(texts), quoted, operator == "<<-"))

    def line(self) -> int:
        return self.source.line_at(self.position)

    def plain(self) -> bool:
        """The current character is shell text, not something already found unknown."""
        return not self.source.unknown_at(self.position)

    def operator(self) -> str | None:
        if not self.plain() or placeholder_at(self.text, self.position) > self.position:
            return None
        for text in _OPERATORS:
            if self.text.startswith(text, self.position):
                if text in {"<", ">"} and self.text.startswith("(", self.position + 1):
                    return None  # process substitution: a word
                return text
        return None

    def skip_blanks(self) -> None:
        """Blanks, continued lines and a comment."""
        while self.position < len(self.text) and self.plain():
            if self.text[self.position] in " \t\r":
                self.position += 1
            elif self.text.startswith("\\\n", self.position):
                self.position += 2
            elif self.text[self.position] == "#":
                end = self.text.find("\n", self.position)
                if end < 0:
                    end = len(self.text)
                self.comments.append(self.source.cut(self.position, end))
                self.position = end
            else:
                return

    def read_documents(
        self, found: list[Token], pending: list[tuple[int, str, bool, bool]]
    ) -> None:
        """The bodies of the here-documents that this line began."""
        for index, delimiter, quoted, strip in pending:
            operator = found[index]
            assert isinstance(operator, Operator)
            lines: list[Traced] = []
            while True:
                if self.position >= len(self.text):
                    what = f"the here-document that should end with {delimiter[:40]!r} has no end"
                    raise ScriptError(operator.line, what, "repair the script")
                end = self.text.find("\n", self.position)
                if end < 0:
                    end = len(self.text)
                line = self.source.cut(self.position, end)
                self.position = min(end + 1, len(self.text))
                if strip:
                    line = line.cut(len(line.text) - len(line.text.lstrip("\t")))
                if line.text == delimiter:
                    break
                lines.append(Traced.join([line, Traced.of("\n", line.line or operator.line)]))
            body = Traced.join(lines)
            parts = (
                (Literal(body, True),)
                if quoted
                else Lexer(body).quoted_parts(end="", document=True)
            )
            found[index] = Operator(operator.text, operator.line, parts)

    # ------------------------------------------------------------------ words
    def word(self) -> ShellWord:
        """One word; the position is on its first character."""
        line = self.line()
        parts = list[Part]()
        start = self.position
        while self.position < len(self.text):
            character = self.text[self.position]
            if not self.plain():
                self.literal(parts, 1, quoted=True)
            elif character in " \t\n\r":
                break
            elif self.text.startswith(("<(", ">("), self.position):
                parts.append(self.substitution(self.position + 1, quoted=False))
            elif character == "(" and _ARRAY_START.fullmatch(self.text, start, self.position):
                self.position += 1
                with_depth = self.deeper()
                items = tuple(
                    token for token in self.tokens(closing=")") if isinstance(token, ShellWord)
                )
                self.depth = with_depth
                return ShellWord(tuple(parts), line, items)
            elif self.operator() is not None:
                break
            else:
                self.word_part(parts, character)
        return ShellWord(tuple(parts), line)

    def word_part(self, parts: list[Part], character: str) -> None:
        if character == "\\":
            if self.text.startswith("\\\n", self.position):
                self.position += 2
            else:
                self.position += 1
                if self.position < len(self.text):
                    self.literal(parts, 1, quoted=True)
        elif character == "'":
            self.single_quoted(parts)
        elif character == '"':
            self.position += 1
            parts += self.quoted_parts(end='"') or (Literal(Traced(), True),)
        elif character == "$" and self.text.startswith("$'", self.position):
            self.escaped_string(parts)
        elif character == "$" and self.text.startswith('$"', self.position):
            self.position += 1
        elif character in "$`":
            parts.append(self.dollar(quoted=False))
        elif self.placeholder(parts):
            return
        else:
            end = self.position + 1
            while (
                end < len(self.text)
                and self.text[end] not in _WORD_ENDS
                and not self.source.unknown_at(end)
            ):
                end += 1
            self.literal(parts, end - self.position, quoted=False)

    def placeholder(self, parts: list[Part]) -> bool:
        """`<PATH TO VOCAB>`, taken as one unknown piece of a word; false where none begins here."""
        end = placeholder_at(self.text, self.position)
        if end == self.position:
            return False
        text = self.source.cut(self.position, end)
        parts.append(Literal(Traced.of(text.text, text.line, unknown=True), True))
        self.position = end
        return True

    def literal(self, parts: list[Part], length: int, quoted: bool) -> None:
        parts.append(Literal(self.source.cut(self.position, self.position + length), quoted))
        self.position += length

    def single_quoted(self, parts: list[Part]) -> None:
        end = self.position + 1
        while end < len(self.text) and (self.text[end] != "'" or self.source.unknown_at(end)):
            end += 1
        if end >= len(self.text):
            raise ScriptError(self.line(), "a single quote is not closed", "repair the script")
        inside = Lexer(self.source.cut(self.position + 1, end))
        self.position = end + 1
        parts += inside.pieces() or [Literal(Traced(), True)]

    def pieces(self) -> list[Part]:
        """Text of single quotes: literal, but for placeholders."""
        parts: list[Part] = []
        while self.position < len(self.text):
            if self.plain() and self.placeholder(parts):
                continue
            stop = self.text.find("<", self.position + 1)
            self.literal(
                parts, (stop if stop >= 0 else len(self.text)) - self.position, quoted=True
            )
        return parts

    def escaped_string(self, parts: list[Part]) -> None:
        """`$'...'` with the common escapes."""
        line = self.line()
        text = ""
        self.position += 2
        while self.position < len(self.text) and self.text[self.position] != "'":
            if self.text[self.position] == "\\" and self.position + 1 < len(self.text):
                following = self.text[self.position + 1]
                text += _ESCAPES.get(following, "\\" + following)
                self.position += 2
            else:
                text += self.text[self.position]
                self.position += 1
        if self.position >= len(self.text):
            raise ScriptError(line, "a single quote is not closed", "repair the script")
        self.position += 1
        parts.append(Literal(Traced.of(text, line), True))

    def quoted_parts(self, end: str, document: bool = False) -> tuple[Part, ...]:
        """What stands between double quotes (or in a here-document), up to and without `end`."""
        parts: list[Part] = []
        opened = self.source.line_at(max(0, self.position - 1))
        special = "$`\\" + ("" if document else '"')
        while self.position < len(self.text):
            character = self.text[self.position]
            if self.plain() and end and character == end:
                self.position += 1
                return tuple(parts)
            if self.plain() and character == "\\" and self.position + 1 < len(self.text):
                following = self.text[self.position + 1]
                if following == "\n":
                    self.position += 2
                    continue
                self.position += following in special
                self.literal(parts, 1, quoted=True)
            elif self.plain() and character in "$`":
                parts.append(self.dollar(quoted=True))
            elif self.plain() and character == "<" and self.placeholder(parts):
                continue
            else:
                stop = self.position + 1
                while (
                    stop < len(self.text)
                    and self.text[stop] not in '$`\\"}<'
                    and not self.source.unknown_at(stop)
                ):
                    stop += 1
                self.literal(parts, stop - self.position, quoted=True)
        if end:
            raise ScriptError(
                opened, f"a quote or brace ({end}) is not closed", "repair the script"
            )
        return tuple(parts)

    # ------------------------------------------------------------------ what begins with $ or a
    # backquote
    def dollar(self, quoted: bool) -> Part:
        start = self.position
        if self.text[start] == "`":
            return self.backquoted(quoted)
        if self.text.startswith("$((", start):
            return self.arithmetic(quoted)
        if self.text.startswith("$(", start):
            return self.substitution(start + 1, quoted)
        if self.text.startswith("${", start):
            return self.braced(quoted)
        match = _NAME.match(self.text, start + 1) or _SPECIAL.match(self.text, start + 1)
        if match:
            end = match.end()
        else:
            end = start + 1
        for index in range(start + 1, end):  # a name does not run on into text found unknown
            if self.source.unknown_at(index):
                end = index
                break
        line = self.line()
        self.position = end
        if end == start + 1:
            return Literal(self.source.cut(start, end), quoted)
        return Parameter(
            self.text[start + 1 : end], None, operator=None, default=(), quoted=quoted, line=line
        )

    def backquoted(self, quoted: bool) -> Substitution:
        line = self.line()
        start = self.position
        end = start + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 1 + (self.text[end] == "\\")
        if end >= len(self.text):
            raise ScriptError(line, "a backquote is not closed", "repair the script")
        self.position = end + 1
        return Substitution(self.text[start : end + 1], quoted, line)

    def deeper(self) -> int:
        """One level further down; returns the level to come back to."""
        before = self.depth
        self.depth += 1
        if self.depth > DEEPEST_NESTING:
            raise ScriptError(self.line(), "it is nested too deeply", "this is not a batch script")
        return before

    def substitution(self, opening: int, quoted: bool) -> Substitution:
        """`$(...)`, from its parenthesis at `opening`: skipped with regard to quotes, never read."""
        start = self.position
        line = self.line()
        level = 0
        index = opening
        quote = ""
        while index < len(self.text):
            character = self.text[index]
            if character == "\\" and quote != "'":
                index += 1
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif character == "(":
                level += 1
            elif character == ")":
                level -= 1
                if level == 0:
                    self.position = index + 1
                    return Substitution(self.text[start : index + 1], quoted, line)
            index += 1
        raise ScriptError(line, "a command substitution is not closed", "repair the script")

    def arithmetic(self, quoted: bool) -> Part:
        start = self.position
        line = self.line()
        body = self.double_parentheses(start + 1)
        if body is None:
            return self.substitution(start + 1, quoted)  # $( (...) ), a subshell
        return Arithmetic(body, self.text[start : self.position], quoted, line)

    def double_parentheses(self, opening: int) -> tuple[Part, ...] | None:
        """The inside of `((...))`; None, and nothing read, where `opening` begins no such."""
        if not self.text.startswith("((", opening):
            return None
        level = 1
        index = opening + 2
        while index < len(self.text):
            level += (self.text[index] == "(") - (self.text[index] == ")")
            if level == 0:
                break
            index += 1
        if not self.text.startswith("))", index):
            return None
        before = self.deeper()
        inner = Lexer(self.source.cut(opening + 2, index))
        inner.depth = self.depth
        body = inner.quoted_parts(end="", document=True)
        self.depth = before
        self.position = index + 2
        return body

    def braced(self, quoted: bool) -> Part:
        start = self.position
        line = self.line()
        before = self.deeper()
        match = _PARAMETER.match(self.text, start + 2)
        if match is not None:
            name, index, operator = match.groups()
            self.position = match.end()
            if operator is None and self.text.startswith("}", self.position):
                self.position += 1
                self.depth = before
                return Parameter(name, index, operator=None, default=(), quoted=quoted, line=line)
            if operator is not None:
                default = self.default_parts(quoted)
                self.depth = before
                return Parameter(
                    name, index, operator=operator, default=default, quoted=quoted, line=line
                )
        self.position = start + 2
        self.default_parts(quoted)
        self.depth = before
        return Substitution(self.text[start : self.position], quoted, line)

    def default_parts(self, quoted: bool) -> tuple[Part, ...]:
        """The word inside `${NAME:-word}`, with the quotes it may hold, past its closing brace."""
        if quoted:
            return self.quoted_parts(end="}")
        parts: list[Part] = []
        opened = self.line()
        while self.position < len(self.text):
            character = self.text[self.position]
            if not self.plain():
                self.literal(parts, 1, quoted=True)
            elif character == "}":
                self.position += 1
                return tuple(parts)
            elif character in "\\'\"$`":
                self.word_part(parts, character)
            elif not self.placeholder(parts):
                self.literal(parts, 1, quoted=False)
        raise ScriptError(opened, "a quote or brace (}) is not closed", "repair the script")
