"""`tr11 diagnose --job` and `--run` on the embedded scheduler: a job whose worker fails, judged as its
agent judged it; and what people are told to type holds for the run as it stands now.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.excluding import exclude
from tests.tr11ops.cli.local_bench import LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.trainings import running
from tests.tr11ops.detect.operation_table import operated
from tests.tr11ops.status_cases import HOUR, NOW, facts_with, idle, snapshot, steps
from tr11ops.base import deadline
from tr11ops.cli.diagnose import advice, with_advice
from tr11ops.cluster.site import SiteRules, keep_site
from tr11ops.diagnose.attribution.evidence import OUTSIDE, Attribution, Conclusion, Kind
from tr11ops.diagnose.attribution.joined import joined
from tr11ops.diagnose.causes import judge
from tr11ops.diagnose.diagnosis import Diagnosis, NowState, RunNow
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.screen import lines
from tr11ops.diagnose.sighting import LogLaunch
from tr11ops.launch.plan import resolved_card
from tr11ops.observe.observations import LaunchEnd
from tr11ops.observe.snapshot import SOUND_LOSSES, Attempt
from tr11ops.runcard.card import load_card
from tr11ops.runcard.sections import ResilienceSection
from tr11ops.rundir.attempts import LaunchRecord
from tr11ops.trainers.outside import failure_words
from trainer.contract.attempt import Heartbeat, write_heartbeat
from trainer.contract.files import write_json

JOBCOMP = Path(__file__).parents[2] / "data" / "slurm" / "22.05" / "jobcomp.txt"

# What stands in for a node agent: the worker of the second node fails, the first one's loses it.
AGENT = """
import json, os, sys, time
from pathlib import Path
from trainer.contract.files import write_json
attempt, launch, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["TR11_NODE_RANK"])
host = os.environ["TR11_NODE_NAME"]
error = "RuntimeError: CUDA error: uncorrectable ECC error encountered" if rank else "RankLost: connection closed by rank 1"
log = attempt / "workers" / host / f"rank-{rank}.log"
log.parent.mkdir(parents=True, exist_ok=True)
log.write_text(error + "\\n")
value = {"rank": rank, "host": host, "time": time.time() - rank, "launch": launch, "error": error}
write_json(attempt / "failures" / f"rank-{rank}.json", value)
sys.exit(1)
"""
SCRIPT = """
import sys
from tr11ops.agent import batch, step
step.WorkerLaunch.node_command = property(
    lambda self: [sys.executable, "-c", {agent!r}, str(self.attempt), str(self.number)]
)
sys.exit(batch.main(["--card", {card!r}, "--submission", "t"]))
"""
ROOT = Path(__file__).parents[3]


@pytest.fixture
def failed(bench: LocalBench) -> Iterator[str]:
    """The number of a job that has failed, with all that its agent recorded."""
    card = load_card(bench.card, ["run.exit_duration_minutes=5", "slurm.nodes=2"], {})
    card.paths.root.mkdir(parents=True, exist_ok=True)
    resolved = bench.folder / "card.json"
    write_json(resolved, resolved_card(card))
    program = bench.folder / "controller.py"
    program.write_text(SCRIPT.format(agent=AGENT, card=str(resolved)))
    number = bench.submit(f"cd {ROOT}\nPYTHONPATH={ROOT} {sys.executable} {program}")
    bench.wait(lambda jobs: any(job.raw_id == number and job.state.is_final for job in jobs))
    yield number


def diagnosed(bench: LocalBench, *words: str) -> dict[str, Any]:
    found = bench.tr11(
        "diagnose", "--run", str(bench.card), "--scheduler", "local", "--json", *words
    )
    assert found.code == 1, found.err
    document: dict[str, Any] = found.json
    return document


def recorded(bench: LocalBench, number: str) -> dict[str, Any]:
    launches = load_card(bench.card, [], {}).paths.attempt(number) / "launches"
    value: dict[str, Any] = json.loads(max(launches.glob("*.json")).read_text())
    return value


def test_a_job_is_judged_as_its_agent_did(bench: LocalBench, failed: str) -> None:
    record = recorded(bench, failed)
    of_job, of_run = diagnosed(bench, "--job", failed), diagnosed(bench)
    for found in (of_job, of_run):
        judged = found["attribution"]
        assert (judged["by"], judged["kind"], judged["blamed"]) == (
            "agent",
            "node",
            record["blamed"],
        )
        assert judged["summary"] == record["summary"]
        assert (found["verdict"], found["action"]) == ("gpu_hardware", "exclude_and_resubmit")
        assert found["root_cause"]["node"] == record["blamed"][0]
        assert (found["who"]["kind"], found["who"]["nodes"], found["who"]["proved"]) == (
            "node",
            record["blamed"],
            True,
        )
        assert found["restart"]["answer"] == record["restart"] == "elsewhere"
        assert found["restart"]["why"] == record["restart_why"]
        assert found["scheduler"]["state"] == "FAILED" and found["scheduler"]["exit_code"] == 1
        assert list(found["scheduler"]["nodes"]) == record["blamed"]
        assert sorted(found["last_signs"]) == ["local-node1", "local-node2"]
        assert all(found["last_signs"].values()), "each has written to its worker's log"
    assert of_job["root_cause"]["rank"] == 1
    shown = bench.tr11("diagnose", "--run", str(bench.card), "--job", failed)
    assert f"to blame  {record['blamed'][0]} (node, confidence" in shown.out
    assert "restart  yes, on other nodes (confidence" in shown.out
    assert f"scheduler  job {failed}: FAILED, its script ended with exit code 1" in shown.out
    assert re.search(r"last signs  local-node\d \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", shown.out)
    lines = shown.out.splitlines()
    assert all(len(line) <= 80 or " /" in line for line in lines), "a path is whole"


def test_without_logs_its_records_are_judged(bench: LocalBench, failed: str) -> None:
    folder = load_card(bench.card, [], {}).paths.attempt(failed)
    for log in folder.glob("workers/*/*.log"):
        log.unlink()
    silent = diagnosed(bench, "--job", failed)["last_signs"]
    assert silent == {"local-node1": None, "local-node2": None}, "unknown is an answer"
    record = recorded(bench, failed)
    main_log = load_card(bench.card, [], {}).paths.main_log
    for file, text in (
        (main_log, record["summary"]),
        (folder / "launches" / f"{record['launch']}.json", ""),
    ):
        found = diagnosed(bench, "--job", failed)
        root, line = (
            found["root_cause"],
            file.read_text().splitlines()[found["root_cause"]["line_number"] - 1],
        )
        assert (root["file"], found["action"]) == (str(file), "exclude_and_resubmit")
        assert (text or root["text"]) in line and record["blamed"] == found["attribution"][
            "blamed"
        ] == [root["node"]]
        main_log.unlink(missing_ok=True)
    none = bench.tr11("diagnose", "--run", str(bench.card), "--job", "999")
    assert none.code == 2 and "neither a log nor a record" in none.err


# ----------------------------------------------------------------------------- a run that is well
def test_a_run_that_trains_is_said_to_be_well(bench: LocalBench) -> None:
    """It was "unknown: cannot tell", of a healthy run; and its attempt went by another number than
    in status.
    """
    number = running(bench, "exec sleep 600")
    paths = load_card(bench.card, [], {}).paths
    write_json(
        paths.attempt(number) / "attempt.json", {"job_id": number, "array_id": "70", "task_id": 3}
    )
    worker = paths.attempt(number) / "workers" / "n1" / "rank-0.log"
    for log in (worker, paths.main_log):
        log.parent.mkdir(parents=True, exist_ok=True)
    worker.write_text(step_line(8))
    start = f"tr11: attempt {number} launch 1 on 1 nodes: n1 (70_3)\n"
    paths.main_log.write_text(start + "".join(step_line(step) for step in range(1, 9)))
    words = ("diagnose", "--run", str(bench.card), "--scheduler", "local")

    write_heartbeat(paths.heartbeat(0), Heartbeat(0, "n1", 1, "training", 8, time.time(), number))
    for more in ((), ("--job", number)):
        found = bench.tr11(*words, "--json", *more)
        assert (found.code, found.json["verdict"], found.json["action"]) == (
            0,
            "running",
            "none",
        ), found.out
        assert "training at iteration 8" in found.json["explanation"]
    assert "verdict  running: nothing has ended, it runs and is well" in bench.tr11(*words).out
    every = bench.tr11(*words, "--json", "--all").json
    assert every["verdict"] == "running" and every["attempt"] == "70_3"
    switch = run_directory(bench).kill_switch
    switch.touch()
    assert bench.tr11(*words, "--json").json["verdict"] == "unknown", "it is being stopped"
    switch.unlink()
    bench.clear()
    assert bench.tr11(*words, "--json").json["verdict"] == "unknown", "it has ended"


def step_line(step: int) -> str:
    return (
        f"[default0]: iteration {step:8}/     100 | consumed samples: {8 * step:12} | elapsed time per iteration (s):"
        f" 0.20 | learning rate: 6.000E-05 | global batch size:     8 | lm loss: {9 - step / 10:E} | grad norm: 1.000 |\n"
    )


def test_a_launch_that_has_begun_again_is_told_by_what_ended_the_one_before(
    bench: LocalBench,
) -> None:
    """It was "nothing has ended, it runs and is well", and "nothing to restart", before its first step."""
    number = running(bench, "exec sleep 600")
    paths = load_card(bench.card, [], {}).paths
    attempt = paths.attempt(number)
    write_json(attempt / "attempt.json", {"job_id": number})
    now = time.time()
    why = f"n1: {failure_words('SIGKILL')}"
    first = LaunchRecord(1, ("n1",), now - 60.0)
    first = replace(
        first, end=now - 20.0, exit_status=137, cause="unknown", summary=why, fault=OUTSIDE,
        confidence=0.8, evidence=(why,), decision="starting again: once more", reached=8,
    )  # fmt: skip
    first.write(attempt)
    LaunchRecord(2, ("n1",), now - 15.0).write(attempt)
    paths.main_log.parent.mkdir(parents=True, exist_ok=True)
    begun = [f"tr11: attempt {number} launch {one} on 1 node: n1\n" for one in (1, 2)]
    paths.main_log.write_text(begun[0] + step_line(8) + begun[1])
    write_heartbeat(paths.heartbeat(0), Heartbeat(0, "n1", 1, "starting", 8, now, number))
    words = ("diagnose", "--run", str(bench.card), "--scheduler", "local")
    found = bench.tr11(*words, "--json")
    assert (found.code, found.json["verdict"], found.json["launch_number"]) == (0, "killed", 1)
    assert (found.json["action"], found.json["now"]["state"]) == ("none", "starts")
    shown = " ".join(bench.tr11(*words).out.split())
    assert "verdict killed: ended by a signal from outside" in shown
    assert "Nothing now. It has recovered when `tr11 status` shows new iterations." in shown
    assert f"in launch 2 of job {number}, and has made no step yet" in shown

    write_heartbeat(paths.heartbeat(0), Heartbeat(0, "n1", 1, "training", 9, now, number))
    found = bench.tr11(*words, "--json")
    assert (found.json["verdict"], found.json["now"]["state"]) == ("running", "trains")
    assert "ended by SIGKILL" in found.json["explanation"]


# ---------------------------------------------------------------------------- what can be typed now
def test_the_last_of_all_launches_has_the_advice_of_this_moment(
    bench: LocalBench, failed: str
) -> None:
    [blamed] = recorded(bench, failed)["blamed"]
    exclude(run_directory(bench), blamed, why="ECC", owner="tr11", days=3)
    expected = f"{blamed} is excluded already."
    every = diagnosed(bench, "--all")
    assert (
        diagnosed(bench)["advice"] == every["advice"] == every["launches"][-1]["advice"] == expected
    )
    assert {launch["advice"] for launch in every["launches"][:-1]} <= {""}


@pytest.mark.parametrize("more", [[], ["--all"], ["--job"]])
def test_a_silent_scheduler_is_asked_once(
    bench: LocalBench, failed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """The answer is there all the same, with general advice, and a line that says why."""
    tools = tmp_path / "silent"
    tools.mkdir()
    for name in ("squeue", "sinfo", "scontrol", "sacct", "sbatch"):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tools}/asked\nexec sleep 600\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(deadline, "ADVICE_SECONDS", 1.0)
    words = [*more, failed] if more == ["--job"] else more
    found = bench.tr11(
        "diagnose", "--run", str(bench.card), "--scheduler", "slurm", "--json", *words
    )
    assert (
        found.code == 1 and found.json["attribution"]["blamed"] == recorded(bench, failed)["blamed"]
    ), found.err
    assert found.json["scheduler"] is None, "it is not known what a silent scheduler says"
    assert found.json["advice"] == "" and len((tools / "asked").read_text().splitlines()) == 1
    assert "did not answer within 1 s: how the run stands now is not known" in found.err


TWICE = "software or data, not the nodes: the same fault came back on n08 and n40: rank 1 on n40: it was ended by SIGSEGV"
FIRST = "attempt 7_1, launch 1: rank 1 on n08: it was ended by SIGSEGV"


def concluded(said: Attribution, attempt: str = "1007") -> Diagnosis:
    found = replace(judge([LogLaunch("")]), launch=attempt)
    return joined(found, Conclusion(said, by_agent=True, file="launches/2.json"))


def screen(found: Diagnosis) -> str:
    return " ".join(" ".join(lines(found)).split())


def test_the_line_and_its_node_are_one() -> None:
    found = concluded(Attribution(Kind.SOFTWARE, TWICE, 0.9, suspects=("n40",), evidence=(FIRST,)))
    assert found.root_cause is not None and (found.root_cause.text, found.root_cause.node) == (
        FIRST,
        "n08",
    )


def test_data_that_may_be_at_fault_are_passed_over() -> None:
    found = concluded(Attribution(Kind.SOFTWARE, TWICE, 0.9, evidence=(FIRST,)))
    bad = Attempt(
        "1007", NOW - HOUR, None, cause="software", held_because="the same fault came back"
    )
    ends = (LaunchEnd("1007", 1, NOW - HOUR, reached=31_350, began_at=31_200),)
    found = with_advice(found, advice(idle(attempts=(bad,), launch_ends=ends), found))
    assert "`tr11 rollback 31200 --skip 31351-31351`" in screen(found)
    assert advice(idle(attempts=(bad,)), found) == "", "no one knows how far it came"


def test_one_command_is_told_once_with_when_it_applies() -> None:
    """Where the roll-back is what `tr11 status` says to type, it stood there twice, once as the cure
    and once as what to do if the data are at fault.
    """
    found = concluded(Attribution(Kind.SOFTWARE, TWICE, 0.9, evidence=(FIRST,)))
    bad = Attempt("1007", NOW - HOUR, None, cause="software", held_because="it came back")
    ends = (LaunchEnd("1007", 1, NOW - HOUR, reached=31_350, began_at=31_200),)
    seen, typed = idle(attempts=(bad,), launch_ends=ends), "tr11 rollback 31200 --skip 31351-31351"
    now = RunNow(NowState.STANDS, "", commands=(typed, "tr11 resume"))
    shown = screen(replace(with_advice(found, advice(seen, found, now.commands)), now=now))
    assert shown.count(typed) == 1, shown
    assert "Type the roll-back only if the data of iteration 31351 are at fault." in shown
    assert f"verdict user_code: {TWICE.partition(':')[0]} (" in shown, "in the words of all screens"


def test_a_job_that_the_scheduler_has_forgotten_is_told_from_its_log(bench: LocalBench) -> None:
    """As status says it of the attempt; it was "unknown" in the diagnosis alone."""
    number, card = "4", load_card(bench.card, [], {})
    ended = JOBCOMP.read_text().replace(" Name=arr ", f" Name={card.run.name} ")
    log = bench.folder / "jobcomp.txt"
    log.write_text(ended)
    keep_site(run_directory(bench).site, SiteRules(job_completions=str(log)))
    of_attempt = {"job_id": number, "nodes": ["n1"]}
    write_json(card.paths.attempt(number) / "attempt.json", of_attempt)
    card.paths.main_log.parent.mkdir(parents=True, exist_ok=True)
    start = f"tr11: attempt {number} launch 1 on 1 node: n1\n"
    card.paths.main_log.write_text(f"{start}{step_line(8)}Segmentation fault (core dumped)\n")
    shown = bench.tr11("diagnose", "--run", str(bench.card), "--scheduler", "local").out
    assert "scheduler  job 1_1: FAILED, its script ended with exit code 3" in shown, shown


def test_a_node_beyond_the_limit_is_excluded_by_force_only() -> None:
    found = concluded(
        Attribution(Kind.NODE, "the second time on n20", 0.9, blamed=("n20",), evidence=("n20",))
    )
    run = operated()
    tight = ResilienceSection(exclusion_cap_percent=0)
    at_limit = replace(run, run=facts_with(run.run, resilience=tight), exclusions=())
    shown = screen(with_advice(found, advice(at_limit, found)))
    assert "helps now: `tr11 nodes exclude n20 --force --reason 'found bad'`" in shown
    assert "tr11 nodes exclude n20" in screen(found)


def test_a_kill_while_the_loss_is_no_number_is_no_clean_end() -> None:
    found = concluded(
        Attribution(
            Kind.OPERATOR, "the kill switch is set", 1.0, evidence=("the kill switch is set",)
        )
    )
    *before, bad = steps()[-1 - SOUND_LOSSES :]
    bad = replace(bad, record=replace(bad.record, lm_loss=float("nan")), job_id="1007")
    told = with_advice(found, advice(snapshot(steps=(*before, bad)), found))
    assert (told.fault.value, told.step.value) == ("numerics", "rollback_and_skip")
    assert f"--skip {bad.record.iteration}-" in screen(told)
    well = with_advice(found, advice(snapshot(steps=tuple(before)), found))
    assert well.fault == found.fault and well.advice == ""


@pytest.mark.parametrize("has_log", [True, False])
def test_how_sure_a_lost_node_is_has_one_answer(tmp_path: Path, has_log: bool) -> None:
    """The main log quotes the agent's conclusion: by that line it was surer than the agent itself."""
    said = "n02: went silent, and the others ended without it"
    judged = Attribution(Kind.NODE, said, 0.75, blamed=("n02",), evidence=(said,))
    log = tmp_path / "main_log.txt"
    log.write_text(f"tr11: launch 1 failed (node): {said}\n" if has_log else "")
    [found] = diagnose_files([log])
    told = joined(found, Conclusion(judged, by_agent=True, file="launches/1.json"))
    assert (told.fault.value, told.confidence) == ("slurm_node_fail", 0.75)
