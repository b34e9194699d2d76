"""docs/architecture.md lists every exit code that the code names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


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
