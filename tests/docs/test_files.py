"""The built pages are opened as files, without a server: there a browser refuses a page its worker, and
docs/assets/iframe-worker.js takes its place, so that the search works.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.browser import browser

playwright = pytest.importorskip("playwright.sync_api")
SHIM = Path(__file__).parents[2] / "docs" / "assets" / "iframe-worker.js"
PAGE = """<!doctype html><body><script src="iframe-worker.js"></script><script>
const worker = new Worker("worker.js")
worker.addEventListener("message", event => { document.title = event.data })
worker.postMessage("lease")
</script></body>"""
WORKER = """addEventListener("message", async event => {
  await importScripts("one.js", "two.js")
  postMessage(`${event.data}: ${found}`)
})"""


def test_a_page_that_was_opened_as_a_file_has_its_worker(tmp_path: Path) -> None:
    shutil.copy(SHIM, tmp_path)
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "worker.js").write_text(WORKER)
    (tmp_path / "one.js").write_text("var found = 1")
    (tmp_path / "two.js").write_text("found += 1")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        page = chromium.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_function("document.title === 'lease: 2'", timeout=300_000)
        chromium.close()


def test_the_site_takes_no_script_of_another_host() -> None:
    settings = (SHIM.parents[2] / "mkdocs.yml").read_text(encoding="utf-8")
    assert "polyfills: [assets/iframe-worker.js]" in settings
    assert "plugins: [search, offline]" in settings
