"""`$((...))` as bash computes it: 64-bit integers, C's operators of the usual kind. No assignment, no names."""

from __future__ import annotations

import re

from tr11ops.base.errors import ArithmeticProblem
from tr11ops.importer.traced import DEEPEST_NESTING

_TOKEN = re.compile(r"\s*(?:(0[xX][0-9a-fA-F]+|[0-9]+)(?![\w#])|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>!~&|^?:]))")
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"), ("+", "-"),
    ("*", "/", "%"),
)  # fmt: skip
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
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

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
        return yes if value else no

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
            raise ArithmeticProblem(f"a number is missing before {token!r}" if token else "a number is missing")
        octal = token[0] == "0" and token.isdigit()
        try:
            return _wrapped(int(token, 8 if octal else 0))
        except ValueError:
            raise ArithmeticProblem(f"{token!r} is not a number") from None


def _apply(operator: str, left: int, right: int) -> int:
    if operator in {"/", "%"}:
        if right == 0:
            raise ArithmeticProblem("a division by zero")
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards zero, as in C
        return _wrapped(quotient if operator == "/" else left - quotient * right)
    if operator in {"<<", ">>"}:
        if not 0 <= right < 64:
            raise ArithmeticProblem("a shift outside 0 to 63")
        return _wrapped(left << right if operator == "<<" else left >> right)
    results = {
        "+": left + right, "-": left - right, "*": left * right,
        "<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right,
        "==": left == right, "!=": left != right, "&": left & right, "^": left ^ right, "|": left | right,
        "&&": bool(left) and bool(right), "||": bool(left) or bool(right),
    }  # fmt: skip
    return _wrapped(int(results[operator]))
