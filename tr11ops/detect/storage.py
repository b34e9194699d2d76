"""File systems: full, filling, and about to be purged."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

from msgspec.structs import replace

from tr11ops.base.observed import known, seen
from tr11ops.base.units import DAY, counted, duration, quantity, timestamp
from tr11ops.detect.detector import Finding, Severity, detector
from tr11ops.observe import derived
from tr11ops.observe.observations import FolderRoom
from tr11ops.observe.snapshot import Snapshot
from tr11ops.runcard.watching import FilesystemSection
from tr11ops.rundir.disk_usage import DAY_SECONDS, Forecast, Usage, forecast, newest
from trainer.contract.units import size

CRITICAL_PERCENT = 97.0
OWN_FOLDERS = frozenset({"checkpoints", "state", "journal"})
KEPT = 2  # checkpoints: the newest, and the one that a resume takes if that fails


@detector(
    "filesystem-full",
    uses=("operation.usage", "operation.shut_folders", "operation.save_room"),
    bound="the card's shares and `least_free`; 97 %; nothing left (read-only, no room for a save: WARNING)",
    severities="WARNING, CRITICAL",
)
def filesystem_full(snapshot: Snapshot) -> Iterator[Finding]:
    """A watched file system or quota is full, or nearly: the next save may fail, and with it everything
    since the last.

    WARNING beyond the card's share of bytes or inodes or below its `least_free`; CRITICAL from
    97 % on.

    One finding a file system, from the last sample of it, however old: what is full empties by
    itself never. Whether the run's own folders can be written to, and have room for the next save,
    is seen at each look; read-only may be so on this host alone.
    """
    shut = known(snapshot.operation.shut_folders, ())
    for folder in shut:
        yield Finding(
            filesystem_full.name,
            Severity.CRITICAL if folder.is_full else Severity.WARNING,
            f"{folder.path} cannot be written to: {folder.why}",
            subject=folder.path,
            identity=(folder.path,),
            evidence=(
                f"{_kept_in(snapshot, folder.path)} kept there",
                *(what_fills_it(snapshot, folder.path) if folder.is_full else ()),
            ),
            fix=make_room(snapshot) if folder.is_full else shlex.join(["df", "-h", folder.path]),
            then=_room_beside(snapshot) if folder.is_full else (),
        )
    yield from _no_room_for_a_save(snapshot, {folder.path for folder in shut})
    samples = newest(known(snapshot.operation.usage, ()))
    for rule in snapshot.run.filesystems:
        sample = samples.get(rule.name)
        if sample is None:
            continue
        usage = with_limits(sample, rule)
        lines = full(usage, rule)
        if lines:
            yield Finding(
                filesystem_full.name,
                severity_of_usage(usage, rule),
                lines[0],
                subject=rule.name,
                identity=(rule.name,),
                evidence=(
                    *lines[1:],
                    f"measured {duration(snapshot.time - usage.time)} ago by {usage.source}",
                ),
                fix=make_room(snapshot),
                then=(derived.command(snapshot, "fs-watchdog"),),
            )


def _kept_in(snapshot: Snapshot, path: str) -> str:
    """What the run keeps on a file system of which `path` is its first folder."""
    root = snapshot.run.directory
    if Path(path) in {root, root / "state"}:
        return "alerts, requests and the trainer's own records are"
    if Path(path).parent.name.endswith("-logs"):
        return "the log is"
    return "checkpoints are"


def _no_room_for_a_save(snapshot: Snapshot, shut: set[str]) -> Iterator[Finding]:
    """WARNING as long as a save as large as the newest sound one does not fit: what was full is
    well only then.
    """
    room, sound = known(snapshot.operation.save_room, None), snapshot.newest_sound
    if room is None or room.path in shut or sound is None or derived.is_finished(snapshot):
        return
    if sound.bytes is not None and room.free_bytes < sound.bytes:
        free, needed = quantity(room.free_bytes), quantity(sound.bytes)
        yield Finding(
            filesystem_full.name,
            Severity.WARNING,
            f"{room.path} has no room for the next save: {free} bytes are free, the last one has {needed}",
            subject=room.path,
            identity=(room.path,),
            evidence=what_fills_it(snapshot, room.path),
            fix=make_room(snapshot),
            then=_room_beside(snapshot),
        )


def what_fills_it(snapshot: Snapshot, path: str) -> tuple[str, ...]:
    """How much of a file system the run's checkpoints are, of which `path` is the run's first
    folder; what becomes of the training; what the command does. Nothing where its checkpoints are
    elsewhere.
    """
    room, checkpoints = known(snapshot.operation.save_room, None), known(snapshot.checkpoints, None)
    if room is None or room.path != path or checkpoints is None:
        return ()
    count, sound = len(checkpoints.steps), checkpoints.newest_sound
    each = None if sound is None else sound.bytes
    goes_on = "the training goes on meanwhile, and saves again by itself once there is room"
    large = _what_is_large(snapshot, room)
    if not count or each is None:
        return (*large, goes_on)
    held, share = count * each, ""
    if room.total_bytes:
        held = min(held, room.total_bytes)
        share = f" of the {size(room.total_bytes)} there"
    lines = [
        f"the run's {counted(count, 'checkpoint')} {'are' if count > 1 else 'is'} about {size(held)}{share}"
    ]
    if room.total_bytes:
        others = max(0, room.total_bytes - room.free_bytes - held)
        lines.append(_others(others, held, path))
    lines += large
    if count > KEPT:
        lines.append(
            "the command shows which checkpoints would go, and asks; with `--dry-run` it only shows them"
        )
    else:
        lines.append(
            f"a resume needs {'them' if count > 1 else 'it'}: what is no checkpoint must go, or be moved"
        )
    return (*lines, goes_on)


def _others(others: int, held: int, path: str) -> str:
    """Of what is no checkpoint; where that is most of it, to remove checkpoints helps for a while
    alone.
    """
    if others <= held:
        return f"{size(others)} are no checkpoints, of this run or of others"
    helps = "to remove checkpoints helps only a while"
    return f"{size(others)}, most of it, are no checkpoints: {helps}: `{_show(path)}`"


def _show(folder: str) -> str:
    """The command that shows what is large in a folder, on its own file system."""
    return shlex.join(["du", "-xhd", "2", folder])


def _what_is_large(snapshot: Snapshot, room: FolderRoom) -> tuple[str, ...]:
    """The largest things but for checkpoints, by name; whether they are the run's own is told by
    where they are.
    """
    lines = []
    for path, held in room.largest.items():
        whose = "of this run" if _is_own(snapshot, path) else "not tr11's"
        lines.append(f"{path}: {size(held)}, {whose}")
    if not room.is_all_seen:
        lines.append("what else is large there is not known: it was not looked at to the end")
    return tuple(lines)


def _is_own(snapshot: Snapshot, path: str) -> bool:
    """Whether tr11 or the trainer has written what is there: below the run's folders of
    checkpoints, logs, records.
    """
    if not Path(path).is_relative_to(snapshot.run.directory):
        return False
    name = Path(path).relative_to(snapshot.run.directory).parts[0]
    return name in OWN_FOLDERS or name.endswith("-logs")


def _foreign(snapshot: Snapshot) -> str:
    """The largest thing on a full disk, where it is none of the run's and pruning would free less;
    else "".
    """
    room, checkpoints = known(snapshot.operation.save_room, None), known(snapshot.checkpoints, None)
    if (
        room is None
        or not room.largest
        or not Path(room.path).is_relative_to(snapshot.run.directory)
    ):
        return ""
    path, held = next(iter(room.largest.items()))
    sound = None if checkpoints is None else checkpoints.newest_sound
    each = 0 if sound is None or sound.bytes is None else sound.bytes
    spare = 0 if checkpoints is None else max(0, len(checkpoints.steps) - KEPT)
    return path if held > spare * each and not _is_own(snapshot, path) else ""


def make_room(snapshot: Snapshot) -> str:
    """The command that frees the most: it removes checkpoints which the run does not need, or the
    core dump that fills the disk, and asks; of other files, and where the run needs all its
    checkpoints, it shows what is there.
    """
    path, room = _foreign(snapshot), known(snapshot.operation.save_room, None)
    if Path(path).name.partition(".")[0] == "core":
        return shlex.join(["rm", "-ri", path])
    if path:
        return _show(path)
    checkpoints = known(snapshot.checkpoints, None)
    if checkpoints is not None and len(checkpoints.steps) <= KEPT:
        if room is not None:
            return _show(room.path)
        return _show(str(snapshot.run.directory))
    return _prune(snapshot)


def _room_beside(snapshot: Snapshot) -> tuple[str, ...]:
    """What frees more when the first command has been typed, or where it must not be."""
    checkpoints = known(snapshot.checkpoints, None)
    can_prune = checkpoints is not None and len(checkpoints.steps) > KEPT
    return (_prune(snapshot),) if _foreign(snapshot) and can_prune else ()


def _prune(snapshot: Snapshot) -> str:
    return derived.command(snapshot, f"checkpoints prune --keep {KEPT}")


def severity_of_usage(usage: Usage, rule: FilesystemSection) -> Severity:
    """How loud a full file system is. Half of the room that must be left is as loud as 97 %."""
    shares = [
        percent
        for percent in (usage.percent("bytes"), usage.percent("inodes"))
        if percent is not None
    ]
    free = usage.bytes_free
    least = rule.least_free_bytes
    short = least is not None and free is not None and free < least / 2
    if short or max(shares, default=0.0) >= CRITICAL_PERCENT:
        return Severity.CRITICAL
    return Severity.WARNING


SOON_SECONDS = 2 * derived.DAY


@detector(
    "filesystem-filling",
    needs=("operation.usage",),
    bound="`forecast_days` (14); 2 days",
    severities="INFO, WARNING",
    runbook="filesystem-full.md",
)
def filesystem_filling(snapshot: Snapshot) -> Iterator[Finding]:
    """A watched file system is not full yet, but will be soon at the pace of the last days.

    WARNING when it fills within two days, INFO within the card's `forecast_days`; silent where
    it is full now.
    """
    samples = seen(snapshot.operation.usage)
    last = newest(samples)
    for rule in snapshot.run.filesystems:
        if rule.name not in last or full(with_limits(last[rule.name], rule), rule):
            continue
        own = [with_limits(sample, rule) for sample in samples if sample.name == rule.name]
        found = forecast(own, snapshot.time)
        line = filling(found, rule, snapshot.time)
        if line and found.full_at is not None:
            if found.per_day is None:
                growth = ""
            else:
                growth = f"it grows by {found.per_day:.2g} % of its limit a day"
            yield Finding(
                filesystem_filling.name,
                Severity.WARNING if found.full_at - snapshot.time < SOON_SECONDS else Severity.INFO,
                line,
                subject=rule.name,
                identity=(rule.name,),
                evidence=(growth,) if growth else (),
                fix=derived.command(snapshot, "checkpoints prune --keep 2"),
                then=(derived.command(snapshot, "fs-watchdog"),),
            )


WARN_SHARE = 0.75  # of watch.scratch_purge_days: of 30 days, a week is left
CRITICAL_SHARE = 0.9


@detector(
    "purge-near",
    needs=("operation.least_used",),
    bound="75 % of `watch.scratch_purge_days`; 90 %",
    severities="WARNING, CRITICAL",
)
def purge_near(snapshot: Snapshot) -> Iterator[Finding]:
    """Files that the run needs have not been touched for so long that the site will delete them
    soon.

    WARNING when three quarters of watch.scratch_purge_days are over, CRITICAL from nine tenths
    on; one a kind.

    Looks at the newest checkpoint and at the datasets. A run that trains reads its data and saves:
    it is silent then.
    """
    days = snapshot.run.watch.scratch_purge_days
    if days is None:
        return
    for entry in seen(snapshot.operation.least_used):
        age = snapshot.time - entry.time
        left = days * derived.DAY - age
        if age <= WARN_SHARE * days * derived.DAY:
            continue
        if left > 0:
            when = f"may be purged in {duration(left)}"
        else:
            when = "may be purged at any moment"
        yield Finding(
            purge_near.name,
            Severity.CRITICAL if age >= CRITICAL_SHARE * days * derived.DAY else Severity.WARNING,
            f"{entry.what} {when}",
            subject=entry.what,
            identity=(entry.what,),
            evidence=(
                f"{entry.path}: untouched for {duration(age)}; the site deletes after {counted(days, 'day')}",
            ),
            fix=f"find {shlex.quote(str(_folder_of(snapshot, Path(entry.path))))} -type f -exec touch -a -c {{}} +",
        )


def _folder_of(snapshot: Snapshot, path: Path) -> Path:
    """What is read again at once: of the run's own files the whole folder that they are in, else
    the file's.
    """
    root = snapshot.run.directory
    if path.is_relative_to(root):
        return root / path.relative_to(root).parts[0]
    return path.parent


# When a watched file system is full, or will be: one wording for the watchdog, its mails and the
# detectors.

GIGA, TERA, KILO = 2**30, 2**40, 2**10


def with_limits(usage: Usage, rule: FilesystemSection) -> Usage:
    """The sample with the card's limits where it has some: they hold instead of what the source
    says.
    """
    return replace(
        usage,
        bytes_limit=rule.most_bytes or usage.bytes_limit,
        inodes_limit=rule.inodes_limit or usage.inodes_limit,
    )


def full(usage: Usage, rule: FilesystemSection) -> tuple[str, ...]:
    """One line for each limit that is passed, empty when all is well. A limit that is just reached
    is not passed.
    """
    lines = []
    of_bytes, of_inodes = usage.percent("bytes"), usage.percent("inodes")
    if of_bytes is not None and of_bytes > rule.bytes_percent:
        amounts = _amounts(usage.bytes_used, usage.bytes_limit, GIGA, "GB")
        lines.append(
            f"{rule.name} is at {_percent(of_bytes, rule.bytes_percent)}% bytes usage{amounts}"
        )
    if of_inodes is not None and of_inodes > rule.inodes_percent:
        amounts = _amounts(usage.inodes_used, usage.inodes_limit, KILO, "K")
        lines.append(
            f"{rule.name} is at {_percent(of_inodes, rule.inodes_percent)}% inodes usage{amounts}"
        )
    least = rule.least_free_bytes
    if least is not None and usage.bytes_free is not None and usage.bytes_free < least:
        lines.append(f"Shared {rule.name} has {_number(usage.bytes_free / TERA)}TB left")
    return tuple(lines)


def filling(found: Forecast, rule: FilesystemSection, now: float) -> str:
    """One line when it will be full within the card's days at the trend of the last ones; else
    empty.
    """
    if found.full_at is None or found.full_at - now >= rule.forecast_days * DAY_SECONDS:
        return ""
    return f"{rule.name} will be full ({found.kind}) {when(found, now)}"


def when(found: Forecast, now: float) -> str:
    """The forecast in words: the day it fills, before which day it cannot, or why there is none."""
    if found.not_before is None:
        earliest = ""
    else:
        earliest = f"not before {timestamp(found.not_before, UTC, DAY)}"
    if found.full_at is None:
        return f"{found.why or 'no day in sight'}{f' ({earliest})' if earliest else ''}"
    days = (found.full_at - now) / DAY_SECONDS
    if days <= 0:
        text = "now"
    else:
        text = f"in about {_number(days)} days ({timestamp(found.full_at, UTC, DAY)})"
    if earliest and found.not_before != found.full_at:
        return f"{text}, {earliest}"
    return text


def _percent(value: float, limit: float) -> str:
    """Two digits behind the point, more where the limit would seem not to be passed."""
    return next(
        (text for digits in range(2, 10) if float(text := f"{value:.{digits}f}") > limit),
        repr(value),
    )


def _amounts(used: float | None, limit: float | None, unit: int, name: str) -> str:
    if used is not None and limit:
        return f" ({_number(used / unit)}{name}/{_number(limit / unit)}{name})"
    return ""


def _number(value: float) -> str:
    """Whole from ten on, below that with one digit behind the point."""
    if value >= 10 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}"
