"""The browser of this machine, for tests that look at pages."""

from __future__ import annotations

import os
import shutil

import pytest


def browser() -> str:
    found = next(
        (
            path
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (path := shutil.which(name))
        ),
        "",
    )
    if not found:
        if os.environ.get("TR11_REQUIRE_BROWSER") == "1":
            pytest.fail("TR11_REQUIRE_BROWSER=1, but there is no Chromium on PATH")
        pytest.skip("no Chromium here")
    return found
