"""A save that fails must not cost the training; a last save that fails must not look like a good
end.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from tests.trainer.cases import tiny
from tests.trainer.courses import trained, worker_of, write_tokens
from tests.trainer.spawn import run_ranks
from trainer.attempt import TrainingAttempt, earliest_start
from trainer.checkpoint import store, writer
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import EndMarker
from trainer.contract.checkpoints import refusal_code
from trainer.contract.errors import CheckpointError, DataError, LostWorkerError, NodeFilesError
from trainer.control.exits import FailedSaves, is_refusal
from trainer.control.lifecycle import Worker, write_failure


def card(folder: Path, **run: Any) -> TrainerConfig:
    write_tokens(folder)
    value = tiny().model_dump(mode="json")
    value["run"] |= {"directory": str(folder), **run}
    value["checkpoint"]["interval"] = 2
    value["evaluation"]["iterations"] = 0
    value["data"]["prefixes"] = [str(folder / "tokens")]
    return TrainerConfig.model_validate(value)


class Watched(Worker):
    """A worker that keeps its log, and whose checkpoints cannot be written until they `heal`."""

    def say(self, line: str) -> None:
        self.lines = [*getattr(self, "lines", []), line]
        checkpoints = self.config.paths.root / "checkpoints"
        if self.rank != 0:
            return
        if (
            line == "training ..."
        ):  # from now on no checkpoint can be written: a file lies where the folder should be
            checkpoints.write_text("in the way")
        if "SAVE FAILED" in line and self.heal:
            checkpoints.unlink()

    heal = False


def attend(config: TrainerConfig, heal: bool) -> tuple[str, int, list[str]]:
    worker = worker_of(config, "7", kind=Watched)
    worker.heal = heal
    attempt = TrainingAttempt(worker, Path("none.json"))
    return trained(attempt)[0], attempt.steps_done, worker.lines


@pytest.mark.parametrize("heal", [True, False], ids=["space-comes-back", "space-stays-away"])
def test_a_failed_save_is_said_and_the_training_goes_on(tmp_path: Path, heal: bool) -> None:
    config = card(tmp_path, exit_interval=5)
    results = run_ranks(attend, 2, config, heal, launch=False)
    assert [steps for _, steps, _ in results] == [5, 5]
    warnings = [line for line in results[0][2] if "SAVE FAILED" in line]
    marker = EndMarker.read(config.paths.end_marker("7"))
    assert marker is not None
    assert "SAVE FAILED at iteration 2, there is none yet" in warnings[0]
    if heal:
        assert [reason for reason, _, _ in results] == ["exit-interval"] * 2
        assert len(warnings) == 1
        assert any(
            "saves failed before this one, at iteration 2;" in line for line in results[0][2]
        )
        assert (marker.reason, marker.checkpoint_step, marker.restart) == ("exit-interval", 5, True)
        assert config.paths.checkpoint(5).is_dir()
    else:
        assert [reason for reason, _, _ in results] == ["error"] * 2
        assert len(warnings) == 3  # of steps 2 and 4, and at the end
        assert (marker.reason, marker.iteration, marker.checkpoint_step, marker.restart) == (
            "error",
            5,
            None,
            True,
        )
        assert "the last save failed" in marker.message
        assert "exit-interval" in marker.message
    records = [json.loads(line) for line in config.paths.metrics.read_text().splitlines()]
    assert [record["iteration"] for record in records if record["kind"] == "step"] == [
        1,
        2,
        3,
        4,
        5,
    ]


class OnNode(Watched):
    """A worker whose ranks are on nodes of their own; only what rank 0 says is kept."""

    def say(self, line: str) -> None:
        self.lines = [*getattr(self, "lines", []), line]


def refuse_writing(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "/scratch/part")


def attend_on_nodes(config: TrainerConfig, failing: tuple[int, ...]) -> tuple[str, int, list[str]]:
    rank = int(os.environ["RANK"])
    os.environ["TR11_NODE_NAME"] = f"n{rank + 1}"
    if rank in failing:
        store.write_named = writer._write = refuse_writing
    worker = worker_of(config, "7", kind=OnNode)
    attempt = TrainingAttempt(worker, Path("none.json"))
    return trained(attempt)[0], attempt.steps_done, worker.lines


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_node_that_twice_cannot_write_a_save_is_left(
    tmp_path: Path, asynchronous: bool
) -> None:
    config = card(tmp_path, exit_interval=11)
    config = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"asynchronous": asynchronous})}
    )
    results = run_ranks(attend_on_nodes, 2, config, (1,), launch=False)
    assert [reason for reason, _, _ in results] == ["error"] * 2
    # in the background it is heard of a little later
    assert results[0][1] in ({4} if not asynchronous else {4, 5, 6})
    [first] = [
        line for line in results[0][2] if "alone could not write" in line and "WARNING" in line
    ]
    assert first == (
        "tr11: WARNING: n2 alone could not write the save of step 2, to which 1 other node wrote: if the next fails "
        "there too, the training leaves that node"
    )
    marker = EndMarker.read(config.paths.end_marker("7"))
    assert marker is not None and (marker.reason, marker.restart, marker.node) == (
        "error",
        True,
        "n2",
    )
    records = [json.loads(line) for line in config.paths.metrics.read_text().splitlines()]
    assert [(one["step"], one["node"]) for one in records if one["kind"] == "save-failed"] == [
        (2, "n2"),
        (4, "n2"),
    ]
    assert marker.message.startswith(
        "n2 alone could not write the save of step 2 and 4, to which 1 other node wrote"
    )
    assert (
        "nothing was saved" in marker.message
        and "Input/output error: /scratch/part" in marker.message
    )


def test_a_file_system_that_fails_everywhere_is_no_nodes_fault(tmp_path: Path) -> None:
    config = card(tmp_path, exit_interval=7)
    results = run_ranks(attend_on_nodes, 2, config, (0, 1), launch=False)
    marker = EndMarker.read(config.paths.end_marker("7"))
    # it went on to its end
    assert marker is not None and (marker.node, marker.iteration) == ("", 7)
    assert not any("alone could not write" in line for line in results[0][2])


def fail_to_load(config: TrainerConfig, failing: tuple[int, ...]) -> tuple[bool, str]:
    rank = int(os.environ["RANK"])
    os.environ["TR11_NODE_NAME"] = f"n{rank + 1}"
    if rank in failing:
        store._read_extras = refuse_writing
    attempt = TrainingAttempt(worker_of(config, "8", kind=OnNode), Path("none.json"))
    try:
        attempt.train()
    except CheckpointError as error:
        write_failure(config.paths, attempt.worker.attempt, rank, error, 0)
        return is_refusal(error, attempt.steps_done), str(error)
    finally:
        attempt.close()
    raise AssertionError("it has loaded")


@pytest.mark.parametrize(("failing", "node", "refused"), [((1,), "n2", False), ((0, 1), "", True)])
def test_a_node_that_alone_cannot_load_refuses_nothing(
    tmp_path: Path, failing: tuple[int, ...], node: str, refused: bool
) -> None:
    config = card(tmp_path, exit_interval=2)
    assert [reason for reason, _, _ in run_ranks(attend_on_nodes, 2, config, (), launch=False)] == [
        "exit-interval"
    ] * 2
    results = run_ranks(fail_to_load, 2, config, failing, launch=False)
    assert [is_refused for is_refused, _ in results] == [refused] * 2, results
    for path in (config.paths.attempt("8") / "failures").glob("*.json"):
        assert json.loads(path.read_text())["node"] == node


REFUSED = NodeFilesError(
    "saving: rank 3 on n2: Input/output error", ["n2"], ["n1", "n3"], [errno.EIO]
)


@pytest.mark.parametrize(
    ("faults", "unable"),
    [
        ([REFUSED], ""),
        ([REFUSED, REFUSED], "n2"),
        (
            [REFUSED, NodeFilesError("x", ["n3"], ["n1", "n2"], [errno.EIO])],
            "",
        ),  # another node the second time
        ([REFUSED, NodeFilesError("x", ["n2", "n3"], ["n1"], [errno.EIO] * 2)], ""),
        ([REFUSED, CheckpointError("No space left on device")], ""),
        ([REFUSED, CheckpointError("everywhere"), REFUSED], ""),  # not in a row
    ],
)
def test_which_node_keeps_saves_from_coming_about(
    faults: list[CheckpointError], unable: str
) -> None:
    found = FailedSaves()
    for number, fault in enumerate(faults, 1):
        found = found.after(10 * number, fault)
    assert found.unable == unable


@pytest.mark.parametrize(
    ("error", "is_nodes"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (
            OSError(errno.ENOENT, "No such file or directory"),
            True,
        ),  # where others wrote at that moment: not mounted
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False),
        (ValueError("one rank describes a place twice"), False),
    ],
)
def test_what_a_node_alone_may_be_refused(error: Exception, is_nodes: bool) -> None:
    assert (refusal_code(error) is not None) == is_nodes


def lose_a_rank() -> CheckpointError:
    error = CheckpointError("the ranks lost each other")
    error.__cause__ = RuntimeError("Connection closed by peer")
    return error


@pytest.mark.parametrize(
    ("error", "steps", "refused"),
    [
        (CheckpointError("another model"), 0, True),
        (DataError("no such file"), 0, True),
        (
            DataError("no such file"),
            9,
            False,
        ),  # it could be read at the start: another try may go better
        (
            LostWorkerError("data worker 0 was killed"),
            0,
            False,
        ),  # of this moment, before a first step too
        (REFUSED, 0, False),  # one node does not reach the files: the next launch is without it
        (
            NodeFilesError("no such file", ["n2"], ["n1"], [errno.ENOENT]),
            0,
            True,
        ),  # the file is not there
        (NodeFilesError("EIO", ["n2", "n3"], ["n1"], [errno.EIO] * 2), 0, True),
        (
            lose_a_rank(),
            0,
            False,
        ),  # else one killed worker would keep every later task from training
        (RuntimeError("boom"), 0, False),
    ],
)
def test_only_bad_input_is_a_refusal(error: Exception, steps: int, refused: bool) -> None:
    assert is_refusal(error, steps) is refused


def test_a_wrong_clock_on_one_node_does_not_end_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(card(tmp_path), "7", rank=0)
    worker.start_time = time.monotonic() - 60
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op, group: None)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    mesh: Any = SimpleNamespace(cpu_group=None)
    before = worker.clock()
    monkeypatch.setattr(time, "time", lambda: 86_400.0)  # set back to 1970 by a day
    assert math.isclose(worker.clock() - earliest_start(worker, mesh), 60, abs_tol=5)
    assert worker.clock() >= before
