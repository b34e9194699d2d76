"""What a scan finds in logs of several writers, forms and sizes of blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.diagnose.diagnose_logs import RAISED, REPORT, STEP, launches_of
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.sighting import LogLaunch
from tr11ops.diagnose.signature import FaultClass, NextStep


def ids(launch: LogLaunch) -> list[tuple[int, str]]:
    return [(one.line_number, one.signature.id) for one in launch.sightings]


def test_tracebacks_of_two_ranks_line_by_line() -> None:
    text = STEP % 1 + STEP % 2 + RAISED
    for size in (1 << 20, 1, 300):  # where a block ends changes nothing
        [launch] = launches_of(text, size)
        assert ids(launch) == [(9, "python-exception"), (10, "c10d-peer-lost")]
        first = launch.sightings[0]
        assert first.raised is not None and first.raised.name == "KeyError"
        assert (first.origin.rank, first.origin.local_rank) == (2, 0)
        assert first.progress is not None and (
            first.progress.line_number,
            first.progress.iteration,
        ) == (2, 2)
        assert launch.progress == first.progress


def test_the_report_of_torchrun() -> None:
    [launch] = launches_of(REPORT)
    [root] = [one for one in launch.reports if one.is_root]
    assert (root.host, root.rank, root.local_rank, root.exit_code, root.time) == (
        "n2",
        2,
        0,
        1,
        "11-23 04:42:20",
    )
    assert [one.exit_code for one in launch.reports] == [-15, 1]


def test_launches_of_one_log() -> None:
    begin = (
        "tr11: attempt %s launch 1 on 2 nodes: n[1-2]\nusing world size: 8, data-parallel-size: 1\n"
    )
    [first, second] = launches_of(begin % "7" + STEP % 1 + RAISED + REPORT + begin % "8" + STEP % 1)
    assert (first.label, first.nodes, first.world_size, second.label) == ("7", ("n1", "n2"), 8, "8")
    assert first.sightings and not second.sightings


def test_what_rank_0_had_in_its_buffer_comes_last() -> None:
    """It prints the beginning when it dies: no new launch."""
    [launch] = launches_of(
        RAISED + "[default0]:using world size: 4, data-parallel-size: 4\n" + REPORT
    )
    assert launch.world_size == 4 and launch.reports and len(launch.sightings) > 2


def test_progress_bars_broken_text_and_long_lines() -> None:
    bar = "".join(f"\r{number}%|##  | {number}/100 [00:01<00:02, 4.5it/s]" for number in range(100))
    data = (
        b"\xff\xfe\x00 not text\n"
        + bar.encode()
        + b"\rOSError: [Errno 28] No space left on device\n"
    )
    data += (
        b"x" * 9_000_000
        + b" Segmentation fault? no\n"
        + b"CUDA error: uncorrectable ECC error encountered\n"
    )
    [launch] = launches_of(data)
    assert ids(launch) == [(2, "storage-full"), (4, "cuda-ecc")]
    assert launch.sightings[0].text == "OSError: [Errno 28] No space left on device"
    assert launch.progress is not None and launch.progress.line_number == 2


def test_a_line_that_repeats_for_ever_is_counted_and_not_kept() -> None:
    [launch] = launches_of("OSError: [Errno 28] No space left on device\n" * 5000)
    assert len(launch.sightings) <= 20 and launch.counts["storage-full"] >= 1000


def test_exceptions_that_python_ignores_are_none() -> None:
    text = "Exception ignored in: <function Pool.__del__ at 0x7f>\n" + RAISED.replace(
        "[default0]:[rank2]: ", ""
    )
    [launch] = launches_of("\n".join(line for line in text.splitlines() if "default1" not in line))
    assert ids(launch) == []


# ----------------------------------------------------------- the end of a log that is still written
def steps_text(losses: list[str], total: int = 500) -> str:
    line = (
        "[default1]: iteration %8d/%8d | consumed samples: %12d | elapsed time per iteration (s): 0.07 | "
        "learning rate: 6.000E-05 | global batch size:   128 | lm loss: %s | grad norm: 1.200 |\n"
    )
    return "".join(
        line % (number, total, 128 * number, loss) for number, loss in enumerate(losses, 1)
    )


@pytest.mark.parametrize("cut", [0, 1])
def test_a_log_without_its_last_newline_keeps_its_steps(tmp_path: Path, cut: int) -> None:
    """Each block ends with a line, so that the last line comes as a block of its own: all other
    steps were lost.
    """
    log = tmp_path / "main_log.txt"
    text = steps_text(["2.5E+00"] * 20 + ["nan"] * 4)
    log.write_text(text[: len(text) - cut])
    [found] = diagnose_files([log])
    assert (found.fault, found.step) == (FaultClass.NUMERICS, NextStep.ROLLBACK_AND_SKIP)
    assert found.root_cause is not None and found.root_cause.line_number == 21
    assert "iteration 21" in found.explanation


def test_where_a_block_ends_the_steps_go_on() -> None:
    text = steps_text(["2.5E+00"] * 20 + ["nan"] * 4) + "Segmentation fault"
    whole = launches_of(text)
    for size in (1, 200, 1000):
        [launch] = launches_of(text, size)
        # a NaN is not itself
        assert repr(launch.steps) == repr(whole[0].steps) and len(launch.steps) == 24
        assert [step.line_number for step in launch.steps] == list(range(1, 25))
        assert ids(launch) == ids(whole[0]) == [(25, "elastic-segfault")]


def test_the_steps_of_a_launch_are_its_own() -> None:
    """Those of an earlier launch in the same block were taken for its first ones."""
    begin = "tr11: attempt 7 launch %d on 2 nodes: n[1-2]\n"
    text = begin % 1 + steps_text(["2.5E+00"] * 20) + begin % 2 + steps_text(["9.5E+00"] * 5)
    for size in (1 << 20, 1, 700):
        first, second = launches_of(text, size)
        assert (len(first.steps), len(second.steps)) == (20, 5)


def test_another_number_is_another_launch() -> None:
    """Whatever came of the one before: a mere warning was taken along."""
    begin = "tr11: attempt 7 launch %d on 2 nodes: n[1-2]\n"
    warning = "PULSE: heal is running for 1-02:13:04 since 2022-04-30T01:43:07 (17_2 on 'gpu_p5' partition (n[1-2])\n"
    first, second = launches_of(begin % 1 + warning + begin % 2 + begin % 2)
    assert (first.number, len(first.sightings), second.number, second.sightings) == (1, 1, 2, [])


# ----------------------------------------------------------------------------- the end of a loop
@pytest.mark.parametrize(
    "said",
    ["{'train_runtime': 40122.11, 'train_loss': 0.8}", "Training completed.", "Training finished"],
)
@pytest.mark.parametrize(
    ("total", "expected"),
    [(500, (FaultClass.UNKNOWN, NextStep.PAGE)), (20, (FaultClass.CLEAN_EXIT, NextStep.NONE))],
)
def test_the_end_of_a_loop_is_the_trainings_at_its_last_step(
    tmp_path: Path, said: str, total: int, expected: tuple[FaultClass, NextStep]
) -> None:
    log = tmp_path / "train.log"
    log.write_text(steps_text(["2.5E+00"] * 20, total) + said)
    [found] = diagnose_files([log])
    assert (found.fault, found.step) == expected
    if total == 500:
        assert "ended at step 20 of 500" in found.explanation
