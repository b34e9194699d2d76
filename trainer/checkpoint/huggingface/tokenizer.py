"""The tokenizer's part of a Hugging Face folder: its files, and the ids of its special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine

from trainer.config.end_token import CONFIG_FILE
from trainer.contract.errors import CheckpointError, DataError
from trainer.contract.record import JsonObject, Record
from trainer.data.tokenizer import TOKENIZER_FILE, load_tokenizer

_COMPANIONS = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_ROLES = ("bos", "eos", "pad")


class TokenizerFiles(Record):
    """`files`: name -> content. `ids`: `bos_token_id`, `eos_token_id`, `pad_token_id` as far as
    they are known.
    """

    files: dict[str, bytes]
    ids: dict[str, int]
    vocabulary_size: int


def tokenizer_files(path: Path) -> TokenizerFiles:
    """What a Hugging Face folder needs of the tokenizer in a folder with tokenizer.json (or in that
    file).

    A tokenizer_config.json is made where there is none. Raises CheckpointError when it is not a
    tokenizer.
    """
    try:
        tokenizer = load_tokenizer(path)
    except DataError as error:
        raise CheckpointError(f"tokenizer: {error}") from None
    home = tokenizer.path.parent
    files = {TOKENIZER_FILE: tokenizer.path.read_bytes()}
    files |= {name: (home / name).read_bytes() for name in _COMPANIONS if (home / name).is_file()}
    config: JsonObject = {}
    if (home / CONFIG_FILE).is_file():
        try:
            config = json.loads((home / CONFIG_FILE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"{home / CONFIG_FILE} is not JSON ({error}); repair it"
            ) from None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.end_token,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    files[CONFIG_FILE] = (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode()
    engine = Engine.from_file(str(tokenizer.path))
    ids = {f"{role}_token_id": _id(engine, config.get(f"{role}_token")) for role in _ROLES}
    known = {key: number for key, number in ids.items() if number is not None}
    return TokenizerFiles(files, known, tokenizer.vocabulary_size)


def _id(engine: Engine, token: Any) -> int | None:
    """The id of a special token, which a config spells as text or as an object with `content`."""
    if isinstance(token, dict):
        text = token.get("content")
    else:
        text = token
    if isinstance(text, str):
        return engine.token_to_id(text)
    return None
