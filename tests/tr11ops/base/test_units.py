"""One form for each kind of number that people read; the cases are those in which several forms once differed. A count
is shown with its noun by `counted`: `1 nodes` is read as a fault of the tool.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
import subprocess
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

import tr11ops
from tr11ops.base.units import (
    DAY,
    MINUTE,
    NEAR,
    capitalized,
    command_lines,
    counted,
    duration,
    first_few,
    iso_time,
    node_time,
    number_in,
    quantity,
    rough_duration,
    size,
    timestamp,
)  # fmt: skip

MOMENT = 1651406712.9  # 2022-05-01, noon in London and Paris' early afternoon


@pytest.mark.parametrize(
    ("seconds", "shown", "rough"),
    [
        (-5, "0 s", "0 s"),
        (59.9, "59 s", "59 s"),  # cut, never rounded up: 60 s would be a minute
        (60, "1 min", "1 min"),
        (61, "1 min 1 s", "1 min"),
        (200, "3 min 20 s", "3 min"),
        (3599, "59 min", "59 min"),
        (3600, "1 h 00 min", "1 h"),
        (7500, "2 h 05 min", "2 h"),
        (90_000, "1 d 1 h", "1 d"),
        (180_000, "2 d 2 h", "2 d"),
        (12.34 * 86400, "12 d 8 h", "12 d"),
    ],
)
def test_durations(seconds: float, shown: str, rough: str) -> None:
    assert (duration(seconds), rough_duration(seconds)) == (shown, rough)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (10, "10 B"), (2048, "2.0 KiB"), (512 * 2**20, "512.0 MiB"), (95 * 2**30, "95.0 GiB"),
        (352.5e9, "328.3 GiB"), (2298 * 2**30, "2.2 TiB"), (3 * 2**50, "3,072.0 TiB"),
    ],
)  # fmt: skip
def test_sizes(count: float, shown: str) -> None:
    assert size(count) == shown


def test_counts() -> None:
    assert [counted(number, "task") for number in (0, 1, 12_800)] == [
        "0 tasks",
        "1 task",
        "12,800 tasks",
    ]
    assert [counted(number, "node is", "nodes are") for number in (1, 2)] == [
        "1 node is",
        "2 nodes are",
    ]
    assert [quantity(950), quantity(47_768_496), quantity(97_829_879_808), quantity(366e12)] == [
        "950", "47.8 M", "97.8 B", "366.0 T",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("the training is slow", "The training is slow"),
        ("jean-zay-iam08 holds the others back", "jean-zay-iam08 holds the others back"),
        ("metrics.jsonl does not grow", "metrics.jsonl does not grow"),
        ("so it ends. Later", "So it ends. Later"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_and_a_name_as_it_is_typed(text: str, said: str) -> None:
    assert capitalized(text) == said


def test_what_is_left_out_is_counted() -> None:
    assert [first_few(range(count), 2) for count in (0, 2, 5)] == ["", "0, 1", "0, 1 and 3 more"]


def test_node_time_is_never_none_of_none() -> None:
    """A rehearsal of minutes said that it had used 11 % of 0 node hours."""
    assert [node_time(hours) for hours in (0.05, 1.99, 2.0, 120_000.5)] == [
        "180 node-seconds", "7,164 node-seconds", "2.0 node-hours", "120,000.5 node-hours",
    ]  # fmt: skip
    assert [node_time(0.01, 0.05), node_time(0.01, 64)] == [
        "36 of 180 node-seconds",
        "0.0 of 64.0 node-hours",
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "5", None, [1], 10**400, -(10**400)])
def test_what_is_no_number_of_a_file(value: object) -> None:
    assert number_in(value) is None and number_in(5) == 5.0


def test_points_of_time() -> None:
    paris = ZoneInfo("Europe/Paris")
    assert timestamp(MOMENT, UTC) == "2022-05-01 12:05 UTC"
    assert [timestamp(MOMENT, paris, form) for form in (DAY, MINUTE, NEAR)] == [
        "2022-05-01", "2022-05-01 14:05", "05-01 14:05",
    ]  # fmt: skip
    assert iso_time(MOMENT) == "2022-05-01T12:05:12+00:00"


@pytest.mark.parametrize("moment", [1e18, -1e18, math.inf, math.nan])
def test_times_that_no_calendar_holds(moment: float) -> None:
    assert (timestamp(moment, UTC), timestamp(moment, None), iso_time(moment)) == (
        "never",
        "never",
        None,
    )


# of which there is often one
NOUNS = "alerts|checkpoints|checks|datasets|days|faults|files|keys|nodes|ranks|tasks|workers"
FOLLOWS = re.compile(rf"^ (?:more |other |queued |usable )?(?:{NOUNS})\b")
OTHERS = {  # never about one, or no sentence of ours
    "agent/breaker.py",
    "backup/restorable.py",
    "checkpoints/quarantine.py",
    "cli/storage.py",
    "detect/speed.py",
    "diagnose/attribution/attributors.py",
    "goodput/advise.py",
    "hub/sync_plan.py",
    "status/rows.py",
    "watchdog/rules.py",
}
ROOT = Path(tr11ops.__file__).parent


def test_one_takes_the_singular() -> None:
    assert (counted(1, "node"), counted(2, "node")) == ("1 node", "2 nodes")
    assert (counted(1, "task takes", "tasks take"), counted(0, "task")) == (
        "1 task takes",
        "0 tasks",
    )


def _uncounted(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where an f-string puts a number before a plural, outside a choice between singular and
    plural.
    """
    chosen = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp) or (isinstance(node, ast.If) and _counts(node.test))
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr) or id(node) in chosen:
            continue
        for number, text in zip(node.values, node.values[1:], strict=False):
            if not isinstance(number, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            shown = ast.unparse(number.value)
            if (
                FOLLOWS.match(str(text.value)) and not shown.isupper()
            ):  # a constant of ours is never one
                yield node.lineno, f"{{{shown}}}{str(text.value)[:30]}"


def _counts(test: ast.expr) -> bool:
    """Whether a condition compares a number with 0 or 1, as who chooses between singular and plural
    does.
    """
    return isinstance(test, ast.Compare) and any(
        isinstance(side, ast.Constant) and type(side.value) is int and side.value in {0, 1}
        for side in (test.left, *test.comparators)
    )


def test_no_sentence_puts_a_number_before_a_plural_by_hand() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in sorted(ROOT.rglob("*.py"))
        if str(path.relative_to(ROOT)) not in OTHERS
        for line, words in _uncounted(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "write these with tr11ops.base.units.counted:\n" + "\n".join(found)


def test_a_command_is_broken_between_its_words_so_that_it_can_be_copied() -> None:
    command = "tr11 nodes exclude jean-zay-iam11 --run /srv/runs/heron --reason 'it holds the others back' --days 7"
    for width in (30, 40, 60, 69, 200):
        lines = command_lines(command, width)
        longest = max(map(len, shlex.split(command))) + len(" '' \\") + 1
        assert max(map(len, lines)) <= max(width, longest)
        pasted = "\n".join(f"           {line}" for line in lines)
        typed = subprocess.run(
            ["sh", "-c", f"set -- {pasted}\nprintf '%s\\n' \"$@\""], capture_output=True, text=True
        )
        assert typed.stdout.splitlines() == shlex.split(command)
    assert command_lines("tr11 status", 5) == ["tr11 \\", "  status"]
