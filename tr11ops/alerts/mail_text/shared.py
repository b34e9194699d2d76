"""What all messages share: clean lines, moments, places, commands. Plain text that carries no
secret.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tr11ops.alerts.policy import Policy
from tr11ops.base.invocation import command_for
from tr11ops.base.redact import redact
from tr11ops.base.units import plain, timestamp
from trainer.contract.units import shortened

LONGEST_SUBJECT = 110
MOST_READ = 10_000  # characters of a text: secrets are looked for in all of it


def clean(text: str, most: int) -> str:
    """One line of at most `most` characters, without control characters and without what looks like
    a secret; `shortened` where it is longer.
    """
    return shortened(redact(plain(text[:MOST_READ], unicode=True).strip()), most)


def moment(seconds: float, policy: Policy) -> str:
    """A point of time as people read it, with the zone."""
    return timestamp(seconds, policy.zone)


def message_identity(name: str, policy: Policy) -> str:
    """The Message-ID of a message: the same no matter who makes it, and known as this run's when it
    is replied to.
    """
    return f"<{name}@{policy.domain}>"


def place(policy: Policy) -> Iterator[str]:
    """Of which run this is, and from which machine."""
    yield f"Run:      {policy.run}, {policy.directory}"
    where = f"Where:    host {policy.host}"
    if policy.folder:
        where += f", in {policy.folder}"
    yield where


def enter(policy: Policy) -> Iterator[str]:
    """A card that is named by a relative path or ships with tr11 means the run only in the folder
    of its commands.
    """
    if policy.folder:
        yield f"  cd {shlex.quote(policy.folder)}"


def from_anywhere(text: str, policy: Policy) -> str:
    """A command of tr11 on one line that means this run in whatever folder it is pasted; another's
    as it is.
    """
    if not policy.folder or not text.startswith("tr11 "):
        return text
    return f"cd {shlex.quote(policy.folder)} && {text}"


def command(words: str, policy: Policy) -> str:
    """A `tr11 alerts` command for this run."""
    return command_for(policy.typed, f"alerts {words}")
