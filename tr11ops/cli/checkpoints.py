"""`tr11 checkpoints`: what is saved, whether it is whole, and in which other form."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.base.installed import READING_CHECKPOINTS, require
from tr11ops.base.observed import cause
from tr11ops.base.units import counted, size
from tr11ops.checkpoints.catalogue import Catalogue
from tr11ops.checkpoints.verify import ValuesFound, VerifyResult, verify as read_checkpoint
from tr11ops.cli import completion
from tr11ops.cli.checkpoints_keep import (
    existing_path,
    find_checkpoint,
    list_checkpoints,
    open_catalogue,
    pin,
    prune,
    remove,
    resolve_step,
    unpin,
)
from tr11ops.cli.common import directory_of, say
from tr11ops.cli.progress import ByteProgress
from tr11ops.cli.runner import JSON, Outcome, RunContext
from tr11ops.cli.trainer_child import (
    SHARD_SIZE,
    ask_checkpoint_module,
    card_file,
    child_request,
    run_trainer_module,
)
from tr11ops.rundir.checkpoint_digests import DigestRecord, note_numbers, put_on_record
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.journal import user_name
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.documents import document

NOT_LOOKED_AT = "bytes were compared, numbers were not looked at: --values finds NaN and infinity"
SCHEMA = 1
DAY = 86400.0


# ----------------------------------------------------------------------------- values
def look_at_values(places: Sequence[Path]) -> Mapping[Path, ValuesFound]:
    """Every number of these checkpoints, with a bar on a terminal. Raises Refusal where the child
    gives no answer.
    """
    if not places:
        return {}
    answer = ask_checkpoint_module("values", places=places)
    if answer is None or "checkpoints" not in answer:
        raise Refusal("the numbers could not be looked at (see above)")
    found = {}
    for one in answer["checkpoints"]:
        bad = tuple((str(part), str(name)) for part, name in one["not_finite"])
        found[Path(one["place"])] = ValuesFound(int(one["tensors"]), bad, str(one["fault"]))
    return found


def put_numbers_on_record(
    directory: RunDirectory,
    step: int,
    identity: str,
    found: ValuesFound,
    why: str,
    kind: str = "full",
) -> None:
    """Keep what was found in a checkpoint, or in a copy of this `kind`, so that no restart and no
    copy counts on it; a record that cannot be written is said.
    """
    if found.fault or not identity:
        return  # then nothing is known of them
    from tr11ops.backup.archive_round import summarise  # help needs no archives

    try:
        note_numbers(directory, step, identity, kind=kind, not_finite=found.names, why=why)
        summarise(directory)
    except (OSError, ValueError) as error:
        say(f"tr11: step {step}: the result cannot be recorded: {cause(error)}")


# ----------------------------------------------------------------------------- verify
def verify(
    context: Annotated[RunContext, JSON],
    steps: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[STEP...]",
            help="Numbers of steps, or `latest`.",
            autocompletion=completion.steps,
        ),
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Every checkpoint.")] = False,
    stale: Annotated[
        float | None,
        typer.Option(
            "--stale",
            min=0.0,
            metavar="DAYS",
            help="Those that no one has read for so long, or ever.",
        ),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option("--workers", "--parallel", min=1, max=256, metavar="N", help="Files at once."),
    ] = 8,
    values: Annotated[
        bool, typer.Option("--values", help="Then look at every number: is one NaN or infinite?")
    ] = False,
) -> Outcome:
    """Read every byte, compare with the manifest's digests, and put the result on record for
    everyone.

    Without STEP, the newest. Ctrl-C loses nothing that is finished: `--stale 1` then goes on with
    the rest. Whole bytes may be NaN: `--values` reads all once more and looks; such a checkpoint is
    skipped by restarts, and so are its copies. Exit code 1: a file differs, or a number is not
    finite; 3: one could not be read, or it changed meanwhile.

    Examples:
      tr11 checkpoints verify
      tr11 checkpoints verify --stale 7 --workers 16
      tr11 checkpoints verify latest --values
    """
    if bool(steps) + everything + (stale is not None) > 1:
        raise WrongUsage("verify what? Give steps, or --all, or --stale DAYS")
    if not everything and stale is None:
        steps = steps or ["latest"]
    if values:
        require(READING_CHECKPOINTS, "--values")
    card = context.card
    context.require_mounted()
    catalogue = open_catalogue(card)
    chosen = _chosen(catalogue, steps, stale)
    try:
        readings = read_them(directory_of(card), chosen, parallel, context.as_json)
    except KeyboardInterrupt:
        raise Refusal(
            "interrupted; what was read whole is on record, and `verify --stale 1` goes on"
        ) from None
    numbers = {}
    if values:
        numbers = _values(chosen, readings)
    identities = {entry.step: entry.identity for entry in chosen}
    for step, found in numbers.items():
        say(f"step {step}: {'' if found.is_sound else 'BAD '}{found}")
        put_numbers_on_record(
            directory_of(card), step, identities[step], found, why="found by verify --values"
        )
    shown = [
        {
            **document(reading),
            "bad": list(reading.bad),
            "values": numbers[reading.step].to_json() if reading.step in numbers else None,
        }
        for reading in readings
    ]
    code = _verdict(readings, named=bool(steps))
    if not all(found.is_sound for found in numbers.values()):
        code = 1
    line, remarks = "nothing to read", list[str]()
    if chosen:
        line = _summary(readings)
        if not values and any(reading.result == "fine" for reading in readings):
            remarks = [NOT_LOOKED_AT]
    elif stale is not None:
        line += f": all were read in the last {counted(stale, 'day')}"
    return Outcome(
        {"schema": SCHEMA, "checkpoints": shown},
        (line,),
        remarks=remarks,
        exit_code=code,
        indent=None,
    )


def _values(
    chosen: Sequence[SavedCheckpoint], readings: Sequence[VerifyResult]
) -> dict[int, ValuesFound]:
    """What the numbers are of those whose bytes could be read, by step; damaged files are named
    already.
    """
    readable = {
        reading.step for reading in readings if reading.result in {"fine", "nothing to compare"}
    }
    places = {Path(entry.path): entry.step for entry in chosen if entry.step in readable}
    return {places[place]: found for place, found in look_at_values(list(places)).items()}


def _chosen(
    catalogue: Catalogue, steps: Sequence[str] | None, stale: float | None
) -> list[SavedCheckpoint]:
    if steps:
        return [find_checkpoint(catalogue, text) for text in dict.fromkeys(steps)]
    if stale is None:
        return list(catalogue.checkpoints)
    now = time.time()
    return [
        entry
        for entry in catalogue.checkpoints
        if entry.manifest == "read" and _is_stale(entry, now, stale * DAY)
    ]


def _is_stale(entry: SavedCheckpoint, now: float, seconds: float) -> bool:
    if not isinstance(entry.digests, DigestRecord):
        return True
    # a record of the future was made by a wrong clock
    return not 0.0 <= now - entry.digests.time < seconds


def read_them(
    directory: RunDirectory, chosen: Sequence[SavedCheckpoint], parallel: int, quiet: bool
) -> list[VerifyResult]:
    """Read every byte of these, show how far it is, say and record what was found. Raises
    KeyboardInterrupt.
    """
    stop = threading.Event()
    readings: list[VerifyResult] = []
    total = sum(entry.bytes for entry in chosen)
    with ByteProgress("reading", total, is_quiet=quiet) as progress:
        for entry in chosen:
            progress.describe(f"step {entry.step}")
            before = progress.done
            reading = read_checkpoint(
                entry, parallel, progress=progress.advance, stop=stop, who=user_name()
            )
            # what was not read of it is not left either
            progress.advance(entry.bytes - (progress.done - before))
            readings.append(reading)
            if reading.record is not None:
                _put_on_record(directory, reading.record, progress)
            if not quiet:
                for line in _lines(reading, entry):
                    progress.say(line)
    return readings


def _put_on_record(directory: RunDirectory, record: DigestRecord, progress: ByteProgress) -> None:
    """Keep a result; a journal or a state folder that cannot be written is said, and the reading
    goes on.
    """
    try:
        put_on_record(directory, record)
    except OSError as error:
        progress.say(
            f"tr11: step {record.step}: the result cannot be recorded: {error.strerror or error}"
        )


def _lines(reading: VerifyResult, entry: SavedCheckpoint) -> list[str]:
    """What to say of one reading: one line for each bad file, else one."""
    head = f"step {reading.step}:"
    more = []
    if reading.bad and reading.why:
        more = [f"{head} {reading.why}"]
    if reading.bad:
        return [*(f"{head} BAD {line}" for line in reading.bad), *more]
    if reading.result == "fine":
        return [f"{head} fine, {counted(entry.files, 'file')}, {size(entry.bytes)}"]
    words = {"gone": "not judged", "changed": "not judged", "unread": "could not be read"}
    return [f"{head} {words.get(reading.result, reading.result)}: {reading.why}"]


def _summary(readings: Sequence[VerifyResult]) -> str:
    bad = [str(reading.step) for reading in readings if reading.result == "bad"]
    fine = sum(reading.result == "fine" for reading in readings)
    rest = len(readings) - fine - len(bad)
    parts = (
        f"{fine} fine",
        f"{len(bad)} damaged (step {', '.join(bad)})" if bad else "",
        f"{rest} not judged" * bool(rest),
    )
    return f"{len(readings)} read: " + ", ".join(filter(None, parts))


def _verdict(readings: Sequence[VerifyResult], named: bool) -> int:
    """The exit code. Of all checkpoints, those that cannot be judged at all are no fault; of named
    ones they are.
    """
    results = {reading.result for reading in readings}
    if "bad" in results:
        return 1
    missing = {"unread", "changed", *(("gone", "nothing to compare") if named else ())}
    if results & missing:
        return 3
    return 0


# ----------------------------------------------------------------------------- the commands
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
        metavar="STEP",
        help="A step's number, `latest`, or the path of its folder.",
        autocompletion=completion.steps,
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer", metavar="PATH", help="Folder with tokenizer.json; else the card's."
    ),
]


def _place(text: str, context: RunContext) -> str:
    """The absolute path for the child. A path needs no card."""
    named = existing_path(text)
    return str(named if named is not None else resolve_step(context.card, text))


def _run(ctx: typer.Context, **instead: object) -> Outcome:
    """The child's answer is the command's."""
    request = child_request(ctx, **instead)
    return Outcome(exit_code=run_trainer_module("trainer.checkpoint", request))


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
        typer.Option(
            "--tensors",
            metavar="PATTERN",
            help="Show numbers of tensors whose name fits, e.g. '*norm*'.",
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every file's digest: reads all bytes.")
    ] = False,
) -> Outcome:
    """What a checkpoint holds: facts, files, tensors with their least, greatest and mean value and
    norm.

    Exit code 1 when a file is missing, short or changed.

    Examples:
      tr11 checkpoints inspect latest --tensors '*norm*' --verify
    """
    return _run(ctx, place=_place(step, context))


@app.command()
def diff(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    a: Annotated[
        str, typer.Argument(metavar="A", help="A step, `latest`, a checkpoint's folder, or dumps.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    *,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            min=0.0,
            metavar="X",
            help="Allowed |a - b|, relative to the tensor's greatest.",
        ),
    ] = 0.0,
) -> Outcome:
    """Compare two states number by number, name where they first differ, and say which kind of
    fault that is.

    A and B may be checkpoints of any layout and shape, or folders of debug dumps, whole or
    fingerprints. Dumps of one folder: FOLDER:ITERATION:MOMENT, such as a:805:after-iteration. Exit
    code 0: equal, 1: different.

    Examples:
      tr11 checkpoints diff 800 latest
      tr11 checkpoints diff dumps-a dumps-b
    """
    return _run(ctx, a=_state(a, context), b=_state(b, context))


def _state(text: str, context: RunContext) -> str:
    """A checkpoint's folder, or dumps: a folder, perhaps with :ITERATION:MOMENT behind it."""
    folder, colon, rest = text.partition(":")
    if colon:
        return f"{Path(folder).expanduser().resolve()}:{rest}"
    return _place(text, context)


# ----------------------------------------------------------------------------- turn one into
# another
@app.command()
def export(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    step: Step,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    to: Annotated[
        Literal["hf"],
        typer.Option(
            "--format",
            "--to",
            metavar="hf",
            help="hf: the Hugging Face architecture that the model is.",
        ),
    ] = "hf",
    dtype: Annotated[
        Literal["bf16", "fp32", "fp16"] | None,
        typer.Option("--dtype", metavar="bf16|fp32|fp16", help="Else as the checkpoint's weights."),
    ] = None,
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max-shard-size", metavar="SIZE", help="Of the tensors in one file: 5GB, 500MB."
        ),
    ] = SHARD_SIZE,
    tokenizer: TokenizerOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an earlier export in DIR.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Compare the digests of the weights first; reads them twice.")
    ] = True,
) -> Outcome:
    """Write a checkpoint's weights as a Hugging Face model: config, weights, tokenizer.

    A BLOOM, Llama or Qwen3, a Megatron-BERT, or a Blenderbot (T5), as the model is.

    The folder appears whole or not at all. Memory does not grow with the model. STEP as a path
    needs no card; the card then says what the checkpoint does not: tokenizer, epsilon of the
    LayerNorms.

    Examples:
      tr11 checkpoints export latest -o bloom-tiny
      tr11 checkpoints export 95000 -o bloom --dtype bf16 --max-shard-size 10GB --run tr11-176B-ml
    """
    named = existing_path(step)
    card = None
    if named is None or context.run is not None:
        card = context.card
    if named is not None or card is None:
        place = named
    else:
        place = resolve_step(card, step)
    if card is None:
        return _run(ctx, place=place, card=None)
    with card_file(card) as name:
        return _run(ctx, place=place, card=name)


@app.command("import")
def import_(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    folder: Annotated[
        Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and the weights.")
    ],
) -> Outcome:
    """Make the first checkpoint of a run from a Hugging Face model, so that a training starts.

    A BLOOM, Llama, Qwen3 or Megatron-BERT.

    Weights in the card's precision, fp32 masters equal to the model's own numbers, empty moments,
    step 0. The card's model must be that of HF_DIR, and the run must hold no checkpoint yet. Reads
    .safetensors and pytorch_model*.bin. Where the card pads the vocabulary otherwise
    (tokenizer.vocabulary_size is then needed), padding rows are of zeros; an export leaves such
    rows out again.

    Examples:
      tr11 checkpoints import bloom-560m --run my-card.toml
    """
    with card_file(context.card) as name:
        return _run(ctx, folder=folder.expanduser().absolute(), card=name)


@app.command()
def reshape(
    ctx: typer.Context,
    context: Annotated[RunContext, JSON],
    step: Step,
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Folder for global_stepN and latest."),
    ],
    layout: Annotated[
        Literal["tr11", "deepspeed"],
        typer.Option("--format", metavar="tr11|deepspeed", help="Layout to write."),
    ] = "tr11",
    tensor: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel degree; else the checkpoint's.")
    ] = None,
    pipeline: Annotated[
        int | None, typer.Option(min=1, help="Stages; else the checkpoint's.")
    ] = None,
    data: Annotated[
        int | None, typer.Option(min=1, help="Data-parallel degree; else the checkpoint's.")
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="Have DIR/latest name it, also where it names another.")
    ] = False,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave the optimizer's state out.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Compare all digests first; reads everything twice.")
    ] = True,
) -> Outcome:
    """Write a checkpoint in the other layout; in DeepSpeed's, for the topology that its engine will
    have.

    A restart of tr11 on another shape needs no reshape: it is just a load, from either layout. One
    file of the new checkpoint is in memory at a time. DIR/global_stepN must not exist, DIR/latest
    is left as it is without --latest, and DIR must not hold another model's checkpoints.

    Examples:
      tr11 checkpoints reshape 95000 -o reshaped --format deepspeed --tensor 4 --pipeline 12 --data 4
    """
    return _run(ctx, place=_place(step, context))
