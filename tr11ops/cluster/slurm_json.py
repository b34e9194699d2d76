"""Reading `squeue --json` in the dialects of Slurm 22.05 to 24.11. Pure.

Older versions write plain numbers, null for "none" and exit codes as wait statuses; newer ones wrap numbers in
{"set", "infinite", "number"}, make the state a list and the exit code an object.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from tr11ops.cluster.base import Job
from tr11ops.cluster.slurm_text import full_job_id, job_state, node_names, shell_exit_code, task_numbers

_NO_VALUE = 0xFFFFFFFE  # Slurm's NO_VAL; one more is INFINITE


def number(value: object) -> int | None:
    """An integer in any dialect; None for null, unset, infinite, and Slurm's two reserved numbers."""
    if isinstance(value, Mapping):
        if value.get("infinite") or not value.get("set", True):
            return None
        value = value.get("number")
    if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value, re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    whole = int(value)
    return None if whole in (_NO_VALUE, _NO_VALUE + 1) else whole


def exit_status(value: object) -> tuple[int | None, int | None]:
    """Exit code and signal in any dialect."""
    if isinstance(value, Mapping) and ("return_code" in value or "signal" in value):
        signal = value.get("signal")
        if isinstance(signal, Mapping) and not {"set", "number"} & signal.keys():
            signal = signal.get("id", signal.get("signal_id"))
        return number(value.get("return_code")), number(signal) or None
    status = number(value)
    if status is None:
        return None, None
    return status >> 8, (status & 0x7F) or None  # a wait status


def _time(value: object) -> float | None:
    seconds = number(value)
    return float(seconds) if seconds else None


def _text(value: object) -> str:
    return value if isinstance(value, str) and value != "(null)" else ""


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(name for name in value if isinstance(name, str))
    return node_names(_text(value))


def output_path(pattern: str, directory: str, replacements: Mapping[str, str]) -> str:
    """The file that a pattern such as "logs/%x-%A_%a.out" names; codes without a replacement stay as they are."""
    if not pattern:
        return ""
    parts, rest = "", pattern
    while rest:
        before, percent, rest = rest.partition("%")
        parts += before
        if percent:
            code, rest = rest[:1], rest[1:]
            parts += replacements.get(code, "%" + code)
    return os.fspath(PurePosixPath(directory) / parts)


def job(value: Mapping[str, Any]) -> Job:
    """One entry of the `jobs` list."""
    raw_id = str(number(value.get("job_id")) or "")
    array = number(value.get("array_job_id"))
    task_id = number(value.get("array_task_id"))
    waiting = _text(value.get("array_task_string"))
    array_id = str(array) if array and (task_id is not None or waiting) else None
    tasks = waiting if task_id is None else str(task_id)
    state = job_state(value.get("job_state"))
    code, signal = exit_status(value.get("exit_code")) if state.is_final else (None, None)
    derived = exit_status(value.get("derived_exit_code")) if state.is_final else (None, None)
    limit = number(value.get("time_limit"))
    name = _text(value.get("name"))
    user = _text(value.get("user_name")) or str(number(value.get("user_id")) or 0)
    directory = _text(value.get("current_working_directory"))
    known = {"%": "%", "x": name, "u": user, "A": array_id or raw_id}
    if not array_id:
        known |= {"j": raw_id, "a": str(_NO_VALUE)}
    elif task_id is not None:
        known |= {"j": raw_id, "a": str(task_id)}
    expanded = _text(value.get("stdout_expanded")) if not (array_id and task_id is None) else ""
    output = expanded or output_path(_text(value.get("standard_output")), directory, known)
    return Job(
        job_id=full_job_id(raw_id, array_id, tasks),
        raw_id=raw_id,
        array_id=array_id,
        task_id=task_id if array_id else None,
        name=name,
        user=user,
        state=state,
        reason=_text(value.get("state_description")) or _text(value.get("state_reason")),
        partition=_text(value.get("partition")),
        nodes=_names(value.get("nodes")),
        node_count=number(value.get("node_count")) or 0,
        submit_time=_time(value.get("submit_time")),
        start_time=_time(value.get("start_time")),
        end_time=_time(value.get("end_time")),
        time_limit_seconds=None if limit is None else limit * 60,
        exit_code=code,
        exit_signal=signal,
        derived_exit_code=shell_exit_code(*derived),
        comment=_text(value.get("comment")),
        dependency=_text(value.get("dependency")),
        excluded=_names(value.get("excluded_nodes")),
        pending_tasks=task_numbers(waiting) if array_id and task_id is None and not state.is_final else (),
        working_directory=directory,
        output=output,
        eligible_time=_time(value.get("eligible_time")),
        priority=number(value.get("priority")),
    )


def _entries(reply: Mapping[str, Any], key: str) -> list[Any]:
    value = reply.get(key)
    return value if isinstance(value, list) else []


def jobs(reply: Mapping[str, Any]) -> tuple[Job, ...]:
    """All jobs of a reply."""
    return tuple(job(entry) for entry in _entries(reply, "jobs") if isinstance(entry, Mapping))


def errors(reply: Mapping[str, Any]) -> str:
    """The errors that a reply reports, in one line; empty when it reports none."""
    texts = []
    for entry in _entries(reply, "errors"):
        if isinstance(entry, Mapping):
            said = [_text(entry.get(key)) for key in ("error", "description")]
            texts.append(": ".join(filter(None, said)) or str(dict(entry)))
        else:
            texts.append(str(entry))
    return "; ".join(texts)
