"""The unchanged trainers that are given faults: their cards, and where their checkpoints are broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from tests.tr11ops.trainers.kept import SCRIPTS
from trainer.contract.record import Record

STEPS, INTERVAL = 20, 5


class FaultedTrainer(Record):
    """A trainer of two ranks, one on each of two nodes.

    `script`: in the folder of scripts. `words`: of its command, with `{folder}`, which tr11 fills in.
    `tables`: the rest of `[trainer]`. `pace`: the variable by which a step takes so many seconds.
    `nan`: a variable of its environment and its value that make a loss NaN; empty where that cannot be.
    `hang`: the variable that names a step at which rank 1 waits for ever, once; "" where that cannot be.
    `cut`: the file of a checkpoint that is cut to break it; "" where a checkpoint is one file.
    `start_seconds`: how long its libraries take before its first step, beyond a second or two.
    `environment`: what else its processes have there. `appears_whole`: a save gets its name when it is
    whole, so that none is ever seen in its middle.
    """

    name: str
    script: str
    words: tuple[str, ...]
    tables: str
    steps: int = STEPS
    interval: int = INTERVAL
    pace: str = "STEP_SECONDS"
    nan: tuple[str, str] | None = None
    hang: str = ""
    cut: str = ""
    start_seconds: float = 0.0
    environment: Mapping[str, str] = {}
    appears_whole: bool = False

    def longer(self, steps: int) -> FaultedTrainer:
        """The same for more steps."""
        words = tuple(str(steps) if word == str(self.steps) else word for word in self.words)
        tables = self.tables.replace(f"steps = {self.steps}", f"steps = {steps}")
        return replace(self, steps=steps, words=words, tables=tables)

    def card(self, root: Path, slurm: str, watch: str, environment: dict[str, str]) -> str:
        """The run card of a training in `root`; `slurm`, `watch`: more lines of these sections."""
        own = {**self.environment, **environment}
        given = "\n".join(f"{name} = {json.dumps(value)}" for name, value in own.items())
        return _CARD.format(
            root=root,
            slurm=slurm,
            watch=watch,
            command=json.dumps([str(SCRIPTS / self.script), *self.words]),
            python=sys.executable,
            interval=self.interval,
            tables=self.tables,
            environment=given,
        )


_CARD = """
[run]
name = "toy"
directory = "{root}"
[slurm]
nodes = 2
spare_nodes = 1
gpus_per_node = 0
workers_per_node = 1
cpus_per_task = 1
{slurm}
[watch]
act = true
{watch}
[trainer]
command = {command}
folder = "{root}/out"
python = "{python}"
checkpoint_interval = {interval}
{tables}
[trainer.environment]
{environment}
"""

PLAIN = FaultedTrainer(
    name="plain",
    script="plain_train.py",
    words=("{folder}", str(STEPS), str(INTERVAL), "0"),
    tables="""
[trainer.progress]
step_line = '^at (?P<step>\\d+)/(?P<total>\\d+) loss=(?P<loss>\\S+)'
[trainer.marks]
resumed = '^begin after step (?P<done>[1-9]\\d*)'
scratch = '^begin after step 0$'
[trainer.checkpoints]
name = "step-{step}"
complete = ["count rank_*.pt = {world_size}", "zip rank_*.pt"]
believes = []
quiet = 1
""",
    nan=("NAN_AT", "8"),
    hang="HANG_AT",
    cut="rank_1.pt",
)
DCP = FaultedTrainer(
    name="dcp",
    script="dcp_train.py",
    words=("{folder}", str(STEPS), str(INTERVAL)),
    tables=f"""
dialect = "torchtitan"
steps = {STEPS}
[trainer.checkpoints]
quiet = 1
""",
    nan=("NAN_AT", "8"),
    hang="HANG_AT",
    cut="__1_0.distcp",
)
HUGGING_FACE = FaultedTrainer(
    name="huggingface",
    script="hf_train.py",
    words=(
        "--output_dir", "{folder}", "--use_cpu", "--max_steps", str(STEPS), "--save_steps", str(INTERVAL),
        "--per_device_train_batch_size", "2", "--logging_steps", "1", "--report_to", "none",
    ),
    tables="""
dialect = "huggingface"
resume = []
[trainer.checkpoints]
quiet = 2
""",
    nan=("NAN_AT", "8"),
    hang="HANG_AT",
    cut="model.safetensors",
    start_seconds=20.0,
)  # fmt: skip
LIGHTNING = FaultedTrainer(
    name="lightning",
    script="lightning_train.py",
    words=("{folder}", "24"),
    tables="""
dialect = "lightning"
resume = ["{path}"]
steps = 24
[trainer.checkpoints]
quiet = 2
""",
    steps=24,
    interval=8,
    nan=("NAN_AT", "10"),
    hang="HANG_AT",
    start_seconds=20.0,
    environment={"BAR": "tqdm"},
    appears_whole=True,
)
TRAINERS = {one.name: one for one in (PLAIN, DCP, HUGGING_FACE, LIGHTNING)}
