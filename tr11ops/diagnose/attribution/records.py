"""Reads what a launch left in its attempt's folder: the workers' failures, the node agents' records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tr11ops.diagnose.attribution.evidence import Failure, NodeReport
from trainer.contract.state_file import read_json


def read_failures(attempt: Path, launch: int) -> tuple[Failure, ...]:
    """The failures that this launch recorded. A half-dead node may leave half a record: the others still speak."""
    found = []
    for value in read_objects(attempt / "failures"):
        if value.get("launch", launch) != launch:
            continue
        try:
            rank = None if value["rank"] is None else int(value["rank"])
            number = value.get("signal")
            ended_by = None if number is None else int(number)
            found.append(Failure(str(value["host"]), rank, float(value["time"]), str(value["error"]), ended_by))
        except (KeyError, TypeError, ValueError):
            continue
    return tuple(sorted(found, key=lambda one: one.time))


def read_reports(attempt: Path, launch: int) -> tuple[NodeReport, ...]:
    """The node agents' records of this launch."""
    found = []
    for value in read_objects(attempt / "nodes"):
        if value.get("launch") != launch or not isinstance(value.get("node"), str):
            continue
        status = value.get("exit_status")
        checks = value.get("checks")
        bad = tuple(
            f"{check.get('name')}: {check.get('why')}"
            for check in (checks if isinstance(checks, list) else [])
            if isinstance(check, dict) and check.get("result") == "bad"
        )
        found.append(NodeReport(value["node"], status if isinstance(status, int) else None, bad))
    return tuple(found)


def read_objects(folder: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a folder; what cannot be read is left out."""
    for path in sorted(folder.glob("*.json")):
        try:
            value = read_json(path)
        except (OSError, ValueError):
            continue
        if value is not None:
            yield value
