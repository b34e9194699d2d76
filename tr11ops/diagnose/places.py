"""Which rank and node a line came from, by all that a launch tells of ranks and nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from tr11ops.base.errors import HostlistError
from tr11ops.cluster.arrays import expand
from tr11ops.diagnose.attribution.names import (
    NodeNames,
    can_be_excluded,
    is_device,
    without_interface,
)
from tr11ops.diagnose.diagnosis import QuotedLine
from tr11ops.diagnose.hosts import (
    HEADING,
    OF_A_NODE,
    PROMPT,
    STATUS,
    hosts_in_columns,
    hosts_in_lists,
    hosts_in_tables,
    hosts_of_ranks,
    machines_of,
    marked_hosts,
    shared_mounts,
)
from tr11ops.diagnose.sighting import LogLaunch, Sighting, WorkerFailure
from tr11ops.diagnose.signature import NodeBlame, Role
from trainer.contract.record import Record

HEAD_LINES = 200
WITNESSES = 2
RANKS_OF_A_NODE = (4, 8, 16)
GPUS_OF_A_NODE = 8
FACTS = 2  # which say that a name is a machine's, before that machine may be excluded
SCHEDULERS = frozenset({"slurm", "slurm_reasons", "ray", "kubernetes"})
_ASKED_OF_NODES = frozenset({"asked", "cuda", "xid", "monitors"})
HEAD_CHARACTERS = 90  # in which the host of a line stands
_WORKER_LOG = re.compile(r"(?:^|/)workers/(?P<node>[^/]+)/rank-(?P<rank>\d+)\.log$")
_ANY_NUMBER = re.compile(r"\d+")
_DAEMONS = (
    r"(?:dmesg(?:-[A-Za-z](?=[._-]))?|syslog|kern(?:el)?(?:\.log)?|messages|journal(?:ctl)?|slurmd|console"
    r"|nvidia-bug-report|nvidia-smi|ipmi(?:tool)?(?:[-_]?sel)?|bmc|node-?monitor|(?:nv-?)?fabric-?manager)"
)
_DAEMON_LOG = re.compile(
    rf"(?:^|[._/-]){_DAEMONS}[._-](?!{_DAEMONS}[._-])(?P<node>(?=[\w-]*[A-Za-z])[A-Za-z0-9][\w-]*?\d[\w-]*?|[a-z]+-[a-z])"
    rf"(?:[._-]{_DAEMONS})?(?:\.(?:txt|log|out|err|gz|zst|bz2|xz|\d{{1,4}}))*$"
)
_NODES_LOG = re.compile(  # the same with the node first
    r"^(?!(?:job|attempt|run|case|test|gpu|step|rank|incident|slurm|log|part|file|day|try|exp|v)[-_]?\d)"
    rf"(?P<node>[A-Za-z][\w-]*?\d)(?:\.[A-Za-z][\w-]*)*?[._-]{_DAEMONS}"
    rf"(?:[._-]{_DAEMONS})?(?:\.(?:txt|log|out|err|gz|zst|bz2|xz|\d{{1,4}}))*$"
)
_OF_DAEMONS = re.compile(rf"(?:^|[._-]){_DAEMONS}(?:[._-]|$)")
_RANK_HOST = re.compile(  # `rank 37 (host n6, local 5)`, `rank 3 on n7`
    r"\b[Rr]ank ?#?(?P<rank>\d+)(?:,|\]:)? ?\(?(?:on |at |(?:running )?on (?:host|node) |(?:host|node|hostname)[ =:]+)"
    r"(?P<node>[A-Za-z][\w.-]*\d[\w-]*)"
)
_ASKED_FOR = re.compile(r"\bsrun\b.{0,200}?(?:--nodelist[= ]|\s-w ?)([\w.-]*\w)(?![\w.,\[-])")
_OWN_HOST = re.compile(
    r"(?<!to )(?<!from )(?<!by )(?<!peer )(?<!remote )\b(?:host|hostname|node|nodename)="
    r"(?P<node>[A-Za-z][\w.-]*\d[\w-]*)"
    r"|\"(?:host|hostname|node|nodename|node_name)\": ?\"(?P<field>[A-Za-z][\w.-]*\d[\w-]*)\""
)
_NAME = re.compile(r"(?<![\w./-])[A-Za-z0-9][\w.-]*(?<![.-])")
# what may stand before a host in a line: times, numbers, tags of ranks, levels, who watches it
_HEAD = re.compile(
    rf"(?:\[[a-z][\w-]{{0,15}}\] |[^A-Za-z]|\b(?:std)?(?:err|out)\b|(?<=\d)[TZ]|\b{STATUS}(?![A-Za-z])"
    r"|\bt(?==\d)|\b(?:rank|default|[Rr]ank|Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct"
    r"|Nov|Dec|INFO|WARNING|WARN|ERROR|DEBUG|CRITICAL|UTC|kernel|dmesg|epilog|prolog|nhc|NHC|dcgm\w*|node|host|health|check"
    r"|agent|monitor)(?![A-Za-z]))*"
)


class WorkerLog(Record):
    """Whose log a file is, by its path."""

    node: str
    rank: int


def worker_of(file: str) -> WorkerLog | None:
    """The worker whose own log this is in a run directory, `workers/NODE/rank-R.log`; None for
    another file.
    """
    match = _WORKER_LOG.search(file)
    if match:
        return WorkerLog(match["node"], int(match["rank"]))
    return None


def is_daemons_log(file: str) -> bool:
    """Whether a kernel or a daemon wrote this log, by its name."""
    return _OF_DAEMONS.search(file.rpartition("/")[2]) is not None


def node_of_daemons_log(file: str, nodes: Collection[str]) -> str | None:
    """The node whose kernel or daemon wrote this log, by its path: `dmesg-n7.txt`, `n7.syslog`;
    None for another log.

    `nodes`: names of nodes that are known otherwise; without one among them the name has to follow
    that of the daemon.
    """
    name = file.rpartition("/")[2]
    if not is_daemons_log(file):
        return None
    known = {
        node
        for node in nodes
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(node)}(?![A-Za-z0-9])", name)
    }
    if known:
        return max(known, key=len)
    match = _DAEMON_LOG.search(name) or _NODES_LOG.search(name)
    if match and not is_device(match["node"]):
        return match["node"]
    return None


_ITSELF = re.compile(  # names that every machine has for itself: of no node
    r"\[?(?:(?:ip6-)?localhost\d?(?:\.local\w*)?|(?:ip6-)?loopback|127(?:\.\d{1,3}){1,3}|0\.0\.0\.0|(?:::ffff:127[\d.]+)|::1?|0(?::0){6}:1)"
    r"\]?(?:[:<]\d+>?)?\.?",
    re.IGNORECASE,
)


def is_this_machine(name: str) -> bool:
    """Whether this is a name that each machine has for itself."""
    return _ITSELF.fullmatch(name) is not None


class LaunchPlaces:
    """Knows the nodes of the ranks of one launch, as far as its log names them."""

    def __init__(self, launch: LogLaunch, reports: Sequence[WorkerFailure]) -> None:
        self._launch = launch
        self._names = NodeNames(launch.nodes)
        self._reports = [replace(report, host=self.host_of(report)) for report in reports]
        self._hosts = {node for one in launch.sightings if (node := _node_named(one)) is not None}
        self._hosts |= {report.host for report in self._reports if report.host} | set(launch.nodes)
        self.in_columns = hosts_in_columns(launch.heads) | hosts_in_tables(launch.heads)
        self.machines = machines_of(launch.heads)
        in_lists = hosts_in_lists(launch.heads)
        self._hosts |= self.in_columns | in_lists
        self._sections = marked_hosts(launch.heads, HEADING)
        self._hosts = {host for host in self._hosts if not is_this_machine(host)}
        self._in_columns = self._hosts | {*self.machines.values()}
        self._of_rank: dict[int, str] = {}
        for report in self._reports:
            if report.rank is not None and report.host:
                self._of_rank[report.rank] = report.host
        for one in launch.sightings:
            for said in _RANK_HOST.finditer(one.text):
                self._of_rank.setdefault(int(said["rank"]), said["node"])
        for one in launch.sightings:
            node = self._own_node(one)
            # that is of whom it speaks
            if node and one.origin.rank is not None and "rank" not in one.named:
                self._of_rank.setdefault(one.origin.rank, node)
        of_ranks = hosts_of_ranks(launch.heads)
        for rank, host in of_ranks.items():
            self._of_rank.setdefault(rank, host)
        self._has_launcher = bool(reports) or any(
            one.origin.local_rank is not None or one.signature.id.startswith("elastic-")
            for one in launch.sightings
        )
        self._exits = [
            one for one in launch.sightings if one.named.get("tasks") and _node_named(one)
        ]
        by_scheduler = {
            one.named["node"]
            for one in launch.sightings
            if one.signature.family in SCHEDULERS and "node" in one.named
        }
        self._by_scheduler = {_short(node) for node in (*by_scheduler, *launch.nodes)}
        listed = {*launch.said_hosts, *self.machines.values(), *in_lists}
        listed |= {report.host for report in self._reports if report.host} | {*of_ranks.values()}
        self._listed = self._by_scheduler | {_short(node) for node in listed}
        columns = {one.origin.node for one in launch.sightings if one.origin.node} | self.in_columns
        columns |= {
            own["node"] or own["field"]
            for one in launch.sightings
            if (own := _OWN_HOST.search(one.text)) is not None
        }
        self._columns = {_short(node) for node in columns}

    def host_of(self, report: WorkerFailure) -> str | None:
        """The node of a report as the node list calls it, else as the report does."""
        if report.host is None or is_this_machine(report.host):
            return None
        return self._names.of_host(report.host) or without_interface(report.host)

    @property
    def has_other_nodes(self) -> bool:
        """Whether the launch is known to have more than one node."""
        return len(self._hosts) > 1

    def is_of_a_daemon(self, one: Sighting) -> bool:
        """Whether the kernel or a daemon of one node wrote the log of a line."""
        return node_of_daemons_log(one.file, self._hosts) is not None

    def says(self, words: re.Pattern[str]) -> bool:
        """Whether the head of a log has these words."""
        return any(words.search(head.text) is not None for head in self._launch.heads)

    def is_asked_for_alone(self, node: str | None) -> bool:
        """Whether commands of steps name this node as the one to run on, and no other: then none tells
        whether others would have done.
        """
        asked = {found for head in self._launch.heads for found in _ASKED_FOR.findall(head.text)}
        return asked == {node}

    def is_shared(self, path: str) -> bool:
        """Whether this path is below where the log says that a server's file system is mounted."""
        mounts = shared_mounts(self._launch.heads)
        return any(path == mount or path.startswith(f"{mount}/") for mount in mounts)

    def peer_of(self, one: Sighting) -> str | None:
        """The other end that a line names, as the node list calls it, else as the line does."""
        peer = one.named.get("peer")
        if peer is None or is_this_machine(peer):
            return None
        short = peer.split(".", maxsplit=1)[0]
        return self._names.of_host(peer) or (short if short in self._hosts else peer)

    def quoted(self, one: Sighting, is_root: bool = False) -> QuotedLine:
        """The line with its place. For the root cause, what the launchers say of the first death
        counts too.
        """
        origin = one.origin
        named = one.named
        writer = worker_of(one.file)
        rank = int(named["rank"]) if named.get("rank", "").isdigit() else origin.rank
        if writer is not None and rank is None:
            rank = writer.rank
        node = self._own_node(one) or (self._of_rank.get(rank) if rank is not None else None)
        is_guess = False
        if node is None and writer is not None and writer.rank == rank:
            node = writer.node
        is_own = node is not None and not self._names_another(one, node)
        if node is None and origin.task is not None and origin.local_rank is not None:
            node, rank = self._by_task(origin.task, origin.local_rank, rank)
        if rank is None and not self._has_launcher:
            rank = origin.task if origin.task is not None else _only_task(named.get("tasks"))
        if is_root and rank is None:
            rank = self._spawned(one)
        if is_root and rank is None:
            fitting = self._reports_of(origin.local_rank, node)
            if fitting:
                is_its_own = (
                    origin.local_rank is not None and len({report.host for report in fitting}) == 1
                )
                is_guess = node is None and self.has_other_nodes and not is_its_own
                rank = fitting[0].rank
                node = node or fitting[0].host
        if node is None:
            node = self._by_exit(rank, origin.task) or self._by_other_ranks(rank)
            is_own = node is not None and node == self._where_srun_saw(rank, origin.task)
        if node is None and is_root:
            node = self._by_first_exit()
            is_guess = (
                len(
                    {
                        _node_named(one)
                        for one in self._exits
                        if one.signature.role is not Role.CONSEQUENCE
                    }
                )
                > 1
            )
        if node is None:
            node = self._by_section(one)
            is_own = False
        if node is None and one.signature.family in _ASKED_OF_NODES:
            node = _above(one, marked_hosts(self._launch.heads, OF_A_NODE))
        if node is None:
            node = self._only_node()
            is_own = node is not None
        if node is None:
            node = self._host_of_file(one.file)
            is_own = is_guess = node is not None
            is_guess = is_guess and one.signature.blame is not NodeBlame.NODE
        if node is not None and is_this_machine(node):
            node = None
        gpu = named.get("gpu") or origin.gpu
        if gpu is None and origin.local_rank is not None:
            gpu = str(origin.local_rank)
        return QuotedLine(
            one.file,
            one.line_number,
            text=one.text.strip(),
            rank=rank,
            node=node,
            gpu=gpu,
            time=origin.stamp,
            meaning=one.signature.meaning,
            is_guess=is_guess and node is not None,
            is_own=is_own and node is not None,
        )

    def _own_node(self, one: Sighting) -> str | None:
        """The node that a line is of by its own words, by whose kernel wrote the log, or by a
        column of hosts in it.
        """
        said = _OWN_HOST.search(one.text)
        return (
            _node_named(one)
            or node_of_daemons_log(one.file, self._hosts)
            or self._in_column(one.text)
            or (said["node"] or said["field"] if said else None)
        )

    def _names_another(self, one: Sighting, node: str) -> bool:
        """Whether a line names a second host, so that it may be told by the one of the other."""
        others = {name for name in self._hosts if _short(name) != _short(node)}
        others -= {alias for alias, machine in self.machines.items() if machine == node}
        return any(name[0] in others for name in _NAME.finditer(one.text))

    def is_surely_host(self, node: str) -> bool:
        """Whether two independent facts say that this is a machine's name: a column of hosts in the
        log, a list of nodes or the scheduler's words, the name of a file.
        """
        is_listed = _short(node) in self._listed
        if _short(node) not in self._by_scheduler and not can_be_excluded(node, is_listed):
            return False
        names = {_short(node)}
        names |= {_short(alias) for alias, machine in self.machines.items() if machine == node}
        files = {one.file.rpartition("/")[2] for one in self._launch.sightings}
        is_file = any(
            re.search(rf"(?<![A-Za-z0-9]){re.escape(_short(node))}(?![A-Za-z0-9])", file.lower())
            for file in files
        )
        facts = (bool(names & self._columns), is_listed, is_file)
        return sum(facts) >= FACTS

    def _in_column(self, text: str) -> str | None:
        """The host that stands before the words of a line, where this launch names it elsewhere
        too.
        """
        for name in _NAME.finditer(text[:HEAD_CHARACTERS]):
            if name[0] in self._in_columns and _HEAD.fullmatch(text, 0, name.start()):
                return name[0]
        return None

    def without_witness(self, quoted: QuotedLine, alike: Sequence[Sighting]) -> QuotedLine:
        """Where several ranks say that a collective did not end: the one rank that says nothing, or
        none of them.
        """
        if len(_speakers(alike)) < WITNESSES:
            return quoted
        rank = self.silent_rank(alike)
        if rank is None:
            return replace(quoted, rank=None, node=None, gpu=None)
        return self.of_absent_rank(quoted, rank)

    def of_absent_rank(self, quoted: QuotedLine, rank: int) -> QuotedLine:
        """A line of others with the place of the rank for which they waited."""
        node = self._of_rank.get(rank) or self._by_other_ranks(rank)
        return replace(quoted, rank=rank, node=node, gpu=None, is_guess=False)

    def lost_node(self, told: Sequence[Sighting]) -> str | None:
        """The one node that the scheduler names as lost; None where it names none, or several.

        Who prints such a line, or whose tasks it ended, is not the lost one: `*** JOB 7 ON n1 ...
        DUE TO NODE FAILURE`.
        """
        named = {
            self._names.of_host(node) or node
            for one in told
            if "node" in one.named and (node := _node_named(one))
        }
        if len(named) == 1:
            return named.pop()
        return None

    def silent_rank(self, alike: Sequence[Sighting]) -> int | None:
        """The one rank that does not say what several others do; None where there is none, or more
        than one.
        """
        speakers = _speakers(alike)
        if len(speakers) < WITNESSES:
            return None
        silent = set(range(self._launch.world_size or max(speakers) + 1)) - speakers
        if len(silent) == 1:
            return silent.pop()
        return None

    def _spawned(self, one: Sighting) -> int | None:
        """The process that torch.multiprocessing names before its traceback."""
        heads = [
            head
            for head in self._launch.sightings
            if head.named.get("rank")
            and head.file == one.file
            and 0 < one.line_number - head.line_number < HEAD_LINES
        ]
        if heads:
            return int(heads[-1].named["rank"])
        return None

    def _reports_of(self, local_rank: int | None, node: str | None) -> list[WorkerFailure]:
        """The first failures that torchrun's launchers report, where they can be this writer's; the
        earliest first.
        """
        roots = [
            report
            for report in self._reports
            if report.is_root and report.exit_code not in (-15, None)
        ]
        roots = [
            report for report in roots if local_rank is None or report.local_rank == local_rank
        ]
        roots = [report for report in roots if node is None or report.host == node]
        return sorted(roots, key=lambda report: report.time or "~")

    def _only_node(self) -> str | None:
        """The node of a launch that has no other: by its list, or where the log names one and no
        rank of a second.
        """
        if self._launch.nodes:
            if len(self._launch.nodes) == 1:
                return self._launch.nodes[0]
            return None
        said = self._launch.said_hosts
        if self._is_small() and len(said) == 1 and self._hosts <= said:
            return min(said)
        return None

    def _host_of_file(self, file: str) -> str | None:
        """The host on which a file says that it was written, where each file says another one."""
        of_files = [hosts for hosts in self._launch.hosts_of_file.values() if hosts]
        own = self._launch.hosts_of_file.get(file, set())
        if len(own) == 1 and any(own.isdisjoint(other) for other in of_files):
            return min(own)
        return None

    def _is_small(self) -> bool:
        """Whether nothing says that the launch needs more than one node."""
        origins = [one.origin for one in self._launch.sightings]
        ranks = {origin.rank for origin in origins} | {origin.task for origin in origins}
        highest = max((rank for rank in ranks if rank is not None), default=0)
        workers = max(highest + 1, self._launch.world_size or 1)
        return len(self._launch.nodes) <= 1 and workers <= GPUS_OF_A_NODE

    def _by_number(self, rank: int) -> str | None:
        """By the node list, where ranks fill the nodes one after another."""
        nodes = self._launch.nodes
        world = self._launch.world_size
        if not nodes or not world or world % len(nodes) or rank >= world:
            return None
        return nodes[rank // (world // len(nodes))]

    def _by_other_ranks(self, rank: int | None) -> str | None:
        if rank is None:
            return None
        return self._by_number(rank) or self._by_blocks(rank)

    def _by_blocks(self, rank: int) -> str | None:
        """By the nodes of other ranks, where so many to a node agree with all that is known of
        them.
        """
        found = set()
        for size in RANKS_OF_A_NODE:
            nodes_of: dict[int, set[str]] = {}
            for known, node in self._of_rank.items():
                nodes_of.setdefault(known // size, set()).add(node)
            nodes = [node for block in nodes_of.values() for node in block]
            is_told = len(nodes_of) > 1  # of one block it is not known how long it is
            # a node a block, and no node in two
            if is_told and len(nodes) == len(nodes_of) == len(set(nodes)):
                found |= nodes_of.get(rank // size, set())
        if len(found) == 1:
            return found.pop()
        return None

    def _by_task(
        self, task: int, local_rank: int, rank: int | None
    ) -> tuple[str | None, int | None]:
        """Node and rank by srun's label and torchrun's prefix, where each task is the launcher of a
        node.
        """
        nodes = self._launch.nodes
        world = self._launch.world_size
        if task >= len(nodes):
            return None, rank
        if rank is None and world and world % len(nodes) == 0 and local_rank < world // len(nodes):
            rank = task * (world // len(nodes)) + local_rank
        return nodes[task], rank

    def _by_exit(self, rank: int | None, task: int | None) -> str | None:
        """The node on which srun saw this task end; without a launcher in it a task is a rank."""
        seen = self._where_srun_saw(rank, task)
        if seen is not None:
            return seen
        if task is None and not self._has_launcher:
            task = rank
        nodes = self._launch.nodes
        is_one_a_node = self._has_launcher or self._launch.world_size in {None, len(nodes)}
        if task is not None and task < len(nodes) and is_one_a_node:
            return nodes[task]
        return None

    def _where_srun_saw(self, rank: int | None, task: int | None) -> str | None:
        """The node on which srun says that this task ended; without a launcher in it a task is a
        rank.
        """
        if task is None and not self._has_launcher:
            task = rank
        for one in self._exits:
            if task is not None and task in _numbers(one.named["tasks"]):
                return _node_named(one)
        return None

    def shell_of(self, one: Sighting) -> str | None:
        """The host of the shell that was asked for what a line answers, by the prompt above it."""
        return _above(one, marked_hosts(self._launch.heads, PROMPT))

    def _by_section(self, one: Sighting) -> str | None:
        """The host of the part of a log in which a line stands, by the heading above it; None where
        the launch may have other nodes: then that is where its script ran, and no more.
        """
        if not self._is_small() or not self._hosts <= {host for _, _, host in self._sections}:
            return None
        return _above(one, self._sections)

    def _by_first_exit(self) -> str | None:
        """The node of the first task that srun saw fail: a guess, where several nodes are told of."""
        firsts = {_node_named(one) for one in self._exits}
        if self._exits and (
            len(firsts) == 1 or self._exits[0].signature.role is not Role.CONSEQUENCE
        ):
            return _node_named(self._exits[0])
        return None


def _above(one: Sighting, marks: Sequence[tuple[str, int, str]]) -> str | None:
    """The host that the last mark above a line names."""
    above = [host for file, at, host in marks if file == one.file and at < one.line_number]
    return next(reversed(above), None)


def _node_named(one: Sighting) -> str | None:
    """The one node that a line names; None where it names several."""
    named = one.named.get("node")
    if named is None or is_device(named):
        return one.origin.node
    try:
        nodes = expand(named)
    except HostlistError:
        return named
    if len(nodes) == 1:
        return nodes[0]
    return None


def _short(node: str) -> str:
    """A host's name without its domain; an address as it is."""
    if node[:1].isdigit():
        return node
    return node.partition(".")[0].lower()


def _speakers(alike: Sequence[Sighting]) -> set[int]:
    return {one.origin.rank for one in alike if one.origin.rank is not None}


def _only_task(tasks: str | None) -> int | None:
    if tasks is not None and tasks.isdigit():
        return int(tasks)
    return None


def _numbers(tasks: str) -> set[int]:
    found: set[int] = set()
    for part in tasks.split(","):
        ends = [int(number) for number in _ANY_NUMBER.findall(part)]
        if ends:
            found |= set(range(ends[0], min(ends[-1], ends[0] + 100_000) + 1))
    return found
