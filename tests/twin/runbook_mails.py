"""What the mail about a fault says to type, taken from the mail itself, and typed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.state import Alert
from tr11ops.alerts.store import read_alert_state

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
        before = body.partition(f"   Alert: {alert.fingerprint}\n")[0]
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
