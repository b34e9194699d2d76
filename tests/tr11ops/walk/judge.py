"""What must hold after any deed, judged by the bytes (`truth`) and by what the walk itself did, not
by records.

1. No checkpoint that was saved is gone from everywhere by an action of tr11, but one that the card does not want and two
   newer ones stand in for; and none that is wanted goes without a whole copy that can be reached.
2. What the list calls resumable is so, and what is so is called so; what is on record as a copy is one.
3. What is copied or restored are bytes of this very run.
4. `latest` never comes to name what no training resumes from while there is something that one resumes from.

A harm that no one could have seen yet (`Harm.is_seen`) is no one's fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.tr11ops.walk.run import Run
from tests.tr11ops.walk.truth import Copy, Prints, Saved, copies_in, folders_of
from tests.tr11ops.walk.world import STRAY, World
from tr11ops.rundir.copies import read_copies
from trainer.contract.checkpoint_formats import MANIFEST_FILE
from trainer.contract.checkpoint_names import checkpoint_name, checkpoint_step, read_latest
from trainer.contract.record import Record


@dataclass
class Harm:
    """What the machine did. `seen`: the runs that have had a chance to see it; `is_open`: any look
    at it shows it; `is_silent`: no list of sizes does, only a reading.
    """

    is_open: bool
    is_silent: bool = False
    seen: set[int] = field(default_factory=set)

    def is_seen(self, run: Run) -> bool:
        return self.is_open or run.number in self.seen


class Look(Record):
    """All bytes at one moment. `folders` and `latest` by run, `copies` by archive and place."""

    folders: tuple[Mapping[str, Prints], ...]
    latest: tuple[int | None, ...]
    copies: Mapping[str, Mapping[str, Copy]]
    owners: Mapping[str, str]

    @classmethod
    def at(cls, world: World) -> Look:
        contents = {address: shelf.contents() for address, shelf in world.shelves.items()}
        return cls(
            tuple(folders_of(run.case.checkpoints) for run in world.runs),
            tuple(_latest(run) for run in world.runs),
            {address: copies_in(found) for address, found in contents.items()},
            {address: _owner(found) for address, found in contents.items()},
        )

    def has(self, saved: Saved) -> bool:
        """Whether all bytes of a checkpoint are anywhere."""
        here = any(saved.is_in(prints) for folders in self.folders for prints in folders.values())
        return here or any(
            saved.is_in(copy.files) for copies in self.copies.values() for copy in copies.values()
        )


def _latest(run: Run) -> int | None:
    try:
        return read_latest(run.case.checkpoints)
    except ValueError:
        return None


def _owner(contents: Mapping[str, bytes]) -> str:
    found = ""
    for name in ("tr11-archive-id.json", "tr11-archive.json"):
        found = str(json.loads(contents[name]).get("id") or "") if name in contents else found
    return found


@dataclass
class Judge:
    """Remembers harm; each method raises AssertionError where something does not hold."""

    world: World
    harm_here: dict[tuple[int, str], Harm] = field(default_factory=dict)
    harm_there: dict[tuple[str, str], Harm] = field(default_factory=dict)
    pins: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.seen = Look.at(self.world)

    @property
    def all_saved(self) -> dict[str, Saved]:
        return {saved.identity: saved for run in self.world.runs for saved in run.saved}

    # -------------------------------------------------------------- what is known of one checkpoint
    def at(self, look: Look, run: Run, step: int) -> Saved | None:
        """The checkpoint whose every byte lies under the name of a step."""
        prints = look.folders[run.number].get(checkpoint_name(step), {})
        return next(
            (
                saved
                for saved in self.all_saved.values()
                if saved.step == step and saved.is_in(prints)
            ),
            None,
        )

    def resumable(self, look: Look, run: Run) -> dict[int, Saved]:
        """What a training of the run's card could go on from, by the bytes."""
        steps = [
            step for name in look.folders[run.number] if (step := checkpoint_step(name)) is not None
        ]
        found = {step: self.at(look, run, step) for step in steps}
        return {
            step: it
            for step, it in found.items()
            if it is not None and it.is_whole and it.layers == run.layers
        }

    def discarded(self, run: Run, saved: Saved) -> bool:
        """Whether a roll-back passes over what was trained before it."""
        return any(
            first <= saved.step <= last and saved.identity in old for first, last, old in run.ranges
        )

    def believed(self, look: Look, run: Run) -> set[int]:
        """Steps that may be called resumable: they are, or what is wrong with them could not be
        seen yet.
        """
        hidden = {
            name
            for (number, name), harm in self.harm_here.items()
            if number == run.number and not harm.is_seen(run)
        }
        steps = {step for name in hidden if (step := checkpoint_step(name)) is not None}
        return set(self.resumable(look, run)) | steps

    def note_saved(self, run: Run, token: int, optimizer: bool) -> None:
        """Read what a training has just saved; a folder under a step's name is whole, or a save has
        broken its promise.
        """
        known = self.all_saved
        for name, prints in Look.at(self.world).folders[run.number].items():
            step = checkpoint_step(name)
            if step is None or prints == self.seen.folders[run.number].get(name):
                continue
            assert MANIFEST_FILE in prints, f"{name} has appeared without a manifest"
            if prints[MANIFEST_FILE] not in known:
                run.saved.append(Saved(step, token, optimizer, run.layers, prints))

    def noted_harm(self, key: tuple[str, str], name: str, how: str) -> None:
        """One file of a copy was harmed."""
        before = self.harm_there.get(key)
        is_open = how != "flip" or name.endswith(".copy.json")
        is_silent = not is_open and (before is None or before.is_silent)
        is_open = (is_open and self.world.kind != "bucket") or (
            before is not None and before.is_open
        )
        self.harm_there[key] = Harm(is_open, is_silent)

    def listed(self, run: Run, is_listed: bool, is_read: bool) -> None:
        """A round has had a chance to see harm: of sizes, when it has listed the archive; of bytes,
        when it has read.
        """
        for (address, _), harm in self.harm_there.items():
            if (
                address == run.address
                and self.owns(run)
                and (is_read or (is_listed and not harm.is_silent))
            ):
                harm.seen.add(run.number)

    def owns(self, run: Run) -> bool:
        """Whether the archive that the card names is this run's."""
        return bool(run.id) and self.seen.owners[run.address] == run.id

    # ------------------------------------------------------------------ before and after
    def harmed(self) -> None:
        """After harm: what is nowhere now, the machine has taken."""
        self.seen = Look.at(self.world)

    def judged(self, run: Run, deed: str, named: str = "") -> Look:
        """After an action of a run. `named`: see `_rightly_removed`."""
        before, after = self.seen, Look.at(self.world)
        self.seen = after
        self._forget_repaired(after)
        self._nothing_lost(run, deed, before, after)
        if deed == "prune":
            self._rightly_removed(run, before, after, named)
        self._own_bytes(run, deed, before, after)
        self._latest_is_resumable(run, deed, before, after)
        self._list_is_right(run, deed, after)
        return after

    def _forget_repaired(self, look: Look) -> None:
        known = self.all_saved
        for address, place in list(self.harm_there):
            copy = look.copies[address].get(place)
            if (
                copy is not None
                and copy.identity in known
                and known[copy.identity].is_in(copy.files)
            ):
                del self.harm_there[address, place]
        for number, name in list(self.harm_here):
            prints = look.folders[number].get(name)
            if prints is None or any(saved.is_in(prints) for saved in known.values()):
                del self.harm_here[number, name]

    def _nothing_lost(self, run: Run, deed: str, before: Look, after: Look) -> None:
        """What a prune may remove is judged by `_rightly_removed`."""
        for saved in self.all_saved.values():
            is_gone = before.has(saved) and not after.has(saved)
            assert not is_gone or deed == "prune", (
                f"{deed} of run {run.number}: {saved} is gone from everywhere"
            )

    def _rightly_removed(self, run: Run, before: Look, after: Look, named: str) -> None:
        """`named`: a folder that a person wanted removed, whether it is copied or not."""
        kept = list(after.folders[run.number].values())
        for saved in self.all_saved.values():
            places = {
                name: prints
                for name, prints in before.folders[run.number].items()
                if saved.is_in(prints)
            }
            if not places or any(saved.is_in(found) for found in kept):
                continue
            step, what = saved.step, f"prune of run {run.number} has removed {saved}"
            assert (run.number, step) not in self.pins, f"{what}, which is pinned"
            assert not any(STRAY in prints for prints in places.values()), (
                f"{what}, in which a person has put a file"
            )
            is_latest = before.latest[run.number] == step and checkpoint_name(step) in places
            assert not is_latest, f"{what}, which latest names"
            newer = [other for other in self.believed(before, run) if other > step]
            assert len(newer) >= 2, (
                f"{what}; of those that are newer, a training resumes from {newer}"
            )
            if step % run.interval == 0 and not (
                named in places and named.startswith(f"{checkpoint_name(step)}.")
            ):
                assert self._is_copied(after, run, saved), (
                    f"{what}, of which no copy can be reached"
                )

    def _is_copied(self, look: Look, run: Run, saved: Saved) -> bool:
        """Whether there is a whole copy in the card's archive, or one whose harm could not be seen
        yet.
        """
        if self.world.is_away and run.kind != "bucket":
            return False
        for place, copy in look.copies[run.address].items():
            harm = self.harm_there.get((run.address, place))
            if copy.identity == saved.identity and saved.is_in(copy.files):
                return True
            if harm is not None and not harm.is_seen(run):
                return True
        return False

    def _own_bytes(self, run: Run, deed: str, before: Look, after: Look) -> None:
        known, own = self.all_saved, before.folders[run.number].values()
        for address, copies in after.copies.items():
            # an earlier copy is completed
            there = [copy.files for copy in before.copies[address].values()]
            for place, copy in copies.items():
                is_harmed = (
                    address,
                    place,
                ) in self.harm_there  # not made good, or harmed in the midst of the action
                if copy == before.copies[address].get(place) or not copy.identity or is_harmed:
                    continue
                what = f"{deed} of run {run.number}: {place} in {address}"
                assert run.id == after.owners[address], (
                    f"{what}: written into the archive of another run"
                )
                saved = known.get(copy.identity)
                assert saved is not None and saved.is_in(copy.files), (
                    f"{what}: not what was saved as {copy.identity}"
                )
                assert saved.is_in(*own, *there), f"{what}: {saved} is not of this run"
        ids = {saved.identity: maker.id for maker in self.world.runs for saved in maker.saved}
        for name, prints in after.folders[run.number].items():
            found = known.get(prints.get(MANIFEST_FILE, ""))
            if name not in before.folders[run.number] and found is not None:
                assert run.id in ("", ids[found.identity]), (
                    f"{deed} of run {run.number}: {name} is another run's {found}"
                )

    def _latest_is_resumable(self, run: Run, deed: str, before: Look, after: Look) -> None:
        was, now = before.latest[run.number], after.latest[run.number]
        there = self.resumable(after, run)
        if now in there or not there or now in self.believed(after, run):
            return
        if was == now and was not in self.believed(before, run):
            return  # it was so before
        raise AssertionError(
            f"{deed} of run {run.number}: latest names {now}, and a training resumes from {sorted(there)}"
        )

    def _list_is_right(self, run: Run, deed: str, look: Look) -> None:
        catalogue = run.catalogue()
        there = self.resumable(look, run)
        for entry in catalogue.checkpoints:
            saved = there.get(entry.step)
            if saved is not None and self.discarded(run, saved):
                continue
            what = f"after {deed} of run {run.number}: step {entry.step}"
            if entry.is_sound:
                assert entry.step in self.believed(look, run), (
                    f"{what} is called resumable, and is not"
                )
            else:
                assert saved is None, f"{what} is resumable, and the list says {entry.no_resume}"

    # ------------------------------------------------------------------ copies on record
    def sound_copies(self, run: Run) -> Iterator[tuple[str, Saved | None, bool]]:
        """Copies that status calls sound in the card's archive: the place, what it is, and whether
        it must be whole.
        """
        for copy in read_copies(run.case.directory):
            if copy.is_sound and copy.address == run.address:
                place = copy.location.removesuffix(".tar")
                harm = self.harm_there.get((run.address, place))
                yield (
                    place,
                    self.all_saved.get(copy.identity),
                    harm is None or run.number in harm.seen,
                )

    def copies_are_whole(self, run: Run) -> None:
        """After everything was read again: what is called sound holds all that was saved."""
        for place, saved, _ in self.sound_copies(run):
            files = self.seen.copies[run.address].get(place)
            assert files is not None and saved is not None and saved.is_in(files.files), (
                f"{place} is called sound"
            )
