"""The pages in a real browser: they fit a phone, live in the dark, keep up by themselves, and an
automatic check of accessibility finds nothing serious.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import browser
from tests.tr11ops.serve.conftest import HOSTILE, Site, published
from tests.waiting import until
from tr11ops.base.units import duration

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def cookie(site: Site) -> dict[str, str]:
    """Of a person who has signed in."""
    name, _, value = site.sign_in().partition("=")
    return {"name": name, "value": value, "url": site.address}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_each_width_and_are_accessible(
    site: Site, chromium: Any, cookie: dict[str, str], scheme: str
) -> None:
    context = chromium.new_context(color_scheme=scheme)
    page, faults = context.new_page(), []
    page.on("pageerror", lambda fault: faults.append(str(fault)))
    run = f"/run/{site.run}"
    try:
        alert = site.link("bo@example.org")
        plans = [(run, button) for button in ("Take the shift", "Resume")]
        pages = [(path, "") for path in ("/", run, "/login", "/runbook/down", alert, run)]
        for path, button in (*pages, *plans):
            if path == alert:  # from here on as a person who has signed in
                context.add_cookies([cookie])
            page.goto(site.address + path)
            if path == "/":
                for word in ("large models", "node-hours", "GPU-hours", "EUR", "On call"):
                    assert word in page.inner_text("main"), "what several runs hold and cost"
            if button:
                kept = page.input_value("input[name=reason]")
                assert kept == ("new data" if button == "Resume" else ""), "of the act before it"
                page.fill("input[name=reason]", "new data")
                page.locator("#acts").get_by_role("button", name=button).click()
                page.wait_for_selector(f"h1:text-matches('{button}|go on', 'i')", timeout=300_000)
                assert not page.locator("#live").count(), "a plan does not change by itself"
            elif path == run:
                page.wait_for_selector("#course-chart svg", timeout=300_000)
                assert page.locator("#course-chart .axis-title").inner_text() == "time (UTC)"
            for width in (390, 1280):
                page.set_viewport_size({"width": width, "height": 844})
                _check(page, f"{path} {button} {width}")
        assert not faults
    finally:
        context.close()


def test_what_a_link_leads_to_is_not_below_the_header(
    site: Site, chromium: Any, cookie: dict[str, str]
) -> None:
    context = chromium.new_context(viewport={"width": 390, "height": 600})
    context.add_cookies([cookie])
    page = context.new_page()
    try:
        page.goto(f"{site.address}/run/{site.run}")
        page.wait_for_selector("#course-chart svg", timeout=300_000)
        header = page.evaluate("document.querySelector('header').getBoundingClientRect().bottom")
        targets = page.evaluate(
            "[...document.querySelectorAll(\"main a[href^='#']\")].map(a => a.hash)"
        )
        assert {"#todo", "#alerts", "#acts", "#figures", "#log"} <= set(targets)
        for target in set(targets):
            page.locator(f"main a[href='{target}']").first.click()
            top = page.evaluate(
                f"document.querySelector('{target} h2').getBoundingClientRect().top"
            )
            assert top >= header, target
    finally:
        context.close()


def _check(page: Any, place: str) -> None:
    """That it is no wider than its window, and accessible."""
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, place
    found = axe.Axe().run(page).response["violations"]
    grave = [one for one in found if one["impact"] in {"serious", "critical"}]
    shown = [(one["id"], [node["html"] for node in one["nodes"][:3]]) for one in grave]
    assert not shown, (place, shown)


def test_a_mails_link_is_answered_by_keyboard_and_the_log_stays_where_it_was_read(
    site: Site, chromium: Any
) -> None:
    page = chromium.new_page()
    try:
        page.goto(site.address + site.link("bo@example.org"))
        page.get_by_role("button", name="Acknowledge").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('Done')", timeout=300_000)
        page.goto(f"{site.address}/run/{site.run}")
        page.wait_for_selector("#live.on", timeout=300_000)
        until(lambda: page.evaluate("document.getElementById('log-lines').dataset.seen === '1'"))
        where = page.evaluate("document.getElementById('log-lines').scrollTop")
        page.evaluate("window.before = document.querySelector('main h1')")
        site.watcher.look_again(site.run)
        until(lambda: not page.evaluate("window.before.isConnected"))
        assert page.evaluate("document.getElementById('log-lines').scrollTop") == where > 0
        # found and asked in one go: a look that comes between replaces it
        shown = page.evaluate(
            "getComputedStyle(document.querySelector('#nodes-now td'), '::before').content"
        )
        assert shown == "none", "a wide table has its titles at the top alone"
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.locator(".copy[data-copy*='nodes include']").first.click()
        page.wait_for_selector("text=Copied", timeout=300_000)
        assert page.evaluate("navigator.clipboard.readText()").startswith("tr11 nodes include ")
    finally:
        page.close()


def test_a_button_that_is_pressed_while_a_newer_look_comes_still_acts(
    site: Site, chromium: Any, cookie: dict[str, str]
) -> None:
    context = chromium.new_context()
    context.add_cookies([cookie])
    page = context.new_page()
    try:
        page.goto(f"{site.address}/run/{site.run}")
        page.wait_for_selector("#live.on", timeout=300_000)
        page.locator("#acts").get_by_role("button", name="Take the shift").hover()
        page.evaluate("window.before = document.querySelector('main h1')")
        page.mouse.down()
        with page.expect_response(f"{site.address}/run/{site.run}", timeout=300_000) as newer:
            site.watcher.look_again(site.run)
        newer.value.text()
        assert page.evaluate("window.before.isConnected"), "what is pressed stays"
        page.mouse.up()
        page.wait_for_selector("h1:has-text('take the shift')", timeout=300_000)
        page.go_back()
    finally:
        context.close()


def test_the_list_keeps_up_and_hostile_names_stay_texts(site: Site, chromium: Any) -> None:
    page = chromium.new_page()
    try:
        page.goto(site.address)
        page.wait_for_selector("#live.on", timeout=300_000)
        hostile = published(run={"name": HOSTILE, "variant": "main"}, line=HOSTILE)
        (site.folder / "mirror" / "status.json").write_text(hostile)
        site.watcher.look_again(site.mirror)
        until(lambda: "<img src=x" in page.inner_text("main"))
        assert "taken" not in page.title() and page.locator("main img").count() == 0
        page.keyboard.press("/")
        page.keyboard.type("small")
        assert page.locator(".run:visible").count() == 2, "the run and its copy"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('small')", timeout=300_000)
    finally:
        page.close()
        (site.folder / "mirror" / "status.json").write_text(published())


def test_an_answer_grows_old_on_a_page_that_hears_of_no_newer_look(
    site: Site, chromium: Any
) -> None:
    page = chromium.new_page()
    try:
        page.goto(f"{site.address}/run/{site.run}")
        page.wait_for_selector("#live.on", timeout=300_000)
        place = page.get_by_text("How it is now is not known")
        assert place.count() and not place.is_visible()
        page.evaluate("() => { window.fetch = () => Promise.reject(); }")
        page.evaluate("() => { const was = Date.now; Date.now = () => was() + 7200000; }")
        until(lambda: page.locator(".state [data-age]").inner_text().startswith("2 h 00 min"))
        for seconds in (0, 59, 60, 61, 599, 600, 3599, 3600, 7260, 86_399, 90_000):
            assert page.evaluate(f"duration({seconds})") == duration(seconds)
        assert place.is_visible()
    finally:
        page.close()
