"""A run directory on a disk that is really full, or really read-only: it is watched, and what was
seen is not lost.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.plugins.disk_fixture import Disk
from tests.tr11ops.alerts.office import ANA, NOON, Mailbox, Office, Server, finding
from tests.tr11ops.cli.local_bench import NODES, Answer, LocalBench
from tests.tr11ops.cron.rounds import job, place, run_directory
from tests.tr11ops.launch.run_inputs import write_checkpoint
from tests.twin.runbook_scene import cure
from tests.twin.small_run import recorded_comment
from tr11ops.alerts.changes import AlertChange, change_alerts
from tr11ops.alerts.incidents import ACKNOWLEDGED
from tr11ops.alerts.state import Alert, AlertState, incident_of, merged
from tr11ops.alerts.store import open_alerts
from tr11ops.base.observed import known
from tr11ops.cluster.base import Job
from tr11ops.cron.runner import run_due, run_job
from tr11ops.detect.detector import Severity
from tr11ops.observe.operation_files import read_save_room
from tr11ops.rundir import fallback
from tr11ops.rundir.cron_records import read_job
from tr11ops.rundir.fallback import (
    RESERVE_FILE,
    VARIABLE,
    existing_fallback,
    fallback_of,
    keep_reserve,
)
from tr11ops.rundir.journal import read_journal
from tr11ops.rundir.paths import RunDirectory, adopt_run_id, require_run_id
from tr11ops.twin.fault_files import CORE_DUMP, fill, uncover
from tr11ops.twin.fault_store import InjectedFault
from tr11ops.twin.plan import TwinFolders
from tr11ops.watchdog.bring_back import bring_back
from trainer.contract.files import write_json
from trainer.contract.paths import RunPaths
from trainer.contract.requests import read_request

FAULTS = ["full", "read-only"]


# --------------------------------------------------------------------------- the fallback directory
def test_where_the_first_place_fills_all_agree_on_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, read and brought back is one directory, whichever of two has room."""
    directory = RunDirectory(RunPaths(tmp_path / "run", "small", "main"), tmp_path / "kill-switch")
    bases = [tmp_path / name for name in ("first", "second")]
    for base in bases:
        base.mkdir(mode=0o700)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(fallback, "BASES", tuple(map(str, bases)))
    full: set[Path] = set()

    def require_room(folder: Path) -> None:
        if any(folder.is_relative_to(base) for base in full):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(fallback, "require_room", require_room)

    def written() -> Path:
        with fallback_of(directory) as local:
            (local.root / "record").write_text("one")
        found = existing_fallback(directory)
        assert found is not None and found.root == local.root
        return local.root

    assert written().is_relative_to(bases[0])
    full.add(bases[0])
    assert written().is_relative_to(bases[1])
    full.clear()
    assert written().is_relative_to(bases[0])
    for base in bases:
        with fallback.abandoned_fallback(directory) as local:
            assert local is not None and local.root.is_relative_to(base)
            (local.root / "record").unlink()
    assert existing_fallback(directory) is None


def test_a_run_does_not_inherit_what_an_earlier_one_at_its_path_has_recorded(
    tmp_path: Path,
) -> None:
    """The earlier one's directory was removed while its watchdog lived."""
    directory = RunDirectory(RunPaths(tmp_path / "run", "demo", "main"), tmp_path / "kill-switch")
    with fallback_of(directory) as earlier:
        write_json(earlier.paths.state / "alerts" / "book.json", {})
    assert existing_fallback(directory) == earlier
    for path in (earlier.root, *earlier.root.rglob("*")):
        os.utime(path, (1_790_000_000.0, 1_790_000_000.0))
    assert existing_fallback(directory) == earlier, "whose it is cannot be told"
    adopt_run_id(directory, "demo", "a" * 32)
    assert existing_fallback(directory) == earlier, "the same run goes on here"
    directory.paths.run_record.unlink()
    require_run_id(directory, "demo")
    assert existing_fallback(directory) is None
    assert (earlier.root.parent / f"{directory.mark}-1790000000/state/alerts/book.json").exists()
    with fallback_of(directory) as own:
        write_json(own.paths.state / "mine.json", {})
    assert existing_fallback(directory) == own


def test_the_fallback_is_private_and_no_one_elses_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    base.mkdir(mode=0o755)
    monkeypatch.setenv(VARIABLE, str(base))
    directory = run_directory(tmp_path)
    private = base / f"tr11-{os.geteuid()}"
    assert existing_fallback(directory) is None and not private.exists()
    with fallback_of(directory) as local:
        assert local.root.parent == private and private.stat().st_mode & 0o777 == 0o700
        assert local.root.stat().st_mode & 0o777 == 0o700
    private.chmod(0o770)
    with pytest.raises(PermissionError, match="private folder"), fallback_of(directory):
        pass
    assert existing_fallback(directory) is None
    private.chmod(0o700)
    private.rename(tmp_path / "trap")
    private.symlink_to(tmp_path / "trap")
    with pytest.raises(PermissionError, match="private folder"), fallback_of(directory):
        pass
    private.unlink()
    base.chmod(0o777)  # without the sticky bit anyone could put another folder in the place of ours
    with pytest.raises(PermissionError, match="private folder"), fallback_of(directory):
        pass
    base.chmod(0o1777)
    with fallback_of(directory) as local:
        assert local.root.is_dir()


# ----------------------------------------------------------------------------- rounds
@pytest.mark.parametrize("fault", FAULTS)
def test_what_watches_runs_once_and_is_on_record_afterwards(
    disk: Disk, tmp_path: Path, fault: str
) -> None:
    there = place(disk.place, f"echo hello; echo x >> {tmp_path}/runs")
    watching, other = job(watches=True), job("sync")
    assert [done.result for done in run_due(there, (watching, other))] == ["ran", "ran"]
    disk.break_as(fault)
    later = replace(
        there, clock=lambda: known(read_job(there.directory, "pulse"), None).next_due + 1
    )  # type: ignore[union-attr]
    moment = later.clock()
    later = replace(there, clock=lambda: moment)
    first, left = run_due(later, (watching, other))
    assert (first.result, left.result) == ("ran", "not recorded")
    assert "the run directory cannot be written (" in first.why
    assert run_job(later, watching).result == "not due"
    assert (tmp_path / "runs").read_text() == "x\n" * 3
    state = known(read_job(there.directory, "pulse"), None)
    assert state is not None and state.started == moment and state.runs == 2
    assert bring_back(there.directory) == ()  # it cannot be written yet
    disk.heal(fault)
    assert "in the run directory again" in bring_back(there.directory)[0]
    assert existing_fallback(there.directory) is None
    state = known(read_job(there.directory, "pulse"), None)
    assert state is not None and state.runs == 2 and state.exit_code == 0
    assert (there.directory.paths.state / "cron" / "pulse.log").read_text().count("hello") == 2
    assert bring_back(there.directory) == ()


def test_a_round_that_ends_on_a_full_disk_is_not_run_twice(disk: Disk, tmp_path: Path) -> None:
    there = place(
        disk.place, f"echo x >> {tmp_path}/runs; cat /dev/zero > {disk.place}/filler; true"
    )
    done = run_job(there, job(watches=True))
    assert done.result == "ran" and "its end is recorded in" in done.why
    assert run_job(there, job(watches=True)).result == "not due"
    assert (tmp_path / "runs").read_text() == "x\n"
    disk.free()
    bring_back(there.directory)
    state = known(read_job(there.directory, "pulse"), None)
    assert state is not None and state.ended is not None


# ----------------------------------------------------------------------------- alerts
@pytest.mark.parametrize("fault", FAULTS)
def test_an_alert_is_mailed_once_and_its_incident_recorded(
    disk: Disk, mailbox: Mailbox, server: Server, fault: str
) -> None:
    desk = Office(disk.place, server.port, f'recipients=["{ANA}"]')
    desk.look(NOON, finding("slow-node", Severity.WARNING))
    disk.break_as(fault)
    for minute in (5, 10, 15):
        outcome = desk.look(NOON + 60 * minute, finding("slow-node", Severity.WARNING), finding())
        assert "alerts are kept in " in outcome.notes[0]
    assert [subject.split("]")[0] for subject in mailbox.subjects] == ["[WARNING", "[CRITICAL"]
    assert len(desk.alert_state.open_alerts) == 1
    disk.heal(fault)
    bring_back(desk.directory)
    assert {alert.detector for alert in desk.alert_state.open_alerts} == {"slow-node", "stalled"}
    ledger = read_journal(desk.directory.journal)
    opened = [entry.data["detector"] for entry in ledger.entries if entry.kind == "alert-opened"]
    assert ledger.is_sound and sorted(opened) == ["slow-node", "stalled"]
    desk.look(NOON + 1200, finding())
    assert len(mailbox.mails) == 2 and not list(desk.folder_of("outbox").glob("*.json"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mail_names_the_folder_in_which_its_answer_is_read(
    disk: Disk, mailbox: Mailbox, server: Server, fault: str
) -> None:
    """It named the one that takes nothing."""
    desk = Office(disk.place, server.port, f'recipients=["{ANA}"]')
    disk.break_as(fault)
    desk.look(NOON, finding())
    text = " ".join(mailbox.mails[0][1].get_body().get_content().split())
    line, folder = re.findall(r"the line `(ack [^`]+)` into a file in (\S+)/ on ", text)[0]
    for name in ("first", "second"):
        Path(folder, name).write_text(f"{line} of the {name}\n")
        if name == "first":
            desk.look(NOON + 60, finding())
            (shown,) = known(open_alerts(desk.directory), ())
            assert shown.is_acknowledged
    disk.heal(fault)
    bring_back(desk.directory)
    desk.look(NOON + 120, finding())
    assert desk.files("replies/done") == ["first", "second"] and not Path(folder).exists()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_known_before", [True, False])
def test_an_alert_is_listed_and_taken_on_while_nothing_can_be_written(
    disk: Disk, mailbox: Mailbox, server: Server, fault: str, is_known_before: bool
) -> None:
    desk = Office(disk.place, server.port, f'recipients=["{ANA}"]')
    desk.look(NOON, *([finding()] if is_known_before else []))
    disk.break_as(fault)
    if not is_known_before:
        desk.look(NOON + 60, finding())
    (shown,) = known(open_alerts(desk.directory), ())
    change = AlertChange(ACKNOWLEDGED, "ana", "on it")
    (taken,), notes = change_alerts(
        desk.sender(NOON + 120), [shown.fingerprint], change, "ana", "on it"
    )
    assert taken.is_acknowledged and any("is kept in" in note for note in notes)
    assert known(open_alerts(desk.directory), ())[0].acknowledged_by == "ana"
    desk.look(NOON + 3 * 3600, finding())  # neither escalated nor repeated
    assert len(mailbox.mails) == 1
    disk.heal(fault)
    bring_back(desk.directory)
    (after,) = desk.alert_state.open_alerts
    assert (after.acknowledged_by, after.last_seen) == ("ana", NOON + 3 * 3600)
    entries = read_journal(desk.directory.journal).entries
    assert [entry.who for entry in entries if entry.kind == "alert-acknowledged"] == ["ana"]


def test_what_waited_when_the_disk_filled_is_sent_all_the_same(
    disk: Disk, mailbox: Mailbox, server: Server
) -> None:
    """The mail server was unreachable, then the disk filled: the message waits in an outbox that
    takes no claim.
    """
    desk = Office(disk.place, server.port, f'recipients=["{ANA}"]')
    mailbox.data_answers = ["451 later"]
    desk.look(NOON, finding())
    assert mailbox.mails == []
    disk.fill()
    desk.look(NOON + 3600, finding())
    assert len(mailbox.mails) == 1
    disk.free()
    bring_back(desk.directory)
    desk.look(NOON + 7200, finding())
    assert len(mailbox.mails) == 1


def test_a_record_that_fits_on_a_full_disk_keeps_nothing_quiet(
    disk: Disk, mailbox: Mailbox, server: Server
) -> None:
    desk = Office(disk.place, server.port, f'recipients=["{ANA}"]')
    desk.look(NOON)
    disk.fill()
    with (disk.place / "filler").open("r+b") as filler:
        filler.truncate((disk.place / "filler").stat().st_size - 8192)
    desk.look(NOON + 60, finding())
    assert len(mailbox.mails) == 1


def alert(began: float, seen: float, **more: object) -> Alert:
    return Alert(
        "f1", "stalled", "7", Severity.CRITICAL, "t", (), "", "", began, began, seen, **more
    )  # type: ignore[arg-type]


def test_of_two_books_the_later_word_on_each_alert_counts() -> None:
    acknowledged = alert(10, 20, acknowledged_by="ana", acknowledged_at=25.0)
    both = merged(AlertState((acknowledged,), looked=20), AlertState((alert(10, 50),), looked=50))
    assert (both.alerts[0].last_seen, both.alerts[0].acknowledged_by, both.looked) == (
        50,
        "ana",
        50,
    )
    over = alert(10, 20, resolved_at=60.0)
    assert not merged(
        AlertState((over,), looked=60), AlertState((alert(10, 50),), looked=50)
    ).open_alerts
    again = merged(AlertState((over,), looked=60), AlertState((alert(70, 80),), looked=80))
    assert again.alerts[0].began == 70 and [one.began for one in again.closed] == [10]
    assert merged(again, AlertState()) == again == merged(AlertState(), again)


def test_an_incident_put_away_in_one_of_two_records_is_closed() -> None:
    stale, away = (
        AlertState((alert(10, 20),), looked=20),
        AlertState((), closed=(incident_of(alert(10, 20)),), looked=90),
    )
    for both in (merged(stale, away), merged(away, stale)):
        assert both.alerts == () and [one.began for one in both.closed] == [10]


# ----------------------------------------------------------------------------- stopping
WAITS = "trap 'echo USR1 > $FOLDER/signal; exit 0' USR1; while :; do sleep 0.05; done"


@dataclass
class Stage:
    """A run on the small disk with a job that trains (it says on another disk which signal came)
    and one behind it.
    """

    bench: LocalBench
    disk: Disk
    directory: RunDirectory
    job: str

    def type(self, *words: str) -> Answer:
        return self.bench.tr11(
            *words, "--run", str(self.bench.card), "--set", f"run.directory={self.disk.place}/run"
        )

    def trains(self) -> bool:
        return any(job.raw_id == self.job and job.state.is_active for job in self.bench.living())

    def queued(self) -> Job:
        return next(job for job in self.bench.living() if not job.state.is_active)


@pytest.fixture
def stage(bench: LocalBench, disk: Disk) -> Stage:
    directory = run_directory(disk.place)
    comment = recorded_comment(directory)
    keep_reserve(directory)
    script = WAITS.replace("$FOLDER", str(bench.folder))
    number = bench.submit(script, NODES, "small", comment)
    bench.wait(lambda jobs: any(job.raw_id == number and job.state.is_active for job in jobs))
    bench.submit("true", NODES, "small", comment)
    return Stage(bench, disk, directory, number)


def test_a_stop_on_a_full_disk_uses_the_reserve(stage: Stage) -> None:
    stage.disk.fill()
    said = stage.type("kill", "--now", "--yes", "--reason", "it is full")
    assert said.code == 0 and "kill switch set: " in said.err and "tr11: " not in said.err
    request = read_request(stage.directory.kill_switch, "kill")
    assert request is not None and request.kind == "kill-now"
    assert (
        stage.queued().reason == "JobHeldUser"
        and "tr11 resume" in said.err
        and "cannot be recorded" not in said.err
    )
    assert [entry.why for entry in read_journal(stage.directory.journal).entries] == [
        "it is full"
    ] * 2


def test_without_a_reserve_the_switch_alone_stops_it(stage: Stage) -> None:
    (stage.directory.paths.state / RESERVE_FILE).unlink()
    stage.disk.fill()
    said = stage.type("kill", "--yes", "--json")
    assert (said.code, said.json["action"]) == (0, "set") and "could only be made empty" in said.err
    assert stage.directory.kill_switch.read_bytes() == b"" and stage.trains()
    assert stage.queued().reason == "JobHeldUser" and "but its comment says so" in said.err
    stage.disk.free()
    assert stage.type("pulse", "--no-email").code in {0, 1}
    (entry, *_) = read_journal(stage.directory.journal).entries
    assert entry.kind == "kill-switch-set"
    resumed = stage.type("resume", "--yes", "--json")
    assert (
        resumed.code == 0
        and resumed.json["released"]
        and not stage.queued().reason.startswith("JobHeld")
    )


def test_an_end_without_saving_is_a_cancellation(stage: Stage) -> None:
    (stage.directory.paths.state / RESERVE_FILE).unlink()
    stage.disk.fill()
    said = stage.type("kill", "--now", "--yes")
    assert (
        said.code == 0
        and f"cancelled: job {stage.job}" in said.err
        and stage.directory.kill_switch_is_set()
    )
    stage.bench.wait(lambda jobs: not stage.trains())


def test_on_a_read_only_disk_the_scheduler_stops_it(stage: Stage) -> None:
    stage.disk.remount("ro")
    said = stage.type("kill", "--yes", "--json")
    assert (said.code, said.json["action"]) == (0, "asked-scheduler")
    assert f"{stage.directory.kill_switch} cannot be made: Read-only file system" in said.err
    assert f"job {stage.job} was sent USR1: it saves and leaves" in said.err
    stage.bench.wait(lambda jobs: not stage.trains())
    assert (
        stage.bench.folder / "signal"
    ).read_text() == "USR1\n" and stage.queued().reason == "JobHeldUser"
    stage.disk.remount("rw")
    stage.type("pulse", "--no-email")
    assert [entry.kind for entry in read_journal(stage.directory.journal).entries][:2] == [
        "stop-asked",
        "held",
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pause_holds_what_is_queued_whatever_the_disk(stage: Stage, fault: str) -> None:
    (stage.directory.paths.state / RESERVE_FILE).unlink()
    stage.disk.break_as(fault)
    said = stage.type("pause", "--yes")
    assert said.code == 0 and stage.trains() and stage.queued().reason == "JobHeldUser"
    assert stage.directory.paths.pause.exists() == (fault == "full")


# ------------------------------------------------------------------------ all of it, as it is typed
@pytest.fixture
def bench(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[LocalBench]:
    """A run on the small disk; the scheduler and the card's folder are there too, and not filled by
    accident.
    """
    tmp_path = disk.place.parent
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(tmp_path / "scheduler"))
    monkeypatch.setenv("TR11_LOCAL_NODES", str(NODES))
    monkeypatch.delenv("TR11_RUN", raising=False)
    under_test = LocalBench(tmp_path, capsys)
    try:
        yield under_test
    finally:
        under_test.clear()


@pytest.mark.parametrize("fault", FAULTS)
def test_cron_alerts_and_the_incident_reaches_the_hand_over(
    bench: LocalBench, disk: Disk, mailbox: Mailbox, server: Server, fault: str
) -> None:
    bench.card.write_text(
        bench.card.read_text()
        + f'\n[alerts]\nrecipients = ["{ANA}"]\nsmtp_host = "127.0.0.1"\nsmtp_port = {server.port}\n'
    )
    words = ("--run", str(bench.card), "--set", f"run.directory={disk.place}/run")
    bench.block()
    assert bench.tr11("launch", *words, "--scheduler", "local", "--array", "1-2").code == 0
    assert bench.tr11("cron", "run", "pulse", *words).code == 0
    (queued,) = [one for one in bench.living() if one.name == "small"]
    bench.scheduler.cancel(queued.array_id or queued.raw_id)
    bench.wait(lambda jobs: not any(one.name == "small" and not one.state.is_final for one in jobs))
    disk.break_as(fault)
    said = bench.tr11("cron", "run", "pulse", *words)
    assert said.code == 0 and "the run directory cannot be written (" in said.err
    told = [
        subject
        for subject in mailbox.subjects
        if "cannot be written to" in subject or "neither running" in subject
    ]
    assert len(told) == 2
    assert bench.tr11("cron", "run", "pulse", *words).code == 0
    assert len(set(mailbox.subjects)) == len(mailbox.subjects)
    shown = bench.tr11("cron", "status", *words)
    assert "rounds are recorded in " in shown.out and shown.code == 1
    disk.heal(fault)
    assert bench.tr11("cron", "run", "pulse", *words).code == 0
    # where lines break hangs on the folder's name
    shown = " ".join(bench.tr11("handover", *words, "--dry-run").out.split())
    assert "cannot be written to" in shown and "filesystem-full.md" in shown
    assert "rounds are recorded in" not in bench.tr11("cron", "status", *words).out


def test_the_runbooks_commands_make_room_on_the_rehearsed_fault(
    bench: LocalBench, tmp_path: Path
) -> None:
    """`tr11 twin fault disk-full`, without the twin: a copy of the run on a disk of its own, full
    to the last byte.
    """
    directory = run_directory(tmp_path)
    (directory.paths.state / "submissions").mkdir(parents=True)
    keep_reserve(directory)
    for step in range(100, 600, 100):
        write_checkpoint(directory.paths.checkpoints, step, size=1 << 20)
    fault, folders = (
        InjectedFault("disk-full", str(directory.root), "1", 0.0),
        TwinFolders(tmp_path / "twin"),
    )
    fill(fault, folders)
    try:
        with pytest.raises(OSError, match="No space left"):
            (directory.root / "one-byte").write_bytes(b"x")
        room = known(read_save_room(directory.paths), None)
        assert room is not None and room.is_all_seen
        assert next(iter(room.largest)) == str(directory.root / CORE_DUMP)
        for line in cure("filesystem-full.md").splitlines():
            typed = shlex.split(line.replace("REASON", "it is full"))
            said = bench.tr11(*typed[1:], "--run", str(bench.card))
            assert said.code == 0, said
        left = directory.checkpoint_steps()  # 100 is a milestone
        assert {400, 500} <= set(left) <= {100, 400, 500}
        (directory.root / "new").write_bytes(bytes(1 << 20))
    finally:
        uncover(fault, folders)
    assert (
        directory.checkpoint_steps() == left and (directory.root / "new").stat().st_size == 1 << 20
    )
    assert not os.path.ismount(directory.root)
    assert "checkpoint-removed" in {entry.kind for entry in read_journal(directory.journal).entries}
