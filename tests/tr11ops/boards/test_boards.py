"""The dashboard and the alert rules: of the table of metrics alone, read by Grafana's own models and
by a real Prometheus, which scrapes a run and answers every query of both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics

from tests.tr11ops.status.screens import full
from tests.waiting import until
from tr11ops.base.shipped import page_names
from tr11ops.boards.dashboard import GPU_COLUMNS, ROWS, WIDTH, dashboard
from tr11ops.boards.rules import rules_text
from tr11ops.status.metrics import ALERT_RULES, BY_NAME, METRICS
from tr11ops.status.prometheus import SAMPLES, exposition, serve

NAME = re.compile(r"\btr11_[a-z_]+")
FULL = replace(full(), nodes=("n01.cluster", "n02"))


def placed() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = dashboard()["panels"]
    return panels


def queries() -> list[str]:
    """Every query of the dashboard, for the run of FULL."""
    written = [target["expr"] for panel in placed() for target in panel.get("targets", ())]
    written += [entry["expr"] for entry in dashboard()["annotations"]["list"]]
    return [
        text.replace("$run", FULL.run.name).replace("$variant", FULL.run.variant)
        for text in written
    ]


# ----------------------------------------------------------------------------- one table
def test_every_metric_is_on_a_panel_and_panels_have_no_others() -> None:
    shown = {name for row in ROWS for panel in row.panels for name in panel.metrics}
    assert shown == set(BY_NAME)
    named = {name for text in queries() for name in NAME.findall(text)}
    assert named == set(BY_NAME)
    assert len(BY_NAME) == len(METRICS)


def test_a_metric_is_a_number_of_the_status_or_has_its_samples() -> None:
    assert set(SAMPLES) == {metric.name for metric in METRICS if not metric.path}


def test_panels_of_several_metrics_have_one_unit() -> None:
    for row in ROWS:
        for panel in row.panels:
            assert len({BY_NAME[name].unit for name in panel.metrics}) == 1, panel.title


def test_alerts_rest_on_metrics_and_name_a_page_that_is_there() -> None:
    for rule in ALERT_RULES:
        assert set(NAME.findall(rule.expression)) <= set(BY_NAME), rule.name
        assert rule.runbook in page_names(), rule.name
    assert len({rule.name for rule in ALERT_RULES}) == len(ALERT_RULES)


def test_no_panel_lies_on_another_or_beside_the_board() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in placed():
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(column for column, _ in cells) < WIDTH
        taken |= cells
    assert len({panel["id"] for panel in placed()}) == len(placed())


# ----------------------------------------------------------------------------- formats
def test_open_metrics_are_read_by_the_strict_parser_and_say_the_same() -> None:
    text = exposition(FULL, is_open_metrics=True)
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in open_metrics(text)}
    assert set(families) == set(BY_NAME)
    assert families["tr11_iteration"].samples[0].value == FULL.iteration
    nodes = [sample.labels["node"] for sample in families["tr11_node"].samples]
    assert nodes == ["n01.cluster", "n02"]


def test_grafanas_own_models_read_the_dashboard_and_lose_nothing() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    made = dashboard()
    read = models.Dashboard.from_json(made)
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))
    # the schema leaves an annotation open for what its data source knows
    del made["annotations"]["list"][0]["titleFormat"]
    assert lost(made, again) == []


def lost(given: Any, kept: Any, where: str = "") -> list[str]:
    """Where a value that was given is not in what a reader kept; a default may be left out."""
    if isinstance(given, dict):
        if not isinstance(kept, dict):
            return [where]
        return [
            fault
            for key, value in given.items()
            if value not in (None, [], {}, False)
            for fault in lost(value, kept.get(key), f"{where}.{key}")
        ]
    if isinstance(given, list):
        if not isinstance(kept, list) or len(kept) != len(given):
            return [where]
        return [
            fault
            for number, value in enumerate(given)
            for fault in lost(value, kept[number], f"{where}[{number}]")
        ]
    return [] if given == kept else [f"{where}: {given!r} became {kept!r}"]


# ----------------------------------------------------------------------------- a real Prometheus
def program(name: str) -> str:
    """On PATH, or where `.ci/install-prometheus` puts it."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None and os.environ.get("TR11_REQUIRE_PROMETHEUS") != "1":
        pytest.skip(f"{name} is not here: make prometheus TR11_REQUIRE_PROMETHEUS=1")
    assert found is not None, name
    return found


@pytest.fixture(scope="module")
def promtool() -> str:
    return program("promtool")


def test_promtool_reads_rules_and_metrics(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules_text())
    checked = subprocess.run(
        [promtool, "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERT_RULES)} rules found" in checked.stdout
    linted = subprocess.run(
        [promtool, "check", "metrics"], input=exposition(FULL), capture_output=True, text=True
    )
    assert linted.returncode == 0, linted.stderr


RUN = 'run="r",variant="main"'
# alert: a minute of series, the moment at which it fires, and one before
FIRES: dict[str, tuple[dict[str, str], str, str]] = {
    "Tr11NeedsPerson": (
        {
            f"tr11_exit_code{{{RUN}}}": "1x20",
            f'tr11_verdict{{{RUN},word="stalled"}}': "1x20",
            f'tr11_verdict{{{RUN},word="down"}}': "0x20",
        },
        "6m",
        "4m",
    ),
    "Tr11NotObserved": ({f"tr11_exit_code{{{RUN}}}": "3x60"}, "31m", "29m"),
    "Tr11NoNewLook": ({f"tr11_time_seconds{{{RUN}}}": "0x60"}, "22m", "14m"),
    "Tr11MetricsGone": ({f"tr11_time_seconds{{{RUN}}}": "0+60x10"}, "85m", "20m"),
    "Tr11SleepUnknown": ({f"tr11_time_seconds{{{RUN}}}": "0+60x60"}, "31m", "29m"),
    "Tr11MayNotSleep": (
        {f"tr11_may_sleep{{{RUN}}}": "0x60", f"tr11_exit_code{{{RUN}}}": "0x60"},
        "16m",
        "14m",
    ),
    "Tr11AlertUnowned": (
        {f'tr11_alerts_open{{{RUN},severity="critical",owned="no"}}': "2x60"},
        "16m",
        "14m",
    ),
    "Tr11Warnings": ({f'tr11_findings{{{RUN},severity="warning"}}': "1x90"}, "61m", "59m"),
    "Tr11Slow": ({f"tr11_throughput_best_percent{{{RUN}}}": "70x90"}, "61m", "59m"),
    "Tr11QueueRunsOut": (
        {
            f"tr11_queue_coverage_seconds{{{RUN}}}": "3600x60",
            f"tr11_remaining_seconds{{{RUN}}}": "900000x60",
        },
        "31m",
        "29m",
    ),
    "Tr11CopyDamaged": ({f"tr11_copies_damaged{{{RUN}}}": "1x20"}, "6m", "4m"),
    "Tr11RestoreDrillFailed": ({f"tr11_restore_drill_passed{{{RUN}}}": "0x20"}, "6m", "4m"),
    "Tr11PeriodicJobFails": (
        {f'tr11_periodic_failures{{{RUN},job="backup"}}': "3x30"},
        "16m",
        "14m",
    ),
    "Tr11FilesystemFull": (
        {f'tr11_filesystem_full_seconds{{{RUN},name="SCRATCH"}}': "9000x60"},
        "31m",
        "29m",
    ),
    "Tr11KillSwitchLeftOn": ({f"tr11_kill_switch{{{RUN}}}": "1x800"}, "721m", "719m"),
}


def test_each_rule_fires_when_it_should_and_not_before(promtool: str, tmp_path: Path) -> None:
    assert set(FIRES) == {rule.name for rule in ALERT_RULES}
    (tmp_path / "rules.yml").write_text(rules_text())
    count = "count(ALERTS{{alertstate='firing',alertname='{}'}})"
    tests: list[dict[str, Any]] = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {"expr": count.format(alert), "eval_time": at, "exp_samples": [{"value": 1}]},
                {"expr": count.format(alert), "eval_time": before, "exp_samples": []},
            ],
        }
        for alert, (series, at, before) in FIRES.items()
    ]
    tests.append(
        {
            "interval": "1m",
            "input_series": [
                {"series": f"tr11_time_seconds{{{RUN}}}", "values": "0x10"},
                {"series": f'tr11_verdict{{{RUN},word="finished"}}', "values": "1x10"},
            ],
            "promql_expr_test": [
                {
                    "expr": "count(ALERTS{alertname=~'Tr11NoNewLook|Tr11MetricsGone'})",
                    "eval_time": at,
                }
                for at in ("60m", "2h")
            ],
        }
    )
    for test in tests:
        for expected in test["promql_expr_test"]:
            for sample in expected.setdefault("exp_samples", []):
                sample["labels"] = "{}"
    cases = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(cases))
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a real Prometheus that scrapes FULL, and a DCGM exporter of its nodes."""
    prometheus = program("prometheus")
    (tmp_path / "rules.yml").write_text(rules_text())
    port, end = serve(lambda: FULL, "127.0.0.1", 0, (FULL.run.name, FULL.run.variant))
    gpus, end_gpus = dcgm()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        own = found.getsockname()[1]
    targets = [f"127.0.0.1:{port}", f"127.0.0.1:{gpus}"]
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "tr11", "static_configs": [{"targets": targets}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    words = [
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen([prometheus, *words], stdout=log, stderr=log)
    address = f"http://127.0.0.1:{own}"
    try:
        for name in ("DCGM_FI_DEV_GPU_UTIL", "tr11_iteration"):
            until(partial(asked, address, name), f"{name} to be scraped")
        yield address
    finally:
        child.terminate()
        child.wait()
        end()
        end_gpus()


def dcgm() -> tuple[int, Any]:
    """What NVIDIA's exporter says of two nodes of this run (short names) and one of another."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry = CollectorRegistry()
    for number, column in enumerate(GPU_COLUMNS):
        gauge = Gauge(column.metric, column.title, ["gpu", "Hostname"], registry=registry)
        for host in ("n01", "n02", "other"):
            for gpu in range(2):
                gauge.labels(str(gpu), host).set(number + gpu)
    running, thread = start_http_server(0, addr="127.0.0.1", registry=registry)

    def end() -> None:
        running.shutdown()
        running.server_close()
        thread.join()

    return running.server_port, end


def asked(address: str, query: str) -> list[dict[str, Any]]:
    try:
        found = answer(f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    except OSError:
        return []
    assert found["status"] == "success", (query, found)
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


def answer(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(address, timeout=60) as said:
        value: dict[str, Any] = json.loads(said.read())
    return value


def test_a_real_prometheus_scrapes_a_run_and_answers_every_query(server: str) -> None:
    names = {entry["metric"]["__name__"] for entry in asked(server, '{__name__=~"tr11_.*"}')}
    # FULL has no unknown
    assert names == set(BY_NAME) - {"tr11_unknown"}
    for query in queries():
        found = asked(server, query)
        if "deriv(" not in query and "ALERTS" not in query and "tr11_unknown" not in query:
            assert found, query
        if "DCGM" in query:
            assert {entry["metric"]["node"] for entry in found} == {"n01", "n02"}, query
    groups = answer(f"{server}/api/v1/rules")["data"]["groups"]
    assert [rule["name"] for rule in groups[0]["rules"]] == [rule.name for rule in ALERT_RULES]
    until(
        lambda: all(
            rule["health"] == "ok"
            for rule in answer(f"{server}/api/v1/rules")["data"]["groups"][0]["rules"]
        ),
        "every rule to be evaluated",
    )
