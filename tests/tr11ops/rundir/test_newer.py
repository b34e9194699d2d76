"""A record that a newer tr11 has written is never written again by this one: it says so in a line,
or leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tr11ops.status.publishing import card_of, directory_of
from tr11ops.backup.ledger import ArchiveState, write_archive_state
from tr11ops.base.errors import NewerFileError
from tr11ops.base.observed import cause
from tr11ops.cluster.site import SiteRules, keep_site
from tr11ops.hub import sync_round
from tr11ops.rundir import cron_records, hold_store
from tr11ops.rundir.attempts import KeptStacks, add_kept_stacks
from tr11ops.rundir.checkpoint_digests import DigestRecord, note_numbers, write_digest
from tr11ops.rundir.copies import CopyRecord, DrillRecord, write_copy, write_drill
from tr11ops.rundir.cron_records import ChainState, PeriodicJobState
from tr11ops.rundir.journal_heads import write_heads
from tr11ops.rundir.kill_switch import mark_switch
from tr11ops.rundir.paths import RunDirectory
from tr11ops.rundir.state_files import STATE_FILES
from tr11ops.trainers.held import ForeignFile, Origin
from tr11ops.trainers.proof import StopProof, write_proof
from tr11ops.trainers.seal import seal
from tr11ops.trainers.watched import WatchedJob
from trainer.contract.checkpoint_formats import FOREIGN
from trainer.contract.manifest import ForeignFacts

NEWER = '{"schema": 99, "made_by": "a newer tr11", "holds": {"new": "form"}}\n'
COPY = CopyRecord(
    "store", "a", 10, "full", "i", "checkpoints/main/global_step10", "files", 1, 1, 1.0, 1.0
)
DRILL = DrillRecord(1.0, "store", 10, passed=True)
ROUND = PeriodicJobState("pulse", "daemon", "h", 1.0, 2.0, 0, "", 60.0, 1, 0, 61.0)


def laid_held(run: RunDirectory) -> Origin:
    """A held checkpoint of one file that is a link."""
    place = run.paths.checkpoint(10) / FOREIGN
    place.mkdir(parents=True, exist_ok=True)
    (place / "model").write_text("x")
    file = ForeignFile("model", 1, 1, device=1, inode=1)
    return Origin(ForeignFacts("huggingface", "checkpoint-10", "folder"), 10, (file,), written=1.0)


# where the record lies, who writes it, and whether the writer says so (else it goes on without:
# status has the line)
WRITERS: list[tuple[str, Callable[[RunDirectory], object], bool]] = [
    (
        "state/requests/holds.json",
        lambda run: hold_store.record_holds(run, ["7"], "ana", "x"),
        True,
    ),
    ("state/requests/holds.json", lambda run: hold_store.forget_holds(run, ["7"]), True),
    ("state/cron/pulse.json", lambda run: cron_records.write_job(run, ROUND), True),
    (
        "state/cron/chain-hourly.json",
        lambda run: cron_records.write_chain(run, ChainState("hourly", "1", 1.0, 2.0)),
        True,
    ),
    (
        "state/backup/copies/store/checkpoints-main-global_step10.json",
        lambda run: write_copy(run, COPY),
        True,
    ),
    (
        "state/backup/archives/store.json",
        lambda run: write_archive_state(run, ArchiveState("store", "a", 1.0)),
        True,
    ),
    (
        "state/backup/archives/store.json",
        lambda run: write_archive_state(run, ArchiveState("store", "/a", 1.0)),
        True,
    ),
    ("state/backup/drill.json", lambda run: write_drill(run, DRILL), True),
    (
        "state/sync/state.json",
        lambda run: sync_round.write_state(run, sync_round.SyncState("e", "r", None)),
        True,
    ),
    ("state/sync/status.json", lambda run: sync_round.write_success(run, 1.0), True),
    ("state/sync/status.json", lambda run: sync_round.write_found(run, 1.0, ()), True),
    ("state/sync/status.json", lambda run: sync_round.write_failure(run, "no answer"), True),
    ("state/sync/public.json", lambda run: sync_round.write_confirmed(run, "e", "r", 1.0), True),
    ("state/journal-heads.json", lambda run: write_heads(run.paths, ()), True),
    (
        "state/attempts/7/stacks/verdict.json",
        lambda run: add_kept_stacks(run.paths, KeptStacks("7", 1.0, "none stands out")),
        True,
    ),
    (
        "state/checkpoints/main/digests/global_step10.json",
        lambda run: write_digest(run, DigestRecord(10, "i", 1.0, 1, 1)),
        True,
    ),
    (
        "state/checkpoints/main/not-finite/global_step10.abcdef01.json",
        lambda run: note_numbers(
            run, 10, "abcdef0123", not_finite=["weights/a"], why="found by verify --values"
        ),
        True,
    ),
    (
        "state/checkpoints/main/seals/global_step10.json",
        lambda run: seal(run.paths, laid_held(run)),
        True,
    ),
    (
        "state/drills/stop-ab12.json",
        lambda run: write_proof(run.paths, StopProof("megatron", "signal TERM", "ab12", time=1.0)),
        True,
    ),
    ("state/watched.json", lambda run: WatchedJob("7", "/log").write(run.paths), True),
    ("state/kill-switch.json", lambda run: mark_switch(run, "small"), False),
    ("state/site.json", lambda run: keep_site(run.site, SiteRules(version="22.05")), False),
]


@pytest.mark.parametrize(
    ("place", "write", "says_so"),
    WRITERS,
    ids=[f"{row[0]}-{number}" for number, row in enumerate(WRITERS)],
)
def test_no_writer_replaces_it(
    place: str, write: Callable[[RunDirectory], object], says_so: bool, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run = directory_of(card_of(tmp_path))
    run = RunDirectory(run.paths, outside / "kill")
    path = run.root / place
    path.parent.mkdir(parents=True)
    write(run)
    assert path.is_file() or place == "state/sync/status.json", (
        "the table names another place than the writer"
    )
    path.write_text(NEWER)
    if says_so:
        with pytest.raises(NewerFileError) as caught:
            write(run)
        line = f"{path}: was written by a newer tr11 (schema 99, this one knows 1): it is only read"
        assert cause(caught.value) == line
    else:
        write(run)
    assert path.read_text() == NEWER


def test_every_record_that_is_written_again_is_in_the_table() -> None:
    """A kind of state file is either among those above, or is listed here with what keeps it."""
    numbered = {"state/exclusions.json", "state/exclusions.d/*.json", "state/requests/holds.d/*.json", "state/lease/*.json", "state/acting/*.json",
                "state/alerts/book.json", "state/alerts/book.d/*.json", "state/cron/claims/*/*.json",
                "state/checkpoints/{variant}/pins.json", "state/checkpoints/{variant}/pins.d/*.json"}  # fmt: skip
    written_once = {"state/submissions/*/submission.json", "state/submissions/*/card.json", "state/run.json",
                    "state/submissions/*/versions.json", "state/requests/answer-*.json",
                    "state/corruption/*.json", "state/checkpoints/{variant}/origin.json"}  # fmt: skip
    of_the_attempt_itself = {"state/heartbeat/*.json"}
    refuses_by_itself = {"state/recovery.json", "state/alerts/outbox/*.json",
                         "state/checkpoints/{variant}/starts/*.json"}  # fmt: skip
    elsewhere = numbered | written_once | of_the_attempt_itself | refuses_by_itself
    # replaced by the same function
    made_of_its_records = {"state/backup/status.json", "state/backup/logs/*.json"}
    for entry in STATE_FILES:
        if entry.read is None or entry.pattern in elsewhere | made_of_its_records:
            continue
        if entry.pattern.startswith("state/attempts/*/") and "stacks" not in entry.pattern:
            continue  # an attempt writes its own records, and no other
        pattern = entry.pattern.format(variant="main", logs="logs")
        assert any(Path(place).match(pattern) for place, _, _ in WRITERS), entry.pattern


def test_rounds_brought_home_leave_the_newer_record(tmp_path: Path) -> None:
    run, local = directory_of(card_of(tmp_path / "a")), directory_of(card_of(tmp_path / "b"))
    cron_records.write_job(local, ROUND)
    path = cron_records.job_file(run, "pulse")
    path.parent.mkdir(parents=True)
    path.write_text(NEWER)
    cron_records.take_in_rounds(run, local)
    assert path.read_text() == NEWER and not cron_records.job_file(local, "pulse").exists()
