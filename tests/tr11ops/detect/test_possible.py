"""Of a job that is only watched nothing is advised that cannot be done: every detector, every screen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.tr11ops.detect.detector_table import TABLE
from tests.tr11ops.detect.operation_table import TABLE as OPERATION
from tests.tr11ops.foreign_card import FOREIGN
from tests.tr11ops.status.screens import SCREENS
from tests.tr11ops.status_cases import checkpoints, snapshot, with_facts
from tr11ops.detect.possible import OWNERS
from tr11ops.detect.registry import detect_all
from tr11ops.dialects.settings import settings_of
from tr11ops.observe.snapshot import Snapshot
from tr11ops.runcard.card import load_card
from tr11ops.rundir.action_log import ActionHistory
from tr11ops.status.assessment import status_of
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.trainers.levels import REFUSED_WHERE_WATCHED, standing_of
from tr11ops.watchdog.actions import PolicyContext
from tr11ops.watchdog.policy import plan
from tr11ops.watchdog.verdict import judge

WATCHED = standing_of(
    settings_of({"command": ["job 4711 of ana"], "start": "watch", "dialect": "torchtitan"}, "it"),
    ranks=1,
)
STARTED = standing_of(settings_of({"command": ["t.py"], "dialect": "torchtitan"}, "it"), ranks=1)
CASES = [
    *((name, seen) for name, seen, *_ in (*TABLE, *OPERATION)),
    *((name, seen) for name, (seen, *_) in SCREENS.items()),
]
REFUSED = re.compile(
    rf"tr11 (?:{'|'.join(sorted(REFUSED_WHERE_WATCHED))})\b|\bscancel\b|scontrol (?!show)"
)


@pytest.mark.parametrize(("name", "seen"), CASES, ids=[name for name, _ in CASES])
def test_what_is_refused_is_advised_nowhere(name: str, seen: Snapshot) -> None:
    watched = with_facts(seen, standing=WATCHED)
    findings = detect_all(watched)
    for finding in findings:
        told = [finding.title, finding.fix, *finding.then, *finding.evidence, finding.by_itself]
        assert not REFUSED.search("\n".join(told)), (name, finding)
    verdict = judge(watched, findings)
    status = status_of(watched, findings, verdict, ExtraObservations())
    assert not REFUSED.search(json.dumps(status.document())), name
    context = PolicyContext(user="ana", is_root=False)
    assert not plan(
        watched, findings, verdict=verdict, history=ActionHistory(), policy_context=context
    ).actions


def test_who_decides_is_said_where_a_command_was_left_out() -> None:
    said = 0
    for _, seen, *_ in TABLE:
        ours = {finding.fingerprint: finding for finding in detect_all(seen)}
        for finding in detect_all(with_facts(seen, standing=WATCHED)):
            before = ours.get(finding.fingerprint)
            if before is not None and REFUSED.search("\n".join((before.fix, *before.then))):
                said += 1
                assert OWNERS in finding.evidence
    assert said > 50


OF_OUR_TRAINER = re.compile(
    r"tr11 (?:rollback|estimate|data|sweep|upload|profile|compute-check)\b|--rehearse|data\.skip_ranges"
)


@pytest.mark.parametrize(("name", "seen"), CASES, ids=[name for name, _ in CASES])
def test_what_only_our_own_trainer_can_do_is_not_advised_to_another(
    name: str, seen: Snapshot
) -> None:
    started = with_facts(seen, standing=STARTED)
    findings = detect_all(started)
    for finding in findings:
        told = [finding.title, finding.fix, *finding.then, *finding.evidence, finding.by_itself]
        assert not OF_OUR_TRAINER.search("\n".join(told)), (name, finding)
        if finding.detector == "loss-not-finite":
            assert finding.fix, "what is typed about it"
    status = status_of(started, findings, judge(started, findings), ExtraObservations())
    assert not OF_OUR_TRAINER.search(json.dumps(status.document())), name


def test_what_tr11_starts_itself_is_advised_as_before() -> None:
    for _, seen, *_ in TABLE:
        started = with_facts(seen, standing=STARTED)
        without = with_facts(seen, standing=replace(WATCHED, level=2))
        assert [one.fix for one in detect_all(started)] == [one.fix for one in detect_all(without)]


def test_where_nothing_whole_was_seen_another_trainers_folder_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "hf.toml"
    path.write_text(FOREIGN)
    late = with_facts(
        snapshot(checkpoints=checkpoints(examined=(), steps=())),
        standing=STARTED,
        source=load_card(path),
    )
    [finding] = [one for one in detect_all(late) if one.detector == "checkpoint-overdue"]
    assert "none that is whole was seen" in finding.evidence[0]
    assert "trainer check" in finding.fix and "--dialect huggingface --folder " in finding.fix


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("torchtitan", "step-48"),
        ("huggingface", "checkpoint-48"),
        ("megatron", "iter_0000048 (step 48)"),
        ("lightning", "step 48"),  # its names hold more than the step
    ],
)
def test_a_checkpoint_of_another_trainer_has_the_name_that_its_folder_has(
    dialect: str, name: str
) -> None:
    settings = settings_of({"command": ["train"], "dialect": dialect, "start": "srun"}, "it")
    standing = standing_of(settings, ranks=1)
    assert standing.name_of(48) == name
    seen = [case for _, case, *_ in TABLE if case.checkpoints]
    told = [
        finding
        for case in seen
        for finding in detect_all(with_facts(case, standing=standing))
        if finding.detector == "checkpoint-unsound"
    ]
    assert told
    for finding in told:
        assert "global_step" not in " ".join((finding.title, *finding.evidence)), finding
