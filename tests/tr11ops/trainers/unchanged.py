"""Trainers that know nothing of tr11, and how two processes of them are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.contract.record import Record

SCRIPTS = Path(__file__).with_name("scripts")
STEPS, INTERVAL = 24, 8


class Kind(Record):
    """A trainer of the tests: its dialect, the words of its script, and where its checkpoints lie."""

    dialect: str
    script: str
    words: tuple[str, ...]
    checkpoints: str
    newest: str
    cut: str  # the file of the newest that a kill in the save leaves behind cut
    before: str  # the checkpoint before it


HUGGING_FACE = Kind(
    "huggingface",
    "hf_train.py",
    (
        "--output_dir", "{folder}", "--use_cpu", "--max_steps", str(STEPS), "--save_steps", str(INTERVAL),
        "--per_device_train_batch_size", "2", "--logging_steps", "2", "--report_to", "none",
    ),
    ".", "checkpoint-24", "trainer_state.json", "checkpoint-16",
)  # fmt: skip
TITAN = Kind(
    "torchtitan", "dcp_train.py", ("{folder}", str(STEPS), str(INTERVAL)),
    "checkpoint", "step-24", "__1_0.distcp", "step-16",
)  # fmt: skip
LIGHTNING = Kind(
    "lightning", "lightning_train.py", ("{folder}", str(STEPS)),
    ".", "epoch=0-step=24.ckpt", "", "epoch=0-step=16.ckpt",
)  # fmt: skip
KINDS = (HUGGING_FACE, TITAN, LIGHTNING)


def train(kind: Kind, folder: Path, log: Path, *more: str) -> int:
    """One launch by torchrun, two processes; its exit code. All it says is in `log`."""
    words = [*(word.format(folder=folder) for word in kind.words), *more]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        str(SCRIPTS / kind.script), *words,
    ]  # fmt: skip
    quiet: Mapping[str, str] = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet},
            cwd=folder.parent,
        )
    return done.returncode
