"""What a secret looks like in text: one table, for cards, messages (`tr11ops.base.redact`) and logs (`hub.masking`).

The forms of many services' tokens are data, `secret_rules.json`, taken from gitleaks; those here are of what people
print beside: assignments, options of commands, headers, addresses. A shape has words, one of which is in each text that
it fits, in capitals where that matters, so that most lines are never looked at with an expression. What it hides is the
group of its expression that matched, or all of it. No expression crosses a line, and each takes a number of steps that
grows as the text does: no repeat but the last has no bound. Private keys, which have many lines, are found by
`hub.masking`. Standard library only, pure but for the reading of the data.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.contract.record import Record
from trainer.contract.secret_names import is_plain, is_secret_name, reference_of

RULES_FILE = Path(__file__).with_name("secret_rules.json")
_NO_VALUE = r"(?!(?:none|null|true|false|unset|required|\*{1,200})(?![A-Za-z0-9_-])|<|\$|/\w{1,200}/|\.{3})"
_VALUE = r"[^\s\"',;&<>(){}\[\]]"
_ASSIGNED = r"[\"']?\s{0,3}[=:]\s{0,3}[\"']?"


class SecretShape(Record, dict=True):
    """One kind of secret. `kind` is what a person reads.

    `entropy`: bits a character below which what fits is none: a word, a placeholder. Where the expression has a group
    `name`, that must be the name of a secret. `is_sure`: it is one wherever it stands, in a card as well.
    """

    kind: str
    words: tuple[str, ...]
    pattern: str
    entropy: float = 0.0
    is_sure: bool = True

    @cached_property
    def in_bytes(self) -> re.Pattern[bytes]:
        return re.compile(self.pattern.encode("ascii"))

    @cached_property
    def in_text(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.ASCII)

    def may_fit(self, text: str, lowered: str) -> bool:
        """Whether a text, here also in lower case, holds one of the words."""
        return any(word in (text if word.isupper() else lowered) for word in self.words)

    def fits(self, text: str) -> bool:
        """Whether a text holds a secret of this kind."""
        return any(True for _ in self._found(self.in_text, text))

    def hide(self, text: str, instead: str) -> str:
        """The text with other words in place of the secrets of this kind."""
        parts, position = [], 0
        for start, end in self._found(self.in_text, text):
            parts += [text[position:start], instead]
            position = end
        return "".join([*parts, text[position:]])

    def spans(self, line: bytes) -> Iterator[tuple[int, int]]:
        """Where in a line the secrets of this kind begin and end."""
        return self._found(self.in_bytes, line)

    def _found(self, pattern: re.Pattern[Any], text: Any) -> Iterator[tuple[int, int]]:
        for match in pattern.finditer(text):
            if "name" in pattern.groupindex and not is_secret_name(_text(match["name"])):
                continue
            start, end = match.span(match.lastindex or 0)
            if self.entropy and bits_a_character(_text(text[start:end])) < self.entropy:
                continue
            yield start, end


def bits_a_character(text: str) -> float:
    """How evenly a text uses its characters: 0 for one that repeats one, 4 for random hexadecimal digits."""
    if not text:
        return 0.0
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def _text(found: str | bytes) -> str:
    return found if isinstance(found, str) else found.decode("latin-1")


SHAPES = (
    SecretShape(
        "Hugging Face token",
        ("hf_", "api_org_"),
        r"(?:hf|api_org)_[A-Za-z0-9]{30,}"
        r"|(?<![A-Za-z0-9])(?:hf(?:_oauth|_jwt)?|api_org)_(?=[a-z]{0,200}[A-Z0-9])[A-Za-z0-9]{8,}",
    ),
    SecretShape("AWS access key", ("akia", "asia"), r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}"),
    SecretShape(  # by its name, or beside the key that it belongs to: alone it is any forty letters
        "AWS secret key",
        ("aws", "secret", "session", "akia"),
        r"(?i:aws[a-z0-9_ .-]{0,30}(?:key|secret|token)|secret[_ ]?access[_ ]?key|session[_ ]?token|AKIA[A-Z0-9]{16})"
        r"[\"']?[^A-Za-z0-9/+\n]{0,8}(?<![A-Za-z0-9/+])([A-Za-z0-9/+]{40,4000}={0,2})",
    ),
    SecretShape("password in an address", ("://",), r"(?<=[A-Za-z0-9])://([!#-&(-.0-9;=?A-~]{0,200}:[!#-&(-.0-;=?A-~]{1,400})@"),
    SecretShape(  # or only a user's name, which many addresses have
        "token in an address", ("://",), r"(?<=[A-Za-z0-9])://([!#-&(-.0-9;=?A-~]{1,400})@", is_sure=False
    ),
    SecretShape(
        "JSON web token", ("eyj",), r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,4000}(?:\.[A-Za-z0-9_-]{0,4000}){1,4}"
    ),
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
        r"(?=[A-Za-z]{0,200}[0-9+/=._-])([A-Za-z0-9._~+/=-]{16,})",
    ),
    SecretShape(
        "signed address",
        ("signature=", "sig=", "token="),
        r"(?i:[?&](?:x-(?:amz|goog)-(?:signature|security-token)|signature|sig|(?:access_)?token)=)([^\s&\"'<>]{6,})",
    ),
    SecretShape(
        "password or key",
        ("passw", "passphrase", "api_key", "apikey", "api-key", "secret", "access_key", "access-key", "accesskey",
         "accountkey", "account_key", "auth_token", "access_token", "private_key", "connection_string", "sharedaccess"),
        r"(?i:(?:passw(?:or)?d|passphrase|api[_-]?key|secret(?:[_-]?(?:access[_-]?)?key)?|access[_-]?key|account_?key"
        rf"|auth_?token|access_?token|private_?key|shared_?access_?(?:key|signature)){_ASSIGNED}{_NO_VALUE})({_VALUE}{{6,}})",
    ),
    SecretShape(  # NAME=value of a shell, 'NAME': 'value' of an environment that is printed, NAME: value of a table
        "variable of a secret's name",
        ("TOKEN", "SECRET", "KEY", "PASS", "PWD", "PAT", "DSN", "SAS", "AUTH", "CRED", "COOKIE", "WEBHOOK", "JWT",
         "CONNECTION_STRING", "CONNSTR", "_PW", "PSK", "BEARER"),
        rf"(?<![A-Za-z0-9_])(?P<name>[A-Z][A-Z0-9_]{{2,60}})(?:=|\s=\s|[\"']\]?\s?[:=]\s?|:\s{{1,3}})(?:b?[\"'])?(?i:{_NO_VALUE})"
        rf"({_VALUE}{{6,}})",
    ),
    SecretShape(
        "header of a request",
        ("-token", "-key", "-secret", "-auth", "cookie"),
        r"(?i:(?<![a-z0-9_-])(?:x-(?:[a-z0-9]{1,20}-){0,4}(?:token|key|secret|auth)|(?:private|job|deploy|subscription)-(?:token|key)"
        rf"|(?:set-)?cookie)[\"']?:\s{{0,3}}[\"']?{_NO_VALUE})([^\s\"'<>]{{8,}})",
    ),
    SecretShape(
        "option of a command",
        ("-pass", "-pwd", "-token", "-secret", "-key", "-auth", "-cred", "-pat", "-cookie", "-dsn", "-webhook"),
        rf"(?<![A-Za-z0-9_-])--?(?P<name>[a-z][a-z0-9_-]{{2,60}})(?:=|\s{{1,3}})[\"']?(?i:{_NO_VALUE})(?!-)({_VALUE}{{4,}})",
    ),
    SecretShape(  # curl -u, http -a: what follows the user's name
        "user and password of a command",
        ("curl", "wget", "http", "sshpass", "docker", "mysql", "ldap", "smbclient", "lftp", "svn"),
        r"\b(?:curl|https?|smbclient|lftp|wget)\b.{0,300}?\s(?:-u|-U|-a|--user|--proxy-user|--auth)(?:\s{1,3}|=)[\"']?"
        r"[^\s:%\"']{1,100}[:%](?![$<])([^\s\"']{1,200})"
        r"|\bsshpass\s{1,3}-p\s{0,3}[\"']?(?![$<])([^\s\"']{1,200})"
        r"|\bdocker\s{1,3}login\s.{0,200}?-p\s{1,3}[\"']?(?![$<])([^\s\"']{1,200})"
        r"|\bmysql[a-z]{0,10}\s.{0,200}?\s-p(?![$<])([^\s\"']{3,200})"
        r"|\bldap[a-z]{1,10}\s.{0,300}?\s-w\s{1,3}[\"']?(?![$<])([^\s\"']{1,200})",
    ),
    SecretShape(
        "password of a netrc file",
        ("password", "passwd"),
        r"\b(?:machine\s{1,3}\S{1,200}|default)\s{1,3}(?:login|account)\s{1,3}\S{1,200}\s{1,3}passw(?:or)?d\s{1,3}(\S{1,200})"
        r"|^\s{0,8}(?:login\s{1,3}\S{1,200}\s{1,3})?password\s{1,3}(\S{1,200})\s{0,3}$",
    ),
    SecretShape(  # services that the data lacks, or knows in one length alone
        "API key",
        ("nvapi-", "dckr_", "npm_", "hvs.", "hvb.", "hvr.", "sk_live", "rk_live", "sk_test", "whsec_", "xai-", "gsk_",
         "pk_live", "pk_test", "rk_test", "r8_", "lsv2_", "tskey-", "dop_v1_", "glsa_", "dapi", "csk-", "pcsk_", "sq0",
         "tvly-", "wandb_v1_", "rpa_"),
        r"(?<![A-Za-z0-9])(?:nvapi-[A-Za-z0-9_-]{20,}|dckr_(?:pat|oat)_[A-Za-z0-9_-]{16,}|npm_[A-Za-z0-9]{20,}"
        r"|hv[sbr]\.[A-Za-z0-9_-]{16,}|[srp]k_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/=]{16,}|xai-[A-Za-z0-9]{20,}"
        r"|gsk_[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{20,}|lsv2_(?:pt|sk)_[A-Za-z0-9_]{20,}|tskey-[a-z]{2,12}-[A-Za-z0-9-]{10,}"
        r"|dop_v1_[a-f0-9]{32,}|glsa_[A-Za-z0-9_]{20,}|dapi[a-f0-9]{32}|pcsk_[A-Za-z0-9_]{20,}|tvly-[A-Za-z0-9-]{20,}"
        r"|wandb_v1_[A-Za-z0-9_]{20,}|rpa_[A-Z0-9]{20,}|csk-[a-z0-9]{20,}|sq0[a-z]{3}-[A-Za-z0-9_-]{20,})",
    ),
)  # fmt: skip


@functools.cache
def all_shapes() -> tuple[SecretShape, ...]:
    """The table here and that of the data, which is read once."""
    rules = json.loads(RULES_FILE.read_text(encoding="utf-8"))["rules"]
    return SHAPES + tuple(
        SecretShape(
            rule["id"].replace("-", " "), tuple(rule["words"]), rule["pattern"], rule.get("entropy", 0.0), is_sure=True
        )
        for rule in rules
    )


def has_secret(text: str) -> bool:
    """Whether a text has the form of a token, a private key, or an address with a password or a signature in it."""
    lowered = text.lower()
    if "private key" in lowered and re.search(_PRIVATE_KEY, text):
        return True
    return any(shape.is_sure and shape.may_fit(text, lowered) and shape.fits(text) for shape in all_shapes())


def without_secrets(text: str, instead: str = "***") -> str:
    """The text with other words in place of what has the form of a secret."""
    lowered, shown = text.lower(), text
    for shape in all_shapes():
        if shape.may_fit(text, lowered):
            shown = shape.hide(shown, instead)
    return shown


def is_secret(name: str, value: str) -> bool:
    """Whether what a name names is a secret: by the form of the value, or by the name where the value can be one."""
    if has_secret(value):
        return True
    if not is_secret_name(name) or reference_of(value):
        return False
    return not is_plain(value) or ("webhook" in name.lower() and "://" in value)  # whose address is the secret


_PRIVATE_KEY = r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"
