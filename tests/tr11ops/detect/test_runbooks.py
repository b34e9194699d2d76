"""The pages of runbooks/: each detector has one, each has a cure to paste, and each command in them
exists.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tr11ops.detect import detector_table, operation_table
from tests.tr11ops.detect.pages import FOLDER, PAGES
from tr11ops.cli import main
from tr11ops.detect import registry
from tr11ops.detect.finding import Finding
from tr11ops.detect.registry import DETECTORS, WORDS, page_of

README = (FOLDER / "README.md").read_text()
PARTS = ("**What it means.**", "**How to see it", "**What to type", "**How to know it is over.**")
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(tr11 [^`\n]+)`")
PLACEHOLDERS = frozenset(
    re.findall(r"`([A-Z]+)`", README.partition("| word |")[2].partition("\n\n")[0])
)
VALUES = {"RANK": "3", "STEP": "800", "JOB": "1234", "JOB1": "1", "JOB2": "2", "N": "7"}


def cure(page: Path) -> str:
    """The first block of commands after "What to type"."""
    found = BLOCK.search(page.read_text().partition("**What to type")[2])
    return found[1] if found else ""


def commands(page: Path) -> Iterator[str]:
    text = page.read_text()
    for block in BLOCK.findall(text):
        parts = (part.strip() for line in block.splitlines() for part in line.split("&&"))
        yield from (part for part in parts if part.startswith("tr11 "))
    yield from INLINE.findall(text)


load = functools.cache(main.load)  # the same few commands, hundreds of times


def parse(line: str) -> None:
    """Parse as the program would, without doing anything. Raises as the parser does where it would
    refuse.
    """
    words = [
        re.sub(r"\b[A-Z][A-Z0-9]*\b", lambda match: VALUES.get(match[0], match[0]), word)
        for word in split(line)
    ]
    name, rest = words[1], words[2:]
    command = load(name)
    parent = None
    while hasattr(command, "commands") and rest:
        parent = command.make_context(name, [], parent=parent, resilient_parsing=True)
        name = rest[0]
        assert name in command.commands, f"{line}: no command {name}"
        command, rest = command.commands[name], rest[1:]
    if not hasattr(command, "commands") and "--help" not in rest:
        command.make_context(name, list(rest), parent=parent)


def split(line: str) -> list[str]:
    return shlex.split(line, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_four_parts_and_its_commands_exist(page: Path) -> None:
    text = page.read_text()
    places = [text.find(part) for part in PARTS]
    assert -1 not in places
    assert places == sorted(places)
    assert len(text.splitlines()) <= 75
    for line in commands(page):
        assert split(line)[1] in main.COMMANDS, line
        parse(line)


@pytest.mark.parametrize("name", [detector.name for detector in DETECTORS])
def test_a_detector_has_a_page_with_a_cure_and_a_table_row(name: str) -> None:
    page = FOLDER / page_of(name)
    assert "**What to type.**" in page.read_text()
    assert cure(page).strip()
    rows = [line for line in README.splitlines() if f"({page.name})" in line]
    assert rows
    assert any(f"`{name}`" in row for row in rows)


@pytest.mark.parametrize("name", [detector.name for detector in DETECTORS])
def test_a_cure_asks_no_questions_and_explains_its_capitals(name: str) -> None:
    text = cure(FOLDER / page_of(name))
    for line in text.splitlines():
        words = split(line)
        if words[0] == "tr11" and words[1] in {"kill", "resume", "pause", "checkpoint-now"}:
            assert "--yes" in words, line
        if words[:2] == ["tr11", "nodes"] and words[2] in {"exclude", "include"}:
            assert "--yes" in words, line
    capitals = set(re.findall(r"\b[A-Z]{2,}\b", text)) | set(
        re.findall(r"global_step([A-Z]+)", text)
    )
    assert capitals <= PLACEHOLDERS


def test_every_page_is_in_the_table() -> None:
    assert {page.name for page in PAGES} == set(re.findall(r"\]\(([a-z-]+\.md)\)", README))


@pytest.mark.parametrize("page", [*PAGES, FOLDER / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere_and_lines_fit(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (FOLDER / target).exists(), target
    assert max(len(line) for line in text.splitlines()) <= 160
    assert text.isascii()


def findings() -> list[Finding]:
    tables = (detector_table.TABLE, operation_table.TABLE)
    return [finding for table in tables for row in table for finding in registry.detect_all(row[1])]


def test_every_command_that_a_finding_shows_exists() -> None:
    shown = {finding.fix for finding in findings() if finding.fix}
    assert len(shown) > 10
    for fix in shown:
        words = split(fix)
        if words[0] == "tr11":
            parse(fix)
        else:
            assert words[0] in {"df", "du", "find", "findmnt", "scancel", "scontrol", "touch"}, fix


def test_every_word_that_people_use_finds_a_page_and_hides_none() -> None:
    pages = {path.stem for path in FOLDER.glob("*.md")}
    for word, page in WORDS.items():
        assert page.removesuffix(".md") in pages, word
        assert word not in pages and word == word.lower(), word
