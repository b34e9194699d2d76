"""The options of the old trainer, one rule each: its key in the run card, or what becomes of it and
why.
"""

from __future__ import annotations

from collections.abc import Mapping

from tr11ops.importer.options import (
    ALL_VALUES,
    Converter,
    LeftReason,
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
from trainer.config.model import OLD_NAMES

# Options of the old trainer that are no key of the run card by themselves, and why. Part of
# `options_table`.


def _left(reason: LeftReason, why: str, options: str) -> list[OptionRule]:
    """Rules for options in `options`: `--switch`, `--one-value:1`, `--many-values:*`."""
    rules = []
    for entry in options.split():
        option, _, count = entry.partition(":")
        rules.append(
            OptionRule(
                option, ALL_VALUES if count == "*" else int(count or 0), note=why, reason=reason
            )
        )
    return rules


# Read by `placing` together with others, because several of them say one thing.
TOGETHER = [
    *_left(
        LeftReason.ELSEWHERE, "run.directory and run.variant say where checkpoints lie", "--save:1"
    ),
    *_left(LeftReason.ELSEWHERE, "a run resumes from its own directory", "--load:1"),
    *_left(
        LeftReason.ELSEWHERE,
        "follows from run.directory, run.name and run.variant",
        "--tensorboard-dir:1",
    ),
    *_left(LeftReason.ELSEWHERE, "data.prefixes and data.weights", "--data-path:*"),
    *_left(LeftReason.ELSEWHERE, "precision.initial_scale_power", "--initial-loss-scale:1"),
    *_left(LeftReason.ELSEWHERE, "precision.min_loss_scale", "--min-loss-scale:1"),
    *_left(
        LeftReason.ELSEWHERE,
        "model.activation_checkpointing, recompute_granularity and recompute_blocks",
        "--recompute-activations --recompute-granularity:1 --recompute-method:1 --recompute-num-layers:1",
    ),
    *_left(
        LeftReason.ELSEWHERE,
        "parallel.virtual_stages",
        "--num-layers-per-virtual-pipeline-stage:1 --num-virtual-stages-per-pipeline-rank:1 "
        "--virtual-pipeline-model-parallel-size:1 --microbatch-group-size-per-virtual-pipeline-stage:1",
    ),
    *_left(
        LeftReason.ELSEWHERE,
        "optimizer.type and embedding_init, model.embedding_layernorm",
        "--use-bnb-optimizer",
    ),
    *_left(LeftReason.ELSEWHERE, "optimizer.embedding_alpha", "--alpha:1"),
    *_left(
        LeftReason.ELSEWHERE,
        "model.position_embedding and rotary_base",
        "--use-rotary-position-embeddings --no-position-embedding --rotary-base:1 --rotary-percent:1",
    ),
    *_left(
        LeftReason.ELSEWHERE, "model.rotary_factor", "--use-rope-scaling --rope-scaling-factor:1"
    ),
    *_left(
        LeftReason.ELSEWHERE,
        "model.key_value_heads",
        "--group-query-attention --num-query-groups:1",
    ),
    *_left(LeftReason.ELSEWHERE, "model.activation and ffn_hidden_size", "--swiglu"),
    *_left(LeftReason.ELSEWHERE, "model.qk_norm", "--qk-layernorm"),
    *_left(LeftReason.ELSEWHERE, "model.layers", "--encoder-num-layers:1 --decoder-num-layers:1"),
    *_left(LeftReason.ELSEWHERE, "tokenizer.path", "--tokenizer-model:1"),
    *_left(
        LeftReason.ELSEWHERE,
        "data.train_group, valid_groups and test_groups",
        "--train-data-path:* --valid-data-path:* --test-data-path:*",
    ),
    *_left(
        LeftReason.DROPPED, "with no token masked it is the same mean", "--calculate-per-token-loss"
    ),
    *_left(LeftReason.ELSEWHERE, "a sequence is not cut over ranks", "--context-parallel-size:1"),
    *_left(
        LeftReason.ELSEWHERE,
        "data.mask_probability, short_sequence_probability and binary_head",
        "--mask-prob:1 --short-seq-prob:1 --bert-no-binary-head",
    ),
    *_left(
        LeftReason.ELSEWHERE,
        "model.decoder_sequence_length and data.extra_ids",
        "--decoder-seq-length:1 --vocab-extra-ids:1",
    ),
]

_DROPPED = [
    ("the trainer always runs on DeepSpeed", "--deepspeed"),
    (
        "the trainer writes it; the script's own is read here",
        "--deepspeed_config:1 --deepspeed-config:1",
    ),
    (
        "the optimizer state is always cut over the data-parallel ranks (ZeRO stage 1)",
        "--zero-stage:1",
    ),
    ("one kind of activation checkpointing serves both", "--deepspeed-activation-checkpointing"),
    (
        "duplicated parameters stay equal by construction, and that is checked at every save",
        "--sync-tp-duplicated-parameters --layernorm-tp-auto-sync",
    ),
    (
        "checkpoints are topology-free: any shape loads any of them, without a conversion",
        "--universal-checkpoint",
    ),
    ("energy accounting was a no-op in the original", "--codecarbon-dir:1"),
    ("chosen by the device: nccl on GPUs, gloo on CPUs", "--distributed-backend:1"),
    (
        "given to every worker by its launcher",
        "--local_rank:1 --local-rank:1 --rank:1 --world-size:1",
    ),
    ("logs have one place: below the run directory", "--log-path:1"),
    (
        "the workers' logs hold everything; `tr11 logs` selects",
        "--log-level:1 --log-level-replica:1 --logging-level:1",
    ),
    ("one block is recomputed at a time", "--checkpoint-num-layers:1"),
    (
        "fused or not, the numbers are the same; the trainer chooses",
        (
            "--no-masked-softmax-fusion --masked-softmax-fusion --bias-gelu-fusion --no-bias-dropout-fusion "
            "--scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion --use-flash-attn "
            "--no-gradient-accumulation-fusion --attention-backend:1 --cross-entropy-loss-fusion "
            "--cross-entropy-fusion-impl:1 --no-rope-fusion --no-persist-layer-norm --no-bias-swiglu-fusion "
            "--tp-comm-overlap"
        ),
    ),
    (
        "softmax is always computed in fp32",
        "--attention-softmax-in-fp32 --apply-query-key-layer-scaling --no-query-key-layer-scaling",
    ),
    ("the cross-entropy is computed in fp32", "--fp16-lm-cross-entropy"),
    (
        "gradients are accumulated and reduced in fp32",
        "--accumulate-allreduce-grads-in-fp32 --fp32-allreduce --grad-reduce-in-bf16 --main-grads-dtype:1",
    ),
    (
        "where stages are cut in parts, no message is waited for before it is needed",
        "--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush",
    ),
    (
        "there is one implementation",
        "--DDP-impl:1 --transformer-impl:1 --use-mcore-models --use-legacy-models",
    ),
    (
        "the optimizer state is always cut over the data-parallel ranks, and kept in fp32",
        "--use-distributed-optimizer --use-precision-aware-optimizer",
    ),
    ("weights are kept as 1 + what is learned there: the same numbers", "--apply-layernorm-1p"),
    (
        "messages go beside the passes wherever they can",
        "--overlap-grad-reduce --overlap-param-gather",
    ),
    (
        "tr11's float8 has its own scales, and weights stay in bf16",
        (
            "--fp8-amax-history-len:1 --fp8-amax-compute-algo:1 --fp8-param-gather --fp8-margin:1 --fp8-interval:1 "
            "--fp8-recipe:1"
        ),
    ),
    (
        "what is not finite is always looked for, and never saved",
        "--no-check-for-nan-in-loss-and-grad",
    ),
    (
        "checkpoints have one format that loads in any shape, and are written beside the steps",
        (
            "--ckpt-format:1 --dist-ckpt-format:1 --use-dist-ckpt --async-save --ckpt-fully-parallel-load "
            "--ckpt-fully-parallel-save --use-persistent-ckpt-worker --ckpt-assume-constant-structure "
            "--auto-detect-ckpt-format"
        ),
    ),
    ("any worker's USR1 or TERM means: save and leave", "--exit-signal-handler"),
    ("each log line has the throughput", "--log-throughput --log-progress"),
    (
        "not needed",
        (
            "--no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp --use-cpu-initialization "
            "--lazy-mpu-init:1 --no-scatter-gather-tensors-in-pipeline --synchronize-each-layer "
            "--contigious-checkpointing --checkpoint-in-cpu --profile-backward --no-pipeline-parallel "
            "--use-pin-memory --scattered-embeddings --split-transformers --data-parallel-random-init "
            "--empty-unused-memory-each-iter:1 --mmap-warmup --repeated-dataloader --manual-gc --manual-gc-interval:1 "
            "--empty-unused-memory-level:1 --no-mmap-bin-files --no-create-attention-mask-in-dataloader "
            "--num-dataset-builder-threads:1"
        ),
    ),
]

_DECISIONS = [
    (
        "it evaluates instead of training, whatever word follows it: use `tr11 eval`",
        "--eval-only:*",
    ),
    ("it serves a model instead of training it", "--inference"),
    (
        "it makes another model, for which there is no key",
        (
            "--apply-residual-connection-post-layernorm --openai-gelu --onnx-safe --fp32-residual-connection "
            "--glu-activation:1 --squared-relu --quick-geglu "
            "--rotary-seq-len-interpolation-factor:1 --rotary-interleaved --multi-latent-attention --window-size:* "
            "--mtp-num-layers:1 --num-experts:* --moe-router-topk:1 --moe-router-load-balancing-type:1 "
            "--moe-aux-loss-coeff:1 --moe-grouped-gemm --moe-token-dispatcher-type:1 --expert-model-parallel-size:1 "
            "--moe-expert-parallel-size:1 --moe-loss-coeff:1 --moe-train-capacity-factor:1 "
            "--moe-eval-capacity-factor:1 --moe-min-capacity:1"
        ),
    ),
    (
        "it warms up by tokens: give schedule.warmup_samples, the tokens divided by the sequence's length",
        "--lr-warmup-tokens:1",
    ),
    (
        "it cuts sequences over ranks of their own, for which there is no key",
        "--ds-sequence-parallel-size:1",
    ),
    (
        "embedding and output learn at the same rate as all else: there is no key",
        "--decoupled-lr:1 --decoupled-min-lr:1",
    ),
    ("it trains on tokens that no one wrote: name data.prefixes", "--mock-data"),
    ("the model's shape was the checkpoint's: fill in [model]", "--use-checkpoint-args"),
    (
        "it trains for another purpose, for which there is no key",
        (
            "--loss-on-targets-only --reweight-loss-based-on-position-frequency --prefixlm --noise-density:1 "
            "--mean-noise-span-length:1"
        ),
    ),
    ("optimizer state stays on the workers", "--cpu-optimizer --cpu_torch_adam"),
    (
        "ZeRO's later stages and off-loading do not go with a pipeline",
        "--remote-device:1 --zero-reduce-bucket-size:1 --zero-allgather-bucket-size:1 --tile-factor:1",
    ),
]

LEFT = [
    *TOGETHER,
    *(left for why, options in _DROPPED for left in _left(LeftReason.DROPPED, why, options)),
    *(left for why, options in _DECISIONS for left in _left(LeftReason.DECISION, why, options)),
    *_left(
        LeftReason.ELSEWHERE,
        "parallel.start_timeout_minutes and step_timeout_minutes",
        "--distributed-timeout-minutes:1",
    ),
    *_left(
        LeftReason.ELSEWHERE,
        "a running training is traced when someone asks: `tr11 profile`",
        "--profile --use-pytorch-profiler --profile-step-start:1 --profile-step-end:1 --profile-ranks:*",
    ),
    *_left(
        LeftReason.NO_COUNTERPART,
        "curves go to TensorBoard's events and `tr11 report`",
        "--wandb-project:1 --wandb-exp-name:1 --wandb-save-dir:1",
    ),
    *_left(LeftReason.NO_COUNTERPART, "there is no curve of memory", "--log-memory-to-tensorboard"),
    *_left(
        LeftReason.NO_COUNTERPART,
        "there is no curve of the optimizer's state",
        "--log-optimizer-states-to-tensorboard",
    ),
    *_left(
        LeftReason.NO_COUNTERPART,
        "tr11 queues the next attempt itself: `tr11 launch --array`",
        "--adlr-autoresume",
    ),
]


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
    return OptionRule(option, count, key=key, convert=convert, note=note)


def _switch(option: str, key: str, convert: Converter = on, note: str = "") -> OptionRule:
    return OptionRule(option, 0, key=key, convert=convert, note=note)


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
        convert=ranges,
        note="whole global batches are skipped here; the original skipped one micro batch each",
        count=ALL_VALUES,
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

RULES: Mapping[str, OptionRule] = {kept.option: kept for kept in (*_KEYS, *LEFT)}
