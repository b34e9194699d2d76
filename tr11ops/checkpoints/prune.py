"""Removing what the policy does not keep. Recorded first, hidden by one rename, looked at once
more, then unlinked.

    global_stepN  --rename-->  .global_stepN.pruning-X  --look again-->  .global_stepN.pruned-X  --unlink-->  gone
                                        |  in use, pinned, changed, or unknown
                                        +--rename back

A kill at any point leaves the folder whole under its name, whole and hidden (the next prune puts it
back and decides again), or doomed (the next prune removes the rest). Two prunes: one has the claim;
where a clock broke that, every rename succeeds for one of them alone.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import field
from msgspec.structs import asdict, replace

from tr11ops.backup.archives import folder_fault
from tr11ops.backup.survey import Sight, look_at_copies
from tr11ops.base.errors import StopAsked
from tr11ops.checkpoints.catalogue import Catalogue, read_catalogue
from tr11ops.checkpoints.quarantine import (
    doomed_name,
    home_of,
    look_at,
    name_to_hide,
    names_of,
    next_name,
)
from tr11ops.checkpoints.retention import (
    RetentionDecision,
    RetentionPolicy,
    decide,
    decide_quarantined,
)
from tr11ops.runcard.card import RunCard
from tr11ops.rundir.checkpoint_pins import state_folder
from tr11ops.rundir.checkpoint_scan import NO_CARD, SavedCheckpoint
from tr11ops.rundir.claims import Claim, ClaimFolder, Clocks, read_clocks
from tr11ops.rundir.copies import CopyRecord, identity_of
from tr11ops.rundir.fallback import keep_reserve, with_reserve
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.files import sync_folder
from trainer.contract.record import Record
from trainer.contract.resumable import ResumeNeed

# Taking one folder away: hide it, decide, unlink. A kill between any two system calls leaves it
# whole or hidden.

THREADS = 8  # unlinking is a round trip each on a shared file system
FAULTS_KEPT = 3


def hide(folder: Path, name: str) -> str:
    """Rename a checkpoint out of everyone's sight; returns its new name. Raises OSError: then
    nothing has happened.
    """
    hidden = name_to_hide(name)
    (folder / name).rename(folder / hidden)
    return hidden


def put_back(folder: Path, hidden: str) -> str:
    """Give a hidden folder its name back, or that of a superseded one when another bears it by now;
    returns the name.

    Its hidden name where that was taken in this moment, "" where it has gone. Raises OSError as the
    file system does.
    """
    home = home_of(hidden)
    if os.path.lexists(folder / home):  # an empty folder there would be replaced by the rename
        home = next_name(folder, home)
    try:
        (folder / hidden).rename(folder / home)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return ""
        if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
            return hidden
        raise
    return home


def doom(folder: Path, hidden: str) -> str:
    """Decide that a hidden folder goes, for good: the decision is on disk before anything is
    unlinked.

    Raises OSError; FileNotFoundError when someone else has put it back.
    """
    doomed = doomed_name(hidden)
    (folder / hidden).rename(folder / doomed)
    sync_folder(folder)
    return doomed


def remove(place: Path, progress: Callable[[int], None], stop: threading.Event) -> list[str]:
    """Unlink a doomed folder; returns one line for each thing that would not go, at most a few.

    Links are unlinked, not followed. `progress` hears the bytes of each file. What another prune
    removes meanwhile is fine. Raises StopAsked.
    """
    if place.is_symlink():
        return [f"{place}: it is a link; remove it by hand"]
    faults: list[str] = []
    # first: whatever happens, no one takes the rest for whole
    unlinked = _unlinked(place / MANIFEST_FILE, progress)
    faults += [unlinked] if unlinked else []
    folders = [place]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="prune") as workers:
        for folder in folders:  # grows while it is walked
            inner, files, fault = _listed(folder)
            faults += [fault] if fault else []
            folders += inner
            for line in workers.map(
                lambda path: None if stop.is_set() else _unlinked(path, progress), files
            ):
                faults += [line] if line else []
            if stop.is_set():
                raise StopAsked
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            if not faults:
                faults.append(f"{folder}: {error.strerror}")
    return _few(faults)


def _listed(folder: Path) -> tuple[list[Path], list[Path], str]:
    try:
        with os.scandir(folder) as entries:
            found = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
    except FileNotFoundError:
        return [], [], ""
    except OSError as error:
        return [], [], f"{folder}: {error.strerror}"
    return (
        [path for path, is_dir in found if is_dir],
        [path for path, is_dir in found if not is_dir],
        "",
    )


def _unlinked(path: Path, progress: Callable[[int], None]) -> str:
    try:
        facts = path.lstat()
        path.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if stat.S_ISREG(facts.st_mode):
        progress(facts.st_size)
    return ""


def _few(faults: list[str]) -> list[str]:
    more = len(faults) - FAULTS_KEPT
    if more <= 1:
        return faults
    return [*faults[:FAULTS_KEPT], f"and {more} more"]


CLAIM = "prune"
CLAIM_SECONDS = 3600.0  # renewed with each checkpoint
BEGUN, REMOVED, LEFT, FAILED = (
    "checkpoints-prune",
    "checkpoint-removed",
    "checkpoint-kept",
    "checkpoint-not-removed",
)


class PrunePlan(Record):
    """What would be removed and what is kept, each with why. `leftovers` are folders that an
    earlier prune began.
    """

    catalogue: Catalogue
    decisions: tuple[RetentionDecision, ...]
    policy: RetentionPolicy
    leftovers: tuple[str, ...] = ()

    @property
    def victims(self) -> tuple[RetentionDecision, ...]:
        return tuple(decision for decision in self.decisions if decision.goes)

    @property
    def bytes(self) -> int:
        return sum(decision.bytes for decision in self.victims)


class RemovalOutcome(Record):
    """What became of one folder. `text`: why it was kept, or what would not go."""

    name: str
    step: int
    bytes: int
    result: Literal["removed", "kept", "failed"]
    text: str = ""


class PruneResult(Record):
    """All that was done. `finished`: what earlier prunes had begun; `ended_early`: why not all was
    done, else "".
    """

    outcomes: tuple[RemovalOutcome, ...] = ()
    finished: tuple[str, ...] = ()
    ended_early: str = ""

    @property
    def freed(self) -> int:
        """Bytes of the checkpoints that are gone."""
        return sum(outcome.bytes for outcome in self.outcomes if outcome.result == "removed")

    @property
    def failed(self) -> bool:
        return bool(self.ended_early) or any(
            outcome.result == "failed" for outcome in self.outcomes
        )


class Pruner(Record):
    """One prune of one run. `load`, `need`: see `read_catalogue`; `who` and `why` go into the
    journal.

    `only`: these folders alone, which a person named. `sight` looks whether copies are still there.
    `look_at_clocks` is replaced by tests alone.
    """

    directory: RunDirectory
    policy: RetentionPolicy
    who: str
    sight: Sight
    why: str = ""
    load: str | None = None
    need: ResumeNeed = NO_CARD
    set_aside: bool = False
    only: frozenset[str] | None = None
    progress: Callable[[int], None] = lambda count: None
    tell: Callable[[RemovalOutcome], None] = lambda outcome: None
    stop: threading.Event = field(default_factory=threading.Event)
    look_at_clocks: Callable[[Path], Clocks] = read_clocks

    @classmethod
    def of(
        cls, card: RunCard, who: str, why: str = "", keep_latest: int | None = None, **rest: Any
    ) -> Pruner:
        """A prune by the card's policy; `keep_latest` overrides its number, `rest` are fields of
        this class.

        A store that is not there (see `folder_fault`) holds no copy that a checkpoint could go for.
        """
        directory = RunDirectory(card.paths, card.kill_switch)
        policy = RetentionPolicy.of(card, keep_latest)
        away = {name: fault for name in policy.addresses if (fault := folder_fault(name, card))}
        sight, need = partial(look_at_copies, card, directory), card.resume_need
        return cls(
            directory,
            replace(policy, away=away),
            who=who,
            sight=sight,
            why=why,
            load=card.load_folder,
            need=need,
            **rest,
        )

    @property
    def folder(self) -> Path:
        return self.directory.paths.checkpoints

    # ------------------------------------------------------------------ what would be done
    def plan(self) -> PrunePlan:
        """Look and decide; changes nothing but a file that asks the file server what time it is.

        Where the file server's clock cannot be asked, nothing is old: that is enough for a preview.
        Raises OSError when the checkpoints cannot be listed.
        """
        try:
            return self._plan(self._clocks() if self.folder.is_dir() else Clocks(time.time()))
        except OSError:
            return self._plan(Clocks(time.time()))

    def _clocks(self) -> Clocks:
        return self.look_at_clocks(state_folder(self.directory))

    def _plan(self, clocks: Clocks) -> PrunePlan:
        catalogue = read_catalogue(self.directory, clocks, self.load, need=self.need)
        counting = [copy for copy in catalogue.copies if self.policy.has(copy)]
        policy = replace(self.policy, unseen=self.sight(counting, clocks))
        decisions = self._decide(catalogue, policy, clocks)
        if self.only is not None:
            decisions = tuple(decision for decision in decisions if decision.name in self.only)
        leftovers = (
            *names_of(self.folder, "hidden by a prune"),
            *names_of(self.folder, "being removed"),
        )
        return PrunePlan(catalogue, decisions, policy, leftovers)

    def _decide(
        self, catalogue: Catalogue, policy: RetentionPolicy, clocks: Clocks
    ) -> tuple[RetentionDecision, ...]:
        named = self.only or ()
        ordinary = decide(catalogue, policy, clocks, named)
        return (*ordinary, *decide_quarantined(catalogue, policy, self.set_aside, named))

    def _looked_again(
        self, plan: PrunePlan, catalogue: Catalogue, step: int, clocks: Clocks
    ) -> RetentionPolicy:
        """The plan's policy after another look at the copies that this step may go for: its own,
        and its share's.
        """
        share = self.policy.share
        mine = share(step)  # 0 is no milestone's: only its own copies matter

        def is_ours(copy: CopyRecord) -> bool:
            return copy.step == step or (
                copy.kind == "full" and mine != 0 and share(copy.step) == mine
            )

        ours = [copy for copy in catalogue.copies if self.policy.has(copy) and is_ours(copy)]
        known = {(copy.archive, copy.location) for copy in ours}
        before = {key: why for key, why in plan.policy.unseen.items() if key not in known}
        return replace(self.policy, unseen={**before, **self.sight(ours, clocks)})

    # ------------------------------------------------------------------ doing it
    def run(self, agreed: Collection[tuple[str, str]] | None = None) -> PruneResult:
        """Remove what may go; of the (name, identity) pairs in `agreed` alone, where a person has
        seen them.

        Raises ClaimTaken, and OSError when the claim or the journal cannot be written: nothing was
        removed then. On a full disk the run's reserve is given up for them, and set aside again
        when there is room again.
        """
        claims, mine = with_reserve(self.directory, self._claim)
        try:
            result = with_reserve(self.directory, lambda: self._run(claims, mine, agreed))
        finally:
            with suppress(OSError):  # then it is over when this process is
                claims.release(mine)
        keep_reserve(self.directory)
        return result

    def _claim(self) -> tuple[ClaimFolder, Claim]:
        claims = ClaimFolder(self.directory, CLAIM)
        return claims, claims.acquire(time.time(), CLAIM_SECONDS)

    def _run(
        self, claims: ClaimFolder, mine: Claim, agreed: Collection[tuple[str, str]] | None
    ) -> PruneResult:
        for name in names_of(self.folder, "hidden by a prune"):  # decided on again, below
            put_back(self.folder, name)
        plan = self._plan(self._clocks())
        victims = [
            victim
            for victim in plan.victims
            if agreed is None or (victim.name, victim.identity) in agreed
        ]
        doomed = names_of(self.folder, "being removed")
        if not victims and not doomed:
            return PruneResult()
        self._begin(victims, doomed)
        outcomes: list[RemovalOutcome] = []
        finished: list[str] = []
        ended_early = ""
        try:
            for name in doomed:
                faults = remove(self.folder / name, self.progress, self.stop)
                if faults:
                    self._add(
                        outcomes,
                        RemovalOutcome(name, 0, bytes=0, result="failed", text="; ".join(faults)),
                    )
                else:
                    finished.append(name)
            for victim in victims:
                if self.stop.is_set():
                    raise StopAsked
                claims.write(
                    replace(mine, expires=time.time() + CLAIM_SECONDS, data={"name": victim.name})
                )
                self._add(outcomes, self._take_away(victim, plan))
        except StopAsked:
            ended_early = "it was stopped; the next prune goes on"
        except OSError as error:  # of the claim or the journal: what cannot be recorded is not done
            why = f"{error.filename or self.directory.journal}: {error.strerror or error}"
            ended_early = f"nothing more is removed that cannot be recorded: {why}"
        return PruneResult(tuple(outcomes), tuple(finished), ended_early)

    def _add(self, outcomes: list[RemovalOutcome], outcome: RemovalOutcome) -> None:
        """Tell and record what became of one. Raises OSError when it cannot be recorded."""
        outcomes.append(outcome)
        self.tell(outcome)
        kind = {"removed": REMOVED, "kept": LEFT, "failed": FAILED}[outcome.result]
        self._record(kind, f"{outcome.name}: {outcome.text}", asdict(outcome))

    def _begin(self, victims: Iterable[RetentionDecision], doomed: list[str]) -> None:
        listed = [
            {
                "name": victim.name,
                "identity": victim.identity,
                "bytes": victim.bytes,
                "why": victim.why,
            }
            for victim in victims
        ]
        names = ", ".join(str(entry["name"]) for entry in listed[:5]) + (
            " ..." if len(listed) > 5 else ""
        )
        if listed:
            text = f"{len(listed)} to remove: {names}"
        else:
            text = "an earlier prune is finished"
        self._record(
            BEGUN,
            f"{self.why}; {text}" if self.why else text,
            {"victims": listed, "unfinished": doomed},
        )

    def _record(self, kind: str, why: str, data: Mapping[str, object]) -> None:
        Journal(self.directory.journal).write(kind, why, data, self.who)

    # ------------------------------------------------------------------ one checkpoint
    def _take_away(self, victim: RetentionDecision, plan: PrunePlan) -> RemovalOutcome:
        made = partial(RemovalOutcome, victim.name, victim.step, victim.bytes)
        try:
            why = self._why_not(victim, plan, victim.name)
            if why:
                return made("kept", why)
            hidden = hide(self.folder, victim.name)
            try:
                why = self._why_not(victim, plan, hidden)
            except BaseException:
                put_back(self.folder, hidden)
                raise
            if why:
                name = put_back(self.folder, hidden)
                taken = f"{why}; its name was taken meanwhile, so it is now {name}"
                return made("kept", taken if name and name != victim.name else why)
            doomed = doom(self.folder, hidden)
            faults = remove(self.folder / doomed, self.progress, self.stop)
        except FileNotFoundError:
            return made("kept", "it has got another name meanwhile, or someone else removes it")
        except OSError as error:
            return made(
                "failed",
                f"{error.filename or self.folder / victim.name}: {error.strerror or error}",
            )
        if faults:
            return made("failed", f"what is left of it is in {doomed}: {'; '.join(faults)}")
        return made("removed", victim.why)

    def _why_not(self, victim: RetentionDecision, plan: PrunePlan, name: str) -> str:
        """Why a victim must stay after all, by what is known now and by what lies under `name`; ""
        when it may go.

        Pins, copies, use and `latest` are read again; the others that count for it must still be
        there. Its copies are looked at where they lie, once more when it is hidden: a copy that
        goes with it is the thing itself.
        """
        place = self.folder / name
        clocks = self._clocks()
        known = (*plan.catalogue.checkpoints, *plan.catalogue.superseded)
        there = [row for row in known if row.name == victim.name or _is_there(row)]
        catalogue = read_catalogue(self.directory, clocks, self.load, there)
        policy = self._looked_again(plan, catalogue, victim.step, clocks)
        if any(row.name == victim.name for row in there):
            identity = identity_of(place)
        else:
            quarantined = look_at(place, victim.name, "discarded", victim.step)
            catalogue = replace(
                catalogue, quarantined=() if quarantined is None else (quarantined,)
            )
            identity = "" if quarantined is None else quarantined.identity
        decisions = self._decide(catalogue, policy, clocks)
        if identity != victim.identity or place.is_symlink():
            return "it has changed since it was looked at"
        found = next((entry for entry in decisions if entry.name == victim.name), None)
        if found is None:
            return "it is not known any more"
        if found.goes:
            return ""
        return found.why


def _is_there(row: SavedCheckpoint) -> bool:
    place = Path(row.path)
    if row.manifest == "read":
        return (place / MANIFEST_FILE).exists()
    return place.is_dir()
