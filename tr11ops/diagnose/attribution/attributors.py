"""Why a launch ended, and which node is to blame: pure conclusions from what the launch left
behind.

Each attributor reads one kind of evidence and returns its conclusion, or None where that evidence
says nothing. The most confident one wins, the earlier one on a tie; so a further source of evidence
is one more function in the list.
"""

from __future__ import annotations

from collections.abc import Callable

from tr11ops.base.redact import signature
from tr11ops.diagnose.attribution.by_machines import (
    by_health,
    by_lost_host,
    by_lost_machine,
    by_node_state,
    by_operator,
    by_port,
    by_refusal,
    by_unwritable,
)
from tr11ops.diagnose.attribution.by_workers import (
    by_agreement,
    by_awaited,
    by_death,
    by_error,
    by_first_exit,
    by_first_missed,
    by_last_words,
    by_launcher,
    by_lost_peer,
    by_silence,
    by_step_codes,
)
from tr11ops.diagnose.attribution.evidence import (
    Attribution,
    Evidence,
    Kind,
)

Attributor = Callable[[Evidence], Attribution | None]
ATTRIBUTORS: tuple[Attributor, ...] = (
    by_operator,
    by_node_state,
    by_lost_machine,
    by_lost_host,
    by_health,
    by_refusal,
    by_unwritable,
    by_last_words,
    by_death,
    by_port,
    by_agreement,
    by_error,
    by_launcher,
    by_first_exit,
    by_awaited,
    by_lost_peer,
    by_silence,
    by_first_missed,
    by_step_codes,
)


def attribute(evidence: Evidence) -> Attribution:
    """The most confident conclusion; UNKNOWN, with what there is to quote, where no attributor has
    one.
    """
    found = [
        conclusion for attributor in ATTRIBUTORS if (conclusion := attributor(evidence)) is not None
    ]
    if found:
        return max(found, key=lambda conclusion: conclusion.confidence)
    quoted = tuple(str(one) for one in sorted(evidence.failures, key=lambda one: one.time)[:3])
    quoted += tuple(line.text for line in evidence.srun[:3])
    if quoted:
        summary = quoted[0]
    else:
        summary = f"the workers ended with status {evidence.status} and no word"
    return Attribution(
        Kind.UNKNOWN, summary, 0.3, evidence=quoted, fault=f"unknown: {signature(summary)}"
    )
