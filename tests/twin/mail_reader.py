"""The person on call who only reads mails, and types what they say."""

from __future__ import annotations

import subprocess

import pytest

from tests.twin.runbook_mails import ASKS, commands_of
from tests.twin.small_run import SmallRun
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Alert, Message
from tr11ops.alerts.store import read_alert_state
from tr11ops.cli.main import execute
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.paths import RunDirectory


class Reader:
    """The person on call: reads what was mailed, and types."""

    def __init__(self, stage: SmallRun, capture: pytest.CaptureFixture[str]) -> None:
        self.stage, self.capture = stage, capture

    @property
    def directory(self) -> RunDirectory:
        """Where alerts are kept at this moment: on this machine's own disk while the run's is full."""
        return existing_fallback(self.stage.directory) or self.stage.directory

    def mails(self) -> list[Message]:
        return list(
            {entry.message.id: entry.message for entry in waiting_entries(self.directory)}.values()
        )

    def wait_for(self, subject: str, detector: str = "") -> Message:
        """The mail that the watchdog's looks bring, of a subject that begins so, about this
        detector's finding.
        """
        found: list[Message] = []

        def has_come() -> bool:
            execute(["pulse"])
            alerts = read_alert_state(self.directory).alert_state.alerts
            names = {alert.fingerprint for alert in alerts if detector in {"", *alert.detectors}}
            found[:] = [
                mail
                for mail in self.mails()
                if mail.subject.startswith(subject) and names & set(mail.alerts)
            ]
            return bool(found)

        self.stage.wait(has_come, f"the mail {subject} of {detector}")
        return found[-1]

    def about(self, mail: Message, detector: str) -> Alert:
        """The alert about this detector's finding: on a busy machine a mail may tell of others
        beside it.
        """
        alerts = read_alert_state(self.directory).alert_state.alerts
        return next(
            one for one in alerts if detector in one.detectors and one.fingerprint in mail.alerts
        )

    def first_command(self, mail: Message, detector: str) -> str:
        """The first command to type about this detector's finding, in the folder that the mail
        names.
        """
        enter_folder = f"cd {self.stage.folder}"
        is_alone = len(mail.alerts) == 1
        first, *others = commands_of(mail.body, self.about(mail, detector), is_alone)
        if is_alone:
            assert first == enter_folder
            return others[0]
        return first.removeprefix(f"{enter_folder} && ")

    def types(self, command: str, expect: int = 0) -> str:
        """Typed once; where it shows its plan and asks, the answer is yes."""
        self.capture.readouterr()
        words = command.split()
        if words[0] != "tr11":
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout
        code = execute(words[1:])
        out, err = self.capture.readouterr()
        if ASKS in err + out:
            code = execute([*words[1:], "--yes"])
            out, err = self.capture.readouterr()
        assert code == expect, (command, out, err)
        return out
