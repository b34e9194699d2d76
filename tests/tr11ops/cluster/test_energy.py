"""What `sacct` tells of energy, and where it tells none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tr11ops.base.observed import Unknown
from tr11ops.cluster.energy import consumed_joules, joules_by_job

TOLD = """\
101|5000
101.batch|4000
101.0|5000
102|
102.batch|300
102.extern|900
102.0|700
103|0
103.batch|18446744073709551614
104|100
104|250
"""


def fake_sacct(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "sacct"
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_job_counts_once_and_what_was_not_measured_does_not() -> None:
    assert joules_by_job(TOLD) == {"101": 5000.0, "102": 900.0, "104": 350.0}
    assert joules_by_job("") == {} and joules_by_job("odd\n|\n1|x\n") == {}


def test_the_accounting_is_asked_once_for_all_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told").write_text(TOLD)
    fake_sacct(tmp_path, f'echo "$@" >> {tmp_path}/asked; cat {tmp_path}/told', monkeypatch)
    assert consumed_joules(["101", "102", "103", "104"]) == 6250.0
    assert "--jobs=101,102,103,104" in (tmp_path / "asked").read_text()
    assert consumed_joules([]) == Unknown("the site's accounting tells no energy of these jobs")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 7|grep -v 7", "tells no energy"),
        ("echo Slurm accounting storage is disabled >&2; exit 1", "storage is disabled"),
    ],
)
def test_what_is_not_accounted_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    fake_sacct(tmp_path, script + ("; true" if "grep" in script else ""), monkeypatch)
    found = consumed_joules(["1"])
    assert isinstance(found, Unknown) and words in found.why
