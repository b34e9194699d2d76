"""Whatever a card holds, the answer is a OwnCard or a CardError whose lines are whole and
printable.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tr11ops.runcard.card import OwnCard, load_card, resolved
from tr11ops.runcard.estimate import estimate
from tr11ops.runcard.load import read_tables
from trainer.config.card import CardError, Section

SMALL = Path(__file__).parents[2] / "data" / "small-card.toml"
QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def toml_text(value: Any) -> str:
    """Inline TOML of a plain value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**50 else hex(value)
    if isinstance(value, float):
        return {True: "nan"}.get(math.isnan(value)) or (
            repr(value) if math.isfinite(value) else f"{value:+}"
        )
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(character):08x}" for character in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return (
        "{"
        + ", ".join(f"{toml_text(name)} = {toml_text(item)}" for name, item in value.items())
        + "}"
    )


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
leaves = st.one_of(
    st.booleans(),
    st.integers(-3, 9),
    st.integers(),
    st.integers(2**62, 2**70),
    st.just(16**3000),
    st.floats(),
    texts,
    st.sampled_from(
        ["$HOME/x", "${NOPE}", "$$", "type:[", "type:embedding", "00:30:00", "9,9", "nan,1,1"]
    ),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def known_keys(schema: type[Section], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every dotted key of the schema, sections included."""
    found: list[tuple[str, ...]] = []
    for name, entry in schema.model_fields.items():
        found.append((*above, name))
        kinds = [entry.annotation, *getattr(entry.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Section):
                found += known_keys(kind, (*above, name))
    return found


KEYS = known_keys(OwnCard)


def check(path: Path, overrides: list[str] | None = None) -> None:
    try:
        card = load_card(path, overrides or [], {"HOME": "/h"})
    except CardError as error:
        lines = str(error).split("\n")
        assert len(lines) == len(error.problems) > 0
        assert all(line.isprintable() and ": " in line and "; " in line for line in lines)
    else:
        assert card.total_iterations >= 1
        assert card.gradient_accumulation_steps(0) >= 1
        assert resolved(card)["derived"]["world_size"] >= 1
        json.dumps(estimate(card, 1.0).to_json(), allow_nan=False)


@QUICK
@given(changes=st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=4))
def test_changed_cards(tmp_path: Path, changes: dict[tuple[str, ...], Any]) -> None:
    tables = read_tables(SMALL)
    for key, value in changes.items():
        table: Any = tables
        for part in key[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else {}
        if isinstance(table, dict):
            table[key[-1]] = value
    path = tmp_path / "card.toml"
    path.write_text(
        "\n".join(f"{name} = {toml_text(item)}" for name, item in tables.items()), encoding="utf-8"
    )
    check(path)


@QUICK
@given(
    tables=st.dictionaries(
        st.one_of(texts, st.sampled_from(list(OwnCard.model_fields))), values, max_size=4
    )
)
def test_random_tables(tmp_path: Path, tables: dict[str, Any]) -> None:
    path = tmp_path / "card.toml"
    text = "\n".join(f"{toml_text(name)} = {toml_text(item)}" for name, item in tables.items())
    path.write_text(text, encoding="utf-8")
    check(path)


@pytest.mark.parametrize("section", list(OwnCard.model_fields))
def test_a_section_that_is_no_table_is_one_of_several_faults(tmp_path: Path, section: str) -> None:
    """Rules that would read it are passed over, whatever else the card lacks."""
    path = tmp_path / "card.toml"
    path.write_text(f"{section} = false\n", encoding="utf-8")
    check(path)


@QUICK
@given(
    content=st.one_of(
        st.binary(max_size=300), st.text("[]{}=\"\n.#ab1$-\t'", max_size=80).map(str.encode)
    )
)
def test_random_text(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "card.toml"
    path.write_bytes(content)
    check(path)


@QUICK
@given(
    pairs=st.lists(
        st.tuples(st.sampled_from(KEYS), st.one_of(st.text(max_size=20), values.map(toml_text))),
        max_size=3,
    ),
    raw=st.text(max_size=20),
)
def test_random_overrides(pairs: list[tuple[tuple[str, ...], str]], raw: str) -> None:
    check(SMALL, [*(f"{'.'.join(key)}={text}" for key, text in pairs), raw])


@QUICK
@given(
    layers=st.integers(1, 10**5),
    stages=st.integers(1, 10**5),
    start=st.integers(1, 10**7),
    increment=st.integers(1, 10**7),
)
def test_extreme_numbers(layers: int, stages: int, start: int, increment: int) -> None:
    check(
        SMALL,
        [
            f"model.layers={layers}",
            f"parallel.pipeline={stages}",
            f"batch.ramp.start={start}",
            f"batch.ramp.increment={increment}",
        ],
    )


@pytest.mark.parametrize(
    "content",
    [
        "a" + ".a" * 200_000 + " = 1",
        "a = " + "[" * 5000,
        "a = " + "[" * 100 + "]" * 100,
        "a = 0x" + "f" * 20_000,
        "a = " + "9" * 5000,
        "\0",
        "x" * (2 << 20),
    ],
    ids=["dotted", "brackets", "nested", "hexadecimal", "digits", "nul", "large"],
)
def test_hostile_text(tmp_path: Path, content: str) -> None:
    path = tmp_path / "card.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CardError):
        load_card(path)
