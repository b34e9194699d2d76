"""The formats of a checkpoint: ours, DeepSpeed's (as the original wrote it, plain or universal), a
Hugging Face folder, and what the operation holds of another trainer's. What tells each, when it is
whole, and which of its files are what.

Here alone is said what the files are called; how they are read: `trainer.checkpoint.reader`.
Standard library and the contract only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Literal

from trainer.contract.record import Record

FormatName = Literal["tr11", "deepspeed", "huggingface", "foreign"]
Part = Literal["weights", "optimizer", "cursor", "random"]

# The names in a checkpoint of ours: what it says of itself, folders of each part, and the file that
# says where the training stood.
MANIFEST_FILE = "manifest.json"
WEIGHTS, OPTIMIZER, RNG = "weights", "optimizer", "rng"
CURSOR_FILE = "cursor.json"
# What is held of another trainer: where its files came from, and the folder in which they lie under
# the names that they have there.
FOREIGN_FILE, FOREIGN = "foreign.json", "foreign"
# The files of a Hugging Face folder: its facts, and its tensors in one file or, by an index, in many.
HF_CONFIG = "config.json"
HF_SINGLE, HF_INDEX = "model.safetensors", "model.safetensors.index.json"
HF_TORCH_SINGLE, HF_TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class Format(Record):
    """How a checkpoint lies in its folder; paths are relative to it.

    `folder`: the folder's name, with `*` for the step; "" where no name says one. Patterns of
    files, with `*` for anything but a slash: `marks`, any of which tells the format; `whole`, each
    of which a complete one has; `loadable`, any of which holds weights that the trainer reads.
    `parts`: how the paths of each part begin.
    """

    name: FormatName
    folder: str
    marks: tuple[str, ...]
    whole: tuple[str, ...]
    loadable: tuple[str, ...]
    parts: dict[Part, tuple[str, ...]]

    def folder_name(self, step: int) -> str:
        """What the folder of the checkpoint of one step is called."""
        return self.folder.replace("*", str(step))

    def step_of(self, name: str) -> int | None:
        """The step that a folder's name says, or None if it is not such a name."""
        match = re.fullmatch(re.escape(self.folder).replace(r"\*", r"(\d+)"), name)
        if match and match.groups():
            return int(match[1])
        return None

    def is_whole(self, paths: Collection[str]) -> bool:
        """Whether these files are a complete checkpoint, as far as names tell."""
        return all(_any_fits(pattern, paths) for pattern in self.whole)

    def has_loadable(self, place: Path) -> bool:
        """Whether the folder `place` holds weights in this format."""
        return any(next(place.glob(pattern), None) is not None for pattern in self.loadable)

    def is_for_resume_alone(self, path: str) -> bool:
        """Whether a file is of no use to who wants the weights: the optimizer's, random states."""
        behind = (*self.parts.get("optimizer", ()), *self.parts.get("random", ()))
        return path.startswith(behind) and not path.startswith(self.parts["weights"])


OWN = Format(
    name="tr11",
    folder="global_step*",
    marks=(f"{WEIGHTS}/*",),
    whole=(MANIFEST_FILE, f"{WEIGHTS}/*"),
    loadable=(f"{WEIGHTS}/*",),
    parts={
        "weights": (f"{WEIGHTS}/",),
        "optimizer": (f"{OPTIMIZER}/",),
        "cursor": (CURSOR_FILE,),
        "random": (f"{RNG}/",),
    },
)
UNIVERSAL_WEIGHTS = "zero/*/fp32.pt"  # each parameter whole, in a folder of its own name
_LAYERS, _RANKS = "layer_*-model_*-model_states.pt", "mp_rank_*_model_states.pt"
DEEPSPEED = Format(
    name="deepspeed",
    folder="global_step*",
    marks=(_RANKS, _LAYERS, UNIVERSAL_WEIGHTS),
    whole=(_RANKS,),
    loadable=(_LAYERS, UNIVERSAL_WEIGHTS),
    parts={
        "weights": ("layer_", "zero/"),
        "optimizer": ("bf16", "zero_pp_rank_", "zero/"),
        "cursor": ("mp_rank_",),
    },
)
HUGGING_FACE = Format(
    name="huggingface",
    folder="",
    marks=(HF_SINGLE, HF_INDEX, HF_TORCH_SINGLE, HF_TORCH_INDEX),
    whole=(HF_CONFIG,),
    loadable=(HF_SINGLE, HF_INDEX, HF_TORCH_SINGLE, HF_TORCH_INDEX),
    parts={"weights": ("model", "pytorch_model")},
)
# Which of its files are weights is the other trainer's matter: each of them is of every part, so that
# no part of one is ever copied or resumed from.
HELD = Format(
    name="foreign",
    folder="global_step*",
    marks=(FOREIGN_FILE,),
    whole=(MANIFEST_FILE, FOREIGN_FILE),
    loadable=(),
    parts={"weights": (f"{FOREIGN}/",), "optimizer": (FOREIGN_FILE,), "cursor": (f"{FOREIGN}/",)},
)
SAVED_FORMATS = (OWN, DEEPSPEED, HELD)
"""What a training saves step by step, and resumes from."""


def is_whole(paths: Collection[str]) -> bool:
    """Whether these files are a complete checkpoint of a step, in whatever format."""
    return any(form.is_whole(paths) for form in SAVED_FORMATS)


def format_of(paths: Collection[str]) -> Format | None:
    """The format of a step's checkpoint, by the names of its files: the one in which it is whole,
    else the one whose marks it has; None where nothing tells.
    """
    whole = [form for form in SAVED_FORMATS if form.is_whole(paths)]
    marked = [form for form in SAVED_FORMATS if any(_any_fits(mark, paths) for mark in form.marks)]
    return next(iter(whole + marked), None)


def format_at(place: Path) -> Format:
    """The format in which the weights in a step's folder can be loaded; ours where there are none."""
    return next((form for form in SAVED_FORMATS if form.has_loadable(place)), OWN)


def part_prefixes(part: Part) -> tuple[str, ...]:
    """How the paths of a part begin, in whatever format a training saves."""
    return tuple(start for form in SAVED_FORMATS for start in form.parts.get(part, ()))


def _any_fits(pattern: str, paths: Collection[str]) -> bool:
    fits = _compiled(pattern).fullmatch
    return any(fits(path) for path in paths)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", "[^/]*"))
