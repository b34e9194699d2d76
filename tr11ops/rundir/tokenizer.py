"""A light look at the card's tokenizer: is it where the workers will look for it, and how many
tokens has it?
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tr11ops.runcard.card import RunCard
from tr11ops.runcard.secret_references import values_here
from trainer.config.hub_files import cache_folder, cached_file, fetch_command
from trainer.contract.record import Record

TOKENIZER_FILE = "tokenizer.json"
FILES = (TOKENIZER_FILE, "tokenizer_config.json")


class TokenizerFacts(Record):
    """The tokenizer of the card. `size` is None where the card names none; `fault` says why it
    cannot be used.
    """

    size: int | None = None
    fault: str = ""
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
        return TokenizerFacts(size=len(pieces))
    except OSError as error:
        return TokenizerFacts(fault=f"{path}: {error.strerror or error}")
    except (ValueError, TypeError):
        return TokenizerFacts(fault=f"{path} is not a vocabulary")


def _read(path: Path, named: str) -> TokenizerFacts:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = value["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = (entry["id"] for entry in value.get("added_tokens", ()))
        return TokenizerFacts(size=1 + max((*ids, *added), default=-1))
    except NotADirectoryError:
        return TokenizerFacts(
            fault=f"{named} is a file, and the folder that holds {TOKENIZER_FILE} is meant"
        )
    except OSError as error:
        return TokenizerFacts(fault=f"{path}: {error.strerror or error}")
    except (ValueError, KeyError, TypeError):
        return TokenizerFacts(fault=f"{path} is not a tokenizer")
