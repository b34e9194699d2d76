"""One launch out of logs that hold many: what earlier and later ones left says nothing of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tr11ops.diagnose.look import LaunchNumber, diagnose_launch
from tr11ops.diagnose.signature import FaultClass
from tr11ops.rundir.attempts import launch_line

NCCL = "RankLost: connection closed by rank 3\n"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
FULL = "OSError: [Errno 28] No space left on device\n"
START = 1_790_000_000.0


def begin(launch: int, attempt: str = "7") -> str:
    return launch_line(attempt, attempt, launch, "2 nodes") + "\n"


def worker_log(folder: Path, rank: int, text: str, written: float = START + 60) -> Path:
    path = folder / "workers" / f"n{rank}" / f"rank-{rank}.log"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    os.utime(path, (written, written))
    return path


@pytest.mark.parametrize(
    ("text", "number", "fault", "line"),
    [
        (begin(1) + NCCL + begin(2) + ECC, 2, FaultClass.GPU_HARDWARE, 4),
        (begin(1) + FULL + begin(2) + ECC, 1, FaultClass.STORAGE, 2),
        (begin(1) + FULL + begin(1, "8") + ECC, 1, FaultClass.STORAGE, 2),
        # put back into the queue: the attempt counts its launches anew
        (begin(1) + FULL + begin(2) + NCCL + begin(1) + ECC, 1, FaultClass.GPU_HARDWARE, 6),
        (
            begin(1) + FULL + begin(2) + "using world size: 4, data\n" + ECC,
            2,
            FaultClass.GPU_HARDWARE,
            5,
        ),
        (FULL, 2, FaultClass.STORAGE, 1),  # of an older tr11, without any launch's line
    ],
)
def test_only_the_launch_that_is_asked_for(
    tmp_path: Path, text: str, number: int, fault: FaultClass, line: int
) -> None:
    found = diagnose_launch([worker_log(tmp_path, 0, text)], LaunchNumber("7", number, START))
    assert found is not None and found.root_cause is not None
    assert (found.fault, found.root_cause.line_number) == (fault, line)
    assert (found.launch, found.number) == ("7", number)


def test_a_worker_that_was_swapped_out_says_nothing(tmp_path: Path) -> None:
    logs = [worker_log(tmp_path, 0, begin(1) + FULL), worker_log(tmp_path, 1, begin(2) + ECC)]
    found = diagnose_launch(logs, LaunchNumber("7", 2, START))
    assert found is not None and found.fault is FaultClass.GPU_HARDWARE and found.evidence == ()
    assert diagnose_launch(logs[:1], LaunchNumber("7", 2, START)) is None


def test_a_log_that_was_written_before_says_nothing(tmp_path: Path) -> None:
    log = worker_log(tmp_path, 0, FULL, written=START - 60)
    assert diagnose_launch([log], LaunchNumber("7", 2, START)) is None


def test_memory_that_a_broken_gpu_still_held_is_its_fault(tmp_path: Path) -> None:
    """The launch right before explains it, as in any log."""
    short = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    found = diagnose_launch(
        [worker_log(tmp_path, 0, begin(1) + ECC + begin(2) + short)], LaunchNumber("7", 2, START)
    )
    assert found is not None and (found.fault, found.number) == (FaultClass.GPU_HARDWARE, 2)
