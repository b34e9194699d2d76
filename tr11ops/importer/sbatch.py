"""`#SBATCH` lines: read as Slurm reads them, into [slurm] and [run], and what Slurm will tell the
job's shell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tr11ops.base.errors import ConversionProblem
from tr11ops.cluster.sbatch_options import gpu_kind_of, gpus_of, option_fault
from tr11ops.importer.options import Builder, Converter, LeftReason, integer, text
from tr11ops.importer.traced import Traced, placeholder_at
from tr11ops.runcard.sections import parse_time_limit
from trainer.contract.record import Record

# `#SBATCH` lines: what Slurm reads before the first command, long and short, with `=`, a blank or
# nothing between.

_LINE = re.compile(r"#SBATCH(?=\s|$)(.*)")
SHORT_OPTIONS = {
    "A": "account",
    "a": "array",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "O": "overcommit",
    "p": "partition",
    "q": "qos",
    "Q": "quiet",
    "s": "oversubscribe",
    "S": "core-spec",
    "t": "time",
    "v": "verbose",
    "W": "wait",
    "w": "nodelist",
    "x": "exclude",
    "h": "help",
    "V": "version",
}
_WITHOUT_VALUE = frozenset(
    {
        "contiguous",
        "help",
        "hold",
        "ignore-pbs",
        "no-kill",
        "no-requeue",
        "overcommit",
        "parsable",
        "quiet",
        "requeue",
        "reboot",
        "spread-job",
        "test-only",
        "use-min-nodes",
        "usage",
        "verbose",
        "version",
        "wait",
        "exclusive",
        "oversubscribe",
        "get-user-env",
        "nice",
        "propagate",
    }
)


class Directive(Record):
    """One option of an `#SBATCH` line, by its long name, and as it is `spelled` there.

    `read` is false where Slurm passes it by: it stands after a command.
    """

    name: str
    value: str
    line: int
    read: bool = True
    spelled: str = ""


def read_directives(text: str) -> list[Directive]:
    """Every option of every `#SBATCH` line, in order; unknown short letters keep their letter as
    the name.
    """
    found: list[Directive] = []
    commands_begun = False
    for number, line in enumerate(text.split("\n"), start=1):
        match = _LINE.match(line)
        if match is None:
            stripped = line.strip()
            commands_begun = commands_begun or (bool(stripped) and not stripped.startswith("#"))
            continue
        found += [
            Directive(name, value, line=number, read=not commands_begun, spelled=spelled)
            for name, value, spelled in _options(match.group(1))
        ]
    return found


def _options(text: str) -> list[tuple[str, str, str]]:
    """Long name, value, and the option as it is spelled."""
    words = _words(text)
    found: list[tuple[str, str, str]] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        following = None
        if position < len(words):
            following = words[position]
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            spelled = f"--{name}"
            if (
                not equals
                and name not in _WITHOUT_VALUE
                and following is not None
                and not following.startswith("-")
            ):
                value = following
                position += 1
        elif word.startswith("-") and len(word) > 1:
            name = SHORT_OPTIONS.get(word[1], word[1])
            value = word[2:].removeprefix("=")
            spelled = word[:2]
            if (
                not value
                and name not in _WITHOUT_VALUE
                and following is not None
                and not following.startswith("-")
            ):
                value = following
                position += 1
        else:
            name = ""
            value = word
            spelled = ""
        found.append((name, value, spelled))
    return found


def _words(text: str) -> list[str]:
    """Words of one line as Slurm splits it: quotes group, a backslash protects, `#` begins a
    comment.
    """
    words: list[str] = []
    current = ""
    started = False
    quote = ""
    index = 0
    while index < len(text):
        character = text[index]
        if quote:
            if character == quote:
                quote = ""
            else:
                current += character
        elif character in "'\"":
            quote = character
            started = True
        elif character == "\\" and index + 1 < len(text):
            index += 1
            current = current + text[index]
            started = True
        elif character.isspace():
            if started:
                words.append(current)
            current = ""
            started = False
        elif character == "#" and not started:
            break
        elif (end := placeholder_at(text, index)) > index:
            current = current + text[index:end]
            started = True
            index = end - 1
        else:
            current = current + character
            started = True
        index += 1
    if started:
        words.append(current)
    return words


RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_LEFT: Mapping[str, tuple[LeftReason, str]] = {
    "ntasks-per-node": (
        LeftReason.DROPPED,
        "each node gets one launcher; slurm.workers_per_node is what it starts",
    ),
    "ntasks": (LeftReason.DROPPED, "each node gets one launcher"),
    "error": (LeftReason.ELSEWHERE, "slurm.output holds both"),
    "open-mode": (LeftReason.DROPPED, "each attempt has its own file"),
    "array": (LeftReason.ELSEWHERE, "belongs to one submission: tr11 launch --array"),
    "dependency": (LeftReason.ELSEWHERE, "belongs to one submission: tr11 launch --after"),
    "begin": (
        LeftReason.DROPPED,
        "a job that waits for its time is invisible to the scheduler and loses its place",
    ),
    "hold": (LeftReason.ELSEWHERE, "belongs to one submission"),
    "requeue": (LeftReason.DROPPED, "the next array task goes on in its place"),
    "no-requeue": (LeftReason.DROPPED, "tr11's jobs are never requeued"),
    "mail-type": (LeftReason.DROPPED, "tr11 tells of trouble itself: [alerts]"),
    "chdir": (LeftReason.DROPPED, "tr11 needs no working directory"),
    "gpus": (LeftReason.ELSEWHERE, "follows from slurm.nodes x slurm.gpus_per_node"),
    "export": (LeftReason.ELSEWHERE, "slurm.environment"),
    "get-user-env": (
        LeftReason.DROPPED,
        "slurm.environment and slurm.setup say what the workers see",
    ),
}
_MUST_DECIDE = frozenset({"nodelist", "nodefile", "clusters"})


def job_variables(directives: Sequence[Directive]) -> dict[str, Traced]:
    """What Slurm tells the shell of the job that these directives describe."""
    names = {
        "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        "job-name": ("SLURM_JOB_NAME",),
        "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
        "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
        "partition": ("SLURM_JOB_PARTITION",),
        "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
        "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    }
    found: dict[str, Traced] = {}
    for item in directives:
        for name in names.get(item.name, ()) if item.read else ():
            found[name] = Traced.of(item.value, item.line)
        if item.read and item.name in {"gres", "gpus-per-node"}:
            count = gpus_of(item.value if item.name == "gres" else f"gpu:{item.value}")
            if count is not None:
                found["SLURM_GPUS_ON_NODE"] = Traced.of(str(count), item.line)
    return found


def place_slurm(builder: Builder, directives: Sequence[Directive], starts_workers: bool) -> None:
    """Place every directive, or tell what becomes of it; `starts_workers`: see ParsedLaunch."""
    if not directives:
        why = "nothing says which GPUs a node is asked for"
        builder.ask("no #SBATCH line", "", line=0, why=why, key="slurm.gpus_per_node")
    for item in directives:
        if not item.read:
            why = "stands after the first command, where Slurm no longer looks"
            builder.leave(_shown(item), item.value, item.line, LeftReason.NO_EFFECT, why)
        elif item.name == "ntasks-per-node" and not starts_workers:
            value = (Traced.of(item.value, item.line),)
            note = "each task was a worker"
            builder.take("slurm.workers_per_node", value, integer, _shown(item), item.line, note)
        else:
            _place(builder, item)


def _place(builder: Builder, item: Directive) -> None:
    source = _shown(item)
    values = (Traced.of(item.value, item.line),)
    if placeholder_at(item.value, max(item.value.find("<"), 0)):
        _placeholder(builder, item)
    elif item.name in _CONVERTED:
        key, convert = _CONVERTED[item.name]
        builder.take(key, values, convert, source, item.line)
        if item.name in {"gres", "gpus-per-node"}:
            _more_of_gres(builder, item)
    elif item.name == "job-name":
        _run_name(builder, item)
    elif item.name == "nodes":
        least, _, most = item.value.partition("-")
        note = ""
        if most and most != least:
            note = f"the script takes {item.value}"
        builder.take(
            "slurm.nodes", (Traced.of(least, item.line),), integer, source, item.line, note
        )
    elif item.name in _LEFT:
        reason, why = _LEFT[item.name]
        builder.leave(
            source,
            item.value,
            item.line,
            reason,
            f"{why} {item.value}" if item.name == "array" else why,
        )
    elif item.name in _MUST_DECIDE:
        why = "tr11 does not ask for it; does the cluster need it?"
        builder.ask(source, item.value, item.line, why)
    elif option_fault(item.name, item.value) is None:
        _passed(builder, f"slurm.options.{item.name}", item)
    else:
        builder.leave(
            source,
            item.value,
            item.line,
            LeftReason.NO_COUNTERPART,
            "tr11 does not ask Slurm for it",
        )


def _placeholder(builder: Builder, item: Directive) -> None:
    """A value that a person should have filled in."""
    key = ""
    if item.name in _CONVERTED:
        key = _CONVERTED[item.name][0]
    why = "is a placeholder, to be filled in"
    if not key:
        why += " where the cluster needs it"
    builder.ask(_shown(item), item.value, line=item.line, why=why, key=key)


def _more_of_gres(builder: Builder, item: Directive) -> None:
    """What slurm.gpus_per_node does not say: the kind of the GPUs, and whatever else is asked for
    on each node.
    """
    if item.name == "gres":
        gres = item.value
    else:
        gres = f"gpu:{item.value}"
    others = [entry for entry in gres.split(",") if gpus_of(entry) is None]
    if gpus_of(gres) is not None and (others or gpu_kind_of(gres)):
        _passed(builder, f"slurm.options.{item.name}", item)


def _passed(builder: Builder, key: str, item: Directive) -> None:
    """An option that the card passes through."""
    if item.value:
        builder.take(key, (Traced.of(item.value, item.line),), text, _shown(item), item.line)
    else:
        builder.put(key, True, _shown(item), item.line)


def _shown(item: Directive) -> str:
    return f"#SBATCH {item.spelled}".rstrip()


def _run_name(builder: Builder, item: Directive) -> None:
    name = item.value
    if not RUN_NAME.fullmatch(name):
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100]
        if not name:
            why = "is no name for a run"
            builder.ask(_shown(item), item.value, line=item.line, why=why, key="run.name")
            return
    if name == item.value:
        note = ""
    else:
        note = f"{item.value!r} is no name for a run"
    builder.put("run.name", name, _shown(item), item.line, note=note)


def _time_limit(values: Sequence[Traced]) -> str:
    try:
        parse_time_limit(values[0].text)
    except ValueError as error:
        raise ConversionProblem(str(error)) from None
    return values[0].text


def _gpus(values: Sequence[Traced]) -> int:
    """GPUs of `--gres=gpu:8` or `--gpus-per-node=8`."""
    value = values[0].text
    count = gpus_of(value if value.startswith(("gpu:", "gres")) or "," in value else f"gpu:{value}")
    if count is None:
        raise ConversionProblem("it names no number of GPUs")
    return count


def _signal(values: Sequence[Traced]) -> int:
    """`B:USR1@600`: the seconds. Without a number Slurm sends it 60 seconds before the limit."""
    match = re.fullmatch(r"(?:[RB]+:)?(?:SIG)?([A-Z0-9]+)(?:@([0-9]{1,5}))?", values[0].text)
    if match is None:
        raise ConversionProblem("it is not a signal such as USR1@600")
    if match.group(1) not in {"USR1", "10"}:
        raise ConversionProblem(f"tr11 leaves on USR1, not on {match.group(1)}")
    return int(match.group(2) or 60)


_CONVERTED: Mapping[str, tuple[str, Converter]] = {
    "partition": ("slurm.partition", text),
    "account": ("slurm.account", text),
    "constraint": ("slurm.constraint", text),
    "qos": ("slurm.quality_of_service", text),
    "reservation": ("slurm.reservation", text),
    "hint": ("slurm.hint", text),
    "output": ("slurm.output", text),
    "comment": ("slurm.comment", text),
    "cpus-per-task": ("slurm.cpus_per_task", integer),
    "time": ("slurm.time_limit", _time_limit),
    "gres": ("slurm.gpus_per_node", _gpus),
    "gpus-per-node": ("slurm.gpus_per_node", _gpus),
    "exclude": ("slurm.exclude", lambda values: [values[0].text]),
    "mail-user": ("alerts.recipients", lambda values: values[0].text.split(",")),
    "signal": ("slurm.signal_seconds_before_limit", _signal),
}
