"""What holds for all tests: the shared twin, no clock in property tests, no silent skip where Slurm
is required.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tr11ops.cluster.local_store import FOLDER_VARIABLE
from tr11ops.rundir import fallback
from trainer.control.lifecycle import without_collections

# The first example imports what the others find loaded, and five parts of the tests run at a time.
settings.register_profile("tr11", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tr11")

# A shell starts what it puts into the background with Ctrl-C ignored, and every process begun from
# there inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = [
    "tests.plugins.ending",
    "tests.plugins.twin_fixture",
    "tests.plugins.object_store_fixture",
    "tests.plugins.hub_fixture",
    "tests.plugins.disk_fixture",
    "tests.plugins.golden_fixture",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Every part of the tests loads most of tr11, or torch: collections meanwhile are a third of
    that time.
    """
    with without_collections():
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _no_folders_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """What a run directory cannot take, and an embedded scheduler with no folder named, use folders
    of the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fallback.VARIABLE, str(tmp_path_factory.mktemp("fallback")))
        patch.setenv(FOLDER_VARIABLE, str(tmp_path_factory.mktemp("scheduler")))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With TR11_REQUIRE_SLURM=1 a skipped Slurm test is a failed one: a green run then proves that
    Slurm was there.
    """
    report = yield
    required = os.environ.get("TR11_REQUIRE_SLURM") == "1"
    if required and report.skipped and ("twin" in item.nodeid or "slurm" in item.nodeid.lower()):
        report.outcome = "failed"
        report.longrepr = (
            f"TR11_REQUIRE_SLURM=1, but this Slurm test was skipped: {report.longrepr}"
        )
    return report
