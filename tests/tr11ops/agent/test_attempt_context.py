"""How many of an allocation's nodes a launch takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tr11ops.agent.allocation import Allocation, SchedulerKind
from tr11ops.agent.attempt_context import AttemptContext, AttemptObservations
from tr11ops.agent.relaunch import first_nodes
from tr11ops.agent.step import LineTee
from tr11ops.base.errors import SchedulerError
from tr11ops.cluster.base import Node
from tr11ops.runcard.card import load_card, shipped_folder
from tr11ops.rundir.exclusion import Exclusion, NodeStanding
from tr11ops.rundir.exclusions import Version, exclude, include, ledger_text, revise
from tr11ops.rundir.paths import RunDirectory

NODES = tuple(f"n{number}" for number in range(1, 6))


@pytest.mark.parametrize("kind", ["slurm", "local", "foreground"])
@pytest.mark.parametrize(("held", "needed"), [(5, 4), (4, 4)])
def test_spare_nodes_do_not_train(
    tmp_path: Path, kind: SchedulerKind, held: int, needed: int
) -> None:
    card = load_card(
        shipped_folder() / "demo.toml", [f"run.directory={tmp_path}", "slurm.spare_nodes=1"], {}
    )
    place = AttemptContext(card, Allocation(kind, "7", None, None, NODES[:held]), {}, "t")
    assert AttemptObservations(place, LineTee(tmp_path / "log.txt")).situation().needed == needed


class States:
    """A scheduler that tells these states of the nodes."""

    def __init__(self, **words: set[str]) -> None:
        self._nodes = tuple(Node(name, frozenset(found)) for name, found in words.items())

    def nodes(self) -> tuple[Node, ...]:
        return self._nodes


@pytest.mark.parametrize(
    ("words", "usable", "reluctant"),
    [
        ({"mixed"}, True, False),
        ({"mixed", "drain"}, True, True),
        ({"mixed", "fail"}, True, True),
        ({"mixed", "reboot_requested", "drain"}, True, True),
        ({"mixed", "inval"}, True, True),
        ({"unknown"}, True, False),
        ({"mixed", "not_responding"}, False, False),  # no step starts there
        ({"down"}, False, False),
        ({"idle", "powered_down"}, False, False),
    ],
)
def test_what_a_nodes_state_means_for_the_next_launch(
    tmp_path: Path, words: set[str], usable: bool, reluctant: bool
) -> None:
    card = load_card(shipped_folder() / "demo.toml", [f"run.directory={tmp_path}"], {})
    states: Any = States(n1={"mixed"}, n2=words)
    seen = AttemptObservations(
        AttemptContext(
            card, Allocation("slurm", "7", None, None, NODES[:3]), {}, "t", states=states
        ),
        LineTee(tmp_path / "log.txt"),
    )
    seen.look()
    found = seen.situation()
    assert ("n2" in found.usable, "n2" in found.reluctant) == (usable, reluctant)
    assert {"n1", "n3"} <= set(found.usable) - found.reluctant  # of n3 nothing was told


def test_what_is_on_record_is_used_after_the_others(tmp_path: Path) -> None:
    """A suspect, a node that came back and one that another run suspects train only where there are
    no others: they are the spares. A list of another run that cannot be read says nothing, and is
    told of once.
    """
    site = tmp_path / "site"
    site.mkdir()
    changes = [f"run.directory={tmp_path / 'run'}", f"resilience.shared_exclusions={site}"]
    card = load_card(shipped_folder() / "demo.toml", changes, {})
    directory = RunDirectory(card.paths, card.kill_switch)
    other = Version(1, (Exclusion("n3", "Xid 79", "tr11"),))
    (site / f"{'1' * 32}.json").write_text(ledger_text(other.number, other))
    (site / f"{'2' * 32}.json").write_text("{")
    exclude(directory, "n1", why="it died", owner="tr11", days=14)
    exclude(directory, "n2", why="Xid 79", owner="tr11", days=14)
    include(directory, "n2", why="repaired", owner="ana", then=NodeStanding.RETURNED)
    log = tmp_path / "log.txt"
    seen = AttemptObservations(
        AttemptContext(card, Allocation("slurm", "7", None, None, NODES), {}, "t"), LineTee(log)
    )
    for _ in range(2):
        found = seen.situation()
        assert (found.usable, found.reluctant, found.suspected) == (
            NODES[1:],
            {"n2", "n3"},
            ("n3",),
        )
    assert first_nodes(replace(found, needed=2)) == ("n4", "n5")
    assert first_nodes(replace(found, needed=3)) == ("n2", "n4", "n5")
    # the suspect comes last
    assert first_nodes(replace(found, usable=("n3", "n2", "n4"), needed=2)) == ("n2", "n4")
    for node, since in (("n4", 5.0), ("n5", 4.0)):
        new = Exclusion(node, "hung", "tr11", None, since=since, state=NodeStanding.SUSPECT.value)
        revise(
            directory, lambda version, new=new: replace(version, suspects=(*version.suspects, new))
        )
    found = seen.situation()
    assert found.suspected == ("n3", "n5", "n4")  # as they were suspected
    assert first_nodes(replace(found, needed=3)) == ("n2", "n3", "n5")
    assert log.read_text().count(f"what another run knows of nodes is unknown: {site}") == 1


class Steps:
    """A scheduler that tells these exit codes, one after another."""

    def __init__(self, *codes: int | SchedulerError | None) -> None:
        self.codes = list(codes)

    def step_code(self, job_id: str) -> int | None:
        code = self.codes.pop(0)
        if isinstance(code, SchedulerError):
            raise code
        return code


def test_a_steps_exit_code_counts_for_the_launch_that_left_it(tmp_path: Path) -> None:
    """Slurm keeps the highest of all steps of the job: what an earlier launch left says nothing of
    a later one.
    """
    card = load_card(shipped_folder() / "demo.toml", [f"run.directory={tmp_path}"], {})
    codes = Steps(134, 134, SchedulerError("silent"), 139, None)
    place = AttemptContext(card, Allocation("slurm", "7", None, None, NODES), {}, "t", states=codes)
    seen = AttemptObservations(place, LineTee(tmp_path / "log.txt"))
    assert [seen.step_code() for _ in range(4)] == [134, None, None, 139]
    assert "does not tell how the steps ended: silent" in (tmp_path / "log.txt").read_text()
