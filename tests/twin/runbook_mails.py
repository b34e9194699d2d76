"""What the mail about a fault says to type, taken from the mail itself, and typed; and the person on call
who does nothing else.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.twin.small_run import SmallRun
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Alert, Message
from tr11ops.alerts.store import read_alert_state
from tr11ops.cli.main import execute
from tr11ops.rundir.fallback import existing_fallback
from tr11ops.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from tests.twin.runbook_scene import Scene


# No one answers at this port: what is mailed stays in the outbox.
MAILS = (
    'alerts.recipients=["oncall@example.org"]',
    'alerts.smtp_host="127.0.0.1"',
    "alerts.smtp_port=9",
)
LOOKS = {  # detectors whose mail can only say where to look, and why nothing more
    "slow": "which node it is, is not known: slow-node has the cure",
    "loss-spike": "a spike that comes back needs nothing",
    "gradient-norm": "a spike that comes back needs nothing",
    "validation-loss-rises": "whether it is the data or the learning rate, both courses tell",
    "limit-changed": "it saves; who changed the limit may change it back",
    "directory-unseen": "the run directory's file system must be mounted",
    "switch-unseen": "the kill switch's file system must be mounted",
    "waits-for-site": "the site opens it again",
    "queued-too-long": "nodes-short has the cure where the run itself keeps nodes off",
    "check-failing": "the site repairs its script, and the next attempt makes the check again",
}
ASKS = "add --yes"
FINDS = ("tr11 diagnose", "tr11 doctor")
_STEP = re.compile(r"^   (?:If tr11 fails, type|Type|Then): (.*)$", re.MULTILINE)


def mailed_commands(scene: Scene, detectors: Collection[str]) -> list[str]:
    """The commands of the mails that a look of the watchdog writes now about findings of these
    detectors; none where they do not tell of all of them.

    As one gets them who has heard of nothing yet. What is merely worth knowing has no mail.
    """
    shutil.rmtree(scene.paths.state / "alerts", ignore_errors=True)
    scene.shell("tr11 pulse", (0, 1, 3))
    bodies = [entry.message for entry in waiting_entries(scene.directory)]
    found: list[str] = []
    told: set[str] = set()
    for alert in read_alert_state(scene.directory).alert_state.open_alerts:
        if not set(alert.detectors) & set(detectors):
            continue
        for message in bodies:
            if alert.fingerprint in message.alerts:
                told.update(alert.detectors)
                found += commands_of(message.body, alert, is_alone=len(message.alerts) == 1)
    if not told.issuperset(detectors):
        return []
    return list(dict.fromkeys(found))


def commands_of(body: str, alert: Alert, is_alone: bool) -> Iterator[str]:
    """What a mail says to type for an alert: below `Type:` where it is alone in the mail, else in
    its own part.
    """
    if not is_alone:
        before = re.split(rf"   Alert: {alert.fingerprint}-\w+\n", body)[0]
        yield from _STEP.findall(before.rpartition("   Alert: ")[2])
        return
    lines = iter(body.splitlines())
    for line in lines:
        if re.fullmatch(
            r"Type:|Type nothing now. Only if that fails:|When it is repaired, type:", line
        ):
            break
    for line in lines:
        if not line:
            return
        if line.startswith("  "):
            yield line.strip()


def pairs(mailed: Collection[str], page: str, folder: Path) -> list[tuple[str, str]]:
    """Each command of a mail with the page's that is the same but for consent and reason; nothing
    where they differ in more.
    """
    enter = f"cd {folder}"
    typed = [command.removeprefix(f"{enter} && ") for command in mailed if command != enter]
    if [_plain(command) for command in typed] != [_plain(line) for line in page.splitlines()]:
        return []
    return list(zip(typed, page.splitlines(), strict=True))


def _plain(command: str) -> list[str]:
    """The words of a command but those by which it is consented to, and for what reason."""
    words = shlex.split(command)
    if "--reason" in words:
        place = words.index("--reason")
        del words[place : place + 2]
    return [word for word in words if word != "--yes"]


def type_them(scene: Scene, commands: Collection[str], expect: tuple[int, ...] = (0,)) -> str:
    """Type commands one after another, and say yes to what asks; what they said."""
    said = ""
    for command in commands:
        # they say by it that something is to be done
        looks = (1,) if command.rpartition("&& ")[2].startswith(FINDS) else ()
        told = scene.shell(f"{{ {command} ; }} 2>&1", (*expect, *looks, 2))
        if ASKS in told:
            told = scene.shell(f"{{ {command} --yes ; }} 2>&1", expect)
        said += told
    return said


# ---------------------------------------------------------------------------
# The person on call who only reads mails, and types what they say.


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
