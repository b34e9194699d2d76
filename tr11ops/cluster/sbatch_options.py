"""What is handed to sbatch: the options of a request, one list, which the command line and the
`#SBATCH` lines both are made of; and what every batch script is made with.
"""

from __future__ import annotations

import math
import shlex
import site
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.base.shipped import read_shipped
from tr11ops.base.units import format_time_limit
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.passed_options import with_gpus

if TYPE_CHECKING:
    import jinja2


# What every batch script is made with: where its code is, the template engine.


def code_root() -> Path | None:
    """The folder that Python must be told of to import tr11; None where it is installed."""
    root = Path(__file__).resolve().parent.parent.parent
    installed = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
        *site.getsitepackages(),
    }
    if str(root) in {str(Path(path).resolve()) for path in installed if path}:
        return None
    return root


def script_engine() -> jinja2.Environment:
    """The template engine of scripts: what is undefined is an error, and `| sh` quotes a value for
    the shell.

    `{% include NAME %}` takes in a part that scripts share, from slurm/.
    """
    import jinja2  # here: most commands that may submit do not

    engine = jinja2.Environment(
        loader=jinja2.FunctionLoader(partial(read_shipped, "slurm")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    engine.filters["sh"] = shlex.quote
    return engine


FLAG = object()  # the value of an option that takes none


def sbatch_options(request: BatchRequest) -> list[str]:
    """Every option that the request means, each as one argument of sbatch; the script itself is
    none of them.
    """
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
        *_passed(request),
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
    # After a node's death the next array task starts in a second or two; a requeued one waits two
    # minutes.
    flags = ["--requeue" if request.requeue else "--no-requeue"]
    if request.survives_nodes:
        flags.append("--no-kill")
    if request.hold:
        flags.append("--hold")
    return [
        *(argument_of(name, value) for name, value in values if value not in (None, "")),
        *flags,
    ]


def _passed(request: BatchRequest) -> Iterator[tuple[str, object]]:
    """What the card passes through, with the GPUs that tr11 asks for; a job's own memory outweighs
    the card's.
    """
    for name, value in with_gpus(request.options, request.gpus_per_node):
        if name != "mem" or not request.memory_megabytes:
            yield name, value or FLAG


def argument_of(name: str, value: object) -> str:
    """An option as one argument of sbatch."""
    if value is FLAG:
        return f"--{name}"
    return f"--{name}={value}"


def script_options(request: BatchRequest) -> list[str]:
    """The same for the script's `#SBATCH` lines: `sbatch` alone does with the script what tr11
    does.
    """
    return [quoted_argument(option) for option in sbatch_options(request)]


def quoted_argument(argument: str) -> str:
    """One argument of sbatch as it stands on an `#SBATCH` or `#SCRON` line."""
    name, equals, value = argument.partition("=")
    if equals:
        return f"{name}={quoted_option(value)}"
    return name


def quoted_option(text: str) -> str:
    """Quoted for Slurm's reader of `#SBATCH` lines: plain words as they are, others in double
    quotes.
    """
    if text and all(character.isalnum() or character in "@%_+=:,./-[]&|*()" for character in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
