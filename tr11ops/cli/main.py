"""The `tr11` command: finds the command's module only when it is asked for, and turns errors into
one line.

Exit codes, everywhere: 0 fine, 1 needs a person, 2 wrong usage, 3 could not observe.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tr11ops.base.invocation import for_this_card
from tr11ops.base.units import escaped
from trainer.contract.errors import NEEDS_PERSON, USAGE, Tr11Error
from trainer.contract.record import Record

# ----------------------------------------------------------------------------- a command's page
_TAG = re.compile(r"\[(?=[a-z#/@])")  # what the terminal library would take for mark-up
EXAMPLES = "Examples:"  # the line of a docstring before the commands, one a line


def flowing(text: str) -> str:
    """A docstring for a terminal of any width: each paragraph on one line, "Examples" in bold over
    its commands.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    joined = "\n\n".join(re.sub(r"(?<=\S)\n(?=\S)", " ", paragraph) for paragraph in paragraphs)
    head, line, commands = joined.partition(f"{EXAMPLES}\n")
    if not line:
        return joined
    # typer dedents what follows the first paragraph but for its first line
    gap = "" if "\n\n" in head.rstrip() else "\n"
    return f"{head}{gap}[bold]Examples[/bold]\n" + _TAG.sub(r"\\[", commands)


class _Page:
    """What `PageCommand` and `PageGroup` have in common."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for option in found:
            if getattr(option, "is_flag", False):
                option.display_type_rich = _no_type
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _as_shown(self.get_params(ctx)):
            super().format_help(ctx, formatter)  # type: ignore[misc]


class PageCommand(_Page, TyperCommand):
    """A command with such a page."""


class PageGroup(_Page, TyperGroup):
    """A group of commands with such a page."""


def _no_type(ctx: Any) -> None:
    """A flag takes no value."""


def shown_spellings(option: Any) -> list[str]:
    """The names of an option (or an argument's) that its page shows."""
    former = [name for name in option.opts if name.startswith("--")][1:]
    return [name for name in option.opts if name not in former]


@contextmanager
def _as_shown(params: list[Any]) -> Iterator[None]:
    """Of several long names of an option the first is its name; the others are former ones, which
    are not shown. What stands in square brackets in its text is text.
    """
    before = [(param, param.opts, param.help) for param in params]
    for param, _, text in before:
        param.opts, param.help = shown_spellings(param), _TAG.sub(r"\\[", text or "")
    try:
        yield
    finally:
        for param, names, text in before:
            param.opts, param.help = names, text


EXIT_FINE = 0

ERROR_SCHEMA = 1


class LazyCommand(Record):
    """Where a command lives in `tr11ops.cli`, and the line that `tr11 --help` shows without
    importing it.
    """

    module: str
    attribute: str
    help: str
    is_group: bool = False
    # what follows its first word is another program's, options and all
    has_command: bool = False


GROUPS: Mapping[str, Mapping[str, LazyCommand]] = {
    "Set up": {
        "init": LazyCommand(
            "init", "init", "Write a run card for this cluster: --preset toy, 1b, 7b, 176b."
        ),
        "doctor": LazyCommand(
            "doctor", "doctor", "Is everything in place to launch a card from here?"
        ),
        "estimate": LazyCommand("config", "estimate", "Every number that follows from a run card."),
        "config": LazyCommand(
            "config", "app", "What a run card says: show; what a key means: explain.", is_group=True
        ),
        "adopt": LazyCommand("adopt", "adopt", "Make a card of a script that trains today."),
        "import": LazyCommand("adopt", "import_script", "Make a run card of an old batch script."),
        "trainer": LazyCommand(
            "trainer", "app", "Other trainers: list, show; check a log, a folder.", is_group=True
        ),
        "data": LazyCommand(
            "data", "app", "Build a corpus, a tokenizer and indexed datasets.", is_group=True
        ),
    },
    "Run": {
        "launch": LazyCommand(
            "launch", "launch", "Check a run card and submit it: --array 1-10 for ten tasks."
        ),
        "sweep": LazyCommand(
            "sweep", "app", "A study: a card's keys varied, as one array; compare.", is_group=True
        ),
        "train": LazyCommand("train", "train", "Train here and now, without a scheduler."),
        "pause": LazyCommand("stop", "pause", "Stop after this task: queued jobs are held."),
        "resume": LazyCommand("resume", "resume", "Let a stopped or paused run go on."),
        "kill": LazyCommand("stop", "kill", "Save and stop a run; its queued jobs are held."),
        "rollback": LazyCommand(
            "rollback", "rollback", "Go back to an older checkpoint, and skip data; --undo."
        ),
        "checkpoint-now": LazyCommand(
            "requests", "checkpoint_now", "Save at the next step, and train on."
        ),
        "requeue": LazyCommand(
            "requeue",
            "requeue",
            "Any command in a batch script; its job requeued at the limit.",
            has_command=True,
        ),
    },
    "Watch": {
        "status": LazyCommand(
            "status", "status", "One screen: is the run healthy, and since when."
        ),
        "top": LazyCommand("top", "top", "Runs, attempts, nodes and ranks on one screen, by keys."),
        "list": LazyCommand(
            "list_runs", "list_runs", "The runs below some folders: verdict, iteration, loss, ETA."
        ),
        "serve": LazyCommand("serve", "serve", "Live pages over your runs, for browser and phone."),
        "watch": LazyCommand(
            "watch", "watch", "A job that someone else submitted: by its log, from outside."
        ),
        "metrics": LazyCommand(
            "metrics", "metrics", "The status as metrics; a Grafana dashboard; alert rules."
        ),
        "logs": LazyCommand("logs", "logs", "Show or follow the run's log, or one worker's."),
        "diagnose": LazyCommand(
            "diagnose", "diagnose", "What ended a training, by its logs: the first cause."
        ),
        "stacks": LazyCommand(
            "requests", "stacks", "What every worker does now, and which one hangs."
        ),
        "alerts": LazyCommand(
            "alerts", "app", "What is open, and who has it: list, ack, snooze.", is_group=True
        ),
        "runbook": LazyCommand("diagnose", "runbook", "What to do about an alert: print its page."),
        "handover": LazyCommand(
            "handover", "handover", "What happened since the last shift, what is open."
        ),
        "goodput": LazyCommand("goodput", "goodput", "Where every second of every node went."),
        "advise": LazyCommand(
            "goodput", "advise", "The save interval, spares and array length to use."
        ),
        "track": LazyCommand(
            "track", "track", "The curves in TensorBoard, MLflow, W&B or Trackio; --follow."
        ),
        "report": LazyCommand("handover", "report", "The whole run as one page: -o report.html."),
        "numbers": LazyCommand(
            "compare", "numbers", "What looks wrong in a log's numbers: spikes, restarts, slow."
        ),
        "compare": LazyCommand(
            "compare", "compare_runs", "The curves of two runs, laid over each other."
        ),
        "profile": LazyCommand(
            "requests", "profile", "A trace of some steps, or what each rank waits for."
        ),
        "compute-check": LazyCommand(
            "requests", "compute_check", "Does every rank compute the same twice?"
        ),
    },
    "Keep alive": {
        "pulse": LazyCommand(
            "pulse", "pulse", "One look by the watchdog: log, alert, and act if allowed."
        ),
        "cron": LazyCommand(
            "cron", "app", "The periodic jobs: list, run, install, status.", is_group=True
        ),
        "nodes": LazyCommand(
            "nodes", "app", "Which nodes the run may use: list, check, exclude.", is_group=True
        ),
        "fs-watchdog": LazyCommand("storage", "fs_watchdog", "Are the file systems getting full?"),
        "perms": LazyCommand(
            "storage", "app", "Are the run's files usable for its whole group?", is_group=True
        ),
        "drill": LazyCommand("doctor", "drill", "Prove on this cluster that a stop signal saves."),
    },
    "Checkpoints": {
        "checkpoints": LazyCommand(
            "checkpoints", "app", "What is saved: list, verify, pin, prune, export.", is_group=True
        ),
        "backup": LazyCommand(
            "backup", "app", "Copies of checkpoints: plan, run, verify, restore.", is_group=True
        ),
        "sync": LazyCommand("sync", "sync", "Mirror logs and TensorBoard events to the hub."),
        "upload": LazyCommand("upload", "upload", "Publish a checkpoint as a model on the hub."),
        "eval": LazyCommand(
            "train", "evaluate", "Loss of a checkpoint on given data, on any topology."
        ),
    },
    "Rehearse": {
        "replay": LazyCommand(
            "replay", "replay", "Months on real failure records: what tr11 would have done."
        ),
        "twin": LazyCommand(
            "twin", "app", "A real Slurm of many nodes on this machine.", is_group=True
        ),
    },
}
# What people type who do not know a command's name yet, by the command that does it.
_WORDS_FOR: Mapping[str, str] = {
    "init": "new",
    "doctor": "check validate preflight",
    "config show": "card",
    "config explain": "explain",
    "launch": "start run submit sbatch extend",
    "launch --repair": "repair",
    "launch --rehearse": "rehearse",
    "sweep": "study",
    "pause": "hold suspend",
    "resume": "restart continue release unpause unhold",
    "kill": "stop cancel end scancel quit kill-switch",
    "rollback": "back revert rewind",
    "rollback --undo": "undo",
    "checkpoint-now": "save",
    "status": "queue squeue job jobs info show eta progress",
    "status --watch": "monitor",
    "top": "htop k9s",
    "metrics": "prometheus openmetrics",
    "metrics --dashboard": "dashboard grafana",
    "list": "ls runs",
    "logs": "log",
    "logs -f": "tail",
    "diagnose": "why debug",
    "stacks": "stack hang ps",
    "alerts list": "alert",
    "alerts ack": "ack",
    "alerts snooze": "snooze",
    "alerts test": "mail",
    "runbook": "page runbooks",
    "handover --start": "shift oncall on-call",
    "handover --chronicle": "history sacct",
    "goodput": "usage hours cost",
    "track tensorboard": "tensorboard tb",
    "track wandb": "wandb",
    "track mlflow": "mlflow",
    "report": "plot",
    "pulse": "watchdog",
    "nodes list": "node sinfo",
    "nodes check": "health",
    "nodes exclude": "exclude drain",
    "nodes include": "include",
    "fs-watchdog": "disk quota",
    "checkpoints list": "ckpt checkpoint",
    "checkpoints verify": "verify",
    "checkpoints pin": "pin",
    "checkpoints prune": "prune clean",
    "checkpoints remove": "rm remove delete",
    "checkpoints export": "export convert",
    "backup run": "copy",
    "backup restore": "restore",
    "upload": "push publish",
    "eval": "evaluate",
    "--help": "help",
    "--version": "version",
}
MEANT: Mapping[str, str] = {
    word: command for command, words in _WORDS_FOR.items() for word in words.split()
}
COMMANDS: Mapping[str, LazyCommand] = {
    name: entry for group in GROUPS.values() for name, entry in group.items()
}

HELP = """\
{bold}tr11{plain}: keep a large training alive on a Slurm cluster, and lose nothing.

{bold}Usage{plain}: tr11 COMMAND [OPTIONS]...

{commands}

{bold}Options{plain}
  --version             print the version
  --install-completion  completion of commands and options for this shell
  --help, -h            this page; `tr11 COMMAND --help` for a command's own

{bold}Examples{plain}
  tr11 launch --array 1-10            ten tasks, one after another
  tr11 status                         how it is going
  tr11 kill --reason "new data"       save and stop; also what is queued
  tr11 resume                         let it run again

The run card is --run PATH, else $TR11_RUN, else tr11.toml here.
Exit codes: 0 fine, 1 needs a person, 2 wrong usage, 3 could not observe.
"""


class LazyGroup(TyperGroup):
    """A group whose commands are names and help lines until one of them is run."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=entry.help)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Plain text: the parser's own rendering imports a Markdown parser, which costs more than
        all the rest.
        """
        blocks = (
            "\n".join(
                (
                    typer.style(title, bold=True),
                    *(_row(name, entry) for name, entry in group.items()),
                )
            )
            for title, group in GROUPS.items()
        )
        bold, plain = typer.style("\0", bold=True).split("\0")
        formatter.write(HELP.format(bold=bold, plain=plain, commands="\n\n".join(blocks)))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        meant = _meant_by(word)
        if meant:
            entry = COMMANDS.get(meant.split()[0])
            what = ""
            if entry is not None:
                what = f" {entry.help}"
            ctx.fail(f"No such command {word!r}: type `tr11 {meant}`.{what}")
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None and name in COMMANDS else command, rest


def _meant_by(word: str) -> str:
    """The command line for a word that is no command: one that people type, or nearly one; "" where
    none is known, or where it is nearer to a command's own name.
    """
    if word in COMMANDS or any(name.startswith(word) for name in COMMANDS):
        return MEANT.get(word, "")
    from difflib import get_close_matches

    near = get_close_matches(word, [*COMMANDS, *MEANT], 1)
    if near and near[0] not in COMMANDS:
        return MEANT[near[0]]
    return ""


def _row(name: str, entry: LazyCommand) -> str:
    return f"  {typer.style(name, bold=True)}{' ' * (16 - len(name))}{entry.help}"


def load(name: str) -> Any:
    """Import one command's module and build its parser."""
    from tr11ops.cli.runner import with_run_options

    entry = COMMANDS[name]
    target = getattr(importlib.import_module(f"tr11ops.cli.{entry.module}"), entry.attribute)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    if not entry.is_group:
        settings = {"allow_interspersed_args": not entry.has_command}
        page = flowing(target.__doc__ or "")
        single.command(name, cls=PageCommand, help=page, context_settings=settings)(
            with_run_options(target)
        )
        return typer.main.get_command(single)
    target.info.cls, target.info.help = PageGroup, flowing(target.info.help)
    if target.registered_callback is not None:  # the group is a command of its own
        target.registered_callback.callback = with_run_options(target.registered_callback.callback)
    for command in target.registered_commands:
        command.callback, command.cls = with_run_options(command.callback), PageCommand
        command.help = flowing(command.help or command.callback.__doc__ or "")
    return typer.main.get_group(target)


app = typer.Typer(
    cls=LazyGroup,
    name="tr11",
    help="Keep a large training alive on a Slurm cluster, and lose nothing.",
    invoke_without_command=True,  # for --version
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.")
    ] = False,
) -> None:
    """Keep a large training alive on a Slurm cluster, and lose nothing."""
    if version:
        from tr11ops import __version__
        from tr11ops.base.installed import trainer_line

        typer.echo(f"tr11 {__version__}")
        typer.echo(trainer_line())
        raise typer.Exit(EXIT_FINE)
    if ctx.invoked_subcommand is None:
        ctx.fail("Missing command.")


ANSWER_SECONDS = 0.2  # at a command's end, for a question to a file system that answers


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script: run one command and end the process with its exit code."""
    # what imports make stays: searching it for garbage was 4 % of `tr11 status`
    gc.set_threshold(200_000, 20, 20)
    # closed by the caller (`>&-`): what would be shown goes nowhere, the exit code counts
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    code = execute(sys.argv[1:] if arguments is None else arguments)
    _write_rest()
    # the process ends: the interpreter need not take apart what it made, which was 5 % of `tr11
    # status`
    gc.freeze()
    from tr11ops.base.deadline import is_abandoned  # `execute` has imported it

    if is_abandoned(ANSWER_SECONDS):
        os._exit(code)  # else a file that never answers would be waited for
    sys.exit(code)


def execute(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors become one line each on stderr; no
    traceback, ever.

    `TR11_DEBUG=1` shows the traceback as well. With `--json` among the arguments, stdout gets the
    error as an object.
    """
    from tr11ops.base.deadline import FILES, FileWatch, within
    from tr11ops.base.errors import Late

    def leave(error: BaseException) -> None:
        code = _report(error, arguments)
        with suppress(Late):
            within(1.0, sys.stdout.flush)
        os._exit(code)

    watch = FileWatch(leave)

    def watched() -> int:
        FILES.set(watch)
        for word in arguments:
            if os.sep in word:
                watch.add(Path(word.rpartition("=")[2]))
        return _execute(arguments)

    is_main = threading.current_thread() is threading.main_thread()
    usual = signal.default_int_handler
    if is_main and signal.getsignal(signal.SIGINT) is usual:
        signal.signal(signal.SIGINT, watch.interrupt)
    try:
        # the card of one invocation is not the next one's
        return copy_context().run(watched)
    finally:
        watch.end()
        if is_main and signal.getsignal(signal.SIGINT) == watch.interrupt:
            signal.signal(signal.SIGINT, usual)


def _execute(arguments: Sequence[str]) -> int:
    try:
        status = app(list(arguments) or ["--help"], prog_name="tr11", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _write_rest()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer met it first
            return _write_rest()
        if isinstance(error.code, int):
            return error.code
        return NEEDS_PERSON
    except BaseException as error:
        return _report(error, arguments)
    if status == 130:  # how typer reports Ctrl-C
        return _report(KeyboardInterrupt(), arguments)
    if isinstance(status, int):
        return status
    return EXIT_FINE


def _write_rest() -> int:
    """Write what is left, unless the reader (`| head`) has what it wanted: Python would complain once
    more when it flushes at its end.
    """
    for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return EXIT_FINE


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    code, text = explain(error, next((word for word in arguments if word in COMMANDS), ""))
    try:
        _say_error(error, code, "\n".join(map(for_this_card, text.splitlines())), arguments)
    except BrokenPipeError:
        _write_rest()
    return code


def _say_error(error: BaseException, code: int, text: str, arguments: Sequence[str]) -> None:
    if os.environ.get("TR11_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, typer.Abort) and sys.stderr.isatty():
        print(file=sys.stderr)  # below the question that was not answered
    for line in text.splitlines():
        print(f"tr11: {escaped(line)}", file=sys.stderr)
    if "--json" in arguments:
        print(
            json.dumps(
                {"schema": ERROR_SCHEMA, "error": {"exit_code": code, "lines": text.splitlines()}}
            )
        )


def explain(error: BaseException, command: str) -> tuple[int, str]:
    """The exit code and the words for an error; one line, but for a card with several faults."""
    if isinstance(error, Tr11Error):
        return error.exit_code, error.sentence
    if hasattr(error, "format_message"):  # the parser's own errors, whichever library carries them
        where = (
            getattr(getattr(error, "ctx", None), "command_path", "") or f"tr11 {command}".rstrip()
        )
        words = " ".join(str(error.format_message()).split()).replace("Value error, ", "")
        # without words: the help itself was shown
        return USAGE, words and f"{words} (see {where} --help)"
    if isinstance(error, KeyboardInterrupt):
        return NEEDS_PERSON, "interrupted; nothing more was done"
    if isinstance(error, typer.Abort):
        return NEEDS_PERSON, "stopped; nothing was changed"
    if isinstance(error, OSError):
        place = ""
        if error.filename:
            place = f"{error.filename}: "
        return NEEDS_PERSON, f"{place}{error.strerror or error}"
    words = " ".join(str(error).split())
    return (
        NEEDS_PERSON,
        f"an error of tr11 itself: {type(error).__name__}: {words} (TR11_DEBUG=1 shows where)",
    )
