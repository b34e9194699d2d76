"""What is large below a run's directory: by name, within a bound, without checkpoints and other
file systems.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.observe import operation_files as largest
from tr11ops.observe.operation_files import largest_below

MEGABYTE = 2**20


def write(path: Path, megabytes: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * int(megabytes * MEGABYTE))


def test_the_largest_things_by_name(tmp_path: Path) -> None:
    write(tmp_path / "core-dumps" / "core.python.4711", 3)
    write(tmp_path / "small-logs" / "logs" / "main" / "main_log.txt", 1)
    write(tmp_path / "small-logs" / "logs" / "main" / "deep" / "more.txt", 1)
    write(tmp_path / "checkpoints" / "main" / "global_step5" / "weights" / "0.bin", 9)
    write(tmp_path / "note", 0.1)
    (tmp_path / "elsewhere").symlink_to("/")
    found, is_all_seen = largest_below(tmp_path)
    names = [str(Path(path).relative_to(tmp_path)) for path in found]
    assert names == ["core-dumps/core.python.4711", "small-logs/logs/main", "note"] and is_all_seen
    assert list(found.values())[:2] == [3 * MEGABYTE, 2 * MEGABYTE]


@pytest.mark.parametrize(("bound", "value"), [("MOST_ENTRIES", 10), ("MOST_SECONDS", 0.0)])
def test_what_the_bound_leaves_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    for number in range(30):
        write(tmp_path / "folder" / str(number), 0.01)
    write(tmp_path / "large", 2)
    monkeypatch.setattr(largest, bound, value)
    found, is_all_seen = largest_below(tmp_path)
    assert not is_all_seen and set(found) <= {
        str(tmp_path / "large"),
        *(str(path) for path in tmp_path.glob("folder/*")),
    }


def test_what_cannot_be_read_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "large", 1)
    (tmp_path / "shut").mkdir()
    shut = str(tmp_path / "shut")
    scan = largest.os.scandir

    def refuse(path: Path) -> object:
        if str(path) == shut:
            raise PermissionError(13, "no", shut)
        return scan(path)

    monkeypatch.setattr(largest.os, "scandir", refuse)
    assert list(largest_below(tmp_path)[0]) == [str(tmp_path / "large")]
