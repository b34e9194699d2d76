"""Faults of the past, seeded into real trainings on several ranks: the diff finds each, names it,
and nothing else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.child_requests import checkpoints as run_checkpoints
from tests.trainer.debug.seeded import (
    DUPLICATE,
    FAULTS,
    IN_THE_ENGINE,
    LAST,
    NORM,
    SAVED,
    all_faults,
    card,
    resumed,
)
from tests.trainer.spawn import run_ranks
from trainer.contract.record import Record

HEAD = "embedding.word.weight"
NORM_WEIGHT = f"{NORM}.weight"
DEADLINE = 600.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every fault with fingerprints in bf16 on 2 stages x 2 tensor ranks; three of them whole in
    fp32 on 2 stages.
    """
    folder = tmp_path_factory.mktemp("seeded")
    run_ranks(
        all_faults, 4, card(2, 2, "bf16", "fingerprint"), folder, list(FAULTS), timeout=DEADLINE
    )
    whole = ["none", "unused-norm", "unreduced-head"]
    run_ranks(all_faults, 2, card(2, 1, "fp32", "full"), folder / "full", whole, timeout=DEADLINE)
    yield folder
    shutil.rmtree(folder)


class Answer(Record):
    code: int
    value: dict[str, Any]

    @property
    def kinds(self) -> list[str]:
        return [finding["kind"] for finding in self.value["findings"]]

    def finding(self, kind: str) -> dict[str, Any]:
        return next(finding for finding in self.value["findings"] if finding["kind"] == kind)


class Diff:
    """Types `diff A B --json`."""

    def __init__(self, capture: pytest.CaptureFixture[str]):
        self.capture = capture

    def __call__(self, *words: object) -> Answer:
        self.capture.readouterr()
        code = run_checkpoints(*["diff", "--json", *map(str, words)])
        return Answer(code, json.loads(self.capture.readouterr().out))


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Diff:
    return Diff(capsys)


def test_a_sound_restart_is_equal(trained: Path, diff: Diff) -> None:
    for place in (trained / "none", trained / "full" / "none"):
        answer = diff(place / "a", place / "b")
        assert (answer.code, answer.value["equal"], answer.value["findings"]) == (0, True, [])
        assert [pair[1] for pair in answer.value["compared"]] == [
            "A (on-save 4)", "A (before-iteration 5)", "B (on-load 4)", "B (before-iteration 5)", "B (after-iteration 5)",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        ("unused-norm", "tied-copy", NORM_WEIGHT),
        ("unreduced-head", "tied-copy", HEAD),
        ("unclipped-duplicate", "tensor-duplicate", DUPLICATE),
        ("adam-from-zero", "optimizer-step", "optimizer_step"),
        ("wrong-generator", "random-state", "torch"),
        ("shifted-cursor", "data-order", "consumed_samples"),
        ("doubled-rate", "schedule", "learning_rate"),
    ],
)
def test_each_fault_is_found_and_named_first(
    trained: Path, diff: Diff, fault: str, kind: str, name: str
) -> None:
    first = fault if fault in IN_THE_ENGINE else "none"
    answer = diff(trained / first / "a", trained / fault / "b")
    assert answer.code == 1
    assert answer.kinds[0] == kind and answer.value["findings"][0]["names"][0] == name
    # later weights differ because of it, nothing else does
    assert set(answer.kinds) <= {kind, "weight"}


def test_an_unused_copy_drifts_and_comes_back_as_it_was(trained: Path, diff: Diff) -> None:
    """The last stage's LayerNorm was decayed and never trained; no load restores it."""
    place = trained / "unused-norm"
    saved = json.loads((place / "a" / "debug-bf16-4-pp1-tp0-dp0-on-save.json").read_text())
    numbers = next(item["numbers"] for item in saved["parameters"] if item["name"] == NORM_WEIGHT)
    # what was seen in the large run: one step of bf16
    assert numbers["min"] == numbers["max"] == 1.0 - 2.0**-8
    answer = diff(f"{place / 'a'}:{SAVED}:on-save", f"{place / 'b'}:{SAVED}:on-load")
    assert answer.kinds == ["tied-copy"]
    [finding] = answer.value["findings"]
    assert finding["names"] == [NORM_WEIGHT, f"{NORM}.bias"]
    assert {held["stage"] for held in finding["places"]} == {1}
    assert any("this copy is 1 throughout, as at the start" in line for line in finding["detail"])


def test_a_tied_copy_that_drifted_is_made_equal_by_the_load(trained: Path, diff: Diff) -> None:
    for place in (trained / "unreduced-head", trained / "full" / "unreduced-head"):
        answer = diff(
            f"{place / 'a'}:{SAVED}:after-iteration", f"{place / 'b'}:{LAST}:before-iteration"
        )
        assert answer.kinds == ["tied-copy"]
        [finding] = answer.value["findings"]
        assert finding["names"] == [HEAD] and {held["stage"] for held in finding["places"]} == {1}
        assert any(
            "differ from each other in A and agree in B" in line for line in finding["detail"]
        )
        assert answer.value["first_divergence"]["place"]["stage"] == 1


def test_the_first_divergence_is_where_torch_sees_it(trained: Path, diff: Diff) -> None:
    place = trained / "full" / "unreduced-head"
    delta = diff(f"{place / 'a'}:{SAVED}:on-save", f"{place / 'b'}:{SAVED}:on-load").value[
        "first_divergence"
    ]["delta"]
    [before], [after] = (
        list((place / side).glob(f"debug-{SAVED}-pp1-tp0-dp0-global1-{moment}-*.pt"))
        for side, moment in (("a", "on-save"), ("b", "on-load"))
    )
    a, b = (torch.load(path, weights_only=True)[HEAD] for path in (before, after))
    assert delta["largest"] == (a - b).abs().max().item()
    assert (delta["a"], delta["b"]) == (a[tuple(delta["at"])].item(), b[tuple(delta["at"])].item())
    assert (delta["different"], delta["count"]) == (int((a != b).sum()), a.numel())


def test_a_larger_difference_is_allowed_when_asked_for(trained: Path, diff: Diff) -> None:
    place = trained / "full" / "unreduced-head"
    states = (f"{place / 'a'}:{LAST}:after-iteration", f"{place / 'b'}:{LAST}:after-iteration")
    assert diff(*states).kinds == ["tied-copy", "weight"]
    # Copies inside one state must be equal to the bit, whatever is allowed between two states.
    loose = diff(*states, "--tolerance", "0.5")
    assert loose.kinds == ["tied-copy"] and len(loose.value["findings"][0]["between"]) == 1


def test_other_shapes_load_the_same_weights(trained: Path, diff: Diff, tmp_path: Path) -> None:
    """Saved on 2 stages x 2 tensor ranks, loaded on one rank and on two: fingerprints are of whole
    tensors.
    """
    for tensor in (1, 2):
        run_ranks(
            resumed,
            tensor,
            card(1, tensor, "bf16", "fingerprint"),
            trained / "none",
            tmp_path / str(tensor),
        )
    one, two = (f"{tmp_path / name}:{SAVED}:on-load" for name in "12")
    for left, right in ((f"{trained / 'none' / 'a'}:{SAVED}:on-save", one), (one, two)):
        answer = diff(left, right)
        assert (answer.code, answer.kinds) == (0, [])
        assert "different shapes" in answer.value["remarks"][0]
    answer = diff(trained / "adam-from-zero" / "b", tmp_path / "2")
    assert answer.kinds == ["optimizer-step", "weight"]


def test_a_checkpoint_against_the_dumps_of_its_save(trained: Path, diff: Diff) -> None:
    for place in (trained / "none", trained / "full" / "none"):
        answer = diff(place / f"global_step{SAVED}", f"{place / 'a'}:{SAVED}:on-save")
        assert (answer.code, answer.kinds) == (0, [])
        assert answer.value["numbers"] > 20_000
    # The checkpoint holds the first stage's copy, so it equals what the first stage dumped.
    place = trained / "full" / "unreduced-head"
    answer = diff(place / f"global_step{SAVED}", f"{place / 'a'}:{SAVED}:on-save")
    assert answer.kinds == ["tied-copy"] and answer.value["findings"][0]["place"]["stage"] == 1


def test_two_checkpoints(trained: Path, diff: Diff) -> None:
    """The same start and the same samples; the second's last stage trained its copy of the
    embedding otherwise.
    """
    step = f"global_step{SAVED}"
    assert diff(trained / "none" / step, trained / "none" / step).code == 0
    answer = diff(trained / "none" / step, trained / "unreduced-head" / step)
    assert answer.code == 1 and answer.kinds == ["weight", "master-weight", "moment"]
    assert answer.value["first_divergence"]["tensor"] == HEAD
    assert answer.value["findings"][2]["names"][0] == f"{HEAD}/exp_avg"


def test_the_original_layout_is_the_same_state_with_duplicates(
    trained: Path, diff: Diff, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The LayerNorms of one checkpoint that differed between tensor ranks were seen in its files
    alone.
    """
    place = trained / "none" / f"global_step{SAVED}"
    words = ["--format", "deepspeed", "--pipeline", "1", "--tensor", "2", "--data", "1"]
    assert run_checkpoints(*["reshape", str(place), "-o", str(tmp_path), *words]) == 0
    other = tmp_path / f"global_step{SAVED}"
    answer = diff(place, other)
    assert (answer.code, answer.kinds) == (0, [])
    path = next(
        path
        for path in sorted(other.glob("layer_*-model_01-model_states.pt"))
        if "input_layernorm" in names(path)
    )
    states = torch.load(path, weights_only=False)
    states["input_layernorm.weight"] += 0.25
    torch.save(states, path)
    # else the changed file is refused before it is read
    (other / "manifest.json").unlink(missing_ok=True)
    answer = diff(place, other)
    assert answer.code == 1 and "tensor-duplicate" in answer.kinds
    assert "blocks.0.input_norm.weight" in answer.finding("tensor-duplicate")["detail"][0]


def names(path: Path) -> str:
    return " ".join(torch.load(path, weights_only=False))


def test_a_lost_dump_is_no_equality(trained: Path, diff: Diff, tmp_path: Path) -> None:
    shutil.copytree(trained / "none" / "b", tmp_path / "b")
    for path in (tmp_path / "b").glob(f"*-{SAVED}-pp1-tp1-*-on-load.json"):
        path.unlink()
    answer = diff(trained / "none" / "a", tmp_path / "b")
    assert (
        answer.code == 1
        and "missing" in answer.kinds
        and "rank 3" in answer.finding("missing")["detail"][0]
    )


def test_a_damaged_file_of_tensors_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side in "ab":
        shutil.copytree(trained / "full" / "unreduced-head" / side, tmp_path / side)
    [path] = (tmp_path / "b").glob(f"debug-{SAVED}-pp1-*-on-load-*.pt")
    path.write_bytes(path.read_bytes()[:1000])
    assert run_checkpoints(*["diff", *(f"{tmp_path / name}:{SAVED}" for name in "ab")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and f"{path} cannot be read" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{}/none/a", "{}/nowhere"], 1, "nowhere is not a folder"),
        (["{}/none/a", "{}/none/a:77"], 1, "has no dump of 77; it holds before-iteration 4"),
        (["{}/none/a", "{}/none/a:4:sometimes"], 2, "MOMENT is one of after-iteration"),
        (["{}/none/a:3-4", "{}/none/a"], 2, "must be FOLDER:ITERATION:MOMENT"),
    ],
)
def test_refusals_are_one_line(
    trained: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    assert run_checkpoints(*["diff", *(word.format(trained) for word in words)]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err.strip().splitlines()[-1] and "Traceback" not in err
