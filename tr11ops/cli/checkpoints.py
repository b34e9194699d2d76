"""`tr11 checkpoints`: what the run has saved, what is in it, how two states differ, and turning one into another.

`list` reads manifests. All else is done by `python -m trainer.checkpoint`, as a child, because it reads tensors.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tr11ops.cli.common import JsonOption, Refusal, RunOption, SetOption, age, directory_of, read_card, say
from trainer.contract import LATEST_FILE, checkpoint_name, checkpoint_step, checkpoint_steps, read_latest

if TYPE_CHECKING:
    from tr11ops.checkpoint_list import CheckpointRow
    from tr11ops.runcard import RunCard

app = typer.Typer(
    name="checkpoints",
    help="List, inspect, compare and convert checkpoints. STEP is a number, `latest`, or a folder's path.",
    no_args_is_help=True,
)

SCHEMA = 1
Step = Annotated[str, typer.Argument(metavar="STEP", help="A step's number, `latest`, or the path of its folder.")]
# Options of these commands belong to the child, which parses them and prints their help.
_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run_trainer_checkpoint(arguments: list[str]) -> int:
    """Run `python -m trainer.checkpoint` with this process's terminal; returns its exit code.

    An interrupt from the keyboard reaches the child too, which cleans up; this process waits for it.
    """
    child = subprocess.Popen([sys.executable, "-m", "trainer.checkpoint", *arguments])
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            continue
        return code if code >= 0 else 1


def resolve_step(card: RunCard, text: str) -> Path:
    """The folder that STEP means in the card's run: a number, `latest`, or a path. Raises Refusal when it is not there.

    Only that the folder exists is looked at, not what is in it.
    """
    named = existing_path(text)
    if named is not None:
        return named
    folder = directory_of(card).paths.checkpoints
    step = _latest(folder) if text == LATEST_FILE else _number(text)
    place = folder / checkpoint_name(step)
    if not place.is_dir():
        known = checkpoint_steps(folder)
        which = f"there are {_abridged(known)}" if known else "there is none yet"
        raise Refusal(f"{place} does not exist; {which} (tr11 checkpoints list)")
    return place.resolve()


def existing_path(text: str) -> Path | None:
    """The folder that `text` names by itself, without a card; None when it must be a step of the run.

    Raises Refusal when it is a path and nothing is there.
    """
    path = Path(text).expanduser()
    if "/" in text or text in {".", ".."}:
        if not path.is_dir():
            raise Refusal(f"{path} is not a folder; give a step, {LATEST_FILE}, or the path of a global_stepN folder")
        return path.resolve()
    is_name = not text.isascii() or not text.isdecimal()
    return path.resolve() if is_name and text != LATEST_FILE and path.is_dir() else None


def _number(text: str) -> int:
    step = int(text) if text.isascii() and text.isdecimal() else checkpoint_step(text)
    if step is None:
        raise Refusal(f"STEP = {text!r}: is not a step; use a number, {LATEST_FILE}, or a folder's path", exit_code=2)
    return step


def _latest(folder: Path) -> int:
    try:
        step = read_latest(folder)
    except ValueError as error:
        raise Refusal(f"{error}; give the step's number instead") from None
    if step is None:
        raise Refusal(f"{folder / LATEST_FILE} does not exist: nothing was saved there yet, or it was lost")
    return step


def _abridged(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-4:]))
    return shown if len(steps) <= 4 else f"{len(steps)} of them, the newest {shown}"


def _place(text: str, run: str | None, overrides: list[str] | None) -> str:
    """The absolute path for the child. A path needs no card."""
    named = existing_path(text)
    return str(named if named is not None else resolve_step(read_card(run, overrides), text))


def _finish(arguments: list[str]) -> None:
    raise typer.Exit(run_trainer_checkpoint(arguments))


def _flag(name: str, value: bool) -> list[str]:
    return [name] if value else []


# ----------------------------------------------------------------------------- list
@app.command("list")
def list_checkpoints(
    *,
    run: RunOption = None,
    as_json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """What the run has saved: size, whether it is whole, on which shape, and which one a restart would take.

    Sizes of files are compared with the manifest; inspect --verify reads every byte. Exit code 1 when `latest` names
    nothing, or a checkpoint that is not whole.

    Example: tr11 checkpoints list --run demo
    """
    from tr11ops.checkpoint_list import list_rows

    folder = directory_of(read_card(run, overrides)).paths.checkpoints
    latest: int | None = None
    fault = ""
    try:
        latest = read_latest(folder)
        rows = list_rows(folder, latest)
    except ValueError as error:
        fault, rows = str(error), list_rows(folder, None)
    except OSError as error:
        raise Refusal(f"{folder} cannot be read: {error.strerror or error}; nothing may be concluded", 3) from None
    named = next((row for row in rows if row.is_latest), None)
    if latest is not None and named is None:
        fault = f"{folder / LATEST_FILE} names {checkpoint_name(latest)}, which does not exist"
    elif named is not None and named.faults:
        fault = f"{LATEST_FILE} names {checkpoint_name(named.step)}, which is not whole: {named.faults[0]}"
    elif latest is None and rows and not fault:
        fault = f"{folder / LATEST_FILE} is missing: a restart takes the newest whole checkpoint"
    if as_json:
        print(
            json.dumps(
                {
                    "schema": SCHEMA, "folder": str(folder), "latest": latest, "fault": fault or None,
                    "checkpoints": [row.document() for row in rows],
                },
                indent=1,
            )
        )  # fmt: skip
    elif rows:
        print(_table(rows, time.time()))
    else:
        print(f"no checkpoint in {folder}")
    if fault:
        say(f"tr11: {fault}")
        raise typer.Exit(1)


def _table(rows: list[CheckpointRow], now: float) -> str:
    """Steps, oldest first; at most 80 columns for the numbers of a 176B run."""
    head = ("step", "size", "shape", "samples", "tokens", "age", "state")
    lines = [head]
    for row in rows:
        lines.append(
            (
                str(row.step),
                _size(row.bytes),
                row.shape,
                "?" if row.consumed_samples is None else f"{row.consumed_samples:,}",
                "?" if row.consumed_tokens is None else _short(row.consumed_tokens),
                age(now - row.created),
                row.state + (", latest" if row.is_latest else ""),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = [
        "  ".join(
            cell.ljust(width) if column in {2, 6} else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    for row in rows:
        shown += [f"step {row.step}: {fault}" for fault in row.faults[:3]]
        shown += [f"step {row.step}: and {len(row.faults) - 3} more"] * (len(row.faults) > 3)
    return "\n".join([*shown, "shape: tensor x pipeline x data"])


def _size(count: int) -> str:
    """Bytes in decimal units, as disks are sold: 2.3 TB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def _short(count: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


# ----------------------------------------------------------------------------- look
@app.command()
def inspect(
    step: Step,
    *,
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="PATTERN", help="Show numbers of tensors whose name fits, e.g. '*norm*'."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file's digest: reads all bytes.")] = False,
    run: RunOption = None,
    json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """What a checkpoint holds: facts, files, tensors with their least, greatest and mean value and norm.

    Exit code 1 when a file is missing, short or changed.

    Example: tr11 checkpoints inspect latest --tensors '*norm*' --verify
    """
    _finish(
        [
            *("inspect", *(["--tensors", tensors] if tensors is not None else [])),
            *_flag("--verify", verify),
            *_flag("--json", json),
            *("--", _place(step, run, overrides)),
        ]
    )


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A step, `latest`, a checkpoint's folder, or dumps.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    *,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, metavar="X", help="Allowed |a - b|, relative to the tensor's greatest."),
    ] = 0.0,
    run: RunOption = None,
    json: JsonOption = False,
    overrides: SetOption = None,
) -> None:
    """Compare two states number by number, name where they first differ, and say which kind of fault that is.

    A and B may be checkpoints of any layout and shape, or folders of debug dumps, whole or fingerprints. Dumps of one
    folder: FOLDER:ITERATION:MOMENT, such as a:805:after-iteration. Exit code 0: equal, 1: different.

    Example: tr11 checkpoints diff 800 latest

    Example: tr11 checkpoints diff dumps-a dumps-b
    """
    places = [_state(text, run, overrides) for text in (a, b)]
    _finish(["diff", "--tolerance", str(tolerance), *_flag("--json", json), "--", *places])


def _state(text: str, run: str | None, overrides: list[str] | None) -> str:
    """A checkpoint's folder, or dumps: a folder, perhaps with :ITERATION:MOMENT behind it."""
    folder, colon, rest = text.partition(":")
    if colon:
        return f"{Path(folder).expanduser().resolve()}:{rest}"
    return _place(text, run, overrides)


# ----------------------------------------------------------------------------- turn one into another
@app.command(context_settings=_FORWARD)
def export(context: typer.Context) -> None:
    """Write a checkpoint as a Hugging Face model: STEP --to hf -o DIR (see export --help).

    Example: tr11 checkpoints export latest --to hf -o bloom-tiny
    """
    _forward("export", context.args)


@app.command("import", context_settings=_FORWARD)
def import_(context: typer.Context) -> None:
    """Make a checkpoint of this run from a Hugging Face model (see import --help)."""
    _forward("import", context.args)


@app.command(context_settings=_FORWARD)
def reshape(context: typer.Context) -> None:
    """Write a checkpoint in another layout or for another shape (see reshape --help).

    A restart on another shape needs no reshape: it is just a load.
    """
    _forward("reshape", context.args)


def _forward(command: str, words: list[str]) -> None:
    """Run the child with its own options. STEP comes first and is resolved; `--run` and `--set` are ours."""
    run, overrides, rest = _split(words)
    if rest and not rest[0].startswith("-"):
        rest = [_place(rest[0], run, overrides), *rest[1:]]
    _finish([command, *rest])


def _split(words: list[str]) -> tuple[str | None, list[str], list[str]]:
    run: str | None = None
    overrides: list[str] = []
    rest: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name in {"--run", "--set"}:
            given = value if equals else next(left, None)
            if given is None:
                raise Refusal(f"{name}: needs a value", exit_code=2)
            if name == "--run":
                run = given
            else:
                overrides.append(given)
        else:
            rest.append(word)
    return run, overrides, rest
