"""Options of the old trainer that are no key of the run card by themselves, and why. Part of `options_table`."""

from __future__ import annotations

from tr11ops.importer.options import ALL_VALUES, OptionRule
from tr11ops.importer.results import LeftReason


def _left(reason: LeftReason, why: str, options: str) -> list[OptionRule]:
    """Rules for options in `options`: `--switch`, `--one-value:1`, `--many-values:*`."""
    rules = []
    for entry in options.split():
        option, _, count = entry.partition(":")
        rules.append(OptionRule(option, ALL_VALUES if count == "*" else int(count or 0), note=why, reason=reason))
    return rules


# Read by `placing` together with others, because several of them say one thing.
TOGETHER = [
    *_left(LeftReason.ELSEWHERE, "run.directory and run.variant say where checkpoints lie", "--save:1"),
    *_left(LeftReason.ELSEWHERE, "a run resumes from its own directory", "--load:1"),
    *_left(LeftReason.ELSEWHERE, "follows from run.directory, run.name and run.variant", "--tensorboard-dir:1"),
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
    *_left(LeftReason.ELSEWHERE, "optimizer.type and embedding_init, model.embedding_layernorm", "--use-bnb-optimizer"),
    *_left(LeftReason.ELSEWHERE, "optimizer.embedding_alpha", "--alpha:1"),
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
    ("the trainer writes it; the script's own is read here", "--deepspeed_config:1 --deepspeed-config:1"),
    ("the optimizer state is always cut over the data-parallel ranks (ZeRO stage 1)", "--zero-stage:1"),
    ("one kind of activation checkpointing serves both", "--deepspeed-activation-checkpointing"),
    (
        "duplicated parameters stay equal by construction, and that is checked at every save",
        "--sync-tp-duplicated-parameters --layernorm-tp-auto-sync",
    ),
    ("checkpoints are topology-free: any shape loads any of them, without a conversion", "--universal-checkpoint"),
    ("energy accounting was a no-op in the original", "--codecarbon-dir:1"),
    ("chosen by the device: nccl on GPUs, gloo on CPUs", "--distributed-backend:1"),
    ("given to every worker by its launcher", "--local_rank:1 --local-rank:1 --rank:1 --world-size:1"),
    ("logs have one place: below the run directory", "--log-path:1"),
    ("the workers' logs hold everything; `tr11 logs` selects", "--log-level:1 --log-level-replica:1"),
    ("one block is recomputed at a time", "--checkpoint-num-layers:1"),
    (
        "fused or not, the numbers are the same; the trainer chooses",
        (
            "--no-masked-softmax-fusion --masked-softmax-fusion --bias-gelu-fusion --no-bias-dropout-fusion "
            "--scaled-upper-triang-masked-softmax-fusion --scaled-masked-softmax-fusion --use-flash-attn "
            "--no-gradient-accumulation-fusion"
        ),
    ),
    (
        "softmax is always computed in fp32",
        "--attention-softmax-in-fp32 --apply-query-key-layer-scaling --no-query-key-layer-scaling",
    ),
    ("the cross-entropy is computed in fp32", "--fp16-lm-cross-entropy"),
    (
        "gradients are accumulated and reduced in fp32",
        "--accumulate-allreduce-grads-in-fp32 --fp32-allreduce",
    ),
    (
        "where stages are cut in parts, no message is waited for before it is needed",
        "--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush",
    ),
    ("there is one implementation", "--DDP-impl:1 --transformer-impl:1"),
    (
        "not needed",
        (
            "--no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp --use-cpu-initialization "
            "--lazy-mpu-init:1 --no-scatter-gather-tensors-in-pipeline --synchronize-each-layer "
            "--contigious-checkpointing --checkpoint-in-cpu --profile-backward --no-pipeline-parallel "
            "--use-pin-memory --scattered-embeddings --split-transformers --data-parallel-random-init "
            "--empty-unused-memory-each-iter:1 --mmap-warmup --repeated-dataloader"
        ),
    ),
]

_DECISIONS = [
    ("it evaluates instead of training, whatever word follows it: use `tr11 eval`", "--eval-only:*"),
    ("it serves a model instead of training it", "--inference"),
    (
        "it makes another model, for which there is no key",
        (
            "--apply-residual-connection-post-layernorm --openai-gelu --onnx-safe --fp32-residual-connection "
            "--untie-embeddings-and-output-weights --swiglu --disable-bias-linear "
            "--use-rotary-position-embeddings --glu-activation:1 --num-experts:* --normalization:1"
        ),
    ),
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
        LeftReason.NO_COUNTERPART, "tr11 queues the next attempt itself: `tr11 launch --array`", "--adlr-autoresume"
    ),
]
