"""The `.bin`/`.idx` pair of token sequences: its formats, and a memory-mapped reader that trusts
nothing.

`PREFIX.bin` holds the tokens of all sequences back to back in one little-endian type. `PREFIX.idx`
holds, after a header, the length of each sequence (int32), its byte offset (int64) and the document
starts (int64, in sequences). This is the layout that Megatron writes and reads, so data prepared by
either can be read by the other. An older kind of index (`TNTIDX`), which holds all numbers as int64
and offsets in elements, is read as well.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainer.contract.errors import DataError, explain_os_errors
from trainer.contract.record import Record
from trainer.schedule.rules import MULTIMODAL

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
# magic, version, type code, sequences, entries of the document index
HEADER = struct.Struct("<9sQBQQ")
# magic, version, type code, element bytes, sequences, sizes, document entries
OLD_HEADER = struct.Struct("<8sQQQQQQ")

Kind = Literal["mapped", "older"]
# What a run card may ask for: the kind that is there, or one of them alone; `cached` holds all
# tokens in memory.
Implementation = Literal["infer", "mmap", "lazy", "cached"]
KIND_OF: dict[str, Kind] = {"mmap": "mapped", "lazy": "older", "cached": "older"}

# Code 7 was float64 in the files of 2022 and is float32 in newer ones; the size of the .bin
# decides.
TYPE_CODES: dict[int, tuple[np.dtype[Any], ...]] = {
    1: (np.dtype("u1"),),
    2: (np.dtype("i1"),),
    3: (np.dtype("<i2"),),
    4: (np.dtype("<i4"),),
    5: (np.dtype("<i8"),),
    6: (np.dtype("<f8"),),
    7: (np.dtype("<f8"), np.dtype("<f4")),
    8: (np.dtype("<u2"),),
}
UINT16_VOCABULARY_LIMIT = 65500

# Up to this many sequences every length and offset is checked when a pair is opened; beyond it, the
# ends of blocks.
FULL_CHECK_SEQUENCES = 4_000_000
CHECK_BLOCK = 65_536


def bin_path(prefix: Path | str) -> Path:
    """The file of tokens of a prefix."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """The index file of a prefix."""
    return Path(f"{prefix}.idx")


def type_code(dtype: npt.DTypeLike) -> int:
    """The code that the index file uses for `dtype`. Raises DataError for a type the format does
    not have.
    """
    wanted = np.dtype(dtype).newbyteorder("<")
    for code, candidates in TYPE_CODES.items():
        if candidates[-1].newbyteorder("<") == wanted:
            return code
    raise DataError(f"the indexed format has no code for {wanted}; use uint16 or int32")


def dtype_for_vocabulary(vocabulary_size: int) -> np.dtype[Any]:
    """uint16 for vocabularies below 65,500 tokens, int32 from there on: the same choice as
    Megatron's.
    """
    if vocabulary_size < UINT16_VOCABULARY_LIMIT:
        return np.dtype("<u2")
    return np.dtype("<i4")


class _Index(Record):
    kind: Kind
    code: int
    dtypes: tuple[np.dtype[Any], ...]
    sizes: npt.NDArray[Any]  # tokens per sequence
    # where each sequence begins in the .bin: in bytes, or of the older kind in elements
    offsets: npt.NDArray[Any]
    documents: npt.NDArray[np.int64]


class IndexedDataset:
    """A read-only, memory-mapped pair `PREFIX.bin` and `PREFIX.idx`.

    `sizes` int32 [sequences], `documents` int64 [documents + 1] (sequence numbers at which documents begin),
    `dtype` of a token, `kind` of the index. Opening reads the index, checks it against the .bin, and maps both; it
    reads no tokens. `implementation` `infer` takes either kind, `mmap` the newer one alone, `lazy` and `cached` the
    older one alone, and `cached` reads all tokens into memory. With a `vocabulary_size`, `get` hands out no token that
    is outside of it: an embedding that is cut over several ranks would train on it as if it were nothing.
    Raises DataError, naming the file and the fault, for anything absent, truncated, foreign or not belonging together.
    """

    def __init__(
        self,
        prefix: Path | str,
        implementation: Implementation = "infer",
        vocabulary_size: int | None = None,
    ) -> None:
        self.prefix = str(prefix)
        self._vocabulary_size = vocabulary_size
        self.path = bin_path(prefix)
        index_file = idx_path(prefix)
        for path, other in ((index_file, self.path), (self.path, index_file)):
            if not path.is_file():
                if other.exists():
                    hint = f"{other.name} is there, so the pair is incomplete"
                else:
                    hint = "neither file exists"
                raise DataError(
                    f"{path} is missing ({hint}); give the path without its extension, or make the pair with"
                    " `tr11 data preprocess`"
                )
        with explain_os_errors("reading", index_file):
            index = _read_index(index_file, self.path)
            self.bytes = self.path.stat().st_size
        if KIND_OF.get(implementation, index.kind) != index.kind:
            if index.kind == "older":
                found = "an older index (TNTIDX)"
            else:
                found = "a memory-mapped index (MMIDIDX)"
            raise DataError(
                f"{index_file} is {found}, which the implementation {implementation!r} does not read; set"
                " data.implementation to infer"
            )
        self.kind = index.kind
        self.code = index.code
        self.sizes = index.sizes
        self.documents = index.documents
        self.dtype = _choose_dtype(index, self.bytes, self.path)
        self._unsigned = np.dtype(f"u{self.dtype.itemsize}")
        self._offsets = index.offsets
        self._divisor = self.dtype.itemsize if index.kind == "mapped" else 1
        if self.bytes == 0 or len(self.sizes) == 0:
            raise DataError(
                f"{self.path} holds no tokens; every text of the input was empty, or the input was"
            )
        _check_layout(index, self.dtype, self.bytes, path=index_file, bin_file=self.path)
        with explain_os_errors("mapping", self.path):
            self.tokens: npt.NDArray[Any]
            if implementation == "cached":
                self.tokens = np.fromfile(self.path, dtype=self.dtype)
            else:
                self.tokens = np.memmap(self.path, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sizes)

    @property
    def name(self) -> str:
        """The prefix without its folder."""
        return Path(self.prefix).name

    @property
    def token_count(self) -> int:
        """Number of tokens in the whole pair."""
        return len(self.tokens)

    @property
    def document_count(self) -> int:
        """Number of documents; sequences and documents are the same unless the text was split into
        sentences.
        """
        return len(self.documents) - 1

    def start(self, sequence: int) -> int:
        """Position of a sequence's first token in `tokens`."""
        return int(self._offsets[sequence]) // self._divisor

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens of one sequence from `offset` on (to its end, or `length` of them): a view
        [tokens], not a copy.

        Raises DataError for a token outside the vocabulary.
        """
        size = int(self.sizes[sequence])
        if length is None:
            stop = size
        else:
            stop = offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens {offset} to {stop} of sequence {sequence}, which has {size}")
        start = self.start(sequence)
        part = self.tokens[start + offset : start + stop]
        if self._vocabulary_size is not None:
            self.check_vocabulary(start + offset, start + stop, self._vocabulary_size)
        return part

    def check_vocabulary(self, start: int, stop: int, size: int) -> None:
        """Raise DataError for a token of `tokens[start:stop]` that is not below `size`, the
        vocabulary's.
        """
        found = self.foreign_token(start, stop, size)
        if found:
            raise DataError(
                f"{found}, the vocabulary has {size}: prepare the data with the tokenizer of this run, or set"
                " tokenizer.padded_vocabulary_size to that of the data's"
            )

    def foreign_token(self, start: int, stop: int, size: int) -> str | None:
        """File, document, number and place of the first token of `tokens[start:stop]` outside a
        vocabulary of `size`.

        None where there is no such token. Raises DataError where the numbers are no tokens at all.
        """
        self.check_type()
        # As unsigned numbers, negative ones are large: one pass finds both.
        numbers = self.tokens[start:stop].view(self._unsigned)
        if numbers.size == 0 or int(numbers.max()) < size:
            return None
        at = start + int(np.argmax(numbers >= size))
        sequence = int(np.searchsorted(self._offsets, at * self._divisor, side="right")) - 1
        document = int(np.searchsorted(self.documents, sequence, side="right")) - 1
        place = at - self.start(int(self.documents[document]))
        return f"{self.path}: document {document} holds token {int(self.tokens[at])} at its place {place}"

    def check_type(self) -> None:
        """Raise DataError where the pair holds no whole numbers."""
        if self.dtype.kind == "f":
            raise DataError(
                f"{self.path} holds {self.dtype} numbers, not tokens; prepare it with `tr11 data preprocess`"
            )


def _choose_dtype(index: _Index, bin_bytes: int, bin_file: Path) -> np.dtype[Any]:
    if len(index.dtypes) == 1:
        return index.dtypes[0]
    tokens = int(np.sum(index.sizes, dtype=np.int64))
    for dtype in index.dtypes:
        if tokens * dtype.itemsize == bin_bytes:
            return dtype
    return index.dtypes[0]


def _read_index(path: Path, bin_file: Path) -> _Index:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(MAGIC):
        return _read_mapped_index(path, start, size)
    if start.startswith(OLD_MAGIC):
        return _read_old_index(path, start, size)
    if size == 0:
        raise DataError(
            f"{path} is empty; its writing was cut short: make the pair again or copy it again"
        )
    with bin_file.open("rb") as stream:
        if stream.read(9).startswith((MAGIC, OLD_MAGIC)):
            raise DataError(
                f"{path} and {bin_file.name} are swapped: the index is in the .bin; exchange their names"
            )
    raise DataError(
        f"{path} is not an index file: it begins with {start[:9]!r}, expected {MAGIC!r}; make it with"
        " `tr11 data preprocess`"
    )


def _truncated(path: Path, size: int, expected: int) -> DataError:
    word = "truncated" if size < expected else "longer than its header says"
    return DataError(
        f"{path} is {word}: {size} bytes, {expected} expected; copy it again or make the pair again"
    )


def _dtypes(code: int, path: Path) -> tuple[np.dtype[Any], ...]:
    if code not in TYPE_CODES:
        raise DataError(
            f"{path} has type code {code}, known are 1 to {max(TYPE_CODES)}; it is damaged or foreign"
        )
    return TYPE_CODES[code]


def _check_version(version: int, path: Path) -> None:
    if version != VERSION:
        raise DataError(
            f"{path} has format version {version}, only {VERSION} is known; the file is damaged or foreign"
        )


def _read_mapped_index(path: Path, start: bytes, size: int) -> _Index:
    if size < HEADER.size:
        raise _truncated(path, size, HEADER.size)
    _, version, code, sequences, documents = HEADER.unpack(start[: HEADER.size])
    _check_version(version, path)
    dtypes = _dtypes(code, path)
    expected = HEADER.size + 12 * sequences + 8 * documents
    if sequences and size == expected + sequences:
        raise DataError(f"{path} {MULTIMODAL}")
    if size != expected:
        raise _truncated(path, size, expected)
    sizes_end = HEADER.size + 4 * sequences
    return _Index(
        kind="mapped",
        code=code,
        dtypes=dtypes,
        sizes=_array(path, "<i4", HEADER.size, sequences),
        offsets=_array(path, "<i8", sizes_end, sequences),
        documents=_array(path, "<i8", sizes_end + 8 * sequences, documents),
    )


def _read_old_index(path: Path, start: bytes, size: int) -> _Index:
    if size < OLD_HEADER.size:
        raise _truncated(path, size, OLD_HEADER.size)
    _, version, code, element, sequences, sizes, documents = OLD_HEADER.unpack(
        start[: OLD_HEADER.size]
    )
    _check_version(version, path)
    dtypes = tuple(dtype for dtype in _dtypes(code, path) if dtype.itemsize == element)
    if not dtypes:
        raise DataError(
            f"{path} says {element} bytes an element, not the size of type code {code}; it is damaged"
        )
    expected = OLD_HEADER.size + 8 * (2 * (sequences + 1) + sizes + documents)
    if size != expected:
        raise _truncated(path, size, expected)
    if sizes != sequences:
        raise DataError(
            f"{path} holds {sizes} dimensions for {sequences} items; only sequences of tokens can be read"
        )
    at = OLD_HEADER.size + 8 * (sequences + 1)
    offsets = _array(path, "<i8", at, sequences + 1)
    at += 8 * (sequences + 1)
    return _Index(
        kind="older",
        code=code,
        dtypes=dtypes,
        sizes=_array(path, "<i8", at, sequences),
        offsets=offsets[:-1],
        documents=_array(path, "<i8", at + 8 * sequences, documents),
    )


def _array(path: Path, dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _check_layout(
    index: _Index, dtype: np.dtype[Any], bin_bytes: int, path: Path, bin_file: Path
) -> None:
    """Lengths, offsets and document starts agree with each other and with the size of the .bin."""
    sizes = index.sizes
    offsets = index.offsets
    documents = index.documents
    unit = dtype.itemsize if index.kind == "mapped" else 1
    end = (int(offsets[-1]) + int(sizes[-1]) * unit) * (dtype.itemsize // unit)
    if end != bin_bytes:
        raise DataError(
            f"{path} describes {end} bytes of {dtype} tokens but {bin_file.name} has {bin_bytes}: one of them is"
            " truncated or they are not a pair; copy both again or make the pair again"
        )
    sequences = len(sizes)
    step = 1 if sequences <= FULL_CHECK_SEQUENCES else CHECK_BLOCK
    fault = int(offsets[0]) != 0
    for first in range(0, sequences, CHECK_BLOCK):
        # One entry beyond the block, so that its last offset is checked against the next block's
        # first.
        block = slice(first, min(first + CHECK_BLOCK, sequences) + 1 if step == 1 else first + 2)
        lengths = sizes[block]
        begins = offsets[block]
        fault = (
            fault
            or bool(np.any(lengths < 0))
            or bool(np.any(np.diff(begins) != lengths[:-1].astype("i8") * unit))
        )
    if fault:
        raise DataError(
            f"{path} is damaged: its offsets do not follow from its lengths; make the pair again"
        )
    starts_fault = len(documents) < 2 or int(documents[0]) != 0 or int(documents[-1]) != sequences
    if starts_fault or (step == 1 and bool(np.any(np.diff(documents) < 0))):
        raise DataError(
            f"{path} is damaged: its document starts do not ascend from 0 to its {sequences} sequences;"
            " make the pair again"
        )


def pair_exists(prefix: Path | str) -> bool:
    """True when both files of a pair are there (which says nothing of what they hold)."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()
