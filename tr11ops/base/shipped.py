"""Finds the files that ship beside the code: slurm/, runbooks/ and cron/, in a checkout or in an
installed wheel; and the pages of runbooks/ as plain text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_root() -> Path:
    """The folder that holds slurm/, runbooks/ and cron/; $TR11_SHIPPED for the set-up lines of a
    card.
    """
    return shipped("slurm").parent


def shipped(*parts: str) -> Path:
    """Path of a shipped file or folder, e.g. `shipped("slurm", "train.sbatch.j2")`.

    Raises FileNotFoundError when neither the wheel nor the checkout holds it.
    """
    places = (_PACKAGE / "shipped", _PACKAGE.parent)
    for place in places:
        path = place.joinpath(*parts)
        if path.exists():
            return path
    name = "/".join(parts)
    raise FileNotFoundError(
        f"{name} is not shipped with this installation of tr11; install it again"
    )


def read_shipped(*parts: str) -> str:
    """Text of a shipped file (UTF-8). Raises FileNotFoundError as `shipped` does."""
    return shipped(*parts).read_text(encoding="utf-8")


# The pages of `runbooks/`, and one as plain text: no markup, lines that fit, commands on lines of
# their own.

_LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
_EMPHASIS = re.compile(r"(?<![\w`])\*{1,2}([^*`]+)\*{1,2}")
_BULLET = re.compile(r"(- |\d+\. )")
_RULE = re.compile(r"[|\s:-]+")  # the line between a table's head and its rows


def page_names() -> tuple[str, ...]:
    """The names of all pages, without `.md`; none where they are not installed."""
    try:
        found = sorted(path.stem for path in shipped("runbooks").glob("*.md"))
    except OSError:
        return ()
    return tuple(name for name in found if name != "README")


def pages_about(word: str) -> tuple[str, ...]:
    """The pages whose text has this word, those first that have it most often."""
    whole = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)
    counts = {
        name: len(whole.findall(" ".join(page_lines(f"{name}.md", 10_000))))
        for name in page_names()
    }
    return tuple(
        sorted(
            (name for name, count in counts.items() if count),
            key=lambda name: (-counts[name], name),
        )
    )


def page_title(name: str) -> str:
    """What the page is headed; its name where it cannot be read."""
    try:
        with shipped("runbooks", f"{name}.md").open(encoding="utf-8") as stream:
            return stream.readline().strip().removeprefix("# ")
    except (OSError, UnicodeDecodeError):
        return name


def page_lines(page: str, width: int) -> tuple[str, ...]:
    """The page's lines, at most `width` wide but for commands; none where the page is not
    installed.
    """
    try:
        text = shipped("runbooks", page).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ()
    lines = list(_lines(text, width))
    return tuple(line for line, before in zip(lines, ["", *lines], strict=False) if line or before)


def _lines(text: str, width: int) -> Iterator[str]:
    paragraph: list[str] = []
    is_code = False
    for source in [*text.splitlines(), ""]:
        if is_code:
            line = source
        else:
            line = _row_as_bullet(source)
        is_fence = line.startswith("```")
        if paragraph and (is_fence or is_code or not line.strip() or _BULLET.match(line)):
            yield from _wrapped(" ".join(paragraph), width)
            paragraph = []
        if is_fence:
            is_code = not is_code
        elif is_code:
            yield f"    {line}".rstrip()
        elif not line.strip():
            yield ""
        elif not line.startswith("# "):  # the mail names the page itself
            paragraph.append(line.strip())


def _row_as_bullet(line: str) -> str:
    """A row of a table as an item of a list: the first cell, then what is said of it; other lines
    as they are.
    """
    if not line.startswith("|"):
        return line
    first, *others = (cell.strip() for cell in line.strip().strip("|").split(" | "))
    if _RULE.fullmatch(line):
        return ""
    return f"- {first}: {' -> '.join(others)}"


def _linked(link: re.Match[str]) -> str:
    """A link as plain text: another page is named by the command that shows it, as a mail has no
    folder.
    """
    label, target = link[1], link[2]
    name = target.removesuffix(".md")
    if name == target:
        return label
    if "/" in target:
        if label.endswith(".md"):
            return target.removeprefix("../")
        return label
    shown = f"`tr11 runbook {name}`"
    if label == target:
        return shown
    return f"{label} ({shown})"


def _wrapped(text: str, width: int) -> list[str]:
    plain = _EMPHASIS.sub(r"\1", _LINK.sub(_linked, text))
    bullet = _BULLET.match(plain)
    return textwrap.wrap(
        plain,
        width,
        subsequent_indent=" " * len(bullet[0]) if bullet else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
