"""Shares of data sets: the groups of a training from a list of ratios, and ratios from the sizes of data sets.

A list of ratios is a JSON list of `{"dataset_path": PREFIX, "ratio": NUMBER}`. The folder of a prefix is named after
the language of its text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config.data import data_set_name
from trainer.contract.errors import DataError
from trainer.contract.files import write_atomically
from trainer.contract.record import Record
from trainer.data.blend import parse_split
from trainer.data.errors import explain_os_errors
from trainer.data.groups import parse_groups
from trainer.data.indexed import IndexedDataset
from trainer.data.sources import SPLITS

# Shares of every data set that training, validation and test read: none for a test, unless one is asked for.
SHARES, SHARES_WITH_TEST = "950,50,0", "949,50,1"
# Sums of published lists differ from 1 by up to 1e-11; more than this is a list that was edited by hand.
SUM_TOLERANCE = 1e-6


class Ratio(Record):
    """One data set and its share of the training."""

    dataset_path: str
    ratio: float

    @property
    def language(self) -> str:
        """Name of the folder that holds the data set. Raises DataError when the path names none."""
        folder = data_set_name(self.dataset_path)
        if not folder:
            raise DataError(
                f"{self.dataset_path} has no folder, whose name is the language of its validation group; give the path"
                " with its folder"
            )
        return folder


def read_ratios(path: str | Path) -> tuple[Ratio, ...]:
    """The ratios in a file. Raises DataError that names the entry and what is wrong with it."""
    with explain_os_errors("reading", path):
        data = Path(path).read_bytes()
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); repair it") from None
    if not isinstance(entries, list) or not entries:
        raise DataError(f'{path} must hold a list of {{"dataset_path": ..., "ratio": ...}}, with at least one entry')
    return tuple(_ratio(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, 1))


def _ratio(entry: Any, where: str) -> Ratio:
    if not isinstance(entry, dict) or "dataset_path" not in entry or "ratio" not in entry:
        raise DataError(f'{where} is not of the form {{"dataset_path": ..., "ratio": ...}}; repair it')
    path, ratio = entry["dataset_path"], entry["ratio"]
    if not isinstance(path, str) or not path:
        raise DataError(f"{where}: dataset_path {path!r} is not a path; repair it")
    if any(character.isspace() or character in ',"' for character in path):
        raise DataError(f"{where}: dataset_path {path!r} holds a space, a comma or a quote; rename the data set")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not math.isfinite(ratio) or ratio <= 0:
        raise DataError(f"{where}: ratio {ratio!r} of {path} is not a number above 0; repair it, or take the entry out")
    return Ratio(path, ratio)


def sum_warning(ratios: Sequence[Ratio]) -> str | None:
    """What is to be said when ratios do not sum to 1; they are normalised when they are used."""
    total = math.fsum(ratio.ratio for ratio in ratios)
    if abs(total - 1) <= SUM_TOLERANCE:
        return None
    return f"the {len(ratios)} ratios sum to {total!r}, not to 1: a data set may be missing or given twice"


def range_of(split: str, shares: str) -> str:
    """Which part START:END of every data set a split reads. Raises DataError when its share is zero."""
    parts = parse_split(shares)
    place = SPLITS.index(split)
    if parts[place] == 0:
        raise DataError(f"--shares {shares} leaves {split} no part of the data; give it a share, such as 949,50,1")
    return f"{_bound(sum(parts[:place]))}:{_bound(sum(parts[: place + 1]))}"


def _bound(value: float) -> str:
    """A fraction as the original wrote it: three digits where they are enough."""
    value = round(value, 12)
    if value in (0, 1):
        return "0" if value == 0 else "1.0"
    return f"{value:.3f}" if round(value, 3) == value else repr(value)


def groups_line(ratios: Sequence[Ratio], split: str, shares: str = SHARES) -> str:
    """The line of a file of groups: the mixture, and for `valid` each data set by itself as well.

    `shares` of training, validation and test, as `949,50,1`. Raises DataError for a split without a share, and when two
    data sets would share a name.
    """
    part = range_of(split, shares)
    mixture = ", ".join(f"{ratio.ratio} {part} {ratio.dataset_path}" for ratio in ratios)
    groups = [f"{split}: {mixture}"]
    if split == "valid":
        groups += [f"valid_{ratio.language}: 1 {part} {ratio.dataset_path}" for ratio in ratios]
    parse_groups(groups)  # what is written can be read
    return " ".join(f'"{group}"' for group in groups) + "\n"


def write_groups(ratios: Sequence[Ratio], split: str, output: Path, shares: str = SHARES) -> bool:
    """Write the file of groups in one step; False when it is there already, byte for byte. Raises DataError.

    Any number of processes may do so at once: a reader finds one whole file or another, and never a mixture.
    """
    line = groups_line(ratios, split, shares)
    with explain_os_errors("writing", output):
        if output.is_file() and output.read_bytes() == line.encode():
            return False
        write_atomically(output, line)
    return True


def sampling_probabilities(prefixes: Sequence[str], alpha: float) -> tuple[Ratio, ...]:
    """Share of each data set: its part p of all tokens, raised to `alpha`, and normalised.

    An alpha below 1 lifts small data sets; 1 keeps their sizes, 0 makes all equal. Raises DataError.
    """
    if not math.isfinite(alpha) or alpha < 0:
        raise DataError(f"alpha {alpha} must be a number of at least 0; 0.3 to 1 is usual")
    tokens = [IndexedDataset(prefix).token_count for prefix in prefixes]
    powers = [(count / sum(tokens)) ** alpha for count in tokens]
    return tuple(Ratio(prefix, power / math.fsum(powers)) for prefix, power in zip(prefixes, powers, strict=True))


def write_ratios(ratios: Sequence[Ratio], output: Path) -> None:
    """Write a list of ratios in one step. Raises DataError."""
    entries = [{"dataset_path": ratio.dataset_path, "ratio": ratio.ratio} for ratio in ratios]
    with explain_os_errors("writing", output):
        write_atomically(output, json.dumps(entries, indent=1) + "\n")
