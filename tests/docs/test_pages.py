"""The documentation: references are written from the code, and every link leads somewhere. `make
docs` builds the site.
"""

from __future__ import annotations

import importlib.util
import json
import posixpath
import re
from pathlib import Path
from types import ModuleType

import pytest

from tr11ops.cli.main import COMMANDS
from tr11ops.detect.registry import DETECTORS

ROOT = Path(__file__).parents[2]
PINNED = json.loads((ROOT / "tests" / "pins" / "expected.json").read_text(encoding="utf-8"))
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_pages", ROOT / ".ci" / "docs_pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_commands_reference_has_every_command(pages: ModuleType) -> None:
    sections = dict(
        re.findall(r"^#+ tr11 (.*)\n(?s:(.*?))(?=^#|\Z)", pages.cli_page(), re.MULTILINE)
    )
    assert {*COMMANDS, "alerts ack", "checkpoints list"} <= set(sections)
    assert (
        "| `--array` |" in sections["launch"] and "tr11 launch --array 1-10" in sections["launch"]
    )
    assert (
        "| `--output`, `-o` |" in sections["backup restore"]
        and "--into" not in sections["backup restore"]
    ), "a former one"


def test_the_detectors_reference_has_every_detector(pages: ModuleType) -> None:
    text = pages.detectors_page()
    assert re.findall(r"^\| `([a-z-]+)`", text, re.MULTILINE) == [each.name for each in DETECTORS]


def test_the_json_reference_has_every_pinned_key(pages: ModuleType) -> None:
    text = pages.json_page()
    assert "### `tr11 goodput --json`" in text
    assert all(f"### `{name}`" in text for name in PINNED["formats"])


def test_the_map_says_of_every_room_and_file_what_it_is_for(pages: ModuleType) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", pages.map_page(), re.MULTILINE)
    silent = [name for name, text in rows if not text.split("|")[-1].strip()]
    assert silent == []
    assert len(rows) > 600


def texts(pages: ModuleType) -> dict[str, str]:
    """Every page by its place, with the links that the site has."""
    made = pages.made_pages()
    return {
        place: pages.linked(
            made[place]() if place in made else (ROOT / source).read_text(encoding="utf-8"), place
        )
        for source, place in pages.sources().items()
    }


def test_every_link_leads_to_a_page_and_a_heading_of_it(pages: ModuleType) -> None:
    found = texts(pages)
    broken = []
    for place, text in found.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", pages.FENCE.sub("", text)):
            if re.match(r"https?:|mailto:", target):
                continue
            path, _, anchor = target.partition("#")
            there = (
                posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
                if path
                else place
            )
            if there not in found or (anchor and anchor not in anchors(found[there])):
                broken.append(f"{place}: {target}")
    assert not broken


def anchors(text: str) -> set[str]:
    """Where links can lead to in a page, as its headings are spelled in addresses."""
    return {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower())
        for each in HEADING.findall(text)
    }


def test_every_page_is_in_the_menu(pages: ModuleType) -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    shown = set(re.findall(r"[\w/-]+\.md", menu))
    assert {
        place for place in pages.sources().values() if not place.startswith("runbooks/")
    } <= shown
    assert shown <= set(pages.sources().values())
