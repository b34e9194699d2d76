"""The training printed a secret: anyone who reads the log has it. What was published is masked, the
log here is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from tr11ops.base.observed import Unknown
from tr11ops.base.units import duration
from tr11ops.detect.finding import Finding, Severity
from tr11ops.observe import derived
from tr11ops.observe.snapshot import Snapshot

BOUND = "at once, until `tr11 sync --revoked`"
SEVERITIES = "WARNING"
NAME = "secret-in-log"
NEEDS = ("operation.sync",)


def detect(snapshot: Snapshot) -> Iterator[Finding]:
    """WARNING, one for each file and kind of secret, until a person says that it is revoked."""
    sync = snapshot.operation.sync
    if sync is None or isinstance(sync, Unknown):
        return
    for secret in sync.secrets:
        if secret.revoked is None:
            yield Finding(
                NAME,
                Severity.WARNING,
                f"the training printed a secret: {secret.kind}",
                subject=secret.path,
                evidence=(
                    f"{secret}, found {duration(max(0.0, snapshot.time - secret.time))} ago",
                    "it is masked at the hub; everyone who reads the log here has it",
                ),
                fix=derived.command(snapshot, "sync --revoked"),
                identity=(secret.path, secret.kind),
            )
