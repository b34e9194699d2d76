"""`tr11 adopt` of scripts whose training runs in an image: the image is the card's, the paths are the
node's, and what starts in it is the trainer alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tr11ops.importer.adopting import adopt_script
from tr11ops.importer.options import Imported
from tr11ops.trainers.start import LaunchWords, commands_of
from tr11ops.trainers.trainer import NodePlaces
from trainer.contract.paths import RunPaths

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=4 --ntasks-per-node=1 --time=60\n"
TORCHRUN = "torchrun --nnodes=2 --nproc_per_node=4"
GPT = "pretrain_gpt.py --num-layers 2 --save /ckpt/gpt --load /ckpt/gpt --save-interval 10 --train-iters 50"
MOUNTS = "/lustre/ck:/ckpt,/lustre/code:/workspace"


def adopted(folder: Path, text: str) -> Imported:
    script = folder / "train.slurm"
    script.write_text(f"{HEAD}{text}\n")
    return adopt_script(script)


def asked(made: Imported) -> set[str]:
    return {one.key or one.option for one in made.decisions}


def started(made: Imported) -> list[str]:
    """The words of the second node, as a launch has them."""
    from tr11ops.dialects.image import image_of
    from tr11ops.dialects.settings import settings_of

    slurm, trainer = made.tables["slurm"], made.tables["trainer"]
    given = settings_of(trainer, "card", image_of(slurm))
    launch = LaunchWords(
        RunPaths(Path("/run"), "x", "main"), Path("/run/state/attempts/7"), 1, node="n2",
        has_directory=False,
    )  # fmt: skip
    [command] = commands_of(given, NodePlaces(2, 1, 4, address="n1", port=29500), launch)
    return list(command.words)


# script -> container, directory, folder, start, what is asked
SCRIPTS: dict[str, tuple[str, dict[str, Any], str | None, str | None, str, set[str]]] = {
    "Pyxis, a shell in it": (
        f"srun --container-image=/images/pt.sqsh --container-mounts={MOUNTS} bash -c 'cd /workspace/gpt && {TORCHRUN} {GPT}'",
        {"image": "/images/pt.sqsh", "runtime": "pyxis", "mounts": MOUNTS.split(",")},
        "/lustre/code/gpt", "/lustre/ck/gpt", "torchrun", set(),
    ),
    "Pyxis, its own folder to begin with": (
        f"srun --container-image nvcr.io#nvidia/pytorch:25.01-py3 --container-mounts {MOUNTS} --container-workdir=/workspace"
        f" --container-writable --no-container-mount-home {TORCHRUN} {GPT}",
        {
            "image": "nvcr.io#nvidia/pytorch:25.01-py3", "runtime": "pyxis", "mounts": MOUNTS.split(","),
            "options": ["--container-writable", "--no-container-mount-home"],
        },
        "/lustre/code", "/lustre/ck/gpt", "torchrun", set(),
    ),
    "Pyxis, where the image begins": (
        f"srun --container-image=/images/pt.sqsh {TORCHRUN} train.py --lr 1",
        {"image": "/images/pt.sqsh", "runtime": "pyxis"},
        None, None, "torchrun", {"trainer.directory", "trainer.dialect", "trainer.resume"},
    ),
    "Pyxis, a task for each worker": (
        f"srun --ntasks-per-node=4 --container-image=/i.sqsh --container-mounts={MOUNTS} bash -c 'cd /workspace; python -u {GPT}'",
        {"image": "/i.sqsh", "runtime": "pyxis", "mounts": MOUNTS.split(",")},
        "/lustre/code", "/lustre/ck/gpt", "torchrun", set(),
    ),
    "Pyxis by #SBATCH": (
        f"#SBATCH --container-image=/i.sqsh\n#SBATCH --container-mounts={MOUNTS}\n#SBATCH --container-workdir=/workspace\n"
        f"srun {TORCHRUN} {GPT}",
        {"image": "/i.sqsh", "runtime": "pyxis", "mounts": MOUNTS.split(",")},
        "/lustre/code", "/lustre/ck/gpt", "torchrun", set(),
    ),
    "Apptainer": (
        f"srun apptainer exec --nv --writable-tmpfs -B /lustre/ck:/ckpt --pwd /opt/app /images/pt.sif {TORCHRUN} {GPT}",
        {
            "image": "/images/pt.sif", "runtime": "apptainer", "mounts": ["/lustre/ck:/ckpt"],
            "options": ["--writable-tmpfs"],
        },
        "/opt/app", "/lustre/ck/gpt", "torchrun", set(),
    ),
    "Singularity that clears its environment": (
        f"srun singularity exec --cleanenv --bind /lustre/ck:/ckpt docker://pytorch/pytorch {TORCHRUN} {GPT}",
        {"image": "docker://pytorch/pytorch", "runtime": "apptainer", "mounts": ["/lustre/ck:/ckpt"]},
        ".", "/lustre/ck/gpt", "torchrun", set(),
    ),
    "docker": (
        f"srun docker run --rm --gpus all -v /lustre/ck:/ckpt -w /opt/app ours:1.2 {TORCHRUN} {GPT}",
        {"image": "docker://ours:1.2", "runtime": "apptainer", "mounts": ["/lustre/ck:/ckpt"]},
        "/opt/app", "/lustre/ck/gpt", "torchrun", {"slurm.container.runtime"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_image_is_the_cards_and_the_paths_are_the_nodes(name: str, tmp_path: Path) -> None:
    text, container, directory, folder, start, questions = SCRIPTS[name]
    made = adopted(tmp_path, text)
    trainer = made.tables["trainer"]
    assert made.tables["slurm"]["container"] == container
    assert (trainer.get("directory"), trainer.get("folder"), trainer["start"]) == (
        directory,
        folder,
        start,
    )
    assert asked(made) == questions and made.problems == ()
    words = started(made)
    assert "/ckpt/gpt" in words or folder is None  # as the image has it


def test_words_of_enroot_are_kept(tmp_path: Path) -> None:
    """What it starts is its child."""
    text = f"srun enroot start --rw -m /lustre/ck:/ckpt pt {TORCHRUN} {GPT}"
    trainer = adopted(tmp_path, text).tables["trainer"]
    assert trainer["command"][:7] == [
        "enroot",
        "start",
        "--rw",
        "-m",
        "/lustre/ck:/ckpt",
        "pt",
        "torchrun",
    ]
    assert trainer["start"] == "node"


def test_where_the_image_is_known_in_the_job_alone(tmp_path: Path) -> None:
    made = adopted(
        tmp_path, f"srun --container-image=$(ls -t *.sqsh | head -1) {TORCHRUN} /a/train.py"
    )
    assert "slurm.container.image" in asked(made) and "container" not in made.tables["slurm"]
