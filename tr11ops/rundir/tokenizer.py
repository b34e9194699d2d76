"""A light look at the card's tokenizer: is it where the workers will look for it, and how many
tokens has it?
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr11ops.runcard.card import RunCard
from tr11ops.runcard.secret_references import values_here
from trainer.config.end_token import end_token_of
from trainer.config.hub_files import cache_folder, cached_file, fetch_command
from trainer.contract.errors import DataError
from trainer.contract.record import Record

TOKENIZER_FILE = "tokenizer.json"
FILES = (TOKENIZER_FILE, "tokenizer_config.json")


class TokenizerFacts(Record):
    """The tokenizer of the card. `size` is None where the card names none; `fault` says why it
    cannot be used.

    `end_fault`: what the trainer says, wherever it loads it, of the token that ends a document; ""
    if it is there.
    """

    size: int | None = None
    fault: str = ""
    end_fault: str = ""
    fix: str = "correct the path, or make one (`tr11 data tokenizer`)"


def workers_environment(card: RunCard, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker that is launched from here, before the card's set-up lines."""
    return {**environment, **values_here(card.slurm.environment, environment)}


def tokenizer_place(card: RunCard, environment: Mapping[str, str]) -> Path | None:
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


def look_at_tokenizer(card: RunCard, environment: Mapping[str, str]) -> TokenizerFacts:
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
        return _read(Path(named) / TOKENIZER_FILE, named)
    try:
        path = tokenizer_place(card, environment)
    except OSError as error:
        return TokenizerFacts(fault=f"{cache_folder(environment)}: {error.strerror or error}")
    if path is None:
        fault = f"{named} is neither a folder nor in the hub's cache that the workers use ({cache_folder(environment)})"
        fix = f"fetch it where there is internet: {fetch_command(named, FILES, environment)}"
        return TokenizerFacts(fault=fault, fix=fix)
    return _read(path, named)


def _read_vocabulary(path: Path) -> TokenizerFacts:
    """vocab.json of GPT-2's BPE, ids by piece; or vocab.txt of WordPiece, a piece a line."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            pieces = json.loads(text)
        else:
            pieces = text.splitlines()
        return TokenizerFacts(size=len(pieces), end_fault=_end_fault(path, _ids(pieces)))
    except OSError as error:
        return TokenizerFacts(fault=f"{path}: {error.strerror or error}")
    except (ValueError, TypeError):
        return TokenizerFacts(fault=f"{path} is not a vocabulary")


def _read(path: Path, named: str) -> TokenizerFacts:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        ids = _ids(value["model"]["vocab"])
        ids |= {str(entry.get("content")): entry["id"] for entry in value.get("added_tokens", ())}
        return TokenizerFacts(
            size=1 + max(ids.values(), default=-1), end_fault=_end_fault(path, ids)
        )
    except NotADirectoryError:
        return TokenizerFacts(
            fault=f"{named} is a file, and the folder that holds {TOKENIZER_FILE} is meant"
        )
    except OSError as error:
        return TokenizerFacts(fault=f"{path}: {error.strerror or error}")
    except (ValueError, KeyError, TypeError):
        return TokenizerFacts(fault=f"{path} is not a tokenizer")


def _ids(vocabulary: dict[str, int] | list[Any]) -> dict[str, int]:
    """Id of each token: named by it, or by its place in a list of tokens, or of tokens with their scores."""
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    tokens = []
    for entry in vocabulary:
        if isinstance(entry, list):
            tokens.append(entry[0])
        else:
            tokens.append(entry)
    return {token: number for number, token in enumerate(tokens)}


def _end_fault(path: Path, ids: Mapping[str, int]) -> str:
    try:
        end_token_of(path, ids.get)
    except DataError as error:
        return str(error)
    return ""
