"""The options of sbatch for a request: one list, which the command line and the `#SBATCH` lines both are made of."""

from __future__ import annotations

import math
import re

from tr11ops.cluster.base import BatchRequest

_NEVER_SATISFIED = re.compile(r"\b(afterok|afternotok|aftercorr):")


def format_time_limit(seconds: int) -> str:
    """`seconds` as Slurm reads it, HH:MM:SS (hours may exceed 24)."""
    return f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"


def sbatch_options(request: BatchRequest) -> list[str]:
    """Every option that the request means, each as one argument of sbatch; the script itself is none of them."""
    early = request.signal_seconds_before_limit
    values: list[tuple[str, object]] = [
        ("job-name", request.name),
        ("partition", request.partition),
        ("account", request.account),
        ("constraint", request.constraint),
        ("reservation", request.reservation),
        ("qos", request.quality_of_service),
        ("nodes", request.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", request.cpus_per_task),
        ("hint", request.hint),
        ("gres", f"gpu:{request.gpus_per_node}" if request.gpus_per_node else None),
        ("mem", f"{request.memory_megabytes}M" if request.memory_megabytes else None),
        ("time", format_time_limit(request.time_limit_seconds)),
        ("signal", f"B:USR1@{early}" if early else None),
        ("chdir", request.working_directory),
        ("output", request.output),
        ("array", request.array),
        ("dependency", request.dependency),
        ("exclude", ",".join(request.exclude)),
        ("comment", request.comment),
        # a time of day would be ambiguous twice a year
        ("begin", None if request.begin is None else f"uts{math.ceil(request.begin)}"),
    ]
    # After a node's death the next array task starts in a second or two; a requeued one waits two minutes.
    flags = ["--requeue" if request.requeue else "--no-requeue"]
    if request.survives_nodes:
        flags.append("--no-kill")
    if request.hold:
        flags.append("--hold")
    if request.dependency and _NEVER_SATISFIED.search(request.dependency):
        flags.append("--kill-on-invalid-dep=yes")  # it would otherwise wait for ever
    return [*(f"--{name}={value}" for name, value in values if value not in (None, "")), *flags]


def script_options(request: BatchRequest) -> list[str]:
    """The same for the script's `#SBATCH` lines: `sbatch` alone does with the script what tr11 does."""
    pairs = (option.partition("=") for option in sbatch_options(request))
    return [f"{name}={quoted_option(value)}" if equals else name for name, equals, value in pairs]


def quoted_option(text: str) -> str:
    """Quoted for Slurm's reader of `#SBATCH` lines: plain words as they are, others in double quotes."""
    if text and all(character.isalnum() or character in "@%_+=:,./-[]&|*()" for character in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
