"""The batch script's text: `slurm/train.sbatch.j2` filled in, with every value quoted for the shell."""

from __future__ import annotations

import shlex
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from tr11ops.cluster.base import BatchRequest
from tr11ops.shipped import read_shipped, shipped_root

TEMPLATE = ("slurm", "train.sbatch.j2")


def agent_command(card: Path, tag: str, python: str | None = None) -> list[str]:
    """What the batch script runs: the agent of the same installation that launched it."""
    return [python or sys.executable, "-u", "-m", "tr11ops.agent.batch", "--card", str(card), "--submission", tag]


def early_command(card: Path, tag: str, python: str | None = None) -> list[str]:
    """What the batch script runs when its agent has not begun: it records the end of the attempt."""
    return [python or sys.executable, "-u", "-m", "tr11ops.agent.early", "--card", str(card), "--submission", tag]


def code_root() -> Path | None:
    """The folder that Python must be told of to import tr11; None where it is installed."""
    root = Path(__file__).resolve().parent.parent.parent
    installed = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
        *site.getsitepackages(),
    }
    return None if str(root) in {str(Path(path).resolve()) for path in installed if path} else root


def batch_options(request: BatchRequest, hint: str | None = None, survives_nodes: bool = False) -> list[str]:
    """The `#SBATCH` options of a request, so that `sbatch` alone would do with the script what tr11 does.

    `survives_nodes`: the job has spare nodes, so that it lives on when one dies (the step never does).
    """
    early = request.signal_seconds_before_limit
    limit = request.time_limit_seconds
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
        ("hint", hint),
        ("gres", f"gpu:{request.gpus_per_node}" if request.gpus_per_node else None),
        ("time", f"{limit // 3600:02d}:{limit % 3600 // 60:02d}:{limit % 60:02d}"),
        ("signal", f"B:USR1@{early}" if early else None),
        ("chdir", request.working_directory),
        ("output", request.output),
        ("array", request.array),
        ("dependency", request.dependency),
        ("exclude", ",".join(request.exclude) or None),
        ("comment", request.comment or None),
    ]
    # After a node's death the next array task starts in a second or two; a requeued one waits two minutes.
    flags = ["--no-requeue", *(["--no-kill"] if survives_nodes else [])]
    return [*(f"--{name}={quoted_option(str(value))}" for name, value in values if value is not None), *flags]


def quoted_option(text: str) -> str:
    """Quoted for Slurm's reader of `#SBATCH` lines: plain words as they are, others in double quotes."""
    if text and all(character.isalnum() or character in "@%_+=:,./-[]&|*()" for character in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def script_engine() -> jinja2.Environment:
    """The template engine of scripts: what is undefined is an error, and `| sh` quotes a value for the shell."""
    engine = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    engine.filters["sh"] = shlex.quote
    return engine


def render_script(
    request: BatchRequest,
    *,
    variant: str,
    tag: str,
    command: Sequence[str],
    setup: Sequence[str],
    setup_seconds: int = 600,
    early: Sequence[str] = (),
    environment: Mapping[str, str],
    hint: str | None = None,
    survives_nodes: bool = False,
    silence: Path | None = None,
    attempts: Path | None = None,
) -> str:
    """The whole script. `setup` lines stand as they are (the node's shell expands them); all else is quoted.

    `silence` is a folder of the script's own, in which it counts the tasks whose agents left no verdict below
    `attempts`, or never began: the second one has what waits held. `early` is run where the agent has not begun.

    Raises ValueError when a value cannot stand in a script (a NUL, or a line end on an `#SBATCH` line).
    """
    options = batch_options(request, hint, survives_nodes)
    for text in (*options, request.name, variant):
        if "\n" in text or "\r" in text:
            raise ValueError(f"{text!r} cannot stand on one line of a batch script; choose a path without line ends")
    engine = script_engine()
    root = code_root()
    script = str(
        engine.from_string(read_shipped(*TEMPLATE)).render(
            run=request.name,
            variant=variant,
            tag=tag,
            options=options,
            environment=sorted(environment.items()),
            code_root=str(root) if root else "",
            setup=list(setup),
            setup_seconds=setup_seconds,
            setup_end=_end_of("\n".join(setup)),
            early=list(early),
            shipped=str(shipped_root()),
            command=list(command),
            silence=str(silence) if silence and attempts else "",
            attempts=str(attempts or ""),
        )
    )
    if "\0" in script:
        raise ValueError("a value of the card holds a NUL character, which no script can; remove it")
    return script


def _end_of(text: str) -> str:
    """A word that is no line of the text, to end it with."""
    word = "TR11_SETUP_END"
    while word in text:
        word += "_"
    return word
