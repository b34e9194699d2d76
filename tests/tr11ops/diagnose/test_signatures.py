"""Every signature has a text that it matches and one that it does not, and a word that a log is
searched for.
"""

from __future__ import annotations

import pytest

from tr11ops.diagnose.catalogue import FOLDER, read_family, rules
from tr11ops.diagnose.lines import split_prefixes
from tr11ops.diagnose.literals import required_words
from tr11ops.diagnose.matcher import matcher
from tr11ops.diagnose.signature import FaultSignature, Role

FAMILIES = sorted(path.stem for path in FOLDER.glob("*.toml"))


def signatures() -> list[FaultSignature]:
    found = {}
    for rule in rules():
        for signature in (rule.signature, *rule.codes.values()):
            if signature is not None:
                found[signature.id] = signature
    return list(found.values())


def matched(text: str) -> set[str]:
    return {signature.id for signature, _ in matcher().match_text(split_prefixes(text)[1])}


@pytest.mark.parametrize("family", FAMILIES)
def test_examples_of_a_family(family: str) -> None:
    own = [signature for signature in signatures() if signature.family == family]
    assert own
    missed = [(one.id, text) for one in own for text in one.examples if one.id not in matched(text)]
    wrong = [
        (one.id, text) for one in own for text in one.counterexamples if one.id in matched(text)
    ]
    assert missed == [] and wrong == []


@pytest.mark.parametrize("family", FAMILIES)
def test_signatures_are_whole(family: str) -> None:
    for one in (signature for signature in signatures() if signature.family == family):
        assert one.examples and one.meaning and one.source, one.id
        assert 0 < one.confidence < 1 or one.role in {Role.BENIGN, Role.CONSEQUENCE, Role.START}, (
            one.id
        )
        assert len(one.meaning) <= 120 and not one.meaning.endswith("."), one.id


def test_each_pattern_has_a_word_that_few_lines_hold() -> None:
    for rule in rules():
        assert required_words(rule.pattern), rule.pattern.pattern


def test_an_unknown_key_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "x.toml"
    path.write_text(
        "[[signature]]\nid = 'a'\npattern = 'abcdef'\nmeaning = 'x'\nsource = 'y'\nmatch = []\ncolour = 1\n"
    )
    with pytest.raises(ValueError, match=r"x\.toml: a: colour is no key"):
        read_family(path)
