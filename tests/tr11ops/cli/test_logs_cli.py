"""`tr11 logs`: the end of a log of any size and content, and on across rotations and attempts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.test_launch_cli import run_directory
from tr11ops.logtail import BLOCK_BYTES, Follower, Source, follow, tail_offset


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"")), max_size=12),
    st.booleans(),
    st.integers(0, 14),
)
def test_the_tail_is_the_last_lines(lines: list[bytes], ended: bool, count: int) -> None:
    content = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    whole = content.split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    with tempfile.TemporaryFile() as stream:
        stream.write(content)
        stream.flush()
        shown = content[tail_offset(stream.fileno(), len(content), count) :]
    wanted = whole[-count:] if count else []
    assert shown.split(b"\n")[: len(wanted)] == wanted and len(shown) <= sum(len(line) + 1 for line in wanted)


def test_a_large_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as stream:
        stream.seek(20 << 30)  # sparse: reading it all would never end
        stream.write(b"\nfirst\n" + b"x" * (3 * BLOCK_BYTES) + b"\nlast\n")
    assert [line[:5] for line in Follower(path).begin(3)] == [b"first", b"xxxxx", b"last"]


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
    seen = [line for _, line in follow(lambda: [Source("", path)], 1, pause)]
    assert seen == ["two", "three", "four", "five", "six", "7", "unfinished"]


def test_new_sources_are_followed_from_their_beginning(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1\n2\n")
    sources = [Source("a", first)]
    pause = steps(lambda: (second.write_text("3\n4\n"), sources.append(Source("b", second))))
    assert list(follow(lambda: sources, 1, pause)) == [("a", "2"), ("b", "3"), ("b", "4")]


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
    for moment, (job, node, rank) in enumerate((("7", "x1", 0), ("8", "x1", 0), ("8", "x1", 1), ("8", "x2", 2))):
        path = directory.worker_log(job, node, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"job {job} rank {rank}\n")
        os.utime(directory.paths.attempt(job), (moment, moment))
    assert logs(bench, "--rank", "0").out == "job 8 rank 0\n"
    assert logs(bench, "--rank", "0", "--job", "7").out == "job 7 rank 0\n"
    assert logs(bench, "--node", "x1").out == "[rank 0] job 8 rank 0\n[rank 1] job 8 rank 1\n"
    wrong = logs(bench, "--rank", "9")
    assert (
        wrong.code == 2
        and "--rank 9: there is no such worker in attempt 8; it has ranks 0 to 2, nodes x1, x2" in wrong.err
    )
    (directory.paths.attempt("7") / "attempt.json").write_text('{"array_id": "5", "task_id": 3}')
    assert logs(bench, "--rank", "0", "--job", "5_3").out == "job 7 rank 0\n"  # as `tr11 status` names it
    assert logs(bench, "--node", "x9").code == 2
    assert logs(bench, "--rank", "0", "--job", "../8").code == 2
    assert logs(bench, "--rank", "-1").code == 2
