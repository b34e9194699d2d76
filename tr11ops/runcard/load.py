"""From the text of a run card to plain tables: TOML, `--set`, `$VARS`, absolute paths; the schema
is an argument.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from tr11ops.base.units import counted
from tr11ops.runcard.find import CARD_FILE
from trainer.config.card import CardError, Problem, nearest
from trainer.config.model import is_hub_id
from trainer.contract.secret_names import is_secret_name, names_a_secret, reference_of
from trainer.contract.secret_shapes import has_secret, is_secret

# Secrets that a card gives to its workers: it names the variable, and each process that needs it
# reads it itself. `[slurm.environment]` may say `PGPASSWORD = "$DB_PASS"`. The resolved card and the
# batch script then hold `${DB_PASS}`, never its value: both are copied, and readable by the run's
# group.

SECTION = ("slurm", "environment")


def kept_reference(key: tuple[str | int, ...], value: str, variables: Mapping[str, str]) -> str:
    """What stays in the card of a variable for the workers whose value is one reference to a
    secret; "" of all else.

    It is one by either name, or by the form of what the variable holds here.
    """
    variable = ""
    if key[:2] == SECTION and len(key) == 3:
        variable = reference_of(value)
    if not variable:
        return ""
    named = is_secret_name(str(key[2])) or is_secret_name(variable)
    if named or has_secret(variables.get(variable, "")):
        return f"${{{variable}}}"
    return ""


def references(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the card's variables those that are references, each with the variable that it is read
    from.
    """
    return {
        name: variable for name, value in environment.items() if (variable := reference_of(value))
    }


def unset_here(environment: Mapping[str, str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """What of the card's variables is read from one that a process with `variables` lacks, as `NAME
    from $VARIABLE`.
    """
    read = sorted(references(environment).items())
    return tuple(f"{name} from ${variable}" for name, variable in read if variable not in variables)


def values_here(environment: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The card's variables as a process with `variables` has them; a reference to one that it lacks
    is left out.
    """
    read = references(environment)
    plain = {name: value for name, value in environment.items() if name not in read}
    return plain | {
        name: variables[variable] for name, variable in read.items() if variable in variables
    }


Key = tuple[str | int, ...]

_ACKNOWLEDGE = (
    "remove it; acknowledge by the link in the mail (alerts.serve_url), with `tr11 alerts ack`, by a "
    "file in state/alerts/replies, or in the chat service of alerts.urls_file"
)
# Keys that cards had once, and what to do instead.
REMOVED_KEYS: dict[tuple[str, str], str] = {
    ("alerts", "imap_host"): _ACKNOWLEDGE,
    ("alerts", "imap_port"): _ACKNOWLEDGE,
    ("alerts", "imap_tls"): _ACKNOWLEDGE,
    ("alerts", "imap_folder"): _ACKNOWLEDGE,
    ("alerts", "imap_credentials_file"): _ACKNOWLEDGE,
}

LARGEST_CARD_BYTES = 1 << 20
LARGEST_INTEGER = 2**63 - 1
DEEPEST = 16
# The standard library's parser takes time and memory with the square of a dotted key's parts.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){32}""")
_VARIABLE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})", re.ASCII)


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises CardError: not there, not a file, too large, not text, not
    TOML.
    """

    def refuse(rule: str, fix: str) -> CardError:
        return CardError(str(path), [Problem("file", None, rule, fix)])

    if path.is_dir():
        card = path / CARD_FILE
        fix = f"no {CARD_FILE} lies in it either: give the path of a card"
        if card.is_file():
            fix = f"give the card that lies in it: {card}"
        raise refuse("is a folder from which nothing was launched", fix)
    if path.exists() and not path.is_file():
        raise refuse("is not a regular file", "give a run card (TOML)")
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_CARD_BYTES + 1)
    except FileNotFoundError:
        raise refuse("does not exist", "name a card with --run PATH or $TR11_RUN") from None
    except OSError as error:
        raise refuse(
            f"cannot be read ({error.strerror or error})", "check its path and rights"
        ) from None
    if len(content) > LARGEST_CARD_BYTES:
        raise refuse(
            f"is larger than {LARGEST_CARD_BYTES} bytes", "a run card is a short TOML file"
        )
    try:
        return parse_toml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refuse(f"is not UTF-8 text (line {line})", "give a run card (TOML)") from None
    except ValueError as error:
        raise refuse(f"is not TOML: {error}", "repair that line") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Tables of TOML text. Raises ValueError, also where the parser runs out of digits or depth."""
    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 32 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# ----------------------------------------------------------------------------- values no schema
# should meet
def walk(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every key and leaf below `value`, tables and lists before their content."""
    yield key, value
    if len(key) >= DEEPEST:
        return
    if isinstance(value, dict):
        for name, item in value.items():
            yield from walk(item, (*key, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk(item, (*key, index))


def dotted(key: Key) -> str:
    """`("slurm", "exclude", 0)` as `slurm.exclude.0`."""
    return ".".join(str(part) for part in key)


def _is_below(key: Key, keys: frozenset[Key]) -> bool:
    """Whether a key is one of `keys`, or inside one."""
    return any(key[: len(prefix)] == prefix for prefix in keys)


def unusable_values(tables: Mapping[str, Any], shell_keys: frozenset[Key]) -> list[Problem]:
    """Values that are TOML but can be no one's setting: beyond 64 bits, too deep, with control
    characters.

    Strings below `shell_keys` may hold tabs and line ends.
    """
    problems = []
    for key, value in walk(dict(tables)):
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            bits = f"an integer of {value.bit_length()} bits"
            problems.append(
                Problem(dotted(key), bits, "does not fit in 64 bits", "use a smaller number")
            )
        elif isinstance(value, str):
            allowed = "\n\t" if _is_below(key, shell_keys) else ""
            if any(
                (character < " " or character == "\x7f") and character not in allowed
                for character in value
            ):
                problems.append(
                    Problem(
                        dotted(key),
                        value,
                        "holds a control character",
                        "write it on one plain line",
                    )
                )
        if len(key) >= DEEPEST:
            problems.append(
                Problem(
                    dotted(key[:3]), None, "is nested too deeply", "`tr11 config explain` has all"
                )
            )
    return problems


def without(tables: Mapping[str, Any], keys: Collection[Key]) -> dict[str, Any]:
    """A copy of `tables` without the sections (keys of one part) and keys of sections (two parts)
    that are named.
    """
    return {
        name: {key: item for key, item in table.items() if (name, key) not in keys}
        if isinstance(table, dict)
        else table
        for name, table in tables.items()
        if (name,) not in keys
    }


def removed_keys(tables: Mapping[str, Any], overrides: Sequence[str]) -> list[Problem]:
    """A problem for each key that cards had once, and that this one or its `overrides` still set.

    The first of those with the same way out says it; one line is enough to act on.
    """
    typed = overridden_keys(overrides)
    found: dict[str, Problem] = {}
    for (section, key), fix in REMOVED_KEYS.items():
        table = tables.get(section)
        if (section, key) in typed or (isinstance(table, dict) and key in table):
            found.setdefault(
                fix, Problem(f"{section}.{key}", None, "was removed from the card", fix)
            )
    return list(found.values())


def secret_values(tables: Mapping[str, Any], file_keys: frozenset[Key]) -> list[Problem]:
    """Texts that are a secret by their form, and addresses where a file that holds one belongs.

    A card is shared, and copied into the run directory: a secret in it is everyone's. The problems
    do not repeat it.
    """
    problems: list[Problem] = []
    texts = [(key, value) for key, value in walk(dict(tables)) if isinstance(value, str)]
    together = "\n".join(value for _, value in texts)
    if not any(key in file_keys for key, _ in texts) and not (
        has_secret(together) or names_a_secret(together)
    ):
        return problems  # what most cards are, looked at in one go
    for key, value in texts:
        if key in file_keys and ("://" in value or has_secret(value)):
            rule = "is the path of a file, and this holds the secret itself"
            problems.append(
                Problem(dotted(key), None, rule, "put it into a file that others cannot read")
            )
        elif has_secret(value) or (key[:2] == ("backup", "options") and names_a_secret(value)):
            rule = (
                "holds a password, a token or a signed address, and the card is shared with others"
            )
            problems.append(
                Problem(
                    dotted(key), None, rule, "keep it in a file of its own that others cannot read"
                )
            )
    return problems


def environment_secrets(tables: Mapping[str, Any]) -> Iterator[Problem]:
    """Variables of the workers that hold a secret. One that refers to another variable holds none."""
    for key, value in walk(dict(tables)):
        if (
            len(key) == 3
            and key[1] == "environment"
            and isinstance(value, str)
            and is_secret(str(key[2]), value)
        ):
            rule = "looks like a secret, and the card is copied into the run directory"
            fix = f'write "${key[2]}" and export it where you launch, or read it from a file of yours in slurm.setup'
            yield Problem(dotted(key), None, rule, fix)


# ----------------------------------------------------------------------------- --set
# section.key=value
def apply_overrides(
    tables: dict[str, Any], overrides: Sequence[str], schema: type[BaseModel]
) -> tuple[dict[str, Any], list[Problem]]:
    """A copy of `tables` with each `section.key=value` in it, and what was wrong with the
    overrides.

    The value is read as TOML; what TOML cannot read is a string, and so is what the schema wants as
    a string. `none` removes an optional key.
    """
    result, problems = copy.deepcopy(tables), []
    for override in overrides:
        name, equals, text = override.partition("=")
        parts = key_of(override)
        if not equals or len(parts) < 2 or not all(parts):
            problems.append(
                Problem("--set", name, "must be section.key=value", "e.g. --set slurm.nodes=24")
            )
            continue
        kinds, problem = _kinds_at(schema, parts)
        if problem:
            problems.append(problem)
            continue
        table: Any = result
        for part in parts[:-1]:
            if isinstance(table, dict):
                table = table.setdefault(part, {})
            else:
                table = None
        if not isinstance(table, dict):
            problems.append(
                Problem(
                    name,
                    None,
                    "is inside something that is not a table in the card",
                    "repair the card",
                )
            )
        elif text.strip().lower() == "none" and type(None) in kinds:
            table.pop(parts[-1], None)
        else:
            table[parts[-1]] = _override_value(text.strip(), kinds)
    return result, problems


def overridden_keys(overrides: Sequence[str]) -> frozenset[Key]:
    """The keys that `overrides` set."""
    return frozenset(key_of(override) for override in overrides)


def key_of(override: str) -> tuple[str, ...]:
    """The key that one `section.key=value` sets."""
    return tuple(part.strip() for part in override.partition("=")[0].split("."))


def _override_value(text: str, kinds: frozenset[Any]) -> Any:
    try:
        read = parse_toml(f"value = {text}")
    except ValueError:
        return text
    if set(read) == {"value"}:
        value = read["value"]
    else:
        value = text
    if str in kinds and type(value) not in kinds:
        return text
    return value


def _kinds_at(
    schema: type[BaseModel], parts: Sequence[str]
) -> tuple[frozenset[Any], Problem | None]:
    """The types that the key at `parts` takes, or the problem that there is no such key."""
    table: type[BaseModel] | None = schema
    kinds: frozenset[Any] = frozenset()
    entries: frozenset[Any] = frozenset({str})  # of a free table
    for depth, part in enumerate(parts):
        if table is None:
            if dict in kinds and depth == len(parts) - 1:  # a free table, such as slurm.environment
                return entries, None
            return kinds, Problem(
                ".".join(parts), None, f"{'.'.join(parts[:depth])} is not a table", "drop the rest"
            )
        if part not in table.model_fields:
            near = nearest(part, table.model_fields)
            if near:
                fix = f"did you mean {'.'.join((*parts[:depth], near))!r}?"
            else:
                fix = "`tr11 config explain` has all"
            return kinds, Problem(".".join(parts), None, "is not a known key", fix)
        annotation = table.model_fields[part].annotation
        options = [item for item in (annotation, *get_args(annotation)) if item is not None]
        kinds = frozenset(getattr(item, "__origin__", item) for item in _alternatives(annotation))
        for item in _alternatives(annotation):
            if get_origin(item) is dict:
                entries = frozenset(_alternatives(get_args(item)[1]))
        tables = [
            item for item in options if isinstance(item, type) and issubclass(item, BaseModel)
        ]
        table = None
        if tables:
            table = tables[0]
    return kinds, None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, a Literal's kinds of value, or the annotation itself."""
    origin = get_origin(annotation)
    if origin in {Union, UnionType}:
        return tuple(item for member in get_args(annotation) for item in _alternatives(member))
    if origin is Literal:
        return tuple(type(item) for item in get_args(annotation))
    return (annotation,)


# ----------------------------------------------------------------------------- $VARS and paths
def expand(
    tables: Mapping[str, Any],
    environment: Mapping[str, str],
    shell_keys: frozenset[Key],
    keep_undefined: bool,
) -> tuple[dict[str, Any], list[Problem]]:
    """`$NAME` and `${NAME}` in every string replaced from `environment`; `$$` is a dollar sign.

    Strings below `shell_keys` are left alone: the node's shell expands them. So is a variable for
    the workers that is a reference to a secret; anywhere else a secret's variable is a problem. An
    undefined variable is one problem, however often it is used, or stays as written with
    `keep_undefined`.
    """
    undefined: dict[str, list[tuple[Key, str]]] = {}
    secrets: list[Problem] = []

    def change(key: Key, value: Any) -> Any:
        if not isinstance(value, str) or _is_below(key, shell_keys):
            return value
        if kept := kept_reference(key, value, environment):
            return kept

        def replace(match: re.Match[str]) -> str:
            name = match.group(1) or match.group(2)
            if name is None:
                return "$"
            if name not in environment:
                undefined.setdefault(name, []).append((key, value))
                return match.group(0)
            if is_secret(name, environment[name]):
                secrets.append(_secret_problem(key, name))
                return match.group(0)
            return environment[name]

        return _VARIABLE.sub(replace, value)

    result: dict[str, Any] = _map(dict(tables), change)
    if keep_undefined:
        return result, secrets
    return result, [*secrets, *(_undefined_problem(name, uses) for name, uses in undefined.items())]


def _secret_problem(key: Key, variable: str) -> Problem:
    rule = f"${variable} is a secret, and the card is copied into the run directory"
    fix = "keep it in a file of its own that others cannot read"
    if key[:2] == SECTION:
        fix = f'write {key[-1]} = "${variable}" and no more, which is read in the job'
    return Problem(dotted(key), None, rule, fix)


def _undefined_problem(name: str, uses: Sequence[tuple[Key, str]]) -> Problem:
    (key, value), others = uses[0], len(uses) - 1
    rule = f"the environment variable ${name} is not defined" + (
        f" ({counted(others, 'more use')})" if others else ""
    )
    return Problem(dotted(key), value, rule, f"export {name}=... or write the value")


HUB_KEYS: frozenset[Key] = frozenset({("tokenizer", "path")})  # a path, or OWNER/NAME on the hub
GROUP_KEYS: frozenset[Key] = frozenset(
    {("data", "train_group"), ("data", "valid_groups"), ("data", "test_groups")}
)


def without_empty_paths(
    tables: Mapping[str, Any], path_keys: frozenset[Key], schema: type[BaseModel]
) -> tuple[dict[str, Any], list[Problem]]:
    """The tables without the optional paths that are empty, as `none` removes them; an empty path
    is the current folder for whoever opens it. Where a path is needed, and in a list, an empty one
    is a problem.
    """
    left, problems = copy.deepcopy(dict(tables)), []
    for key, value in list(walk(left)):
        plain = tuple(part for part in key if not isinstance(part, int))
        if value != "" or plain not in path_keys:
            continue
        if plain == key and type(None) in _kinds_at(schema, plain)[0]:
            section, name = plain
            del left[section][name]
        else:
            problems.append(
                Problem(dotted(key), value, "is empty, and a path is needed", "write the path")
            )
    return left, problems


def make_absolute(
    tables: Mapping[str, Any],
    path_keys: frozenset[Key],
    folder_of: Callable[[Key], Path],
    home: str,
) -> dict[str, Any]:
    """Paths at `path_keys` (or in a list there) and in data groups made absolute; `~/` is `home`
    where there is one.

    `folder_of` says from which folder those at a key are taken.
    """

    def change(key: Key, value: Any) -> Any:
        plain = tuple(part for part in key if not isinstance(part, int))
        if isinstance(value, str) and plain in GROUP_KEYS:
            return _absolute_group(value, folder_of(plain))
        if not isinstance(value, str) or not value or plain not in path_keys:
            return value
        folder = folder_of(plain)
        if plain in HUB_KEYS and is_hub_id(value, folder):
            return value
        if value.startswith("~/") and home:
            value = home + value[1:]
        return str(folder / value)

    result: dict[str, Any] = _map(dict(tables), change)
    return result


def _absolute_group(text: str, directory: Path) -> str:
    """A group `NAME: WEIGHT START:END PREFIX, ...` with absolute prefixes; what is no group is left
    for its parser.
    """
    name, colon, rest = text.partition(":")
    parts = [part.split() for part in rest.split(",")]
    if not colon or any(len(fields) != 3 for fields in parts):
        return text
    return f"{name}: " + ", ".join(
        f"{weight} {span} {directory / prefix}" for weight, span, prefix in parts
    )


def _map(value: Any, change: Callable[[Key, Any], Any], key: Key = ()) -> Any:
    if isinstance(value, dict):
        return {name: _map(item, change, (*key, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_map(item, change, (*key, index)) for index, item in enumerate(value)]
    return change(key, value)
