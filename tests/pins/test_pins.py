"""What users, scripts and run directories rely on stays: options, exit codes, keys of documents,
formats of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.pins.commands import DOCUMENTS, beside, option_names, said, typed
from tests.pins.files import records
from tests.pins.recording import EXPECTED, unpacked
from tests.pins.shapes import lost

expected: Mapping[str, Any] = json.loads(EXPECTED.read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("recorded").resolve())


@pytest.mark.parametrize("words", DOCUMENTS, ids=" ".join)
def test_exit_code_and_document(words: tuple[str, ...], recorded: Path) -> None:
    pinned, now = expected["documents"][" ".join(words)], said(recorded, words)
    assert now["exit"] == pinned["exit"]
    assert lost(pinned.get("shape", {}), now.get("shape", {})) == []


def test_every_option_is_still_taken() -> None:
    now = option_names()
    assert set(expected["options"]) - set(now) == set(), "commands that are gone"
    gone = {
        name: sorted(set(options) - set(now[name])) for name, options in expected["options"].items()
    }
    assert {name: options for name, options in gone.items() if options} == {}


def test_an_old_run_is_read_as_it_was(recorded: Path) -> None:
    with beside(recorded):
        status = json.loads(typed(("status", "--json", "--scheduler", "local"))[1])
        handover = json.loads(
            typed(("handover", "--json", "--since", "2000-01-01", "--scheduler", "local"))[1]
        )
    assert (status["verdict"], status["iteration"], status["consumed_samples"]) == (
        "stopped",
        38,
        560,
    )
    assert (status["loss"], status["last_checkpoint"]["step"]) == (2.768862724304199, 18)
    assert (status["kill_switch"]["who"], status["kill_switch"]["why"]) == ("root", "new data")
    assert [entry["node"] for entry in status["exclusions"]] == ["local-node3"]
    assert [end["end_marker"]["reason"] for end in status["last_attempts"]] == [
        "kill-switch",
        *["exit-interval"] * 3,
    ]
    assert [entry["detector"] for entry in status["alerts"]] == ["down", "exclusion-cap", "held"]
    assert handover["progress"]["last"] == 38
    assert [entry["node"] if "node" in entry else entry["text"] for entry in handover["nodes"]] == [
        "local-node3 excluded"
    ]


def test_the_journal_is_a_chain_that_others_can_check(recorded: Path) -> None:
    """Each entry's hash is the SHA-256 of its other keys, sorted, in compact JSON; it is the next
    one's `previous`.

    The recorded file, and that of the commands above where this machine has restarted since the
    recording.
    """
    paths = list((recorded / "run" / "journal").glob("*.jsonl"))
    assert paths
    for entries in map(records, paths):
        for entry in entries:
            text = json.dumps(
                {k: v for k, v in entry.items() if k != "hash"},
                sort_keys=True,
                separators=(",", ":"),
            )
            assert hashlib.sha256(text.encode()).hexdigest() == entry["hash"]
        assert [entry["previous"] for entry in entries] == [
            "0" * 64,
            *(entry["hash"] for entry in entries[:-1]),
        ]
