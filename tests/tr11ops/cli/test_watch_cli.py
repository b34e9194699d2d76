"""`tr11 watch`: a job that someone else submitted, on the embedded scheduler, seen from outside."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.cli.watch_bench import BASH_STEP, STEP, WatchBench, watching
from tests.waiting import until
from tr11ops.observe.files import read_details
from tr11ops.observe.look import facts_of
from tr11ops.runcard.card import load_card
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.assessment import assess
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.trainers.levels import REFUSED_WHERE_WATCHED
from tr11ops.trainers.watched import LogPlace, WatchedJob, new_lines
from trainer.contract.files import write_json
from trainer.contract.paths import ATTEMPT_FILE


@pytest.fixture
def bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[WatchBench]:
    with watching(tmp_path, monkeypatch, capsys) as one:
        yield one


def test_a_job_of_someone_else_is_seen_from_outside_and_left_alone(bench: WatchBench) -> None:
    bench.submit('for i in 1 2 3; do echo "' + BASH_STEP + '"; sleep 0.2; done; sleep 60')
    until(lambda: bench.log.is_file() and "step: 3" in bench.log.read_text(), "three steps")
    first = bench.watch()
    assert "level 0, watched: it is not started, stopped or relaunched by tr11" in first.out
    assert "torchtitan" in first.out
    assert first.code == 0, first.out + first.err
    assert bench.steps() == [3]  # when the earlier ones were taken no one knows
    with bench.log.open("a") as stream:
        stream.write(
            STEP.format(4, 2.5) + "\n" + STEP.format(5, 2.25) + "\n" + STEP.format(6, 9)[:40]
        )
    kept = bench.root / "state/attempts" / bench.job / ATTEMPT_FILE
    now = read_details(kept)
    # as the start before this one left it, of a job that was put back into the queue
    write_json(kept, {**now, "nodes": ["elsewhere"], "start": now["start"] - 600})
    bench.watch()
    assert read_details(kept) == now
    assert bench.steps() == [3, 4, 5]
    status = bench.tr11("status", "--run", bench.card, "--json").json
    assert status["iteration"] == 5 and status["loss"] == 2.25
    assert [job["id"] for job in status["jobs"]] == [bench.job]
    assert "queue" not in {need["kind"] for need in status["sleep_needs"]}
    more = {
        "nodes exclude": ["n1", "--reason", "x"],
        "nodes include": ["n1"],
        "rollback": ["1"],
        "upload": ["1"],
    }
    for command in sorted(REFUSED_WHERE_WATCHED):
        words = [*command.split(), *more.get(command, [])]
        refused = bench.tr11(*words, "--run", bench.card, "--scheduler", "local")
        assert (refused.code, len(refused.err.splitlines())) == (1, 1), (command, refused)
        assert f"starts nor stops job {bench.job}" in refused.err or "[trainer]" in refused.err
    job = bench.scheduler.job(bench.job)
    assert job is not None and job.state == "RUNNING"


@pytest.mark.parametrize(
    ("reason", "lines"),
    [
        ("unexplained", ("echo 'Training completed'",)),
        ("error", ("echo 'RuntimeError: CUDA error: an illegal memory access'", "exit 1")),
    ],
    ids=["unexplained", "died"],
)
def test_its_end_is_on_record(bench: WatchBench, reason: str, lines: tuple[str, ...]) -> None:
    bench.submit('for i in 1 2 3; do echo "' + BASH_STEP + '"; sleep 0.1; done', *lines)
    until(lambda: bench.log.is_file() and "step: 1" in bench.log.read_text(), "a step")
    bench.watch()
    bench.ended()
    answer = bench.watch()
    marker = bench.marker()
    assert marker is not None and (marker.reason, marker.restart) == (reason, False)
    assert marker.iteration == 3
    assert answer.code == 1, answer.out
    alerted = bench.tr11("pulse", "--run", bench.card, "--scheduler", "local")
    assert alerted.code == 1, alerted.out + alerted.err
    alerts = bench.tr11("alerts", "list", "--run", bench.card, "--json").json["alerts"]
    assert [(alert["detector"], alert["severity"]) for alert in alerts] == [
        ("unfinished-end", "CRITICAL")
    ]
    found = bench.tr11("diagnose", "--run", bench.card, "--job", bench.job)
    assert found.code in (0, 1), found.err
    if reason == "error":
        assert "illegal memory access" in found.out
    before = sorted(path.read_bytes() for path in bench.root.rglob("*.json*"))
    bench.watch()  # and it stays as it is
    assert sorted(path.read_bytes() for path in bench.root.rglob("*.json*")) == before


def test_what_was_kept_of_a_cancelled_one_is_not_known(bench: WatchBench) -> None:
    """No checkpoint of it is looked at: to call all of it lost would be a guess."""
    bench.submit('for i in $(seq 1 600); do echo "' + BASH_STEP + '"; sleep 0.2; done')
    until(lambda: bench.log.is_file() and "step: 3" in bench.log.read_text(), "three steps")
    bench.watch()
    until(lambda: "step: 9" in bench.log.read_text(), "more steps")
    bench.watch()
    bench.scheduler.cancel(bench.job)
    bench.ended()
    bench.watch()
    run = ("--run", bench.card, "--scheduler", "local")
    past = bench.tr11("goodput", "--json", *run).json
    assert past["useful_of_held"] > 0.0 and past["kept_is_known"] is False
    again = bench.tr11("goodput", "--json", *run).json
    assert again["end"] == past["end"]  # the time after it is its owner's matter
    said = bench.tr11("goodput", *run).out
    assert "(kept: not known)" in said and "unknown: checkpoints: not looked at: level 0" in said
    advised = bench.tr11("advise", *run)
    assert advised.code == 0 and "cannot tell" in advised.out, advised.err
    assert "what was saved is not known" in " ".join(advised.out.split())
    page = bench.folder / "report.html"
    bench.tr11("report", "-o", str(page), *run)
    text = page.read_text(encoding="utf-8")
    assert "only watched (level 0)" in text and "none yet" not in text
    assert "Not drawn, for no step tells it: learning rate" in text
    assert "only watched (level 0)" in bench.tr11("checkpoints", "list", "--run", bench.card).out


def test_one_that_finishes_needs_no_one(bench: WatchBench) -> None:
    ours = bench.folder / "ours.toml"
    ours.write_text(
        'name = "ours"\ntitle = "a script"\n'
        "step_line = 'at (?P<step>\\d+)/(?P<total>\\d+) loss (?P<loss>\\S+)'\n"
    )
    bench.submit('for i in 1 2 3; do echo "at $i/3 loss 2.5"; done')
    bench.ended()
    answer = bench.watch("--dialect", str(ours))
    marker = bench.marker()
    assert marker is not None and (marker.reason, marker.iteration) == ("finished", 3)
    assert answer.code == 0, answer.out
    assert "Nothing is left to train" in answer.out


def test_a_hang_is_seen_by_silence(bench: WatchBench) -> None:
    bench.submit("echo starting; exec sleep 600")
    until(bench.log.is_file, "a log")
    began = time.time() - 120  # as if it had been watched for two minutes
    with bench.log.open("a") as stream:
        stream.write(STEP.format(1, 2.5) + "\n")
    os.utime(bench.log, (began, began))
    bench.watch("--dialect", "torchtitan")
    for step in range(2, 62):
        with bench.log.open("a") as stream:
            stream.write(STEP.format(step, 2.5) + "\n")
        os.utime(bench.log, (began + step, began + step))
        if step % 10 == 0:
            bench.watch()
    assert len(bench.steps()) > 50
    card = load_card(Path(bench.card), (), {})
    directory = RunDirectory(card.paths, card.kill_switch)
    look = partial(
        assess, directory, facts_of(card), bench.scheduler, lambda _: ExtraObservations()
    )
    assert look(now=began + 70).verdict.word == "healthy"
    seen = bench.tr11("status", "--run", bench.card, "--json").json
    assert not [one for one in seen["findings"] if one["detector"] == "clock-skew"]
    unseen = look(now=began + 3600)  # by whoever looks no more: that is no silence of the job's
    assert unseen.verdict.word == "unknown" and "no one has looked at its log" in unseen.verdict.why
    watched = WatchedJob.read(card.paths)
    assert watched is not None
    replace(watched, looked=began + 3600).write(card.paths)
    hung = look(now=began + 3600)
    assert hung.verdict.word == "stalled", hung.verdict
    assert hung.exit_code == 1


def test_what_cannot_be_told_yet_is_said_and_nothing_is_made(bench: WatchBench) -> None:
    bench.submit("exec sleep 600")
    until(bench.log.is_file, "a log")  # the job's own: it would come back after it is removed
    bench.log.write_text("hello\n")
    answer = bench.watch()
    assert answer.code == 3
    said = " ".join(answer.out.split())
    assert "does not tell (yet) which trainer writes it. Tried: " in said
    assert "step_line" in said and not bench.root.exists()
    bench.log.unlink()
    assert "is not there yet" in " ".join(bench.watch().out.split())
    assert not bench.root.exists()
    unknown = bench.tr11("watch", "999", "--log", "x", "--scheduler", "local", "--once")
    assert unknown.code == 3 and "knows no job 999" in unknown.err
    process = bench.tr11("watch", str(os.getpid()), "--log", "x", "--scheduler", "local")
    assert (process.code, len(process.err.splitlines())) == (3, 1), process
    assert (
        f"{os.getpid()} is a process of this machine" in process.err and "tr11 adopt" in process.err
    )
    wrong = bench.watch("--dialect", "none-such")
    assert wrong.code == 2 and "is no dialect" in wrong.err
    bench.watch("--dialect", "torchtitan")
    other = bench.submit("exec sleep 600")
    taken = bench.watch("--dialect", "torchtitan", "--directory", f"tr11-watch-{int(other) - 1}")
    assert taken.code == 2 and "give another one" in taken.err


def test_a_watcher_that_is_frozen_in_its_look_does_not_block_others(
    bench: WatchBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.submit("exec sleep 600")
    until(bench.log.is_file, "a log")
    bench.watch("--dialect", "torchtitan")
    monkeypatch.setattr("tr11ops.cli.watch.ALONE_SECONDS", 0.2)
    with (bench.root / "state/watched.lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        blocked = bench.watch()
    assert blocked.code == 3 and "another watcher has been at one look" in blocked.err, blocked
    assert bench.watch().code == 0


def all_lines(log: Path, place: LogPlace, is_over: bool = False) -> tuple[list[bytes], LogPlace]:
    found: list[bytes] = []
    for piece in new_lines(log, place, time.time(), is_over):
        found += piece.lines
        place = piece.place
    return found, place


def test_a_log_is_read_on_whatever_becomes_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(FileNotFoundError):
        all_lines(log, LogPlace())
    log.write_bytes(b"one\ntwo\r\nbar 1\rbar 2\rthr")
    lines, place = all_lines(log, LogPlace())
    assert lines == [b"one", b"two", b"bar 1", b"bar 2"]
    with log.open("ab") as stream:
        stream.write(b"ee\nfo")
    lines, place = all_lines(log, place)
    assert lines == [b"three"]
    assert all_lines(log, place)[0] == []
    log.write_bytes(b"new\n")  # truncated, as by copytruncate
    lines, place = all_lines(log, place)
    assert lines == [b"new"]
    log.rename(tmp_path / "log.1")
    log.write_bytes(b"a longer one after rotation\n")
    lines, place = all_lines(log, place)
    assert lines == [b"a longer one after rotation"]
    with log.open("ab") as stream:
        stream.write(b"x\rbar 9/24")
    assert all_lines(log, place)[0] == [b"x"]
    assert all_lines(log, place, is_over=True)[0] == [b"x", b"bar 9/24"]
    os.utime(log, (1_700_000_000, 1_700_000_000))
    assert all_lines(log, place)[0] == [b"x", b"bar 9/24"]
    with log.open("wb") as stream:  # one line that never ends
        stream.truncate(40 << 20)
    assert sum(map(len, all_lines(log, LogPlace())[0])) >= 32 << 20


def test_the_middle_of_a_long_past_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    line = b"x" * 999 + b"\n"
    with log.open("wb") as stream:
        stream.write(b"first\n")
        for _ in range(100):
            stream.write(line * 1000)
        stream.write(b"last\n")
    lines, place = all_lines(log, LogPlace())
    assert (lines[0], lines[-1]) == (b"first", b"last")
    assert {len(one) for one in lines[1:-1]} == {999}
    assert place.offset == log.stat().st_size
    assert sum(map(len, lines)) < 40_000_000


def test_a_card_of_a_watched_job_lets_no_watchdog_act(bench: WatchBench) -> None:
    bench.submit("exec sleep 600")
    until(bench.log.is_file, "a log")
    bench.watch("--dialect", "torchtitan")
    with Path(bench.card).open("a") as stream:
        stream.write("\n[watch]\nact = true\n")
    refused = bench.tr11("status", "--run", bench.card)
    assert refused.code == 2 and "watch.act" in refused.err
