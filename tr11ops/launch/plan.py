"""What a launch would do, decided before anything is done, with the batch script's text: `--dry-
run` prints it, and submitting carries it out.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from tr11ops.base.shipped import read_shipped, shipped_root
from tr11ops.base.units import counted
from tr11ops.cluster.arrays import NO_TASK
from tr11ops.cluster.base import BatchRequest
from tr11ops.cluster.sbatch_options import (
    EXPEDITE,
    code_root,
    options_of,
    script_engine,
    script_options,
    shown,
)
from tr11ops.launch.facts import LaunchRequest
from tr11ops.runcard.card import PathBase, RunCard, resolved
from tr11ops.runcard.exit_duration import ExitPlan, exit_plan, resolved_with_exit
from tr11ops.runcard.load import references
from tr11ops.runcard.sections import requested
from tr11ops.runcard.speed import RunHistory
from tr11ops.rundir.hold_store import unmarked
from tr11ops.rundir.paths import RunDirectory, nearest_folder
from trainer.contract.record import JsonObject, Record

# The batch script's text: `slurm/train.sbatch.j2` filled in, with every value quoted for the
# shell.

TEMPLATE = ("slurm", "train.sbatch.j2")
_CODES = {  # of `sbatch --output`, as the job's own environment says it
    "A": "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}",
    "a": f"${{SLURM_ARRAY_TASK_ID:-{NO_TASK}}}",
    "j": "$SLURM_JOB_ID",
    "J": "$SLURM_JOB_ID",
    "N": "${SLURMD_NODENAME:-$(hostname -s)}",
    "n": "0",
    "t": "0",
    "s": "batch",
    "u": "${SLURM_JOB_USER:-$(id -un)}",
    "x": "$SLURM_JOB_NAME",
    "%": "%",
}
_NUMBERS = frozenset("AajJnt")


def agent_command(module: Literal["batch", "early"], card: Path, tag: str) -> list[str]:
    """What the batch script runs, of the same installation that launched it: the agent, or, where
    that has not begun, what records the end of the attempt.
    """
    return [
        sys.executable,
        "-u",
        "-m",
        f"tr11ops.agent.{module}",
        "--card",
        str(card),
        "--submission",
        tag,
    ]


def render_script(
    request: BatchRequest,
    *,
    variant: str,
    tag: str,
    command: Sequence[str],
    setup: Sequence[str],
    setup_seconds: int = 600,
    early: Sequence[str] = (),
    environment: Mapping[str, str],
    silence: Path | None = None,
    attempts: Path | None = None,
    folder: Path | None = None,
    output: str = "",
) -> str:
    """The whole script. `setup` lines stand as they are (the node's shell expands them); all else
    is quoted.

    `silence` is a folder of the script's own, in which it counts the tasks whose agents left no
    verdict below `attempts`, or never began: the second one has queued jobs held. `early` is run
    where the agent has not begun. `folder` is the submission's own: where it is missing, so is the
    run directory, and queued jobs are held. With it the script opens `output`, a path with sbatch's
    codes, by itself.

    Raises ValueError when a value cannot stand in a script (a NUL, or a line end on an `#SBATCH`
    line).
    """
    options = script_options(request)
    for text in (*options, request.name, variant):
        if "\n" in text or "\r" in text:
            raise ValueError(
                f"{text!r} cannot stand on one line of a batch script; choose a path without line ends"
            )
    engine = script_engine()
    read = references(environment)
    root = code_root()
    script = str(
        engine.from_string(read_shipped(*TEMPLATE)).render(
            run=request.name,
            variant=variant,
            tag=tag,
            options=options,
            environment=sorted(
                (name, value) for name, value in environment.items() if name not in read
            ),
            references=sorted(read.items()),
            code_root=str(root) if root else "",
            setup=list(setup),
            setup_seconds=setup_seconds,
            setup_end=_end_of("\n".join(setup)),
            early=list(early),
            shipped=str(shipped_root()),
            command=list(command),
            silence=str(silence) if silence and attempts else "",
            attempts=str(attempts or ""),
            folder=str(folder or ""),
            root=str(request.working_directory),
            output=shell_output(output),
            comment=unmarked(request.comment),
            expedites=request.expedites,
        )
    )
    if "\0" in script:
        raise ValueError(
            "a value of the card holds a NUL character, which no script can; remove it"
        )
    return script


def shell_output(pattern: str) -> str:
    """A path with sbatch's codes as one word of the shell; codes that say nothing here stay as they
    are.

    As for sbatch, a backslash in it means that it has no codes.
    """
    if "\\" in pattern:
        return shlex.quote(pattern.replace("\\", ""))
    words = []
    for literal, width, code in re.findall(r"([^%]+)|%([0-9]*)(.?)", pattern):
        value = _CODES.get(code, "")
        if literal or not value:
            words.append(shlex.quote(literal or f"%{width}{code}"))
        elif width and code in _NUMBERS:
            words.append(f'"$(printf %0{min(int(width), 10)}d {value})"')
        else:
            words.append(f'"{value}"')
    return "".join(words)


def _end_of(text: str) -> str:
    """A word that is no line of the text, to end it with."""
    word = "TR11_SETUP_END"
    while word in text:
        word += "_"
    return word


NO_OUTPUT = "/dev/null"  # the script opens its own: Slurm ends a job whose output cannot be opened
DEFAULT_OUTPUT = "%x-%A_%a.out"
SINGLE_OUTPUT = "%x-%j.out"


class LaunchPlan(Record):
    """One submission, complete. `card` is the resolved card, as the trainer will read it.

    `output`: where the batch script writes, with sbatch's codes in it.
    """

    tag: str
    directory: RunDirectory
    request: BatchRequest
    tasks: int
    card: JsonObject
    variant: str
    output: Path

    @property
    def test_request(self) -> BatchRequest:
        """The request for a trial: the run directory may not exist yet, and a trial must not make
        it.
        """
        return replace(
            self.request, working_directory=nearest_folder(self.request.working_directory)
        )


def plan_launch(
    card: RunCard,
    directory: RunDirectory,
    request: LaunchRequest,
    excluded: Iterable[str],
    tag: str,
    history: RunHistory | None = None,
    expedites: bool = False,
) -> LaunchPlan:
    """The plan for a card; `history` are the run's own times, for what is derived from them.
    `expedites`: the site starts a job again at once that has lost a node.

    Raises ValueError when a path of the card cannot stand in a batch script.
    """
    slurm = card.slurm
    paths = directory.submission(tag)
    if request.array is None and slurm.output == DEFAULT_OUTPUT:
        output = SINGLE_OUTPUT
    else:
        output = slurm.output
    batch = BatchRequest(
        **requested(slurm),
        script="",
        name=card.run.name,
        nodes=slurm.allocated_nodes,
        least_nodes=slurm.least_nodes,
        time_limit_seconds=card.time_limit_seconds,
        output=NO_OUTPUT,
        working_directory=directory.root,
        array=request.array,
        dependency=":".join(("afterany", *request.awaited)) if request.awaited else None,
        exclude=tuple(excluded),
        comment=" ".join(filter(None, (directory.comment(tag), slurm.comment))),
        expedites=expedites,
        survives_nodes=slurm.spare_nodes > 0,
        options=options_of(slurm.options),
    )
    script = render_script(
        batch,
        variant=card.run.variant,
        tag=tag,
        command=agent_command("batch", paths.card, tag),
        setup=slurm.setup,
        setup_seconds=round(60 * slurm.setup_minutes),
        early=agent_command("early", paths.card, tag),
        environment=slurm.environment,
        silence=paths.folder / "agent-silent",
        attempts=directory.paths.attempts,
        folder=paths.folder,
        output=str(paths.folder / output),
    )
    return LaunchPlan(
        tag,
        directory,
        request=replace(batch, script=script),
        tasks=request.tasks,
        card=resolved_card(card, exit_plan(card, history)),
        variant=card.run.variant,
        output=paths.folder / output,
    )


def resolved_card(card: RunCard, leaves: ExitPlan | None = None) -> JsonObject:
    """The resolved card with what a card may leave out: the number of workers, and when the trainer
    leaves.
    """
    if leaves:
        value = resolved_with_exit(card, leaves)
    else:
        value = resolved(card)
    return {**value, "slurm": {**value["slurm"], "workers_per_node": card.slurm.workers}}


_BASES = {
    "card": "the card's folder",
    "shipped": "where you type: the card ships with tr11",
    "recorded": "where this run was launched",
}


def plan_lines(
    plan: LaunchPlan,
    card: RunCard,
    scheduler: str,
    base: PathBase,
    missing_parents: Sequence[Path] = (),
) -> list[tuple[str, str]]:
    """The plan for a person: (word, value) pairs. `missing_parents`: folders above the run
    directory that it makes.
    """
    request = plan.request
    count = counted(plan.tasks, "task", "tasks, one after another")
    if request.array:
        tasks = f"array {request.array}: {count}"
    else:
        tasks = "one job"
    nodes = counted(card.slurm.nodes, "node")
    spares = ""
    if card.slurm.spare_nodes:
        spares = f", {card.slurm.spares_asked} spare"
    workers = f"{nodes} x {counted(card.slurm.workers, 'worker')}"
    gpus = ""
    if request.gpus_per_node:
        gpus = f", {counted(request.gpus_per_node, 'GPU')} each"
    minutes = plan.card["run"]["exit_duration_minutes"]
    derived = "" if card.run.exit_duration_minutes else " (derived)"
    leaves = ""
    if minutes:
        leaves = f", the trainer leaves after {minutes:g} min{derived}"
    rows = [
        ("run", f"{request.name}/{plan.variant}"),
        ("directory", str(plan.directory.root)),
        ("paths from", f"{base.folder} ({_BASES[base.reason]})"),
        (
            "scheduler",
            scheduler + (f", partition {request.partition}" if request.partition else ""),
        ),
        ("job", tasks),
        ("workers", workers + gpus + spares),
        ("time limit", card.slurm.time_limit + leaves),
    ]
    if missing_parents:
        count = counted(len(missing_parents), "missing folder")
        rows.insert(2, ("makes", f"{count} above it, from {missing_parents[0]} on"))
    if request.dependency:
        rows.append(("starts after", request.dependency.partition(":")[2].replace(":", ", ")))
    if request.expedites:
        what = "Slurm starts the job again at once on other nodes"
        rows.append(("node lost", f"{what} ({EXPEDITE})"))
    if request.exclude:
        rows.append(("exclude", ",".join(request.exclude)))
    if request.options:
        rows.append(("options", shown(request.options)))
    rows += [("kill switch", str(plan.directory.kill_switch)), ("output", str(plan.output))]
    return rows


def plan_value(plan: LaunchPlan) -> JsonObject:
    """The plan for a machine."""
    request = plan.request
    return {
        "tag": plan.tag,
        "run": request.name,
        "variant": plan.variant,
        "directory": str(plan.directory.root),
        "array": request.array,
        "tasks": plan.tasks,
        "nodes": request.nodes,
        "gpus_per_node": request.gpus_per_node,
        "time_limit_seconds": request.time_limit_seconds,
        "exit_duration_minutes": plan.card["run"]["exit_duration_minutes"],
        "partition": request.partition,
        "dependency": request.dependency,
        "exclude": list(request.exclude),
        "expedites": request.expedites,
        "options": dict(request.options),
        "comment": request.comment,
        "output": str(plan.output),
        "kill_switch": str(plan.directory.kill_switch),
        "script": request.script,
    }
