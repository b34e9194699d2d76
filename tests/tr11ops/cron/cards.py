"""A card with periodic jobs, for tests."""

from __future__ import annotations

from pathlib import Path

from tr11ops.runcard.card import RunCard, load_card

CARD = Path(__file__).parents[2] / "data" / "small-card.toml"


def card(tmp_path: Path, *changes: str, more: str = "") -> RunCard:
    path = tmp_path / "card.toml"
    path.write_text(CARD.read_text() + more)
    return load_card(path, changes, {}, directory=tmp_path)
