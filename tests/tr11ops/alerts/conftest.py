"""An office that mails through the test's mail server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tr11ops.alerts.office import Office, Server


@pytest.fixture
def office(tmp_path: Path, server: Server) -> Callable[..., Office]:
    """Makes the office with these lines of [alerts]."""
    return lambda *settings: Office(tmp_path, server.port, *settings)
