"""What a launch left behind, and what is concluded from it: the values. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import field

from tr11ops.diagnose.answers import RestartAnswer
from tr11ops.diagnose.attribution.names import NodeNames, unshared
from tr11ops.diagnose.attribution.srun import SrunLine
from trainer.contract.attempt import EndMarker
from trainer.contract.record import Record


class Kind(StrEnum):
    """What sort of thing ended a launch. NODE, and no other, is cured by other nodes; be it proved
    or suspected.

    PORT: rank 0 could not listen where the others look for it; another port cures it, or who holds
    it leaves.
    """

    NODE = "node"
    CONFIGURATION = "configuration"
    STORAGE = "storage"
    NUMERICS = "numerics"
    SOFTWARE = "software"
    PORT = "port"
    OPERATOR = "operator"
    HEALTH_CHECK = "health-check"  # one that fails everywhere: cured by leaving it out
    UNKNOWN = "unknown"


# the fault of a launch whose trainer left with 0, unasked, before its last step
UNEXPLAINED = "unexplained end"
# the fault of a launch that a signal ended which no one on record had sent
OUTSIDE = "signal from outside"
MAY_BE_A_NODES = frozenset({Kind.NODE, Kind.PORT, Kind.UNKNOWN})


class Failure(Record):
    """One record of `failures/*.json`. `signal`: what ended a process that could not tell of it
    itself.

    `node`: the one at fault by the word of all ranks, which did the same at the same moment; ""
    where it is not told.
    """

    host: str
    rank: int | None
    time: float
    error: str
    signal: int | None = None
    node: str = ""

    def __str__(self) -> str:
        if self.rank is None:
            who = self.host
        else:
            who = f"rank {self.rank} on {self.host}"
        return f"{who}: {self.error}"


class MissedWorker(Record):
    """A worker that was gone. `time`: when its agent missed it, by that node's clock. `how` it
    ended.
    """

    rank: int
    time: float
    how: str


class NodeReport(Record):
    """What one node's agent recorded.

    `bad_checks`: `name: why` of each health check that condemned the node; `passed_checks`: names
    of those it passed. `addresses`: of its network interfaces. `first_missed`: of its failed
    workers, which was missed first. `port_holder`: who listened on rank 0's port when all that the
    launch had started there was gone; "" where no one did, or it cannot be seen. `memory`: what is
    known of the node's memory while the launch ran, in words.
    """

    node: str
    exit_status: int | None = None
    bad_checks: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    first_missed: MissedWorker | None = None
    port_holder: str = ""
    memory: str = ""
    passed_checks: tuple[str, ...] = ()

    @property
    def names_of_bad_checks(self) -> tuple[str, ...]:
        return tuple(check.partition(": ")[0] for check in self.bad_checks)


class AgentsWord(Record):
    """The agent's conclusion as it printed it, for where its record could not be written. `line`
    counts from 1.
    """

    kind: Kind
    summary: str
    file: str
    line: int


class Awaited(Record):
    """Whom the ranks of a launch waited for while it hung, by one way to look at them; `nodes`: may
    be several.
    """

    nodes: tuple[str, ...]
    said: str


def awaited_node(words: Iterable[Awaited]) -> tuple[str, ...]:
    """The one node that all ways to look name; empty where they name several, or none."""
    named = {node for word in words for node in word.nodes}
    if len(named) == 1:
        return tuple(named)
    return ()


class Evidence(Record):
    """All that one launch left behind.

    `states` are the nodes' flags as the scheduler gives them, None where it did not answer.
    `overdue`: the step did not end by itself after its first failure, and was ended.
    `worker_statuses`: exit status by global rank, as the launchers printed it. `ended_by`: who
    asked for an end at once, without saving. `unwritable`: why the batch host cannot write the run
    directory now. `lost`: machines without a scheduler whose agents are gone, and why. `ranks`:
    node by global rank. `derived_exit_code`: the highest exit status of the job's steps by the
    scheduler's records, 128 + n after signal n, None where there are none. `fixed_port`: rank 0's
    port, where the card fixes it. `failing_checks`: in words, by name, health checks that fail
    everywhere, so that they condemn no node. `reached`: the last iteration that this launch itself
    did, None where it did none or that is not known. `lost_host`: how it is known that the node of
    the batch script was lost, and its agent with it; "" where it was not. `agents_word`: what the
    launch's agent itself said in the log that it was. `awaited`: what was seen of a hang while it
    was there, and no iteration followed.
    """

    nodes: tuple[str, ...]
    status: int
    marker: EndMarker | None = None
    stopped_by: str = ""
    ended_by: str = ""
    unwritable: str = ""
    srun: tuple[SrunLine, ...] = ()
    failures: tuple[Failure, ...] = ()
    reports: tuple[NodeReport, ...] = ()
    states: Mapping[str, frozenset[str]] | None = None
    overdue: bool = False
    worker_statuses: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[int, str] = field(default_factory=dict)
    derived_exit_code: int | None = None
    fixed_port: int | None = None
    failing_checks: Mapping[str, str] = field(default_factory=dict)
    reached: int | None = None
    lost_host: str = ""
    agents_word: AgentsWord | None = None
    awaited: tuple[Awaited, ...] = ()

    @property
    def needs_step_code(self) -> bool:
        """Whether no line of srun, worker, health check or trainer tells of an end, so that the
        step's code counts.
        """
        told = self.srun or self.failures or self.marker or self.lost_host
        return not (told or any(one.bad_checks for one in self.reports))

    @property
    def names(self) -> NodeNames:
        """What the nodes are called in texts."""
        return NodeNames(
            self.nodes, self.ranks, unshared({one.node: one.addresses for one in self.reports})
        )


class Attribution(Record):
    """A conclusion. `blamed` are nodes that must not be used again; `suspects` may be at fault, and
    are only swapped. `avoided`: those of the suspects that are not used any more while enough
    others are free.

    The death or the error of one rank makes a suspect and no more: see `recurrence` for the second
    time.

    `fault` names the fault itself, free of hosts and numbers that change from time to time: two
    launches with the same `fault` on different nodes met the same fault, and the nodes are
    innocent. `rule`: which weight it has; "" where it is a fact and no guess. `restart`: whether a
    plain restart helps, where that was asked.
    """

    kind: Kind
    summary: str
    confidence: float
    blamed: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    fault: str = ""
    rule: str = ""
    restart: RestartAnswer | None = None
    avoided: tuple[str, ...] = ()

    @property
    def named_suspects(self) -> tuple[str, ...]:
        """The suspects, where a node may be at fault at all."""
        if self.kind in MAY_BE_A_NODES:
            return self.suspects
        return ()

    @property
    def is_no_nodes(self) -> bool:
        """Whether no node is at fault: what all of them share is, or an order."""
        return self.kind not in MAY_BE_A_NODES


class Conclusion(Record):
    """Who is to blame for the end of a launch. `by_agent`: the agent itself came to it, when the
    launch ended.

    `file`: the record or the log that says so; "" where there is none. `lines`: those of a record.
    """

    found: Attribution
    by_agent: bool
    file: str = ""
    lines: tuple[str, ...] = ()
    line: int = 1

    def line_number(self, text: str) -> int:
        """Which line of the file holds these words, from 1 on."""
        quoted = json.dumps(text)
        return next(
            (number for number, line in enumerate(self.lines, 1) if quoted in line), self.line
        )

    def document(self) -> Mapping[str, object]:
        """For --json."""
        found = self.found
        return {
            "by": "agent" if self.by_agent else "evidence",
            "kind": found.kind.value,
            "summary": found.summary,
            "confidence": round(found.confidence, 2),
            "blamed": list(found.blamed),
            "suspects": list(found.suspects),
            "evidence": list(found.evidence),
        }
