"""Which names say that what they name is a secret: of a variable, an option or a key. One rule, for cards and for text.

A name is judged by its words, not by a list of names: PGPASSWORD, GITHUB_PAT, azureStorageKey and db-dsn are all made
of a few words, and the next service's variable will be too. Standard library only, pure.
"""

from __future__ import annotations

import re

# A word of a name that says it by itself, and what words end in that people write together. Expressions are text: `re`
# compiles each at its first use.
_WORDS = frozenset(
    {
        "auth", "authorization", "bearer", "connstr", "cookie", "cred", "credential", "credentials", "creds", "dsn",
        "jwt", "key",
        "pass", "passcode", "passphrase", "passwd", "passwort", "password", "pat", "psk", "pw", "pwd", "sas", "secret",
        "secrets", "token", "webhook",
    }
)  # fmt: skip
_ENDS = (
    "password", "passwd", "passphrase", "passwort", "secret", "token", "apikey", "accesskey", "accountkey", "authkey",
    "accesssignature", "privatekey", "secretkey", "sharedkey", "signingkey",
    "credential", "credentials", "connectionstring", "webhook",
)  # fmt: skip
_SHORT_ENDS = r"(?!(?:com|by)pass$)\w{2,}pass|(?!old)\w{2,}pwd"  # smtppass, mysqlpwd
# What is asked for by such a name is a place or a number, not the secret.
_LAST = frozenset(
    {
        "dir", "directory", "file", "filename", "folder", "length", "limit", "path", "paths", "size", "sock", "socket",
        "type", "uri", "url",
    }
)  # fmt: skip
_WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+"  # camelCase, CAPITALS_WITH_LINES and any-other
_PLAIN = (  # a choice, a number, a place, a mark of a vocabulary: nothing that anyone keeps to himself
    r"(?i:|true|false|yes|no|on|off|none|null|auto|default|[0-9.]{1,6}|[/~.][^\s:@]*|<[^<>]*>|\[[^\[\]]*\])"
)
_WEB_ADDRESS = r"(?i:https?)://[^\s@?]*"
_REFERENCE = r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})"


def is_secret_name(name: str) -> bool:
    """Whether what a name of this form names is a secret."""
    words = [word.lower() for word in re.findall(_WORD, name)]
    if not words or (words[-1] in _LAST and "webhook" not in words):
        return False
    together = "".join(words)
    if any(word in _WORDS or word.endswith(_ENDS) or re.fullmatch(_SHORT_ENDS, word) for word in words):
        return True
    return together.endswith(_ENDS) or "connectionstring" in together


def names_a_secret(text: str) -> bool:
    """Whether a text assigns anything to the name of a secret: `Name=...;Key=...`, or a header's `Name: ...`."""
    return any(is_secret_name(name) for name in re.findall(r"([A-Za-z][A-Za-z0-9_-]{0,100})\s{0,3}[=:]", text))


def is_plain(value: str) -> bool:
    """Whether a value can be no secret, whatever its name: a choice, a small number, a path, an address."""
    return re.fullmatch(_PLAIN, value) is not None or re.fullmatch(_WEB_ADDRESS, value) is not None


def reference_of(value: str) -> str:
    """The variable that a value is a reference to, all of it: `$NAME` or `${NAME}`; "" for any other value."""
    match = re.fullmatch(_REFERENCE, value)
    return "" if match is None else match[1] or match[2]
