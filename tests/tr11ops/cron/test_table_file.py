"""A run's lines in a crontab: others' lines stay byte for byte, and hostile paths reach the shell
unharmed.
"""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given, settings, strategies as st

from tr11ops.base.errors import TableError
from tr11ops.cron.jobs import Daily, Every, Schedule
from tr11ops.cron.table_programs import cron_command, difference, minutes_field, replaced

MARK, OTHER = "0123456789ab", "ba9876543210"
LINES = ["0 * * * * /x.sh --way crontab"]
NOW = 1_795_289_822.25
tables = st.binary(max_size=200).filter(lambda table: b"# tr11 cron " not in table)


def as_cron_reads(command: str) -> str:
    """What cron gives to the shell (crontab(5)): up to the first % that has no backslash;
    backslashes before % go.
    """
    bare = re.search(r"(?<!\\)%", command)
    return re.sub(r"\\%", "%", command[: bare.start()] if bare else command)


@settings(deadline=None)
@given(tables)
def test_others_lines_stay_byte_for_byte(table: bytes) -> None:
    new = replaced(table, MARK, "run", LINES)
    assert new.startswith(table)
    assert replaced(new, MARK, "run", LINES) == new  # the same again changes nothing
    gone = replaced(new, MARK, "run", ())
    assert gone == table or gone == table + b"\n"  # a table without a last line end gets one
    assert replaced(table, MARK, "run", ()) == table


@settings(deadline=None)
@given(tables.map(lambda table: table + b"\n" if table else table), tables)
def test_two_runs_share_a_table(before: bytes, after: bytes) -> None:
    table = replaced(replaced(before, OTHER, "theirs", LINES) + after, MARK, "mine", LINES)
    changed = replaced(table, MARK, "mine", ["5 * * * * /y.sh"])
    assert replaced(changed, OTHER, "theirs", ()).startswith(before + after)
    assert b"/y.sh" in changed and b"/x.sh" in changed
    assert replaced(changed, MARK, "mine", LINES) == table


def test_the_block_stays_where_it_is() -> None:
    table = replaced(b"a\n", MARK, "run", LINES) + b"b\n"
    assert replaced(table, MARK, "renamed", ["1 * * * * /z"]).splitlines() == [
        b"a", b"# tr11 cron 0123456789ab begin: renamed", b"1 * * * * /z", b"# tr11 cron 0123456789ab end", b"b",
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [0, 2])
def test_a_block_that_a_person_has_broken_is_left_alone(cut: int) -> None:
    block = replaced(b"", MARK, "run", LINES).splitlines(keepends=True)
    broken = b"".join(row for index, row in enumerate(block) if index != cut)
    for lines in (LINES, []):
        with pytest.raises(TableError, match="by hand"):
            replaced(broken, MARK, "run", lines)


@settings(deadline=None, max_examples=30)  # each starts a shell
@given(
    st.lists(
        st.text(
            st.characters(blacklist_categories=("Cs",), blacklist_characters="\0\n\r"), min_size=1
        ),
        min_size=1,
    )
)
def test_a_command_is_read_as_it_was_meant(words: list[str]) -> None:
    text = as_cron_reads(cron_command(["printf", "%s\\0", *words]))
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=True)
    assert done.stdout == b"".join(word.encode() + b"\0" for word in words)


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "a\0b"])
def test_what_cannot_stand_on_a_line_is_refused(word: str) -> None:
    with pytest.raises(TableError, match="cannot stand"):
        cron_command([word])


def points(field: str, now: float, offset: int) -> set[int]:
    """Minutes since the epoch, of a day from `now`, at which such a line is started."""
    step = 60 if field == "0" else 1 if field == "*" else int(field.removeprefix("*/"))
    first = int(now // 60)
    return {minute for minute in range(first, first + 1500) if (minute + offset) % 60 % step == 0}


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.builds(Every, st.integers(1, 1440).map(lambda minutes: minutes * 60)),
            st.builds(
                Daily,
                st.builds("{:02d}:{:02d}".format, st.integers(0, 23), st.integers(0, 59)),
                st.sampled_from(["UTC", "Europe/Paris", "Asia/Kathmandu"]),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0, 30, 45]),
)
def test_the_line_meets_every_point(schedules: list[Schedule], offset: int) -> None:
    started = points(minutes_field(schedules, NOW, offset), NOW, offset)
    for schedule in schedules:
        point = schedule.after(NOW)
        while point < NOW + 86_400:
            assert round(point / 60) in started
            point = schedule.after(point)


def test_the_usual_lines() -> None:
    assert minutes_field([Every(3600), Every(21_600), Daily("08:00", "UTC")], NOW, 0) == "0"
    assert minutes_field([Every(600)], NOW, 0) == "*/10"
    assert minutes_field([Every(420)], NOW, 0) == "*"
    assert minutes_field([Every(90)], NOW, 0) == "*"
    assert minutes_field([Every(3600), Daily("08:15", "UTC")], NOW, 0) == "*/15"
    assert minutes_field([], NOW, 0) == "0"


def test_the_difference_is_shown_as_diff_does() -> None:
    text = difference(b"a\n", replaced(b"a\n", MARK, "run", LINES))
    assert (
        "+0 * * * * /x.sh --way crontab" in text.splitlines() and difference(b"a\n", b"a\n") == ""
    )
