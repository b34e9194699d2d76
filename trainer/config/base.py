"""What every section of the run card is made of: frozen tables, and problems told in one line each.

Imports pydantic and the standard library only; never torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.plugin import _loader

from trainer.contract.errors import USAGE, Tr11Error
from trainer.contract.record import Record
from trainer.contract.secret_names import is_secret_name
from trainer.contract.secret_shapes import has_secret
from trainer.contract.units import printable

# Ceilings far beyond any training: they keep every derived number finite and every loop over levels
# or stages short.
MOST_WAYS = 100_000
MOST_LAYERS = 100_000
LARGEST_WIDTH = 10**7
LARGEST_BATCH = 10**7
MOST_RAMP_LEVELS = 10_000
MOST_SAMPLES = 10**15
MOST_ITERATIONS = 10**12

# what many keys are
Iterations = Annotated[int, Field(gt=0, le=MOST_ITERATIONS)]
StepCount = Annotated[int, Field(ge=0, le=MOST_ITERATIONS)]
Samples = Annotated[int, Field(gt=0, le=MOST_SAMPLES)]
Tokens = Annotated[int, Field(gt=0, le=10**18)]
BatchSize = Annotated[int, Field(gt=0, le=LARGEST_BATCH)]
Width = Annotated[int, Field(gt=0, le=LARGEST_WIDTH)]
Layers = Annotated[int, Field(gt=0, le=MOST_LAYERS)]
Ways = Annotated[int, Field(gt=0, le=MOST_WAYS)]
SmallCount = Annotated[int, Field(ge=0, le=1000)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
AboveOne = Annotated[float, Field(gt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
Hours = Annotated[float, Field(gt=0, le=8760)]
Days = Annotated[float, Field(gt=0, le=3650)]


# What no message repeats, wherever in a card it was put by mistake, besides what surely is a
# secret.
_DOUBTFUL_SHAPES = (
    r"\bhf_[A-Za-z0-9]{8,}",
    r":[^\s/@]{1,400}@",
    r"://[^\s/@]{1,400}@",
    r"://[^\s?]{0,2000}\?",
)


def _may_be_shown(key: str, value: object) -> bool:
    """Whether a message may repeat what a key holds; in doubt it does not."""
    if isinstance(value, dict) or any(is_secret_name(part) for part in key.split(".")):
        return False
    text = str(value)
    return not has_secret(text) and not any(re.search(shape, text) for shape in _DOUBTFUL_SHAPES)


class Problem(Record):
    """One thing wrong with a card: which key, what it holds, the rule it breaks, and how to repair
    it.

    As text it does not repeat what may be a secret.
    """

    key: str
    value: Any
    rule: str
    fix: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if isinstance(self.value, bool):
            shown = shown.lower()  # as TOML has it
        if len(shown) > 60:
            shown = shown[:57] + "..."
        held = ""
        if self.value is not None and _may_be_shown(self.key, self.value):
            held = f" = {shown}"
        line = f"{self.key}{held}: {self.rule}; {self.fix}"
        return printable(line, " ")


class CardError(Tr11Error, ValueError):
    """A run card that cannot be used. `problems` holds every fault found; the text is one line for
    each, which says where its key was given: in `source`, or by --set where it begins with one of
    `typed`.
    """

    exit_code = USAGE

    def __init__(self, source: str, problems: Iterable[Problem], typed: tuple[str, ...] = ()):
        self.source = source
        self.problems = tuple(problems)
        card = f"{printable(source)}:"
        lines = [
            f"{'--set' if f'{problem.key}.'.startswith(typed) else card} {problem}"
            for problem in self.problems
        ]
        super().__init__("\n".join(lines))


class Section(BaseModel):
    """A table of the card. Unknown keys are refused; values are never silently converted from text."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True
    )


SectionType = TypeVar("SectionType", bound=BaseModel)


def left_out(schema: type[SectionType]) -> SectionType:
    """The default of a table that a card need not have: an empty one.

    It is made with the card that lacks it: a table made here would cost each command a validator of
    its own.
    """
    default: Any = Field(default_factory=dict, validate_default=True)
    return cast(SectionType, default)


def validate(schema: type[SectionType], value: Mapping[str, Any], source: str) -> SectionType:
    """Build `schema` from plain tables; raises CardError with every problem, unknown keys with the
    nearest known.

    Plug-ins of pydantic do not see it: a search for them was 2 % of `tr11 status`. Not by their
    environment variable, which a training would inherit.
    """
    theirs, _loader._plugins = _loader._plugins, {}
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise CardError(source, [_problem(schema, entry) for entry in error.errors()]) from None
    finally:
        _loader._plugins = theirs


def _problem(schema: type[BaseModel], entry: Any) -> Problem:
    key = ".".join(str(part) for part in entry["loc"]) or "card"
    context = entry.get("ctx", {})
    value = entry["input"]
    if entry["type"] == "extra_forbidden":
        near = nearest(str(entry["loc"][-1]), _fields_at(schema, entry["loc"][:-1]))
        if near:
            fix = f"did you mean {near!r}?"
        else:
            fix = "remove it"
        return Problem(key, value, "is not a known key", fix)
    if entry["type"] == "missing":
        return Problem(key, None, "is required and missing", "add it to the card")
    if entry["type"] == "literal_error":
        return Problem(key, value, f"must be {context['expected']}", "choose one of these")
    if entry["type"] == "model_type":
        return Problem(key, value, "must be a table", f"write [{key}] and its keys below it")
    if entry["type"] == "too_short":
        return Problem(
            key,
            value,
            f"needs at least {context['min_length']} entry",
            "add what is missing",
        )
    if is_private(schema, entry["loc"]):
        value = None
    rule = entry["msg"][0].lower() + entry["msg"][1:]
    if entry["type"] == "string_pattern_mismatch":
        rule = f"must look like {context['pattern']} (a regular expression)"
    fix = context.get("fix") or "change it in the card or with --set " + key + "=VALUE"
    return Problem(key, value, rule, fix)


def is_private(schema: type[BaseModel], location: Iterable[Any]) -> bool:
    """Whether a key on the way is one whose value is never shown (`repr=False`): it may hold a
    secret by mistake.
    """
    current: Any = schema
    for part in location:
        field = current.model_fields.get(part)
        if field is None:
            return False
        if not field.repr:
            return True
        current = section_of(field.annotation)
        if current is None:
            return False
    return False


def _fields_at(schema: type[BaseModel], location: Iterable[Any]) -> list[str]:
    """Names of the keys allowed in the table at `location`."""
    current: Any = schema
    for part in location:
        if part in current.model_fields:
            current = section_of(current.model_fields[part].annotation)
        else:
            current = None
        if current is None:
            return []
    return list(current.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The table that a key of this type holds, also where it may be left out or there may be
    several; else None.
    """
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next(
        (item for item in options if isinstance(item, type) and issubclass(item, BaseModel)), None
    )


def salvage(
    schema: type[SectionType], value: Mapping[str, Any], faulty: Collection[tuple[str, ...]]
) -> SectionType:
    """What is sound of `value`, for rules that need no more: to read a key below `faulty`, or a
    missing one, raises AttributeError. `faulty` must name everything that `validate` refuses.
    """
    found: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        inner = {key[1:] for key in faulty if key[:1] == (name,)}
        section = section_of(field.annotation)
        if () in inner or (name not in value and field.is_required()):
            continue
        if name not in value:
            default = field.get_default(call_default_factory=True)
            if section is not None and default == {}:
                found[name] = section()
            else:
                found[name] = default
        elif section is not None and isinstance(value[name], Mapping):
            found[name] = salvage(section, value[name], inner)
        elif not inner:
            if section is None:
                found[name] = value[name]
            else:
                found[name] = _sections(section, value[name])
    made = schema.model_construct(**found)
    for name in set(schema.model_fields) - set(found):
        vars(made).pop(name, None)
    return made


def _sections(schema: type[BaseModel], value: Any) -> Any:
    """A list of tables as the schema has it; anything else, such as a section that is one already,
    as it is.
    """
    if not isinstance(value, list):
        return value
    return [schema.model_validate(item) if isinstance(item, Mapping) else item for item in value]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to a misspelt one, or None when nothing is near."""
    import difflib  # for a key that is not known

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    if found:
        return found[0]
    return None
