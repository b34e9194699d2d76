"""What an error speaks of, where no signature knows it: by words that it holds in any order, and by
its traceback.

An error names the thing that failed and what happened to it; the words are fewer than the sentences.
What is found so is less sure than a signature, and never above 0.9.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from tr11ops.diagnose.signature import (
    FaultClass,
    FaultSignature,
    NextStep,
    NodeBlame,
    Role,
    Rule,
    signature_of,
)
from trainer.contract.record import Record

FILE = Path(__file__).with_name("topics.toml")
FAMILY: Final = "topics"
LINE: Final = 0.55  # the most for a line of a log that no exception stands behind
WARNED: Final = 0.4  # for one that calls itself a warning
LONGEST = 600  # characters of an error that are looked at
# each exception ends so: it says nothing of what failed
_KIND = re.compile(r"(?:Error|Exception)$")
_INFORMS = re.compile(r"^I\d{4} |\b(?:INFO|DEBUG|TRACE|NOTICE)\b")
_WARNS = re.compile(
    r"^W\d{4} |\[W\b|\bWARN(?:ING)?\b|\b(?:User|Future|Runtime|Deprecation)?Warning\b|\b[Ww]arning:"
)
_SAYS_ERROR = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|SEVERE|PANIC)\b|\b(?:[Ff]atal|[Ee]rror|[Pp]anic)\b ?[:\]]|^E\d{4} |\[E\b"
)
_HARMLESS = re.compile(
    r"\b(?:0 (?:errors?|failed|failures)|no errors?|non-fatal|ignor(?:ed|ing)|skipp(?:ed|ing)|fall(?:s|ing)? back"
    r"|fallback|recovered|harmless|deprecat\w+|will continue|continuing|resum(?:ed|ing) training|optional|on_?error"
    r"|in case of|if (?:it|this|the)|handler|errors? (?:handling|rate)|timeout ?[:=]|timeout_)\b",
    re.IGNORECASE,
)


class Topic(Record):
    """All of `words` must be found, `unless` not; one frame of the traceback must match `frames`."""

    signature: FaultSignature
    words: tuple[re.Pattern[str], ...]
    unless: re.Pattern[str] | None
    frames: re.Pattern[str] | None
    is_state: bool

    def is_of(self, text: str, frames: Sequence[str]) -> bool:
        if self.unless is not None and self.unless.search(text):
            return False
        if self.frames is not None and not any(self.frames.search(frame) for frame in frames):
            return False
        return all(words.search(text) for words in self.words)


UNTOLD: Final = FaultSignature(
    "error-line",
    FAMILY,
    role=Role.CAUSE,
    fault=FaultClass.UNKNOWN,
    step=NextStep.PAGE,
    blame=NodeBlame.UNKNOWN,
    confidence=WARNED,
    meaning="a line says that something failed, and nothing that is known",
    source="https://docs.python.org/3/library/logging.html",
)


def of_exception(name: str, said: str, frames: Sequence[str]) -> FaultSignature | None:
    """The topic of an exception that the program raised; None where it is the program's own affair."""
    found = _first(f"{_KIND.sub('', name)}: {said}", frames)
    if found is None or found.signature.fault is FaultClass.USER_CODE:
        return None
    return found.signature


def of_line(text: str) -> FaultSignature | None:
    """The topic of a line of a log; None where it is no error, `UNTOLD` where it is one and does
    not say of what.
    """
    if _HARMLESS.search(text[:LONGEST]):
        return None
    found = _first(text, ())
    informs = _INFORMS.search(text) is not None
    warns = _WARNS.search(text) is not None
    if found is None or (informs and not found.is_state):
        is_error = not informs and not warns and _SAYS_ERROR.search(text)
        if is_error:
            return UNTOLD
        return None
    return _less_sure(found.signature, WARNED if warns else LINE)


def _first(text: str, frames: Sequence[str]) -> Topic | None:
    text = text[:LONGEST]
    return next((topic for topic in topics() if topic.is_of(text, frames)), None)


@cache
def _less_sure(signature: FaultSignature, most: float) -> FaultSignature:
    return replace(signature, confidence=min(most, signature.confidence))


@cache
def topics() -> tuple[Topic, ...]:
    """All topics, in the order in which they are asked. Raises ValueError that names the one that
    is wrong.
    """
    return tuple(_topic(entry) for entry in _document()["topic"])


@cache
def error_lines() -> tuple[Rule, ...]:
    """The rules that find lines which may tell of an error; each means `UNTOLD`."""
    return tuple(Rule(re.compile(pattern), UNTOLD) for pattern in _document()["lines"])


@cache
def _document() -> Mapping[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def _topic(entry: Mapping[str, Any]) -> Topic:
    try:
        if missing := {"class", "confidence"} - set(entry):
            raise KeyError(min(missing))
        signature = signature_of(
            f"topic-{entry['id']}", FAMILY, {"source": FILE.name, "match": (), **entry}
        )
        words = tuple(re.compile(words, re.IGNORECASE) for words in entry.get("words", ()))
        unless = None
        if "unless" in entry:
            unless = re.compile(entry["unless"], re.IGNORECASE)
        frames = None
        if "frames" in entry:
            frames = re.compile(entry["frames"])
        return Topic(
            signature, words, unless=unless, frames=frames, is_state=entry.get("level") == "state"
        )
    except (KeyError, ValueError, re.error) as error:
        raise ValueError(f"{FILE.name}: {entry.get('id', 'a topic')}: {error}") from error
