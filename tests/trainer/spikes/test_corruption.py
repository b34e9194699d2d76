"""Silent corruption is found and the right worker named; looking for it changes no bit of the
training.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.trainer.cases import CPU, Piece, batches, copy_state, tiny
from tests.trainer.spawn import run_ranks
from trainer.config.card import TrainerConfig
from trainer.contract.attempt import AttemptIdentity
from trainer.contract.corruption import Suspect, WorkerDigests, judge
from trainer.contract.errors import LostRanksError
from trainer.contract.files import host_name
from trainer.contract.record import Record
from trainer.contract.requests import RequestAnswer
from trainer.control.exits import failure_text
from trainer.engine import Engine
from trainer.model.layers import ColumnParallelLinear
from trainer.parallel.mesh import Mesh
from trainer.spikes.corruption_check import PEER_FAULT, CorruptionWatch, check_workers


def outcome(
    rank: int, first: str, second: str = "", stage: int = 0, replica: int = 0, part: int = 0
) -> WorkerDigests:
    ones, twos = tuple(map(ord, first)), tuple(map(ord, second or first))
    return WorkerDigests(rank, stage, replica, part, f"n{rank}", "GPU 0", ones, twos)


def named(*outcomes: WorkerDigests) -> list[tuple[int, str]]:
    return [(suspect.rank, suspect.how) for suspect in judge(outcomes)]


def test_who_is_suspect() -> None:
    one, two, three = (outcome(rank, "abc", replica=rank) for rank in range(3))
    assert named(one, two, three) == named(one) == []
    assert named(one, outcome(1, "abc", "abd", replica=1), three) == [(1, "repeat")]
    assert named(one, outcome(1, "xyz", "abc", replica=1)) == [(1, "repeat")], (
        "the others are not asked"
    )
    assert named(one, outcome(1, "abx", replica=1), three) == [(1, "minority")]
    assert named(one, outcome(1, "abx", replica=1)) == [(0, "undecided"), (1, "undecided")]
    assert named(one, two, outcome(2, "x", replica=2), outcome(3, "x", replica=3)) == [
        (rank, "undecided") for rank in range(4)
    ]
    assert named(one, two, outcome(2, "x", replica=2), outcome(3, "y", replica=3)) == [
        (2, "minority"),
        (3, "minority"),
    ]
    lame = replace(two, first=(), second=(), fault="OutOfMemoryError")
    assert named(one, lame) == []
    assert str(Suspect(3, "n7", "GPU 1", "repeat")).startswith("rank 3 on n7 (GPU 1) computed")


def test_of_tensor_ranks_the_one_that_differs_first() -> None:
    right = [outcome(0, "abcd"), outcome(1, "efcd", part=1)]
    wrong = [outcome(2, "abxx", replica=1), outcome(3, "eyxx", replica=1, part=1)]
    assert named(*right, *wrong, *(replace(each, replica=2) for each in right)) == [(3, "minority")]
    twice = [outcome(0, "abcd", "abxx"), outcome(1, "efcd", "eyxx", part=1)]
    assert named(*twice) == [(1, "repeat")]


class Seen(Record):
    """One rank's training: losses, state and random stream at its end; for each check, what was
    found by name.
    """

    losses: list[float]
    state: list[Piece]
    drawn: Tensor
    found: dict[str, list[tuple[int, str]]]
    faults: list[str]


def train(card: TrainerConfig, checks: bool) -> Seen:
    """Some steps, the arithmetic checked between them: no one wrong, then rank 3 in one of two,
    then in both.
    """
    mesh = Mesh.create(card.parallel, CPU)
    engine = Engine.build(card, mesh)
    said: list[str] = []
    watch = CorruptionWatch(
        card, mesh, AttemptIdentity("7", 1, card.paths.stop_request("7")), said.append
    )
    losses, found, faults = [], {}, []
    torch.manual_seed(5)  # no step does, and no check may draw
    for step, wrong in enumerate(("never", "once", "twice", "after")):
        losses.append(engine.train_step(batches(card, mesh, step, 16), 16, step).loss)
        if not checks:
            continue
        if wrong == "never":
            watch.ask(11)
            watch.ask(12)  # while the other one is under way
            watch.after_step(1, engine)  # not due, and asked for
            watch.after_step(1, engine)
            assert len(said) == (mesh.rank == 0), "asked for once"
        if wrong == "twice":
            watch.ask(13)
        hook = flip_bits(engine, wrong) if mesh.rank == 3 else None
        if wrong == "twice":
            watch.after_step(step, engine)
            watch.after_step(step + 1, engine)  # not due
        outcomes = check_workers(engine.stage(), mesh, 7, step)
        if hook is not None:
            hook.remove()
        found[wrong] = named(*outcomes)
        faults += [each.fault for each in outcomes if each.fault]
        assert all(len(set(each.first)) > 5 for each in outcomes), "something was computed"
    seen = Seen(losses, copy_state(engine), torch.rand(4), found, faults)
    engine._pipeline.destroy()
    return seen


def flip_bits(engine: Engine, wrong: str) -> torch.utils.hooks.RemovableHandle:
    """Flip one bit of a layer's result, at a place drawn by a seed: in its last call (of four), in
    all, or in none.
    """
    layer = next(
        module
        for module in engine.stage().module.modules()
        if isinstance(module, ColumnParallelLinear)
    )
    calls, generator = count(), torch.Generator()

    def flip(_: object, __: object, result: Tensor) -> Tensor:
        if not (wrong == "twice" or (wrong == "once" and next(calls) == 3)):
            return result
        bad = result.detach().clone()
        place = int(torch.randint(bad.numel(), (), generator=generator.manual_seed(5)))
        bits, top_of_fraction = {4: (torch.int32, 22), 2: (torch.int16, 6)}[bad.element_size()]
        bad.view(-1).view(bits)[place] ^= 1 << top_of_fraction
        return torch.where(bad == result, result, bad)

    return layer.register_forward_hook(flip)


def every_shape(folder: Path) -> dict[tuple[str, bool], Seen]:
    cards = {
        "tensor": tiny(1, 2, hidden_dropout=0.1, attention_dropout=0.1),
        "pipeline": tiny(2, 1, "bf16", hidden_dropout=0.1, attention_dropout=0.1),
    }
    found = {}
    for name, card in cards.items():
        run = card.run.model_copy(
            update={"directory": str(folder / name), "corruption_interval": 2}
        )
        for checks in (False, True):
            found[name, checks] = train(card.model_copy(update={"run": run}), checks)
    return found


def test_a_flipped_bit_names_its_worker_and_changes_nothing(tmp_path: Path) -> None:
    ranks = run_ranks(every_shape, 4, tmp_path)
    for seen in ranks:
        for name, others in (("tensor", 1), ("pipeline", 2)):
            plain, checked = seen[name, False], seen[name, True]
            assert checked.losses == plain.losses and torch.equal(checked.drawn, plain.drawn)
            for one, other in zip(checked.state, plain.state, strict=True):
                assert one.name == other.name and one.elements.keys() == other.elements.keys()
                assert all(
                    torch.equal(one.elements[kind], other.elements[kind]) for kind in one.elements
                )
            assert checked.faults == []
            assert checked.found == {
                "never": [], "once": [(3, "repeat")], "twice": [(others, "undecided"), (3, "undecided")], "after": [],
            }  # fmt: skip
    for name, other in (("tensor", 1), ("pipeline", 2)):
        (place,) = (tmp_path / name / "state" / "corruption").iterdir()
        value = json.loads(place.read_text())
        assert place.name == "7-1-2.json" and (value["iteration"], value["launch"]) == (2, 1)
        assert [(item["rank"], item["how"]) for item in value["suspects"]] == [
            (other, "undecided"),
            (3, "undecided"),
        ]
        assert {item["host"] for item in value["suspects"]} == {host_name()}
        answers = {
            number: RequestAnswer.read(tmp_path / name / f"state/requests/answer-{number}.json")
            for number in (11, 12, 13)
        }
        fine, busy, wrong = answers[11], answers[12], answers[13]
        assert fine is not None and busy is not None and wrong is not None
        assert fine.step == 1 and fine.message.startswith(
            "iteration 1: 4 ranks computed as before ("
        )
        assert busy.step is None and "another check is under way" in busy.message
        assert wrong.step is None and wrong.message.startswith(
            "SILENT CORRUPTION at iteration 2: rank "
        )


# ------------------------------------------------------------------- ranks that cannot, die or hang
def stopped_by_one(card: TrainerConfig, call: int) -> tuple[list[str], list[str], list[float]]:
    """Tensor rank 1 fails in one call of a layer: what was found, what was said, losses before and
    after.
    """
    mesh = Mesh.create(card.parallel, CPU)
    engine = Engine.build(card, mesh)
    said: list[str] = []
    watch = CorruptionWatch(
        card, mesh, AttemptIdentity("7", 1, card.paths.stop_request("7")), said.append
    )
    losses = [engine.train_step(batches(card, mesh, 0, 16), 16, 0).loss]
    layer = [
        module
        for module in engine.stage().module.modules()
        if isinstance(module, ColumnParallelLinear)
    ][-1]
    calls = count()

    def fail(*_: object) -> None:
        if mesh.tensor_rank == 1 and next(calls) == call:
            raise torch.OutOfMemoryError("out of memory\nmore of it")

    with_fault = layer.register_forward_hook(fail)
    found = [each.fault for each in check_workers(engine.stage(), mesh, 7, 0)]
    calls = count()
    watch.ask(11)
    watch.after_step(1, engine)
    with_fault.remove()
    losses.append(engine.train_step(batches(card, mesh, 1, 16), 16, 1).loss)
    assert not any(each.fault for each in check_workers(engine.stage(), mesh, 7, 1))
    engine._pipeline.destroy()
    return found, said, losses


@pytest.mark.parametrize("call", [0, 3], ids=["the-first-time", "the-last-time"])
def test_a_tensor_rank_that_cannot_go_on_holds_no_other(call: int, tmp_path: Path) -> None:
    """Neither in a sum that it does not enter, nor at the end; and the training goes on as if
    nothing had been.
    """
    card = tiny(1, 2)
    card = card.model_copy(update={"run": card.run.model_copy(update={"directory": str(tmp_path)})})
    fault = "OutOfMemoryError: out of memory"
    ranks = run_ranks(stopped_by_one, 2, card, call)
    assert [found for found, _, _ in ranks] == [[PEER_FAULT, fault]] * 2
    assert ranks[0][1][0].endswith(
        f"2 of 2 ranks could not check their arithmetic; rank 1 on {host_name()}: {fault}"
    )
    answer = RequestAnswer.read(card.paths.answer(11))
    assert (
        answer is not None
        and answer.step is None
        and f"rank 1 on {host_name()}: {fault}" in answer.message
    )
    assert ranks[0][2] == ranks[1][2] == run_ranks(unchecked, 2, card)[0]


def unchecked(card: TrainerConfig) -> list[float]:
    mesh = Mesh.create(card.parallel, CPU)
    engine = Engine.build(card, mesh)
    losses = [engine.train_step(batches(card, mesh, step, 16), 16, step).loss for step in range(2)]
    engine._pipeline.destroy()
    return losses


def left_alone(card: TrainerConfig, dies: bool, ended: Path) -> str:
    """The last rank does not come to the check; what the first says of it, which waits two seconds
    for each group.
    """
    mesh = Mesh.create(card.parallel, CPU)
    engine = Engine.build(card, mesh)
    engine.train_step(batches(card, mesh, 0, 16), 16, 0)
    dist.barrier()
    for group in {dist.group.WORLD, mesh.tensor_group} - {None}:
        _set_pg_timeout(timedelta(seconds=2), group)
    if mesh.rank:
        if dies:
            dist.destroy_process_group()  # as the system closes a dead process's connections
        while not dies and not ended.exists():
            time.sleep(0.05)
        return ""
    with pytest.raises(LostRanksError) as caught:
        check_workers(engine.stage(), mesh, 7, 3)
    ended.touch()
    return failure_text(caught.value)


@pytest.mark.parametrize("dies", [True, False], ids=["dead", "hanging"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["tensor-rank", "stage"])
def test_a_rank_that_does_not_come_ends_the_check(
    shape: tuple[int, int], dies: bool, tmp_path: Path
) -> None:
    line = run_ranks(left_alone, 2, tiny(*shape), dies, tmp_path / "ended")[0]
    start = "tr11: stopped: the check of the arithmetic after iteration 3 did not end: a rank has died or hangs ("
    assert line.startswith(start) and "\n" not in line


def test_who_asked_before_a_training_that_ends_is_answered(tmp_path: Path) -> None:
    card = tiny(1, 1)
    card = card.model_copy(update={"run": card.run.model_copy(update={"directory": str(tmp_path)})})
    watch = CorruptionWatch(
        card,
        Mesh.single(CPU),
        AttemptIdentity("7", 1, card.paths.stop_request("7")),
        lambda line: None,
    )
    watch.give_up()
    assert not card.paths.requests.exists()
    watch.ask(11)
    watch.give_up()
    answer = RequestAnswer.read(card.paths.answer(11))
    assert (
        answer is not None
        and answer.step is None
        and "the training ended before its next step" in answer.message
    )


def test_a_launch_without_repeatable_kernels_says_so_when_asked(tmp_path: Path) -> None:
    card = tiny(1, 1)
    card = card.model_copy(update={"run": card.run.model_copy(update={"directory": str(tmp_path)})})
    mesh = Mesh.single(torch.device("cuda", 0))
    CorruptionWatch(
        card, mesh, AttemptIdentity("7", 1, card.paths.stop_request("7")), lambda line: None
    ).ask(11)
    answer = RequestAnswer.read(card.paths.answer(11))
    assert (
        answer is not None
        and answer.step is None
        and "set run.corruption_interval" in answer.message
    )
