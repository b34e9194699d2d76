"""What every detector owes: a name, what it needs, a page, and no word on what cannot be seen."""

from __future__ import annotations

import inspect
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
from tr11ops.detect.registry import DETECTORS, Detector
from tr11ops.detect.runbooks import page_of
from tr11ops.observe.operation import OperationObservations
from tr11ops.observe.snapshot import Snapshot
from tr11ops.observe.training import TrainingObservations

ROOT = Path(__file__).parents[3]
AWAY = Unknown("the disk is unreachable")
NAMES = [detector.NAME for detector in DETECTORS]
BASES = [row[1] for row in TABLE]


@pytest.mark.parametrize("detector", DETECTORS, ids=NAMES)
def test_a_detector_says_its_name_its_needs_and_its_purpose(detector: Detector) -> None:
    assert inspect.ismodule(detector)
    assert detector.__name__.rpartition(".")[2].replace("_", "-") == detector.NAME
    assert detector.__doc__ and detector.detect.__doc__
    assert detector.NEEDS
    assert not any(registry.is_hidden(snapshot(), need) for need in detector.NEEDS)


def test_names_are_different_and_no_file_is_left_out() -> None:
    assert len(set(NAMES)) == len(NAMES)
    folder = Path(registry.__file__).parent
    with_names = {
        path.stem.replace("_", "-")
        for path in folder.glob("*.py")
        if "\nNAME = " in path.read_text()
    }
    assert with_names == set(NAMES)


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
        for need in one.NEEDS
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
    """The end of the last launch is a sign of life: without it the silence of its workers tells nothing."""
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
    assert detector.BOUND
    source = (Path(registry.__file__).parent / f"{detector.NAME.replace('-', '_')}.py").read_text()
    used = {word for word in ("INFO", "WARNING", "CRITICAL") if f"Severity.{word}" in source}
    assert used == {word for word in ("INFO", "WARNING", "CRITICAL") if word in detector.SEVERITIES}
