"""What is read of the training beside its steps: phases, events, the logs' sizes, nodes' warnings;
whole, torn or huge; and that every reader of metrics.jsonl understands the same lines.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.status_cases import NOW, record
from tr11ops.base.observed import Unknown, known
from tr11ops.goodput.history import read_metrics
from tr11ops.hub.upload import read_losses
from tr11ops.launch.margins import read_history
from tr11ops.logs.show import steps_since
from tr11ops.observe.files import (
    LONGEST_TAIL_BYTES,
    TAIL_BYTES,
    progress_at,
    read_attempts,
    read_steps,
)
from tr11ops.observe.look import facts_of
from tr11ops.observe.observations import Validation
from tr11ops.observe.snapshot import Attempt, newest_attempt
from tr11ops.observe.training_files import (
    EVENTS_KEPT,
    PHASES_HEAD_BYTES,
    PHASES_TAIL_BYTES,
    last_measured,
    read_compute_times,
    read_corruptions,
    read_events,
    read_launch_ends,
    read_logs,
    read_node_warnings,
    read_phases,
    read_validations,
    see_training,
)
from tr11ops.report.series import read_series
from tr11ops.runcard.card import load_card, shipped_folder
from tr11ops.runcard.watching import WatchSection
from tr11ops.status.extra_observations import best_rates
from trainer.contract.attempt import EndMarker, PhaseWriter
from trainer.contract.compute_record import ComputeTimes
from trainer.contract.files import append_line, write_json
from trainer.contract.metrics_record import StepRecord
from trainer.contract.paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    result = RunPaths(tmp_path, "demo", "main")
    result.logs.mkdir(parents=True)
    return result


def refuse(line: str) -> None:
    raise AssertionError(line)


def write_phases(path: Path, launch: int, *entries: tuple[str, int, float]) -> None:
    writer = PhaseWriter(path, launch, refuse)
    for phase, iteration, time in entries:
        writer.enter(phase, iteration, time)


# ----------------------------------------------------------------------------- phases
def test_what_the_trainer_wrote_becomes_spans(paths: RunPaths) -> None:
    """A phase lasts until the next one of its launch; where a launch broke off, no one knows its
    end.
    """
    path = paths.phases("7")
    write_phases(
        path,
        1,
        ("starting", 0, 1.0),
        ("loading", 0, 11.0),
        ("training", 100, 16.0),
        ("saving", 120, 40.0),
    )
    write_phases(path, 2, ("starting", 0, 90.0), ("loading", 0, 99.0))
    found = read_phases(paths, ["7"])
    assert isinstance(found, tuple)
    assert [
        (span.launch, span.phase, span.iteration, span.began, span.ended) for span in found
    ] == [
        (1, "starting", 0, 1.0, 11.0),
        (1, "loading", 0, 11.0, 16.0),
        (1, "training", 100, 16.0, 40.0),
        (1, "saving", 120, 40.0, None),
        (2, "starting", 0, 90.0, 99.0),
        (2, "loading", 0, 99.0, None),
    ]
    assert {span.job_id for span in found} == {"7"}
    assert read_phases(paths, ["none"]) == ()


def test_torn_and_foreign_lines_are_left_out(paths: RunPaths) -> None:
    path = paths.phases("7")
    path.parent.mkdir(parents=True)
    good = json.dumps({"time": 5.0, "phase": "training", "iteration": 1, "launch": 1})
    path.write_bytes(
        b'{"time": 1\n\xff\xfe\n[]\n{"time": NaN, "phase": "x", "iteration": 1, "launch": 1}\n'
        + good.encode()
    )
    assert read_phases(paths, ["7"]) == (), "the last line may still be being written"
    append_line(path, "")
    found = read_phases(paths, ["7"])
    assert isinstance(found, tuple)
    assert [span.phase for span in found] == ["training"]


def test_of_a_long_file_the_begin_and_the_end_are_read(paths: RunPaths) -> None:
    path = paths.phases("7")
    write_phases(path, 1, ("starting", 0, 1.0), ("loading", 0, 11.0), ("training", 0, 16.0))
    line = json.dumps({"time": 20.0, "phase": "data-wait", "iteration": 1, "launch": 1}) + "\n"
    with path.open("a") as stream:
        stream.write(line * ((PHASES_HEAD_BYTES + PHASES_TAIL_BYTES) // len(line) + 100))
    write_phases(path, 1, ("evaluating", 900, 1000.0), ("training", 900, 1300.0))
    tracemalloc.start()
    found = read_phases(paths, ["7"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(found, tuple)
    assert [span.phase for span in found[:2]] == ["starting", "loading"]
    assert [span.phase for span in found[-2:]] == ["evaluating", "training"]
    assert found[-2].ended == 1300.0
    assert len(found) * len(line) < PHASES_HEAD_BYTES + PHASES_TAIL_BYTES
    assert peak < 2 << 20
    gap = [span for span in found if span.ended is None]
    assert len(gap) == 2, "nothing is made up about what lies between the two parts"


def test_phases_that_cannot_be_read_are_unknown(paths: RunPaths) -> None:
    paths.phases("7").mkdir(parents=True)
    assert isinstance(read_phases(paths, ["7"]), Unknown)


# ----------------------------------------------------------------------------- events
def test_events_are_the_records_that_are_no_steps(paths: RunPaths) -> None:
    rows = [
        {"kind": "step", **to_builtins(record(1)), "time": 1.0, "job_id": "7"},
        {"kind": "spike", "iteration": 2, "what": "loss", "time": 2.0, "job_id": "7"},
        {"kind": "roll-back", "to": 100, "skip": "2-9", "time": 3.0, "job_id": "7"},
        {"iteration": 4, "time": 4.0},
        {"kind": 5, "time": 5.0},
        {"kind": "no-time"},
    ]
    paths.metrics.write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + 'null\n{"kind": "cut"'
    )
    found = read_events(paths)
    assert isinstance(found, tuple)
    assert [(event.kind, event.time, event.job_id) for event in found] == [
        ("spike", 2.0, "7"),
        ("roll-back", 3.0, "7"),
    ]
    assert found[1].values == {"to": 100, "skip": "2-9"}


def test_no_metrics_are_no_events_unreadable_ones_are_unknown(paths: RunPaths) -> None:
    assert read_events(paths) == ()
    paths.metrics.mkdir()
    assert isinstance(read_events(paths), Unknown)


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_bytes_break_the_reader_of_events(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    found = RunPaths(tmp_path_factory.mktemp("run"), "demo", "main")
    found.logs.mkdir(parents=True)
    found.metrics.write_bytes(b"\n".join(lines))
    assert isinstance(read_events(found), tuple)


def test_many_events_in_a_log_of_gigabytes(paths: RunPaths) -> None:
    line = json.dumps({"kind": "validation", "time": 1.0}) + "\n"
    with paths.metrics.open("wb") as stream:
        stream.truncate(2 << 30)  # a hole: no disk is used
        stream.seek(0, os.SEEK_END)
        stream.write(b"\n" + line.encode() * 1000)
    tracemalloc.start()
    found = read_events(paths)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(found, tuple)
    assert len(found) == EVENTS_KEPT
    assert peak < 8 * TAIL_BYTES


# ----------------------------------------------------------------------------- logs, nodes, facts
def validation(iteration: int, loss: object, **more: object) -> str:
    """A line of metrics.jsonl, as the trainer writes it."""
    value = {"kind": "validation", "name": "valid", "iteration": iteration, "lm_loss": loss}
    return json.dumps({**value, "time": NOW + iteration, "job_id": "7", **more})


def test_evaluations_are_found_behind_thousands_of_steps(paths: RunPaths) -> None:
    """Beyond the tail that holds events: a large run evaluates every thousand steps."""
    step = json.dumps({"kind": "step", "note": "x" * (2 * TAIL_BYTES)})
    lines = (
        validation(100, 2.5), step, validation(200, None), validation(300, 2.4, time="late"),
        validation(400, 2.3, name="code"), step, '{"kind": "validation"', validation(500, 2.2),
    )  # fmt: skip
    for line in lines:
        append_line(paths.metrics, line)
    assert read_validations(paths) == (
        Validation("valid", 100, 2.5, NOW + 100),
        Validation("code", 400, 2.3, NOW + 400),
        Validation("valid", 500, 2.2, NOW + 500),
    )
    assert see_training(paths, ()).validations == read_validations(paths)
    assert see_training(paths, (), evaluates=False).validations == ()
    back = {"kind": "roll-back", "time": NOW + 501, "to": 400, "by": "ana"}
    append_line(paths.metrics, json.dumps(back))
    assert [one.iteration for one in known(read_validations(paths), ())] == [100, 400]
    append_line(paths.metrics, json.dumps({**back, "kind": "roll-back-undone", "to": 500}))
    assert [one.iteration for one in known(read_validations(paths), ())] == [100, 400, 500]
    append_line(paths.metrics, "x" * LONGEST_TAIL_BYTES)
    assert read_validations(paths) == (), "no more is read of a log of gigabytes"
    paths.metrics.unlink()
    assert read_validations(paths) == ()
    paths.metrics.mkdir()
    assert isinstance(read_validations(paths), Unknown)


def test_sizes_and_ages_of_the_logs(paths: RunPaths) -> None:
    assert read_logs(paths) == ()
    paths.main_log.write_bytes(b"x" * 77)
    os.utime(paths.main_log, (NOW, NOW - 5))
    paths.metrics.write_bytes(b"")
    found = read_logs(paths)
    assert isinstance(found, tuple)
    assert [(log.name, log.bytes) for log in found] == [("main_log.txt", 77), ("metrics.jsonl", 0)]
    assert found[0].changed == NOW - 5
    paths.main_log.unlink()
    paths.main_log.symlink_to(paths.main_log)
    assert isinstance(read_logs(paths), Unknown)


def test_warnings_of_the_newest_attempts_nodes(paths: RunPaths) -> None:
    checks = [
        {"name": "memory", "result": "fine", "why": ""},
        {"name": "throttling", "result": "warning", "why": "hot"},
    ]
    for job_id, node in (("6", "n01"), ("7", "n02")):
        write_json(
            paths.attempt(job_id) / "nodes" / f"{node}.json", {"node": node, "checks": checks}
        )
        os.utime(paths.attempt(job_id), (NOW, NOW + int(job_id)))
    seen = see_training(paths, read_attempts(paths))
    assert isinstance(seen.node_warnings, tuple)
    assert [(found.node, found.check, found.why) for found in seen.node_warnings] == [
        ("n02", "throttling", "hot")
    ]
    # A task that finds another one training goes back into the queue: what it leaves is newer, and
    # says nothing.
    write_json(
        paths.attempt("8") / "verdict.json",
        {"reason": "superseded", "launches": 0, "message": "7 trains"},
    )
    os.utime(paths.attempt("8"), (NOW, NOW + 8))
    attempts = read_attempts(paths)
    assert see_training(paths, attempts).node_warnings == seen.node_warnings
    assert isinstance(attempts, tuple) and [one.gave_way for one in attempts] == [
        True,
        False,
        False,
    ]
    assert newest_attempt(attempts) == attempts[1] and attempts[0].why == ""
    write_json(paths.attempt("7") / "nodes" / "n03.json", {"checks": [3]})
    assert isinstance(read_node_warnings(paths, "7"), Unknown)


def test_suspects_of_every_check_oldest_first(paths: RunPaths) -> None:
    assert read_corruptions(paths) == ()
    for name, when, how in (("7-1-20", 20.0, "undecided"), ("6-1-10", 10.0, "repeat")):
        suspect = {"rank": 3, "host": f"n{name[0]}", "gpu": "GPU 3", "how": how}
        value = {
            "time": when,
            "iteration": int(when),
            "suspects": [suspect],
            "job_id": "7",
            "launch": 1,
        }
        write_json(paths.corruptions / f"{name}.json", value)
    found = read_corruptions(paths)
    assert isinstance(found, tuple)
    assert [(one.node, one.iteration, one.certain) for one in found] == [
        ("n6", 10, True),
        ("n7", 20, False),
    ]
    assert (
        found[0].why
        == "rank 3 on n6 (GPU 3) computed the same micro batch twice, with different results"
    )
    assert see_training(paths, ()).corruptions == found
    (paths.corruptions / "8-1-1.json").write_text('{"suspects": [3]}')
    assert isinstance(read_corruptions(paths), Unknown)


def write_times(
    paths: RunPaths, rank: int, launch: int = 1, job_id: str = "7", steps: int = 10
) -> None:
    host = f"n{rank // 8 + 1:02d}"
    times = ComputeTimes(rank, host, launch, 1.7e9, 40, steps, {"forward": 0.5}, 0.6, 0, 0)
    write_json(paths.compute(job_id, rank), to_builtins(times))


def test_the_ranks_own_compute_times_of_the_newest_launch(paths: RunPaths) -> None:
    assert read_compute_times(paths, "7") == ()
    for rank, launch in ((0, 2), (10, 2), (2, 2), (11, 1)):
        write_times(paths, rank, launch)
    paths.compute("7", 1).write_text('{"rank": 1, "ho')
    (paths.compute("7", 1).parent / ".rank-3.json.77").write_text("being written")
    paths.compute("7", 4).write_text(json.dumps({"rank": 4, "padding": "x" * 100_000}))
    found = read_compute_times(paths, "7")
    assert isinstance(found, tuple) and [times.rank for times in found] == [0, 2, 10], (
        "torn and huge ones are left out"
    )
    attempt = Attempt("7", 5.0, None)
    assert see_training(paths, (attempt,)).compute_times == found
    ended = EndMarker("finished", 40, 40, False, "", 6.0, "n01", "7")
    assert see_training(paths, (replace(attempt, end=ended),)).compute_times == (), (
        "nothing runs there any more"
    )
    for path in paths.compute("7", 0).parent.iterdir():
        path.write_text("[]")
    assert isinstance(read_compute_times(paths, "7"), Unknown)


def test_an_attempt_that_ended_at_once_hides_nothing_that_the_one_before_measured(
    paths: RunPaths,
) -> None:
    write_times(paths, 0, job_id="7")
    write_times(paths, 0, job_id="8", steps=1)
    attempts = (Attempt("8", 6.0, None), Attempt("7", 5.0, None))
    assert last_measured(paths, attempts) == read_compute_times(paths, "7") != ()
    assert last_measured(paths, attempts[:1]) == ()


def test_the_ends_of_launches(paths: RunPaths) -> None:
    for launch, end in ((1, 50.0), (2, 90.0), (3, None)):
        write_json(
            paths.attempt("7") / "launches" / f"{launch}.json",
            {"launch": launch, "nodes": ["n1"], "start": 1.0, "end": end},
        )
    found = read_launch_ends(paths, "7")
    assert isinstance(found, tuple)
    assert [(end.launch, end.time) for end in found] == [(1, 50.0), (2, 90.0)]
    (paths.attempt("7") / "launches" / "4.json").write_text("{")
    assert isinstance(read_launch_ends(paths, "7"), Unknown)
    assert read_launch_ends(paths, "8") == ()


def test_whether_another_launch_follows_is_a_field_and_was_words_once(paths: RunPaths) -> None:
    """The line is for people: where the field is there, what the line says does not count."""
    ends, again = "ending this task: no spare node is left", "starting again: without n1"
    decided: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"decision": again}, False),
        ({"decision": ends}, True),
        ({"decision": "stopping: it would fail again"}, True),
        ({"decision": "no launch follows: no spare node is left", "is_last": True}, True),
        ({"decision": "ending this task; the next launch has its nodes", "is_last": False}, False),
    ]
    for number, (said, _) in enumerate(decided, 1):
        write_json(
            paths.attempt("7") / "launches" / f"{number}.json",
            {"launch": number, "nodes": ["n1"], "start": 1.0, "end": 9.0, **said},
        )
    found = known(read_launch_ends(paths, "7"), ())
    assert [end.is_last for end in found] == [is_last for _, is_last in decided]


def test_without_attempts_there_is_nothing_to_know_of_them(paths: RunPaths) -> None:
    seen = see_training(paths, ())
    assert (seen.phases, seen.events, seen.logs, seen.node_warnings) == ((), (), (), ())
    away = Unknown("no rights")
    assert see_training(paths, away).phases is away


def test_the_card_says_what_is_a_fault() -> None:
    changes = [
        "watch.stall_iterations=7",
        "watch.slow_percent=5",
        "logging.interval=2",
        "checkpoint.interval_minutes=90",
    ]
    facts = facts_of(load_card(shipped_folder() / "demo.toml", changes, {}))
    assert (facts.watch.stall_iterations, facts.watch.slow_percent) == (7, 5)
    assert (facts.log_interval, facts.checkpoint_minutes) == (2, 90)
    usual = facts_of(load_card(shipped_folder() / "demo.toml", [], {}))
    assert usual.watch.stall_iterations == WatchSection().stall_iterations


STEPS = 8


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = StepRecord(number, 100, 8 * number, 80 * number, 1.5, 1e-4, 8, 2.5, 0.3, 5.0, 150.0)
    return {
        "kind": "step",
        **to_builtins(record),
        "time": 1000.0 + number,
        "job_id": "12",
        **changes,
    }


def test_where_the_readers_differed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "demo", "main")
    paths.logs.mkdir(parents=True)
    old = step(STEPS)
    del old["kind"]  # the report left such a step out
    lines = [
        *(step(number) for number in range(1, STEPS)),
        old,
        step(90, iteration=-1),  # all but one took it for a step
        step(91, iteration="91"),  # most took the text for a number
        step(92, iteration=True),
        {"kind": 5, "iteration": 93, "time": 1093.0},
    ]
    half = json.dumps(step(94))  # goodput and the report took a line that was being written
    paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in lines) + half)
    observed = read_steps(paths)
    assert isinstance(observed, tuple) and [each.record.iteration for each in observed] == [
        *range(1, STEPS + 1)
    ]
    assert [mark.iteration for mark in read_metrics(paths.metrics)] == [*range(1, STEPS + 1)]
    series = read_series(paths.metrics)
    assert series.total == STEPS and series.points[-1].iteration == STEPS
    last = progress_at(paths.metrics, 1e9)
    assert last is not None and last.iteration == STEPS
    assert steps_since(paths.metrics, 0.0) == STEPS
    assert read_history(paths).step_iteration == STEPS
    assert best_rates(paths) == (150.0, 5.0)
    assert (
        read_losses(paths.metrics, STEPS).train == 2.5
        and read_losses(paths.metrics, 94).train is None
    )
