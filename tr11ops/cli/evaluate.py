"""`tr11 eval`: the loss of a checkpoint on given data, on this machine, on any topology."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from tr11ops.base.errors import Refusal
from tr11ops.cli import completion
from tr11ops.cli.checkpoints import resolve_step
from tr11ops.cli.common import read_card
from tr11ops.cli.context import JSON, RunContext
from tr11ops.runcard.card import RunCard, resolved
from tr11ops.runcard.load import apply_overrides, read_tables
from trainer.contract.state_file import read_json

SCHEMA = 1


def evaluate(
    context: Annotated[RunContext, JSON],
    *,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="STEP",
            help="A step's number, `latest`, or the path of its folder.",
            autocompletion=completion.steps,
        ),
    ] = "latest",
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="valid, test, train, or a group of the card."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=1,
            metavar="N",
            help="Windows to evaluate; default: the card's, or the file's.",
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--windows",
            "--tokens",
            metavar="FILE",
            help=".npy with integers [windows, sequence + 1].",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, metavar="N", help="Processes; default: tensor x pipeline."
        ),
    ] = None,
) -> None:
    """Mean loss (nats per token) of a checkpoint, and with --json the loss of every window.

    Weights alone are loaded: no optimizer, any tensor x pipeline x data shape, whatever shape wrote
    the checkpoint.

    Examples:
      tr11 eval --split valid --samples 256
      tr11 eval --checkpoint 94000 --windows windows.npy --set parallel.tensor=2 --set parallel.pipeline=1 --json
    """
    if (split is None) == (tokens is None):
        raise Refusal("give one of --split NAME and --windows FILE", exit_code=2)
    if tokens is not None and not tokens.is_file():
        raise Refusal(f"{tokens} is not a file", exit_code=2)

    count = workers or _workers_of(context)
    here = [f"slurm.workers_per_node={count}", "slurm.nodes=1", "slurm.gpus_per_node=0"]
    card = read_card(context.run, [*(context.overrides), *here])
    place = resolve_step(card, checkpoint)
    with tempfile.TemporaryDirectory(prefix="tr11-eval-") as folder:
        resolved_card, output = Path(folder) / "card.json", Path(folder) / "result.json"
        resolved_card.write_text(json.dumps(resolved(card)), encoding="utf-8")
        command = [
            *(
                sys.executable,
                "-m",
                "trainer.control.launcher",
                "--standalone",
                f"--nproc-per-node={count}",
            ),
            *(
                "-m",
                "trainer.control.evaluate",
                str(resolved_card),
                "--checkpoint",
                str(place),
                "--output",
                str(output),
            ),
            *(["--split", split] if split is not None else []),
            *(["--tokens", str(tokens.absolute())] if tokens is not None else []),
            *(["--samples", str(samples)] if samples is not None else []),
        ]
        _run(command)
        found = read_json(output)
    if found is None:
        raise Refusal("the evaluation ended without a result; what the workers said is above")
    if "refused" in found:
        raise Refusal(f"refused: {found['refused']}", exit_code=2)
    context.emit({"schema": SCHEMA, **found}, [_sentence(found)], indent=None)


def _workers_of(context: RunContext) -> int:
    """Tensor x pipeline of the card, before it is known whether the card fits this machine."""
    tables, _ = apply_overrides(read_tables(context.card_path), context.overrides, RunCard)
    parallel = tables.get("parallel", {})
    if isinstance(parallel, dict):
        degrees = [parallel.get(key, 1) for key in ("tensor", "pipeline")]
    else:
        degrees = [1, 1]
    if not all(type(degree) is int and degree > 0 for degree in degrees):
        return 1  # the card's own check says what is wrong
    return int(degrees[0] * degrees[1])


def _run(command: list[str]) -> None:
    """Run the workers with this process's terminal; their words go to stderr."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    child = subprocess.Popen(command, stdout=sys.stderr.fileno(), env=environment)
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue  # the children got it too
        break
    if code:
        raise Refusal("the evaluation failed; what the workers said is above")


def _sentence(found: dict[str, Any]) -> str:
    shape = " x ".join(
        f"{name} {degree}" for name, degree in sorted(found["topology"].items(), reverse=True)
    )
    parts = "".join(
        f"{name} {value:.4f}, " if " " in name else f"{name} loss {value:.6f}, "
        for name, value in found["parts"].items()
    )
    return (
        f"step {found['step']} on {found['source']}: loss {found['loss']:.6f}, {parts}"
        f"perplexity {found['perplexity']:.4f} "
        f"({found['windows']} windows, {found['tokens']:,} tokens, {shape}, {found['seconds']:.1f} s)"
    )
