"""Which options an import names: those of the script, as it spells them, or those marked as
assumed.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tr11ops.importer.old_scripts import LLAMA, NAMES, PLACEHOLDERS, SCRIPTS, minimal
from tr11ops.base.errors import ScriptError
from tr11ops.importer.importing import import_text

TEXTS = {name: (SCRIPTS / f"{name}.slurm").read_text() for name in NAMES}
TEXTS |= {"llama": minimal(LLAMA), "placeholders": PLACEHOLDERS, "minimal": minimal()}
ABSENT = ("is not given", "no --", "without --")


def flags(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", text)


def without(script: str, option: str) -> str:
    """The script without an option and the word behind it, unless that is an option too."""
    return re.sub(rf"{option}(?![\w-])([ =](?!-)[^\s\\\"]+)?", "", script)


def check(script: str) -> None:
    """Each option that the report names stands in the script, on the line that is told, or is said
    to be absent.
    """
    found, given_there, lines = import_text(script, "x"), set(flags(script)), script.splitlines()
    for placed in found.placed:
        named = set(flags(placed.source))
        is_assumed = placed.line == 0 and "the original's default" in placed.note
        assert named <= given_there or is_assumed, placed
        if placed.line:
            assert named <= set(flags(lines[placed.line - 1])), placed
    for item in found.unplaced:
        named = set(flags(item.option))
        assert named <= given_there or "is not given" in item.why, item
        if item.line and named <= given_there and item.option.startswith("--"):
            assert named <= set(flags(lines[item.line - 1])), item
    for defect in found.defects:
        is_said_absent = any(word in defect.what for word in ABSENT)
        assert set(flags(defect.what)) <= given_there or is_said_absent, defect
        assert defect.line <= len(lines)


@pytest.mark.parametrize("name", TEXTS)
def test_a_report_names_the_options_of_its_script(name: str) -> None:
    check(TEXTS[name])


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.data())
def test_a_report_names_no_option_that_was_taken_away(data: st.DataObject) -> None:
    script = TEXTS[data.draw(st.sampled_from(sorted(TEXTS)))]
    for option in data.draw(
        st.sets(st.sampled_from(sorted(set(flags(script)))), min_size=1, max_size=4)
    ):
        script = without(script, option)
    try:
        check(script)
    except ScriptError:  # too little is left of it
        return
