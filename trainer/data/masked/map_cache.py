"""Sample maps on disk, in the manner of a GPT's index maps."""

from __future__ import annotations

import hashlib

import numpy as np

from trainer.data.array_cache import CacheKey, key_digest
from trainer.data.index_cache import digest_sizes
from trainer.data.indexed import IndexedDataset
from trainer.data.masked.sample_map import IntArray, MapRules, build_sample_map

# Raised by one whenever the maths changes, so that nothing of older maths is found.
MAP_REVISION = 1
MAP_PARTS = ("samples",)


class SampleMapKey(CacheKey):
    """Everything that a sample map is a function of: the lengths of the sentences and the documents that they form."""

    data_set: str
    name: str
    samples: int
    longest: int
    short_probability: float
    least_sentences: int
    seed: int
    first_document: int
    end_document: int
    sizes_digest: str
    documents_digest: str
    revision: int = MAP_REVISION

    @property
    def stem(self) -> str:
        """Beginning of the files' names: readable parts, then a digest of all of the key."""
        size = f"{self.samples}ns_{self.longest}msl_{self.short_probability:0.2f}ssp_{self.seed}s"
        return f"{self.data_set}_{self.name}_samplemap_{size}_{key_digest(self)}"

    @classmethod
    def of(cls, data: IndexedDataset, name: str, samples: int, documents: range, rules: MapRules) -> SampleMapKey:
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
            documents_digest=hashlib.blake2b(begins.astype("<i8").tobytes(), digest_size=16).hexdigest(),
        )

    def build(self, data: IndexedDataset) -> IntArray:
        """The map. Raises DataError when no document can be used."""
        rules = MapRules(self.longest, self.short_probability, self.least_sentences, self.seed)
        begins = np.asarray(data.documents[self.first_document : self.end_document + 1])
        return build_sample_map(data.sizes, begins, samples=self.samples, rules=rules)
