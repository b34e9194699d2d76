"""One import from beginning to end: file, shell, options, defects, card, check. Nothing of the
script is ever run.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tr11ops.base.errors import ScriptError
from tr11ops.base.units import duration
from tr11ops.importer.complete import complete, correct, data_parallel
from tr11ops.importer.defects import JOB_DEFECTS, NUMBER_DEFECTS, Case
from tr11ops.importer.defects_table import defect
from tr11ops.importer.launch import DeepSpeedFile, find_deepspeed, find_launch, refuse_settings
from tr11ops.importer.options import Builder
from tr11ops.importer.place_shell import place_conditions, place_shell
from tr11ops.importer.place_training import place_training
from tr11ops.importer.reader import read_shell
from tr11ops.importer.results import CardProblem, Defect, DefectSeverity, Imported, LeftReason
from tr11ops.importer.sbatch import job_variables, place_slurm, read_directives
from tr11ops.importer.traced import LARGEST_SCRIPT_BYTES, Traced
from tr11ops.runcard.card import RunCard, load_card
from tr11ops.runcard.load import apply_overrides, dotted, overridden_keys
from tr11ops.runcard.toml_writer import write_card
from trainer.config.card import CardError, Problem
from trainer.config.model import WHAT_IT_COST, too_large
from trainer.schedule import flops

# Defects of shape: divisibility, left-over widths, initial weights too large, fused kernels.


def width_left_over(case: Case) -> Iterator[Defect]:
    """`--ffn-hidden-size` that is not four times the hidden size, as after a change of the one
    alone.
    """
    hidden, ffn = case.card.integer("model.hidden_size"), case.card.integer("model.ffn_hidden_size")
    # its width is another share, and seldom a round one
    is_gated = case.card.value("model.activation") == "swiglu"
    if not hidden or not ffn or ffn == 4 * hidden or is_gated:
        return
    layers = case.card.integer("model.layers")
    meant, real = (_blocks(layers, hidden, width) / 1e9 for width in (4 * hidden, ffn))
    line = case.line("--ffn-hidden-size")
    yield defect(
        "ffn-left-over",
        line,
        ffn=ffn,
        hidden=hidden,
        meant=4 * hidden,
        real_billion=real,
        meant_billion=meant,
    )


def _blocks(layers: int, hidden: int, ffn: int) -> int:
    """Parameters of all blocks: attention 4h^2 + 4h, feed-forward 2hf + f + h, two LayerNorms 4h."""
    return layers * (
        4 * hidden * hidden + 4 * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden
    )


def shapes(case: Case) -> Iterator[Defect]:
    """Heads, tensor ranks, stages and workers that do not divide."""
    hidden, heads = (
        case.card.integer("model.hidden_size"),
        case.card.integer("model.attention_heads"),
    )
    tensor, stages = (
        case.card.integer("parallel.tensor", 1),
        case.card.integer("parallel.pipeline", 1),
    )
    if hidden and heads and hidden % heads and "model.kv_channels" not in case.card.placed:
        yield defect("hidden-by-heads", case.line("--hidden-size"), hidden=hidden, heads=heads)
    if heads and tensor > 0 and heads % tensor:
        yield defect(
            "heads-by-tensor", case.line("--tensor-model-parallel-size"), heads=heads, tensor=tensor
        )
    layers = case.card.integer("model.layers")
    partition = str(case.card.value("parallel.partition", ""))
    if "embedding" in partition:
        units, shown = (layers + 2, "layers + 2")
    else:
        units, shown = (layers, "layers")
    if layers and stages > 1 and partition.startswith("type:") and units % stages:
        yield defect(
            "layers-by-stages", case.line("--num-layers"), shown=shown, units=units, stages=stages
        )
    workers = case.card.integer("slurm.workers_per_node") or case.card.integer(
        "slurm.gpus_per_node"
    )
    world, shape = workers * case.card.integer("slurm.nodes"), tensor * stages
    if world and shape > 0 and world % shape:
        line = case.line("--pipeline-model-parallel-size")
        yield defect(
            "workers-by-shape", line, world=world, tensor=tensor, stages=stages, shape=shape
        )


def batches(case: Case) -> Iterator[Defect]:
    """The batch, its ramp, and micro batch x data-parallel degree."""
    degree, micro = data_parallel(case.card), case.card.integer("batch.micro_batch_size")
    full, ramp = case.card.integer("batch.global_batch_size"), case.card.value("batch.ramp")
    chunk = degree * micro
    common = {"micro": micro, "degree": degree, "chunk": chunk}
    if chunk and full % chunk:
        yield defect(
            "batch-by-replicas",
            case.line("--global-batch-size"),
            full=full,
            near=_near(full, chunk),
            **common,
        )
    if not isinstance(ramp, dict):
        return
    line = case.line("--rampup-batch-size")
    start, increment = ramp["start"], ramp["increment"]
    if start == full:
        yield defect("ramp-without-levels", line, full=full)
        return
    if increment > 0 and (full - start) % increment:
        yield defect(
            "ramp-increment", line, increment=increment, full=full, start=start, way=full - start
        )
    for name, value in (("start", start), ("increment", increment)):
        if chunk and value % chunk:
            yield defect(
                f"ramp-{name}-by-replicas", line, value=value, near=_near(value, chunk), **common
            )


def _near(value: int, chunk: int) -> str:
    below, above = value // chunk * chunk, -(-value // chunk) * chunk
    if below:
        return f"{below} or {above} would do, or another micro batch or number of nodes"
    return f"{above} would do, or fewer nodes"


def initial_weights(case: Case) -> Iterator[Defect]:
    """A standard deviation far above what the width bears."""
    hidden = case.card.integer("model.hidden_size")
    std = case.card.number("model.init_std", 0.02) or 0.0
    drawn = case.card.value("model.init_method", "normal") == "normal"
    advice = None
    if hidden > 0 and drawn:
        advice = too_large(std, hidden)
    if advice is not None:
        line, given = (
            case.line("--init-method-std"),
            "" if case.has("--init-method-std") else " (the default)",
        )
        yield defect(
            "init-std-too-large",
            line,
            std=std,
            given=given,
            hidden=hidden,
            cost=WHAT_IT_COST,
            advice=advice,
        )


def fused_softmax(case: Case) -> Iterator[Defect]:
    """The original's fused softmax had conditions on the shape."""
    heads, tensor = (
        case.card.integer("model.attention_heads"),
        case.card.integer("parallel.tensor", 1),
    )
    micro, length = (
        case.card.integer("batch.micro_batch_size"),
        case.card.integer("model.sequence_length"),
    )
    if heads <= 0 or tensor <= 0 or heads % tensor or micro <= 0 or not length:
        return
    if (heads // tensor * micro) % 4 or length % 4 or not 16 < length <= 2048:
        line = case.line("--num-attention-heads")
        yield defect("fused-softmax", line, heads=heads, tensor=tensor, micro=micro, length=length)


MODEL_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    width_left_over,
    shapes,
    batches,
    initial_weights,
    fused_softmax,
)


# What the DeepSpeed file says that no option does: fp16 scale, clipping, curriculum; and what it
# says otherwise.

_SCALE_KEYS = {
    "fp16.initial_scale_power": "precision.initial_scale_power",
    "fp16.loss_scale_window": "precision.loss_scale_window",
    "fp16.hysteresis": "precision.hysteresis",
    "fp16.min_loss_scale": "precision.min_loss_scale",
}
# Read elsewhere, compared with the options, or without meaning for a card.
_READ = frozenset(
    {
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "gradient_clipping",
        "zero_optimization.stage",
        "bf16.enabled",
        "bfloat16.enabled",
        "fp16.enabled",
        "fp16.loss_scale",
    }
)
_DROPPED = {
    "steps_per_print": "the log has one line a step",
    "wall_clock_breakdown": "times of the parts: logging.tensorboard_timers",
    "zero_allow_untested_optimizer": "the optimizers are tr11's own",
    "gradient_accumulation_steps": "follows from the global batch",
    "prescale_gradients": "not needed",
    "dump_state": "the resolved card is kept in the run directory",
    "communication_data_type": "gradients are reduced in fp32",
    "data_types.grad_accum_dtype": "gradients are accumulated in fp32",
}
_CURRICULUM = "curriculum_learning."
_KINDS = {"fixed_linear": "linear", "fixed_root": "root", "fixed_discrete": "discrete"}


def place_deepspeed(builder: Builder, file: DeepSpeedFile) -> None:
    """Place what the file adds; tell what becomes of the rest."""
    for key, target in _SCALE_KEYS.items():
        _whole(builder, file, key, target)
    scale = file.value("fp16.loss_scale", 0)
    if isinstance(scale, int | float) and scale and file.value("fp16.enabled") is True:
        _put(
            builder, file, key="fp16.loss_scale", target="precision.loss_scale", value=float(scale)
        )
    clip = file.value("gradient_clipping")
    if (
        isinstance(clip, int | float)
        and not isinstance(clip, bool)
        and "optimizer.clip_grad" not in builder.placed
    ):
        _put(
            builder, file, key="gradient_clipping", target="optimizer.clip_grad", value=float(clip)
        )
    _dtype(builder, file)
    _curriculum(builder, file)
    for key, setting in file.settings.items():
        if key in _READ or key in _SCALE_KEYS or key.startswith(_CURRICULUM):
            continue
        if key in _DROPPED:
            builder.leave(
                _shown(key), setting.value, setting.line, LeftReason.DROPPED, _DROPPED[key]
            )
        elif key.startswith(
            ("zero_optimization.", "fp16.", "bf16.", "activation_checkpointing.", "flops_profiler.")
        ):
            builder.leave(
                _shown(key),
                setting.value,
                setting.line,
                LeftReason.DROPPED,
                "the trainer chooses it",
            )
        else:
            why = "tr11 writes its own DeepSpeed settings and has no key for it"
            builder.leave(_shown(key), setting.value, setting.line, LeftReason.DECISION, why)


def _shown(key: str) -> str:
    return f"DeepSpeed {key}"


def _put(builder: Builder, file: DeepSpeedFile, key: str, target: str, value: Any) -> None:
    """Place a value of the file."""
    builder.put(target, value, _shown(key), file.line_of(key))


def _whole(builder: Builder, file: DeepSpeedFile, key: str, target: str) -> None:
    value = file.value(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and file.value("fp16.enabled") is True
    ):
        _put(builder, file, key=key, target=target, value=value)


def _dtype(builder: Builder, file: DeepSpeedFile) -> None:
    """The dtype, where only the file says it."""
    if "precision.dtype" in builder.placed:
        return
    for block, dtype in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if file.value(f"{block}.enabled") is True:
            _put(builder, file, key=f"{block}.enabled", target="precision.dtype", value=dtype)


def _curriculum(builder: Builder, file: DeepSpeedFile) -> None:
    if file.value(_CURRICULUM + "enabled") is not True:
        return
    line = file.line_of(_CURRICULUM + "enabled")
    kind = _KINDS.get(str(file.value(_CURRICULUM + "schedule_type")))
    by_length = file.value(_CURRICULUM + "curriculum_type", "seqlen") == "seqlen"
    if kind is None or not by_length:
        why = (
            "tr11's curriculum is by sequence length: fixed_linear, fixed_root or fixed_discrete; "
            "fill in [curriculum]"
        )
        builder.leave(
            _shown("curriculum_learning"), "", line, LeftReason.DECISION, why, "curriculum.kind"
        )
        return
    for key, value, source in _curriculum_values(file, kind):
        _put(builder, file, key=source, target=f"curriculum.{key}", value=value)
    longest = file.value(_CURRICULUM + "max_difficulty")
    length = builder.value("model.sequence_length")
    if longest is not None and length is not None and longest != length:
        why = f"the curriculum ends at model.sequence_length ({length}) here"
        key = _CURRICULUM + "max_difficulty"
        builder.leave(_shown(key), longest, file.line_of(key), LeftReason.DECISION, why)


def _curriculum_values(file: DeepSpeedFile, kind: str) -> Iterator[tuple[str, Any, str]]:
    schedule = _CURRICULUM + "schedule_config."
    yield "kind", kind, _CURRICULUM + "schedule_type"
    if kind == "discrete":
        names = [("lengths", schedule + "difficulty"), ("until_steps", schedule + "max_step")]
    else:
        names = [
            ("start_length", _CURRICULUM + "min_difficulty"),
            ("total_steps", schedule + "total_curriculum_step"),
            ("step", schedule + "difficulty_step"),
        ]
    if kind == "root":
        names.append(("root_degree", schedule + "root_degree"))
    for name, source in names:
        value = file.value(source)
        if value is not None:
            yield (
                name,
                float(value) if name == "root_degree" and isinstance(value, int) else value,
                source,
            )


# The one defect that needs the whole card: saves too far apart for the time that an attempt has.

# TFLOPs that large trainings reached on each kind of GPU, by the word in the constraint or
# partition.
_REACHED = (("h100", 400.0), ("h200", 400.0), ("a100", 149.0), ("v100", 45.0))
_UNKNOWN = 149.0
_LARGEST_SHARE = 0.25  # of an attempt, between two saves


def save_interval(card: RunCard, line: int) -> Iterator[Defect]:
    """A crash costs up to one save interval; nothing is known of the speed but what such GPUs
    reach.
    """
    interval = card.checkpoint.interval
    if interval is None or not card.slurm.gpus_per_node:
        return
    words = f"{card.slurm.constraint} {card.slurm.partition} {card.slurm.account}".lower()
    tflops = next((value for word, value in _REACHED if word in words), _UNKNOWN)
    rows = card.tokenizer.padded_vocabulary_size
    a_step = (
        flops.tflops_per_gpu(
            card.model,
            rows,
            global_batch_size=card.batch.global_batch_size,
            seconds=1.0,
            world_size=card.world_size,
        )
        / tflops
    )
    seconds, limit = a_step * interval, card.time_limit_seconds
    if seconds <= _LARGEST_SHARE * limit:
        return
    advised = max(1, int(_LARGEST_SHARE * limit / 2 / a_step))
    code = "save-interval-beyond-limit" if seconds >= limit else "save-interval-wide"
    span, basis = duration(seconds), f"at {tflops:g} TFLOPs a GPU, an assumption"
    yield defect(
        code,
        line,
        interval=interval,
        span=span,
        basis=basis,
        nodes=card.slurm.nodes,
        advised=advised,
    )


# The known defects, one function each in three files, and the order in which they are told.

_ORDER = {DefectSeverity.ERROR: 0, DefectSeverity.WARNING: 1, DefectSeverity.NOTE: 2}


def find_defects(case: Case) -> list[Defect]:
    """Every defect of the script, in order."""
    return in_order(
        defect for look in (*JOB_DEFECTS, *MODEL_DEFECTS, *NUMBER_DEFECTS) for defect in look(case)
    )


def in_order(defects: Iterable[Defect]) -> list[Defect]:
    """The most severe first, then by line."""
    return sorted(defects, key=lambda defect: (_ORDER[defect.severity], defect.line, defect.code))


def read_script(path: Path) -> str:
    """The text of a batch script. Raises ScriptError: not there, not a file, too large, not text."""
    try:
        if path.is_dir():
            raise ScriptError(0, "it is a folder", "name the script inside it")
        if path.exists() and not path.is_file():
            raise ScriptError(0, "it is not a regular file", "name a batch script")
        with path.open("rb") as stream:
            content = stream.read(LARGEST_SCRIPT_BYTES + 1)
    except FileNotFoundError:
        raise ScriptError(0, "it does not exist", "name a batch script") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScriptError(0, f"it cannot be read ({reason})", "check its path and rights") from None
    if len(content) > LARGEST_SCRIPT_BYTES:
        raise ScriptError(
            0, f"it is larger than {LARGEST_SCRIPT_BYTES} bytes", "this is not a batch script"
        )
    if b"\0" in content:
        raise ScriptError(
            content[: content.index(b"\0")].count(b"\n") + 1,
            "it is not text",
            "name a batch script",
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ScriptError(line, "it is not UTF-8 text", "name a batch script") from None


def import_script(path: Path, overrides: Sequence[str] = ()) -> Imported:
    """The script in `path` as a run card, with all that there is to say about it.

    `overrides` are `section.key=value`, put over what the script says. Raises ScriptError when the
    script cannot be read, CardError when an override is none.
    """
    return import_text(read_script(path), str(path), overrides, folder=path.parent)


# what `dirname` of the script itself is written as
_OWN_FOLDER = re.compile(r"\$\(.*\bdirname\b.*(?:\$0|BASH_SOURCE).*\)", re.DOTALL)


def text_beside(folder: Path, name: Traced) -> str | None:
    """The text of a file that a script in `folder` sources; None where it is not at hand: not there,
    no text, or named by what only a shell could tell. An absolute path is another machine's.
    """
    path = name.text
    if name.unknowns and _OWN_FOLDER.fullmatch(name.unknowns[0]):
        own = len(name.unknowns[0])
        name, path = name.cut(own), path[own:].lstrip("/")
    if not name.is_known or not path or path.startswith(("/", "~")):
        return None
    try:
        return read_script(folder / path).replace("\r\n", "\n")
    except ScriptError:
        return None


def import_text(
    raw: str, name: str, overrides: Sequence[str] = (), folder: Path | None = None
) -> Imported:
    """As `import_script`, of a script's text; `name` is what it is called, and `folder` where the
    files that it sources may be.
    """
    text = raw.replace("\r\n", "\n")
    refuse_settings(name, text)
    directives = read_directives(text)
    file_at = None
    if folder is not None:
        file_at = partial(text_beside, folder)
    script = read_shell(text, job_variables(directives), file_at)
    if script.submitted:
        directives = read_directives(script.submitted)
        script = read_shell(text, job_variables(directives), file_at)
    launch = find_launch(script)
    file = find_deepspeed(script, launch)
    builder = Builder()
    place_slurm(builder, directives, launch.starts_workers)
    place_shell(builder, script, launch)
    place_training(builder, launch)
    if file is not None:
        place_deepspeed(builder, file)
    place_conditions(builder, script, launch)
    complete(builder)
    uses = {use.option: use for use in launch.options}
    case = Case(
        raw,
        directives,
        script=script,
        launch=launch,
        uses=uses,
        deepspeed=file,
        card=copy.deepcopy(builder),
    )
    defects = find_defects(case)
    correct(builder)
    tables, problems = apply_overrides(builder.tables(), overrides, RunCard)
    if problems:
        raise CardError("command line", problems)
    return _finished(name, builder, tables=tables, defects=defects, overrides=overrides)


def _finished(
    name: str,
    builder: Builder,
    tables: dict[str, Any],
    defects: list[Defect],
    overrides: Sequence[str],
) -> Imported:
    given = frozenset(map(dotted, overridden_keys(overrides)))
    remarks = {key: item.comment for key, item in builder.placed.items()} | dict.fromkeys(
        given, "--set"
    )
    unplaced = tuple(sorted(builder.unplaced, key=lambda item: item.line))
    imported = Imported(
        name,
        "",
        tables=tables,
        placed=tuple(builder.placed.values()),
        unplaced=unplaced,
        changed=tuple(builder.changed),
        defects=tuple(defects),
        problems=(),
        overridden=given,
    )
    text = write_card(tables, remarks, _head(imported))
    card, problems = _checked(text)
    if card is not None:
        defects = in_order([*defects, *save_interval(card, builder.line("checkpoint.interval"))])
    found = tuple(CardProblem(item.key, _line_of(item, builder), str(item)) for item in problems)
    return replace(imported, text=text, defects=tuple(defects), problems=found)


def _head(imported: Imported) -> list[str]:
    script = imported.script.rpartition("/")[2]
    lines = [
        f"Made from {script} by `tr11 import`. Each remark names the line of the script.",
        "Check it: tr11 estimate --run THIS-FILE",
    ]
    for item in imported.decisions:
        shown = ""
        if item.value and item.reason is LeftReason.DECISION:
            shown = f" {item.value}"
        lines.append(f"DECIDE, line {item.line}: {item.option}{shown}: {item.why}")
    lines += [f"DECIDE, line {item.line}: {item.what}; {item.fix}" for item in imported.errors]
    return lines


def _checked(text: str) -> tuple[RunCard | None, Sequence[Problem]]:
    """The card as `load_card` sees it, with variables of the environment left as they are; or what
    it refuses.
    """
    with tempfile.TemporaryDirectory(prefix="tr11-import-") as folder:
        path = Path(folder) / "card.toml"
        path.write_text(text, encoding="utf-8")
        try:
            return load_card(path, (), os.environ, keep_undefined=True), ()
        except CardError as error:
            return None, error.problems


def _line_of(problem: Problem, builder: Builder) -> int:
    """The line of the key that a problem is about, or of the longest key above it."""
    parts = problem.key.split(".")
    for length in range(len(parts), 0, -1):
        line = builder.line(".".join(parts[:length]))
        if line:
            return line
    return 0


def write_import(imported: Imported, target: Path, force: bool) -> None:
    """Write the card whole or not at all. Raises FileExistsError unless `force`, OSError when it
    cannot be written.
    """
    if force:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(imported.text)
            Path(name).chmod(0o644)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return
    with target.open("x", encoding="utf-8") as stream:
        stream.write(imported.text)
