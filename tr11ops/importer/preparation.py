"""What a script's shell prepares before the training: sourced files, modules, exported variables, and
commands that tr11 does not run.
"""

from __future__ import annotations

import re
from collections.abc import Set

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.expansion import Assignment, Script, ShellCommand
from tr11ops.importer.options import (
    IN_THE_JOB,
    Builder,
    LeftReason,
    card_text,
    only_a_person_knows,
)
from trainer.contract.secret_shapes import is_secret

_SETUP = frozenset(
    {"source", ".", "module", "ml", "conda", "mamba", "micromamba", "spack", "ulimit", "umask"}
)
_SILENT = frozenset(
    {
        "set",
        "cd",
        "pushd",
        "popd",
        "mkdir",
        "echo",
        "printf",
        "date",
        "clear",
        "sleep",
        "true",
        ":",
        "cat",
        "tee",
        "hostname",
        "pwd",
        "ls",
        "unset",
        "exit",
        "trap",
        "wait",
        "[",
        "[[",
        "test",
        "shopt",
        "eval",
        "read",
        "shift",
        "nvidia-smi",
        "touch",
        "env",
        "which",
        "git",
        "return",
        "]]",
        "grep",
        "head",
        "tail",
    }
)
_LISTS_OF_FOLDERS = frozenset(
    {"PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PYTHONPATH", "MANPATH"}
)
_OWN_VARIABLES = {
    "MASTER_ADDR": "the first node of the allocation",
    "MASTER_PORT": "slurm.master_port",
    "TORCHELASTIC_ERROR_FILE": "tr11 keeps the first worker's error itself",
    "WORLD_SIZE": "slurm.nodes x slurm.workers_per_node",
    "RANK": "given to every worker",
    "LOCAL_RANK": "given to every worker",
    "NCCL_ASYNC_ERROR_HANDLING": "every worker gets TORCH_NCCL_ASYNC_ERROR_HANDLING=3",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "every worker gets 3",
    "CUDA_LAUNCH_BLOCKING": "the processor would wait for every kernel; where steps hang without it: "
    "--set slurm.environment.CUDA_LAUNCH_BLOCKING=1",
}
# What a batch script asks of the machine, and a card does not need: the first node, times, places.
_SHELL_HOOK = re.compile(
    r"\b(?:conda|mamba|micromamba|spack|pixi|mise|lmod)\b.*\b(?:hook|activate|init|load)\b"
)
_HARMLESS = re.compile(
    r"scontrol show hostname|\b(date|pwd|hostname|whoami|nproc|mktemp|basename|dirname)\b"
)


def place_preparation(
    builder: Builder,
    script: Script,
    launch: ShellCommand,
    reached: Set[str],
    environment: str = "slurm.environment",
) -> None:
    """Place the set-up lines, and exported variables below `environment`; tell of commands that
    tr11 does not run. `reached`: variables that are said in other keys.
    """
    _unread(builder, script)
    setup: list[str] = []
    setup_line = 0
    for command in script.commands:
        is_setup = command.name in _SETUP or _is_shell_hook(command)
        if is_setup and not command.outer and command.line <= launch.line:
            why = _why_left(command)
            if why:
                builder.leave(
                    command.name,
                    shell_text(command).removeprefix(f"{command.name} "),
                    command.line,
                    LeftReason.DECISION,
                    why,
                    "slurm.setup",
                )
                continue
            setup.append(shell_text(command))
            setup_line = setup_line or command.line
        elif command is not launch and not command.outer and command.words is not launch.outer:
            _other(builder, command)
    for item in script.assignments:
        if item.exported and item.applied and item.name not in reached:
            line = _exported(builder, item, environment)
            if line:
                setup.append(line)
                setup_line = setup_line or item.line
    if setup:
        builder.put(
            "slurm.setup", list(dict.fromkeys(setup)), "the script's own set-up", setup_line
        )


def _why_left(command: ShellCommand) -> str:
    """Why a line of the set-up is a person's to place; "" where it goes into slurm.setup."""
    if command.conditional:
        return "stands in a condition, which is not evaluated: add it to slurm.setup if the nodes need it"
    why = only_a_person_knows(command.words)
    if why:
        return f"{why}: add the line to slurm.setup"
    return ""


def _unread(builder: Builder, script: Script) -> None:
    """Tell of what only a running shell could work out; where it reaches a key, that key asks for a
    decision too.
    """
    for path, line in script.not_read:
        why = "not read: what it sets is not known here; give it with --set where it matters"
        builder.leave("source", path, line, LeftReason.ELSEWHERE, why=why)
    for (number, line), taken in script.variables.assumed.items():
        why = (
            f"likely {taken!r}, if it is called without arguments: `sbatch SCRIPT ARGUMENT` says it otherwise,"
            " and --set does here"
        )
        builder.leave(f"${number}", taken, line, LeftReason.UNKNOWN, why=why)
    for (source, line), why in script.variables.unread.items():
        if not _HARMLESS.search(source) and not _SHELL_HOOK.search(source):
            builder.leave(source, "", line, LeftReason.NO_COUNTERPART, f"in a value: {why}")


def place_conditions(builder: Builder, script: Script, launch: ShellCommand) -> None:
    """Tell of values that stand in a condition, passed by or taken. Run when all keys are placed."""
    reached = names_of(script, launch)
    passed_by = {item.name for item in script.assignments if not item.applied}
    for item in script.assignments:
        said = item.value if item.added is None else item.added
        if item.name not in reached or item.name in _OWN_VARIABLES or not said.text.strip():
            continue
        key = ""
        why = "stands in a condition, which is not evaluated; "
        if not item.applied:
            if item.added is not None:
                key = ""
            else:
                key = _key_of(item.name, builder, script)
            why += "the value before it was taken" + (f": give --set {key}=..." if key else "")
        elif item.conditional and item.name not in passed_by:
            why += "it was taken"
        else:
            continue
        builder.leave(item.name, said.for_shell(), item.line, LeftReason.DECISION, why, key)


def _key_of(name: str, builder: Builder, script: Script) -> str:
    """The key whose value is the one that a variable had before."""
    lines = {other.line for other in script.assignments if other.name == name and other.applied}
    return next((key for key, placed in builder.placed.items() if placed.value_line in lines), "")


def names_of(script: Script, launch: ShellCommand) -> set[str]:
    """Variables that the training's command is made of, through all others."""
    names = set(launch.used)
    outer = launch.outer
    while outer:
        holder = next((command for command in script.commands if command.words is outer), None)
        names |= holder.used if holder else set()
        outer = holder.outer if holder else ()
    for name in tuple(names):
        names |= script.variables.origins.get(name, set())
    return names


def _is_shell_hook(command: ShellCommand) -> bool:
    """`eval "$(conda shell.bash hook)"` and its kind, without which the shell knows no `activate`."""
    text = " ".join(word.text for word in command.words[1:])
    return command.name == "eval" and _SHELL_HOOK.search(text) is not None


def shell_text(command: ShellCommand) -> str:
    """The command as shell text again; words that would fall apart between double quotes."""
    return " ".join(
        f'"{word.for_shell()}"'
        if re.search(r"""[\s;&|<>()'*?#]""", word.text) or not word.text
        else word.for_shell()
        for word in command.words
    )


def _other(builder: Builder, command: ShellCommand) -> None:
    words = [word.text for word in command.words]
    shown = " ".join(word.for_shell() for word in command.words[1:])
    if any("load_ratios_meg_ds_format" in word for word in words):
        why = "written again at every job start, also by other jobs: write these files once, before the launch"
        builder.leave(command.name, shown, command.line, LeftReason.ELSEWHERE, why)
    elif command.name not in _SILENT and "=" not in command.name:
        why = "tr11 does not run it; what the nodes need before the workers start goes into slurm.setup"
        builder.leave(command.name, shown, command.line, LeftReason.NO_COUNTERPART, why)


def _exported(builder: Builder, item: Assignment, environment: str) -> str:
    """Place an exported variable; returns a set-up line for one that only the node's shell can
    make.
    """
    source = f"export {item.name}"
    shown = item.value.for_shell()
    if item.name in _OWN_VARIABLES:
        builder.leave(source, shown, item.line, LeftReason.DROPPED, _OWN_VARIABLES[item.name])
        return ""
    if is_secret(item.name, item.value.text):
        why = f'looks like a secret, and cards are copied: write "${item.name}" there, or source a file in slurm.setup'
        builder.leave(source, "(not shown)", item.line, LeftReason.DECISION, why, "slurm.setup")
        return ""
    if why := only_a_person_knows([item.value]):
        key = f"{environment}.{item.name}"
        builder.ask(source, shown, line=item.line, why=why, key=key)
        return ""
    inside = any(name in item.value.text for name in IN_THE_JOB)
    if item.name in _LISTS_OF_FOLDERS or inside or "${" + item.name + "}" in item.value.unknowns:
        return f'export {item.name}="{shown}"'
    try:
        value = card_text(item.value)
    except ConversionProblem:
        return f'export {item.name}="{shown}"'
    builder.put(f"{environment}.{item.name}", value, source, item.line)
    return ""
