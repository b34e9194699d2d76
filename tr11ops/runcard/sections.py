"""The operation's sections of the run card, each key with its rule; `tr11ops.runcard.card` composes
them.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tr11ops.base.errors import ArraySyntaxError, HostlistError
from tr11ops.base.units import format_time_limit
from tr11ops.cluster.arrays import ArraySpec, expand, parse_array, task_numbers
from trainer.config.base import Days, Seconds
from trainer.config.card import CardError, Problem, Section

# The two small languages of Slurm's command line that a run card speaks: time limits and array
# specifications.

_TIME_FORMS = (
    re.compile(r"(?P<minutes>\d{1,9})"),
    re.compile(r"(?P<minutes>\d{1,9}):(?P<seconds>\d{1,2})"),
    re.compile(r"(?P<hours>\d{1,9}):(?P<minutes>\d{1,2}):(?P<seconds>\d{1,2})"),
    re.compile(
        r"(?P<days>\d{1,9})-(?P<hours>\d{1,2})(?::(?P<minutes>\d{1,2})(?::(?P<seconds>\d{1,2}))?)?"
    ),
)
_UNIT_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
_UNIT_WORDS = {
    "days": ("d", "day", "days"),
    "hours": ("h", "hr", "hrs", "hour", "hours"),
    "minutes": ("m", "min", "mins", "minute", "minutes"),
    "seconds": ("s", "sec", "secs", "second", "seconds"),
}
TIME_LIMIT_RULE = "a time limit is MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


def parse_time_limit(text: str) -> int:
    """Seconds of a Slurm time limit: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.

    Raises ValueError for anything else, for zero, and for `infinite`, which no array task may have.
    """
    for form in _TIME_FORMS:
        match = None
        if text.isascii():
            match = form.fullmatch(text.strip())
        if match:
            seconds = sum(
                _UNIT_SECONDS[unit] * int(value)
                for unit, value in match.groupdict().items()
                if value
            )
            if seconds == 0:
                raise ValueError("a time limit must be above zero")
            return seconds
    raise ValueError(TIME_LIMIT_RULE)


def suggested_time_limit(text: str) -> str | None:
    """What a span as people write it (20h, 2 days, 1h30m, 90 min) is as a time limit; None for
    anything else.
    """
    if len(text) <= 60:
        parts = re.findall(r"(\d{1,6}(?:\.\d{1,3})?)\s*([a-z]+)", text.strip().lower())
    else:
        parts = []
    plain = re.sub(r"[\s,]+|and", "", text.lower())
    seconds = 0.0
    for number, word in parts:
        unit = next((unit for unit in _UNIT_SECONDS if word in _UNIT_WORDS[unit]), None)
        if unit is None:
            return None
        seconds += float(number) * _UNIT_SECONDS[unit]
    if plain != "".join(number + word for number, word in parts) or seconds < 1:
        return None
    return format_time_limit(round(seconds))


def checked_time_limit(text: str) -> str:
    """A time limit as it is. Raises pydantic's error for what is none, with the way to write it."""
    try:
        parse_time_limit(text)
    except ValueError as error:
        fix = f'write "{suggested_time_limit(text) or "100:00:00"}"'
        raise PydanticCustomError(
            "time_limit", "{rule}", {"rule": str(error), "fix": fix}
        ) from None
    return text


TimeLimit = Annotated[str, AfterValidator(checked_time_limit)]


def parse_attempts(text: str) -> ArraySpec:
    """Read `--array` of a launch: `1-10`, `1-10%1`, `3`, `0,2,5-9:2`. `%1`, one task at a time, is
    appended.

    Raises CardError for what is no array, for a task that is named twice, and for any throttle but
    1: two tasks of one array would train on the same checkpoints.
    """

    def refuse(rule: str, fix: str) -> CardError:
        return CardError("command line", [Problem("--array", text, rule, fix)])

    body, percent, throttle = text.strip().partition("%")
    if percent and throttle != "1":
        raise refuse(
            "must run one task at a time, or two tasks train on the same checkpoints",
            f"use {body}%1",
        )
    try:
        array = parse_array(f"{body}%1")
    except ArraySyntaxError as error:
        raise refuse(error.rule, error.fix) from None
    if len(task_numbers(body)) != len(array):
        raise refuse("names a task twice", "give ranges that do not overlap")
    return array


# Sections of the run card for what runs in containers: under Slurm, and on Kubernetes.

Image = Annotated[str, Field(pattern=r"^[A-Za-z0-9/][A-Za-z0-9._:/@#+-]{0,400}$")]
Folder = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/@+-]{0,400}$")]
Mount = Annotated[
    str, Field(pattern=r"^/[A-Za-z0-9._/@+-]*(:/[A-Za-z0-9._/@+-]*(:(ro|rw))?)?$", max_length=1000)
]


RuntimeOption = Annotated[
    str, Field(pattern=r"^--?[A-Za-z][A-Za-z0-9-]*(=[A-Za-z0-9._/:,@+=-]*)?$", max_length=400)
]


class ContainerSection(Section):
    """[slurm.container]: the image that node agents and workers run in, or, with [trainer], the
    workers alone; the batch script and its agent stay outside.
    """

    image: Image
    """path of an image (.sif, .sqsh), or its address: docker://..., nvcr.io#nvidia/..."""

    runtime: Literal["pyxis", "apptainer"]
    """what runs it: Slurm's plug-in Pyxis, or Apptainer"""

    mounts: list[Mount] = Field(default=[])
    """folders of the node that are seen inside: HOST or HOST:INSIDE or HOST:INSIDE:ro"""

    options: list[RuntimeOption] = Field(default=[])
    """further words of the runtime's own, such as --writable-tmpfs"""

    python: str = Field(default="python3", pattern=r"^[A-Za-z0-9._/+-]{1,400}$")
    """the image's Python that has tr11; of no meaning with [trainer], whose own is trainer.python"""


class KubernetesSection(Section):
    """[kubernetes]: what `tr11 launch --scheduler kubernetes` needs beyond the rest of the card."""

    image: Image
    """container image with tr11, as container/Containerfile makes it"""

    volume_claim: str = Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")
    """PersistentVolumeClaim that all pods may write to (ReadWriteMany)"""

    mount: Folder
    """where the pods see it; run directory, data and tokenizer lie below"""

    namespace: str = Field(default="default", pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    """where the Job is made"""

    gpu_resource: str = Field(
        default="nvidia.com/gpu", pattern=r"^[a-z0-9.-]{1,200}/[A-Za-z0-9._-]{1,60}$"
    )
    """name of a GPU there"""


# safe on an #SBATCH line
Scale = Annotated[float, Field(gt=0, le=10**6)]
SomeTime = Annotated[float, Field(gt=0, le=86_400)]  # seconds
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9@._,&|:+*\[\]()-]{1,200}$")]
NodeList = Annotated[str, Field(pattern=r"^[A-Za-z0-9._,\[\]-]{1,2000}$")]


# What [slurm], [cron] and [backup] say of a job by the very names of a `BatchRequest`.
REQUEST_KEYS = (
    "gpus_per_node",
    "cpus_per_task",
    "partition",
    "account",
    "constraint",
    "reservation",
    "quality_of_service",
    "hint",
    "signal_seconds_before_limit",
)


def requested(section: Section) -> dict[str, Any]:
    """What a section of the card asks of the scheduler, for a `BatchRequest`; what it does not set
    is left out.
    """
    values = {key: getattr(section, key, None) for key in REQUEST_KEYS}
    return {key: value for key, value in values.items() if value is not None}


class SlurmSection(Section):
    """[slurm]: the allocation of one attempt, and what its shell does before the workers start."""

    nodes: int = Field(gt=0, le=100_000)
    """nodes of one attempt"""

    spare_nodes: int = Field(default=0, ge=0, le=10_000)
    """nodes held beyond these, so that a launch can go on without a bad one"""

    least_spare_nodes: int | None = Field(default=None, ge=0, le=10_000)
    """an attempt starts with no more than so many of them, rather than wait; default: all of them"""

    gpus_per_node: int = Field(default=0, ge=0, le=1024)
    """GPUs asked for on each node; 0 = none"""

    gpu_kind: str | None = Field(default=None, pattern=r"^[A-Za-z0-9 ._-]{1,60}$")
    """such as V100, where constraint and partition do not name it; for estimates of time"""

    gpu_memory_gb: float | None = Field(default=None, gt=0, le=10_000)
    """memory of each GPU in GiB, as its name has it (80); a card that cannot fit is then refused"""

    workers_per_node: int | None = Field(default=None, gt=0, le=1024)
    """trainer processes on each node; default: gpus_per_node"""

    partition: Word | None = None
    """default: the cluster's"""

    account: Word | None = None
    """who pays"""

    constraint: Word | None = None
    """node feature asked for"""

    reservation: Word | None = None
    """reservation to run in"""

    quality_of_service: Word | None = None
    """QoS"""

    hint: Literal["nomultithread", "multithread", "compute_bound", "memory_bound"] | None = None
    """Slurm's --hint: nomultithread gives physical cores only"""

    cpus_per_task: int = Field(default=1, gt=0, le=100_000)
    """cores for each node's one launcher"""

    time_limit: TimeLimit
    """of one attempt, as Slurm writes it: HH:MM:SS, D-HH:MM:SS, MM, MM:SS"""

    signal_seconds_before_limit: int | None = Field(default=None, gt=0, le=65535)
    """USR1 this long before the limit: save and leave; may come a minute early"""

    output: str = Field(default="%x-%A_%a.out", pattern=r"^[^\s]+$", max_length=1000)
    """the batch script's log, which it opens itself: %x name, %j job, %A array, %a task"""

    exclude: list[NodeList] = Field(default=[])
    """nodes never to be used, as names or ranges"""

    master_port: int | None = Field(default=None, ge=1024, le=65535)
    """rendezvous port on the first node; default: a free one"""

    setup: list[str] = Field(default=[])
    """shell lines run once, on the first node, before the agent; what they export reaches the
    workers of all nodes; `$` is left to that shell
    """

    setup_minutes: float = Field(default=10.0, gt=0, le=1440)
    """a set-up that takes longer is ended, and what is queued is held"""

    environment: dict[str, str] = Field(default={})
    """variables given to every worker; a secret as a reference, `NAME = "$NAME"`"""

    chain: Literal["auto", "array", "afterany", "self"] = "auto"
    """how the next attempt is queued: a job array, dependent jobs, or by the job itself"""

    comment: str = Field(default="", pattern=r"^[^\"'\\`$]{0,200}$")
    """shown by squeue; no quotes"""

    options: dict[str, str | int | bool] = Field(default={})
    """other options of sbatch, by their long names: `licenses = "scratch"`, `exclusive = true`,
    `gres = "gpu:a100:8"`; those that tr11 sets itself are refused. Checks and measurements take
    them too (but not switches, segment, nodelist), copies and periodic jobs licenses, wckey,
    nice and mcs-label
    """

    container: ContainerSection | None = None
    """run node agents and workers in an image"""

    @property
    def excluded_nodes(self) -> tuple[str, ...]:
        """The names in `exclude`; what is no host list is judged where the card is read."""
        names: list[str] = []
        for text in self.exclude:
            with suppress(HostlistError):
                names += expand(text)
        return tuple(names)

    @property
    def allocated_nodes(self) -> int:
        """Nodes that one attempt asks for: those that train and the spares."""
        return self.nodes + self.spare_nodes

    @property
    def spares_asked(self) -> str:
        """How many spares an attempt asks for, in words: "2", or "0 to 2"."""
        if self.least_nodes < self.allocated_nodes:
            return f"{self.least_spare_nodes} to {self.spare_nodes}"
        return str(self.spare_nodes)

    @property
    def least_nodes(self) -> int:
        """Nodes without which an attempt does not start: with all of its spares, where the card does
        not say with how few.
        """
        if self.least_spare_nodes is None:
            return self.allocated_nodes
        return self.nodes + self.least_spare_nodes

    @property
    def workers(self) -> int:
        """Trainer processes on each node; 0 when the card says neither workers nor GPUs (which is
        refused).
        """
        return self.workers_per_node or self.gpus_per_node


class CheckScript(Section):
    """[[resilience.check_scripts]]: a health check of the site's. A text alone is its `script`."""

    script: str
    """the executable"""

    arguments: list[str] = Field(default=[])
    """what it is called with"""

    dialect: Literal["tr11", "gcm", "nagios", "nhc"] = "tr11"
    """what its exit status means: of a script for tr11, a check of gcm, a Nagios plugin, LBNL NHC"""

    name: Word | None = None
    """it is `script:NAME` then; default: the executable's own name"""

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"script": value}
        return value

    @model_serializer(mode="wrap")
    def _as_text(self, serialize: SerializerFunctionWrapHandler) -> str | dict[str, Any]:
        """As it was written: the resolved card of a run with plain scripts stays what it was."""
        is_plain = self == CheckScript(script=self.script)
        return self.script if is_plain else serialize(self)


class ResilienceSection(Section):
    """[resilience]: how much of a fault is answered without a person, and when it is left to one."""

    launches_per_attempt: int = Field(default=20, gt=0, le=10_000)
    """most launches inside one allocation"""

    launches_without_progress: int = Field(default=3, gt=0, le=1000)
    """launches in a row that add no iteration before the attempt gives up"""

    most_tasks_per_fault: int = Field(default=2, gt=0, le=100)
    """array tasks that one fault may burn before the rest is held"""

    exclusion_days: Days = 14
    """how long an exclusion lasts before the node is checked again"""

    exclusion_cap_percent: float | None = Field(default=None, ge=0, le=100)
    """of the partition's nodes, never below the nodes needed; unset: 10, or half of what is idle"""

    shared_exclusions: str | None = Field(default=None, pattern=r"^/")
    """a folder in which the runs of a site tell each other of nodes: another run's suspicion counts"""

    check_scripts: list[CheckScript] = Field(default=[])
    """own health checks: executables that exit with 0 fine, 1 bad node, 3 unknown (text), or tables"""

    skip_checks: list[Word] = Field(default=[])
    """names of health checks that are not run"""

    check_seconds: float = Field(default=30, gt=0, le=3600)
    """time-out of each health check"""

    adapt_save_interval: bool = False
    """save more often than [checkpoint] says while the run's own faults and saves call for it; each
    launch decides, as far as the disk has room until backup.prune
    """

    end_within_seconds: float = Field(default=20, ge=1, le=3600)
    """after a failure no worker is left on any node after this time"""

    stop_within_minutes: float = Field(default=30, gt=0, le=10_080)
    """after this time a stop switch falls back to cancelling the job"""

    support_address: str | None = Field(default=None, pattern=r"^[^@\s,]+@[^@\s,]+$")
    """the site's support, for reports of bad nodes"""


class PermsSection(Section):
    """[perms]: who may read and write the files of the run, for `tr11 perms`."""

    group: Word | None = None
    """the Unix group that all files should have; default: that of each folder itself"""

    folders: list[str] = Field(default=[])
    """looked at too, beside the run directory: code, archives"""


class RehearsalSection(Section):
    """[rehearsal]: a stand-in takes the trainer's place, to try the operation on a twin. Times are
    the trainer's.
    """

    time_scale: Scale = 1
    """how many of these seconds pass in one second"""

    start_seconds: Seconds = 300
    """from the workers' start to the first load"""

    step_seconds: SomeTime = 105
    """one step"""

    save_seconds: Seconds = 40
    """one save"""

    evaluation_seconds: Seconds = 60
    """one batch of an evaluation"""

    bytes_per_rank: int = Field(default=4096, ge=256, le=2**30)
    """what each rank writes into a checkpoint"""

    collective_seconds: SomeTime = 60
    """how long ranks wait for one that hangs; not scaled"""

    log_scale: Scale | None = None
    """the log's seconds of a step are whole tenths of a second, at least one, times this; else
    measured
    """
