"""`tr11 adopt` reads the files of settings that a command names, as the trainer itself would: what its
words say goes first. What cannot be read, or is not certain, stays unknown.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tr11ops.importer.adopting import adopt_script
from tr11ops.importer.options import Imported, LeftReason

HEAD = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --time=04:00:00\n"
TORCHRUN = "srun torchrun --nnodes 2 --nproc-per-node 4"
AXOLOTL = "srun accelerate launch --num_processes 8 --num_machines 2 -m axolotl.cli.train"

HUGGING_FACES = ["--resume_from_checkpoint", "{path}"]

# files beside the script; its command; folder, steps, interval; words to resume; workers on a node
READ: dict[str, tuple[dict[str, str], str, tuple[Any, ...], list[str] | None, int]] = {
    "axolotl": (
        {"mistral.yml": "base_model: m\noutput_dir: ./outputs/mistral\nmax_steps: 2000\nsave_steps: 100\nbf16: auto\n"},
        f"{AXOLOTL} mistral.yml",
        ("outputs/mistral", 2000, 100), ["--resume-from-checkpoint", "{path}"], 4,
    ),
    "axolotl, the command goes first": (
        {"mistral.yml": "output_dir: ./outputs\nmax_steps: 2000\nsave_steps: 100\n"},
        f"{AXOLOTL} mistral.yml --max-steps=500 --output_dir=elsewhere",
        ("elsewhere", 500, 100), ["--resume-from-checkpoint", "{path}"], 4,
    ),
    "axolotl saves once an epoch": (
        {"q.yaml": "output_dir: out\nnum_epochs: 3\nsaves_per_epoch: 1\n"},
        f"{AXOLOTL} q.yaml",
        ("out", None, None), ["--resume-from-checkpoint", "{path}"], 4,
    ),
    "a fraction of the steps is no number of them": (
        {"q.yaml": "output_dir: out\nmax_steps: -1\nsave_steps: 0.1\n"},
        f"{AXOLOTL} q.yaml",
        ("out", None, None), ["--resume-from-checkpoint", "{path}"], 4,
    ),
    "LLaMA-Factory": (
        {"sft.yaml": "stage: sft\ndo_train: true\noutput_dir: saves/qwen\nsave_steps: 250\nmax_steps: 3000\n"},
        "NNODES=2 NODE_RANK=$SLURM_NODEID NPROC_PER_NODE=4 MASTER_ADDR=$HEAD srun llamafactory-cli train sft.yaml",
        ("saves/qwen", 3000, 250), ["resume_from_checkpoint={path}"], 4,
    ),
    "LLaMA-Factory, the command goes first": (
        {"sft.yaml": "output_dir: saves/qwen\nsave_steps: 250\n"},
        "export NNODES=2\nexport FORCE_TORCHRUN=1\nsrun llamafactory-cli train sft.yaml output_dir=/s/b save_steps=50",
        ("/s/b", None, 50), ["resume_from_checkpoint={path}"], 4,
    ),
    "nanotron": (
        {"cfg/llama.yaml": "checkpoints:\n  checkpoint_interval: 1000\n  checkpoints_path: /ck/l\n"
         "  resume_checkpoint_path: /ck/l\ntokens:\n  train_steps: 40000\nparallelism:\n  dp: 2\n  tp: 2\n  pp: 2\n"},
        f"{TORCHRUN} run_train.py --config-file cfg/llama.yaml",
        ("/ck/l", 40_000, 1000), None, 4,
    ),
    "torchtitan": (
        {"train.toml": '[job]\ndump_folder = "dump"\n[training]\nsteps = 900\n[checkpoint]\nenable = true\ninterval = 90\n'},
        f"{TORCHRUN} -m torchtitan.train --job.config_file train.toml",
        ("dump", 900, 90), None, 4,
    ),
    "torchtitan, the command goes first": (
        {"train.toml": '[job]\ndump_folder = "dump"\n[training]\nsteps = 900\n[checkpoint]\nenable = true\ninterval = 90\n'},
        f"{TORCHRUN} -m torchtitan.train --job.config_file train.toml --training.steps 5000 --checkpoint.interval=500",
        ("dump", 5000, 500), None, 4,
    ),
    "torchtitan saves nothing": (
        {"train.toml": '[job]\ndump_folder = "dump"\n[checkpoint]\nenable = false\ninterval = 90\n'},
        f"{TORCHRUN} -m torchtitan.train --job.config_file train.toml",
        ("dump", None, None), None, 4,
    ),
    "accelerate": (
        {"fsdp.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\n"},
        "srun accelerate launch --config_file fsdp.yaml --machine_rank $SLURM_NODEID run_clm.py --output_dir o --max_steps 9",
        ("o", 9, None), HUGGING_FACES, 4,
    ),
    "accelerate, the command goes first": (
        {"d.json": '{"num_machines": 2, "num_processes": 8, "distributed_type": "MULTI_GPU"}'},
        "srun accelerate launch --config_file d.json --num_processes 4 --machine_rank $R run_clm.py --output_dir o",
        ("o", None, None), HUGGING_FACES, 2,
    ),
    "arguments of Hugging Face's examples": (
        {"args.json": '{"output_dir": "/o/clm", "max_steps": 700, "save_steps": 70, "save_strategy": "steps"}'},
        f"{TORCHRUN} run_clm.py args.json",
        ("/o/clm", 700, 70), None, 4,
    ),
    "TRL": (
        {"dpo.yaml": "output_dir: dpo\nmax_steps: 60\nsave_steps: 6\nsave_strategy: epoch\n"},
        f"{TORCHRUN} dpo.py --config dpo.yaml --per_device_train_batch_size 1",
        ("dpo", 60, None), None, 4,
    ),
    "DeepSpeed's batches fit": (
        {"z.json": '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}'},
        f"{TORCHRUN} run_clm.py --deepspeed z.json --output_dir o --save_steps 5",
        ("o", None, 5), HUGGING_FACES, 4,
    ),
    "a hostfile": (
        {"hosts": "# ours\nn1 slots=4\nn2 slots=4\n"},
        "deepspeed --hostfile hosts train.py --deepspeed --deepspeed_config z.json --save /c",
        ("/c", None, None), None, 4,
    ),
}  # fmt: skip


def adopted(folder: Path, files: dict[str, str], command: str) -> Imported:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = folder / "train.slurm"
    script.write_text(f"{HEAD}{command}\n")
    return adopt_script(script)


def unknown(made: Imported, name: str) -> str:
    found = [one.why for one in made.unplaced if one.option == name]
    assert all(one.reason is LeftReason.UNKNOWN for one in made.unplaced if one.option == name)
    return "; ".join(found)


def asked(made: Imported) -> dict[str, str]:
    return {one.key or one.option: one.why for one in made.decisions}


@pytest.mark.parametrize("name", READ)
def test_what_its_settings_say_is_in_the_card(name: str, tmp_path: Path) -> None:
    files, command, expected, resume, workers = READ[name]
    made = adopted(tmp_path, files, command)
    trainer, slurm = made.tables["trainer"], made.tables["slurm"]
    assert tuple(map(trainer.get, ("folder", "steps", "checkpoint_interval"))) == expected
    assert trainer.get("resume") == resume
    assert (slurm["nodes"], slurm["workers_per_node"]) == (2, workers)
    assert made.problems == ()


def test_llamafactory_is_told_by_variables_of_each_launch(tmp_path: Path) -> None:
    text = "export NNODES=2 NPROC_PER_NODE=4 MAX_RESTARTS=3\nsrun llamafactory-cli train sft.yaml"
    made = adopted(tmp_path, {"sft.yaml": "output_dir: o\n"}, text)
    trainer = made.tables["trainer"]
    assert trainer["start"] == "node"
    assert trainer["command"] == ["llamafactory-cli", "train", "sft.yaml"]
    given = trainer["environment"]
    assert (given["NNODES"], given["NODE_RANK"]) == ("{nodes}", "{node_rank}")
    assert given["NPROC_PER_NODE"] == "{workers_per_node}" and "MAX_RESTARTS" not in given
    assert any("second supervisor" in one.why for one in made.unplaced)
    alone = adopted(tmp_path, {}, "srun llamafactory-cli train sft.yaml")
    assert "slurm.nodes" in asked(alone)  # without NNODES each node trains by itself


def test_settings_wherever_they_lie(tmp_path: Path) -> None:
    """Where it runs goes before the script's own folder, and a whole path is the file that it names."""
    inner = tmp_path / "code"
    inner.mkdir()
    (inner / "a.yml").write_text("output_dir: inner\nmax_steps: 7\n")
    made = adopted(tmp_path, {"a.yml": "output_dir: outer\n"}, f"cd code\n{AXOLOTL} a.yml")
    assert (made.tables["trainer"]["folder"], made.tables["trainer"]["steps"]) == ("code/inner", 7)
    made = adopted(tmp_path, {}, f"cd /nowhere\n{AXOLOTL} {inner}/a.yml")
    assert made.tables["trainer"]["folder"] == "/nowhere/inner"


ANOTHER_SIZE = {
    "nanotron": (
        {"l.yaml": "parallelism: {dp: 4, tp: 4, pp: 1}\n"},
        f"{TORCHRUN} run_train.py --config-file l.yaml",
        "is for 16 ranks, and 8 are started",
    ),
    "DeepSpeed": (
        {"z.json": '{"train_batch_size": 60, "train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 4}'},
        f"{TORCHRUN} run_clm.py --deepspeed z.json --output_dir o",
        "no fit for 8 ranks",
    ),
    "DeepSpeed by accelerate": (
        {
            "a.yaml": "num_machines: 2\nnum_processes: 8\ndeepspeed_config: {deepspeed_config_file: z.json}\n",
            "z.json": '{"train_batch_size": 96, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}',
        },
        "srun accelerate launch --config_file a.yaml run_clm.py --output_dir o",
        "no fit for 8 ranks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANOTHER_SIZE)
def test_settings_for_another_number_of_ranks_are_asked_about(name: str, tmp_path: Path) -> None:
    files, command, what = ANOTHER_SIZE[name]
    made = adopted(tmp_path, files, command)
    assert made.exit_code == 1 and what in asked(made)["slurm.workers_per_node"]


def test_deepspeed_by_accelerate_does_not_reach_out_itself(tmp_path: Path) -> None:
    """Its default starts the other nodes by pdsh from the first one."""
    files, command, _ = ANOTHER_SIZE["DeepSpeed by accelerate"]
    words = adopted(tmp_path, files, command).tables["trainer"]["command"]
    assert words[words.index("--deepspeed_multinode_launcher") + 1] == "standard"


BOMB = "a: &a {k: v}\n" + "".join(
    f"{name}: &{name}\n  <<: [{', '.join([f'*{before}'] * 9)}]\n  {name}1: x\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
LIST_BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
MAP_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{{', '.join(f'k{n}: *{before}' for n in range(9))}}}\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
HOSTILE = {
    "not there": (None, "not at hand"),
    "an object of Python": ("output_dir: !!python/object/apply:os.system ['touch seen']\n", "no YAML"),
    "merges without end": (BOMB, "more than 20 aliases"),
    "lists without end": (LIST_BOMB, "more than 20 aliases"),
    "keys without end": (MAP_BOMB, "more than 20 aliases"),
    "no YAML at all": ("output_dir: [1, 2\nx: }\n", "no YAML (line"),
    "nested without end": ("[" * 50_000, "YAML"),
    "huge": ("x: y\n" * 300_000, "larger than"),
    "a list": ("- output_dir: x\n", "holds no keys"),
    "nothing": ("", "holds no keys"),
    "two documents": ("a: 1\n---\nb: 2\n", "no YAML"),
    "no date": ("a: 2001-99-99\n", "no YAML"),
    "a key that is a list": ("? [a, b]\n: 1\n", "no YAML"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_cannot_be_read_says_nothing(name: str, tmp_path: Path) -> None:
    text, what = HOSTILE[name]
    made = adopted(tmp_path, {} if text is None else {"c.yml": text}, f"{AXOLOTL} c.yml")
    why = unknown(made, "c.yml")
    assert what in why and "\n" not in why and len(why) < 250
    assert "folder" not in made.tables["trainer"] and not (tmp_path / "seen").exists()
    assert unknown(made, "output folder")


def test_what_refers_to_itself_is_looked_at_for_a_while(tmp_path: Path) -> None:
    text = "output_dir: out\na: &a\n  b: *a\n"
    made = adopted(tmp_path, {"c.yml": text}, f"{AXOLOTL} c.yml")
    assert made.tables["trainer"]["folder"] == "out"


def test_what_is_filled_in_later_is_not_certain(tmp_path: Path) -> None:
    text = "output_dir: ${oc.env:RUNS}/a\nmax_steps: 1e5\nsave_steps: '{{ n }}'\n"
    made = adopted(tmp_path, {"c.yaml": text}, f"{AXOLOTL} c.yaml")
    assert "trainer.folder" in asked(made)
    assert not {"folder", "steps", "checkpoint_interval"} & set(made.tables["trainer"])
    strict = adopted(tmp_path, {"c.yaml": "output_dir: o\nstrict: true\n"}, f"{AXOLOTL} c.yaml")
    assert "trainer.resume" in asked(strict)


def test_a_file_that_never_ends_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yml")
    assert "it is no file" in unknown(adopted(tmp_path, {}, f"{AXOLOTL} c.yml"), "c.yml")


def test_a_file_that_only_the_job_can_name(tmp_path: Path) -> None:
    made = adopted(tmp_path, {}, f"{AXOLOTL} $SLURM_JOB_ID.yml")
    assert any("only known in the job" in one.why for one in made.unplaced)
