"""The documentation: references are written from the code, and every link leads somewhere. `make
docs` builds the site.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import posixpath
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.waiting import until
from tr11ops.cli import main
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
    text = "\n".join(pages.cli_pages().values())
    sections = dict(re.findall(r"^#+ tr11 (.*)\n(?s:(.*?))(?=^#|\Z)", text, re.MULTILINE))
    assert {*COMMANDS, "alerts ack", "checkpoints list"} <= set(sections)
    assert (
        "| `--array` |" in sections["launch"] and "tr11 launch --array 1-10" in sections["launch"]
    )
    assert (
        "| `--output`, `-o` |" in sections["backup restore"]
        and "--into" not in sections["backup restore"]
    ), "a former one"


def test_the_detectors_reference_has_every_detector(pages: ModuleType) -> None:
    names = [each.name for each in DETECTORS]
    index, *kinds = pages.detectors_pages().values()
    assert re.findall(r"^\| `([a-z-]+)`", index, re.MULTILINE) == names
    assert {*names} == {*re.findall(r"^## (.*)$", "\n".join(kinds), re.MULTILINE)}


def test_the_json_reference_has_every_pinned_key(pages: ModuleType) -> None:
    text = "\n".join(pages.json_pages().values())
    assert "## `tr11 goodput --json`" in text
    assert all(f"## `{name}`" in text for name in PINNED["formats"])


def test_the_map_says_of_every_room_and_file_what_it_is_for(pages: ModuleType) -> None:
    index, *rooms = pages.map_pages().values()
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", "\n".join(rooms), re.MULTILINE)
    rows += re.findall(r"^\| \[`([^`]+)`\].*? \| \d+ \| (.*) \|$", index, re.MULTILINE)
    assert [name for name, text in rows if not text.strip()] == []
    assert len(rows) > 600


def texts(pages: ModuleType) -> dict[str, str]:
    """Every page by its place, with the links that the site has."""
    made = pages.made_pages()
    return {
        place: pages.linked(
            made[place] if place in made else (ROOT / source).read_text(encoding="utf-8"), place
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
    places = set(pages.sources().values())
    of_an_index = tuple(line.strip(" /") for line in re.findall(r"^  /.*/$", menu, re.MULTILINE))
    assert {place for place in places if not place.startswith(of_an_index)} <= shown
    assert shown <= places


def test_a_page_begins_with_what_it_is_for() -> None:
    """A sentence below its title: no code, no table, no other heading."""
    bare = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines[2:3] == ["<!-- Written by `make history` from benchmarks/history.json. -->"]:
            continue
        first = next(line for line in lines[1:] if line.strip())
        if re.match(r"[`~]{3}|    |\||#|- |<", first):
            bare.append(str(path.relative_to(ROOT)))
    assert not bare


def test_no_page_is_longer_than_one_sitting(pages: ModuleType) -> None:
    """1,200 words, without the bars of tables. The two records by date are not read from end to end."""
    records = {"benchmarks.md", "changelog.md"}
    counts = {place: pages.words(text) for place, text in texts(pages).items()}
    long = {place: count for place, count in counts.items() if count > 1200}
    assert set(long) == records, (
        "split it by its readers' questions, or leave out what is said twice"
    )


# ---------------------------------------------------------------------------
# The commands of README and of the first pages exist with their options, and the first one comes
# early.


README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^(?:```|~~~)\w*\n(.*?)^(?:```|~~~)$", re.MULTILINE | re.DOTALL)
# What stands in the place of an answer, and what a line has behind its command.
PLACES = {"STEP": "100"}
BEHIND = re.compile(r" {2,}\S.*| (?:[|>&;]|\|\||&>) .*| 2>.*| &$")


def commands_of(text: str) -> list[str]:
    """The lines of a page's blocks that begin with tr11, each one whole, without what is behind it."""
    lines = "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines()
    return [
        BEHIND.sub("", re.sub(r" +(?=-)", " ", line)) for line in lines if line.startswith("tr11 ")
    ]


def taken(line: str) -> None:
    """Raises where the parser does not take the command."""
    counted = re.sub(r"\$\(\(.*?\)\)", "8", line)
    _, name, *rest = (PLACES.get(word, word) for word in shlex.split(counted, comments=True))
    rest = [word.strip("[]") if word.startswith("[-") else word for word in rest]
    command = main.load(name)
    context = None
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        name, *rest = rest
        command = command.commands[name]
    command.make_context(name, list(rest), parent=context)


@pytest.mark.parametrize(
    "place", ["README.md", "docs/tutorial", "docs/how-to", "docs/explanation", "docs/reference"]
)
def test_the_commands_of_the_pages_are_taken(place: str) -> None:
    refused = []
    for path in sorted((ROOT / place).glob("*.md")) or [ROOT / place]:
        for line in commands_of(path.read_text(encoding="utf-8")):
            try:
                taken(line)
            except Exception as error:
                refused.append(f"{path.name}: {line}: {error}")
    assert not refused


def test_the_picture_of_a_first_run_is_whole_and_shows_commands_that_exist() -> None:
    path = ROOT / "docs" / "images" / "first-run.svg"
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 150_000 and str(path.relative_to(ROOT)) in README
    svg = ElementTree.fromstring(text)
    names = {element.tag.rpartition("}")[2] for element in svg.iter()}
    assert names == {"svg", "title", "desc", "style", "rect", "g", "text"}
    assert not [
        key
        for element in svg.iter()
        for key in element.attrib
        if "href" in key or key.startswith("on")
    ]
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "prefers-color-scheme:dark" in text and "/tmp" not in text and "/work" not in text
    shown = [
        "".join("".join(frame.itertext()).split()) for frame in svg if frame.tag.endswith("}g")
    ]
    (typed,) = (element.text for element in svg if element.tag.endswith("}desc"))
    assert typed
    commands = typed.splitlines()
    assert {"init", "doctor", "launch", "status", "logs", "kill"} <= {
        line.split()[1] for line in commands
    }
    for line in commands:
        assert any("".join(line.split()) in text for text in shown), line
        if line.startswith("tr11 "):
            taken(BEHIND.sub("", line))


def test_the_first_command_comes_within_a_screenful() -> None:
    before = README.partition("```sh")[0].splitlines()
    assert len(before) <= 30
    assert [
        name
        for name in ("init", "doctor", "data", "launch", "alerts", "cron", "status")
        if name not in README
    ] == []


def test_the_mails_of_a_trial_go_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As README says it, but for the port."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    said = README.replace("8025", port)
    (sink,) = re.findall(r"`(python -m aiosmtpd .*) > mails.txt`", said)
    (settings,) = re.findall(r"`(--set alerts.smtp_host=.*)` behind `tr11 init`", said)
    init = "init --preset toy --yes --scheduler local --mail you@example.org"
    assert main.execute([*init.split(), *settings.split()]) == 0
    mails = tmp_path / "mails.txt"
    command = [sys.executable, *sink.split()[1:]]
    with mails.open("w") as file, subprocess.Popen(command, stdout=file) as program:
        try:
            until(lambda: main.execute(["alerts", "test"]) == 0, "a server that takes mails")
            until(lambda: "Subject: [TEST]" in mails.read_text(), "the mail in the file")
        finally:
            program.terminate()


# ---------------------------------------------------------------------------
# docs/reference/exit-codes.md lists every exit code that the code names.


PAGE = ROOT / "docs" / "reference" / "exit-codes.md"


def named_codes() -> dict[str, int]:
    """Each module constant EXIT_... = NUMBER of the two packages that a process returns."""
    found = {}
    for path in (*(ROOT / "tr11ops").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "EXIT_" not in text:
            continue
        for node in ast.parse(text).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and type(node.value.value) is int
            ):
                for target in node.targets:
                    if isinstance(target, ast.Name) and re.fullmatch(r"_?EXIT_[A-Z_]+", target.id):
                        found[f"{path.relative_to(ROOT)}: {target.id}"] = node.value.value
    return found


def test_each_code_stands_in_the_table() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Exit codes")[2]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    codes = named_codes()
    codes.pop("tr11ops/launch/rehearse.py: EXIT_INTERVAL", None)  # iterations
    assert {75, 255, 0, 1, 2, 3} <= set(codes.values())
    assert not {name: code for name, code in codes.items() if code not in listed}
    assert "| 128 + n |" in section
