"""Does the node's clock agree with the batch controller's? Logs and leases are compared by time."""

from __future__ import annotations

from tr11ops.base.errors import Unanswered
from tr11ops.health.base import Answer, CheckOutcome, NodeRequirements, System

BEHIND_DOUBTFUL, BEHIND_BAD = 2.0, 60.0
# starting the agent takes its time too, on a loaded cluster minutes
AHEAD_DOUBTFUL, AHEAD_BAD = 300.0, 3600.0


def check(system: System, wanted: NodeRequirements) -> Answer:
    """Bad when the clock is a minute behind, or an hour ahead: what lies between asking and
    answering looks ahead.
    """
    if wanted.controller_time is None:
        raise Unanswered("the controller's time was not given")
    ahead = system.now() - wanted.controller_time
    told = f"{abs(ahead):.1f} s {'ahead of' if ahead >= 0 else 'behind'} the controller"
    if ahead < -BEHIND_BAD or ahead > AHEAD_BAD:
        return CheckOutcome.BAD, told
    if ahead < -BEHIND_DOUBTFUL or ahead > AHEAD_DOUBTFUL:
        return CheckOutcome.WARNING, told
    return CheckOutcome.FINE, f"{told} (starting included)" if ahead > 1 else told
