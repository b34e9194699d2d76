"""Actions of the random walk in processes of their own: the trainer's save, and whatever is killed
(-9) in its middle.
"""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.tr11ops.backup.forked_deeds import ForkingProcess, die_at, serve

# what a trainer answers that found nothing to resume from; else 1 + the step that it resumed from
REFUSED = 0


class WalkNursery(ForkingProcess):
    """The process that forks one for each action."""

    module = "tests.tr11ops.walk.nursery"

    def do(self, deed: str, at: int = 0, **what: Any) -> int | None:
        """An action's answer; None when it was killed, at its `at`-th change of a file (0: never)."""
        code, number = self.order(deed=deed, at=at, **what)
        assert code in (0, -signal.SIGKILL), f"{deed} ended with {code}"
        return number if code == 0 else None


def train(what: dict[str, Any]) -> int:
    """Start as the trainer does, read what it resumes from, "train" to the next step, and save
    that.
    """
    import torch

    from tests.trainer.checkpoint.synthetic import Model, Shape, differences, state
    from trainer.checkpoint import store
    from trainer.checkpoint.publishing import CheckpointInfo, Extras, NewCheckpoint
    from trainer.contract.checkpoint_names import checkpoint_name
    from trainer.contract.checkpoints import fence_off
    from trainer.contract.errors import CheckpointError
    from trainer.contract.lease import Lease
    from trainer.contract.paths import RunPaths
    from trainer.contract.recovery import read_recovery, settle
    from trainer.contract.resumable import ResumeNeed

    torch.set_num_threads(1)
    paths = RunPaths(Path(what["root"]), what["name"], "main")
    model, shape, facts = Model(what["layers"], 4, 8), Shape(), what["facts"]
    info = CheckpointInfo(shape.topology, facts)
    lease = Lease.begin(paths, "7", what["launch"])
    holder = lease.take()
    assert holder is None, f"kept out by {holder}"
    fence_off(paths.checkpoints)
    settle(paths, read_recovery(paths))
    die_at(what["at"], FILE_CALLS)
    try:
        found = store.find_resumable(
            paths.checkpoints, "digests", False, lambda line: None, need=ResumeNeed(facts)
        )
    except CheckpointError:
        lease.release()
        return REFUSED
    if found is not None:
        filled = state(model, shape, 0, None)
        place = paths.checkpoints / checkpoint_name(found)
        loaded = store.load(paths.checkpoints, found, filled, info)
        wanted = state(model, shape, 0, int(loaded.cursor["token"]))
        assert not differences(filled, wanted), f"{place} was loaded, and is not what was saved"
    step = (found or 0) + what["gain"]
    extras = Extras({"consumed_samples": step, "consumed_tokens": step, "token": what["token"]})
    new = NewCheckpoint(paths.checkpoints, step, extras, info, fence=lease.check)
    saved = state(model, shape, 0, what["token"])
    store.save(new, saved, save_optimizer=what["optimizer"])
    lease.release()
    return 1 + (found or 0)


def operate(what: dict[str, Any]) -> int:
    """A round, a prune or a restore."""
    from tests.tr11ops.backup.lose_it import Case, invoke

    bucket: Any = None
    if what["bucket"] is not None:
        bucket = SimpleNamespace(**what["bucket"])
        os.environ["XDG_STATE_HOME"] = what["bucket"]["state"]
    case = Case(Path(what["folder"]), what["kind"], bucket, *what["changes"])
    case.now = what["now"]
    die_at(what["at"], FILE_CALLS)
    if what["deed"] == "round":
        case.round()
    elif what["deed"] == "prune":
        case.prune()
    else:
        invoke(case, what["line"])
    return 0


FILE_CALLS = tuple(
    (os, name)
    for name in ("open", "pwrite", "fsync", "replace", "rename", "link", "mkdir", "unlink")
)


def main() -> None:
    for module in (
        "gcsfs.core", "tests.tr11ops.backup.lose_it", "tests.trainer.checkpoint.synthetic", "tr11ops.backup.remote",
        "trainer.checkpoint.store", "trainer.contract.recovery",
    ):  # fmt: skip
        importlib.import_module(module)
    serve(lambda what: train(what) if what["deed"] == "train" else operate(what))


if __name__ == "__main__":
    main()
