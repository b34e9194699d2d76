"""`tr11 trainer`: what tr11 knows of other trainers, and what it makes of their logs and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from tr11ops.base.errors import Refusal, Unobserved, WrongUsage
from tr11ops.base.observed import cause
from tr11ops.base.units import counted, timestamp
from tr11ops.cli.common import in_time, require_file
from tr11ops.cli.logs import byte_progress
from tr11ops.cli.runner import DRY_RUN, JSON, NO_RUN, YES, Change, Outcome, RunContext
from tr11ops.diagnose.reading import opened
from tr11ops.dialects.dialect import CheckpointRules, Dialect, dialect_named, names
from tr11ops.trainers.aside import Aside, plan_aside, set_aside
from tr11ops.trainers.checkpoints import CheckpointSurvey, FoundCheckpoint, settled, survey
from tr11ops.trainers.ends import EndMeaning, meaning_of_end
from tr11ops.trainers.log import LogReading, TrainerLogReader, dialect_of_log, lines_of
from trainer.contract.documents import document
from trainer.contract.errors import NEEDS_PERSON
from trainer.contract.record import Record
from trainer.contract.units import size

SCHEMA = 1
_BLOCK = 1 << 20
_HEAD = 4 << 20  # bytes of a log in which its trainer is looked for
BEAT = files("tr11ops.trainers").joinpath("tr11_beat.py")
_MOST_SHOWN = 8  # checkpoints on a screen
_END_LINE = 56  # characters of a line of 80

app = typer.Typer(
    name="trainer",
    help="""What is known of other trainers, and what their logs and checkpoints say.

    Examples:
      tr11 trainer list
      tr11 trainer check --log slurm-1234.out --folder outputs
    """,
    no_args_is_help=True,
)

DialectOption = Annotated[
    str | None,
    typer.Option(
        "--dialect",
        metavar="NAME|FILE",
        help="A name of `tr11 trainer list`, or a .toml of your own. If not given: by the log.",
    ),
]


FOLDER = typer.Option(
    "--folder",
    metavar="DIR",
    help="Where its checkpoints lie: the trainer's own output folder, or the one in it.",
)
FolderOption = Annotated[Path, FOLDER]
WorldSizeOption = Annotated[
    int | None,
    typer.Option(
        "--world-size",
        metavar="N",
        min=1,
        help="How many ranks train; some checkpoints are whole only with a file of each.",
    ),
]


@app.command("list")
def list_dialects(context: Annotated[RunContext, NO_RUN, JSON]) -> Outcome:
    """The trainers that tr11 knows, and what can be asked of each.

    Examples:
      tr11 trainer list
      tr11 trainer show torchtitan
    """
    known = [dialect_named(name) for name in names()]
    lines = []
    for one in known:
        lines.append(f"{one.name:<12} {one.title}")
        lines.append(f"{'':<12} stops with a save: {_stop_words(one)}")
        lines.append(f"{'':<12} takes a broken checkpoint: {_belief(one)}")
    return Outcome({"schema": SCHEMA, "dialects": [_facts(one) for one in known]}, lines)


@app.command()
def show(
    context: Annotated[RunContext, NO_RUN, JSON],
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A dialect.")],
) -> Outcome:
    """All that a dialect says of its trainer, with where it was read.

    Examples:
      tr11 trainer show huggingface
      tr11 trainer show ./ours.toml
    """
    found = dialect_named(name)
    return Outcome({"schema": SCHEMA, **_facts(found)}, list(_page(found)))


@app.command()
def check(
    context: Annotated[RunContext, NO_RUN, JSON],
    dialect: DialectOption = None,
    log: Annotated[
        Path | None,
        typer.Option("--log", metavar="FILE", help="A log of the trainer."),
    ] = None,
    folder: Annotated[Path | None, FOLDER] = None,
    world_size: WorldSizeOption = None,
    status: Annotated[
        int | None,
        typer.Option(
            "--status",
            metavar="N",
            help="The exit code of its launcher, where the log is of a launch that ended.",
        ),
    ] = None,
) -> Outcome:
    """What tr11 reads in another trainer's log and checkpoints, and what stays unknown.

    Shows the first and the last step, the marks and the end that were found, which checkpoints are
    whole, and which one the trainer would take at its next start. Nothing is changed, and nothing
    in a checkpoint is run.

    Returns 1 where the next start would take a broken checkpoint, one that is being written, or
    none beside what is there, and where this one started from the beginning though it need not; 3 where the log or
    the folder cannot be read.

    Examples:
      tr11 trainer check --log slurm-1234.out
      tr11 trainer check --dialect huggingface --folder output --world-size 8
      tr11 trainer check --log slurm-1234.out --folder outputs --status 0
    """
    if log is None and folder is None:
        raise WrongUsage("give --log FILE, --folder DIR, or both: there is nothing to look at")
    known = _dialect(dialect, log)
    reading, end, found, changed = None, None, None, 0.0
    if log is not None:
        reading = _read_log(log, known)
        changed = log.stat().st_mtime
        if status is not None:
            end = meaning_of_end(known, reading, status)
    if folder is not None:
        found = _look(*_place(folder, known), world_size)
    seen = Seen(dialect=known, log=reading, end=end, checkpoints=found, log_changed=changed)
    lines = list(_screen(seen, log))
    if not seen.conflict:
        return Outcome(seen.document(), lines)
    return Outcome(seen.document(), lines, fault=seen.conflict, exit_code=NEEDS_PERSON)


@app.command("set-aside")
def set_broken_aside(
    context: Annotated[RunContext, NO_RUN, JSON, YES, DRY_RUN],
    dialect: Annotated[
        str, typer.Option("--dialect", metavar="NAME|FILE", help="As in `tr11 trainer list`.")
    ],
    folder: FolderOption,
    world_size: WorldSizeOption = None,
) -> Change | Outcome:
    """Move broken checkpoints out of the way of a trainer that would take them.

    For a batch script of your own, before it starts the trainer: a save that was cut is no longer
    what the next start dies of. What is moved lies whole in FOLDER.set-aside; a file that names the
    newest checkpoint is written again. Waits until nothing has been written for as long as a save
    of this trainer may pause.

    Only while no training writes there. Returns 1 where there is nothing whole to go back to, or
    where it is not known what a checkpoint is.

    Examples:
      tr11 trainer set-aside --dialect huggingface --folder output --dry-run
      tr11 trainer set-aside --dialect megatron --folder ckpt --yes && srun ./train.sh
    """
    known = dialect_named(dialect)
    rules, place = _place(folder, known)
    found = _settled(rules, place, world_size)
    plan = plan_aside(rules, found)
    if plan is None:
        return Outcome(_moves(None, []), (f"nothing to move: {_taken(found)}",))

    def apply() -> Outcome:
        # the question may have stood for hours
        again = plan_aside(rules, _look(rules, place, world_size))
        if again != plan:
            raise Refusal(f"{place} has changed since the plan was shown: look again")
        try:
            moved = set_aside(plan, rules, place, time.time())
        except OSError as error:
            raise Refusal(f"{place}: not all was moved: {cause(error)}") from None
        lines = [f"moved {one.name} to {one}" for one in moved]
        return Outcome(_moves(plan, moved), lines)

    lines = [f"{one.name}: {one.state} ({one.why})" for one in plan.moved]
    lines.append(f"the next start goes on from {plan.back_to.name}")
    preview = Outcome(_moves(plan, []))
    return Change(lines, f"Move {counted(len(plan.moved), 'checkpoint')} aside?", apply, preview)


@app.command()
def beat(context: Annotated[RunContext, NO_RUN]) -> Outcome:
    """Print tr11_beat.py, by which a training says by itself where it is.

    Copy it beside the script: it needs nothing but Python 3.8, and does nothing where tr11 has not
    started the training. Then each rank is seen, not only the one that writes the log.

    Examples:
      tr11 trainer beat > tr11_beat.py
    """
    text = BEAT.read_text(encoding="utf-8")
    return Outcome(lines=text.splitlines())


def _settled(rules: CheckpointRules, place: Path, world_size: int | None) -> CheckpointSurvey:
    """The checkpoints once none is being written, or after twice the time that a save may pause."""

    def look(now: float) -> CheckpointSurvey:
        return _look(rules, place, world_size)

    return settled(look, rules.quiet)


def _moves(plan: Aside | None, moved: list[Path]) -> dict[str, object]:
    """The document of a plan, and of what came of it."""
    found: dict[str, object] = {"schema": SCHEMA, "broken": [], "goes_back_to": None}
    if plan is not None:
        found["broken"] = [one.name for one in plan.moved]
        found["goes_back_to"] = plan.back_to.name
    return {**found, "moved": [str(one) for one in moved]}


def _taken(found: CheckpointSurvey) -> str:
    if found.taken is None:
        return "there is no checkpoint"
    return f"it takes {found.taken.name}, which is {found.taken.state}"


class Seen(Record):
    """What was found of one trainer. `log`, `checkpoints`: None where none was given; `end`: None
    where no one said how its launcher left. `log_changed`: when the log was last written, seconds
    since the epoch.
    """

    dialect: Dialect
    log: LogReading | None
    end: EndMeaning | None
    checkpoints: CheckpointSurvey | None
    log_changed: float = 0.0

    @property
    def conflict(self) -> str:
        """What went wrong at the start of this log, or would at the next one; "" for nothing."""
        if self.checkpoints is None:
            return ""
        passed_over = self._passed_over(self.checkpoints.wanted)
        if passed_over:
            return f"it began with random weights, though {passed_over} was there and is whole"
        return self.checkpoints.conflict

    def _passed_over(self, wanted: FoundCheckpoint | None) -> str:
        """The whole checkpoint that this launch did not take; "" where it may have written it
        itself, or a later launch may have.
        """
        log = self.log
        if log is None or wanted is None or wanted.step is None or log.last is None:
            return ""
        began_anew = log.marks.get("scratch", 0) > 0 and not log.marks.get("saved", 0)
        if began_anew and wanted.step > log.last and wanted.changed < self.log_changed:
            return wanted.name
        return ""

    def unknown(self) -> Iterator[str]:
        """What was looked for and not found, a line each."""
        log, rules = self.log, self.dialect.checkpoints
        if log is not None and log.last is None:
            yield f"steps: no line of a step in {counted(log.lines, 'line')}; is the dialect right?"
        if log is not None and log.last is not None and log.total is None:
            yield "its last step: the log does not tell, so that no end is known to be the last"
        if log is not None and not self.dialect.marks:
            yield "when it loads and saves: its dialect has no marks"
        if log is not None and log.last is not None and log.loss is None:
            yield "its loss: not in the lines of its steps"
        if rules is None:
            yield "its checkpoints: the dialect says nothing of them"
        if self.checkpoints is not None and self.checkpoints.unsure:
            yield self.checkpoints.unsure
        if self.dialect.stop is None:
            yield "how it is stopped: the dialect does not say"

    def document(self) -> dict[str, object]:
        """All of it as JSON values."""
        found: dict[str, object] = {"schema": SCHEMA, "dialect": self.dialect.name}
        for name, value in (
            ("log", self.log),
            ("end", self.end),
            ("checkpoints", self.checkpoints),
        ):
            found[name] = None
            if value is not None:
                found[name] = document(value)
        found["conflict"] = self.conflict
        return {**found, "unknown": list(self.unknown())}


# ----------------------------------------------------------------------------- looking
def _dialect(named: str | None, log: Path | None) -> Dialect:
    """The dialect that was named, else the one that the log is in. Raises Refusal."""
    if named is not None:
        return dialect_named(named)
    if log is None:
        raise WrongUsage(f"--dialect is missing: give one of {', '.join(names())}")
    require_file(log, "--log")
    head = in_time(partial(_head, log))
    found = dialect_of_log(head)
    if found is not None:
        return found
    raise WrongUsage(
        f"{log}: does not tell which trainer wrote it; give --dialect, one of {', '.join(names())}"
    )


def _head(log: Path) -> bytes:
    with _opened(log) as file:
        head: bytes = file.read(_HEAD)
    return head


def _read_log(log: Path, dialect: Dialect) -> LogReading:
    """What a log says. Raises Refusal where it cannot be read."""
    require_file(log, "--log")
    with _opened(log) as file, byte_progress(log.stat().st_size) as advance:
        blocks = _blocks(partial(file.read, _BLOCK), advance)
        return TrainerLogReader(dialect).read(lines_of(blocks))


@contextmanager
def _opened(log: Path) -> Iterator[Any]:
    """A log, unpacked. Raises Unobserved where it cannot be read."""
    try:
        with opened(log) as file:
            yield file
    except OSError as error:
        raise Unobserved(f"{log}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise Unobserved(str(error)) from None


def _blocks(read: Callable[[], bytes], advance: Callable[[int], None]) -> Iterator[bytes]:
    position = 0
    while block := read():
        position += len(block)
        advance(position)
        yield block


def _place(folder: Path, dialect: Dialect) -> tuple[CheckpointRules, Path]:
    """The rules of a dialect, and the folder that its checkpoints lie in. Raises WrongUsage."""
    rules = dialect.checkpoints
    if rules is None:
        raise WrongUsage(f"--folder: the dialect {dialect.name} says nothing of checkpoints")
    if not folder.is_dir():
        raise WrongUsage(f"--folder {folder}: is no folder; a training makes it with its first run")
    inner = folder / rules.folder
    if rules.folder and inner.is_dir():
        return rules, inner.resolve()
    return rules, folder.resolve()


def _look(rules: CheckpointRules, place: Path, world_size: int | None) -> CheckpointSurvey:
    """The checkpoints of a folder, now. Raises Refusal where it cannot be read."""
    try:
        look = partial(survey, rules, place, world_size=world_size, now=time.time())
        return in_time(look)
    except OSError as error:
        raise Unobserved(f"{place}: cannot be read: {cause(error)}") from None


# ----------------------------------------------------------------------------- screens
def _facts(dialect: Dialect) -> dict[str, object]:
    found = document(dialect)
    del found["examples"]
    return found


def _stop_words(dialect: Dialect) -> str:
    stop = dialect.stop
    if stop is None:
        return "not known"
    if stop.how == "next checkpoint":
        return "no: after the next checkpoint"
    if stop.needs:
        return f"{stop.how}, if {stop.needs}"
    return stop.how


def _belief(dialect: Dialect) -> str:
    """Whether it would take a broken newest checkpoint, in words."""
    rules = dialect.checkpoints
    if rules is None or rules.believes is None:
        return "not known"
    if rules.tracker:
        return f"what {rules.tracker} names"
    if rules.newest == "told":
        return "what its command says"
    if rules.believes:
        return "where its own marks are there"
    return "yes"


def _page(dialect: Dialect) -> Iterator[str]:
    yield dialect.title
    yield f"  read in          {dialect.versions or 'no version'}"
    yield f"  source           {dialect.source or 'none'}"
    yield f"  lines of steps   {dialect.step_line or dialect.steps or 'not known'}"
    for mark, pattern in dialect.marks.items():
        yield f"  {mark:<16} {pattern}"
    rules = dialect.checkpoints
    if rules is not None:
        yield f"  checkpoints      {rules.folder and rules.folder + '/'}{rules.name}"
        for rule in rules.complete:
            yield f"    whole if       {rule}"
        for rule in rules.resumable:
            yield f"    resumable if   {rule}"
        yield f"    it takes       {rules.newest}; a broken one: {_belief(dialect)}"
        yield f"    deleted by     {rules.deleted_by}"
        yield f"    other sizes    {rules.world_size}"
        if rules.rewritten:
            yield "    a save         overwrites the one before, in the same file"
    yield f"  stop and save    {_stop_words(dialect)}"
    if dialect.stop is not None and dialect.stop.agrees is False:
        yield "                   its ranks do not agree on a step: signal all at one moment"
    if dialect.first:
        yield f"  a first start    {' '.join(dialect.first)}"
    if dialect.resume:
        yield f"  a resume         {' '.join(dialect.resume)}"
    if dialect.scratch_if_missing:
        yield "  no checkpoint    it begins with random weights, and does not complain"
    command = dialect.command
    for title, words in (
        ("its folder", command.folder),
        ("last step", command.steps),
        ("saves every", command.interval),
        ("told to resume", command.resume),
    ):
        if words:
            yield f"  {title:<16} {', '.join(words)}"
    for word in dialect.supervisors:
        yield f"  starts it again  {word}"
    for end in dialect.ends.lines:
        yield f"  {end.means:<16} {end.line}"
    for code, sequel in dialect.ends.exit.items():
        yield f"  status {code:<9} {sequel}"
    for note in dialect.notes:
        yield f"  note             {note}"


def _screen(seen: Seen, log: Path | None) -> Iterator[str]:
    yield f"trainer      {seen.dialect.title}"
    if seen.log is not None:
        yield f"log          {log}: {counted(seen.log.lines, 'line')}"
        yield from _log_lines(seen.log)
    if seen.end is not None:
        yield f"  end        {seen.end.reason}: {seen.end.why}"
        yield f"  then       {seen.end.sequel}"
        if seen.end.reason == "error":
            yield f"             what went wrong: tr11 diagnose {log}"
    if seen.checkpoints is not None:
        yield from _checkpoint_lines(seen.checkpoints)
    title = "not known"
    for line in seen.unknown():
        yield f"{title:<12} {line}"
        title = ""


def _log_lines(log: LogReading) -> Iterator[str]:
    if log.last is not None:
        steps = f"{log.first} to {log.last} of {log.total or '?'}"
        yield f"  steps      {steps}, in the words of {', '.join(log.words)}"
    if log.loss is not None:
        yield f"  loss       {log.loss:g} at the last"
    if log.resumed_at is not None:
        yield f"  began      after step {log.resumed_at}"
    if log.marks:
        marks = ", ".join(f"{count} {mark}" for mark, count in log.marks.items())
        yield f"  marks      {marks}"
    if log.ending_line:
        yield f"  end line   {log.ending}: {log.ending_line[:_END_LINE]}"


def _checkpoint_lines(found: CheckpointSurvey) -> Iterator[str]:
    yield f"checkpoints  {len(found.found)} in {found.folder}"
    left_out = len(found.found) - _MOST_SHOWN
    if left_out > 0:
        yield f"  ... {left_out} older"
    for one in found.found[-_MOST_SHOWN:]:
        line = f"  {one.name}: {one.state}, {size(one.bytes)}, {timestamp(one.changed, None)}"
        if one.why:
            line += f"; {one.why}"
        yield line
    if found.taken is not None:
        yield f"  it takes   {found.taken.name}"
