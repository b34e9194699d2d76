"""What a secret looks like in text: one table, for cards, messages (`tr11ops.base.redact`) and logs
(`hub.masking`).

The forms of many services' tokens are data, `secret_rules.json`, taken from gitleaks; those here
are of what people print beside: assignments, options of commands, headers, addresses. A shape has
words, one of which is in each text that it fits, in capitals where that matters, so that most lines
are never looked at with an expression. What it hides is the group of its expression that matched,
or all of it; where the expression ends with a name, what stands behind it, if name and value are a
secret's (`secret_names`). No expression crosses a line, and each takes a number of steps that grows
as the text does: no repeat but the last has no bound. Private keys, which have many lines, are
found by `hub.masking`. Standard library only, pure but for the reading of the data.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.contract.record import Record
from trainer.contract.secret_names import (
    is_plain,
    is_plain_word,
    is_said,
    is_secret_name,
    is_surely_secret_name,
    looks_random,
    reference_of,
)

RULES_FILE = Path(__file__).with_name("secret_rules.json")
_QUOTE = r"(?:\\{0,7}[\"'`]|&quot;|%22)"
_SIGN = r"[^\s\"'`,;&<>(){}\[\]\\]"  # of a value without quotes
_NO_VALUE = (
    r"(?!(?:none|null|true|false|unset|required|\*{1,200})(?![A-Za-z0-9_-])|<|\$|/\w{1,200}/|\.{3})"
)
# A value as it stands behind its name: SecretStr("..."), b'...', \"...\", or bare, without what is
# called or indexed.
_VALUE = (
    rf"(?:[A-Za-z_][\w.]{{0,40}}\(\s?)?[bBrRuUfF]{{0,2}}(?:\"((?:[^\"\\\n]|\\[^\n]){{4,400}})\"|'((?:[^'\\\n]|\\[^\n]){{4,400}})'"
    rf"|(?:\\{{1,7}}[\"']|&quot;|%22)([^\"'\\&\n]{{4,400}}))"
    rf"|[\"'`]?(?!(?:[A-Za-z_]\w{{0,60}}\.){{1,9}}\w{{1,60}}\([^()\s]{{0,60}}\)|(?:get|read|load|fetch|make)\w{{0,60}}\("
    rf"|[A-Za-z_][\w.]{{0,100}}[(\[][\"'][A-Za-z_]{{1,60}}[\"'][)\]])({_SIGN}{{4,400}})"
)
_BARE_LEAST = 6  # signs of a value without quotes that a name says is a secret; an option's, 4
_BEFORE_NAME = r"(?:(?<![A-Za-z0-9_.-])|(?<=%[0-9A-F][0-9A-F]))"
_NAME_SIGNS = 101  # of the longest name
_REACH = 640
_LOOKED_AHEAD = 2  # signs behind what joins name and value that its expression looks at: b"
_NAME = r"(?P<name>[A-Za-z_][A-Za-z0-9_.-]{1,100})"
_ANNOTATED = r":\s?(?:Optional\[)?(?:str|bytes|SecretStr)\]?(?:\s?\|\s?None)?\s?=\s?"
_ASSIGNED = (
    rf"(?:{_ANNOTATED}|{_QUOTE}?\]?(?:\s{{0,3}}(?:=>|->|:=|=|:|%3[DA])\s{{0,3}}|>|\s{{1,3}}\.{{3,100}}\s{{1,3}}"
    rf"|\s{{0,3}},?\s{{0,3}}{_QUOTE}?value{_QUOTE}?\s?[=:]\s?))"
)
_LISTED = rf"(?:{_QUOTE},\s{{0,3}}(?=b?[\"'])|\s{{1,60}}(?:\||[^\x00-\x7f]{{1,3}})\s{{1,60}})"
_GIVEN = rf"(?:=|\s{{1,3}}|{_QUOTE},\s{{0,3}}(?=b?[\"']))"  # to an option
# What names are written of, before what stands between a name and its value: so most lines need no
# second look.
_STEM_WORDS = "token key auth cred pass pwd pat pw sas dsn jwt psk bearer cookie webhook"
_STEMS = _STEM_WORDS.split()
_BEHIND_STEMS = ("=", " =", ":", " :", "'", '"', "\\", "`", " ..", " -", ">", "&", "%")
# One of these is in each name of a secret, wherever: see `secret_names.is_secret_name`.
NAME_STEMS = (*_STEMS, "secret", "connstr", "connection", "signature", "hook")
_NAMING = (
    "passw",
    "passphrase",
    "passcode",
    "secret",
    "credential",
    "creds",
    "api_key",
    "apikey",
    "api-key",
    "access_key",
    "access-key",
    "accesskey",
    "accountkey",
    "account_key",
    "auth_token",
    "access_token",
    "private_key",
    "hf_token",
    "hub_token",
    "connection_string",
    "connectionstring",
    "connstr",
    "sharedaccess",
    "TOKEN",
    "KEY",
    "PASS",
    "PWD",
    "PAT",
    "DSN",
    "SAS",
    "AUTH",
    "CRED",
    "COOKIE",
    "WEBHOOK",
    "JWT",
    "_PW",
    "PSK",
    "BEARER",
    *(stem + sign for stem in _STEMS for sign in _BEHIND_STEMS),
)


class SecretShape(Record, dict=True):
    """One kind of secret. `kind` is what a person reads.

    `entropy`: bits a character below which what fits is none: a word, a placeholder. `is_sure`: it
    is one wherever it stands, in a card as well. `after_name` is for expressions that end with a
    name and what joins it to its value: "field", "option" of a command line, or "list", whose
    members may be names alone. `joint` is what joins them, in these that may stand anywhere: then
    only what is around `NAME_STEMS` need be looked at. `holds`: what follows one of the words,
    `_REACH` signs behind it at most.
    """

    kind: str
    words: tuple[str, ...]
    pattern: str
    entropy: float = 0.0
    is_sure: bool = True
    after_name: str = ""
    joint: str = ""
    holds: str = ""

    @cached_property
    def from_stem(self) -> re.Pattern[bytes]:
        """What must stand from the beginning of one of `NAME_STEMS` on."""
        return re.compile(f"[A-Za-z0-9_.-]{{1,{_NAME_SIGNS}}}{self.joint}".encode("ascii"))

    @cached_property
    def in_bytes(self) -> re.Pattern[bytes]:
        return re.compile(self.pattern.encode("ascii"))

    @cached_property
    def in_text(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.ASCII)

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

    def spans(
        self, line: bytes, words: Sequence[int], stems: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Where in a line the secrets of this kind begin and end. `words`: where those of its words
        begin that the line holds; `stems`: where any of `NAME_STEMS` begins, in order.
        """
        held = self.holds.encode("ascii")
        if held and not any(line.find(held, word, word + _REACH) >= 0 for word in words):
            return iter(())
        if not self.joint:
            return self._found(self.in_bytes, line)
        near = self._matches_near(line, stems)
        return self._found_after_names(near, line)

    def _matches_near(self, line: bytes, stems: Sequence[int]) -> Iterator[re.Match[bytes]]:
        """Each match of the expression whose name has one of these stems, once, in order."""
        seen = -1
        for stem in stems:
            ahead = self.from_stem.match(line, stem)
            if ahead is None:
                continue
            first, last = max(0, stem - _NAME_SIGNS), ahead.end() + _LOOKED_AHEAD
            for match in self.in_bytes.finditer(line, max(first, seen), last):
                if match.start() > seen:
                    seen = match.start()
                    yield match

    def _found(self, pattern: re.Pattern[Any], text: Any) -> Iterator[tuple[int, int]]:
        if self.after_name:
            yield from self._found_after_names(pattern.finditer(text), text)
            return
        for match in pattern.finditer(text):
            start, end = match.span(match.lastindex or 0)
            if self.entropy and bits_a_character(_text(text[start:end])) < self.entropy:
                continue
            yield start, end

    def _found_after_names(
        self, matches: Iterable[re.Match[Any]], text: Any
    ) -> Iterator[tuple[int, int]]:
        value_pattern, rest = _value_patterns(isinstance(text, str))
        seen = 0
        for match in matches:
            if match.start() < seen or not is_secret_name(_text(match["name"])):
                continue
            value = value_pattern.match(text, match.end())
            if value is None or value.lastindex is None:
                continue
            is_bare = value.lastindex == BARE
            if not self._is_of(_text(match["name"]), _text(value[value.lastindex]), is_bare):
                continue
            start, seen = value.span(value.lastindex)
            longer = None
            if is_bare:
                longer = rest.match(text, seen)
            if longer is not None:
                seen = longer.end()
            yield start, seen

    def _is_of(self, name: str, value: str, is_bare: bool) -> bool:
        """Whether a value is a secret of this name, where and as it stands."""
        if is_said(name, value):
            return False
        if self.after_name == "list":
            return looks_random(value)
        if self.after_name == "option":
            return not value.startswith("-") and (_is_named_alone(name) or not is_plain_word(value))
        if is_surely_secret_name(name):
            return len(value) >= _BARE_LEAST or not is_bare
        return name.lower() != "key" and looks_random(value)


BARE = 4  # the group of a value without quotes


@functools.cache
def _value_patterns(of_text: bool) -> tuple[re.Pattern[Any], re.Pattern[Any]]:
    """A value, as far as it is judged, and how it may go on."""
    if of_text:
        return re.compile(_VALUE, re.ASCII), re.compile(f"{_SIGN}*", re.ASCII)
    return re.compile(_VALUE.encode("ascii")), re.compile(f"{_SIGN}*".encode("ascii"))


def _is_named_alone(name: str) -> bool:
    """Whether an option of this name gives a secret, whatever it is given: --password, --hub_token,
    --token.
    """
    return is_surely_secret_name(name) or name.lower() in ("token", "pass")


def bits_a_character(text: str) -> float:
    """How evenly a text uses its characters: 0 for one that repeats one, 4 for random hexadecimal
    digits.
    """
    if not text:
        return 0.0
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def _text(found: str | bytes) -> str:
    if isinstance(found, str):
        return found
    return found.decode("latin-1")


# 7z, 7za and their like, as commands: the two signs alone are in many digests
_SEVEN_ZIP = [f"7z{letter}{space}" for letter in ("", *"arz") for space in " \t"]
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
    SecretShape(
        "password in an address",
        ("://",),
        r"://(?<=[A-Za-z0-9]://)([!#-&(-.0-9;=?A-~]{0,200}:[!#-&(-.0-;=?A-~]{1,400})@",
        holds="@",
    ),
    SecretShape(  # or only a user's name, which many addresses have
        "token in an address",
        ("://",),
        r"://(?<=[A-Za-z0-9]://)([!#-&(-.0-9;=?A-~]{1,400})@",
        is_sure=False,
        holds="@",
    ),
    SecretShape(
        "JSON web token",
        ("eyj",),
        r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,4000}(?:\.[A-Za-z0-9_-]{0,4000}){1,4}",
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
        rf"(?i:authorization{_QUOTE}?\s{{0,3}}[:=,]\s{{0,3}}b?{_QUOTE}?(?:bearer|basic|token|apikey|bot|key)\s{{1,3}}){_NO_VALUE}([A-Za-z0-9._~+/=-]{{6,}})"
        rf"|(?i:authorization{_QUOTE}?\s{{0,3}}[:=]\s{{0,3}}b?{_QUOTE}?|bearer\s{{1,3}}|basic\s{{1,3}})"
        r"(?=[A-Za-z]{0,200}[0-9+/=._-])(?!AWS4)([A-Za-z0-9._~+/=-]{16,})"
        r"|(?i:aws4-hmac-sha256\s.{0,400}?signature=)([0-9a-fA-F]{64})",
    ),
    SecretShape(
        "signed address",
        ("signature=", "sig=", "token="),
        r"(?i:[?&](?:x-(?:amz|goog)-(?:signature|security-token)|signature|sig|(?:access_)?token)=)([^\s&\"'<>]{6,})",
    ),
    # name=value of a shell, 'name': 'value' of Python and JSON, name: value of YAML, name .....
    # value
    SecretShape(
        "value of a secret's name",
        _NAMING,
        rf"{_BEFORE_NAME}{_NAME}{_ASSIGNED}",
        after_name="field",
        joint=_ASSIGNED,
    ),
    SecretShape(  # ('NAME', 'value'), | name | value |
        "value beside a secret's name",
        tuple(
            stem + sign
            for stem in (
                *_STEMS,
                "password",
                "passwd",
                "passphrase",
                "secret",
                "credential",
                "credentials",
            )
            for sign in ("',", '",', " |", "  ", " \u2502", " \u2503")
        ),
        rf"{_BEFORE_NAME}{_NAME}{_LISTED}",
        after_name="list",
        joint=_LISTED,
    ),
    SecretShape(
        "query of an address",
        ("token=", "key=", "auth=", "password=", "passwd=", "pass=", "pwd=", "secret=", "sas="),
        r"(?<=[?&])(?P<name>[A-Za-z_][A-Za-z0-9_.-]{1,60})=",
        after_name="option",
    ),
    SecretShape(
        "variable that is set",
        (
            "setenv ",
            "putenv ",
            "ENV ",
            "ARG ",
            "set -",
            "config set ",
            "configure set ",
            "config -",
            "configure -",
        ),
        r"(?i:\b(?:setenv|putenv|env|arg|set\s-[a-z]{1,3}|config(?:ure)?(?:\s--?[a-z]{1,20})?\sset)\s{1,3})"
        r"(?P<name>[A-Za-z_][A-Za-z0-9_.-]{1,60})\s{1,3}(?![=:])",
        after_name="field",
    ),
    SecretShape(
        "header of a request",
        ("-token", "-key", "-secret", "-auth", "cookie", "curl"),
        r"(?i:(?<![a-z0-9_-])(?:x-(?:[a-z0-9]{1,20}-){0,4}(?:token|key|secret|auth)|(?:private|job|deploy|subscription)-(?:token|key)"
        rf")[\"']?:\s{{0,3}}[\"']?{_NO_VALUE})([^\s\"'<>]{{8,}})"
        r"|(?i:\b(?:set-)?cookie[\"']?:\s{0,3}[\"']?)([\w.-]{1,60}=[^\"'\n]{6,})"
        r"|\bcurl\s(?:.{0,300}?\s)?(?:-b|--cookie)(?:\s{1,3}|=)[\"']?(\w{1,60}=[^\"'\s]{6,})",
    ),
    SecretShape(
        "option of a command",
        (
            "-pass",
            "-pwd",
            "-token",
            "-secret",
            "-key",
            "-auth",
            "-cred",
            "-pat",
            "-cookie",
            "-dsn",
            "-webhook",
            "-sas",
            "-oauth",
            "-bearer",
            "-api",
            "_secret",
            "_passw",
            "_creds",
            ".secret",
            ".passw",
            *(f"{sign}{stem}{end}" for sign in "_.-" for stem in _STEMS for end in " ='\""),
        ),
        rf"(?<![A-Za-z0-9_-])--?(?P<name>[A-Za-z][A-Za-z0-9_.-]{{1,60}}){_GIVEN}",
        after_name="option",
        joint=_GIVEN,
    ),
    SecretShape(  # what follows the user's name, or a letter
        "user and password of a command",
        (
            "curl",
            "wget",
            "http ",
            "https ",
            "sshpass",
            "login ",
            "login\t",
            "mysql",
            "mariadb",
            "ldap",
            "smbclient",
            "lftp",
            "redis-cli",
            "wandb login",
            "wandb.login",
            "mongo",
            "openssl",
            *_SEVEN_ZIP,
            "zip -",
            "-creds",
            "vault login",
            "password-stdin",
            "sudo -s",
            "kinit",
            "rclone",
        ),
        r"\b(?:curl|https?|smbclient|lftp|wget)\b.{0,300}?\s(?:-u|-U|-a|--user|--proxy-user|--auth)(?:\s{1,3}|=)[\"']?"
        r"[^\s:%,\"']{1,100}[:%,](?![$<])([^\s\"']{1,200})"
        r"|--(?:src-|dest-)?creds(?:\s{1,3}|=)[\"']?[^\s:\"']{1,100}:(?![$<])([^\s\"']{1,200})"
        r"|\bsshpass\s{1,3}-p\s{0,3}[\"']?(?![$<])([^\s\"']{1,200})"
        r"|\b(?:docker|podman|nerdctl|helm|az)\s{1,3}(?:registry\s{1,3})?login\s(?:.{0,200}?\s)?-p\s{1,3}[\"']?(?![$<])([^\s\"']{1,200})"
        r"|\becho\s{1,3}(?:-n\s{1,3})?[\"']?(?![$<])([^\s\"'|$]{4,400})[\"']?\s{0,3}\|\s{0,3}"
        r"(?:(?:docker|podman|helm|skopeo|crane|oras)\s.{0,200}?--password-stdin|sudo\s{1,3}-S|kinit)"
        r"|\b(?:mysql|mariadb)[a-z-]{0,10}\s(?:.{0,200}?\s)?-p(?![$<])([^\s\"']{3,200})"
        r"|\bmongo[a-z]{0,10}\s.{0,200}?-p\s{1,3}[\"']?(?![$<])([^\s\"']{1,200})"
        r"|\bredis-cli\s(?:.{0,200}?\s)?-a\s{1,3}[\"']?(?![$<])([^\s\"']{1,200})"
        r"|\bldap[a-z]{1,10}\s.{0,300}?\s-w\s{1,3}[\"']?(?![$<])([^\s\"']{1,200})"
        r"|\bwandb\s{1,3}login\s(?:.{0,200}?\s)?[\"']?([0-9a-f]{40})(?![0-9a-f])"
        r"|\bwandb\.login\(.{0,200}?\bkey\s?=\s?[\"']([^\"'\s]{8,400})"
        r"|\bvault\s{1,3}login\s{1,3}(?![-$<])([^\s\"']{8,400})"
        r"|\bopenssl\s.{0,300}?\s-(?:pass(?:in|out)?\s{1,3}[\"']?pass:|k\s{1,3}[\"']?)(?![$<])([^\s\"']{1,200})"
        r"|\b7z[arz]?\s(?:.{0,200}?\s)?-p(?![$<])([^\s\"']{3,200})"
        r"|\b(?-i:zip)\s(?:.{0,200}?\s)?-P\s{1,3}[\"']?(?![$<])([^\s\"']{1,200})"
        r"|\brclone\s{1,3}(?:obscure\s{1,3}(?![-$<])([^\s\"']{4,400})"
        r"|config\s{1,3}(?:create|update)\s.{0,200}?\b(?:pass|password|secret_access_key|token|key)[\s=]{1,3}[\"']?(?![$<])([^\s\"']{4,400}))",
    ),
    SecretShape(
        "API key",
        ("username", "gocspx-"),
        r"[\"']username[\"']\s?:\s?[\"'][^\"']{1,100}[\"'],\s?[\"']key[\"']\s?:\s?[\"']([0-9a-f]{32})[\"']|GOCSPX-[A-Za-z0-9_-]{20,}",
    ),
    SecretShape(
        "password of a netrc file",
        ("password", "passwd"),
        r"\b(?:machine\s{1,3}\S{1,200}|default)\s{1,3}(?:login|account)\s{1,3}\S{1,200}\s{1,3}passw(?:or)?d\s{1,3}(\S{1,200})"
        r"|^\s{0,8}(?:login\s{1,3}\S{1,200}\s{1,3})?password\s{1,3}(\S{1,200})\s{0,3}$",
    ),
    SecretShape(  # services that the data lacks, or knows in one length alone
        "API key",
        (
            "nvapi-",
            "dckr_",
            "npm_",
            "hvs.",
            "hvb.",
            "hvr.",
            "sk_live",
            "rk_live",
            "sk_test",
            "whsec_",
            "xai-",
            "gsk_",
            "pk_live",
            "pk_test",
            "rk_test",
            "r8_",
            "lsv2_",
            "tskey-",
            "dop_v1_",
            "glsa_",
            "dapi",
            "csk-",
            "pcsk_",
            "sq0",
            "tvly-",
            "wandb_v1_",
            "rpa_",
        ),
        r"(?<![A-Za-z0-9])(?:nvapi-[A-Za-z0-9_-]{20,}|dckr_(?:pat|oat)_[A-Za-z0-9_-]{16,}|npm_[A-Za-z0-9]{20,}"
        r"|hv[sbr]\.[A-Za-z0-9_-]{16,}|[srp]k_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/=]{16,}|xai-[A-Za-z0-9]{20,}"
        r"|gsk_[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{20,}|lsv2_(?:pt|sk)_[A-Za-z0-9_]{20,}|tskey-[a-z]{2,12}-[A-Za-z0-9-]{10,}"
        r"|dop_v1_[a-f0-9]{32,}|glsa_[A-Za-z0-9_]{20,}|dapi[a-f0-9]{32}|pcsk_[A-Za-z0-9_]{20,}|tvly-[A-Za-z0-9-]{20,}"
        r"|wandb_v1_[A-Za-z0-9_]{20,}|rpa_[A-Z0-9]{20,}|csk-[a-z0-9]{20,}|sq0[a-z]{3}-[A-Za-z0-9_-]{20,})",
    ),
)


@functools.cache
def all_shapes() -> tuple[SecretShape, ...]:
    """The table here and that of the data, which is read once."""
    rules = json.loads(RULES_FILE.read_text(encoding="utf-8"))["rules"]
    return SHAPES + tuple(
        SecretShape(
            rule["id"].replace("-", " "),
            tuple(rule["words"]),
            rule["pattern"],
            rule.get("entropy", 0.0),
            is_sure=True,
        )
        for rule in rules
    )


@functools.cache
def _places_by_word(in_capitals: bool) -> tuple[tuple[str, frozenset[int]], ...]:
    """Each word of the shapes once, with the places of those that have it in `all_shapes`."""
    places: dict[str, set[int]] = {}
    for place, shape in enumerate(all_shapes()):
        for word in shape.words:
            if word.isupper() == in_capitals:
                places.setdefault(word, set()).add(place)
    return tuple((word, frozenset(found)) for word, found in places.items())


def _shapes_that_may_fit(text: str) -> Iterator[SecretShape]:
    """Those of which a text holds a word, in their order. Words in capitals are looked for as they
    are, others in any case.
    """
    lowered = text.lower()
    found: set[int] = set()
    for word, places in _places_by_word(in_capitals=False):
        if word in lowered:
            found |= places
    for word, places in _places_by_word(in_capitals=True):
        if word in text:
            found |= places
    shapes = all_shapes()
    return (shapes[place] for place in sorted(found))


def has_secret(text: str) -> bool:
    """Whether a text has the form of a token, a private key, or an address with a password or a
    signature in it.
    """
    if "private key" in text.lower() and re.search(_PRIVATE_KEY, text):
        return True
    return any(shape.is_sure and shape.fits(text) for shape in _shapes_that_may_fit(text))


def without_secrets(text: str, instead: str = "***") -> str:
    """The text with other words in place of what has the form of a secret."""
    shown = text
    for shape in _shapes_that_may_fit(text):
        shown = shape.hide(shown, instead)
    return shown


def is_secret(name: str, value: str) -> bool:
    """Whether what a name names is a secret: by the form of the value, or by the name where the
    value can be one.
    """
    if has_secret(value):
        return True
    if not is_secret_name(name) or reference_of(value):
        return False
    # whose address is the secret
    return not is_plain(value) or ("webhook" in name.lower() and "://" in value)


_PRIVATE_KEY = r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"
