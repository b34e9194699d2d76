"""A random walk through everything that may happen to checkpoints and copies; see `judge` for what
must hold.

`make walk` walks for long, from another start each time: TR11_WALK_SECONDS of it, a third for each
kind of archive. A walk that finds something prints its seed; TR11_WALK_SEED=THAT makes `make walk`
begin with it.
"""

from __future__ import annotations

import itertools
import os
import random
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.tr11ops.backup.lose_it import KINDS, Kind
from tests.tr11ops.walk.machine import walk_of
from tests.tr11ops.walk.nursery import WalkNursery
from tests.tr11ops.walk.surroundings import COUNTED

QUIET = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.filter_too_much,
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk(kind: Kind, nursery: WalkNursery, request: pytest.FixtureRequest) -> None:
    bucket = request.getfixturevalue("object_store") if kind == "bucket" else None
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        walk_of(kind, bucket, nursery),
        settings=settings(
            max_examples=2, stateful_step_count=20, derandomize=True, deadline=None, database=None,
            suppress_health_check=QUIET,
        ),
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_walk(kind: Kind, nursery: WalkNursery, request: pytest.FixtureRequest) -> None:
    bucket = request.getfixturevalue("object_store") if kind == "bucket" else None
    COUNTED.clear()
    began = time.monotonic()
    first = int(os.environ.get("TR11_WALK_SEED") or random.randrange(10**6))
    numbers = itertools.count(first)
    while time.monotonic() - began < float(os.environ.get("TR11_WALK_SECONDS", "600")) / len(KINDS):
        number = next(numbers)
        try:
            run_state_machine_as_test(  # type: ignore[no-untyped-call]
                seed(number)(walk_of(kind, bucket, nursery)),
                settings=settings(
                    max_examples=5, stateful_step_count=50, deadline=None, database=None, suppress_health_check=QUIET,
                    phases=[Phase.generate],  # to shorten a walk takes longer than to walk it
                ),
            )  # fmt: skip
        except BaseException as error:
            error.add_note(f"again: make walk TR11_WALK_SEED={number} PYTEST_OPTIONS='-k {kind}'")
            raise
    print(
        f"\n{kind}: {COUNTED['walks']} walks, {COUNTED['steps']} steps, seeds {first} to {next(numbers) - 1}, {time.monotonic() - began:.0f} s"
    )
