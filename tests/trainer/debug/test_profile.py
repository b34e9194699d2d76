"""What ranks record on request: profiles and compute times of a real training of one process, and on their
own; what they did last, from a thread while their own hangs, and at a time-out.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.trainer.cases import CPU
from tests.trainer.control.trainers import Processes, at, card
from tests.trainer.courses import worker_of
from tests.trainer.spawn import run_ranks
from tests.waiting import until
from tr11ops.detect.slow_ranks import slow_ranks
from trainer.attempt import run
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.compute_record import ComputeRecord, ComputeTimes, RankPosition
from trainer.contract.paths import RunPaths
from trainer.contract.requests import Request, RequestAnswer
from trainer.control.control_signals import ControlSignals
from trainer.control.lifecycle import HeartbeatWriter, SignalFlag, StopConditions, Worker
from trainer.debug import profile
from trainer.debug.flight_recorder import OperationsOnRequest, record_path, write_record
from trainer.debug.profile import StepProfiler
from trainer.metrics import compute_clock
from trainer.metrics.compute_clock import ComputeClock
from trainer.parallel.comm import start_all_reduce
from trainer.parallel.mesh import Mesh
from trainer.pipeline.library import init_distributed


def profile_request(number: int, steps: int, rank: int) -> Request:
    return Request("profile", number, steps=steps, rank=rank)


def test_a_running_training_is_traced_and_goes_on(processes: Processes, tmp_path: Path) -> None:
    config = card(tmp_path)
    paths = config.paths
    trainer = processes.start(config, "7")
    processes.wait(lambda: at(config, "7", 2))
    Request("profile", 11, "ana", steps=2).write(paths.profile_request)
    processes.wait(lambda: paths.answer(11).exists())
    answer = RequestAnswer.read(paths.answer(11))
    assert answer is not None and answer.step is not None and answer.job_id == "7"
    (trace,) = paths.profiles("7").iterdir()
    assert answer.message.startswith(f"{trace} (") and "iB)" in answer.message
    assert trace.name == f"launch-1-iterations-{answer.step - 1}-{answer.step}-rank-0.trace.json.gz"
    names = {
        event.get("name")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert any("scaled_dot_product" in str(name) for name in names)
    assert not paths.profile_request.exists() and "profiling iterations" in processes.output("7")
    goes_on = answer.step + 2
    processes.wait(lambda: at(config, "7", goes_on))
    assert trainer.exit_code is None
    own = json.loads(paths.compute("7", 0).read_text())
    assert own["steps"] >= 1 and set(own["seconds"]) == {"forward", "backward", "optimizer"}
    assert (
        all(0 < seconds < 60 for seconds in own["seconds"].values()) and 0 < own["processor"] < 60
    )


def profiler(folder: Path, rank: int = 0, workers: int = 2) -> StepProfiler:
    paths = RunPaths(folder, "run", "main", "")
    return StepProfiler(
        paths, AttemptIdentity("7", 1, paths.stop_request("7")), (rank, workers), CPU
    )


def answer_of(folder: Path, number: int) -> RequestAnswer | None:
    return RequestAnswer.read(RunPaths(folder, "run", "main", "").answer(number))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ('"steps": 3, "rank": null', "there are 2 ranks"),
        ('"steps": "3"', "a profile has 1 to 10 steps"),
    ],
)
def test_a_malformed_request_is_refused_in_words(tmp_path: Path, said: str, why: str) -> None:
    config = card(tmp_path)
    paths = config.paths
    control_signals = ControlSignals(
        worker_of(config, "7", rank=0),
        StopConditions.of(config, 0.0),
        lambda own: torch.tensor(own, dtype=torch.int32).clamp(min=0).tolist(),
    )
    paths.profile_request.parent.mkdir(parents=True)
    paths.profile_request.write_text(f'{{"id": 5, {said}}}')
    ask = control_signals.agree(3, True).profile
    assert ask is not None
    profiler(tmp_path).start(ask, 3)
    answer = answer_of(tmp_path, 5)
    assert answer is not None and answer.message == f"nothing was profiled: {why}"


def test_what_cannot_be_profiled_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler(tmp_path).start(profile_request(1, steps=3, rank=2), 5)
    assert answer_of(tmp_path, 1) == RequestAnswer(
        1, None, "nothing was profiled: there are 2 ranks", pytest.approx(time.time(), abs=60), "7"
    )  # type: ignore[arg-type]
    other = profiler(tmp_path)
    other.start(profile_request(2, steps=3, rank=1), 5)  # of the other rank
    other.start(profile_request(3, steps=3, rank=0), 5)
    assert answer_of(tmp_path, 2) is None and "under way" in str(answer_of(tmp_path, 3))
    other.give_up()
    assert answer_of(tmp_path, 2) is None, "who is asked answers"
    ended = profiler(tmp_path, 1)
    ended.start(profile_request(2, steps=3, rank=1), 5)
    ended.after_step(6)
    ended.give_up()
    assert "the training ended before the last step" in str(answer_of(tmp_path, 2))
    monkeypatch.setattr(profile, "LARGEST_TRACE", 10)
    large = profiler(tmp_path)
    large.start(profile_request(4, steps=1, rank=0), 5)
    torch.ones(3) + 1
    large.after_step(6)
    assert "ask for fewer steps" in str(answer_of(tmp_path, 4))
    assert list(RunPaths(tmp_path, "run", "main", "").profiles("7").iterdir()) == []


def test_a_profiler_that_fails_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("CUPTI is busy")

    monkeypatch.setattr("torch.profiler.profile", broken)
    own = profiler(tmp_path)
    own.start(profile_request(1, steps=1, rank=0), 5)
    own.after_step(6)
    assert "RuntimeError: CUPTI is busy" in str(answer_of(tmp_path, 1))


class SharedTime:
    """The `time` of all ranks. It stands still, but for the 0.6 s in which the slow rank is held
    up.

    Each look of a rank at the clock leaves a file, so that another can go on when it has begun to
    wait.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.looks = 0
        self.worked = iter((5.0, 5.25))

    def perf_counter(self) -> float:
        self.looks += 1
        seconds = 0.6 if (self.folder / "moved").exists() else 0.0
        (self.folder / f"rank-{self.rank}-look-{self.looks}").touch()
        return seconds

    def process_time(self) -> float:
        return next(self.worked)

    def hold_up(self) -> None:
        """Let time pass when rank 1 has looked as its forward pass began, and again as it began to
        wait.
        """
        until((self.folder / "rank-1-look-2").exists, "rank 1 waits")
        (self.folder / "moved").touch()


def computed_together(folder: Path) -> list[Any]:
    """A forward pass of two ranks, in which rank 0 is slow: as one that is stopped, or whose
    processor others use.
    """
    shared = SharedTime(folder, dist.get_rank())

    def forward() -> None:
        if dist.get_rank() == 0:
            shared.hold_up()
        start_all_reduce(torch.ones(3), dist.group.WORLD)()  # type: ignore[arg-type]
        dist.barrier()

    with patch.object(compute_clock, "time", shared):
        clock = ComputeClock(CPU)
        clock.begin_step()
        clock.timed("forward", forward)()
        clock.timed("backward", lambda: None)()
        clock.end_step()
        return [*clock.take(), *clock.take_processor()]


def test_who_waits_for_a_slow_rank_does_not_compute(tmp_path: Path) -> None:
    """And what took the slow one longer was no work of its processor."""
    (slow, worked), (quick, _) = run_ranks(computed_together, 2, tmp_path)
    assert slow == {"forward": 0.6, "backward": 0.0} and worked == 0.25
    assert quick == {"forward": 0.0, "backward": 0.0}


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
    evaluated = clock.timed("forward", lambda: None)
    evaluated()
    assert events == [], "of an evaluation no one reads them: they would pile up"
    for passes in (2, 1):
        clock.begin_step()
        for _ in range(passes):
            clock.timed("forward", lambda: None)()
        clock.end_step()
        evaluated()
    assert events == ["record"] * 6, "a step waits for no event"
    assert clock.take() == [{"forward": 0.5}, {"forward": 0.25}]
    assert events[6:] == ["synchronize", "read", "read", "read"] and clock.take() == []


def test_the_record_is_the_mean_of_ten_steps_at_every_tenth(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "run", "main", "")
    record, place = (
        ComputeRecord(
            paths, AttemptIdentity("7", 2, paths.stop_request("7")), 3, RankPosition(1, 0)
        ),
        paths.compute("7", 3),
    )
    seen: list[tuple[int, int]] = []
    steps: list[dict[str, float]] = []
    for iteration in range(3, 48):
        if iteration == 35:  # traced
            record.forget()
            steps.clear()
        else:
            steps.append({"forward": 9.0 if iteration == 25 else 1.0, "backward": 2.0})
        if record.is_due(iteration):
            record.add(iteration, *steps, processor=[float(iteration % 2) for _ in steps])
            steps.clear()
        found = ComputeTimes.read(place)
        assert found is not None
        seen.append((found.iteration, found.steps))
        if iteration == 30:
            assert (found.rank, found.launch, found.stage, found.part, found.longest) == (
                3,
                2,
                1,
                0,
                11.0,
            )
            assert found.seconds == {"forward": 1.8, "backward": 2.0} and found.processor == 0.0
            assert found.total == pytest.approx(3.8) and found.without_longest == pytest.approx(3.0)
            assert found.recent == (3.0,) * 14 + (11.0,) + (3.0,) * 5, (
                "the last twenty, oldest first"
            )
    assert list(dict.fromkeys(seen)) == [(3, 1), (10, 8), (20, 10), (30, 10), (40, 5)]
    assert found.recent == (3.0,) * 5, "none from before the trace"


def test_a_slow_rank_is_named_within_twenty_steps(tmp_path: Path) -> None:
    """Wherever in ten iterations it becomes slow, also for part of the time, and while all steps
    grow longer.
    """
    for begins in range(100, 110):
        paths = RunPaths(tmp_path / str(begins), "run", "main", "")
        attempt = AttemptIdentity("7", 1, paths.stop_request("7"))
        records = [
            ComputeRecord(paths, attempt, rank, RankPosition.of(rank, 8, 2, 2)) for rank in range(8)
        ]
        named: list[tuple[int, list[int]]] = []
        for iteration in range(81, begins + 21):
            usual = 2.0 if iteration >= 95 else 1.0
            for rank, record in enumerate(records):
                is_slow = rank == 5 and iteration >= begins and iteration % 2
                record.add(iteration, {"forward": usual * (5.0 if is_slow else 1.0 + rank / 1000)})
            seen = [ComputeTimes.read(paths.compute("7", rank)) for rank in range(8)]
            found = slow_ranks([times for times in seen if times is not None], 3.0)
            if found:
                named.append((iteration, [entry.times.rank for entry in found]))
        assert named and begins <= named[0][0] <= begins + 19
        assert all(ranks == [5] for _, ranks in named)


def test_an_older_record_is_read_and_a_broken_one_named(tmp_path: Path) -> None:
    place = tmp_path / "rank-3.json"
    old = {
        "rank": 3,
        "host": "n01",
        "launch": 1,
        "time": 5.0,
        "iteration": 9,
        "steps": 2,
        "seconds": {"forward": 2.0},
    }
    place.write_text(json.dumps(old))
    found = ComputeTimes.read(place)
    assert found is not None and (found.stage, found.part, found.without_longest) == (
        None,
        None,
        2.0,
    )
    assert found.processor is None and found.recent == ()
    for change in (
        {"seconds": [1]},
        {"steps": "many"},
        {"longest": "nan"},
        {"processor": "nan"},
        {"recent": ["nan"]},
        {"recent": 5},
        {"host": None, "time": 1e999},
    ):
        place.write_text(json.dumps({**old, **change}))
        with pytest.raises(ValueError, match=r"rank-3\.json"):
            ComputeTimes.read(place)
    assert ComputeTimes.read(tmp_path / "rank-4.json") is None


def test_the_place_of_a_rank_is_that_of_the_grid() -> None:
    for rank in range(12):
        mesh = Mesh(pipeline=3, data=2, tensor=2, rank=rank, device=CPU)
        assert RankPosition.of(rank, 12, 2, 3) == RankPosition(mesh.pipeline_rank, mesh.tensor_rank)


def test_traced_steps_are_not_in_the_record(tmp_path: Path) -> None:
    own = profiler(tmp_path)
    assert not own.is_tracing
    own.start(profile_request(1, steps=1, rank=0), 5)
    assert own.is_tracing
    own.after_step(6)
    assert not own.is_tracing


def late(folder: Path) -> Any:
    """Rank 1 does not come to the second operation; rank 0 meets the time-out as its training
    would.
    """
    os.environ["TORCH_FR_BUFFER_SIZE"] = "50"
    init_distributed(torch.device("cpu"), timedelta(seconds=2))
    dist.all_reduce(torch.ones(3))
    if dist.get_rank() == 1:
        until = time.monotonic() + 300
        while not (folder / "done").exists() and time.monotonic() < until:
            time.sleep(0.05)
        return None
    paths = RunPaths(folder, "run", "main", "")
    identity = AttemptIdentity("7", 2, paths.stop_request("7"))

    class Hangs:
        steps_done = iteration = 3

        def __init__(self, worker: Worker, _: Path) -> None:
            self.worker = worker
            self.close = lambda: None

        def train(self) -> str:
            dist.all_reduce(torch.ones(5))
            return "finished"

    class Left(Exception):
        pass

    def leave(code: int, close: Any) -> None:
        raise Left(code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.attempt.TrainingAttempt", Hangs)
        patch.setattr("trainer.attempt.exit_process", leave)
        config = TrainerConfig.model_construct()
        patch.setattr(TrainerConfig, "paths", paths)
        patch.setattr(TrainerConfig, "kill_switch", folder / "kill-switch")
        heartbeat = HeartbeatWriter(paths, 0, "7")
        with pytest.raises(Left):
            run(Worker(config, identity, 0, heartbeat, SignalFlag()), folder / "card")
    (folder / "done").touch()
    return json.loads(record_path(paths, "7", 2, 0).read_text())


def test_a_time_out_leaves_what_the_rank_waited_for(tmp_path: Path) -> None:
    found, _ = run_ranks(late, 2, tmp_path, launch=False)
    last = found["entries"][-1]
    assert (last["profiling_name"], last["input_sizes"], last["timeout_ms"]) == (
        "gloo:all_reduce",
        [[5]],
        2000,
    )
    failure = json.loads(
        (tmp_path / "state" / "attempts" / "7" / "failures" / "rank-0.json").read_text()
    )
    assert failure["launch"] == 2 and "imed out" in failure["error"]


def test_nothing_is_written_where_nothing_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace_json", lambda: b'{"entries":[]}')
    assert not write_record(tmp_path / "x" / "y.json") and not (tmp_path / "x").exists()


def test_a_request_is_honoured_once_by_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = b'{"entries":[{"record_id":1}]}'
    monkeypatch.setattr("torch._C._distributed_c10d._dump_fr_trace_json", lambda: kept)
    paths = RunPaths(tmp_path, "run", "main", "")
    look = OperationsOnRequest(paths, "7", 2, 5)
    look()
    assert not paths.flight_records("7").exists()
    Request("operations", 31, "ana").write(paths.operations_request)
    look()
    place = record_path(paths, "7", 2, 5, 31)
    assert place.read_bytes() == kept and place.name == "launch-2-request-31-rank-5.json"
    place.unlink()
    look()
    assert not place.exists()
