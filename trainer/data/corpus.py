"""A real corpus from text that every Python installation carries: documentation, docstrings and
sources.

No text is taken twice: a module's docstrings become one document and its code, with the docstrings
cut out, another. Documents are ordered by their digest, so that every part of the file, and so
every split of it, is a fair mixture.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from trainer.contract.documents import record_of
from trainer.contract.errors import DataError, explain_os_errors
from trainer.contract.files import write_atomically
from trainer.contract.record import JsonObject, Record
from trainer.data.made import begin_record, check_replaceable, end_record, recorded

RECIPE_REVISION = 1  # raised by one whenever the choice or the cutting of texts changes
SHORTEST_TEXT = 64  # characters; shorter documents teach nothing
LONGEST_FILE = 2_000_000  # bytes; longer sources are generated tables
TEST_FOLDERS = {"test", "tests", "idle_test"}
# The topics are taken as text; the build's own configuration differs from machine to machine.
LEFT_OUT = re.compile(
    r"(^|/)(__pycache__|pydoc_data|site-packages|dist-packages|lib2to3)(/|$)|(^|/)_sysconfigdata"
)


class Document(Record):
    """One text, and where it comes from: `topics/NAME`, or a file of a library with `#docstrings`
    or `#code`.
    """

    text: str
    source: str


class CorpusReport(Record):
    """What a finished corpus holds: counts, UTF-8 bytes of text by origin, and what was left out."""

    path: str
    documents: int
    text_bytes: int
    file_bytes: int
    bytes_by_origin: dict[str, int]
    duplicates: int
    unreadable_files: int
    already_complete: bool = False


def topics() -> Iterator[Document]:
    """The documentation topics that `help()` shows."""
    try:
        from pydoc_data.topics import topics as entries
    except ImportError:  # some distributions package the documentation apart
        return
    for name in sorted(entries):
        yield Document(entries[name], f"topics/{name}")


def library_files(library: Path, tests: bool) -> Iterator[str]:
    """Paths (relative, sorted) of the Python sources below a library; those of its tests, or all
    but those.
    """
    found = []
    for folder, names, files in os.walk(library):
        below = Path(folder).relative_to(library)
        names[:] = [name for name in names if not LEFT_OUT.search((below / name).as_posix())]
        found += [(below / file).as_posix() for file in files if file.endswith(".py")]
    for name in sorted(found):
        if not LEFT_OUT.search(name) and tests == bool(TEST_FOLDERS & set(Path(name).parts[:-1])):
            yield name


def cut_module(source: str) -> tuple[str, str]:
    """A module's docstrings, each under the name it documents, and its code without them.

    Raises SyntaxError or ValueError when the source is not of this Python's syntax.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in strings are no concern of ours
        tree = ast.parse(source)
    # not splitlines: a form feed ends no line of Python
    lines: list[str | None] = list(source.split("\n"))
    docstrings = []
    for name, node in _documented(tree, ""):
        text = ast.get_docstring(node)
        if not text:
            continue
        expression = node.body[0]
        first = expression.lineno - 1
        if (lines[first] or "").lstrip()[:1] not in {'"', "'", "r", "R", "u", "U"}:
            continue  # it shares its line with code and stays there
        docstrings.append(f"{name}\n\n{text}" if name else text)
        # Marked while walking, so that the count of lines stays right; dropped at the end.
        for number in range(first, expression.end_lineno):
            lines[number] = None
    return "\n\n\n".join(docstrings), "\n".join(line for line in lines if line is not None)


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.Module):
        yield "", node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from _documented(child, f"{name}.")


def library_documents(
    library: Path, label: str, tests: bool, on_unreadable: Callable[[], None]
) -> Iterator[Document]:
    """Docstrings and code of every module of a library; what cannot be read or parsed is counted
    and left out.
    """
    for name in library_files(library, tests):
        path = library / name
        try:
            if path.stat().st_size > LONGEST_FILE:
                continue
            with tokenize.open(path) as stream:
                docstrings, code = cut_module(stream.read())
            (docstrings + code).encode("utf-8")  # lone surrogates cannot be written
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            on_unreadable()
            continue
        yield Document(docstrings, f"{label}/{name}#docstrings")
        yield Document(code, f"{label}/{name}#code")


def all_documents(on_unreadable: Callable[[], None]) -> Iterator[Document]:
    """Every document of this installation, best first: topics, standard library, its tests,
    installed packages.
    """
    yield from topics()
    standard = Path(sysconfig.get_path("stdlib"))
    yield from library_documents(standard, "stdlib", False, on_unreadable)
    yield from library_documents(standard, "stdlib", True, on_unreadable)
    for folder in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        if Path(folder).is_dir():
            yield from library_documents(Path(folder), "packages", False, on_unreadable)


def build_corpus(
    output: Path,
    min_bytes: int,
    force: bool = False,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> CorpusReport:
    """Write `output`, one JSON object `{"text", "source"}` a line, with at least `min_bytes` of
    UTF-8 text.

    Deterministic for one installation; written whole or not at all. A complete corpus of the same recipe is kept unless
    `force`, and a file that this function did not make is replaced with `force` alone. `on_bytes` hears of the text
    gathered. Holds the text in memory (about `min_bytes`, and its lines as well when it writes).
    Raises DataError when the installation carries less than `min_bytes`, another file is there, or the file cannot be
    written.
    """
    if min_bytes < 1:
        raise DataError(f"a corpus of at least {min_bytes} bytes was asked; ask for at least 1")
    request = {"min_bytes": min_bytes, "python": sys.version, "recipe": RECIPE_REVISION}
    if force:
        done = None
    else:
        done = _complete(output, request)
    if done is not None:
        return done
    record = record_path(output)
    check_replaceable(
        [output], record, lambda report: output.stat().st_size == report["file_bytes"], force
    )
    chosen: dict[bytes, Document] = {}
    origins: dict[str, int] = {}
    gathered = duplicates = unreadable = 0

    def count_unreadable() -> None:
        nonlocal unreadable
        unreadable += 1

    for document in all_documents(count_unreadable):
        if len(document.text.strip()) < SHORTEST_TEXT:
            continue
        data = document.text.encode("utf-8")
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest in chosen:
            duplicates += 1
            continue
        chosen[digest] = document
        origin = _origin(document.source)
        origins[origin] = origins.get(origin, 0) + len(data)
        gathered += len(data)
        on_bytes(len(data))
        if gathered >= min_bytes:
            break
    else:
        raise DataError(
            f"this Python installation carries {gathered} bytes of text, {min_bytes} were asked; use"
            f" --min-bytes {gathered} or an installation with the standard library's sources"
        )
    begin_record(record, request)
    with recorded(record, [output]):
        _write_lines(output, [chosen[digest] for digest in sorted(chosen)])
    report = CorpusReport(
        str(output),
        len(chosen),
        gathered,
        file_bytes=output.stat().st_size,
        bytes_by_origin=dict(sorted(origins.items())),
        duplicates=duplicates,
        unreadable_files=unreadable,
    )
    end_record(record, request, asdict(report))
    return report


def _origin(source: str) -> str:
    label, _, name = source.partition("/")
    if label == "topics":
        return label
    kind = source.rpartition("#")[2]
    if TEST_FOLDERS & set(Path(name).parts[:-1]):
        return f"{label} tests {kind}"
    return f"{label} {kind}"


def _write_lines(output: Path, documents: list[Document]) -> None:
    lines = [json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in documents]
    with explain_os_errors("writing", output):
        write_atomically(output, "".join(lines))


def record_path(output: Path) -> Path:
    """Where a corpus keeps what it was made from."""
    return output.with_name(f"{output.name}.report.json")


def _complete(output: Path, request: JsonObject) -> CorpusReport | None:
    """The report of a corpus that is already there, whole, and of the same request."""
    try:
        record = json.loads(record_path(output).read_text(encoding="utf-8"))
        report = replace(
            record_of(CorpusReport, record["report"]), path=str(output), already_complete=True
        )
        if record["request"] == request and output.stat().st_size == report.file_bytes:
            return report
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
