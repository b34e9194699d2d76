"""What a command may replace: what it made itself, as the record beside it says; anything else only
when it is told to.

A record is written twice: before the output appears, without a report, and after. So what a killed
command left behind is known as its own, and is gone on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os.path import lexists
from pathlib import Path
from typing import Any

from trainer.contract.errors import DataError, explain_os_errors
from trainer.contract.files import write_json


def check_replaceable(
    outputs: Iterable[Path],
    record: Path,
    is_unchanged: Callable[[Mapping[str, Any]], bool],
    force: bool,
) -> None:
    """Raises DataError when one of `outputs` is there and this command did not make it, unless
    `force`.

    `is_unchanged`: whether the outputs are still what a finished record's report says.
    """
    there = next((path for path in outputs if lexists(path)), None)
    if there is None or force or _is_ours(record, is_unchanged):
        return
    raise DataError(
        f"{there} is there already, and {record.name} beside it does not say that this command made it as it is; move"
        " it away, choose another output, or replace it with --force"
    )


def begin_record(record: Path, request: Mapping[str, Any]) -> None:
    """Say that what appears now is made by this command. Raises DataError."""
    with explain_os_errors("writing", record):
        write_json(record, {"request": dict(request), "report": None})


@contextmanager
def recorded(record: Path, outputs: Iterable[Path]) -> Iterator[None]:
    """Where the block fails before any of `outputs` appeared, a record that it began goes too."""
    try:
        yield
    except BaseException:
        if not any(lexists(path) for path in outputs):
            record.unlink(missing_ok=True)
        raise


def was_interrupted(record: Path) -> bool:
    """Whether a record says that its command began to write and did not come to its end."""
    try:
        value = json.loads(record.read_text(encoding="utf-8"))
        return "request" in value and value.get("report", value) is None
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def end_record(record: Path, request: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """Say what was made. Raises DataError."""
    with explain_os_errors("writing", record):
        write_json(record, {"request": dict(request), "report": dict(report)})


def _is_ours(record: Path, is_unchanged: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        value = json.loads(record.read_text(encoding="utf-8"))
        if isinstance(value["request"], dict):
            report = value.get("report", value)
        else:
            report = {}
        return report is None or is_unchanged(report)
    except (OSError, ValueError, KeyError, TypeError):
        return False
