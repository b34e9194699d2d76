"""What commands show of the recorded run in each of its states: the list of golden screens, and how
one is taken.

A screen is the command as it is typed, what it printed on both outputs, and its exit code. The
clock, the user, the host, the room on the disks and what programs are installed are given; folders
have names of one length.
"""

from __future__ import annotations

import contextlib
import grp
import importlib.metadata
import io
import json
import os
import re
import shlex
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import time_machine

from tests.pins.states import BAD_CARDS, NAMED, Place
from trainer.contract.record import Record

ROOT = Path(__file__).parents[2]
LOCAL = ("--scheduler", "local")
DRY = ("--dry-run", *LOCAL)


class Screen(Record):
    """A command that is typed in a state of the run, in a terminal of so many columns."""

    name: str
    state: str
    words: tuple[str, ...]
    columns: int = 80

    @property
    def writes(self) -> bool:
        """Whether it leaves something behind: such a command has the run for itself."""
        return self.words[:2] in WRITES


WRITES = {("checkpoints", "verify"), ("backup", "verify")}
STATUS = ("status", *LOCAL)
SINCE = ("--since", "2000-01-01")
KEPT = ("--reason", "a pin", *DRY)


def screens_in(state: str, *commands: tuple[str, ...], columns: int = 80) -> list[Screen]:
    """Screens of these commands, each named after the words that tell it from others."""
    found = []
    for words in commands:
        said = [word for word in words if word not in (*LOCAL, *KEPT, "-o", "-")]
        width = [] if columns == 80 else [str(columns)]
        name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join([state, *said, *width]))
        found.append(Screen(name, state, words, columns))
    return found


SCREENS: tuple[Screen, ...] = (
    *screens_in(
        "stopped",
        STATUS,
        ("list", *LOCAL),
        ("alerts", "list"), ("alerts", "list", "--all"), ("alerts", "digest"), ("alerts", "rota"), ("alerts", "ack", "000000000000"),
        ("checkpoints", "list"), ("checkpoints", "prune", "--all", "--dry-run"), ("checkpoints", "remove", "18", "--dry-run"),
        ("checkpoints", "verify", "18"), ("checkpoints", "pin", "99"),
        ("nodes", "list", *LOCAL), ("nodes", "list", "--excluded", *LOCAL), ("nodes", "history"),
        ("nodes", "exclude", "local-node1", *KEPT), ("nodes", "exclude", "elsewhere", *KEPT), ("nodes", "include", "local-node3", *KEPT),
        ("handover", *SINCE, *DRY), ("handover", "--start", *SINCE, *LOCAL), ("handover", "--chronicle", *SINCE, *LOCAL),
        ("goodput",), ("advise",), ("report", "--no-charts", "-o", "-", *LOCAL),
        ("logs", "--summary"), ("logs", "--lines", "6"), ("logs", "--level", "warning"),
        ("diagnose",), ("diagnose", "--all"), ("diagnose", "--job", "1_2"),
        ("estimate",), ("estimate", "--levels"), ("estimate", "--run", "tr11-176B-ml"),
        ("launch", "--array", "1-3", *DRY), ("launch", "--array", "9-1", *DRY),
        ("kill", *DRY), ("pause", *DRY), ("resume", *DRY), ("checkpoint-now", *DRY),
        ("rollback", "18", *DRY), ("rollback", "18", "--skip", "20-24", *DRY), ("rollback", "7", *DRY), ("rollback", "--undo", *DRY),
        ("backup", "plan"), ("backup", "status"), ("backup", "run", "--dry-run"), ("backup", "restore", "--list", "18"), ("backup", "verify", "18"),
        ("sync", "--dry-run"), ("cron", "list"), ("cron", "status"), ("fs-watchdog",), ("perms", "check"),
        ("doctor", *LOCAL), ("pulse", "--no-act", *DRY),
        ("config", "explain"), ("config", "explain", "watch.act"), ("config", "explain", "alerts"), ("config", "explain", "no_such_key"),
        ("config", "show"), ("runbook", "hung"), ("--help",), ("no-such-command",), ("status", "--no-such-option"),
        ("status", "--run", "missing.toml"), ("status", "--run", "missing.toml", "--json"), ("status", "--scheduler", "pbs"),
    ),
    *screens_in(
        "stopped",
        *(("launch", "--run", f"bad/{name}.toml", *DRY) for name in BAD_CARDS),
        ("status", "--run", "bad/several.toml", *LOCAL), ("status", "--run", "bad/several.toml", "--json", *LOCAL),
        ("kill", "--run", "bad/wrong-rule.toml", *DRY), ("config", "show", "--run", "bad/not-toml.toml"),
        ("launch", "--set", "model.layers=none", *DRY), ("launch", "--set", "no.such=1", *DRY), ("launch", "--set", "layers", *DRY),
    ),
    *screens_in("healthy", STATUS, ("status", "--digests", *LOCAL), columns=120),
    *screens_in("healthy", STATUS, columns=60),
    *screens_in(
        "healthy",
        STATUS, ("list", *LOCAL), ("nodes", "list", *LOCAL), ("diagnose", *LOCAL), ("handover", *DRY), ("alerts", "list"),
        ("launch", "--array", "1-3", *DRY), ("launch", "--replace", *DRY), ("launch", "--repair", *DRY),
        ("kill", *DRY), ("kill", "--now", *DRY), ("pause", *DRY), ("resume", *DRY), ("checkpoint-now", *DRY),
        ("rollback", "18", *DRY), ("nodes", "exclude", "local-node1", *KEPT), ("pulse", *DRY),
    ),
    *screens_in("stalled", STATUS, columns=60),
    *screens_in("stalled", STATUS, columns=120),
    *screens_in("stalled", STATUS, ("list", *LOCAL), ("diagnose", *LOCAL), ("pulse", *DRY), ("kill", *DRY), ("handover", *DRY)),
    *screens_in(
        "down",
        STATUS, ("list", *LOCAL), ("diagnose", *LOCAL), ("pulse", *DRY), ("launch", "--array", "1-3", *DRY), ("resume", *DRY),
        ("launch", "--repair", *DRY), ("launch", "--replace", *DRY), ("kill", *DRY),
    ),
    *screens_in("held", STATUS, ("resume", *DRY), ("kill", *DRY), ("launch", "--repair", *DRY), ("launch", "--replace", *DRY), ("pulse", *DRY)),
    *screens_in("finished", STATUS, ("list", *LOCAL), ("launch", "--array", "1-3", *DRY), ("pulse", *DRY), ("handover", *DRY), ("resume", *DRY),
        ("launch", "--repair", *DRY)),
    *screens_in(
        "damaged",
        STATUS, ("list", *LOCAL), ("checkpoints", "list"), ("nodes", "list", *LOCAL), ("alerts", "list"), ("handover", *SINCE, *DRY),
        ("diagnose", *LOCAL), ("launch", "--array", "1-3", *DRY), ("resume", *DRY), ("goodput",), ("logs", "--summary"), ("pulse", *DRY),
    ),
    *screens_in("older", STATUS, ("checkpoints", "list"), ("nodes", "list", *LOCAL), ("alerts", "list"), ("goodput",), ("handover", *SINCE, *DRY)),
    *screens_in("foreign", STATUS, ("goodput",), ("handover", *SINCE, *DRY), ("report", "--no-charts", "-o", "-", *LOCAL), ("logs", "--summary"), ("pulse", *DRY)),
)  # fmt: skip

Room = namedtuple(
    "Room", "f_bsize f_frsize f_blocks f_bfree f_bavail f_files f_ffree f_favail f_flag f_namemax"
)
ROOM = Room(4096, 4096, 2**28, 2**27, 2**27, 2**24, 2**23, 2**23, 0, 255)  # 1 TiB, half of it free


@contextlib.contextmanager
def terminal(place: Place, columns: int = 80) -> Iterator[None]:
    """In the folder of the run, at its time, on a machine of which everything is given."""
    before = Path.cwd()
    own = {
        "TR11_LOCAL_SCHEDULER": str(place.folder / "scheduler"), "TR11_LOCAL_NODES": "3", "TR11_NODE_NAME": "login1",
        "COLUMNS": str(columns), "HOME": str(place.folder / "home"), "PATH": str(place.folder / "bin"), "LANG": "C.UTF-8",
        "LOGNAME": "ana", "TZ": "UTC", "TR11_FALLBACK": str(place.folder / "fallback"),
    }  # fmt: skip
    with (
        patch.dict(os.environ, own, clear=True),
        time_machine.travel(place.when, tick=False),
        _file_system(),
    ):
        time.tzset()
        os.chdir(place.folder)
        mask = os.umask(0o022)
        try:
            yield
        finally:
            os.umask(mask)
            os.chdir(before)
    time.tzset()


@contextlib.contextmanager
def _file_system() -> Iterator[None]:
    """One with room, whose clock is that of the look."""
    from trainer.contract import lease

    asked = lease.file_system_time

    def told(folder: Path) -> tuple[float, float]:
        return time.time(), time.time()

    def give(old: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if getattr(module, "file_system_time", None) is old:
                module.file_system_time = new  # type: ignore[attr-defined]

    with patch("os.statvfs", lambda path: ROOM):
        give(asked, told)
        try:
            yield
        finally:
            give(told, asked)


def taken(place: Place, words: tuple[str, ...], columns: int = 80) -> str:
    """The text of a screen."""
    [entry] = importlib.metadata.entry_points(group="console_scripts", name="tr11")
    out, err, code = io.StringIO(), io.StringIO(), 0
    with terminal(place, columns), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            entry.load()(list(words))
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
    parts = [f"$ tr11 {shlex.join(words)}", plain(place, out.getvalue())]
    if err.getvalue():
        parts += ["--- standard error", plain(place, err.getvalue())]
    return "\n".join([*parts, f"--- exit code {code}", ""])


def mails(place: Place) -> str:
    """The mails that a look of the watchdog wants sent, as they wait for a mail server that is not
    there.
    """
    server = (
        "--set",
        "alerts.smtp_host=127.0.0.1",
        "--set",
        "alerts.smtp_port=9",
        "--set",
        "alerts.sender=tr11@example.org",
    )
    to = ("--set", 'alerts.recipients=["ana@example.org"]', "--set", "alerts.urls_file=")
    taken(place, ("pulse", "--no-act", *server, *to, *LOCAL))
    entries = [
        json.loads(path.read_text())
        for path in (place.state / "alerts" / "outbox").glob("*-mail.json")
    ]
    found = []
    for entry in sorted(entries, key=lambda entry: entry["message"]["id"]):
        message = entry["message"]
        found += [
            f"To: {', '.join(message['to'])}",
            f"Subject: {message['subject']}",
            "",
            message["body"],
            message["appendix"],
            "=" * 80,
        ]
    return plain(place, "\n".join(found)) + "\n"


class _Text(HTMLParser):
    """The words of a page, a line for each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._unread = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._unread += tag in {"style", "script"}

    def handle_endtag(self, tag: str) -> None:
        self._unread -= tag in {"style", "script"}

    def handle_data(self, data: str) -> None:
        if data.strip() and not self._unread:
            self.lines.append(" ".join(data.split()))


def plain(place: Place, text: str) -> str:
    """The text without what differs from machine to machine, and without blanks at the ends of
    lines.
    """
    if text.lower().startswith("<!doctype html"):
        page = _Text()
        page.feed(text)
        text = "\n".join(page.lines)
    text = text.replace(str(place.folder), NAMED).replace(str(ROOT), "/opt/tr11")
    text = text.replace(f"group {grp.getgrgid(os.getgid()).gr_name}:", "group GROUP:")
    text = re.sub(r"(tr11:[0-9-]+-[0-9a-f]{8})@[0-9a-f]{12}", r"\1@............", text)
    text = re.sub(r"\b(\d{8}-\d{6})-[0-9a-f]{8}\b", r"\1-........", text)
    text = re.sub(r"(ok  (?:python|packages)): .*(?:\n {10}.*)*", r"\1: ...", text)
    return "\n".join(line.rstrip() for line in text.splitlines())
