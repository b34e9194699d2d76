"""Labelled incidents: a folder's `labels.toml`, further tables of labels beside it, or
`labels.jsonl`; as one type.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.contract.record import Record

RESTARTS = ("plain", "elsewhere", "change", "unknown", "none")
CLEAN, GOES_ON_WELL, UNTOLD = "clean_exit", "running", "unknown"
NOTHING = "none"  # is to be done
_RESTARTS_OF_ACTION: Mapping[
    str, tuple[str, ...]
] = {  # where a label tells what to do, and not whether it helps
    "exclude_and_resubmit": ("elsewhere",),
    "resubmit": ("plain",),
    "fix_config": ("change",),
    "fix_storage": ("change", "unknown"),  # who has to look does not know yet whether it came back
    "rollback_and_skip": ("change",),
    "page": ("unknown", "change"),
    "none": ("none",),
}
_RESTARTS_OF: Mapping[
    tuple[str, str], tuple[str, ...]
] = {  # by action and verdict, where both together tell more
    ("page", "unknown"): ("unknown",),
    ("resubmit", "slurm_node_fail"): (
        "plain",
        "elsewhere",
    ),  # Slurm itself keeps the lost node away
    ("resubmit", "nccl_timeout"): (
        "plain",
        "unknown",
    ),  # to try is what is done about a hang without a reason
}


class LabelError(Exception):
    """A folder without labels, or a label that cannot be used."""


class Incident(Record):
    """One incident, and what a good on-call engineer says of it.

    `lines`: (file's name, number from 1) of each line that tells of the first cause; empty where
    none does. `node`: the one that the label names, `is_guilty` whether as the guilty one; None
    where the label names none. `may_be_no_one`: whether to accuse no one is right too.
    `judges_nodes`: whether a node that is accused and is not named is innocent. `restarts`: the
    answers that count as right; `tells_restart`: whether the label has them, else they follow from
    its actions.
    """

    name: str
    files: tuple[Path, ...]
    faults: frozenset[str]
    lines: frozenset[tuple[str, int]]
    node: str | None
    is_guilty: bool
    may_be_no_one: bool
    judges_nodes: bool
    restarts: frozenset[str]
    tells_restart: bool


def read_set(folder: Path) -> list[Incident]:
    """The incidents of a folder. Raises LabelError in one line, OSError."""
    jsonl = folder / "labels.jsonl"
    tables = sorted(folder.glob("*.toml"))
    if not jsonl.is_file() and not tables:
        raise LabelError(f"{folder}: neither labels.toml nor labels.jsonl is there")
    found = (
        list(_of_jsonl(jsonl))
        if jsonl.is_file()
        else [one for path in tables for one in _of_toml(path)]
    )
    if not found:
        raise LabelError(f"{folder}: no incident has a label")
    for incident in found:
        for path in incident.files:
            if not path.is_file():
                raise LabelError(f"{incident.name}: {path} is not there")
        if not incident.restarts <= set(RESTARTS):
            raise LabelError(f"{incident.name}: restart is one of {', '.join(RESTARTS)}")
    return found


def _of_toml(path: Path) -> Iterator[Incident]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise LabelError(f"{path}: {error}") from None
    has_nodes = any("node" in label for label in tables.values())
    for name, label in tables.items():
        try:
            yield _incident(path.parent, name, label, has_nodes)
        except KeyError as error:
            raise LabelError(f"{path}: {name} has no {error.args[0]}") from None


def _incident(folder: Path, name: str, label: Mapping[str, Any], has_nodes: bool) -> Incident:
    files = tuple(folder / file for file in label.get("files", (f"{name}.log.gz",)))
    actions = (label["action"], *label.get("accepted_actions", ()))
    told = (label["restart"], *label.get("accepted_restarts", ())) if "restart" in label else ()
    # else it is only where the fault showed
    is_guilty = "restart" in label or "exclude_and_resubmit" in actions
    is_exclusion = label["action"] == "exclude_and_resubmit"
    return Incident(
        name=name,
        files=files,
        faults=_faults((label["verdict"], *label.get("accepted_verdicts", ())), actions),
        lines=frozenset(_lines(label, files)),
        node=label.get("node"),
        is_guilty=is_guilty,
        may_be_no_one="restart" not in label and not is_exclusion,
        judges_nodes=has_nodes and not (is_exclusion and "node" not in label),
        restarts=frozenset(told or _restarts(actions, label["verdict"])),
        tells_restart=bool(told),
    )


def _faults(classes: Iterable[str], actions: Iterable[str]) -> frozenset[str]:
    """The classes that count as right. A label's `clean_exit` is of what ended as it should, or goes
    on well; so is an `unknown` after which nothing is to be done: no line tells of a fault.
    """
    told = frozenset(classes)
    if CLEAN in told or (UNTOLD in told and NOTHING in actions):
        return told | {GOES_ON_WELL}
    return told


def _lines(label: Mapping[str, Any], files: tuple[Path, ...]) -> Iterator[tuple[str, int]]:
    for number in label.get("lines", ()):
        yield files[0].name, number
    if "root_cause" in label:
        yield label["root_cause"]["file"], label["root_cause"]["line_number"]
    for file, numbers in label.get("accepted_lines", {}).items():
        for number in numbers:
            yield file, number


def _of_jsonl(path: Path) -> Iterator[Incident]:
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        try:
            label = json.loads(text)
            lines = {(file, line) for file, line in label["accepted_lines"]}
            if label["cause_line"] is not None:
                lines.add((label["cause_file"], label["cause_line"]))
            told = tuple(label.get("restarts", ()))
            yield Incident(
                name=f"{label['id']}-{label['name']}",
                files=tuple(path.parent / file for file in label["files"]),
                faults=_faults(
                    (*label["right_classes"], *label["acceptable_classes"]),
                    label["sensible_actions"],
                ),
                lines=frozenset(lines),
                node=label["node"],
                is_guilty=True,
                may_be_no_one=False,
                judges_nodes=True,
                restarts=frozenset(
                    told or _restarts(label["sensible_actions"], label["right_classes"][0])
                ),
                tells_restart=bool(told),
            )
        except json.JSONDecodeError as error:
            raise LabelError(f"{path}:{number}: {error}") from None
        except KeyError as error:
            raise LabelError(f"{path}:{number}: no {error.args[0]}") from None


def _restarts(actions: Iterable[str], verdict: str) -> Iterator[str]:
    for action in actions:
        yield from _RESTARTS_OF.get((action, verdict), _RESTARTS_OF_ACTION[action])
