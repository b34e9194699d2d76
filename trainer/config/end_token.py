"""Which token of a tokenizer ends a document: one rule, for the trainer and for those who look
before it starts.

Reads the config that lies beside the tokenizer. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from trainer.contract.errors import DataError
from trainer.contract.units import shortened

CONFIG_FILE = "tokenizer_config.json"
END_OF_DOCUMENT = "<|endoftext|>"
# Spellings of the end of a document in tokenizers made elsewhere, looked for in this order when no
# config names it.
KNOWN_END_TOKENS: tuple[str, ...] = (
    END_OF_DOCUMENT,
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)


def end_token_of(file: Path, id_of: Callable[[str], int | None]) -> tuple[str, int]:
    """The token that ends a document, and its id: the one that the config beside it names, else the
    first known one.

    `file`: of the tokenizer; `id_of`: the id of a token there, None of one that it lacks. Raises
    DataError.
    """
    named = _named_end_token(file.parent / CONFIG_FILE)
    sought = KNOWN_END_TOKENS
    if named is not None:
        sought = (named,)
    for token in sought:
        number = id_of(token)
        if number is not None:
            return token, number
    if named is not None:  # another in its place would end documents where no one meant it
        there = [token for token in KNOWN_END_TOKENS if id_of(token) is not None]
        has = ""
        if there:
            has = f", it has {', '.join(there)}"
        raise DataError(
            f"{file.parent / CONFIG_FILE} names {named!r} as eos_token, which {file.name} does not have{has}",
            "name the token that ends a document there",
        )
    raise DataError(
        f"{file} has no token that ends a document",
        f"name one as eos_token in {CONFIG_FILE} beside it (looked for {', '.join(KNOWN_END_TOKENS)})",
    )


def _named_end_token(config: Path) -> str | None:
    """None where there is no config, or it names none. Raises DataError where it cannot be read."""
    try:
        value = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = shortened(" ".join(str(error).split()), 200)
        raise DataError(
            f"{config} cannot be read: {why}", "copy it again, or take it away"
        ) from error
    named = None
    if isinstance(value, dict):
        named = value.get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    if isinstance(named, str):
        return named
    return None
