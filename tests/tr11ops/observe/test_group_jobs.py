"""The queue of the people who share a run: who belongs to the group, and what of the queue is
shown.
"""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.status_cases import NOW, pending, running
from tr11ops.base.errors import SchedulerUnreachable
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Job, JobState
from tr11ops.handover.start import (
    StartOfShift,
    group_jobs,
    group_of_folder,
    job_lines,
    members_among,
    read_group_jobs,
)

ME = pwd.getpwuid(os.getuid()).pw_name
MINE = grp.getgrgid(pwd.getpwuid(os.getuid()).pw_gid).gr_name
OURS = running(user="ana")
OTHER = replace(
    OURS,
    job_id="7",
    raw_id="7",
    array_id=None,
    task_id=None,
    name="other",
    user="bo",
    start_time=NOW - 60,
)
QUEUED = pending(user="bo", reason="Resources")
OVER = replace(OTHER, job_id="8", raw_id="8", state=JobState.COMPLETED)
STRANGE = replace(OTHER, job_id="9", raw_id="9", user="zoe")


def test_the_run_comes_first_then_what_runs_and_nothing_of_strangers() -> None:
    found = group_jobs((STRANGE, QUEUED, OVER, OTHER, OURS), {"bo"}, (OURS,), NOW)
    assert [(job.job, job.user, job.is_own) for job in found] == [
        (OURS.job_id, "ana", True), ("7", "bo", False), (QUEUED.job_id, "bo", False),
    ]  # fmt: skip
    lines = list(job_lines(StartOfShift((), "six", found)))
    assert lines[1] == "`7` of bo: other, RUNNING for 1 min, 48 nodes"
    assert lines[2].startswith(f"`{QUEUED.job_id}` of bo: ") and "PENDING (Resources)" in lines[2]


def test_a_member_is_one_of_the_list_or_has_it_as_the_first_group() -> None:
    assert members_among([ME, "no-such-user-of-this-machine"], MINE) == {ME}
    with pytest.raises(KeyError):
        members_among([ME], "no-such-group-of-this-machine")


class Edge:
    name = "slurm"

    def __init__(self, jobs: tuple[Job, ...] | None) -> None:
        self._jobs = jobs

    def jobs(self, name: str | None = None) -> tuple[Job, ...]:
        if self._jobs is None:
            raise SchedulerUnreachable("squeue did not answer")
        return self._jobs

    def nodes(self) -> tuple[()]:
        return ()


def test_what_cannot_be_read_is_unknown_and_never_none() -> None:
    for edge, group, why in (
        (Unknown("there is no scheduler here"), MINE, "there is no scheduler here"),
        (Edge(None), MINE, "squeue did not answer"),
        (Edge(()), "no-such-group-of-this-machine", "there is no group no-such-group"),
    ):
        found = read_group_jobs(edge, group, (), NOW)
        assert isinstance(found, Unknown) and why in found.why
        assert next(job_lines(StartOfShift((), group, None, found.why))).startswith("unknown: ")
    assert read_group_jobs(Edge((replace(OTHER, user=ME),)), MINE, (), NOW) != ()


def test_a_folder_says_whose_it_is(tmp_path: Path) -> None:
    assert group_of_folder(tmp_path) == grp.getgrgid(tmp_path.stat().st_gid).gr_name
