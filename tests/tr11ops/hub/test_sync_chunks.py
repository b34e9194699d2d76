"""A large log that grows, at a hub with chunked storage: only what is new travels, and what is
there is the log.
"""

from __future__ import annotations

import random
from pathlib import Path
from unittest.mock import patch

import hf_xet
import pytest

from tests.tr11ops.hub.sync_cases import LOG, REPOSITORY, Mirror
from tr11ops.hub import committing

LARGE = 17 << 20
# random bytes in which no secret's form is found by chance
NO_TEXT = bytes(number | 0x80 for number in range(256))


@pytest.fixture
def mirror(tmp_path, hub, hub_server) -> Mirror:
    hub_server.hub.chunks = tmp_path / "chunks"
    (tmp_path / "chunks").mkdir()
    chance = random.Random(3)
    mirror = Mirror(tmp_path / "run", hub, hub_server)
    mirror.write(
        LOG,
        b"\n".join(chance.randbytes(1000).translate(NO_TEXT) for _ in range(LARGE // 1000 + 1))
        + b"\nunfinished",
    )
    return mirror


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fetched(folder: Path, name: str, size: int, into: Path) -> bytes:
    """What the storage engine has under a name."""
    with hf_xet.XetSession().new_file_download_group(endpoint=f"local://{folder}") as group:
        group.start_download_file(hf_xet.XetFileInfo(name, size), str(into))
    return into.read_bytes()


def test_only_what_is_new_travels(mirror, tmp_path):
    names = []
    real = committing.send_chunked

    def spy(*arguments):
        names.append(real(*arguments))
        return names[-1]

    with patch("tr11ops.hub.committing.send_chunked", spy):
        mirror.sync()
        before = stored(tmp_path / "chunks")
        mirror.now += 1
        mirror.add(LOG, b" line, and one more\n" * 1000)
        mirror.sync()
    grown = stored(tmp_path / "chunks") - before
    blob = mirror.server.history(REPOSITORY)[-1].files[LOG]
    assert blob.size == mirror.path(LOG).stat().st_size
    assert grown < 1 << 20 < LARGE < before and mirror.server.bytes_sent() == 0
    assert (
        fetched(tmp_path / "chunks", names[-1][LOG], blob.size, tmp_path / "again")
        == mirror.path(LOG).read_bytes()
    )
    assert mirror.commits() == 3


@pytest.mark.parametrize("how", ["none", "off", "away", "garbled", "refused"])
def test_where_it_cannot_be_done_the_file_goes_whole(mirror, tmp_path, how, monkeypatch):
    if how == "none":
        mirror.server.hub.chunks = None
    elif how == "off":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    elif how == "away":
        mirror.server.hub.chunks = tmp_path / "run" / "journal" / "no\0folder"
        (tmp_path / "run" / "journal").mkdir()
    elif how == "garbled":
        mirror.server.garble("chunks-token")
    else:
        mirror.server.fail("chunks-token", 403)
    mirror.sync()
    assert mirror.server.bytes_sent() > LARGE
    assert mirror.there()[LOG] + b"unfinished" == mirror.path(LOG).read_bytes()
