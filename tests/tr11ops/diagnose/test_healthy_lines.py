"""Lines that healthy trainings print are no cause, whatever comes after them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import RAISED, REPORT, STEP
from tr11ops.diagnose.diagnosis import Diagnosis
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import FaultClass, NextStep
from trainer.contract.record import Record

FOLDER = Path(__file__).parents[2] / "data" / "diagnose" / "healthy"
LINES: list[str] = [
    entry["line"]
    for file in ("lines.toml", "probes.toml")
    for entry in tomllib.loads((FOLDER / file).read_text(encoding="utf-8"))["healthy"]
]
FEW_STEPS = STEP % 1 + STEP % 2
ALL_STEPS = "".join(STEP % number for number in range(1, 41))
VALUE_ERROR = """\
Traceback (most recent call last):
  File "/code/train.py", line 211, in <module>
    main(parse(sys.argv))
ValueError: hidden size 1000 cannot be divided by 16 attention heads
"""
OOM_KILL = "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.\n"
HANG = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1234, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=1800000) ran for 1800123 milliseconds before timing out.\n"
)


class Context(Record):
    """What a log holds after the harmless line, and what it is that ended the training; None:
    nothing did.
    """

    after: str
    fault: FaultClass | None
    words: str = ""


CONTEXTS = {
    "healthy end": Context(ALL_STEPS, None),
    "ValueError": Context(VALUE_ERROR, FaultClass.USER_CODE, "ValueError: hidden size"),
    "OOM kill": Context(FEW_STEPS + OOM_KILL, FaultClass.HOST_OOM, "oom_kill event"),
    "hang": Context(FEW_STEPS + HANG, FaultClass.NCCL_TIMEOUT, "Watchdog caught"),
    "bare": Context("", None),
}


def is_right(found: Diagnosis, line: str, context: Context) -> bool:
    root = found.root_cause
    if context.fault is None:
        names_it = root is not None and root.text.strip() == line.strip()
        return not names_it and found.step is NextStep.NONE
    return found.fault is context.fault and root is not None and context.words in root.text


@pytest.mark.parametrize("name", CONTEXTS)
def test_no_line_of_a_healthy_run_is_a_cause(tmp_path: Path, name: str) -> None:
    context, log = CONTEXTS[name], tmp_path / "main_log.txt"
    wrong = []
    for line in LINES:
        log.write_text(f"{line}\n{context.after}", encoding="utf-8")
        [found] = diagnose_files([log])
        if not is_right(found, line, context):
            wrong.append(
                (
                    line[:100],
                    found.fault.value,
                    found.step.value,
                    found.root_cause and found.root_cause.text[:60],
                )
            )
    assert len(LINES) >= 100
    assert wrong == []


BEGIN = "tr11: attempt 7 launch %d on 2 nodes: n[1-2]\n"
HABIT = "licence cache %d: connect to cache-%d: No route to host\n"


def last_of(tmp_path: Path, text: str) -> Diagnosis:
    log = tmp_path / "main_log.txt"
    log.write_text(text, encoding="utf-8")
    [found] = diagnose_files([log])
    return found


def test_what_an_earlier_launch_printed_and_trained_on_after_is_no_cause(tmp_path: Path) -> None:
    failed = HABIT % (2, 4) + FEW_STEPS + HANG
    first = last_of(tmp_path, BEGIN % 1 + failed)
    assert first.root_cause is not None and first.root_cause.text.startswith("licence cache")
    trained = BEGIN % 1 + HABIT % (1, 3) + ALL_STEPS + RAISED + REPORT
    again = last_of(tmp_path, trained + BEGIN % 2 + failed)
    assert again.fault is FaultClass.NCCL_TIMEOUT
    assert again.root_cause is not None and "Watchdog" in again.root_cause.text
    alone = last_of(tmp_path, trained + BEGIN % 2 + HABIT % (2, 4))
    assert alone.root_cause is None and alone.step is NextStep.NONE


def test_a_gpu_that_worked_on_after_an_error_is_no_habit(tmp_path: Path) -> None:
    xid = "Nov 23 05:25:41 n%d kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=%d, GPU has fallen off the bus.\n"
    found = last_of(
        tmp_path,
        BEGIN % 1 + xid % (1, 7) + ALL_STEPS + RAISED + BEGIN % 2 + FEW_STEPS + xid % (1, 9) + HANG,
    )
    assert found.fault is FaultClass.GPU_HARDWARE and found.step is NextStep.EXCLUDE_AND_RESUBMIT


def test_random_weights_are_a_fault_only_where_a_launch_had_trained(tmp_path: Path) -> None:
    fresh = "    will not load any checkpoints and will start from random\n" + FEW_STEPS
    assert last_of(tmp_path, BEGIN % 1 + fresh).step is NextStep.NONE
    again = last_of(tmp_path, BEGIN % 1 + ALL_STEPS + BEGIN % 2 + fresh)
    assert again.fault is FaultClass.CHECKPOINT_MISMATCH and again.root_cause is not None
    failed = last_of(tmp_path, BEGIN % 1 + ALL_STEPS + BEGIN % 2 + fresh + VALUE_ERROR)
    assert failed.root_cause is not None and failed.root_cause.text.startswith("ValueError")


def test_a_warning_is_the_cause_where_it_is_repeated_and_nothing_else_comes(tmp_path: Path) -> None:
    line = "[W1123 05:25:%02d.282746 socket.cpp:764] [c10d] The IPv6 network addresses of (n9, 29603) cannot be retrieved (gai error: -2 - Name or service not known).\n"
    once = last_of(tmp_path, line % 1)
    assert once.root_cause is None
    again = last_of(tmp_path, "".join(line % second for second in range(10, 50, 5)))
    assert again.fault is FaultClass.RENDEZVOUS and again.confidence <= 0.5
    followed = last_of(tmp_path, "".join(line % second for second in range(10, 50, 5)) + OOM_KILL)
    assert followed.fault is FaultClass.HOST_OOM
