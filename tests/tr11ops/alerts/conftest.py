"""A mail server for each test, and an office that mails through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tr11ops.alerts.office import Mailbox, Office, Server


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
def office(tmp_path: Path, server: Server) -> Callable[..., Office]:
    """Makes the office with these lines of [alerts]."""
    return lambda *settings: Office(tmp_path, server.port, *settings)
