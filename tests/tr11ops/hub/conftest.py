"""Fixtures of this folder."""

from __future__ import annotations

import pytest

from tests.plugins.faulty_hub import FaultyHub
from tests.tr11ops.hub.repositories import LOGS
from tests.tr11ops.hub.sync_cases import Mirror
from tr11ops.hub.base import Repository


@pytest.fixture
def logs(hub_server: FaultyHub) -> Repository:
    hub_server.create(LOGS.name)
    hub_server.forget_requests()
    return LOGS


@pytest.fixture
def mirror(tmp_path, hub, hub_server) -> Mirror:
    return Mirror(tmp_path, hub, hub_server)
