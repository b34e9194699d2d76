"""Moves a broken checkpoint out of the way of a trainer that would take it.

Nothing is deleted: what is moved lies in `FOLDER.set-aside`, beside the folder of the checkpoints,
since some trainers find a folder under whatever name it bears there. Where a file names the newest
checkpoint, it is written again; the old one goes along. Each move is a line of `moves.jsonl` there.
"""

from __future__ import annotations

import json
from pathlib import Path

from tr11ops.base.errors import Refusal
from tr11ops.dialects.dialect import CheckpointRules
from tr11ops.trainers.checkpoints import CheckpointSurvey, FoundCheckpoint, files_of
from tr11ops.trainers.moved import MOVES, aside_place
from trainer.contract.files import append_line, make_shared, write_atomically
from trainer.contract.record import Record
from trainer.contract.replacing import free_name


class Aside(Record):
    """What is to be moved, the newest last, so that the trainer goes back to `back_to`."""

    moved: tuple[FoundCheckpoint, ...]
    back_to: FoundCheckpoint


def plan_aside(rules: CheckpointRules, found: CheckpointSurvey) -> Aside | None:
    """What has to be moved before the next start; None where nothing has. Pure.

    Raises Refusal where a start would go wrong, and moving something would not mend it.
    """
    if found.unsure:
        raise Refusal(f"it is not known {found.unsure}; nothing was moved")
    if not found.conflict:
        return None
    if found.taken is not None and found.taken.state == "being written":
        raise Refusal(f"{found.conflict}, and look again")
    if found.wanted is None:
        raise Refusal(
            f"{found.conflict}; restore a copy, or move {found.found[-1].name} away to start from the beginning"
        )
    if found.taken is None and found.lost is None:
        text = rules.tracked(found.wanted.name, found.wanted.step)
        raise Refusal(f"{found.conflict}: write {text} into {rules.tracker} to go on from it")
    wanted = found.found.index(found.wanted)
    newer = found.found[wanted + 1 :]
    unsure = [one for one in newer if one.state in ("being written", "not known")]
    if unsure:
        raise Refusal(f"{unsure[0].name}: {unsure[0].state} ({unsure[0].why}); nothing was moved")
    return Aside(newer, found.wanted)


def set_aside(plan: Aside, rules: CheckpointRules, folder: Path, now: float) -> list[Path]:
    """Move what the plan says; returns where each file or folder lies now. Raises OSError.

    The file that names the newest is written first: whenever this ends, the next start finds what
    it looks for, and what is still to be moved is found by the next look.
    """
    place = aside_place(folder)
    make_shared(place)
    if rules.tracker:
        tracker = (folder / rules.tracker).resolve()
        old = tracker.read_text(encoding="utf-8", errors="replace")
        write_atomically(free_name(place, tracker.name), old)
        write_atomically(tracker, rules.tracked(plan.back_to.name, plan.back_to.step))
    return [to for one in plan.moved for to in move_aside(one, rules, folder, now)]


def move_aside(
    one: FoundCheckpoint, rules: CheckpointRules, folder: Path, now: float
) -> list[Path]:
    """Move one checkpoint, or its files where they lie loose; returns where each lies now. Raises
    OSError.

    The file by which a loose one is found goes last: what is still to be moved is found by the next
    look.
    """
    place = aside_place(folder)
    make_shared(place)
    names = [one.name]
    if rules.layout != "folder":
        others = set(files_of(rules, folder, one)) - {one.name}
        names = [*sorted(others), one.name]
    moved = []
    for name in names:
        to = free_name(place, name)
        line = {"time": now, "name": name, "to": to.name, "why": one.why}
        append_line(place / MOVES, json.dumps(line))
        (folder / name).rename(to)
        moved.append(to)
    return moved
