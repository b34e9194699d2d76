"""`tr11 adopt` with bash itself as the judge: what a card says is what the script starts."""

from __future__ import annotations

import random
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.tr11ops.importer.foreign_scripts import NAMES, SCRIPTS, adopted, of_text
from tr11ops.base.errors import ScriptError
from tr11ops.importer.options import Imported

# Programs in the place of Slurm's and of the launchers: each writes the words that it was called with.
STUB = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >> "$CALLS"
printf '\\n' >> "$CALLS"
"""
SRUN = """#!/bin/bash
while [ $# -gt 0 ]; do
  case "${1##*/}" in
    torchrun|bash|python|python3|litgpt|apptainer|uv|accelerate) exec "$@";;
    hostname) echo n1; exit;;
  esac
  shift
done
"""
PREFIX = """#!/bin/bash
while [ $# -gt 0 ]; do
  case "${1##*/}" in torchrun|uv) exec "$@";; esac
  shift
done
"""
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "litgpt")
# what bash cannot be asked: carriage returns are no blanks to it
JUDGED = [name for name in NAMES if name != "windows"]


def calls_of_bash(script: Path, folder: Path, made: Imported) -> list[list[str]]:
    """The launchers' words, as bash starts them in a job of the card's size."""
    stubs = folder / "stubs"
    stubs.mkdir()
    # in one write, as Slurm has it: `head -n 1` may end before the second
    count = made.tables["slurm"]["nodes"]
    (stubs / "names").write_text("".join(f"n{number}\n" for number in range(1, count + 1)))
    texts = dict.fromkeys((*LAUNCHERS, "dcgmi"), STUB)
    texts |= {"srun": SRUN, "uv": PREFIX, "apptainer": PREFIX}
    texts |= {
        "scontrol": f"#!/bin/bash\nexec cat {stubs}/names\n",
        "conda": "#!/bin/bash\n",
        "module": "#!/bin/bash\n",
    }
    for name, text in texts.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    work, calls = folder / "work", folder / "calls"
    (work / "nanoGPT").mkdir(parents=True)
    nodes = str(count)
    environment = {
        "PATH": f"{stubs}:/usr/bin:/bin",
        "HOME": str(work),
        "CALLS": str(calls),
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_JOB_NODELIST": "n[1-4]",
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
    }
    lines = script.read_text().splitlines(keepends=True)
    copied = folder / "script"
    copied.write_text("".join(line for line in lines if not line.startswith("source ")))
    subprocess.run(["bash", copied], cwd=work, env=environment, capture_output=True, timeout=60)
    lines = calls.read_bytes().split(b"\0\n")
    found = [[word.decode() for word in line.split(b"\0")] for line in lines if line]
    return [words for words in found if words[0] in LAUNCHERS]


def number_in(words: list[str], *options: str) -> int | None:
    text = " ".join(words).replace("_", "-")
    match = re.search(rf"(?:{'|'.join(options)})[ =](\d+)", text)
    return None if match is None else int(match[1])


@pytest.mark.parametrize("name", JUDGED)
def test_bash_starts_what_the_card_says(name: str, tmp_path: Path) -> None:
    made = adopted(name)
    calls = calls_of_bash(SCRIPTS / f"{name}.slurm", tmp_path, made)
    assert calls, "bash started no launcher"
    words, slurm = calls[-1], made.tables["slurm"]
    nodes = number_in(words, "--nnodes", "--num-machines", "--num-nodes", r"trainer\.num-nodes")
    assert nodes in {None, slurm["nodes"]} and (nodes is not None or slurm["nodes"] == 1)
    own = number_in(words, "--nproc-per-node", "--num-gpus", "--devices", r"trainer\.devices")
    total = number_in(words, "--num-processes")
    workers = slurm["workers_per_node"]
    assert own in {None, workers} and total in {None, workers * slurm["nodes"]}
    assert (own, total) != (None, None) or "gpu" in " ".join(words)
    command = made.tables["trainer"]["command"]
    place = next(
        i for i, word in enumerate(command) if word.endswith(".py") or word in ("-m", "litgpt")
    )
    wanted = [word for word in command[place:] if not re.search(r"[{$]\w", word)]
    rest = iter(words)
    missing = [word for word in wanted if word not in rest]
    assert not missing, (missing, words)


def test_scripts_with_slips_of_the_pen_are_read_or_refused(tmp_path: Path) -> None:
    """Never anything but a card in TOML or one line of refusal."""
    pick = random.Random(34)
    pieces = [
        "$(",
        "${X}",
        "`",
        '"',
        "'",
        "\\\n",
        "srun ",
        "--nnodes ",
        "<<EOF\n",
        "; ",
        "-m ",
        "=",
        "é",
        "#",
        "cd ",
        "9" * 30,
    ]
    texts = [(SCRIPTS / f"{name}.slurm").read_text() for name in NAMES]
    cards = 0
    for _ in range(200):
        text = pick.choice(texts)
        for _ in range(pick.randint(1, 4)):
            start = pick.randrange(len(text))
            text = text[:start] + pick.choice(pieces) + text[start + pick.choice((0, 1, 20)) :]
        try:
            made = of_text(tmp_path, text)
        except ScriptError as error:
            assert "\n" not in str(error)
            continue
        tomllib.loads(made.text)
        cards += 1
    assert cards > 50
