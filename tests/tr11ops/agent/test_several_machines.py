"""`tr11 train` on several machines without a scheduler: two agents of this machine, as two nodes
that share a folder.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.end_to_end import TR11, Playground
from tests.plugins.worker_server import worker_python
from tr11ops.agent.peers import Newcomer, objection
from tr11ops.agent.rendezvous import Channel, Greeting, Rendezvous, greet, read_rendezvous
from tr11ops.base.errors import ChannelBusy, ChannelLost, RendezvousError
from tr11ops.twin.machine import claimed_ports
from trainer.contract.state_file import read_json

LAUNCHER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "NNODES": "4", "NODE_RANK": "2"}
RENDEZVOUS = Rendezvous(4, 2, "node1", 29500)
SLOW_MACHINE_SECONDS = 120.0
# what forks for each worker: it has the folder in its command line, and stays
SERVERS: set[int] = set()


# ----------------------------------------------------------------------------- which node this is
@pytest.mark.parametrize(
    "environment",
    [
        LAUNCHER,
        {
            "MASTER_ADDR": "node1",
            "MASTER_PORT": "29500",
            "WORLD_SIZE": "4",
            "RANK": "2",
        },  # a PyTorchJob
        {
            "MASTER_ADDR": "node1",
            "MASTER_PORT": "29500",
            "NNODES": "4",
            "JOB_COMPLETION_INDEX": "2",
        },  # an indexed Job
    ],
)
def test_a_launchers_environment_names_the_node(environment: dict[str, str]) -> None:
    assert read_rendezvous(None, None, None, environment, 9) == (RENDEZVOUS, ())


def test_options_win_over_the_environment_and_say_so() -> None:
    rendezvous, said = read_rendezvous(3, 1, "node7:29600", LAUNCHER, 9)
    assert rendezvous == Rendezvous(3, 1, "node7", 29600)
    assert said == (
        "--nodes 3 is used, not NNODES=4 of the environment",
        "--node-rank 1 is used, not NODE_RANK=2 of the environment",
        "--master node7:29600 is used, not MASTER_ADDR=node1 of the environment",
    )
    assert read_rendezvous(4, 2, "node1:29500", LAUNCHER, 9) == (RENDEZVOUS, ())
    assert read_rendezvous(None, 1, "[::1]:29500", {}, 2)[0] == Rendezvous(2, 1, "::1", 29500)


@pytest.mark.parametrize(
    "environment", [{}, {"RANK": "3", "WORLD_SIZE": "8"}, {"JOB_COMPLETION_INDEX": "1"}]
)
def test_no_launcher_means_one_machine(environment: dict[str, str]) -> None:
    assert read_rendezvous(2, None, None, environment, 2) == (None, ())


def test_a_launcher_of_one_container_means_one_machine() -> None:
    assert (
        read_rendezvous(None, None, None, {**LAUNCHER, "NNODES": "1", "NODE_RANK": "0"}, 4)[0]
        is None
    )


@pytest.mark.parametrize(
    ("options", "environment", "fix"),
    [
        (
            (None, None, None),
            {"MASTER_ADDR": "a"},
            "MASTER_ADDR is set and MASTER_PORT is not: set both",
        ),
        (
            (None, None, None),
            {"MASTER_PORT": "1"},
            "MASTER_PORT is set and MASTER_ADDR is not: set both",
        ),
        (
            (None, None, None),
            {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "give --node-rank, or set NODE_RANK, or unset",
        ),
        (
            (None, None, None),
            {"NODE_RANK": "1"},
            "give --master HOST:PORT, or set MASTER_ADDR and MASTER_PORT",
        ),
        (
            (None, None, None),
            {**LAUNCHER, "NNODES": "four"},
            "NNODES='four': must be a whole number from 1",
        ),
        (
            (None, None, None),
            {**LAUNCHER, "MASTER_PORT": "70000"},
            "MASTER_PORT: port='70000': must be",
        ),
        ((None, None, None), {**LAUNCHER, "NODE_RANK": "4"}, "with 4 nodes it must be 0 to 3"),
        ((None, None, None), {**LAUNCHER, "LOCAL_RANK": "0"}, "start it once on each node"),
        (
            (2, None, "a:1"),
            {},
            "nothing says which node this is: give --node-rank, or set NODE_RANK",
        ),
        ((2, 1, None), {}, "nothing says where node 0 is: give --master HOST:PORT"),
        ((2, 2, "a:1"), {}, "with --nodes 2 it must be 0 to 1"),
        ((2, 1, "node1"), {}, "must be HOST:PORT, such as node1:29500"),
        ((2, 1, ":29500"), {}, "must be HOST:PORT"),
        ((2, 1, "a:b"), {}, "--master: port='b': must be a whole number"),
    ],
)
def test_half_a_place_is_refused(
    options: tuple[int | None, int | None, str | None], environment: Mapping[str, str], fix: str
) -> None:
    with pytest.raises(RendezvousError, match=re.escape(fix)) as refused:
        read_rendezvous(*options, environment, 8)
    assert "\n" not in str(refused.value)


# ----------------------------------------------------------------------------- who may join
OURS = Newcomer(2, 0, "a", "1.0", {"run": {"seed": 1, "name": "x"}, "derived": {"hash": "1"}})


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            Newcomer(2, 1, "b", "1.0", {"run": {"seed": 1, "name": "x"}, "derived": {"hash": "2"}}),
            "",
        ),
        (
            Newcomer(3, 1, "b", "1.0", OURS.card),
            "was started for 3 nodes, node 0 for 2: give the same --nodes",
        ),
        (Newcomer(2, 2, "b", "1.0", OURS.card), "its rank must be 1 to 1: correct --node-rank"),
        (Newcomer(2, 1, "b", "1.1", OURS.card), "has tr11 1.1, node 0 has 1.0: install the same"),
        (
            Newcomer(2, 1, "b", "1.0", {"run": {"seed": 2, "name": "x"}}),
            "another card than node 0, in run.seed: give",
        ),
    ],
)
def test_nodes_that_disagree_are_told_in_what(other: Newcomer, why: str) -> None:
    assert why in objection(OURS, other) and bool(objection(OURS, other)) == bool(why)


def test_who_does_not_share_the_key_is_put_off() -> None:
    left, right = socket.socketpair()
    heard: list[str] = []

    def listen() -> None:
        try:
            Greeting(Channel(left), b"one key")
        except ChannelLost as error:
            heard.append(str(error))

    listener = threading.Thread(target=listen)
    listener.start()
    with pytest.raises(ChannelBusy, match="is that shared between the nodes"):
        greet(Channel(right), b"another", {"rank": 1})
    listener.join()
    assert heard == ["a newcomer without the key"]


# ----------------------------------------------------------------------------- two nodes
@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    folder = tmp_path_factory.mktemp("two machines")
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in {*LAUNCHER, "RANK", "WORLD_SIZE"}
    }
    python, server = worker_python(folder)
    SERVERS.add(server)
    made = Playground(folder, {**environment, "COLUMNS": "80", "PYTHON_EXEC": str(python)})
    made.prepare()
    made.card("tr11.toml", nodes=2, workers=1, tensor=1)
    yield made
    assert left_running(folder) == []


@pytest.fixture
def port() -> Iterator[int]:
    with claimed_ports(1, beside_twins=True) as first:
        yield first


class Node:
    """One agent, as a person starts it on one machine."""

    def __init__(
        self, playground: Playground, name: str, options: list[str], more: Mapping[str, str]
    ) -> None:
        self.output = playground.folder / f"{name}.txt"
        self.folder = playground.folder
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [str(TR11), "train", *options], cwd=playground.folder, env={**playground.environment, **more},
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def ends(self, seconds: float = 600) -> int:
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.said[-3000:]}") from None
        assert "Traceback" not in "".join(
            line for line in self.said.splitlines() if line.startswith("tr11: ")
        )
        return code


def left_running(folder: Path) -> list[list[str]]:
    """The processes that have this folder in their command line."""
    found = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in SERVERS]
    lines = [process.info["cmdline"] or [] for process in found]
    return [words for words in lines if any(str(folder) in word for word in words)]


def pair(
    playground: Playground, port: int, directory: str, *options: str, name: str = ""
) -> tuple[Node, Node]:
    """Node 0 and node 1, with the same command but for the rank."""
    words = [
        "--nodes",
        "2",
        "--master",
        f"127.0.0.1:{port}",
        "--set",
        f"run.directory={directory}",
        *options,
    ]
    nodes = [
        Node(playground, f"{directory}{name}-{rank}", [*words, "--node-rank", str(rank)], {})
        for rank in (0, 1)
    ]
    return nodes[0], nodes[1]


def end(*nodes: Node) -> None:
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()


def test_two_machines_train_as_one_does(playground: Playground, port: int) -> None:
    """Started by a launcher's environment; bit for bit the course of one machine that plays both
    nodes.

    A signal to node 1 stops both in order, and --until-finished says that there is more to train.
    """
    started = []
    for rank in (1, 0):
        launcher = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NNODES": "2",
            "NODE_RANK": str(rank),
        }
        options = ["--until-finished", "--set", "run.directory=env"]
        started.append(Node(playground, f"env-{rank}", options, launcher))
    other, first = started
    try:
        playground.wait(lambda: len(playground.steps("env")) >= 6, "six steps")
        other.process.send_signal(signal.SIGTERM)
        assert (first.ends(), other.ends()) == (1, 1), first.said[-3000:]
    finally:
        end(*started)
    [marker] = playground.ends("env")
    assert (marker.reason, marker.restart, marker.checkpoint_step) == (
        "signal",
        True,
        marker.iteration,
    )
    assert (
        "exit status 1, as --until-finished asks" in first.said
        and "node 0 has ended: signal" in other.said
    )
    [attempt] = playground.paths("env").attempts.iterdir()
    assert (
        len({json.loads(path.read_text())["node"] for path in (attempt / "nodes").iterdir()}) == 2
    )
    assert not (playground.paths("env").state / "meeting.json").exists()

    playground.tr11(
        "train", "--set", f"run.exit_interval={marker.iteration}", "--set", "run.directory=alone"
    )
    two, one = playground.steps("env"), playground.steps("alone")
    assert [step["iteration"] for step in two] == list(range(1, marker.iteration + 1))
    for field in ("lm_loss", "grad_norm", "learning_rate", "consumed_samples"):
        assert [step[field] for step in two] == [step[field] for step in one], field


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["--nodes", "4"],
            "was started for 4 nodes, node 0 for 2: give the same --nodes (or NNODES) on all",
        ),
        (["--set", "run.seed=8"], "has another card than node 0, in run.seed: give the same card"),
        (
            ["--set", "batch.micro_batch_size=0"],
            "cannot start: its card is refused: batch.micro_batch_size",
        ),
    ],
)
def test_a_node_that_disagrees_ends_all(
    playground: Playground, port: int, options: list[str], why: str
) -> None:
    words = ["--master", f"127.0.0.1:{port}", "--set", "run.directory=odd"]
    first = Node(playground, "odd-0", ["--nodes", "2", "--node-rank", "0", *words], {})
    other = Node(playground, "odd-1", ["--nodes", "2", "--node-rank", "1", *words, *options], {})
    try:
        assert (first.ends(), other.ends()) == (2, 2)
    finally:
        end(first, other)
    for node in (first, other)[: 1 if "refused" in why else 2]:
        assert [line for line in node.said.splitlines() if why in line], node.said
    assert not playground.paths("odd").attempts.exists()  # nothing was started


def test_a_node_that_does_not_come_is_named(playground: Playground, port: int) -> None:
    words = ["--nodes", "2", "--node-rank", "0", "--master", f"127.0.0.1:{port}", "--wait", "1s"]
    done = playground.tr11("train", *words, "--set", "run.directory=late", expect=1)
    assert f"node 1 of 2 did not come to 127.0.0.1:{port} within 1 s: start them" in done.stdout
    taken = socket.create_server(("127.0.0.1", port))
    with taken:
        done = playground.tr11("train", *words, "--set", "run.directory=late", expect=1)
    assert "address already in use" in (done.stdout + done.stderr).lower()


def test_a_lost_node_ends_all_and_the_same_commands_go_on(
    playground: Playground, port: int
) -> None:
    more = ["--set", "batch.train_samples=1_000_000", "--set", "resilience.end_within_seconds=8"]
    first, other = pair(playground, port, "lost", *more)
    try:
        playground.wait(lambda: len(playground.steps("lost")) >= 7, "seven steps")
        name = re.search(r"node 1 of 2 \((\S+)\) has joined", other.said)
        assert name is not None
        other.process.kill()
        assert first.ends() == 1
    finally:
        end(first, other)
    [attempt] = playground.paths("lost").attempts.iterdir()
    verdict = read_json(attempt / "verdict.json") or {}
    assert verdict["blamed"] == [name[1]] and verdict["restart"] is True
    assert f"{name[1]}: the connection to its agent was lost" in verdict["message"]
    assert f"{name[1]} is gone: start all nodes again to go on" in first.said
    failure = read_json(attempt / "failures" / f"lost-{name[1]}.json") or {}
    assert failure["host"] == name[1] and "agent of node 1 was lost" in failure["error"]
    launch = read_json(attempt / "launches" / "1.json") or {}
    # not the silence of a whole connection
    assert launch["end"] - launch["first_sign"] < 8 + SLOW_MACHINE_SECONDS
    playground.wait(lambda: left_running(playground.folder) == [], "the lost node's workers to end")

    # The same commands; now node 0 dies.
    before = len(playground.steps("lost"))
    first, other = pair(playground, port, "lost", *more, name="-again")
    try:
        playground.wait(lambda: len(playground.steps("lost")) >= before + 2, "two more steps")
        first.process.kill()
        assert other.ends() == 1
        assert "is gone" in other.said and "ending the workers here" in other.said
        playground.wait(lambda: left_running(playground.folder) == [], "no worker to be left")
    finally:
        end(first, other)
    iterations = [step["iteration"] for step in playground.steps("lost")]
    resumed = [one for one, next_one in pairwise(iterations) if next_one != one + 1]
    assert len(resumed) <= 1 and set(iterations) == set(range(1, max(iterations) + 1))


def test_a_stop_before_the_start_leaves_nothing(playground: Playground, port: int) -> None:
    first = Node(
        playground, "stopped-0", ["--nodes", "2", "--node-rank", "0", "--master", f"127.0.0.1:{port}",
        "--set", "run.directory=stopped"], {},
    )  # fmt: skip
    try:
        playground.wait(lambda: "waits at" in first.said, "node 0 to wait")
        first.process.send_signal(signal.SIGTERM)
        assert first.ends() == 0
    finally:
        end(first)
    assert "SIGTERM received before the workers were started: leaving" in first.said
    assert not (playground.paths("stopped").state / "meeting.json").exists()
