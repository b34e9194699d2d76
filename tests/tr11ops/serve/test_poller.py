"""Runs are looked at again and again, each by itself, and what has changed is seen."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from tests.tr11ops.serve.conftest import Site, published, words
from tests.waiting import until
from tr11ops.base import deadline
from tr11ops.rundir.journal import Journal
from tr11ops.serve import poller
from tr11ops.serve.pages import Pages
from tr11ops.serve.poller import RunPoller
from tr11ops.serve.view import view_of


def test_the_page_is_told_of_changes(site: Site) -> None:
    with socket.create_connection(("127.0.0.1", site.port), timeout=300) as stream:
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        seen = b""
        while b"event: change" not in seen:
            seen += stream.recv(4096)
        version = site.watcher.version
        site.watcher.look_again(site.mirror)
        until(lambda: site.watcher.version > version)
        while seen.count(b"event: change") < 2:
            seen += stream.recv(4096)


def test_what_is_typed_in_a_terminal_is_seen_at_once_while_someone_reads(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the next look, which is an hour away here."""
    monkeypatch.setattr(poller, "LOOK_EVERY_SECONDS", 3600.0)
    monkeypatch.setattr(poller, "GLANCE_SECONDS", 0.05)
    folder = site.folder / "run"
    watcher = RunPoller([folder], "local")
    watcher.start()
    try:
        until(lambda: all(one.looked for one in watcher.news()) and bool(watcher.news()))
        [seen] = watcher.news()
        reader = watcher._readers.of(seen.run.directory)  # type: ignore[union-attr]
        watcher.asked = time.monotonic()
        Journal(folder / "journal").write("noted", "typed in a terminal")
        until(lambda: watcher.news()[0].looked > seen.looked)
        assert watcher.news()[0].run.reader is not reader, "the scheduler is asked again too"  # type: ignore[union-attr]
        assert watcher.news()[0].stamp == poller.stamp_of(folder) != seen.stamp
    finally:
        watcher.stop()
    with monkeypatch.context() as refusing:
        stale = OSError(errno.ESTALE, "Stale file handle")
        refusing.setattr(os, "scandir", Mock(side_effect=stale))
        assert poller.stamp_of(folder) == 0.0, "one that refuses ends no looks"
    monkeypatch.setattr(deadline, "is_silent", lambda *_: True)
    assert poller.stamp_of(folder) == 0.0, "a file system that does not answer is not waited for"


def test_a_folder_that_hangs_holds_up_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("well", "hangs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text(
            published(run={"name": name, "variant": "main"})
        )
    asked = deadline.is_silent

    def silent(place: Path, seconds: float) -> bool:
        return place.name == "hangs" or asked(place, seconds)

    monkeypatch.setattr(deadline, "is_silent", silent)
    watcher = RunPoller([tmp_path])
    watcher.start()
    try:
        until(lambda: len(watcher.news()) == 2 and all(one.looked for one in watcher.news()))
        hangs, well = watcher.news()
        assert hangs.document is None and "does not answer" in hangs.why
        assert well.document is not None
    finally:
        watcher.stop()


def test_a_change_of_a_run_and_a_run_that_is_new_are_seen_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK_EVERY_SECONDS", "FIND_EVERY_SECONDS"):
        monkeypatch.setattr(poller, name, 0.05)

    def publish(name: str, **changes: object) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        made = tmp_path / f"{name}.json"
        made.write_text(published(run={"name": name, "variant": "main"}, **changes))
        made.replace(tmp_path / name / "status.json")

    def seen() -> dict[str, object]:
        return {one.folder.name: (one.document or {}).get("iteration") for one in watcher.news()}

    publish("first")
    watcher = RunPoller([tmp_path])
    watcher.start()
    try:
        until(lambda: seen() == {"first": 7})
        version = watcher.version
        publish("first", iteration=8)
        until(lambda: seen() == {"first": 8})
        assert watcher.version > version, "pages that are open are told of it"
        publish("second", iteration=1)
        until(lambda: seen() == {"first": 8, "second": 1})
        (tmp_path / "first" / "status.json").write_text("{")
        until(lambda: seen()["first"] is None)
        assert "no JSON" in watcher.news()[0].why, "and of what can be read no longer"
    finally:
        watcher.stop()


def test_what_was_seen_before_an_act_is_no_verdict_after_it(site: Site) -> None:
    watcher = RunPoller([site.folder / "run"], "local")
    watcher._follow(site.folder / "run")
    until(lambda: all(one.looked for one in watcher.news()))
    [seen] = watcher.news()
    reader, down = watcher._readers.of(seen.run.directory), "waits for a person"  # type: ignore[union-attr]
    told = {**(seen.document or {}), "verdict": "down", "why": down, "answer": "Do not sleep"}
    acted = replace(seen, document=told, acted=seen.began + 1)
    for shown in (view_of(acted, time.time()), view_of(replace(acted, document=None), time.time())):
        page = words(Pages().render("run", is_part=True, run=shown, session=None, form=""))
        assert "Looking again after what was done at" in page and shown.word == "unknown"
        assert not any(
            word in page for word in (down, "Do not sleep", "No alert is open", "$ tr11 n")
        )
    watcher.look_again(seen.key)
    [waits] = watcher.news()
    assert waits.acted > seen.began, "from the moment of the act"
    until(lambda: not watcher.news()[0].is_before_act)
    fresh = watcher.news()[0]
    assert fresh.run is not None and fresh.run.reader is not reader, "the scheduler is asked again"
    watcher._put(replace(acted, began=seen.began), 0.0)
    assert watcher.news()[0] == fresh, "an earlier look that took longer replaces no later one"
    watcher.stop()


def test_a_run_that_stops_is_looked_at_sooner_and_the_scheduler_is_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has begun the look that found it stopping: of its own it waits for an hour here."""
    monkeypatch.setattr(poller, "LOOK_EVERY_SECONDS", 3600.0)
    monkeypatch.setattr(poller, "GLANCE_SECONDS", 0.05)
    told, asked = {"verdict": "healthy"}, list[str]()
    watcher = RunPoller([tmp_path])
    monkeypatch.setattr(watcher._readers, "forget", lambda: asked.append("anew"))
    monkeypatch.setattr(watcher, "_seen", lambda news: replace(news, document={**told}, why=""))
    watcher.asked = time.monotonic()
    watcher._follow(tmp_path)
    try:
        until(lambda: bool(watcher.news()[0].looked))
        [seen] = watcher.news()
        assert seen.every == 3600.0 and not asked
        told["verdict"] = "stopping"
        watcher._look(seen)
        [stops] = watcher.news()
        assert stops.every == 900.0 and not asked
        told["verdict"] = "stopped"
        watcher._news[seen.key] = replace(stops, looked=0.0)
        until(lambda: watcher.news()[0].document == told)
        assert watcher.news()[0].every == 3600.0 and asked == ["anew"]
    finally:
        watcher.stop()
