"""What every section of the run card is made of: frozen tables, and problems told in one line each.

Imports pydantic and the standard library only; never torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

# Ceilings far beyond any training: they keep every derived number finite and every loop over levels or stages short.
MOST_WAYS = 100_000
MOST_LAYERS = 100_000
LARGEST_WIDTH = 10**7
LARGEST_BATCH = 10**7
MOST_RAMP_LEVELS = 10_000
MOST_SAMPLES = 10**15
MOST_ITERATIONS = 10**12


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a card: which key, what it holds, the rule it breaks, and how to mend it."""

    key: str
    value: Any
    rule: str
    fix: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        held = "" if self.value is None else f" = {shown}"
        line = f"{self.key}{held}: {self.rule}; {self.fix}"
        return "".join(character if character.isprintable() else " " for character in line)


class CardError(ValueError):
    """A run card that cannot be used. `problems` holds every fault found; the text is one line for each."""

    def __init__(self, source: str, problems: Iterable[Problem]):
        self.source = source
        self.problems = tuple(problems)
        shown = "".join(character if character.isprintable() else "?" for character in source)
        super().__init__("\n".join(f"{shown}: {problem}" for problem in self.problems))


class Section(BaseModel):
    """A table of the card. Unknown keys are refused; values are never silently converted from text."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


SectionType = TypeVar("SectionType", bound=BaseModel)


def validate(schema: type[SectionType], value: Mapping[str, Any], source: str) -> SectionType:
    """Build `schema` from plain tables; raises CardError with every problem, unknown keys with the nearest known."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise CardError(source, [_problem(schema, entry) for entry in error.errors()]) from None


def _problem(schema: type[BaseModel], entry: Any) -> Problem:
    key = ".".join(str(part) for part in entry["loc"]) or "card"
    context = entry.get("ctx", {})
    if entry["type"] == "extra_forbidden":
        near = nearest(str(entry["loc"][-1]), _fields_at(schema, entry["loc"][:-1]))
        fix = f"did you mean {near!r}?" if near else "remove it"
        return Problem(key, entry["input"], "is not a known key", fix)
    if entry["type"] == "missing":
        return Problem(key, None, "is required and missing", "add it to the card")
    if entry["type"] == "literal_error":
        return Problem(key, entry["input"], f"must be {context['expected']}", "choose one of these")
    if entry["type"] == "model_type":
        return Problem(key, entry["input"], "must be a table", f"write [{key}] and its keys below it")
    if entry["type"] == "too_short":
        return Problem(key, entry["input"], f"needs at least {context['min_length']} entry", "add what is missing")
    rule = entry["msg"][0].lower() + entry["msg"][1:]
    if entry["type"] == "string_pattern_mismatch":
        rule = f"must look like {context['pattern']} (a regular expression)"
    fix = "change it in the card or with --set " + key + "=VALUE"
    return Problem(key, entry["input"], rule, fix)


def _fields_at(schema: type[BaseModel], location: Iterable[Any]) -> list[str]:
    """Names of the keys allowed in the table at `location`."""
    current: Any = schema
    for part in location:
        annotation = current.model_fields[part].annotation if part in current.model_fields else None
        options = [annotation, *getattr(annotation, "__args__", ())]
        tables = [item for item in options if isinstance(item, type) and issubclass(item, BaseModel)]
        if not tables:
            return []
        current = tables[0]
    return list(current.model_fields)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to a misspelt one, or None when nothing is near."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return found[0] if found else None
