"""The cards of the original training, key by key, against what its scripts and its documents said.

The values here were typed from the description of the original, not read from the cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tr11ops.runcard.card import RunCard, load_card, shipped_folder
from trainer.data.samples import wanted_data

WORK, SCRATCH, STORE, WORKSF = "/site/work", "/site/scratch", "/site/store", "/site/worksf"
SITE = {
    "six_ALL_CCFRWORK": WORK, "six_ALL_CCFRSCRATCH": SCRATCH, "six_ALL_CCFRSTORE": STORE, "six_ALL_CCFRWORKSF": WORKSF,
    "TR11_ALERT_RECIPIENTS": "ana@site.org, ben@site.org",
}  # fmt: skip
TOKENIZER = "bigscience-catalogue-data-dev/byte-level-bpe-tokenizer-no-norm-250k-whitespace-and-eos-regex-alpha-v3-dedup-lines-articles"
SHARES = {
    "ar": 0.0330676168743166, "ca": 0.011242051312222764, "code": 0.13027200903379185, "en": 0.22171164529099704,
    "es": 0.10667815627928671, "eu": 0.0015595123898173287, "fr": 0.13054018439603915, "id": 0.01091803753667153,
    "indic-as": 0.00011021422347108609, "indic-bn": 0.005492381453597748, "indic-gu": 0.0004021215011318779,
    "indic-hi": 0.007470068593492175, "indic-kn": 0.0006190467776576425, "indic-ml": 0.0010335296343329384,
    "indic-mr": 0.0005012010684646179, "indic-ne": 0.0006672772956128299, "indic-or": 0.00035928138344705506,
    "indic-pa": 0.0005084433130291778, "indic-ta": 0.0021137328219915496, "indic-te": 0.0009129946225980253,
    "indic-ur": 0.0012454301613725426, "nigercongo-all": 0.00031588689199263235, "oscar-en": 0.08137213783015229,
    "oscar-zh": 0.055293935695898196, "pt": 0.04954150576361177, "vi": 0.02461641286531197,
    "zhs": 0.12091748245519074, "zht": 0.0005177025345001541,
}  # fmt: skip
DATA = f"{WORK}/bigscience-training/merged-meg-ds_v3_pii"


def prefix(name: str) -> str:
    """The tokenizer's id with `_` for `/`, then the language; OSCAR's two were made by another
    hand.
    """
    tokenizer = TOKENIZER.replace("/", "_")
    last = f"meg_ds_{tokenizer}" if name.startswith("oscar-") else f"{tokenizer}_{name}"
    return f"{DATA}/{name}/{last}_text_document"


CLONE = f"{WORK}/code/tr11-176B-ml/Megatron-DeepSpeed"
RUN = f"{SCRATCH}/checkpoints/tr11-176B-ml"

# What the scripts of all three say, and what follows from it.
SHARED: dict[str, Any] = {
    "run.seed": 42,
    "slurm.gpus_per_node": 8,
    "slurm.partition": "gpu_p5",
    "slurm.account": "six@a100",
    "slurm.constraint": "a100",
    "slurm.reservation": "hug",
    "slurm.quality_of_service": "qos_gpu-gc",
    "slurm.hint": "nomultithread",
    "slurm.cpus_per_task": 64,
    "slurm.output": "%x-%j.out",
    "slurm.environment.HF_DATASETS_OFFLINE": "1",
    "slurm.environment.TRANSFORMERS_OFFLINE": "1",
    "slurm.environment.TRANSFORMERS_CACHE": f"{WORK}/models",
    "slurm.environment.HF_DATASETS_CACHE": f"{WORK}/datasets",
    "slurm.environment.HF_MODULES_CACHE": f"{WORK}/modules",
    "slurm.environment.HF_METRICS_CACHE": f"{WORK}/metrics",
    "parallel.tensor": 4,
    "parallel.sequence_parallel": False,
    "parallel.partition": "type:transformer|embedding",
    "model.sequence_length": 2048,
    "model.position_embedding": "alibi",
    "model.embedding_layernorm": True,
    "model.init_std": 0.0048,
    "model.attention_dropout": 0.1,
    "model.hidden_dropout": 0.1,
    "model.layernorm_epsilon": 1e-5,
    "model.activation": "gelu_tanh",
    "model.activation_checkpointing": True,
    "model.require_fused_attention": True,
    "batch.micro_batch_size": 1,
    "batch.micro_batch_ramp": [{"from_batch": 784, "size": 2}],
    "batch.global_batch_size": 2048,
    "batch.train_samples": 220_000_000,
    "batch.ramp.start": 192,
    "batch.ramp.increment": 16,
    "batch.ramp.samples": 9_765_625,
    "optimizer.type": "adamw",
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.epsilon": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_grad": 1.0,
    "schedule.learning_rate": 6e-5,
    "schedule.min_learning_rate": 6e-6,
    "schedule.decay_style": "cosine",
    "schedule.decay_samples": 200_000_000,
    "schedule.warmup_samples": 183_105,
    "precision.dtype": "bf16",
    "evaluation.interval": 1000,
    "evaluation.iterations": 1,
    "data.prefixes": [prefix(name) for name in SHARES],
    "data.weights": list(SHARES.values()),
    "data.split": "950,50,0",
    "data.validate_each": True,
    "data.implementation": "mmap",
    "data.order": "single",
    "data.workers": 2,
    "data.valid_workers": 0,
    "tokenizer.type": "huggingface",
    "tokenizer.path": TOKENIZER,
    "tokenizer.padded_vocabulary_size": 250_880,
    "logging.interval": 1,
    "logging.tensorboard": True,
    "logging.tensorboard_queue": 5,
    "logging.tensorboard_interval": 1,
    "logging.tensorboard_timers": True,
    "logging.tensorboard_batch_size": True,
    "logging.tensorboard_validation_perplexity": True,
    "logging.tensorboard_learning_rate": True,
}
MAIN: dict[str, Any] = SHARED | {
    "run.name": "tr11-176B-ml",
    "run.variant": "main",
    "run.directory": RUN,
    "run.kill_switch": f"{CLONE}/kill-switch-tr11-176B-exp1",
    "run.exit_duration_minutes": 5990,
    "slurm.nodes": 48,
    "slurm.time_limit": "100:00:00",
    "slurm.master_port": 6000,
    "parallel.pipeline": 12,
    "model.layers": 70,
    "model.hidden_size": 14336,
    "model.attention_heads": 112,
    "checkpoint.interval": 100,
    "resilience.support_address": "assist@idris.fr",
    "hub.repository": "bigscience/tr11-176B-ml-logs",
    "hub.patterns": ["tensorboard/*/*tfevents*", "logs/*/*.txt"],
    "hub.interval_minutes": 60,
    "hub.credentials_file": f"{WORK}/auth/.hub_info.json",
    "backup.store": f"{STORE}/checkpoints/tr11-176B-ml",
    "backup.url": "gs://bigscience-backups/tr11-176B-ml",
    "backup.store_format": "tar",
    "backup.keep_latest": 15,
    "backup.store_interval": 1000,
    "backup.full_interval": 10_000,
    "backup.full_steps": [3000, 95_000],
    "backup.weights_interval": 3000,
    "backup.spike_steps": [31_200, 31_259],
    "backup.milestone_percent": 10,
    "backup.logs": True,
    "backup.prune": False,
    "backup.partition": "compil",
    "backup.account": "six@cpu",
    "backup.time_limit": "20:00:00",
    "alerts.sender": "bigscience-bot@huggingface.co",
    "alerts.smtp_host": "localhost",
    "alerts.interval_minutes": 60,
    "watch.resubmit_array": "1-3",
    "watch.tasks_left": 2,
    "watch.scratch_purge_days": 30,
    "cron.partition": "compil",
    "cron.account": "six@cpu",
    "cron.hourly_time_limit": "00:30:00",
    "cron.daily_time_limit": "02:00:00",
    "cron.filesystem_hours": 24,
    "perms.group": "six",
    "filesystems": [
        {"name": "WORK", "source": "idrquota", "arguments": ["-w", "-p", "six"], "bytes_percent": 85, "inodes_percent": 85},
        {"name": "STORE", "source": "idrquota", "arguments": ["-s", "-p", "six"], "bytes_percent": 85, "inodes_percent": 85},
        {"name": "SCRATCH", "source": "du", "path": SCRATCH, "bytes_limit": "400 TiB", "bytes_percent": 75},
        {"name": "SCRATCH-shared", "source": "df", "path": SCRATCH, "least_free": "100 TiB"},
        {"name": "WORKSF", "source": "du", "path": WORKSF, "bytes_limit": "2 TiB", "inodes_limit": 3_000_000,
         "bytes_percent": 85, "inodes_percent": 85},
    ],
}  # fmt: skip

# What is said otherwise than the original said it, or beyond it, and why.
DIFFERENT: dict[str, tuple[Any, str]] = {
    "slurm.workers_per_node": (8, "the original's --nproc_per_node; a key of its own here"),
    "slurm.gpu_memory_gb": (80.0, "a card whose workers cannot fit is refused"),
    "slurm.comment": ("main training", "for anyone who reads squeue"),
    "slurm.spare_nodes": (2, "the four spare nodes stood outside the job: a lost node cost its place in the queue"),
    "slurm.signal_seconds_before_limit": (
        1200, "the original's ten minutes are less than one evaluation: a last checkpoint could be lost"),
    "slurm.setup": (
        ['source "$TR11_SHIPPED/slurm/start-tr11-176B-ml"'], "the script ships with tr11, not with a clone beside it"),
    "slurm.environment.HF_HUB_OFFLINE": ("1", "what today's libraries read besides TRANSFORMERS_OFFLINE"),
    "slurm.environment.HF_HUB_CACHE": (f"{WORK}/models", "the name that TRANSFORMERS_CACHE has today"),
    "alerts.recipients": (["ana@site.org", "ben@site.org"], "two private addresses: from $TR11_ALERT_RECIPIENTS here"),
    "alerts.time_zone": ("Europe/Paris", "the cluster's; the original's stamps are in it without saying so"),
    "perms.folders": (
        [f"{WORK}/code/tr11-176B-ml", f"{STORE}/checkpoints/tr11-176B-ml"],
        "the original walked the project's whole trees, of which these are the run's"),
}  # fmt: skip
# Keys left at what tr11 does by default, where the original did otherwise.
LEFT_OUT: dict[str, tuple[Any, str]] = {
    "slurm.environment.CUDA_LAUNCH_BLOCKING": (
        None, "kept large jobs of 2022 from hanging; the processor waits for every kernel, so nothing overlaps"),
    "slurm.environment.TORCH_NCCL_ASYNC_ERROR_HANDLING": (None, "every worker gets 3; NCCL_ASYNC_ERROR_HANDLING was 1"),
    "checkpoint.format": ("tr11", "topology-free: half the nodes go on without a conversion; deepspeed is read too"),
    "watch.act": (False, "the original's checker only wrote mails"),
}  # fmt: skip

HALF = MAIN | {"slurm.nodes": 24}
HALF_DIFFERENT = DIFFERENT | {
    "slurm.comment": ("main training on half the nodes", "for anyone who reads squeue"),
    "slurm.spare_nodes": (1, "as on 48 nodes"),
    "slurm.signal_seconds_before_limit": (
        1800,
        "as on 48 nodes; an evaluation takes twice as long",
    ),
}
_NOT_IN_A_REHEARSAL = (
    "resilience.",
    "hub.",
    "backup.",
    "alerts.",
    "watch.",
    "cron.",
    "perms.",
    "filesystems",
)
REHEARSAL = {
    key: value for key, value in MAIN.items() if not key.startswith(_NOT_IN_A_REHEARSAL)
} | {
    "run.name": "setup-test-n2",
    "run.variant": "main-test-setup",
    "run.directory": f"{SCRATCH}/checkpoints/tr11-176B-ml-test-setup",
    "run.kill_switch": f"{CLONE}/kill-switch-tr11-setup-test-n2",
    "logging.folder": "tr11-176B-ml-logs",
    "slurm.nodes": 2,
    "slurm.time_limit": "00:30:00",
    "parallel.pipeline": 2,
    "model.layers": 2,
    "model.hidden_size": 1024,
    "model.attention_heads": 64,
    "checkpoint.interval": 250,
}
REHEARSAL_DIFFERENT = {
    key: value
    for key, value in DIFFERENT.items()
    if key.startswith(("slurm.environment.", "slurm.setup", "slurm.workers", "slurm.gpu_memory"))
} | {
    "slurm.comment": ("rehearsal", "for anyone who reads squeue"),
    "slurm.master_port": (6001, "a sibling job's; both may share a node"),
    "run.exit_duration_minutes": (20, "5990 minutes in a job of 30 are never reached"),
    "data.valid_workers": (
        0,
        "the script kept the default of 2, with which evaluations hung on the main run",
    ),
}
for key in REHEARSAL_DIFFERENT:
    REHEARSAL.pop(key, None)

CARDS = {
    "tr11-176B-ml": (MAIN, DIFFERENT),
    "tr11-176B-ml-24n": (HALF, HALF_DIFFERENT),
    "setup-test-n2": (REHEARSAL, REHEARSAL_DIFFERENT),
}


def read(name: str) -> RunCard:
    return load_card(shipped_folder() / f"{name}.toml", (), SITE)


def said(found: Any, expected: Any) -> Any:
    """Of a list of tables, only the keys that the expectation has."""
    if not isinstance(found, list) or not all(
        isinstance(entry, Mapping) for entry in [*found, *expected]
    ):
        return found
    return [
        {key: entry.get(key) for key in wanted}
        for entry, wanted in zip(found, expected, strict=True)
    ]


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A card's tables as dotted keys; what is unset or empty is left out."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        key = f"{prefix}{name}"
        if isinstance(item, Mapping) and item:
            found |= flat(item, f"{key}.")
        elif item not in (None, {}):
            found[key] = item
    return found


@pytest.mark.parametrize("name", CARDS)
def test_every_key_is_the_originals_or_differs_for_a_reason(name: str) -> None:
    facts, different = CARDS[name]
    card = read(name)
    values = flat(card.model_dump(mode="json"))
    assert {key: said(values.get(key), fact) for key, fact in facts.items()} == facts
    for key, (value, why) in (different | LEFT_OUT).items():
        assert values.get(key) == value and why, key
    assert not facts.keys() & (different | LEFT_OUT).keys()
    set_keys = flat(card.model_dump(mode="json", exclude_defaults=True)).keys()
    assert set_keys - facts.keys() - different.keys() == set()


def test_the_shares_are_the_final_ones() -> None:
    assert len(SHARES) == 28 and sum(SHARES.values()) == pytest.approx(1, abs=1e-12)
    assert [round(SHARES[name], 4) for name in ("en", "oscar-en", "fr", "code", "zhs", "es")] == [
        0.2217, 0.0814, 0.1305, 0.1303, 0.1209, 0.1067,
    ]  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_the_mixture_and_each_data_set_are_validated_apart(name: str) -> None:
    """What the original's files train-splits.txt and valid-splits.txt hold: one group, and 29."""
    wanted = wanted_data(read(name))
    assert wanted.roles["train"] == ("train",) and wanted.roles["test"] == ()
    assert wanted.roles["valid"] == ("valid", *(f"valid_{name}" for name in SHARES))
    groups = {group.name: group for group in wanted.groups}
    ranges = {(part.start, part.end) for part in groups["train"].members}
    assert ranges == {(0.0, 0.95)} and [part.weight for part in groups["train"].members] == list(
        SHARES.values()
    )
    assert [part.prefix for part in groups["valid"].members] == [prefix(name) for name in SHARES]
    for language in SHARES:
        (part,) = groups[f"valid_{language}"].members
        assert (part.weight, part.prefix, part.start, part.end) == (
            1.0,
            prefix(language),
            0.95,
            1.0,
        )


def test_the_rehearsal_writes_its_logs_where_the_originals_did() -> None:
    assert str(read("setup-test-n2").paths.main_log) == (
        f"{SCRATCH}/checkpoints/tr11-176B-ml-test-setup/tr11-176B-ml-logs/logs/main-test-setup/main_log.txt"
    )
    assert (
        str(read("tr11-176B-ml").paths.main_log)
        == f"{RUN}/tr11-176B-ml-logs/logs/main/main_log.txt"
    )
