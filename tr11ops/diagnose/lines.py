"""Where a log line comes from: the rank, node, GPU and time that its prefixes and its words name.
Pure.
"""

from __future__ import annotations

import calendar
import json
import re

from msgspec.structs import replace

from tr11ops.diagnose.attribution.names import is_device
from trainer.contract.record import Record

ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_=>()*+#-/][^\x1b]?|.?)"
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_DAY = r"(?P<date>\d{4}[-/]\d\d[-/]\d\d)[T _](?P<clock>\d\d:\d\d:\d\d(?:[.,]\d+)?)(?: ?(?:Z|[+-]\d\d:?\d\d)\b)?"
_GLOG = r"[IWEFCD](?P<month>\d\d)(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d\.\d+)"
_HOST = r"(?P<node>(?=[\w.-]*[A-Za-z]|\d+\.)\w[\w.-]*)"
_SERVICE = r"(?:python[\d.]*|bash|sh|docker\w*|containerd|torchrun)\[\d+\]: "
_OTHER_SERVICE = r"(?!kernel|systemd|slurm|earlyoom|nvidia|nv-|oom|kubelet|munged|dcgm)[\w./@-]{1,40}\[\d{1,7}\]: "
# what a node's own logs are called by who collects them: `prolog[n7]`, `[syslog 10.0.0.7]`
_COLLECTED = r"prolog|epilog|syslog|dmesg|journal|console|messages|nhc|dcgm|healthcheck"
_NAME_OR_ADDRESS = r"[A-Za-z][\w.-]*\d[\w-]*|\d{1,3}(?:\.\d{1,3}){3}"
_CONTAINER = r"(?:pytorch|tensorflow|trainer|train(?:ing)?|main|worker|master|launcher|node|mpi|app|ray-\w{2,12})"
_SINCE_BOOT = re.compile(r"\[ *\d{1,9}\.\d{3,6}\] ")  # the kernel's time since it began
_PREFIXES = (
    re.compile(rf"\s*\| {_DAY} \| "),  # CloudWatch's, as a table
    re.compile(
        r"[ \t]{1,32}(?=[\w.-]+:\d+:\d+ \[\d+\] |\[(?:rank|default)?\d+\]:|\[?\d{4}-\d\d-\d\d|srun: |slurmstepd: )"
    ),
    re.compile(
        rf"{_HOST}: (?:kern|user|daemon|syslog): +(?:emerg|alert|crit|err|warning|notice|info|debug): \[{_DAY}\]:?\s*"
    ),  # Talos'
    re.compile(r"<\d{1,3}>(?=[A-Z][a-z]{2} +\d)"),  # a priority of syslog's
    # SageMaker's
    re.compile(r"\[\d+,mpirank:(?P<rank>\d+),(?P<node>[\w.-]+)\]<std(?:err|out|diag)>: ?"),
    # a container's runtime
    re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) (?:stdout|stderr) [FP] "),
    re.compile(r"\[pod/(?P<node>[\w.-]{1,100})(?:/[\w./-]{1,100})?\] "),
    re.compile(r"\[(?:container|job|task)/[\w./-]{1,200}\] "),
    re.compile(
        r"(?:[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4})?\[\d+,(?P<rank>\d+)\]<std(?:err|out|diag)>: ?"
    ),  # MPI's
    # Open MPI 5's
    re.compile(r"\[prterun-(?P<node>[\w.-]+?)-\d+@\d+,(?P<rank>\d+)\]<std(?:err|out|diag)>: ?"),
    re.compile(
        r"\((?:[\w-]{1,60}, )?(?:rank=\d+, )?(?:[\w.]{1,60} )?pid=\d+(?:, ip=(?P<node>[\w.:]+))?\) "
    ),  # Ray's and SkyPilot's
    re.compile(
        r"\((?:raylet|gcs_server|autoscaler(?: \+[\dhms]{1,12})?)(?:, ip=(?P<node>[\w.:]+))?\) "
    ),
    re.compile(r"[\w.-]{1,80}@(?P<node>[\w.-]{1,64}) +\| "),  # docker swarm's
    re.compile(r"[\w.-]{1,60}(?:[-_]\d+|\d) +\| "),  # docker compose's
    # stern's
    re.compile(
        rf"(?=[a-z0-9-]*\d)[a-z][a-z0-9-]{{1,80}}-[a-z0-9]{{1,10}} (?:\u203a )?{_CONTAINER} (?=.)"
    ),
    # torchrun's: the role
    re.compile(r"\[(?!rank|node|host|gpu|cuda)[a-z]{3,12}(?P<local_rank>\d+)\]:"),
    re.compile(r"\[rank(?P<rank>\d+)\]:\s?"),
    re.compile(r"\[rank[:=] ?(?P<rank>\d+)\] "),  # Lightning's and Determined's
    _SINCE_BOOT,
    # pdsh's, where hosts are addresses
    re.compile(r"(?P<node>\d{1,3}(?:\.\d{1,3}){3}):(?: (?=\S)|(?=\[))"),
    re.compile(r"\[(?P<node>[a-z][\w.-]*\d)\] (?=\[?(?:rank|default)\d)"),
    re.compile(
        r"(?P<node>(?!rank|gpu\d|default)[a-z][\w.-]*\d[\w.-]*)(?<!-worker-\d)(?<!-master-\d):? "
        r"(?=\[(?:rank|default)\d)"
    ),  # a column of hosts
    re.compile(r"\[(?P<local_rank>\d+)\]:\s?(?=\S)"),
    re.compile(r"\s{0,4}(?P<task>\d{1,5}): "),
    re.compile(r"<(?P<task>\d{1,5})> (?=\S)"),  # prun's and mpiexec's
    re.compile(
        r"(?!(?:rank|gpu|cuda|python|layer|stage|worker|device|step|epoch|mlx|nvidia|pid)\w*\[)"
        r"(?P<node>[a-z][a-z-]*\d[\w-]*)\[(?P<rank>\d{1,6})\](?::| ) ?(?=\S)"
    ),  # a column of hosts and ranks
    re.compile(
        r"(?P<node>(?!rank|gpu\d|step|epoch)[a-z][a-z-]*\d[\w-]*) (?P<rank>\d{1,6}) +"
        r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL) "
    ),  # the same before a level
    re.compile(rf"\[{_DAY}\]:?\s*(?:\[(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)\]\s*)?"),
    re.compile(rf"{_DAY}[,:]?\s+"),
    # a time without a day, before NCCL's own
    re.compile(r"\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]? (?=[A-Za-z][\w.-]*:\d+:\d+ \[\d+\] )"),
    re.compile(
        rf"<\d{{1,3}}>1 {_DAY} (?P<node>\S+) (?=\S+ \S+ \S+ )(?:\S+ ){{3}}(?:- |\[.{{0,200}}?\] )?"
    ),  # RFC 5424's
    re.compile(
        r"(?P<mon>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +(?P<day>\d{1,2}) (?P<clock>\d\d:\d\d:\d\d)"
        rf" (?P<node>\S+) (?:(?=kernel:|systemd|slurm)|{_OTHER_SERVICE}|(?=[\w./-]{{1,40}}\[\d+\]: ))"
    ),
    # journald's, after its time
    re.compile(
        rf"(?:(?:journal|syslog|dmesg|messages|kern)[ :]{{1,2}})?{_HOST} (?=kernel: |systemd|slurm\w*\[|{_SERVICE})"
    ),
    re.compile(rf"(?:{_COLLECTED})\[(?P<node>{_NAME_OR_ADDRESS})\]:? (?=\S)"),
    re.compile(rf"\[(?:{_COLLECTED})[ :@](?P<node>{_NAME_OR_ADDRESS})\]:? (?=\S)"),
    re.compile(r"\[(?P<node>\d{1,3}(?:\.\d{1,3}){3})\]:? (?=\S)"),  # hosts that are addresses
    re.compile(_SERVICE),
    re.compile(rf"\[?{_GLOG}(?= )"),
    re.compile(r"\[[A-Z][a-z]{2} (?P<mon>\w{3}) +(?P<day>\d{1,2}) (?P<clock>[\d:]{8}) \d{4}\]\s*"),
    re.compile(rf"(?!\d{{4}}-){_HOST}:\d+:\d+ \[(?P<local_rank>\d+)\] "),  # NCCL's own
    re.compile(r"\[(?P<node>(?:node|host)-?[\w.-]*\d)\] "),
    re.compile(  # any name before a kernel's words
        rf"[\[(<](?P<node>{_NAME_OR_ADDRESS})[\])>]:? (?=(?:\[ *[\d.]+\] ?)?"
        r"(?:kernel: |NVRM: |nvidia-nv|mlx5_core |EDAC |mce: |pcieport ))"
    ),
    re.compile(  # the Neuron runtime's
        r"\d{4}-[A-Z][a-z]{2}-\d\d \d\d:\d\d:\d\d\.\d+ +\d+:\d+ +(?:ERROR|WARN\w*|INFO) +\w+:\w+ +(?=Nodename: )"
    ),
    re.compile(r"\[(?P<node>[A-Za-z][\w.-]*\d[\w.-]*):\d+\] "),  # MPI's
    re.compile(r"slurmstepd-(?P<node>[\w.-]+): (?:error: )?"),
    re.compile(r"slurm(?:d|stepd)\[(?P<node>[A-Za-z][\w.-]*)\]: "),
    re.compile(r"(?!tr11:)(?P<node>[a-z][a-z0-9-]*\d[a-z0-9.-]*): (?!task|error)"),  # pdsh's
    # Loki's labels
    re.compile(r'\{(?:[^}:]*?\b(?:host|node|hostname|node_name)="(?P<node>[\w.-]+)")?[^}:]*\} '),
    re.compile(
        r"(?P<node>(?!rank|gpu\d|step|epoch|layer)[a-z][a-z0-9-]*\d[\w-]*)(?::(?P<rank>\d{1,6}))?\| (?=\S)"
    ),  # a column of hosts, with ranks or without
    # a collector's, whatever it is: the rank's own comes behind it
    re.compile(r"\S.{0,160}? (?=\[rank[\d:=])"),
)
_NAMED_GROUP = re.compile(r"\(\?P<\w+>")
# One look for the first that fits: a line is read some thousand times, and hardly any has a prefix.
_ANY_PREFIX = re.compile(
    "|".join(
        f"(?P<at_{place}>{_NAMED_GROUP.sub('(?:', prefix.pattern)})"
        for place, prefix in enumerate(_PREFIXES)
    )
)
_MONTHS = {name: number for number, name in enumerate(calendar.month_abbr)}
_RANK = re.compile(
    r"\[[Rr]ank (?P<a>\d+)\]|\brank(?: +| ?[:=] ?)(?P<b>\d+)\b|\[rank(?P<c>\d+)(?:\]| @)|\bglobal_rank[ :=]+(?P<d>\d+)"
    r"|\b[Rr]ank_?(?:ID|id)[ :=]+(?P<e>\d+)\b|(?:^|\s)rank(?P<f>\d+): "
)
_LOCAL_RANK = re.compile(r"\blocal_rank(?:: ?|=)(\d+)")
_GPU = re.compile(r"\bGPU (?P<a>\d{1,2})\b|\bcuda:(?P<b>\d{1,2})\b|\bdevice[= ](?P<c>\d{1,2})\b")
_CLOCK = re.compile(_DAY)
_HOURS = re.compile(r"\d\d:\d")  # in whatever tells a time
_MESSAGE = re.compile(r'"(?:log|message|msg|MESSAGE|textPayload)"(?:: ?|=>)"((?:[^"\\]|\\.)*)')
# where the words are of which the message only names the kind
_DETAIL = re.compile(
    r'"(?:line|exc|exception|exc_info|error|err|reason|stack_trace|traceback)": ?"((?:[^"\\]|\\.){4,})'
)
# What Fluentd and Fluent Bit put before a record: its time and its tag.
_RECORD = re.compile(
    rf"(?:{_DAY}\S* (?:[+-]\d{{4}} )?[\w.*-]{{1,200}}: "
    r"|\[\d+\] [\w.*-]{1,200}: \[{1,2}[\d.]+, (?:\{\}\], )?)(?={)"
)
_JSON_NODE = re.compile(
    r'"(?:host|hostname|_HOSTNAME|node|node_name|nodename)": ?"(?P<node>[\w.:-]{1,120})"'
)
_JSON_OBJECT = re.compile(  # of which an event of Kubernetes tells
    r'"kind": ?"Node", ?"name": ?"(?P<node>[\w.:-]{1,120})"'
)
_JSON_RANK = re.compile(r'"(?:rank|global_rank)": ?"?(?P<rank>\d{1,7})\b')
_JSON_TIME = re.compile(rf'"(?:time|timestamp|@timestamp|ts)": ?"{_DAY}')
PREFIXES_AT_MOST = 8


class LineOrigin(Record):
    """Who wrote a line, and when; None where it does not say.

    `task` is srun's label. `time` is `MM-DD HH:MM:SS[.ffffff]`, which all forms of time stamps
    have.
    """

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    node: str | None = None
    gpu: str | None = None
    time: str | None = None
    year: str | None = None

    @property
    def stamp(self) -> str | None:
        """The time as a person reads it."""
        if self.time is None or self.year is None:
            return self.time
        return f"{self.year}-{self.time}"

    @property
    def writer(self) -> tuple[int | None, int | None, int | None, str | None]:
        """Lines of one writer belong together; those of several may alternate."""
        return self.rank, self.local_rank, self.task, self.node


def plain(text: str) -> str:
    """The text without escapes and other characters that a terminal obeys; tabs stay."""
    if not text.isprintable():
        return CONTROL.sub("", ESCAPE.sub("", text))
    return text


def split_prefixes(text: str) -> tuple[LineOrigin, str]:
    """What the prefixes of a plain line say, and the line without them; of a JSON record its fields
    and its message.
    """
    origin = LineOrigin()
    at = 0
    record = _RECORD.match(text)
    if record is not None:
        origin = _with(origin, record.groupdict())
        text = text[record.end() :]
    if text.startswith("{") and (message := _MESSAGE.search(text)) is not None:
        origin = _with(origin, _fields(text, message))
        detail = _DETAIL.search(text)
        text = _unescaped(message[1]).rstrip("\n")
        if detail is not None:
            text = f"{text}: {_unescaped(detail[1])}"
    is_kernels = False
    for _ in range(PREFIXES_AT_MOST):
        match = _prefix_at(text, at)
        if match is None or match.end() == at:
            break
        said = match.groupdict()
        if is_kernels:  # what stands first in a kernel's own words is a driver, or its device
            said.pop("node", None)
        origin = _with(origin, said)
        at = match.end()
        is_kernels = is_kernels or match.re is _SINCE_BOOT
    return origin, text[at:].lstrip() if at and text[at : at + 1] == "]" else text[at:]


def _prefix_at(text: str, at: int) -> re.Match[str] | None:
    """The first of the prefixes that stands there."""
    found = _ANY_PREFIX.match(text, at)
    if found is None:
        return None
    return _PREFIXES[int(str(found.lastgroup).removeprefix("at_"))].match(text, at)


def _fields(text: str, message: re.Match[str]) -> dict[str, str | None]:
    """Node, rank and time that a JSON record names beside its message."""
    beside = text[: message.start()] + text[message.end() :]
    found: dict[str, str | None] = {}
    for field in (_JSON_NODE, _JSON_OBJECT, _JSON_RANK, _JSON_TIME):
        match = field.search(beside)
        found |= {} if match is None else match.groupdict()
    return found


def _unescaped(text: str) -> str:
    """The words of a JSON string, whose end may have been cut."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


def full_origin(text: str) -> LineOrigin:
    """Also what the words of the line say: `rank 3`, `local_rank: 1`, a GPU, a time."""
    origin, _ = split_prefixes(text)
    if origin.rank is None and (rank := _RANK.search(text)):
        origin = replace(origin, rank=int(next(group for group in rank.groups() if group)))
    if origin.local_rank is None and (local := _LOCAL_RANK.search(text)):
        origin = replace(origin, local_rank=int(local[1]))
    if origin.time is None and (clock := _CLOCK.search(text)):
        origin = _with(origin, clock.groupdict())
    if gpu := _GPU.search(text):
        origin = replace(origin, gpu=next(group for group in gpu.groups() if group))
    return origin


def time_of(text: str) -> str | None:
    """The time of a line alone, as `full_origin` has it."""
    if _HOURS.search(text) is None:
        return None
    origin, _ = split_prefixes(text)
    if origin.time is None and (clock := _CLOCK.search(text)):
        return _time(clock.groupdict())[0]
    return origin.time


def _with(origin: LineOrigin, found: dict[str, str | None]) -> LineOrigin:
    time, year = _time(found)
    node = found.get("node")
    if node is not None and is_device(node):
        node = None
    return replace(
        origin,
        rank=_first(origin.rank, found.get("rank")),
        local_rank=_first(origin.local_rank, found.get("local_rank")),
        task=_first(origin.task, found.get("task")),
        node=origin.node or node,
        time=origin.time or time,
        year=origin.year or year,
    )


def _first(known: int | None, found: str | None) -> int | None:
    if known is not None or found is None:
        return known
    return int(found)


def _time(found: dict[str, str | None]) -> tuple[str | None, str | None]:
    clock = found.get("clock")
    if clock is None:
        return None, None
    clock = clock.replace(",", ".")
    if date := found.get("date"):
        return f"{date[5:7]}-{date[8:10]} {clock}", date[:4]
    month = found.get("month") or f"{_MONTHS.get(found.get('mon') or '', 0):02d}"
    return f"{month}-{int(found.get('day') or 0):02d} {clock}", None
