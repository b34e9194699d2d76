"""How many nodes and workers a script's training has: by `#SBATCH` lines, srun's options and the
launcher's, which must say the same. What they do not say is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tr11ops.base.errors import ConversionProblem
from tr11ops.base.units import counted
from tr11ops.importer.options import Builder, LeftReason, integer
from tr11ops.importer.sbatch import Directive
from tr11ops.importer.settings_files import SettingsFile, whole_number
from tr11ops.importer.traced import Traced
from tr11ops.importer.training_command import (
    ONLY_IN_THE_JOB,
    OWN_TORCHRUN,
    LauncherOption,
    TrainingCommand,
)

NODES = "slurm.nodes"
WORKERS = "slurm.workers_per_node"
GPUS = "slurm.gpus_per_node"
# launchers that themselves reach the other nodes
_REACH_OUT = frozenset({"deepspeed", "mpirun"})
_COUNTS_NODES = re.compile(r"scontrol show hostname|SLURM_(?:JOB_)?(?:NUM_NODES|NNODES)\b")
_CHOICES = ("include", "i", "exclude", "e")  # of GPUs, by DeepSpeed
_SLOTS = re.compile(r"\S+\s+slots\s*=\s*([0-9]{1,4})")
_COUNTS_GPUS = re.compile(r"nvidia-smi (?:-L|--list-gpus|--query-gpu)|rocm-smi|SLURM_GPUS_ON_NODE")


def number_of(value: Traced | None) -> int | None:
    """A whole number above zero that the script says; None where it is none, or not known."""
    if value is None or not value.is_known or not re.fullmatch(r"[0-9]{1,9}", value.text):
        return None
    return int(value.text) or None


class ClusterPlacement:
    """Places nodes, workers and GPUs of one script into a card."""

    def __init__(
        self,
        builder: Builder,
        directives: Sequence[Directive],
        training: TrainingCommand,
        settings: SettingsFile | None,
        text_at: Callable[[str], str | None],
    ) -> None:
        self.builder = builder
        self.training = training
        self.settings = settings
        self.text_at = text_at
        self.asked = {item.name: item for item in directives if item.read}

    def place(self, devices: LauncherOption | None) -> None:
        """Place all of them. `devices`: the trainer's own option of workers on a node."""
        self.place_nodes()
        self.place_gpus()
        if self.training.option(ONLY_IN_THE_JOB) is not None:
            line = self.training.line
            why = "options of the launcher stand in a variable that the script does not set"
            self.builder.ask("the launcher", "", line=line, why=why, key=WORKERS)
            return
        self.place_workers(devices)

    # ------------------------------------------------------------------ nodes
    def place_nodes(self) -> None:
        if NODES not in self.builder.placed and not self.is_asked(NODES):
            self.nodes_by_tasks()
        self.compare_nodes()

    def nodes_by_tasks(self) -> None:
        """Slurm's own rule where no number of nodes is asked for."""
        tasks = self.directive("ntasks")
        each = self.directive("ntasks-per-node")
        if tasks is None or tasks == 1:
            self.builder.put(
                NODES, 1, "no #SBATCH --nodes", 0, note="no --nodes is given: Slurm gives one node"
            )
        elif each is not None and tasks % each == 0:
            line = self.asked["ntasks"].line
            note = f"{counted(tasks, 'task')}, {each} on a node"
            self.builder.put(NODES, tasks // each, "#SBATCH --ntasks", line, note=note)
        else:
            why = "no number of nodes is asked for, and tasks may lie on any number of them"
            line = self.asked["ntasks"].line
            self.builder.ask("#SBATCH --ntasks", str(tasks), line=line, why=why, key=NODES)

    def compare_nodes(self) -> None:
        """What srun and the launcher are told must be the allocation."""
        training = self.training
        asked = self.builder.integer(NODES)
        told = training.option("nnodes", "num_machines", "num_nodes")
        if not asked:
            return
        srun = training.srun.get("nodes")
        on = number_of(srun)
        if on is not None and on != asked and not training.is_each_node:
            assert srun is not None
            self.contradiction(f"srun starts it on {on} of {counted(asked, 'node')}", srun.line)
            return
        if told is None:
            self.without_nodes(asked)
            return
        value = told.value or Traced()
        number = number_of(value)
        if number is None and not any(map(_COUNTS_NODES.search, value.unknowns)):
            shown = f"{told.spelled} {value.for_shell()}"
            what = f"{shown} is only known in the job, Slurm is asked for {counted(asked, 'node')}"
            if ":" in value.text and value.is_known:
                what = f"{shown} is an elastic number: tr11 has a fixed one, and slurm.spare_nodes"
            self.contradiction(what, told.line)
            return
        if number is not None and number != asked:
            self.contradiction(
                f"the launcher is told {counted(number, 'node')}, Slurm is asked for {asked}",
                told.line,
            )
            return
        self.is_reached(asked)

    def without_nodes(self, asked: int) -> None:
        training = self.training
        if asked == 1 or training.launcher in _REACH_OUT or not training.launcher:
            if not training.launcher:
                self.is_reached(asked)
            return
        config = self.config_number("num_machines")
        if training.launcher == "accelerate" and config == asked:
            self.is_reached(asked)
            return
        why = f"the launcher is told no number of nodes, so each of {asked} would train by itself"
        self.contradiction(why, training.line)

    def is_reached(self, asked: int) -> None:
        """A batch script runs on the first node alone."""
        training = self.training
        if asked == 1 or training.under_srun or training.remote or training.launcher in _REACH_OUT:
            return
        self.contradiction(
            f"no srun starts it on the other nodes: it runs on one of {asked}", training.line
        )

    def contradiction(self, what: str, line: int) -> None:
        if NODES in self.builder.placed:
            self.builder.drop(NODES, f"contradicted on line {line}", LeftReason.NO_EFFECT)
        self.builder.ask("nodes", "", line=line, why=what, key=NODES)

    # ------------------------------------------------------------------ GPUs
    def place_gpus(self) -> None:
        if GPUS in self.builder.placed or self.is_asked(GPUS):
            return
        nodes = self.builder.integer(NODES)
        each_task = self.directive("gpus-per-task")
        tasks = self.tasks_asked(nodes)
        total = self.directive("gpus")
        if each_task is not None and tasks:
            item = self.asked["gpus-per-task"]
            self.builder.forget("#SBATCH --gpus-per-task")
            note = f"{each_task} of each of {counted(tasks, 'task')}"
            self.builder.put(
                GPUS, each_task * tasks, "#SBATCH --gpus-per-task", item.line, note=note
            )
        elif total is not None and nodes and total % nodes == 0:
            item = self.asked["gpus"]
            self.builder.forget("#SBATCH --gpus")
            note = f"{total} on {nodes} nodes" if nodes > 1 else ""
            self.builder.put(GPUS, total // nodes, "#SBATCH --gpus", item.line, note=note)
        elif "gpus" in self.asked or "gpus-per-task" in self.asked:
            item = self.asked.get("gpus") or self.asked["gpus-per-task"]
            why = "does not say how many GPUs each node has"
            self.builder.ask(
                f"#SBATCH --{item.name}", item.value, line=item.line, why=why, key=GPUS
            )

    # ------------------------------------------------------------------ workers
    def place_workers(self, devices: LauncherOption | None) -> None:
        launcher = self.training.launcher
        if launcher in {"torchrun", "ft_launcher", "torch.distributed.launch"}:
            self.by_launcher("nproc_per_node", 1)
            self.only_one_launcher()
        elif launcher == "deepspeed":
            if not self.by_hostfile():
                self.by_launcher("num_gpus", self.builder.integer(GPUS))
        elif launcher == OWN_TORCHRUN:
            self.by_launcher("nproc_per_node", self.builder.integer(GPUS))
            self.only_one_launcher()
        elif launcher == "accelerate":
            self.by_total()
            self.only_one_launcher()
        elif launcher == "mpirun":
            self.by_mpi()
        else:
            self.by_tasks(devices)

    def by_hostfile(self) -> bool:
        """The slots of DeepSpeed's hostfile, where it is at hand and gives each node as many."""
        option = self.training.option("hostfile", "H")
        others = self.training.option("num_gpus", *_CHOICES)
        if option is None or option.value is None or not option.value.is_known or others:
            return False
        try:
            text = self.text_at(option.value.text) or ""
        except ConversionProblem:
            return False
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        slots = [_SLOTS.fullmatch(line) for line in lines if line]
        counts = {match[1] for match in slots if match}
        if None in slots or len(counts) != 1 or len(slots) != self.builder.integer(NODES):
            return False
        note = f"slots of {option.value.text}: the machines are those that Slurm gives"
        self.builder.put(WORKERS, int(counts.pop()), option.spelled, option.line, note=note)
        return True

    def by_launcher(self, name: str, default: int) -> None:
        option = self.training.option(name)
        gpus = self.builder.integer(GPUS)
        if option is None:
            if self.training.option("hostfile", "H", *_CHOICES):
                why = "a hostfile, or a choice of GPUs, says how many workers a node has"
                self.builder.ask("workers", "", line=self.training.line, why=why, key=WORKERS)
            elif default:
                note = f"no --{name} is given: {self.training.launcher} starts {default}"
                self.builder.put(WORKERS, default, self.training.launcher, 0, note=note)
            else:
                why = f"{self.training.launcher} starts as many workers as it finds GPUs"
                self.builder.ask("workers", "", line=self.training.line, why=why, key=WORKERS)
            return
        value = option.value or Traced()
        counts_gpus = any(map(_COUNTS_GPUS.search, value.unknowns)) or value.text in {"gpu", "auto"}
        if counts_gpus and gpus:
            note = f"{value.text[:40]}: the GPUs of a node"
            self.builder.put(WORKERS, gpus, option.spelled, option.line, note=note)
            return
        if value.text in {"gpu", "auto", "cpu"}:
            why = f"is {value.text!r}, and the script does not say how many a node has: give --set {WORKERS}=..."
            self.builder.ask(option.spelled, value.text, line=option.line, why=why, key=WORKERS)
            return
        self.builder.take(WORKERS, (value,), integer, source=option.spelled, line=option.line)

    def only_one_launcher(self) -> None:
        """A launcher starts the workers of a node, so there must be one on each."""
        if not self.training.under_srun or self.training.is_each_node:
            return
        tasks = self.tasks_started(self.builder.integer(NODES))
        if tasks is not None and tasks > 1:
            self.withdraw()
            why = f"srun starts {self.training.launcher} {tasks} times on a node, each with workers of its own"
            self.builder.ask("tasks", "", line=self.training.line, why=why, key=WORKERS)

    def by_total(self) -> None:
        """accelerate is told the processes of all nodes."""
        option = self.training.option("num_processes")
        nodes = self.builder.integer(NODES)
        total = None
        source = "accelerate"
        line = self.training.line
        if option is not None:
            total = number_of(option.value)
            source = option.spelled
            line = option.line
        else:
            total = self.config_number("num_processes")
        if total is not None and nodes and total % nodes == 0:
            note = f"{total} on {nodes} nodes" if nodes > 1 else ""
            self.builder.put(WORKERS, total // nodes, source, line, note=note)
            return
        why = "how many processes there are is not said: give --num_processes, or a --config_file beside the script"
        shown = ""
        if option is not None:
            why = "does not say how many processes each node has"
            shown = (option.value or Traced()).for_shell()
        self.builder.ask(source, shown, line=line, why=why, key=WORKERS)

    def by_mpi(self) -> None:
        nodes = self.builder.integer(NODES)
        each = self.training.option("npernode", "ppn", "N")
        total = self.training.option("np", "n", "c")
        if each is not None and number_of(each.value) is not None:
            assert each.value is not None
            self.builder.take(WORKERS, (each.value,), integer, source=each.spelled, line=each.line)
        elif (
            total is not None
            and nodes
            and (count := number_of(total.value) or 0)
            and count % nodes == 0
        ):
            note = f"{count} on {nodes} nodes" if nodes > 1 else ""
            self.builder.put(WORKERS, count // nodes, total.spelled, total.line, note=note)
        else:
            self.by_tasks(None)
        why = "the program finds its rank in RANK and LOCAL_RANK then, not in what mpirun sets: does it look there?"
        why = f"{why} If so: give --set trainer.start=srun"
        self.builder.ask("mpirun", "", line=self.training.line, why=why, key="trainer.start")

    def by_tasks(self, devices: LauncherOption | None) -> None:
        """Without a launcher each task is a worker, unless the program starts its own."""
        training = self.training
        own = number_of(devices.value) if devices is not None else None
        tasks = 1
        if training.under_srun:
            found = self.tasks_started(self.builder.integer(NODES))
            if found is None:
                why = "how many tasks srun starts on a node is not known"
                self.withdraw()
                self.builder.ask("srun", "", line=training.line, why=why, key=WORKERS)
                return
            tasks = found
        if devices is not None and own is not None and tasks in {1, own}:
            self.builder.put(WORKERS, own, devices.spelled, devices.line)
            return
        if devices is not None and own is not None and tasks != own:
            why = f"the trainer is told {counted(own, 'worker')} on a node, srun starts {tasks}"
            self.withdraw()
            self.builder.ask(devices.spelled, "", line=devices.line, why=why, key=WORKERS)
            return
        gpus = self.builder.integer(GPUS)
        if tasks == 1 and gpus > 1:
            why = f"one process is started on a node with {gpus} GPUs: whether it starts more is the program's"
            self.withdraw()
            self.builder.ask("workers", "", line=training.line, why=why, key=WORKERS)
            return
        line = training.line
        item = self.asked.get("ntasks-per-node")
        if training.under_srun:
            note = "each task is a worker"
        else:
            note = "one process is started"
        if item is not None and number_of(Traced.of(item.value, 0)) == tasks:
            line = item.line
        if WORKERS not in self.builder.placed:
            self.builder.put(WORKERS, tasks, "tasks", line, note=note)
        elif self.builder.integer(WORKERS) != tasks:
            self.builder.put(WORKERS, tasks, "srun", training.line, note=note)

    # ------------------------------------------------------------------ what is asked for
    def tasks_started(self, nodes: int) -> int | None:
        """Tasks that srun starts on each node; None where that is not known."""
        srun = self.training.srun
        each = srun.get("ntasks_per_node")
        if each is not None:
            return number_of(each)
        total = srun.get("ntasks")
        if total is not None:
            count = number_of(total)
            if count is None and any(map(_COUNTS_NODES.search, total.unknowns)):
                return 1
            if count is None or not nodes or count % nodes:
                return None
            return count // nodes
        return self.tasks_asked(nodes)

    def withdraw(self) -> None:
        """No number of workers stands in the card where two of them contradict each other."""
        if WORKERS in self.builder.placed:
            self.builder.drop(WORKERS, "is contradicted", LeftReason.NO_EFFECT)

    def tasks_asked(self, nodes: int) -> int | None:
        """Tasks of a node by the `#SBATCH` lines: one, where they say nothing."""
        if "ntasks-per-node" in self.asked:
            return self.directive("ntasks-per-node")
        if "ntasks" not in self.asked:
            return 1
        count = self.directive("ntasks")
        if count is None or not nodes or count % nodes:
            return None
        return count // nodes

    def directive(self, name: str) -> int | None:
        item = self.asked.get(name)
        if item is None:
            return None
        return number_of(Traced.of(item.value.rpartition(":")[2], item.line))

    def config_number(self, key: str) -> int | None:
        """A number in accelerate's own file of settings, where that is at hand and is of this machine."""
        if self.settings is None:
            return None
        content = self.settings.content
        if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
            return None
        return whole_number(content.get(key))

    def is_asked(self, key: str) -> bool:
        """Whether a person is already asked for this key."""
        return any(
            item.key == key and item.reason is LeftReason.DECISION for item in self.builder.unplaced
        )
