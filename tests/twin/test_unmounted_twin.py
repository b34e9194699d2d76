"""A run directory whose file system is not mounted, on real Slurm: nothing is known of the run, and
nothing is begun.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.twin_fixture import require_slurm
from tests.twin.small_run import SmallRun
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.store import read_alert_state
from tr11ops.cli.main import execute
from tr11ops.cluster.base import JobState
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.twin.fault_effects import ask_client
from tr11ops.twin.faults import heal, inject
from tr11ops.twin.plan import TwinPlan
from tr11ops.twin.twin import Twin

# how Slurm names the end of a task whose output it cannot open: 22.05, and newer ones
NOT_LAUNCHED = frozenset({"JobLaunchFailure", "RaisedSignal:53(Real-time_signal_19)"})
MAILS = (
    'alerts.recipients=["oncall@example.org"]',
    'alerts.smtp_host="127.0.0.1"',
    "alerts.smtp_port=9",
)
CHANGES = (
    "resume --yes", "kill --release --yes", "checkpoint-now", "rollback 5 --yes",
    "launch --array 1-3", "launch --array 1-3 --after {array}", "launch --repair --yes", "launch --replace --yes",
    "nodes exclude {node} --reason doubt --yes", "nodes include {node} --yes",
)  # fmt: skip
COPIES = ('backup.store="copies"', 'hub.repository="group/logs"', "backup.prune=true")
LOOKS = (
    "backup run", "backup run --dry-run", "backup verify", "backup plan", "backup status", "checkpoints list",
    "checkpoints prune --yes", "checkpoints remove 5 --yes", "checkpoints verify --all", "checkpoints pin 5",
    "checkpoints unpin 5", "sync", "sync --dry-run", "backup restore 5 --output {root}/again",
    "upload latest --to group/model --yes", "upload 5 --to group/model --dry-run",
)  # fmt: skip


@pytest.fixture(scope="module")
def small_twin(twin_home: Path) -> Iterator[Twin]:
    require_slurm()
    with Twin.up(TwinPlan(name="unmounted", nodes=4, gpus=0, cpu_nodes=0), twin_home) as made:
        yield made


def refusal(stage: SmallRun, words: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What a command says that must not go on."""
    capfd.readouterr()
    node = stage.twin.plan.node_names[0]
    assert (
        execute(shlex.split(words.format(array=stage.array, node=node, root=stage.paths.root))) == 3
    ), words
    return "".join(capfd.readouterr())


def seen(capfd: pytest.CaptureFixture[str]) -> dict[str, object]:
    capfd.readouterr()
    assert execute(["status", "--json"]) == 3
    value: dict[str, object] = json.loads(capfd.readouterr().out)
    return value


def test_a_run_directory_that_vanishes_is_unknown_until_it_is_back(
    stage: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.launch(6, *MAILS, *COPIES)
    attempt = stage.train()
    root = stage.paths.root
    inject(stage.twin, "unmounted", path=str(root))
    stage.wait_for_hold()  # by the attempt that lost its directory
    stage.wait(lambda: not any(job.state.is_active for job in stage.jobs()), "the attempt's end")

    status = seen(capfd)
    assert status["verdict"] == "unknown" and "not mounted" in str(status["why"])
    assert execute(["status"]) == 3
    screen = capfd.readouterr().out
    assert (
        "none yet" not in screen
        and "nothing was launched" not in screen
        and "directory-unseen" in screen
    )
    left = sorted(root.rglob("*"))  # by the attempt
    for words in (*CHANGES, *LOOKS):
        said = refusal(stage, words, capfd)
        assert f"{root} holds no record of any launch" in said and "is not mounted here" in said, (
            words,
            said,
        )
        assert words not in LOOKS or len(said.splitlines()) == 1, said
        assert (
            "random weights" not in said
            and "does not exist" not in said
            and "never launched" not in said
            and "Traceback" not in said
        ), (words, said)
    assert stage.queued().reason.startswith("JobHeld") and stage.queued().pending_tasks == (
        2,
        3,
        4,
        5,
        6,
    )
    assert sorted(root.rglob("*")) == left and not (stage.folder / "copies").exists()

    assert execute(["pulse", "--act"]) == 3
    local = existing_fallback(stage.directory)
    assert local is not None and not (root / "state" / "alerts").exists()
    [alert] = read_alert_state(local).alert_state.open_alerts
    assert alert.detector == "directory-unseen" and alert.fix == f"findmnt --target {root}"
    [mail] = {entry.message.id: entry.message for entry in waiting_entries(local)}.values()
    first, _, repaired = (
        mail.body.partition("Type:")[2].partition("\n\n")[0].partition("When it is repaired, type:")
    )
    assert "CRITICAL" in mail.subject and "nothing trains" in mail.subject
    assert "tr11 resume" not in first and repaired.split("\n")[2].startswith("  tr11 resume")
    assert "scontrol release" not in mail.body and "no checkpoint" not in mail.body

    assert not [healing.error for healing in heal(stage.twin) if healing.error]
    assert execute(["pulse"]) == 1  # it is held
    [same] = read_alert_state(stage.directory).alert_state.open_alerts
    assert not list(local.root.rglob("book.d/*")) and alert.fingerprint in same.names
    assert (same.detector, same.fix) == ("unfinished-end", "tr11 resume")
    [told] = {entry.message.id for entry in waiting_entries(stage.directory)}
    assert told == mail.id  # people know of it, and what to type
    assert execute(["resume", "--yes"]) == 0
    second = stage.train(attempt=1)
    assert second != attempt and stage.launches(second)[0]["checkpoint_before"] is not None

    def is_all_clear() -> bool:
        execute(["pulse"])
        mails = {
            entry.message.id: entry.message for entry in waiting_entries(stage.directory)
        }.values()
        return any("[OK]" in mail.subject and same.fingerprint in mail.alerts for mail in mails)

    stage.wait(is_all_clear, "the all-clear")
    assert read_alert_state(stage.directory).alert_state.open_alerts == ()
    subjects = [entry.message.subject for entry in waiting_entries(stage.directory)]
    assert sum("CRITICAL" in subject for subject in subjects) == 1, subjects


@pytest.mark.parametrize("words", ["kill --yes --reason test", "kill --now --yes --reason test"])
def test_a_stop_asks_the_scheduler(
    stage: SmallRun, capfd: pytest.CaptureFixture[str], words: str
) -> None:
    """It holds what is queued, says so in the jobs, and ends what runs; when the directory is back
    the run goes on.
    """
    stage.launch(6, *MAILS)
    attempt = stage.train()
    inject(stage.twin, "unmounted", path=str(stage.paths.root))
    capfd.readouterr()
    assert execute([*shlex.split(words), "--json"]) == 0
    answer, said = capfd.readouterr()
    assert json.loads(answer)["action"] == "asked-scheduler" and "no kill switch is set" in said
    assert ("cancelled: job" if "--now" in words else "was sent USR1") in said
    stage.wait(lambda: not any(job.state.is_active for job in stage.jobs()), "the attempt's end")
    stage.wait_for_hold()
    assert stage.queued().pending_tasks == (2, 3, 4, 5, 6)
    assert not [healing.error for healing in heal(stage.twin) if healing.error]
    assert not stage.directory.kill_switch_is_set()
    assert execute(["resume", "--yes"]) == 0
    assert stage.train(attempt=1) != attempt


def test_a_pause_holds_what_is_queued(stage: SmallRun, capfd: pytest.CaptureFixture[str]) -> None:
    inject(stage.twin, "partition-down")
    stage.launch(3, *MAILS)
    inject(stage.twin, "unmounted", path=str(stage.paths.root))
    assert execute(["pause", "--yes", "--reason", "test"]) == 0
    assert "no pause is set" in capfd.readouterr().err
    stage.wait_for_hold()
    assert "/switch:test" in stage.queued().comment
    assert not [healing.error for healing in heal(stage.twin) if healing.error]
    assert execute(["resume", "--yes"]) == 0
    stage.train()


def test_a_task_that_starts_without_the_directory_holds_the_others(
    stage: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """No task of the array trains, and one is lost, not all of them: the batch script itself looks
    before it begins.
    """
    root = stage.paths.root
    inject(stage.twin, "partition-down")
    stage.launch(8, *MAILS)
    inject(stage.twin, "unmounted", path=str(root))
    heal(stage.twin, kind="partition-down")
    stage.wait_for_hold()  # by the first task
    stage.wait(lambda: not any(job.state.is_active for job in stage.jobs()), "its end")
    assert stage.queued().pending_tasks == (2, 3, 4, 5, 6, 7, 8) and not list(root.iterdir())
    [ended] = [job for job in stage.jobs() if job.state.is_final and job.array_id == stage.array]
    assert ended.exit_code == 3 and ended.reason != "JobLaunchFailure"
    status = seen(capfd)
    assert status["verdict"] == "unknown" and "not mounted" in str(status["why"])
    assert "random weights" not in refusal(stage, "launch --array 1-3", capfd)

    assert not [healing.error for healing in heal(stage.twin) if healing.error]
    assert execute(["pulse"]) == 1
    mails = {entry.message.id: entry.message for entry in waiting_entries(stage.directory)}.values()
    [told] = [mail for mail in mails if not mail.id.startswith("directory-unseen")]
    assert told.detector == "held" and f"{root} is not mounted" in " ".join(told.body.split()), (
        told.body
    )
    assert told.body.partition("Type:")[2].split("\n")[2] == "  tr11 resume"
    capfd.readouterr()
    assert execute(["resume", "--yes"]) == 0
    stage.train()


def test_a_task_that_starts_where_nothing_at_all_lies_holds_the_others(stage: SmallRun) -> None:
    """Not even the folder that is the mount's place: Slurm's own output, and the job's folder, are
    none of the run's.
    """
    root = stage.paths.root
    inject(stage.twin, "partition-down")
    stage.launch(8, *MAILS)
    away = root.with_name("away")
    root.rename(away)
    try:
        heal(stage.twin, kind="partition-down")
        stage.wait_for_hold()  # by the first task
        stage.wait(lambda: not any(job.state.is_active for job in stage.jobs()), "its end")
        assert stage.queued().pending_tasks == (2, 3, 4, 5, 6, 7, 8) and not root.exists()
        assert f"{root} is not mounted" in stage.queued().comment
    finally:
        away.rename(root)
    assert execute(["resume", "--yes"]) == 0
    stage.train()


def as_older_tr11(stage: SmallRun, tasks: int) -> None:
    """Queue an array whose output Slurm itself must open, and cannot, in place of what is queued."""
    [queued] = stage.living()
    stage.slurm.cancel(stage.array)
    words = (
        "sbatch",
        f"--array=1-{tasks}%1",
        "--nodes=3",
        f"--job-name={stage.card.run.name}",
        "--wrap=true",
    )
    output = "/proc/none/%j.out"  # newer Slurm makes folders that are missing, where it can
    ask_client(
        stage.twin,
        *words,
        f"--output={output}",
        f"--comment={queued.comment}",
        f"--partition={queued.partition}",
    )
    stage.array = next(job.array_id or job.raw_id for job in stage.living())


def test_a_watchdog_holds_what_slurm_itself_burns(
    stage: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    inject(stage.twin, "partition-down")
    stage.launch(3, *MAILS)
    as_older_tr11(stage, 200)
    heal(stage.twin, kind="partition-down")
    stage.wait(
        lambda: sum(job.reason in NOT_LAUNCHED for job in stage.jobs()) >= 2,
        "two burned tasks",
    )

    def is_held() -> bool:  # not while a task is just being burned
        execute(["pulse", "--act"])
        return stage.queued().reason.startswith("JobHeld")

    stage.wait(is_held, "the hold")
    assert "tasks ended before they began to work (FAILED " in capfd.readouterr().out
    assert len(stage.queued().pending_tasks) > 100
    assert execute(["resume", "--yes", "--dry-run"]) == 0
    assert f"job {stage.array}, by tr11: will be released" in capfd.readouterr().err


def test_tasks_that_could_not_begin_are_no_launch_that_never_was(
    stage: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm ends each task that cannot open its output, before anything of tr11 begins: scripts of
    an older tr11.
    """
    inject(stage.twin, "partition-down")
    stage.launch(3, *MAILS)
    as_older_tr11(stage, 3)
    inject(stage.twin, "unmounted", path=str(stage.paths.root))
    heal(stage.twin, kind="partition-down")
    stage.wait(lambda: all(job.state.is_final for job in stage.jobs()), "the end of all tasks")
    assert NOT_LAUNCHED & {job.reason for job in stage.jobs()}
    status = seen(capfd)
    assert status["verdict"] == "unknown" and "not mounted" in str(status["why"])
    assert "random weights" not in refusal(stage, "launch --array 1-3", capfd)
    for words in ("kill --yes", "pause --yes"):
        assert "is not mounted here" in refusal(stage, words, capfd)
    assert not (stage.paths.root / "kill-switch").exists()


def test_a_directory_that_is_not_there_at_all(
    stage: SmallRun, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where nothing at all lies in its place, the jobs tell too; and without a job nothing was
    launched.
    """
    root = stage.paths.root
    inject(stage.twin, "partition-down")
    stage.launch(3, *MAILS, *COPIES)
    ask_client(stage.twin, "scontrol", "hold", stage.array)
    away = root.with_name("away")
    root.rename(away)
    try:
        for words in (
            "launch --array 1-3",
            "launch --replace --yes",
            "pulse",
            "report",
            "diagnose",
            *LOOKS,
        ):
            assert f"{root} is not there, but job {stage.array}" in refusal(stage, words, capfd), (
                words
            )
        assert execute(["kill", "--yes"]) == 0 and "no kill switch is set" in capfd.readouterr().err
        assert seen(capfd)["verdict"] == "unknown" and not root.exists()
        assert existing_fallback(stage.directory) is not None
        for words in ("run --once", "run pulse", "run --once --way crontab"):
            assert execute(["cron", *words.split(), "--json"]) in {0, 1}, words
            rounds = {done["job"]: done for done in json.loads(capfd.readouterr().out)["rounds"]}
            if words != "run --once --way crontab":  # then it is not due
                assert rounds["pulse"]["result"] == "ran" and rounds["pulse"]["exit_code"] == 3, (
                    rounds
                )
                assert "recorded in" in rounds["pulse"]["why"], rounds
            assert all(
                done["result"] == "not recorded" for name, done in rounds.items() if name != "pulse"
            ), rounds
            assert not root.exists()
        local = existing_fallback(stage.directory)
        assert local is not None
        mails = {entry.message.id: entry.message for entry in waiting_entries(local)}.values()
        assert [
            mail
            for mail in mails
            if "CRITICAL" in mail.subject and f"findmnt --target {root}" in mail.body
        ]
    finally:
        away.rename(root)
    assert execute(["status"]) == 1 and stage.queued().state is JobState.PENDING
