"""A count is shown with its noun by `counted`: `1 nodes` is read as a fault of the tool."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tr11ops
from tr11ops.base.units import counted

# of which there is often one
NOUNS = "alerts|checkpoints|checks|datasets|days|faults|files|keys|nodes|ranks|tasks|workers"
FOLLOWS = re.compile(rf"^ (?:more |other |queued |usable )?(?:{NOUNS})\b")
OTHERS = {  # never about one, or no sentence of ours
    "agent/breaker.py",
    "backup/restorable.py",
    "checkpoints/quarantine.py",
    "cli/storage.py",
    "detect/speed.py",
    "diagnose/attribution/attributors.py",
    "goodput/advise.py",
    "hub/sync_plan.py",
    "status/rows.py",
    "watchdog/policy.py",
}
ROOT = Path(tr11ops.__file__).parent


def test_one_takes_the_singular() -> None:
    assert (counted(1, "node"), counted(2, "node")) == ("1 node", "2 nodes")
    assert (counted(1, "task takes", "tasks take"), counted(0, "task")) == (
        "1 task takes",
        "0 tasks",
    )


def _uncounted(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where an f-string puts a number before a plural, outside a choice between singular and
    plural.
    """
    chosen = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp) or (isinstance(node, ast.If) and _counts(node.test))
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr) or id(node) in chosen:
            continue
        for number, text in zip(node.values, node.values[1:], strict=False):
            if not isinstance(number, ast.FormattedValue) or not isinstance(text, ast.Constant):
                continue
            shown = ast.unparse(number.value)
            if (
                FOLLOWS.match(str(text.value)) and not shown.isupper()
            ):  # a constant of ours is never one
                yield node.lineno, f"{{{shown}}}{str(text.value)[:30]}"


def _counts(test: ast.expr) -> bool:
    """Whether a condition compares a number with 0 or 1, as who chooses between singular and plural
    does.
    """
    return isinstance(test, ast.Compare) and any(
        isinstance(side, ast.Constant) and type(side.value) is int and side.value in {0, 1}
        for side in (test.left, *test.comparators)
    )


def test_no_sentence_puts_a_number_before_a_plural_by_hand() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in sorted(ROOT.rglob("*.py"))
        if str(path.relative_to(ROOT)) not in OTHERS
        for line, words in _uncounted(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "write these with tr11ops.base.units.counted:\n" + "\n".join(found)
