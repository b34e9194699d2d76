"""Rules between the keys of [data], [tokenizer], [checkpoint], [precision] and [debug]. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainer.config.card import Problem, TrainerConfig
from trainer.config.data import data_set_name
from trainer.config.kernel_choice import MULTIPLE, odd_sizes

# Of an index with one byte more for each sequence, its mode: whole, but of data that no one here
# trains on.
MULTIMODAL = (
    "is of multimodal data (it ends with a mode of each sequence), which is not trained on here; make the pair again"
    " from text alone"
)

# Of a group of data: it becomes part of file names, of log lines and of chart names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# Families that are trained on masked words, and the special tokens for which a sample has room.
MASKING_TOKENS = {"bert": 3, "t5": 2}


def data_problems(config: TrainerConfig) -> list[Problem]:
    """What [data] says twice, or not at all, or against another section."""
    return [
        *_source_problems(config),
        *_share_problems(config),
        *_document_problems(config),
        *_masking_problems(config),
    ]


def _source_problems(config: TrainerConfig) -> Iterator[Problem]:
    data = config.data
    groups = {
        "train": (data.train_group, data.train_groups_file),
        "valid": (data.valid_groups, data.valid_groups_file),
        "test": (data.test_groups, data.test_groups_file),
    }
    for name, (written, file) in groups.items():
        if name == "train":
            key = "data.train_group"
        else:
            key = f"data.{name}_groups"
        if written and file:
            yield Problem(
                key, None, f"and data.{name}_groups_file both say the same", "keep one of the two"
            )
        if name != "train" and (written or file) and not data.uses_groups:
            yield Problem(
                key,
                None,
                "needs a training group too",
                "add data.train_group or data.train_groups_file",
            )
    if data.uses_groups and data.prefixes:
        yield Problem(
            "data.prefixes", data.prefixes, "excludes named groups", "keep prefixes or the groups"
        )
    if not data.uses_groups and not data.prefixes:
        yield Problem(
            "data.prefixes", None, "is empty, and there are no groups", "name what is trained on"
        )
    if data.uses_groups and data.weights is not None:
        yield Problem(
            "data.weights",
            data.weights,
            "belongs to data.prefixes",
            "remove it; groups have weights",
        )
    if data.validate_each:
        yield from _each_problems(config)
    if (
        data.uses_groups
        and config.evaluation.iterations
        and not (data.valid_groups or data.valid_groups_file)
    ):
        yield Problem(
            "data.valid_groups",
            None,
            "is needed by evaluation.iterations",
            "add data.valid_groups, or set evaluation.iterations = 0",
        )


def _each_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Each data set has a name of its own, and something to be validated on."""
    data = config.data
    if data.uses_groups:
        yield Problem(
            "data.validate_each", True, "belongs to data.prefixes", "remove it; groups are named"
        )
        return
    names = [data_set_name(prefix) for prefix in data.prefixes]
    double = next((name for name in names if names.count(name) > 1), None)
    if not all(NAME.fullmatch(name) for name in names):
        rule = "names each validation set after its data set's folder, and one of them has no such name"
        yield Problem(
            "data.validate_each",
            True,
            rule,
            "use letters, digits, '.', '_' and '-' in names of folders",
        )
    elif double is not None:
        rule = f"names each validation set after its data set's folder, and two are in folders called {double!r}"
        yield Problem("data.validate_each", True, rule, "keep each data set in a folder of its own")


def _share_problems(config: TrainerConfig) -> Iterator[Problem]:
    data = config.data
    if data.uses_groups or not data.prefixes:
        return
    if data.weights is not None and len(data.weights) != len(data.prefixes):
        rule = f"needs one entry per data.prefixes ({len(data.prefixes)})"
        yield Problem("data.weights", data.weights, rule, "add or remove weights")
    if data.weights is not None and (
        min(data.weights, default=0) < 0 or not 0 < sum(data.weights) < float("inf")
    ):
        rule = "must not be negative, nor all zero, nor sum to infinity"
        yield Problem("data.weights", data.weights, rule, "give shares such as 0.7 and 0.3")
    rule = "must be three shares such as 949,50,1 (train, validation, test), the first above zero"
    try:
        shares = [float(part) for part in data.split.split(",")]
    except ValueError:
        shares = []
    if (
        len(shares) != 3
        or min(shares) < 0
        or not 0 < shares[0] < float("inf")
        or sum(shares) == float("inf")
    ):
        yield Problem("data.split", data.split, rule, "write three numbers with commas")
    elif config.evaluation.iterations and shares[1] == 0:
        rule = "leaves no validation data for [evaluation]"
        fix = "give the second share a value or set evaluation.iterations = 0"
        yield Problem("data.split", data.split, rule, fix)


def _document_problems(config: TrainerConfig) -> Iterator[Problem]:
    data, token = config.data, config.data.end_of_document_id
    if data.marks_documents and token is None:
        rule = "is needed by reset_position_ids, reset_attention_mask and mask_end_of_document_loss"
        yield Problem(
            "data.end_of_document_id", None, rule, "give the id of the token that ends a document"
        )
    if token is not None and token >= config.tokenizer.padded_vocabulary_size:
        rule = f"must be below tokenizer.padded_vocabulary_size ({config.tokenizer.padded_vocabulary_size})"
        yield Problem("data.end_of_document_id", token, rule, "give the id that the tokenizer uses")


def _masking_problems(config: TrainerConfig) -> Iterator[Problem]:
    """What samples with masked words need."""
    family, length, named = str(config.model.family), config.model.sequence_length, config.tokenizer
    special = MASKING_TOKENS.get(family)
    if special is None:
        return
    if length < special + 2:
        rule = f"leaves no room for words beside the {special} special tokens of {family}"
        yield Problem("model.sequence_length", length, rule, f"use {special + 2} or more")
    if named.type == "gpt2_bpe" or (named.path is None and named.vocabulary_file is None):
        rule = f"must be a WordPiece vocabulary for model.family = {family}"
        fix = 'set tokenizer.type = "bert_wordpiece_lower" and tokenizer.vocabulary_file'
        yield Problem("tokenizer.type", named.type, rule, fix)
    if config.data.marks_documents:
        rule = f"has no meaning for model.family = {family}: a sample is of one document"
        keys = ("reset_position_ids", "reset_attention_mask", "mask_end_of_document_loss")
        key = next(key for key in keys if getattr(config.data, key))
        yield Problem(f"data.{key}", True, rule, "leave it out")


def tokenizer_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Sizes of the vocabulary that do not fit together, and files that the tokenizer's type needs."""
    tokenizer = config.tokenizer
    size, rows, multiple = (
        tokenizer.vocabulary_size,
        tokenizer.padded_vocabulary_size,
        tokenizer.divisible_by,
    )
    if size is not None and rows < size:
        rule = f"must be at least tokenizer.vocabulary_size ({size})"
        yield Problem("tokenizer.padded_vocabulary_size", rows, rule, "raise it or leave it out")
    if multiple is not None and rows % multiple:
        rule = f"must be a multiple of tokenizer.divisible_by ({multiple})"
        fix = f"use {-(-rows // multiple) * multiple}"
        yield Problem("tokenizer.padded_vocabulary_size", rows, rule, fix)
    if tokenizer.type == "gpt2_bpe" and (tokenizer.vocabulary_file is None) != (
        tokenizer.merges_file is None
    ):
        rule = "gpt2_bpe needs both vocab.json and merges.txt"
        yield Problem("tokenizer.merges_file", tokenizer.merges_file, rule, "name both files")
    if tokenizer.type != "huggingface" and tokenizer.path is not None:
        rule = f"is for huggingface tokenizers, not for {tokenizer.type}"
        yield Problem("tokenizer.path", tokenizer.path, rule, "use tokenizer.vocabulary_file")


def checkpoint_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Keys without the one that they belong to."""
    if config.checkpoint.finetune and config.checkpoint.load is None:
        rule = "needs checkpoint.load: what it starts from"
        yield Problem("checkpoint.finetune", True, rule, "name the folder of checkpoints")


def precision_problems(config: TrainerConfig) -> Iterator[Problem]:
    """Loss scales where nothing is scaled; 8-bit floats where the other numbers or the sizes forbid
    them.
    """
    precision, odd = config.precision, None
    if precision.float8 and precision.dtype != "bf16":
        rule = f"is for bf16, not {precision.dtype}"
        yield Problem("precision.float8", True, rule, "leave it out, or use bf16")
        return
    if precision.float8:
        odd = next(odd_sizes(config.model, config.parallel.tensor), None)
    if odd is not None:
        rule = f"needs multiples of {MULTIPLE}: {odd[0]} is {odd[1]}"
        yield Problem("precision.float8", True, rule, "change that, or leave this out")
    elif precision.loss_scale is not None and precision.dtype != "fp16":
        rule = f"is for fp16; {precision.dtype} needs no loss scale"
        yield Problem("precision.loss_scale", precision.loss_scale, rule, "remove it")


def debug_problems(config: TrainerConfig) -> list[Problem]:
    """Ranges of iterations that are empty."""
    return [
        Problem("debug.iterations", text, "ends before it starts", "write FIRST-LAST")
        for text in config.debug.iterations
        if int(text.split("-")[0]) > int(text.split("-")[1])
    ]
