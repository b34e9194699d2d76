"""The `[trainer]` section of a script's training: how it is started, what its words say of folder,
steps, saves and resuming, and its container.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from posixpath import join, normpath

from tr11ops.base.errors import ConversionProblem
from tr11ops.dialects.dialect import Dialect, dialect_named
from tr11ops.importer.expansion import Script
from tr11ops.importer.family import (
    Recognised,
    SeenLog,
    WordUse,
    family_of,
    steps_between_saves,
)
from tr11ops.importer.options import IN_THE_JOB, Builder, LeftReason, card_text
from tr11ops.importer.place_cluster import NODES, WORKERS, ClusterPlacement, number_of
from tr11ops.importer.place_container import container_of, on_the_node, place_container
from tr11ops.importer.place_resume import place_resume
from tr11ops.importer.place_settings import CommandSettings, card_word
from tr11ops.importer.sbatch import Directive
from tr11ops.importer.supervisors import tell_supervisors
from tr11ops.importer.traced import Traced
from tr11ops.importer.training_command import (
    OWN_TORCHRUN,
    PYTHON,
    VARIABLES,
    TrainingCommand,
)
from tr11ops.trainers.levels import BELIEF
from trainer.contract.secret_shapes import is_secret

NO_DIALECT = "none"
_NO_DIALECT = Dialect(NO_DIALECT, "a trainer of which nothing is known")
_SUBMIT_FOLDER = re.compile(r"\$\{SLURM_SUBMIT_DIR\}|\$\{PWD\}|\$\(pwd\)")
_FILLED_IN = re.compile(
    r"\{(?:root|folder|name|variant|attempt|launch|nodes|node_rank|workers_per_node|world_size"
    r"|master_address|master_port|step|path|exit_minutes)\}"
)
# options of containers
_WHERE_IT_BEGINS = ("container_workdir", "pwd", "cwd", "w", "workdir")
_REACH = "deepspeed_multinode_launcher"
# of torch.distributed.launch and deepspeed: the place on the node as an option of the program
_LOCAL_RANK = frozenset({"torch.distributed.launch", "deepspeed"})


class TrainerPlacer:
    """Places `[trainer]`, the container and the size of the world of one script."""

    def __init__(
        self,
        builder: Builder,
        script: Script,
        training: TrainingCommand,
        folder: Path,
        directives: Sequence[Directive],
        log: SeenLog | None,
    ) -> None:
        self.builder = builder
        self.script = script
        self.training = training
        self.folder = folder
        self.directives = directives
        self.log = log
        self.directory = folder
        self.container = container_of(builder, training, directives)

    def kept_names(self) -> set[str]:
        """Variables that the card's own command still names."""
        text = " ".join(word.text for word in self.files.words)
        return set(re.findall(r"\$\{(\w+)\}", text))

    def told_names(self) -> set[str]:
        """Variables that tell the launcher what each launch tells it otherwise."""
        if self.training.launcher == OWN_TORCHRUN:
            return set(VARIABLES)
        return set()

    def place(self) -> None:
        dialect = self.place_dialect()
        self.place_directory()
        self.files = CommandSettings(
            self.builder, self.training, (self.directory, self.folder), dialect
        )
        self.tell_own_braces()
        devices = self.files.said(dialect.command.devices)
        world = ClusterPlacement(
            self.builder,
            self.directives,
            self.training,
            settings=self.files.launchers,
            text_at=self.files.text_at,
        )
        world.place(devices.option if devices is not None else None)
        self.files.compare()
        start = self.start_of(dialect)
        self.builder.put(
            "trainer.start", start, self.training.launcher or "the command", self.training.line
        )
        self.place_folder(dialect)
        self.place_counts(dialect)
        place_resume(self.files)
        self.tell_stop(dialect)
        self.tell_belief(dialect)
        self.place_command(start)
        self.place_environment()
        self.place_unset()
        place_container(self.builder, self.container)
        for item in self.training.left:
            self.builder.leave(
                item.option,
                item.value,
                line=item.line,
                reason=item.reason,
                why=item.why,
                key=item.key,
            )
        tell_supervisors(self.builder, self.script, self.training, dialect)

    # ------------------------------------------------------------------ the family
    def place_dialect(self) -> Dialect:
        said = family_of(self.training.text)
        logged = Recognised() if self.log is None else self.log.family
        both = [name for name in said.names if name in logged.names]
        line = self.training.line
        if said.only and logged.only and not both:
            assert self.log is not None
            why = (
                f"the command is of {said.only}, the lines of {self.log.path} are of {logged.only}"
            )
            self.builder.ask("trainer", "", line=line, why=why, key="trainer.dialect")
        name = said.only or (both[0] if len(both) == 1 else "")
        source = "the words of the command"
        if not name and logged.only and not said.names:
            assert self.log is not None
            name = logged.only
            source = f"the lines of {self.log.path}"
        if not name:
            if said.names:
                names = f"the command may be of {' or '.join(said.names)}"
            else:
                names = "no family is recognised"
            why = f"{names}, so that its steps and its end are not read, and an end with status 0 holds what is queued"
            way = "give --set trainer.dialect=NAME (tr11 trainer list), or --log FILE"
            self.builder.ask("trainer", "", line=line, why=f"{why}: {way}", key="trainer.dialect")
            return _NO_DIALECT
        self.builder.put("trainer.dialect", name, source, line)
        return dialect_named(name)

    # ------------------------------------------------------------------ where it runs
    def place_directory(self) -> None:
        """Of `--chdir` and `cd`, one after another."""
        current = Traced()
        line = 0
        for item in self.directives:
            if item.name == "chdir" and item.read:
                current = Traced.of(item.value, item.line)
                line = item.line
        for command in self.script.commands:
            if command is self.training.command:
                break
            is_plain = command.name in {"cd", "pushd"} and len(command.words) > 1
            if is_plain and not command.looped and not command.piped_into:
                target = command.words[-1]
                is_whole = target.text.startswith(("/", "~", "$"))
                if is_whole or not current:
                    current = target
                else:
                    current = Traced.join([current, target], "/")
                line = command.line
        if self.container:
            asked = self.container.option(*_WHERE_IT_BEGINS)
        else:
            asked = None
        if asked and not any(
            command.outer and command.name == "cd" for command in self.script.commands
        ):
            current = asked
            line = asked.line
        text = _SUBMIT_FOLDER.sub(".", current.text)
        if text != current.text:
            current = Traced.of(text, line)
        try:
            found = card_text(current) if current else "."
        except ConversionProblem as problem:
            self.builder.ask(
                "cd", current.for_shell(), line=line, why=str(problem), key="trainer.directory"
            )
            return
        found = on_the_node(self.container, normpath(found))
        if not current and self.container is not None and self.container.runtime == "pyxis":
            self.ask_for_directory()
            return
        if current:
            note = ""
        else:
            note = "no cd: where the card lies is where sbatch was typed"
        self.builder.put("trainer.directory", found, "cd" if current else "", line, note=note)
        if not found.startswith(("~", "$")):
            self.directory = self.folder / found

    def ask_for_directory(self) -> None:
        """Under Pyxis a command begins where the image says."""
        if any(
            word.text.endswith(".py") and word.text[0] not in "/$" for word in self.training.program
        ):
            why = "where it begins in the image is the image's own matter: give the folder"
            self.builder.ask("cd", "", line=self.training.line, why=why, key="trainer.directory")

    # ------------------------------------------------------------------ how it is started
    def start_of(self, dialect: Dialect) -> str:
        launcher = self.training.launcher
        nodes = self.builder.integer(NODES)
        line = self.training.line
        if self.training.prefix and launcher in {"torchrun", "accelerate", "deepspeed"}:
            return "node"
        if launcher in {"accelerate", OWN_TORCHRUN} or (launcher == "deepspeed" and nodes == 1):
            return "node"
        if launcher in _LOCAL_RANK:
            why = f"{launcher} gives the program --local_rank, torchrun sets LOCAL_RANK alone: does it look there?"
            if launcher == "deepspeed" or self.training.option("use_env") is None:
                why = f"{why} If so: give --set trainer.start=torchrun"
                self.builder.ask(launcher, "", line=line, why=why, key="trainer.start")
            return "torchrun"
        if launcher in {"torchrun", "ft_launcher"}:
            return "torchrun"
        if not self.training.under_srun and not launcher:
            return "node"
        workers = self.builder.integer(WORKERS)
        tasks = self.builder.placed.get(WORKERS)
        if dialect.command.starts and tasks is not None and workers >= 1:
            why = "under srun it takes itself for Slurm's own, and may requeue the job: torchrun starts it"
            self.builder.leave("srun", "", line=line, reason=LeftReason.DROPPED, why=why)
            return "torchrun"
        if self.container is not None and self.container.runtime == "pyxis":
            why = "each worker would unpack the image: torchrun starts them in one"
            self.builder.leave("srun", "", line=line, reason=LeftReason.DROPPED, why=why)
            return "torchrun"
        return "srun"

    def place_command(self, start: str) -> None:
        words = self.started_words(start)
        shown = Traced.join(words, " ")
        converted: list[str] = []
        for word in words:
            try:
                converted.append(card_word(word))
            except ConversionProblem as problem:
                why = f"{problem}: write it into trainer.command"
                self.builder.ask(
                    "command", word.for_shell(), line=word.line, why=why, key="trainer.command"
                )
                converted.append(word.for_card())
        self.builder.put(
            "trainer.command",
            converted,
            "the training",
            line=self.training.line,
            value_line=shown.last_line,
        )

    def tell_own_braces(self) -> None:
        for word in self.files.words:
            if word.is_known and _FILLED_IN.search(word.text):
                why = "holds a name in braces that tr11 fills in: write it otherwise"
                self.builder.ask("command", word.text, word.line, why=why, key="trainer.command")

    def started_words(self, start: str) -> list[Traced]:
        """The words of `trainer.command`, for the way in which it is started."""
        training = self.training
        line = self.training.line
        kept = list(training.kept_options())
        program = list(self.files.words)
        if start == "torchrun":
            if training.launcher not in {"torchrun", "ft_launcher", "torch.distributed.launch"}:
                kept = []
            self.place_python()
            return [*kept, *_for_torchrun(program, has_launcher=bool(training.launcher))]
        before = [*training.prefix]
        if training.launcher == "accelerate":
            given = [Traced.of(word, line) for word in (*_ACCELERATE, *self.reach_of_deepspeed())]
            return [*before, *training.spelled, *kept, *given, *program]
        if training.launcher == "torchrun":
            given = [Traced.of(word, line) for word in _TORCHRUN]
            return [*before, *training.spelled, *given, *kept, *program]
        if training.launcher == "deepspeed":
            own = [word for one in training.options if one.name != "hostfile" for word in one.words]
            return [*before, *training.spelled, *own, *program]
        return [*before, *program]

    def reach_of_deepspeed(self) -> tuple[str, ...]:
        """On several nodes accelerate lets DeepSpeed start the others by pdsh, unless it is told not to."""
        names = ("config_file", "use_deepspeed", "deepspeed_config_file", _REACH)
        if self.builder.integer(NODES) == 1 or self.training.option(*names) is None:
            return ()
        return (f"--{_REACH}", "standard")

    def place_python(self) -> None:
        """The interpreter of torchrun: its own, or the one beside it."""
        training = self.training
        first = (training.spelled or training.program)[0]
        name = first.text.rpartition("/")[2]
        place = len(first) - len(name)
        if PYTHON.fullmatch(name):
            found = first
        elif place:
            found = Traced.join([first.cut(0, place), Traced.of("python", first.line)])
        else:
            return
        if found.text == "python":
            return
        try:
            self.builder.put("trainer.python", card_text(found), "the launcher", first.line)
        except ConversionProblem as problem:
            self.builder.ask(
                "python", found.for_shell(), line=first.line, why=str(problem), key="trainer.python"
            )

    # ------------------------------------------------------------------ what its words say
    def place_folder(self, dialect: Dialect) -> None:
        use = self.files.said(dialect.command.folder)
        key = "trainer.folder"
        line = self.training.line
        if use is None or not use.value:
            words = ", ".join(dialect.command.folder)
            if words:
                why = f"no {words} says it"
            else:
                why = "the dialect knows no option of it"
            why += ": its checkpoints are not seen; give --set trainer.folder=..."
            self.builder.leave(
                "output folder", "", line=line, reason=LeftReason.UNKNOWN, why=why, key=key
            )
            return
        directory = self.builder.value("trainer.directory", ".")
        value = use.value
        from_here = _SUBMIT_FOLDER.sub(".", value.text)
        if directory == "." and from_here != value.text:
            # no cd: it is where the card lies, wherever tr11 is typed
            value = Traced.of(from_here, use.option.line)
        if any(name in piece for piece in value.unknowns for name in IN_THE_JOB):
            why = "is another folder for each job, in which the next one finds no checkpoint"
            self.builder.ask(
                use.option.spelled, use.value.for_shell(), line=use.option.line, why=why, key=key
            )
            return
        try:
            found = card_text(value)
        except ConversionProblem as problem:
            self.builder.ask(
                use.option.spelled,
                value.for_shell(),
                line=use.option.line,
                why=str(problem),
                key=key,
            )
            return
        if not found.startswith(("/", "~", "$")):
            found = normpath(join(directory, found))
        found = on_the_node(self.container, found)
        self.builder.put(key, found, use.option.spelled, use.option.line)
        self.fill_in(use)
        inner = self.files.said(dialect.command.checkpoints)
        rules = dialect.checkpoints
        if (
            inner is not None
            and rules is not None
            and inner.value.is_known
            and inner.value.text != rules.folder
        ):
            self.builder.put(
                "trainer.checkpoints",
                {"folder": inner.value.text},
                inner.option.spelled,
                inner.option.line,
            )

    def fill_in(self, use: WordUse) -> None:
        """The command names the folder by `{folder}`, so that the two cannot differ."""
        word = use.option.words[0]
        if all(one is not word for one in self.files.words):
            return  # of a file of settings
        if use.count == 2:
            self.files.words[use.place + 1] = Traced.of("{folder}", word.line)
        else:
            self.files.words[use.place] = Traced.of(f"{use.option.spelled}={{folder}}", word.line)

    def place_counts(self, dialect: Dialect) -> None:
        line = self.training.line
        steps = self.files.said(dialect.command.steps)
        count = None if steps is None else number_of(steps.value)
        if steps is not None and count is not None:
            self.builder.put("trainer.steps", count, steps.option.spelled, steps.option.line)
        elif self.log is not None and self.log.total is not None:
            self.builder.put("trainer.steps", self.log.total, f"the lines of {self.log.path}", 0)
        else:
            why = "no option says it: by its log, where that tells it"
            self.builder.leave(
                "last step", "", line=line, reason=LeftReason.UNKNOWN, why=why, key="trainer.steps"
            )
        saves = steps_between_saves(
            dialect, self.files.said(dialect.command.interval), self.files.text
        )
        if saves is not None:
            value = number_of(saves.value)
            self.builder.put(
                "trainer.checkpoint_interval", value, saves.option.spelled, saves.option.line
            )
        else:
            why = "how often it saves is not said: no alert comes of an overdue checkpoint"
            self.builder.leave(
                "saves",
                "",
                line=line,
                reason=LeftReason.UNKNOWN,
                why=why,
                key="trainer.checkpoint_interval",
            )

    def tell_stop(self, dialect: Dialect) -> None:
        """Whether it can be asked to save before it stops, where a word of the command decides that."""
        stop = dialect.stop
        if stop is None or not stop.needs or stop.needs in self.training.text:
            return
        why = f"it saves on request only with {stop.needs} in its command; as it is, it ends after its next checkpoint"
        line = self.training.line
        self.builder.leave(
            "stop", "", line, reason=LeftReason.UNKNOWN, why=why, key="trainer.command"
        )

    def tell_belief(self, dialect: Dialect) -> None:
        """What a kill in a save comes to, where no one has said which checkpoint the trainer takes."""
        rules = dialect.checkpoints
        if rules is not None and not rules.lacks_belief:
            return
        key = "trainer.checkpoints.believes"
        unknown = LeftReason.UNKNOWN
        self.builder.leave("resume", "", self.training.line, reason=unknown, why=BELIEF, key=key)

    # ------------------------------------------------------------------ what stands around it
    def place_environment(self) -> None:
        given = list(self.training.environment)
        export = self.training.srun.get("export")
        if export is not None:
            for piece in export.text.split(","):
                said, equals, text = piece.partition("=")
                if equals:
                    given.append((said, Traced.of(text, export.line)))
        if self.training.launcher == OWN_TORCHRUN:
            given = [(name, value) for name, value in given if name not in VARIABLES]
            line = self.training.line
            for name, text in _FOR_OWN_TORCHRUN.items():
                self.builder.put(f"trainer.environment.{name}", text, "its own torchrun", line)
        for name, value in given:
            key = f"trainer.environment.{name}"
            if is_secret(name, value.text):
                why = "looks like a secret, and cards are copied: source a file in slurm.setup"
                self.builder.ask(name, "(not shown)", line=value.line, why=why, key="slurm.setup")
                continue
            try:
                self.builder.put(
                    key, card_word(value), f"{name}=", value.line or self.training.line
                )
            except ConversionProblem as problem:
                self.builder.ask(
                    name, value.for_shell(), line=value.line, why=str(problem), key=key
                )

    def place_unset(self) -> None:
        """`unset NAME` before the training: what it shall not see."""
        names: list[str] = []
        line = 0
        for command in self.script.commands:
            if command is self.training.command:
                break
            if command.name == "unset" and not command.conditional:
                names += [word.text for word in command.words[1:] if word.text.isidentifier()]
                line = line or command.line
        if names:
            self.builder.put("trainer.unset", list(dict.fromkeys(names)), "unset", line)


_ACCELERATE = (
    "--num_processes",
    "{world_size}",
    "--num_machines",
    "{nodes}",
    "--machine_rank",
    "{node_rank}",
    "--main_process_ip",
    "{master_address}",
    "--main_process_port",
    "{master_port}",
)
# what llamafactory-cli gives to the torchrun that it starts
_FOR_OWN_TORCHRUN = {
    "FORCE_TORCHRUN": "1",
    "NNODES": "{nodes}",
    "NODE_RANK": "{node_rank}",
    "NPROC_PER_NODE": "{workers_per_node}",
    "MASTER_ADDR": "{master_address}",
    "MASTER_PORT": "{master_port}",
}
_TORCHRUN = (
    "--nnodes={nodes}",
    "--node-rank={node_rank}",
    "--nproc-per-node={workers_per_node}",
    "--master-addr={master_address}",
    "--master-port={master_port}",
)


def _for_torchrun(program: Sequence[Traced], has_launcher: bool) -> list[Traced]:
    """Without the interpreter, which torchrun brings; a program of another kind needs none."""
    if not has_launcher and PYTHON.fullmatch(program[0].text.rpartition("/")[2]):
        rest = list(program[1:])
        while rest and re.fullmatch(r"-[uBOOsSEIbdqvi]+", rest[0].text):
            del rest[0]
        return rest
    is_own = program[0].text.endswith(".py") or program[0].text.startswith("-")
    if has_launcher or is_own:
        return list(program)
    return [Traced.of("--no-python", program[0].line), *program]
