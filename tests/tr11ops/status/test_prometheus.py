"""The metrics, read back with Prometheus' own parser: names, types, absent values, hostile labels,
file and server.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from tests.tr11ops.cli.status_place import COMMAND, Place
from tests.tr11ops.status.screens import SCREENS, full
from tests.tr11ops.status_cases import NOW, idle, snapshot
from tests.tr11ops.watchdog.verdict_table import TABLE
from tr11ops.base.errors import Refusal
from tr11ops.base.observed import Unknown
from tr11ops.cli.status import target_of
from tr11ops.detect.registry import detect_all
from tr11ops.observe.snapshot import Snapshot
from tr11ops.status.assessment import status_of
from tr11ops.status.document import ShownFilesystem, ShownPeriodicJob, Status
from tr11ops.status.extra_observations import ExtraObservations
from tr11ops.status.prometheus import exposition, serve, unknown_whats
from tr11ops.watchdog.verdict import judge

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
RUN = {"run": "tr11-176B-ml", "variant": "main"}


def status(seen: Snapshot, extra: ExtraObservations = ExtraObservations()) -> Status:  # noqa: B008  frozen
    findings = detect_all(seen)
    return status_of(seen, findings, judge(seen, findings), extra)


def parsed(text: str) -> Samples:
    """Every sample; the parser refuses what is not the format, and a name that comes twice is
    refused here.
    """
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted({**RUN, **labels}.items()))))


def test_the_metrics_of_a_healthy_run() -> None:
    samples = parsed(exposition(status(snapshot())))
    assert value(samples, "tr11_iteration") == 31219
    assert value(samples, "tr11_loss") == 2.3
    assert value(samples, "tr11_may_sleep") == 1
    assert value(samples, "tr11_verdict", word="healthy") == 1
    assert value(samples, "tr11_verdict", word="down") == 0
    assert value(samples, "tr11_jobs", state="PENDING") == 3
    assert value(samples, "tr11_kill_switch") == 0
    assert value(samples, "tr11_time_seconds") == NOW
    assert value(samples, "tr11_checkpoint_age_seconds") == 2000
    assert not [key for key in samples if key[0] == "tr11_unknown"]


def test_every_metric_is_documented_and_the_reverse() -> None:
    text = exposition(full())
    written = {name for name, _ in parsed(text)} | {"tr11_unknown"}
    described = (Path(__file__).parents[3] / "docs" / "how-to" / "metrics.md").read_text(
        encoding="utf-8"
    )
    assert set(re.findall(r"^\| `(tr11_[a-z_]+)", described, re.MULTILINE)) == written
    assert all(f"# HELP {name} " in text and f"# TYPE {name} gauge" in text for name in written)


def test_what_is_unknown_has_no_value_but_a_name() -> None:
    blind = status(SCREENS["blind-60-ascii"][0], ExtraObservations(alerts=Unknown("no rights")))
    samples = parsed(exposition(blind))
    for name in (
        "tr11_iteration",
        "tr11_loss",
        "tr11_may_sleep",
        "tr11_jobs",
        "tr11_kill_switch",
        "tr11_alerts_open",
    ):
        assert not [key for key in samples if key[0] == name], name
    unknown = {dict(labels)["what"] for name, labels in samples if name == "tr11_unknown"}
    assert {"jobs", "steps", "checkpoints", "kill_switch", "alerts"} <= unknown
    assert value(samples, "tr11_verdict", word="unknown") == 1


def test_reasons_make_no_time_series() -> None:
    lines = [
        "end of attempt 1007: torn",
        "heartbeat 3.json: torn",
        "jobs, kill switch: away, at 12:00",
        "a:b",
    ]
    assert unknown_whats(lines) == ["jobs", "kill_switch", "other"]


def test_no_number_is_ever_written_for_nothing() -> None:
    for _, seen, *_ in TABLE:
        written = status(seen)
        samples = parsed(exposition(written))
        assert all(math.isfinite(number) for number in samples.values())
        assert (value(samples, "tr11_iteration") is None) == (written.iteration is None)
    assert value(parsed(exposition(status(idle(steps=())))), "tr11_seconds_per_iteration") is None
    wild = replace(
        FULL, loss=math.nan, grad_norm=math.inf, filesystems=(full_disk(bytes_used=math.inf),)
    )
    assert all(math.isfinite(number) for number in parsed(exposition(wild)).values())


@given(st.text(max_size=40), st.text(max_size=40))
def test_hostile_labels_are_read_back_as_they_were(job: str, disk: str) -> None:
    written = replace(FULL, periodic_jobs=(full_job(job),), filesystems=(full_disk(name=disk),))
    samples = parsed(exposition(written))
    (periodic,) = [dict(labels)["job"] for name, labels in samples if name == "tr11_periodic_late"]
    disks = {
        dict(labels)["name"] for name, labels in samples if name == "tr11_filesystem_used_percent"
    }
    assert periodic == job.encode("utf-8", "replace").decode()
    assert disks == {disk.encode("utf-8", "replace").decode()}


FULL = full()


def full_job(name: str) -> ShownPeriodicJob:
    assert FULL.periodic_jobs
    shown = FULL.periodic_jobs[0]
    return replace(shown, job=replace(shown.job, name=name))


def full_disk(**changes: Any) -> ShownFilesystem:
    assert FULL.filesystems
    shown = FULL.filesystems[0]
    return replace(shown, usage=replace(shown.usage, **changes))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "\ud800", "ü{}", ""])
def test_names_that_break_a_careless_writer(name: str) -> None:
    samples = parsed(exposition(replace(FULL, periodic_jobs=(full_job(name),))))
    assert (
        value(samples, "tr11_periodic_failures", job=name.encode("utf-8", "replace").decode()) == 0
    )


# ----------------------------------------------------------------------------- serving
def test_it_is_served_and_looked_at_again() -> None:
    looks: list[int] = []

    def look() -> Status:
        looks.append(1)
        return replace(status(snapshot()), iteration=len(looks))

    port, end = serve(look, "127.0.0.1", 0, ("r", "main"))
    try:
        for expected in (1, 2):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain")
                assert value(parsed(answer.read().decode()), "tr11_iteration") == expected
    finally:
        end()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)


def test_a_look_that_fails_is_unknown_and_not_an_error_page(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def look() -> Status:
        raise OSError(5, "Input/output error")

    port, end = serve(look, "127.0.0.1", 0, ("r", "main"))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            samples = parsed(answer.read().decode())
    finally:
        end()
    assert samples == {("tr11_unknown", (("run", "r"), ("variant", "main"), ("what", "look"))): 1.0}
    assert capfd.readouterr().err == ""


# ----------------------------------------------------------------------------- as typed
@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.directory.root.mkdir()
    return made


def test_a_file_is_replaced_whole(place: Place) -> None:
    path = place.folder / "tr11.prom"
    path.write_text("old")
    done = place.status("--scheduler", "local", "--prometheus", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    samples = parsed(path.read_text())
    assert samples[("tr11_verdict", (("run", "demo"), ("variant", "main"), ("word", "down")))] == 1
    assert [entry.name for entry in place.folder.iterdir() if "prom" in entry.name] == ["tr11.prom"]
    assert path.stat().st_mode & 0o004, "the exporter is another user"
    odd = place.status("--scheduler", "local", "--prometheus", "metrics.txt")
    assert "only files that end in .prom" in odd.stderr


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nowhere/tr11.prom", "not a file in a folder that exists"),
        (".", "not a file"),
        ("/dev/null", "not a file"),
        ("", "not a file"),
        ("0", "between 1 and 65535"),
        ("localhost:99999", "between 1 and 65535"),
    ],
)
def test_what_is_neither_a_file_nor_a_port_is_refused(text: str, part: str) -> None:
    with pytest.raises(Refusal, match=part) as refusal:
        target_of(text)
    assert refusal.value.exit_code == 2


def test_ports_and_files_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert target_of("9108") == ("127.0.0.1", 9108)
    assert target_of(":9108") == ("127.0.0.1", 9108)
    assert target_of("0.0.0.0:9108") == ("0.0.0.0", 9108)
    assert target_of("[::1]:9108") == ("::1", 9108)
    for name in ("./9108", "tr11.prom", "a:b.prom", "٣"):
        assert target_of(name) == Path(name)


def test_what_is_served_is_not_watched(place: Place) -> None:
    done = place.status("--prometheus", "9108", "--watch")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--watch goes with --prometheus FILE" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_served_page_as_typed_and_a_port_that_is_taken(place: Place) -> None:
    port, end = serve(lambda: status(snapshot()), "127.0.0.1", 0, ("r", "main"))
    taken = place.status("--scheduler", "local", "--prometheus", f"127.0.0.1:{port}")
    end()
    assert taken.returncode == 1
    assert "cannot be served" in taken.stderr
    child = subprocess.Popen(
        [*COMMAND, "--scheduler", "local", "--prometheus", str(port)],
        cwd=place.folder,
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stderr is not None
    try:
        assert f"http://127.0.0.1:{port}/metrics" in child.stderr.readline()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert "tr11_verdict" in answer.read().decode()
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=300)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, errors) == (0, "")


def test_the_client_library_is_imported_only_when_it_is_needed(place: Place) -> None:
    program = (
        "import sys; from tr11ops.cli.main import execute; execute(sys.argv[1:]);"
        "print('prometheus_client' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            "status",
            "--run",
            "demo",
            "--scheduler",
            "local",
            "--json",
        ],
        cwd=place.folder,
        env={**os.environ, **place.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr.strip() == "False"
    assert json.loads(done.stdout)["verdict"] == "down"
