"""The batch script's text: `slurm/train.sbatch.j2` filled in, with every value quoted for the shell."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tr11ops.base.shipped import read_shipped, shipped_root
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.sbatch_options import script_options
from tr11ops.cluster.sbatch_script import code_root, script_engine
from tr11ops.runcard.secret_references import references

TEMPLATE = ("slurm", "train.sbatch.j2")


def agent_command(module: Literal["batch", "early"], card: Path, tag: str) -> list[str]:
    """What the batch script runs, of the same installation that launched it: the agent, or, where that has not begun,
    what records the end of the attempt."""
    return [sys.executable, "-u", "-m", f"tr11ops.agent.{module}", "--card", str(card), "--submission", tag]


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
) -> str:
    """The whole script. `setup` lines stand as they are (the node's shell expands them); all else is quoted.

    `silence` is a folder of the script's own, in which it counts the tasks whose agents left no verdict below
    `attempts`, or never began: the second one has queued jobs held. `early` is run where the agent has not begun.

    Raises ValueError when a value cannot stand in a script (a NUL, or a line end on an `#SBATCH` line).
    """
    options = script_options(request)
    for text in (*options, request.name, variant):
        if "\n" in text or "\r" in text:
            raise ValueError(f"{text!r} cannot stand on one line of a batch script; choose a path without line ends")
    engine = script_engine()
    read = references(environment)
    root = code_root()
    script = str(
        engine.from_string(read_shipped(*TEMPLATE)).render(
            run=request.name,
            variant=variant,
            tag=tag,
            options=options,
            environment=sorted((name, value) for name, value in environment.items() if name not in read),
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
