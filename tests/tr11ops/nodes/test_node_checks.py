"""How nodes are checked, and what the results say of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.tr11ops.nodes.queued import job
from tr11ops.base.errors import NodeNameError
from tr11ops.cluster.base import JobState, Node
from tr11ops.health.base import CheckOutcome, CheckResult
from tr11ops.nodes.check import (
    DIED,
    JobSettings,
    NodeCheck,
    check_nodes,
    job_script,
    judge,
    told,
    ways,
    without_failing_checks,
)
from tr11ops.nodes.health_job import HealthRequest, results_of
from tr11ops.nodes.queue_exclusions import queue_changes, resolve
from tr11ops.nodes.view import support_note
from tr11ops.runcard.sections import SlurmSection
from tr11ops.rundir.exclusion import Exclusion, NodeStanding


def test_a_node_is_fine_when_all_its_checks_were_made() -> None:
    def of(*results: CheckOutcome) -> NodeCheck:
        return told(
            "n1",
            tuple(CheckResult(f"check-{n}", result, "why") for n, result in enumerate(results)),
        )

    fine, warning, bad, unknown = (
        CheckOutcome.FINE,
        CheckOutcome.WARNING,
        CheckOutcome.BAD,
        CheckOutcome.UNKNOWN,
    )
    for checks, result, is_judged in (
        ((fine, fine), fine, True),
        ((fine, warning), warning, True),
        ((fine, unknown, unknown), unknown, False),
        ((warning, unknown), warning, False),
        ((bad, unknown), bad, True),
        ((unknown,), unknown, False),
    ):
        assert (of(*checks).result, of(*checks).is_judged) == (result, is_judged), checks
    assert (
        of(fine, unknown, unknown).why == "2 of 3 checks could not be made (check-1, check-2): why"
    )


def test_how_a_node_can_be_checked() -> None:
    idle, down = frozenset({"idle"}), frozenset({"idle", "drain"})
    cluster = [Node("a", idle), Node("b", down, reason="fan"), Node("c", idle), Node("d", idle)]
    jobs = [
        job(JobState.RUNNING, nodes=("c",)),
        job(JobState.RUNNING, nodes=("d",), user="other"),
        job(JobState.PENDING),
    ]
    found = {way.node: way for way in ways(["a", "b", "c", "d", "e"], cluster, jobs, "me")}
    assert (found["a"].inside, found["a"].never) == ("", "")
    assert found["c"].inside == "5"
    assert "drain" in found["b"].never and "fan" in found["b"].never
    assert "busy with job 5 of other" in found["d"].never and "does not know" in found["e"].never


def test_a_dead_job_speaks_against_a_node_only_if_others_ran() -> None:
    died = NodeCheck("a", CheckOutcome.UNKNOWN, f"{DIED}: FAILED")
    silent = NodeCheck("b", CheckOutcome.UNKNOWN, "no answer within 3 s")
    fine = told("c", (CheckResult("memory", CheckOutcome.FINE, "yes"),))
    assert [entry.result for entry in judge((died, silent))] == ["unknown", "unknown"]
    assert [entry.result for entry in judge((died, silent, fine))] == ["bad", "unknown", "fine"]


def test_a_check_that_fails_everywhere_speaks_against_no_node() -> None:
    """Neither is one of them prolonged on the list by it, nor is one let back in."""
    fans, memory = (
        ("script:fans.sh", CheckOutcome.BAD, "fan: 3"),
        ("memory", CheckOutcome.FINE, "yes"),
    )
    bad = [told(name, (CheckResult(*fans), CheckResult(*memory))) for name in "abc"]
    found = without_failing_checks(tuple(bad))
    assert [entry.result for entry in found] == ["unknown"] * 3 and not any(
        entry.is_judged for entry in found
    )
    assert (
        "script:fans.sh): it failed on 3 nodes, so that it is not the nodes: fan: 3" in found[0].why
    )
    fine = tuple(
        told(name, (CheckResult("script:fans.sh", CheckOutcome.FINE, ""),)) for name in "defg"
    )
    assert without_failing_checks((*bad, *fine)) == (*bad, *fine)  # more nodes pass it
    worse = told("a", (CheckResult(*fans), CheckResult("xid", CheckOutcome.BAD, "79")))
    assert [entry.result for entry in without_failing_checks((worse, *bad[1:]))] == [
        "bad",
        "unknown",
        "unknown",
    ]
    assert without_failing_checks((bad[0],)) == (bad[0],)


def test_what_is_under_way_is_ended_when_the_person_has_enough() -> None:
    class Endless:
        stopped = False

        def answer(self) -> None:
            raise KeyboardInterrupt

        def stop(self) -> None:
            self.stopped = True

    check = Endless()
    planned = ways(["a"], [Node("a", frozenset({"idle"}))], (), "me")
    with pytest.raises(KeyboardInterrupt):
        check_nodes(planned, lambda way: check, 5.0, lambda entry: None)
    assert check.stopped


def test_a_request_travels_as_json() -> None:
    request = HealthRequest("a", inside="5", gpus=8, folder="/x", scripts=("/s",), skip=("memory",))
    travelled = {**to_builtins(request), "scripts": ["/s"], "skip": ["memory"]}
    assert json.loads(json.dumps(to_builtins(request))) == travelled
    with pytest.raises(ValueError):
        results_of([{"name": "x"}])
    with pytest.raises(ValueError):
        results_of([{"name": "x", "result": "splendid", "why": ""}])


# ---------------------------------------------------------------------------
# Nodes as they are typed and shown: host lists, the queue's lists, the note to the site.


def test_queue_lists_keep_what_others_put_there() -> None:
    jobs = [
        job(JobState.PENDING, excluded=("a", "z")),
        job(JobState.RUNNING),
        job(JobState.PENDING, excluded=("b",)),
    ]
    [first, second] = queue_changes(jobs, "abcz", add=["b", "c"])
    assert first.after == ("a", "b", "c", "z") and second.after == ("b", "c")
    assert [
        change.after for change in queue_changes(jobs, "abcz", remove=["a", "b"], keep=["b"])
    ] == [("z",)]


def test_host_lists_are_expanded_once() -> None:
    known = {"x01", "x02", "x03"}
    assert resolve(["x[01-02]", "x02", "x03"], known) == ("x01", "x02", "x03")
    with pytest.raises(NodeNameError, match="nor are 2 more"):
        resolve(["y[01-03]"], known)


def test_a_note_is_plain_text() -> None:
    entries = [
        Exclusion("x01", why="bad\x1b[2J\nnews", since=0.0, evidence=("a\nb",)),
        Exclusion("x02"),
    ]
    note = support_note(entries, "tr11", "anna", None)
    repeated = support_note(
        [Exclusion("x01", why="x01: Xid 79", evidence=("x01: Xid 79", "more"))],
        "tr11",
        "anna",
        None,
    )
    assert "\nx01: Xid 79\n    more\n" in repeated
    assert (
        "x[01-02]" in note
        and "\x1b" not in note
        and "no reason was noted" in note
        and "    a b\n" in note
    )


def test_the_note_says_of_each_node_what_is_true_of_it() -> None:
    """Nodes that are merely down are neither called faulty nor said to be kept off."""
    down = Node("x01", frozenset({"down"}), reason="Not responding")
    entries = [Exclusion("x05", why="Xid 79", since=0.0), Exclusion("x06", why="slow", since=0.0)]
    avoided = replace(entries[1], state=NodeStanding.AVOID.value)
    both = support_note([entries[0], avoided], "b", "anna", None, shut=[down])
    assert "\nSubject: Faulty nodes x[05-06]; out of service: x01\n" in both
    said = " ".join(both.split())
    assert "the training b keeps its next jobs off x[05-06]. The scheduler has x01" in said
    assert "out of service; the training b has not excluded it. Could you" in said
    assert "please look at them?" in said and "stopped using" not in both
    assert "\nx05: Xid 79 (excluded since 1970-01-01 00:00 UTC)\n" in both
    assert "\nx06: slow (avoided since 1970-01-01 00:00 UTC)\n" in both
    assert "\nx01: not excluded by this run; down: Not responding\n" in both
    assert max(map(len, both.splitlines()[1:])) <= 80
    alone = support_note([], "b", "anna", None, shut=[down])
    assert "\nSubject: Out of service: x01\n" in alone and "Faulty" not in alone
    assert "the scheduler has x01 out of service" in alone and "look at it?" in " ".join(
        alone.split()
    )


# ---------------------------------------------------------------------------
# The options of sbatch of a job on chosen nodes: the card's, without those that choose nodes,
# and each GPU asked once.


PLAIN = SlurmSection(nodes=2, time_limit="20:00:00")
OPTIONS: dict[str, str | int | bool] = {
    "licenses": "scratch",
    "exclusive": True,
    "switches": 1,
    "gres": "gpu:a100:8",
    "mem": "900G",
}
CARD = PLAIN.model_copy(update={"reservation": "ours", "options": OPTIONS})


@pytest.mark.parametrize(("gpus", "gres"), [(8, ["gpu:a100:8"]), (4, ["gpu:a100:4"]), (0, [])])
def test_a_check_takes_the_cards_options(
    tmp_path: Path, gpus: int, gres: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = script(JobSettings(tmp_path, CARD, gpus), monkeypatch, tmp_path)
    assert [line for line in lines if "gres" in line] == [
        f"#SBATCH --gres={value}" for value in gres
    ]
    for option in ("--licenses=scratch", "--exclusive", "--mem=900G", "--reservation=ours"):
        assert f"#SBATCH {option}" in lines
    assert not any("switches" in line for line in lines)


def test_without_options_it_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = script(JobSettings(tmp_path, PLAIN, 8), monkeypatch, tmp_path)
    assert "#SBATCH --gres=gpu:8" in lines and not any("exclusive" in line for line in lines)


def script(settings: JobSettings, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    srun = folder / "srun"  # submitit looks whether there is one
    srun.write_text("")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return job_script(settings, ["n1", "n2"], 5).splitlines()
