"""The batch script's text: `slurm/train.sbatch.j2` filled in, with every value quoted for the
shell.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tr11ops.base.shipped import read_shipped, shipped_root
from tr11ops.cluster.arrays import NO_TASK
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.sbatch_options import script_options
from tr11ops.cluster.sbatch_script import code_root, script_engine
from tr11ops.runcard.secret_references import references
from tr11ops.rundir.hold_marks import unmarked

TEMPLATE = ("slurm", "train.sbatch.j2")
_CODES = {  # of `sbatch --output`, as the job's own environment says it
    "A": "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}",
    "a": f"${{SLURM_ARRAY_TASK_ID:-{NO_TASK}}}",
    "j": "$SLURM_JOB_ID",
    "J": "$SLURM_JOB_ID",
    "N": "${SLURMD_NODENAME:-$(hostname -s)}",
    "n": "0",
    "t": "0",
    "s": "batch",
    "u": "${SLURM_JOB_USER:-$(id -un)}",
    "x": "$SLURM_JOB_NAME",
    "%": "%",
}
_NUMBERS = frozenset("AajJnt")


def agent_command(module: Literal["batch", "early"], card: Path, tag: str) -> list[str]:
    """What the batch script runs, of the same installation that launched it: the agent, or, where
    that has not begun, what records the end of the attempt.
    """
    return [
        sys.executable,
        "-u",
        "-m",
        f"tr11ops.agent.{module}",
        "--card",
        str(card),
        "--submission",
        tag,
    ]


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
    silence: Path | None = None,
    attempts: Path | None = None,
    folder: Path | None = None,
    output: str = "",
) -> str:
    """The whole script. `setup` lines stand as they are (the node's shell expands them); all else
    is quoted.

    `silence` is a folder of the script's own, in which it counts the tasks whose agents left no
    verdict below `attempts`, or never began: the second one has queued jobs held. `early` is run
    where the agent has not begun. `folder` is the submission's own: where it is missing, so is the
    run directory, and queued jobs are held. With it the script opens `output`, a path with sbatch's
    codes, by itself.

    Raises ValueError when a value cannot stand in a script (a NUL, or a line end on an `#SBATCH`
    line).
    """
    options = script_options(request)
    for text in (*options, request.name, variant):
        if "\n" in text or "\r" in text:
            raise ValueError(
                f"{text!r} cannot stand on one line of a batch script; choose a path without line ends"
            )
    engine = script_engine()
    read = references(environment)
    root = code_root()
    script = str(
        engine.from_string(read_shipped(*TEMPLATE)).render(
            run=request.name,
            variant=variant,
            tag=tag,
            options=options,
            environment=sorted(
                (name, value) for name, value in environment.items() if name not in read
            ),
            references=sorted(read.items()),
            code_root=str(root) if root else "",
            setup=list(setup),
            setup_seconds=setup_seconds,
            setup_end=_end_of("\n".join(setup)),
            early=list(early),
            shipped=str(shipped_root()),
            command=list(command),
            silence=str(silence) if silence and attempts else "",
            attempts=str(attempts or ""),
            folder=str(folder or ""),
            root=str(request.working_directory),
            output=shell_output(output),
            comment=unmarked(request.comment),
        )
    )
    if "\0" in script:
        raise ValueError(
            "a value of the card holds a NUL character, which no script can; remove it"
        )
    return script


def shell_output(pattern: str) -> str:
    """A path with sbatch's codes as one word of the shell; codes that say nothing here stay as they
    are.

    As for sbatch, a backslash in it means that it has no codes.
    """
    if "\\" in pattern:
        return shlex.quote(pattern.replace("\\", ""))
    words = []
    for literal, width, code in re.findall(r"([^%]+)|%([0-9]*)(.?)", pattern):
        value = _CODES.get(code, "")
        if literal or not value:
            words.append(shlex.quote(literal or f"%{width}{code}"))
        elif width and code in _NUMBERS:
            words.append(f'"$(printf %0{min(int(width), 10)}d {value})"')
        else:
            words.append(f'"{value}"')
    return "".join(words)


def _end_of(text: str) -> str:
    """A word that is no line of the text, to end it with."""
    word = "TR11_SETUP_END"
    while word in text:
        word += "_"
    return word
