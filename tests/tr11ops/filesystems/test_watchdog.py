"""The watchdog: thresholds in both directions, the original's words, sources that fail beside
others, real commands.
"""

from __future__ import annotations

import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.waiting import is_gone, until
from tr11ops.base.errors import SourceError
from tr11ops.base.observed import Unknown, seen
from tr11ops.base.processes import ProbeOutput
from tr11ops.detect.storage import filling, full, when
from tr11ops.filesystems.look import FilesystemResult, NicedRunner, look_at, read_drift
from tr11ops.filesystems.report import FilesystemReport, judge, lines, value
from tr11ops.runcard.watching import FilesystemSection
from tr11ops.rundir.disk_usage import DAY_SECONDS, Forecast, Usage
from tr11ops.rundir.permissions import PermissionTally, PermissionWalk

NOW = 1_650_000_000.0
GB, TB = 2**30, 2**40
RULE = FilesystemSection(name="SCRATCH", source="df", bytes_percent=75, inodes_percent=85)


def usage(used: float, limit: float = 400 * TB, **more: float) -> Usage:
    return Usage(NOW, "SCRATCH", "du", "/x", bytes_used=used, bytes_limit=limit, **more)  # type: ignore[arg-type]


def tally(entries: int, wrong: int, folders: int = 1) -> PermissionTally:
    return PermissionTally(entries=entries, wrong=wrong, folders=folders)


def test_beyond_the_limit_and_not_at_it_and_not_below() -> None:
    assert full(usage(299 * TB), RULE) == ()
    assert full(usage(300 * TB), RULE) == ()  # 75 % is not beyond 75 %
    assert full(usage(300 * TB + 1), RULE)[0].startswith("SCRATCH is at 75.00000000000")
    assert full(usage(360 * TB), RULE) == ("SCRATCH is at 90.00% bytes usage (368640GB/409600GB)",)


def test_inodes_and_what_is_left_of_a_shared_disk() -> None:
    rule = FilesystemSection(name="WORKSF", source="df", least_free="100 TiB", inodes_percent=85)
    crowded = usage(1, inodes_used=2_600_000, inodes_limit=3_000_000, bytes_free=99.5 * TB)
    assert full(crowded, rule) == (
        "WORKSF is at 86.67% inodes usage (2539K/2930K)", "Shared WORKSF has 100TB left",
    )  # fmt: skip
    assert full(replace(crowded, inodes_used=2_550_000, bytes_free=100 * TB), rule) == ()
    assert full(replace(crowded, inodes_used=0, bytes_free=40.26 * TB), rule) == (
        "Shared WORKSF has 40TB left",
    )
    assert full(replace(crowded, inodes_used=0, bytes_free=4.26 * TB), rule) == (
        "Shared WORKSF has 4.3TB left",
    )


def test_a_share_alone_is_told_with_the_sources_own_report() -> None:
    share = Usage(NOW, "WORK", "idrquota", bytes_share=0.862, inodes_share=0.5)
    rule = FilesystemSection(name="WORK", source="df")
    assert full(share, rule) == ("WORK is at 86.20% bytes usage",)
    report = judge(
        "tr11-176B-ml",
        [rule],
        [FilesystemResult("WORK", share, "WORK (86.2%)\nWORK (50.0%)")],
        [],
        NOW,
    )
    assert list(lines(report)) == [
        "[ALERT] tr11-176B-ml filesystem is getting close to being full",
        "WORK is at 86.20% bytes usage",
        "    WORK (86.2%)",
        "    WORK (50.0%)",
    ]
    assert report.exit_code == 1


def test_nothing_known_is_nothing_said() -> None:
    assert full(Usage(NOW, "SCRATCH", "df"), RULE) == ()
    assert full(usage(1, limit=0), RULE) == ()


def test_one_unknown_hides_no_other() -> None:
    away = FilesystemResult("STORE", Unknown("idrquota is not there"))
    well, crowded = (
        FilesystemResult("SCRATCH", usage(1 * TB)),
        FilesystemResult("SCRATCH", usage(399 * TB)),
    )
    rules = [FilesystemSection(name="STORE", source="df"), RULE]
    told = list(lines(judge("r", rules, [away, well], [], NOW)))
    assert told == ["1 of 2 file systems are in good standing, the others are unknown",
                    "STORE is unknown: idrquota is not there"]  # fmt: skip
    assert judge("r", rules, [away, well], [], NOW).exit_code == 0
    assert judge("r", rules, [away, crowded], [], NOW).exit_code == 1
    nothing = judge("r", rules, [away, away], [], NOW)
    assert nothing.exit_code == 3 and next(lines(nothing)) == "No file system could be observed"
    assert list(lines(judge("r", [RULE], [well], [], NOW))) == [
        "All file systems are in good standing"
    ]
    none = judge("r", [], [], [], NOW)
    assert none.exit_code == 0 and "No file system is watched" in next(lines(none))


def test_the_day_is_told_before_it_comes() -> None:
    def course(slope: float) -> list[Usage]:
        return [Usage(NOW - day * DAY_SECONDS, "SCRATCH", "du", bytes_used=(60 - slope * day) * TB, bytes_limit=100 * TB)
                for day in range(10, 0, -1)]  # fmt: skip

    look = FilesystemResult("SCRATCH", usage(60 * TB, 100 * TB))
    soon = judge("r", [RULE], [look], course(4), NOW)
    assert soon.systems[0].filling == "SCRATCH will be full (bytes) in about 10 days (2022-04-25)"
    assert list(lines(soon))[1] == soon.systems[0].filling and soon.exit_code == 0
    assert judge("r", [RULE], [look], course(1), NOW).systems[0].filling == ""
    assert (
        judge("r", [RULE], [look], [replace(one, name="OTHER") for one in course(4)], NOW)
        .systems[0]
        .filling
        == ""
    )


def test_the_forecast_in_words() -> None:
    day = DAY_SECONDS
    assert when(Forecast("bytes", NOW + 4.5 * day), NOW) == "in about 4.5 days (2022-04-19)"
    assert when(Forecast("bytes", NOW + 30 * day, NOW + 5 * day), NOW) == (
        "in about 30 days (2022-05-15), not before 2022-04-20"
    )
    assert when(Forecast("bytes", None, NOW + 5 * day, why="what grows is deleted again"), NOW) == (
        "what grows is deleted again (not before 2022-04-20)"
    )
    assert when(Forecast("bytes", NOW), NOW) == "now"
    assert filling(Forecast("bytes", NOW + 14 * day), RULE, NOW) == ""
    assert filling(Forecast("inodes", NOW + 13 * day), RULE, NOW).startswith(
        "SCRATCH will be full (inodes)"
    )


def test_every_measure_with_debug_and_json_that_parses() -> None:
    import json

    looks = [
        FilesystemResult("SCRATCH", usage(1 * TB, bytes_free=3 * TB), notes=("a note",)),
        FilesystemResult("X", Unknown("why")),
    ]
    report = replace(
        judge("r", [RULE, FilesystemSection(name="X", source="df")], looks, [], NOW),
        drift=tally(100, 7),
    )
    text = "\n".join(lines(report, debug=True))
    assert (
        "0.2% (1.0 TiB of 400.0 TiB)" in text
        and "too few samples yet" in text
        and "SCRATCH: a note" in text
    )
    assert "7 files are not usable for the run's group, of 100: tr11 perms check" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    document = json.loads(json.dumps(value(report), allow_nan=False))
    assert (document["schema"], document["exit_code"], document["rights"]["wrong"]) == (1, 0, 7)
    assert document["filesystems"][1] == {"name": "X", "unknown": "why"}


def test_rights_that_are_well_are_not_mentioned() -> None:
    assert list(lines(FilesystemReport("r", NOW, (), tally(5, 0)))) == list(
        lines(FilesystemReport("r", NOW, ()))
    )
    assert "the first 5" in list(lines(FilesystemReport("r", NOW, (), tally(5, 1, folders=0))))[-1]
    assert "unknown: gone" in list(lines(FilesystemReport("r", NOW, (), Unknown("gone"))))[-1]


# -------------------------------------------------------------------- the rights of the run's files
def test_drift_is_counted_within_a_time(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    for number in range(3):
        path = tmp_path / f"{number}"
        path.write_text("x")
        path.chmod(0o664 if number else 0o600)
    found = seen(read_drift(tmp_path, 60.0, time.monotonic))
    assert (found.entries, found.wrong, found.is_complete) == (4, 1, True)
    assert isinstance(read_drift(tmp_path / "gone", 60.0, time.monotonic), Unknown)
    (tmp_path / "deep").mkdir(mode=0o770)
    (tmp_path / "deep").chmod(0o2770)
    stopped = PermissionWalk(tmp_path, tmp_path.stat().st_gid, repair=False)
    stopped.stop()
    assert (stopped.run().entries, stopped.tally.folders, stopped.tally.folders_found) == (1, 0, 1)


def test_a_file_system_that_hangs_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hang(walk: PermissionWalk, folder: str) -> None:
        answers.wait(60.0)

    monkeypatch.setattr(PermissionWalk, "_look_into", hang)
    moments = itertools.count(0, 100)
    try:
        assert read_drift(tmp_path, 10.0, lambda: float(next(moments))) == Unknown(
            f"{tmp_path}: it gives no answer"
        )
    finally:
        answers.set()


# ----------------------------------------------------------------------------- real commands
class Fake:
    """Answers with prepared outputs; a source whose answer is missing cannot be run."""

    def __init__(self, outputs: Mapping[str, ProbeOutput]) -> None:
        self.outputs = outputs
        self.seconds: dict[str, float] = {}

    def run(self, command: Sequence[str], seconds: float) -> ProbeOutput:
        self.seconds[command[0]] = seconds
        if command[0] not in self.outputs:
            raise SourceError(f"{command[0]} is not there")
        return self.outputs[command[0]]

    def cancel(self) -> None:
        raise AssertionError("nothing is to be cancelled")


def section(name: str, source: str, **more: object) -> FilesystemSection:
    return FilesystemSection.model_validate({"name": name, "source": source, **more})


def test_each_source_is_asked_and_the_cards_limits_hold() -> None:
    fake = Fake(
        {
            "du": ProbeOutput(0, "5000000000000\t/x\n"),
            "idrquota": ProbeOutput(0, "a (86.2%) b (68.7%)"),
            "df": ProbeOutput(0, "nonsense"),
        }
    )
    sections = [
        section("SCRATCH", "du", path="/x", bytes_limit="400 TiB"), section("WORK", "idrquota", arguments=["-w"]),
        section("HOME", "quota"), section("DISK", "df", path="/x"), section("LUSTRE", "lfs"),
    ]  # fmt: skip
    looks = look_at(sections, fake, NOW, 7200.0)
    assert [look.name for look in looks] == ["SCRATCH", "WORK", "HOME", "DISK", "LUSTRE"]
    assert looks[0].usage == Usage(
        NOW, "SCRATCH", "du", "/x", bytes_used=5e12, bytes_limit=400 * TB
    )
    assert looks[1].usage == Usage(NOW, "WORK", "idrquota", bytes_share=0.862, inodes_share=0.687)
    unknown = [look.usage.why for look in looks if isinstance(look.usage, Unknown)]
    assert (
        unknown[0] == "quota is not there" and "rows" in unknown[1] and "needs a path" in unknown[2]
    )
    assert fake.seconds["du"] == 7200.0 and fake.seconds["idrquota"] == 120.0


@pytest.mark.parametrize("digits", ["9" * 30, "9" * 5000])
def test_figures_without_end_are_unknown(digits: str) -> None:
    [look] = look_at(
        [section("X", "du", path="/x")], Fake({"du": ProbeOutput(0, f"{digits}\t/x\n")}), NOW, 9.0
    )
    assert isinstance(look.usage, Unknown)


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def runner(folder: Path) -> NicedRunner:
    return NicedRunner({**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})


def test_a_command_runs_with_low_priority_and_bounded_output(tmp_path: Path) -> None:
    program(
        tmp_path,
        "idrquota",
        "print(os.nice(0), os.environ['LC_ALL'], sys.argv[1:]); sys.stderr.write('e' * 3000000)",
    )
    found = runner(tmp_path).run(["idrquota", "-w", "-p", "six"], 60.0)
    assert (
        found.text == "19 C ['-w', '-p', 'six']\n"
        and found.status == 0
        and len(found.error) == 1 << 20
    )


def test_a_command_that_is_not_there_or_may_not_run(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no-such-tool is not there"):
        runner(tmp_path).run(["no-such-tool"], 5.0)
    (tmp_path / "lfs").write_text("not for running")
    with pytest.raises(SourceError, match=r"lfs (may not be run|is not there)"):
        NicedRunner({**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}).run(["lfs"], 5.0)


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program(
        tmp_path,
        "du",
        f"child = os.fork()\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)",
    )
    for seconds in (1, 8, 64):  # a busy machine may need longer until both are there
        with pytest.raises(SourceError, match=f"du gave no answer in {seconds} s"):
            runner(tmp_path).run(["du", "-bs"], float(seconds))
        if pids.exists() and len(pids.read_text().split()) >= 2:
            break
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) >= 2
    until(lambda: all(is_gone(pid) for pid in started), "the end of what du started")


def test_an_interrupted_look_ends_its_commands(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program(tmp_path, "du", f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    under_test = runner(tmp_path)

    def interrupt() -> None:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)
        under_test.cancel()

    thread = threading.Thread(target=interrupt)
    thread.start()
    [look] = look_at([section("X", "du", path=str(tmp_path))], under_test, NOW, 60.0)
    thread.join()
    assert look.usage == Unknown("du was interrupted")
    until(lambda: is_gone(int(pid.read_text())), "the end of du")


def test_ctrl_c_leaves_no_walk_behind(tmp_path: Path) -> None:
    """In a process of its own: only a main thread is interrupted, and only its end would leave a
    command behind.
    """
    pid = tmp_path / "pid"
    program(tmp_path, "du", f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    script = (
        "import os\nfrom tr11ops.filesystems.look import look_at\nfrom tr11ops.filesystems.look import NicedRunner\n"
        "from tr11ops.runcard.watching import FilesystemSection\n"
        "look_at([FilesystemSection(name='X', source='du', path='/')], NicedRunner(os.environ), 0.0, 600.0)\n"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while not (pid.exists() and pid.read_text()):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(60.0) != 0
        finally:
            process.kill()
    until(lambda: is_gone(int(pid.read_text())), "the end of what du started")
