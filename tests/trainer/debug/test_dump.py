"""Dumps: names and contents of the files, what is dumped when, and companions that are read back."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from tests.trainer.cases import tiny
from tests.trainer.child_requests import checkpoints as run_checkpoints
from tests.trainer.courses import attempt_of, trained, write_tokens
from tests.trainer.spawn import run_ranks
from trainer.config.card import DebugSection, TrainerConfig
from trainer.contract.errors import CheckpointError
from trainer.debug.dump import DebugDumps, random_digests, samples_digest
from trainer.debug.record import DumpRecord, StepFacts, companions
from trainer.loop import Trainer
from trainer.model.families import FAMILIES
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import Sharding, declare

FACTS = StepFacts(optimizer_step=7, learning_rate=6e-5, consumed_samples=112, consumed_tokens=1792)
# The worker at stage 1, tensor rank 1, data rank 0 of a grid of 2 x 2 x 2.
MESH = Mesh(pipeline=2, data=2, tensor=2, rank=5, device=torch.device("cpu"))


def parameters() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(3)
    return [
        ("blocks.1.input_norm.weight", declare(nn.Parameter(torch.ones(8)), Sharding(None, 1))),
        ("blocks.1.mlp.up.weight", declare(nn.Parameter(torch.randn(6, 8)), Sharding(0, 2))),
        (
            "embedding.word.weight",
            declare(nn.Parameter(torch.randn(10, 8, dtype=torch.bfloat16)), Sharding(0, 2)),
        ),
    ]


def dumps(folder: Path, form: str, *iterations: str) -> DebugDumps:
    section = DebugSection.model_validate({"dump": form, "iterations": list(iterations)})
    return DebugDumps(section, MESH, folder, FAMILIES["gpt"])


def moments(folder: Path) -> list[tuple[str, int, int]]:
    records = [DumpRecord.read(path) for path in companions(folder)]
    return sorted((record.moment, record.iteration, record.completed) for record in records)


def test_full_form(tmp_path: Path) -> None:
    named = parameters()
    dumps(tmp_path, "full").after_step(805, named, FACTS)
    stem = f"debug-805-pp1-tp1-dp0-global5-after-iteration-{os.getpid()}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{stem}.{end}" for end in ("json", "pt", "txt")
    ]
    text = (tmp_path / f"{stem}.txt").read_text()
    assert [line.split("=")[0] for line in text.splitlines() if "=tensor" in line] == [
        name for name, _ in named
    ]
    assert "blocks.1.input_norm.weight=tensor([1., 1., 1., 1., 1., 1., 1., 1.])" in text
    saved = torch.load(tmp_path / f"{stem}.pt", weights_only=True)
    assert all(torch.equal(saved[name], parameter) for name, parameter in named)


def test_fingerprint_form(tmp_path: Path) -> None:
    named = parameters()[2:]
    dumps(tmp_path, "fingerprint").before_step(806, named, FACTS)
    stem = "debug-bf16-806-pp1-tp1-dp0-before-iteration"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{stem}.json", f"{stem}.txt"]
    head, row = (tmp_path / f"{stem}.txt").read_text().splitlines()
    assert head.split() == ["min", "max", "mean", "l2", "norm", "metadata"]
    assert row.endswith("embedding.word.weight [10, 8]")
    assert float(row[:13]) == pytest.approx(float(named[0][1].detach().min()), rel=1e-6)


def test_companion_says_what_the_diff_needs(tmp_path: Path) -> None:
    hook = dumps(tmp_path, "fingerprint")
    batch = torch.arange(12).view(2, 6)
    hook.before_step(8, parameters(), FACTS)
    assert list(hook.watch(iter([(batch, batch)]))) == [(batch, batch)]
    hook.after_step(8, parameters(), FACTS)
    records = {record.moment: record for record in map(DumpRecord.read, companions(tmp_path))}
    record = records["after-iteration"]
    assert (record.completed, records["before-iteration"].completed) == (8, 7)
    assert record.facts == replace(FACTS, samples_digest=samples_digest(batch))
    assert records["before-iteration"].facts == FACTS
    assert record.topology == {"pipeline": 2, "data": 2, "tensor": 2}
    assert (record.place.rank, record.place.stage, record.place.tensor, record.place.data) == (
        5,
        1,
        1,
        0,
    )
    assert record.random_state.keys() >= {"torch", "python", "numpy"}
    norm, up, word = record.parameters
    assert (norm.replicated, norm.sharding_dim, norm.tied) == (True, None, False)
    assert (up.replicated, up.sharding_dim, up.shape, up.global_shape, up.offsets) == (
        False,
        0,
        (6, 8),
        (12, 8),
        (6, 0),
    )
    assert (word.tied, word.dtype, word.numbers.count) == (True, "bfloat16", 80)


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        (
            (),
            {
                ("before", 4),
                ("after", 4),
                ("before", 5),
                ("after", 5),
                ("save", 5),
                ("before", 6),
                ("load", 2),
            },
        ),
        (("5-5",), {("before", 5), ("after", 5), ("save", 5)}),
        (("3-3", "6-7"), {("save", 5), ("before", 6), ("load", 2)}),
        (("9-10",), set()),
    ],
)
def test_what_is_dumped_when(
    tmp_path: Path, ranges: tuple[str, ...], expected: set[tuple[str, int]]
) -> None:
    """A save and a load belong to the steps on both sides of them."""
    hook = dumps(tmp_path, "fingerprint", *ranges)
    named = parameters()
    hook.on_load(2, named, FACTS)
    for step in (4, 5):
        hook.before_step(step, named, FACTS)
        hook.after_step(step, named, FACTS)
    hook.on_save(5, named, FACTS)
    hook.before_step(6, named, FACTS)
    words = {
        "before-iteration": "before",
        "after-iteration": "after",
        "on-save": "save",
        "on-load": "load",
    }
    assert {(words[moment], iteration) for moment, iteration, _ in moments(tmp_path)} == expected


def test_off_does_nothing_at_all(tmp_path: Path) -> None:
    hook = dumps(tmp_path / "never", "off", "1-9")
    stream = iter([(torch.zeros(1, 2),)])
    assert hook.watch(stream) is stream
    for method in (hook.before_step, hook.after_step, hook.on_save, hook.on_load):
        method(1, iter(()), FACTS)
    assert not hook.enabled and not hook.wants(1) and not (tmp_path / "never").exists()


def test_samples_digest_tells_samples_not_their_order() -> None:
    tokens = torch.arange(40).view(4, 10)
    assert samples_digest(tokens) == samples_digest(tokens.flip(0))
    assert (
        samples_digest(tokens) == (samples_digest(tokens[:1]) + samples_digest(tokens[1:])) % 2**64
    )
    assert samples_digest(tokens) != samples_digest(tokens.flip(1))
    assert samples_digest(tokens[[0, 1, 2, 2]]) != samples_digest(tokens)


def test_random_digests_follow_the_generators() -> None:
    before = random_digests()
    assert random_digests() == before
    torch.rand(1)
    after = random_digests()
    assert {name for name in before if before[name] != after[name]} == {"torch"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: {**value, "schema": 99}, "newer tr11"),
        (lambda value: {**value, "parameters": 3}, "not a dump's companion"),
        (
            lambda value: {key: item for key, item in value.items() if key != "facts"},
            "not a dump's companion",
        ),
        (lambda value: [value], "not a dump's companion"),
    ],
)
def test_a_damaged_companion_is_refused_by_name(
    tmp_path: Path, change: object, message: str
) -> None:
    dumps(tmp_path, "fingerprint").on_save(3, parameters(), FACTS)
    [path] = companions(tmp_path)
    assert callable(change)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=message) as caught:
        DumpRecord.read(path)
    assert str(path) in str(caught.value)


def test_a_cut_off_companion_is_refused(tmp_path: Path) -> None:
    dumps(tmp_path, "fingerprint").on_save(3, parameters(), FACTS)
    [path] = companions(tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(CheckpointError, match="not a dump's companion"):
        DumpRecord.read(path)


# ----------------------------------------------------------------------------- loop dumps
# Dumps of the real loop: a restart shows in them as equal to going on, with data from worker
# processes and dropout.


def card(folder: Path, directory: str, leave_at: int) -> TrainerConfig:
    value = tiny(2, 1, hidden_dropout=0.1).model_dump(mode="json")
    value["run"] |= {"directory": str(folder / directory), "exit_interval": leave_at}
    value["evaluation"] |= {"interval": 3, "iterations": 1}
    value["data"]["prefixes"] = [str(folder / "tokens")]
    value["debug"] = {"dump": "fingerprint", "iterations": ["4-6"]}
    return TrainerConfig.model_validate(value)


def attend(config: TrainerConfig, job: str) -> str:
    # Python seeds its generator again in each process; nothing in the training draws from it
    random.seed(7)
    return trained(attempt_of(Trainer, config, job))[0]


def test_a_restart_is_the_same_as_going_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path, 200)
    for directory, job, leave_at in (
        ("stopped", "7", 4),
        ("stopped", "8", 6),
        ("straight", "9", 6),
    ):
        config = card(tmp_path, directory, leave_at)
        assert run_ranks(attend, 2, config, job, launch=False) == ["exit-interval"] * 2
    places = {
        job: str(tmp_path / directory / "state" / "attempts" / job / "debug" / "launch-1")
        for directory, job in (("stopped", "7"), ("stopped", "8"), ("straight", "9"))
    }
    after = next(
        path
        for path in companions(Path(places["9"]))
        if path.name.endswith("6-pp0-tp0-dp0-after-iteration.json")
    )
    record = DumpRecord.read(after)
    assert (record.facts.optimizer_step, record.facts.consumed_samples) == (6, 96)
    assert record.facts.samples_digest is not None
    for one, other in (("7", "8"), ("9", "8")):
        code = run_checkpoints(*["diff", places[one], places[other]])
        assert code == 0, capsys.readouterr().out
    assert (
        run_checkpoints(
            *["diff", f"{places['9']}:6:after-iteration", f"{places['9']}:5:after-iteration"]
        )
        == 1
    )
