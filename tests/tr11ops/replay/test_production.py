"""tr11 in a replay: the controller, exclusions, watchdog and mails of production, on a few faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.pins.commands import typed
from tests.tr11ops.replay.small_trace import ECC, UNKNOWN, write_trace
from tr11ops.cli.main import execute
from tr11ops.launch.margins import read_launches
from tr11ops.replay.parameters import IN_BACKGROUND, Layout, Parameters
from tr11ops.replay.production import Production
from tr11ops.replay.traces import DAY, Fault, FaultSign, Window
from tr11ops.replay.world import BEGIN, Score, World
from tr11ops.rundir.action_log import OUTCOME, ProgressRecord, Result
from tr11ops.rundir.exclusion import ExclusionLimit
from tr11ops.rundir.exclusions import read_version
from tr11ops.rundir.journal import JournalEntry, read_journal
from tr11ops.watchdog.actions import Exclude, Plan

LAYOUT = Layout(nodes=4, spares=4, held=2)
NODES = tuple(f"n{number:03d}" for number in range(1, 9))


class Played:
    """A replay that is over, and what it left."""

    def __init__(
        self, folder: Path, days: float, *faults: Fault, times: Parameters = IN_BACKGROUND
    ) -> None:
        self.world = World(Window(NODES, days * DAY, faults), LAYOUT, times)
        self.tr11 = Production(self.world, folder)
        self.tr11.replay()
        self.score = Score.of(self.world, "tr11")
        self.journal = read_journal(self.tr11.run.directory.journal).entries

    def of(self, kind: str) -> list[JournalEntry]:
        return [entry for entry in self.journal if entry.kind == kind]


def fault(node: str, day: float, until: float, kind: FaultSign) -> Fault:
    return Fault(node, day * DAY, until * DAY, kind, "as recorded")


def test_broken_hardware_is_excluded_by_its_own_error(tmp_path: Path) -> None:
    played = Played(tmp_path, 2.0, fault("n001", 1.0, 1.5, FaultSign.HARDWARE))
    [failed] = played.of("launch-failed")
    assert failed.data["blamed"] == ["n001"]
    assert failed.data["decision"].startswith("starting again: without n001; ")
    [excluded] = played.of("node-excluded")
    assert excluded.data["node"] == "n001"
    # by the replay's clock, 14 days later
    assert excluded.time == pytest.approx(BEGIN + DAY, abs=60.0)
    assert excluded.data["until"] == pytest.approx(excluded.time + 14 * DAY, abs=60.0)
    assert (played.score.launches, played.score.tasks, played.score.innocent) == (2, 1, 0)


def test_a_worker_that_dies_is_a_suspicion_and_a_second_one_more(tmp_path: Path) -> None:
    played = Played(
        tmp_path,
        3.0,
        fault("n002", 1.0, 1.1, FaultSign.CRASH),
        fault("n002", 1.5, 1.6, FaultSign.CRASH),
    )
    first = played.of("launch-failed")[0]
    assert (first.data["blamed"], first.data["suspects"]) == ([], ["n002"])
    assert first.data["decision"].endswith(" takes the place of n002, which is only suspected")
    # it is not used again, so it cannot fail a second time
    assert (len(played.of("launch-failed")), played.score.excluded) == (1, 0)


def hang(node: str, day: float) -> Fault:
    """Over as soon as its launch has ended."""
    return Fault(node, day * DAY, day * DAY + 1.0, FaultSign.HANG, "a rank goes no further")


def test_a_hang_that_the_workers_end_is_a_suspicion_and_the_node_is_used_last(
    tmp_path: Path,
) -> None:
    """The spares are lost in between, so that the node is needed again."""
    played = Played(
        tmp_path,
        2.0,
        hang("n002", 0.5),
        *(fault(f"n00{number}", 0.6, 0.9, FaultSign.LOSS) for number in (5, 6, 7, 8)),
        hang("n002", 0.8),
    )
    first, lost, second = played.of("launch-failed")
    for failed in (first, second):
        assert (failed.data["blamed"], failed.data["suspects"]) == ([], ["n002"])
    assert first.time == pytest.approx(BEGIN + 0.5 * DAY + 600.0, abs=60.0)  # they gave up
    assert first.data["decision"].endswith("which is only suspected: n005 takes its place")
    assert lost.data["decision"] == "starting again: without n005; n002 takes its place"
    assert second.data["decision"].endswith("only suspected, and no spare node is left")
    assert [entry.data["node"] for entry in played.of("node-excluded")] == ["n005"]


def test_where_a_hang_names_several_nodes_none_is_suspected(tmp_path: Path) -> None:
    played = Played(tmp_path, 2.0, hang("n002", 1.0), hang("n003", 1.0))
    [failed] = played.of("launch-failed")
    assert (failed.data["blamed"], failed.data["suspects"]) == ([], [])
    assert "whom the others waited for is not known" in failed.why
    assert not read_version(played.tr11.run.directory.exclusions).exclusions


def test_of_three_hangs_that_the_watchdog_ends_the_second_avoids_the_node_and_the_third_excludes_it(
    tmp_path: Path,
) -> None:
    """No worker gives up. Tasks of 12 h; the fifth node is lost in between, so that the other is needed."""
    world = World(
        Window(
            NODES[:5],
            3 * DAY,
            (
                hang("n002", 0.3),
                hang("n002", 1.1),
                fault("n005", 1.6, 1.8, FaultSign.LOSS),
                hang("n002", 2.1),
            ),
        ),
        Layout(nodes=4, spares=1, held=0),
        replace(IN_BACKGROUND, silent_for=9 * DAY, time_limit=DAY / 2, quiet_looks=1),
    )
    tr11 = Production(world, tmp_path)
    tr11.replay()
    entries = read_journal(tr11.run.directory.journal).entries
    kept_out = [
        (entry.data["node"], entry.data.get("state", "exclude"))
        for entry in entries
        if entry.kind == "node-excluded"
    ]
    assert kept_out == [
        ("n002", "suspect"), ("n002", "avoid"), ("n005", "exclude"), ("n002", "exclude"),
    ]  # fmt: skip
    cancelled = [
        entry.data["message"]
        for entry in entries
        if entry.kind == OUTCOME and entry.data["action"] == "cancel"
    ]
    assert cancelled == ["done"] * 3
    told = [one.subject for one in tr11.watchdog.messages if one.kind == "opened"]
    assert sum(" hangs: rank 8 on node n002 waits for the data" in subject for subject in told) == 3


def test_launches_save_more_often_while_faults_come_in_a_burst(tmp_path: Path) -> None:
    played = Played(
        tmp_path,
        3.0,
        *(fault(f"n00{number}", 1 + number / 8, 9.0, FaultSign.LOSS) for number in (2, 3, 4)),
    )
    folders = sorted(played.tr11.run.card.paths.attempts.iterdir())
    minutes = [launch.save_minutes for launch in reversed(read_launches(reversed(folders)))]
    usual = minutes[0]
    assert usual is not None and usual < 100 * 105 / 60
    # the first fault is one more beside BLOOM's rate; two in a week count for themselves
    assert all(one is not None and one < usual for one in minutes[2:])
    # a save each 100 steps would have cost some 50 of them with each fault
    assert played.score.lost_percent["redone"] * 3 * 864 < 3 * 50 * 105.0 / 2


def test_a_lost_node_is_left_behind_in_the_same_allocation(tmp_path: Path) -> None:
    played = Played(tmp_path, 2.0, fault("n003", 1.0, 1.5, FaultSign.LOSS))
    [failed] = played.of("launch-failed")
    assert failed.data["blamed"] == ["n003"]
    assert (played.score.tasks, played.score.launches) == (1, 2)


def test_a_lost_batch_host_ends_the_task_and_the_next_goes_on(tmp_path: Path) -> None:
    played = Played(tmp_path, 2.0, fault("n001", 1.0, 1.5, FaultSign.LOSS))
    assert (played.score.tasks, played.score.launches, played.score.burned) == (2, 2, 0)


def test_an_array_that_ends_is_followed_by_another(tmp_path: Path) -> None:
    played = Played(tmp_path, 45.0)
    assert played.score.tasks > 10
    assert any("queued" in message.subject for message in played.tr11.watchdog.messages)
    assert played.score.effective > 0.95


def test_an_exclusion_that_the_cap_refuses_is_refused_in_a_replay_too(tmp_path: Path) -> None:
    world = World(Window(NODES, DAY, ()), LAYOUT, Parameters())
    tr11 = Production(world, tmp_path)
    action = Exclude("n001", "ECC", incident="exclude:n001:1", limit=ExclusionLimit(0))
    tr11.watchdog.apply(Plan((action,)), ProgressRecord())
    directory = tr11.run.directory
    [outcome] = [one for one in read_journal(directory.journal).entries if one.kind == OUTCOME]
    assert outcome.data["result"] == Result.REFUSED
    assert not read_version(directory.exclusions).exclusions


def test_a_node_that_was_repaired_is_used_again_without_a_person(tmp_path: Path) -> None:
    """Three of eight nodes fail for a day, one after another; four train. No one has to come."""
    faults = (fault(f"n00{n}", float(n), n + 1.0, FaultSign.HARDWARE) for n in (1, 2, 3))
    played = Played(tmp_path, 8.0, *faults)
    back = {entry.data["node"] for entry in played.of("node-included")}
    assert back == {"n001", "n002", "n003"}
    assert (played.score.acts, played.score.innocent) == (0, 0)


def test_the_machines_clock_is_back_afterwards(tmp_path: Path) -> None:
    import time

    from tr11ops.base.now import now

    Played(tmp_path, 0.5)
    assert abs(now() - time.time()) < 60.0


# ----------------------------------------------------------------------------- the command
def test_the_command_prints_a_row_for_each_operation(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "t.json",
        *((f"node{number}", 1.0, 1.2, ECC) for number in range(400)),
        ("node1", 4.0, 4.5, UNKNOWN),
    )
    words = ["replay", "--trace", str(trace), "--nodes", "4", "--spares", "2", "--days", "4"]
    code, text = typed((*words, "--against"))
    assert code == 0, text
    for name in ("tr11", "sbatch array", "oracle", "no foresight"):
        assert f"\n{name}" in text
    code, text = typed((*words, "--json"))
    value = json.loads(text)
    assert (value["schema"], value["days"], value["operations"][0]["operation"]) == (1, 4.0, "tr11")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "0"), "--nodes 0: must be 1 to 1000"),
        (("--held", "5"), "--held 5: must be 0 to the 4 of --spares"),
        (("--days", "0"), "--days 0: must be above 0"),
        (("--days", "30"), "30 d 0 h asked for: t.json covers 10 d 0 h"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "t.json", ("a", 1.0, 10.0, ECC))
    code = execute(["replay", "--trace", str(trace), *words])
    shown = " ".join(capsys.readouterr().err.split())
    assert code == 2
    assert said in shown
    assert "Traceback" not in shown
