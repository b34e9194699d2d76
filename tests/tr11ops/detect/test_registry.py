"""What every detector owes: a name, what it needs, a page, and no word on what cannot be seen."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import TABLE
from tests.tr11ops.status_cases import changed, snapshot
from tr11ops.base.observed import Unknown, known
from tr11ops.detect import registry
from tr11ops.detect.detector import REGISTERED, Detector
from tr11ops.detect.detector import detector as as_detector
from tr11ops.detect.finding import Finding, Severity
from tr11ops.detect.registry import DETECTORS, page_of
from tr11ops.observe.observations import OperationObservations, TrainingObservations
from tr11ops.observe.snapshot import Snapshot

ROOT = Path(__file__).parents[3]
AWAY = Unknown("the disk is unreachable")
NAMES = [detector.name for detector in DETECTORS]
BASES = [row[1] for row in TABLE]


@pytest.mark.parametrize("detector", DETECTORS, ids=NAMES)
def test_a_detector_says_its_name_its_needs_and_its_purpose(detector: Detector) -> None:
    assert inspect.isfunction(detector.judge)
    assert detector.judge.__name__.replace("_", "-") == detector.name
    purpose, _, how = (detector.judge.__doc__ or "").partition("\n\n")
    assert purpose.strip() and how.strip()
    assert detector.needs or detector.uses
    assert not set(detector.needs) & set(detector.uses)
    assert not detector.is_blind(snapshot())


def test_names_are_different_and_no_file_is_left_out() -> None:
    folder = Path(registry.__file__).parent
    with_detectors = {
        path.stem for path in folder.glob("*.py") if "\n@detector(" in path.read_text()
    }
    assert {family.__name__.rpartition(".")[2] for family in registry.FAMILIES} == with_detectors
    assert set(NAMES) == set(REGISTERED) and len(set(NAMES)) == len(NAMES)
    with pytest.raises(ValueError, match="two detectors are named down"):
        as_detector("down", bound="at once", severities="INFO")(DETECTORS[0].judge)


def test_what_it_needs_keeps_a_detector_from_running_and_what_it_uses_does_not() -> None:
    ran = []

    def judge(_: Snapshot) -> Iterator[Finding]:
        ran.append(True)
        yield Finding("of-a-test", Severity.INFO, "it ran")

    made = Detector(
        name="of-a-test",
        judge=judge,
        needs=("training.events", "checkpoints.latest"),
        uses=("steps",),
        bound="at once",
        severities="INFO",
        page="of-a-test.md",
    )
    assert made.detect(snapshot()) and not made.is_blind(snapshot())
    without_steps = changed(snapshot(), steps=AWAY)
    assert made.detect(without_steps) and made.is_blind(without_steps)
    latest = replace(snapshot().checkpoints, latest=AWAY)
    ran.clear()
    for hidden in ({"events": AWAY}, {"checkpoints": AWAY}, {"checkpoints": latest}):
        blind = changed(snapshot(), **hidden)
        assert made.detect(blind) == () and made.is_blind(blind)
    assert not ran
    unknown_part = replace(made, needs=("weather",))
    with pytest.raises(AttributeError):
        unknown_part.detect(snapshot())


@pytest.mark.parametrize("name", NAMES)
def test_every_detector_has_a_page(name: str) -> None:
    assert (ROOT / "runbooks" / page_of(name)).is_file()


def test_everything_blinds_no_detector_and_nothing_blinds_all() -> None:
    assert registry.unjudged_detectors(snapshot()) == frozenset()
    assert registry.unjudged_detectors(hide(snapshot(), *fields_needed())) == frozenset(NAMES)


@pytest.mark.parametrize(
    ("hidden", "some", "others"),
    [
        ({"jobs": AWAY}, {"down", "hung", "held"}, {"loss-not-finite"}),
        ({"heartbeats": AWAY}, {"hung", "stalled"}, {"held", "chain-end"}),
        (
            {"checkpoints": replace(snapshot().checkpoints, latest=AWAY)},
            {"checkpoint-unsound"},
            {"checkpoint-overdue"},
        ),
        (
            {"attempts": (replace(snapshot().attempts[0], end=AWAY),)},
            {"down"},
            {"lingering"},
        ),
    ],
)
def test_who_is_blind(hidden: dict[str, Any], some: set[str], others: set[str]) -> None:
    found = registry.unjudged_detectors(changed(snapshot(), **hidden))
    assert some <= found
    assert not others & found


def fields_needed() -> set[str]:
    parts = {
        *Snapshot.__struct_fields__,
        *TrainingObservations.__struct_fields__,
        *OperationObservations.__struct_fields__,
    }
    needs = {
        need.removeprefix("training.").removeprefix("operation.")
        for one in DETECTORS
        for need in (*one.needs, *one.uses)
    }
    return {need.split(".")[0] for need in needs if need.split(".")[0] in parts} | {"attempts"}


def hide(given_snapshot: Snapshot, *names: str) -> Snapshot:
    changes: dict[str, Any] = dict.fromkeys(names, AWAY)
    return changed(given_snapshot, **changes)


@given(
    base=st.sampled_from(BASES),
    hidden=st.sets(st.sampled_from(sorted(fields_needed()))),
    later=st.floats(0, 1e6),
)
def test_what_cannot_be_seen_makes_no_detector_speak(
    base: Snapshot, hidden: set[str], later: float
) -> None:
    """Hiding anything can only silence a detector: a fault is never concluded from not seeing."""
    seen = replace(base, time=base.time + later)
    spoken = {finding.detector for finding in registry.detect_all(seen)}
    assert {finding.detector for finding in registry.detect_all(hide(seen, *hidden))} <= spoken


@pytest.mark.parametrize("phase", ["training", "starting", "ended"])
def test_workers_between_two_launches_are_no_hang_where_the_ends_of_launches_are_hidden(
    phase: str,
) -> None:
    """The end of the last launch is a sign of life: without it the silence of its workers tells
    nothing.
    """
    [base] = [row[1] for row in TABLE if row[0] == "a check fails everywhere"]
    beats = tuple(replace(beat, phase=phase) for beat in known(base.heartbeats, ()))
    [end, *_] = known(base.training.launch_ends, ())
    late = replace(base, heartbeats=beats, time=end.time + 60)
    for later in (0.0, 30.0, 100.0, 300.0, 600.0, 1200.0, 6000.0):
        seen = replace(late, time=late.time + later)
        spoken = {finding.detector for finding in registry.detect_all(seen)}
        assert {
            finding.detector for finding in registry.detect_all(hide(seen, "launch_ends"))
        } <= spoken
    assert {"hung", "stalled", "lingering", "unfinished-end"} <= registry.unjudged_detectors(
        hide(base, "launch_ends")
    )


# ----------------------------------------------------------------------------- the documentation
@pytest.mark.parametrize("detector", DETECTORS, ids=NAMES)
def test_the_documentation_names_the_severities_and_a_bound(detector: Detector) -> None:
    assert detector.bound
    text = inspect.getsource(sys.modules[detector.judge.__module__])
    own = text.partition(f'@detector(\n    "{detector.name}",')[2].partition("@detector(")[0]
    used = {severity.name for severity in Severity if f"Severity.{severity.name}" in own}
    assert used == {severity.name for severity in Severity if severity.name in detector.severities}
