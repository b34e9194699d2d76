"""The commands of README and CONTRIBUTING exist with their options, and the first one comes early."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until
from tr11ops.cli import main

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("tr11 ")]


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_taken(line: str) -> None:
    _, name, *rest = shlex.split(line, comments=True)
    command = main.load(name)
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        name, *rest = rest
        command = command.commands[name]
    command.make_context(name, list(rest), parent=context)


def test_the_first_command_comes_within_a_screenful() -> None:
    before = README.partition("```sh")[0].splitlines()
    assert len(before) <= 30
    assert [
        name
        for name in ("init", "doctor", "data", "launch", "alerts", "cron", "status")
        if name not in README
    ] == []


def test_the_mails_of_a_trial_go_into_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As README says it, but for the port."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    said = README.replace("8025", port)
    (sink,) = re.findall(r"`(python -m aiosmtpd .*) > mails.txt`", said)
    (settings,) = re.findall(r"`(--set alerts.smtp_host=.*)` behind `tr11 init`", said)
    init = "init --preset toy --yes --scheduler local --mail you@example.org"
    assert main.execute([*init.split(), *settings.split()]) == 0
    mails = tmp_path / "mails.txt"
    command = [sys.executable, *sink.split()[1:]]
    with mails.open("w") as file, subprocess.Popen(command, stdout=file) as program:
        try:
            until(lambda: main.execute(["alerts", "test"]) == 0, "a server that takes mails")
            until(lambda: "Subject: [TEST]" in mails.read_text(), "the mail in the file")
        finally:
            program.terminate()
