"""Which layers a `type:REGEX` partition counts when it deals them to pipeline stages. Pure."""

from __future__ import annotations

import re

from trainer.contract.record import Record

# Names of the classes that the engine deals, by which DeepSpeed counts. The head is the embedding again.
EMBEDDING, BLOCK = "VocabularyParallelEmbedding", "TransformerBlock"
OTHERS = ("LearnedPositions", "LayerNorm", "RMSNorm", "Dropout", "TokenTypes", "PretrainingHeads")


class Units(Record):
    """`ends`: the embedding and the head weigh 1 each. `blocks`: each transformer block does."""

    ends: bool
    blocks: bool

    def total(self, layers: int) -> int:
        return layers * self.blocks + 2 * self.ends


def units_of(partition: str) -> Units | None:
    """What the partition counts; None for one that is no `type:REGEX`, or that counts other layers too.

    As DeepSpeed reads it: in lower case, what stands between the first colon and the next.
    """
    if not partition.lower().startswith("type:"):
        return None
    expression = partition.lower().split(":")[1]
    ends, blocks, *others = (
        re.search(expression, name, re.IGNORECASE) is not None for name in (EMBEDDING, BLOCK, *OTHERS)
    )
    return None if any(others) else Units(ends, blocks)
