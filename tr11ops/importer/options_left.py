"""Options of the old trainer that are no key of the run card by themselves, and why. Part of
`options_table`.
"""

from __future__ import annotations

from tr11ops.importer.options import ALL_VALUES, OptionRule
from tr11ops.importer.results import LeftReason


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
            "--moe-aux-loss-coeff:1 --moe-grouped-gemm --moe-token-dispatcher-type:1 --expert-model-parallel-size:1"
        ),
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
    *(rule for why, options in _DROPPED for rule in _left(LeftReason.DROPPED, why, options)),
    *(rule for why, options in _DECISIONS for rule in _left(LeftReason.DECISION, why, options)),
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
        "tr11 queues the next attempt itself: `tr11 launch --array`",
        "--adlr-autoresume",
    ),
]
