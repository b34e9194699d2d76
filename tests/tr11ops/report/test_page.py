"""The report page: what it says of a run with a past, that hostile texts stay texts, and how it
looks in a browser.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from tests.browser import browser
from tr11ops.base.observed import Unknown, known
from tr11ops.cli.main import execute
from tr11ops.curves.curve import CurvePlace, CurveRange
from tr11ops.observe.snapshot import RunFacts
from tr11ops.report.build import page_of
from tr11ops.report.material import ReportMaterial, gather
from tr11ops.report.page import Cell, Column, render, table
from tr11ops.report.sections.nodes import NodeThroughput, throughput_by_node
from tr11ops.report.sections.training import with_gaps
from tr11ops.report.series import (
    MOST_LAYER_POINTS,
    LayersPoint,
    LayerSpread,
    StepPoint,
    TrainingSeries,
    ValidationPoint,
    points_of,
    read_series,
    series_of,
    thinned,
)
from tr11ops.rundir.attempts import CodeIdentity
from tr11ops.rundir.journal import Journal
from tr11ops.rundir.paths import RunDirectory
from trainer.contract.attempt import EndMarker, PhaseWriter
from trainer.contract.documents import document
from trainer.contract.files import write_json
from trainer.contract.metrics_record import parse_record
from trainer.contract.paths import RunPaths

START = 1_700_000_000.0
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> & \"quotes\""
)


def point(
    iteration: int,
    loss: float = 2.0,
    norm: float = 0.2,
    tflops: float = 149.0,
    time: float | None = None,
) -> StepPoint:
    moment = START + 105 * iteration if time is None else time
    return StepPoint(moment, iteration, 1000 * iteration, loss, 6e-5, 2048, tflops, norm, "1")


def record(iteration: int, job_id: str, time: float, loss: float | None = 2.0) -> str:
    value = {
        "kind": "step", "iteration": iteration, "total_iterations": 400, "consumed_samples": 8 * iteration,
        "consumed_tokens": 16384 * iteration, "seconds_per_iteration": 10.0, "learning_rate": 6e-5,
        "global_batch_size": 8, "lm_loss": loss, "grad_norm": 0.2, "samples_per_second": 0.8, "tflops": 149.5,
        "time": time, "job_id": job_id,
    }  # fmt: skip
    return json.dumps(value)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run with two attempts: the first was ended by a fault after 100 steps, the second ended as
    it should.
    """
    paths = RunPaths(tmp_path / "run", "small", "main")
    found = RunDirectory(paths, paths.root / "kill-switch")
    lines = []
    for job, label, first, last, begin in (
        ("11", 1, 1, 100, START + 60),
        ("12", 2, 91, 200, START + 2000),
    ):
        folder = paths.attempt(job)
        write_json(
            folder / "attempt.json",
            {
                "job_id": job,
                "array_id": "10",
                "task_id": label,
                "start": begin,
                "nodes": ["n1", "n2", "n3"],
            },
        )
        end = begin + 10 * (last - first + 1) + 30
        launch = {
            "launch": 1,
            "nodes": ["n1", "n2"],
            "start": begin,
            "end": end,
            "first_sign": end - 5,
            "cause": "node",
        }
        write_json(folder / "launches" / "1.json", launch)
        PhaseWriter(paths.phases(job), 1, print).enter("training", first - 1, begin)
        lines += [
            record(
                step, job, begin + 10 * (step - first + 1), None if step == 150 else 2.0 + 1 / step
            )
            for step in range(first, last + 1)
        ]
    marker = EndMarker("exit-duration", 200, 200, True, "", START + 3130, "n1", "12", 1)
    write_json(paths.end_marker("12"), to_builtins(marker))
    write_json(
        paths.attempt("11") / "verdict.json",
        {"reason": "error", "iteration": 100, "checkpoint_step": 90, "exit_status": 1, "message": HOSTILE,
         "cause": "node", "time": START + 1100, "job_id": "11"},
    )  # fmt: skip
    paths.metrics.parent.mkdir(parents=True)
    paths.metrics.write_text("\n".join([*lines, '{"kind": "step", "torn']), encoding="utf-8")
    Journal(found.journal, "test").write(
        "node-excluded", HOSTILE, {"node": "n2"}, "someone", START + 1200
    )
    return found


def material_of(directory: RunDirectory) -> ReportMaterial:
    facts = RunFacts("small", "main", directory.root, directory.kill_switch)
    return gather(directory, facts, Unknown("no scheduler here"), START + 4000)


def page_text(directory: RunDirectory, with_charts: bool = False) -> str:
    return render(page_of(material_of(directory), UTC, with_charts))


def words_of(text: str) -> str:
    return re.sub(
        r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style).*?</\1>", " ", text))
    )


# ----------------------------------------------------------------------------- what it says
def test_a_run_with_a_fault_is_told_as_it_was(directory: RunDirectory) -> None:
    text = page_text(directory)
    words = words_of(text)
    assert "210 steps" in words
    assert "10_1" in words and "1 to 100" in words and "91 to 200" in words
    assert "exit-duration" in words
    assert "none was ever raised" in words
    assert "no scheduler here" in words  # what could not be seen is said
    faults = words[words.index("Faults that stopped") : words.index("Alerts")]
    # by its attempt's verdict, where no launch has told more; the last step was 25 s before the first sign
    assert "&lt;/script&gt;" in faults and "(node) 25 s" in faults
    account = words[words.index("Where the node-hours went") : words.index("Faults that stopped")]
    assert "useful" in account and "100.00 %" in account


def test_a_fault_is_told_by_what_its_launch_left_on_record(directory: RunDirectory) -> None:
    """Its summary and the node to which it points, and not the class of fault alone."""
    place = directory.paths.attempt("11") / "launches" / "1.json"
    found = json.loads(place.read_text())
    summary = "worker killed (SIGKILL), rank 7"
    write_json(place, {**found, "summary": summary, "suspects": ["n2"]})
    words = words_of(page_text(directory))
    faults = words[words.index("Faults that stopped") : words.index("Alerts")]
    assert "worker killed (SIGKILL), rank 7, n2 (node) 25 s" in faults
    write_json(place, {**found, "summary": f"{summary} on n2", "blamed": ["n2"]})
    assert "rank 7 on n2 (node) 25 s" in words_of(page_text(directory)), "a node is named once"


def test_nodes_are_ranked_only_where_their_steps_differ(directory: RunDirectory) -> None:
    """Ranks of one step wait for each other: a small difference names no node."""
    words = words_of(page_text(directory, with_charts=True))
    assert "wait for each other" in words
    assert "each node was part of, about the same for all, by name" in words
    place = directory.paths.attempt("12") / "launches" / "1.json"
    write_json(place, {**json.loads(place.read_text()), "nodes": ["n3", "n2"]})
    lines = [json.loads(line) for line in directory.paths.metrics.read_text().splitlines()[:-1]]
    for line in lines:
        line["tflops"] = 120.0 if line["job_id"] == "12" else 149.5
    directory.paths.metrics.write_text("\n".join(map(json.dumps, lines)) + "\n")
    words = words_of(page_text(directory, with_charts=True))
    assert "each node was part of, the lowest first n3" in words


def test_a_length_is_about_where_no_one_has_said_when_it_ended(directory: RunDirectory) -> None:
    """Of one its verdict tells, of the other the trainer's end marker."""
    assert "about" not in " ".join(
        re.findall(r"10_[12] \S+ \S+ (.{1,30})", words_of(page_text(directory)))
    )
    (directory.paths.attempt("11") / "verdict.json").unlink()
    rows = re.findall(r"(10_[12]) \S+ \S+ (?:UTC )?about ", words_of(page_text(directory)))
    assert rows == ["10_1"]


def test_a_part_of_the_course_is_drawn_and_the_rest_stays_whole(directory: RunDirectory) -> None:
    facts = RunFacts("small", "main", directory.root, directory.kill_switch)
    within = CurveRange(CurvePlace(150), CurvePlace(160))
    part = gather(directory, facts, Unknown("no scheduler here"), START + 4000, within)
    assert not isinstance(part.series, Unknown)
    assert (part.series.total, {point.iteration for point in part.series.points}) == (
        11,
        set(range(150, 161)),
    )
    words = words_of(render(page_of(part, UTC)))
    assert "Course of the training from iteration 150 to iteration 160 11 steps;" in words
    assert "1 to 100" in words and "91 to 200" in words  # the attempts are told as they were
    none = gather(directory, facts, Unknown("no"), START + 4000, CurveRange(CurvePlace(900)))
    assert "no step is logged there" in words_of(render(page_of(none, UTC)))


def test_the_code_of_each_attempt_is_told(directory: RunDirectory) -> None:
    assert "Which code ran" not in page_text(directory)  # what an older tr11 did not record
    path = directory.paths.attempt("12") / "attempt.json"
    code = CodeIdentity("/code", "ab" * 20, "work", ("x.py",), 1, "f" * 64, "code.diff")
    since = [
        "since attempt 11: code: work 1234567890 -> work ababababab with 1 changed file (ffffffff)"
    ]
    write_json(path, {**json.loads(path.read_text()), "code": document(code), "versions": {"torch": "2.13"},
                      "changes": since})  # fmt: skip
    words = words_of(page_text(directory))
    part = words[words.index("Which code ran") :]
    assert (
        "10_2 work ababababab with 1 changed file (ffffffff) torch 2.13 code: work 1234567890 -&gt; work"
        in part
    )
    assert "the code lies in /code" in part


def test_a_cause_that_hides_several_things_is_named_once(directory: RunDirectory) -> None:
    assert sum("no scheduler here" in line for line in material_of(directory).read_errors) == 1


def test_hostile_texts_stay_texts(directory: RunDirectory) -> None:
    text = page_text(directory)
    assert html.escape(HOSTILE, quote=False).split(" &amp;")[0] in text.replace("&#39;", "'")
    assert "<img" not in text and "<script" not in text


def test_a_run_without_a_past_is_a_page_too(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run", "small", "main")
    paths.state.mkdir(parents=True)
    words = page_text(RunDirectory(paths, paths.root / "kill-switch"))
    assert "no step is logged yet" in words and "nothing was submitted yet" in words


def test_the_command_writes_the_page_or_refuses_in_one_line(
    directory: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    card = Path("tests/data/small-card.toml").resolve()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [
        "report", "--run", str(card), "--no-charts", "--scheduler", "local", "--set", f"run.directory={directory.root}",
        "--set", "run.name=small", "--set", "run.variant=main",
    ]  # fmt: skip
    assert execute([*words, "-o", "r.html"]) == 0
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    capsys.readouterr()
    assert execute([*words, "-o", "/none/r.html"]) == 2
    assert capsys.readouterr().err == "tr11: --output /none/r.html: there is no folder /none\n"
    os.mkfifo(tmp_path / "pipe")
    assert execute([*words, "-o", "pipe"]) == 2
    assert capsys.readouterr().err == "tr11: --output pipe: is not a file\n"
    assert execute([*words, "--zone", "../etc"]) == 2
    assert "is not a time zone" in capsys.readouterr().err


# ----------------------------------------------------------------------------- thinning and gaps
@given(
    st.lists(st.floats(0.1, 100) | st.just(math.nan), min_size=1, max_size=600),
    st.integers(6, 60),
)
def test_thinning_loses_no_extreme_and_keeps_the_order(losses: list[float], most: int) -> None:
    points = [point(index, loss) for index, loss in enumerate(losses)]
    kept, total = thinned(points, most)
    assert total == len(points)
    assert [each.iteration for each in kept] == sorted({each.iteration for each in kept})
    finite = [loss for loss in losses if not math.isnan(loss)]
    if finite:
        shown = [each.loss for each in kept if not math.isnan(each.loss)]
        assert min(shown) == min(finite)
        assert max(shown) == max(finite)
    assert any(math.isnan(loss) for loss in losses) == any(math.isnan(each.loss) for each in kept)
    assert len(kept) <= max(len(points) if len(points) <= most else 0, 14 * max(1, most // 7))


def test_the_spike_of_april_is_drawn() -> None:
    points = [
        point(step, *((5.098, 960.0) if step == 31219 else (2.2, 0.24))) for step in range(60_000)
    ]
    kept, _ = thinned(points, 2000)
    assert len(kept) <= 4000
    assert max(each.loss for each in kept) == 5.098
    assert max(each.grad_norm for each in kept) == 960.0


def test_no_metrics_are_an_empty_series() -> None:
    assert read_series(Path("/nonexistent/metrics.jsonl")) == TrainingSeries((), 0)


def test_no_line_is_drawn_across_an_outage_or_a_step_back() -> None:
    steady = [point(step) for step in range(50)]
    assert None not in with_gaps(steady)
    outage = [*steady, point(50, time=START + 105 * 49 + 7200)]
    assert with_gaps(outage)[-2] is None
    back = [*steady, point(40, time=START + 105 * 50)]
    assert with_gaps(back)[-2] is None


def test_a_validation_stands_at_the_tokens_of_its_step() -> None:
    validation = b'{"kind": "validation", "name": "en", "iteration": 7, "lm_loss": 2.5, "time": 1700000100.0}'
    found = map(parse_record, [record(7, "1", START).encode(), validation])
    series = series_of(points_of(each for each in found if each is not None))
    assert series.validations == (ValidationPoint("en", START + 100, 7, 7 * 16384, 2.5, 56),)


def layers_record(iteration: int, updates: list[float | None]) -> bytes:
    value = {
        "kind": "layers", "iteration": iteration, "time": START + iteration, "layers": ["embedding", "blocks.0", "blocks.1"],
        "gradient": [0.1, 0.3, 0.2], "update": updates, "weight": [10.0, 20.0, 40.0], "output": [None, 1.5, 2.5],
    }  # fmt: skip
    return json.dumps(value).encode()


def test_layers_are_read_with_the_one_that_has_most() -> None:
    """Updates relative to weights; what was not finite, or is no number at all, counts as not
    measured.
    """
    lines = [
        record(7, "1", START).encode(),
        layers_record(7, [0.1, 0.1, 0.1]),
        layers_record(8, [None, 0.6, None]),
    ]
    odd = b'{"kind": "layers", "iteration": 9, "time": 1700000200.0, "layers": ["a", "b"], "update": "none", "weight": [true]}'
    found = map(
        parse_record,
        [*lines, odd, b'{"kind": "layers", "iteration": 10, "time": 1.0, "layers": 3}'],
    )
    first, second, third = series_of(points_of(each for each in found if each is not None)).layers
    assert (first.iteration, first.tokens, first.samples) == (7, 7 * 16384, 56)
    assert first.update == LayerSpread(0.01, "embedding", 0.005)
    assert first.gradient == LayerSpread(0.3, "blocks.0", 0.2) and first.output == LayerSpread(
        2.5, "blocks.1", 2.0
    )
    assert second.update == LayerSpread(0.03, "blocks.0", 0.03)
    assert third.update.layer == "" and math.isnan(third.update.largest)


def test_a_spike_of_an_update_is_drawn() -> None:
    """Of more measures than are drawn each stretch's largest update stays."""
    points = (
        parse_record(layers_record(step, [0.1, 5.0 if step == 4321 else 0.1, 0.1]))
        for step in range(6000)
    )
    kept = series_of(points_of(each for each in points if each is not None)).layers
    assert len(kept) == MOST_LAYER_POINTS
    assert [each.iteration for each in kept if each.update.largest == 0.25] == [4321]


# ----------------------------------------------------------------------------- the charts
def test_layers_have_a_chart_where_they_were_measured(directory: RunDirectory) -> None:
    assert "layers-chart" not in page_text(directory, with_charts=True)
    with directory.paths.metrics.open("ab") as stream:
        stream.write(
            b"\n"
            + layers_record(5, [0.1, 0.6, 0.1])
            + b"\n"
            + layers_record(6, [0.1, 0.1, 0.1])
            + b"\n"
        )
    page = page_text(directory, with_charts=True)
    assert "layers-chart" in page and re.search(r"0\.030* in blocks\.0", page)


def test_each_stretch_without_data_breaks_the_line(directory: RunDirectory) -> None:
    page = page_text(directory, with_charts=True)
    loss = re.search(r'<path class="line blue" d="([^"]*)"', page)
    # Broken where the second attempt began, and at step 150, whose loss was not finite; nowhere
    # else.
    assert loss and loss[1].count("M") == 3


def test_incidents_are_named_and_nodes_have_their_throughput(directory: RunDirectory) -> None:
    page = page_text(directory, with_charts=True)
    assert re.search(r'<span class="critical"[^>]*>stopped: &lt;/script&gt;', page)
    usual = NodeThroughput(149.5, 1.0)
    assert throughput_by_node(material_of(directory)) == {"n1": usual, "n2": usual}  # n3 was spare
    assert "speed-chart" in page and "tokens-chart" in page


def test_the_page_of_a_long_run_stays_small(directory: RunDirectory) -> None:
    found = material_of(directory)
    several = [
        replace(
            attempt,
            label=f"{job}_{task}",
            job_id=f"{job}{task}",
            start=attempt.start + 90_000 * job,
        )
        for job in range(60)
        for task, attempt in enumerate(known(found.history.attempts, ()) * 5)
    ]
    series = series_of(long_course())
    material = replace(
        found, series=series, history=replace(found.history, attempts=tuple(several))
    )
    page = render(page_of(material, UTC))
    assert len(page.encode()) < 500_000
    (drawn,) = re.findall(r'(?s)id="attempts-chart">(.*?)<div class="axis">', page)
    assert re.findall(r'class="name">(job \d+)<', drawn) == [f"job {job}" for job in range(20, 60)]
    assert drawn.count("<title>") == 40 * 10  # each attempt by itself


def long_course() -> Iterator[StepPoint | ValidationPoint | LayersPoint]:
    """Steps that leave nothing to be thinned away, two groups of evaluations, and layers."""
    for step in range(1, 20_000):
        seen = point(step, 2 + math.sin(step), 1 / step, 149 + math.cos(step))
        yield seen
        if step % 20 == 0:
            spread = LayerSpread(
                1 + math.sin(step), f"blocks.{step % 70}", 0.5 + 0.1 * math.cos(step)
            )
            yield LayersPoint(seen.time, step, 1000 * step, None, spread, spread, spread)
            for group in ("valid", "other"):
                yield ValidationPoint(group, seen.time, step, 1000 * step, 2 + math.cos(step))


def test_the_top_says_it_in_a_sentence_with_an_eta(directory: RunDirectory) -> None:
    words = words_of(page_text(directory))
    assert re.search(
        r"The training has done 200 of 400 iterations \(3\.3 M tokens\) in [^;]+;[^.]*1 fault stopped it",
        words,
    )
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d ETA ", words)
    over = replace(material_of(directory), end=None)
    assert " not known ETA " in words_of(render(page_of(over, UTC, False)))


# ----------------------------------------------------------------------------- in a browser
# Measures the page inside frames of a desktop's and of a phone's width, and writes what it found
# into its own title.
FRAMES = """<!doctype html><body><script>
const widths = [1280, 390], found = [];
function point(inside) {
  const plot = inside.querySelector("#course-chart .plot"), box = plot.getBoundingClientRect();
  plot.onpointermove({clientX: box.left + box.width, clientY: box.top});
  return inside.querySelector("#course-chart .readout").textContent;
}
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px"; frame.style.height = "900px"; frame.src = "report.html";
  frame.onload = () => setTimeout(() => {
    const inside = frame.contentDocument;
    found.push({width, overflow: inside.documentElement.scrollWidth - width, title: inside.title,
      charts: inside.querySelectorAll(".chart").length,
      lines: inside.querySelectorAll("#course-chart .line").length,
      widest: Math.max(...[...inside.querySelectorAll(".chart svg")].map(e => e.getBoundingClientRect().width)),
      furthest: Math.max(...[...inside.querySelectorAll("td, th, .tiles li")].map(e => e.getBoundingClientRect().right)),
      paper: frame.contentWindow.getComputedStyle(inside.body).backgroundColor,
      said: point(inside),
      foreign: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:"))});
    if (found.length == widths.length) { const out = document.createElement("pre"); out.id = "found";
      out.textContent = JSON.stringify(found); document.body.append(out); }
  }, 1500);
  document.body.append(frame);
}
</script></body>"""


def test_it_fits_desktop_and_phone_and_fetches_nothing(
    directory: RunDirectory, tmp_path: Path
) -> None:
    program = browser()
    (tmp_path / "report.html").write_text(page_text(directory, with_charts=True), encoding="utf-8")
    (tmp_path / "frames.html").write_text(FRAMES, encoding="utf-8")
    done = subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--blink-settings=preferredColorScheme=0",
         "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000",
         "--dump-dom", (tmp_path / "frames.html").as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, (done.stdout[-2000:], done.stderr[-2000:])
    views = json.loads(html.unescape(match.group(1)))
    assert sorted(view["width"] for view in views) == [390, 1280]
    for view in views:
        assert view["overflow"] <= 0, view
        assert view["title"] == "small / main: report", view
        assert view["charts"] >= 5 and view["lines"] == 5, view
        assert view["furthest"] <= view["width"], view  # no column is cut off
        assert view["paper"] == "rgb(17, 24, 31)", view  # the browser asks for dark
        assert "iteration 200" in view["said"] and "loss 2.005" in view["said"], view
        assert 280 < view["widest"] <= view["width"], view
        assert view["foreign"] == [], view


def test_an_error_text_of_a_rank_takes_no_more_than_its_cell() -> None:
    text = f"rank 3 on n17 failed: {'Connection closed by peer [10.0.0.17]:41123 ' * 30}; launch 2 starts"
    made = table((Column("end", is_wide=True),), [(text,), (Cell(text, "critical"),)])
    assert made is not None
    for (cell,) in made.rows:
        assert len(cell.text) <= 300 and cell.text.startswith("rank 3 on n17")
        assert cell.text.endswith("launch 2 starts")
