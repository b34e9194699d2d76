"""A log's diagnosis and the attempt's records are one answer; the agent's own conclusion stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tr11ops.base.observed import known
from tr11ops.diagnose.answers import Signs
from tr11ops.diagnose.attribution.attributors import attribute
from tr11ops.diagnose.attribution.conclusion import conclude, has_clean_end
from tr11ops.diagnose.attribution.evidence import (
    OUTSIDE,
    Attribution,
    Conclusion,
    Evidence,
    Failure,
    Kind,
)
from tr11ops.diagnose.attribution.joined import joined
from tr11ops.diagnose.attribution.restart import restart_after
from tr11ops.diagnose.diagnosis import Diagnosis, QuotedLine
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.screen import lines
from tr11ops.diagnose.signature import FaultClass, NextStep, Restart
from tr11ops.observe.files import read_attempts
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.trainers.outside import failure_words
from trainer.contract.attempt import EndMarker
from trainer.contract.paths import RunPaths

NODES = ("n1", "n2")
BEGUN = LaunchRecord(2, NODES, 100.0)
AGENTS = replace(
    BEGUN, end=200.0, exit_status=1, cause="node", summary="rank 3 on n2: the worker was ended by SIGKILL",
    confidence=0.78, suspects=("n2",), evidence=("rank 3 on n2: the worker was ended by SIGKILL",), fault="died",
)  # fmt: skip


def put(folder: Path, name: str, value: dict[str, object]) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def failure(rank: int, host: str, error: str, time: float) -> dict[str, object]:
    return {"rank": rank, "host": host, "time": time, "launch": 2, "error": error}


def test_the_agents_conclusion_stands(tmp_path: Path) -> None:
    AGENTS.write(tmp_path)
    replace(AGENTS, launch=1, suspects=("n1",)).write(tmp_path)
    put(
        tmp_path,
        "failures/rank-0.json",
        failure(0, "n1", "RuntimeError: No CUDA GPUs are available", 101.0),
    )
    found = conclude(tmp_path, None, None)
    assert found is not None and found.by_agent
    assert (found.found.kind, found.found.suspects, found.found.confidence) == (
        Kind.NODE,
        ("n2",),
        0.78,
    )
    first = conclude(tmp_path, 1, None)
    assert first is not None and first.found.suspects == ("n1",)
    assert conclude(tmp_path, 9, None) is None and conclude(tmp_path / "none", None, None) is None


def test_without_the_agents_word_the_records_are_asked(tmp_path: Path) -> None:
    BEGUN.write(tmp_path)
    # it may still train: nothing is left that tells of an end
    assert conclude(tmp_path, None, None) is None
    (tmp_path / "launches" / "3.json").write_text('{"launch": "three"}')  # not one
    put(
        tmp_path,
        "failures/rank-0.json",
        failure(0, "n1", "RankLost: connection closed by rank 3 on n2", 102.0),
    )
    put(
        tmp_path,
        "failures/rank-3.json",
        failure(3, "n2", "RuntimeError: No CUDA GPUs are available", 101.0),
    )
    found = conclude(tmp_path, None, None)
    assert found is not None and not found.by_agent
    assert (found.found.kind, found.found.blamed) == (Kind.NODE, ("n2",))
    assert found.document()["by"] == "evidence"


def test_a_log_speaks_for_a_node_that_left_no_record(tmp_path: Path) -> None:
    BEGUN.write(tmp_path)
    put(tmp_path, "failures/rank-0.json", failure(0, "n1", "RankLost: connection closed", 102.0))
    log = tmp_path / "workers" / "n2" / "rank-3.log"
    log.parent.mkdir(parents=True)
    log.write_text("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    [log_evidence] = diagnose_files([log])
    found = conclude(tmp_path, None, log_evidence.log_evidence)
    assert found is not None and found.found.blamed == ("n2",)


def test_the_schedulers_step_code_counts_where_all_else_is_silent(tmp_path: Path) -> None:
    BEGUN.write(tmp_path)
    found = conclude(tmp_path, None, None, lambda: 134)
    assert found is not None and "SIGABRT" in found.found.summary
    put(tmp_path, "failures/rank-3.json", failure(3, "n2", "KeyError: 'text'", 101.0))
    asked: list[int] = []
    conclude(tmp_path, None, None, lambda: asked.append(1))
    assert asked == []


def diagnosis(
    fault: FaultClass, step: NextStep, node: str | None = "n1", confidence: float = 0.6
) -> Diagnosis:
    line = QuotedLine("train.log", 7, "words", rank=1, node=node)
    return Diagnosis(fault, step, confidence, line, "A reason.")


def of(
    kind: Kind, blamed: tuple[str, ...] = (), suspects: tuple[str, ...] = (), sure: float = 0.95
) -> Conclusion:
    return Conclusion(Attribution(kind, "what it says", sure, blamed, suspects), by_agent=True)


@pytest.mark.parametrize(
    ("fault", "step", "conclusion", "expected"),
    [
        (FaultClass.UNKNOWN, NextStep.RESUBMIT, of(Kind.NODE, ("n2",)), ("slurm_node_fail", "exclude_and_resubmit")),
        (FaultClass.NCCL_TIMEOUT, NextStep.RESUBMIT, of(Kind.NODE, ("n2",)), ("nccl_timeout", "exclude_and_resubmit")),
        # a death or an error of one rank excludes no node, whatever the log's words make of it
        (FaultClass.GPU_HARDWARE, NextStep.EXCLUDE_AND_RESUBMIT, of(Kind.NODE, (), ("n2",)), ("gpu_hardware", "resubmit")),
        (FaultClass.UNKNOWN, NextStep.PAGE, of(Kind.NODE, (), ("n2",)), ("unknown", "resubmit")),
        (FaultClass.GPU_HARDWARE, NextStep.EXCLUDE_AND_RESUBMIT, of(Kind.SOFTWARE, (), ("n2",)), ("user_code", "fix_config")),
        (FaultClass.UNKNOWN, NextStep.RESUBMIT, of(Kind.STORAGE), ("storage", "fix_storage")),
        (FaultClass.UNKNOWN, NextStep.PAGE, of(Kind.OPERATOR, sure=1.0), ("clean_exit", "none")),
        (FaultClass.SLURM_TIME_LIMIT, NextStep.RESUBMIT, of(Kind.OPERATOR, sure=1.0), ("slurm_time_limit", "resubmit")),
        (FaultClass.CUDA_OOM, NextStep.FIX_CONFIG, of(Kind.UNKNOWN, (), ("n2",), 0.6), ("cuda_oom", "fix_config")),
    ],
)  # fmt: skip
def test_class_of_the_log_and_blame_of_the_records(
    fault: FaultClass, step: NextStep, conclusion: Conclusion, expected: tuple[str, str]
) -> None:
    found = joined(diagnosis(fault, step), conclusion)
    assert (found.fault.value, found.step.value) == expected
    assert "what it says" in found.explanation and found.confidence <= 0.9


@pytest.mark.parametrize(
    ("fault", "step", "signs"),
    [
        (FaultClass.STORAGE, NextStep.FIX_STORAGE, Signs(lone_node="n1")),
        (FaultClass.NCCL_NETWORK, NextStep.RESUBMIT, Signs(peer="n1")),
    ],
)
def test_a_restart_avoids_no_node_where_the_records_say_that_none_is_to_blame(
    fault: FaultClass, step: NextStep, signs: Signs
) -> None:
    found = replace(diagnosis(fault, step), signs=signs)
    assert found.restart.answer is Restart.ELSEWHERE, "by the log alone"
    told = joined(found, of(Kind.STORAGE))
    assert told.accused.nodes == ()
    assert told.restart.answer is not Restart.ELSEWHERE and "n1" not in told.restart.why


def test_the_node_is_the_conclusions() -> None:
    victim = joined(
        diagnosis(FaultClass.NCCL_NETWORK, NextStep.RESUBMIT), of(Kind.NODE, ("n2",))
    ).root_cause
    assert victim is not None and (victim.node, victim.rank) == ("n2", None)
    unplaced = joined(
        diagnosis(FaultClass.UNKNOWN, NextStep.PAGE, node=None), of(Kind.NODE, ("n2",))
    ).root_cause
    assert unplaced is not None and (unplaced.node, unplaced.rank) == ("n2", 1)
    own = joined(diagnosis(FaultClass.STORAGE, NextStep.FIX_STORAGE), of(Kind.STORAGE)).root_cause
    assert own is not None and (own.node, own.rank) == ("n1", 1)


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        (0.55, ("unknown", "rank 3 on n2: the worker was ended by SIGKILL")),  # a line of any kind
        (0.8, ("user_code", "words")),
    ],
)
def test_a_death_that_was_seen_is_more_than_a_line_that_may_speak_of_anything(
    confidence: float, expected: tuple[str, str], tmp_path: Path
) -> None:
    AGENTS.write(tmp_path)
    seen = conclude(tmp_path, None, None)
    assert seen is not None
    log = diagnosis(FaultClass.USER_CODE, NextStep.FIX_CONFIG, confidence=confidence)
    found = joined(log, seen)
    assert found.root_cause is not None
    assert (found.fault.value, found.root_cause.text) == expected


def test_detectors_and_status_quote_what_the_agent_would_say(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path, "small", "main")
    attempt = paths.attempt("7")
    BEGUN.write(attempt)

    def quoted() -> str:
        [seen] = known(read_attempts(paths), ())
        return seen.failure

    assert quoted() == ""  # it may still train
    put(
        attempt,
        "failures/rank-0.json",
        failure(0, "n1", "RankLost: connection closed by rank 3", 102.0),
    )
    put(
        attempt,
        "failures/rank-3.json",
        failure(3, "n2", "RuntimeError: No CUDA GPUs are available", 103.0),
    )
    # the agent was ended too
    assert quoted() == "rank 3 on n2: RuntimeError: No CUDA GPUs are available"
    AGENTS.write(attempt)
    assert quoted() == AGENTS.summary
    put(attempt, "verdict.json", {"message": "the verdict's words"})
    assert quoted() == "the verdict's words"


# ----------------------------------------------------------------------------- ended from outside
WORDS = failure_words("SIGTERM")
DONE_LOG = "step=10 loss=2.9\nstep=11 loss=2.8\n{'train_runtime': 8123.1, 'train_loss': 2.1}\n"


def of_launcher(*others: Failure) -> Attribution:
    own = Failure("n1", None, 100.0, WORDS)
    return attribute(Evidence(NODES, 1, failures=(own, *others), reached=11))


def test_a_launcher_that_was_ended_from_outside_accuses_no_node() -> None:
    found = of_launcher(
        Failure("n2", 3, 100.1, "RuntimeError: Connection closed by peer [n1]:29500")
    )
    assert (found.kind, found.fault, found.blamed, found.suspects) == (
        Kind.UNKNOWN,
        OUTSIDE,
        (),
        (),
    )
    assert "ended by SIGTERM" in found.summary
    assert restart_after(found, trained=True).answer is Restart.PLAIN
    again = restart_after(found, trained=True, times=3)
    assert again.answer is Restart.CHANGE, "what comes again at one step is not chance"


def test_what_had_failed_before_it_says_more() -> None:
    found = of_launcher(Failure("n2", 3, 99.0, "KeyError: 'a'"))
    assert found.fault != OUTSIDE and "KeyError" in found.summary


@pytest.mark.parametrize("text", [DONE_LOG, "step=10 loss=2.9\nstep=11 loss=2.8\n"])
def test_an_end_from_outside_is_not_called_clean(tmp_path: Path, text: str) -> None:
    """The last lines are those of a training that was asked to leave, or of one that trains."""
    log = tmp_path / "train.log"
    log.write_text(text)
    said = replace(of_launcher(), restart=restart_after(of_launcher(), trained=True))
    found = joined(
        diagnose_files([log])[0], Conclusion(said, by_agent=True, file="launches/1.json")
    )
    assert (found.fault, found.action) == (FaultClass.KILLED, NextStep.RESUBMIT)
    assert "ended by SIGTERM" in found.explanation and found.accused.nodes == ()
    shown = " ".join(lines(found))
    assert "ended by a signal from outside" in shown and "clean end" not in shown


def test_a_signal_that_the_trainer_heeded_is_told_as_one(tmp_path: Path) -> None:
    marker = EndMarker("signal", 11, 11, True, "a signal", 100.0, "n1", "7")
    log = tmp_path / "train.log"
    log.write_text("step=11 loss=2.8\n[exiting program on signal] datetime: 2022-03-21 13:34:11\n")
    said = attribute(Evidence(NODES, 0, marker=marker))
    assert (said.kind, said.fault) == (Kind.OPERATOR, OUTSIDE)
    found = joined(diagnose_files([log])[0], Conclusion(said, by_agent=True))
    assert (found.fault, found.step) == (FaultClass.KILLED, NextStep.RESUBMIT)


def test_an_end_is_clean_only_with_a_record_of_it(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(DONE_LOG)
    [by_log] = diagnose_files([log])
    assert by_log.fault is FaultClass.CLEAN_EXIT
    failed = attribute(Evidence(NODES, 1))
    found = joined(by_log, Conclusion(failed, by_agent=True, file="launches/1.json"))
    assert found.fault is FaultClass.UNKNOWN and "no exit record says so" in found.explanation
    assert found.evidence and "train_runtime" in found.evidence[0].text
    assert not has_clean_end(tmp_path)
    put(tmp_path, "end.json", to_builtins(EndMarker("finished", 11, 11, False, "", 1.0, "n1", "7")))
    assert has_clean_end(tmp_path)
    put(tmp_path, "end.json", to_builtins(EndMarker("error", 11, 11, False, "", 1.0, "n1", "7")))
    assert not has_clean_end(tmp_path)
    (tmp_path / "end.json").write_text("{")
    assert not has_clean_end(tmp_path)
