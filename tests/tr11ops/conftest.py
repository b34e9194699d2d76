"""A real mail server on the loopback, one for each test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

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
