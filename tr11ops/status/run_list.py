"""Several runs at once: which run directories lie below some folders, and what each one's status
says in short.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr11ops.alerts.state import AlertCare, OnCall
from tr11ops.base.observed import known, observed
from tr11ops.base.units import counted, duration
from tr11ops.cluster.base import ACTIVE_STATES
from tr11ops.runcard.find import CARD_FILE, SUBMISSIONS
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.published import care_of, on_call_of, rows, text
from tr11ops.status.run_use import RunUse, UseTotal, total_use
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.documents import document
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

if TYPE_CHECKING:
    from tr11ops.alerts.state import HeldVerdict
    from tr11ops.runcard.card import RunCard

SCHEMA = 1
_PROGRESS = ("iteration", "total_iterations", "loss", "remaining_seconds", "eta", "done_again")
_SHOWN = ("verdict", "why", "exit_code", "watchdog_fault", *_PROGRESS, "on_call")


# Of runs that need a person equally: the worst first.
_WORST_FIRST = (
    VerdictWord.DOWN,
    VerdictWord.STALLED,
    VerdictWord.AT_RISK,
    VerdictWord.SLOW,
    VerdictWord.UNKNOWN,
    VerdictWord.STOPPING,
    VerdictWord.STOPPED,
    VerdictWord.STARTING,
    VerdictWord.QUEUED,
    VerdictWord.HEALTHY,
    VerdictWord.FINISHED,
)
_BY_EXIT_CODE = {1: 0, 3: 1, 0: 2}
MOST_NAMED = 5  # runs in a sentence; more are counted


def urgency(word: VerdictWord, exit_code: int) -> tuple[int, int]:
    """The place of a run among others, the least first: what needs a person, what could not be
    observed, then the rest, the worst verdict first. Lists, pages and screens all go by it.
    """
    return _BY_EXIT_CODE.get(exit_code, 1), _WORST_FIRST.index(word)


def verdict_counts(runs: Iterable[tuple[str, VerdictWord, int]]) -> str:
    """Of some runs, by name, verdict and exit code: how many need a person, and what the others are."""
    found = sorted((urgency(word, code), word, name) for name, word, code in runs)
    are_named = len(found) <= MOST_NAMED
    asking = [(word, name) for (place, _), word, name in found if not place]
    others = [(word, name) for (place, _), word, name in found if place]
    if asking:
        said = f"{counted(len(asking), 'needs', 'need')} a person ({_by_word(asking, are_named)})"
    elif any(word is VerdictWord.UNKNOWN for word, _ in others):
        said = "none is known to need a person"
    else:
        said = "none needs a person"
    counts = f"{counted(len(found), 'run')}: {said}"
    return "; ".join(filter(None, (counts, _by_word(others, are_named))))


def _by_word(runs: Iterable[tuple[VerdictWord, str]], are_named: bool) -> str:
    if are_named:
        return ", ".join(f"{name} {word}" for word, name in runs)
    words = Counter(word for word, _ in runs)
    return ", ".join(f"{count} {word}" for word, count in words.items())


def unwatched(word: VerdictWord, fault: object) -> str:
    """Why nothing looks at a run regularly, as it is said beside the verdict; "" where something does,
    where that is not known, and of a finished training.
    """
    if word is VerdictWord.FINISHED:
        return ""
    return text(fault)


def alerts_words(cares: Sequence[AlertCare], on_call: OnCall | None, now: float) -> str:
    """How many alerts are open, and who has those whose fault is found, or was told of it. What is said
    of the others is told apart: it holds for none that a person has to act on.
    """
    found = [care for care in cares if care.is_found]
    closing = [care for care in cares if not care.is_found]
    said = []
    if found:
        untaken = [care for care in found if not care.holder]
        who = "; ".join(dict.fromkeys(care.words(on_call, now) for care in found))
        if untaken and len(found) > 1:
            some = "any" if len(untaken) == len(found) else len(untaken)
            who = f"no one has taken {some} of them"
            if on_call is not None:
                who += min((care.called(on_call) for care in untaken), key=len)
        said.append(f"{counted(len(found), 'is', 'are')} open: {who}")
    if len(closing) == 1:
        said.append(f"1 is {closing[0].words(on_call, now)}")
    elif closing:
        said.append(f"{len(closing)} are no longer found, and close by themselves")
    return "; ".join(said)


class ListedRun(Record):
    """A run directory, and its status; `status` is None where it could not be read, and `why` says
    why not. `use` is what it holds and costs, None where that was not looked at.
    """

    directory: Path
    status: Mapping[str, Any] | None
    why: str = ""
    use: RunUse | None = None

    @property
    def told(self) -> Mapping[str, Any]:
        """The status; nothing where it could not be read."""
        return self.status or {}

    @property
    def exit_code(self) -> int:
        return int(self.told.get("exit_code", 3))

    @property
    def word(self) -> VerdictWord:
        return VerdictWord(self.told.get("verdict", "unknown"))

    @property
    def place(self) -> tuple[tuple[int, int], str]:
        """By what runs are listed."""
        return urgency(self.word, self.exit_code), str(self.directory)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that its running jobs hold."""
        held = {
            node
            for job in self.told.get("jobs") or ()
            if job["state"] in ACTIVE_STATES
            for node in job["nodes"]
        }
        return tuple(sorted(held))

    @property
    def excluded(self) -> tuple[str, ...]:
        """The nodes that it must not use."""
        return tuple(entry["node"] for entry in self.told.get("exclusions") or ())

    @property
    def cares(self) -> tuple[AlertCare, ...]:
        """Who looks after each of its open alerts, the most severe first."""
        return tuple(map(care_of, rows(self.told.get("alerts"))))

    @property
    def owners(self) -> tuple[str, ...]:
        """Who has its alerts; none where no one has taken any."""
        return tuple(dict.fromkeys(care.holder for care in self.cares if care.holder))

    @property
    def on_call(self) -> OnCall | None:
        """Who is told first; None where that is not known."""
        return on_call_of(self.told.get("on_call"))

    def document(self) -> dict[str, Any]:
        """For --json."""
        run = self.told.get("run", {})
        return {
            "directory": str(self.directory),
            "name": run.get("name"),
            "variant": run.get("variant"),
            **{key: self.told.get(key) for key in _SHOWN},
            "verdict": self.word.value,
            "why": self.told.get("why", self.why),
            "exit_code": self.exit_code,
            **self._operation(),
        }

    def _operation(self) -> dict[str, Any]:
        """Who is asked, since when, and what it holds and costs; null where that is not known."""
        values: dict[str, Any] = dict.fromkeys(RunUse.__struct_fields__)
        if self.use is not None:
            values = document(self.use)
        since = self.told.get("verdict_since")
        return {
            "verdict_since": since,
            "owners": list(self.owners),
            **values,
            "nodes": list(self.nodes),
            "excluded_nodes": list(self.excluded),
        }


class RunList(Record):
    """Several runs, what needs a person first, and what they hold together."""

    runs: tuple[ListedRun, ...]

    @classmethod
    def of(cls, found: Iterable[ListedRun]) -> RunList:
        return cls(tuple(sorted(found, key=attrgetter("place"))))

    @property
    def exit_code(self) -> int:
        """1 where a run needs a person, else 3 where one could not be observed, else 0."""
        codes = {run.exit_code for run in self.runs}
        return next((code for code in (1, 3) if code in codes), 0)

    @property
    def teams(self) -> dict[str, tuple[ListedRun, ...]]:
        """The runs of each team, by its name; "" for those that name none."""
        found: dict[str, list[ListedRun]] = {}
        for run in self.runs:
            team = "" if run.use is None else run.use.team
            found.setdefault(team, []).append(run)
        return {team: tuple(found[team]) for team in sorted(found)}

    @property
    def shared_nodes(self) -> dict[str, tuple[str, ...]]:
        """Nodes that more than one run holds now, and which runs."""
        return _in_several(self.runs, "nodes")

    @property
    def shared_exclusions(self) -> dict[str, tuple[str, ...]]:
        """Nodes that more than one run must not use, and which runs."""
        return _in_several(self.runs, "excluded")

    def document(self) -> dict[str, object]:
        """For --json."""
        return {
            "schema": SCHEMA,
            "runs": [run.document() for run in self.runs],
            "teams": {team: document(total(runs)) for team, runs in self.teams.items()},
            "total": document(total(self.runs)),
            "shared_nodes": self.shared_nodes,
            "shared_exclusions": self.shared_exclusions,
        }


def _in_several(runs: Sequence[ListedRun], name: str) -> dict[str, tuple[str, ...]]:
    by_node: dict[str, list[str]] = {}
    for run in runs:
        for node in dict.fromkeys(getattr(run, name)):
            by_node.setdefault(node, []).append(str(run.directory))
    return {node: tuple(who) for node, who in sorted(by_node.items()) if len(who) > 1}


def total(runs: Sequence[ListedRun]) -> UseTotal:
    """What some runs hold and cost together."""
    nodes = {node for run in runs for node in run.nodes}
    return total_use([run.use for run in runs if run.use is not None], len(runs), len(nodes))


def launches(root: Path) -> tuple[Path, ...]:
    """The folders of a run's launches, the newest first. Raises OSError."""
    return tuple(sorted((root / SUBMISSIONS).iterdir(), reverse=True))


def kept_verdict(root: Path) -> HeldVerdict | None:
    """What the watchdog's looks at a run have concluded; None where none is on record, or it cannot
    be read. Neither card nor scheduler is asked.
    """
    from tr11ops.alerts.store import current_alert_state

    directory = RunDirectory(RunPaths(root, "", ""), root)
    state = known(observed(partial(current_alert_state, directory)), None)
    return None if state is None else state.verdict


def kept_words(kept: HeldVerdict | None, moment: float) -> str:
    """The same as a sentence at `moment`, which says how old it is."""
    if kept is None or not kept.word:
        return "no watchdog has looked yet"
    return f"the watchdog found it {kept.word} {duration(moment - kept.judged)} ago"


def newest_card(root: Path) -> RunCard:
    """The card of the newest launch; of a job that is only watched, the one that was made for it.
    Raises CardError, OSError or ValueError where there is none that can be read.
    """
    from tr11ops.runcard.card import card_from_resolved, load_card  # the slowest import of a list

    for folder in launches(root):
        value = read_json(folder / "card.json")
        if value is None:
            continue
        card = card_from_resolved(value, str(folder / "card.json"))
        if card.paths.root.resolve() != root.resolve():
            raise ValueError(f"its card names another directory, {card.paths.root}")
        return card
    if (root / CARD_FILE).is_file():
        return load_card(root / CARD_FILE, (), os.environ)
    raise ValueError("nothing was launched there")
