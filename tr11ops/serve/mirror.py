"""A mirrored copy of what a run publishes: a folder with its status.json, and its logs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr11ops.base.errors import Refusal
from tr11ops.hub.base import FILE_NAME
from tr11ops.status.published import read_published, table
from tr11ops.status.remote import LARGEST_STATUS_BYTES, Facts, RemoteView, judge_outside


def is_mirror(folder: Path) -> bool:
    """Whether a folder holds what a run publishes, and is no run directory."""
    return (folder / FILE_NAME).is_file() and not (folder / "state" / "submissions").is_dir()


def look_at_mirror(folder: Path, now: float) -> Mapping[str, Any]:
    """The published document, with the verdict, the sentence and the exit code that may be
    concluded from how old it is. Raises OSError; Refusal for what is no such document.
    """
    place = folder / FILE_NAME
    with place.open("rb") as stream:
        data = stream.read(LARGEST_STATUS_BYTES + 1)
        changed = os.fstat(stream.fileno()).st_mtime
    if len(data) > LARGEST_STATUS_BYTES:
        raise Refusal(f"{place}: is larger than {LARGEST_STATUS_BYTES >> 20} MiB")
    try:
        published = read_published(data)
    except ValueError as error:
        raise Refusal(f"{place}: {error}") from None
    view = RemoteView(
        now,
        str(folder),
        facts=Facts("", changed, (FILE_NAME,)),
        variant=str(table(published.get("run")).get("variant") or "main"),
        published=published,
        trouble="",
        log_path="",
        log=None,
    )
    told = judge_outside(view)
    word = "unknown" if told.word is None else told.word.value
    return {
        **published,
        "verdict": word,
        "verdict_since": published.get("verdict_since")
        if word == published.get("verdict")
        else None,
        "why": told.line,
        "exit_code": told.exit_code,
        "answer": told.answer,
        "may_sleep": told.may_sleep,
    }
