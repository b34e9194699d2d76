"""Words expanded with the variables that the script itself sets. Nothing is run; what is not known
stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tr11ops.base.errors import ArithmeticProblem, ScriptError
from tr11ops.importer.lexer import Arithmetic, Literal, Parameter, Part, ShellWord, Substitution
from tr11ops.importer.traced import DEEPEST_NESTING, LARGEST_VALUE, Traced
from trainer.contract.record import Record

# `$((...))` as bash computes it: 64-bit integers, C's operators of the usual kind. No assignment,
# no names.

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|[0-9]+)(?![\w#])|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>!~&|^?:]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_BITS = 1 << 64
_LONGEST = 4096


def evaluate(text: str) -> int:
    """The value of `text`, names already replaced. Raises ArithmeticProblem."""
    if len(text) > _LONGEST:
        raise ArithmeticProblem("the expression is too long")
    if not text.strip():
        return 0
    tokens: list[str] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise ArithmeticProblem(f"{text[position:].strip()[:20]!r} is not read")
        tokens.append(match.group(1) or match.group(2))
        position = match.end()
    parser = _Parser(tokens)
    value = parser.choice(0)
    if parser.position != len(tokens):
        raise ArithmeticProblem(f"{tokens[parser.position]!r} is one too many")
    return value


def _wrapped(value: int) -> int:
    return (value + _BITS // 2) % _BITS - _BITS // 2


class _Parser:
    """Recursive descent; the depth is bounded because every level of parentheses is one call."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.position = 0

    def peek(self) -> str:
        if self.position < len(self.tokens):
            return self.tokens[self.position]
        return ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def choice(self, depth: int) -> int:
        if depth > DEEPEST_NESTING:
            raise ArithmeticProblem("it is nested too deeply")
        value = self.binary(0, depth)
        if self.peek() != "?":
            return value
        self.take()
        yes = self.choice(depth + 1)
        if self.take() != ":":
            raise ArithmeticProblem("? without :")
        no = self.choice(depth + 1)
        if value:
            return yes
        return no

    def binary(self, level: int, depth: int) -> int:
        if level == len(_LEVELS):
            return self.power(depth)
        value = self.binary(level + 1, depth)
        while self.peek() in _LEVELS[level]:
            value = _apply(self.take(), value, self.binary(level + 1, depth))
        return value

    def power(self, depth: int) -> int:
        base = self.unary(depth)
        if self.peek() != "**":
            return base
        if depth > DEEPEST_NESTING:
            raise ArithmeticProblem("it is nested too deeply")
        self.take()
        exponent = self.power(depth + 1)
        if exponent < 0:
            raise ArithmeticProblem("a negative exponent")
        return _wrapped(pow(base, exponent, _BITS))

    def unary(self, depth: int) -> int:
        if depth > DEEPEST_NESTING:
            raise ArithmeticProblem("it is nested too deeply")
        token = self.take()
        if token == "(":
            value = self.choice(depth + 1)
            if self.take() != ")":
                raise ArithmeticProblem("( without )")
            return value
        if token in {"+", "-", "!", "~"}:
            value = self.unary(depth + 1)
            return {"+": value, "-": _wrapped(-value), "!": int(not value), "~": ~value}[token]
        if not token[:1].isdigit():
            raise ArithmeticProblem(
                f"a number is missing before {token!r}" if token else "a number is missing"
            )
        octal = token[0] == "0" and token.isdigit()
        try:
            return _wrapped(int(token, 8 if octal else 0))
        except ValueError:
            raise ArithmeticProblem(f"{token!r} is not a number") from None


def _apply(operator: str, left: int, right: int) -> int:
    if operator in {"/", "%"}:
        if right == 0:
            raise ArithmeticProblem("a division by zero")
        # towards zero, as in C
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return _wrapped(quotient if operator == "/" else left - quotient * right)
    if operator in {"<<", ">>"}:
        if not 0 <= right < 64:
            raise ArithmeticProblem("a shift outside 0 to 63")
        return _wrapped(left << right if operator == "<<" else left >> right)
    results = {
        "+": left + right,
        "-": left - right,
        "*": left * right,
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
        "==": left == right,
        "!=": left != right,
        "&": left & right,
        "^": left ^ right,
        "|": left | right,
        "&&": bool(left) and bool(right),
        "||": bool(left) or bool(right),
    }
    return _wrapped(int(results[operator]))


_BLANKS = " \t\n"
_NAME_IN_ARITHMETIC = re.compile(r"(?<![\w#])[A-Za-z_]\w*", re.ASCII)
MOST_CHARACTERS = 8 * 1024 * 1024  # of all expansions of one script together
MOST_FIELDS = 20_000
_DEEPEST_NAMES = 8
# What Slurm sets in a job, so that a default beside it says nothing of the job.
_OF_SLURM = "SLURM_"

Value = Traced | tuple[Traced, ...]  # text, or an array


@dataclass
class Variables:
    """What the script has set so far, which names each value was made from, and what could not be
    evaluated.
    """

    values: dict[str, Value] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    origins: dict[str, set[str]] = field(default_factory=dict)
    unread: dict[tuple[str, int], str] = field(default_factory=dict)  # (source, line) -> why
    # defaults of the script's own arguments: (number, line) -> what was taken for it
    assumed: dict[tuple[str, int], str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    spent: int = 0

    def assign(self, name: str, value: Value, made_from: set[str]) -> None:
        """Set `name`; remember what it was made from, also what those were made from."""
        reached = set(made_from)
        for other in made_from:
            reached |= self.origins.get(other, set())
        self.values[name] = value
        self.origins[name] = reached
        self.removed.discard(name)

    def remove(self, name: str) -> None:
        """`unset NAME`: from here on the name is known to be empty."""
        self.values.pop(name, None)
        self.removed.add(name)

    def text(self, name: str) -> Traced | None:
        """The value as one text (an array's first element), or None when the script does not set
        it.
        """
        value = self.values.get(name)
        if isinstance(value, tuple):
            if value:
                return value[0]
            return Traced()
        return value

    def spend(self, count: int, line: int) -> None:
        """Account for expanded characters. Raises ScriptError when the script grows without end."""
        self.spent += count
        if count > LARGEST_VALUE or self.spent > MOST_CHARACTERS:
            raise ScriptError(
                line,
                "a value grows beyond all measure",
                "a variable is made of itself again and again",
            )


def expand_word(word: ShellWord, variables: Variables, split: bool = True) -> list[Traced]:
    """The fields that a word becomes; with `split=False` (assignments) always exactly one."""
    builder = _Fields(word.line, split)
    _expand_into(word.parts, variables, builder)
    fields = builder.finish()
    variables.spend(sum(len(field) for field in fields), word.line)
    return fields


def expand_text(parts: Sequence[Part], variables: Variables, line: int) -> Traced:
    """Parts as one text, as between double quotes or on the right of `=`."""
    return expand_word(ShellWord(tuple(parts), line), variables, split=False)[0]


class _Fields:
    """Collects text; unquoted blanks from expansions begin a new field."""

    def __init__(self, line: int, split: bool):
        self.line = line
        self.split = split
        self.done: list[Traced] = []
        self.current: list[Traced] = []
        self.started = False

    def add(self, text: Traced) -> None:
        self.current.append(text)
        self.started = True

    def add_split(self, text: Traced) -> None:
        """Unquoted text of an expansion; unknown parts of it are never split."""
        if not self.split:
            self.current.append(text)
            return
        start: int | None = None
        for index in range(len(text) + 1):
            blank = index == len(text) or (
                text.text[index] in _BLANKS and not text.unknown_at(index)
            )
            if not blank and start is None:
                start = index
            elif blank and start is not None:
                self.add(text.cut(start, index))
                start = None
            if blank and index < len(text):
                self.end()

    def end(self) -> None:
        if self.started:
            self.done.append(Traced.join(self.current))
            if len(self.done) > MOST_FIELDS:
                raise ScriptError(
                    self.line, f"has more than {MOST_FIELDS} words", "this is not a batch script"
                )
        self.current = []
        self.started = False

    def finish(self) -> list[Traced]:
        if not self.split:
            return [Traced.join(self.current)]
        self.end()
        return self.done


def _expand_into(parts: Sequence[Part], variables: Variables, fields: _Fields) -> None:
    for part in parts:
        match part:
            case Literal():
                fields.add(part.text)
            case Parameter():
                _parameter(part, variables, fields)
            case Arithmetic():
                fields.add(_arithmetic(part, variables))
            case Substitution():
                variables.unread.setdefault((part.source, part.line), "is not evaluated")
                fields.add(Traced.of(part.source, part.line, unknown=True))


def _parameter(part: Parameter, variables: Variables, fields: _Fields) -> None:
    variables.used.add(part.name)
    text, items = _looked_up(part, variables)
    missing = text is None
    if text is None and part.name in variables.removed:
        text = Traced()
    is_slurms = missing and part.name.startswith(_OF_SLURM)
    if (
        part.operator is not None
        and not is_slurms
        and _default_taken(
            part, missing or not text, missing=missing, variables=variables, fields=fields
        )
    ):
        return
    if text is None:
        index = ""
        if part.index is not None:
            index = f"[{part.index}]"
        fields.add(Traced.of("${" + part.name + index + "}", part.line, unknown=True))
    elif part.quoted and items is not None and "@" in {part.index, part.name} and fields.split:
        for number, item in enumerate(items):
            if number:
                fields.end()
            fields.add(item)
    elif part.quoted:
        fields.add(text)
    else:
        fields.add_split(text)


def _looked_up(
    part: Parameter, variables: Variables
) -> tuple[Traced | None, tuple[Traced, ...] | None]:
    """The parameter's text (None: the script does not set it), and its elements where all are
    meant.
    """
    value = variables.values.get(part.name)
    if part.index is None and part.name not in {"@", "*"}:
        return variables.text(part.name), None
    if part.index is not None and part.index.isdigit():
        return _element(value, int(part.index)), None
    if value is None:
        return None, None
    if isinstance(value, tuple):
        items = value
    else:
        items = (value,)
    return Traced.join(items, " "), items


def _default_taken(
    part: Parameter, empty: bool, missing: bool, variables: Variables, fields: _Fields
) -> bool:
    """`:-`, `:=`, `:+` and their forms without a colon; true when they said all there is to say."""
    assert part.operator is not None
    kind = part.operator[-1]
    absent = empty if part.operator.startswith(":") else missing
    if kind == "+":
        if not absent:
            _expand_default(part, variables, fields)
        elif part.quoted:
            fields.add(Traced())
        return True
    if not absent or kind == "?":
        return False
    if missing and part.name.isdecimal():
        taken = expand_text(part.default, variables, part.line).text
        variables.assumed.setdefault((part.name, part.line), taken)
    if kind == "=":
        variables.assign(part.name, expand_text(part.default, variables, part.line), set())
    _expand_default(part, variables, fields)
    return True


def _element(value: Value | None, index: int) -> Traced | None:
    if value is None:
        return None
    if isinstance(value, tuple):
        items = value
    else:
        items = (value,)
    if index < len(items):
        return items[index]
    return Traced()


def _expand_default(part: Parameter, variables: Variables, fields: _Fields) -> None:
    """The word after `:-`; unquoted, its own blanks split too."""
    if part.quoted:
        fields.add(Traced())
        _expand_into(part.default, variables, fields)
        return
    for piece in part.default:
        if isinstance(piece, Literal) and not piece.quoted:
            fields.add_split(piece.text)
        else:
            _expand_into([piece], variables, fields)


def _arithmetic(part: Arithmetic, variables: Variables) -> Traced:
    return calculated(expand_text(part.body, variables, part.line), part.source, variables)


def calculated(text: Traced, source: str, variables: Variables) -> Traced:
    """The value of an arithmetic expression; `source`, unknown, where it has none."""
    try:
        if not text.is_known:
            raise ArithmeticProblem(f"{text.unknowns[0]} is not known")
        value = evaluate(_named(text.text, variables, 0))
    except ArithmeticProblem as problem:
        variables.unread.setdefault((source, text.line), str(problem))
        return Traced.of(source, text.line, unknown=True)
    return Traced.of(str(value), text.line)


def _named(expression: str, variables: Variables, depth: int) -> str:
    """Names in an arithmetic expression replaced by their values, themselves expressions, as bash
    does.
    """
    if depth > _DEEPEST_NAMES:
        raise ArithmeticProblem("a name stands for itself")

    def replace(match: re.Match[str]) -> str:
        name = match.group()
        variables.used.add(name)
        value = variables.text(name)
        if value is None and name in variables.removed:
            return "0"
        if value is None or not value.is_known:
            raise ArithmeticProblem(f"{name} is not known")
        inner = value.text.strip() or "0"
        if re.fullmatch(r"[0-9]+", inner):
            return inner
        return f"({_named(inner, variables, depth + 1)})"

    replaced = _NAME_IN_ARITHMETIC.sub(replace, expression)
    if len(replaced) > LARGEST_VALUE:
        raise ArithmeticProblem("the expression is too long")
    return replaced


# ---------------------------------------------------------------------------
# What the reader finds in a batch script.

SOURCING = frozenset({"source", "."})


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
    one stands in. `looped`: it stands in a loop. `given`: `NAME=value` before it.
    """

    words: tuple[Traced, ...]
    line: int
    conditional: bool
    piped_into: tuple[str, ...] = ()
    outer: tuple[Traced, ...] = ()
    used: frozenset[str] = frozenset()
    looped: bool = False
    given: tuple[Traced, ...] = ()

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
    # functions that nothing calls
    uncalled: dict[str, int] = field(default_factory=dict)
    # sourced files that are not at hand: (file, line)
    not_read: list[tuple[str, int]] = field(default_factory=list)
    # the text of `sbatch <<END`, on its own lines
    submitted: str = ""
