"""Whole bytes may hold NaN: `verify` looks at the numbers where asked, `restore` and `drill` unless
told not to; all say what they did.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from tests.tr11ops.cli.local_bench import LocalBench
from tests.trainer.checkpoint.memory_source import Sizes, extras_of, info_of, memory_source
from tr11ops.backup.drill import choose_copy
from tr11ops.base.errors import Refusal
from tr11ops.checkpoints.verify import ValuesFound
from tr11ops.cli import backup_restore
from tr11ops.rundir.checkpoint_digests import NotFiniteRecord, note_numbers, read_not_finite
from tr11ops.rundir.copies import CopyRecord, read_copies, write_copy
from tr11ops.rundir.paths import RunDirectory
from trainer.checkpoint import rewrite
from trainer.checkpoint.deepspeed.write import write_deepspeed_layout
from trainer.checkpoint.publishing import NewCheckpoint
from trainer.contract.paths import RunPaths
from trainer.contract.resumable import ResumeFault, ResumeNeed, judge, size_faults

TOPOLOGY = {"tensor": 1, "pipeline": 1, "data": 1}
NAN = ("weights", "final_norm.bias")
INFINITE = ("optimizer", "blocks.1.mlp.up.weight/exp_avg_sq")


@pytest.fixture
def checkpoints(bench: LocalBench) -> Path:
    return bench.folder / "run" / "checkpoints" / "main"


@pytest.fixture
def save(checkpoints: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a checkpoint with these tensors spoilt, as no command of ours makes one any more."""

    def make(step: int, *spoilt: tuple[str, str], layout: str = "tr11") -> Path:
        source = memory_source(Sizes())
        for number, (part, key) in enumerate(spoilt):
            source.parts[part][key].view(-1)[-1] = (math.nan, -math.inf)[number % 2]
        for module in (
            rewrite,
            __import__("trainer.checkpoint.deepspeed.write", fromlist=["write"]),
        ):
            monkeypatch.setattr(
                module, "read_finite", lambda source, *place, **cut: source.read(*place, **cut)
            )
        write = rewrite.write_checkpoint if layout == "tr11" else write_deepspeed_layout
        new = NewCheckpoint(checkpoints, step, extras_of(source), info_of(source, TOPOLOGY))
        return write(new, source)

    return make


def test_verify_looks_at_every_number_where_asked(bench: LocalBench, save) -> None:
    save(100)
    save(200, NAN, INFINITE)
    run = ("--run", str(bench.card))
    bytes_alone = bench.tr11("checkpoints", "verify", "--all", *run)
    assert bytes_alone.code == 0 and bytes_alone.out == "2 read: 2 fine\n"
    assert "numbers were not looked at: --values" in bytes_alone.err
    asked = bench.tr11("checkpoints", "verify", "--all", "--values", *run)
    assert asked.code == 1 and "not looked at" not in asked.err
    assert "step 100: numbers finite" in asked.err
    named = f"step 200: BAD NaN or infinity in {NAN[1]} ({NAN[0]}), {INFINITE[1]} ({INFINITE[0]}): no training goes on"
    assert named in asked.err
    told = bench.tr11("checkpoints", "verify", "--all", "--values", *run, "--json").json
    sound, bad = (one["values"] for one in told["checkpoints"])
    assert sound["not_finite"] == [] and sound["tensors"] > 10
    assert bad["not_finite"] == [{"part": part, "tensor": key} for part, key in (NAN, INFINITE)]
    plain = bench.tr11("checkpoints", "verify", "100", *run, "--json").json
    assert plain["checkpoints"][0]["values"] is None


@pytest.mark.usefixtures("reader_here")
def test_the_original_s_layout_too(bench: LocalBench, save) -> None:
    save(100, NAN, layout="deepspeed")
    answer = bench.tr11("checkpoints", "verify", "100", "--values", "--run", str(bench.card))
    assert answer.code == 1 and NAN[1] in answer.err


@pytest.mark.usefixtures("reader_here")
def test_what_cannot_be_read_is_not_called_finite(bench: LocalBench, save) -> None:
    place = save(100)
    manifest = place / "manifest.json"
    manifest.unlink()
    (place / "weights" / ".metadata").unlink()
    answer = bench.tr11("checkpoints", "verify", "100", "--values", "--run", str(bench.card))
    assert answer.code != 0 and "finite, " not in answer.err


@pytest.fixture
def stored(bench: LocalBench, tmp_path: Path):
    """Copies what was saved, and gives the words that name run and store."""

    def copy() -> tuple[str, ...]:
        store = tmp_path / "store"
        store.mkdir()
        run = (
            "--run",
            str(bench.card),
            "--set",
            f"backup.store={store}",
            "--set",
            "backup.store_interval=100",
        )
        assert bench.tr11("backup", "run", *run).code == 0
        return run

    return copy


@pytest.mark.usefixtures("reader_here")
@pytest.mark.parametrize("asked", [(), ("--values",)])
def test_restore_looks_at_every_number_and_latest_stays(
    bench: LocalBench, save, stored, tmp_path: Path, asked
) -> None:
    save(100)
    save(200, NAN)
    run, into, other = stored(), tmp_path / "again", tmp_path / "other"
    first = bench.tr11("backup", "restore", "100", "--output", str(into), "--latest", *asked, *run)
    assert first.code == 0 and "step 100: numbers finite" in first.err
    assert (into / "latest").read_text() == "global_step100"
    bad = bench.tr11(
        "backup", "restore", "200", "--output", str(other), "--latest", *asked, *run, "--json"
    )
    assert bad.code == 1 and bad.json["values"]["not_finite"] == [
        {"part": NAN[0], "tensor": NAN[1]}
    ]
    assert (
        "BAD NaN or infinity" in bad.err
        and not (other / "latest").exists()
        and (other / "global_step200").is_dir()
    )
    without = bench.tr11(
        "backup", "restore", "200", "--from", "store",
        "--output", str(other), "--latest", "--no-values", *run,
    )  # fmt: skip
    assert without.code == 0 and "numbers were not looked at: --values" in without.err
    assert (other / "latest").read_text() == "global_step200"


def test_numbers_that_no_one_can_read_are_not_called_finite_and_stop_who_asked(
    bench: LocalBench, save, stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(100)
    run, into = stored(), tmp_path / "again"
    unread = ValuesFound(0, fault="no such layout")
    monkeypatch.setattr(
        backup_restore, "look_at_values", lambda places: dict.fromkeys(places, unread)
    )
    said = "numbers could not be looked at: no such layout"
    asked = bench.tr11(
        "backup", "restore", "100", "--output", str(into), "--latest", "--values", *run
    )
    assert asked.code == 1 and said in asked.err and not (into / "latest").exists()
    by_default = bench.tr11("backup", "restore", "100", "--output", str(into), "--latest", *run)
    assert by_default.code == 0 and said in by_default.err and (into / "latest").exists()


@pytest.mark.usefixtures("reader_here")
def test_a_drill_looks_at_the_numbers_too(bench: LocalBench, save, stored) -> None:
    save(100)
    run = stored()
    assert "every number finite" in bench.tr11("backup", "drill", *run).out
    save(200, NAN)
    assert bench.tr11("backup", "run", *run).code == 0
    bad = bench.tr11("backup", "drill", *run)
    assert bad.code == 1 and f"NaN or infinity in {NAN[1]}" in bad.out + bad.err


def test_a_reader_that_gives_no_answer_stops_who_asked_alone(
    bench: LocalBench, save, stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(100)
    run, into = stored(), tmp_path / "again"

    def no_answer(places: object) -> None:
        raise Refusal("the numbers could not be looked at (see above)")

    monkeypatch.setattr(backup_restore, "look_at_values", no_answer)
    assert bench.tr11("backup", "restore", "100", "--output", str(into), "--values", *run).code == 1
    by_default = bench.tr11("backup", "restore", "100", "--output", str(into), *run)
    assert by_default.code == 0 and "could not be looked at" in by_default.err


# ----------------------------------------------------------------------------- what is found goes on
# record
def found_on(bench: LocalBench, step: int) -> ResumeFault | None:
    """Why a restart would pass over a checkpoint; None where it would take it."""
    return judge(bench.folder / "run" / "checkpoints" / "main", step, ResumeNeed(), size_faults)[1]


@pytest.mark.usefixtures("reader_here")
def test_a_restart_passes_over_what_verify_found(bench: LocalBench, save) -> None:
    save(100)
    save(200, NAN)
    run = ("--run", str(bench.card))
    assert bench.tr11("checkpoints", "verify", "--all", *run).code == 0
    assert found_on(bench, 200) is None
    assert bench.tr11("checkpoints", "verify", "200", "--values", *run).code == 1
    fault = found_on(bench, 200)
    assert fault is not None and f"NaN or infinity in {NAN[0]}/{NAN[1]}" in fault.text
    # reading the bytes again, which are those that were saved, changes nothing of it
    assert bench.tr11("checkpoints", "verify", "200", *run).code == 0
    assert found_on(bench, 200) is not None and found_on(bench, 100) is None
    listed = bench.tr11("checkpoints", "list", *run)
    assert f"step 200: NaN or infinity in {NAN[0]}/{NAN[1]}" in " ".join(listed.out.split())


@pytest.mark.usefixtures("reader_here")
def test_another_checkpoint_of_the_step_is_not_meant(
    bench: LocalBench, save, checkpoints: Path
) -> None:
    save(200, NAN)
    run = ("--run", str(bench.card))
    assert bench.tr11("checkpoints", "verify", "200", "--values", *run).code == 1
    shutil.rmtree(checkpoints / "global_step200")
    save(200)
    assert found_on(bench, 200) is None


@pytest.mark.usefixtures("reader_here")
def test_numbers_that_are_finite_at_a_later_look_clear_it(
    bench: LocalBench, save, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, run = save(200), ("--run", str(bench.card))
    wrong = ValuesFound(1, (NAN,))
    with monkeypatch.context() as once:
        once.setattr(
            "tr11ops.cli.checkpoints.look_at_values", lambda places: dict.fromkeys(places, wrong)
        )
        assert bench.tr11("checkpoints", "verify", "200", "--values", *run).code == 1
    assert found_on(bench, 200) is not None
    unread = ValuesFound(0, fault="no such layout")
    with monkeypatch.context() as once:
        once.setattr(
            "tr11ops.cli.checkpoints.look_at_values", lambda places: dict.fromkeys(places, unread)
        )
        assert bench.tr11("checkpoints", "verify", "200", "--values", *run).code == 1
    assert found_on(bench, 200) is not None, "what no one could look at says nothing"
    assert bench.tr11("checkpoints", "verify", "200", "--values", *run).code == 0
    assert found_on(bench, 200) is None and place.is_dir()


def bring_back(bench: LocalBench, run: tuple[str, ...], into: Path) -> None:
    words = ("backup", "restore", "200", "--output", str(into), *run)
    assert bench.tr11(*words).code == 1


def drill(bench: LocalBench, run: tuple[str, ...], into: Path) -> None:
    assert bench.tr11("backup", "drill", *run).code == 1


@pytest.mark.usefixtures("reader_here")
@pytest.mark.parametrize("look", [bring_back, drill])
def test_what_is_found_in_a_copy_counts_for_the_checkpoint_and_each_copy(
    bench: LocalBench, save, stored, tmp_path: Path, look
) -> None:
    save(100)
    save(200, NAN)
    run = stored()
    look(bench, run, tmp_path / "again")
    assert found_on(bench, 200) is not None and found_on(bench, 100) is None
    shown = bench.tr11("backup", "status", *run, "--json").json
    (store,) = [one for one in shown["archives"] if one["archive"] == "store"]
    assert {copy["step"]: copy["not_finite"] for copy in store["copies"]} == {
        100: [],
        200: [f"{NAN[0]}/{NAN[1]}"],
    }
    assert [copy["damaged"] for copy in store["copies"]] == [[], []]
    # its bytes are whole: no round makes it again, and the next drill takes the one before
    assert not [due for due in store["due"] if due["step"] == 200]
    paths = RunPaths(bench.folder / "run", "run", "main")
    next_drill = choose_copy(read_copies(RunDirectory(paths, bench.folder / "kill-switch")))
    assert next_drill is not None and next_drill.step == 100
    refused = bench.tr11("backup", "restore", "200", "--output", str(tmp_path / "b"), *run)
    said = "no sound copy of step 200 is on record (the store's is not sound: NaN or infinity in"
    assert refused.code != 0 and f"{said} {NAN[0]}/{NAN[1]})" in refused.err
    journal = "".join(path.read_text() for path in (bench.folder / "run/journal").glob("*.jsonl"))
    assert journal.count('"checkpoint-not-finite"') == 1


def test_weights_alone_are_sound_where_the_optimizer_is_not() -> None:
    record = NotFiniteRecord(200, "i", 1.0, not_finite=("optimizer/a/exp_avg", "weights/b"))
    assert record.of_copy("full") == record.not_finite
    assert record.of_copy("weights") == record.of_copy("spike") == ("weights/b",)


@pytest.mark.parametrize(("found", "left"), [((), ()), (("weights/b",), ("weights/b",))])
def test_a_look_at_weights_alone_says_nothing_of_the_optimizer(
    tmp_path: Path, found: tuple[str, ...], left: tuple[str, ...]
) -> None:
    """A restore of the weights, all finite, made the checkpoint sound again."""
    run = RunDirectory(RunPaths(tmp_path, "run", "main"), tmp_path / "kill-switch")
    both = ["weights/a", "optimizer/a/exp_avg"]
    note_numbers(run, 200, "abcdef0123", not_finite=both, why="found by verify --values")
    note_numbers(run, 200, "abcdef0123", kind="weights", not_finite=found, why="found by a restore")
    record = read_not_finite(run, 200, "abcdef0123")
    assert record is not None and record.not_finite == (*left, "optimizer/a/exp_avg")
    note_numbers(run, 200, "abcdef0123", not_finite=(), why="found by verify --values")
    assert read_not_finite(run, 200, "abcdef0123") is None


def test_numbers_of_a_copy_are_those_of_its_own_variant(tmp_path: Path) -> None:
    """They were looked for among this variant's, where there are none, or another checkpoint's."""
    main, other = (
        RunDirectory(RunPaths(tmp_path, "run", variant), tmp_path / "kill-switch")
        for variant in ("main", "other")
    )
    for run, identity in ((main, "a" * 64), (other, "b" * 64)):
        place = f"checkpoints/{run.paths.variant}/global_step200"
        fields = {"step": 200, "kind": "full", "identity": identity, "location": place}
        about = {"format": "files", "files": 1, "bytes": 1, "copied": 1.0, "verified": 1.0}
        write_copy(run, CopyRecord("store", "/archive", **fields, **about))
    note_numbers(other, 200, "b" * 64, not_finite=["weights/a"], why="found by a drill")
    found = {copy.variant: copy.not_finite for copy in read_copies(main, every_variant=True)}
    assert found == {"main": (), "other": ("weights/a",)}
    assert {copy.not_finite for copy in read_copies(other)} == {("weights/a",)}
