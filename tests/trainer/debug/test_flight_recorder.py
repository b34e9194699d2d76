"""What the ranks did last: kept at a time-out, and on request from a thread while the training's
own hangs.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.trainer.spawn import run_ranks
from trainer.attempt import run
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.paths import RunPaths
from trainer.contract.requests import Request
from trainer.control.lifecycle import HeartbeatWriter, SignalFlag, Worker
from trainer.debug.flight_recorder import OperationsOnRequest, record_path, write_record
from trainer.engine import init_distributed


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
