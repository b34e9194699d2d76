"""The options of the old trainer, one rule each: its key in the run card, or what becomes of it and
why.
"""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.importer.options import (
    ALL_VALUES,
    Converter,
    OptionRule,
    always,
    groups,
    integer,
    number,
    off,
    on,
    one_group,
    one_of,
    ramp,
    ranges,
    split_shares,
    text,
    whole_if_possible,
)
from tr11ops.importer.options_left import LEFT
from trainer.config.optimizer_names import OLD_NAMES

_TOKENIZERS = one_of(
    PretrainedFromHF="huggingface",
    HuggingFaceTokenizer="huggingface",
    GPT2BPETokenizer="gpt2_bpe",
    BertWordPieceCase="bert_wordpiece",
    BertWordPieceLowerCase="bert_wordpiece_lower",
)

# `1-sqrt` is what a fork called it before Megatron had it.
_COOLDOWNS = {
    "exponential": "exponential",
    "linear": "linear",
    "cosine": "cosine",
    "minus_sqrt": "minus_sqrt",
    "1-sqrt": "minus_sqrt",
}


def _key(option: str, key: str, convert: Converter, note: str = "", count: int = 1) -> OptionRule:
    return OptionRule(option, count, key, convert, note)


def _switch(option: str, key: str, convert: Converter = on, note: str = "") -> OptionRule:
    return OptionRule(option, 0, key, convert, note)


# Names of the old trainers, and the keys that mean the same. Their `lamb` was Apex's.
OPTIMIZERS: Mapping[str, Mapping[str, str]] = {
    "adam": {"type": "adamw"},
    "adamw": {"type": "adamw"},
    "lamb": {"type": "lamb", "lamb_variant": "apex"},
    **OLD_NAMES,
}

_KEYS = [
    # what is trained
    _key("--num-layers", "model.layers", integer),
    _key("--hidden-size", "model.hidden_size", integer),
    _key("--num-attention-heads", "model.attention_heads", integer),
    _key("--kv-channels", "model.kv_channels", integer),
    _key("--ffn-hidden-size", "model.ffn_hidden_size", integer),
    _key("--seq-length", "model.sequence_length", integer),
    _key("--encoder-seq-length", "model.sequence_length", integer),
    _key("--max-position-embeddings", "model.max_position_embeddings", integer),
    _key(
        "--position-embedding-type",
        "model.position_embedding",
        one_of(
            alibi="alibi",
            absolute="absolute",
            learned_absolute="absolute",
            rotary="rotary",
            rope="rotary",
        ),
    ),
    _key("--num-key-value-heads", "model.key_value_heads", integer),
    _key(
        "--normalization",
        "model.norm",
        one_of(LayerNorm="layernorm", RMSNorm="rmsnorm", layernorm="layernorm", rmsnorm="rmsnorm"),
    ),
    _switch("--disable-bias-linear", "model.linear_biases", off),
    _switch("--untie-embeddings-and-output-weights", "model.tied_embeddings", off),
    _switch("--embed-layernorm", "model.embedding_layernorm"),
    _key("--layernorm-epsilon", "model.layernorm_epsilon", number),
    _key("--norm-epsilon", "model.layernorm_epsilon", number),
    _key("--attention-dropout", "model.attention_dropout", number),
    _key("--hidden-dropout", "model.hidden_dropout", number),
    _key("--init-method-std", "model.init_std", number),
    _switch("--init-method-xavier-uniform", "model.init_method", always("xavier")),
    _switch(
        "--no-bias-gelu-fusion",
        "model.activation",
        always("gelu"),
        "unfused, the exact GELU was used",
    ),
    _switch("--checkpoint-activations", "model.activation_checkpointing"),
    _switch("--partition-activations", "model.partition_activations"),
    _switch("--abort-on-unmet-fused-kernel-constraints", "model.require_fused_attention"),
    # how it is cut
    _key("--tensor-model-parallel-size", "parallel.tensor", integer),
    _key("--pipeline-model-parallel-size", "parallel.pipeline", integer),
    _key("--pp-partition-method", "parallel.partition", text),
    _switch("--sequence-parallel", "parallel.sequence_parallel"),
    # batch and length
    _key("--micro-batch-size", "batch.micro_batch_size", integer),
    _key("--batch-size", "batch.micro_batch_size", integer, "the older name of --micro-batch-size"),
    _key("--global-batch-size", "batch.global_batch_size", integer),
    _key("--rampup-batch-size", "batch.ramp", ramp, count=3),
    _key("--train-samples", "batch.train_samples", integer),
    _key("--train-iters", "batch.train_iterations", integer),
    _key("--train-tokens", "batch.train_tokens", integer),
    # optimizer and schedule
    _key(
        "--optimizer",
        "optimizer.type",
        one_of(**{word: keys["type"] for word, keys in OPTIMIZERS.items()}),
    ),
    _key("--adam-beta1", "optimizer.beta1", number),
    _key("--adam-beta2", "optimizer.beta2", number),
    _key("--adam-eps", "optimizer.epsilon", number),
    _key("--weight-decay", "optimizer.weight_decay", number),
    _key("--clip-grad", "optimizer.clip_grad", number),
    _key("--lr", "schedule.learning_rate", number),
    _key("--min-lr", "schedule.min_learning_rate", number),
    _key(
        "--lr-decay-style",
        "schedule.decay_style",
        one_of(constant="constant", linear="linear", cosine="cosine", WSD="wsd"),
    ),
    _key("--lr-wsd-decay-style", "schedule.cooldown_style", one_of(**_COOLDOWNS)),
    _key("--lr-wsd-decay-samples", "schedule.cooldown_samples", integer),
    _key("--lr-wsd-decay-iters", "schedule.cooldown_iterations", integer),
    _key("--lr-decay-samples", "schedule.decay_samples", integer),
    _key("--lr-decay-iters", "schedule.decay_iterations", integer),
    _key("--lr-decay-tokens", "schedule.decay_tokens", integer),
    _key("--lr-warmup-samples", "schedule.warmup_samples", integer),
    _key("--lr-warmup-iters", "schedule.warmup_iterations", integer),
    _key("--lr-warmup-fraction", "schedule.warmup_fraction", number),
    _switch("--override-lr-scheduler", "schedule.on_resume", always("override")),
    _switch("--use-checkpoint-lr-scheduler", "schedule.on_resume", always("checkpoint")),
    _switch("--override-opt_param-scheduler", "schedule.on_resume", always("override")),
    _switch("--use-checkpoint-opt_param-scheduler", "schedule.on_resume", always("checkpoint")),
    _switch("--bf16", "precision.dtype", always("bf16")),
    _switch("--fp16", "precision.dtype", always("fp16")),
    _key(
        "--fp8-format",
        "precision.float8",
        always(True),
        "scales of each tensor are found at each product",
    ),
    _switch("--fp8-hybrid", "precision.float8"),
    _switch("--fp8-e4m3", "precision.float8"),
    _key("--loss-scale", "precision.loss_scale", number),
    _key("--loss-scale-window", "precision.loss_scale_window", integer),
    _key("--hysteresis", "precision.hysteresis", integer),
    # data
    _key("--train-weighted-split-paths", "data.train_group", one_group, count=ALL_VALUES),
    _key("--valid-weighted-split-paths", "data.valid_groups", groups, count=ALL_VALUES),
    _key("--test-weighted-split-paths", "data.test_groups", groups, count=ALL_VALUES),
    _key("--train-weighted-split-paths-path", "data.train_groups_file", text),
    _key("--valid-weighted-split-paths-path", "data.valid_groups_file", text),
    _key("--test-weighted-split-paths-path", "data.test_groups_file", text),
    _key("--split", "data.split", split_shares, count=ALL_VALUES),
    _key(
        "--data-impl",
        "data.implementation",
        one_of(infer="infer", mmap="mmap", lazy="lazy", cached="cached"),
    ),
    _key("--dataloader-type", "data.order", one_of(single="single", cyclic="cyclic")),
    _key("--data-cache-path", "data.cache", text),
    _key("--num-workers", "data.workers", integer),
    _key("--valid-num-workers", "data.valid_workers", integer),
    _key(
        "--skip-train-iteration-range",
        "data.skip_ranges",
        ranges,
        "whole global batches are passed over here; the original passed over one micro batch each",
        ALL_VALUES,
    ),
    _switch("--reset-position-ids", "data.reset_position_ids"),
    _switch("--reset-attention-mask", "data.reset_attention_mask"),
    _switch("--eod-mask-loss", "data.mask_end_of_document_loss"),
    _key("--tokenizer-type", "tokenizer.type", _TOKENIZERS),
    _key("--tokenizer-name-or-path", "tokenizer.path", text),
    _key("--vocab-file", "tokenizer.vocabulary_file", text),
    _key("--merge-file", "tokenizer.merges_file", text),
    _key("--vocab-size", "tokenizer.vocabulary_size", integer),
    _key("--pad-vocab-size-to", "tokenizer.padded_vocabulary_size", integer),
    _key("--make-vocab-size-divisible-by", "tokenizer.divisible_by", integer),
    # the run
    _key("--seed", "run.seed", integer),
    _key("--kill-switch-path", "run.kill_switch", text),
    _key("--exit-duration-in-mins", "run.exit_duration_minutes", whole_if_possible),
    _switch("--exit-on-missing-checkpoint", "run.expect_resume"),
    _key("--exit-interval", "run.exit_interval", integer),
    _key("--save-interval", "checkpoint.interval", integer),
    _switch("--finetune", "checkpoint.finetune"),
    _switch("--no-load-optim", "checkpoint.load_optimizer", off),
    _switch("--no-load-rng", "checkpoint.load_random_state", off),
    _switch("--no-save-optim", "checkpoint.save_optimizer", off),
    _switch("--no-save-rng", "checkpoint.save_random_state", off),
    _key("--eval-interval", "evaluation.interval", integer),
    _key("--eval-iters", "evaluation.iterations", integer),
    _key("--log-interval", "logging.interval", integer),
    _switch("--log-params-norm", "logging.params_norm"),
    _switch("--log-num-zeros-in-grad", "logging.zeros_in_gradient"),
    _key("--tensorboard-log-interval", "logging.tensorboard_interval", integer),
    _key("--tensorboard-queue-size", "logging.tensorboard_queue", integer),
    _switch("--log-timers-to-tensorboard", "logging.tensorboard_timers"),
    _switch("--log-batch-size-to-tensorboard", "logging.tensorboard_batch_size"),
    _switch("--log-validation-ppl-to-tensorboard", "logging.tensorboard_validation_perplexity"),
    # its own spelling
    _switch("--no-log-learnig-rate-to-tensorboard", "logging.tensorboard_learning_rate", off),
    _switch("--no-log-learning-rate-to-tensorboard", "logging.tensorboard_learning_rate", off),
    _switch("--no-log-loss-scale-to-tensorboard", "logging.tensorboard_loss_scale", off),
]

RULES: Mapping[str, OptionRule] = {rule.option: rule for rule in (*_KEYS, *LEFT)}
