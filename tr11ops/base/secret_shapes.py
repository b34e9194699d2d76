"""What a secret looks like in text: one table, for messages (`tr11ops.base.redact`) and published logs (`hub.masking`).

A shape has words in lower case, one of which is in each text that it fits, so that most lines are never looked at with
a regular expression. What it hides is the group of its expression that matched, or all of it. No expression crosses a
line; private keys, which have many, are found by `hub.masking`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from trainer.contract.record import Record

_NO_VALUE = r"(?!(?:none|null|true|false|unset|required|\*+)(?![A-Za-z0-9_-])|<|\$|/\w+/|\.{3,})"
_VALUE = r"[^\s\"',;&<>(){}\[\]]"
_ASSIGNED = r"[\"']?\s{0,3}[=:]\s{0,3}[\"']?"


class SecretShape(Record):
    """One kind of secret. `kind` is what a person reads."""

    kind: str
    words: tuple[str, ...]
    pattern: str

    @cached_property
    def in_bytes(self) -> re.Pattern[bytes]:
        return re.compile(self.pattern.encode("ascii"))

    @cached_property
    def in_text(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.ASCII)

    def hide(self, text: str, instead: str) -> str:
        """The text with other words in place of the secrets of this kind."""
        lowered = text.lower()
        if not any(word in lowered for word in self.words):
            return text
        parts, position = [], 0
        for found in self.in_text.finditer(text):
            start, end = found.span(found.lastindex or 0)
            parts += [text[position:start], instead]
            position = end
        return "".join([*parts, text[position:]])

    def spans(self, line: bytes) -> Iterator[tuple[int, int]]:
        """Where in a line the secrets of this kind begin and end."""
        return (found.span(found.lastindex or 0) for found in self.in_bytes.finditer(line))


SHAPES = (
    SecretShape(
        "Hugging Face token",
        ("hf_", "api_org_"),
        r"(?:hf|api_org)_[A-Za-z0-9]{30,}"
        r"|(?<![A-Za-z0-9])(?:hf(?:_oauth|_jwt)?|api_org)_(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,}",
    ),
    SecretShape("AWS access key", ("akia", "asia"), r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}"),
    SecretShape(  # by its name, or beside the key that it belongs to: alone it is any forty letters
        "AWS secret key",
        ("aws", "secret", "session", "akia"),
        r"(?i:aws[a-z0-9_ .-]{0,30}(?:key|secret|token)|secret[_ ]?access[_ ]?key|session[_ ]?token|AKIA[A-Z0-9]{16})"
        r"[\"']?[^A-Za-z0-9/+\n]{0,8}(?<![A-Za-z0-9/+])([A-Za-z0-9/+]{40,}={0,2})",
    ),
    SecretShape("password in an address", ("://",), r"(?<=[A-Za-z0-9])://([!#-&(-.0-;=?A-~]{1,400})@"),
    SecretShape("JSON web token", ("eyj",), r"eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){1,4}"),
    SecretShape(
        "GitHub or GitLab token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
        r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}",
    ),
    SecretShape(
        "Slack token",
        ("xox", "hooks.slack.com"),
        r"xox[abeprs]-[A-Za-z0-9-]{10,}|hooks\.slack\.com/services/[A-Za-z0-9/]+",
    ),
    SecretShape(
        "API key",
        ("sk-", "aiza", "ya29.", "pypi-age"),
        r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{20,}|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9._-]{10,}"
        r"|pypi-AgE[A-Za-z0-9_-]{20,}",
    ),
    SecretShape(
        "authorization header",
        ("authorization", "bearer", "basic"),
        r"(?i:authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:(?:bearer|basic|token)\s{1,3})?|bearer\s{1,3}|basic\s{1,3})"
        r"(?=[A-Za-z]*[0-9+/=._-])([A-Za-z0-9._~+/=-]{16,})",
    ),
    SecretShape(
        "signed address",
        ("signature=", "sig=", "token="),
        r"(?i:[?&](?:x-(?:amz|goog)-(?:signature|security-token)|signature|sig|(?:access_)?token)=)([^\s&\"'<>]{6,})",
    ),
    SecretShape(
        "password or key",
        ("passw", "api_key", "apikey", "api-key", "secret", "access_key", "access-key", "accesskey", "accountkey",
         "auth_token", "access_token", "_token=", "_key=", "_token\"", "_token'"),
        r"(?i:(?:passw(?:or)?d|api[_-]?key|secret(?:[_-]?(?:access[_-]?)?key)?|access[_-]?key|account_?key|auth_?token"
        rf"|access_?token){_ASSIGNED}{_NO_VALUE})({_VALUE}{{6,}})"
        rf"|\b[A-Z0-9_]{{1,60}}_(?:TOKEN|SECRET|KEY|PASS)(?:=|[\"']:\s?)[\"']?(?i:{_NO_VALUE})({_VALUE}{{8,}})",
    ),
)  # fmt: skip
