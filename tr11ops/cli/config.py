"""`tr11 config`: what a run card says; `tr11 estimate`: every number that follows from it."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table

from tr11ops.base.errors import WrongUsage
from tr11ops.base.units import counted, duration, plain, size
from tr11ops.cli import completion
from tr11ops.cli.common import draws_unicode, say
from tr11ops.cli.runner import JSON, NO_RUN, Outcome, RunContext
from tr11ops.cluster.local_rules import this_machine
from tr11ops.cluster.select import has_slurm
from tr11ops.goodput.history import read_metrics
from tr11ops.runcard.card import SECRET_FILE_KEYS, RunCard, own_card, resolved, tables_in
from tr11ops.runcard.docs import CardKey, CardSection, card_sections
from tr11ops.runcard.estimate import Duration, Estimate, estimate as derive
from tr11ops.runcard.kinds import card_kind
from tr11ops.runcard.load import apply_overrides, environment_secrets, secret_values
from tr11ops.runcard.sections import parse_attempts
from tr11ops.runcard.speed import with_gpus_of
from tr11ops.runcard.toml_writer import write_card
from trainer.config.card import CardError

# ----------------------------------------------------------------------------- estimate
SCREEN_WIDTH = 80
Row = tuple[str, str, str]  # what, value, remark


def estimate(
    context: Annotated[RunContext, JSON],  # options of a command line: typer calls it by name
    seconds_per_iteration: Annotated[
        float | None,
        typer.Option(
            "--seconds-per-iteration", metavar="S", help="A step of the full batch takes S seconds."
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            "--tflops", metavar="T", help="Each GPU does T TFLOPs (recomputation counted)."
        ),
    ] = None,
    array: Annotated[
        str, typer.Option("--array", metavar="1-10", help="How far these array tasks go.")
    ] = "1-10",
    all_levels: Annotated[
        bool, typer.Option("--levels", help="Show every level of the batch ramp.")
    ] = False,
) -> Outcome:
    """Every number that follows from a run card, and from the steps that the run has measured so
    far; nothing is run.

    Variables that are not defined here are left as they are. Before its first steps, a run's GPUs
    are taken to reach what the 176B training reached on A100, and other kinds (slurm.gpu_kind) the
    same share of their peak. Where there is no Slurm, GPUs that the card does not name are this
    machine's. Times on GPUs of an unknown kind, and of models of less than 1,024 features, are
    unknown.

    Examples:
      tr11 estimate --run tr11-176B-ml
      tr11 estimate --run tr11-176B-ml --seconds-per-iteration 105 --array 1-20
      tr11 estimate --set parallel.pipeline=24 --set slurm.nodes=96 --json
    """
    for option, value in (("--seconds-per-iteration", seconds_per_iteration), ("--tflops", tflops)):
        if value is not None and not (math.isfinite(value) and 1e-9 <= value <= 1e9):
            raise WrongUsage(f"{option} {value:g}: must be a number above zero, such as 105")
    if seconds_per_iteration is not None and tflops is not None:
        raise WrongUsage(
            "--seconds-per-iteration and --tflops say the same thing: give one of them"
        )
    tasks = len(parse_attempts(array))
    card = own_card(context.card_with_undefined(), "an estimate")
    if card.slurm.gpus_per_node and not has_slurm():
        card = with_gpus_of(card, [this_machine()])
    found = derive(
        card, seconds_per_iteration, assumed_tflops=tflops, asked_attempts=tasks, steps=_steps(card)
    )
    return Outcome(found.to_json(), screen=partial(_show, found, all_levels))


def _show(found: Estimate, all_levels: bool) -> None:
    from rich.console import Console

    console = Console(width=SCREEN_WIDTH, highlight=False)
    for table in tables(found, all_levels):
        console.print(table)
    for warning in found.warnings:
        say(
            textwrap.fill(
                f"warning: {warning}", SCREEN_WIDTH, break_long_words=False, break_on_hyphens=False
            )
        )


def _steps(card: RunCard) -> list[tuple[int, float]]:
    """Steps of the run as (iteration, seconds); none where it has not begun, or its log cannot be
    read.
    """
    try:
        steps = read_metrics(card.paths.metrics)
    except OSError as error:
        say(f"tr11: the run's steps cannot be read ({error.strerror or error}): times are assumed")
        return []
    return [(step.iteration, step.seconds) for step in steps if step.seconds is not None]


def tables(found: Estimate, all_levels: bool = False) -> list[Table]:
    """The screen: one table a subject."""
    result = [
        _table(f"{found.run} ({found.variant})", _size_rows(found)),
        _table("Steps", _step_rows(found)),
        _rates(found),
        _ramp(found, all_levels),
        _table("Checkpoints and state", _byte_rows(found)),
        _memory(found),
        _table("Time", _time_rows(found.duration, found.time_unknown)),
    ]
    return [table for table in result if table is not None]


def _table(title: str, rows: Iterable[Row], names: int = 25) -> Table:

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        width=SCREEN_WIDTH,
    )
    table.add_column(width=names, no_wrap=True)
    table.add_column(width=17, justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _size_rows(found: Estimate) -> list[Row]:
    count = found.parameters
    decoder = ""
    if count.decoder_block:
        decoder = f", {count.decoder_block:,} one of the decoder"
    degrees = f"tensor {found.tensor_parallel} x pipeline {found.pipeline_parallel} x data {found.data_parallel}"
    rows = [
        ("parameters", f"{count.total:,}", f"{count.block:,} a block{decoder}"),
        ("  without embeddings", f"{count.without_embeddings:,}", ""),
        ("workers", f"{found.world_size:,}", degrees),
    ]
    if found.stages is not None:
        heaviest = max(found.stages, key=lambda stage: stage.parameters_per_worker)
        blocks = sorted({stage.blocks for stage in found.stages})
        if len(blocks) > 1:
            shown = f"{blocks[0]} to {blocks[-1]}"
        else:
            shown = str(blocks[0])
        rows.append(
            ("blocks a stage", shown, f"up to {heaviest.parameters_per_worker:,} on a worker")
        )
    if found.busiest_stage_excess is not None and found.pipeline_parallel > 1:
        rows.append(
            (
                "busiest stage",
                f"+{found.busiest_stage_excess:.1%}",
                "operations over the mean stage's",
            )
        )
    kernel = found.attention
    name: str
    if kernel.refusal:
        name = "refused"
    else:
        name = kernel.name
    remark = kernel.refusal or kernel.why or kernel.what
    if found.gpu_is_unknown:
        name, remark = "unknown", f"set slurm.gpu_kind; on an A100: {name}"
    rows.append(("attention kernel", name, remark))
    return rows


def _step_rows(found: Estimate) -> list[Row]:
    first, full = found.first_step, found.full_step
    return [
        ("iterations", f"{found.iterations:,}", f"{found.ramp_iterations:,} of them in the ramp"),
        ("samples", f"{found.trained_samples:,}", f"of {found.train_samples:,} asked for"),
        ("tokens", f"{found.tokens:,}", ""),
        *_first_loss(found),
        (
            "global batch",
            f"{first.global_batch_size:,} to {full.global_batch_size:,}",
            f"{len(found.levels)} levels",
        ),
        (
            "accumulation steps",
            f"{first.gradient_accumulation_steps:,} to {full.gradient_accumulation_steps:,}",
            "",
        ),
        ("pipeline bubble", f"{first.bubble_share:.1%} to {full.bubble_share:.1%}", "of a step"),
        (
            "model FLOPs a step",
            f"{found.model_flops_per_iteration:.4e}",
            f"{found.total_model_flops:.4e} in all",
        ),
        (
            "hardware FLOPs a step",
            f"{found.hardware_flops_per_iteration:.4e}",
            "recomputation counted",
        ),
    ]


def _first_loss(found: Estimate) -> Iterable[Row]:
    if found.first_loss is not None:
        yield "first loss, about", f"{found.first_loss.expected:.1f}", str(found.first_loss)


def _rates(found: Estimate) -> Table:

    table = Table(
        title="Learning rate",
        title_justify="left",
        title_style="bold",
        box=None,
        width=SCREEN_WIDTH,
    )
    table.add_column("after", width=26)
    for name in ("iteration", "samples", "rate"):
        table.add_column(name, justify="right")
    for point in found.rates:
        rate = f"{point.learning_rate:.3E}"
        table.add_row(point.moment, f"{point.iteration:,}", f"{point.consumed_samples:,}", rate)
    return table


def _ramp(found: Estimate, all_levels: bool) -> Table | None:
    """Levels of the batch ramp with bubble and times: the first, the middle and the last, or all."""
    levels = found.levels
    if len(levels) == 1:
        return None
    if found.duration:
        times = {level.batch_size: level for level in found.duration.levels}
    else:
        times = {}
    bubbles = {step.global_batch_size: step.bubble_share for step in found.level_steps}
    middle = len(levels) // 2
    few = all_levels or len(levels) <= 9
    if few:
        shown = levels
    else:
        shown = (*levels[:3], *levels[middle - 1 : middle + 2], *levels[-3:])
    table = Table(
        title="Batch ramp", title_justify="left", title_style="bold", box=None, width=SCREEN_WIDTH
    )
    timed = ("s each", "hours", "") if times else ()
    names = ("batch", "from step", "iterations", "samples before", "bubble", *timed)
    for name in names:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    previous = shown[0]
    for level in shown:
        if level.first_iteration > previous.first_iteration + previous.iterations:
            table.add_row(*("..." if name else "" for name in names))
        row = [f"{level.batch_size:,}", f"{level.first_iteration:,}", f"{level.iterations:,}"]
        row += [f"{level.consumed_samples:,}", f"{bubbles[level.batch_size]:.1%}"]
        if level.batch_size in times:
            time = times[level.batch_size]
            row += [
                f"{time.seconds_per_iteration:,.1f}",
                f"{time.hours:,.2f}",
                "measured" if time.measured else "",
            ]
        table.add_row(*row)
        previous = level
    return table


def _byte_rows(found: Estimate) -> list[Row]:
    count = "saved by the clock"
    if found.checkpoints is not None:
        count = f"{found.checkpoints:,} at this interval"
    rows = [
        ("checkpoint", size(found.checkpoint_bytes), count),
        ("weights alone", size(found.weight_bytes), ""),
        _file_row(found),
        ("training state, unsharded", size(found.training_bytes), "weights, gradients, optimizer"),
    ]
    if found.save_copy_bytes is not None:
        rows.append(
            ("  copied by a save", size(found.save_copy_bytes), "of each node's host memory")
        )
    if found.worker_state_bytes is not None:
        rows.append(
            (
                "  on a worker, at most",
                size(found.worker_state_bytes),
                "ZeRO stage 1; no activations",
            )
        )
    return rows


def _file_row(found: Estimate) -> Row:
    """How many files a save writes, in the layout that the card asks for."""
    if found.checkpoint_format == "deepspeed":
        files = found.checkpoint_files
        parts = f"{files.layer} layer, {files.model} rank, {files.optimizer} optim"
        return ("files, DeepSpeed layout", f"{files.total:,}", parts)
    return ("files, at most", f"{found.checkpoint_files_at_most:,}", "any topology reads them")


def _memory(found: Estimate) -> Table | None:
    """The peak of the worker that needs most, largest part first."""
    memory = found.worker_memory
    if memory is None:
        return None
    held = sorted(memory.parts, key=lambda part: -part.bytes)
    rows = [(part.name, size(part.bytes), f"{part.bytes / memory.total:.1%}") for part in held]
    limit = "of unknown" if found.gpus_per_node else ""
    if found.gpu_memory_gb is not None:
        limit = f"of {found.gpu_memory_gb:g} GiB"
    layers = sum(stage.blocks for stage in found.stages or ())
    total = ("at the peak", size(memory.total), limit)
    least = found.least_recomputed_blocks
    fits = ""
    if found.gpu_memory_gb is not None:
        fits = f"{'none' if least is None else least} would fit"
    recomputed = ("blocks recomputed", f"{found.recomputed_blocks} of {layers}", fits)
    title = f"Memory of a worker of stage {memory.stage}, micro batch {memory.micro_batch}"
    return _table(title, [total, *rows, recomputed], 42)


def _time_rows(found: Duration | None, why_unknown: str) -> list[Row]:
    if found is None:
        return [("unknown", "", f"{why_unknown}; give --seconds-per-iteration or --tflops")]
    return [
        ("rests on", "", found.basis),
        (
            "seconds per iteration",
            f"{found.seconds_per_iteration:,.4g}",
            f"{found.tflops_per_gpu:.4g} TFLOPs per worker",
        ),
        ("training", duration(found.days * 86400), "without waits, faults, saves"),
        ("  in the batch ramp", duration(found.ramp_hours * 3600), ""),
        (
            "  by the rule of thumb",
            duration(found.rule_of_thumb_days * 86400),
            "see docs/how-to/estimate.md",
        ),
        ("node-hours", f"{found.node_hours:,.1f}", ""),
        (
            "array tasks needed",
            f"{found.attempts:,}",
            f"{duration(found.attempt_hours * 3600)} each: {found.array}",
        ),
        (
            counted(found.asked_attempts, "task trains for", "tasks train for"),
            duration(found.asked_days * 86400),
            f"{found.asked_share:.1%} of the training",
        ),
    ]


SCHEMA = 1
WIDTH = 78
MOST_NEAR = 3

app = typer.Typer(
    name="config",
    help="""What a run card says, and what follows from it.

    Examples:
      tr11 config show
      tr11 config show --resolved --run tr11-176B-ml
      tr11 config explain watch.act
    """,
    no_args_is_help=True,
)


@app.command()
def show(
    context: Annotated[RunContext, JSON],
    is_resolved: Annotated[
        bool,
        typer.Option(
            "--resolved", help="With every default, variables put in, paths made absolute."
        ),
    ] = False,
) -> Outcome:
    """Print the run card as TOML, with what --set changes; then what `tr11 launch` would refuse in it.

    With --resolved, a variable that is not defined here stays as written. What a key means: `tr11
    config explain`.

    Examples:
      tr11 config show --run demo
      tr11 config show --resolved --set slurm.nodes=24
      tr11 config show --resolved --json | jq .card.parallel
    """
    path = context.card_path
    refusals: Sequence[str] = ()
    if is_resolved:
        tables: dict[str, Any] = resolved(context.card_with_undefined())
        derived = tables.pop("derived")
    else:
        tables = tables_in(path)
        tables, problems = apply_overrides(tables, context.overrides, card_kind(tables))
        problems += secret_values(tables, SECRET_FILE_KEYS)
        problems += environment_secrets(tables)
        if problems:
            raise CardError(str(path), problems)
        try:
            context.card_with_undefined()
        except CardError as error:
            refusals = [f"`tr11 launch` refuses it: {line}" for line in str(error).splitlines()]
        derived = None
    document = {
        "schema": SCHEMA,
        "path": str(path),
        "resolved": is_resolved,
        "card": tables,
        "derived": derived,
    }
    return Outcome(
        document, [write_card(_without_none(tables), {}, [str(path)]).rstrip("\n")], refusals
    )


def _without_none(tables: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: a key that is not set is left out."""
    return {name: _written(value) for name, value in tables.items() if value is not None}


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        return _without_none(value)
    if isinstance(value, list):
        return [_written(item) for item in value]
    return value


# ----------------------------------------------------------------------------- what a key means
@app.command()
def explain(
    context: Annotated[RunContext, NO_RUN, JSON],
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]",
            help="SECTION.KEY, a section, or a key alone; left out: list the sections.",
            autocompletion=completion.card_keys,
        ),
    ] = None,
) -> Outcome:
    """Say what a key of the run card means: its value, its default, what it does. No card is read.

    Examples:
      tr11 config explain
      tr11 config explain watch.act
      tr11 config explain alerts
      tr11 config explain spare_nodes
    """
    sections = list(card_sections())
    shown, keys = sections, list[CardKey]()
    if key is not None:
        shown, keys = _meant(key.strip("[]"), sections)
    document = {
        "schema": SCHEMA,
        "sections": [_section_object(section) for section in shown],
        "keys": [_key_object(one) for one in keys],
    }
    return Outcome(document, _shown(_lines(shown, keys)))


def _meant(word: str, sections: Sequence[CardSection]) -> tuple[list[CardSection], list[CardKey]]:
    """The section of that name with its keys, or the keys of that name. Raises Refusal where there
    is neither.
    """
    section = next((one for one in sections if one.name == word), None)
    if section is not None:
        return [section], list(section.keys)
    every = [key for one in sections for key in one.keys]
    keys = [key for key in every if word in (key.dotted, key.name)]
    if keys:
        return [], keys
    near = _near(word, sections, every)
    hint = "`tr11 config explain` lists the sections"
    if near:
        hint = f"did you mean {', '.join(near)}?"
    raise WrongUsage(f"KEY {word!r}: the run card has no such key or section; {hint}")


def _near(word: str, sections: Sequence[CardSection], keys: Sequence[CardKey]) -> list[str]:
    """What is spelt like it, with its section; a key alone is compared with keys alone."""
    names = {key.dotted: [key.dotted] for key in keys} | {
        section.name: [section.name] for section in sections
    }
    if "." not in word:
        for key in keys:
            names.setdefault(key.name, []).append(key.dotted)
    found = [
        place for name in difflib.get_close_matches(word, names, MOST_NEAR) for place in names[name]
    ]
    return list(dict.fromkeys(found))[:MOST_NEAR]


def _lines(sections: Sequence[CardSection], keys: Sequence[CardKey]) -> Iterator[str]:
    for section in sections:
        yield from _section_lines(section)
    for number, key in enumerate(keys):
        if number or sections:
            yield ""
        yield from textwrap.wrap(f"{key.dotted} = {_value(key)}", WIDTH, subsequent_indent="  ")
        yield from textwrap.wrap(key.meaning, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _shown(lines: Iterable[str]) -> Iterator[str]:
    """As this terminal can draw them."""
    unicode = draws_unicode()
    return (plain(line, unicode) for line in lines)


def _value(key: CardKey) -> str:
    """What a key's value may be, and what it is where the card does not say."""
    if key.is_path:
        what = f"{key.kind}, a path"
    else:
        what = key.kind
    if key.is_required:
        return f"{what}; required"
    if key.default_text:
        return f"{what}; default {key.default_text}"
    return f"{what}; not set by default"


def _section_lines(section: CardSection) -> Iterator[str]:
    if section.is_list:
        name = f"[[{section.name}]]"
    else:
        name = f"[{section.name}]"
    yield from textwrap.wrap(f"{name}  {section.text}", WIDTH, subsequent_indent="  ")


def _section_object(section: CardSection) -> dict[str, Any]:
    return {"name": section.name, "is_list": section.is_list, "text": section.text}


def _key_object(key: CardKey) -> dict[str, Any]:
    return {
        "key": key.dotted,
        "value": key.kind,
        "default": None if key.is_required else key.default,
        "required": key.is_required,
        "is_path": key.is_path,
        "meaning": key.meaning,
    }
