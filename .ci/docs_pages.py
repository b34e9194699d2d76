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
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the modules whose reference is written are those of this tree
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
ONE_PAGE = 1_000  # words of a group of commands; a longer one has a page for each
FENCE = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)


@cache
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
        "CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "changelog.md",
        "runbooks/README.md": "runbooks/index.md", "benchmarks/RESULTS.md": "benchmarks.md",
        **{f"docs/{place}": place for place in made_pages()},
    }  # fmt: skip


# ----------------------------------------------------------------------------- the hook
def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not files of docs/."""
    from mkdocs.structure.files import File

    made = made_pages()
    for source, uri in sources().items():
        if uri in made:
            files.append(File.generated(config, uri, content=made[uri]))
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
@cache
def made_pages() -> dict[str, str]:
    """Pages by their places."""
    return {**cli_pages(), **detectors_pages(), **json_pages(), **map_pages()}


def words(text: str) -> int:
    """How long a page is. The bars of its tables do not count."""
    return len(re.findall(r"\S*\w\S*", text))


def cell(text: str) -> str:
    """A text in a table's cell, on one line."""
    return (
        " ".join(text.split())
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("[bold]", "")
        .replace("[/bold]", "")
    )


def cli_pages() -> dict[str, str]:
    """A page for each command with its arguments and options, from the parsers. A group that is too long for
    one has a page for each of its commands.
    """
    from tr11ops.cli import main

    pages = {}
    index = [
        "# Commands", "",
        "Exit codes everywhere: 0 fine, 1 needs a person, 2 wrong usage, 3 could not observe.", "",
        "| command | what it is for |", "|---|---|",
    ]  # fmt: skip
    for name in main.COMMANDS:
        command = main.load(name)
        index.append(f"| [`tr11 {name}`](cli/{name}.md) | {cell(summary(command))} |")
        page = "\n".join(_command(command, f"tr11 {name}", 1))
        if words(page) <= ONE_PAGE:
            pages[f"reference/cli/{name}.md"] = page
            continue
        own = [*_alone(command, f"tr11 {name}", 1), "| command | what it is for |", "|---|---|"]
        for inner, each in command.commands.items():
            place = f"{name}-{inner}.md"
            own.append(f"| [`tr11 {name} {inner}`]({place}) | {cell(summary(each))} |")
            pages[f"reference/cli/{place}"] = "\n".join(_command(each, f"tr11 {name} {inner}", 1))
        pages[f"reference/cli/{name}.md"] = "\n".join([*own, ""])
    return {"reference/cli.md": "\n".join([*index, ""]), **pages}


def summary(command: Any) -> str:
    """The first sentence of a command's help."""
    return re.split(r"(?<=[.?!])\s|\n\n", (command.help or "").strip(), maxsplit=1)[0]


def _command(command: Any, path: str, level: int) -> Iterator[str]:
    """A command, and those in it."""
    yield from _alone(command, path, level)
    for name, inner in getattr(command, "commands", {}).items():
        if not getattr(inner, "hidden", False):
            yield from _command(inner, f"{path} {name}", level + 1)


def _alone(command: Any, path: str, level: int) -> Iterator[str]:
    from tr11ops.cli.main import shown_spellings

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


def detectors_pages() -> dict[str, str]:
    """Every detector, as its decorator and its docstring have it: a page for each file of them."""
    from tr11ops.detect.registry import DETECTORS

    index = [
        "# Detectors", "",
        "What each one finds is on the page of its kind. How they work, and what they cannot see, is in",
        "[How faults are found](../explanation/detectors.md). A detector is not run where what it needs is unknown; where what it",
        "uses is, it says what the rest shows. Either way no alert of its is over because it is silent.", "",
        "| detector | of | severity | runbook |", "|---|---|---|---|",
    ]  # fmt: skip
    pages: dict[str, list[str]] = {}
    for detector in DETECTORS:
        kind = detector.judge.__module__.rpartition(".")[2]
        runbook = f"{detector.page.removesuffix('.md')}]({{}}runbooks/{detector.page})"
        index.append(
            f"| `{detector.name}` | [{kind}](detectors/{kind}.md) | {cell(detector.severities)} "
            f"| [{runbook.format('../../')} |"
        )
        if kind not in pages:
            text = first_sentence(ROOT / "tr11ops" / "detect" / f"{kind}.py")
            pages[kind] = [f"# Detectors: {kind}", "", text, ""]
        pages[kind] += [
            f"## {detector.name}", "", cell(detector.purpose), "",
            f"- Bound: {cell(detector.bound)}", f"- Severity: {cell(detector.severities)}",
            f"- Needs: {names_of(detector.needs)}", f"- Uses: {names_of(detector.uses)}",
            f"- Runbook: [{runbook.format('../../../')}", "",
        ]  # fmt: skip
    return {
        "reference/detectors.md": "\n".join([*index, ""]),
        **{f"reference/detectors/{kind}.md": "\n".join(page) for kind, page in pages.items()},
    }


def names_of(parts: Iterable[str]) -> str:
    """Parts of a snapshot as a list in words."""
    return ", ".join(f"`{part}`" for part in parts) or "nothing else"


def json_pages() -> dict[str, str]:
    """The keys of every `--json` document and of the run directory's files, as the tests pin them."""
    pinned = json.loads((ROOT / "tests" / "pins" / "expected.json").read_text(encoding="utf-8"))
    index = [
        "# JSON documents and files", "",
        "What programs may rely on. `a.b` is a key in an object, `a[]` an element of a list. Keys may be added;",
        "none is removed, renamed or of another type later. Written from the record that the tests compare with.", "",
        "## Documents of `--json`", "",
    ]  # fmt: skip
    pages: dict[str, list[str]] = {}
    for command, document in sorted(pinned["documents"].items()):
        if document["exit"] in (0, 1) and len(document.get("shape", ())) > 1:
            page = command.split()[0]
            if page not in pages:
                index.append(f"- [`tr11 {page}`](json/{page}.md)")
                pages[page] = [f"# Documents of `tr11 {page}`", ""]
            pages[page] += [f"## `tr11 {command}`", "", *_shape(document["shape"])]
    index += ["", "## Files of a run directory", ""]
    for name, shape in sorted(pinned["formats"].items()):
        page = "-".join(["files", *name.split("/")[:-1][:2]]).replace("*", "").rstrip("-")
        if page not in pages:
            folder = "/".join(name.split("/")[:-1][:2]) or "the run directory itself"
            index.append(f"- [{folder}](json/{page}.md)")
            pages[page] = [f"# Files in {folder}", "", "Numbers in a name are shown as `*`.", ""]
        pages[page] += [f"## `{name}`", "", *_shape(shape)]
    return {
        "reference/json.md": "\n".join([*index, ""]),
        **{f"reference/json/{page}.md": "\n".join(lines) for page, lines in pages.items()},
    }


def _shape(shape: dict[str, list[str]]) -> list[str]:
    rows = [f"| `{key}` | {' or '.join(kinds)} |" for key, kinds in shape.items() if key != "."]
    return ["| key | value |", "|---|---|", *rows, ""]


def map_pages() -> dict[str, str]:
    """Every room with its one line, and on a page of its own every file of it, as their docstrings have them."""
    index = [
        "# Map of the code", "",
        "The rooms, and the files of each. Five walks through them are in the [tour](../explanation/tour.md).", "",
        "| room | files | what it is for |", "|---|---|---|",
    ]  # fmt: skip
    pages: dict[str, list[str]] = {}
    for room in sorted({path.parent for each in ("tr11ops", "trainer") for path in (ROOT / each).rglob("*.py")}):
        name = str(room.relative_to(ROOT))
        page = "-".join(name.split("/")[:2])
        text = cell(first_sentence(room / "__init__.py"))
        files = [path for path in sorted(room.glob("*.py")) if path.name != "__init__.py"]
        if page not in pages:
            index.append(f"| [`{name}`](map/{page}.md) | {len([*room.rglob('*.py')])} | {text} |")
            pages[page] = [f"# {name}", "", text, ""]
        elif files:
            pages[page] += [f"## {name}", "", text, ""]
        if files:
            rows = [f"| `{path.name}` | {cell(first_sentence(path))} |" for path in files]
            pages[page] += ["| file | what is in it |", "|---|---|", *rows, ""]
    return {
        "reference/map.md": "\n".join([*index, ""]),
        **{f"reference/map/{page}.md": "\n".join(lines) for page, lines in pages.items()},
    }


def first_sentence(path: Path) -> str:
    """Of the docstring of a file; empty where it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.?!])\s|\n\n", text, maxsplit=1)[0]
