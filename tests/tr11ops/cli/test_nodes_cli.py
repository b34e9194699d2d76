"""`tr11 nodes` on the embedded scheduler: list, check, exclude, include, history, and every
refusal.
"""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.excluding import exclude
from tests.tr11ops.cli.local_bench import Answer, LocalBench
from tests.tr11ops.cli.run_folder import run_directory
from tests.tr11ops.cli.trainings import measure, running
from tests.tr11ops.detect.operation_table import operated
from tests.tr11ops.status_cases import facts_with
from tr11ops.base.observed import known
from tr11ops.cli import nodes_bench
from tr11ops.cluster.base import Node
from tr11ops.cluster.local import LocalScheduler
from tr11ops.detect.nodes import exclusion_cap
from tr11ops.detect.nodes_left import NOTE
from tr11ops.observe.look import read_readmissions
from tr11ops.rundir.exclusion import Exclusion, NodeStanding
from tr11ops.rundir.exclusions import read_version, record_check, revise

ONE, TWO, THREE = "local-node1", "local-node2", "local-node3"


@pytest.fixture
def nodes(bench: LocalBench, monkeypatch: pytest.MonkeyPatch):
    """Types `tr11 nodes ...` for a run of two nodes that has a directory, on a cluster of four."""
    monkeypatch.setenv("TR11_LOCAL_NODES", "4")
    bench.scheduler = LocalScheduler()
    run_directory(bench).root.mkdir()

    def type_in(command: str, *words: str) -> Answer:
        known = [] if command == "history" else ["--scheduler", "local"]
        return bench.tr11("nodes", command, "--run", str(bench.card), *known, *words)

    return type_in


CAP = ("--set", "resilience.exclusion_cap_percent=50")


def listed(bench: LocalBench) -> list[str]:
    return [entry.node for entry in read_version(run_directory(bench).exclusions).exclusions]


def test_list_shows_every_node_once(nodes, bench: LocalBench) -> None:
    exclude(run_directory(bench), TWO, why="Xid 79 \x1b[2J", owner="tr11", days=3.5)
    exclude(run_directory(bench), "gone07", why="old", owner="anna", days=None)
    found = nodes("list", "--json").json
    assert found["schema"] == 1
    rows = {row["node"]: row for row in found["nodes"]}
    assert set(rows) == {ONE, TWO, THREE, "local-node4", "gone07"}
    innocent = {"exclusion": None, "suspicion": None, "elsewhere": []}
    site = {"site_reason": "", "site_reason_since": None, "site_reason_by": ""}
    assert rows[ONE] == {"node": ONE, "state": "idle", "jobs": [], **site, **innocent}
    assert rows[TWO]["exclusion"]["owner"] == "tr11" and not rows[TWO]["exclusion"]["is_due"]
    assert rows["gone07"]["state"] is None and rows["gone07"]["exclusion"]["until"] is None
    shown = nodes("list").out
    assert "for 3 d" in shown and "no expiry" in shown and "\x1b" not in shown
    assert [row["node"] for row in nodes("list", "--excluded", "--json").json["nodes"]] == [
        "gone07",
        TWO,
    ]
    assert [row["node"] for row in nodes("list", ONE, "--json").json["nodes"]] == [ONE]


def test_list_shows_how_a_node_stands_and_what_comes_next(nodes, bench: LocalBench) -> None:
    directory = run_directory(bench)
    exclude(
        directory,
        TWO,
        why="it died again",
        owner="tr11",
        days=3.5,
        state=NodeStanding.AVOID,
        fault="died",
    )
    seen = Exclusion(
        ONE, "it died", "tr11", evidence=("rank 3: SIGSEGV",), state="suspect", fault="died"
    )
    revise(directory, lambda version: replace(version, suspects=(seen,)))
    rows = {row["node"]: row for row in nodes("list", "--json").json["nodes"]}
    assert rows[ONE]["exclusion"] is None and rows[TWO]["suspicion"] is None
    assert (rows[ONE]["suspicion"]["state"], rows[ONE]["suspicion"]["evidence"]) == (
        "suspect",
        ["rank 3: SIGSEGV"],
    )
    assert (
        rows[TWO]["exclusion"]["state"] == "avoid" and "exclude" in rows[TWO]["exclusion"]["next"]
    )
    shown = nodes("list")
    said = " ".join(shown.out.split())
    assert "one more fault: avoid" in said and "one more of this kind: exclude" in said
    assert max(map(len, shown.out.splitlines())) <= 80
    assert nodes("include", TWO, "--force", "--yes", "--reason", "repaired").code == 0
    rows = {row["node"]: row for row in nodes("list", "--json").json["nodes"]}
    assert rows[TWO]["exclusion"] is None and rows[TWO]["suspicion"]["state"] == "returned"


def test_list_says_which_node_is_slow_in_the_words_of_the_status(nodes, bench: LocalBench) -> None:
    job = running(bench, "exec sleep 600")
    assert nodes("list", "--json").json["slow_nodes"]["state"] == "unmeasured"
    measure(bench, job, ONE, (1.0, 1.0, 1.0, 5.0))
    told = bench.tr11("status", "--run", str(bench.card), "--scheduler", "local", "--json").json
    assert (
        told["slow_nodes"]["nodes"] == [ONE]
        and "5.00 times the usual" in told["slow_nodes"]["text"]
    )
    assert nodes("list", "--json").json["slow_nodes"] == told["slow_nodes"]
    shown = nodes("list")
    assert told["slow_nodes"]["text"] in " ".join(shown.out.split())
    assert max(map(len, shown.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("local-node9", "did you mean"),
        ("zzz", "tr11 nodes list --run {card} --all"),
        ("local-node[1", "bracket"),
        ("a;reboot", "letters, digits"),
        ("$(reboot)", "letters, digits"),
        ("local-node[1-99999999]", "more than"),
        ("", "empty"),
    ],
)
@pytest.mark.parametrize("command", ["list", "check", "exclude", "include"])
def test_names_that_cannot_be_meant_are_refused(
    nodes, bench: LocalBench, command: str, name: str, words: str
) -> None:
    answer = nodes(command, name)
    words = words.replace("{card}", str(bench.card))
    assert answer.code == 2 and words in answer.err and len(answer.err.splitlines()) == 1
    assert listed(bench) == []


def test_exclude_is_previewed_then_done_and_kept_in_history(nodes, bench: LocalBench) -> None:
    preview = nodes("exclude", THREE, "--reason", "Xid 79", "--dry-run", "--json")
    assert (preview.code, preview.json["action"], listed(bench)) == (0, "would-exclude", [])
    assert nodes("exclude", THREE).code == 2  # no one can be asked
    done = nodes(
        "exclude",
        THREE,
        "--reason",
        "Xid 79",
        "--days",
        "7",
        "--evidence",
        "seen twice",
        "--acting-for",
        "ana",
        "--yes",
        "--json",
    )
    assert (done.code, done.json["nodes"], done.json["failed"]) == (0, [THREE], [])
    [entry] = read_version(run_directory(bench).exclusions).exclusions
    assert entry.why == "Xid 79" and entry.evidence == ("seen twice",) and entry.owner == "ana"
    assert abs(entry.until - time.time() - 7 * 86400) < 600
    assert "excluded already, by ana" in nodes("exclude", THREE, "--dry-run").err
    [event] = nodes("history", "--json").json["events"]
    assert (event["kind"], event["node"], event["why"]) == ("node-excluded", THREE, "Xid 79")
    assert nodes("history", ONE, "--json").json["events"] == []
    assert "Xid 79" in nodes("history", THREE).out


def test_queued_work_of_the_run_follows_and_no_other(nodes, bench: LocalBench) -> None:
    blocker = bench.submit("exec sleep 600", 4)
    bench.wait(lambda jobs: any(job.raw_id == blocker and job.state.is_active for job in jobs))
    directory = run_directory(bench)
    mine = bench.submit("true", 2, "small", directory.comment("20260101-000000-00000000"))
    other = bench.submit("true", 2, "block2", "tr11:20260101-000000-00000000@0123456789ab")
    answer = nodes("exclude", f"{ONE},{TWO}", "--yes", "--json", *CAP)
    assert answer.code == 0, answer.err
    assert answer.json["queue"] == [{"job_id": mine, "before": [], "after": [ONE, TWO]}]
    excluded = {job.raw_id: job.excluded for job in bench.living()}
    assert excluded[mine] == (ONE, TWO) and excluded[other] == () and excluded[blocker] == ()
    back = nodes("include", ONE, "--force", "--yes", "--json")
    assert back.json["queue"] == [{"job_id": mine, "before": [ONE, TWO], "after": [TWO]}]
    assert {job.raw_id: job.excluded for job in bench.living()}[mine] == (TWO,)


def test_never_below_what_the_run_needs(nodes, bench: LocalBench) -> None:
    answer = nodes("exclude", "local-node[1-2]", "--yes")
    assert answer.code == 1 and "of the partition's 4 nodes at most 1 may be excluded" in answer.err
    assert (
        nodes(
            "exclude", "local-node[1-3]", "--yes", "--set", "resilience.exclusion_cap_percent=100"
        ).code
        == 1
    )
    assert listed(bench) == []
    assert nodes("exclude", ONE, "--yes").code == 0
    assert nodes("exclude", TWO, "--yes").code == 1
    assert nodes("exclude", ONE, "--yes", "--days", "30").code == 0  # no further node
    assert listed(bench) == [ONE]


def test_what_could_not_be_written_is_not_said_to_be_done(nodes, bench: LocalBench) -> None:
    exclude(run_directory(bench), TWO, why="Xid 79", owner="tr11", days=3.5)
    (written,) = (run_directory(bench).exclusions.with_suffix(".d")).glob("*.json")
    written.write_text(json.dumps({**json.loads(written.read_text()), "schema": 99}))
    for name, node, done in (("exclude", ONE, "excluded"), ("include", TWO, "included")):
        answer = nodes(name, node, "--force", "--reason", "x", "--yes")
        assert answer.code == 1 and "was written by a newer tr11" in answer.err
        assert f"{done}: nothing" in answer.err + answer.out


def test_exclude_tells_how_many_more_may_be_and_that_tr11_stops_at_the_cap(
    nodes, bench: LocalBench
) -> None:
    preview = nodes("exclude", ONE, "--dry-run", *CAP)
    assert (
        "after this 1 more node may be excluded: of the partition's 4 nodes at most 2"
        in preview.err
    )
    assert nodes("exclude", ONE, "--dry-run", "--json", *CAP).json["may_exclude"] == 1
    assert nodes("exclude", ONE, "--yes", "--json", *CAP).json["may_exclude"] == 1
    done = nodes("exclude", TWO, "--yes", *CAP)
    assert (
        "after this no more may be excluded" in done.err
        and "tr11 excludes no bad node by itself" in done.err
    )
    beyond = nodes("exclude", THREE, "--dry-run", "--json", "--force", "--reason", "smoke", *CAP)
    assert beyond.json["may_exclude"] == 0


def test_what_the_cap_names_where_all_excluded_nodes_are_dead_helps(
    nodes, bench: LocalBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note for the site is written; the percentage lets one more be excluded, in the queue too."""
    exclude(run_directory(bench), ONE, why="lost to the scheduler", owner="tr11", days=3)
    dead = {ONE: frozenset({"down"})}
    there = tuple(
        replace(one, states=dead.get(one.name, one.states)) for one in bench.scheduler.nodes()
    )
    entries = read_version(run_directory(bench).exclusions).exclusions
    given = operated(nodes=there, exclusions=entries, readmissions=())
    (told,) = exclusion_cap.detect(
        replace(given, run=facts_with(given.run, nodes=2, allocated_nodes=2, partition=""))
    )
    monkeypatch.chdir(tmp_path)
    of_run = ("--run", str(bench.card), "--scheduler", "local")
    assert bench.tr11(*shlex.split(told.fix)[1:], *of_run).code == 0
    assert ONE in (tmp_path / NOTE).read_text()
    (line,) = (line for line in told.evidence if line.startswith("so that more may be"))
    launch = shlex.split(line.split("`")[1])[1:]
    setting = launch[launch.index("--set") :]
    assert nodes("exclude", TWO, "--dry-run").code == 1
    assert nodes("exclude", TWO, "--dry-run", *setting).code == 0
    bench.launch("--array", "1-2")
    assert bench.tr11(*launch, *of_run, "--yes").code == 0


def test_a_person_may_exclude_more_with_a_reason_which_is_kept(nodes, bench: LocalBench) -> None:
    assert nodes("exclude", ONE, "--yes").code == 0
    refused = nodes("exclude", TWO, "--yes")
    assert (
        refused.code == 1
        and f"`tr11 nodes exclude --run {bench.card} {TWO} --force --reason REASON`" in refused.err
    )
    assert nodes("exclude", TWO, "--yes", "--force").code == 2, "not without a reason"
    preview = nodes("exclude", f"{TWO},{THREE}", "--force", "--reason", "smoke", "--dry-run")
    assert (
        preview.code == 0
        and "1 usable node is left, too few for an attempt, which needs 2" in preview.err
    )
    by_card = ("--set", 'slurm.exclude=["local-node4"]', "--reason", "smoke", "--dry-run")
    preview = nodes("exclude", f"{TWO},{THREE}", "--force", *by_card)
    assert "0 usable nodes are left, too few for an attempt" in preview.err
    assert nodes("exclude", TWO, "--yes", "--force", "--reason", "smoke").code == 0
    assert listed(bench) == [ONE, TWO]
    (event,) = nodes("history", TWO, "--json").json["events"]
    assert event["forced"] is True and event["why"] == "smoke"


@pytest.mark.parametrize("days", ["0", "-3", "nan", "1e9"])
def test_impossible_days_are_refused(nodes, bench: LocalBench, days: str) -> None:
    assert nodes("exclude", ONE, "--yes", f"--days={days}").code == 2
    assert listed(bench) == []


def test_a_run_without_a_directory_gets_no_list(bench: LocalBench) -> None:
    answer = bench.tr11(
        "nodes", "exclude", ONE, "--run", str(bench.card), "--scheduler", "local", "--yes"
    )
    assert answer.code == 1 and "does not exist" in answer.err
    assert not run_directory(bench).root.exists()


def test_a_list_that_cannot_be_read_is_not_an_empty_one(nodes, bench: LocalBench) -> None:
    path = run_directory(bench).exclusions
    path.parent.mkdir()
    path.write_text("{")
    for command in ("list", "exclude", "history"):
        answer = nodes(command, *([ONE, "--yes"] if command == "exclude" else []))
        assert answer.code == 3 and "cannot be read" in answer.err


def own_script(folder: Path, body: str) -> str:
    path = folder / "own.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return f'resilience.check_scripts=["{path}"]'


def test_check_and_include(nodes, bench: LocalBench) -> None:
    """Two nodes well, then bad; an excluded node comes back only after a passed check."""
    bad = own_script(bench.folder, "echo 'fan 3 stands still'; exit 1")
    exclude(run_directory(bench), ONE, why="Xid 79", owner="tr11", days=3)
    refused = nodes("include", ONE, "--yes", "--set", bad)
    assert refused.code == 1 and "fan 3 stands still" in refused.err and listed(bench) == [ONE]
    assert nodes("include", ONE, "--dry-run", "--json").json["action"] == "would-include"
    assert nodes("include", ONE, "--yes", "--json").json["action"] == "included"
    assert listed(bench) == []
    assert nodes("include", ONE, "--yes").code == 0  # nothing to do
    answer = nodes("check", ONE, TWO, "--json", "--set", bad)
    assert answer.code == 1
    assert [(row["node"], row["result"]) for row in answer.json["nodes"]] == [
        (ONE, "bad"),
        (TWO, "bad"),
    ]
    kinds = [
        (event["kind"], event.get("result"))
        for event in nodes("history", ONE, "--json").json["events"]
    ]
    assert kinds == [
        ("node-excluded", None), ("node-checked", "bad"), ("node-checked", "fine"), ("node-included", None),
        ("node-checked", "bad"),
    ]  # fmt: skip
    assert not list((run_directory(bench).root / "state").glob("health-*"))


def test_a_node_that_cannot_be_checked_is_looked_at_before_anyone_is_asked(
    nodes, bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way past is named: what a site cannot check, and the unchecked inclusion."""
    asked: list[str] = []
    monkeypatch.setattr("tr11ops.cli.runner.agree", lambda question, yes: asked.append(question))
    exclude(run_directory(bench), ONE, why="Xid 79", owner="tr11", days=3)
    refused = nodes("include", ONE, "--yes", "--set", own_script(bench.folder, "exit 2"))
    assert (refused.code, asked, listed(bench)) == (1, [], [ONE])
    said = " ".join(refused.err.split())
    assert "resilience.skip_checks" in said and "script:own.sh" in said
    assert f"`tr11 nodes include --run {bench.card} {ONE} --force --reason REASON`" in said
    bad = nodes("include", ONE, "--yes", "--set", own_script(bench.folder, "exit 1"))
    assert bad.code == 1 and "--force" not in bad.err and asked == []
    assert nodes("include", ONE, "--yes").code == 0 and asked == [f"Include {ONE}?"]


def on_record(bench: LocalBench, **outcomes: str) -> None:
    """What the nodes of the last attempt said at its start to the site's own script."""
    folder = run_directory(bench).paths.attempt("7") / "nodes"
    folder.mkdir(parents=True)
    for node, result in outcomes.items():
        checks = [
            {"name": "system", "result": "fine", "why": ""},
            {"name": "script:own.sh", "result": result, "why": ""},
        ]
        (folder / f"{node.replace('_', '-')}.json").write_text(json.dumps({"checks": checks}))


def test_a_check_that_no_other_node_could_make_either_keeps_no_node_out(
    nodes, bench: LocalBench
) -> None:
    """The command that a mail names works on a site without nvidia-smi; what was not checked is
    said.
    """
    unsure = ("--set", own_script(bench.folder, "exit 3"))
    exclude(run_directory(bench), ONE, why="Xid 79", owner="tr11", days=1e-9)
    on_record(bench, local_node1="unknown", local_node2="unknown")
    back = nodes("include", ONE, "--yes", *unsure)
    assert (back.code, listed(bench)) == (0, [])
    assert f"{ONE}: not checked, as on no other node of the last attempt: script:own.sh" in back.err
    exclude(run_directory(bench), ONE, why="Xid 79", owner="tr11", days=1e-9)
    due = nodes("check", "--due", "--json", *unsure)
    assert (due.code, due.json["readmitted"], listed(bench)) == (0, [ONE], [])
    exclude(
        run_directory(bench), ONE, why="health check script:own.sh: smoke", owner="tr11", days=1e-9
    )
    assert nodes("include", ONE, "--yes", *unsure).code == 1, "it is what the node was excluded for"


def test_a_check_that_another_node_could_make_must_be_made(nodes, bench: LocalBench) -> None:
    exclude(run_directory(bench), ONE, why="Xid 79", owner="tr11", days=1e-9)
    on_record(bench, local_node1="unknown", local_node2="fine")
    unsure = ("--set", own_script(bench.folder, "exit 3"))
    assert nodes("include", ONE, "--yes", *unsure).code == 1
    assert nodes("check", "--due", *unsure).code == 3 and listed(bench) == [ONE]


@pytest.mark.parametrize("words", ["down", "idle not_responding"])
@pytest.mark.parametrize("more", ["--yes", "--dry-run"])
def test_a_node_that_is_lost_now_is_not_offered_past_its_check(
    nodes, bench: LocalBench, monkeypatch: pytest.MonkeyPatch, words: str, more: str
) -> None:
    seen = LocalScheduler.nodes

    def one_is_lost(self: LocalScheduler) -> tuple[Node, ...]:
        states = {ONE: frozenset(words.split())}
        return tuple(
            replace(node, states=states.get(node.name, node.states)) for node in seen(self)
        )

    monkeypatch.setattr(LocalScheduler, "nodes", one_is_lost)
    exclude(run_directory(bench), ONE, why="lost to the scheduler", owner="ana", days=3)
    refused = nodes("include", ONE, more, "--set", own_script(bench.folder, "exit 2"))
    said = " ".join(refused.err.split())
    assert (refused.code, listed(bench)) == (1, [ONE]), said
    assert f"include {ONE}" not in said, "a preview of what is refused"
    assert "--force" not in said and "what is lost to the scheduler stays excluded" in said


def test_no_node_is_checked_where_no_one_can_be_asked(nodes, bench: LocalBench) -> None:
    exclude(run_directory(bench), ONE, why="Xid 79", owner="tr11", days=3)
    assert nodes("include", ONE).code == 2 and listed(bench) == [ONE]
    assert [event["kind"] for event in nodes("history", ONE, "--json").json["events"]] == [
        "node-excluded"
    ]


def test_due_nodes_are_checked_before_they_come_back(nodes, bench: LocalBench) -> None:
    directory = run_directory(bench)
    for name, days in ((ONE, 1e-6), (TWO, 3.0)):
        exclude(directory, name, why="Xid 79", owner="tr11", days=days)
    time.sleep(0.2)
    bad = own_script(bench.folder, "exit 1")
    first = nodes("check", "--due", "--json", "--set", bad)
    assert (first.code, first.json["prolonged"], first.json["readmitted"]) == (1, [ONE], [])
    assert nodes("check", "--due", "--json").json["nodes"] == []  # not due any more
    nodes("include", ONE, "--force", "--yes")
    exclude(directory, ONE, why="Xid 79", owner="tr11", days=1e-6)
    time.sleep(0.2)
    second = nodes("check", "--due", "--json")
    assert (second.code, second.json["readmitted"]) == (0, [ONE])
    assert listed(bench) == [TWO]


def test_checks_that_cannot_be_made_are_no_pass(nodes, bench: LocalBench) -> None:
    unsure = own_script(bench.folder, "echo 'no such tool'; exit 3")
    answer = nodes("check", ONE, "--set", unsure)
    assert (
        answer.code == 3
        and "UNKNOWN" in answer.out
        and "1 of 8 checks could not be made" in answer.out
    )
    assert (
        "1 node is not known to be fine, of 1" in answer.err
        and "resilience.skip_checks" in answer.err
    )
    exclude(run_directory(bench), ONE, why="Xid 79", owner="tr11", days=1e-9)
    due = nodes("check", "--due", "--json", "--set", unsure)
    assert (due.code, due.json["readmitted"], due.json["prolonged"]) == (3, [], []) and listed(
        bench
    ) == [ONE]
    left_out = nodes(
        "check",
        "--due",
        "--json",
        "--set",
        unsure,
        "--set",
        'resilience.skip_checks=["script:own.sh"]',
    )
    assert left_out.json["readmitted"] == [ONE]


def test_a_check_that_never_answers_is_unknown(nodes, bench: LocalBench) -> None:
    hangs = own_script(bench.folder, "sleep 600")
    answer = nodes("check", ONE, "--timeout", "3", "--json", "--set", hangs)
    assert answer.code == 3
    assert (
        answer.json["nodes"][0]["result"] == "unknown"
        and "no answer within 3 s" in answer.json["nodes"][0]["why"]
    )


def test_the_note_to_the_site(nodes, bench: LocalBench) -> None:
    address = ("--set", "resilience.support_address=help@site.example")
    assert nodes("list", "--report", "-").code == 1  # nothing to report
    nodes(
        "exclude",
        THREE,
        "--reason",
        "Xid 79",
        "--evidence",
        "job 105: GPU has fallen off the bus",
        "--yes",
    )
    note = nodes("list", THREE, "--report", "-", *address).out
    assert note.startswith("To: help@site.example\nSubject: Faulty node local-node3\n")
    assert (
        "Xid 79 (excluded since 20" in note and "    job 105: GPU has fallen off the bus\n" in note
    )
    nodes("list", "--report", str(bench.folder / "note.txt"), *address)
    assert (bench.folder / "note.txt").read_text() == note


def test_a_suggested_exclusion_is_one_that_is_accepted(
    nodes, bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four nodes a run of two may exclude one."""
    looked = [
        replace(node, states=frozenset({"down"})) if node.name == ONE else node
        for node in LocalScheduler().nodes()
    ]
    monkeypatch.setattr(LocalScheduler, "nodes", lambda self: tuple(looked))
    below = nodes("list", "--excluded").out
    assert f"\n  tr11 nodes exclude {ONE} --reason REASON\n" in below and "--force" not in below
    assert nodes("exclude", TWO, "--reason", "Xid 79", "--yes").code == 0
    past = nodes("list", "--excluded").out
    assert f"\n  tr11 nodes exclude {ONE} --force --reason REASON\n" in past
    assert "takes --force: of the partition's 4 nodes at most 1" in " ".join(past.split())
    assert max(map(len, past.splitlines())) <= 80
    assert nodes("exclude", ONE, "--reason", "down", "--yes").code == 1
    assert nodes("exclude", ONE, "--force", "--reason", "down", "--yes").code == 0


def test_the_exclusion_that_a_measurement_suggests_is_one_that_is_accepted(
    nodes, bench: LocalBench
) -> None:
    exclude(run_directory(bench), ONE, why="Xid 79", owner="anna", days=None)
    words = ("--command", SPEEDS, "--repeats", "2")
    suggested = f'tr11 nodes exclude {TWO} --force --reason "nodes bench, tokens 80%"'
    assert f"to exclude: {suggested}" in nodes("bench", *words).out
    assert nodes("bench", *words, "--json").json["exclude_command"] == suggested


# ----------------------------------------------------------------------------- bench
SPEEDS = f"case $SLURMD_NODENAME in {TWO}) echo tokens 80;; *) echo tokens 100;; esac"


def test_bench_names_the_slow_node_and_excludes_nothing(nodes, bench: LocalBench) -> None:
    answer = nodes("bench", "--command", SPEEDS, "--repeats", "2")
    assert answer.code == 1, answer.err
    assert f'to exclude: tr11 nodes exclude {TWO} --reason "nodes bench, tokens 80%"' in answer.out
    assert (
        f"{TWO}: tokens at 80% of what is usual among 4 nodes: 80, below 90.5 is slow"
        in " ".join(answer.out.split())
    )
    assert max(map(len, answer.out.splitlines())) <= 80
    assert listed(bench) == []
    found = nodes("bench", "--command", SPEEDS, "--repeats", "2", "--json").json
    assert (found["schema"], found["slow"], found["left_out"]) == (1, [TWO], [])
    assert found["nodes"][1]["measurements"]["tokens"]["samples"] == {"": [80, 80]}
    assert [entry["result"] for entry in found["nodes"]] == ["fine", "slow", "fine", "fine"]
    assert not list(bench.folder.rglob("*health-*")), "its folder is gone"


def test_bench_of_one_node_shows_its_speed(nodes) -> None:
    answer = nodes("bench", ONE, "--repeats", "1", "--sample", "0.001", "--timeout", "20m")
    assert answer.code == 3 and "three nodes of the same hardware are" in " ".join(
        answer.out.split()
    )
    assert "cpu-fp32" in answer.out and "FLOP/s" in answer.out and "alone" in answer.out


def test_a_clean_bench_answers_slowness_and_no_other_check_does(nodes, bench: LocalBench) -> None:
    directory, begin = run_directory(bench), time.time() - 1.0
    assert nodes("bench", "--command", SPEEDS, "--repeats", "2").code == 1
    assert nodes("check", THREE).code in {0, 3}
    events = nodes("history", "--json").json["events"]
    results = {
        one["node"]: one["result"]
        for one in events
        if one["why"].startswith(("tokens", "nodes bench"))
    }
    assert results == {ONE: "fine", TWO: "slow", THREE: "fine", "local-node4": "fine"}
    assert read_readmissions(directory, (), time.time()) == (), (
        "a command of one's own measures what it likes"
    )
    for node, result in ((ONE, "fine"), (TWO, "slow"), (THREE, "unknown")):
        record_check(directory, node, result=result, why="", owner="ana", of_speed=True)
    (found,) = known(read_readmissions(directory, (), time.time()), ())
    assert (found.node, found.of_speed) == (ONE, True) and found.time > begin


def test_bench_keeps_what_its_own_measurement_found(
    nodes, bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr(
        nodes_bench, "record_check", lambda *given, **how: kept.append((given[1], how))
    )
    assert nodes("bench", ONE, "--repeats", "1", "--sample", "0.001", "--timeout", "20m").code == 3
    assert [(node, how["result"], how["of_speed"]) for node, how in kept] == [
        (ONE, "unknown", True)
    ]


def test_bench_shows_a_node_that_gives_no_answer(nodes) -> None:
    answer = nodes("bench", "--command", "echo the fan is off; exit 3")
    assert (
        answer.code == 3
        and "no answer" in answer.out
        and f"{ONE}: exit status 3: the fan is off" in answer.out
    )
    assert "to exclude" not in answer.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--repeats", "0"), "--repeats"),
        (("--sample", "soon"), "soon"),
        (("--timeout", "-1"), "-1"),
        (("local-node9",), "did you mean"),
    ],
)
def test_bench_refuses_what_cannot_be_meant(nodes, words: tuple[str, ...], text: str) -> None:
    answer = nodes("bench", *words)
    assert answer.code == 2 and text in answer.err


def test_bench_dry_run_runs_nothing(nodes, bench: LocalBench) -> None:
    answer = nodes("bench", "--dry-run")
    assert answer.code == 0 and "no job: 4 nodes of this machine" in answer.out
    assert "-m trainer.debug.node_bench --rank=0 --size=1" in answer.out
    assert not list(bench.folder.rglob("*health-*"))
