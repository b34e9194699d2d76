"""The scripts to import, and small ones made for a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[2] / "data" / "slurm_scripts"


NAMES = sorted(path.stem for path in SCRIPTS.glob("*.slurm"))


# A Llama in the options of newer Megatrons; none of them leaves anything to decide.
LLAMA = (
    "--position-embedding-type rope --rotary-base 500000 --rotary-percent 1.0 --no-position-embedding --swiglu "
    "--ffn-hidden-size 192 --normalization RMSNorm --group-query-attention --num-query-groups 2 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --use-mcore-models "
    "--attention-backend fused --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --manual-gc "
    "--cross-entropy-loss-fusion --no-mmap-bin-files --apply-layernorm-1p --ckpt-format torch_dist --async-save "
    "--context-parallel-size 1 --calculate-per-token-loss --distributed-timeout-minutes 60"
)


# What published scripts leave to be filled in.
PLACEHOLDERS = """#!/bin/bash
#SBATCH <SITE OPTIONS> --nodes=2 --ntasks-per-node=4 --job-name=small
#SBATCH --partition=<your_partition> --time=1:00:00
FIRST="<PATH TO THE FIRST SET>"
options=" --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 \\
 --vocab-file <PATH TO vocab.json> --merge-file <PATH TO merges.txt> --data-path 0.2 ${FIRST} 0.8 /d/b \\
 --global-batch-size 8 --train-samples 400 --lr 1e-3 --save <FOLDER> --eval-iters 0 --save-interval 5 \\
 --tensorboard-dir <EVENTS FOLDER> --fp16 --checkpoint-activations "
srun --kill-on-bad-exit=1 sh -c "python -u pretrain_gpt.py $@ ${options}" 2> errors.txt
"""


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
