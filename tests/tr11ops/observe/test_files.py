"""Log tails and step lines: the formats of several trainings, cut lines, bytes that are no text,
files of gigabytes. Of a directory that this user may not read everything is unknown, and nothing is
concluded from it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec import to_builtins

from tests.tr11ops.job_queue import Queue
from tests.tr11ops.status_cases import pending, record, running
from tr11ops.base.observed import Unknown, known
from tr11ops.cli.main import execute
from tr11ops.cluster.base import Job, JobState
from tr11ops.detect.detector import Severity
from tr11ops.detect.registry import detect_all
from tr11ops.dialects.reading import step_record
from tr11ops.goodput.history import read_history
from tr11ops.observe import files as observe_files
from tr11ops.observe.files import (
    LONGEST_TAIL_BYTES,
    STEPS_KEPT,
    TAIL_BYTES,
    read_checkpoints,
    read_heartbeats,
    read_steps,
)
from tr11ops.observe.look import look_now, observe
from tr11ops.observe.snapshot import SOUND_LOSSES, RunFacts
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.answer import answer
from tr11ops.watchdog.verdict import VerdictWord, judge
from trainer.contract.metrics_record import StepRecord, format_step
from trainer.contract.paths import RunPaths
from trainer.contract.state_file import tail_lines

LOGS = Path(__file__).parents[2] / "data" / "logs"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    result = RunPaths(tmp_path, "demo", "main")
    result.logs.mkdir(parents=True)
    return result


def only_step(name: str) -> StepRecord:
    found = [
        step
        for line in (LOGS / name).read_text().splitlines()
        if (step := step_record(line)) is not None
    ]
    assert len(found) == 1
    return found[0]


def test_the_line_of_the_176b_training_is_read() -> None:
    step = only_step("tr11.txt")
    assert (step.iteration, step.total_iterations, step.lm_loss, step.grad_norm) == (
        31219,
        115311,
        5.098124,
        960.351,
    )
    assert (step.consumed_samples, step.consumed_tokens, step.tflops) == (
        47768496,
        97829879808,
        149.77,
    )
    assert step.consumed_tokens == 2048 * step.consumed_samples


def test_a_line_without_a_loss_is_read_as_nan() -> None:
    step = only_step("tr8.txt")
    assert step.iteration == 9027
    assert math.isnan(step.lm_loss)
    assert step.loss_scale == 8192.0


def test_milliseconds_are_read_as_seconds() -> None:
    step = only_step("tr1.txt")
    assert (step.iteration, step.seconds_per_iteration) == (29050, 13.5429)
    assert math.isnan(step.tflops)


finite = st.floats(0, 1e6, allow_nan=False)


@given(
    iteration=st.integers(0, 10**8 - 1),
    samples=st.integers(0, 10**12 - 1),
    loss=st.one_of(st.floats(1e-6, 1e6), st.just(math.nan), st.just(math.inf)),
    norm=st.one_of(st.none(), finite),
    seconds=finite,
    prefix=st.sampled_from(["", "[default7]:", "7: "]),
)
def test_what_is_written_is_read_back(  # hypothesis calls it by name
    iteration: int, samples: int, loss: float, norm: float | None, seconds: float, prefix: str
) -> None:
    """Reading gives the values as printed: printing what was read gives the very same line."""
    written = record(
        iteration,
        consumed_samples=samples,
        lm_loss=loss,
        grad_norm=norm,
        seconds_per_iteration=seconds,
    )
    line = format_step(written)
    read = step_record(prefix + line)
    assert read is not None
    assert format_step(read) == line
    assert (read.iteration, read.consumed_samples) == (iteration, samples)


@given(st.text(max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    step_record(text)
    step_record(f" iteration 5/ 10 | {text} | consumed samples: 4 |")


# ----------------------------------------------------------------------------- files
def test_metrics_come_first_and_null_is_not_a_number(paths: RunPaths) -> None:
    rows = [
        {"kind": "step", **to_builtins(record(n)), "time": 100.0 + n, "job_id": "12"}
        for n in (1, 2, 3)
    ]
    rows[2]["lm_loss"] = None
    rows.insert(2, {"kind": "validation", "iteration": 2, "lm_loss": 2.0})
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths.main_log.write_text(format_step(record(77)) + "\n")
    found = read_steps(paths)
    assert not isinstance(found, Unknown)
    assert [step.record.iteration for step in found] == [1, 2, 3]
    assert [step.time for step in found] == [101.0, 102.0, 103.0]
    assert math.isnan(found[-1].record.lm_loss)
    assert found[-1].job_id == "12"


def test_the_main_log_serves_where_metrics_say_nothing(paths: RunPaths) -> None:
    paths.metrics.write_text(
        '{"half": \n[1, 2]\nnull\n{"kind": "step", "iteration": "x"}\n' + "[" * 5000 + "\n"
    )
    paths.main_log.write_bytes((LOGS / "mixed.txt").read_bytes())
    found = read_steps(paths)
    assert not isinstance(found, Unknown)
    assert [step.record.iteration for step in found] == [31218, 31219], (
        "the half-written line 31220 does not count"
    )
    assert found[0].time is None


def test_losses_that_are_no_numbers_are_read_from_their_beginning(paths: RunPaths) -> None:
    """Else no one knows which checkpoint is from before: the last ones may be of bad weights."""

    def written(count: int, first_bad: int) -> list[int]:
        rows = [{"kind": "step", **to_builtins(record(n)), "time": 1.0} for n in range(count)]
        for row in rows[first_bad:]:
            row["lm_loss"] = None if row["iteration"] % 7 else 4.9
        paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = read_steps(paths)
        assert isinstance(found, tuple)
        return [step.record.iteration for step in found]

    assert written(2000, 2000) == list(range(2000 - STEPS_KEPT, 2000))
    assert written(2000, 1900) == list(range(2000 - STEPS_KEPT, 2000))
    began = written(2000, 301)
    assert began[-1] == 1999 and 301 - SOUND_LOSSES <= began[1] <= 301
    assert written(1000, 0) == list(range(1000))


@pytest.mark.parametrize(
    "name", ["learning_rate", "grad_norm", "num_zeros", "curriculum_length", "skipped_iterations"]
)
@pytest.mark.parametrize("value", ["high", True, [1], {}])
def test_a_step_with_something_else_than_a_number_is_none(
    paths: RunPaths, name: str, value: object
) -> None:
    rows = [{"kind": "step", **to_builtins(record(n)), "time": 1.0} for n in (1, 2)]
    rows[1][name] = value
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_steps(paths)
    assert isinstance(found, tuple)
    assert [step.record.iteration for step in found] == [1]


def test_a_line_being_written_is_not_read(paths: RunPaths) -> None:
    text = json.dumps({"kind": "step", **to_builtins(record(1)), "time": 1.0})
    paths.metrics.write_text(text + "\n" + text[:-1])
    found = read_steps(paths)
    assert isinstance(found, tuple)
    assert len(found) == 1


def test_a_number_without_end_ends_no_look(paths: RunPaths) -> None:
    """JSON knows integers of any length; no float holds one of 400 digits, and the command ended
    with a traceback.
    """
    beat = {
        "rank": 0,
        "host": "n1",
        "pid": 1,
        "phase": "training",
        "iteration": 3,
        "job_id": "1",
        "time": 10**400,
    }
    paths.heartbeats.mkdir(parents=True)
    (paths.heartbeats / "0.json").write_text(json.dumps(beat))
    found, _ = read_heartbeats(paths)
    assert isinstance(found, Unknown) and "`time` is out of range" in found.why
    history = read_history(RunDirectory(paths, paths.root / "switch"), ())
    assert known(history.attempts, None) == ()


def test_no_log_at_all_is_no_step_yet(paths: RunPaths) -> None:
    assert read_steps(paths) == ()


def test_an_unreadable_log_is_unknown_not_empty(paths: RunPaths) -> None:
    paths.metrics.mkdir()
    found = read_steps(paths)
    assert isinstance(found, Unknown)
    assert str(paths.metrics) in found.why


def test_a_log_whose_tail_holds_no_step_is_unknown_not_empty(paths: RunPaths) -> None:
    with paths.main_log.open("wb") as stream:
        stream.write(format_step(record()).encode() + b"\n")
        stream.truncate(LONGEST_TAIL_BYTES + 4096)
    found = read_steps(paths)
    assert isinstance(found, Unknown)
    assert "no step in its last" in found.why


def test_steps_are_found_behind_a_crash_of_many_ranks(paths: RunPaths) -> None:
    noise = "".join(
        f"[default{rank % 8}]:  File train.py, line {rank}, in step\n" for rank in range(20_000)
    )
    paths.main_log.write_text(format_step(record(5)) + "\n" + noise)
    assert TAIL_BYTES < paths.main_log.stat().st_size < LONGEST_TAIL_BYTES
    found = read_steps(paths)
    assert isinstance(found, tuple)
    assert [step.record.iteration for step in found] == [5]


@pytest.mark.parametrize("name", ["metrics", "main_log"])
def test_a_log_of_two_gigabytes_costs_little_memory(paths: RunPaths, name: str) -> None:
    path: Path = getattr(paths, name)
    line = {
        "metrics": json.dumps({"kind": "step", **to_builtins(record(9))}),
        "main_log": format_step(record(9)),
    }[name]
    with path.open("wb") as stream:
        stream.truncate(2 << 30)  # a hole: no disk is used
        stream.seek(0, 2)
        stream.write(b"\n" + line.encode() + b"\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    tracemalloc.start()
    try:
        found = read_steps(paths)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, tuple)
    assert found[-1].record.iteration == 9
    assert peak < 8 << 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * 512 < 64 << 20


@given(
    st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=30),
    st.integers(1, 400),
)
def test_tails_are_whole_lines_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + b"unfinished")
    found, complete = tail_lines(path, size)
    expected = [line.decode("utf-8", errors="replace") for line in lines]
    assert found == (expected[len(expected) - len(found) :] if found else [])
    assert not complete or found == expected


@pytest.mark.parametrize("moved_on", [False, True])
def test_a_save_beside_the_look_is_no_missing_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved_on: bool
) -> None:
    """`latest` moves on, and what it named is removed, between the list and the file."""

    def save(step: int) -> None:
        (tmp_path / f"global_step{step}").mkdir()
        (tmp_path / "latest").write_text(f"global_step{step}")

    save(100)
    listed = observe_files.checkpoint_steps
    later = [200]

    def list_beside_a_save(folder: Path) -> list[int]:
        steps = listed(folder)
        if later:
            save(later.pop())
            if moved_on:
                (tmp_path / "global_step100").rmdir()
                steps = listed(folder)
        return steps

    monkeypatch.setattr(observe_files, "checkpoint_steps", list_beside_a_save)
    found = read_checkpoints(tmp_path)
    assert not isinstance(found, Unknown)
    assert found.latest in found.steps


STRANGER = 65534
LOOKS_AT_JOBS = {
    "status",
    "handover",
    "pulse",
    "launch",
    "kill",
    "pause",
    "resume",
    "checkpoint-now",
}


@pytest.fixture(params=["the folder itself", "the folder above it"])
def directory(request: pytest.FixtureRequest, outside: Path) -> Iterator[RunDirectory]:
    """A run directory behind a closed door, seen by a user who is not root."""
    above = outside / "scratch"
    root = above / "run"
    (root / "state" / "submissions").mkdir(parents=True)
    closed = root if request.param == "the folder itself" else above
    made = RunDirectory(RunPaths(root, "tr11-176B-ml", "main"), root / "kill-switch")
    made.mark  # noqa: B018  worked out while it can be read
    closed.chmod(0o000)
    before = os.geteuid()
    if before == 0:
        os.seteuid(STRANGER)
    try:
        yield made
    finally:
        os.seteuid(before)
        closed.chmod(0o755)


def held(directory: RunDirectory) -> Job:
    mark = directory.comment("20220501-120000-00000000")
    return pending(reason="JobHeldUser", comment=mark)


@pytest.mark.parametrize("what", ["held", "waits", "nothing", "leaves", "runs"])
def test_it_is_unknown_whatever_the_queue_shows(directory: RunDirectory, what: str) -> None:
    job = held(directory)
    jobs = {
        "held": (job,),
        "waits": (pending(comment=job.comment),),
        "nothing": (),
        "leaves": (running(state=JobState.COMPLETING, comment=job.comment),),
        "runs": (running(comment=job.comment),),
    }[what]
    facts = RunFacts("tr11-176B-ml", "main", directory.root, directory.kill_switch, nodes=48)
    queue = Queue(*jobs)
    seen = observe(directory, facts, queue, look_now(directory, facts, queue))
    findings = detect_all(seen)
    verdict = judge(seen, findings)
    assert (verdict.word, verdict.exit_code) == (VerdictWord.UNKNOWN, 3), verdict
    assert all(finding.severity < Severity.CRITICAL for finding in findings), findings
    assert answer(seen, findings, verdict).may_sleep is None


@pytest.mark.parametrize(
    "words",
    [("status",), ("handover", "--dry-run"), ("pulse", "--no-email"), ("pulse", "--act"), ("advise",), ("goodput",),
     ("nodes", "list"), ("checkpoints", "list"), ("alerts", "list"), ("launch", "--dry-run"), ("cron", "status"),
     ("kill", "--yes"), ("kill", "--now", "--yes"), ("pause", "--yes"), ("resume", "--yes"), ("checkpoint-now", "--yes"),
     ("profile", "--yes"), ("compute-check", "--yes")],
    ids=" ".join,
)  # fmt: skip
def test_every_command_says_so(
    words: tuple[str, ...],
    directory: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one or two lines, with the exit code for what could not be observed."""
    monkeypatch.setenv("TR11_LOCAL_SCHEDULER", str(directory.root.parent.parent / "scheduler"))
    monkeypatch.setenv("COLUMNS", "80")
    overrides = ("--set", f"run.directory={directory.root}")
    where = ("--scheduler", "local") if words[0] in LOOKS_AT_JOBS else ()
    me = os.geteuid()
    os.seteuid(0 if os.getuid() == 0 else me)
    (spare := directory.root.parents[1] / "spare").mkdir()
    (directory.root.parents[1] / "scheduler").mkdir(mode=0o777)
    # imports, which a stranger may not
    execute([*words, "--run", "demo", "--set", f"run.directory={spare}", *where])
    capsys.readouterr()
    for path in (directory.root.parents[1] / "scheduler").rglob("*"):
        path.chmod(0o777)
    os.seteuid(me)
    code = execute([*words, "--run", "demo", *overrides, *where])
    out, err = capsys.readouterr()
    assert (code, "Traceback" in out + err) == (3, False), out + err
    assert "ermission denied" in out + err, out + err
    assert not any(
        word in err for word in ("nothing of this run is", "nothing stands", "nothing is queued")
    ), err
