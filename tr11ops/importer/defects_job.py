"""Defects of the job around the training: time limits, exits, pipes, nodes, kill switch, lost text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tr11ops.importer.case import Case
from tr11ops.importer.complete import time_limit
from tr11ops.importer.defects_table import defect
from tr11ops.importer.results import Defect
from tr11ops.runcard.rules import (
    LONG_ATTEMPT_SECONDS,
    MARGIN_WITH_EVALUATION_SECONDS,
    advised_exit_minutes,
)

_FEWEST_NODES_FOR_BLOCKING = 40


def exit_minute(case: Case) -> Iterator[Defect]:
    """`--exit-duration-in-mins` beyond the time limit, too close to it, or missing."""
    limit, minutes = time_limit(case.card), case.card.number("run.exit_duration_minutes")
    if not limit:
        return
    line, advised = case.line("--exit-duration-in-mins"), f"{advised_exit_minutes(limit):g}"
    if minutes is None:
        if not case.has("--exit-interval"):
            yield defect("exit-minute-missing", line, advised=advised)
        return
    if minutes * 60 >= limit:
        yield defect(
            "exit-minute-beyond-limit", line, minutes=minutes, limit=limit / 60, advised=advised
        )
        return
    margin = limit - minutes * 60
    evaluates = (case.card.number("evaluation.iterations") or 0) > 0
    if evaluates and limit >= LONG_ATTEMPT_SECONDS and margin < MARGIN_WITH_EVALUATION_SECONDS:
        yield defect("exit-margin-short", line, margin=margin / 60, advised=advised)


def evaluation_before_save(case: Case) -> Iterator[Defect]:
    """Evaluation and save at the same iteration: the original evaluates first."""
    save, evaluate = (
        case.card.integer("checkpoint.interval"),
        case.card.integer("evaluation.interval"),
    )
    if save and evaluate and evaluate % save == 0 and case.card.integer("evaluation.iterations"):
        yield defect(
            "evaluation-before-save", case.line("--eval-interval"), evaluate=evaluate, save=save
        )


def pipe_hides_the_end(case: Case) -> Iterator[Defect]:
    """`... | tee` without pipefail."""
    holders = [
        case.launch.command,
        *(c for c in case.script.commands if c.words is case.launch.command.outer),
    ]
    piped = next((command for command in holders if command.piped_into), None)
    if piped is not None and "pipefail" not in case.script.shell_options:
        yield defect("no-pipefail", piped.line, command=piped.piped_into[-1] or "a command")


def bad_exit(case: Case) -> Iterator[Defect]:
    """`srun` that lets a step live after a worker died."""
    words = [word.text for word in (*case.launch.command.outer, *case.launch.command.words)]
    if "srun" in words and not any(word.startswith(("--kill-on-bad-exit", "-K")) for word in words):
        yield defect("no-kill-on-bad-exit", case.launch.line)


def node_counts(case: Case) -> Iterator[Defect]:
    """The launcher's numbers against Slurm's."""
    nodes = case.directive("nodes")
    value = case.launch.launcher.get("nnodes")
    if nodes is not None and value is not None and value.is_known and value.line != nodes.line:
        asked, told = nodes.value.partition("-")[0], value.text.partition(":")[0]
        if asked != told:
            yield defect("nodes-differ", value.line, told=told, asked=asked, other=nodes.line)
        else:
            yield defect("nodes-written-twice", value.line)
    workers, gpus = (
        case.card.integer("slurm.workers_per_node"),
        case.card.integer("slurm.gpus_per_node"),
    )
    if workers and gpus and workers != gpus:
        code = "gpus-differ/shared" if workers > gpus else "gpus-differ"
        said = case.card.placed["slurm.workers_per_node"]
        line, other = said.value_line or said.line, case.card.line("slurm.gpus_per_node")
        yield defect(code, line, workers=workers, gpus=gpus, other=other)
    tasks = case.directive("ntasks-per-node")
    if tasks is not None and tasks.value != "1" and case.launch.starts_workers:
        yield defect("tasks-per-node", tasks.line, tasks=tasks.value)


def directives_unread(case: Case) -> Iterator[Defect]:
    """`#SBATCH` lines that Slurm passes by, or that hold a variable."""
    for item in case.directives:
        if not item.read:
            yield defect("directive-too-late", item.line, option=item.spelled, value=item.value)
        elif "$" in item.value:
            yield defect(
                "directive-with-variable", item.line, option=item.spelled, value=item.value
            )


def kill_switch(case: Case) -> Iterator[Defect]:
    """No kill switch, or one that looks like another run's."""
    path = case.card.value("run.kill_switch")
    line = case.line("--kill-switch-path")
    if path is None:
        if not case.has("--kill-switch-path"):
            yield defect("kill-switch-missing", line)
        return
    name = str(path).rpartition("/")[2].lower()
    run = str(case.card.value("run.name", "")).lower()
    sizes, own = (
        set(re.findall(r"\d+(?:\.\d+)?[bm]\b", name)),
        set(re.findall(r"\d+(?:\.\d+)?[bm]\b", run)),
    )
    plain = name.replace("_", "-").strip("-") in {"kill-switch", "killswitch", "kill"}
    if plain and run not in str(path).lower():
        yield defect("kill-switch-shared", line, path=path, says="names no run")
    elif sizes and own and not sizes & own:
        yield defect(
            "kill-switch-shared", line, path=path, says=f"bears another run's name than {run}"
        )


def launch_blocking(case: Case) -> Iterator[Defect]:
    """`CUDA_LAUNCH_BLOCKING`, which an import leaves out, and all pay for."""
    key = "slurm.environment.CUDA_LAUNCH_BLOCKING"
    if case.card.value(key) not in {None, "0", ""}:
        needed = case.card.integer("slurm.nodes") >= _FEWEST_NODES_FOR_BLOCKING
        if needed:
            fix = "measure without it first"
        else:
            fix = f"--set {key}=0 below {_FEWEST_NODES_FOR_BLOCKING} nodes"
        yield defect("launch-blocking", case.card.line(key), fix=fix)


def lost_text(case: Case) -> Iterator[Defect]:
    """Text that no shell sees as it was meant: broken continuations, comments in arguments,
    unexported variables.
    """
    for number, written in enumerate(case.text.split("\n"), start=1):
        if re.search(r"(?<!\\)\\[ \t]+\r?$", written) and not written.lstrip().startswith("#"):
            yield defect("continuation-broken", number)
    for comment in case.script.lost_comments:
        yield defect("options-commented-out", comment.line, text=comment.text[:40].strip())
    for name, line in sorted(case.script.not_exported.items()):
        yield defect("not-exported", line, name=name)
    if "\r" in case.text:
        yield defect("windows-line-ends", case.text[: case.text.index("\r")].count("\n") + 1)


def environment_needed(case: Case) -> Iterator[Defect]:
    """Variables that must be exported where `tr11` is typed; a misspelt name shows up here."""
    names: dict[str, int] = {}
    for key, item in case.card.placed.items():
        if not key.startswith("slurm.setup"):
            for name in re.findall(r"(?<!\$)\$\{?([A-Za-z_]\w*)", str(item.value), re.ASCII):
                names.setdefault(name, item.value_line or item.line)
    for name, line in names.items():
        yield defect("from-environment", line, name=name)


JOB_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    exit_minute,
    evaluation_before_save,
    pipe_hides_the_end,
    bad_exit,
    node_counts,
    directives_unread,
    kill_switch,
    launch_blocking,
    lost_text,
    environment_needed,
)
