"""The journal is read by the whole group: what has the form of a secret is in no entry, whoever
writes it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.planted_secrets import planted
from tr11ops.rundir.journal import Journal, read_journal


@pytest.mark.parametrize(("line", "secret"), planted()[::5])
def test_no_entry_holds_a_secret(tmp_path: Path, line: str, secret: str) -> None:
    Journal(tmp_path).write(
        "note", line, {"said": line, "deep": [{"told": line, "step": 100}], "path": "/a/b"}
    )
    assert not [path for path in tmp_path.iterdir() if secret in path.read_text()]
    (entry,) = read_journal(tmp_path).entries
    assert (
        entry.kind == "note"
        and entry.data["deep"][0]["step"] == 100
        and entry.data["path"] == "/a/b"
    )
    assert read_journal(tmp_path).entries == (entry,), "and the chain of entries holds"
