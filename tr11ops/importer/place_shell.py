"""What the script's shell prepares: exported variables, sourced files, other commands, and the
launcher's options.
"""

from __future__ import annotations

import re

from tr11ops.base.errors import ConversionProblem
from tr11ops.importer.expansion import Assignment, Script, ShellCommand
from tr11ops.importer.launch import ParsedLaunch
from tr11ops.importer.options import (
    IN_THE_JOB,
    Builder,
    LeftReason,
    card_text,
    integer,
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
_HARMLESS = re.compile(
    r"scontrol show hostname|\b(date|pwd|hostname|whoami|nproc|mktemp|basename|dirname)\b"
)


def place_shell(builder: Builder, script: Script, launch: ParsedLaunch) -> None:
    """Place the environment, the set-up lines and the rendezvous port; tell of commands that tr11
    does not run.
    """
    _launcher(builder, script, launch)
    _unread(builder, script)
    reached = names_of_launch(script, launch)
    setup: list[str] = []
    setup_line = 0
    for command in script.commands:
        if command.name in _SETUP and not command.outer and command.line <= launch.line:
            if command.conditional:
                why = "stands in a condition, which is not evaluated: add it to slurm.setup if the nodes need it"
                builder.leave(
                    command.name,
                    _text(command),
                    command.line,
                    LeftReason.DECISION,
                    why,
                    "slurm.setup",
                )
                continue
            if why := only_a_person_knows(command.words):
                why += ": add the line to slurm.setup"
                builder.leave(
                    command.name,
                    _text(command),
                    command.line,
                    LeftReason.DECISION,
                    why,
                    "slurm.setup",
                )
                continue
            setup.append(_text(command))
            setup_line = setup_line or command.line
        elif (
            command is not launch.command
            and not command.outer
            and command.words is not launch.command.outer
        ):
            _other(builder, command)
    for item in script.assignments:
        if item.exported and item.applied and item.name not in reached:
            line = _exported(builder, item)
            if line:
                setup.append(line)
                setup_line = setup_line or item.line
    if setup:
        builder.put(
            "slurm.setup", list(dict.fromkeys(setup)), "the script's own set-up", setup_line
        )


def _unread(builder: Builder, script: Script) -> None:
    """Tell of what only a running shell could work out; where it reaches a key, that key asks for a
    decision too.
    """
    for path, line in script.not_read:
        why = "not read: what it sets is not known here; give it with --set where it matters"
        builder.leave("source", path, line, LeftReason.ELSEWHERE, why=why)
    for (source, line), why in script.variables.unread.items():
        if not _HARMLESS.search(source):
            builder.leave(source, "", line, LeftReason.NO_COUNTERPART, f"in a value: {why}")


def place_conditions(builder: Builder, script: Script, launch: ParsedLaunch) -> None:
    """Tell of values that stand in a condition, passed by or taken. Run when all keys are placed."""
    reached = names_of_launch(script, launch)
    passed_by = {item.name for item in script.assignments if not item.applied}
    for item in script.assignments:
        said = item.value if item.added is None else item.added
        if item.name not in reached or not said.text.strip():
            continue
        key, why = "", "stands in a condition, which is not evaluated; "
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


def names_of_launch(script: Script, launch: ParsedLaunch) -> set[str]:
    """Variables that the training's command is made of, through all others."""
    names = set(launch.command.used)
    outer = launch.command.outer
    while outer:
        holder = next((command for command in script.commands if command.words is outer), None)
        names |= holder.used if holder else set()
        outer = holder.outer if holder else ()
    for name in tuple(names):
        names |= script.variables.origins.get(name, set())
    return names


def _launcher(builder: Builder, script: Script, launch: ParsedLaunch) -> None:
    for name in ("nproc_per_node", "num_gpus"):
        if name in launch.launcher:
            option = launch.spelled[name]
            value = (launch.launcher[name],)
            builder.take("slurm.workers_per_node", value, integer, option.text, option.line)
    spelled, nodes = launch.nodes
    if nodes is not None and nodes.text and "slurm.nodes" not in builder.placed:
        if ":" in nodes.text:
            least = nodes.cut(0, nodes.text.find(":"))
        else:
            least = nodes
        option = launch.spelled[spelled]
        builder.take("slurm.nodes", (least,), integer, option.text, option.line)
    endpoint = launch.launcher.get("rdzv_endpoint")
    port = launch.launcher.get("master_port")
    if endpoint is not None and ":" in endpoint.text:
        port = endpoint.cut(endpoint.text.rindex(":") + 1)
    port = port or script.variables.text("MASTER_PORT")
    if port is not None and port.text and port.is_known:
        builder.take("slurm.master_port", (port,), integer, "the launcher's port", port.line)


def _text(command: ShellCommand) -> str:
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


def _exported(builder: Builder, item: Assignment) -> str:
    """Place an exported variable; returns a set-up line for one that only the node's shell can
    make.
    """
    source, shown = f"export {item.name}", item.value.for_shell()
    if item.name in _OWN_VARIABLES:
        builder.leave(source, shown, item.line, LeftReason.DROPPED, _OWN_VARIABLES[item.name])
        return ""
    if is_secret(item.name, item.value.text):
        why = f'looks like a secret, and cards are copied: write "${item.name}" there, or source a file in slurm.setup'
        builder.leave(source, "(not shown)", item.line, LeftReason.DECISION, why, "slurm.setup")
        return ""
    if why := only_a_person_knows([item.value]):
        key = f"slurm.environment.{item.name}"
        builder.leave(
            source, shown, item.line, LeftReason.DECISION, f"{why}: give --set {key}=...", key
        )
        return ""
    inside = any(name in item.value.text for name in IN_THE_JOB)
    if item.name in _LISTS_OF_FOLDERS or inside or "${" + item.name + "}" in item.value.unknowns:
        return f'export {item.name}="{shown}"'
    try:
        value = card_text(item.value)
    except ConversionProblem:
        return f'export {item.name}="{shown}"'
    builder.put(f"slurm.environment.{item.name}", value, source, item.line)
    return ""
