"""What costs or breaks on GPUs and cannot be seen on CPUs: every host synchronisation, unnamed GPU
and timeless group.

Each place that may do so stands in the list below with its reason; a new one, or one that is gone,
fails.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.trainer.source_finder import SourceFinder

ROOT = Path(__file__).parents[2] / "trainer"
SYNCHRONISES = {"item", "tolist", "cpu", "cuda"}
GROUPS = {"new_group", "init_process_group", "init_distributed", "split_group"}

ALLOWED: dict[tuple[str, str, str], str] = {
    (
        "control/evaluate.py",
        "read_windows",
        ".tolist()",
    ): "numpy's, of a file, before anything runs",
    (
        "parallel/agreement.py",
        "RankGroup.all_true",
        ".item()",
    ): "of the processors' group, in host memory",
    (
        "checkpoint/deepspeed/collective.py",
        "_own_copy",
        ".cpu()",
    ): "a save in the original's layout, which stands still",
    (
        "checkpoint/randomness.py",
        "restore",
        ".tolist()",
    ): "numpy's and Python's own state, at a load",
    (
        "spikes/corruption_check.py",
        "_compute",
        ".tolist()",
    ): "once a check of the arithmetic, which the card asks for",
    ("debug/dump.py", "_save_tensors", ".cpu()"): "a dump that was asked for",
    ("checkpoint/fingerprint.py", "state_digest", ".cpu()"): "a dump that was asked for",
    (
        "pipeline/library.py",
        "_of_rank_0.agreed",
        ".cpu()",
    ): "the norm, once a step: whether the step counts, and is clipped",
    (
        "engine.py",
        "Engine._of_first_rank",
        ".tolist()",
    ): "loss and norm of the step, once a step, in host memory",
    (
        "pipeline/partial_losses.py",
        "PartialLosses._named",
        ".tolist()",
    ): "of an evaluation, behind its loss",
    ("parallel/replica_check.py", "disagreements", ".tolist()"): "once a check, before a save",
    ("parallel/replica_check.py", "not_finite", ".tolist()"): "once a save, for all tensors",
    ("attempt.py", "earliest_start", ".item()"): "in host memory, at the start",
    (
        "attempt.py",
        "TrainingAttempt._control_signals.largest",
        ".tolist()",
    ): "the stop switches, in host memory",
    ("model/random.py", "DropoutPlaces.begin", ".tolist()"): "numbers that the processor made",
    (
        "optim/layer_norms.py",
        "LayerNorms.take",
        ".tolist()",
    ): "norms of the layers, at the steps that the card names",
    ("optim/adam8bit.py", "Adam8bit.step", ".item()"): "the count of steps, in host memory",
    ("optim/lamb.py", "Lamb.step", ".item()"): "the count of steps, in host memory",
    ("optim/lamb.py", "Lamb.tensor_sums", ".tolist()"): "a few numbers a tensor, at a save",
    (
        "optim/interface.py",
        "TrainingOptimizer.steps_done",
        ".item()",
    ): "the count of steps of each group, at a save",
}
NUMPY_ALONE = (
    "data/"  # its lists are of arrays: no tensor is made there but of memory that is mapped
)


class Finder(SourceFinder):
    """(function, what) of each finding in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def visit_Call(self, node: ast.Call) -> None:
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        given = {keyword.arg for keyword in node.keywords}
        if (
            isinstance(node.func, ast.Attribute)
            and name in SYNCHRONISES
            and not node.args
            and not node.keywords
        ):
            self._add(f".{name}()")
        if name in GROUPS and not given & {"timeout", None} and len(node.args) < 2:
            self._add(f"{name} without timeout")
        if name == "device" and len(node.args) == 1 and _is_cuda(node.args[0]):
            self._add("cuda without a number")
        if name in {"to", "empty", "zeros", "ones", "full", "tensor", "arange"} and any(
            _is_cuda(value) for value in [*node.args, *(keyword.value for keyword in node.keywords)]
        ):
            self._add("cuda without a number")
        self.generic_visit(node)

    def _add(self, what: str) -> None:
        self.found.append((self.place, what))


def _is_cuda(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cuda"


def findings(root: Path) -> Counter[tuple[str, str, str]]:
    found: Counter[tuple[str, str, str]] = Counter()
    for path in sorted(root.rglob("*.py")):
        finder = Finder()
        finder.visit(ast.parse(path.read_text(encoding="utf-8")))
        found.update((str(path.relative_to(root)), place, what) for place, what in finder.found)
    return found


def test_every_place_is_known_with_a_reason() -> None:
    found = findings(ROOT)
    unknown = sorted(
        key
        for key in set(found) - set(ALLOWED)
        if not (key[0].startswith(NUMPY_ALONE) and key[2] == ".tolist()")
    )
    assert not unknown, (
        f"a host synchronisation, a GPU without a number, or a group without a timeout: {unknown}"
    )
    assert not sorted(set(ALLOWED) - set(found)), "these are gone: take them off the list"
    assert all(ALLOWED.values())


def test_the_finder_finds(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "class A:\n"
        "    def f(self, x):\n"
        "        dist.new_group([0]); dist.new_group([0], timeout=T); torch.device('cuda'); torch.device('cuda', 1)\n"
        "        return x.item(), x.cpu(), x.cuda(), x.tolist(), x.to('cuda'), torch.zeros(1, device='cuda'), d.item(1)\n"
    )
    assert findings(tmp_path) == {
        ("module.py", "A.f", "new_group without timeout"): 1,
        ("module.py", "A.f", "cuda without a number"): 3,
        ("module.py", "A.f", ".item()"): 1,
        ("module.py", "A.f", ".cpu()"): 1,
        ("module.py", "A.f", ".cuda()"): 1,
        ("module.py", "A.f", ".tolist()"): 1,
    }
