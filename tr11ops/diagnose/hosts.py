"""Which hosts the head of a log names, which ranks run on them, and which host alone says
otherwise. Pure.

Launchers, checks before a start and NCCL print a line for each host. Of three hosts or more that
print the same, the one whose line alone tells of something missing is the odd one: a suspect, by
what stands before the first error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from tr11ops.base.errors import HostlistError
from tr11ops.cluster.arrays import expand
from tr11ops.diagnose.attribution.names import is_device
from tr11ops.diagnose.lines import plain
from tr11ops.diagnose.signature import FaultClass
from trainer.contract.record import Record

FEWEST_OTHERS = 2  # that agree
FEWEST_HOSTS = 2  # in a column of them
LONGEST = 300  # characters of a line that are looked at
LINES = 1500
FEWEST_WORDS = 2  # that lines of one kind begin with
MOST_RANKS = 1024  # on one host
STATUS = (  # what came out of a check
    r"(?:[Oo]k|OK|[Pp]ass(?:ed)?|PASS(?:ED)?|[Ff]ail(?:ed)?|FAIL(?:ED)?|slow|SLOW|warn|WARN|error|ERROR|bad|BAD)"
)
_HOST = r"[A-Za-z][A-Za-z0-9.-]*\d[A-Za-z0-9-]*"
_NAME = re.compile(rf"(?<![\w./:=@-]){_HOST}(?![\w/@=])")
_NO_HOST = re.compile(
    r"gpu[-_]?\d{1,2}|(?:rank|cuda|default|step|epoch|layer|stream|queue|stage|iter|iteration|mlx|numa|attempt|try|retry|seed|port|process|task|pid"
    r"|thread|shard|part|chunk|file|line|block|bucket|group|device|card|version|phase|level|trainer|actor|learner|rollout|replica|role)[-_]?\d[\w.-]*"
    r"|(?:ib|eth|ens|nvme|sd|dp|tp|pp|ep|cp|pg|fp|bf|int|float|sha|python|cpu|hfi|cxi|efa|rdmap|lo|md|utf|dev|bond"
    r"|torch|glibc|libc|nccl|top|p|cu|sm|rocm)\d[\w.-]*"
    r"|[vahb]\d00\w*|l40s?|g[bh]\d00|mi\d{3}\w?"
    r"|(?:step|epoch|iter|global|checkpoint|ckpt)[\w.-]*|[\w-]+\.(?:py|log|txt|json|yaml|so|pt|cc|cpp|cu|hpp|h)",
    re.IGNORECASE,
)
_COLUMN = re.compile(
    rf"^\s{{0,4}}(?:\[[a-z][\w-]{{0,15}}\] (?P<tagged>{_HOST})(?=[ :|])"
    rf"|[\[(<{{]?(?:(?:std)?(?:err|out) |\d{{1,6}}[@/])?(?P<host>{_HOST})"
    r"(?:\]\[|[/:@ ](?:local_?)?(?:rank ?)?\d{1,6}|[/: .](?:std)?(?:err|out))?"
    r"(?:[\]>)}]:?|:| +\|) *\S"
    rf"|(?P<bare>{_HOST}) +(?:[IWEFD]|INFO|WARN(?:ING)?|ERROR|DEBUG|FATAL|CRITICAL|[a-z][\w.-]{{1,30}}\[\d+\]:) +\S)"
)
_ROW = re.compile(  # of a table of hosts: what came out may stand before the name
    rf"^[\s|+*-]{{0,8}}(?:\W{{0,2}}{STATUS}\W{{1,8}})?(?P<host>{_HOST})(?:\s{{2,}}|\s*[|,;\t]\s*|\s+{STATUS}\b)\S?"
)
FEWEST_ROWS = 3  # of a table
_LIST = re.compile(
    r"\b(?:[Nn]odes?|[Nn]ode_?[Ll]ist|NODE_?LIST|[Hh]osts?|HOSTS?|SLURM_\w*NODELIST)\b(?:\(s\))?[ :=(\"']+"
    rf"(?P<list>(?:[A-Za-z][\w.-]*\[\d[\d,-]*\][\w.-]*|{_HOST})(?:, ?(?:[A-Za-z][\w.-]*\[\d[\d,-]*\][\w.-]*|{_HOST}))*)"
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_CLOCK = re.compile(
    r"\bt=\d+(?:\.\d+)?s? |[\[(<]{0,2}(?:\d{4}[-/]\d\d[-/]\d\d[T ])?\b\d\d:\d\d:\d\d[.,\dZ]*\]? ?"
)
_MISSING = re.compile(
    r"\b(?:FAIL(?:ED|URE|S)?|[Ff]ail(?:ed|s|ure)?|NOT|not|NO|[Mm]issing|MISSING|DOWN|[Dd]own|ERROR|[Ee]rror|[Uu]nhealthy"
    r"|[Dd]egraded|DEGRADED|BAD|bad|[Uu]navailable|[Uu]nreachable|refused|INACTIVE|[Ii]nactive|absent|mismatch|MISMATCH"
    r"|0 active|throttl\w+|[Ss]low|SLOW|stale|[Tt]imed? ?out|SKEW|corrupt\w*|full|100 ?%(?= ?(?:used|full|/)|$))(?!\w)"
)
# who waited for others in vain is a witness, and lacks nothing itself
_WAITED = re.compile(r"\bwait(?:ing|ed)? for\b|\b\d+/\d+ (?:clients|workers|nodes|peers) joined")
_WELL = re.compile(r"(?<!not )\b(?:ok|OK|[Pp]ass(?:ed)?|PASS(?:ED)?|healthy|mounted|reachable)\b")
_COUNTED = re.compile(
    r"(?<![\d.])\d+(?= (?:visible |active |healthy |neuron )?(?:gpus?|devices?|nics?|ports?|hcas?|cards?|links?)\b)",
    re.IGNORECASE,
)
_COUNTED_BEHIND = re.compile(r"\b(?:gpus?|nics?|hcas?|npus?)[=:] ?(\d+)(?![\d./])", re.IGNORECASE)
_LISTED = re.compile(rf"\W{{0,2}}(?P<host>{_HOST})\]?:? GPU \d{{1,2}}: ")
_SHARE = re.compile(r"\b(\d+)/(\d+)\b")
_THINGS: tuple[tuple[FaultClass, re.Pattern[str]], ...] = (
    (
        FaultClass.SLURM_AUTH,
        re.compile(r"\bmunge\w*|\bclock skew|\bskew\b|\bchrony|\bntp\b", re.IGNORECASE),
    ),
    (
        FaultClass.GPU_HARDWARE,
        re.compile(
            r"gemm|t?flops?\b|nvlink|nvswitch|\bgpus?\b|\becc\b|dcgm|\bhbm\b|nvidia|cuda|\bxid\b|thermal|\bsm clock"
            r"|driver|neuron|pcie|fabric ?manager|\bnpus?\b|rocm|amdgpu",
            re.IGNORECASE,
        ),
    ),
    (
        FaultClass.NCCL_NETWORK,
        re.compile(
            r"\bib\b|infiniband|\bmlx\w*|\bports?\b|rdma|\befa\b|\bnics?\b|\bhcas?\b|roce|\blinks?\b|\bnccl\b|\bgid\b"
            r"|\bmtu\b|bus ?bw|network|slingshot|\bcxi\w*",
            re.IGNORECASE,
        ),
    ),
    (
        FaultClass.STORAGE,
        re.compile(
            r"mount|\bdisk|nfs\b|lustre|gpfs|beegfs|\bspace\b|\bfs\b|/(?:data|scratch|mnt|shared|fsx|tmp|local)\w*|nvme",
            re.IGNORECASE,
        ),
    ),
    (FaultClass.HOST_OOM, re.compile(r"\bmemory\b|\bram\b|memlock", re.IGNORECASE)),
)
_OF_A_SERVER = re.compile(  # `10.1.1.3:/export 50T 49T 1T 98% /data`, `x on /data type wekafs (rw)`
    r"(?:^|\s)[\w.@,-]+:/\S*\s|\stype (?:nfs4?|lustre|gpfs|wekafs|beegfs|ceph|fuse\.\S+)\b"
)
_MOUNTED_AT = re.compile(r"(?:\son|\d%) (/[\w./-]+)")
AROUND = 30  # characters about the word that tells of what is missing
_ON_HOST = r"\b(?:on|host|hostname|node|nodename|running on|->|=>)[ =:]+(?:host |node )?"
_MAP = re.compile(r"\bmap\b|\branks?\b", re.IGNORECASE)
_MAPPED = re.compile(
    rf"\b(?P<first>\d+)-(?P<last>\d+)(?:[ :=]+| ?(?:on|at|@|->|=>) ?(?:node |host )?)(?P<host>{_HOST})\b(?=,|;|\s|$)"
)
_TO = r"(?:-|\.\.|to|through|\u2013)"
_RANKS_ON = (
    re.compile(
        rf"\branks? (?P<first>\d+) ?{_TO} ?(?P<last>\d+)\b[^)]{{0,12}}?(?:on|->|=>|:|=|at|@) ?(?:host |node )?"
        rf"(?P<host>{_HOST})\b"
    ),
    re.compile(
        rf"\b(?P<host>{_HOST})\b\W{{0,4}}(?:has |hosts |runs |gets |with |: ?)?(?:global )?ranks? ?[:=]? ?\[?"
        rf"(?P<first>\d+) ?{_TO} ?(?P<last>\d+)\b"
    ),
    re.compile(rf"\b[Rr]ank[ :=#]+(?P<first>\d+)\b.{{0,40}}?{_ON_HOST}(?P<host>{_HOST})\b"),
    re.compile(rf"\[[Rr]ank ?(?P<first>\d+)\].{{0,60}}?{_ON_HOST}(?P<host>{_HOST})\b"),
    re.compile(rf"\b[Rr]ank (?P<first>\d+)(?:, | \()(?P<host>{_HOST})\b"),
    re.compile(rf"\b(?P<host>{_HOST}) ?\((?P<first>\d+) ?{_TO} ?(?P<last>\d+)\)"),
    re.compile(rf"\[\d+,(?P<first>\d+)\]<std(?:err|out|diag)>: ?(?P<host>{_HOST}): "),
    re.compile(
        rf"(?:^|[\s|])(?P<host>{_HOST}):\d+:\d+ \[\d+\] NCCL INFO .{{0,80}}?\brank (?P<first>\d+) nranks \d+"
    ),
)

_ADDRESS = r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)"
_MACHINE = r"[A-Za-z][\w.-]*[A-Za-z0-9]"
_OF_ADDRESSES = (  # the machine of an address
    re.compile(
        rf"(?P<alias>{_ADDRESS}) ?(?:=|->|=>| is ) ?(?P<host>{_HOST}|[a-z][a-z0-9]*(?:-[a-z0-9]+)+)\b"
    ),
    re.compile(
        rf"(?<![\w.-])(?P<host>{_HOST}) ?(?:=|->|=>|has address |\(|\bip[ =:]+) ?(?P<alias>{_ADDRESS})"
    ),
    re.compile(
        rf"(?:^|[\s|])(?P<host>{_HOST}):\d+:\d+ (?:\[\d+\] )?NCCL INFO .{{0,60}}\bUsing .{{0,80}}?\b\w+:"
        rf"(?P<alias>{_ADDRESS})<\d+>"
    ),
    re.compile(
        rf"^(?P<alias>[a-z][\w.-]*)\s+\d+/\d+\s+[A-Z]\w+\s+\d+ .*?\s{_ADDRESS}\s+(?P<host>{_MACHINE})(?:\s|$)"
    ),
    re.compile(  # pods with their addresses, and with the machines of them
        rf"^[a-z][\w.-]*\s+\d+/\d+\s+[A-Z]\w+\s+\d+ .*?\s(?P<alias>{_ADDRESS})\s+(?!<none>)(?P<host>{_MACHINE})(?:\s|$)"
    ),
    re.compile(
        rf"^(?P<host>[a-z][\w.-]*)\s+\d+/\d+\s+[A-Z]\w+\s+\d+ .*?\s(?P<alias>{_ADDRESS})\s*$"
    ),
    re.compile(  # machines, as kubectl lists them
        rf"^(?P<host>{_HOST})\s+(?:Not)?Ready\S*\s.*?\sv\d\S*\s+(?P<alias>{_ADDRESS})(?:\s|$)"
    ),
    re.compile(rf"^(?P<alias>{_ADDRESS})\s+(?P<host>{_HOST})(?:\s+{_HOST})*\s*$"),  # /etc/hosts
    re.compile(rf"^{_MACHINE}\s+(?P<alias>{_ADDRESS})\s+(?P<host>{_HOST})\s*$"),
    re.compile(rf"\bNodeAddr=(?P<alias>{_ADDRESS}) NodeHostName=(?P<host>{_HOST})\b"),
)
_OF_PODS = (  # the machine on which a pod runs
    re.compile(  # a pod's own words
        rf"^\[pod/(?P<alias>[\w.-]+)[\]/].{{0,300}}\((?:node|host)[ =:](?P<host>{_MACHINE})\)"
    ),
    re.compile(
        rf"[Ss]uccessfully assigned (?:[\w.-]+/)?(?P<alias>[\w.-]+) to (?P<host>{_MACHINE})"
    ),
    re.compile(
        rf"\b(?:pod|worker|replica|task|container)[ /](?:[\w-]+/)?(?P<alias>[\w.-]+) (?:is |was |now )?"
        rf"(?:scheduled|placed|running|runs|bound|started|assigned) (?:on|to) (?:node |host )?(?P<host>{_MACHINE})"
    ),
    re.compile(
        r"(?<![\w.-])(?P<alias>[a-z][a-z0-9-]*-\d+) \((?:on |node[ =:]|host[ =:])?"
        r"(?P<host>[a-z][a-z0-9]*(?:-[a-z0-9]+)+)\)"
    ),
    re.compile(  # a row of pods without the columns between
        r"^(?P<alias>[a-z][\w.-]*)\s+\d+/\d+\s+[A-Z]\w+\s+(?:\d+\s+)?(?:\(\S+ ago\)\s+)?(?:[\dhdms]{2,12}\s+)?"
        rf"(?P<host>{_HOST}|[a-z][a-z0-9]*(?:-[a-z0-9]+)+)(?:\s+<none>)*\s*$"
    ),
)
DOTS = 3  # of an address
HEADING = re.compile(
    rf"^\s*(?:[-=#>*]{{1,8}} ?)?(?:(?i:job|run|task) #?[\d_]+ on (?:node |host )?({_HOST})\b"
    rf"|(?:.{{0,40}}\W)?(?:cron|crond|launcher|submitter) on (?:node |host )?({_HOST})\b"
    rf"|\W{{0,2}}(?:cron|launcher|submitter)\W{{1,3}}(?:on )?host ({_HOST})\b)"
)
PROMPT = re.compile(
    rf"^(?:\([\w.-]{{1,30}}\) ?)?\[?(?:[a-z_][\w.-]{{0,31}}@)?({_HOST})(?:[: ][~/\w.-]{{0,80}})?\]? ?[$#] "
)
_ASKED = (
    r"(?:sudo )?(?:nvidia-smi|rocm-smi|npu-smi|dmesg|journalctl|ibstat\w*|ibv_devinfo|dcgmi|ipmitool|lspci"
    r"|mlxlink|ethtool)"
)
OF_A_NODE = re.compile(  # what a node was asked
    rf"\b(?:ssh|srun|pdsh|clush|rsh|kubectl)\b.{{0,60}}?[ =@]({_HOST})\b.{{0,40}}?{_ASKED}\b"
    rf"|\b{_ASKED}\b.{{0,60}}?\b(?:on|from|of)(?: node| host)? ({_HOST})\b"
    rf"|\b({_HOST})\b\W{{1,6}}{_ASKED}\b"
    rf"|^\W{{0,8}}(?i:post-?mortem|diagnostics?|node|host)\b.{{0,24}}?\b({_HOST})\W{{0,8}}$|^={{2,}} ({_HOST}) ={{2,}}$"
)
_NAMED_BY_ADDRESS = re.compile(
    r"(?<![\w.-])ip-(\d{1,3})-(\d{1,3})-(\d{1,3})-(\d{1,3})(?![\w-])(?:\.[\w-]+)*"
)
_PAIR = re.compile(
    r"(?<![\w.-])(?P<alias>[a-z][a-z0-9-]*-\d+) (?P<host>[a-z][a-z0-9-]*-[a-z0-9-]*[a-z0-9])(?=,|;|$| \()"
)


class LogHead(Record, dict=True):
    """The first lines of a launch in a file. `first_line` counts from 1."""

    file: str
    first_line: int
    text: str

    @cached_property
    def lines(self) -> tuple[tuple[int, str], ...]:
        """(number, beginning) of the lines in which hosts are looked for."""
        beginnings = (line[:LONGEST] for line in self.text.split("\n")[:LINES])
        return tuple(enumerate(map(plain, beginnings), start=self.first_line))

    @cached_property
    def timeless(self) -> tuple[tuple[int, str], ...]:
        """The same without the times in them."""
        return tuple((number, _CLOCK.sub(" ", line)) for number, line in self.lines)


class OddHost(Record):
    """The host that alone says otherwise, and its line. `fault`: of what kind the thing is that it
    lacks.
    """

    host: str
    file: str
    line_number: int
    text: str
    fault: FaultClass


class _Report(Record):
    """A line that a host prints of itself. `shape`: without hosts and numbers; `start`: its first
    words.
    """

    host: str
    head: LogHead
    line_number: int
    text: str
    shape: str
    start: tuple[str, ...]


def hosts_in_columns(heads: Sequence[LogHead]) -> frozenset[str]:
    """The hosts that stand first in lines: names of one kind that differ in their number, `[w-1]`,
    `w-2:`, `w-3 |`.
    """
    return _first_in_lines(heads, _COLUMN, FEWEST_HOSTS)


def hosts_in_tables(heads: Sequence[LogHead]) -> frozenset[str]:
    """The hosts of which a table has a row each: three or more names of one kind, in rows of their
    own.
    """
    return _first_in_lines(heads, _ROW, FEWEST_ROWS)


def _first_in_lines(
    heads: Sequence[LogHead], pattern: re.Pattern[str], fewest: int
) -> frozenset[str]:
    """What the group of `pattern` that matched names, of kinds that have so many hosts."""
    of_kind: dict[str, set[str]] = {}
    for head in heads:
        for _, line in head.timeless:
            found = pattern.match(line)
            host = "" if found is None else found[found.lastgroup or 0]
            if host and _is_host(host):
                of_kind.setdefault(_NUMBER.sub("#", host), set()).add(host)
    return frozenset(host for hosts in of_kind.values() if len(hosts) >= fewest for host in hosts)


def hosts_in_lists(heads: Sequence[LogHead]) -> frozenset[str]:
    """The hosts that a launcher lists: `nodes n[1-4]`, `SLURM_NODELIST=n1,n2`."""
    found: set[str] = set()
    for head in heads:
        for _, line in head.lines:
            for match in _LIST.finditer(line):
                try:
                    names = expand(match["list"].replace(" ", ""))
                except HostlistError:
                    continue
                found |= {name for name in names if not is_device(name)}
    return frozenset(found)


def shared_mounts(heads: Sequence[LogHead]) -> frozenset[str]:
    """The paths at which mount or df say that a server's file system is."""
    of_servers = [
        line for head in heads for _, line in head.lines if _OF_A_SERVER.search(line) is not None
    ]
    return frozenset(path for line in of_servers for path in _MOUNTED_AT.findall(line))


def _is_host(name: str) -> bool:
    return _NO_HOST.fullmatch(name) is None and not is_device(name)


def hosts_of_ranks(heads: Sequence[LogHead]) -> Mapping[int, str]:
    """The host of each rank, where launchers say which ranks they start where; without ranks that
    two hosts claim.
    """
    found: dict[int, set[str]] = {}
    for head in heads:
        for _, line in head.lines:
            for ranks, host in _mapped_ranks(line):
                for rank in ranks:
                    found.setdefault(rank, set()).add(host)
            if "ank" not in line.lower() and "<std" not in line:
                continue
            for pattern in _RANKS_ON:
                for match in pattern.finditer(line):
                    for rank in _ranks_of(match):
                        found.setdefault(rank, set()).add(match["host"])
    return {
        rank: next(iter(hosts))
        for rank, hosts in found.items()
        if len(hosts) == 1 and _NO_HOST.fullmatch(next(iter(hosts))) is None
    }


def _mapped_ranks(line: str) -> Iterator[tuple[range, str]]:
    """The ranks of each host in a line that maps all: `npu-node map: 0-7 q1, 8-15 q2`."""
    if _MAP.search(line) is None:
        return
    for match in _MAPPED.finditer(line):
        yield (
            range(
                int(match["first"]), min(int(match["last"]), int(match["first"]) + MOST_RANKS) + 1
            ),
            match["host"],
        )


def _ranks_of(match: re.Match[str]) -> range:
    first = int(match["first"])
    last = match.groupdict().get("last")
    if last is None:
        return range(first, first + 1)
    return range(first, min(int(last), first + MOST_RANKS) + 1)


def machines_of(heads: Sequence[LogHead]) -> Mapping[str, str]:
    """The machine that an address or a pod's name means, where lines say so and none says
    otherwise.
    """
    found: dict[str, set[str]] = {}
    by_address: dict[str, str] = {}  # of a cloud that names its machines so
    for head in heads:
        for _, line in head.lines:
            for pattern in _alias_patterns(line):
                for match in pattern.finditer(line):
                    found.setdefault(match["alias"], set()).add(match["host"])
            if "ip-" not in line:
                continue
            for named in _NAMED_BY_ADDRESS.finditer(line):
                address = ".".join(named.groups())
                by_address[address] = max(by_address.get(address, ""), named[0], key=len)
    for address, host in by_address.items():
        found.setdefault(address, {host})
    single = {alias: next(iter(hosts)) for alias, hosts in found.items() if len(hosts) == 1}
    return {
        alias: host
        for alias, host in single.items()
        if host not in single and _NO_HOST.fullmatch(host) is None
    }


def _alias_patterns(line: str) -> Iterator[re.Pattern[str]]:
    """What may find in this line what a machine is called."""
    yield from _OF_PODS
    if line.count(".") >= DOTS:
        yield from _OF_ADDRESSES
    if "get pods" in line:
        yield _PAIR


def marked_hosts(heads: Sequence[LogHead], mark: re.Pattern[str]) -> list[tuple[str, int, str]]:
    """(file, line, host) of each line that says on which host that was printed which follows: a heading,
    or a shell's prompt.
    """
    found = []
    for head in heads:
        for number, line in head.timeless:
            match = mark.search(line)
            host = "" if match is None else next(filter(None, match.groups()))
            if host and _is_host(host):
                found.append((head.file, number, host))
    return found


def odd_host(heads: Sequence[LogHead]) -> OddHost | None:
    """The one host whose line alone tells of something that is missing; None where none does, or
    several do.
    """
    of_start: dict[tuple[str, ...], list[_Report]] = {}
    for head in heads:
        for report in _reports(head):
            of_start.setdefault(report.start, []).append(report)
    odd: dict[str, _Report] = {}
    for reports in of_start.values():
        found = _odd_one(reports)
        if found is not None:
            odd.setdefault(found.host, found)
    if not odd:
        return _of_fewer_gpus(heads)
    if len(odd) != 1:
        return None
    [report] = odd.values()
    return OddHost(
        host=report.host,
        file=report.head.file,
        line_number=report.line_number,
        text=report.text,
        fault=_fault_of(report.text),
    )


def _of_fewer_gpus(heads: Sequence[LogHead]) -> OddHost | None:
    """The one host that lists fewer GPUs, a line each, than all others, which list the same number."""
    listed: dict[str, list[OddHost]] = {}
    for head in heads:
        for (number, line), (_, timeless) in zip(head.lines, head.timeless, strict=True):
            match = _LISTED.match(timeless.strip())
            if match is not None:
                entry = OddHost(
                    host=match["host"],
                    file=head.file,
                    line_number=number,
                    text=line.strip(),
                    fault=FaultClass.GPU_HARDWARE,
                )
                listed.setdefault(match["host"], []).append(entry)
    counts = {host: len(lines) for host, lines in listed.items()}
    fewest = [host for host, count in counts.items() if count < max(counts.values())]
    if len(fewest) != 1 or len(set(counts.values())) != FEWEST_HOSTS:
        return None
    return listed[fewest[0]][-1]


def _reports(head: LogHead) -> Iterator[_Report]:
    for (number, line), (_, timeless) in zip(head.lines, head.timeless, strict=True):
        body = timeless.strip()
        names = [name for name in _NAME.finditer(body) if _is_host(name[0])]
        if len(names) != 1:  # a line of two hosts is of a link
            continue
        shape = _NUMBER.sub("#", body.replace(names[0][0], "@"))
        start = tuple(shape.split()[:FEWEST_WORDS])
        if len(start) == FEWEST_WORDS and "@" in shape[: len(" ".join(start)) + len("[@] :")]:
            yield _Report(
                names[0][0], head, line_number=number, text=line.strip(), shape=shape, start=start
            )


def _odd_one(reports: Sequence[_Report]) -> _Report | None:
    """The report of the one host that tells of something missing, or of another number, while all
    others agree.
    """
    of_host: dict[str, list[_Report]] = {}
    for report in reports:
        of_host.setdefault(report.host, []).append(report)
    if len(of_host) <= FEWEST_OTHERS:
        return None
    lacking = {host: said for host, own in of_host.items() if (said := _lacking(own)) is not None}
    if not lacking:
        unwell = {host: own[0] for host, own in of_host.items() if not _is_well(own)}
        lacking = unwell if len(unwell) == 1 else {}
    if len(lacking) == 1:
        [(host, said)] = lacking.items()
        if _WAITED.search(said.text) is None and _agree(
            [own for other, own in of_host.items() if other != host]
        ):
            return said
        return None
    if lacking:
        return None
    return _of_another_number(of_host)


def _lacking(own: Sequence[_Report]) -> _Report | None:
    return next((one for one in own if _MISSING.search(one.text) is not None), None)


def _is_well(own: Sequence[_Report]) -> bool:
    return any(_WELL.search(one.text) is not None for one in own)


def _agree(others: Sequence[Sequence[_Report]]) -> bool:
    """Whether all hosts print a line of one shape."""
    shapes = [{report.shape for report in own} for own in others]
    return bool(set.intersection(*shapes))


def _of_another_number(of_host: Mapping[str, Sequence[_Report]]) -> _Report | None:
    """The one that counts fewer GPUs, ports or links than all others, which count the same."""
    counts = {host: _counts(own) for host, own in of_host.items()}
    odd = []
    for host, own in counts.items():
        others = [count for other, count in counts.items() if other != host]
        if (
            own
            and all(count == others[0] for count in others)
            and len(own) == len(others[0])
            and own < others[0]
        ):
            odd.append(host)
    if len(odd) == 1:
        return of_host[odd[0]][0]
    return None


def _counts(own: Sequence[_Report]) -> tuple[int, ...]:
    """What a host counts, in the order of its first line."""
    text = own[0].text
    counted = [
        int(number) for pattern in (_COUNTED, _COUNTED_BEHIND) for number in pattern.findall(text)
    ]
    return tuple(
        counted + [int(part) for part, whole in _SHARE.findall(text) if int(part) <= int(whole)]
    )


def _fault_of(text: str) -> FaultClass:
    """Of what kind the thing is of which a line tells that it is missing: by the words about that
    one first.
    """
    missing = _MISSING.search(text)
    if missing is None:
        near = text
    else:
        near = text[max(0, missing.start() - AROUND) : missing.end() + AROUND]
    for part in (near, text):
        for fault, words in _THINGS:
            if words.search(part):
                return fault
    return FaultClass.UNKNOWN
