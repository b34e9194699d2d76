"""What masking needs to know of a WordPiece vocabulary: its special tokens, and which pieces
continue a word.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError
from trainer.contract.record import Record

if TYPE_CHECKING:
    from trainer.data.tokenizer import Tokenizer  # which workers do without

CONTINUATION = "##"
NEEDED = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
SENTINEL = "<extra_id_{}>"


class MaskingVocabulary(Record, dict=True):
    """Ids. `size` counts every id, added ones too; `continuations`: one bit for each id that
    continues a word.

    Begin, end and sentinels that the vocabulary does not have take the ids behind its last one, in
    this order, as in Megatron. Small, and can be sent between processes.
    """

    size: int
    cls: int
    sep: int
    mask: int
    pad: int
    begin: int
    end: int
    sentinels: tuple[int, ...]
    continuations: bytes

    @cached_property
    def continues(self) -> npt.NDArray[np.bool_]:
        """Whether an id continues a word [size]."""
        bits = np.unpackbits(np.frombuffer(self.continuations, dtype=np.uint8), count=self.size)
        return bits.astype(np.bool_)

    @property
    def added(self) -> dict[int, str]:
        """Names of begin, end and sentinels by their ids, which the tokenizer may not have."""
        sentinels = {number: SENTINEL.format(place) for place, number in enumerate(self.sentinels)}
        return {self.begin: "[BOS]", self.end: "[EOS]", **sentinels}


def masking_vocabulary(tokenizer: Tokenizer, extra_ids: int = 0) -> MaskingVocabulary:
    """The vocabulary of a WordPiece tokenizer, with `extra_ids` sentinels.

    Raises DataError when a special token that masking needs is missing.
    """
    known = tokenizer.vocabulary()
    missing = [token for token in NEEDED if token not in known]
    if missing:
        raise DataError(
            f"{tokenizer.path} has no {', '.join(missing)}: masked training needs a WordPiece vocabulary; set"
            ' tokenizer.type = "bert_wordpiece_lower" and tokenizer.vocabulary_file to one'
        )
    size = tokenizer.vocabulary_size
    ids: dict[str, int] = {}
    for token in ("[BOS]", "[EOS]", *(SENTINEL.format(number) for number in range(extra_ids))):
        ids[token] = known.get(token, size)
        size += token not in known
    continues = np.zeros(size, dtype=np.bool_)
    continues[[number for token, number in known.items() if token.startswith(CONTINUATION)]] = True
    return MaskingVocabulary(
        size=size,
        cls=known["[CLS]"],
        sep=known["[SEP]"],
        mask=known["[MASK]"],
        pad=known["[PAD]"],
        begin=ids["[BOS]"],
        end=ids["[EOS]"],
        sentinels=tuple(ids[SENTINEL.format(number)] for number in range(extra_ids)),
        continuations=np.packbits(continues).tobytes(),
    )
