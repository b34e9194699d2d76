"""What a run's past says of one checkpoint, for the card of the model that is published from it.
Pure.
"""

from __future__ import annotations

from tr11ops.base.observed import Unknown
from tr11ops.goodput.account import Goodput
from tr11ops.goodput.history_values import History
from tr11ops.hub.model_card import TrainingHistory
from trainer.contract.manifest import Manifest


def past_until(
    history: History | None, goodput: Goodput | None, manifest: Manifest
) -> TrainingHistory:
    """How the training went until the checkpoint was saved; what cannot be read is unknown."""
    saved = manifest.created
    if history is None or goodput is None or isinstance(history.attempts, Unknown):
        return TrainingHistory(saved=saved)
    attempts = [attempt for attempt in history.attempts if attempt.start <= saved]
    if not attempts:  # a checkpoint that this run did not train, as an imported one
        return TrainingHistory(saved=saved)
    until = goodput.between(goodput.begin, saved)
    return TrainingHistory(
        begun=min(attempt.start for attempt in attempts),
        saved=saved,
        goodput=until.useful_of_held,
        node_hours=until.total.held_hours or None,
        attempts=len(attempts),
        faults=len(until.faults),
    )
