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

from tr11ops.alerts.state import AlertCare, HeldVerdict, OnCall
from tr11ops.base.observed import known, observed
from tr11ops.base.units import counted, duration, first_few
from tr11ops.cluster.base import ACTIVE_STATES
from tr11ops.runcard.find import CARD_FILE, SUBMISSIONS
from tr11ops.rundir.paths import RunDirectory
from tr11ops.status.published import cares_of, list_of, on_call_of, rows, table, text, word_of
from tr11ops.status.run_use import RunUse, UseTotal, total_use
from tr11ops.watchdog.verdict import VerdictWord
from trainer.contract.documents import document
from trainer.contract.paths import RunPaths
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

if TYPE_CHECKING:
    from tr11ops.runcard.card import RunCard

SCHEMA = 1
_PROGRESS = ("iteration", "total_iterations", "loss", "remaining_seconds", "eta", "done_again")
_SHOWN = ("verdict", "verdict_since", "why", "exit_code", "watchdog_fault", *_PROGRESS, "on_call")


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


def unwatched(word: VerdictWord, fault: object) -> str:
    """Why nothing looks at a run regularly, as it is said beside the verdict; "" where something does,
    where that is not known, and of a finished training.
    """
    if word is VerdictWord.FINISHED:
        return ""
    return text(fault)


class ListedRun(Record):
    """A run directory, and its status; `status` is None where it could not be read, and `why` says
    why not. `use` is what it holds and costs, None where that was not looked at. `title`: what a screen calls
    it; "" for its directory.
    """

    directory: Path
    status: Mapping[str, Any] | None
    why: str = ""
    use: RunUse | None = None
    title: str = ""

    @property
    def told(self) -> Mapping[str, Any]:
        """The status; nothing where it could not be read."""
        return self.status or {}

    @property
    def exit_code(self) -> int:
        code = self.told.get("exit_code")
        return code if code in (0, 1) else 3

    @property
    def word(self) -> VerdictWord:
        return word_of(self.told.get("verdict"))

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
        """Who looks after what it has: what no one was told of, then its alerts, the most severe first."""
        return cares_of(self.told)

    @property
    def owners(self) -> tuple[str, ...]:
        """Who has its alerts; none where no one has taken any."""
        return tuple(dict.fromkeys(care.holder for care in self.cares if care.holder))

    @property
    def on_call(self) -> OnCall | None:
        """Who is told first; None where that is not known."""
        return on_call_of(self.told.get("on_call"))

    @property
    def slow_words(self) -> str:
        """Which node is slow, where the training is; "" where its document does not tell."""
        slow = table(self.told.get("slow_nodes"))
        if self.word is not VerdictWord.SLOW or not slow:
            return ""
        nodes = [text(name) for name in list_of(slow.get("nodes"))]
        if slow.get("state") == "named":
            return first_few(nodes, 2)
        # until the ranks are compared: of the attempt before
        found = rows(self.told.get("findings"))
        nodes += [text(one.get("subject")) for one in found if one.get("detector") == "slow-node"]
        if nodes:
            return f"perhaps {first_few(dict.fromkeys(nodes), 2)}"
        return "no single node" if slow.get("state") == "none" else "node not known yet"

    def who_has(self, are_told: bool) -> str:
        """Who has what it needs a person for; with `are_told` also who was told where no one has."""
        if self.told.get("alerts") is None:
            return "not known who has it"
        cares = self.cares
        if not all(care.is_told for care in cares):
            return "no one was told yet"
        found = [care for care in cares if care.is_found]
        untaken = [care for care in found if not care.holder]
        if not found:
            return "no alert yet"
        if not untaken:
            return f"{', '.join(dict.fromkeys(care.person for care in found))} has it"
        said = "no one has taken it"
        if len(untaken) < len(found):
            said = f"no one has taken {len(untaken)} of {counted(len(found), 'alert')}"
        told = dict.fromkeys(name for care in untaken for name in care.told)
        if are_told and self.on_call is not None and (told or self.on_call.who):
            said += f"; told: {first_few(told, 2) or 'no one yet'}"
        return said

    def in_short(self, are_told: bool) -> str:
        """Its verdict, the slow node where it is slow, and who has it where it needs a person."""
        notes = [self.slow_words] if self.slow_words else []
        if self.exit_code == 1:
            notes.append(self.who_has(are_told))
        told = f" ({'; '.join(notes)})" if notes else ""
        return f"{self.title or self.directory} {self.word}{told}"

    def document(self) -> dict[str, Any]:
        """For --json; null where something is not known."""
        run = self.told.get("run", {})
        return {
            "directory": str(self.directory),
            "name": run.get("name"),
            "variant": run.get("variant"),
            **{key: self.told.get(key) for key in _SHOWN},
            "verdict": self.word.value,
            "why": self.told.get("why", self.why),
            "exit_code": self.exit_code,
            "owners": list(self.owners),
            **(dict.fromkeys(RunUse.__struct_fields__) if self.use is None else document(self.use)),
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
    def sentence(self) -> str:
        """The first sentence of a screen: which need a person and who has them, which are slow because
        of which node, and what the others are.
        """
        asking = [run for run in self.runs if run.exit_code == 1]
        if asking:
            said = f"{counted(len(asking), 'needs', 'need')} a person: "
        elif any(run.word is VerdictWord.UNKNOWN for run in self.runs):
            said = "none is known to need a person; "
        else:
            said = "none needs a person; "
        parts = (
            _in_short(runs, are_named=len(self.runs) <= MOST_NAMED, are_told=len(asking) == 1)
            for runs in (asking, self.runs[len(asking) :])
        )
        return f"{counted(len(self.runs), 'run')}: {said}{'; '.join(filter(None, parts))}"

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


def _in_short(runs: Sequence[ListedRun], are_named: bool, are_told: bool) -> str:
    """Each run; of many the first that need a person or are slow, and how many are what else."""
    named = runs
    if not are_named:
        named = [run for run in runs if run.exit_code == 1 or run.slow_words][:MOST_NAMED]
    others = Counter(run.word for run in runs) - Counter(run.word for run in named)
    counts = [f"{count} {word}" for word, count in others.items()]
    return ", ".join([*(run.in_short(are_told) for run in named), *counts])


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
