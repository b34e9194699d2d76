"""Defects of the job around the training: time limits, exits, pipes, nodes, kill switch, lost text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tr11ops.importer.case import Case
from tr11ops.importer.complete import time_limit
from tr11ops.importer.results import Defect, Severity
from tr11ops.runcard_checks import LONG_ATTEMPT_SECONDS, MARGIN_WITH_EVALUATION_SECONDS, advised_exit_minutes

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_FEWEST_NODES_FOR_BLOCKING = 40


def exit_minute(case: Case) -> Iterator[Defect]:
    """`--exit-duration-in-mins` beyond the time limit, too close to it, or missing."""
    limit, minutes = time_limit(case.card), case.card.number("run.exit_duration_minutes")
    if not limit:
        return
    line, key = case.line("--exit-duration-in-mins"), "run.exit_duration_minutes"
    advised = f"{advised_exit_minutes(limit):g}"
    if minutes is None:
        if not case.has("--exit-interval"):
            cost = "Slurm ends every attempt without a last checkpoint: up to one save interval is lost each time"
            yield Defect(
                "exit-minute-missing",
                _WARNING,
                line,
                "the training never leaves by itself",
                cost,
                f"--set {key}={advised}",
                key,
            )
        return
    if minutes * 60 >= limit:
        what = f"--exit-duration-in-mins {minutes:g} is not below the time limit of {limit / 60:g} minutes"
        cost = "Slurm kills every attempt first: no last checkpoint, up to one save interval lost each time"
        yield Defect(
            "exit-minute-beyond-limit",
            _ERROR,
            line,
            what,
            cost,
            f"the card has {advised}; confirm with --set {key}={advised}",
            key,
        )
        return
    margin = limit - minutes * 60
    evaluates = (case.card.number("evaluation.iterations") or 0) > 0
    if evaluates and limit >= LONG_ATTEMPT_SECONDS and margin < MARGIN_WITH_EVALUATION_SECONDS:
        what = (
            f"{margin / 60:g} minutes are left between the exit and the time limit, less than one evaluation may take"
        )
        cost = "an attempt that ends with an evaluation is killed before its last save"
        yield Defect("exit-margin-short", _WARNING, line, what, cost, f"--set {key}={advised}", key)


def evaluation_before_save(case: Case) -> Iterator[Defect]:
    """Evaluation and save at the same iteration: the original evaluates first."""
    save, evaluate = case.card.integer("checkpoint.interval"), case.card.integer("evaluation.interval")
    if save and evaluate and evaluate % save == 0 and case.card.integer("evaluation.iterations"):
        what = f"every {evaluate} iterations the original evaluates before it saves"
        cost = f"a hang in the evaluation loses the {save} iterations before it (it did, three times)"
        yield Defect(
            "evaluation-before-save", _NOTE, case.line("--eval-interval"), what, cost, "nothing: tr11 saves first"
        )


def pipe_hides_the_end(case: Case) -> Iterator[Defect]:
    """`... | tee` without pipefail."""
    holders = [case.launch.command, *(c for c in case.script.commands if c.words is case.launch.command.outer)]
    piped = next((command for command in holders if command.piped_into), None)
    if piped is not None and "pipefail" not in case.script.shell_options:
        what = f"the training is piped into {piped.piped_into[-1] or 'a command'} without `set -o pipefail`"
        cost = "a crashed training ends the job as COMPLETED 0:0, so chains go on and nobody is told"
        yield Defect(
            "no-pipefail", _WARNING, piped.line, what, cost, "nothing: tr11's job ends with the training's own status"
        )


def bad_exit(case: Case) -> Iterator[Defect]:
    """`srun` that lets a step live after a worker died."""
    words = [word.text for word in (*case.launch.command.outer, *case.launch.command.words)]
    if "srun" not in words:
        return
    if not any(word.startswith(("--kill-on-bad-exit", "-K")) for word in words):
        cost = "when one worker dies the others may wait for ever: up to 3 hours of all nodes, several times"
        what = "srun is started without --kill-on-bad-exit=1 (and --wait)"
        yield Defect(
            "no-kill-on-bad-exit", _WARNING, case.launch.line, what, cost, "nothing: tr11's agent ends the step"
        )


def node_counts(case: Case) -> Iterator[Defect]:
    """The launcher's numbers against Slurm's."""
    nodes = case.directive("nodes")
    value = case.launch.launcher.get("nnodes")
    if nodes is not None and value is not None and value.is_known and value.line != nodes.line:
        counts = nodes.value.partition("-")[0], value.text.partition(":")[0]
        if counts[0] != counts[1]:
            what = f"the launcher is told {counts[1]} nodes, Slurm is asked for {counts[0]} (line {nodes.line})"
            cost = "the start waits for nodes that never come, or leaves nodes idle"
            yield Defect(
                "nodes-differ",
                _ERROR,
                value.line,
                what,
                cost,
                "--set slurm.nodes=... says which is right",
                "slurm.nodes",
            )
        else:
            what = "the number of nodes is written twice: for Slurm and for the launcher"
            yield Defect(
                "nodes-written-twice",
                _NOTE,
                value.line,
                what,
                "one change forgets the other",
                "nothing: slurm.nodes is the only place",
            )
    workers, gpus = case.card.integer("slurm.workers_per_node"), case.card.integer("slurm.gpus_per_node")
    if workers and gpus and workers != gpus:
        line = case.card.line("slurm.workers_per_node")
        severity = _ERROR if workers > gpus else _WARNING
        what = f"{workers} workers a node, {gpus} GPUs a node (line {case.card.line('slurm.gpus_per_node')})"
        yield Defect(
            "gpus-differ",
            severity,
            line,
            what,
            "workers share a GPU, or GPUs stay idle",
            "--set slurm.workers_per_node=...",
            "slurm.workers_per_node",
        )
    tasks = case.directive("ntasks-per-node")
    if tasks is not None and tasks.value != "1":
        what = f"{tasks.value} tasks a node: each would start a launcher of its own"
        yield Defect(
            "tasks-per-node",
            _WARNING,
            tasks.line,
            what,
            "workers start twice and fight for GPUs",
            "nothing: tr11 starts one a node",
        )


def directives_unread(case: Case) -> Iterator[Defect]:
    """`#SBATCH` lines that Slurm passes by, or that hold a variable."""
    for item in case.directives:
        if not item.read:
            what = f"#SBATCH --{item.name} stands after the first command"
            yield Defect(
                "directive-too-late",
                _WARNING,
                item.line,
                what,
                "Slurm does not read it",
                f"--set it in [slurm] if it was meant: {item.value}",
            )
        elif "$" in item.value:
            what = f"#SBATCH --{item.name}={item.value} holds a variable"
            yield Defect(
                "directive-with-variable",
                _ERROR,
                item.line,
                what,
                "Slurm takes it literally: no shell has run yet",
                "--set the value in [slurm]",
            )


def kill_switch(case: Case) -> Iterator[Defect]:
    """No kill switch, or one that looks like another run's."""
    path = case.card.value("run.kill_switch")
    line = case.line("--kill-switch-path")
    if path is None:
        if not case.has("--kill-switch-path"):
            what = "no --kill-switch-path: the training cannot be stopped by a file"
            yield Defect(
                "kill-switch-missing",
                _NOTE,
                line,
                what,
                "only scancel stops it, without a save",
                "nothing: tr11's is in the run directory",
            )
        return
    name = str(path).rpartition("/")[2].lower()
    run = str(case.card.value("run.name", "")).lower()
    sizes, own = set(re.findall(r"\d+(?:\.\d+)?[bm]\b", name)), set(re.findall(r"\d+(?:\.\d+)?[bm]\b", run))
    plain = name.replace("_", "-").strip("-") in {"kill-switch", "killswitch", "kill"}
    if plain and run not in str(path).lower():
        what = f"the kill switch {path} names no run"
    elif sizes and own and not sizes & own:
        what = f"the kill switch {path} bears another run's name than {run}"
    else:
        return
    cost = "whoever stops the other run stops this one too, and the next start leaves at once"
    yield Defect(
        "kill-switch-shared",
        _WARNING,
        line,
        what,
        cost,
        "--set run.kill_switch=none: each run has its own",
        "run.kill_switch",
    )


def launch_blocking(case: Case) -> Iterator[Defect]:
    """`CUDA_LAUNCH_BLOCKING`, which an import leaves out, and all pay for."""
    key = "slurm.environment.CUDA_LAUNCH_BLOCKING"
    if case.card.value(key) not in {None, "0", ""}:
        nodes = case.card.integer("slurm.nodes")
        what = "CUDA_LAUNCH_BLOCKING is on, as asked by --set"
        needed = nodes >= _FEWEST_NODES_FOR_BLOCKING
        fix = "measure without it first" if needed else f"--set {key}=0 below {_FEWEST_NODES_FOR_BLOCKING} nodes"
        cost = "0 to 7 % of the speed; without it jobs of 40 nodes and more hung after the first step"
        yield Defect("launch-blocking", _NOTE, case.card.line(key), what, cost, fix, key)


def lost_text(case: Case) -> Iterator[Defect]:
    """Text that no shell sees as it was meant: broken continuations, comments in arguments, unexported variables."""
    for number, written in enumerate(case.text.split("\n"), start=1):
        if re.search(r"(?<!\\)\\[ \t]+\r?$", written) and not written.lstrip().startswith("#"):
            what = "a blank follows the backslash at the end of the line: the line does not continue"
            yield Defect(
                "continuation-broken",
                _ERROR,
                number,
                what,
                "the options below may never reach the trainer",
                "remove the blank and import again",
            )
    for comment in case.script.lost_comments:
        what = f"a # inside the launched text: {comment.text[:40].strip()!r} and all behind it is a comment there"
        yield Defect(
            "options-commented-out",
            _ERROR,
            comment.line,
            what,
            "the options behind it never reach the trainer",
            "remove them from the script and import again",
        )
    for name, line in sorted(case.script.not_exported.items()):
        what = f"${name} is used by the launched shell, and is not exported to it"
        yield Defect(
            "not-exported",
            _ERROR,
            line,
            what,
            "it is empty there; the import took its value",
            f"was it meant? then `export {name}`",
        )
    if "\r" in case.text:
        line = case.text[: case.text.index("\r")].count("\n") + 1
        yield Defect(
            "windows-line-ends",
            _WARNING,
            line,
            "lines end as on Windows",
            "sbatch refuses the script",
            "nothing: the card has none",
        )


def environment_needed(case: Case) -> Iterator[Defect]:
    """Variables that must be exported where `tr11` is typed; a misspelt name shows up here."""
    names: dict[str, int] = {}
    for key, item in case.card.placed.items():
        if not key.startswith("slurm.setup"):
            for name in re.findall(r"(?<!\$)\$\{?([A-Za-z_]\w*)", str(item.value), re.ASCII):
                names.setdefault(name, item.value_line or item.line)
    for name, line in names.items():
        what = f"${name} is set nowhere in the script"
        yield Defect(
            "from-environment",
            _NOTE,
            line,
            what,
            "the card cannot be used where it is not exported",
            f"export {name}=..., or mend its spelling",
        )


JOB_DEFECTS: tuple[Callable[[Case], Iterator[Defect]], ...] = (
    exit_minute, evaluation_before_save, pipe_hides_the_end, bad_exit, node_counts, directives_unread, kill_switch,
    launch_blocking, lost_text, environment_needed,
)  # fmt: skip
