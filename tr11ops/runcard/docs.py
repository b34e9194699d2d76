"""The reference of the run card, written from the schema: `python -m tr11ops.runcard.docs > docs/run-card.md`."""

from __future__ import annotations

import json
import sys
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tr11ops.runcard.card import PATH_KEYS, RunCard

_HEAD = """# The run card

One TOML file says everything a run should be. This is a whole card; each key that is not in it has a default:

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
- **Paths** may be relative: they are taken from the card's folder (behind a link: the file's), so that one card is one
  run, wherever a command is typed. Two exceptions: a card that ships with tr11, by name or by path, takes them from the
  folder in which the command is typed; and a run that was launched below the current folder when all cards did so goes
  on there, until the card names its directory in full (`tr11 launch` warns). The plan's line `paths from` says which.
  `~/` is your home. These keys are paths: PATH_KEYS.
- **Overrides**: `--set section.key=value`, as often as needed; the value is TOML, or text where it is not.
  `none` removes an optional key: `--set batch.ramp=none`. A relative path given here is taken from the folder in which
  the command is typed, as with any other option.
- **Faults** are reported all at once, one line each: where, the key, its value, the rule, and what repairs it.
- The data-parallel degree is not a key: it is nodes x workers per node / (tensor x pipeline).

This page is generated from the schema; `make test` fails when it is out of date.
"""


def card_reference() -> str:
    """The whole page, in Markdown."""
    paths = ", ".join(f"`{'.'.join(map(str, key))}`" for key in sorted(PATH_KEYS))
    parts = [_HEAD.replace("PATH_KEYS", paths)]
    for name, entry in RunCard.model_fields.items():
        parts += _section(name, entry)
    return "\n".join(parts)


def _section(name: str, entry: FieldInfo) -> list[str]:
    """Heading and table of one section, and of the tables inside it."""
    schema = _table(entry)
    assert schema is not None, f"{name} is not a section"
    text = (schema.__doc__ or "").partition(": ")[2].strip()
    lines = [
        f"## [[{name}]]" if get_origin(entry.annotation) is list else f"## [{name}]",
        "",
        text[:1].upper() + text[1:],
        "",
        "| key | value | default | meaning |",
        "|---|---|---|---|",
    ]
    inner = []
    for key, item in schema.model_fields.items():
        kind = "table" if _table(item) else _kind(item)
        lines.append(
            f"| `{key}` | {kind} | {_default(item)} | {(item.description or '').replace('|', chr(92) + '|')} |"
        )
        if _table(item):
            inner += _section(f"{name}.{key}", item)
    return [*lines, "", *inner]


def _table(entry: FieldInfo) -> type[BaseModel] | None:
    options = (entry.annotation, *get_args(entry.annotation))
    return next((item for item in options if isinstance(item, type) and issubclass(item, BaseModel)), None)


def _kind(entry: FieldInfo) -> str:
    words = _words(entry.annotation)
    bounds = [
        f"{sign} {getattr(rule, name)}" for rule in entry.metadata for name, sign in _BOUNDS if hasattr(rule, name)
    ]
    return " ".join([words, *bounds[:1]])


_BOUNDS = (("gt", ">"), ("ge", "≥"))


def _words(annotation: Any) -> str:
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(members[0])
    if origin in {Union, UnionType}:
        return " or ".join(_words(item) for item in members if item is not NoneType)
    if origin is Literal:
        return ", ".join(f'`"{item}"`' for item in members)
    if origin is list:
        return f"list of {_words(members[0])}"
    if origin is dict:
        return "table of text" if members[1] is str else "table"
    return {int: "integer", float: "number", bool: "true, false", str: "text"}[annotation]


def _default(entry: FieldInfo) -> str:
    value = entry.default
    if value is PydanticUndefined:
        return "**required**"
    if value is None:
        return ""
    return f"`{json.dumps(value)}`".replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(card_reference())
