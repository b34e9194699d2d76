"""What a Slurm site grants a run: its reservation, and what its account and QoS have left by the controller's count."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tr11ops.cluster.base import SchedulerError
from tr11ops.cluster.site import SiteRules
from tr11ops.cluster.slurm_command import CommandRunner, ask_about_site, run_command
from tr11ops.cluster.slurm_text import limit_seconds, node_names, records, time_stamp

_BUDGET = re.compile(r"(?P<resource>[^=,]+)=(?P<limit>\d+)\((?P<used>\d+)\)")  # an unlimited one is `cpu=N(12)`
_LIMIT = re.compile(r"(?P<resource>[^=,]+)=(?P<limit>\d+)(\(\d+\))?(?=,|$)")  # `node=4(2)`; of one job `node=4`


@dataclass(frozen=True)
class Reservation:
    """A reservation: when it begins and ends, in seconds since the epoch; None where that is not told.

    `nodes`: those that its jobs get; empty where it has none of its own, or its jobs may take others too.
    """

    name: str
    start: float | None
    end: float | None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResourceBudget:
    """Minutes of a resource (`cpu`, `node`, `gres/gpu`) that an account or QoS may use in all, and has used."""

    owner: str
    resource: str
    limit: float
    used: float

    @property
    def left(self) -> float:
        return self.limit - self.used


@dataclass(frozen=True)
class ResourceLimit:
    """How much of a resource (`cpu`, `node`, `gres/gpu`) jobs of an account or QoS may have at one time.

    `is_of_one_job`: each job by itself may have so much; else all of them together.
    """

    owner: str
    resource: str
    limit: int
    is_of_one_job: bool


@dataclass(frozen=True)
class Grants:
    """`reservation` is None where none was asked for, or there is none of that name. Limits are the strictest ones.

    `longest_job`: seconds, None for no limit. `is_safe`: a job that asks for more than is left is not started either.
    """

    reservation: Reservation | None = None
    budgets: tuple[ResourceBudget, ...] = ()
    longest_job: int | None = None
    is_safe: bool = False
    limits: tuple[ResourceLimit, ...] = ()


def read_grants(
    rules: SiteRules,
    user: str,
    account: str | None,
    quality: str | None,
    reservation: str | None,
    environment: Mapping[str, str] | None = None,
    runner: CommandRunner = run_command,
) -> Grants:
    """Ask `scontrol`; only for what the card names and the site enforces. `account` None: the user's default.

    Raises SchedulerError where it refuses, SchedulerUnreachable where it does not answer.
    """

    def ask(*words: str) -> str:
        result = ask_about_site(["scontrol", "--oneliner", "show", *words], environment, runner)
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip().splitlines()
            raise SchedulerError(said[-1] if said else f"scontrol show {words[0]} failed")
        return result.stdout

    found = _reservation(ask("reservation"), reservation) if reservation else None
    if not rules.enforces_limits:
        return Grants(found)
    rows = list(_limits(ask("assoc_mgr", "flags=assoc,qos"), user, account, quality))
    walls = [wall for _, row in rows if (wall := limit_seconds(row.get("MaxWallPJ", ""))) is not None]
    budgets = tuple(
        ResourceBudget(owner, match["resource"], float(match["limit"]), float(match["used"]))
        for owner, row in rows
        for match in _BUDGET.finditer(row.get("GrpTRESMins", ""))
    )
    limits = tuple(
        ResourceLimit(owner, match["resource"], int(match["limit"]), key == "MaxTRESPJ")
        for owner, row in rows
        for key in ("GrpTRES", "MaxTRESPJ")
        for match in _LIMIT.finditer(row.get(key, ""))
    )
    return Grants(found, budgets, min(walls, default=None), rules.is_safe, limits)


def _reservation(text: str, name: str) -> Reservation | None:
    for row in records(text, "ReservationName"):
        if row["ReservationName"] == name:
            may_take_others = "FLEX" in row.get("Flags", "").split(",")
            nodes = () if may_take_others else node_names(row.get("Nodes", ""))
            return Reservation(name, time_stamp(row.get("StartTime", "")), time_stamp(row.get("EndTime", "")), nodes)
    return None


def _limits(text: str, user: str, account: str | None, quality: str | None) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The associations above a user's jobs, from the user's own up to the root, and the QoS; each with its owner."""
    associations = records(text, "ClusterName")
    own = [row for row in associations if row.get("UserName", "").partition("(")[0] == user]
    own = [row for row in own if row.get("Account") == account or (account is None and row.get("DefAssoc") == "Yes")]
    for row in own:
        yield f"user {user} of account {row['Account']}", row
    wanted = own[0]["Account"] if own else account or ""
    seen: set[str] = set()
    while wanted and wanted not in seen:
        seen.add(wanted)
        above = [row for row in associations if row.get("Account") == wanted and not row.get("UserName")]
        for row in above:
            yield f"account {wanted}", row
        wanted = above[0].get("ParentAccount", "").partition("(")[0] if above else ""
    for row in records(text, "QOS"):
        if quality is not None and row["QOS"].partition("(")[0] == quality:
            yield f"QoS {quality}", row
