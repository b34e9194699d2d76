"""The run card: one TOML file that says everything a run should be, checked whole before anything
is done.

`RunCard` has the operation's sections. With the schema of tr11's own trainer beside them
(`trainer.config.card.TrainerConfig`) it is an `OwnCard`, with `[trainer]` a `ForeignCard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.runcard.find import (
    PathBase,
    base_of,
    find_card,
    newest_launch,
    shipped_cards,
    shipped_folder,
)
from tr11ops.runcard.kinds import OWN_SECTIONS, ForeignCard, OwnCard, RunCard, card_kind, own_card
from tr11ops.runcard.load import (
    REMOVED_KEYS,
    Key,
    apply_overrides,
    dotted,
    expand,
    key_of,
    make_absolute,
    overridden_keys,
    read_tables,
    removed_keys,
    secret_values,
    unusable_values,
    without,
    without_empty_paths,
)
from tr11ops.runcard.rules import knows_weights, operation_rules
from tr11ops.runcard.sections import (
    KubernetesSection,
    PermsSection,
    RehearsalSection,
    ResilienceSection,
    SlurmSection,
    parse_attempts,
    parse_time_limit,
)
from tr11ops.runcard.watching import (
    AlertsSection,
    BackupSection,
    CronSection,
    FilesystemSection,
    HubSection,
    WatchSection,
)
from trainer.config.base import is_private, salvage
from trainer.config.card import CardError, Problem, RunSection, derive_numbers, validate
from trainer.config.rules import Rule
from trainer.contract.paths import RunPaths
from trainer.contract.record import JsonObject
from trainer.contract.secret_names import reference_of
from trainer.schedule.rules import cross_rules

# Lists of mail addresses that a card takes from the environment: `recipients =
# ["$TR11_ALERT_RECIPIENTS"]`.

ADDRESS_KEYS = (("alerts", "recipients"), ("alerts", "rota"))


def expand_addresses(
    tables: Mapping[str, Any], environment: Mapping[str, str], keep_undefined: bool
) -> tuple[JsonObject, list[Problem]]:
    """The tables with each address that is one `$NAME` replaced by the addresses in it, split at
    commas.

    An undefined variable is left for the card's other variables to be reported with;
    `keep_undefined` drops it, since it can be no address. One that names no address is a problem.
    """
    result, problems = dict(tables), []
    for section, key in ADDRESS_KEYS:
        table = result.get(section)
        if not isinstance(table, dict) or not isinstance(table.get(key), list):
            continue
        entries: list[Any] = []
        for entry in table[key]:
            name = reference_of(entry) if isinstance(entry, str) else ""
            if not name or (name not in environment and not keep_undefined):
                entries.append(entry)
            elif name in environment:
                found = [part.strip() for part in environment[name].split(",") if part.strip()]
                entries += found
                if not found:
                    fix = f"export {name}=ana@site.org,ben@site.org, or --set '{section}.{key}=[]'"
                    problems.append(
                        Problem(f"{section}.{key}", entry, "names no mail address", fix)
                    )
        result[section] = {**table, key: entries}
    return result, problems


__all__ = [
    "AlertsSection",
    "BackupSection",
    "CardError",
    "CronSection",
    "FilesystemSection",
    "ForeignCard",
    "HubSection",
    "KubernetesSection",
    "OwnCard",
    "PathBase",
    "PermsSection",
    "RehearsalSection",
    "ResilienceSection",
    "RunCard",
    "SlurmSection",
    "WatchSection",
    "card_from_resolved",
    "find_card",
    "load_card",
    "load_with_base",
    "own_card",
    "parse_attempts",
    "parse_time_limit",
    "resolved",
    "shipped_cards",
    "shipped_folder",
]

RESOLVED_SCHEMA = 1
MOST_PROBLEMS = 40

# Strings that the shell on the node expands, and paths that are made absolute
# (`runcard_find.base_of` says from where).
SHELL_KEYS: frozenset[Key] = frozenset({("slurm", "setup")})
PATH_KEYS: frozenset[Key] = frozenset(
    {
        ("run", "directory"),
        ("run", "kill_switch"),
        ("data", "prefixes"),
        ("data", "cache"),
        ("data", "train_groups_file"),
        ("data", "valid_groups_file"),
        ("data", "test_groups_file"),
        ("tokenizer", "path"),
        ("trainer", "directory"),
        ("trainer", "folder"),
        ("trainer", "needs"),
        ("tokenizer", "vocabulary_file"),
        ("tokenizer", "merges_file"),
        ("checkpoint", "load"),
        ("resilience", "check_scripts"),
        ("resilience", "check_scripts", "script"),
        ("hub", "credentials_file"),
        ("backup", "store"),
        ("backup", "credentials_file"),
        ("alerts", "urls_file"),
        ("alerts", "dead_man_url_file"),
        ("filesystems", "path"),
        ("perms", "folders"),
    }
)
SECRET_FILE_KEYS: frozenset[Key] = frozenset(
    {
        ("hub", "credentials_file"),
        ("backup", "credentials_file"),
        ("alerts", "urls_file"),
        ("alerts", "dead_man_url_file"),
    }
)


def resolved(card: RunCard) -> JsonObject:
    """The card as JSON for the trainer and later commands: every default filled in, and what
    follows from it.

    `trainer.config.card.load_trainer_config` reads it as it is; `card_from_resolved` gives the card
    back.
    """
    derived: JsonObject = {
        "schema": RESOLVED_SCHEMA,
        "card_hash": card.digest,
        "world_size": card.world_size,
        "total_iterations": card.total_iterations,
        "time_limit_seconds": card.time_limit_seconds,
        "kill_switch": str(card.kill_switch),
    }
    if isinstance(card, OwnCard):
        derived["data_parallel"] = card.data_parallel_degree
    return {**card.model_dump(mode="json"), "derived": derived}


def card_from_resolved(value: JsonObject, source: str) -> RunCard:
    """The card that `resolved` was made from. Raises CardError when it is not one.

    Keys that are no longer of the card are passed over: older versions kept them with their
    defaults.
    """
    return _checked(without(value, {("derived",), *REMOVED_KEYS}), [], source)


def load_card(
    path: Path,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    directory: Path | None = None,
    keep_undefined: bool = False,
) -> RunCard:
    """The card in `path`; see `load_with_base`."""
    return load_with_base(
        path, overrides, environment, directory=directory, keep_undefined=keep_undefined
    )[0]


def load_with_base(
    path: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str] | None,
    *,
    directory: Path | None = None,
    keep_undefined: bool = False,
) -> tuple[RunCard, PathBase]:
    """Read, complete and check the card in `path`; with the folder that its relative paths were
    taken from.

    `overrides` are `section.key=value`; `$VARS` come from `environment` (None: nothing is defined). Relative paths are
    taken from the card's folder (`find.base_of` knows the two exceptions), those of `overrides` from
    `directory`: where the command is typed, by default the current working directory. `keep_undefined` leaves
    undefined variables as written, for commands that touch no path.
    Raises CardError with every problem found, one line each.
    """
    tables, problems, base = _prepared(
        path,
        overrides,
        variables=environment or {},
        current=directory or Path.cwd(),
        keep_undefined=keep_undefined,
    )
    try:
        return _checked(tables, problems, str(path)), base
    except CardError as error:
        raise placed(error, error.source, overrides) from None


def placed(error: CardError, source: str, overrides: Sequence[str]) -> CardError:
    """The error with where each of its values was given: by `overrides`, or in `source`."""
    typed = tuple(f"{dotted(key)}." for key in overridden_keys(overrides))
    return CardError(source, error.problems, typed)


def paths_of_refused(
    path: Path, overrides: Sequence[str], environment: Mapping[str, str]
) -> RunPaths | None:
    """Where the run lives whose card `load_card` refuses; None where that cannot be said either.
    Raises nothing.
    """
    try:
        tables, _, _ = _prepared(
            path, overrides, variables=environment, current=Path.cwd(), keep_undefined=False
        )
        run = validate(RunSection, tables.get("run") or {}, str(path))
    except CardError:
        return None
    return RunPaths(Path(run.directory), run.name, run.variant)


def _prepared(
    path: Path,
    overrides: Sequence[str],
    variables: Mapping[str, str],
    current: Path,
    keep_undefined: bool,
) -> tuple[JsonObject, list[Problem], PathBase]:
    """The tables of a card as they are to be judged, what is wrong with them so far, and where its
    paths begin.
    """
    problems: list[Problem] = []
    tables = _usable(tables_in(path), problems)
    problems += removed_keys(tables, overrides)
    tables = without(tables, REMOVED_KEYS)
    overrides = [override for override in overrides if key_of(override) not in REMOVED_KEYS]
    own_run, _ = expand({"run": tables.get("run")}, variables, SHELL_KEYS, True)
    tables, wrong = apply_overrides(tables, overrides, card_kind(tables))
    problems += wrong
    tables = _usable(tables, problems)
    tables, empty = expand_addresses(tables, variables, keep_undefined)
    tables, undefined = expand(tables, variables, SHELL_KEYS, keep_undefined)
    problems += empty + undefined
    tables = _usable(tables, problems)
    problems += secret_values(tables, SECRET_FILE_KEYS)
    tables, pathless = without_empty_paths(tables, PATH_KEYS, card_kind(tables))
    problems += pathless
    tables = _for_another_trainer(tables)
    base, typed = base_of(path, own_run, current), overridden_keys(overrides)
    tables = make_absolute(
        tables,
        PATH_KEYS,
        lambda key: current if key in typed else base.folder,
        variables.get("HOME", ""),
    )
    return tables, problems, base


def tables_in(path: Path) -> JsonObject:
    """The tables of a card; of a run directory, what its newest launch was given. Raises CardError."""
    if path.is_dir():
        launched = launched_tables(path)
        if launched is not None:
            return launched
    return read_tables(path)


def text_in(path: Path) -> str:
    """The text of a card that was read before; of a run directory, its `tables_in` written as a card."""
    if path.is_dir():
        from tr11ops.runcard.toml_writer import write_card

        return write_card(tables_in(path), {}, [f"As {path} was launched last."])
    return path.read_text(encoding="utf-8", errors="replace")


def launched_tables(directory: Path) -> JsonObject | None:
    """What the newest launch from a run directory was given, as a card has it; None where nothing
    was launched there.
    """
    card = newest_launch(directory)
    if card is None:
        return None
    told = without(card, {("derived",), *REMOVED_KEYS})
    return {
        name: escaped_variables(table, (name,)) for name, table in told.items() if table is not None
    }


def escaped_variables(value: Any, key: tuple[str, ...]) -> Any:
    """A value that is read as it is: dollar signs doubled, but in what the node's shell expands;
    without what is unset.
    """
    if isinstance(value, Mapping):
        told = {name: item for name, item in value.items() if item is not None}
        return {name: escaped_variables(item, (*key, name)) for name, item in told.items()}
    if isinstance(value, list):
        return [escaped_variables(item, key) for item in value]
    if isinstance(value, str) and key not in SHELL_KEYS:
        return value.replace("$", "$$")
    return value


def _for_another_trainer(tables: JsonObject) -> JsonObject:
    """What a card with [trainer] may leave out, and what differs from a card of tr11's own: it is
    started in the card's folder, and weights are not copied alone where no one can tell which files
    they are.
    """
    section = tables.get("trainer")
    if not isinstance(section, dict):
        return tables
    backup = tables.get("backup", {})
    if isinstance(backup, dict) and not knows_weights(section):
        tables = {**tables, "backup": {"weights_interval": 0, **backup}}
    return {**tables, "trainer": {"directory": ".", **section}}


def _usable(tables: Mapping[str, Any], problems: list[Problem]) -> JsonObject:
    """The tables without the keys that hold what no schema should meet; these are added to
    `problems`.
    """
    found = unusable_values(tables, SHELL_KEYS)
    problems += found
    return without(tables, {tuple(problem.key.split(".")[:2]) for problem in found})


def _checked(tables: Mapping[str, Any], problems: list[Problem], source: str) -> RunCard:
    """The card, when there are no `problems` so far and it breaks no rule. Raises CardError with
    all that is wrong.

    A card with faulty keys is judged by all rules that do not need these.
    """
    kind = card_kind(tables)
    if kind is ForeignCard:
        for name in sorted({*OWN_SECTIONS} & {*tables}):
            fix = "remove one of the two"
            problems.append(
                Problem(name, None, "is tr11's own, but [trainer] names another trainer", fix)
            )
        tables = {name: table for name, table in tables.items() if name not in OWN_SECTIONS}
    try:
        card = validate(kind, tables, source)
    except CardError as error:
        named = [f"{problem.key}." for problem in problems]
        fresh = [
            fault
            for fault in error.problems
            if not any(key.startswith(f"{fault.key}.") for key in named)
        ]
        faulty = {tuple(problem.key.split(".")) for problem in (*problems, *error.problems)}
        if kind is OwnCard:
            tables = derive_numbers(tables)
        partly = salvage(kind, tables, faulty)
        _raise_if([*problems, *fresh, *broken_rules(partly, is_whole=False)], source)
        raise
    _raise_if([*problems, *broken_rules(card, is_whole=True)], source)
    return card


def broken_rules(card: RunCard, is_whole: bool = True) -> list[Problem]:
    """What the rules between keys say against a card; of one that `is_whole` is False, those that
    can be asked.
    """
    found: list[Problem] = []
    own_rules: tuple[Rule, ...] = ()
    if isinstance(card, OwnCard):
        own_rules = tuple(cross_rules(card, lambda: card.world_size))
    for rule in (*own_rules, *operation_rules(card)):
        try:
            for problem in rule():
                found.append(problem)
        except AttributeError:  # it reads a key that is not sound
            if is_whole:
                raise
    return found


def _raise_if(problems: Sequence[Problem], source: str) -> None:
    if len(problems) > MOST_PROBLEMS:
        more = Problem(
            "card", None, f"has {len(problems) - MOST_PROBLEMS} more problems", "repair these first"
        )
        problems = [*problems[:MOST_PROBLEMS], more]
    if problems:
        raise CardError(source, [_without_private(problem) for problem in problems])


def _without_private(problem: Problem) -> Problem:
    """The problem without what it quotes, where that is of a key that is never shown."""
    if is_private(OwnCard, problem.key.split(".")):
        return replace(problem, value=None)
    return problem


# ----------------------------------------------------------------------------- how two resolved cards differ
def differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """(key, old value, new value) of everything that differs, by name; None where it is unset. A
    table that is unset has no key that is set.
    """
    first, second = dict(_flat(before)), dict(_flat(after))
    for key in sorted({*first, *second}):
        if first.get(key) != second.get(key):
            yield key, first.get(key), second.get(key)


def difference_lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """`section.key: old -> new` for each of them."""
    for key, old, new in differences(before, after):
        yield f"{key}: {_value(old)} -> {_value(new)}"


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _value(value: Any) -> str:
    if value is None:
        text = "none"
    else:
        text = " ".join(str(value).split())
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
