"""The pages of docs/contributing/ are followed to the letter: their files are written, their checks
are run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.contract.record import Record

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
BLOCK = re.compile(r'^(`{3,})(\w+) title="([^"]+)"\n(.*?)^\1$', re.MULTILINE | re.DOTALL)
LINKED = ("tests/data", "slurm", "cron", "LICENSE", "pyproject.toml")
COPIED = ("tr11ops", "trainer", "tests", "docs", "runbooks")


class Block(Record):
    """A block of a page: `kind` python or markdown is a new file, diff a change, sh what is run."""

    kind: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [
        Block(kind, title, text)
        for _, kind, title, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def apply(block: Block, root: Path) -> None:
    """Write or change one file. What a diff takes away or names as context must be there exactly
    once.
    """
    path = root / block.title
    if block.kind != "diff":
        assert not path.exists(), f"{block.title} is there already"
        path.write_text(block.text, encoding="utf-8")
        return
    lines = block.text.splitlines()
    assert all(line[:1] in {" ", "+", "-"} for line in lines), block.text
    before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
    after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, (
        f"{block.title} holds this {text.count(before)} times:\n{before}"
    )
    path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in COPIED:
        ignored = shutil.ignore_patterns("data") if name == "tests" else None
        # with its compiled files: they save seconds
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for folder in (ROOT / "tests").rglob(
        "data"
    ):  # recorded outputs are large, and folders of tests have that name too
        target = tmp_path / folder.relative_to(ROOT)
        if not target.exists():
            target.symlink_to(folder)
    for name in LINKED:
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_leads_to_a_green_check(page: Path, tree: Path) -> None:
    found = blocks(page)
    checks = [block for block in found if block.kind == "sh"]
    assert len(checks) == 1 and checks[0] is found[-1]
    for block in found[:-1]:
        apply(block, tree)
    words = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(tree)}
    done = subprocess.run(
        ["bash", "-euc", checks[0].text],
        cwd=tree,
        env={**os.environ, **words},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lint = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        *[block.title for block in found[:-1] if block.title.endswith(".py")],
    ]
    done = subprocess.run(lint, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
