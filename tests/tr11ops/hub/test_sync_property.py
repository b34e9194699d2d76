"""Whatever happens to logs, records and the repository: nothing that was ever at the hub is lost,
and what is new arrives.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.plugins.faulty_hub import FaultyHub
from tests.tr11ops.hub.sync_cases import REPOSITORY, Mirror
from tr11ops.hub.base import Credentials, Secret, hub_retries
from tr11ops.hub.client import Hub

NAMES = ("logs/main/a.txt", "logs/main/b.txt")
DEEDS = (
    "append",
    "append",
    "append",
    "begin",
    "cut",
    "rewrite",
    "replace",
    "remove",
    "wait",
    "forget",
    "scribble",
    "tidy",
)
records = st.lists(
    st.tuples(st.sampled_from(DEEDS), st.sampled_from(NAMES), st.integers(0, 99)), max_size=14
)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyHub]:
    with FaultyHub() as running:
        running.commit_limit = None
        yield running


def do(mirror: Mirror, deed: str, name: str, number: int) -> None:
    path, old = mirror.path(name), b""
    if path.exists():
        old = path.read_bytes()
    mirror.now += 1
    match deed:
        case "append":
            mirror.write(name, old + b"line %d\n" % number)
        case "begin":
            mirror.write(name, old + b"unfinished %d" % number)
        case "cut":
            mirror.write(name, old[: number % (len(old) + 1)])
        case "rewrite":
            mirror.write(name, bytes(reversed(old)) + b"%d\n" % number)
        case "replace":
            mirror.write(name, b"another %d\n" % number)
        case "remove":
            path.unlink(missing_ok=True)
        case "wait":
            mirror.now += 1000
        case "forget":
            (mirror.directory.paths.state / "sync" / "state.json").unlink(missing_ok=True)
        case "scribble":
            mirror.server.put(REPOSITORY, name, b"by someone %d\n" % number)
        case "tidy":
            mirror.server.put(REPOSITORY, "README.md", b"%d" % number)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(records, st.randoms(use_true_random=False))
def test_nothing_is_ever_lost(server: FaultyHub, steps, chance: random.Random) -> None:
    server.hub.repos.clear()
    server.create(REPOSITORY)
    with TemporaryDirectory() as folder:
        hub = Hub(server.url, Credentials(Secret(server.token)), hub_retries(5.0), 5.0)
        mirror = Mirror(Path(folder), hub, server, now=time.time() - 1e6)
        mirror.path("logs/main").mkdir(parents=True)
        for deed, name, number in steps:
            do(mirror, deed, name, number)
            if chance.random() < 0.6:
                check_round(mirror)
        check_round(mirror)
        count = mirror.commits()
        assert not mirror.sync(anew=False).commits and mirror.commits() == count


def check_round(mirror: Mirror) -> None:
    before = mirror.there()
    outcome = mirror.sync(anew=False)
    after = mirror.there()
    noted = {note.path for note in outcome.notes}
    for path, content in before.items():
        stem = path.removesuffix(".txt")
        kept = [
            other
            for name, other in after.items()
            if name == path or name.startswith(f"{stem}-superseded-")
        ]
        assert any(other.startswith(content) for other in kept), path
    for name in NAMES:
        if mirror.path(name).exists() and name not in noted:
            here = mirror.path(name).read_bytes()
            whole = here[: here.rfind(b"\n") + 1]
            there = after.get(name, b"")
            assert here.startswith(there) and len(there) >= len(whole)
