"""`tr11 adopt`: nodes, workers and folders, only where the script is certain of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tr11ops.importer.foreign_scripts import of_text, to_decide

# each: lines of a script, and the key that a person must give, since no number is certain
UNCERTAIN = {
    "the launcher and Slurm differ": (
        "#SBATCH --nodes=4 --gpus-per-node=8\nsrun torchrun --nnodes=2 --nproc_per_node=8 train.py",
        "slurm.nodes",
    ),
    "no srun on four nodes": (
        "#SBATCH --nodes=4 --gpus-per-node=8\ntorchrun --nnodes=4 --nproc_per_node=8 train.py",
        "slurm.nodes",
    ),
    "each node by itself": (
        "#SBATCH --nodes=4 --gpus-per-node=8\nsrun torchrun --standalone --nproc_per_node=8 train.py",
        "slurm.nodes",
    ),
    "elastic": (
        "#SBATCH --nodes=4 --gpus-per-node=8\nsrun torchrun --nnodes=1:4 --nproc_per_node=8 train.py",
        "slurm.nodes",
    ),
    "some of the nodes": (
        "#SBATCH --nodes=4 --gpus-per-node=8\nsrun -N 2 torchrun --nnodes=2 --nproc_per_node=8 train.py",
        "slurm.nodes",
    ),
    "tasks on any node": ("#SBATCH --ntasks=16\nsrun python train.py", "slurm.nodes"),
    "a launcher for each task": (
        "#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8\n"
        "srun torchrun --nnodes=2 --nproc_per_node=8 train.py",
        "slurm.workers_per_node",
    ),
    "workers that only the job knows": (
        "#SBATCH --nodes=1 --gpus-per-node=8\ntorchrun --nproc_per_node=$NGPU train.py",
        "slurm.workers_per_node",
    ),
    "options that only the job knows": (
        "#SBATCH --nodes=1 --gpus-per-node=8\ntorchrun $DISTRIBUTED_ARGS train.py",
        "slurm.workers_per_node",
    ),
    "one process on eight GPUs": (
        "#SBATCH --nodes=1 --gpus-per-node=8\nsrun python train.py",
        "slurm.workers_per_node",
    ),
    "processes that do not divide": (
        "#SBATCH --nodes=3 --ntasks-per-node=1 --gpus-per-node=8\n"
        "srun accelerate launch --num_processes 16 --num_machines 3 train.py",
        "slurm.workers_per_node",
    ),
    "a command substitution": (
        "#SBATCH --nodes=1\ntorchrun --nproc_per_node=$(./count-them) train.py",
        "slurm.workers_per_node",
    ),
    "no time limit": (
        "#SBATCH --nodes=1\ntorchrun --nproc_per_node=1 train.py",
        "slurm.time_limit",
    ),
    "a folder for each job": (
        "#SBATCH --nodes=1\ntorchrun --nproc_per_node=1 train.py --output_dir out/$SLURM_JOB_ID"
        " --save_steps 5 --per_device_train_batch_size 1",
        "trainer.folder",
    ),
    "arguments of the script": (
        "#SBATCH --nodes=1 --time=60\ntorchrun --nproc_per_node=1 $1 --lr 1",
        "trainer.command",
    ),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_no_number_stands_in_the_card_that_is_not_certain(name: str, tmp_path: Path) -> None:
    text, key = UNCERTAIN[name]
    made = of_text(tmp_path, f"#!/bin/bash\n{text}\n")
    assert key in to_decide(made) and made.exit_code == 1
    section, _, last = key.partition(".")
    assert key == "trainer.command" or last not in made.tables.get(section, {})


CERTAIN = {
    "each task a worker": (
        "#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4\nsrun python -u train.py",
        (2, 4, "srun"),
    ),
    "srun's own tasks": (
        "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4\n"
        "srun --ntasks-per-node=4 python -u train.py",
        (2, 4, "srun"),
    ),
    "tasks in all": ("#SBATCH -N 2 -n 8 --gpus-per-node=4\nsrun python train.py", (2, 4, "srun")),
    "tasks alone": (
        "#SBATCH --ntasks=8 --ntasks-per-node=4 --gpus-per-task=1\nsrun python train.py",
        (2, 4, "srun"),
    ),
    "a task for each node": (
        "#SBATCH -N 2 --ntasks-per-node=8 --gpus-per-node=8\nsrun -n $SLURM_NNODES torchrun"
        " --nnodes $SLURM_NNODES --nproc-per-node 8 train.py",
        (2, 8, "torchrun"),
    ),
    "counted in the job": (
        "#SBATCH -N 2 --gpus-per-node=8\nN=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)\n"
        "srun torchrun --nnodes $N --nproc-per-node $(nvidia-smi -L | wc -l) train.py",
        (2, 8, "torchrun"),
    ),
    "defaults beside what Slurm sets": (
        "#SBATCH -N 2 --gpus=8\nexport N=${SLURM_NNODES:-1} G=${SLURM_GPUS_ON_NODE:-8}\n"
        "srun torchrun --nnodes $N --nproc-per-node $G train.py",
        (2, 4, "torchrun"),
    ),
    "mpirun": (
        "#SBATCH -N 2 --ntasks-per-node=4 --gpus-per-node=4\nmpirun -np 8 --bind-to none python train.py",
        (2, 4, "srun"),
    ),
    "mpirun with pairs": (
        "#SBATCH -N 2 --gpus-per-node=4\n"
        "mpirun --mca btl tcp -x NCCL_DEBUG=INFO --npernode 4 python train.py",
        (2, 4, "srun"),
    ),
    "a shell around it": (
        "#SBATCH -N 1 --gpus-per-node=2\nsrun --ntasks=1 bash -lc 'cd /x && torchrun --nproc_per_node=2 t.py'",
        (1, 2, "torchrun"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CERTAIN)
def test_workers_are_counted_as_slurm_counts_tasks(name: str, tmp_path: Path) -> None:
    text, expected = CERTAIN[name]
    made = of_text(tmp_path, f"#!/bin/bash\n#SBATCH --time=60\n{text}\n")
    slurm = made.tables["slurm"]
    assert (slurm["nodes"], slurm["workers_per_node"], made.tables["trainer"]["start"]) == expected


def test_where_it_runs(tmp_path: Path) -> None:
    def directory(lines: str) -> str:
        text = f"#SBATCH --nodes=1 --time=60\n{lines}\ntorchrun --nproc_per_node=1 train.py\n"
        return str(of_text(tmp_path, text).tables["trainer"]["directory"])

    assert directory("") == "."
    assert directory("cd $SLURM_SUBMIT_DIR/code") == "code"
    assert directory("cd /a\ncd b") == "/a/b"
    assert directory("cd $HOME/x") == "$HOME/x"
    assert directory("#SBATCH -D /w\ncd y") == "/w/y"


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ("", "out"),
        ("OUT=$PWD/out", "out"),
        ("OUT=${SLURM_SUBMIT_DIR}/a/out", "a/out"),
        ("cd code", "code/out"),
        ("cd code\nOUT=$PWD/out", "$PWD/out"),  # of after the cd
        ("OUT=$PWDX/out", "$PWDX/out"),
    ],
)
def test_where_it_saves(tmp_path: Path, lines: str, folder: str) -> None:
    """A card is used from wherever tr11 is typed: $PWD would be another folder there."""
    text = (
        f"#SBATCH --nodes=1 --time=60\nOUT=out\n{lines}\n"
        "torchrun --nproc_per_node=1 run_clm.py --output_dir $OUT --save_steps 5\n"
    )
    assert of_text(tmp_path, text).tables["trainer"]["folder"] == folder
