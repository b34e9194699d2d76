"""What befell the original training beside its nodes, as a history plays it: the hub refuses, the site
purges, the chain of periodic jobs is gone. And where its copies lie: on scratch, in the STORE, at the hub.

What takes days is played by moving what is on record, and the times of files, back by so much.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from msgspec.structs import replace

from tests.plugins.faulty_hub import FaultyHub
from tests.tr11ops.launch.run_inputs import write_dataset
from tests.twin.fault_scenario import CHAIN_DEAD, HUB_REFUSES, PURGE
from tests.twin.operation import Operation
from tests.twin.runbook_mails import commands_of
from tr11ops.alerts.outbox import waiting_entries
from tr11ops.alerts.store import read_alert_state
from tr11ops.base.units import counted
from tr11ops.cron.chain import links_of
from tr11ops.hub.sync_round import records_folder
from tr11ops.rundir.cron_records import (
    PeriodicJobState,
    read_chains,
    read_job,
    write_chain,
)
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.checkpoint_names import checkpoint_name
from trainer.contract.checkpoints import checkpoint_steps
from trainer.contract.files import write_json
from trainer.contract.manifest import Manifest, manifest_faults
from trainer.contract.record import Record
from trainer.contract.state_file import read_json

HOUR, DAY = 3600.0, 86_400.0
PURGE_DAYS = 30
REPOSITORY = "bot/tr11-176B-logs"
MAIN_LOG = "logs/main/main_log.txt"
LARGE_LOG = "stacks.txt"
LARGE_BYTES = 11_000_000  # the hub of then took files of 10 MB
REFUSED = "Forbidden: pre-receive hook declined, a file is larger than 10 MB"
_STEP = re.compile(rb"iteration +(\d+)/")


class Copies(Record):
    """How many checkpoints lie on scratch and in the STORE, every byte of which was read and found
    right, and the last iteration whose line the hub has.
    """

    scratch: int
    store: int
    hub: int


@dataclass
class Site:
    """The archive, the hub and the periodic jobs of a run that trains. `acts`: what people typed;
    `notes`: what is worth telling of an incident; `wrong`: what should not be.
    """

    run: Operation
    hub: FaultyHub
    store: Path
    acts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = RunDirectory(self.run.paths, self.run.card.kill_switch)
        self.logs = self.run.paths.main_log.parent

    def play(self, fault: str) -> None:
        """One incident, until it is over."""
        {HUB_REFUSES: self._hub_refuses, PURGE: self._purge, CHAIN_DEAD: self._chain_dies}[fault]()

    # ------------------------------------------------------------------ copies
    def copies(self) -> Copies:
        """Where they lie now; each byte of a checkpoint is read."""
        return Copies(
            len(_whole(self.run.paths.checkpoints)), len(_whole(self._archive)), self._mirrored()
        )

    @property
    def _archive(self) -> Path:
        return self.store / "checkpoints" / self.run.paths.checkpoints.name

    def _mirrored(self) -> int:
        if ("model", REPOSITORY) not in self.hub.hub.repos:
            return 0
        lines = _STEP.findall(self.hub.files(REPOSITORY).get(MAIN_LOG, b""))
        return max(map(int, lines), default=0)

    # ------------------------------------------------------------------ the hub refuses a push
    def _hub_refuses(self) -> None:
        """A log of more than 10 MB, and a hub that takes no commit for four hours."""
        large = self.logs / LARGE_LOG
        large.write_text("rank 0: all threads wait\n" * (LARGE_BYTES // 25), encoding="utf-8")
        self.hub.fail("commit", 403, times=10**9, text=REFUSED)
        said: list[str] = []

        def is_refused() -> bool:
            done = self.run.tr11("sync", "--once", expect=None)
            said.append(done.stdout + done.stderr)
            return done.returncode == 1

        self.run.until(is_refused, "tr11 sync is refused")
        self.notes.append("`tr11 sync` says: " + said[-1].strip().splitlines()[-1])
        self._hours_go_by(4)
        self._until_mailed("sync-overdue")
        self.hub.heal()  # the periodic job does the rest

        def has_all() -> bool:
            said.append(self.run.tr11("sync", "--once", expect=None).stdout)
            content = self.hub.files(REPOSITORY).get(f"logs/main/{LARGE_LOG}", b"")
            return content == large.read_bytes()

        self.run.until(has_all, "the hub has everything")
        self._until_over("sync-overdue")
        self.notes.append(
            f"The next round of the periodic job brought all of it, a file of {LARGE_BYTES / 1e6:.0f} MB among it."
        )
        text = "".join([*said, self.run.log()])
        if any(secret in text for secret in self.hub.secrets()):
            self.wrong.append("a token of the hub was printed")
        large.unlink()

    def _hours_go_by(self, hours: float) -> None:
        """Since the last time that all was mirrored."""
        place = records_folder(self.directory) / "status.json"
        value = read_json(place)
        assert value is not None, "nothing was mirrored before"
        write_json(place, {**value, "time": value["time"] - hours * HOUR})

    # ------------------------------------------------------------------ the site purges
    def _purge(self) -> None:
        """Data and old checkpoints are untouched for four weeks; a mail tells of the data, what it
        says is typed, and days later the site deletes, file by file: those that a look at the run
        reads stay. One of these checkpoints is wanted again.
        """
        checkpoints = self.run.paths.checkpoints
        self.run.until(self._is_stored, "the copies that the card wants are in the STORE")
        old = checkpoint_steps(checkpoints)[:-2]
        data = self.run.paths.root / "data"
        left = [file for step in old for file in _files(checkpoints / checkpoint_name(step))]
        _age([*left, *_files(data)], (PURGE_DAYS - 2) * DAY)
        self._type_as_mailed("purge-near")
        self._until_over("purge-near")
        _age(left, 3 * DAY)
        gone = _purged(self.run.paths.root)
        lost = set(old) - set(_whole(checkpoints))
        stored = set(_whole(self._archive)) & lost
        self.notes.append(
            f"The purge took {counted(gone, 'file')} of {counted(len(lost), 'old checkpoint')}; "
            f"whole in the STORE: {len(stored)} of them."
        )
        back = max(stored, default=None)
        if back is None:
            self.wrong.append("no purged checkpoint is in the STORE")
            return
        words = ("backup", "restore", str(back), "--output", "again")
        done = self.run.tr11(*words, expect=None)
        self.acts.append(f"tr11 {' '.join(words)}")
        if done.returncode or back not in _whole(self.run.folder / "again"):
            self.wrong.append(f"tr11 {' '.join(words)}: {done.stdout}{done.stderr}")
        if not _files(data):
            self.wrong.append("the data were purged")

    def _is_stored(self) -> bool:
        interval = self.run.card.backup.store_interval
        old = checkpoint_steps(self.run.paths.checkpoints)[:-2]
        wanted = {step for step in old if step % interval == 0}
        return bool(wanted) and wanted <= set(_whole(self._archive))

    # ------------------------------------------------------------------ the chain dies
    def _chain_dies(self) -> None:
        """The watchdog lives as a chain of Slurm jobs; its next link is cancelled, and two hours go
        by. Another watchdog notices: for one that is alone, silence is the sign.
        """
        self.run.tr11("cron", "install", "--way", "slurm", "--yes")
        self.run.until(self._has_looked, "the first round of the chain")
        for name in ("hourly", "daily"):
            for link in links_of(self.run.slurm.jobs(), self.directory.mark, name):
                self.run.slurm.cancel(link.job.raw_id)
        self.run.until(lambda: not self._lives(), "the chain is cancelled")
        chains = read_chains(self.directory)
        assert isinstance(chains, tuple)
        for chain in chains:
            write_chain(self.directory, replace(chain, next_due=time.time() - 2 * HOUR))
        self._type_as_mailed("cron-dead")
        self.run.until(self._lives, "the chain lives again")
        self._until_over("cron-dead")
        done = self.run.tr11("cron", "status", expect=None)
        self.notes.append(f"`tr11 cron status` afterwards: exit status {done.returncode}.")
        self.run.tr11("cron", "remove", "--yes")

    def _has_looked(self) -> bool:
        state = read_job(self.directory, "pulse")
        return isinstance(state, PeriodicJobState) and not state.is_running and self._lives()

    def _lives(self) -> bool:
        return bool(links_of(self.run.slurm.jobs(), self.directory.mark, "hourly"))

    # ------------------------------------------------------------------ mails
    def _is_open(self, detector: str) -> bool:
        found = read_alert_state(self.directory).alert_state.open_alerts
        return any(detector in alert.detectors for alert in found)

    def _until_mailed(self, detector: str) -> list[str]:
        """The commands that the mail about a detector's finding says to type, once it is there."""
        commands: list[str] = []

        def has_come() -> bool:
            alerts = read_alert_state(self.directory).alert_state.open_alerts
            for entry in waiting_entries(self.directory):
                for alert in alerts:
                    is_about = alert.fingerprint in entry.message.alerts
                    if detector in alert.detectors and is_about:
                        is_alone = len(entry.message.alerts) == 1
                        commands[:] = commands_of(entry.message.body, alert, is_alone)
                        return True
            return False

        self.run.until(has_come, f"the mail of {detector}")
        return commands

    def _type_as_mailed(self, detector: str) -> None:
        """What its mail says, by a person, who says yes where that is asked."""
        for command in self._until_mailed(detector):
            words = re.sub(r" --run \S+", "", command)
            if words.startswith("tr11 cron install"):
                words += " --yes"
            if words.startswith("tr11 "):
                self.run.tr11(*words.split()[1:], expect=None)
            elif words.startswith("find "):
                subprocess.run(shlex.split(words), check=True)
            else:
                continue  # into the run's folder
            self.acts.append(words.replace(f"{self.run.folder}/", ""))

    def _until_over(self, detector: str) -> None:
        self.run.until(lambda: not self._is_open(detector), f"the end of {detector}")


@contextmanager
def site_beside(folder: Path) -> Iterator[tuple[FaultyHub, tuple[str, ...]]]:
    """A hub, an archive and data, and the changes of a card that make a run use them."""
    store = folder / "store"
    store.mkdir()
    write_dataset(folder / "rehearsal-run" / "data" / "none_text_document")
    with FaultyHub() as hub, patch.dict(os.environ, {"HF_TOKEN": hub.token}):
        yield (
            hub,
            (
                f"hub.repository={REPOSITORY}", f"hub.endpoint={hub.url}", f"backup.store={store}",
                "backup.store_interval=100", "backup.milestone_percent=0", "backup.logs=false",
                f"watch.scratch_purge_days={PURGE_DAYS}",
                'cron.skip=["digest", "sync", "backup", "nodes-check"]',
            ),
        )  # fmt: skip


def _whole(folder: Path) -> Sequence[int]:
    """The steps of the checkpoints below a folder whose every byte is as its manifest says."""
    found = []
    for step in checkpoint_steps(folder):
        place = folder / checkpoint_name(step)
        manifest = Manifest.read(place)
        if manifest is not None and not manifest_faults(place, manifest, read_digests=True):
            found.append(step)
    return found


def _purged(folder: Path) -> int:
    """The site's: deletes what was neither read nor changed for so long; how many files that were."""
    old = [word for which in ("-amin", "-mmin") for word in (which, f"+{PURGE_DAYS * 24 * 60}")]
    done = subprocess.run(
        ["find", folder, "-type", "f", *old, "-print", "-delete"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return len(done.stdout.splitlines())


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def _touched(path: Path) -> float:
    status = path.stat()
    return max(status.st_atime, status.st_mtime)


def _age(paths: Iterable[Path], seconds: float) -> None:
    """As if these had not been touched for so much longer."""
    for path in paths:
        moment = min(_touched(path), time.time()) - seconds
        os.utime(path, (moment, moment))
