"""What a worker loads before it trains: each second is paid by every rank, at every start."""

from __future__ import annotations

import gc
import inspect
import re
import subprocess
import sys

from torch.distributed import distributed_c10d

from trainer.control.lifecycle import without_collections
from trainer.engine import CURRENT_DEVICE


def test_no_compiler_is_loaded_unless_the_card_asks() -> None:
    """Neither by what the loop imports nor by what each of DeepSpeed's engines asks of its
    optimizer.
    """
    code = (
        "import trainer.attempt, sys\n"
        "from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


def test_collections_go_on_after_loading() -> None:
    frozen = gc.get_freeze_count()
    try:
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_the_warning_that_is_left_out_is_torchs_own() -> None:
    """Its barrier tells a worker that is alone on its GPU, in each log, that it takes the device
    that was set.
    """
    assert re.search(CURRENT_DEVICE, inspect.getsource(distributed_c10d.barrier))
