"""What scripts rely on: the options of each command, its exit code, and the keys of its `--json`."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import time_machine

from tests.pins.shapes import shape

LOCAL = ("--scheduler", "local")
# Typed in the folder of the recorded run, in this order; what keeps a record of its own comes last.
DOCUMENTS: tuple[tuple[str, ...], ...] = (
    ("status", "--json", *LOCAL),
    ("status", "--json", "--digests", *LOCAL),
    ("status", "--prometheus", "metrics.prom", *LOCAL),
    ("handover", "--json", *LOCAL),
    ("handover", "--json", "--since", "2000-01-01", *LOCAL),
    ("goodput", "--json"),
    ("advise", "--json"),
    ("logs", "--json", "--summary"),
    ("alerts", "list", "--json"),
    ("alerts", "list", "--json", "--all"),
    ("alerts", "rota", "--json"),
    ("alerts", "ack", "000000000000", "--json"),
    ("checkpoints", "list", "--json"),
    ("checkpoints", "prune", "--json", "--dry-run"),
    ("checkpoints", "pin", "99", "--json"),
    ("checkpoints", "remove", "18", "--json", "--dry-run"),
    ("backup", "plan", "--json"),
    ("backup", "status", "--json"),
    ("backup", "restore", "--list", "18", "--json"),
    ("nodes", "list", "--json", *LOCAL),
    ("nodes", "history", "--json"),
    ("nodes", "exclude", "local-node1", "--json", "--dry-run", "--reason", "a pin", *LOCAL),
    ("nodes", "exclude", "elsewhere", "--json", "--dry-run", "--reason", "a pin", *LOCAL),
    ("nodes", "include", "local-node3", "--json", "--dry-run", "--reason", "a pin", *LOCAL),
    ("cron", "list", "--json"),
    ("cron", "status", "--json"),
    ("fs-watchdog", "--json"),
    ("perms", "check", "--json"),
    ("estimate", "--json"),
    ("estimate", "--run", "tr11-176B-ml", "--json"),
    ("doctor", "--json", *LOCAL),
    ("launch", "--array", "1-3", "--json", "--dry-run", *LOCAL),
    ("launch", "--array", "9-1", "--json", "--dry-run", *LOCAL),
    ("kill", "--json", "--dry-run", *LOCAL),
    ("pause", "--json", "--dry-run", *LOCAL),
    ("resume", "--json", "--dry-run", *LOCAL),
    ("rollback", "18", "--json", "--dry-run", *LOCAL),
    ("checkpoint-now", "--json", "--dry-run", *LOCAL),
    ("pulse", "--json", "--no-act", "--dry-run", *LOCAL),
    ("status", "--run", "missing.toml"),
    ("status", "--run", "missing.toml", "--json"),
    ("status", "--no-such-option"),
    ("no-such-command",),
    ("checkpoints", "verify", "18", "--json"),
    ("checkpoints", "verify", "5", "--json"),
    ("backup", "verify", "18", "--json"),
)
# Minutes after the run was recorded: later, its exclusion would have expired, its copies would be
# due for a reading.
WHEN = datetime(2026, 11, 22, 21, 24, tzinfo=UTC)


def typed(words: tuple[str, ...]) -> tuple[int, str]:
    """Type a command in this process, through the console script's entry point: exit code and
    standard output.
    """
    [entry] = importlib.metadata.entry_points(group="console_scripts", name="tr11")
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        try:
            entry.load()(list(words))
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
    return code, said.getvalue()


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[None]:
    """In the folder of the recorded run, soon after it ended, with its scheduler and no setting of
    this machine's own.
    """
    before = Path.cwd()
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    own = {
        "TR11_LOCAL_SCHEDULER": str(folder / "scheduler"),
        "TR11_LOCAL_NODES": "3",
        "COLUMNS": "80",
    }
    with patch.dict(os.environ, kept | own, clear=True), time_machine.travel(WHEN):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def said(folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """The exit code of a command, and the shape of its document if it prints one."""
    with beside(folder):
        code, output = typed(words)
    if "--json" in words:
        return {"exit": code, "shape": shape(_document(output))}
    return {"exit": code}


def _document(output: str) -> Any:
    try:
        return json.loads(output)
    except ValueError:
        return [json.loads(line) for line in output.splitlines()]


def option_names() -> dict[str, list[str]]:
    """Command -> every spelling of its options, hidden ones too."""
    from tr11ops.cli.main import COMMANDS, load

    found: dict[str, list[str]] = {}

    def walk(words: tuple[str, ...], command: Any) -> None:
        options = [one for one in command.params if one.param_type_name == "option"]
        found[" ".join(words)] = sorted(
            {name for one in options for name in (*one.opts, *one.secondary_opts)}
        )
        for name, inner in getattr(command, "commands", {}).items():
            walk((*words, name), inner)

    for name in COMMANDS:
        walk((name,), load(name))
    return found
