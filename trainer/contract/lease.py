"""Who may train in a run directory: a lease that one trainer holds, with a number that fences off
those before it.

    state/lease/N.json     the claim of epoch N: who, where, since when, and a counter that its owner raises
    state/lease.json       a link to the newest claim, for people; nothing is decided by it

The owner of the highest epoch holds the lease, and no one else ever does (see `NumberedFiles`).
Claims are never taken back: who was passed by a higher epoch finds that out at its next look, and
publishes nothing. A newcomer judges a holder by its counter and its own clock alone; no two nodes'
clocks are compared.

Standard library only: tools without torch read it too.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from trainer.contract.checkpoint_names import LATEST_FILE
from trainer.contract.documents import document, record_of_text
from trainer.contract.errors import HIDDEN_LEASE, LeaseLost
from trainer.contract.files import NumberedFiles, file_system_time, host_name, login_name
from trainer.contract.paths import RunPaths, read_attempt_label
from trainer.contract.record import Record

RENEW_SECONDS = 1.0  # between two signs of life of a holder
WATCH_SECONDS = 10.0  # a holder that was silent for so long is dead
SIGNS_OF_LIFE = 3  # changes of the counter after which a holder is believed to live
LOOK_SECONDS = 0.25  # between two looks of a newcomer
LIVING_SECONDS = 15.0  # for who looks once: a holder renewed its claim within this time
LARGEST_CLAIM = 65536  # bytes
KEPT_CLAIMS = 8  # older ones are removed


class LeaseClaim(Record):
    """One trainer's claim. `renewed` counts its signs of life; `held` is False once it has let go."""

    job_id: str
    launch: int
    host: str
    pid: int
    user: str
    time: float
    token: str
    epoch: int = 0
    renewed: int = 0
    held: bool = True

    @classmethod
    def of_this_process(cls, job_id: str, launch: int) -> LeaseClaim:
        """A claim in this process's name; it gets its epoch when it is made."""
        return cls(
            job_id,
            launch,
            host=host_name(),
            pid=os.getpid(),
            user=login_name(),
            time=time.time(),
            token=secrets.token_hex(8),
        )

    def told(self, paths: RunPaths) -> str:
        """The trainer whose claim this is, for people: their name of its attempt, not the record's."""
        job = read_attempt_label(paths, self.job_id)
        return f"job {job} (launch {self.launch}) of {self.user} on {self.host}, process {self.pid}"

    def is_earlier_launch_of(self, other: LeaseClaim) -> bool:
        """Whether `other` is a later launch of the same attempt: its controller has seen this one
        end.
        """
        return self.job_id == other.job_id and self.launch < other.launch


def living_claim(
    paths: RunPaths, *clocks: float, seconds: float = LIVING_SECONDS
) -> LeaseClaim | None:
    """The claim of the trainer that holds the lease and lives: it was renewed within `seconds`, by
    any of `clocks`.

    One that cannot be read is someone's (without a token) as long as it is that young, and so is
    one that has just been followed by another. Raises OSError.
    """
    folder = LeaseFolder(paths)
    epoch, content = folder.newest()
    if not epoch:
        return None
    claim = parse_claim(epoch, content)
    if claim is not None and not claim.held:
        return None
    with suppress(FileNotFoundError):
        renewed = folder.file(epoch).stat().st_mtime
        if all(clock - renewed >= seconds for clock in clocks):
            return None
    return claim or _nameless(epoch)


def clocks_of(paths: RunPaths, now: float) -> tuple[float, ...]:
    """`now`, by this host's clock, and what time it is by the file server that stamps the claims,
    if that can be asked.

    A holder is dead when all of them say so: then one clock that is wrong ends no life.
    """
    try:
        return now, file_system_time(LeaseFolder(paths).path)[1]
    except OSError:
        return (now,)


def trained_into(folder: Path, now: float) -> str:
    """Why `latest` in a folder of checkpoints must be left alone: its run is being trained; "" when
    it is not.

    A folder that is no run's (by its place) is no one's. `now`: seconds since the epoch, by this
    host; the file server is asked too. Raises OSError.
    """
    # a link may lie between run and folder
    places = dict.fromkeys((folder.absolute(), folder.resolve()))
    runs = [paths for place in places if (paths := RunPaths.of_checkpoints(place)) is not None]
    for paths in runs:
        claim = living_claim(paths, *clocks_of(paths, now))
        if claim is not None:
            return (
                f"{folder / LATEST_FILE} is not moved: the run is being trained by {claim.told(paths)}, whose next "
                "save would move it again; stop the training first (tr11 kill --wait), or type it again in "
                f"{LIVING_SECONDS:.0f} s where it was killed just now"
            )
    return ""


# ----------------------------------------------------------------------------- the files
class LeaseFolder(NumberedFiles):
    """The claims below `state/NAME`. Each method is one step of the protocol; between two, anything
    may happen.
    """

    def __init__(self, paths: RunPaths, name: str = "lease"):
        super().__init__(paths.state / name)
        self._shown = paths.state / f"{name}.json"

    def newest(self, most_bytes: int = LARGEST_CLAIM) -> tuple[int, bytes]:
        """The highest epoch and its claim's bytes; (0, b"") when no one ever claimed. Raises
        OSError.
        """
        return super().newest(most_bytes)

    def claim(self, epoch: int, claim: LeaseClaim) -> bool:
        """Try to become the owner of an epoch; False when another is. Raises OSError.

        Without hard links a claim may be seen unfinished, and then counts as a silent holder's. It
        is not flushed to disk: after a power cut no one holds the lease.
        """
        return self.make(epoch, _written(claim), is_flushed=False)

    def renew(self, epoch: int, count: int, held: bool = True) -> None:
        """Show life, or let go: overwrite the claim's end in place. Raises OSError.

        In place, because a file that is replaced can look unchanged for half a minute from another
        NFS client; and opened again each time, because closing is what makes the change visible
        there. It is not flushed to disk: a flush waits for gigabytes of a checkpoint, and after a
        power cut no one holds the lease.
        """
        with self.file(epoch).open("r+b") as stream:
            stream.seek(-_TAIL_BYTES, os.SEEK_END)
            stream.write(_tail(count, held))

    def show(self, epoch: int) -> None:
        """Let `state/lease.json` name the claim."""
        draft = self.path / f".link-{secrets.token_hex(6)}"
        with suppress(OSError):  # it is for people alone, and some file systems have no links
            draft.symlink_to(Path("lease") / f"{epoch}.json")
            draft.replace(self._shown)


def _tail(count: int, held: bool) -> bytes:
    return f',"held":{"true" if held else "false":>6},"renewed":{count:>13}}}\n'.encode()


_TAIL_BYTES = len(_tail(0, True))


def _written(claim: LeaseClaim) -> bytes:
    words = document(claim)
    del words["held"], words["renewed"]
    return json.dumps(words, separators=(",", ":")).removesuffix("}").encode() + _tail(
        claim.renewed, claim.held
    )


def parse_claim(epoch: int, content: bytes) -> LeaseClaim | None:
    """The claim in a file; None when it is unfinished or torn: it says no name, but its epoch
    counts.
    """
    try:
        return replace(record_of_text(LeaseClaim, content), epoch=epoch)
    except ValueError:
        return None


# ----------------------------------------------------------------------------- a newcomer's
# judgement
@dataclass
class HolderWatch:
    """What a newcomer has seen of a holder, by its own clock. `changes`: how often the claim's
    bytes were new.
    """

    epoch: int
    content: bytes
    changed: float
    changes: int = 0

    def see(self, epoch: int, content: bytes, now: float) -> None:
        """Take one look into account. A new epoch has another holder: the watch begins again."""
        if epoch != self.epoch:
            self.epoch, self.content, self.changed, self.changes = epoch, content, now, 0
        elif content != self.content:
            self.content, self.changed, self.changes = content, now, self.changes + 1

    def verdict(self, me: LeaseClaim, now: float) -> bool | None:
        """True: the lease may be taken; False: a living trainer holds it; None: watch on."""
        if self.epoch == 0:
            return True
        holder = parse_claim(self.epoch, self.content)
        if holder is not None and (not holder.held or holder.is_earlier_launch_of(me)):
            return True
        if now - self.changed >= WATCH_SECONDS:
            return True
        if self.changes >= SIGNS_OF_LIFE:
            return False
        return None


class Lease:
    """This trainer's part in the lease; of rank 0 alone. `begin` early, `take` before anything is
    loaded or written.

    After `take` a thread shows life, whatever the training does: a long save or evaluation is no
    silence.
    """

    def __init__(
        self,
        paths: RunPaths,
        me: LeaseClaim,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ):
        self.folder, self.paths = LeaseFolder(paths), paths
        self.me = me
        self.superseded_by: LeaseClaim | None = None
        self.lost = False
        self.is_hidden = False  # our own claim cannot be found, nor a later one
        self._clock, self._pause = clock, pause
        self._watch: HolderWatch | None = None
        self._watching = threading.Lock()
        self._writing = threading.Lock()
        self._decided = threading.Event()
        self._over = threading.Event()

    @classmethod
    def begin(cls, paths: RunPaths, job_id: str, launch: int) -> Lease:
        """Begin to watch the one who holds the lease, in a thread: the watch passes while this
        trainer starts.
        """
        lease = cls(paths, LeaseClaim.of_this_process(job_id, launch))
        threading.Thread(target=lease._look_on, name="lease-watch", daemon=True).start()
        return lease

    def take(self) -> LeaseClaim | None:
        """Take the lease, unless a living trainer holds it: then its claim is returned. Raises
        OSError.

        Takes at most a few seconds, less what has passed since `begin`.
        """
        try:
            while True:
                with self._watching:
                    watch = self._look()
                    verdict = watch.verdict(self.me, self._clock())
                if verdict is None:
                    self._pause(LOOK_SECONDS)
                elif not verdict:
                    return parse_claim(watch.epoch, watch.content) or _nameless(watch.epoch)
                elif self._claim(watch.epoch + 1):
                    return None
        finally:
            self._decided.set()

    def check(self) -> None:
        """Make sure that this trainer still holds the lease. Raises LeaseLost, or OSError when that
        is not known.
        """
        if not self.lost and self.folder.is_newest(self.me.epoch):
            return
        self.lost = True
        epoch, content = self.folder.newest()
        self.superseded_by = parse_claim(epoch, content)
        self.is_hidden = epoch < self.me.epoch
        raise LeaseLost(self.words())

    def words(self) -> str:
        """Why this trainer stops, when it has lost the lease."""
        if self.is_hidden:
            return (
                f"{HIDDEN_LEASE} {self.folder.path} any more (unmounted, or removed by "
                "hand); nothing more is published here"
            )
        new = self.superseded_by
        by = ""
        if new is not None:
            by = f": {new.told(self.paths)} has taken over (epoch {new.epoch}, ours was {self.me.epoch})"
        return f"another trainer holds this run's lease{by}; nothing more is published here"

    def lost_to_own_job(self) -> bool:
        """Whether a later launch of this very attempt has taken over: the attempt's records are
        then the other's.
        """
        return self.superseded_by is not None and self.superseded_by.job_id == self.me.job_id

    def release(self) -> None:
        """Let go, so that the next trainer need not watch. Idempotent; without effect when it was
        never taken.
        """
        self._decided.set()
        with self._writing:
            if self._over.is_set():
                return
            self._over.set()
            if self.me.epoch and not self.lost:
                with suppress(OSError):  # then the next one watches for some seconds
                    self.folder.renew(self.me.epoch, 0, held=False)

    # ------------------------------------------------------------------ looking on and showing life
    def _look(self) -> HolderWatch:
        epoch, content = self.folder.newest()
        if self._watch is None:
            self._watch = HolderWatch(epoch, content, self._clock())
        self._watch.see(epoch, content, self._clock())
        return self._watch

    def _look_on(self) -> None:
        while not self._decided.wait(LOOK_SECONDS):
            with self._watching, suppress(OSError):  # `take` meets the same fault and tells it
                self._look()

    def _claim(self, epoch: int) -> bool:
        claim = replace(self.me, epoch=epoch)
        if not self.folder.claim(epoch, claim) or not self.folder.is_newest(epoch):
            return False
        self.me = claim
        self.folder.show(epoch)
        self.folder.clear(KEPT_CLAIMS)
        threading.Thread(target=self._keep, name="lease", daemon=True).start()
        return True

    def _keep(self) -> None:
        """Show life until it is over. What cannot be written is said once: the training goes on,
        and may be taken for dead, but then the next look says so.
        """
        count, complained = 0, False
        while not self._over.wait(RENEW_SECONDS):
            count += 1
            try:
                if not self.folder.is_newest(self.me.epoch, surely=False):
                    self.check()
                with self._writing:
                    if not self._over.is_set():
                        self.folder.renew(self.me.epoch, count)
            except LeaseLost:
                return
            except OSError as error:
                if not complained:
                    complained = True
                    print(
                        f"tr11: WARNING: the lease cannot be renewed: {error}",
                        file=sys.stderr,
                        flush=True,
                    )


def _nameless(epoch: int) -> LeaseClaim:
    return LeaseClaim(
        "unknown",
        0,
        host="an unknown host",
        pid=0,
        user="an unknown user",
        time=0.0,
        token="",
        epoch=epoch,
    )


def refusal(holder: LeaseClaim, paths: RunPaths) -> str:
    """The one line for a newcomer whom a living holder keeps out."""
    return (
        f"this run is being trained by {holder.told(paths)}, which shows life in {paths.state / 'lease'}: "
        "two trainers must not write one run's checkpoints; stop that one first (`tr11 kill`), or wait for its end"
    )
