"""The command that starts the training: which one it is, its launcher's options, its own options,
and the DeepSpeed settings that the script writes for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tr11ops.base.errors import ScriptError
from tr11ops.importer.expansion import SOURCING, Script, ShellCommand, WrittenFile
from tr11ops.importer.options import ALL_VALUES, Builder, LeftReason, OptionUse
from tr11ops.importer.options_table import RULES
from tr11ops.importer.traced import DEEPEST_NESTING, Traced
from trainer.contract.record import Record

FEWEST_OPTIONS = 3  # of the trainer's, for a command to count as a training
_OPTION = re.compile(r"--?[A-Za-z]")
# which start the workers of a node
_LAUNCHERS = frozenset(
    {"torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "accelerate"}
)
_LAUNCHER_SWITCHES = frozenset(
    {"-u", "--standalone", "--no_python", "--use_env", "--no_python_module", "-m"}
)


class ParsedLaunch(Record):
    """The training's command, taken apart. `strays` are words among the options that belong to
    none.

    `launcher` has the launcher's options by name with `_`; `spelled` how the script writes each.
    """

    command: ShellCommand
    program: str
    launcher: Mapping[str, Traced]
    spelled: Mapping[str, Traced]
    options: tuple[OptionUse, ...]
    strays: tuple[Traced, ...]

    @property
    def line(self) -> int:
        return self.command.line

    @property
    def nodes(self) -> tuple[str, Traced | None]:
        """How many nodes the launcher is told, and by which option: torchrun's or DeepSpeed's."""
        for name in ("nnodes", "num_nodes"):
            if name in self.launcher:
                return name, self.launcher[name]
        return "", None

    @property
    def starts_workers(self) -> bool:
        """Whether a launcher starts the workers of a node; else each task of Slurm is one of them."""
        return any(word.text.rpartition("/")[2] in _LAUNCHERS for word in self.command.words)


def find_launch(script: Script) -> ParsedLaunch:
    """The command with the most options of the old trainer. Raises ScriptError when there is none."""
    best: tuple[int, ShellCommand] | None = None
    for command in script.commands:
        count = sum(word.text.partition("=")[0] in RULES for word in command.words)
        if count >= FEWEST_OPTIONS and (best is None or count >= best[0]):
            best = (count, command)
    if best is None:
        raise ScriptError(
            0, _nothing_found(script), "give the script that holds the training's own options"
        )
    return take_apart(best[1])


def _nothing_found(script: Script) -> str:
    outside = _settings_outside(script)
    if outside:
        return outside
    if script.not_read:
        path, line = script.not_read[-1]
        return f"no command in it starts a training; line {line} sources {path[:80]}, which is not at hand"
    for name, line in script.uncalled.items():
        return f"no command in it starts a training; nothing calls {name[:80]} of line {line}"
    return "no command in it starts a training with options such as --num-layers"


def _settings_outside(script: Script) -> str:
    """The last command that starts another script, or a program with settings of another kind;
    empty: there is none.
    """
    for command in reversed(script.commands):
        words = [word.text for word in command.words]
        settings = next((word for word in words if re.search(r"\.ya?ml\b", word)), "")
        started = next((word for word in words[1:] if word.endswith(".sh")), "")
        program = next((word for word in words if word.endswith(".py")), "")
        if command.name in SOURCING:
            continue
        if command.name == "sbatch":
            return f"no command in it starts a training; line {command.line} submits another script"
        if settings:
            return f"line {command.line} takes its settings from {settings[:80]}, which is not a Megatron command line"
        if program:
            return f"line {command.line} starts {program[:80]} without options such as --num-layers"
        if started:
            return f"no command in it starts a training; line {command.line} starts {started[:80]}"
    return ""


# what tells the settings of other trainers apart
_TRAINERS = {
    "GPT-NeoX": r"pipe[-_]parallel[-_]size",
    "nanotron": r"^parallelism:",
    "NeMo": r"^(trainer|exp_manager):",
    "OLMo": r"^\s+d_model:",
}


def refuse_settings(name: str, text: str) -> None:
    """Raises ScriptError for a file of settings that is no script."""
    if not name.endswith((".yml", ".yaml")):
        return
    trainers = [key for key, sign in _TRAINERS.items() if re.search(sign, text, re.MULTILINE)]
    what = f"it holds settings of {(*trainers, 'another trainer')[0]} in YAML, which are not read"
    raise ScriptError(0, what, "give a script that starts Megatron or Megatron-DeepSpeed")


def take_apart(command: ShellCommand) -> ParsedLaunch:
    """Words before the program are the launcher's; those behind it are the trainer's."""
    words = command.words
    first = next((i for i, word in enumerate(words) if word.text.partition("=")[0] in RULES), 0)
    program_at = max((i for i in range(first) if words[i].text.endswith(".py")), default=-1)
    before = words[: program_at if program_at >= 0 else first]
    launcher = _launcher_options(before)
    spelled = {
        word.option_key: word.cut(0, len(word.text.partition("=")[0]))
        for word in before
        if _is_option(word)
    }
    options, strays = _options(words[program_at + 1 if program_at >= 0 else first :])
    program = words[program_at].text if program_at >= 0 else ""
    return ParsedLaunch(
        command,
        program,
        launcher=launcher,
        spelled=spelled,
        options=tuple(options),
        strays=tuple(strays),
    )


def _options(words: Sequence[Traced]) -> tuple[list[OptionUse], list[Traced]]:
    options: list[OptionUse] = []
    strays: list[Traced] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_option(word):
            strays.append(word)
            continue
        name, equals, _ = word.text.partition("=")
        if equals:
            values = [word.cut(len(name) + 1)]
        else:
            values = []
        limit = RULES[name].count if name in RULES else ALL_VALUES
        while (
            position < len(words)
            and not _is_option(words[position])
            and (limit < 0 or len(values) < limit)
        ):
            values.append(words[position])
            position += 1
        options.append(OptionUse(name, tuple(values), word.line))
    return options, strays


def _is_option(word: Traced) -> bool:
    return bool(_OPTION.match(word.text)) and not word.unknown_at(0)


def _launcher_options(words: Sequence[Traced]) -> dict[str, Traced]:
    """`--nnodes 48`, `--nproc_per_node=8`: names with `-` as `_`, without dashes before them."""
    found: dict[str, Traced] = {}
    for index, word in enumerate(words):
        if not _is_option(word):
            continue
        name, equals, _ = word.text.partition("=")
        key = word.option_key
        following = None
        if index + 1 < len(words):
            following = words[index + 1]
        if equals:
            found[key] = word.cut(len(name) + 1)
        elif following is not None and not _is_option(following) and name not in _LAUNCHER_SWITCHES:
            found[key] = following
        else:
            found[key] = Traced.of("", word.line)
    return found


# The DeepSpeed settings that a script writes for itself: JSON, read leniently, every value with
# its line.

_NUMBER = re.compile(r"-?[0-9]+(?:_[0-9]+)+(?:\.[0-9]+)?")
_SIGNS = ("train_micro_batch_size_per_gpu", "zero_optimization", "train_batch_size")
MOST_KEYS = 1000


class DeepSpeedFile(Record):
    """The file's values and their lines by dotted key; None for a value that only a running shell could
    tell. `underscored` are lines on which a number holds `_`, which
    JSON refuses.
    """

    path: str
    line: int
    settings: Mapping[str, tuple[Any, int]]
    underscored: tuple[int, ...]

    def value(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key."""
        value, _ = self.settings.get(key, (None, 0))
        if value is None:
            return default
        return value

    def line_of(self, key: str) -> int:
        """Its line; the file's first line where the key is not there."""
        _, line = self.settings.get(key, (None, self.line))
        return line


def find_deepspeed(script: Script, launch: ParsedLaunch) -> DeepSpeedFile | None:
    """The file that the launched command names, or else the one that looks like it. None: the
    script writes none.

    Raises ScriptError when it is not JSON.
    """
    named = [
        use.values[0]
        for use in launch.options
        if use.option.replace("-", "_") == "__deepspeed_config" and use.values
    ]
    for file in reversed(script.files):
        if any(file.path.text == name.text for name in named):
            return _read(file)
    for file in reversed(script.files):
        if any(f'"{sign}"' in file.content.text for sign in _SIGNS):
            return _read(file)
    return None


def _read(file: WrittenFile) -> DeepSpeedFile:
    text, underscored = _mended(file.content)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = file.content.line_at(min(error.pos, len(file.content) - 1)) or file.line
        raise ScriptError(
            line, f"the DeepSpeed settings are not JSON: {error.msg}", "repair the script"
        ) from None
    except (RecursionError, ValueError):
        raise ScriptError(
            file.line,
            "the DeepSpeed settings are nested too deeply, or hold a huge number",
            "repair the script",
        ) from None
    if not isinstance(value, dict):
        raise ScriptError(
            file.line, "the DeepSpeed settings are no JSON object", "repair the script"
        )
    settings: dict[str, tuple[Any, int]] = {}
    _flatten(value, "", start=0, file=file, settings=settings)
    return DeepSpeedFile(file.path.for_shell(), file.line, settings, tuple(underscored))


def _mended(content: Traced) -> tuple[str, list[int]]:
    """JSON text of the same length, but for unknown parts and underscores; and the lines with
    underscores.
    """
    pieces: list[str] = []
    underscored: list[int] = []
    inside = False
    index = 0
    while index < len(content):
        character = content.text[index]
        if inside:
            number = None
        else:
            number = _NUMBER.match(content.text, index)
        if content.unknown_at(index):
            start = index
            while index < len(content) and content.unknown_at(index):
                index += 1
            pieces.append("?" * (index - start) if inside else "null".ljust(index - start))
            continue
        if number is not None:
            underscored.append(content.line_at(index))
            pieces.append(number.group().replace("_", "").rjust(len(number.group())))
            index = number.end()
            continue
        if character == "\\" and inside:
            pieces.append(content.text[index : index + 2])
            index += 2
            continue
        inside ^= character == '"'
        pieces.append(character)
        index += 1
    return "".join(pieces), underscored


def _flatten(
    value: Any, prefix: str, start: int, file: WrittenFile, settings: dict[str, tuple[Any, int]]
) -> None:
    for name, item in value.items():
        key = f"{prefix}{name}"
        if key.count(".") > DEEPEST_NESTING:
            raise ScriptError(
                file.line, "the DeepSpeed settings are nested too deeply", "repair the script"
            )
        position = max(file.content.text.find(f'"{name}"', start), 0)
        if isinstance(item, dict):
            _flatten(item, key + ".", start=position, file=file, settings=settings)
        else:
            settings[key] = (item, file.content.line_at(position) or file.line)
        if len(settings) > MOST_KEYS:
            raise ScriptError(
                file.line,
                f"the DeepSpeed settings have more than {MOST_KEYS} keys",
                "repair the script",
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
    for key, (value, line) in file.settings.items():
        if key in _READ or key in _SCALE_KEYS or key.startswith(_CURRICULUM):
            continue
        if key in _DROPPED:
            builder.leave(_shown(key), value, line, LeftReason.DROPPED, _DROPPED[key])
        elif key.startswith(
            ("zero_optimization.", "fp16.", "bf16.", "activation_checkpointing.", "flops_profiler.")
        ):
            builder.leave(
                _shown(key),
                value,
                line,
                LeftReason.DROPPED,
                "the trainer chooses it",
            )
        else:
            why = "tr11 writes its own DeepSpeed settings and has no key for it"
            builder.ask(_shown(key), value, line, why)


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
        builder.ask(_shown(key), longest, file.line_of(key), why)


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
