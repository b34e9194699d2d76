"""What all walks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tr11ops.walk.nursery import WalkNursery


@pytest.fixture(scope="package")
def nursery() -> Iterator[WalkNursery]:
    """Its imports take seconds."""
    with WalkNursery() as made:
        yield made
