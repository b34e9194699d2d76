"""A Slurm site's own rules, as far as its commands tell them (arrays, jobs of one user, accounts,
its clock), and what it grants a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from tr11ops.base.errors import NewerFileError, SchedulerError, SchedulerUnreachable
from tr11ops.base.observed import replace_json
from tr11ops.cluster.slurm_command import (
    COMMAND_SECONDS,
    CommandResult,
    ask_about_site,
)
from tr11ops.cluster.slurm_text import limit_seconds, node_names, records, time_stamp
from trainer.contract.record import Record

SCHEMA = 1
# slurmdbd that is frozen keeps its clients for minutes; what it tells is not needed
ACCOUNTING_SECONDS = 8.0
_AS_OF = re.compile(r"^Configuration data as of (?P<time>\S+)", re.MULTILINE)
_ENFORCES_LIMITS = re.compile(r"\b(limits|safe|all)\b")
_FEDERATION = re.compile(r"^Federation:\s*(\S+)", re.MULTILINE)
_EXPEDITES = re.compile(r"\benable_expedited_requeue\b", re.IGNORECASE)
_SETTING = re.compile(r"^(?P<key>\w+)\s+= ?(?P<value>.*)$", re.MULTILINE)


class SiteRules(Record):
    """What a site allows. None: no such rule, or it is not told.

    `largest_array_size` is Slurm's MaxArraySize: indices must stay below it, and 0 or 1 switches
    arrays off. `jobs` are all that the controller keeps, `submitted_jobs` what one user may have
    queued and running. `clock` is the controller's time of its answer (seconds since the epoch).
    `job_completions` is the text file in which it notes each job that has ended
    (JobCompType=jobcomp/filetxt). `enforces_limits`: limits of accounts and QoS hold; `is_safe`:
    also for what a job could use at most. `expedites`: a job may ask to be started again at once when
    it loses a node (enable_expedited_requeue). `hidden`: what users are not shown of others, such as
    `jobs` and `nodes` (PrivateData). `federation`: its name, where the cluster is part of one.
    `untold`: why accounts, QoS and the limit of submitted
    jobs could not be asked; "" where they could.
    """

    largest_array_size: int | None = None
    jobs: int | None = None
    submitted_jobs: int | None = None
    version: str = ""
    clock: float | None = None
    accounts: tuple[str, ...] = ()
    qualities: tuple[str, ...] = ()
    job_completions: str = ""
    enforces_limits: bool = False
    is_safe: bool = False
    untold: str = ""
    expedites: bool = False
    hidden: frozenset[str] = frozenset()
    federation: str = ""

    @property
    def has_arrays(self) -> bool:
        return self.largest_array_size is None or self.largest_array_size > 1


def read_site(user: str, ask: Callable[..., CommandResult] = ask_about_site) -> SiteRules:
    """Ask `scontrol show config`, and `sacctmgr` where the site keeps accounts.

    Raises SchedulerUnreachable when the controller does not answer. An accounting database that
    does not answer within ACCOUNTING_SECONDS leaves accounts and their limits untold, and is not
    asked a second time.
    """

    def told(*arguments: str, seconds: float = COMMAND_SECONDS) -> str | None:
        result = ask(arguments, timeout_seconds=seconds)
        if result.returncode == 0:
            return result.stdout
        return None

    shown = told("scontrol", "show", "config")
    if shown is None:
        raise SchedulerUnreachable("scontrol show config failed: the controller does not answer")
    settings = {match["key"]: match["value"].strip() for match in _SETTING.finditer(shown)}
    accounts: tuple[str, ...] = ()
    qualities: tuple[str, ...] = ()
    limits: list[int] = []
    untold = ""
    if "slurmdbd" in settings.get("AccountingStorageType", ""):
        own = ("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account,qos,maxsubmit")
        every = ("sacctmgr", "-nP", "show", "qos", "format=name,maxsubmitpu")
        try:
            accounts, qualities, limits = _account_limits(
                told(*own, seconds=ACCOUNTING_SECONDS) or ""
            )
            limits += _quality_limits(told(*every, seconds=ACCOUNTING_SECONDS) or "", qualities)
        except SchedulerUnreachable as error:
            untold = str(error)
    federation = ""
    if "slurmdbd" in settings.get("AccountingStorageType", ""):  # which keeps them
        found = _FEDERATION.search(told("scontrol", "show", "federation") or "")
        federation = found[1] if found else ""
    enforced = settings.get("AccountingStorageEnforce", "")
    enforces_limits = bool(_ENFORCES_LIMITS.search(enforced))
    if not enforces_limits:
        limits = []
    return SiteRules(
        largest_array_size=_number(settings.get("MaxArraySize", "")),
        jobs=_number(settings.get("MaxJobCount", "")),
        submitted_jobs=min(limits, default=None),
        version=settings.get("SLURM_VERSION", ""),
        clock=config_time(shown),
        accounts=accounts,
        qualities=qualities,
        job_completions=settings.get("JobCompLoc", "")
        if "filetxt" in settings.get("JobCompType", "")
        else "",
        enforces_limits=enforces_limits and "slurmdbd" in settings.get("AccountingStorageType", ""),
        is_safe=bool(re.search(r"\b(safe|all)\b", enforced)),
        untold=untold,
        hidden=frozenset(re.findall(r"\w+", settings.get("PrivateData", "").lower())) - {"none"},
        federation=federation,
        expedites=_EXPEDITES.search(settings.get("SlurmctldParameters", "")) is not None,
    )


def config_time(shown: str) -> float | None:
    """The controller's time of its answer to `scontrol show config`; None where it does not say."""
    stamp = _AS_OF.search(shown)
    if stamp:
        return time_stamp(stamp["time"])
    return None


def keep_site(path: Path, rules: SiteRules) -> None:
    """Put on record what later looks need, so that they need not ask. What a newer tr11 wrote of
    the site stays.

    Raises OSError as the file system does.
    """
    kept = {"schema": SCHEMA, "version": rules.version, "job_completions": rules.job_completions}
    with suppress(NewerFileError):
        replace_json(path, kept, SCHEMA)


def _account_limits(text: str) -> tuple[tuple[str, ...], tuple[str, ...], list[int]]:
    """Accounts, QoS and limits of submitted jobs in the lines `account|qos,qos|limit`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    accounts = tuple(dict.fromkeys(account for account, _, _ in rows if account))
    qualities = tuple(
        dict.fromkeys(name for _, names, _ in rows for name in names.split(",") if name)
    )
    return accounts, qualities, [int(limit) for _, _, limit in rows if limit.isdigit()]


def _quality_limits(text: str, usable: Sequence[str]) -> list[int]:
    """Limits of submitted jobs a user in the lines `name|limit`, of the QoS that may be used."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 1]
    return [int(limit) for name, limit in rows if limit.isdigit() and name in usable]


def _number(text: str) -> int | None:
    match = re.match(r"\d+", text)
    if match:
        return int(match[0])
    return None


# What a Slurm site grants a run: its reservation, and what its account and QoS have left by the
# controller's count.

# an unlimited one is `cpu=N(12)`
_BUDGET = re.compile(r"(?P<resource>[^=,]+)=(?P<limit>\d+)\((?P<used>\d+)\)")
# `node=4(2)`; of one job `node=4`
_LIMIT = re.compile(r"(?P<resource>[^=,]+)=(?P<limit>\d+)(\(\d+\))?(?=,|$)")

_COUNT = re.compile(r"(\d+)(\(\d+\))?$")  # `3(1)` and `3`; one without a limit is `N(1)` or nothing

USUAL_QUALITY = "normal"  # that Slurm makes for each cluster
Level: TypeAlias = tuple[str, Mapping[str, str]]  # who owns a limit, and the record that has it


class Reservation(Record):
    """A reservation: when it begins and ends, in seconds since the epoch; None where that is not
    told.

    `nodes`: those that its jobs get; empty where it has none of its own, or its jobs may take
    others too.
    """

    name: str
    start: float | None
    end: float | None
    nodes: tuple[str, ...] = ()


class ResourceBudget(Record):
    """Minutes of a resource (`cpu`, `node`, `gres/gpu`) that an account or QoS may use in all, and
    has used.
    """

    owner: str
    resource: str
    limit: float
    used: float

    @property
    def left(self) -> float:
        return self.limit - self.used


class ResourceLimit(Record):
    """How much of a resource (`cpu`, `node`, `gres/gpu`) jobs of an account or QoS may have at one
    time.

    `job` and `queued job` stand for how many may run, and may be queued or run. `is_of_one_job`:
    each job by itself may have so much; else all of them together, or those of each "user" or
    "account" (`of_each`).
    """

    owner: str
    resource: str
    limit: int
    is_of_one_job: bool
    of_each: str = ""


class Grants(Record):
    """`reservation` is None where none was asked for, or there is none of that name.

    Limits are those that Slurm goes by: of the partition's QoS, else of the job's, else of the
    associations. A job's QoS with the flag OverPartQOS comes before the partition's.

    `longest_job`: seconds, None for no limit. `is_safe`: a job that asks for more than is left is
    not started either.
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
    partition: str | None = None,
    ask: Callable[..., CommandResult] = ask_about_site,
) -> Grants:
    """Ask `scontrol`; only for what the card names and the site enforces. None: the user's default,
    or the site's.

    Raises SchedulerError where it refuses, SchedulerUnreachable where it does not answer. An
    accounting database that is silent keeps the user's default QoS untold, and what a QoS gives
    each user and account: they are left out.
    """

    def show(*words: str) -> str:
        result = ask(["scontrol", "--oneliner", "show", *words])
        if result.returncode != 0:
            said = (result.stderr or result.stdout).strip().splitlines()
            raise SchedulerError(said[-1] if said else f"scontrol show {words[0]} failed")
        return result.stdout

    found = None
    if reservation:
        found = _reservation(show("reservation"), reservation)
    if not rules.enforces_limits:
        return Grants(found)
    text = show("assoc_mgr", "flags=assoc,qos")
    associations = list(_associations(text, user, account))
    wanted = quality or _default_quality(rules, user, associations, ask)
    of_partition = _partition_quality(show("partition"), partition)
    told = _told_qualities(rules, {of_partition, wanted}, ask)
    qualities = list(
        _qualities(
            text, of_partition, wanted, "OverPartQOS" in told.get(wanted, {}).get("Flags", "")
        )
    )
    with_told = [(owner, told.get(row["QOS"].partition("(")[0], {})) for owner, row in qualities]
    walls = [row.get("MaxWallPJ", "") for _, row in (*qualities, *associations)]
    longest = next((wall for text in walls if (wall := limit_seconds(text)) is not None), None)
    budgets = tuple(
        ResourceBudget(owner, match["resource"], float(match["limit"]), float(match["used"]))
        for owner, match in _of_group(qualities, associations, "GrpTRESMins", _BUDGET)
    )
    limits = tuple(
        ResourceLimit(owner, match["resource"], int(match["limit"]), is_of_one_job)
        for is_of_one_job, told in (
            (False, _of_group(qualities, associations, "GrpTRES", _LIMIT)),
            (True, _nearest((*qualities, *associations), "MaxTRESPJ")),
        )
        for owner, match in told
    )
    of_each = tuple(
        ResourceLimit(
            owner, match["resource"], limit=int(match["limit"]), is_of_one_job=False, of_each=each
        )
        for each, key in (("user", "MaxTRESPU"), ("account", "MaxTRESPA"))
        for owner, match in _nearest(with_told, key)
    )
    counts = tuple(_job_counts(qualities, associations, with_told))
    return Grants(
        found,
        budgets,
        longest_job=longest,
        is_safe=rules.is_safe,
        limits=(*limits, *of_each, *counts),
    )


def _reservation(text: str, name: str) -> Reservation | None:
    for row in records(text, "ReservationName"):
        if row["ReservationName"] == name:
            may_take_others = "FLEX" in row.get("Flags", "").split(",")
            nodes = () if may_take_others else node_names(row.get("Nodes", ""))
            return Reservation(
                name,
                time_stamp(row.get("StartTime", "")),
                time_stamp(row.get("EndTime", "")),
                nodes,
            )
    return None


def _associations(text: str, user: str, account: str | None) -> Iterator[Level]:
    """The associations above a user's jobs, from the user's own up to the root; each with its
    owner.
    """
    associations = records(text, "ClusterName")
    own = [row for row in associations if row.get("UserName", "").partition("(")[0] == user]
    own = [
        row
        for row in own
        if row.get("Account") == account or (account is None and row.get("DefAssoc") == "Yes")
    ]
    for row in own:
        yield f"user {user} of account {row['Account']}", row
    if own:
        wanted = own[0]["Account"]
    else:
        wanted = account or ""
    seen: set[str] = set()
    while wanted and wanted not in seen:
        seen.add(wanted)
        above = [
            row for row in associations if row.get("Account") == wanted and not row.get("UserName")
        ]
        for row in above:
            yield f"account {wanted}", row
        wanted = ""
        if above:
            wanted = above[0].get("ParentAccount", "").partition("(")[0]


def _qualities(text: str, of_partition: str, of_job: str, job_comes_first: bool) -> Iterator[Level]:
    """The partition's QoS and the job's, in the order in which Slurm goes by them."""
    rows = {row["QOS"].partition("(")[0]: row for row in records(text, "QOS")}
    found = []
    if of_partition in rows:
        found.append((f"QoS {of_partition} of the partition", rows[of_partition]))
    if of_job in rows and of_job != of_partition:
        found.insert(0 if job_comes_first else len(found), (f"QoS {of_job}", rows[of_job]))
    yield from found


_TOLD = (
    "Name",
    "Flags",
    "MaxTRESPU",
    "MaxTRESPA",
    "MaxJobsPU",
    "MaxJobsPA",
    "MaxSubmitPU",
    "MaxSubmitPA",
)


def _told_qualities(
    rules: SiteRules,
    names: Collection[str],
    ask: Callable[..., CommandResult],
) -> dict[str, Mapping[str, str]]:
    """What the accounting database alone tells of these QoS, by name; the controller shows it of
    those in use only.

    Empty where it does not say.
    """
    if rules.untold or not any(names):
        return {}
    asked = ("sacctmgr", "-nP", "show", "qos", f"format={','.join(_TOLD)}")
    try:
        result = ask(asked, timeout_seconds=ACCOUNTING_SECONDS)
    except SchedulerUnreachable:
        return {}
    rows = [
        line.split("|") for line in result.stdout.splitlines() if line.count("|") == len(_TOLD) - 1
    ]
    found = [dict(zip(_TOLD, row, strict=True)) for row in rows if result.returncode == 0]
    return {row["Name"]: row for row in found if row["Name"] in names}


def _job_counts(
    qualities: Sequence[Level], associations: Sequence[Level], with_told: Sequence[Level]
) -> Iterator[ResourceLimit]:
    """How many jobs may run, and be queued, at one time: by the first level that says one; of the
    accounts above, where no QoS says one for all together, by each.
    """
    for resource, group, own, per_user, per_account in (
        ("job", "GrpJobs", "MaxJobs", "MaxJobsPU", "MaxJobsPA"),
        ("queued job", "GrpSubmitJobs", "MaxSubmitJobs", "MaxSubmitPU", "MaxSubmitPA"),
    ):
        of_user = [*_counts(with_told, per_user), *_counts(associations[:1], own)]
        for told, each in (
            (list(_counts(qualities, group))[:1] or list(_counts(associations, group)), ""),
            (of_user[:1], "user"),
            (list(_counts(with_told, per_account))[:1], "account"),
        ):
            for owner, count in told:
                yield ResourceLimit(owner, resource, limit=count, is_of_one_job=False, of_each=each)


def _counts(levels: Sequence[Level], key: str) -> Iterator[tuple[str, int]]:
    for owner, row in levels:
        match = _COUNT.match(row.get(key, ""))
        if match is not None:
            yield owner, int(match[1])


def _partition_quality(text: str, name: str | None) -> str:
    """The QoS of a partition, or of the site's default one; "" where it has none."""
    for row in records(text, "PartitionName"):
        if row["PartitionName"] == name or (name is None and row.get("Default") == "YES"):
            found = row.get("QoS", "")
            if found == "N/A":
                return ""
            return found
    return ""


def _default_quality(
    rules: SiteRules,
    user: str,
    associations: Sequence[Level],
    ask: Callable[..., CommandResult],
) -> str:
    """The QoS that a job gets which asks for none: the association's default, its only one, or the
    site's `normal`.

    "" where it has none, or the accounting database does not say.
    """
    account = ""
    if associations:
        account = associations[0][1].get("Account", "")
    if rules.untold or not account:
        return ""
    whose = (f"user={user}", f"account={account}")
    asked = ("sacctmgr", "-nP", "show", "assoc", *whose, "format=partition,qos,defaultqos")
    try:
        result = ask(asked, timeout_seconds=ACCOUNTING_SECONDS)
    except SchedulerUnreachable:
        return ""
    rows = [line.split("|") for line in result.stdout.splitlines() if line.count("|") == 2]
    for partition, usable, default in rows:
        if partition or result.returncode != 0:
            continue
        names = usable.split(",")
        if default or len(names) == 1:
            return default or names[0]
        if USUAL_QUALITY in names:
            return USUAL_QUALITY
        return ""
    return ""


# ----------------------------------------------------------------------------- which of them count
def _of_group(
    qualities: Sequence[Level], associations: Sequence[Level], key: str, pattern: re.Pattern[str]
) -> Iterator[tuple[str, re.Match[str]]]:
    """What all jobs together may have: of each association above the job, unless a QoS says
    another; the first QoS that says one counts alone.
    """
    said = list(_nearest(qualities, key, pattern))
    by_quality = {match["resource"] for _, match in said}
    for owner, row in associations:
        for match in pattern.finditer(row.get(key, "")):
            if match["resource"] not in by_quality:
                yield owner, match
    yield from said


def _nearest(
    levels: Sequence[Level], key: str, pattern: re.Pattern[str] = _LIMIT
) -> Iterator[tuple[str, re.Match[str]]]:
    """For each resource the first level that limits it: what lies further up is not looked at."""
    seen: set[str] = set()
    for owner, row in levels:
        for match in pattern.finditer(row.get(key, "")):
            if match["resource"] not in seen:
                seen.add(match["resource"])
                yield owner, match
