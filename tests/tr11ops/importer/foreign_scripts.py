"""Scripts of other trainers, and what `tr11 adopt` makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tr11ops.importer.adopting import adopt_script
from tr11ops.importer.options import Imported

SCRIPTS = Path(__file__).parents[2] / "data" / "foreign_scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.slurm"))


def adopted(name: str) -> Imported:
    return adopt_script(SCRIPTS / f"{name}.slurm")


def of_text(folder: Path, text: str, **options: Any) -> Imported:
    script = folder / "train.slurm"
    script.write_text(text)
    return adopt_script(script, **options)


def to_decide(made: Imported) -> set[str]:
    return {item.key or item.option for item in made.decisions}
