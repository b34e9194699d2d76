"""A real file system that never answers, as a hung NFS mount: every command ends, and concludes
nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.tr11ops.cli.hung_mounts import ENTRY, hang, own_mounts, printed_by
from tests.tr11ops.launch.run_inputs import write_card
from trainer.contract.files import write_json

LIMIT_SECONDS = 2.0  # in place of a look's minute
AT_ONCE = 12  # they wait
LINES = [
    "status", "status --json", "list RUN", "list ABOVE", "list RUN BESIDE", "logs", "logs -f", "logs --rank 0", "diagnose", "stacks", "checkpoint-now",
    "profile", "pulse", "kill", "pause", "resume", "handover", "handover --start", "goodput", "numbers", "cron list",
    "cron run pulse", "cron status", "nodes list", "nodes exclude n1 --reason x", "nodes history", "fs-watchdog",
    "checkpoints list", "checkpoints verify --all", "checkpoints prune", "backup run", "backup status",
    "sync", "sync --every 60", "upload latest --to a/b", "rollback 5", "launch --dry-run", "alerts list",
]  # fmt: skip
WITHOUT_CARD = ("list",)
WITH_SCHEDULER = {
    "status", "list", "stacks", "checkpoint-now", "profile", "pulse", "kill", "pause", "resume", "handover", "rollback",
    "launch",
}  # fmt: skip


def type_them(card: str, root: str, into: str, lines: list[str]) -> None:
    """Type each line in a process of its own on a run whose directory hangs; what it says goes to
    the file of its number, its exit code to stdout.
    """
    from tr11ops.base import deadline
    from tr11ops.cli.main import execute
    from tr11ops.cron import runner

    try:
        own_mounts()
        held = hang(root)
    except OSError as error:
        print(f"cannot be mounted: {error}")
        return
    deadline.LOOK_SECONDS = deadline.STOP_SECONDS = deadline.SILENCE_SECONDS = LIMIT_SECONDS
    runner.ENTRY = ENTRY
    children: dict[int, int] = {}
    for number, line in enumerate(lines):
        if len(children) == AT_ONCE:
            tell_end(children)
        child = os.fork()
        if child == 0:
            said = os.open(f"{into}/{number}", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            code = execute(words_of(line, card, root))
            sys.stdout.flush()
            os._exit(code)
        children[child] = number
    while children:
        tell_end(children)
    os.close(held)


def tell_end(children: dict[int, int]) -> None:
    """Wait for the next one that ends, and print its number and exit code."""
    child, status = os.wait()
    print(children.pop(child), os.waitstatus_to_exitcode(status), flush=True)


def words_of(line: str, card: str, root: str) -> list[str]:
    above = Path(root).parent
    places = {"RUN": root, "ABOVE": str(above), "BESIDE": str(above / "beside")}
    words = [places.get(word, word) for word in line.split()]
    if words[0] not in WITHOUT_CARD:
        words += ["--run", card]
    if words[0] in WITH_SCHEDULER:
        words += ["--scheduler", "local"]
    if words[0] == "backup":
        words += ["--set", f"backup.store={card}.store"]
    if words[0] == "sync":
        words += ["--set", "hub.repository=a/b"]
    return words


def test_every_command_ends_where_the_run_directory_hangs(tmp_path: Path) -> None:
    """One that does not end keeps this test, until it is ended from outside."""
    card, root, said = write_card(tmp_path), tmp_path / "run", tmp_path / "said"
    said.mkdir()
    beside = tmp_path / "beside" / "other"
    write_json(beside / "state" / "submissions" / "mark.json", {})
    write_json(root / "state" / "submissions" / "mark.json", {})
    typed = (
        "import json, sys; from tests.tr11ops.cli.test_hung_mount import type_them\n"
        "type_them(*sys.argv[1:4], json.loads(sys.argv[4]))"
    )
    rows = printed_by(typed, str(card), str(root), str(said), json.dumps(LINES), seconds=900)
    if rows.startswith("cannot be mounted"):
        pytest.skip(rows)
    codes = dict(tuple(map(int, row.split())) for row in rows.splitlines())
    for number, line in enumerate(LINES):
        text = (said / str(number)).read_text()
        # what a round finds is the round's own, unless it saw nothing in its time
        expected = {0, 3} if line == "cron run pulse" else {3}
        assert codes.get(number) in expected and "does not answer" in text, (line, codes, text)
        assert "Traceback" not in text, (line, text)
        if line == "list RUN BESIDE":
            assert str(beside) in text, text
