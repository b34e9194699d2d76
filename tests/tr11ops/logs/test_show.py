"""What is shown of a log: by severity, text, iteration, time and attempt; in any form a training
has written.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from tests.tr11ops.logs.log_cases import CountingReader, log_of, step_line
from tr11ops.base.errors import NoSuchAttempt
from tr11ops.logs import reader, show
from tr11ops.logs.line_filter import LineFilter, LineQuery
from tr11ops.logs.lines import coloured, plain, severity
from tr11ops.logs.show import Beginning, Query, may_hold

LOGS = Path(__file__).parents[2] / "data" / "logs"

TRACEBACK = """\
[default0]:Traceback (most recent call last):
[default1]:an ordinary line of another worker
[default0]:  File "pretrain.py", line 3, in <module>
[default0]:    main()
[default0]:ZeroDivisionError: division by zero
[default0]:
[default0]:During handling of the above exception, another exception occurred:
[default0]:
[default0]:Traceback (most recent call last):
[default0]:  File "x.py", line 9
[default0]:RuntimeError: CUDA error: unknown error
[default0]:life goes on
"""


def shown(text: str | bytes, **wanted: object) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    query = Query(LineQuery(**wanted))  # type: ignore[arg-type]
    return list(Beginning(CountingReader(data), len(data), query, LineFilter(query.wanted)).lines())


def test_levels() -> None:
    lines = [
        "[2022-05-01 03:56:11,123] [WARNING] [engine.py:1:f] something",
        "WARNING:root:something",
        "x.py:3: UserWarning: something",
        "0: [deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4, reducing to 2",
        "node1:3:5 [0] NCCL WARN Connect to 10.0.0.1<1> failed : Connection refused",
    ]
    assert [severity(line) for line in lines] == [30] * len(lines)
    worse = [
        "srun: error: node3: task 17: Aborted",
        "slurmstepd: error: *** STEP 3.0 ON n1 CANCELLED",
        "OSError: [Errno 28] No space left on device",
        "[2022-05-01 03:56:11,123] [ERROR] [engine.py:1:f] something",
    ]
    assert [severity(line) for line in worse] == [40] * len(worse)
    worst = [
        "[default3]:terminate called after throwing an instance of 'c10::CUDAError'",
        "transform: failed to synchronize: cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
        "[2021-08-01 01:02:03] ***ALERT: tr8 is not RUNNING or SCHEDULED! Alert someone at Eng WG***",
        "tr11: launch 1 failed (hardware): n3",
    ]
    assert [severity(line) for line in worst] == [50] * len(worst)
    usual = [
        "ERRORS: none",
        "[default7]: using torch.float16",
        "[INFO] fine",
        " > building train dataset",
        "",
    ]
    assert [severity(line) for line in usual] == [20] * len(usual)


def test_a_step_without_a_finite_loss_is_a_warning_a_cut_not() -> None:
    for name, level in (("tr11.txt", 20), ("tr1.txt", 20), ("tr8.txt", 30)):
        step = next(line for line in (LOGS / name).read_text().splitlines() if "iteration" in line)
        assert severity(step) == level
        assert severity(step[:100]) == 20
    assert (
        severity(
            re.sub(r"lm loss: \S+", "lm loss: nan", (LOGS / "tr11.txt").read_text().splitlines()[0])
        )
        == 30
    )


def test_a_traceback_is_shown_whole_without_lines_of_others() -> None:
    lines = TRACEBACK.splitlines()
    expected = [line for number, line in enumerate(lines) if number not in {1, 5, len(lines) - 1}]
    assert shown(TRACEBACK, level=40) == expected
    assert shown(TRACEBACK, level=30) == expected
    assert shown(TRACEBACK, level=50) == [lines[-2]]
    assert shown(TRACEBACK, level=20) == lines


def test_grep_with_context_joins_what_touches() -> None:
    text = "\n".join(f"line {number}" for number in range(20)) + "\n"
    pattern = re.compile("line (5|7|15)$")
    assert shown(text, pattern=pattern) == ["line 5", "line 7", "line 15"]
    assert shown(text, pattern=pattern, context=1) == [
        *(f"line {number}" for number in range(4, 9)), "--", "line 14", "line 15", "line 16",
    ]  # fmt: skip
    assert shown(text, pattern=re.compile("line (1|4)$"), context=1) == [
        f"line {n}" for n in range(6)
    ]


def test_iterations_with_what_was_printed_during_them() -> None:
    text = (LOGS / "mixed.txt").read_bytes()
    found = shown(text, iterations=(31218, 31218))
    assert "31218/" in found[0] and any("valid loss at iteration 45000" in line for line in found)
    assert not any("31219/" in line for line in found) and found[-1].startswith("[default0]:")
    assert any("PULSE" in line for line in found)
    assert not any("PULSE" in line for line in shown(text, iterations=(31218, 31218), pulse=False))
    start_up = b"using world size: 8, and more\nloading\n"
    again = log_of(range(1, 6)) + start_up + log_of(range(3, 8))
    assert [
        re.findall(r"iteration +(\d+)/", line)[0] for line in shown(again, iterations=(4, 5))
    ] == list("4545")


def test_pulses_are_left_out() -> None:
    text = (LOGS / "mixed.txt").read_bytes()
    assert len(shown(text)) - len(shown(text, pulse=False)) == 2
    assert shown(
        "[2021-08-01 01:02:03] ***ALERT: x\nPULSE: not of the watchdog\n", pulse=False
    ) == ["PULSE: not of the watchdog"]


def test_one_attempt() -> None:
    text = "tr11: attempt 7 launch 1 on 1 nodes: a\nx\ntr11: attempt 8 launch 1 on 1 nodes: a\ny\n"
    assert shown(text, attempt="8")[-1] == "y" and len(shown(text, attempt="8")) == 2
    with pytest.raises(NoSuchAttempt) as caught:
        shown(text, attempt="9")
    assert caught.value.launches == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "long " * 30]), max_size=60),
    st.integers(0, 12),
    st.integers(8, 300),
)
def test_the_last_matching_lines_are_those_of_the_whole(
    lines: list[str], count: int, window: int
) -> None:
    data = "".join(f"{line}{number}\n" for number, line in enumerate(lines)).encode()
    wanted = LineQuery(pattern=re.compile("^[al]"))
    query = Query(wanted, lines=count)
    before, show.FIRST_WINDOW_BYTES = show.FIRST_WINDOW_BYTES, window
    try:
        found = list(Beginning(CountingReader(data), len(data), query, LineFilter(wanted)).lines())
    finally:
        show.FIRST_WINDOW_BYTES = before
    every = list(
        Beginning(
            CountingReader(data), len(data), replace(query, lines=None), LineFilter(wanted)
        ).lines()
    )
    assert found == (every[-count:] if count else [])


def test_the_end_of_a_log_is_shown_without_reading_the_rest() -> None:
    log = CountingReader(log_of(range(1, 50_000)))
    query = Query(LineQuery(), lines=3)
    assert len(list(Beginning(log, len(log.data), query, LineFilter(query.wanted)).lines())) == 3
    assert log.amount < 1 << 20


def test_since_a_time_by_steps_and_by_stamps() -> None:
    stamped = b"[2022-05-01 03:56:11] PULSE: running\n"
    data = log_of(range(1, 11)) + stamped + log_of(range(11, 21))

    def first(since: float, steps: int | None) -> str:
        query = Query(LineQuery(), since=since, steps_since=steps)
        return next(
            Beginning(CountingReader(data), len(data), query, LineFilter(query.wanted)).lines(),
            "nothing",
        )

    assert first(0.0, None) == stamped.decode().rstrip()
    assert "iteration       18/" in first(4e9, 3)
    assert first(4e9, 0) == first(4e9, None) == "nothing"


ESCAPES = "\x1b[31mred\x1b[0m \x1b[2Jcleared\x1b]52;c;aGk=\x07 \x1b(Bset \x08\x07bell \x9b1mC1"


def test_nothing_that_a_terminal_obeys_is_printed() -> None:
    assert plain(ESCAPES) == "red cleared set bell 1mC1"
    assert coloured(ESCAPES) == "\x1b[31mred\x1b[0m cleared set bell 1mC1\x1b[0m"
    assert (
        plain("10%\r50%\r100%\r") == "100%" and plain("dos\r") == "dos" and plain("a\tb") == "a\tb"
    )


@given(st.text(alphabet="\x1b[]0123;mJHP\\\x07\x9bab\r\x00", max_size=30))
def test_no_text_gets_an_escape_through(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain(text))
    assert re.sub(r"\x1b\[[0-9;:]*m", "", coloured(text)).isprintable()


def test_lines_without_end_and_bytes_that_are_no_text() -> None:
    data = b"\xff\xfe two\r\nlast"
    beginning = Beginning(CountingReader(data), len(data), Query(), LineFilter(LineQuery()))
    assert list(beginning.lines()) == ["\ufffd\ufffd two\r"] and beginning.rest == b"last"
    endless = b"x" * (3 << 20)
    pieces = Beginning(CountingReader(endless), len(endless), Query(), LineFilter(LineQuery()))
    assert sum(len(piece) for piece in pieces.lines()) + len(pieces.rest) == len(endless)


def test_one_step_line_of_the_176b_training_is_shown_as_it_is() -> None:
    text = (LOGS / "tr11.txt").read_text()
    assert "960.351" in shown(text, iterations=(31219, 31219))[0]
    assert step_line(5).decode().rstrip("\n") == shown(step_line(5))[0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "usual",
                "loss is fine",
                "ERROR here",
                "x: UserWarning: y",
                "",
                "caf\xe9 \x1b[1mERROR\x1b[0m",
            ]
        )
    ),
    st.sampled_from(
        [
            "ERROR",
            "^usual$",
            "caf. ERR",
            "r$",
            r"\berror\b|is",
            "(?i)error",
            r"\Ausual\Z",
            "l(?!oss)",
            "é",
        ]
    ),
    st.sampled_from([None, 20, 30, 40]),
    st.integers(0, 2),
)
def test_passing_over_blocks_changes_nothing(
    lines: list[str], pattern: str, level: int | None, context: int
) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    wanted = LineQuery(pattern=re.compile(pattern), level=level, context=context)
    before, reader.LARGE_BLOCK_BYTES = reader.LARGE_BLOCK_BYTES, 16
    try:
        found = list(
            Beginning(CountingReader(data), len(data), Query(wanted), LineFilter(wanted)).lines()
        )
    finally:
        reader.LARGE_BLOCK_BYTES = before
    line_filter = LineFilter(wanted)
    assert found == [shown for line in lines for shown in line_filter.feed(line)]


def test_whatever_is_severe_holds_a_word_that_blocks_go_by() -> None:
    holds = may_hold(LineQuery(level=30))
    assert holds is not None
    for path in (Path(__file__), LOGS / "tr8.txt", LOGS / "tr11.txt"):
        for line in path.read_text().splitlines():
            for text in re.findall(r'"([^"]+)"', line) or [line]:
                assert severity(text) <= 20 or holds(text.encode()), text


def test_a_line_of_megabytes_moves_nothing_that_follows() -> None:
    mark = b"tr11: attempt 8 launch 1 on 1 nodes: a\n"
    data = b"y\n" + b"x" * (3 << 20) + b"\n" + mark + b"z\n"
    assert shown(data, attempt="8") == [mark.decode().rstrip(), "z"]
