"""Several documents in one sample: where each begins, found from the token that ends a document.

The token that ends a document belongs to it. The numbers travel through the pipeline beside the
hidden states, as integers, and only when a rule needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from trainer.config.card import DataSection
from trainer.contract.record import Record

Stream = Tensor | tuple[Tensor, Tensor]
"""What flows between layers: hidden states, or (hidden states, document numbers)."""

IGNORED = -100
"""A label that does not count."""


class DocumentRules(Record):
    """What a document's start resets. `end_id`: the token that ends a document."""

    end_id: int
    reset_positions: bool
    reset_attention: bool

    @classmethod
    def of(cls, data: DataSection) -> DocumentRules | None:
        """The rules of a card that the model must know; None when it need not know documents."""
        if data.end_of_document_id is None or not (
            data.reset_position_ids or data.reset_attention_mask
        ):
            return None
        return cls(data.end_of_document_id, data.reset_position_ids, data.reset_attention_mask)


def document_numbers(tokens: Tensor, end_id: int) -> Tensor:
    """Per token [batch, sequence]: how many documents of the sample ended before it; int32."""
    ends = tokens == end_id
    return (ends.cumsum(dim=1) - ends.long()).to(torch.int32)


def positions_in_documents(documents: Tensor) -> Tensor:
    """Per token [batch, sequence]: its distance from the first token of its document; int64."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.zeros_like(place)
    begins[:, 1:] = torch.where(documents[:, 1:] != documents[:, :-1], place[:, 1:], 0)
    return place - begins.cummax(dim=1).values


def labels_without_ends(tokens: Tensor, labels: Tensor, end_id: int) -> Tensor:
    """The labels, IGNORED where the input is a document's end: what follows it cannot be known."""
    return labels.masked_fill(tokens == end_id, IGNORED)


def hidden_of(stream: Stream) -> tuple[Tensor, Tensor | None]:
    """Take a stream apart: hidden states and, if they travel with it, document numbers."""
    if isinstance(stream, tuple):
        return stream
    return (stream, None)


def joined(hidden: Tensor, documents: Tensor | None) -> Stream:
    """The inverse of `hidden_of`."""
    if documents is None:
        return hidden
    return (hidden, documents)


def passes_documents(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Stream], Any]:
    """Let a layer that needs only the hidden states take a whole stream, and hand the document
    numbers on.
    """

    @wraps(forward)
    def on_stream(layer: Any, stream: Stream) -> Stream:
        hidden, documents = hidden_of(stream)
        return joined(forward(layer, hidden), documents)

    return on_stream
