"""Pages of the documentation that are made from code when it is built, and links between the tree's own texts.

A hook of mkdocs: README, runbooks and measurements become pages; the references of commands, detectors and documents
are written from the program. A link to a file of the tree that is no page becomes plain text; one to a file that is not
there stays, and fails the strict build.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the modules whose reference is written are those of this tree
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)


def sources() -> dict[str, str]:
    """Files of the tree that are pages -> their place in the documentation."""
    found = {
        f"docs/{path.relative_to(ROOT / 'docs')}": str(path.relative_to(ROOT / "docs"))
        for path in sorted((ROOT / "docs").rglob("*.md"))
    }
    found |= {
        f"runbooks/{path.name}": f"runbooks/{path.name}"
        for path in sorted((ROOT / "runbooks").glob("*.md"))
    }
    return found | {
        "README.md": "index.md", "CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "changelog.md",
        "runbooks/README.md": "runbooks/index.md", "benchmarks/RESULTS.md": "benchmarks.md",
        "docs/reference/cli.md": "reference/cli.md", "docs/reference/detectors.md": "reference/detectors.md",
        "docs/reference/json.md": "reference/json.md", "docs/reference/map.md": "reference/map.md",
    }  # fmt: skip


# ----------------------------------------------------------------------------- the hook
def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    made = made_pages()
    for source, uri in sources().items():
        if uri in made:
            files.append(File.generated(config, uri, content=made[uri]()))
        elif not source.startswith("docs/"):
            files.append(
                File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8"))
            )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as the built pages have them."""
    return linked(markdown, page.file.src_uri)


def linked(markdown: str, uri: str) -> str:
    """The text of a page with links that hold from its place in the documentation; blocks of code are left alone."""
    places = sources()
    source = {place: name for name, place in places.items()}[uri]
    parts, last = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_links(markdown[last : fence.start()], source, uri, places), fence[0]]
        last = fence.end()
    return "".join([*parts, _links(markdown[last:], source, uri, places)])


def _links(text: str, source: str, uri: str, places: dict[str, str]) -> str:
    def rewritten(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        path = f"{path}/README.md" if f"{path}/README.md" in places else path
        if path in places:
            there = posixpath.relpath(places[path], posixpath.dirname(uri) or ".")
            return f"[{words}]({there}{'#' * bool(anchor)}{anchor})"
        return words if (ROOT / path).exists() else match[0]

    return LINK.sub(rewritten, text)


# ----------------------------------------------------------------------------- what is made from code
def made_pages() -> dict[str, Callable[[], str]]:
    """Pages by their places -> what writes each."""
    return {
        "reference/cli.md": cli_page,
        "reference/detectors.md": detectors_page,
        "reference/json.md": json_page,
        "reference/map.md": map_page,
    }


def cell(text: str) -> str:
    """A text in a table's cell, on one line."""
    return (
        " ".join(text.split())
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("[bold]", "")
        .replace("[/bold]", "")
    )


def cli_page() -> str:
    """Every command with its arguments and options, from the parsers."""
    from tr11ops.cli import main

    lines = [
        "# Commands",
        "",
        "Exit codes everywhere: 0 fine, 1 needs a person, 2 wrong usage, 3 could not observe.",
        "",
    ]
    for name in main.COMMANDS:
        lines += _command(main.load(name), f"tr11 {name}", 2)
    return "\n".join(lines)


def _command(command: Any, path: str, level: int) -> Iterator[str]:
    from tr11ops.cli.main import shown_spellings

    if getattr(command, "hidden", False):
        return
    yield from ("#" * level + f" {path}", "")
    text, _, examples = (
        (command.help or "").replace("[/bold]", "").replace("[bold]", "").partition("Examples")
    )
    yield from (text.strip(), "")
    lines = [line.strip() for line in examples.strip(":\n ").splitlines() if line.strip()]
    if lines:
        yield from ("```sh", *lines, "```", "")
    parameters = [
        entry
        for entry in command.params
        if not getattr(entry, "hidden", False) and entry.name != "help"
    ]
    if parameters:
        yield from ("| option | value | meaning |", "|---|---|---|")
        for entry in parameters:
            names = ", ".join(
                f"`{name}`" for name in (*shown_spellings(entry), *entry.secondary_opts)
            )
            is_flag = getattr(entry, "is_flag", False)
            value = "" if is_flag else cell(entry.metavar or "")
            yield f"| {names} | {value} | {cell(getattr(entry, 'help', '') or '')} |"
        yield ""
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(inner, f"{path} {name}", level + 1)


def detectors_page() -> str:
    """Every detector, as its decorator and its docstring have it."""
    from tr11ops.detect.registry import DETECTORS

    lines = [
        "# Detectors", "",
        "What each one finds, from when on, and how grave it is. How they work, and what they cannot see, is in",
        "[How faults are found](../explanation/detectors.md). A detector is not run where what it needs is unknown; where what it",
        "uses is, it says what the rest shows. Either way no alert of its is over because it is silent.", "",
        "| detector | what it finds | bound | severity | needs | uses | runbook |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for detector in DETECTORS:
        needs = ", ".join(f"`{part}`" for part in detector.needs)
        uses = ", ".join(f"`{part}`" for part in detector.uses)
        values = (
            f"`{detector.name}`",
            cell(detector.purpose),
            cell(detector.bound),
            cell(detector.severities),
            needs,
            uses,
            f"[{detector.page.removesuffix('.md')}](../../runbooks/{detector.page})",
        )
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join([*lines, ""])


def json_page() -> str:
    """The keys of every `--json` document and of the run directory's files, as the tests pin them."""
    pinned = json.loads((ROOT / "tests" / "pins" / "expected.json").read_text(encoding="utf-8"))
    lines = [
        "# JSON documents and files", "",
        "What programs may rely on. `a.b` is a key in an object, `a[]` an element of a list. Keys may be added;",
        "none is removed, renamed or of another type later. Written from the record that the tests compare with.", "",
        "## Documents of `--json`", "",
    ]  # fmt: skip
    for command, document in sorted(pinned["documents"].items()):
        if document["exit"] in (0, 1) and len(document.get("shape", ())) > 1:
            lines += [f"### `tr11 {command}`", "", *_shape(document["shape"])]
    lines += ["## Files of a run directory", "", "Numbers in a name are shown as `*`.", ""]
    for name, shape in sorted(pinned["formats"].items()):
        lines += [f"### `{name}`", "", *_shape(shape)]
    return "\n".join(lines)


def _shape(shape: dict[str, list[str]]) -> list[str]:
    rows = [f"| `{key}` | {' or '.join(kinds)} |" for key, kinds in shape.items() if key != "."]
    return ["| key | value |", "|---|---|", *rows, ""]


def map_page() -> str:
    """Every room with its one line, and every file of it with its own, as their docstrings have them."""
    rooms = sorted(
        {
            path.parent
            for package in ("tr11ops", "trainer")
            for path in (ROOT / package).rglob("*.py")
        }
    )
    lines = [
        "# Map of the code",
        "",
        "The rooms, and the files of each. Five walks through them are in the [tour](../explanation/tour.md).",
        "",
    ]
    lines += ["| room | files | what it is for |", "|---|---|---|"]
    tables = []
    for room in rooms:
        name = str(room.relative_to(ROOT))
        files = [path for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]
        lines.append(f"| `{name}` | {len(files)} | {cell(first_sentence(room / '__init__.py'))} |")
        if not files:
            continue
        tables += [f"## {name}", "", "| file | what is in it |", "|---|---|"]
        tables += [f"| `{path.name}` | {cell(first_sentence(path))} |" for path in files] + [""]
    return "\n".join([*lines, "", *tables])


def first_sentence(path: Path) -> str:
    """Of the docstring of a file; empty where it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.?!])\s|\n\n", text, maxsplit=1)[0]
