"""Profiles on request and each rank's compute time, on a real training of one process, and on their own."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CPU
from test_stops import Processes, at, card, processes  # noqa: F401

from trainer import profile
from trainer.compute_record import EVERY_SECONDS, ComputeRecord
from trainer.contract import RunPaths
from trainer.lifecycle import Attempt, HeartbeatWriter, Limits, SignalFlag
from trainer.profile import ComputeClock, StepProfiler
from trainer.requests import Answer, ProfileAsk, Request
from trainer.switches import Switches


def test_a_running_training_is_traced_and_goes_on(processes: Processes, tmp_path: Path) -> None:  # noqa: F811
    config = card(tmp_path)
    paths = config.paths
    trainer = processes.start(config, "7")
    processes.wait(lambda: at(config, "7", 2))
    Request("profile", 11, "ana", steps=2).write(paths.profile_request)
    processes.wait(lambda: paths.answer(11).exists())
    answer = Answer.read(paths.answer(11))
    assert answer is not None and answer.step is not None and answer.job_id == "7"
    (trace,) = paths.profiles("7").iterdir()
    assert answer.message.startswith(str(trace)) and "MB" in answer.message
    assert trace.name == f"launch-1-iterations-{answer.step - 1}-{answer.step}-rank-0.trace.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any("scaled_dot_product" in str(name) for name in names)
    assert not paths.profile_request.exists() and "profiling iterations" in processes.output("7")
    goes_on = answer.step + 2
    processes.wait(lambda: at(config, "7", goes_on))
    assert trainer.poll() is None
    own = json.loads(paths.compute("7", 0).read_text())
    assert own["steps"] == 1 and set(own["seconds"]) == {"forward", "backward", "optimizer"}
    assert all(0 < seconds < 60 for seconds in own["seconds"].values())


def profiler(folder: Path, rank: int = 0, workers: int = 2) -> StepProfiler:
    paths = RunPaths(folder, "run", "main", "")
    return StepProfiler(paths, Attempt("7", 1, paths.stop_request("7")), (rank, workers), CPU)


def answer_of(folder: Path, number: int) -> Answer | None:
    return Answer.read(RunPaths(folder, "run", "main", "").answer(number))


@pytest.mark.parametrize(
    ("said", "why"),
    [('"steps": 3, "rank": null', "there are 2 ranks"), ('"steps": "3"', "a profile has 1 to 10 steps")],
)
def test_a_malformed_request_is_refused_in_words(tmp_path: Path, said: str, why: str) -> None:
    paths = RunPaths(tmp_path, "run", "main", "")
    attempt = Attempt("7", 1, paths.stop_request("7"))
    switches = Switches(
        paths, Limits(paths.root / "kill-switch", None, None, 0.0), attempt, SignalFlag(),
        HeartbeatWriter(paths, 0, "7"), None, lambda own: torch.tensor(own, dtype=torch.int32).clamp(min=0).tolist(),
        True,
    )  # fmt: skip
    paths.profile_request.parent.mkdir(parents=True)
    paths.profile_request.write_text(f'{{"id": 5, {said}}}')
    ask = switches.agree(3, True).profile
    assert ask is not None
    profiler(tmp_path).start(ask, 3)
    answer = answer_of(tmp_path, 5)
    assert answer is not None and answer.message == f"nothing was profiled: {why}"


def test_what_cannot_be_profiled_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler(tmp_path).start(ProfileAsk(1, 3, 2), 5)
    assert answer_of(tmp_path, 1) == Answer(
        1, None, "nothing was profiled: there are 2 ranks", pytest.approx(time.time(), abs=60), "7"
    )  # type: ignore[arg-type]
    other = profiler(tmp_path)
    other.start(ProfileAsk(2, 3, 1), 5)  # of the other rank
    other.start(ProfileAsk(3, 3, 0), 5)
    assert answer_of(tmp_path, 2) is None and "under way" in str(answer_of(tmp_path, 3))
    monkeypatch.setattr(profile, "LARGEST_TRACE", 10)
    large = profiler(tmp_path)
    large.start(ProfileAsk(4, 1, 0), 5)
    torch.ones(3) + 1
    large.after_step(6)
    assert "ask for fewer steps" in str(answer_of(tmp_path, 4))
    assert list(RunPaths(tmp_path, "run", "main", "").profiles("7").iterdir()) == []


def test_a_profiler_that_fails_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("CUPTI is busy")

    monkeypatch.setattr("torch.profiler.profile", broken)
    own = profiler(tmp_path)
    own.start(ProfileAsk(1, 1, 0), 5)
    own.after_step(6)
    assert "RuntimeError: CUPTI is busy" in str(answer_of(tmp_path, 1))


def test_waiting_is_not_computing() -> None:
    clock = ComputeClock(CPU)
    clock.timed("forward", time.sleep)(0.2)
    assert clock.take()["forward"] < 0.1
    clock.timed("forward", lambda: sum(range(3_000_000)))()
    clock.timed("backward", lambda: sum(range(1_000)))()
    found = clock.take()
    assert 0 < found["backward"] < found["forward"] and clock.take() == {}


def test_on_a_gpu_events_are_read_once_all_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def synchronize(self) -> None:
            events.append("synchronize")

        def elapsed_time(self, other: Any) -> float:
            events.append("read")
            return 250.0

    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = ComputeClock(torch.device("cuda", 0))
    for _ in range(2):
        clock.timed("forward", lambda: None)()
    assert events == ["record"] * 4, "a step waits for no event"
    assert clock.take() == {"forward": 0.5} and events[4:] == ["synchronize", "read", "read"]


def test_the_record_is_a_mean_and_is_written_every_half_minute(tmp_path: Path) -> None:
    paths, now = RunPaths(tmp_path, "run", "main", ""), SimpleNamespace(time=100.0)
    record = ComputeRecord(paths, Attempt("7", 2, paths.stop_request("7")), 3, lambda: now.time)
    record.add(1, {"forward": 9.0})
    place = paths.compute("7", 3)
    assert json.loads(place.read_text())["seconds"] == {"forward": 9.0}
    record.add(2, {"forward": 1.0, "backward": 2.0})
    assert json.loads(place.read_text())["iteration"] == 1
    now.time += EVERY_SECONDS
    record.add(3, {"forward": 3.0, "backward": 4.0})
    found = json.loads(place.read_text())
    assert (found["iteration"], found["steps"], found["launch"], found["rank"]) == (3, 2, 2, 3)
    assert found["seconds"] == {"forward": 2.0, "backward": 3.0}
