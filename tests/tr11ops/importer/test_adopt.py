"""`tr11 adopt`: scripts of other trainers, as they are run in public, become cards that say the same;
what a script does not say is told, and never a number that it does not say.
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.tr11ops.importer.foreign_scripts import NAMES, SCRIPTS, adopted, of_text, to_decide
from tr11ops.base.errors import ScriptError
from tr11ops.cli.main import execute
from tr11ops.importer.options import Imported, LeftReason
from tr11ops.runcard.card import ForeignCard, load_card

# nodes, workers of a node, time limit, start, dialect, folder, steps, interval
EXPECTED: dict[str, tuple[Any, ...]] = {
    "array-one-at-a-time": (1, 8, "06:00:00", "torchrun", "nanogpt", "/s/out", 100, None),
    "conda-quotes": (1, 2, "30", "torchrun", None, None, None, None),
    "deepspeed-hostfile": (2, 8, "10:00:00", "torchrun", "deepspeed", None, None, None),
    "deepspeed-one-node": (1, 4, "04:00:00", "node", "huggingface", "/o", None, 50),
    "heredoc": (2, 4, "02:00:00", "torchrun", "huggingface", "/o/run", 4000, 100),
    "hf-accelerate": (2, 4, "20:00:00", "node", "huggingface", "out/sft", 5000, 250),
    "lightning-srun": (4, 8, "0-02:00:00", "torchrun", "lightning", "/data/runs/first one", 100_000, None),
    "litgpt-srun": (2, 4, "1-00", "torchrun", "litgpt", "out/pythia", 9000, 500),
    "loop-over-nodes": (3, 2, "01:00:00", "torchrun", None, None, None, None),
    "megatron-torchrun": (8, 8, "2-00:00:00", "torchrun", "megatron", "/ckpt/gpt-3b", 300_000, 1000),
    "nanochat": (1, 8, "08:00:00", "torchrun", "nanochat", None, 5000, 500),
    "nanogpt-torchrun": (2, 8, "12:00:00", "torchrun", "nanogpt", "$HOME/nanoGPT/out-124M", 600_000, 1000),
    "nemo-container": (4, 8, "04:00:00", "torchrun", "nemo", "/lustre/results/gpt", 100_000, 2000),
    "torchtitan-multinode": (4, 8, "24:00:00", "torchrun", "torchtitan", "/scratch/titan", 20_000, 500),
    "trl-yaml": (1, 8, "05:00:00", "node", "huggingface", None, None, None),
    "uv-apptainer": (2, 4, "08:00:00", "node", None, None, None, None),
    "windows": (2, 2, "1:00:00", "torchrun", None, None, None, None),
}  # fmt: skip
# what a person must say, by script: the keys, or the option where there is no key
TO_DECIDE = {
    "conda-quotes": {"trainer.dialect", "trainer.resume"},
    "deepspeed-hostfile": {"trainer.start", "trainer.resume"},
    "hf-accelerate": {"slurm.setup"},
    "lightning-srun": {"slurm.setup"},
    "loop-over-nodes": {"trainer.dialect", "trainer.resume"},
    "uv-apptainer": {"trainer.dialect", "trainer.resume"},
    "windows": {"trainer.dialect", "trainer.resume"},
}


def left(made: Imported, option: str) -> str:
    return "; ".join(item.why for item in made.unplaced if item.option == option)


def test_each_script_has_its_expectation() -> None:
    assert sorted(EXPECTED) == NAMES and len(NAMES) >= 15


@pytest.mark.parametrize("name", NAMES)
def test_a_card_says_the_same_as_the_script(name: str, tmp_path: Path) -> None:
    made = adopted(name)
    slurm, trainer = made.tables["slurm"], made.tables["trainer"]
    said = (
        slurm["nodes"],
        slurm["workers_per_node"],
        slurm["time_limit"],
        trainer["start"],
        *map(trainer.get, ("dialect", "folder", "steps", "checkpoint_interval")),
    )
    assert said == EXPECTED[name]
    assert to_decide(made) == TO_DECIDE.get(name, set())
    assert made.exit_code == int(name in TO_DECIDE) and made.problems == ()
    card = tmp_path / "tr11.toml"
    card.write_text(made.text)
    loaded = load_card(card, (), os.environ, keep_undefined=True)
    assert isinstance(loaded, ForeignCard)
    assert loaded.world_size == EXPECTED[name][0] * EXPECTED[name][1]


def test_a_trainer_is_told_of_whose_broken_checkpoint_a_person_would_have_to_look_at() -> None:
    told = {name for name in NAMES if "believes = []" in left(adopted(name), "resume")}
    assert told == {name for name in NAMES if EXPECTED[name][4] is None}


def test_the_words_of_the_training_are_kept() -> None:
    def command(name: str) -> list[str]:
        found = adopted(name).tables["trainer"]["command"]
        assert isinstance(found, list)
        return found

    assert command("windows") == ["train.py", "--lr", "1"]
    assert command("conda-quotes") == [
        "train model.py", "--title", 'it is "quoted"', "--note", "a b", "--json", '{"a": 1}',
    ]  # fmt: skip
    assert command("nanochat") == [
        "-m", "scripts.base_train", "--", "--depth=20", "--num-iterations=5000", "--save-every=500", "--run=$WANDB_RUN",
    ]  # fmt: skip
    assert command("uv-apptainer")[:5] == [
        "uv", "run", "--frozen", "torchrun", "--nnodes={nodes}",
    ]  # fmt: skip
    accelerate = command("hf-accelerate")
    assert accelerate[:4] == ["accelerate", "launch", "--mixed_precision", "bf16"]
    assert "--resume_from_checkpoint" not in accelerate
    assert accelerate[accelerate.index("--output_dir") + 1] == "{folder}"
    assert command("litgpt-srun")[:2] == ["--no-python", "litgpt"]
    assert command("torchtitan-multinode")[:6] == [
        "--local-ranks-filter", "0", "--role", "rank", "-m", "torchtitan.train",
    ]  # fmt: skip


def test_what_is_set_up_before_the_training() -> None:
    assert adopted("hf-accelerate").tables["slurm"]["setup"] == [
        "module purge",
        "module load cuda/12.4",
        "source /work/conda/etc/profile.d/conda.sh",
        "conda activate sft",
    ]
    quotes = adopted("conda-quotes").tables
    assert quotes["slurm"]["setup"] == [
        'eval "$(conda shell.bash hook)"',
        'conda activate "my env"',
    ]
    assert quotes["trainer"]["environment"] == {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN"}
    assert adopted("heredoc").tables["trainer"]["environment"] == {"OMP_NUM_THREADS": "8"}
    assert "hf_abcdef" not in adopted("hf-accelerate").text


def test_second_supervisors_are_left_out_and_said() -> None:
    chain = adopted("array-one-at-a-time")
    assert "second supervisor" in left(chain, "--max-restarts") and "tr11 hears" in left(
        chain, "trap"
    )
    assert "tr11 launch --array 1-20%1" in left(chain, "#SBATCH --array")
    assert "--max-restarts" not in chain.tables["trainer"]["command"]
    accelerate = adopted("hf-accelerate")
    assert "second supervisor" in left(accelerate, "--max_restarts")
    assert left(accelerate, "#SBATCH --requeue") != ""
    assert "requeue the job" in left(adopted("lightning-srun"), "srun")


def test_ft_launcher_and_scripts_that_queue_themselves_again(tmp_path: Path) -> None:
    made = of_text(
        tmp_path,
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --time=60\n"
        "sbatch --dependency=afterany:$SLURM_JOB_ID train.slurm\n"
        "srun ft_launcher --nnodes=2 --nproc-per-node=8 --max-restarts=5 --ft-rank-heartbeat-timeout=900"
        " pretrain_gpt.py --num-layers 2 --save /c --load /c --save-interval 10 --train-iters 50\n",
    )
    assert "second supervisor" in left(made, "ft_launcher")
    assert "second supervisor" in left(made, "sbatch")
    assert left(made, "--ft-rank-heartbeat-timeout") != ""
    command = made.tables["trainer"]["command"]
    assert command[0] == "pretrain_gpt.py" and not any("ft" in word for word in command)
    assert made.tables["trainer"]["start"] == "torchrun"


def test_words_of_resuming_go_where_a_launch_chooses() -> None:
    lightning = adopted("lightning-srun").tables["trainer"]
    assert lightning["resume"] == ["--ckpt_path", "{path}"]
    assert "--ckpt_path" not in lightning["command"]
    assert adopted("array-one-at-a-time").tables["trainer"]["first"] == ["--init_from=scratch"]
    megatron = adopted("megatron-torchrun").tables["trainer"]
    assert "--load" not in megatron["command"] and "first" not in megatron


def test_a_checkpoint_to_begin_with_is_no_resume(tmp_path: Path) -> None:
    made = of_text(
        tmp_path,
        "#SBATCH --nodes=1 --gpus-per-node=8 --time=60\ntorchrun --nproc_per_node 8 pretrain_gpt.py"
        " --num-layers 2 --save /c/new --load /c/pretrained --save-interval 10 --train-iters 50\n",
    )
    assert made.tables["trainer"]["first"] == ["--load", "/c/pretrained"]


def test_a_trainer_that_cannot_be_asked_to_save_is_told(tmp_path: Path) -> None:
    assert "--exit-signal-handler" in left(adopted("megatron-torchrun"), "stop")
    text = (SCRIPTS / "megatron-torchrun.slurm").read_text()
    asked = of_text(tmp_path, text.replace("--bf16", "--bf16 --exit-signal-handler"))
    assert left(asked, "stop") == ""


def test_a_container_is_the_cards() -> None:
    container = adopted("nemo-container").tables["slurm"]["container"]
    assert container["image"] == "nvcr.io#nvidia/nemo:24.07" and container["runtime"] == "pyxis"
    assert container["mounts"] == ["/lustre:/lustre", "/home/data:/data:ro"]
    assert adopted("uv-apptainer").tables["slurm"]["container"]["runtime"] == "apptainer"


def test_what_pyxis_is_asked_in_sbatch_lines_is_a_container_too(tmp_path: Path) -> None:
    made = of_text(
        tmp_path,
        "#SBATCH --nodes=1 --gpus-per-node=8 --time=60\n#SBATCH --container-image=/images/a.sqsh\n"
        "#SBATCH --container-mounts=/a:/w,/b\nunset SLURM_NTASKS SLURM_PROCID\n"
        "srun --ntasks=1 torchrun --nproc_per_node=8 train.py\n",
    )
    container = made.tables["slurm"]["container"]
    assert (container["image"], container["mounts"]) == ("/images/a.sqsh", ["/a:/w", "/b"])
    assert "options" not in made.tables["slurm"]
    assert made.tables["trainer"]["unset"] == ["SLURM_NTASKS", "SLURM_PROCID"]


def test_a_loop_of_trainings_is_a_question(tmp_path: Path) -> None:
    made = of_text(
        tmp_path,
        "#SBATCH --nodes=1 --gpus-per-node=8 --time=60\nfor seed in 1 2; do\n"
        "torchrun --nproc_per_node=8 train.py --seed $seed\ndone\n",
    )
    assert "trainer.start" in to_decide(made)


def test_settings_in_a_file_beside_the_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "llama.toml").write_text(
        '[job]\ndump_folder = "./outs"\n[training]\nsteps = 700\n'
        '[checkpoint]\nenable = true\ninterval = 50\nfolder = "ck"\n'
    )
    text = (
        "#SBATCH --nodes=1 --gpus-per-node=8 --time=60\n"
        "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file llama.toml"
    )
    trainer = of_text(tmp_path, f"{text}\n").tables["trainer"]
    assert (trainer["steps"], trainer["checkpoint_interval"], trainer["folder"]) == (
        700,
        50,
        "outs",
    )
    assert trainer["checkpoints"] == {"folder": "ck"}
    trainer = of_text(tmp_path, f"{text} --training.steps 900\n").tables["trainer"]
    assert trainer["steps"] == 900  # the command has the last word
    (tmp_path / "acc.yaml").write_text("num_machines: 2\nnum_processes: 16\n")
    made = of_text(
        tmp_path,
        "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --time=60\n"
        "srun accelerate launch --config_file acc.yaml --machine_rank $SLURM_NODEID train.py --lr 1\n",
    )
    assert made.tables["slurm"]["workers_per_node"] == 8


def test_a_log_tells_the_family(tmp_path: Path) -> None:
    log = tmp_path / "old.log"
    log.write_text(
        " [2026-08-21 10:22:31] iteration      100/   50000 | consumed samples:  1000 | elapsed time per"
        " iteration (ms): 1000.0 | learning rate: 1.0E-04 | global batch size: 8 | lm loss: 2.0E+00 |"
        " loss scale: 1.0 | number of skipped iterations: 0 | number of nan iterations: 0 |\n"
    )
    text = "#SBATCH --nodes=1 --gpus-per-node=8 --time=60\ntorchrun --nproc_per_node=8 train.py\n"
    assert "dialect" not in of_text(tmp_path, text).tables["trainer"]
    assert of_text(tmp_path, text, log=log).tables["trainer"]["dialect"] == "megatron"
    log.rename(tmp_path / "slurm-17.out")
    made = of_text(tmp_path, text)
    assert made.tables["trainer"]["dialect"] == "megatron"
    made = of_text(tmp_path, text.replace("train.py", "-m torchtitan.train"))
    assert "trainer.dialect" in to_decide(made)  # command and log contradict each other


HOSTILE = {
    "two groups of nodes": (
        "#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=8\nsrun torchrun train.py\n",
        "several groups of nodes",
    ),
    "two programs in one srun": (
        "#SBATCH --nodes=2\nsrun -n1 python a.py : -n1 python b.py\n",
        "several programs at once",
    ),
    "nothing in it": ("", "no command in it starts a training"),
    "no training": ("#SBATCH --nodes=1\nsrun hostname\n", "starts srun hostname"),
    "a script that is not here": ("srun bash /far/away/run.sh\n", "which is not at hand"),
    "a program that only the job knows": ("srun $CMD\n", "no training is seen"),
    "one that submits another": ("sbatch other.slurm\n", "no training is seen"),
    "an open quote": ('#SBATCH --nodes=1\nsrun torchrun "train.py\n', "quote"),
    "text without end": ("echo " + "x" * (1 << 20), "larger than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_such_script_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, what = HOSTILE[name]
    script = tmp_path / "bad.slurm"
    script.write_text(text)
    assert execute(["adopt", str(script), "-o", str(tmp_path / "card.toml")]) == 2
    error = capsys.readouterr().err
    assert what in error and "Traceback" not in error and len(error.strip().splitlines()) <= 2
    assert not (tmp_path / "card.toml").exists()


def test_what_is_no_text_or_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary = tmp_path / "a.out"
    binary.write_bytes(b"\x7fELF\0\0")
    for path, what in (
        (binary, "not text"),
        (tmp_path, "is a folder"),
        (tmp_path / "none", "does not exist"),
    ):
        assert execute(["adopt", str(path), "--dry-run"]) == 2
        assert what in capsys.readouterr().err
    script = SCRIPTS / "windows.slurm"
    assert execute(["adopt", str(script), "--dry-run", "--log", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_two_trainings_are_one_too_many(tmp_path: Path) -> None:
    text = (
        "#SBATCH --nodes=1 --gpus-per-node=1 --time=60\n"
        "srun torchrun --nproc_per_node=1 first.py\nsrun torchrun --nproc_per_node=1 second.py\n"
    )
    with pytest.raises(ScriptError, match="2 commands may be the training"):
        of_text(tmp_path, text)
    assert of_text(tmp_path, text, line=3).tables["trainer"]["command"] == ["second.py"]
    with pytest.raises(ScriptError, match="starts no training"):
        of_text(tmp_path, text, line=1)


def test_an_address_in_a_condition_is_no_question(tmp_path: Path) -> None:
    made = of_text(
        tmp_path,
        "#SBATCH -N 2 --gpus-per-node=8 --time=60\nMASTER_ADDR=x\n"
        "if [ -z $HERE ]; then MASTER_ADDR=$(hostname); SIZE=2; fi\n"
        "srun torchrun --nnodes 2 --nproc_per_node 8 --master_addr $MASTER_ADDR train.py --size $SIZE\n",
    )
    assert "MASTER_ADDR" not in to_decide(made) and "SIZE" in to_decide(made)


def test_what_prepares_the_training_is_not_it(tmp_path: Path) -> None:
    made = of_text(
        tmp_path,
        "#SBATCH --nodes=1 --gpus-per-node=2 --time=60\npip install -e .\nsrun nvidia-smi\n"
        "python prepare.py --out d\npython -c 'import torch'\n"
        "srun torchrun --nproc_per_node=2 train.py\nsrun python evaluate.py\n",
    )
    assert made.tables["trainer"]["command"] == ["train.py"]
    assert "does not run it" in left(made, "python")


def test_nothing_of_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of_text(
        tmp_path,
        "#SBATCH --nodes=1 --time=60\nX=$(touch seen-1)\ntouch seen-2\n`touch seen-3`\n"
        'eval "touch seen-4"\nbash -c "touch seen-5"\ntorchrun --nproc_per_node=1 train.py $(touch seen-6)\n',
    )
    assert not list(tmp_path.glob("seen-*"))


def test_dry_run_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = str(SCRIPTS / "megatron-torchrun.slurm")
    assert execute(["adopt", script, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert tomllib.loads(shown.out)["trainer"]["dialect"] == "megatron"
    assert "Understood" in shown.err and not list(tmp_path.iterdir())
    assert execute(["adopt", script, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["card"] == "tr11.toml" and document["decisions"] == 0
    assert {item["reason"] for item in document["unplaced"]} <= {str(one) for one in LeftReason}
    assert execute(["adopt", script, "--force", "--set", "slurm.nodes=16", "--json"]) == 0
    assert tomllib.loads((tmp_path / "tr11.toml").read_text())["slurm"]["nodes"] == 16


RESUMES = """#!/bin/bash
#SBATCH --nodes=1 --gpus-per-node=2 --time=01:00:00
torchrun --nproc-per-node=2 train.py --output_dir out --max_steps 400 --save_steps 20
"""
OWN = "parser = argparse.ArgumentParser()\nparser.add_argument('--output_dir')\n"


@pytest.mark.parametrize(
    ("script", "resume", "said"),
    [
        (OWN + "last = get_last_checkpoint(out)\n", [], ""),
        (OWN + "trainer.train(resume_from_checkpoint=True)\n", [], ""),
        (OWN, None, "train.py knows no --resume_from_checkpoint"),
        (OWN + "parser.add_argument('--resume_from_checkpoint')\n", ["--resume_from_checkpoint", "{path}"], ""),
        ("parser = HfArgumentParser((TrainingArguments,))\n", ["--resume_from_checkpoint", "{path}"], ""),
        (OWN + "train(resume_from_checkpoint=args.resume_from_checkpoint)", ["--resume_from_checkpoint", "{path}"], "whether train.py takes"),
        ("# get_last_checkpoint()\nfrom there import main\n", ["--resume_from_checkpoint", "{path}"], "whether train.py takes"),
        (None, ["--resume_from_checkpoint", "{path}"], "whether train.py takes"),
    ],
)  # fmt: skip
def test_what_a_resume_adds_is_said_and_written_down(
    tmp_path: Path, script: str | None, resume: list[str] | None, said: str
) -> None:
    """Words that its parser refuses would end each launch but the first."""
    if script is not None:
        (tmp_path / "train.py").write_text(script)
    made = of_text(tmp_path, RESUMES)
    assert made.tables["trainer"].get("resume") == resume
    assert said in left(made, "resume")
    assert bool(said) == ("--resume_from_checkpoint" in left(made, "resume"))
    assert ("finds it" in made.text) == (resume is not None)
