"""`tr11 logs`: the end of a log of any size and content, and on across rotations and attempts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.logs.hub_server import Hub, serving
from tests.tr11ops.status_cases import record
from tr11ops.cli.logs import print_line
from tr11ops.logs.line_filter import LineQuery
from tr11ops.logs.lines import folded
from tr11ops.logs.reader import BLOCK_BYTES
from tr11ops.logs.show import Follower, LogSource, Query, follow
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.metrics_record import format_step

LOGS = Path(__file__).parents[2] / "data" / "logs"


def following(
    sources: Callable[[], Sequence[LogSource]], count: int, pause: Callable[[], bool]
) -> Iterator[str]:
    """`label line` of what is followed from the last `count` lines on."""
    return (f"{label} {line}".strip() for label, line in follow(sources, Query(lines=count), pause))


def test_a_large_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as stream:
        stream.seek(20 << 30)  # sparse: reading it all would never end
        stream.write(b"\nfirst\n" + b"x" * (3 * BLOCK_BYTES) + b"\nlast\n")
    assert [line[:5] for line in Follower(path, Query(lines=3)).begin()] == [
        "first",
        "xxxxx",
        "last",
    ]


def steps(*actions: Callable[[], object]) -> Callable[[], bool]:
    """A pause that does one action each time it is called, then ends the following."""
    waiting: Iterator[Callable[[], object]] = iter(actions)

    def pause() -> bool:
        action = next(waiting, None)
        if action is not None:
            action()
        return action is not None

    return pause


def append(path: Path, text: str) -> Callable[[], None]:
    def write() -> None:
        with path.open("a") as stream:
            stream.write(text)

    return write


def test_following_survives_everything_that_happens_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    pause = steps(
        append(path, "three\nfo"),
        append(path, "ur\n"),
        lambda: (path.rename(tmp_path / "log.1"), path.write_text("five\n")),
        path.unlink,
        append(path, "six\n"),
        lambda: path.write_text("7\n"),
        append(path, "unfinished"),
    )
    assert list(following(lambda: [LogSource("", path)], 1, pause)) == [
        "two",
        "three",
        "four",
        "five",
        "six",
        "7",
        "unfinished",
    ]


def test_new_sources_are_followed_from_their_beginning(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1\n2\n")
    sources = [LogSource("a", first)]
    pause = steps(lambda: (second.write_text("3\n4\n"), sources.append(LogSource("b", second))))
    assert list(following(lambda: sources, 1, pause)) == ["a 2", "b 3", "b 4"]


def logs(bench: LocalBench, *words: str) -> Answer:
    return bench.tr11("logs", "--run", str(bench.card), *words)


def test_the_main_log(bench: LocalBench) -> None:
    path = run_directory(bench).paths.main_log
    answer = logs(bench)
    assert answer.code == 1 and "has not started" in answer.err
    path.parent.mkdir(parents=True)
    path.write_bytes(b"zero\n[default0]:one\n\xff\xfe two\n")
    assert logs(bench, "-n", "2").out == "[default0]:one\n�� two\n"
    assert logs(bench, "-n", "0").out == ""
    assert logs(bench).out.count("\n") == 3


def test_one_workers_log_and_one_nodes(bench: LocalBench) -> None:
    directory = run_directory(bench)
    assert "no worker has written a log yet" in logs(bench, "--rank", "0").err
    for moment, (job, node, rank) in enumerate(
        (("7", "x1", 0), ("8", "x1", 0), ("8", "x1", 1), ("8", "x2", 2))
    ):
        path = directory.paths.attempt(job) / "workers" / node / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"job {job} rank {rank}\n")
        os.utime(directory.paths.attempt(job), (moment, moment))
    assert logs(bench, "--rank", "0").out == "job 8 rank 0\n"
    assert logs(bench, "--rank", "0", "--job", "7").out == "job 7 rank 0\n"
    assert logs(bench, "--node", "x1").out == "[rank 0] job 8 rank 0\n[rank 1] job 8 rank 1\n"
    wrong = logs(bench, "--rank", "9")
    assert (
        wrong.code == 2
        and "--rank 9: no such worker has written anything in attempt 8; there are logs of ranks 0, 1, 2 on nodes x1, x2"
        in wrong.err
    )
    (directory.paths.attempt("7") / "attempt.json").write_text('{"array_id": "5", "task_id": 3}')
    # as `tr11 status` names it
    assert logs(bench, "--rank", "0", "--job", "5_3").out == "job 7 rank 0\n"
    assert logs(bench, "--node", "x9").code == 2
    assert logs(bench, "--rank", "0", "--job", "../8").code == 2
    assert logs(bench, "--rank", "-1").code == 2


def test_several_ranks_and_nodes(bench: LocalBench) -> None:
    directory = run_directory(bench)
    for node, rank in (("x1", 0), ("x1", 1), ("x2", 2), ("x2", 3)):
        path = directory.paths.attempt("8") / "workers" / node / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"rank {rank}\n")
    assert logs(bench, "--rank", "1-2").out == "[rank 1] rank 1\n[rank 2] rank 2\n"
    assert logs(bench, "--rank", "0,3").out == "[rank 0] rank 0\n[rank 3] rank 3\n"
    assert (
        logs(bench, "--node", "x1", "--node", "x2", "--rank", "1,2").out
        == "[rank 1] rank 1\n[rank 2] rank 2\n"
    )


def write_main_log(bench: LocalBench) -> RunDirectory:
    """Two attempts: the second redoes a step; each has one warning."""
    directory = run_directory(bench)
    text = ""
    for job, first in (("7", 1), ("8", 3)):
        text += f"tr11: attempt {job} launch 1 on 2 nodes: n[1-2]\n"
        for step in range(first, first + 3):
            text += f"[default1]:{format_step(record(step))}\n"
        text += "[2022-05-01 03:56:11] PULSE: small is running for 1:00\n[default0]:x.py:1: UserWarning: careful\n"
        folder = directory.paths.attempt(job)
        folder.mkdir(parents=True)
        (folder / "attempt.json").write_text(json.dumps({"array_id": "5", "task_id": int(job)}))
    directory.paths.main_log.parent.mkdir(parents=True)
    directory.paths.main_log.write_text(text)
    ages = enumerate((9000, 8000, 7000, 60, 40, 20), 1)
    times = (
        json.dumps({"kind": "step", "iteration": step, "time": time.time() - age})
        for step, age in ages
    )
    directory.paths.metrics.write_text("\n".join(times) + "\n")
    return directory


def test_parts_of_the_main_log(bench: LocalBench) -> None:
    write_main_log(bench)
    assert logs(bench, "--level", "warning").out == "[default0]:x.py:1: UserWarning: careful\n" * 2
    assert logs(bench, "--level", "WARNING", "-n", "1").out.count("careful") == 1
    assert [
        line.split("/")[0].split()[-1]
        for line in logs(bench, "--grep", "iteration +3").out.splitlines()
    ] == list("33")
    assert logs(bench, "--iterations", "5").out.count("\n") == 3
    assert "PULSE" not in logs(bench, "--iterations", "5", "--no-pulse").out
    assert (
        logs(bench, "--attempt", "5_8").out.count("\n")
        == logs(bench, "--job", "8").out.count("\n")
        == 6
    )
    assert "iteration        3/" in logs(bench, "--since", "1h").out.splitlines()[0]
    assert logs(bench, "--since", "10s").out == ""


def test_the_summary(bench: LocalBench) -> None:
    write_main_log(bench)
    found = logs(bench, "--summary", "--json").json
    assert (found["schema"], found["steps"], found["last"]) == (1, 6, 5)
    assert [start["attempt"] for start in found["starts"]] == ["7", "8"] and found["starts"][1][
        "redone"
    ] == 1
    assert "7: first step 1" in logs(bench, "--summary").out


def test_another_trainings_log(bench: LocalBench) -> None:
    assert "960.351" in logs(bench, "--file", str(LOGS / "tr11.txt"), "--iterations", "31219").out
    assert "9,027 to 9,027" in logs(bench, "--file", str(LOGS / "tr8.txt"), "--summary").out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--level", "loud"], "must be one of debug, info"),
        (["--iterations", "9:1"], "empty range"),
        (["--since", "soon"], "is no time"),
        (["--grep", "("], "not a regular expression"),
        (["--json"], "--json goes with --summary"),
        (["--file", "/no/such/log"], "does not exist"),
        (["--file", "/dev/null"], "is not a regular file"),
        (["--file", "/x", "--remote", "a/b"], "exclude each other"),
        (["--summary", "--rank", "0"], "without --rank"),
        (["--remote", "nonsense"], "give OWNER/NAME"),
        (["--remote", "a/b..c"], "--remote"),
        (["--every", "0"], "--every 0"),
        (["--rank", "x"], "is no list of ranks"),
    ],
)
def test_what_makes_no_sense_is_refused(bench: LocalBench, words: list[str], told: str) -> None:
    write_main_log(bench)
    answer = logs(bench, *words)
    assert answer.code == 2 and told in answer.err and answer.err.count("\n") == 1


def test_an_attempt_that_the_log_does_not_know(bench: LocalBench) -> None:
    directory = write_main_log(bench)
    assert "2 launches, but none of this attempt" in logs(bench, "--attempt", "9").err
    directory.paths.main_log.write_text("no marks\n")
    assert "does not say where an attempt begins" in logs(bench, "--attempt", "9").err


def test_escapes_are_not_printed(bench: LocalBench) -> None:
    path = run_directory(bench).paths.main_log
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x1b[2J\x1b[31mred\x1b[0m\r\n")
    assert logs(bench).out == "red\n"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_long_line_is_folded_between_words_and_loses_none(width: int) -> None:
    line = (
        " iteration      129/  421 | consumed samples:        2056 | lm loss: 5.410500E+00 | grad norm: 0.910 | "
        * 3
    )
    shown = folded(line, width).splitlines()
    assert len(shown) > 1 and all(len(part) <= width for part in shown)
    assert all(part.startswith("    ") for part in shown[1:])
    assert "".join(" ".join(shown).split()) == "".join(line.split())
    assert max(map(len, folded("x" * 500, width).splitlines())) <= width
    assert (
        folded("short", width) == "short" and folded("\x1b[31m" + line, width) == "\x1b[31m" + line
    )


def test_lines_are_folded_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "word " * 40
    monkeypatch.setenv("COLUMNS", "60")
    print_line(line, flush=True)
    assert capsys.readouterr().out == line + "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_line(line, flush=True)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_filters_go_on_while_following(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("Traceback (most recent call last):\n")
    pause = steps(
        append(path, "  File\n"), append(path, "OSError: x\nusual\n"), append(path, "WARNING: y")
    )
    query = Query(LineQuery(level=30), lines=40)
    assert [line for _, line in follow(lambda: [LogSource("", path)], query, pause)] == [
        "Traceback (most recent call last):", "  File", "OSError: x", "WARNING: y",
    ]  # fmt: skip


def test_the_copy_on_the_hub(bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_notshown")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serving(Hub(b"one\ntwo\nthree\n")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert bench.tr11("logs", "--remote", "big/logs", "-n", "2").out == "two\nthree\n"
        assert hub.asked[0][1] == "Bearer hf_notshown"
        assert (
            "none: no line of a step" in bench.tr11("logs", "--remote", "big/logs", "--summary").out
        )
        missing = bench.tr11("logs", "--remote", "big/logs/other.txt")
        assert missing.code == 1 and "404" in missing.err and "notshown" not in missing.err
        hub.failures = [(503, "")] * 4
        away = bench.tr11("logs", "--remote", "big/logs")
        assert away.code == 3 and "nothing may be concluded" in away.err


def test_ctrl_c_ends_following_without_a_word(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    command = [
        sys.executable,
        "-c",
        "from tr11ops.cli.main import run; run()",
        "logs",
        "-f",
        "--file",
        str(path),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "one\n"
        append(path, "two\n")()
        assert process.stdout.readline() == "two\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("", "")
        assert process.returncode == 0


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a line\n" * 200_000)
    command = [
        sys.executable,
        "-c",
        "from tr11ops.cli.main import run; run()",
        "logs",
        "-n",
        "200000",
        "--file",
        str(path),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60.0) == 0


def test_a_launch_is_shown_by_its_task(bench: LocalBench) -> None:
    directory = run_directory(bench)
    directory.paths.main_log.parent.mkdir(parents=True)
    line = "tr11: attempt 75 launch 1 on 2 nodes: n[1-2]"
    directory.paths.main_log.write_text(f"{line} (70_3)\n{line}\n")
    assert logs(bench).out.splitlines() == ["tr11: attempt 70_3 launch 1 on 2 nodes: n[1-2]", line]
