"""How attempts are queued under a site's rules, how far they go, and whether each one's end leaves
time enough.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.tr11ops.launch.run_inputs import write_card
from tr11ops.base.errors import SchedulerUnreachable
from tr11ops.cluster.site import ACCOUNTING_SECONDS, SiteRules, read_site
from tr11ops.cluster.slurm_command import CommandResult
from tr11ops.launch.margins import margin_checks, read_history, room_before_limit
from tr11ops.launch.queue_checks import choose_chain, coverage_of, site_checks
from tr11ops.runcard.card import RunCard, load_card, shipped_folder
from tr11ops.runcard.check import Level
from tr11ops.runcard.estimate import estimate
from tr11ops.runcard.sections import parse_attempts
from tr11ops.runcard.speed import RunHistory
from trainer.contract.files import write_json
from trainer.contract.metrics_record import StepRecord, format_step
from trainer.contract.paths import RunPaths
from trainer.schedule.path import path_of

WIDE = SiteRules(largest_array_size=1001, jobs=10_000)

CHOICES: list[tuple[str, str, str | None, SiteRules | None, str, str]] = [
    ("one job", "auto", None, WIDE, "single", ""),
    ("no rules", "auto", "1-10", None, "array", ""),
    ("an array where it fits", "auto", "1-10", WIDE, "array", ""),
    (
        "indices too large",
        "auto",
        "995-1001",
        WIDE,
        "afterany",
        "must stay below 1001 (MaxArraySize)",
    ),
    ("no arrays", "auto", "1-10", SiteRules(largest_array_size=0), "afterany", "no job arrays"),
    (
        "few jobs may wait",
        "auto",
        "1-10",
        SiteRules(1001, 10_000, submitted_jobs=4),
        "self",
        "limit of 4",
    ),
    ("neither", "auto", "1-10", SiteRules(0, 10_000, submitted_jobs=4), "self", "limit of 4"),
    (
        "one job alone",
        "auto",
        "1-10",
        SiteRules(1001, submitted_jobs=1),
        "self",
        "FAULT 2 queued jobs",
    ),
    ("told", "afterany", "1-3", WIDE, "afterany", "slurm.chain"),
    (
        "told, and refused",
        "array",
        "1-10",
        SiteRules(largest_array_size=1),
        "array",
        "FAULT the site has no job arrays",
    ),
    ("told to queue itself", "self", "1-3", WIDE, "self", "slurm.chain"),
]


@pytest.mark.parametrize(
    ("wanted", "array", "site", "kind", "words"),
    [row[1:] for row in CHOICES],
    ids=[row[0] for row in CHOICES],
)
def test_the_way_follows_the_sites_rules(
    wanted: str, array: str | None, site: SiteRules | None, kind: str, words: str
) -> None:
    chain = choose_chain(wanted, parse_attempts(array) if array else None, site)
    assert chain.kind == kind
    assert words.removeprefix("FAULT ") in (
        chain.fault if words.startswith("FAULT ") else chain.why
    )
    assert bool(chain.fault) == words.startswith("FAULT ")


@given(
    st.sampled_from(["auto", "array", "afterany", "self"]),
    st.integers(1, 60),
    st.integers(0, 60) | st.none(),
    st.integers(1, 60) | st.none(),
)
def test_a_chain_without_a_fault_never_breaks_a_rule(
    wanted: str, tasks: int, size: int | None, submitted: int | None
) -> None:
    chain = choose_chain(wanted, parse_attempts(f"1-{tasks}"), SiteRules(size, None, submitted))
    assert chain.tasks == tasks and (wanted in {"auto", chain.kind})
    if not chain.fault:
        at_once = min(2, tasks) if chain.kind == "self" else tasks
        assert submitted is None or at_once <= submitted
        assert chain.kind != "array" or size is None or tasks < size


CONFIG = """\
Configuration data as of 1795278110
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
MaxArraySize            = 1001
MaxJobCount             = 10000
SLURM_VERSION           = 23.11.4

Slurmctld(primary) at c1 is UP
"""


def test_the_rules_are_read_from_slurms_own_words() -> None:
    answers = {
        "assoc": "six@a100|qos_gpu-t3,qos_gpu-gc|\nsix@v100|normal|50\n",
        "qos": "qos_gpu-gc|20\nother|1\n",
    }

    def runner(arguments: Any, **_: Any) -> CommandResult:
        return CommandResult(0, CONFIG if arguments[0] == "scontrol" else answers[arguments[3]], "")

    site = read_site("me", runner)
    assert (site.largest_array_size, site.jobs, site.version, site.clock) == (
        1001,
        10_000,
        "23.11.4",
        1_795_278_110.0,
    )
    assert site.accounts == ("six@a100", "six@v100") and site.qualities == (
        "qos_gpu-t3",
        "qos_gpu-gc",
        "normal",
    )
    assert not (site.expedites or site.hidden or site.federation)
    closed = CONFIG + "PrivateData = jobs,nodes\n"
    told = {"federation": "Federation: east\nSelf: one:10.0.0.1:6817 ID:1\n", "config": closed}
    odd = read_site("me", lambda words, **_: CommandResult(0, told.get(words[2], ""), ""))
    assert odd.hidden == {"jobs", "nodes"} and odd.federation == "east"
    said = [str(check) for check in site_checks(odd)]
    assert "own jobs alone" in said[0] and "part of east" in said[1]
    switched_on = CONFIG + "SlurmctldParameters = cloud_dns,enable_expedited_requeue\n"
    assert read_site("me", lambda *_, **__: CommandResult(0, switched_on, "")).expedites
    assert site.submitted_jobs == 20  # the least of those that hold for this user
    free = read_site(
        "me", lambda arguments, **_: CommandResult(0, CONFIG.replace(",limits", ""), "")
    )
    assert free.submitted_jobs is None


def test_an_accounting_database_that_is_frozen_is_asked_once_and_shortly() -> None:
    asked = []

    def runner(arguments: Any, timeout_seconds: float, **_: Any) -> CommandResult:
        asked.append((arguments[0], timeout_seconds))
        if arguments[0] == "sacctmgr":
            raise SchedulerUnreachable("sacctmgr did not answer within 8 s")
        return CommandResult(0, CONFIG, "")

    site = read_site("me", runner)
    of_accounts = [(name, seconds) for name, seconds in asked if name != "scontrol"]
    assert of_accounts == [("sacctmgr", ACCOUNTING_SECONDS)] and ACCOUNTING_SECONDS <= 10
    assert (site.largest_array_size, site.submitted_jobs, site.enforces_limits) == (
        1001,
        None,
        True,
    )
    [said] = site_checks(site)
    assert said.level is Level.WARNING
    assert (
        said.text
        == "unknown: sacctmgr did not answer within 8 s; how many jobs you may queue is not looked at"
    )
    assert list(site_checks(SiteRules())) == []


# ----------------------------------------------------------------------------- coverage
@pytest.fixture(scope="module")
def big() -> RunCard:
    return load_card(shipped_folder() / "tr11-176B-ml.toml", keep_undefined=True)


def test_coverage_of_the_176b_training(big: RunCard) -> None:
    """A whole run takes what `tr11 estimate` says; the original took about 100 to 120 days, ten
    tasks hold 41.
    """
    coverage = coverage_of(big, 10, RunHistory(), 0)
    duration = estimate(big).duration
    assert duration is not None and coverage.remaining == pytest.approx(86400 * duration.days)
    assert coverage.tasks_needed == duration.attempts
    assert str(coverage).startswith("10 x 4 d 3 h = 41 d 12 h, the run needs ")


def test_a_measured_step_of_the_ramp_is_scaled_to_a_full_batch(big: RunCard) -> None:
    full = 105.0
    first = path_of(big).segments[0]
    whole = coverage_of(
        big, 10, RunHistory(step=full, step_iteration=path_of(big).total_iterations), 0
    )
    pace = estimate(big, full).duration
    assert pace is not None and whole.remaining == pytest.approx(86400 * pace.days)
    assert whole.remaining is not None
    from tr11ops.runcard.speed import step_weights

    ramp = RunHistory(step=full * step_weights(big, [first])[0], step_iteration=1)
    assert coverage_of(big, 10, ramp, 0).remaining == pytest.approx(whole.remaining)
    half = coverage_of(big, 10, ramp, path_of(big).total_iterations).remaining
    assert half == 0.0


# ----------------------------------------------------------------------------- the run's own times
def write_logs(paths: RunPaths) -> None:
    paths.logs.mkdir(parents=True)
    step = StepRecord(100, 1000, 100, 100, 2.0, 1e-3, 8, 3.0, 1.0, 1.0, 1.0)
    lines = ["[default0]:" + format_step(step), "time (ms) | save-checkpoint: 41250.00", "noise",
             "time (ms) | save-checkpoint: 39000.00 (the training stood still for 120.00)"]  # fmt: skip
    paths.main_log.write_text("\n".join(lines) + "\n")
    records = [
        {
            "kind": "step",
            "iteration": 100,
            "seconds_per_iteration": 2.0,
            "time": 1000.0,
            "job_id": "7",
        },
        {"kind": "validation", "name": "a", "iteration": 100, "time": 1500.0, "job_id": "7"},
        {"kind": "validation", "name": "b", "iteration": 100, "time": 1720.0, "job_id": "7"},
        {
            "kind": "step",
            "iteration": 101,
            "seconds_per_iteration": 4.0,
            "time": 1722.0,
            "job_id": "7",
        },
        {"kind": "spike", "time": 1723.0, "job_id": "7"},
        {"kind": "validation", "name": "a", "iteration": 200, "time": 99_000.0, "job_id": "8"},
    ]
    paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + "{cut")


def test_times_are_read_from_the_logs(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "run", "main")
    assert read_history(paths) == RunHistory()
    write_logs(paths)
    assert read_history(paths) == RunHistory(
        step=3.0,
        step_iteration=101,
        save=41.25,
        usual_save=40.125,
        stall=20.685,  # of one that stopped the steps, and one beside them
        evaluation=720.0,
    )


def test_the_shortest_start_is_the_one_that_counts(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "run", "main")
    steps = [
        ("7", 90, 50.0),
        ("7", 91, 60.0),
        ("8", 92, 1130.0),
        ("9", 93, 2045.0),
        ("9", 94, 2050.0),
        ("10", 95, 9.0),
    ]
    for job, began in (("7", 1.0), ("8", 1000.0), ("9", 2000.0)):
        write_json(paths.attempt(job) / "attempt.json", {"start": began})
    paths.logs.mkdir(parents=True)
    lines = [
        json.dumps(
            {
                "kind": "step",
                "iteration": number,
                "seconds_per_iteration": 1.0,
                "time": at,
                "job_id": job,
            }
        )
        for job, number, at in steps
    ]
    paths.metrics.write_text("\n".join(lines) + "\n")
    # of the first attempt, only what the log still has is known
    assert read_history(paths).start == 45.0


MARGINS: list[tuple[str, list[str], RunHistory, Level | None, str]] = [
    ("never saved", [], RunHistory(step=1.0), None, ""),
    ("enough", [], RunHistory(step=1.0, save=60.0, evaluation=400.0), Level.OK, "9 min are left before the time limit"),
    ("no time for an evaluation", [], RunHistory(step=1.0, save=60.0, evaluation=720.0), Level.WARNING, "12 min"),
    ("no evaluation is made", ["evaluation.iterations=0"], RunHistory(step=1.0, save=60.0, evaluation=720.0),
     Level.OK, "a save 1 min"),
    ("no time for a save", [], RunHistory(step=1.0, save=550.0), Level.REFUSED, "last checkpoint of each attempt"),
    ("a signal that may be late", ["run.exit_duration_minutes=none"], RunHistory(step=1.0, save=61.0),
     Level.WARNING, "2 min are left before the time limit, and Slurm's signal may come a minute late"),
    ("a signal that is too late", ["run.exit_duration_minutes=none"], RunHistory(step=1.0, save=121.0),
     Level.REFUSED, "last checkpoint of each attempt would be lost"),
    ("the signal alone, early enough",
     ["run.exit_duration_minutes=none", "slurm.signal_seconds_before_limit=180"], RunHistory(step=1.0, save=61.0),
     Level.OK, "3 min are left"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "history", "level", "words"),
    [row[1:] for row in MARGINS],
    ids=[row[0] for row in MARGINS],
)
def test_the_end_of_an_attempt(
    tmp_path: Path, overrides: list[str], history: RunHistory, level: Level | None, words: str
) -> None:
    overrides = ["evaluation.iterations=1", "slurm.signal_seconds_before_limit=120", *overrides]
    card = load_card(write_card(tmp_path), overrides, {})
    checks = list(margin_checks(card, history))
    assert [check.level for check in checks] == ([level] if level else [])
    assert all(words in check.text for check in checks)


def test_without_any_end_of_its_own_nothing_is_left(tmp_path: Path) -> None:
    none = ["run.exit_duration_minutes=none", "slurm.signal_seconds_before_limit=none"]
    assert room_before_limit(load_card(write_card(tmp_path), none, {})) is None
