"""A training's command taken out of what starts it: srun, torchrun, accelerate, deepspeed, mpirun,
containers and shells. Nothing is run; what the options of each layer say is kept, or told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tr11ops.importer.expansion import Script, ShellCommand
from tr11ops.importer.options import LeftReason, words_of
from tr11ops.importer.sbatch import SHORT_OPTIONS
from tr11ops.importer.shell_words import SHELLS
from tr11ops.importer.traced import Traced
from trainer.contract.record import Record

PYTHON = re.compile(r"python[0-9.]*|pypy3?")


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
# programs that start the command behind them, with those of their options that take a value
_PLAIN_PREFIXES: Mapping[str, frozenset[str]] = {
    "exec": frozenset(),
    "command": frozenset(),
    "nohup": frozenset(),
    "time": frozenset(),
    "env": frozenset({"u", "unset", "C", "chdir"}),
    "timeout": frozenset({"s", "signal", "k", "kill_after"}),
    "stdbuf": frozenset({"o", "e", "i"}),
    "nice": frozenset({"n", "adjustment"}),
}
_REMOTE = frozenset({"ssh", "pdsh", "clush", "parallel-ssh"})
_RUNNERS = frozenset({"uv", "poetry", "pipenv", "pdm", "conda", "mamba", "micromamba", "pixi"})
_KEPT_PREFIXES = frozenset(
    {"numactl", "taskset", "nsys", "ncu", "dcgmi", "catchsegv", "jemalloc.sh"}
)
_DAEMONS = frozenset({"docker", "podman"})
_IMAGES = frozenset({"apptainer", "singularity", "enroot"}) | _DAEMONS
_ENROOTS = frozenset({"m", "mount", "e", "env", "c", "conf", "rc"})
_BINDS = frozenset({"B", "bind", "v", "volume"})
_MPI = frozenset({"mpirun", "mpiexec", "prun", "orterun"})
_TORCHRUN = {"torchrun": "torchrun", "ft_launcher": "ft_launcher"}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate_cli",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed": "deepspeed",
}
# Options that take no value, by the program; dashes and underscores are one.
_SWITCHES: Mapping[str, frozenset[str]] = {
    "srun": _set(
        "l u Q v E O s k label unbuffered exclusive overlap overcommit no_kill pty quiet verbose "
        "contiguous kill_on_bad_exit K multi_prog no_container_mount_home container_mount_home "
        "use_min_nodes hold container_writable container_readonly container_remap_root "
        "no_container_remap_root container_entrypoint no_container_entrypoint disable_status "
        "exact immediate spread_job"
    ),
    "torchrun": _set("standalone m module no_python run_path use_env disable_ft"),
    "accelerate": _set(
        "q quiet cpu multi_gpu tpu ipex use_deepspeed use_fsdp use_megatron_lm use_tp use_xpu m "
        "module no_python same_network debug tpu_use_cluster no_tpu_cluster tpu_use_sudo "
        "dynamo_use_fullgraph dynamo_use_dynamic enable_cpu_affinity use_parallelism_config"
    ),
    "deepspeed": _set(
        "module no_python no_local_rank no_ssh no_ssh_check force_multi enable_elastic_training "
        "save_pid bind_cores_to_rank"
    ),
    "mpi": _set(
        "allow_run_as_root display_map oversubscribe nooversubscribe report_bindings tag_output v "
        "q bind_to_none bycore bynode"
    ),
    "apptainer": _set(
        "nv rocm e cleanenv c contain C containall w writable writable_tmpfs no_home u userns f "
        "fakeroot no_init p pid i ipc compat no_privs keep_privs nvccli"
    ),
    "docker": _set("rm i t it ti d detach init privileged interactive tty read_only"),
    "enroot": _set("r root w rw"),
}
# What a launch gets from tr11 anew each time.
_RENDEZVOUS = _set(
    "nnodes nproc_per_node node_rank rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr "
    "master_port standalone local_addr monitor_interval log_dir redirects tee r t use_env "
    "num_processes num_machines machine_rank main_process_ip main_process_port num_nodes "
    "num_gpus hostfile H force_multi launcher no_ssh no_ssh_check no_local_rank"
)
_TWO_VALUES = frozenset({"mca", "gmca"})
_RESTARTS = "max_restarts"
ONLY_IN_THE_JOB = "?"
"""The name of launcher options that stand in a variable of which the script says nothing."""
_OWN_OUTPUT = frozenset({"log_dir", "redirects", "tee", "r", "t"})


OWN_TORCHRUN = "llamafactory-cli"
"""Starts torchrun itself, which is told by variables."""
# variable -> the option of torchrun that it is
VARIABLES: Mapping[str, str] = {
    "NNODES": "nnodes",
    "NPROC_PER_NODE": "nproc_per_node",
    "NODE_RANK": "node_rank",
    "MASTER_ADDR": "master_addr",
    "MASTER_PORT": "master_port",
    "MAX_RESTARTS": "max_restarts",
    "RDZV_ID": "rdzv_id",
    "FORCE_TORCHRUN": "",
    "MIN_NNODES": "",
    "MAX_NNODES": "",
}


class LauncherOption(Record):
    """One option of a launcher. `words`: as the script gives it; `value` is None for a switch."""

    name: str
    words: tuple[Traced, ...]
    value: Traced | None = None

    @property
    def spelled(self) -> str:
        return self.words[0].text.partition("=")[0]

    @property
    def line(self) -> int:
        return self.words[0].line


class ContainerUse(Record):
    """The container that a command is started in. `runtime`: pyxis, apptainer or docker."""

    runtime: str
    image: Traced
    mounts: tuple[Traced, ...]
    options: tuple[LauncherOption, ...] = ()

    def option(self, *names: str) -> Traced | None:
        """The value of an option of one of these names."""
        found = [one.value for one in self.options if one.name in names]
        if found:
            return found[-1]
        return None


class LeftOut(Record):
    """What stands in the script's command and not in the card's."""

    option: str
    value: str
    line: int
    why: str
    reason: LeftReason = LeftReason.DROPPED
    key: str = ""


class TrainingCommand(Record):
    """The training's command and what the script says of its start.

    `launcher`: torchrun, accelerate, deepspeed, ...; "" where each task of Slurm is a worker.
    `program`: the words from the program on; `prefix`: words before the launcher that belong to it
    (`uv run`, `numactl ...`); `spelled`: the launcher's own words. `options`: the launcher's, `srun`:
    those of srun, by name. `remote`: ssh or its like. `image`: the container's runtime, image, mounts.
    """

    command: ShellCommand
    launcher: str
    program: tuple[Traced, ...]
    prefix: tuple[Traced, ...] = ()
    spelled: tuple[Traced, ...] = ()
    options: tuple[LauncherOption, ...] = ()
    srun: Mapping[str, Traced] = {}
    under_srun: bool = False
    remote: str = ""
    image: ContainerUse | None = None
    environment: tuple[tuple[str, Traced], ...] = ()
    left: tuple[LeftOut, ...] = ()

    @property
    def line(self) -> int:
        return self.command.line

    @property
    def text(self) -> str:
        """All that is started, for a look at it."""
        words = (
            *self.spelled,
            *(word for one in self.options for word in one.words),
            *self.program,
        )
        return " ".join(word.text for word in words)

    @property
    def is_each_node(self) -> bool:
        """Whether the script itself starts it on one node after another."""
        host = self.srun.get("nodelist")
        is_somewhere = bool(self.remote) or (host is not None and not host.is_known)
        return is_somewhere and self.command.conditional

    def option(self, *names: str) -> LauncherOption | None:
        """The launcher's option of one of these names, the last one given."""
        found = [one for one in self.options if one.name in names]
        if found:
            return found[-1]
        return None

    def kept_options(self) -> Iterator[Traced]:
        """Words of the launcher's options that tr11 does not give itself."""
        for one in self.options:
            if one.name not in _RENDEZVOUS and one.name != _RESTARTS and not _is_of_ft(one):
                yield from one.words


def training_commands(script: Script) -> list[TrainingCommand]:
    """Every command of a script that may be a training."""
    found = []
    for command in script.commands:
        one = _Layers(script).taken_apart(command)
        if one is not None:
            found.append(one)
    return found


@dataclass
class _Layers:
    """Takes one layer after another from a command."""

    script: Script
    prefix: list[Traced] = field(default_factory=list)
    spelled: tuple[Traced, ...] = ()
    launcher: str = ""
    options: list[LauncherOption] = field(default_factory=list)
    srun: dict[str, Traced] = field(default_factory=dict)
    under_srun: bool = False
    remote: str = ""
    image: ContainerUse | None = None
    environment: list[tuple[str, Traced]] = field(default_factory=list)

    def taken_apart(self, command: ShellCommand) -> TrainingCommand | None:
        for holder in _holders(self.script, command):
            self.given(holder)
            self.peel(holder.words)
        self.given(command)
        program = self.peel(command.words)
        if not program or not _may_train(program, self.launcher):
            return None
        return TrainingCommand(
            command,
            self.launcher,
            program,
            prefix=tuple(self.prefix),
            spelled=self.spelled,
            options=tuple(self.options),
            srun=dict(self.srun),
            under_srun=self.under_srun,
            remote=self.remote,
            image=self.image,
            environment=tuple(self.environment),
            left=tuple(self.left_out()),
        )

    def given(self, command: ShellCommand) -> None:
        """`NAME=value` before a command."""
        for word in command.given:
            name, _, _ = word.text.partition("=")
            self.environment.append((name, word.cut(len(name) + 1)))

    def peel(self, words: tuple[Traced, ...]) -> tuple[Traced, ...]:
        """The words behind all launchers; the layers are kept."""
        while words:
            rest = self.one_layer(words)
            if rest == words:
                return words
            words = rest
        return words

    def one_layer(self, words: tuple[Traced, ...]) -> tuple[Traced, ...]:
        name = words[0].text.rpartition("/")[2]
        if _ASSIGNED.match(words[0].text) and not words[0].unknown_at(0):
            key, _, _ = words[0].text.partition("=")
            self.environment.append((key, words[0].cut(len(key) + 1)))
            return words[1:]
        if name in _PLAIN_PREFIXES:
            return self.plain(words, name)
        if name == "srun":
            return self.srun_layer(words)
        if name in _REMOTE:
            return self.remote_layer(words, name)
        if name in _MPI:
            options, rest = options_of(words[1:], _SWITCHES["mpi"])
            self.set_launcher("mpirun", words[:1], options)
            return rest
        if name in _IMAGES and len(words) > 1 and words[1].text in {"exec", "run", "start"}:
            return self.image_layer(words, name)
        if name in _RUNNERS and len(words) > 2 and words[1].text == "run":
            options, rest = options_of(words[2:], frozenset({"no_capture_output", "live_stream"}))
            self.prefix += words[: len(words) - len(rest)]
            return rest
        if name in _KEPT_PREFIXES:
            _, rest = options_of(words[1:], frozenset())
            self.prefix += words[: len(words) - len(rest)]
            return rest
        return self.launcher_layer(words, name)

    def plain(self, words: tuple[Traced, ...], name: str) -> tuple[Traced, ...]:
        valued = _PLAIN_PREFIXES.get(name, _ENROOTS)
        rest = words[1:]
        while rest and rest[0].text.startswith("-"):
            key = rest[0].option_key
            takes_value = key in valued and "=" not in rest[0].text
            rest = rest[1 + takes_value :]
        if name == "timeout":
            rest = rest[1:]
        return rest

    def srun_layer(self, words: tuple[Traced, ...]) -> tuple[Traced, ...]:
        options, rest = options_of(words[1:], _SWITCHES["srun"], SHORT_OPTIONS)
        self.under_srun = True
        for one in options:
            self.srun[one.name] = one.value or Traced.of("", one.line)
        if "container_image" in self.srun:
            mounts = self.srun.get("container_mounts", Traced())
            cut = cut_at_commas(mounts)
            self.image = ContainerUse("pyxis", self.srun["container_image"], cut, tuple(options))
        return rest

    def remote_layer(self, words: tuple[Traced, ...], name: str) -> tuple[Traced, ...]:
        self.remote = name
        options, rest = options_of(words[1:], frozenset(["t", "q", "T", "A", "n", "f", "x", "X"]))
        if name == "ssh" or not any(one.name in {"w", "x", "hostfile"} for one in options):
            rest = rest[1:]
        if len(rest) == 1:
            text = rest[0].text
            last = max(text.rfind("&&") + 2, text.rfind(";") + 1)
            start = last if last > 1 else 0
            rest = tuple(words_of(rest[0].cut(start)))
        return rest

    def image_layer(self, words: tuple[Traced, ...], name: str) -> tuple[Traced, ...]:
        kind = "docker" if name in _DAEMONS else name
        if kind == "enroot":
            # what it starts is its child: its words are kept, with the container's name
            rest = self.plain(words[1:], name)
            self.prefix += words[: len(words) - len(rest) + 1]
            return rest[1:]
        options, rest = options_of(words[2:], _SWITCHES.get(kind, _SWITCHES["apptainer"]))
        mounts = [
            piece
            for one in options
            if one.name in _BINDS and one.value is not None
            for piece in cut_at_commas(one.value)
        ]
        if rest:
            runtime = kind.replace("singularity", "apptainer")
            self.image = ContainerUse(runtime, rest[0], tuple(mounts), tuple(options))
        return rest[1:]

    def launcher_layer(self, words: tuple[Traced, ...], name: str) -> tuple[Traced, ...]:
        if name == OWN_TORCHRUN and len(words) > 1 and words[1].text == "train":
            self.set_launcher(OWN_TORCHRUN, (), list(self.told_by_variables()))
            return words
        kind = _TORCHRUN.get(name, "")
        behind = 1
        if name in {"accelerate", "deepspeed"}:
            kind = name
        if PYTHON.fullmatch(name):
            place = next((i for i, word in enumerate(words) if word.text == "-m"), len(words))
            are_flags = all(word.text.startswith("-") for word in words[1:place])
            if place + 1 < len(words) and are_flags:
                kind = _MODULES.get(words[place + 1].text, "")
                behind = place + 2
        if (
            kind in {"accelerate", "accelerate_cli"} and name == "accelerate"
        ) or kind == "accelerate_cli":
            if behind >= len(words) or words[behind].text != "launch":
                return words
            kind = "accelerate"
            behind = behind + 1
        if not kind:
            return words
        switches = _SWITCHES.get(kind, _SWITCHES["torchrun"])
        options, rest = options_of(words[behind:], switches)
        self.set_launcher(kind, words[:behind], options)
        return rest

    def told_by_variables(self) -> Iterator[LauncherOption]:
        exported = [
            (item.name, item.value, item.line)
            for item in self.script.assignments
            if item.exported and item.applied
        ]
        given = [(name, value, value.line) for name, value in self.environment]
        for name, value, line in {one[0]: one for one in (*exported, *given)}.values():
            if VARIABLES.get(name):
                word = Traced.join([Traced.of(f"{name}=", line), value])
                yield LauncherOption(VARIABLES[name], (word,), value)

    def set_launcher(
        self, kind: str, spelled: tuple[Traced, ...], options: Sequence[LauncherOption]
    ) -> None:
        self.launcher, self.spelled, self.options = kind, spelled, list(options)

    def left_out(self) -> Iterator[LeftOut]:
        """Second supervisors, and what each launch gets from tr11."""
        given = [one for one in self.options if one.name in _RENDEZVOUS]
        counts = {
            "nnodes",
            "nproc_per_node",
            "num_processes",
            "num_machines",
            "num_nodes",
            "num_gpus",
        }
        told = [one for one in given if one.name not in counts | _OWN_OUTPUT]
        if told and self.launcher != "mpirun":
            why = "each launch gets a rendezvous of its own from tr11"
            shown = " ".join(one.spelled for one in told)
            yield LeftOut(shown, "", told[0].line, why=why)
        for one in given:
            if one.name in _OWN_OUTPUT:
                why = "tr11 keeps the lines of each worker itself"
                yield LeftOut(one.spelled, _value(one), one.line, why=why)
        for one in self.options:
            if one.name == _RESTARTS:
                why = "a second supervisor: it would start workers again by itself, and tr11 does that"
                yield LeftOut(one.spelled, _value(one), one.line, why=why)
            elif _is_of_ft(one):
                why = "of ft_launcher, a second supervisor"
                yield LeftOut(one.spelled, _value(one), one.line, why=why)
        if self.launcher == "ft_launcher":
            why = "a second supervisor: torchrun takes its place, and tr11 starts workers again"
            yield LeftOut("ft_launcher", "", self.spelled[0].line, why=why)


def options_of(
    words: Sequence[Traced], switches: frozenset[str], short: Mapping[str, str] | None = None
) -> tuple[list[LauncherOption], tuple[Traced, ...]]:
    """The options at the beginning, and the words behind them. An option that is no switch takes the
    next word, unless that is an option or a script.
    """
    found: list[LauncherOption] = []
    place = 0
    while place < len(words):
        word = words[place]
        if word.text == "--":
            return found, tuple(words[place + 1 :])
        if word.option_key in {"m", "module"}:
            break
        if re.match(r"--?[A-Za-z]", word.text):
            option, used = _option_at(words, place, switches, short)
            found.append(option)
            place += used
        elif word.text.startswith("$") and any(map(_begins_program, words[place + 1 :])):
            found.append(LauncherOption(ONLY_IN_THE_JOB, (word,)))
            place += 1
        else:
            break
    return found, tuple(words[place:])


def _begins_program(word: Traced) -> bool:
    name = word.text.rpartition("/")[2]
    is_program = word.text.endswith(".py") or word.text == "-m" or PYTHON.fullmatch(name)
    return bool(is_program) or name in {*_TORCHRUN, "accelerate", "deepspeed"}


def _option_at(
    words: Sequence[Traced], place: int, switches: frozenset[str], short: Mapping[str, str] | None
) -> tuple[LauncherOption, int]:
    word = words[place]
    text = word.text
    name = word.option_key
    value = None
    if "=" in text:
        value = word.cut(text.index("=") + 1)
    elif short is not None and not text.startswith("--"):
        name = text[1]
        if len(text) > 2:
            value = word.cut(2)
    if short is not None:
        name = short.get(name, name).replace("-", "_")
    is_switch = name in switches or word.option_key in switches
    if name in _TWO_VALUES and value is None and place + 2 < len(words):
        return LauncherOption(name, tuple(words[place : place + 3])), 3
    if value is None and not is_switch and place + 1 < len(words):
        following = words[place + 1]
        if not following.text.startswith("-") and not _begins_program(following):
            return LauncherOption(name, (word, following), following), 2
    return LauncherOption(name, (word,), value), 1


def _value(option: LauncherOption) -> str:
    if option.value is None:
        return ""
    return option.value.for_shell()


def _is_of_ft(option: LauncherOption) -> bool:
    return option.name.startswith(("ft_", "fault_tol_cfg"))


def cut_at_commas(value: Traced) -> tuple[Traced, ...]:
    found = []
    start = 0
    for place in range(len(value) + 1):
        if place == len(value) or (value.text[place] == "," and not value.unknown_at(place)):
            if place > start:
                found.append(value.cut(start, place))
            start = place + 1
    return tuple(found)


def _holders(script: Script, command: ShellCommand) -> list[ShellCommand]:
    """The commands whose shell text this one stands in, the outermost first; `source` and `eval`
    start nothing.
    """
    found = []
    outer = command.outer
    while outer:
        holder = next((one for one in script.commands if one.words is outer), None)
        if holder is None:
            break
        if holder.name not in {"source", ".", "eval", "sbatch"}:
            found.append(holder)
        outer = holder.outer
    return found[::-1]


# modules that prepare and do not train
_NO_TRAINING = re.compile(
    r"(pip|venv|virtualenv|ensurepip|http\.server|json\.tool|compileall)(\.|$)"
)
_TRAINING_TOOLS = frozenset(
    {
        "litgpt",
        "llamafactory-cli",
        "axolotl",
        "trl",
        "nemo",
        "fabric",
        "lightning",
        "tune",
        "torchtune",
    }
)


def _may_train(program: tuple[Traced, ...], launcher: str) -> bool:
    """Whether these words may be a training: a script or a module of Python, or a known tool."""
    name = program[0].text.rpartition("/")[2]
    if launcher:
        return True
    if name in SHELLS:
        return False
    if PYTHON.fullmatch(name):
        rest = [word.text for word in program[1:]]
        while rest and re.fullmatch(r"-[uBOOsSEIbdqvi]+|-[XW]\S*", rest[0]):
            rest = rest[1:]
        if not rest or rest[0] in {"-c", "-", "-V", "--version", "-h"}:
            return False
        if rest[0] == "-m":
            return len(rest) > 1 and not _NO_TRAINING.match(rest[1])
        return True
    return name in _TRAINING_TOOLS or program[0].text.endswith(".py")
