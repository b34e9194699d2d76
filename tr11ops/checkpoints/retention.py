"""Which checkpoints stay and which may go, and why. Pure: no clock, no file; times and what was
seen are arguments.

A checkpoint goes only when nothing speaks for it. A reason to stay follows from the steps that are
there and from the records of its own copies, never from the reasons of another: so a copy that is
lost keeps more, and lets nothing go.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from tr11ops.backup.archives import archive_address
from tr11ops.checkpoints.catalogue import Catalogue
from tr11ops.checkpoints.quarantine import QuarantinedCheckpoint
from tr11ops.runcard.card import RunCard
from tr11ops.runcard.save_interval import adapts
from tr11ops.runcard.watching import BackupSection
from tr11ops.rundir.checkpoint_pins import Pin
from tr11ops.rundir.checkpoint_scan import SavedCheckpoint
from tr11ops.rundir.claims import Clocks
from tr11ops.rundir.copies import CopyRecord
from tr11ops.rundir.copy_policy import WantedCopy, wanted_copies
from trainer.contract.record import Record

LEAST_KEPT = 2  # the last resumable ones, whatever the policy says
# a save without a manifest that was not written to for so long is given up
INCOMPLETE_SECONDS = 86400.0
KIND_WORDS: Mapping[str, str] = {"full": "whole", "weights": "weights", "spike": "spike weights"}


class RetentionPolicy(Record):
    """What the card says of keeping. `addresses`: of the archives as `CopyRecord.address` gives
    them, by their key.

    `away`: archives whose copies cannot be there to fall back on as things are, and why; nothing
    goes because of them. `unseen`: the same of single copies, by archive and location (see
    `tr11ops.backup.survey`). `interval`: iterations between the saves that the card asks for, where
    others come between; else 1.
    """

    keep_latest: int
    milestone_percent: float
    last_step: int
    copies: BackupSection
    addresses: Mapping[str, str]
    away: Mapping[str, str] = {}
    unseen: Mapping[tuple[str, str], str] = {}
    interval: int = 1

    @classmethod
    def of(cls, card: RunCard, keep_latest: int | None = None) -> RetentionPolicy:
        """The card's policy; `keep_latest` overrides its number."""
        section = card.backup
        archives = (("store", section.store), ("url", section.url))
        return cls(
            keep_latest=section.keep_latest if keep_latest is None else keep_latest,
            milestone_percent=section.milestone_percent,
            last_step=card.total_iterations or 0,
            copies=section,
            interval=(card.saves_every.steps or 1) if adapts(card) else 1,
            addresses={
                key: archive_address(address) for key, address in archives if address is not None
            },
        )

    def share(self, step: int) -> int:
        """Which milestone of the training a step has reached: 0 before the first."""
        if not self.milestone_percent or self.last_step <= 0:
            return 0
        reached = min(100.0, 100 * step / self.last_step)
        return math.floor(reached / self.milestone_percent)

    def has(self, copy: CopyRecord) -> bool:
        """Whether a copy counts: read back whole, undamaged since, seen lately in the archive that
        the card means.
        """
        is_there = (
            self.addresses.get(copy.archive) == copy.address and copy.archive not in self.away
        )
        is_seen = (copy.archive, copy.location) not in self.unseen
        return is_there and is_seen and copy.is_sound and copy.verified > 0 and copy.files > 0


class RetentionDecision(Record):
    """What becomes of one folder. `rule`: one word or two, for counting; `why`: the whole reason."""

    name: str
    step: int
    bytes: int
    identity: str
    goes: bool
    rule: str
    why: str


def decide(
    catalogue: Catalogue, policy: RetentionPolicy, clocks: Clocks, named: Collection[str] = ()
) -> tuple[RetentionDecision, ...]:
    """One decision for each checkpoint, superseded ones too, by step. `named`: folders that a
    person wants removed.
    """
    state = _State.of(catalogue, policy, named)
    found = []
    for entry in (*catalogue.checkpoints, *catalogue.superseded):
        rule, why = _reason(entry, state, clocks)
        found.append(
            RetentionDecision(
                entry.name,
                entry.step,
                bytes=entry.freed,
                identity=entry.identity,
                goes=rule == "goes",
                rule=rule,
                why=why,
            )
        )
    return tuple(sorted(found, key=lambda decision: decision.step))


def decide_quarantined(
    catalogue: Catalogue, policy: RetentionPolicy, every: bool, named: Collection[str] = ()
) -> tuple[RetentionDecision, ...]:
    """One decision for each checkpoint that a roll-back set aside; a person wants `every` one
    removed, or these.
    """
    found = []
    for quarantined in catalogue.quarantined:
        if quarantined.kind == "discarded":
            rule, why = _quarantined_reason(
                quarantined, catalogue, policy, every or quarantined.name in named
            )
            goes = rule == "goes"
            found.append(
                RetentionDecision(
                    quarantined.name,
                    quarantined.step,
                    bytes=quarantined.bytes,
                    identity=quarantined.identity,
                    goes=goes,
                    rule=rule,
                    why=why,
                )
            )
    return tuple(found)


def counts(decisions: Iterable[RetentionDecision]) -> tuple[tuple[str, int], ...]:
    """How many stay by which rule, the commonest first."""
    counted = Counter(decision.rule for decision in decisions if not decision.goes)
    return tuple(sorted(counted.items(), key=lambda entry: (-entry[1], entry[0])))


# ----------------------------------------------------------------------------- how
class _State(Record):
    """What the reasons are taken from. `sound`: steps a training can resume from; `milestones`:
    step to share.

    `named`: folders that a person wants removed.
    """

    catalogue: Catalogue
    policy: RetentionPolicy
    sound: Sequence[int]
    wanted: Mapping[int, Sequence[WantedCopy]]
    milestones: Mapping[int, int]
    named: Collection[str] = ()

    @classmethod
    def of(cls, catalogue: Catalogue, policy: RetentionPolicy, named: Collection[str]) -> _State:
        sound = sorted(entry.step for entry in catalogue.checkpoints if entry.is_sound)
        counting = [copy for copy in catalogue.copies if policy.has(copy) and copy.kind != "data"]
        return cls(
            catalogue,
            policy,
            sound=sound,
            wanted=_wanted(catalogue, policy, sound, counting),
            milestones=_milestones(catalogue, policy, sound, counting),
            named=named,
        )

    def newer(self, step: int, interval: int = 1) -> int:
        """How many resumable checkpoints at multiples of an interval are newer."""
        return sum(one % interval == 0 for one in self.sound[bisect_right(self.sound, step) :])


def _wanted(
    catalogue: Catalogue,
    policy: RetentionPolicy,
    sound: Sequence[int],
    counting: Sequence[CopyRecord],
) -> dict[int, list[WantedCopy]]:
    """The copies that the schedule wants, by step; of what is damaged too, in case it is the only
    one there is.

    Copies stand for what is no longer here. Of a checkpoint that is here its own state counts: else
    one that no training resumes from would be wanted because it was copied once, and go when that
    copy is lost.
    """
    here = {entry.step for entry in (*catalogue.checkpoints, *catalogue.superseded)}
    copied = [copy.step for copy in counting if copy.step not in here]
    found: dict[int, list[WantedCopy]] = {}
    everything = sorted({entry.step for entry in (*catalogue.checkpoints, *catalogue.superseded)})
    for steps in ([*sound, *copied], [*everything, *copied]):
        for entry in wanted_copies(policy.copies, steps, policy.last_step):
            if entry not in found.setdefault(entry.step, []):
                found[entry.step].append(entry)
    return found


def _milestones(
    catalogue: Catalogue,
    policy: RetentionPolicy,
    sound: Sequence[int],
    counting: Sequence[CopyRecord],
) -> dict[int, int]:
    """The first sound checkpoint of each share of the training of which no whole copy is on record.

    Where none is sound, the first that has a manifest: nothing better is left of that part.
    """
    here = {entry.step: entry.identity for entry in catalogue.checkpoints}
    usable = frozenset(catalogue.uses.recovery.usable(copy.step for copy in counting))
    safe = {
        policy.share(copy.step)
        for copy in counting
        if copy.kind == "full"
        and copy.step in usable
        and here.get(copy.step, copy.identity) == copy.identity
    }
    others = sorted(
        entry.step
        for entry in catalogue.checkpoints
        if entry.manifest == "read" and not entry.is_discarded
    )
    first: dict[int, int] = {}
    for step in (*sound, *others):
        first.setdefault(policy.share(step), step)
    return {step: share for share, step in first.items() if share and share not in safe}


def _reason(entry: SavedCheckpoint, state: _State, clocks: Clocks) -> tuple[str, str]:
    """The rule that decides, and why in words."""
    certain = _needed(state.catalogue, entry.used_by, entry.pin) or _unclear(entry)
    if certain is not None:
        return certain
    if entry.manifest == "none":
        return _incomplete(entry, state, clocks)
    return _by_policy(entry, state)


def _by_policy(entry: SavedCheckpoint, state: _State) -> tuple[str, str]:
    newer, keep = state.newer(entry.step), state.policy.keep_latest
    if newer < LEAST_KEPT:
        return "last two", "no two newer ones are there that a restart can take"
    if newer < keep:
        return "newest", f"one of the newest {keep}"
    interval = state.policy.interval
    if entry.step % interval == 0 and state.newer(entry.step, interval) < keep:
        return "newest", f"one of the newest {keep} of each {interval} iterations"
    if entry.is_superseded and entry.name in state.named:  # no round copies it, so a person decides
        return "goes", _farewell(entry, state)
    lacking = [
        lack
        for want in state.wanted.get(entry.step, ())
        if (lack := _lack(entry, want, state)) is not None
    ]
    if lacking:
        return "not backed up", f"superseded; {lacking[0]}" if entry.is_superseded else lacking[0]
    if entry.step in state.milestones:
        reached = state.milestones[entry.step] * state.policy.milestone_percent
        return "milestone", f"first at {reached:g} % of the training, and no verified whole copy"
    return "goes", _farewell(entry, state)


def _needed(
    catalogue: Catalogue, used_by: Sequence[str], pin: Pin | None
) -> tuple[str, str] | None:
    """Whether someone needs a folder, or may."""
    if catalogue.read_errors:
        return "unknown", f"nothing may go while this is not known: {catalogue.read_errors[0]}"
    if used_by:
        return "in use", "; ".join(used_by)
    if pin is not None:
        return "pinned", f"pinned by {pin.who}" + (f": {pin.why}" if pin.why else "")
    if catalogue.uses.loading:
        return (
            "in use",
            f"{catalogue.uses.loading} is loading a checkpoint, and which one is not known",
        )
    return None


def _unclear(entry: SavedCheckpoint) -> tuple[str, str] | None:
    """Whether what it is cannot be told well enough to remove it."""
    if entry.is_link or entry.is_discarded:
        discarded = "a roll-back discarded it: the next start sets it aside"
        return "unclear", "it is a link: remove it by hand" if entry.is_link else discarded
    if entry.manifest == "unreadable" or not entry.identity or entry.changed is None:
        return "unclear", entry.faults[0] if entry.faults else "not all of it can be seen"
    if entry.is_foreign:
        return "unclear", f"{entry.lack.partition(';')[0]}: remove it by hand"
    if entry.unnamed:
        more = ""
        if len(entry.unnamed) > 1:
            more = f" and {len(entry.unnamed) - 1} more"
        return (
            "unclear",
            f"its manifest does not name {entry.unnamed[0]}{more}: move what you want to keep away",
        )
    if entry.manifest == "foreign":
        return "unclear", entry.faults[
            0
        ] if entry.faults else "no manifest says whether it is whole: remove it by hand"
    return None


def _incomplete(entry: SavedCheckpoint, state: _State, clocks: Clocks) -> tuple[str, str]:
    if not state.newer(entry.step):
        return "incomplete", "not complete, and no resumable one is newer: it may be in the making"
    if clocks.server is None or entry.changed is None:
        return "incomplete", "not complete, and when it was last written is not known"
    # A clock that jumps makes nothing old: both must say so, and what lies in the future has no
    # age.
    if min(clocks.ages(entry.changed)) < INCOMPLETE_SECONDS:
        return "incomplete", "not complete, but written to within the last day"
    return "goes", "its save did not end, and no one has written to it for a day"


def _lack(entry: SavedCheckpoint, want: WantedCopy, state: _State) -> str | None:
    """Why a wanted copy does not count yet; None when it does."""
    if (want.kind, want.archive) == ("weights", "url"):
        kinds = {want.kind, "full"}
    else:
        kinds = {want.kind}
    made = [copy for copy in entry.copies if copy.archive == want.archive and copy.kind in kinds]
    if any(state.policy.has(copy) for copy in made):
        return None
    what = f"{KIND_WORDS[want.kind]} copy in the {want.archive} ({want.why})"
    if made and want.archive in state.policy.away:
        return f"whether there is a {what} is not known: {state.policy.away[want.archive]}"
    hidden = [
        why for copy in made if (why := state.policy.unseen.get((copy.archive, copy.location)))
    ]
    if hidden:
        return f"the {what} is on record, but {hidden[0]}"
    faulty = [copy for copy in made if copy.fault]
    if faulty:
        return f"the {what} is {faulty[0].fault}"
    if made:
        return f"no {what}: what there is lies in another archive, or was not verified"
    alike = [
        copy
        for copy in state.catalogue.copies
        if (copy.step, copy.archive) == (entry.step, want.archive)
    ]
    elsewhere = any(copy.kind in kinds for copy in alike)
    if elsewhere:
        return f"no {what}: what there is was made of another checkpoint of this step"
    return f"no {what}"


def _farewell(entry: SavedCheckpoint, state: _State) -> str:
    copies = sorted(
        {
            f"{copy.archive} ({KIND_WORDS[copy.kind]})"
            for copy in entry.copies
            if state.policy.has(copy)
        }
    )
    if copies:
        where = f"copied to {', '.join(copies)}"
    else:
        where = "no copy of it is wanted"
    damage = "no training resumes from it; " if not entry.is_sound else ""
    damage = "superseded; " if entry.is_superseded else damage
    return f"{damage}older than the newest {state.policy.keep_latest}; {where}"


def _quarantined_reason(
    quarantined: QuarantinedCheckpoint,
    catalogue: Catalogue,
    policy: RetentionPolicy,
    is_asked: bool,
) -> tuple[str, str]:
    pin = next((entry for entry in catalogue.pins if entry.step == quarantined.step), None)
    needed = _needed(catalogue, catalogue.uses.by_step.get(quarantined.step, ()), pin)
    if needed is not None:
        return needed
    if quarantined.is_link or quarantined.changed is None:
        return "unclear", "it is a link, or not all of it can be seen"
    wanted = wanted_copies(policy.copies, [quarantined.step], policy.last_step)
    ours = [
        copy for copy in catalogue.copies if copy.step == quarantined.step and copy.kind == "spike"
    ]
    if any(want.kind == "spike" for want in wanted) and not any(map(policy.has, ours)):
        return "not backed up", "no spike weights copy to the url (spike_steps) yet"
    if not is_asked:
        return "set aside", "a roll-back set it aside; --set-aside removes it"
    return "goes", "set aside by a roll-back, and --set-aside asks for it"
