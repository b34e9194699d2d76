"""What there is to say of each key of the run card, read from its schema: for `config explain`, and
for the reference, written by `python -m tr11ops.runcard.docs docs/reference`.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tr11ops.base.units import capitalized
from tr11ops.runcard.card import PATH_KEYS
from tr11ops.runcard.kinds import ALL_SECTIONS
from trainer.config.base import Section, section_of
from trainer.contract.files import make_shared
from trainer.contract.record import Record

REQUIRED = object()  # the default of a key that a card must give


class CardKey(Record):
    """One key. `kind`: what its value may be, in words. `default`: as JSON has it; None where there
    is none.
    """

    section: str
    name: str
    kind: str
    default: Any
    meaning: str
    is_path: bool

    @property
    def dotted(self) -> str:
        """As `--set` and the faults of a card name it."""
        return f"{self.section}.{self.name}"

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED

    @property
    def default_text(self) -> str:
        """Its default as JSON; "" for none, and where the card must give it."""
        if self.default is None or self.is_required:
            return ""
        return json.dumps(self.default)


class CardSection(Record):
    """One section, or a table inside one (`batch.ramp`). `is_list`: there may be several tables of
    it.
    """

    name: str
    text: str
    keys: tuple[CardKey, ...]
    is_list: bool = False


def card_sections() -> Iterator[CardSection]:
    """Every section in the schema's order, each followed by the tables inside it."""
    for name, entry in ALL_SECTIONS.items():
        yield from _sections(name, entry)


def meaning_of(schema: type[BaseModel], key: str) -> str:
    """What a key of a section is for: the text below it in the source; "" where it has none."""
    for kind in schema.__mro__:
        if kind is Section:
            break
        text = _meanings(sys.modules[kind.__module__]).get((kind.__name__, key))
        if text is not None:
            return text
    return schema.model_fields[key].description or ""


@cache
def _meanings(module: ModuleType) -> dict[tuple[str, str], str]:
    """The texts below the fields of a module's classes, by class and field."""
    found = {}
    for kind in ast.parse(inspect.getsource(module)).body:
        if not isinstance(kind, ast.ClassDef):
            continue
        for field, below in pairwise(kind.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[kind.name, name] = " ".join(text.split())
    return found


def _sections(name: str, entry: FieldInfo) -> Iterator[CardSection]:
    schema = section_of(entry.annotation)
    assert schema is not None, f"{name} is not a section"
    text = " ".join((schema.__doc__ or "").partition(": ")[2].split())
    keys = tuple(_key(name, key, schema) for key in schema.model_fields)
    yield CardSection(name, capitalized(text), keys, get_origin(entry.annotation) is list)
    for key, item in schema.model_fields.items():
        if section_of(item.annotation):
            yield from _sections(f"{name}.{key}", item)


def _key(section: str, name: str, schema: type[BaseModel]) -> CardKey:
    entry = schema.model_fields[name]
    default = REQUIRED if entry.default is PydanticUndefined else entry.default
    if section_of(entry.annotation):
        kind = "table"
    else:
        kind = _kind(entry)
    is_path = (*section.split("."), name) in PATH_KEYS
    meaning = meaning_of(schema, name)
    return CardKey(section, name, kind=kind, default=default, meaning=meaning, is_path=is_path)


def _kind(entry: FieldInfo) -> str:
    words = _words(entry.annotation)
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in (*entry.metadata, *_rules_inside(entry.annotation))
        for name, sign in _BOUNDS
        if hasattr(rule, name)
    ]
    return " ".join([words, *bounds[:1]])


def _rules_inside(annotation: Any) -> Iterator[Any]:
    """Those of the types of which a key takes one: `Iterations | None`."""
    if get_origin(annotation) in {Union, UnionType}:
        for item in get_args(annotation):
            for field in getattr(item, "__metadata__", ()):
                yield from field.metadata


_BOUNDS = (("gt", ">"), ("ge", "≥"))


def _words(annotation: Any) -> str:
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(members[0])
    if origin in {Union, UnionType}:
        return " or ".join(_words(item) for item in members if item is not NoneType)
    if origin is Literal:
        return ", ".join(f'"{item}"' for item in members)
    if origin is list:
        return f"list of {_words(members[0])}"
    if origin is dict:
        if members[1] is str:
            return "table of text"
        return "table"
    return {int: "integer", float: "number", bool: "true, false", str: "text"}[annotation]


_HEAD = """# The run card

One TOML file says everything a run should be. This is a complete card; every other key has a default:

```toml
run = { name = "small", directory = "small-run", exit_duration_minutes = 1185 }
slurm = { nodes = 2, gpus_per_node = 8, workers_per_node = 8, time_limit = "20:00:00" }
model = { layers = 24, hidden_size = 2048, attention_heads = 16, sequence_length = 2048 }
batch = { micro_batch_size = 4, global_batch_size = 512, train_samples = 12_000_000 }
schedule = { learning_rate = 2e-4, warmup_samples = 200_000 }
data = { prefixes = ["data/corpus_text_document"] }
tokenizer = { path = "data/tokenizer", padded_vocabulary_size = 50_304 }
```

`tr11 launch`, `status`, `kill` and `estimate` take it from `--run`,
else from `$TR11_RUN`, else from `tr11.toml` in the current folder. `--run demo` finds a card that ships with tr11.

- **Numbers** may carry underscores (`220_000_000`). Text is never read as a number, nor a number as text.
- **Variables**: `$NAME` and `${NAME}` in strings are replaced from the environment; an undefined one is refused;
  `$$` is a dollar sign. `slurm.setup` is left alone: it is shell, and the node expands it. A variable that is a whole
  entry of `alerts.recipients` or `alerts.rota` may hold several addresses, with commas between them.
- **Secrets** do not belong in a card: it is copied, and read by the group. In `slurm.environment`,
  `PGPASSWORD = "$DB_PASS"` (the variable alone) stays as it is, and is expanded in the job. Anything else that looks
  like a secret, by the words of its name (`..._KEY`, `..._PAT`, `...PASSWORD`, `..._DSN`) or by the form of its value,
  is refused.
- **Paths** may be relative: they are taken from the card's folder (behind a link: the file's), so that one card is one
  run, wherever a command is typed. Two exceptions: for a card that ships with tr11, by name or by path, they are
  relative to the current folder; and a run that an older tr11 launched below the current folder stays there until the
  card names its directory in full (`tr11 launch` warns). The plan's line `paths from` says which.
  `~/` is your home. An empty text is no path: it leaves an optional key unset. These keys are paths: PATH_KEYS.
- **Overrides**: `--set section.key=value`, as often as needed; the value is TOML, or text where it is not.
  `none` removes an optional key: `--set batch.ramp=none`. A relative path given here is taken from the folder in which
  the command is typed, as with any other option.
- **Errors** are reported all at once, one line each: where, the key, its value, the rule, and the fix.
- The data-parallel degree is not a key: it is nodes x workers per node / (tensor x pipeline).

This page and those of the sections are generated from the schema; `make test` fails when they are out of date.
`tr11 config explain KEY` says the same of one key.

## The sections

| section | what it is for |
|---|---|
"""


def card_reference() -> dict[str, str]:
    """The pages of the reference, in Markdown, by their places in its folder: `run-card.md`, and one
    for each section in `card/`.
    """
    sections = list(card_sections())
    paths = sorted(key.dotted for section in sections for key in section.keys if key.is_path)
    shown = ", ".join(f"`{path}`" for path in paths)
    head = _HEAD.replace("PATH_KEYS", shown)
    overview = [head.rstrip()]
    pages: dict[str, list[str]] = {}
    for section in sections:
        outer, _, inner = section.name.partition(".")
        place = f"card/{outer}.md"
        if inner:
            pages[place] += _section(section, "##")
            continue
        title = _title(section)
        text = _cell(section.text)
        overview.append(f"| [`{title}`]({place}) | {text} |")
        pages[place] = _section(section, "#")
    pages["run-card.md"] = [*overview, ""]
    found = {}
    for place, lines in pages.items():
        found[place] = "\n".join(lines)
    return found


def _title(section: CardSection) -> str:
    """As a card begins it."""
    if section.is_list:
        return f"[[{section.name}]]"
    return f"[{section.name}]"


def _section(section: CardSection, level: str) -> list[str]:
    """Heading and table of one section."""
    return [
        f"{level} {_title(section)}",
        "",
        section.text,
        "",
        "| key | value | default | meaning |",
        "|---|---|---|---|",
        *(_row(key) for key in section.keys),
        "",
    ]


def _row(key: CardKey) -> str:
    kind = _QUOTED.sub(r"`\g<0>`", key.kind)
    if key.is_required:
        default = "**required**"
    elif key.default_text:
        default = f"`{key.default_text}`"
    else:
        default = ""
    cells = (f"`{key.name}`", kind, default, key.meaning)
    return f"| {' | '.join(_cell(text) for text in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", _BAR)


_QUOTED = re.compile(r'"[^"]*"')
_BAR = "\\|"


if __name__ == "__main__":
    for place, text in card_reference().items():
        path = Path(sys.argv[1]) / place
        make_shared(path.parent)
        path.write_text(text, encoding="utf-8")
