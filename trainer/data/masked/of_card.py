"""Which samples a run card's family of models is trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trainer.config.card import TrainerConfig
from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.data.dataset import NamedFields, Row, RowFormat, SampleSource, one_row
from trainer.data.index_cache import Arrays, MapsKey, digest_sizes
from trainer.data.indexed import IndexedDataset
from trainer.data.masked.rules import (
    BERT_SPECIAL_TOKENS,
    T5_SPECIAL_TOKENS,
    BertRules,
    Sample,
    T5Rules,
    Tokens,
    bert_sample,
    t5_sample,
)
from trainer.data.masked.sample_map import IntArray, MapRules, build_sample_map
from trainer.data.masked.vocabulary import MaskingVocabulary, masking_vocabulary
from trainer.data.tokenizer import TokenizerSpec, load_tokenizer

# BERT's and T5's samples by number: a map of sentences, and a generator of its own for each sample.

# Raised by one whenever the maths changes, so that nothing of older maths is found.
MAP_REVISION = 1


class SampleMapKey(MapsKey):
    """Everything that a sample map is a function of: the lengths of the sentences and the documents
    that they form.
    """

    parts = ("samples",)

    longest: int
    short_probability: float
    least_sentences: int
    documents_digest: str
    revision: int = MAP_REVISION

    @property
    def label(self) -> str:
        size = f"{self.samples}ns_{self.longest}msl_{self.short_probability:0.2f}ssp_{self.seed}s"
        return f"{self.data_set}_{self.name}_samplemap_{size}"

    @classmethod
    def of(
        cls, data: IndexedDataset, name: str, samples: int, documents: range, rules: MapRules
    ) -> SampleMapKey:
        """The key of some documents of a data set."""
        begins = np.asarray(data.documents[documents.start : documents.stop + 1])
        return cls(
            data_set=data.name,
            name=name,
            samples=samples,
            longest=rules.longest,
            short_probability=rules.short_probability,
            least_sentences=rules.least_sentences,
            seed=rules.seed,
            first_document=documents.start,
            end_document=documents.stop,
            sizes_digest=digest_sizes(data.sizes, range(int(begins[0]), int(begins[-1]))),
            documents_digest=hashlib.blake2b(
                begins.astype("<i8").tobytes(), digest_size=16
            ).hexdigest(),
        )

    def build(self, data: IndexedDataset) -> Arrays:
        rules = MapRules(self.longest, self.short_probability, self.least_sentences, self.seed)
        begins = np.asarray(data.documents[self.first_document : self.end_document + 1])
        return (build_sample_map(data.sizes, begins, samples=self.samples, rules=rules),)


class MaskedTask(Record):
    """What both kinds share. A split shares out documents, which are sequences of sentences."""

    seed: int
    short_probability: float
    vocabulary: MaskingVocabulary
    unit = "documents"

    @property
    def row(self) -> NamedFields:
        """The fields of a sample."""
        raise NotImplementedError

    @property
    def map_rules(self) -> MapRules:
        """How sentences become samples."""
        raise NotImplementedError

    def sample(self, sentences: list[Tokens], target: int, random: np.random.RandomState) -> Sample:
        """The fields of one sample."""
        raise NotImplementedError

    def units(self, data: IndexedDataset) -> int:
        """Documents."""
        return data.document_count

    def key(self, data: IndexedDataset, name: str, samples: int, units: range) -> SampleMapKey:
        """Of the sample map of some documents."""
        return SampleMapKey.of(data, name, samples, units, self.map_rules)

    def open(self, arrays: Arrays, samples: int, data: IndexedDataset) -> SampleSource:
        """The samples in the order of the map."""
        return MaskedDataset(data, arrays[0], self, samples)


class BertTask(MaskedTask):
    """Masked words, and of two segments which comes first."""

    rules: BertRules

    @property
    def row(self) -> NamedFields:
        """As `bert_sample` makes them."""
        names = ("text", "types", "labels", "loss_mask", "padding_mask")
        fields = tuple((name, self.rules.sequence_length) for name in names)
        return NamedFields((*fields, ("is_random", 0)), "padding_mask", ("loss_mask",))

    @property
    def map_rules(self) -> MapRules:
        """Two sentences or more where their order is learned."""
        longest = self.rules.sequence_length - BERT_SPECIAL_TOKENS
        return MapRules(
            longest, self.short_probability, 2 if self.rules.orders_sentences else 1, self.seed
        )

    def sample(self, sentences: list[Tokens], target: int, random: np.random.RandomState) -> Sample:
        """The fields of one sample."""
        return bert_sample(sentences, target, self.rules, vocabulary=self.vocabulary, random=random)


class T5Task(MaskedTask):
    """Runs of words that the decoder is to say."""

    rules: T5Rules

    @property
    def row(self) -> NamedFields:
        """As `t5_sample` makes them."""
        encoder = self.rules.sequence_length
        decoder = self.rules.decoder_sequence_length
        fields = (
            ("text_enc", encoder),
            ("text_dec", decoder),
            ("labels", decoder),
            ("loss_mask", decoder),
            ("enc_mask", encoder),
            ("dec_mask", decoder),
        )
        return NamedFields(fields, "enc_mask", ("loss_mask",))

    @property
    def map_rules(self) -> MapRules:
        """Any number of sentences."""
        return MapRules(
            self.rules.sequence_length - T5_SPECIAL_TOKENS, self.short_probability, 1, self.seed
        )

    def sample(self, sentences: list[Tokens], target: int, random: np.random.RandomState) -> Sample:
        """The fields of one sample."""
        return t5_sample(sentences, target, self.rules, vocabulary=self.vocabulary, random=random)


@dataclass
class MaskedDataset:
    """Samples of one data set, or of a range of its documents, in the order of their map. See
    `sample_map`.
    """

    tokens: IndexedDataset
    rows: IntArray
    task: MaskedTask
    samples: int

    def __post_init__(self) -> None:
        self.prefix = self.tokens.prefix
        self.row: RowFormat = self.task.row
        self._places = self.task.row.slices()

    def __len__(self) -> int:
        return self.samples

    def fields(self, index: int) -> Sample:
        """Sample `index`, its fields by name. Its masking depends on the seed and its number alone."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        first, end, target = self.rows[index].tolist()
        sentences = [self.tokens.get(number) for number in range(first, end)]
        random = np.random.RandomState((self.task.seed + index) % (1 << 32))
        return self.task.sample(sentences, target, random)

    def read(self, index: int, out: Row) -> None:
        """Write sample `index` into `out` [row.length]."""
        fields = self.fields(index)
        for name, place in self._places.items():
            out[place] = fields[name]

    def documents_of(self, index: int) -> list[int]:
        """The document of the data set that sample `index` is from."""
        return [
            int(np.searchsorted(self.tokens.documents, int(self.rows[index][0]), side="right")) - 1
        ]

    def __getitem__(self, index: int) -> Row:
        return one_row(self, index)


def masked_task(config: TrainerConfig) -> MaskedTask | None:
    """How samples are made for a family that is trained on masked words; None for a GPT.

    Reads the tokenizer's files. Raises DataError: no WordPiece vocabulary, or more ids than rows of
    the embedding.
    """
    make = _MAKERS.get(config.model.family)
    if make is None:
        return None
    return make(config)


def _bert(config: TrainerConfig) -> BertTask:
    data = config.data
    return BertTask(
        seed=config.run.seed,
        short_probability=data.short_sequence_probability,
        vocabulary=_vocabulary(config),
        rules=BertRules(config.model.sequence_length, data.mask_probability, data.binary_head),
    )


def _t5(config: TrainerConfig) -> T5Task:
    data = config.data
    model = config.model
    return T5Task(
        seed=config.run.seed,
        short_probability=data.short_sequence_probability,
        vocabulary=_vocabulary(config, data.extra_ids),
        rules=T5Rules(model.sequence_length, model.decoder_sequence_length, data.mask_probability),
    )


def _vocabulary(config: TrainerConfig, extra_ids: int = 0) -> MaskingVocabulary:
    named = config.tokenizer
    rows = config.tokenizer.padded_vocabulary_size
    spec = TokenizerSpec(named.type, named.path, named.vocabulary_file, named.merges_file)
    vocabulary = masking_vocabulary(load_tokenizer(spec), extra_ids)
    if vocabulary.size > rows:
        raise DataError(
            f"the vocabulary has {vocabulary.size} ids with those that masked training adds, and"
            f" tokenizer.padded_vocabulary_size is {rows}: set it to {vocabulary.size} or more"
        )
    return vocabulary


_MAKERS: dict[str, Callable[[TrainerConfig], MaskedTask]] = {"bert": _bert, "t5": _t5}
