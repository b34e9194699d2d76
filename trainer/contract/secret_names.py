"""Which names say that what they name is a secret: of a variable, an option or a key. One rule, for
cards and for text.

A name is judged by its words, not by a list of names: PGPASSWORD, GITHUB_PAT, azureStorageKey and
db-dsn are all made of a few words, and the next service's variable will be too. Some of these words
mean much else beside a training: a token of a text, a key of attention, a pass over the data. They
count by their neighbours (`eos_token` is none), and in text what they name must also look like a
secret. Standard library only, pure.
"""

from __future__ import annotations

import functools
import re

SURE, MAYBE, NO = 2, 1, 0  # how much a name says


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A word of a name that says it by itself, and what words end in that people write together.
# Expressions are text: `re` compiles each at its first use.
_SURE_WORDS = _words(
    """
    authorization connstr credential credentials creds passcode passphrase passwd passwort password psk pwd secret
    secrets webhook
    """
)
_WORDS = _words("auth bearer cookie cred dsn jwt key pass pat pw sas token")
_SURE_ENDS = tuple(
    _words(
        """
        password passwd passphrase passwort secret apikey accesskey accountkey authkey accesssignature
        privatekey secretkey sharedkey signingkey authtoken accesstoken credential credentials connectionstring
        webhook
        """
    )
)
_ENDS = ("token",)
# Before one of `_WORDS`: whose token or key it is, where that is a person's or a service's ...
_OF_SERVICES = _words(
    """
    access account admin ansible anthropic api app auth aws azure basic bearer bot client cloud clearml comet
    dagshub db deploy discord docker encryption ftp gcp gcs ghcr git gitea github gitlab google grafana hf http
    https hub huggingface hugging influx jfrog kaggle ldap license login mail master mlflow mysql neptune ngc npm
    nvidia oauth openai pg postgres private proxy push pypi read redis refresh registry repo robot root security
    sentry service session shared signing slack smtp ssh storage subscription sudo sync teams telegram upload user
    vault wandb write
    """
)
# ... and where it is one of a text, of a dictionary or of a layer.
_OF_DATA = _words(
    """
    added additional answer any arrow assistant attention attn audio average avg backward bad batch begin best bos
    boundary by byte cache char class cls column completion composite consumed context continuation decoder dict
    document draft dummy duplicate each encoder end enter env eod eop eos eval feature field fim first float forced
    foreign forward function generated generation greedy hash header hot id image index input int invalid json label
    last layer lookup loss map mask max mean metric min missing module newline next num output over pad padding page
    param parameter partition patch pattern per placeholder prefix prev previous primary prng processed prompt
    public query question remaining rng row sample sampled search second seed seen sentinel sep separator single
    sort special speech start stop sub table tensor text think top total train trained two unexpected unique unk
    unknown valid value video vision vocab vocabulary warmup weight whitespace word yaml
    """
)
# What follows one of `_WORDS` where a number, a choice or a place is named, not the secret.
_ABOUT = _words(
    """
    accuracy and backend bias bits budget cache capacity chunk class classification cls cols column columns count
    counts dim dims dispatch dispatcher domain dropout drop dtype embedding embeddings enabled error errors expiry
    expires factor failed failure failures fields format freq func function head heads idx ids index indices
    interval kept label layer layers len lifetime logits loss losses mask masks merging method mixing mode model
    norm num number offset order padding parallelism per permutation permute policy position positions prefix
    probability prob provider quant rate ratio realm required retries router routing scale scheme scope score scores
    seconds separator shape shift similarity states stride strings throughput through timeout ttl usage user
    username value values weight weights window
    """
)
_SHORT_ENDS = r"(?!(?:com|by)pass$)\w{2,}pass|(?!old)\w{2,}pwd"  # smtppass, mysqlpwd
# What is asked for by such a name is a place or a number, not the secret.
_LAST = _words(
    """
    cmd command dir directory env error exception file filename folder helper length limit name path paths size sock
    socket type uri url var variable warning
    """
)
_WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+"  # camelCase, CAPITALS_WITH_LINES and any-other
# a choice, a number, a place, a mark of a vocabulary: nothing that anyone keeps to himself
_PLAIN = r"(?i:|true|false|yes|no|on|off|none|null|auto|default|[0-9.]{1,6}|[/~.][^\s:@]*|<[^<>]*>|\[[^\[\]]*\])"
_WEB_ADDRESS = r"(?i:https?)://[^\s@?]*"
_REFERENCE = r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})"


def is_secret_name(name: str) -> bool:
    """Whether what a name of this form names is a secret."""
    return _weight(name) != NO


def is_surely_secret_name(name: str) -> bool:
    """Whether a name says so by itself; of others (`x_token`, `key`) it takes a look at the value
    too, in text.
    """
    return _weight(name) == SURE or (name.isupper() and is_secret_name(name))


@functools.lru_cache(maxsize=4096)  # a log repeats its names in each line
def _weight(name: str) -> int:
    words = [word.lower() for word in re.findall(_WORD, name)]
    if not words or (words[-1] in _LAST and "webhook" not in words):
        return NO
    if "".join(words).endswith(_SURE_ENDS) or "connectionstring" in "".join(words):
        return SURE
    return max(_weight_at(words, place) for place in range(len(words)))


def _weight_at(words: list[str], place: int) -> int:
    """What one word of a name says, by the words beside it."""
    word = words[place]
    if word in _SURE_WORDS or word.endswith(_SURE_ENDS) or re.fullmatch(_SHORT_ENDS, word):
        return SURE
    if word not in _WORDS and not word.endswith(_ENDS):
        return NO
    before, after = words[:place], words[place + 1 :]
    if "access" in before and word == "key":
        return SURE  # access_key_id
    if (before and before[-1] in _OF_DATA) or (
        after and (after[0] in _ABOUT or _is_number_of(word, before, after))
    ):
        return NO
    if before and before[-1] in _OF_SERVICES:
        return SURE
    return MAYBE


def _is_number_of(word: str, before: list[str], after: list[str]) -> bool:
    """`token_id`, of a vocabulary; the id of a key or a client's token is half of what lets in."""
    return word == "token" and after[0] == "id" and not (before and before[-1] in _OF_SERVICES)


def names_a_secret(text: str) -> bool:
    """Whether a text assigns anything to the name of a secret: `Name=...;Key=...`, or a header's
    `Name: ...`.
    """
    return any(
        is_secret_name(name)
        for name in re.findall(r"([A-Za-z][A-Za-z0-9_-]{0,100})\s{0,3}[=:]", text)
    )


def is_plain(value: str) -> bool:
    """Whether a value can be no secret, whatever its name: a choice, a small number, a path, an
    address.
    """
    return re.fullmatch(_PLAIN, value) is not None or re.fullmatch(_WEB_ADDRESS, value) is not None


def reference_of(value: str) -> str:
    """The variable that a value is a reference to, all of it: `$NAME` or `${NAME}`; "" for any
    other value.
    """
    match = re.fullmatch(_REFERENCE, value)
    if match is None:
        return ""
    return match[1] or match[2]


# ----------------------------------------------------------------------------- what is beside a
# name, in text
_SAID = (  # what says what is wanted, or that there is none
    r"(?i:none|null|nil|true|false|yes|no|on|off|auto|default|unset|empty|required|optional|missing|invalid|expired"
    r"|incorrect|wrong|enabled|disabled|hidden|redacted|masked|undefined|unknown|given|present|string|str|bytes|secretstr"
    r"|\*{1,200}|\.{3,200})(?![A-Za-z0-9_-]).*"
    r"|(?:Optional|Union)\b.*"
)
# to a variable, a field, a place to fill in
_REFERS = r"\$.*|<.*|\{{1,2}\s?[A-Za-z_].*|%\(.*|%[A-Za-z_]{1,60}%"
_PLACE = r"~?/\w{1,200}/.*|[/~.]{1,3}(?:[A-Za-z_-]{1,60}[0-9]{0,9}[/.]?){1,20}"
_CODE = r"(?:[A-Za-z_]\w{0,60}\.){1,9}[A-Za-z_]\w{0,60}"
_NUMBER = r"[+-]?(?:0x[0-9a-fA-F]{1,16}|[0-9][0-9.,:_]{0,40}(?:e[+-]?[0-9]{1,3})?[A-Za-z%]{0,3})"
# words, each with its number
_WORDY = r"[A-Za-z]{0,60}[0-9]{0,20}(?:[^A-Za-z0-9][A-Za-z]{0,60}[0-9]{0,20}){0,60}"
_TOKEN_LIKE = r"[A-Za-z0-9_.~+/=:%-]{8,}"


def is_said(name: str, value: str) -> bool:
    """Whether what stands beside a name in text can be no secret: a word about it, a reference, a
    place, a name.
    """
    if any(re.fullmatch(shape, value, re.DOTALL) for shape in (_SAID, _REFERS, _PLACE)):
        return True
    if value.isupper() and re.fullmatch(r"[A-Z0-9_]+", value) and is_secret_name(value):
        return True  # the variable that holds it
    if value.strip("_") == name.strip("_") or (name.endswith("s") and is_secret_name(value)):
        return True  # token=token, secrets: hf-token
    return re.fullmatch(_CODE, value) is not None and is_secret_name(value.rsplit(".", 1)[1])


def looks_random(value: str) -> bool:
    """Whether a value is made as tokens are: eight signs or more, neither words nor a number."""
    if re.fullmatch(_TOKEN_LIKE, value) is None:
        return False
    return re.fullmatch(_NUMBER, value) is None and re.fullmatch(_WORDY, value) is None


def is_plain_word(value: str) -> bool:
    """Whether a value is a word, or words that are joined, or a number: what most options are
    given.
    """
    return (
        re.fullmatch(_NUMBER, value) is not None
        or re.fullmatch(r"[A-Za-z_./-]+", value) is not None
    )
