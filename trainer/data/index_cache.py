"""Index maps and the order of mixtures on disk: computed by one rank, named after everything they
depend on.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.array_cache import APPEARANCE_SECONDS, ArrayCache, CacheKey, key_digest
from trainer.data.blend import build_blend
from trainer.data.index import LAST_EPOCH_SHARE, IndexMaps, build_index_maps

# Raised by one whenever the maths changes, so that nothing of older maths is found.
MAPS_REVISION = 1
BLEND_REVISION = 1
PARTS = ("doc", "sample", "shuffle")
BLEND_PARTS = ("set", "number")

Blend = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class IndexMapsKey(CacheKey):
    """Everything that index maps are a function of.

    `sizes_digest` stands for the data: the maps depend on nothing of it but the lengths of the
    documents in the range.
    """

    data_set: str
    name: str
    samples: int
    sequence_length: int
    seed: int
    first_document: int
    end_document: int
    sizes_digest: str
    last_epoch_share: float = LAST_EPOCH_SHARE
    revision: int = MAPS_REVISION

    @property
    def stem(self) -> str:
        """Beginning of the files' names: readable parts, then a digest of all of the key."""
        size = f"{self.samples}ns_{self.sequence_length}sl_{self.seed}s"
        return f"{self.data_set}_{self.name}_indexmap_{size}_{key_digest(self)}"


class BlendKey(CacheKey):
    """Everything that the order of a mixture is a function of: the weights, in their order, and its
    length.
    """

    name: str
    weights: tuple[float, ...]
    samples: int
    revision: int = BLEND_REVISION

    @property
    def stem(self) -> str:
        """Beginning of the files' names: readable parts, then a digest of all of the key."""
        return f"{self.name}_blend_{len(self.weights)}sets_{self.samples}ns_{key_digest(self)}"


def digest_sizes(sizes: npt.NDArray[Any], documents: range) -> str:
    """Digest of the lengths of a range of documents (little-endian int32), whatever type they are
    stored in.
    """
    digest = hashlib.blake2b(digest_size=16)
    for first in range(documents.start, documents.stop, 1 << 20):
        block = sizes[first : min(first + (1 << 20), documents.stop)]
        digest.update(np.asarray(block).astype("<i4").tobytes())
    return digest.hexdigest()


class IndexMapsCache:
    """Index maps in one folder."""

    def __init__(self, folder: Path | str) -> None:
        self.files = ArrayCache(Path(folder))

    def load(self, key: IndexMapsKey, check_digests: bool) -> IndexMaps | None:
        """The memory-mapped maps; None when they are absent or damaged in any way, and so must be
        built.
        """
        found = self.files.load(key, PARTS, check_digests)
        if found is None:
            return None
        return IndexMaps(*found)

    def ensure(self, key: IndexMapsKey, sizes: npt.NDArray[Any]) -> bool:
        """Build the maps unless sound ones are there; True when they were built. For the one rank
        that builds.

        Raises DataError when the data or the disk does not allow it.
        """
        if self.load(key, check_digests=True) is not None:
            return False
        maps = build_index_maps(
            sizes,
            range(key.first_document, key.end_document),
            samples=key.samples,
            sequence_length=key.sequence_length,
            seed=key.seed,
            last_epoch_share=key.last_epoch_share,
        )
        self.files.write(
            key, dict(zip(PARTS, (maps.documents, maps.samples, maps.shuffle), strict=True))
        )
        return True

    def wait(self, key: IndexMapsKey, seconds: float = APPEARANCE_SECONDS) -> IndexMaps:
        """The maps that the builder made. Raises DataError when they do not appear in time."""
        return IndexMaps(*self.files.wait(key, PARTS, seconds))


def ensure_blend(folder: Path, key: BlendKey) -> bool:
    """Compute the order of a mixture unless a sound one is there; True when it was computed. Raises
    DataError.

    That of a long training takes half a minute to compute, and no time to map.
    """
    files = ArrayCache(folder)
    if files.load(key, BLEND_PARTS, check_digests=True) is not None:
        return False
    files.write(key, dict(zip(BLEND_PARTS, build_blend(key.weights, key.samples), strict=True)))
    return True


def wait_for_blend(folder: Path, key: BlendKey) -> Blend:
    """For each sample the member and its number there. Raises DataError when they do not appear in
    time.
    """
    sets, numbers = ArrayCache(folder).wait(key, BLEND_PARTS, APPEARANCE_SECONDS)
    return sets, numbers
