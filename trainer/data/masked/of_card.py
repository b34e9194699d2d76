"""Which samples a run card's family of models is trained on."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config.card import TrainerConfig
from trainer.contract.errors import DataError
from trainer.data.masked.bert import BertRules
from trainer.data.masked.t5 import T5Rules
from trainer.data.masked.task import BertTask, MaskedTask, T5Task
from trainer.data.masked.vocabulary import MaskingVocabulary, masking_vocabulary
from trainer.data.tokenizer import TokenizerSpec, load_tokenizer


def masked_task(config: TrainerConfig) -> MaskedTask | None:
    """How samples are made for a family that is trained on masked words; None for a GPT.

    Reads the tokenizer's files. Raises DataError: no WordPiece vocabulary, or more ids than rows of the embedding.
    """
    make = _MAKERS.get(config.model.family)
    return None if make is None else make(config)


def _bert(config: TrainerConfig) -> BertTask:
    data = config.data
    return BertTask(
        seed=config.run.seed,
        short_probability=data.short_sequence_probability,
        vocabulary=_vocabulary(config),
        rules=BertRules(config.model.sequence_length, data.mask_probability, data.binary_head),
    )


def _t5(config: TrainerConfig) -> T5Task:
    data, model = config.data, config.model
    return T5Task(
        seed=config.run.seed,
        short_probability=data.short_sequence_probability,
        vocabulary=_vocabulary(config, data.extra_ids),
        rules=T5Rules(model.sequence_length, model.decoder_sequence_length, data.mask_probability),
    )


def _vocabulary(config: TrainerConfig, extra_ids: int = 0) -> MaskingVocabulary:
    named, rows = config.tokenizer, config.tokenizer.padded_vocabulary_size
    spec = TokenizerSpec(named.type, named.path, named.vocabulary_file, named.merges_file)
    vocabulary = masking_vocabulary(load_tokenizer(spec), extra_ids)
    if vocabulary.size > rows:
        raise DataError(
            f"the vocabulary has {vocabulary.size} ids with those that masked training adds, and"
            f" tokenizer.padded_vocabulary_size is {rows}: set it to {vocabulary.size} or more"
        )
    return vocabulary


_MAKERS: dict[str, Callable[[TrainerConfig], MaskedTask]] = {"bert": _bert, "t5": _t5}
