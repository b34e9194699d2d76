"""Lines with which a launcher says that it never started a trainer: the next launch would meet the same.
Pure.

Only what is wrong with the command or the job's shape counts, not what passes by itself (a busy node, a
rendezvous that timed out). A file that is not there may be the fault of one node's file system: such a
line counts only as long as the run has never trained.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LONGEST = 500


class NeverBegan(NamedTuple):
    """One kind of refusal: what it means, and what to do. `may_be_node`: one node may see it alone."""

    pattern: str
    means: str
    fix: str = "correct trainer.command"
    may_be_node: bool = False


NOT_TAKEN = NeverBegan(
    # argparse, jsonargparse, click, and HfArgumentParser; `accelerate` has spaces in its own name
    r"^(?:(?!\w*Error: )(?:\S{1,200}|\S{1,40} <command> \[<args>\](?: \w+)?): )?[Ee]rror: "
    r"(?:[Uu]nrecognized arguments|the following arguments are required"
    r"|argument \S+: (?:invalid|expected)|ambiguous option|[Nn]o such option)"
    r"|Some specified arguments are not used by the HfArgumentParser",
    "the program does not accept how it was called",
)
_SHAPE = "make slurm.nodes, slurm.gpus_per_node and trainer.command agree"
KINDS = (
    NOT_TAKEN,
    NeverBegan(
        r"^\S*python[\d.]*: can't open file .*\[Errno 2\]"
        r"|^\[Errno 2\] No such file or directory: '[^']+\.(?:py|sh)'"
        r"|error: execve\(\): .*: No such file or directory"
        r"|execvp error on file .* \(No such file or directory\)"
        r"|^(?:mpirun|mpiexec|prterun) was unable to "
        r"(?:find the specified executable file|launch the specified application)",
        "what it is to start is not there",
        "correct trainer.command, or trainer.directory from which its paths count",
        may_be_node=True,
    ),
    NeverBegan(
        r"^(?:\S+: )?line \d+: \S+: command not found$"
        r"|^env: [‘'`]?[^:’']+[’']?: No such file or directory$"
        r"|(?:^|: )exec: \S+: not found$"
        r"|error: execve\(\): .*: Permission denied"
        r"|^\S*python[\d.]*: (?:No module named \S+|Error while finding module specification)"
        r"|RuntimeError: launcher '\w+' not installed",
        "the program that starts it is not installed there",
        "name the trainer's own interpreter in trainer.python, or load it in slurm.setup",
        may_be_node=True,
    ),
    NeverBegan(
        r"^srun: (?:unrecognized option|invalid option|option .* requires an argument|fatal: )"
        r"|^srun: error: (?:Unable to create step for job \S+: (?:More processors requested than permitted"
        r"|Invalid generic resource|Requested node configuration is not available"
        r"|Memory required by task is not available)"
        r"|Invalid .*(?:specification|argument))",
        "srun does not start it in this job",
        _SHAPE,
    ),
    NeverBegan(
        r"^There are not enough slots available in the system to satisfy the \d+"
        r"|^(?:mpirun|mpiexec|prterun) has detected an attempt to run as root",
        "mpirun does not start it in this job",
        _SHAPE,
    ),
    NeverBegan(
        r"^(?:ValueError|RuntimeError): (?:Unsupported nproc_per_node value"
        r"|The rendezvous backend '[^']+' is not registered"
        r"|Unable to proceed, no (?:GPU )?resources available"
        r"|hostname '[^']+' not found in hostfile|No slot '\d+' specified on host"
        r"|You need to (?:use at least|manually pass in)|`?--?num_processes`? must)",
        "its launcher does not start it on what this job has",
        _SHAPE,
    ),
)
_ANY = re.compile("|".join(f"(?:{kind.pattern})" for kind in KINDS))
_EACH = tuple((re.compile(kind.pattern), kind) for kind in KINDS)


def kind_of(line: str) -> NeverBegan | None:
    """What a line says of a trainer that never began; None where it says nothing of it."""
    if _ANY.search(line) is None:
        return None
    return next(kind for pattern, kind in _EACH if pattern.search(line))


def counts(line: str, has_trained: bool) -> str:
    """The line, where it ends a launch for good: `has_trained`: some launch of this run has trained, so
    that a file which is not there is one node's. Else "".
    """
    kind = kind_of(line)
    if kind is None or (kind.may_be_node and has_trained):
        return ""
    return line


def sentence(line: str, fix: str = "") -> str:
    """What such a line means, in one sentence with what to do: `fix`, else what is usual."""
    kind = kind_of(line) or NOT_TAKEN
    means = kind.means
    if kind is not NOT_TAKEN:
        means = f"the trainer never began: {means}"
    return f"{means}: {line.strip()[:_LONGEST]}; {fix or kind.fix}"
