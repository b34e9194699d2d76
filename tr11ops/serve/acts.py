"""What a person may do from the page: the commands themselves, with their plan and their journal."""

from __future__ import annotations

import re
from functools import partial

from msgspec.structs import replace

from tr11ops.api import Answer, Run
from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.rundir.fallback import write_or_fall_back
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from tr11ops.serve.poller import SHIFT_TAKEN
from trainer.contract.record import Record

AT_ONCE = frozenset({"ack", "snooze", "shift"})  # what takes nothing away is done without a preview
PREVIEWED = frozenset({"kill", "pause", "resume", "exclude"})
ENTRY = "served-act"
_FINGERPRINTS = re.compile(r"[0-9a-f]{4,40}( [0-9a-f]{4,40}){0,19}")
_LENGTH = re.compile(r"[0-9]{1,3}[mhd]")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]{0,200}")
LONGEST_REASON = 300


class WebAct(Record):
    """What a form asks for, of which run (`key`), and who. `alert`: a fingerprint, or several with
    spaces between them. `source`: where the form was. `shown`: what stands for the plan that the
    person has seen, "" for none. Texts are checked by `checked`.
    """

    key: str
    action: str
    who: str
    reason: str = ""
    alert: str = ""
    length: str = "2h"
    nodes: str = ""
    source: str = "the page"
    shown: str = ""

    def checked(self) -> WebAct:
        """Itself. Raises WrongUsage for what no form of the page sends."""
        if self.action not in AT_ONCE | PREVIEWED:
            raise WrongUsage("the page has no such button")
        if self.action in {"ack", "snooze"} and not _FINGERPRINTS.fullmatch(self.alert):
            raise WrongUsage("alert: is no fingerprint")
        if self.action == "snooze" and not _LENGTH.fullmatch(self.length):
            raise WrongUsage("length: use 30m, 2h or 1d")
        if self.action == "exclude" and not _NODE.fullmatch(self.nodes):
            raise WrongUsage("nodes: give names or a host list: node[01-03]")
        if len(self.reason) > LONGEST_REASON or not self.reason.isprintable():
            raise WrongUsage(f"reason: one line of at most {LONGEST_REASON} characters")
        if self.action in {"kill", "exclude"} and not self.reason.strip():
            raise WrongUsage("reason: say why, it is kept in the journal")
        return self

    @property
    def parts(self) -> tuple[str, ...]:
        """All of it, for the signature of a preview."""
        asked = (self.key, self.action, self.who, self.reason, self.alert, self.length, self.nodes)
        return (*asked, self.shown)

    @property
    def words(self) -> str:
        """The change in words."""
        return {
            "ack": f"acknowledge {self.alert}",
            "snooze": f"snooze {self.alert} for {self.length}",
            "kill": "save and stop the run",
            "pause": "stop after this task",
            "resume": "let the run go on",
            "exclude": f"exclude {self.nodes}",
        }.get(self.action, self.action)


def carry_out(run: Run, act: WebAct, dry_run: bool = False) -> Answer:
    """Do it, or show what would be done. The run's journal names the person, besides what the
    command itself writes there. Raises Refusal and what else `Run.command` raises.
    """
    reason = f"{act.who}, from {act.source}{f': {act.reason}' if act.reason else ''}"
    if act.action == "shift":
        _record(run.directory, SHIFT_TAKEN, act, {})
        return Answer(0, {}, (f"{act.who} has the shift",))
    if not dry_run:
        _record(run.directory, ENTRY, act, {"action": act.action, "asked": True})
    answer = _answer(run, act, reason, dry_run)
    if not dry_run:
        data = {"action": act.action, "exit_code": answer.exit_code}
        _record(run.directory, ENTRY, act, data)
    if answer.lines:
        return answer
    return replace(answer, lines=(f"{act.who}: {act.words}",))


def _answer(run: Run, act: WebAct, reason: str, dry_run: bool) -> Answer:
    match act.action:
        case "ack":
            return run.acknowledge(act.alert.split(), act.who, reason)
        case "snooze":
            return run.snooze(act.alert.split(), act.length, reason)
        case "exclude":
            words = ["nodes", "exclude", act.nodes]
        case _:
            words = [act.action]
    return run.command(words, reason, dry_run, plan="" if dry_run else act.shown)


def _record(directory: RunDirectory, kind: str, act: WebAct, data: dict[str, object]) -> None:
    """Raises Refusal where no journal can be written: nothing is done then that no one can see."""
    told = {**data, "alert": act.alert, "nodes": act.nodes}
    write = partial(_write, kind, act, told)
    try:
        write_or_fall_back(directory, write)
    except OSError as error:
        raise Refusal(
            f"the journal cannot be written ({error.strerror}): nothing was done"
        ) from None


def _write(kind: str, act: WebAct, data: dict[str, object], directory: RunDirectory) -> None:
    Journal(directory.journal).write(kind, act.reason, data, act.who)
