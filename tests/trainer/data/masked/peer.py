"""megatron-core's map builder and sample classes, without the parts of it that look for GPU
libraries.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import distribution
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.data.masked.sample_map import MapRules
from trainer.data.masked.vocabulary import MaskingVocabulary

FOLDER = "megatron/core/datasets"
PARENTS = ("", ".core", ".core.utils", ".core.datasets")
NEIGHBOURS = (
    "blended_megatron_dataset_config",
    "indexed_dataset",
    "megatron_dataset",
    "utils",
    "helpers",
)


class _Anything(ModuleType):
    """A module of which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _load(name: str, file: str) -> ModuleType:
    place = distribution("megatron-core").locate_file(f"{FOLDER}/{file}")
    spec = importlib.util.spec_from_file_location(name, str(place))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def builder() -> ModuleType:
    """The compiled map builder."""
    [file] = [
        path.name
        for path in distribution("megatron-core").files or ()
        if path.name.startswith("helpers_cpp")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "helpers_cpp", raising=False)
        module = _load("helpers_cpp", file)
        del sys.modules["helpers_cpp"]
    return module


@cache
def sample_classes() -> tuple[type, type]:
    """The classes of BERT's and T5's samples."""
    with pytest.MonkeyPatch.context() as patch:
        for parent in PARENTS:
            patch.setitem(sys.modules, f"megatron{parent}", _Anything(f"megatron{parent}"))
        for neighbour in NEIGHBOURS:
            name = f"megatron.core.datasets.{neighbour}"
            patch.setitem(sys.modules, name, _Anything(name))
        for name in ("masked_dataset", "bert_dataset", "t5_dataset"):
            whole = f"megatron.core.datasets.{name}"
            patch.setitem(sys.modules, whole, ModuleType(whole))
            _load(whole, f"{name}.py")
        bert, t5 = (
            sys.modules["megatron.core.datasets.bert_dataset"],
            sys.modules["megatron.core.datasets.t5_dataset"],
        )
        return bert.BERTMaskedWordPieceDataset, t5.T5MaskedWordPieceDataset


def their_map(
    sizes: np.ndarray, documents: np.ndarray, samples: int, rules: MapRules
) -> np.ndarray:
    rows: np.ndarray = builder().build_mapping(
        documents.astype(np.int64), sizes.astype(np.int32), 2**31 - 2, samples, rules.longest, rules.short_probability,
        rules.seed, False, rules.least_sentences,
    )  # fmt: skip
    return rows


def their_samples(
    kind: type,
    sentences: Sequence[np.ndarray],
    rows: np.ndarray,
    vocabulary: MaskingVocabulary,
    seed: int,
    **config: Any,
) -> Any:
    """A data set of the given class, whose samples can be asked for by number."""
    continues = vocabulary.continues
    tokenizer = SimpleNamespace(
        cls=vocabulary.cls, sep=vocabulary.sep, mask=vocabulary.mask, pad=vocabulary.pad, bos=vocabulary.begin,
        eos=vocabulary.end, additional_special_tokens_ids=list(vocabulary.sentinels),
        inv_vocab={number: f"##{number}" if continues[number] else str(number) for number in range(vocabulary.size)},
    )  # fmt: skip
    data = object.__new__(kind)
    data.dataset, data.sample_index, data._pad_token_id = sentences, rows, vocabulary.pad
    data.token_lookup = list(tokenizer.inv_vocab)
    data.config = SimpleNamespace(
        tokenizer=tokenizer, random_seed=seed, masking_use_longer_ngrams=False, masking_do_permutation=False,
        masking_do_full_word=True, **config,
    )  # fmt: skip
    return data
