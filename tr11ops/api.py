"""tr11 from Python: open a run, look at it, read its steps, launch and stop it (docs/reference/api.md).

A look is the one of `tr11 status`, in this process. What changes a run is the command itself, as a
person would type it, in a process of its own: the same checks, the same plan, the same journal.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tr11ops.base import deadline
from tr11ops.base.errors import Late, Refusal, SchedulerError
from tr11ops.base.invocation import PLAN_CHANGED, PLAN_MARK
from tr11ops.base.observed import Unknown
from tr11ops.cluster.base import Overview
from tr11ops.observe.readers import check_scheduler_word, kind_to_watch, looking, open_scheduler
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.errors import USAGE, Tr11Error
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record

if TYPE_CHECKING:
    from tr11ops.base.processes import ProbeOutput
    from tr11ops.observe.snapshot import RunFacts
    from tr11ops.runcard.card import RunCard
    from tr11ops.status.assessment import Assessment
    from tr11ops.watchdog.verdict import Verdict
    from trainer.contract.metrics_record import MetricsRecord

COMMAND_SECONDS = 900.0  # of a command that changes something; it has deadlines of its own


class Answer(Record):
    """What a command said. `exit_code` as documented: 0 fine, 1 needs a person, 2 wrong usage, 3
    could not observe. `document` is what its `--json` printed, {} where it printed none; `lines`
    are the plan and the remarks. `plan`: what stands for the plan that a dry run has shown.
    """

    exit_code: int
    document: dict[str, Any]
    lines: tuple[str, ...]
    plan: str = ""

    @property
    def has_changed(self) -> bool:
        """Whether nothing was done because the plan is no longer the one that was shown."""
        return bool(self.lines) and self.lines[-1] == PLAN_CHANGED

    def checked(self) -> Answer:
        """Itself. Raises Refusal, with the last line and the exit code, where the command did not
        do what was asked.
        """
        if self.exit_code:
            raise Refusal(self.lines[-1] if self.lines else "no answer", self.exit_code)
        return self


class Run(Record):
    """A run, and through which scheduler it is looked at; each `look` is a fresh observation.

    `typed` is the card as commands take it (`--run`), "" for the folder's own. `is_copy`: the
    folder is not where the run's jobs write (a mount elsewhere, a mirror), so nothing can be
    changed from here.
    """

    card: RunCard
    directory: RunDirectory
    facts: RunFacts
    reader: Overview | Unknown
    typed: str = ""
    scheduler: str = "auto"
    overrides: tuple[str, ...] = ()
    is_copy: bool = False

    @property
    def name(self) -> str:
        return self.card.run.name

    # ------------------------------------------------------------------------- looks
    def look(self, read_digests: bool = False) -> Assessment:
        """One look within its deadline; one that is late saw nothing, and says so.

        `read_digests`: every byte of the newest checkpoint is read too, however long that takes.
        """
        if read_digests:
            return self._look(True)
        try:
            return deadline.within(deadline.LOOK_SECONDS, partial(self._look, False))
        except Late:
            from tr11ops.status.assessment import nothing_seen

            why = deadline.late_words(self.directory.root, deadline.LOOK_SECONDS)
            return nothing_seen(self.facts, time.time(), Unknown(why))

    def _look(self, read_digests: bool) -> Assessment:
        from tr11ops.status.assessment import assess
        from tr11ops.status.extra_observations import observe_extra

        beside = partial(observe_extra, self.directory, self.card)
        return assess(self.directory, self.facts, self.reader, beside, read_digests=read_digests)

    def document(self) -> dict[str, Any]:
        """A fresh look as `tr11 status --json` prints it (docs/reference/status-json.md)."""
        return self.look().document()

    def verdict(self) -> Verdict:
        """A fresh look in one word (`.word`), with the sentence that says why (`.why`)."""
        return self.look().verdict

    def steps(self) -> Iterator[MetricsRecord]:
        """Every step on record, the oldest first, one in memory at a time; a step that was trained
        again comes again. `values` are the keys of `metrics.jsonl`; times are seconds since the
        epoch.

        Raises OSError as the file system does; no file has no steps.
        """
        from trainer.contract.metrics_record import records

        return (one for one in records(self.directory.paths.metrics) if one.is_step)

    # ------------------------------------------------------------------------- changes
    def launch(self, array: str = "", reason: str = "", dry_run: bool = False) -> Answer:
        """Check the card and submit it, as `tr11 launch` does; `array`: "1-10" for ten tasks."""
        return self.command(["launch", *_option("--array", array)], reason, dry_run)

    def kill(
        self, reason: str = "", now: bool = False, wait: bool = False, dry_run: bool = False
    ) -> Answer:
        """Save and stop, as `tr11 kill` does; `now`: end within seconds, unsaved; `wait`: until it
        has ended.
        """
        flags = ["--now"] * now + ["--wait"] * wait
        return self.command(["kill", *flags], reason, dry_run)

    def pause(self, reason: str = "", dry_run: bool = False) -> Answer:
        """Stop after this task, as `tr11 pause` does."""
        return self.command(["pause"], reason, dry_run)

    def resume(self, reason: str = "", dry_run: bool = False) -> Answer:
        """Let a stopped or paused run go on, as `tr11 resume` does."""
        return self.command(["resume"], reason, dry_run)

    def exclude(self, nodes: Sequence[str], reason: str = "", dry_run: bool = False) -> Answer:
        """Keep the run off these nodes, as `tr11 nodes exclude` does."""
        return self.command(["nodes", "exclude", *nodes], reason, dry_run)

    def acknowledge(self, alert: str | Sequence[str], who: str = "", reason: str = "") -> Answer:
        """Say that someone works on an alert (its fingerprint) or several, as `tr11 alerts ack` does."""
        words = ["alerts", "ack", *_several(alert), *_option("--as", who)]
        return self.command(words, reason, asks=False)

    def snooze(self, alert: str | Sequence[str], length: str = "2h", reason: str = "") -> Answer:
        """No message about an alert or several for so long, as `tr11 alerts snooze` does."""
        words = ["alerts", "snooze", *_several(alert), "--for", length]
        return self.command(words, reason, asks=False)

    def command(
        self,
        words: Sequence[str],
        reason: str = "",
        dry_run: bool = False,
        asks: bool = True,
        plan: str = "",
        who: str = "",
        as_text: bool = False,
    ) -> Answer:
        """Type a command of tr11 that changes this run, with --json and --yes; with `dry_run` only
        its plan comes back. `asks`: False for one that has no --yes. `plan`: that of the answer to a
        dry run; it is carried out only as it was shown. `who`: the person for whom it is typed, whom
        the journal then names in place of this process's user. `as_text`: without --json; the lines
        are all that a person would see.

        Raises Refusal where the folder is a copy, Unanswered where no answer comes.
        """
        if self.is_copy:
            raise Refusal(
                f"{self.directory.root} is a copy: its jobs write to {self.card.paths.root}; "
                "type this where that is"
            )
        options = [] if as_text else ["--json"]
        options += [*_option("--reason", reason), *_option("--acting-for", who)]
        if dry_run:
            options += ["--dry-run", "--as-shown", "?"]
        elif asks:
            options.append("--yes")
        if plan:
            options += ["--as-shown", plan]
        said = self.output_of([*words, *options])
        lines = said.text.splitlines() if as_text else []
        lines += [line.removeprefix("tr11: ") for line in said.error.splitlines() if line]
        mark = next((line for line in lines if line.startswith(PLAN_MARK)), "")
        shown = tuple(line for line in lines if line != mark)
        return Answer(said.status, _document(said.text), shown, mark.removeprefix(PLAN_MARK))

    def output_of(self, words: Sequence[str]) -> ProbeOutput:
        """Type a command of tr11 for this run, in the environment of whoever types it: a job that it
        submits has the same. Raises Unanswered where no answer comes.
        """
        from tr11ops.base.processes import LocalCommands
        from tr11ops.cron.runner import child_environment, tr11_command

        scheduler = [] if "--scheduler" in words else ["--scheduler", self.scheduler]
        line = tr11_command([*words, *scheduler], self._card(), self.overrides)
        return LocalCommands().command(line, COMMAND_SECONDS, child_environment(os.environ))

    def _card(self) -> Path:
        """The card as the command is told it, whatever folder it is typed in."""
        from tr11ops.runcard.card import find_card

        return find_card(self.typed or None, os.environ, Path.cwd()).absolute()


def _several(names: str | Sequence[str]) -> list[str]:
    if isinstance(names, str):
        return [names]
    return list(names)


def _option(name: str, value: str) -> list[str]:
    if value:
        return [name, value]
    return []


def _document(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    if isinstance(value, dict):
        return value
    return {}


# ----------------------------------------------------------------------------- opening
def open_run(
    card: str | Path | None = None,
    overrides: Sequence[str] = (),
    scheduler: str = "auto",
    reader: Overview | Unknown | None = None,
) -> Run:
    """The run of a card: a path, a shipped card's name, or a run directory (what was launched from
    it last); None: as commands find it ($TR11_RUN, else tr11.toml here).

    A run directory that lies elsewhere than its card says is a copy: it is looked at where it is.
    Nothing is created; the scheduler is asked, or the `reader` that several runs share. Raises CardError with every
    problem of the card, WrongUsage for another scheduler than slurm, local and auto.
    """
    from tr11ops.runcard.card import find_card, load_card

    check_scheduler_word(scheduler)
    typed = "" if card is None else str(card)
    path = find_card(typed if card is not None else None, os.environ, Path.cwd())
    found = load_card(path, overrides, os.environ)
    return run_of(found, typed, scheduler, tuple(overrides), path=path, reader=reader)


def run_of(
    card: RunCard,
    typed: str = "",
    scheduler: str = "auto",
    overrides: tuple[str, ...] = (),
    path: Path | None = None,
    reader: Overview | Unknown | None = None,
) -> Run:
    """The run of a card that is read already; `path` is what it was read from, where that may be a
    run directory.
    """
    directory = RunDirectory(card.paths, card.kill_switch)
    is_copy = path is not None and path.is_dir() and path.resolve() != card.paths.root.resolve()
    if is_copy and path is not None:
        directory = _moved(directory, path.absolute())
    # the commands of a scheduler take their time, and so do our own imports: side by side
    if reader is None:
        reader = _reader(card.run.name, kind_to_watch(directory, scheduler))
    from tr11ops.observe.look import facts_of

    facts = facts_of(card, typed)
    if is_copy:
        facts = replace(facts, directory=directory.root, kill_switch=directory.kill_switch)
    return Run(
        card,
        directory,
        facts=facts,
        reader=reader,
        typed=typed,
        scheduler=scheduler,
        overrides=overrides,
        is_copy=is_copy,
    )


def _reader(name: str, kind: str) -> Overview | Unknown:
    from tr11ops.cluster.select import AskedAhead

    try:
        return AskedAhead(looking(open_scheduler(kind)), name)
    except (SchedulerError, OSError) as error:
        return Unknown(f"no {kind} scheduler here: {error}")


def _moved(directory: RunDirectory, root: Path) -> RunDirectory:
    """The same run directory, where it is seen from here."""
    paths = directory.paths
    switch = directory.kill_switch
    if switch.is_relative_to(paths.root):
        switch = root / switch.relative_to(paths.root)
    return RunDirectory(RunPaths(root, paths.name, paths.variant, paths.logs_folder), switch)


def runs_below(folder: str | Path, scheduler: str = "auto") -> Iterator[Run | Refusal]:
    """The runs at and below a folder, four levels down, by name, as `tr11 list` finds them; for one
    whose card cannot be read, why. Raises OSError for a folder that cannot be read.
    """
    from tr11ops.runcard.find import run_directories

    for found in run_directories(Path(folder)):
        try:
            yield open_run(found, scheduler=scheduler)
        except (Tr11Error, OSError, ValueError) as error:
            yield Refusal(f"{found}: {' '.join(str(error).split())}", USAGE)
