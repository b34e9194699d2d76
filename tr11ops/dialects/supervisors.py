"""What would start a training again beside tr11: launchers with restarts of their own, handlers that
requeue the job, loops. Recognised by the words of a command; pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from trainer.contract.record import Record

_RESTARTS = re.compile(r"--max[-_]restarts(?:=|$)")
_ELASTIC = re.compile(r"--nnodes=\d+:\d+|\d+:\d+")
# variable -> the program that takes it for the number of its own restarts
_RESTART_VARIABLES = {"PET_MAX_RESTARTS": "torchrun", "MAX_RESTARTS": "llamafactory-cli"}
_AGAIN = "starts a training again on its own, and so does tr11"
_STARTS = (
    r"\b(?:srun|torchrun|accelerate|deepspeed|llamafactory-cli|axolotl|python[\d.]*|\S+\.py)\b"
)


class Supervisor(Record):
    """One kind: `sign` is looked for in the command, its words parted by spaces."""

    name: str
    sign: str
    why: str


SUPERVISORS = (
    Supervisor(
        "ft_launcher",
        r"(?:^|[\s/])ft_launcher(?:\s|$)|\bnvidia_resiliency_ext\.fault_tolerance\b",
        f"{_AGAIN}: torchrun starts it without that",
    ),
    Supervisor(
        "--inprocess-restart",
        r"--inprocess[-_]restart(?:\s|$)",
        f"{_AGAIN}: leave it out",
    ),
    Supervisor(
        "elastic training",
        r"--enable_elastic_training\b|(?:^|[\s/])horovodrun\s.*--min-n(?:p|um-proc)\b",
        f"{_AGAIN}, on another number of nodes: give a fixed one",
    ),
    Supervisor(
        "docker",
        r"(?:^|[\s;&|/])(?:docker|podman)\s+run\b",
        "starts it outside the job, which could not end it then: name the image in [slurm.container]",
    ),
    Supervisor(
        "submitit",
        r"\bsubmitit\.core\._submit\b",
        "requeues the job from a handler of its own: start the program that it calls",
    ),
    Supervisor(
        "torchx",
        r"(?:^|[\s/])torchx\s+run\b",
        "submits a job of its own: start the program that it calls",
    ),
    Supervisor(
        "requeue",
        r"\bscontrol\s+requeue\w*|(?:^|[\s;&|/])sbatch\s",
        "queues the job again, and so does tr11 (--array): leave it out",
    ),
    Supervisor(
        "a loop",
        rf"\b(?:while|until)\b.*?\bdo\b.*{_STARTS}.*\bdone\b|\buntil\s.*{_STARTS}.*\bdo\b",
        f"{_AGAIN}: leave the loop out",
    ),
    Supervisor(
        "auto_requeue",
        r"\bauto[-_]requeue=(?i:true|1)\b",
        "lets it requeue the job itself: say false",
    ),
)
_PATTERNS = [(one, re.compile(one.sign, re.DOTALL)) for one in SUPERVISORS]


def supervisors_in(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Each of them in a command and its variables, in one line."""
    text = " ".join(words)
    for one, pattern in _PATTERNS:
        if pattern.search(text):
            yield f"{one.name} {one.why}"
    for place, word in enumerate(words):
        if _RESTARTS.match(word) and _number_behind(words, place) > 0:
            yield f"{word} starts workers again on its own, and so does tr11: leave it out"
        if word.startswith("--nnodes") and _ELASTIC.search(_value_behind(words, place)):
            yield f"{word}: the number of nodes may not change in a launch: give one number"
    for name, program in _RESTART_VARIABLES.items():
        value = environment.get(name, "")
        is_read = program in text or program == "torchrun"
        if is_read and value.isdecimal() and int(value) > 0:
            yield f"{name}={value} lets {program} start workers again on its own: leave it out"


def _value_behind(words: Sequence[str], place: int) -> str:
    """The value of an option, in its own word or in the next one."""
    _, has_value, value = words[place].partition("=")
    if has_value:
        return value
    return next(iter(words[place + 1 : place + 2]), "")


def _number_behind(words: Sequence[str], place: int) -> int:
    value = _value_behind(words, place)
    if value.isdecimal():
        return int(value)
    return 0
