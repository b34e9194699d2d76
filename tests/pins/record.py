"""Records what must not change for users, files and scripts: a whole run directory, and what
commands say of it.

    python -m tests.pins.record run       a run on the embedded scheduler -> run.tar.xz (two minutes)
    python -m tests.pins.record expected  what today's commands say of that run -> expected.json

Both are made on purpose, by the code whose behaviour is to be kept; the tests of this folder only
compare.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.end_to_end import CARD, Playground
from tests.pins.commands import DOCUMENTS, option_names, said
from tests.pins.files import formats_of
from tests.pins.recording import ARCHIVE, EXPECTED, ROOT_WORD, unpacked
from tr11ops.cluster.local import LocalScheduler

MORE = """
[backup]
store = "archive"
store_interval = 6
keep_latest = 2

[alerts]
urls_file = "urls"

[watch]
act = true
"""
KEPT_WHOLE = "global_step18"  # of the others, the lists and not the tensors
NOT_NEEDED = ("*.npy", "state/reserve", "*.trace.json.gz", "scheduler/jobs/*/environment.json")
LOCAL = ("--scheduler", "local")
YES = (*LOCAL, "--yes", "--reason")


def record_run(folder: Path) -> None:
    """Two submissions, four attempts, a pause, an exclusion, copies, alerts, and a kill switch at
    the end.
    """
    environment = {
        name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ
    }
    own = {
        "TR11_LOCAL_SCHEDULER": str(folder / "scheduler"),
        "TR11_LOCAL_NODES": "3",
        "COLUMNS": "80",
    }
    place = Playground(folder, environment | own)
    place.prepare()
    card = CARD.replace("hidden_size = 32", "hidden_size = 16")
    (folder / "tr11.toml").write_text(
        card.format(nodes=2, workers=2, dtype="fp32", tensor=2) + MORE
    )
    (folder / "urls").write_text("json://127.0.0.1:9/nothing-listens-here\n")
    (folder / "urls").chmod(0o600)
    (folder / "archive").mkdir()
    place.tr11("launch", "--array", "1-3", *LOCAL, "--set", "run.exit_interval=6", "--yes")
    place.wait(lambda: len(place.steps()) >= 8, "eight steps")
    place.tr11("checkpoint-now", *YES, "before a change")
    place.tr11("pulse", "--act", *LOCAL, expect=None)
    place.tr11("pause", *YES, "maintenance")
    place.wait(lambda: len(place.ends()) >= 3, "three attempts")
    place.tr11(
        "nodes", "exclude", "local-node3", *YES, "Xid 79", "--evidence", "dmesg: NVRM: Xid 79"
    )
    place.tr11("resume", *LOCAL, "--yes")
    place.tr11("checkpoints", "pin", "5", "--reason", "for the paper")
    place.tr11("pulse", "--act", *LOCAL, expect=None)
    place.wait(lambda: len(place.steps()) >= 21, "the watchdog's submission")
    place.tr11("profile", *LOCAL, "--yes", "--steps", "1", expect=None)
    place.tr11("kill", *YES, "new data")
    place.wait(lambda: len(place.ends()) >= 4, "four attempts")
    place.tr11("backup", "run")
    place.tr11("checkpoints", "verify", expect=None)
    place.tr11("pulse", *LOCAL, expect=None)
    scheduler = LocalScheduler(folder / "scheduler")
    for job in scheduler.jobs():
        if not job.state.is_final:  # a recorded one would be started where it is unpacked
            scheduler.cancel(job.array_id)
    pack(folder)


def pack(folder: Path) -> None:
    """The recording: text names its folder by a word, tensors of most checkpoints are left out."""
    tensors = [path for path in folder.rglob("global_step*/*/*") if KEPT_WHOLE not in path.parts]
    for path in tensors + [path for pattern in NOT_NEEDED for path in folder.rglob(pattern)]:
        path.unlink()
    installed = re.compile(
        re.escape(str(Path(sys.prefix).resolve().parent).encode()) + rb"(/\.venv)?"
    )
    for path in folder.rglob("*"):
        if path.is_file() and not {"checkpoints", "journal"} & set(path.parts):
            content = path.read_bytes()
            plain = content.replace(str(folder).encode(), ROOT_WORD)
            plain = installed.sub(b"/opt/tr11", plain)
            if plain != content and b"\0" not in content:
                times = path.stat()
                path.write_bytes(plain)
                os.utime(path, ns=(times.st_mtime_ns, times.st_mtime_ns))
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        archive.add(folder, arcname=".", filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member if member.isfile() or member.isdir() or member.issym() else None


def record_expected() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = unpacked(Path(name).resolve())
        found = {
            "options": option_names(),
            "documents": {" ".join(words): said(folder, words) for words in DOCUMENTS},
            "formats": formats_of(folder / "run"),
        }
    EXPECTED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        place = Path(
            tempfile.gettempdir(), "tr11-recording"
        ).resolve()  # its name stays in files under a digest
        place.mkdir()
        try:
            record_run(place)
        finally:
            shutil.rmtree(place)
    elif sys.argv[1:] == ["expected"]:
        record_expected()
    else:
        sys.exit(__doc__)
