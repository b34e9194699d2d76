"""Logs of any trainer: their summary, a range of their iterations, how grave a line is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tests.tr11ops.dialects.trainer_lines import LINES, WITH_TOTAL, WITHOUT_NUMBERS, healthy, log
from tests.tr11ops.logs.log_cases import CountingReader
from tests.tr11ops.status_cases import record
from tr11ops.dialects.reading import iteration_of, step_of
from tr11ops.logs import search
from tr11ops.logs.line_filter import LineFilter, LineQuery
from tr11ops.logs.lines import INFO, WARNING, plain, severity
from tr11ops.logs.show import Beginning, Query, may_hold
from tr11ops.logs.summary import Summary, summarise
from tr11ops.logs.summary_text import lines
from trainer.contract.metrics_record import format_step

REAL = Path(__file__).parents[2] / "data" / "dialects"
NUMBERED = sorted(LINES.keys() - WITHOUT_NUMBERS)
LINEWISE = sorted(LINES.keys() - {"lightning", "huggingface"})  # the others overprint their lines
NOISE = "node07:41230:41544 [3] NCCL INFO Channel 01/02 : 3[b2000] -> 4[1b000] via P2P/IPC\n"


def of(text: str) -> Summary:
    data = text.encode()
    return summarise(CountingReader(data), len(data))


@pytest.mark.parametrize("name", NUMBERED)
def test_the_summary_of_each_trainer(name: str) -> None:
    found = of(NOISE * 3 + log(LINES[name], healthy(40)) + "\n" + NOISE)
    assert (found.steps, found.first, found.last, found.without_loss) == (40, 100, 139, 0)
    assert found.total == (900 if name in WITH_TOTAL else 0)
    assert (found.first_loss, found.last_loss, found.lowest_at) == (
        pytest.approx(4.2),
        pytest.approx(3.81),
        139,
    )
    assert of(log(LINES[name], [*healthy(10), *["nan"] * 3])).without_loss == 3


def shown(text: str, wanted: LineQuery) -> Iterator[str]:
    data = text.encode()
    return Beginning(CountingReader(data), len(data), Query(wanted), LineFilter(wanted)).lines()


@pytest.mark.parametrize("name", sorted(set(NUMBERED) & set(LINEWISE)))
def test_a_range_of_iterations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LEAF_BYTES", 2048)
    text = log(LINES[name], healthy(300))
    found = [line for line in shown(text, LineQuery(iterations=(150, 159))) if line]
    assert [iteration_of(line) for line in found] == list(range(150, 160))


@pytest.mark.parametrize("name", LINEWISE)
@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_no_number_is_a_warning(name: str, loss: str) -> None:
    bad, good = (LINES[name](120, 900, said, "1.2", 100.0) for said in (loss, "2.5"))
    assert (severity(plain(bad.rstrip())), severity(plain(good.rstrip()))) == (WARNING, INFO)
    holds = may_hold(LineQuery(level=WARNING))
    assert holds is not None and holds(bad.encode()) and not holds(good.encode())
    assert list(shown(good * 5 + bad + good * 5, LineQuery(level=WARNING))) == [bad.rstrip("\n")]


def test_a_label_counts_where_a_line_only_looks_like_a_step() -> None:
    assert severity("[WARNING] step 12: the loss: 4.2 is high") == WARNING
    assert severity("[INFO] step 12: loss: 4.2") == INFO
    assert severity("[INFO] step 12: loss: nan") == WARNING


@given(
    st.lists(
        st.tuples(st.integers(1, 10**7), st.one_of(st.floats(1e-3, 1e3), st.just(math.nan)), st.integers(0, 400)),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_the_quick_reading_of_megatrons_lines_is_that_of_the_table(
    steps: list[tuple[int, float, int]],
) -> None:
    """The summary reads them without the table's expressions; a line may be cut."""
    whole = [format_step(record(iteration, lm_loss=loss)) for iteration, loss, _ in steps]
    parts = [
        line[: len(line) - cut] if cut < 40 else line
        for line, (_, _, cut) in zip(whole, steps, strict=True)
    ]
    found = of("[default7]:" + "\n[default7]:".join([whole[0], *parts]) + "\n")
    read = [
        step for line in [whole[0], *parts] if (step := step_of(line)) is not None and step.is_whole
    ]
    losses = [step.loss for step in read if step.loss is not None and math.isfinite(step.loss)]
    assert (found.steps, found.last) == (len(read), read[-1].iteration)
    assert found.without_loss == len(read) - len(losses)
    assert found.last_loss == (losses[-1] if losses else None)


@pytest.mark.parametrize(
    ("name", "steps", "first", "last", "without"),
    [("huggingface", 12, 2, 24, 3), ("lightning", 40, 1, 40, 7)],
)
def test_the_summary_of_real_trainings(
    name: str, steps: int, first: int, last: int, without: int
) -> None:
    """A bar that is drawn again is one step, and no start."""
    found = of((REAL / f"{name}.log").read_text(encoding="utf-8"))
    assert (found.steps, found.first, found.last, found.without_loss) == (
        steps,
        first,
        last,
        without,
    )
    assert len(found.starts) == 1 and found.gaps == []


def test_lines_of_steps_without_their_number_are_told() -> None:
    found = of(log(LINES["huggingface-dicts"], healthy(30)))
    assert (found.steps, found.unnumbered) == (0, 30)
    assert "no line of a step has its number (lines: 30)" in "\n".join(lines(found, "x"))
