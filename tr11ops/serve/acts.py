"""What a person may do from the page: the commands themselves, with their plan and their journal."""

from __future__ import annotations

import re

from msgspec.structs import replace

from tr11ops.alerts.mail_route import is_address
from tr11ops.api import Answer, Run
from tr11ops.base.errors import Refusal, WrongUsage
from tr11ops.rundir.fallback import write_or_fall_back
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.published import rows, text
from trainer.contract.record import Record

AT_ONCE = frozenset({"ack", "snooze"})  # what takes nothing away is done without a preview
WORDS_DONE = {
    "ack": "Acknowledged by {0.who}",
    "snooze": "Snoozed for {0.length} by {0.who}",
    "kill": "{0.who} has asked the run to save and stop",
    "pause": "{0.who} has asked the run to stop after this task",
    "resume": "{0.who} has taken away what kept the run from going on",
    "exclude": "{0.who} has excluded {0.nodes}: nothing that starts from now on takes it",
    "shift": "{0.who} has taken the shift",
    "shift-back": "{0.who} has given the shift back",
}
SHIFTS = {"shift": "take the shift", "shift-back": "give the shift back"}
UNASKED = AT_ONCE | SHIFTS.keys()  # commands that have no --yes
ENTRY = "served-act"
_INCIDENTS = re.compile(r"[0-9a-f]{4,40}-[0-9a-f]{1,16}( [0-9a-f]{4,40}-[0-9a-f]{1,16}){0,19}")
_LENGTH = re.compile(r"[0-9]{1,3}[mhd]")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]{0,200}")
LONGEST_REASON = 300


class WebAct(Record):
    """What a form asks for, of which run (`key`), and who. `alert`: the incident that was shown (a later
    one of its kind is none of this form's), or several with spaces between them. `source`: where the
    form was. `shown`: what stands for the plan that the person has seen, "" for none. Texts are
    checked by `checked`. `address`: who takes a shift, "" for `who`.
    """

    key: str
    action: str
    who: str
    reason: str = ""
    alert: str = ""
    length: str = "2h"
    nodes: str = ""
    address: str = ""
    source: str = "the page"
    shown: str = ""

    def checked(self) -> WebAct:
        """Itself. Raises WrongUsage for what no form of the page sends."""
        if self.action not in WORDS_DONE:
            raise WrongUsage("the page has no such button")
        if self.action in AT_ONCE and not _INCIDENTS.fullmatch(self.alert):
            raise WrongUsage("alert: names no incident; open the run's page again")
        if self.action == "snooze" and not _LENGTH.fullmatch(self.length):
            raise WrongUsage("length: use 30m, 2h or 1d")
        if self.address and not is_address(self.address):
            raise WrongUsage("address: give your mail address, like ana@example.org")
        if self.action == "exclude" and not _NODE.fullmatch(self.nodes):
            raise WrongUsage("nodes: give names or a host list: node[01-03]")
        if len(self.reason) > LONGEST_REASON or not self.reason.isprintable():
            raise WrongUsage(f"reason: one line of at most {LONGEST_REASON} characters")
        return self

    @property
    def words(self) -> str:
        """The change in words."""
        return {
            "kill": "save and stop",
            "pause": "stop after this task",
            "resume": "let what is queued go on",
            "exclude": f"exclude {self.nodes}",
            **SHIFTS,
        }.get(self.action, self.action)


def carry_out(run: Run, act: WebAct, dry_run: bool = False) -> Answer:
    """Do it, or show what would be done. The run's journal names the person, here and in what the
    command itself writes there. Raises Refusal and what else `Run.command` raises.
    """
    if not dry_run:
        _record(run.directory, act, {"action": act.action, "asked": True})
    answer = _answer(run, act, dry_run)
    if not dry_run:
        _record(run.directory, act, {"action": act.action, "exit_code": answer.exit_code})
    if dry_run or answer.exit_code:
        return replace(answer, lines=answer.lines or (act.words,))
    done = WORDS_DONE[act.action].format(act)
    titles = [text(one.get("title")) for one in rows(answer.document.get("alerts"))]
    said = [f"{done}: {title}" for title in titles] or [done]
    return replace(answer, lines=(*said, *answer.lines))


def _answer(run: Run, act: WebAct, dry_run: bool) -> Answer:
    match act.action:
        case "ack":
            words = ["alerts", "ack", *act.alert.split()]
        case "snooze":
            words = ["alerts", "snooze", *act.alert.split(), "--for", act.length]
        case "exclude":
            words = ["nodes", "exclude", act.nodes]
        case "shift":
            words = ["alerts", "take-shift", "--as", act.address or act.who]
        case "shift-back":
            words = ["alerts", "end-shift"]
        case _:
            words = [act.action]
    plan = "" if dry_run else act.shown
    reason = f"from {act.source}{f': {act.reason}' if act.reason else ''}"
    asks = act.action not in UNASKED
    return run.command(words, reason, dry_run, asks=asks, plan=plan, who=act.who)


def _record(directory: RunDirectory, act: WebAct, data: dict[str, object]) -> None:
    """Raises Refusal where no journal can be written: nothing is done then that no one can see."""
    told = {**data, "alert": act.alert, "nodes": act.nodes if act.action == "exclude" else ""}

    def write(folder: RunDirectory) -> None:
        Journal(folder.journal).write(ENTRY, act.reason, told, act.who)

    try:
        write_or_fall_back(directory, write)
    except OSError as error:
        raise Refusal(
            f"the journal cannot be written ({error.strerror}): nothing was done"
        ) from None
