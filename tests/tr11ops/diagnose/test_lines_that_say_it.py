"""Of several lines that tell of one end, the one that says it: by the place in the program, by the
chain of exceptions, by what came to its end before.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tr11ops.diagnose.diagnose_logs import HEAD, of_text
from tr11ops.diagnose.signature import FaultClass, Restart

STEPS = "".join(
    f"completed step: {step}, seconds: 3.2, TFLOP/s/device: 230.1, loss: 2.4{step % 10}\n"
    for step in range(20)
)
TITAN = "".join(
    f"[titan] INFO - step: {step:5d}  loss:  2.4{step % 10}  grad_norm:  0.4  tps: 836  tflops: 373.88  mfu: 38.76%\n"
    for step in range(20)
)
SITE = "/opt/lib/python3.11/site-packages"


class Told(NamedTuple):
    """`says`: how the line begins that says it."""

    text: str
    fault: FaultClass
    restart: Restart
    says: str


def _raised(frame: str, *lines: str) -> str:
    return "\n".join([f'{HEAD}  File "{SITE}/{frame}\n    x = y()', *lines, ""])


LOGS = {
    "a key that is missing while a checkpoint is loaded": Told(
        _raised(
            'torch/distributed/checkpoint/default_planner.py", line 471, in create_default_local_load_plan',
            "KeyError: MetadataIndex(fqn='module.x', index=24)",
        ),
        FaultClass.CHECKPOINT_MISMATCH,
        Restart.CHANGE,
        "KeyError",
    ),
    "a file that is missing where a library of data looks for it": Told(
        STEPS
        + _raised(
            'streaming/base/stream.py", line 346, in _decompress_shard_part',
            "FileNotFoundError: [Errno 2] No such file or directory: '/d/0.mds.tmp' -> '/d/0.mds'",
        ),
        FaultClass.DATALOADER,
        Restart.CHANGE,
        "FileNotFoundError",
    ),
    "a table that is damaged": Told(
        STEPS
        + _raised(
            'pyarrow/parquet/core.py", line 320, in read_row_group',
            "OSError: Couldn't deserialize thrift: TProtocolException: Exceeded size limit",
        ),
        FaultClass.DATALOADER,
        Restart.CHANGE,
        "OSError",
    ),
    "a connection that an object store's client lost": Told(
        STEPS
        + _raised(
            'google/cloud/storage/blob.py", line 2999, in upload_from_file',
            "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        ),
        FaultClass.GCS,
        Restart.PLAIN,
        "requests.exceptions.ConnectionError",
    ),
    "a wait that was given up, and what the program raised of it": Told(
        STEPS
        + _raised(
            'asyncio/tasks.py", line 445, in wait_for', "asyncio.exceptions.CancelledError", ""
        )
        + "The above exception was the direct cause of the following exception:\n\n"
        + _raised('verl/reward.py", line 31, in run', "ValueError: no answer of the judge"),
        FaultClass.USER_CODE,
        Restart.CHANGE,
        "ValueError",
    ),
    "code that a traceback quotes behind a writer's words": Told(
        "(E pid=6) ERROR 08-25 [core.py:632] Traceback (most recent call last):\n"
        f'(E pid=6) ERROR 08-25 [core.py:632]   File "{SITE}/vllm/kv.py", line 565, in check\n'
        '(E pid=6) ERROR 08-25 [core.py:632]     raise ValueError("No available memory for the cache blocks. "\n'
        "(E pid=6) ERROR 08-25 [core.py:632] ValueError: No available memory for the cache blocks. Try more\n",
        FaultClass.CUDA_OOM,
        Restart.CHANGE,
        "(E pid=6) ERROR 08-25 [core.py:632] ValueError",
    ),
    "an engine that died without words": Told(
        STEPS
        + "ERROR 01-16 17:16:49 [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.\n"
        + _raised(
            'vllm/v1/engine/core_client.py", line 716, in get_output',
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
        ),
        FaultClass.UNKNOWN,
        Restart.UNKNOWN,
        "ERROR 01-16",
    ),
    "all steps done, and a service that others left": Told(
        STEPS
        + "Training loop done: 20 of 20 steps\n"
        + "E1009 coordination_service.cc:1170] /job:jax_worker/replica:0/task:0 has been set to ERROR in coordination service: "
        + "UNAVAILABLE: Task /job:jax_worker/replica:0/task:0 heartbeat timeout. This indicates that the remote task has failed\n",
        FaultClass.CLEAN_EXIT,
        Restart.NONE,
        "Training loop done",
    ),
    "the program's own word for its numbers": Told(
        TITAN
        + TITAN.replace("loss:  2", "loss:  9").replace("grad_norm:  0", "grad_norm:  80")
        + _raised('olmo/train.py", line 645, in train_step', "ValueError: nan loss encountered"),
        FaultClass.NUMERICS,
        Restart.CHANGE,
        "ValueError: nan loss",
    ),
    "a warning that is the runtime's own error": Told(
        f"{SITE}/torch/cuda/__init__.py:184: UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). "
        "Error 802: system not yet initialized\n"
        + _raised(
            'lightning/pytorch/accelerators/cuda.py", line 48, in setup_device',
            "MisconfigurationException: CUDAAccelerator can not run on your system since the accelerator is not available.",
        ),
        FaultClass.GPU_HARDWARE,
        Restart.ELSEWHERE,
        SITE,
    ),
    "a controller that could not be reached": Told(
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
        FaultClass.SLURM_SUBMIT,
        Restart.PLAIN,
        "sbatch",
    ),
    "Slurm's short word for memory": Told(
        STEPS + "412231           pre7b    OUT_OF_ME+      0:125\n",
        FaultClass.HOST_OOM,
        Restart.CHANGE,
        "412231",
    ),
    "a collective of HCCL, and below it the code that says how it failed": Told(
        "RuntimeError: InnerRunOpApi:OpParamMaker.cpp:281 OPS function error: HcclAllreduce, error code is 6\n"
        "[ERROR] 2025-04-08-18:07:20 (PID:1, Device:1, RankID:1) ERR01100 OPS call acl api failed.\n"
        "EI0006: [PID: 1] 2025-04-08-18:07:20.444.401 Getting socket times out. Reason: Remote Rank did not send\n",
        FaultClass.NCCL_TIMEOUT,
        Restart.UNKNOWN,
        "EI0006",
    ),
    "a controller that came back, and refused": Told(
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
        "sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)\n",
        FaultClass.SLURM_SUBMIT,
        Restart.CHANGE,
        "sbatch: error: QOSMax",
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_line_that_says_it(tmp_path: Path, name: str) -> None:
    told = LOGS[name]
    found = of_text(tmp_path, told.text)
    assert (found.fault, found.restart.answer) == (told.fault, told.restart)
    assert found.root_cause is not None
    assert found.root_cause.text.startswith(told.says)


def test_steps_whose_progress_is_counted_are_not_hidden_by_one_that_goes_on(tmp_path: Path) -> None:
    """The last line of a step is not the last one that tells its speed."""
    early = "[batch=1/3]:\n\t Train loss/train/total: 2.3\n\t Train throughput/device/tokens_per_sec: 9247.99\n"
    late = "[batch=2/3]:\n\t Train loss/train/total: 2.2\n[batch=3/3]:\n\t Train loss/train/total: 2.1\nINFO: Done.\n"
    found = of_text(tmp_path, early + late)
    assert found.fault is FaultClass.CLEAN_EXIT


def test_a_link_that_a_kernel_saw_go_down_is_its_nodes(tmp_path: Path) -> None:
    down = "Oct 02 12:08:51 r2-u13 kernel: mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN\n"
    found = of_text(tmp_path, down)
    assert found.fault is FaultClass.NCCL_NETWORK
    assert found.accused.nodes == ("r2-u13",)
    up = down.replace("DOWN", "ACTIVE").replace(":51", ":58")
    assert of_text(tmp_path, down + up).fault is FaultClass.UNKNOWN
