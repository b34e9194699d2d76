"""status.json: a few fields are let in; whatever else an observation holds never gets out."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.tr11ops.status.publishing import (
    GOODPUT,
    NAMES,
    card_of,
    directory_of,
    full_of,
    published,
)
from tests.tr11ops.status_cases import HOUR, NOW, changed, idle, pending, running, snapshot
from tr11ops.alerts.state import AlertCare
from tr11ops.base.observed import Unknown, all_unknown, observed_fields
from tr11ops.cluster.base import JobState
from tr11ops.detect.detector import Finding, Severity
from tr11ops.observe.clock import Moment
from tr11ops.observe.observations import CopyStatus, OperationObservations, TrainingObservations
from tr11ops.observe.snapshot import KillSwitch, Snapshot
from tr11ops.rundir.exclusion import Exclusion
from tr11ops.status import assessment
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.status.publish import document
from tr11ops.status.published import (
    SCHEMA,
    GoodputSummary,
    care_of,
    published_status,
    read_published,
)
from tr11ops.status.run_list import ListedRun
from tr11ops.watchdog.verdict import VerdictWord, judge


def test_a_healthy_run_says_what_matters() -> None:
    told = published(snapshot(backup=CopyStatus(NOW - HOUR, 31000, "to gs://secret-bucket")))
    assert told["schema"] == SCHEMA and told["time"] == "2022-05-01T12:00:00+00:00"
    assert told["run"] == {"name": "tr11-176B-ml", "variant": "main"}
    assert (told["verdict"], told["exit_code"], told["may_sleep"]) == ("healthy", 0, True)
    assert (told["iteration"], told["total_iterations"], told["loss"]) == (31219, 115311, 2.3)
    assert told["grad_norm"] == 0.17 and told["last_step_time"] == "2022-05-01T11:59:30+00:00"
    assert round(told["progress_percent"], 2) == 27.07
    assert told["attempts"] == {"running": 1, "waiting": 3}
    assert told["last_checkpoint"]["step"] == 31200 and told["backup"] == {
        "step": 31000,
        "age_seconds": 3600.0,
    }
    assert told["goodput"] == {
        "useful_share": 0.91, "effective_time_ratio": 0.87, "held_node_hours": 41_000.0, "faults": 7,
    }  # fmt: skip
    assert told["interval_seconds"] == HOUR and told["unknown"] == []


def test_real_names_stay_inside() -> None:
    """Every way in which a name gets into the full status, at once."""
    seen = snapshot(
        jobs=(running(state=JobState.SUSPENDED, user="ana"), pending(reason="waits for ana")),
        kill_switch=KillSwitch(
            Path("/scratch/tr11/kill-switch"), "ana", NOW - 9 * HOUR, "mail ana@site.example"
        ),
        exclusions=(Exclusion("n07", "GPU fell off n07", "ana", None, ("xid 79",), NOW, "1007"),),
        heartbeats=Unknown("/scratch/tr11/state: permission denied on n01"),
        read_errors=("end of attempt 1007: /scratch/tr11 is away",),
    )
    text = json.dumps(
        published(
            seen, Finding("node-lost", Severity.CRITICAL, "node n07 is lost", "n07", ("by ana",))
        )
    )
    for name in (
        "ana",
        "n07",
        "n01",
        "1007",
        "1000_7",
        "/scratch",
        'kill-switch"',
        "@",
        "site.example",
        "xid",
    ):
        assert name not in text, name
    assert json.loads(text)["verdict"] == "stalled" and "node lost" in json.loads(text)["line"]
    assert json.loads(text)["unknown"] == ["heartbeats", "other"]


def test_findings_are_told_by_their_detector() -> None:
    loud = [
        Finding("slow-node", Severity.WARNING, f"node n{number} is slow", f"n{number}")
        for number in (1, 2)
    ]
    told = published(snapshot(), *loud, Finding("from-a-plugin", Severity.CRITICAL, "n3"))
    assert told["findings"] == [
        {"severity": "critical", "detector": "other", "title": "other", "count": 1},
        {"severity": "warning", "detector": "slow-node", "title": "slow node", "count": 2},
    ]


@pytest.mark.parametrize("word", list(VerdictWord))
def test_every_verdict_has_its_sentence(word: VerdictWord) -> None:
    told = published_status({"verdict": word.value}, NAMES)
    assert told["verdict"] == word.value and told["line"]
    assert told["exit_code"] == 3 and told["iteration"] is None and told["attempts"] is None


def test_unknown_stays_unknown() -> None:
    away = Unknown("no slurm here: n01 refused")
    told = published(idle(jobs=away, nodes=away, steps=away, checkpoints=away, backup=away))
    assert told["verdict"] == "unknown" and told["exit_code"] == 3
    assert told["attempts"] is None and told["loss"] is None and told["last_checkpoint"] is None
    assert told["unknown"] == ["jobs", "nodes", "steps", "checkpoints", "backup"]


def test_whatever_may_be_unknown_is_published_by_name() -> None:
    why = Unknown("not mounted")
    seen = changed(
        snapshot(),
        **all_unknown(Snapshot, why),
        **all_unknown(TrainingObservations, why),
        **all_unknown(OperationObservations, why),
    )
    extra = ExtraObservations(**all_unknown(ExtraObservations, why))
    told = published_status(status_of(seen, (), judge(seen, ()), extra).document(), NAMES, GOODPUT)
    names = {
        *observed_fields(
            Snapshot, TrainingObservations, OperationObservations, ExtraObservations
        ).values()
    }
    assert set(told["unknown"]) == names
    assert {"ended jobs", "corruptions", "damaged files", "messages"} <= names


# ----------------------------------------------------------------------------- planted
PLANTED = (
    "n13",
    "ana@site.example",
    "/gpfs/ana/run",
    "1007_3",
    "hf_token0123456789",
    "jean-zay-iam01",
)
FULL = full_of(
    snapshot(
        jobs=(running(), pending()),
        exclusions=(Exclusion("n07", "w", "ana"),),
        backup=CopyStatus(NOW - HOUR, 31000, "m"),
        read_errors=("a: b",),
    ),
    Finding("node-lost", Severity.CRITICAL, "node n07 is lost", "n07", ("e",)),
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [
            path,
            *(found for key, item in value.items() for found in paths_of(item, (*path, key))),
        ]
    if isinstance(value, list):
        return [
            path,
            *(
                found
                for index, item in enumerate(value)
                for found in paths_of(item, (*path, index))
            ),
        ]
    return [path]


PLACES = [
    path
    for path in paths_of(FULL)
    if path and path not in {("run", "name"), ("run", "variant"), ("run",)}
]


def plant(target: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put the value there, where nothing that was planted before is in the way."""
    for key in path[:-1]:
        target = target[key] if isinstance(target, dict | list) and is_in(target, key) else None
    if isinstance(target, dict | list) and is_in(target, path[-1]):
        target[path[-1]] = value


def is_in(target: Any, key: Any) -> bool:
    return key in target if isinstance(target, dict) else isinstance(key, int) and key < len(target)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(PLACES),
        st.one_of(
            st.sampled_from(PLANTED),
            st.sampled_from(PLANTED).map(lambda word: [word]),
            st.sampled_from(PLANTED).map(
                lambda word: {word: word, "detector": word, "severity": word, "unit": word}
            ),
            st.sampled_from(PLANTED).map(lambda word: f"jobs, {word}: why"),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_what_is_planted_anywhere_never_comes_out(planted: dict[tuple[Any, ...], Any]) -> None:
    given_document = copy.deepcopy(FULL)
    for path, value in planted.items():
        plant(given_document, path, value)
    text = json.dumps(published_status(given_document, NAMES, GOODPUT, HOUR), allow_nan=False)
    assert not [word for word in PLANTED if word in text]


def test_numbers_that_are_none_are_left_out() -> None:
    wild = {
        "iteration": True,
        "loss": float("nan"),
        "tflops": float("inf"),
        "consumed_samples": 10**400,
    }
    told = published_status(wild, NAMES)
    assert [told[name] for name in wild] == [None] * 4
    json.dumps(told, allow_nan=False)


# ----------------------------------------------------------------------------- the file
class Machine:
    """A scheduler that counts what it is asked."""

    name = "slurm"

    def __init__(self) -> None:
        self.calls = 0

    def jobs(self, name: str | None = None) -> tuple[Any, ...]:
        self.calls += 1
        return ()

    def nodes(self) -> tuple[Any, ...]:
        self.calls += 1
        return ()


def test_the_file_of_a_run_that_never_started(tmp_path: Path) -> None:
    card, machine = card_of(tmp_path, interval_minutes=30), Machine()
    data = document(card, directory_of(card), machine, NOW)
    assert data is not None and data.endswith(b"}\n") and str(tmp_path).encode() not in data
    told = read_published(data)
    assert (
        told["run"]["name"] == card.run.name
        and told["interval_seconds"] == 1800.0
        and told["goodput"] is None
    )
    assert machine.calls <= 2


def test_a_run_with_a_directory_has_an_account(tmp_path: Path) -> None:
    card = card_of(tmp_path)
    card.paths.state.mkdir(parents=True)
    data = document(card, directory_of(card), Unknown("away"), NOW)
    assert data is not None and read_published(data)["goodput"]["faults"] == 0


def test_what_is_published_is_by_the_run_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went by the clock of the machine that published it, all others by the run's."""
    monkeypatch.setattr(assessment, "look_now", lambda *_: Moment(NOW - HOUR, HOUR))
    card = card_of(tmp_path)
    data = document(card, directory_of(card), Unknown("away"))
    assert data is not None and read_published(data)["time"] == "2022-05-01T11:00:00+00:00"


def test_a_card_may_want_none(tmp_path: Path) -> None:
    card = card_of(tmp_path, publish_status="false")
    assert document(card, directory_of(card), Machine(), NOW) is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{", b"\xff", b"{}", b'{"schema": 1}', b'{"schema": 99, "run": {}}', b'{"schema": "1", "run": {}}',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_status_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_published(data)


def test_a_later_detector_is_still_read() -> None:
    told = read_published(
        json.dumps({**published(snapshot()), "new": 1, "loss": float("nan")}).encode()
    )
    assert told["new"] == 1 and told["loss"] is None


def test_the_summary_is_of_plain_numbers() -> None:
    assert "str" not in GoodputSummary.__annotations__.values()


def test_who_has_an_alert_is_read_in_one_way_whoever_wrote_the_document():
    alerts = [
        {"owner": "ana", "acknowledged_by": "bo"}, {"owner": None, "acknowledged_by": "bo"},
        {"owner": ["x"], "acknowledged_by": "c\nd"}, {"owner": "e" * 99}, {}, "no alert",
    ]  # fmt: skip
    run = ListedRun(Path("run"), {"alerts": alerts})
    assert run.owners[:3] == ("ana", "bo", "c d") and len(run.owners[3]) <= 60
    assert care_of({"told": "ana", "snoozed_until": "soon"}) == AlertCare()
    for nothing in (None, "ana", {"owner": "ana"}):
        assert ListedRun(Path("run"), {"alerts": nothing}).owners == ()
