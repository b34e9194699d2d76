"""For each test that asks for it: a real mail server on the loopback, and a folder that other users
may enter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.alerts.office import Mailbox, Server


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox()


@pytest.fixture
def server(mailbox: Mailbox) -> Iterator[Server]:
    running = Server(mailbox)
    running.start()
    try:
        yield running
    finally:
        running.stop(no_assert=True)


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that another user may enter, outside pytest's own: each session that begins closes
    that one to others.
    """
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)
