"""One look of the alerts at the file systems alone, right after they were measured; all else is
left to the pulse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tr11ops.base.observed import Unknown, known
from tr11ops.detect.storage import filesystem_filling, filesystem_full
from tr11ops.observe.look import facts_of, observe
from tr11ops.rundir.disk_usage import Usage
from tr11ops.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from tr11ops.alerts.service import AlertOutcome
    from tr11ops.runcard.card import RunCard


def alert(
    directory: RunDirectory, card: RunCard, samples: Sequence[Usage], now: float, typed: str
) -> AlertOutcome:
    """Tell the alerts what these samples show, also where a full disk did not let them be kept."""
    from tr11ops.alerts.sending import Sender
    from tr11ops.alerts.service import process_some

    snapshot = observe(
        directory, facts_of(card, typed), Unknown("only the file systems were looked at"), now
    )
    earlier = (sample for sample in known(snapshot.operation.usage, ()) if sample.time < now)
    snapshot = replace(snapshot, operation=replace(snapshot.operation, usage=(*earlier, *samples)))
    findings = (*filesystem_full.detect(snapshot), *filesystem_filling.detect(snapshot))
    return process_some(Sender.of(directory, card, now, typed), findings)
