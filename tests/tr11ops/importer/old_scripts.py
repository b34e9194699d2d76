"""The scripts to import, and small ones made for a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "data" / "slurm_scripts"


NAMES = sorted(path.stem for path in SCRIPTS.glob("*.slurm"))


def minimal(options: str = "", head: str = "#SBATCH --nodes=1", before: str = "") -> str:
    """The smallest script with a sound card, and more options."""
    return (
        f"#!/bin/bash\n#SBATCH --job-name=tiny\n#SBATCH --gres=gpu:2\n#SBATCH --time=1:00:00\n{head}\n{before}\n"
        "python -m torch.distributed.run --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
        "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
        "--global-batch-size 4 --train-samples 400 --lr 1e-3 --bf16 --pad-vocab-size-to 512 "
        "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path /t --data-path /d/a --save /r/checkpoints/main "
        f"--save-interval 5 --eval-iters 0 --exit-duration-in-mins 50 {options}\n"
    )


def value_at(tables: dict[str, Any], key: str) -> Any:
    found: Any = tables
    for part in key.split("."):
        found = found[part]
    return found
