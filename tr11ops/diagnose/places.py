"""Which rank and node a line came from, by all that a launch tells of ranks and nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tr11ops.cluster.hostlist import HostlistError, expand
from tr11ops.diagnose.attribution.names import NodeNames, without_interface
from tr11ops.diagnose.diagnosis import QuotedLine
from tr11ops.diagnose.sighting import LogLaunch, Sighting, WorkerFailure
from tr11ops.diagnose.signature import Role

HEAD_LINES = 200
WITNESSES = 2
_WORKER_LOG = re.compile(r"(?:^|/)workers/(?P<node>[^/]+)/rank-(?P<rank>\d+)\.log$")
_FILE_NAME = re.compile(r"[/\\]")
_ANY_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class WorkerLog:
    """Whose log a file is, by its path."""

    node: str
    rank: int


def worker_of(file: str) -> WorkerLog | None:
    """The worker whose own log this is in a run directory, `workers/NODE/rank-R.log`; None for another file."""
    match = _WORKER_LOG.search(file)
    return WorkerLog(match["node"], int(match["rank"])) if match else None


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
        self._of_rank: dict[int, str] = {}
        for report in self._reports:
            if report.rank is not None and report.host:
                self._of_rank[report.rank] = report.host
        for one in launch.sightings:
            node = _node_named(one)
            if node and one.origin.rank is not None:
                self._of_rank.setdefault(one.origin.rank, node)
        self._has_launcher = bool(reports) or any(
            one.origin.local_rank is not None or one.signature.id.startswith("elastic-") for one in launch.sightings
        )
        self._exits = [one for one in launch.sightings if one.named.get("tasks") and _node_named(one)]

    def host_of(self, report: WorkerFailure) -> str | None:
        """The node of a report as the node list calls it, else as the report does."""
        if report.host is None or is_this_machine(report.host):
            return None
        return self._names.of_host(report.host) or without_interface(report.host)

    def peer_of(self, one: Sighting) -> str | None:
        """The other end that a line names, as the node list calls it, else as the line does."""
        peer = one.named.get("peer")
        if peer is None or is_this_machine(peer):
            return None
        return self._names.of_host(peer) or peer

    def quoted(self, one: Sighting, is_root: bool = False) -> QuotedLine:
        """The line with its place. For the root cause, what the launchers say of the first death counts too."""
        origin, named = one.origin, one.named
        writer = worker_of(one.file)
        rank = int(named["rank"]) if named.get("rank", "").isdigit() else origin.rank
        if writer is not None and rank is None:
            rank = writer.rank
        node = _node_named(one) or (self._of_rank.get(rank) if rank is not None else None)
        if node is None and writer is not None and writer.rank == rank:
            node = writer.node
        if node is None and origin.task is not None and origin.local_rank is not None:
            node, rank = self._by_task(origin.task, origin.local_rank, rank)
        if rank is None and not self._has_launcher:
            rank = origin.task if origin.task is not None else _only_task(named.get("tasks"))
        if is_root and rank is None:
            rank = self._spawned(one)
        if is_root and rank is None:
            report = self._report_of(origin.local_rank, node)
            if report is not None:
                rank, node = report.rank, node or report.host
        if node is None and rank is not None:
            node = self._by_number(rank)
        if node is None and is_root:
            node = self._by_first_exit(rank, origin.task)
        if node is None:
            node = self._by_file(one.file) or self._only_node()
        if node is not None and is_this_machine(node):
            node = None
        gpu = named.get("gpu") or origin.gpu
        if gpu is None and origin.local_rank is not None:
            gpu = str(origin.local_rank)
        return QuotedLine(
            one.file, one.line_number, one.text.strip(), rank, node, gpu, origin.stamp, one.signature.meaning
        )

    def without_witness(self, quoted: QuotedLine, alike: Sequence[Sighting]) -> QuotedLine:
        """Where several ranks say that a collective did not end: the one rank that says nothing, or none of them."""
        if len(_speakers(alike)) < WITNESSES:
            return quoted
        rank = self.silent_rank(alike)
        node = None if rank is None else self._of_rank.get(rank) or self._by_number(rank)
        return replace(quoted, rank=rank, node=node, gpu=None)

    def lost_node(self, told: Sequence[Sighting]) -> str | None:
        """The one node that the scheduler names as lost; None where it names none, or several.

        Who prints such a line, or whose tasks it ended, is not the lost one: `*** JOB 7 ON n1 ... DUE TO NODE FAILURE`.
        """
        named = {
            self._names.of_host(node) or node for one in told if "node" in one.named and (node := _node_named(one))
        }
        return named.pop() if len(named) == 1 else None

    def silent_rank(self, alike: Sequence[Sighting]) -> int | None:
        """The one rank that does not say what several others do; None where there is none, or more than one."""
        speakers = _speakers(alike)
        if len(speakers) < WITNESSES:
            return None
        silent = set(range(self._launch.world_size or max(speakers) + 1)) - speakers
        return silent.pop() if len(silent) == 1 else None

    def _spawned(self, one: Sighting) -> int | None:
        """The process that torch.multiprocessing names before its traceback."""
        heads = [
            head
            for head in self._launch.sightings
            if head.named.get("rank") and head.file == one.file and 0 < one.line_number - head.line_number < HEAD_LINES
        ]
        return int(heads[-1].named["rank"]) if heads else None

    def _report_of(self, local_rank: int | None, node: str | None) -> WorkerFailure | None:
        """The first failure that torchrun reports, where it can be that of this writer."""
        roots = [report for report in self._reports if report.is_root and report.exit_code not in (-15, None)]
        roots = [report for report in roots if local_rank is None or report.local_rank == local_rank]
        roots = [report for report in roots if node is None or report.host == node]
        return min(roots, key=lambda report: report.time or "~", default=None)

    def _only_node(self) -> str | None:
        return self._launch.nodes[0] if len(self._launch.nodes) == 1 else None

    def _by_file(self, file: str) -> str | None:
        """The node whose name the file has, such as `dmesg-n3.txt`, where the launch knows a node of that name."""
        known = {*self._launch.nodes, *self._of_rank.values()}
        known |= {report.host for report in self._reports if report.host}
        known |= {node for one in self._launch.sightings if (node := _node_named(one))}
        name = _FILE_NAME.split(file)[-1]
        found = {
            node for node in known if re.search(rf"(?<![\w-]){re.escape(node)}(?![\w-])|-{re.escape(node)}\.", name)
        }
        return found.pop() if len(found) == 1 else None

    def _by_number(self, rank: int) -> str | None:
        """By the node list, where ranks fill the nodes one after another."""
        nodes, world = self._launch.nodes, self._launch.world_size
        if not nodes or not world or world % len(nodes) or rank >= world:
            return None
        return nodes[rank // (world // len(nodes))]

    def _by_task(self, task: int, local_rank: int, rank: int | None) -> tuple[str | None, int | None]:
        """Node and rank by srun's label and torchrun's prefix, where each task is the launcher of a node."""
        nodes, world = self._launch.nodes, self._launch.world_size
        if task >= len(nodes):
            return None, rank
        if rank is None and world and world % len(nodes) == 0 and local_rank < world // len(nodes):
            rank = task * (world // len(nodes)) + local_rank
        return nodes[task], rank

    def _by_first_exit(self, rank: int | None, task: int | None) -> str | None:
        """The node of the first task that srun saw fail, where it is the only one or that of this rank."""
        nodes = self._launch.nodes
        if task is not None and task < len(nodes):
            return nodes[task]
        for one in self._exits:
            if rank is not None and rank in _numbers(one.named["tasks"]):
                return _node_named(one)
        firsts = {_node_named(one) for one in self._exits}
        if self._exits and (len(firsts) == 1 or self._exits[0].signature.role is not Role.CONSEQUENCE):
            return _node_named(self._exits[0])
        return None


def _node_named(one: Sighting) -> str | None:
    """The one node that a line names; None where it names several."""
    named = one.named.get("node")
    if named is None:
        return one.origin.node
    try:
        nodes = expand(named)
    except HostlistError:
        return named
    return nodes[0] if len(nodes) == 1 else None


def _speakers(alike: Sequence[Sighting]) -> set[int]:
    return {one.origin.rank for one in alike if one.origin.rank is not None}


def _only_task(tasks: str | None) -> int | None:
    return int(tasks) if tasks is not None and tasks.isdigit() else None


def _numbers(tasks: str) -> set[int]:
    found: set[int] = set()
    for part in tasks.split(","):
        ends = [int(number) for number in _ANY_NUMBER.findall(part)]
        if ends:
            found |= set(range(ends[0], min(ends[-1], ends[0] + 100_000) + 1))
    return found
