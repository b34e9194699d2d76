"""Sync rounds whose record is lost, wrong or shared; a hub that is not well; how often is
committed.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from tests.tr11ops.hub.sync_cases import EVENTS, LOG, REPOSITORY, Mirror, other, record
from tr11ops.base.errors import HubPermanentError, HubUnavailable
from tr11ops.hub.sync import preview, sync_once
from tr11ops.hub.sync_round import read_state
from tr11ops.rundir.claims import Claim, ClaimFolder, ClaimTaken
from tr11ops.rundir.journal import read_journal


# --------------------------------------------------------------------------- the record can be lost
@pytest.mark.parametrize("damage", ["gone", "garbled", "another", "newer", "rebuild", "odd"])
def test_the_record_is_found_again_from_the_hub(mirror, damage):
    mirror.write(LOG, b"one\n")
    mirror.write(EVENTS, record(b"first"))
    mirror.sync()
    path = mirror.directory.paths.state / "sync" / "state.json"
    value = json.loads(path.read_text())
    contents = {
        "garbled": "{", "another": json.dumps({**value, "repository": "bot/others"}), "odd": '{"schema": 1, "files": 3}',
        "newer": json.dumps({**value, "schema": 2, "files": {}}), "rebuild": path.read_text(),
    }  # fmt: skip
    path.unlink()
    if damage in contents:
        path.write_text(contents[damage])
    mirror.server.forget_requests()
    assert not mirror.sync(rebuild=damage == "rebuild").sends
    assert (
        mirror.server.bytes_sent() == 0
        and mirror.server.counts()["tree"] == 1
        and mirror.commits() == 2
    )
    assert json.loads(path.read_text()) == (
        json.loads(contents["newer"]) if damage == "newer" else value
    )
    mirror.add(LOG, b"two\n")
    assert [send.path for send in mirror.sync().sends] == [LOG]


def test_what_someone_changed_at_the_hub_is_repaired_and_kept(mirror):
    mirror.write(LOG, b"one\n")
    mirror.write(EVENTS, record(b"first"))
    mirror.sync()
    mirror.server.put(REPOSITORY, LOG, b"scribbled over\n")
    mirror.sync()
    assert (
        mirror.there()[LOG] == b"one\n"
        and mirror.there()["logs/main/main_log-superseded-1.txt"] == b"scribbled over\n"
    )
    mirror.server.put(REPOSITORY, LOG, b"one\nand more than is here\n")
    mirror.sync()
    assert mirror.there()[LOG] == b"one\nand more than is here\n"


def test_a_removed_repository_is_made_again_only_on_order(mirror):
    mirror.write(LOG, b"one\n")
    mirror.sync()
    mirror.server.hub.repos.clear()
    with pytest.raises(HubPermanentError, match="--rebuild makes it again"):
        mirror.sync()
    assert not mirror.server.hub.repos
    mirror.sync(rebuild=True)
    assert mirror.there() == {LOG: b"one\n"}


def test_a_commit_of_someone_else_in_between_is_seen_and_kept(mirror):
    mirror.write(LOG, b"one\n")
    mirror.sync()
    mirror.add(LOG, b"two\n")
    mirror.server.on("commit", lambda: mirror.server.put(REPOSITORY, "README.md", b"hello"))
    mirror.sync()
    assert mirror.there() == {LOG: b"one\ntwo\n", "README.md": b"hello"}
    assert [commit.author for commit in mirror.server.history(REPOSITORY)[-2:]] == [
        "somebody",
        "bot",
    ]
    assert any("looking again" in line for line in mirror.said)


@pytest.mark.parametrize("when", ["preupload", "lfs-batch", "commit"])
def test_the_same_file_sent_by_two_at_once_is_committed_once(mirror, make_hub, when):
    """Without claims, as from two machines whose claims cannot be written."""
    mirror.write(LOG, b"one\n")
    mirror.sync()
    mirror.add(LOG, b"two\n")
    second = other(mirror, make_hub())
    second.root = mirror.root
    mirror.server.on(when, lambda: _steal(second))
    outcome = mirror.sync()
    assert mirror.there() == {LOG: b"one\ntwo\n", "README.md": b"and more"} and not outcome.commits
    assert mirror.commits() == 4 and "README.md" in read_state(mirror.directory).files


def _steal(second: Mirror) -> None:
    with patch("tr11ops.hub.sync.SyncRound.take", return_value=None):
        second.sync()
    second.server.put(REPOSITORY, "README.md", b"and more")


# ------------------------------------------------------------------- who may, and records that fail
def test_the_second_of_two_leaves_and_says_who_is_at_it(mirror):
    mirror.write(LOG, b"one\n")
    folder = ClaimFolder(mirror.directory, "hub-sync")
    claim = folder.take(Claim.of_this_process(mirror.now, 3600), None)
    with pytest.raises(ClaimTaken, match=f"process {os.getpid()} of "):
        mirror.sync()
    assert mirror.server.count() == 0
    folder.write(replace(claim, held=False))
    assert mirror.sync().sends


def test_a_clock_that_jumps_loses_nothing(mirror):
    mirror.write(LOG, b"one\ntw")
    for jump in (-1e7, 2e7, -1.5e7):
        mirror.sync()
        mirror.now += jump
        mirror.add(LOG, b"o\ntw")
    mirror.sync()
    assert (
        mirror.path(LOG).read_bytes().startswith(mirror.there()[LOG]) and len(mirror.there()) == 1
    )


@pytest.mark.parametrize("spoiled", ["state", "state/sync", "journal"])
def test_logs_are_mirrored_where_nothing_can_be_put_on_record(mirror, spoiled):
    mirror.write(LOG, b"one\n")
    (mirror.root / spoiled).parent.mkdir(parents=True, exist_ok=True)
    (mirror.root / spoiled).write_text("in the way")
    for _ in range(2):
        mirror.sync()
    assert mirror.there() == {LOG: b"one\n"} and mirror.commits() == 2
    assert any("on record" in line for line in mirror.said)


def test_each_commit_is_in_the_journal(mirror):
    mirror.write(LOG, b"one\n")
    outcome = mirror.sync()
    entries = read_journal(mirror.directory.journal).entries
    assert [(entry.kind, entry.data["commit"]) for entry in entries] == [
        ("sync", commit) for commit in outcome.commits
    ]


# ----------------------------------------------------------------------------- the hub is not well
def test_a_hub_that_is_away_is_said_beside_the_last_success(mirror, make_hub):
    mirror.write(LOG, b"one\n")
    mirror.sync()
    path = mirror.directory.paths.state / "sync" / "status.json"
    before = json.loads(path.read_text())
    assert before == {"schema": 1, "time": mirror.now, "step": None, "message": ""}
    mirror.now += 100
    mirror.server.is_down = True
    mirror.hub = make_hub(seconds=0.0)
    with pytest.raises(HubUnavailable):
        mirror.sync()
    after = json.loads(path.read_text())
    assert after["time"] == before["time"] and "no answer" in after["message"]
    mirror.server.heal()
    mirror.sync()
    assert json.loads(path.read_text()) == {**before, "time": mirror.now}


def test_the_limit_of_commits_is_waited_for_as_the_hub_asks(mirror, hub_waits):
    mirror.write(LOG, b"one\n")
    mirror.server.fail("commit", 429, headers={"Retry-After": "1717"})
    mirror.sync()
    assert mirror.there() == {LOG: b"one\n"} and max(hub_waits) >= 1717


@pytest.mark.parametrize("how", ["fail", "reset", "lose", "garble"])
def test_every_request_may_fail_and_nothing_is_committed_twice(mirror, how):
    kinds = ["info", "tree", "resolve", "preupload", "lfs-batch", "lfs-put", "commit", "paths-info"]
    for number, kind in enumerate(kinds):
        mirror.add(LOG, f"{kind}\n".encode())
        if how in {"fail", "garble"}:
            fault = getattr(mirror.server, how)(kind)
        else:
            fault = mirror.server.break_off(how, kind)
        mirror.sync(rebuild=kind in {"tree", "resolve"})
        assert fault.met == 1
        assert (
            mirror.there() == {LOG: mirror.path(LOG).read_bytes()}
            and mirror.commits() == 2 + number
        )


@pytest.mark.parametrize("token", [None, "hf_wrong", "read"])
def test_a_token_that_may_not_write_is_refused_in_one_line(mirror, make_hub, token):
    mirror.write(LOG, b"one\n")
    mirror.server.create(REPOSITORY)
    mirror.hub = make_hub(token=mirror.server.read_token if token == "read" else token)
    with pytest.raises(HubPermanentError) as refused:
        mirror.sync()
    assert "\n" not in str(refused.value) and "hf_" not in str(refused.value)


# ----------------------------------------------------------------------------- how many commits
def test_a_large_first_round_is_several_commits_and_resumes(mirror, make_hub):
    for number in range(7):
        mirror.write(f"logs/main/{number}.txt", b"line\n")
    mirror.hub = make_hub(seconds=0.0)
    with patch("tr11ops.hub.sync_plan.MOST_FILES", 3):
        mirror.server.fail("commit", 503, times=9, after=2)
        with pytest.raises(HubUnavailable):
            mirror.sync()
        assert len(mirror.there()) == 3
        mirror.server.heal()
        outcome = mirror.sync()
    assert len(outcome.sends) == 4 and len(mirror.there()) == 7 and mirror.commits() == 4


def test_two_days_without_the_hub_are_one_commit(mirror, make_hub, hub_waits):
    """Logs grow for 48 hours while each hourly round finds the hub unreachable."""
    chance = random.Random(5)
    mirror.write(LOG, b"one\n")
    mirror.write(EVENTS, record(b"first"))
    mirror.sync()
    count = mirror.commits()
    mirror.server.is_down = True
    mirror.hub = make_hub(seconds=300.0)
    for hour in range(48):
        mirror.now += 3600
        for name in (LOG, f"logs/main/{hour % 5}.txt"):
            mirror.add(name, chance.randbytes(chance.randrange(200)).replace(b"\0", b"") + b"\n")
        mirror.add(EVENTS, record(chance.randbytes(chance.randrange(200))))
        with pytest.raises(HubUnavailable):
            mirror.sync(anew=False)
    mirror.server.heal()
    mirror.sync(anew=False)
    assert mirror.commits() - count == 1
    folder = mirror.directory.paths.published
    assert mirror.there() == {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")
    }


# ----------------------------------------------------------------------------- while it grows
def test_a_log_written_while_it_is_sent_is_whole_there(mirror):
    chance, stop = random.Random(2), threading.Event()
    text = b"".join(b"line %d of the log\n" % number for number in range(60_000))
    mirror.write(LOG, b"")

    def write() -> None:
        position = 0
        with mirror.path(LOG).open("ab", buffering=0) as stream:
            while position < len(text) and not stop.is_set():
                position += stream.write(text[position : position + chance.randrange(1, 3000)])
                time.sleep(0.0005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(12):
            mirror.now = time.time()
            mirror.sync(anew=False)
    finally:
        stop.set()
        writer.join()
    sizes = []
    for commit in mirror.server.history(REPOSITORY)[1:]:
        content = mirror.server.files(REPOSITORY, commit.id).get(LOG, b"\n")
        assert content.endswith(b"\n") and (text.startswith(content) or content == b"\n")
        sizes.append(len(content))
    assert sizes == sorted(sizes) and len(set(sizes)) > 2 and set(mirror.there()) == {LOG}


def test_a_process_that_stays_reads_only_what_is_new(mirror):
    mirror.write(LOG, b"x" * 99 + b"\n" + b"line\n" * 1_000_000)
    mirror.sync(anew=False)
    mirror.now += 1
    mirror.add(LOG, b"one more\n" * 1000)
    read = []
    real = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        data = real(descriptor, length, offset)
        read.append(len(data))
        return data

    with patch("tr11ops.hub.sync_files.os.pread", counted):
        mirror.sync(anew=False)
    assert sum(read) < 200_000
    assert mirror.there() == {LOG: mirror.path(LOG).read_bytes()}


# ---------------------------------------------------------------------------- the status goes along
def test_a_status_goes_with_the_logs_and_alone_when_it_matters(mirror):
    mirror.write(LOG, b"one\n")
    mirror.status = b'{"verdict": "healthy", "time": "1"}'
    mirror.sync()
    assert mirror.there()["status.json"] == mirror.status and mirror.commits() == 2
    mirror.status = b'{"verdict": "healthy", "time": "2"}'
    assert not mirror.sync().status_sent
    mirror.status = b'{"verdict": "stopped", "time": "3"}'
    assert mirror.sync().status_sent
    assert mirror.there()["status.json"] == mirror.status and mirror.commits() == 3
    mirror.add(LOG, b"two\n")
    mirror.status = b'{"verdict": "stopped", "time": "4"}'
    mirror.sync()
    assert mirror.there()["status.json"] == mirror.status and mirror.commits() == 4


def test_an_unchanged_status_is_renewed_while_one_is_expected(mirror):
    mirror.write(LOG, b"one\n")
    mirror.status = b'{"verdict": "queued", "interval_seconds": 3600}'
    mirror.sync()
    sent = []
    for hour in range(24):
        mirror.now += 3600
        if hour == 12:
            mirror.status = mirror.status.replace(b"queued", b"stopped")
        mirror.status = mirror.status[:-1] + b" }"
        sent.append(mirror.sync().status_sent)
    assert sent == [False, True] * 6 + [True] + [False] * 11


def test_a_status_that_cannot_be_made_keeps_no_log_back(mirror):
    mirror.write(LOG, b"one\n")

    def broken() -> bytes:
        raise OSError(5, "Input/output error")

    outcome = sync_once(replace(mirror.setting, status=broken))
    assert len(outcome.sends) == 1 and any("Input/output error" in line for line in mirror.said)


def test_a_preview_changes_nothing_anywhere(mirror):
    mirror.write(LOG, b"one\n")
    before = sorted(mirror.root.rglob("*"))
    assert [send.path for send in preview(mirror.setting).sends] == [LOG]
    assert sorted(mirror.root.rglob("*")) == before and mirror.server.counts() == {"info": 1}
    mirror.sync()
    assert not preview(mirror.setting).sends
    assert not mirror.server.counts()["tree"] > 1
