"""The table of a whole log, of several trainings' forms; and the two failures that only a whole log
shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.tr11ops.logs.log_cases import CountingReader, log_of, step_line
from tr11ops.logs import summary as summaries
from tr11ops.logs.summary import CleanEnd, LoggedStart, Silence, Summary, summarise
from tr11ops.logs.summary_text import lines, value

LOGS = Path(__file__).parents[2] / "data" / "logs"


def of(data: bytes) -> Summary:
    return summarise(CountingReader(data), len(data))


def test_the_forms_of_three_trainings() -> None:
    tr11, tr8, tr1 = (of((LOGS / f"{name}.txt").read_bytes()) for name in ("tr11", "tr8", "tr1"))
    assert (tr11.steps, tr11.last, tr11.total, tr11.last_loss) == (1, 31219, 115311, 5.098124)
    assert (tr8.steps, tr8.last, tr8.last_loss, tr8.without_loss) == (1, 9027, None, 1)
    assert (tr1.steps, tr1.last, tr1.total, tr1.last_loss) == (1, 29050, 311541, 2.641183)
    mixed = of((LOGS / "mixed.txt").read_bytes())
    assert mixed.validations == {"valid": (45000, 2.327091)}
    assert mixed.pulses == {"running": 1, "waiting for the previous task": 1}
    assert (mixed.steps, mixed.last) == (2, 31219)  # the third is cut


def test_restarts_gaps_and_ends() -> None:
    def start(job: str) -> bytes:
        return f"tr11: attempt {job} launch 1 on 2 nodes: n[1-2]\n".encode()

    data = (
        start("7") + log_of(range(1, 101)) + b"[exiting program after 1190.03 minutes] datetime: 2022-05-01 01:02:03 \n"
        + start("8") + log_of(range(91, 121)) + b"Traceback (most recent call last):\n"
        + start("9")
        + b"using world size: 8, data-parallel-size: 1\n" * 2 + log_of([*range(121, 141), *range(151, 161)])
        + b"[Detected kill switch at /x. Exiting] datetime: 2022-05-01 01:02:03 \n" * 3
    )  # fmt: skip
    found = of(data)
    assert (found.first, found.last, found.highest, found.steps) == (1, 160, 160, 160)
    assert found.starts[:2] == [LoggedStart(None, 1, "7"), LoggedStart(100, 91, "8")]
    assert found.starts[1].redone == 10 and found.starts[-1].after == 121
    assert found.gaps == [(140, 151)]
    assert found.ends == [CleanEnd("its time was up", 100), CleanEnd("kill switch", 160)]
    assert found.tracebacks == 1


def test_a_start_that_never_came_to_a_step_is_told() -> None:
    mark = b"tr11: attempt 8 launch %d on 2 nodes: n[1-2]\n"
    assert of(log_of(range(1, 4)) + mark % 1 + mark % 2).starts[1:] == [
        LoggedStart(3, None, "8"),
        LoggedStart(3, None, "8"),
    ]


def pulse(
    hour: int, words: str = "tr11 is running for 1:00 since x (1_1 on 'p' partition (n[1-2])"
) -> bytes:
    return f"[2022-05-01 {hour:02d}:56:11] PULSE: {words}\n".encode()


def test_pulses_that_said_running_while_nothing_ran() -> None:
    """The night of an evaluation that hung: running, running, running."""
    data = (
        step_line(45000) + pulse(1) + pulse(2) + pulse(3) + step_line(45001) + pulse(4) + pulse(5)
    )
    assert of(data).silences == [Silence(45000, "2022-05-01 01:56:11", "2022-05-01 03:56:11", 3)]
    waiting = (
        step_line(1)
        + pulse(1)
        + pulse(2)
        + pulse(3, "tr11 is waiting to be scheduled (1 on 'p' partition)")
    )
    assert of(waiting).silences == []


def test_every_state_of_the_pulse_and_its_older_form() -> None:
    words = (
        "x is waiting through the dependency mechanism",
        "x is scheduled to start in 1:00 (at y)",
        "other",
    )
    data = b"".join(pulse(hour, text) for hour, text in enumerate(words))
    data += b"[2021-08-01 01:02:03] ***ALERT: x is not RUNNING or SCHEDULED! Alert someone at Eng WG***\n"
    assert of(data).pulses == {
        "waiting for a dependency": 1, "start is scheduled": 1, "other": 1, "not running nor scheduled": 1,
    }  # fmt: skip


def test_a_log_of_every_tenth_step_has_no_gaps() -> None:
    found = of(log_of(range(10, 200, 10)))
    assert found.gaps == [] and len(found.starts) == 1


def test_blocks_cut_nothing(monkeypatch: object) -> None:
    data = log_of(range(1, 60), b"noise\n")
    whole = of(data)
    for size in (7, 100, 350, 1000):
        summaries.SCAN_BYTES, before = size, summaries.SCAN_BYTES
        try:
            assert of(data) == whole
        finally:
            summaries.SCAN_BYTES = before


def test_the_table_fits_and_the_json_is_sound() -> None:
    data = b"".join(log_of(range(start, start + 30)) for start in range(1, 400, 20))
    data += b" valid loss at iteration 1 | lm loss value: nan | lm loss PPL: nan | \n" + b"".join(
        map(pulse, range(9))
    )
    found = of(data)
    text = list(lines(found, "main_log.txt"))
    assert all(len(line) <= 80 for line in text)
    assert any("10 redone" in line for line in text) and any("..." in line for line in text)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    parsed = json.loads(json.dumps(value(found, "x")), parse_constant=refuse)
    assert parsed["schema"] == 1 and parsed["validations"]["valid"]["lm_loss"] is None
    assert len(parsed["starts"]) == 20 and parsed["starts"][1]["redone"] == 10


def test_nothing_at_all() -> None:
    calls: list[int] = []
    progress: Callable[[int], None] = calls.append
    assert summarise(CountingReader(b""), 0, progress) == Summary() and calls == []
    assert "none: no line of a step was found" in "\n".join(lines(Summary(), "x"))


def test_a_start_is_one_although_two_lines_tell_of_it() -> None:
    """The agent's line and the trainer's own, as a run of ours writes them."""
    begin = "tr11: attempt %d launch 1 on 2 nodes: n[1-2]\n[default0]:using world size: 4, data-parallel-size: 1\n"
    end = b"[default0]:[exiting program at iteration 6] datetime: 2026-11-22 21:18:41 \ntr11: attempt 2 ended: x\n"
    data = b"".join(
        (begin % job).encode() + log_of(range(6 * job, 6 * job + 6)) + end for job in range(3)
    )
    found = of(data)
    assert found.starts == [
        LoggedStart(None, 0, "0"),
        LoggedStart(5, 6, "1"),
        LoggedStart(11, 12, "2"),
    ]
    assert found.ends == [CleanEnd("exit interval", number) for number in (5, 11, 17)]


def test_the_watchdogs_own_states_are_pulses() -> None:
    words = (
        "x is STOPPED: the kill switch was set",
        "x: resubmit 1-3: nothing runs",
        "x is HUNG: no step for 2 h",
    )
    assert of(b"".join(pulse(hour, text) for hour, text in enumerate(words))).pulses == {"other": 3}


def test_an_attempt_goes_by_its_task() -> None:
    """The scheduler's own number is no one's: status and alerts say 70_3."""
    mark = b"tr11: attempt 75 launch 1 on 2 nodes: n[1-2] (70_3)\n"
    assert of(mark + log_of(range(1, 4))).starts == [LoggedStart(None, 1, "70_3")]
