"""Fixtures of this folder."""

from __future__ import annotations

import pytest

from tests.tr11ops.hub.repositories import LOGS
from tests.tr11ops.hub.sync_cases import Mirror
from tr11ops.hub.base import Repository
from tr11ops.twin.hub.server import HubServer


@pytest.fixture
def logs(hub_server: HubServer) -> Repository:
    hub_server.create(LOGS.name)
    hub_server.forget_requests()
    return LOGS


@pytest.fixture
def mirror(tmp_path, hub, hub_server) -> Mirror:
    return Mirror(tmp_path, hub, hub_server)
