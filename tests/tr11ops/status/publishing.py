"""What a run publishes of itself, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tr11ops.status_cases import HOUR
from tr11ops.detect.detector import Finding
from tr11ops.detect.registry import DETECTORS, detect_all
from tr11ops.observe.snapshot import Snapshot
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.status.published import GoodputSummary, published_status
from tr11ops.watchdog.verdict import judge

NAMES = [detector.name for detector in DETECTORS]


GOODPUT = GoodputSummary(0.91, 0.87, 41_000.0, 7)


def full_of(seen: Snapshot, *more: Finding) -> dict[str, Any]:
    findings = (*more, *detect_all(seen))
    return status_of(seen, findings, judge(seen, findings), ExtraObservations()).document()


def published(seen: Snapshot, *more: Finding) -> dict[str, Any]:
    return published_status(full_of(seen, *more), NAMES, GOODPUT, HOUR)


def card_of(tmp_path: Path, **hub: Any) -> RunCard:
    from tr11ops.runcard.card import load_card, shipped_folder

    overrides = [
        f"run.directory={tmp_path / 'run'}",
        *(f"hub.{name}={value}" for name, value in hub.items()),
    ]
    return load_card(shipped_folder() / "demo.toml", overrides)


def directory_of(card: RunCard) -> RunDirectory:
    return RunDirectory(card.paths, card.kill_switch)
