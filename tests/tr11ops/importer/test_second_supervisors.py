"""What would start a training again beside tr11: adopt leaves it out or asks, and a card that holds it
is refused before a launch; each in one line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tr11ops.dialects.settings import settings_of
from tr11ops.importer.adopting import adopt_script
from tr11ops.importer.options import LeftReason
from tr11ops.trainers.start import refusal_of, unset_of

HEAD = "#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=2 --time=60\n"
RUN = "srun torchrun --nnodes=1 --nproc_per_node=2"
LEFT, ASKED = LeftReason.DROPPED, LeftReason.DECISION

# lines of a script; where it is told; what is said of it
ADOPTED: dict[str, tuple[str, LeftReason, str]] = {
    "torchrun": (f"{RUN} --max-restarts=3 train.py", LEFT, "--max-restarts"),
    "accelerate": ("srun accelerate launch --num_processes 2 --max_restarts 3 train.py", LEFT, "--max_restarts"),
    "NVRx": ("srun ft_launcher --nproc-per-node=2 --max-restarts=3 train.py", LEFT, "ft_launcher"),
    "NVRx in the process": (f"{RUN} pretrain_gpt.py --num-layers 2 --inprocess-restart", ASKED, "--inprocess-restart"),
    "Lightning": (
        "#SBATCH --ntasks-per-node=2\nsrun python train.py fit --trainer.devices 2 --trainer.max_steps 9",
        LEFT, "may requeue the job",
    ),
    "Lightning, asked to": (f"{RUN} train.py fit --trainer.plugins.auto_requeue=true", ASKED, "auto_requeue"),
    "a handler": (f"trap 'scontrol requeue $SLURM_JOB_ID' USR1\n{RUN} train.py", LEFT, "second supervisor"),
    "a handler in a function": (
        f"again() {{\n  scontrol requeue $SLURM_JOB_ID\n}}\ntrap again USR1\n{RUN} train.py", LEFT, "tr11 hears",
    ),
    "at the end": (f"{RUN} train.py\nscontrol requeue $SLURM_JOB_ID", LEFT, "second supervisor"),
    "the script itself again": (f"{RUN} train.py || sbatch train.slurm", LEFT, "second supervisor"),
    "asked of Slurm": (f"#SBATCH --requeue\n{RUN} train.py", LEFT, "next array task"),
    "while true": (f"while true; do\n{RUN} train.py\nsleep 5\ndone", ASKED, "in a loop"),
    "until it is done": (f"until {RUN} train.py; do sleep 60; done", ASKED, "in a loop"),
    "a loop of tries": (f"for try in 1 2 3; do {RUN} train.py && break; done", ASKED, "in a loop"),
    "a loop in a shell of the step": (f"srun bash -c 'while true; do {RUN[5:]} train.py; done'", ASKED, "in a loop"),
    "submitit": ("srun --unbuffered python -u -m submitit.core._submit /ck/jobs", ASKED, "submitit"),
    "elastic nodes": (f"{RUN.replace('nnodes=1', 'nnodes=1:4')} train.py", ASKED, "elastic number"),
    "elastic DeepSpeed": ("deepspeed --num_gpus 2 --enable_elastic_training train.py", ASKED, "elastic training"),
}  # fmt: skip

# `[trainer]` -> what is said of it
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torchrun": ({"command": ["--max-restarts=3", "train.py"]}, "starts workers again"),
    "its own torchrun": ({"start": "node", "command": ["torchrun", "--max-restarts", "2", "t.py"]}, "starts workers again"),
    "by a variable": ({"command": ["t.py"], "environment": {"PET_MAX_RESTARTS": "2"}}, "PET_MAX_RESTARTS=2"),
    "LLaMA-Factory": (
        {"start": "node", "command": ["llamafactory-cli", "train", "a.yaml"], "environment": {"MAX_RESTARTS": "1"}},
        "MAX_RESTARTS=1",
    ),
    "NVRx": ({"start": "node", "command": ["/e/bin/ft_launcher", "t.py"]}, "ft_launcher"),
    "NVRx by its module": (
        {"start": "node", "command": ["python", "-m", "nvidia_resiliency_ext.fault_tolerance.launcher", "t.py"]},
        "ft_launcher",
    ),
    "NVRx in the process": ({"command": ["pretrain_gpt.py", "--inprocess-restart"]}, "--inprocess-restart"),
    "submitit": ({"start": "srun", "command": ["python", "-m", "submitit.core._submit", "/j"]}, "submitit requeues"),
    "while true": ({"start": "node", "command": "while true; do torchrun t.py; done"}, "a loop"),
    "until": ({"start": "node", "command": "until python t.py; do sleep 9; done"}, "a loop"),
    "requeue": ({"start": "node", "command": "python t.py || scontrol requeue $SLURM_JOB_ID"}, "queues the job again"),
    "sbatch": ({"start": "node", "command": "python t.py; sbatch again.slurm"}, "queues the job again"),
    "Lightning": ({"command": ["t.py", "--trainer.plugins.auto_requeue=True"]}, "auto_requeue"),
    "elastic": ({"start": "node", "command": ["torchrun", "--nnodes=1:4", "t.py"]}, "may not change"),
    "elastic DeepSpeed": ({"start": "node", "command": ["deepspeed", "--enable_elastic_training", "t.py"]}, "elastic"),
    "torchx": ({"start": "node", "command": ["torchx", "run", "-s", "slurm", "dist.ddp"]}, "torchx"),
}  # fmt: skip

INNOCENT: tuple[dict[str, Any], ...] = (
    {"command": ["--max-restarts=0", "train.py"]},
    {"command": ["t.py", "--note", "do not requeue", "--data", "/sbatch/x", "--while", "1"]},
    {"start": "node", "command": "while read -r line; do export $line; done < env; exec torchrun t.py"},
    {"start": "node", "command": ["deepspeed", "t.py"], "environment": {"MAX_RESTARTS": "3"}},
    {"command": ["t.py", "--trainer.plugins.auto_requeue=false"]},
)  # fmt: skip


@pytest.mark.parametrize("name", ADOPTED)
def test_adopt_leaves_it_out_or_asks(name: str, tmp_path: Path) -> None:
    text, reason, what = ADOPTED[name]
    script = tmp_path / "train.slurm"
    script.write_text(f"{HEAD}{text}\n")
    made = adopt_script(script)
    told = [f"{one.option}: {one.why}" for one in made.unplaced if one.reason is reason]
    assert any(what in line for line in told), told
    assert not refusal_of(settings_of(made.tables["trainer"], "card")) or reason is ASKED


@pytest.mark.parametrize("name", REFUSED)
def test_a_card_with_one_is_refused_in_one_line(name: str) -> None:
    table, what = REFUSED[name]
    why = refusal_of(settings_of(table, "card"))
    assert what in why and "\n" not in why and len(why) < 200


@pytest.mark.parametrize("table", INNOCENT, ids=lambda table: str(table["command"])[:40])
def test_what_only_looks_like_one_is_started(table: dict[str, Any]) -> None:
    assert refusal_of(settings_of(table, "card")) == ""


def test_what_would_wake_one_is_not_handed_on() -> None:
    found = unset_of(settings_of({"dialect": "lightning", "command": ["t.py"]}, "card"))
    assert set(found) == {"PET_MAX_RESTARTS", "SLURM_NTASKS"}
