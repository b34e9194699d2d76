"""`tr11 adopt` and `tr11 init --trainer` as they are typed: the card is written, and launches."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tr11ops.dialects.dialect import names
from tr11ops.launch.foreign_starter import trainer_choices
from tr11ops.runcard.card import ForeignCard, load_card


def test_the_card_is_written_and_launched_dry(bench: LocalBench) -> None:
    script = bench.folder / "train.slurm"
    script.write_text(
        "#!/bin/bash\n#SBATCH --job-name=tiny --nodes=2 --ntasks-per-node=1 --time=02:00:00 --partition=local\n"
        "srun torchrun --nnodes=2 --nproc_per_node=2 train.py --output_dir out --max_steps 50"
        " --save_steps 5 --per_device_train_batch_size 1\n"
    )
    answer = bench.tr11("adopt", "train.slurm")
    assert answer.code == 0, answer.err
    assert "slurm.nodes = 2" in answer.out and "nothing is left to decide" in answer.out
    assert "next: tr11 trainer check --dialect huggingface --folder out" in answer.out
    assert "the first run makes it" in answer.out, (
        "the folder of the command above is not there yet"
    )
    assert "No one is told of anything yet: --set 'alerts.recipients=" in answer.out
    assert 'trainer.resume = ["--resume_from_checkpoint", "{path}"]' in answer.out
    assert "whether train.py takes --resume_from_checkpoint" in " ".join(answer.out.split())
    assert (
        "\n         no cd: where the card lies" in answer.out
    )  # no source, and no colon before it
    dry = bench.tr11("launch", "--scheduler", "local", "--dry-run")
    shown = dry.out + dry.err
    assert "2 x 2 workers = 4 ranks" in shown and "partition: local, 02:00:00" in shown, shown
    assert "a resume adds: --resume_from_checkpoint PATH" in shown
    told = ("--set", "alerts.recipients=['ana@example.org']", "--set", "trainer.resume=[]")
    answer = bench.tr11("adopt", "train.slurm", "--force", *told)
    assert answer.code == 0 and "No one is told" not in answer.out
    dry = bench.tr11("launch", "--scheduler", "local", "--dry-run")
    assert "a resume adds no words" in dry.out + dry.err
    again = bench.tr11("adopt", "train.slurm")
    assert again.code == 2 and "--force writes over it" in again.err
    assert bench.tr11("adopt", "train.slurm", "--force").code == 0


def test_a_default_of_an_argument_is_likely_and_not_certain(bench: LocalBench) -> None:
    script = bench.folder / "train.slurm"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=1 --time=02:00:00\nOUT=${1:-out}\n"
        "srun torchrun --nproc_per_node=2 train.py --output_dir $OUT --max_steps 50 --save_steps 5\n"
    )
    answer = bench.tr11("adopt", "train.slurm", "--dry-run")
    unknown = " ".join(answer.err.partition("Not known")[2].split())
    said = unknown or " ".join(answer.out.partition("Not known")[2].split())
    assert "3 $1 likely 'out', if it is called without arguments" in said, answer


@pytest.mark.parametrize("family", trainer_choices())
def test_each_family_has_a_starter_card(family: str, bench: LocalBench) -> None:
    words = ("init", "--scheduler", "local", "--yes", "--trainer", family)
    answer = bench.tr11(*words)
    assert answer.code == 0, answer.err
    assert "tr11 trainer check" in answer.err and "tr11 launch --dry-run" in answer.err
    path = bench.folder / "tr11.toml"
    text = path.read_text()
    card = load_card(path)
    assert isinstance(card, ForeignCard) and card.world_size >= 1
    assert card.trainer.dialect == (None if family == "command" else family)
    is_told = "Nothing is known of this trainer" in text
    assert is_told == (family == "command")
    assert ("believes = []" in text) == is_told, "a kill in a save would wait for a person"
    before = ""
    for line in text.splitlines():
        is_key = "=" in line and not line.startswith((" ", "#", "[", "]"))
        assert not is_key or "#" in line or before.startswith("#"), line
        before = line
    dry = bench.tr11("launch", "--scheduler", "local", "--dry-run")
    assert re.search(r"\d+ ranks? of another trainer", dry.out + dry.err)
    again = bench.tr11(*words)
    assert again.code == 1 and "nothing was written" in again.err


def test_a_family_has_a_short_name_too(bench: LocalBench) -> None:
    answer = bench.tr11("init", "--scheduler", "local", "--yes", "--trainer", "hf")
    assert answer.code == 0, answer.err
    card = load_card(bench.folder / "tr11.toml")
    assert isinstance(card, ForeignCard) and card.trainer.dialect == "huggingface"


def test_a_starter_card_takes_what_is_known(bench: LocalBench) -> None:
    known = (
        "--set",
        'trainer.command=["pre.py","--x"]',
        "--set",
        "trainer.folder=/o",
        "--set",
        "slurm.nodes=2",
    )
    answer = bench.tr11("init", "--scheduler", "local", "--yes", "--trainer", "megatron", *known)
    assert answer.code == 0, answer.err
    tables = tomllib.loads((bench.folder / "tr11.toml").read_text())
    assert tables["trainer"]["command"] == ["pre.py", "--x"]
    assert (tables["trainer"]["folder"], tables["slurm"]["nodes"]) == ("/o", 2)


def test_what_is_of_another_kind_of_card_is_refused(bench: LocalBench) -> None:
    words = ("init", "--scheduler", "local", "--yes", "--trainer")
    answer = bench.tr11(*words, "megatron", "--preset", "toy")
    assert answer.code == 2 and "of tr11's own trainer" in answer.err
    answer = bench.tr11(*words, "keras")
    assert answer.code == 2 and all(name in answer.err for name in names())
    assert bench.tr11(*words, "megatron", "--set", "trainer.comand=x").code == 2
    assert not (bench.folder / "tr11.toml").exists()


def test_what_is_left_to_a_person_is_not_launched(bench: LocalBench) -> None:
    """Without it, a card whose workers only the job knew would start one for each GPU."""
    script = bench.folder / "train.slurm"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=1 --gpus-per-node=2 --time=02:00:00 --partition=local\n"
        "torchrun --nproc_per_node=$NGPU train.py --output_dir out --per_device_train_batch_size 1\n"
    )
    assert bench.tr11("adopt", "train.slurm").code == 1
    words = ("launch", "--scheduler", "local", "--dry-run")
    dry = bench.tr11(*words)
    assert "1 question of adopt open: line 3: --nproc_per_node" in dry.out + dry.err
    answered = bench.tr11(*words, "--set", "slurm.workers_per_node=2")
    assert "of adopt open" not in answered.out + answered.err
    again = bench.tr11("adopt", "train.slurm", "--force", "--set", "slurm.workers_per_node=2")
    assert again.code == 0
    dry = bench.tr11(*words)
    assert "of adopt open" not in dry.out + dry.err
