"""`tr11 config`: what a run card says, as it is written or with all that follows from it."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from tr11ops.base.errors import Refusal
from tr11ops.base.glyphs import plain
from tr11ops.cli import completion
from tr11ops.cli.common import JsonOption
from tr11ops.cli.context import JSON, RunContext, answer
from tr11ops.cli.terminal import draws_unicode
from tr11ops.runcard.card import SECRET_FILE_KEYS, RunCard, resolved
from tr11ops.runcard.load import apply_overrides, read_tables, secret_values
from tr11ops.runcard.reference import CardKey, CardSection, card_sections
from tr11ops.runcard.toml_writer import write_card
from trainer.config.card import CardError

SCHEMA = 1
WIDTH = 78
MOST_NEAR = 3

app = typer.Typer(
    name="config",
    help="""What a run card says, and what follows from it.

    Examples:
      tr11 config show
      tr11 config show --resolved --run tr11-176B-ml
      tr11 config explain watch.act
    """,
    no_args_is_help=True,
)


@app.command()
def show(
    context: Annotated[RunContext, JSON],
    is_resolved: Annotated[
        bool,
        typer.Option(
            "--resolved", help="With every default, variables put in, paths made absolute."
        ),
    ] = False,
) -> None:
    """Print the run card as TOML, with what --set changes.

    With --resolved, a variable that is not defined here stays as written. What a key means: `tr11
    config explain`.

    Examples:
      tr11 config show --run demo
      tr11 config show --resolved --set slurm.nodes=24
      tr11 config show --resolved --json | jq .card.parallel
    """
    path = context.card_path
    if is_resolved:
        tables: dict[str, Any] = resolved(context.card_with_undefined())
        derived = tables.pop("derived")
    else:
        tables, problems = apply_overrides(read_tables(path), context.overrides, RunCard)
        problems += secret_values(tables, SECRET_FILE_KEYS)
        if problems:
            raise CardError("command line", problems)
        derived = None
    document = {
        "schema": SCHEMA,
        "path": str(path),
        "resolved": is_resolved,
        "card": tables,
        "derived": derived,
    }
    context.emit(document, [write_card(_without_none(tables), {}, [str(path)]).rstrip("\n")])


def _without_none(tables: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: a key that is not set is left out."""
    return {name: _written(value) for name, value in tables.items() if value is not None}


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        return _without_none(value)
    if isinstance(value, list):
        return [_written(item) for item in value]
    return value


# ----------------------------------------------------------------------------- what a key means
@app.command()
def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]",
            show_default=False,
            help="SECTION.KEY, a section, or a key alone; left out: list the sections.",
            autocompletion=completion.card_keys,
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Say what a key of the run card means: its value, its default, what it does. No card is read.

    Examples:
      tr11 config explain
      tr11 config explain watch.act
      tr11 config explain alerts
      tr11 config explain spare_nodes
    """
    sections = list(card_sections())
    if key is None:
        document = {
            "schema": SCHEMA,
            "sections": [_section_object(section) for section in sections],
            "keys": [],
        }
        answer(
            as_json,
            document,
            _shown(line for section in sections for line in _section_lines(section)),
        )
        return
    shown, keys = _meant(key.strip("[]"), sections)
    document = {
        "schema": SCHEMA,
        "sections": [_section_object(section) for section in shown],
        "keys": [_key_object(one) for one in keys],
    }
    answer(as_json, document, _shown(_lines(shown, keys)))


def _meant(word: str, sections: Sequence[CardSection]) -> tuple[list[CardSection], list[CardKey]]:
    """The section of that name with its keys, or the keys of that name. Raises Refusal where there
    is neither.
    """
    section = next((one for one in sections if one.name == word), None)
    if section is not None:
        return [section], list(section.keys)
    every = [key for one in sections for key in one.keys]
    keys = [key for key in every if word in (key.dotted, key.name)]
    if keys:
        return [], keys
    near = _near(word, sections, every)
    if near:
        hint = f"did you mean {', '.join(near)}?"
    else:
        hint = "`tr11 config explain` lists the sections"
    raise Refusal(f"KEY {word!r}: the run card has no such key or section; {hint}", exit_code=2)


def _near(word: str, sections: Sequence[CardSection], keys: Sequence[CardKey]) -> list[str]:
    """What is spelt like it, with its section; a key alone is compared with keys alone."""
    names = {key.dotted: [key.dotted] for key in keys} | {
        section.name: [section.name] for section in sections
    }
    if "." not in word:
        for key in keys:
            names.setdefault(key.name, []).append(key.dotted)
    found = [
        place for name in difflib.get_close_matches(word, names, MOST_NEAR) for place in names[name]
    ]
    return list(dict.fromkeys(found))[:MOST_NEAR]


def _lines(sections: Sequence[CardSection], keys: Sequence[CardKey]) -> Iterator[str]:
    for section in sections:
        yield from _section_lines(section)
    for number, key in enumerate(keys):
        if number or sections:
            yield ""
        yield from textwrap.wrap(f"{key.dotted} = {_value(key)}", WIDTH, subsequent_indent="  ")
        yield from textwrap.wrap(key.meaning, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _shown(lines: Iterable[str]) -> Iterator[str]:
    """As this terminal can draw them."""
    unicode = draws_unicode()
    return (plain(line, unicode) for line in lines)


def _value(key: CardKey) -> str:
    """What a key's value may be, and what it is where the card does not say."""
    if key.is_path:
        what = f"{key.kind}, a path"
    else:
        what = key.kind
    if key.is_required:
        return f"{what}; required"
    if key.default_text:
        return f"{what}; default {key.default_text}"
    return f"{what}; not set by default"


def _section_lines(section: CardSection) -> Iterator[str]:
    if section.is_list:
        name = f"[[{section.name}]]"
    else:
        name = f"[{section.name}]"
    yield from textwrap.wrap(f"{name}  {section.text}", WIDTH, subsequent_indent="  ")


def _section_object(section: CardSection) -> dict[str, Any]:
    return {"name": section.name, "is_list": section.is_list, "text": section.text}


def _key_object(key: CardKey) -> dict[str, Any]:
    return {
        "key": key.dotted,
        "value": key.kind,
        "default": None if key.is_required else key.default,
        "required": key.is_required,
        "is_path": key.is_path,
        "meaning": key.meaning,
    }
