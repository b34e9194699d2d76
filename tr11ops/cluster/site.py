"""A Slurm site's own rules, as far as its commands tell them: arrays, jobs of one user, accounts,
its clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tr11ops.base.errors import NewerFileError, SchedulerUnreachable
from tr11ops.base.newer import replace_json
from tr11ops.cluster.slurm_command import (
    COMMAND_SECONDS,
    CommandRunner,
    ask_about_site,
    run_command,
)
from tr11ops.cluster.slurm_text import time_stamp
from trainer.contract.record import Record

SCHEMA = 1
# slurmdbd that is frozen keeps its clients for minutes; what it tells is not needed
ACCOUNTING_SECONDS = 8.0
_AS_OF = re.compile(r"^Configuration data as of (?P<time>\S+)", re.MULTILINE)
_ENFORCES_LIMITS = re.compile(r"\b(limits|safe|all)\b")
_SETTING = re.compile(r"^(?P<key>\w+)\s+= ?(?P<value>.*)$", re.MULTILINE)


class SiteRules(Record):
    """What a site allows. None: no such rule, or it is not told.

    `largest_array_size` is Slurm's MaxArraySize: indices must stay below it, and 0 or 1 switches
    arrays off. `jobs` are all that the controller keeps, `submitted_jobs` what one user may have
    queued and running. `clock` is the controller's time of its answer (seconds since the epoch).
    `job_completions` is the text file in which it notes each job that has ended
    (JobCompType=jobcomp/filetxt). `enforces_limits`: limits of accounts and QoS hold; `is_safe`:
    also for what a job could use at most. `untold`: why accounts, QoS and the limit of submitted
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

    @property
    def has_arrays(self) -> bool:
        return self.largest_array_size is None or self.largest_array_size > 1


def read_site(
    user: str,
    environment: Mapping[str, str] | None = None,
    runner: CommandRunner = run_command,
) -> SiteRules:
    """Ask `scontrol show config`, and `sacctmgr` where the site keeps accounts.

    Raises SchedulerUnreachable when the controller does not answer. An accounting database that
    does not answer within ACCOUNTING_SECONDS leaves accounts and their limits untold, and is not
    asked a second time.
    """

    def ask(*arguments: str, seconds: float = COMMAND_SECONDS) -> str | None:
        result = ask_about_site(arguments, environment, runner, seconds)
        if result.returncode == 0:
            return result.stdout
        return None

    shown = ask("scontrol", "show", "config")
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
            accounts, qualities, limits = _associations(ask(*own, seconds=ACCOUNTING_SECONDS) or "")
            limits += _quality_limits(ask(*every, seconds=ACCOUNTING_SECONDS) or "", qualities)
        except SchedulerUnreachable as error:
            untold = str(error)
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


def _associations(text: str) -> tuple[tuple[str, ...], tuple[str, ...], list[int]]:
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
