"""Sentences of a text, by a rule: for models that are trained on pairs of sentences.

A sentence ends with `.`, `!`, `?` or `…`, perhaps closed by quotes or brackets, before a space that no small letter
follows, or with one of the full-width marks of Chinese and Japanese. Abbreviations before a capital are split, too.
"""

from __future__ import annotations

import re

_BOUNDARY = re.compile(r"(?:[.!?…]+[\"'”’»)\]]*(?P<gap>\s+)(?=[^\s])|[。！？]+[”’」』）]*)")


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """The sentences in order; none is empty. Spaces between them are left out, but line ends stay if asked for.

    Joined again, they are the text but for the spaces between them.
    """
    sentences = []
    begin = 0
    for match in _BOUNDARY.finditer(text):
        following = text[match.end() : match.end() + 1]
        if match["gap"] is not None and following.islower():
            continue
        sentences.append(_trimmed(text[begin : match.end()], keep_newlines))
        begin = match.end()
    sentences.append(_trimmed(text[begin:], keep_newlines))
    return [sentence for sentence in sentences if sentence.strip()]


def _trimmed(sentence: str, keep_newlines: bool) -> str:
    body = sentence.strip()
    if not keep_newlines:
        return body
    tail = sentence[len(sentence.rstrip()) :]
    return body + "\n" * tail.count("\n")
