"""Nodes as they are typed and shown: host lists, the queue's lists, the note to the site."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tr11ops.nodes.queued import job
from tr11ops.base.errors import NodeNameError
from tr11ops.cluster.base import JobState, Node
from tr11ops.nodes.names import resolve
from tr11ops.nodes.queue_exclusions import queue_changes
from tr11ops.nodes.view import support_note
from tr11ops.rundir.exclusion import Exclusion, NodeStanding


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
