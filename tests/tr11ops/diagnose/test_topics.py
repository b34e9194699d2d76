"""What errors that no signature knows are about, by their words and their tracebacks."""

from __future__ import annotations

import pytest

from tests.tr11ops.diagnose.diagnose_logs import STEP
from tr11ops.diagnose.causes import judge
from tr11ops.diagnose.literals import required_words
from tr11ops.diagnose.matcher import matcher
from tr11ops.diagnose.scan import scan
from tr11ops.diagnose.signature import FaultClass
from tr11ops.diagnose.topics import UNTOLD, error_lines, of_exception, of_line, topics

STEPS = STEP % 1 + STEP % 2
RAISED = 'Traceback (most recent call last):\n  File "/code/train.py", line 12, in <module>\n    main()\n'


def classes(text: str) -> set[str]:
    """Of the text as an exception and as a line of a log."""
    name, _, said = text.partition(": ")
    found = (of_exception(name, said, ()), of_line(text))
    return {one.id for one in found if one is not None}


def test_examples_of_every_topic() -> None:
    own = [topic.signature for topic in topics()]
    assert [
        (one.id, text) for one in own for text in one.examples if one.id not in classes(text)
    ] == []
    assert [
        (one.id, text) for one in own for text in one.counterexamples if one.id in classes(text)
    ] == []
    assert all(0.5 < one.confidence <= 0.75 for one in own)  # never as sure as a signature
    assert all(required_words(rule.pattern) for rule in error_lines())


def test_a_line_that_is_no_error_has_no_topic() -> None:
    harmless = [
        "INFO: CUDA out of memory handler installed",
        "0 errors on node n1",
        "WARNING: falling back to gloo",
    ]
    assert [of_line(text) for text in harmless] == [None, None, None]
    assert of_line("ERROR: 17") is UNTOLD


@pytest.mark.parametrize(
    ("frame", "said", "fault"),
    [
        ('/x/ck.py", line 3, in load_checkpoint', "ValueError: 3", FaultClass.CHECKPOINT_MISMATCH),
        (
            '/x/data.py", line 3, in __getitem__',
            "UnicodeDecodeError: 'utf-8' codec",
            FaultClass.DATALOADER,
        ),
        ('/x/data.py", line 3, in __getitem__', "KeyError: 'text'", FaultClass.USER_CODE),
        ('/x/main.py", line 3, in main', "my.OddError: 3", FaultClass.USER_CODE),
        (
            '/x/main.py", line 3, in main',
            "my.FabricError: RDMA link on mlx5_1 is down",
            FaultClass.NCCL_NETWORK,
        ),
    ],
)
def test_the_frames_of_a_traceback_count(frame: str, said: str, fault: FaultClass) -> None:
    text = f'Traceback (most recent call last):\n  File "{frame}\n    x()\n{said}\n'
    found = judge(scan("log", [(STEPS + text).encode()], matcher()))
    assert found.fault is fault and found.root_cause is not None and found.root_cause.text == said


TIME_LIMIT = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T14:00:00 DUE TO TIME LIMIT ***\n"
)
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
WATCHDOG = "[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 600000 milliseconds\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "+ grep 'CUDA out of memory' old.log\n# DUE TO TIME LIMIT?\n"
            + STEPS
            + RAISED
            + "KeyError: 'x'\n",
            "user_code",
        ),
        ("  on_hang ......... 'Disk quota exceeded'\n" + RAISED + "KeyError: 'x'\n", "user_code"),
        (
            "WARNING: [Errno 5] Input/output error, retrying in 5 s (1/5)\n"
            + RAISED
            + OUT_OF_MEMORY,
            "cuda_oom",
        ),
        ("[WARNING] Unable to find hostfile\n" + STEPS, "unknown"),
        (
            RAISED
            + OUT_OF_MEMORY
            + "=== attempt 2 ===\n"
            + STEPS
            + "srun: error: Node failure on n7\n",
            "slurm_node_fail",
        ),
        (STEPS + "ncclRemoteError: a remote process exited\n" + TIME_LIMIT, "slurm_time_limit"),
        (STEPS + WATCHDOG + TIME_LIMIT, "nccl_timeout"),
        (
            STEPS + "Received SIGTERM: 15\nsrun: error: n1: task 0: Killed\n" + TIME_LIMIT,
            "slurm_time_limit",
        ),
        (
            STEPS
            + "exiting program after receiving SIGTERM.\n[after training is done]\n"
            + TIME_LIMIT,
            "slurm_time_limit",
        ),
        (
            STEPS + "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T14:00:00 ***\n",
            "slurm_user_cancel",
        ),
        (STEPS + "7  run  TIMEOUT 1-00:00:19 1-00:00:00  0:0\n", "slurm_time_limit"),
        (STEPS + "JobState=PREEMPTED Reason=None Dependency=(null)\n", "slurm_preempted"),
        (
            STEPS + "tar: ck.tar : écriture impossible: Débordement du quota d'espace disque\n",
            "storage",
        ),
        (
            "2026-01-01T10:00:00.5Z stderr F "
            + (RAISED + OUT_OF_MEMORY).replace("\n", "\n2026-01-01T10:00:00.5Z stderr F "),
            "cuda_oom",
        ),
        (
            STEPS
            + RAISED
            + "KeyError: 'x'\n"
            + "".join(STEP % step for step in range(3, 9))
            + "failed (exitcode: 1) local_rank: 0\n",
            "user_code",
        ),
        (STEPS + "All done! Reached max steps 2, exiting.\n", "clean_exit"),
    ],
    ids=lambda value: value if "\n" not in value else "",
)
def test_what_surrounds_an_error(text: str, fault: str) -> None:
    found = judge([scan("log", [text.encode()], matcher())[-1]])
    assert found.fault.value == fault and found.confidence <= 0.97
