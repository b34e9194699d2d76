"""A repository and a file that is large to a hub."""

from __future__ import annotations

import os

from tr11ops.hub.base import Repository

LOGS = Repository("science/logs")


LARGE = os.urandom(64) + b"\0" * 3000
