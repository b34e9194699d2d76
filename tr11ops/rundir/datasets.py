"""A light look at what a card trains on, with the standard library alone: the indexed datasets (are
they there, and whole?) and the tokenizer (is it where the workers will look for it?).

Format of a dataset: spec of the `.bin`/`.idx` pair (magic, version, dtype, counts, lengths,
offsets, document starts). Only the header and the last entries are read, so a terabyte costs what a
kilobyte costs.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr11ops.runcard.card import OwnCard, RunCard
from tr11ops.runcard.load import values_here
from trainer.config.card import DataSection
from trainer.config.end_token import end_token_of
from trainer.config.hub_files import cache_folder, cached_file, fetch_command
from trainer.contract.errors import DataError
from trainer.contract.record import Record
from trainer.schedule.rules import MULTIMODAL

# ---------------------------------------------------------------- the tokenizer

TOKENIZER_FILE = "tokenizer.json"
FILES = (TOKENIZER_FILE, "tokenizer_config.json")


class TokenizerFacts(Record):
    """The tokenizer of the card. `size` is None where the card names none; `fault` says why it
    cannot be used.

    `end_fault`: what is wrong with the token that ends a document, as the trainer says wherever it loads
    it, and `end_fix` what to do about it; "" if it is there.
    """

    size: int | None = None
    fault: str = ""
    end_fault: str = ""
    end_fix: str = ""
    fix: str = "correct the path, or make one (`tr11 data tokenizer`)"


def workers_environment(card: RunCard, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker that is launched from here, before the card's set-up lines."""
    return {**environment, **values_here(card.slurm.environment, environment)}


def tokenizer_place(card: OwnCard, environment: Mapping[str, str]) -> Path | None:
    """The card's folder or file, or the hub's file in the cache that `environment` names; None
    where there is neither.

    Raises OSError when the cache cannot be looked at.
    """
    named = card.tokenizer.path
    if named is None or Path(named).is_absolute():
        if named:
            return Path(named)
        return None
    return cached_file(named, TOKENIZER_FILE, environment)


def look_at_tokenizer(card: OwnCard, environment: Mapping[str, str]) -> TokenizerFacts:
    """Look at it on this machine's disks. Asks no network: what compute nodes are to have must be
    on a disk.

    A hub id is looked for in the cache that `environment`, the workers', names.
    """
    named, vocabulary = card.tokenizer.path, card.tokenizer.vocabulary_file
    if vocabulary is not None:
        return _read_vocabulary(Path(vocabulary))
    if named is None:
        return TokenizerFacts()
    if Path(named).is_absolute():
        return _looked_into(Path(named) / TOKENIZER_FILE, named)
    try:
        path = tokenizer_place(card, environment)
    except OSError as error:
        return TokenizerFacts(fault=f"{cache_folder(environment)}: {error.strerror or error}")
    if path is None:
        fault = f"{named} is neither a folder nor in the hub's cache that the workers use ({cache_folder(environment)})"
        fix = f"fetch it where there is internet: {fetch_command(named, FILES, environment)}"
        return TokenizerFacts(fault=fault, fix=fix)
    return _looked_into(path, named)


def _read_vocabulary(path: Path) -> TokenizerFacts:
    """vocab.json of GPT-2's BPE, ids by piece; or vocab.txt of WordPiece, a piece a line."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            pieces = json.loads(text)
        else:
            pieces = text.splitlines()
        return _of_ids(path, len(pieces), _ids(pieces))
    except OSError as error:
        return TokenizerFacts(fault=f"{path}: {error.strerror or error}")
    except (ValueError, TypeError):
        return TokenizerFacts(fault=f"{path} is not a vocabulary")


def _looked_into(path: Path, named: str) -> TokenizerFacts:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        ids = _ids(value["model"]["vocab"])
        ids |= {str(entry.get("content")): entry["id"] for entry in value.get("added_tokens", ())}
        return _of_ids(path, 1 + max(ids.values(), default=-1), ids)
    except NotADirectoryError:
        return TokenizerFacts(
            fault=f"{named} is a file, and the folder that holds {TOKENIZER_FILE} is meant"
        )
    except OSError as error:
        return TokenizerFacts(fault=f"{path}: {error.strerror or error}")
    except (ValueError, KeyError, TypeError):
        return TokenizerFacts(fault=f"{path} is not a tokenizer")


def _ids(vocabulary: dict[str, int] | list[Any]) -> dict[str, int]:
    """Id of each token: named by it, or by its place in a list of tokens, or of tokens with their
    scores.
    """
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    tokens = []
    for entry in vocabulary:
        if isinstance(entry, list):
            tokens.append(entry[0])
        else:
            tokens.append(entry)
    return {token: number for number, token in enumerate(tokens)}


def _of_ids(path: Path, size: int, ids: Mapping[str, int]) -> TokenizerFacts:
    try:
        end_token_of(path, ids.get)
    except DataError as error:
        return TokenizerFacts(size, end_fault=error.rule, end_fix=error.fix)
    return TokenizerFacts(size)


MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER_BYTES = 34
ITEM_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 8, 8: 2}


class DatasetFacts(Record):
    """What was seen of one prefix. `fault` is empty when it is whole; `unreadable` when that could
    not be found out.
    """

    prefix: str
    documents: int = 0
    tokens: int = 0
    fault: str = ""
    unreadable: str = ""


class _Fault(ValueError):
    """A dataset that is not whole."""


def prefixes_of(data: DataSection) -> tuple[str, ...]:
    """Every prefix that a card names, once: its own list, and the third field of each part of its
    groups.

    Groups that cannot be read as such give nothing here; the trainer says what is wrong with them.
    """
    groups = [data.train_group or "", *data.valid_groups, *data.test_groups]
    for file in (data.train_groups_file, data.valid_groups_file, data.test_groups_file):
        if file is not None and Path(file).is_file():
            groups += re.findall(
                r'"([^"]*)"', Path(file).read_text(encoding="utf-8", errors="replace")
            )
    parts = [part.split() for group in groups for part in group.partition(":")[2].split(",")]
    return tuple(
        dict.fromkeys([*data.prefixes, *(fields[2] for fields in parts if len(fields) == 3)])
    )


def look_at(prefix: str) -> DatasetFacts:
    """Open a dataset's index, and compare its counts with the sizes of both files. Never raises."""
    try:
        return _read(prefix, Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    except _Fault as fault:
        return DatasetFacts(prefix, fault=str(fault))
    except OSError as error:
        return DatasetFacts(
            prefix, unreadable=f"{error.filename or prefix}: {error.strerror or error}"
        )
    except struct.error:
        return DatasetFacts(prefix, unreadable=f"{prefix}.idx changed while it was read")
    except ValueError as error:
        return DatasetFacts(prefix, fault=f"{prefix!r} is not a path ({error})")


def _read(prefix: str, index: Path, tokens: Path) -> DatasetFacts:
    for path in (index, tokens):
        if not path.is_file():
            raise _Fault(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    with index.open("rb") as stream:
        descriptor = stream.fileno()
        code, sequences, entries = _header(stream.read(HEADER_BYTES), index)
        expected = HEADER_BYTES + 12 * sequences + 8 * entries
        size = os.fstat(descriptor).st_size
        if size == expected + sequences:
            raise _Fault(f"{index} {MULTIMODAL}")
        if size != expected:
            raise _Fault(
                f"{index} has {size} bytes, its header needs {expected}{_cut(size, expected)}"
            )
        last_length = _integer(descriptor, "<i", HEADER_BYTES + 4 * (sequences - 1))
        last_offset = _integer(descriptor, "<q", HEADER_BYTES + 12 * sequences - 8)
        first_document = _integer(descriptor, "<q", HEADER_BYTES + 12 * sequences)
        last_document = _integer(descriptor, "<q", expected - 8)
    if first_document != 0 or last_document != sequences:
        raise _Fault(
            f"{index} has documents from {first_document} to {last_document}, expected 0 to {sequences}"
        )
    needed = last_offset + last_length * ITEM_BYTES[code]
    held = tokens.stat().st_size
    if held != needed:
        raise _Fault(f"{tokens} has {held} bytes, its index needs {needed}{_cut(held, needed)}")
    return DatasetFacts(prefix, documents=entries - 1, tokens=held // ITEM_BYTES[code])


def _header(head: bytes, index: Path) -> tuple[int, int, int]:
    """Dtype code, number of sequences and of document entries. Raises _Fault when it is not a
    usable header.
    """
    if head.startswith(OLD_MAGIC):
        raise _Fault(f"{index} is of the older, lazy kind")
    if not head.startswith(MAGIC):
        raise _Fault(f"{index} is not an index of a dataset (its first bytes are wrong)")
    if len(head) < HEADER_BYTES:
        raise _Fault(f"{index} is cut off inside its header")
    version, code, sequences, entries = struct.unpack_from("<QBQQ", head, len(MAGIC))
    if version != 1:
        raise _Fault(f"{index} is of version {version}, expected 1")
    if code not in ITEM_BYTES:
        raise _Fault(f"{index} holds dtype code {code}, expected 1 to 8")
    if sequences == 0 or entries < 2:
        raise _Fault(f"{index} holds no document")
    return code, sequences, entries


def _integer(descriptor: int, layout: str, offset: int) -> int:
    return int(struct.unpack(layout, os.pread(descriptor, struct.calcsize(layout), offset))[0])


def _cut(size: int, expected: int) -> str:
    if size < expected:
        return " (it was cut off)"
    return ""
