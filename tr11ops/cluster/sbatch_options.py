"""What is handed to sbatch: the options of a request, one list, which the command line and the
`#SBATCH` lines both are made of; among them those of a card that tr11 does not know; and what every
batch script is made with.
"""

from __future__ import annotations

import math
import re
import shlex
import site
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tr11ops.base.shipped import read_shipped
from tr11ops.base.units import counted, format_time_limit
from tr11ops.cluster.base import BatchRequest
from trainer.contract.record import Record

if TYPE_CHECKING:
    import jinja2


# ----------------------------------------------------------------------------- options that a card passes on
# Options of sbatch that tr11 does not know and passes through as a card gives them, and the
# generic resources (GPUs) that some of them ask for. Pure. An option is a name, as sbatch spells
# it without the dashes, and a value: text, or "" where it has none (`--exclusive`).
# Generic resources as Slurm writes them, of a node and of a request: `gpu:8`,
# `gpu:3090:8(S:0-1),nic:2`. Pure.
#
# An entry is NAME[:KIND][:COUNT]; a kind may begin with a digit (`3090`, MIG's `1g.10gb`), so that
# only the last part is a count. What stands in parentheses says where they are: sockets `(S:0-1)`,
# numbers `(IDX:0-3,6)`.

_WHERE = re.compile(r"\([^()]*\)")
_NONE = {"", "(null)", "N/A", "n/a"}


class Gres(Record):
    """One entry. `count` is None where it does not say how many: a request for one."""

    name: str
    kind: str = ""
    count: int | None = None


def parse_gres(text: str) -> tuple[Gres, ...]:
    """The entries of a list. Raises ValueError for one that is none."""
    if text.strip() in _NONE:
        return ()
    return tuple(_entry(entry) for entry in _WHERE.sub("", text).split(",") if entry.strip())


def _entry(text: str) -> Gres:
    name, *rest = text.strip().removeprefix("gres/").removeprefix("gres:").split(":")
    rest = [part for part in rest if part != "no_consume"]
    count = None
    if rest and rest[-1].isascii() and rest[-1].isdigit():
        count = int(rest.pop())
    if not name or len(rest) > 1 or not all(rest):
        raise ValueError(f"{text!r} is no generic resource: NAME[:KIND][:COUNT]")
    return Gres(name, rest[0] if rest else "", count)


def gpu_count(text: str) -> int:
    """GPUs of a node's list; MIG slices count each. An entry that cannot be read counts none."""
    found = 0
    for entry in _WHERE.sub("", text).split(","):
        try:
            found += sum(gres.count or 0 for gres in parse_gres(entry) if gres.name == "gpu")
        except ValueError:
            continue
    return found


def gpu_kind_of(gres: str) -> str:
    """The one kind of GPU that a list names: "a100" of `gpu:a100:8`; "" for none, or for several."""
    try:
        kinds = {entry.kind for entry in parse_gres(gres) if entry.name == "gpu" and entry.kind}
    except ValueError:
        return ""
    if len(kinds) == 1:
        return kinds.pop()
    return ""


Options = tuple[tuple[str, str], ...]

_NAME = re.compile(r"[a-z][a-z0-9-]{1,60}")
_SIZE = re.compile(r"([0-9]{1,12})([KMGT]?)B?", re.IGNORECASE)
_KIBIBYTES = {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}  # a number alone counts MiB
_OF_A_SUBMISSION = "it belongs to one submission"
_BREAKS = "tr11 could not follow the job"
_ONE_LAUNCHER = "each node gets one launcher"

# What sets each option that tr11 sets itself, or why none may be given.
TAKEN: Mapping[str, str] = {
    "job-name": "use run.name",
    "partition": "use slurm.partition",
    "account": "use slurm.account",
    "constraint": "use slurm.constraint",
    "reservation": "use slurm.reservation",
    "qos": "use slurm.quality_of_service",
    "nodes": "use slurm.nodes and slurm.spare_nodes",
    "cpus-per-task": "use slurm.cpus_per_task",
    "hint": "use slurm.hint",
    "time": "use slurm.time_limit",
    "signal": "use slurm.signal_seconds_before_limit",
    "output": "use slurm.output",
    "error": "slurm.output holds both",
    "exclude": "use slurm.exclude",
    "comment": "use slurm.comment",
    "export": "use slurm.environment",
    "export-file": "use slurm.environment",
    "get-user-env": "use slurm.environment",
    "chdir": "use run.directory",
    "array": f"{_OF_A_SUBMISSION}: tr11 launch --array",
    "dependency": f"{_OF_A_SUBMISSION}: tr11 launch --after",
    "begin": _OF_A_SUBMISSION,
    "hold": _OF_A_SUBMISSION,
    "ntasks": _ONE_LAUNCHER,
    "ntasks-per-node": _ONE_LAUNCHER,
    "ntasks-per-core": _ONE_LAUNCHER,
    "ntasks-per-gpu": _ONE_LAUNCHER,
    "ntasks-per-socket": _ONE_LAUNCHER,
    "gpus": "use slurm.gpus_per_node",
    "gpus-per-task": "use slurm.gpus_per_node",
    "gpus-per-socket": "use slurm.gpus_per_node",
    "requeue": "the next array task goes on in its place",
    "no-requeue": "tr11's jobs are never requeued",
    "no-kill": "use slurm.spare_nodes",
    "kill-on-invalid-dep": "an attempt waits for the end of others, however they end",
    "open-mode": "each attempt has its own file",
    "clusters": _BREAKS,
    "input": _BREAKS,
    "parsable": _BREAKS,
    "quiet": _BREAKS,
    "test-only": _BREAKS,
    "uid": _BREAKS,
    "gid": _BREAKS,
    "verbose": _BREAKS,
    "version": _BREAKS,
    "help": _BREAKS,
    "usage": _BREAKS,
    "wait": _BREAKS,
    "wrap": _BREAKS,
}
# What a job on chosen nodes has no use for: they say which nodes a job of many gets.
_WHICH_NODES = frozenset(
    {
        "contiguous",
        "consolidate-segments",
        "nodefile",
        "nodelist",
        "segment",
        "spread-job",
        "switches",
        "use-min-nodes",
    }
)
# Who does the work, and what every job of the run uses wherever it runs, such as the license of a
# file system.
_OF_EVERY_JOB = frozenset({"licenses", "mcs-label", "nice", "wckey"})


def options_of(table: Mapping[str, str | int | bool]) -> Options:
    """The options of a card's table; one that is `false` is left out."""
    found = []
    for name, value in table.items():
        if value is True:
            found.append((name, ""))
        elif value is not False:
            found.append((name, str(value)))
    return tuple(found)


def option_fault(name: str, value: str) -> tuple[str, str] | None:
    """Why an option may not be passed through (the rule, what to do); None when it may."""
    if not _NAME.fullmatch(name):
        return (
            "is not the long name of an option of sbatch",
            "write it as in `--licenses=scratch`, without the dashes",
        )
    if any(not character.isprintable() for character in value):
        return "holds characters that cannot stand in a batch script", "leave them out"
    # sbatch takes them for the whole name
    beginnings = (other for other in TAKEN if other.startswith(name))
    taken = name if name in TAKEN else next(beginnings, None)
    if taken is not None:
        return f"is not passed through: tr11 sees to --{taken} itself", TAKEN[taken]
    return None


def gpu_fault(options: Options, gpus: int) -> tuple[str, str, str] | None:
    """Why what the options say of GPUs does not fit the card's number of them (option, rule, what
    to do); else None.
    """
    named = [
        (name, count) for name, value in options if (count := _gpus_named(name, value)) is not None
    ]
    if len(named) > 1:
        return (
            named[1][0],
            "names the GPUs a second time",
            f"keep slurm.options.{named[0][0]} alone",
        )
    if named and named[0][1] != gpus:
        name, count = named[0]
        return (
            name,
            f"asks for {count} GPUs a node, slurm.gpus_per_node for {gpus}",
            "make the two equal",
        )
    return None


def segment_fault(options: Options, least: int, most: int) -> tuple[str, str] | None:
    """Why `segment`, the nodes of one block of the network that a job gets at a time, does not fit the
    job of `least` to `most` nodes (rule, what to do); None where it does, or none is asked for.
    """
    segment = dict(options).get("segment", "")
    if not segment.isdecimal() or not int(segment):
        return None
    asked = counted(most, "node")
    if least < most:
        return (
            f"is of whole blocks, and slurm.least_spare_nodes lets Slurm give {least} to {asked}",
            "leave one of the two out",
        )
    if most % int(segment) == 0:
        return None
    return (
        f"does not divide the {asked} of the job, spares included: Slurm gives whole segments",
        "make the nodes of the job a multiple of it",
    )


def gpus_of(gres: str) -> int | None:
    """GPUs of a `--gres` value: `gpu:8`, `gpu:a100:8`, `gpu:8,other:1`. None when it names none, or
    no number.
    """
    try:
        counts = [
            1 if entry.count is None else entry.count
            for entry in parse_gres(gres)
            if entry.name == "gpu"
        ]
    except ValueError:
        return None
    if counts:
        return sum(counts)
    return None


def gpu_kind_asked(options: Options) -> str:
    """The one kind of GPU that the options ask for; "" for none, or for several."""
    asked = dict(options)
    return gpu_kind_of(
        f"gpu:{asked['gpus-per-node']}" if "gpus-per-node" in asked else asked.get("gres", "")
    )


def with_gpus(options: Options, gpus: int) -> Options:
    """The options with `gpus` GPUs a node, of the kind that they name: in `gres`, or in
    `gpus-per-node`; 0: none.
    """
    if any(_gpus_named(name, value) == gpus for name, value in options):
        return options
    kind = ""
    by_node = False
    found = []
    for name, value in options:
        if name == "gpus-per-node":
            kind = gpu_kind_of(f"gpu:{value}")
            by_node = True
        elif name == "gres":
            kind = kind or gpu_kind_of(value)
            found.append(
                (name, ",".join(entry for entry in value.split(",") if gpus_of(entry) is None))
            )
        else:
            found.append((name, value))
    found = [(name, value) for name, value in found if name != "gres" or value]
    if not gpus:
        return tuple(found)
    if kind:
        wanted = f"{kind}:{gpus}"
    else:
        wanted = str(gpus)
    if by_node:
        return (*found, ("gpus-per-node", wanted))
    return _with_gres(tuple(found), f"gpu:{wanted}")


def memory_megabytes(options: Options) -> int:
    """Memory of each node that the options ask for, in MiB; 0 where they do not say it, or want all
    of it.
    """
    match = _SIZE.fullmatch(dict(options).get("mem", ""))
    if match is None:
        return 0
    return int(match[1]) * _KIBIBYTES[match[2].upper()] // 1024


def of_chosen_nodes(options: Options) -> Options:
    """Those for a job on nodes that are named: a check, a measurement."""
    return tuple((name, value) for name, value in options if name not in _WHICH_NODES)


def of_any_job(options: Options) -> Options:
    """Those for a job of the run wherever it runs: a copy, a periodic job."""
    return tuple((name, value) for name, value in options if name in _OF_EVERY_JOB)


def shown(options: Iterable[tuple[str, str]]) -> str:
    """For a person: `licenses=scratch, exclusive`."""
    return ", ".join(f"{name}={value}" if value else name for name, value in options)


def _gpus_named(name: str, value: str) -> int | None:
    if name == "gpus-per-node":
        return gpus_of(f"gpu:{value}")
    if name == "gres":
        return gpus_of(value)
    return None


def _with_gres(options: Options, entry: str) -> Options:
    """With one more entry in `gres`: given twice, sbatch takes the last one alone."""
    others = tuple((name, value) for name, value in options if name != "gres")
    before = dict(options).get("gres")
    return (("gres", f"{entry},{before}" if before else entry), *others)


# What every batch script is made with: where its code is, the template engine.


# ----------------------------------------------------------------------------- what sbatch is handed
def code_root() -> Path | None:
    """The folder that Python must be told of to import tr11; None where it is installed."""
    root = Path(__file__).resolve().parent.parent.parent
    installed = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
        *site.getsitepackages(),
    }
    if str(root) in {str(Path(path).resolve()) for path in installed if path}:
        return None
    return root


def script_engine() -> jinja2.Environment:
    """The template engine of scripts: what is undefined is an error, and `| sh` quotes a value for
    the shell.

    `{% include NAME %}` takes in a part that scripts share, from slurm/.
    """
    import jinja2  # here: most commands that may submit do not

    engine = jinja2.Environment(
        loader=jinja2.FunctionLoader(partial(read_shipped, "slurm")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    engine.filters["sh"] = shlex.quote
    return engine


EXPEDITE = "--requeue=expedite"  # of Slurm from 25.11 on, where the site has switched it on
FLAG = object()  # the value of an option that takes none


def _node_range(request: BatchRequest) -> str:
    """`--nodes`: a number, or from the least to the most, of which Slurm gives what is free."""
    if request.least < request.nodes:
        return f"{request.least}-{request.nodes}"
    return str(request.nodes)


def sbatch_options(request: BatchRequest) -> list[str]:
    """Every option that the request means, each as one argument of sbatch; the script itself is
    none of them.
    """
    early = request.signal_seconds_before_limit
    values: list[tuple[str, object]] = [
        ("job-name", request.name),
        ("partition", request.partition),
        ("account", request.account),
        ("constraint", request.constraint),
        ("reservation", request.reservation),
        ("qos", request.quality_of_service),
        ("nodes", _node_range(request)),
        # of a range Slurm (22.05) gives the least where the tasks are told: as many nodes as tasks
        ("ntasks-per-node", 1 if request.least == request.nodes else None),
        ("cpus-per-task", request.cpus_per_task),
        ("hint", request.hint),
        *_passed(request),
        ("mem", f"{request.memory_megabytes}M" if request.memory_megabytes else None),
        ("time", format_time_limit(request.time_limit_seconds)),
        ("signal", f"B:USR1@{early}" if early else None),
        ("chdir", request.working_directory),
        ("output", request.output),
        ("array", request.array),
        ("dependency", request.dependency),
        ("exclude", ",".join(request.exclude)),
        ("comment", request.comment),
        # a time of day would be ambiguous twice a year
        ("begin", None if request.begin is None else f"uts{math.ceil(request.begin)}"),
    ]
    # After a node's death the next array task starts in a second or two; a requeued one waits two
    # minutes.
    flags = [_requeue_flag(request)]
    if request.survives_nodes:
        flags.append("--no-kill")
    if request.hold:
        flags.append("--hold")
    return [
        *(argument_of(name, value) for name, value in values if value not in (None, "")),
        *flags,
    ]


def _requeue_flag(request: BatchRequest) -> str:
    """Whether the job goes back into the queue when it loses a node."""
    if request.expedites:
        return EXPEDITE
    if request.requeue:
        return "--requeue"
    return "--no-requeue"


def _passed(request: BatchRequest) -> Iterator[tuple[str, object]]:
    """What the card passes through, with the GPUs that tr11 asks for; a job's own memory outweighs
    the card's.
    """
    for name, value in with_gpus(request.options, request.gpus_per_node):
        if name != "mem" or not request.memory_megabytes:
            yield name, value or FLAG


def argument_of(name: str, value: object) -> str:
    """An option as one argument of sbatch."""
    if value is FLAG:
        return f"--{name}"
    return f"--{name}={value}"


def script_options(request: BatchRequest) -> list[str]:
    """The same for the script's `#SBATCH` lines: `sbatch` alone does with the script what tr11
    does.
    """
    return [quoted_argument(option) for option in sbatch_options(request)]


def quoted_argument(argument: str) -> str:
    """One argument of sbatch as it stands on an `#SBATCH` or `#SCRON` line."""
    name, equals, value = argument.partition("=")
    if equals:
        return f"{name}={quoted_option(value)}"
    return name


def quoted_option(text: str) -> str:
    """Quoted for Slurm's reader of `#SBATCH` lines: plain words as they are, others in double
    quotes.
    """
    if text and all(character.isalnum() or character in "@%_+=:,./-[]&|*()" for character in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
