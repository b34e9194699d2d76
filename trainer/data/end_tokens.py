"""Texts that spell out the token that ends a document: which token that is, and what it does to a training."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.tokenizer import KNOWN_END_TOKENS, Tokenizer

EFFECT = (
    "a training takes what follows it for another document: data.reset_attention_mask keeps the two apart,"
    " data.reset_position_ids counts from there again, data.mask_end_of_document_loss does not learn what comes next"
)
FIX = "take it out of the text, or spell it in another way, unless it does end a document"


def spelled_end_tokens(tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """What a text must not spell out: the tokenizer's own token, where its spelling becomes it; else all known ones."""
    if tokenizer is None:
        return KNOWN_END_TOKENS
    becomes_it = tokenizer.eod_id in tokenizer.encode_batch([f"a{tokenizer.end_token}a"])[0]
    return (tokenizer.end_token,) if becomes_it else ()


def end_token_warning(token: str, documents: int, lines: Sequence[int]) -> str | None:
    """The warning of texts that spell out `token`, with the first of their lines; None when there are none."""
    if not documents:
        return None
    places = ", ".join(map(str, lines)) + (" ..." if documents > len(lines) else "")
    return f"{documents:,} document(s) hold {token!r} in their text (line {places}): {EFFECT}; {FIX}"
