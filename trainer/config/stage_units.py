"""Which layers a `type:REGEX` partition counts when it deals them to pipeline stages. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.contract.record import Record

# Names of the classes that the engine deals, by which DeepSpeed counts. The head is the embedding
# again.
EMBEDDING, BLOCK = "VocabularyParallelEmbedding", "TransformerBlock"
OTHERS = ("LearnedPositions", "LayerNorm", "RMSNorm", "Dropout", "TokenTypes", "PretrainingHeads")


class Units(Record):
    """`ends`: the embedding and the head weigh 1 each. `blocks`: each transformer block does."""

    ends: bool
    blocks: bool

    def total(self, layers: int) -> int:
        return layers * self.blocks + 2 * self.ends


def units_of(partition: str) -> Units | None:
    """What the partition counts; None for one that is no `type:REGEX`, or that counts other layers
    too.

    As DeepSpeed reads it: in lower case, what stands between the first colon and the next.
    """
    if not partition.lower().startswith("type:"):
        return None
    expression = partition.lower().split(":")[1]
    ends, blocks, *others = (
        re.search(expression, name, re.IGNORECASE) is not None
        for name in (EMBEDDING, BLOCK, *OTHERS)
    )
    if any(others):
        return None
    return Units(ends, blocks)


UNCUT_FAMILIES = ("t5",)
"""Of whose two sequences, side by side in one tensor, no rank could have an even stretch."""


def is_cut_by_default(
    parallel: Mapping[str, Any], model: Mapping[str, Any], curriculum: Mapping[str, Any]
) -> bool:
    """Sequence parallelism of a card without `parallel.sequence_parallel`, given its sections as
    plain keys.

    False too where a value is of a wrong kind, which the schema refuses.
    """
    tensor = parallel.get("tensor", 1)
    if type(tensor) is not int or tensor < 2 or model.get("partition_activations") is True:
        return False
    if model.get("family") in UNCUT_FAMILIES:
        return False
    return next(uneven_lengths(tensor, model, curriculum), None) is None


def uneven_lengths(
    tensor: int, model: Mapping[str, Any], curriculum: Mapping[str, Any]
) -> Iterator[tuple[str, str, object]]:
    """Section, key and value of the lengths that `tensor` ranks cannot cut evenly."""
    lengths: list[tuple[str, str, Any]] = [
        ("model", "sequence_length", model.get("sequence_length"))
    ]
    if curriculum.get("kind") == "discrete":
        given = curriculum.get("lengths")
        lengths += [
            ("curriculum", "lengths", item)
            for item in (given if isinstance(given, list) else [given])
        ]
    elif curriculum:
        lengths.append(("curriculum", "step", curriculum.get("step", 8)))
    return (entry for entry in lengths if type(entry[2]) is not int or entry[2] % tensor)


def sends_shares(pipeline: int, tensor: int, sequence_parallel: bool, hidden_size: int) -> bool:
    """Whether each tensor rank sends the next stage a share of the hidden states: all hold the
    same, in any length.
    """
    return pipeline > 1 and tensor > 1 and not sequence_parallel and hidden_size % tensor == 0
