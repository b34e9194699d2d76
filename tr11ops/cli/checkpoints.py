"""`tr11 checkpoints`: what the run has saved, what is in it, how two states differ, and turning one into another.

What stays is in `tr11ops.cli.checkpoints_keep`, what goes in `checkpoints_prune`, whether it is sound in
`checkpoints_verify`. All else is done by `python -m trainer.checkpoint`, as a child, because it reads tensors.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tr11ops.base.errors import Refusal
from tr11ops.cli import completion
from tr11ops.cli.checkpoints_keep import list_checkpoints, pin, unpin
from tr11ops.cli.checkpoints_prune import prune, remove
from tr11ops.cli.checkpoints_verify import verify
from tr11ops.cli.common import directory_of
from tr11ops.cli.context import JSON, RunContext
from tr11ops.cli.trainer_child import child_words, run_trainer_module
from tr11ops.runcard.card import resolved
from trainer.contract.checkpoint_names import (
    LATEST_FILE,
    checkpoint_name,
    checkpoint_step,
    checkpoint_steps,
    read_latest,
)

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

app = typer.Typer(
    name="checkpoints",
    help="""What is saved: list, verify, pin, prune, inspect, convert. STEP is a number, `latest`, or a folder's path.

    Examples:
      tr11 checkpoints list
      tr11 checkpoints verify latest
      tr11 checkpoints prune --dry-run
    """,
    no_args_is_help=True,
)

Step = Annotated[
    str,
    typer.Argument(
        metavar="STEP", help="A step's number, `latest`, or the path of its folder.", autocompletion=completion.steps
    ),
]


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
    is_step = not text or text == LATEST_FILE or (text.isascii() and text.isdecimal())
    return path.resolve() if not is_step and path.is_dir() else None


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


def _place(text: str, context: RunContext) -> str:
    """The absolute path for the child. A path needs no card."""
    named = existing_path(text)
    return str(named if named is not None else resolve_step(context.card, text))


def _run(ctx: typer.Context, **instead: object) -> NoReturn:
    raise typer.Exit(run_trainer_module("trainer.checkpoint", child_words(ctx, **instead)))


# ----------------------------------------------------------------------------- what is kept
app.command("list")(list_checkpoints)
app.command()(verify)
app.command()(pin)
app.command()(unpin)
app.command()(prune)
app.command()(remove)


# ----------------------------------------------------------------------------- look
@app.command()
def inspect(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    step: Step,
    *,
    tensors: Annotated[
        str | None,
        typer.Option("--tensors", metavar="PATTERN", help="Show numbers of tensors whose name fits, e.g. '*norm*'."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file's digest: reads all bytes.")] = False,
) -> None:
    """What a checkpoint holds: facts, files, tensors with their least, greatest and mean value and norm.

    Exit code 1 when a file is missing, short or changed.

    Examples:
      tr11 checkpoints inspect latest --tensors '*norm*' --verify
    """
    _run(ctx, step=_place(step, context))


@app.command()
def diff(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    a: Annotated[str, typer.Argument(metavar="A", help="A step, `latest`, a checkpoint's folder, or dumps.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    *,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, metavar="X", help="Allowed |a - b|, relative to the tensor's greatest."),
    ] = 0.0,
) -> None:
    """Compare two states number by number, name where they first differ, and say which kind of fault that is.

    A and B may be checkpoints of any layout and shape, or folders of debug dumps, whole or fingerprints. Dumps of one
    folder: FOLDER:ITERATION:MOMENT, such as a:805:after-iteration. Exit code 0: equal, 1: different.

    Examples:
      tr11 checkpoints diff 800 latest
      tr11 checkpoints diff dumps-a dumps-b
    """
    _run(ctx, a=_state(a, context), b=_state(b, context))


def _state(text: str, context: RunContext) -> str:
    """A checkpoint's folder, or dumps: a folder, perhaps with :ITERATION:MOMENT behind it."""
    folder, colon, rest = text.partition(":")
    if colon:
        return f"{Path(folder).expanduser().resolve()}:{rest}"
    return _place(text, context)


# ----------------------------------------------------------------------------- turn one into another
@app.command()
def export(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    step: Step,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    to: Annotated[
        str,
        typer.Option("--format", "--to", metavar="hf", help="hf: the Hugging Face architecture that the model is."),
    ] = "hf",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="bf16|fp32|fp16", help="Else as the checkpoint's weights.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Of the tensors in one file: 5GB, 500MB.")
    ] = "5GB",
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="PATH", help="Folder with tokenizer.json; else the card's.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export in DIR.")] = False,
    verify: Annotated[bool, typer.Option(help="Compare the digests of the weights first; reads them twice.")] = True,
) -> None:
    """Write a checkpoint's weights as a Hugging Face model: config, weights, tokenizer.

    A BLOOM, Llama or Qwen3, a Megatron-BERT, or a Blenderbot (T5), as the model is.

    The folder appears whole or not at all. Memory does not grow with the model. STEP as a path needs no card; the
    card then says what the checkpoint does not: tokenizer, epsilon of the LayerNorms.

    Examples:
      tr11 checkpoints export latest -o bloom-tiny
      tr11 checkpoints export 95000 -o bloom --dtype bf16 --max-shard-size 10GB --run tr11-176B-ml
    """
    named = existing_path(step)
    card = context.card if named is None or context.run is not None else None
    place = named if named is not None or card is None else resolve_step(card, step)
    with _card_file(card) as card_option:
        _run(ctx, step=place, **card_option)


@app.command("import")
def import_(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    folder: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and the weights.")],
) -> None:
    """Make the first checkpoint of a run from a Hugging Face model, so that a training starts.

    A BLOOM, Llama, Qwen3 or Megatron-BERT.

    Weights in the card's precision, fp32 masters equal to the model's own numbers, empty moments, step 0. The card's
    model must be that of HF_DIR, and the run must hold no checkpoint yet. Reads .safetensors and pytorch_model*.bin.
    Where the card pads the vocabulary otherwise (tokenizer.vocabulary_size is then needed), padding rows are of
    zeros; an export leaves such rows out again.

    Examples:
      tr11 checkpoints import bloom-560m --run my-card.toml
    """
    with _card_file(context.card) as card_option:
        _run(ctx, folder=folder.expanduser().absolute(), **card_option)


@contextmanager
def _card_file(card: RunCard | None) -> Generator[dict[str, str]]:
    """The child's option for the resolved card, which lies in a file of its own meanwhile; no option without a card."""
    if card is None:
        yield {}
        return

    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="tr11-card-", encoding="utf-8") as stream:
        stream.write(dumps(resolved(card)))
        stream.flush()
        yield {"card": stream.name}


@app.command()
def reshape(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    step: Step,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for global_stepN and latest.")],
    layout: Annotated[str, typer.Option("--format", metavar="tr11|deepspeed", help="Layout to write.")] = "tr11",
    tensor: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel degree; else the checkpoint's.")] = None,
    pipeline: Annotated[int | None, typer.Option(min=1, help="Stages; else the checkpoint's.")] = None,
    data: Annotated[int | None, typer.Option(min=1, help="Data-parallel degree; else the checkpoint's.")] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Have DIR/latest name it, also where it names another.")
    ] = False,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave the optimizer's state out.")] = False,
    verify: Annotated[bool, typer.Option(help="Compare all digests first; reads everything twice.")] = True,
) -> None:
    """Write a checkpoint in the other layout; in DeepSpeed's, for the topology that its engine will have.

    A restart of tr11 on another shape needs no reshape: it is just a load, from either layout. One file of the new
    checkpoint is in memory at a time. DIR/global_stepN must not exist, DIR/latest is left as it is without
    --latest, and DIR must not hold another model's checkpoints.

    Examples:
      tr11 checkpoints reshape 95000 -o reshaped --format deepspeed --tensor 4 --pipeline 12 --data 4
    """
    _run(ctx, step=_place(step, context))
