"""The `tr11` command: finds the command's module only when it is asked for, and turns errors into one line.

Exit codes, everywhere: 0 fine, 1 needs a person, 2 wrong usage, 3 could not observe.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

EXIT_FINE = 0
EXIT_NEEDS_PERSON = 1
EXIT_USAGE = 2
EXIT_UNOBSERVED = 3

ERROR_SCHEMA = 1


@dataclass(frozen=True)
class LazyCommand:
    """Where a command lives, and the line that `tr11 --help` shows without importing it."""

    module: str
    attribute: str
    help: str
    is_group: bool = False


COMMANDS: Mapping[str, LazyCommand] = {
    "launch": LazyCommand(
        "tr11ops.cli.launch", "launch", "Check a run card and submit it: --array 1-10 for ten tasks."
    ),
    "status": LazyCommand("tr11ops.cli.status", "status", "One screen: is the run healthy, and since when."),
    "logs": LazyCommand("tr11ops.cli.logs", "logs", "Show or follow the run's log, or one worker's."),
    "pulse": LazyCommand("tr11ops.cli.pulse", "pulse", "One look by the watchdog: log, alert, and act if allowed."),
    "alerts": LazyCommand(
        "tr11ops.cli.alerts", "app", "What is open, and who has it: list, ack, snooze.", is_group=True
    ),
    "handover": LazyCommand("tr11ops.cli.handover", "handover", "What happened since the last shift, what is open."),
    "goodput": LazyCommand("tr11ops.cli.goodput", "goodput", "Where every second of every node went."),
    "advise": LazyCommand("tr11ops.cli.advise", "advise", "The save interval, spares and array length to use."),
    "report": LazyCommand("tr11ops.cli.report", "report", "The whole run as one page: -o report.html."),
    "kill": LazyCommand("tr11ops.cli.kill", "kill", "Save and stop a run, with all that waits of it."),
    "pause": LazyCommand("tr11ops.cli.pause", "pause", "Stop after this task: what waits is held."),
    "resume": LazyCommand("tr11ops.cli.resume", "resume", "Let a stopped or paused run go on."),
    "rollback": LazyCommand(
        "tr11ops.cli.rollback", "rollback", "Go back to an older checkpoint, and pass over data; --undo."
    ),
    "checkpoint-now": LazyCommand(
        "tr11ops.cli.checkpoint_now", "checkpoint_now", "Save at the next step, and train on."
    ),
    "profile": LazyCommand("tr11ops.cli.profile", "profile", "A trace of some steps, or what each rank waits for."),
    "drill": LazyCommand("tr11ops.cli.drill", "drill", "Prove on this cluster that a stop signal saves, in any phase."),
    "train": LazyCommand("tr11ops.cli.train", "train", "Train here and now, without a scheduler."),
    "doctor": LazyCommand("tr11ops.cli.doctor", "doctor", "Is everything in place to launch a card from here?"),
    "init": LazyCommand("tr11ops.cli.init", "init", "Write a starter card for this cluster."),
    "perms": LazyCommand(
        "tr11ops.cli.perms", "app", "Are the run's files usable for its whole group? check, fix.", is_group=True
    ),
    "estimate": LazyCommand("tr11ops.cli.estimate", "estimate", "Every number that follows from a run card."),
    "eval": LazyCommand("tr11ops.cli.evaluate", "evaluate", "Loss of a checkpoint on given data, on any topology."),
    "import": LazyCommand("tr11ops.cli.import_script", "import_script", "Make a run card of an old batch script."),
    "checkpoints": LazyCommand(
        "tr11ops.cli.checkpoints", "app", "What is saved: list, verify, pin, prune, inspect, convert.", is_group=True
    ),
    "backup": LazyCommand(
        "tr11ops.cli.backup", "app", "Copies of checkpoints: plan, run, verify, restore, status.", is_group=True
    ),
    "sync": LazyCommand("tr11ops.cli.sync", "sync", "Mirror logs and TensorBoard events to the hub."),
    "upload": LazyCommand("tr11ops.cli.upload", "upload", "Publish a checkpoint as a model on the hub, with its card."),
    "nodes": LazyCommand(
        "tr11ops.cli.nodes", "app", "Which nodes the run may use: list, check, exclude, include.", is_group=True
    ),
    "cron": LazyCommand("tr11ops.cli.cron", "app", "The periodic jobs: list, run, install, status.", is_group=True),
    "fs-watchdog": LazyCommand("tr11ops.cli.fs_watchdog", "fs_watchdog", "Are the file systems getting full?"),
    "data": LazyCommand("tr11ops.cli.data", "app", "Build a corpus, a tokenizer and indexed datasets.", is_group=True),
    "twin": LazyCommand("tr11ops.cli.twin", "app", "A real Slurm of many nodes on this machine.", is_group=True),
}

HELP = """\
{bold}tr11{plain}: keep a large training alive on a Slurm cluster, and lose nothing.

{bold}Usage{plain}: tr11 COMMAND [OPTIONS]...

{bold}Commands{plain}
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
        """Plain text: the parser's own rendering imports a Markdown parser, which costs more than all the rest."""
        rows = (
            f"  {typer.style(name, bold=True)}{' ' * (16 - len(name))}{entry.help}" for name, entry in COMMANDS.items()
        )
        bold, plain = typer.style("\0", bold=True).split("\0")
        formatter.write(HELP.format(bold=bold, plain=plain, commands="\n".join(rows)))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name is not None and name in COMMANDS else command, rest


def load(name: str) -> Any:
    """Import one command's module and build its parser."""
    entry = COMMANDS[name]
    target = getattr(importlib.import_module(entry.module), entry.attribute)
    if entry.is_group:
        for command in target.registered_commands:
            command.help = flowing(command.help or command.callback.__doc__ or "")
        return typer.main.get_group(target)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, help=flowing(target.__doc__ or ""))(target)
    return typer.main.get_command(single)


def flowing(text: str) -> str:
    """A docstring with each paragraph on one line, for a terminal of any width; the parser would keep its line ends."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(re.sub(r"(?<=\S)\n(?=\S)", " ", paragraph) for paragraph in paragraphs)


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
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Keep a large training alive on a Slurm cluster, and lose nothing."""
    if version:
        from tr11ops import __version__

        typer.echo(f"tr11 {__version__}")
        raise typer.Exit(EXIT_FINE)
    if ctx.invoked_subcommand is None:
        ctx.fail("Missing command.")


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script: run one command and end the process with its exit code."""
    if sys.stdout is None:  # closed by the caller (`>&-`): what would be shown goes nowhere, the exit code counts
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    sys.exit(execute(sys.argv[1:] if arguments is None else arguments))


def execute(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors become one line each on stderr; no traceback, ever.

    `TR11_DEBUG=1` shows the traceback as well. With `--json` among the arguments, stdout gets the error as an object.
    """
    try:
        status = app(list(arguments) or ["--help"], prog_name="tr11", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer met it first
            return _reader_left()
        return error.code if isinstance(error.code, int) else EXIT_NEEDS_PERSON
    except BaseException as error:
        return _report(error, arguments)
    if status == 130:  # how typer reports Ctrl-C
        return _report(KeyboardInterrupt(), arguments)
    return status if isinstance(status, int) else EXIT_FINE


def _reader_left() -> int:
    """The reader (`| head`) has what it wanted. Python would complain once more when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return EXIT_FINE


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    code, text = explain(error, next((word for word in arguments if word in COMMANDS), ""))
    common = sys.modules.get("tr11ops.cli.common")
    text = "\n".join(map(common.typed_for_run, text.splitlines())) if common else text
    if os.environ.get("TR11_DEBUG") == "1":
        traceback.print_exception(error)
    for line in text.splitlines():
        print(f"tr11: {_printable(line)}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"schema": ERROR_SCHEMA, "error": {"exit_code": code, "lines": text.splitlines()}}))
    return code


def _printable(line: str) -> str:
    """The line without characters that a terminal obeys or an encoding refuses."""
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in line)
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def explain(error: BaseException, command: str) -> tuple[int, str]:
    """The exit code and the words for an error; one line, but for a card with several faults."""
    known = _explain_own(error)
    if known is not None:
        return known
    if hasattr(error, "format_message"):  # the parser's own errors, whichever library carries them
        where = getattr(getattr(error, "ctx", None), "command_path", "") or f"tr11 {command}".rstrip()
        words = " ".join(str(error.format_message()).split())
        return EXIT_USAGE, words and f"{words} (see {where} --help)"  # without words: the help itself was shown
    if isinstance(error, KeyboardInterrupt):
        return EXIT_NEEDS_PERSON, "interrupted; nothing more was done"
    if isinstance(error, typer.Abort):
        return EXIT_NEEDS_PERSON, "stopped; nothing was changed"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return EXIT_NEEDS_PERSON, f"{place}{error.strerror or error}"
    words = " ".join(str(error).split())
    return EXIT_NEEDS_PERSON, f"an error of tr11 itself: {type(error).__name__}: {words} (TR11_DEBUG=1 shows where)"


def _explain_own(error: BaseException) -> tuple[int, str] | None:
    """As `explain`, for the errors that tr11 raises. Their modules are looked up only if something imported them."""
    cluster, config, common = (sys.modules.get(name) for name in _ERROR_MODULES)
    if common and isinstance(error, common.Refusal):
        return error.exit_code, str(error)
    if config and isinstance(error, config.CardError):
        return EXIT_USAGE, str(error)
    if cluster and isinstance(error, cluster.SchedulerUnreachable):
        return EXIT_UNOBSERVED, error.sentence
    if cluster and isinstance(error, cluster.SchedulerError):
        return EXIT_NEEDS_PERSON, error.sentence
    return None


_ERROR_MODULES = ("tr11ops.cluster.base", "trainer.config", "tr11ops.cli.common")
