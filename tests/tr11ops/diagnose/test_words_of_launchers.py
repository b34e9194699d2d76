"""Launchers of MPI, registries of images, Kubernetes, clouds and GPUDirect Storage in their own
words: what happened, whose it is, and whether the same again helps.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tr11ops.diagnose.diagnose_logs import of_text
from tr11ops.diagnose.look import diagnose_files
from tr11ops.diagnose.signature import FaultClass, Restart

STEPS = "".join(f"step {step} | loss 2.{90 - step}1\n" for step in range(1, 7))
ABORT = (
    "MPI_ABORT was invoked on rank 9 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n"
    "prterun has exited due to process rank 9 with PID 22145 on node g13 calling\n"
)
CHOSEN = "oom-kill:constraint=CONSTRAINT_{0},nodemask=(null),cpuset=/,mems_allowed=0-1,{1},task={2},pid=44120,uid=1001\n"


class Told(NamedTuple):
    text: str
    fault: FaultClass
    restart: Restart
    nodes: tuple[str, ...] = ()


LOGS = {
    "what a rank raised before it ended the others": Told(
        f"[rank9]: ValueError: could not convert string to float: '0,1'\n{ABORT}",
        FaultClass.USER_CODE,
        Restart.CHANGE,
    ),
    "the end of all alone": Told(STEPS + ABORT, FaultClass.UNKNOWN, Restart.UNKNOWN),
    "a launcher without slots": Told(
        "There are not enough slots available in the system to satisfy the 64\nslots that were requested\n",
        FaultClass.USER_CODE,
        Restart.CHANGE,
    ),
    "a library without PMI": Told(
        "but OMPI was not built with SLURM's PMI support and therefore cannot\nsrun: error: n14: task 0: Exited with exit code 1\n",
        FaultClass.USER_CODE,
        Restart.CHANGE,
    ),
    "a link that UCX gave up": Told(
        f"{STEPS}[t07:33:0:34] ib_mlx5_log.c:177  Transport retry count exceeded on mlx5_2:1/IB (synd 0x15 vend 0x81 hw_synd 0/0)\n",
        FaultClass.NCCL_NETWORK,
        Restart.PLAIN,
    ),
    "a pod's image that is refused": Told(
        'Warning  Failed  94s  kubelet  Failed to pull image "reg.io/t:2": pull access denied, repository does not exist\n'
        "Warning  Failed  94s  kubelet  Error: ErrImagePull\n",
        FaultClass.SLURM_SUBMIT,
        Restart.CHANGE,
    ),
    "a pod's image for which the registry is busy": Told(
        "Warning  Failed  9s  kubelet  Error: ImagePullBackOff\n"
        'Warning  Failed  8s  kubelet  Failed to pull image "ray:2": toomanyrequests: You have reached your pull rate limit.\n',
        FaultClass.SLURM_SUBMIT,
        Restart.PLAIN,
    ),
    "an image that Slurm's container plugin may not have": Told(
        "slurmstepd: error: pyxis: failed to import docker image\n"
        "slurmstepd: error: pyxis:     [ERROR] URL https://reg.io/proxy_auth returned error code: 401 Unauthorized\n",
        FaultClass.USER_CODE,
        Restart.CHANGE,
    ),
    "an image that Slurm's container plugin gets later": Told(
        "slurmstepd: error: pyxis: failed to import docker image\n"
        "slurmstepd: error: pyxis:     [ERROR] URL https://reg.io/v2/x/manifests/2 returned error code: 429 Too Many Requests\n",
        FaultClass.USER_CODE,
        Restart.PLAIN,
    ),
    "the kernel's choice in a job's memory": Told(
        STEPS + CHOSEN.format("MEMCG", "oom_memcg=/slurm/uid_1/job_5", "python"),
        FaultClass.HOST_OOM,
        Restart.CHANGE,
    ),
    "the kernel's choice in a node's memory": Told(
        STEPS + CHOSEN.format("NONE", "global_oom", "python3"), FaultClass.HOST_OOM, Restart.CHANGE
    ),
    "a service's own memory": Told(
        STEPS
        + CHOSEN.format("MEMCG", "oom_memcg=/system.slice/dcgm-exporter.service", "dcgm-exporter"),
        FaultClass.HOST_OOM,
        Restart.UNKNOWN,
    ),
    "a pod that gave way": Told(
        f"{STEPS}30s  Warning  Evict  pod/nemo-worker-4  Pod is evicted, because of preempt\n",
        FaultClass.SLURM_PREEMPTED,
        Restart.PLAIN,
    ),
    "a quota that was reclaimed": Told(
        f"{STEPS}1m  Normal  EvictedDueToPreempted  workload/sft-1  due to reclamation within the cohort\n",
        FaultClass.SLURM_PREEMPTED,
        Restart.PLAIN,
    ),
    "a machine that a cloud moves": Told(
        f"{STEPS}scheduled-events: EventType=Redeploy EventStatus=Scheduled Resources=[nd96-11]\n",
        FaultClass.SLURM_PREEMPTED,
        Restart.PLAIN,
    ),
    "a sandbox that one node does not set up": Told(
        "Warning  FailedCreatePodSandBox  3m (x21 over 4m)  kubelet, gpu-w7  Failed to create pod sandbox: rpc error\n",
        FaultClass.SLURM_NODE_FAIL,
        Restart.ELSEWHERE,
        ("gpu-w7",),
    ),
    "a machine that a cloud replaces": Told(
        f"{STEPS}[agent] ip-10-1-90-87 status=UnschedulablePendingReplacement\n",
        FaultClass.GPU_HARDWARE,
        Restart.ELSEWHERE,
        ("ip-10-1-90-87",),
    ),
    "a file system that GPUDirect Storage does not serve": Told(
        "[rank3]: RuntimeError: cuFile failed: GPUDirect Storage not supported on current file (5033)\n",
        FaultClass.STORAGE,
        Restart.CHANGE,
    ),
    "a condition of a node that a cloud takes back": Told(
        f"{STEPS}Warning  PreemptScheduled  node/aks-nd-1  Node aks-nd-1 status is now: PreemptScheduled\n"
        "Warning  NodeNotReady  node/aks-nd-1  Node aks-nd-1 status is now: NodeNotReady\n",
        FaultClass.SLURM_PREEMPTED,
        Restart.PLAIN,
    ),
    "a node that an autoscaler folds": Told(
        f"{STEPS}Normal  DisruptionTerminating  node/ip-10-0-9-9.ec2.internal  Disrupting Node: Underutilized/Delete\n",
        FaultClass.SLURM_PREEMPTED,
        Restart.PLAIN,
    ),
    "the taint of a lost node": Told(
        f"{STEPS}Warning  TaintManagerEviction  pod/sft-0  Marking for deletion Pod ml/sft-0\n"
        "Node n-gpu-5 has taint node.kubernetes.io/unreachable:NoExecute\n",
        FaultClass.SLURM_NODE_FAIL,
        Restart.ELSEWHERE,
        ("n-gpu-5",),
    ),
    "what any pod tolerates": Told(
        "Tolerations:  node.kubernetes.io/not-ready:NoExecute op=Exists for 300s\n"
        "              node.kubernetes.io/unreachable:NoExecute op=Exists for 300s\nModuleNotFoundError: No module named 'x'\n",
        FaultClass.USER_CODE,
        Restart.CHANGE,
    ),
    "a kubelet without healthy devices": Told(
        "Warning  UnexpectedAdmissionError  4s  kubelet, k8-gpu-12  Allocate failed due to no healthy devices present\n",
        FaultClass.GPU_HARDWARE,
        Restart.ELSEWHERE,
        ("k8-gpu-12",),
    ),
    "a disk full of images": Told(
        "Warning  FreeDiskSpaceFailed  3m  kubelet  Failed to garbage collect required amount of images.\n",
        FaultClass.STORAGE,
        Restart.CHANGE,
    ),
    "memory that an engine of rollouts shares": Told(
        "(vLLMHttpServer pid=771, ip=10.0.0.4) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a "
        "total capacity of 139.81 GiB of which 101.00 MiB is free. Process 991 has 120.00 GiB memory in use. Process 1002 has "
        "19.00 GiB memory in use.\n",
        FaultClass.CUDA_OOM,
        Restart.CHANGE,
    ),
    "workers that Ray does not start in time": Told(
        "ray.train.WorkerGroupStartupTimeoutError: The worker group startup timed out after 30.0 seconds waiting for 2 workers.\n",
        FaultClass.RENDEZVOUS,
        Restart.UNKNOWN,
    ),
    "a probe that failed": Told(
        f"{STEPS}Normal  Killing  2m  kubelet  Container trainer failed liveness probe, will be restarted\n",
        FaultClass.USER_CODE,
        Restart.UNKNOWN,
    ),
    "a link between chips": Told(
        f"{STEPS}E0303 tpu_driver] FAILED_PRECONDITION: ICI link failure detected on chip 2: TPU worker 11 unhealthy\n",
        FaultClass.GPU_HARDWARE,
        Restart.ELSEWHERE,
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_what_it_is_whose_it_is_and_whether_the_same_again_helps(tmp_path: Path, name: str) -> None:
    told = LOGS[name]
    found = of_text(tmp_path, told.text)
    assert (found.fault, found.restart.answer) == (told.fault, told.restart)
    assert found.accused.nodes == told.nodes
    assert not found.accused.is_proved  # one log excludes no one


# ----------------------------------------------------------------------------- one node alone
OTHERS = (
    "w-20: [rank0] cuda devices: 8\nw-21: [rank8] cuda devices: 8\nw-22: [rank16] cuda devices: 8\n"
)
UNKNOWN = "w-23: [rank24]: RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment\n"
NO_GDS = (
    "w-23: [rank24]: RuntimeError: cuFileDriverOpen failed: CU_FILE_DRIVER_NOT_INITIALIZED (5001)\n"
)
NVLINK = "[preflight] w-20 nvlink 18 active links\n[preflight] w-21 nvlink 18 active links\n[preflight] w-23 nvlink 0 active links\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (OTHERS + UNKNOWN, FaultClass.GPU_HARDWARE),
        (OTHERS + NO_GDS, FaultClass.STORAGE),
        (
            "w-21: 16 neuron devices\nw-22: 16 neuron devices\nw-23: 15 neuron devices\n"
            "w-23: [rank32]: RuntimeError: NRT_INIT: device /dev/neuron15 not found\n",
            FaultClass.GPU_HARDWARE,
        ),
        (
            f"{NVLINK}[preflight] w-22 nvlink 18 active links\nw-23: [rank24]: NCCL error: unhandled system error\n",
            FaultClass.GPU_HARDWARE,
        ),
        (
            "check w-21: 8 HCA ports Active\ncheck w-22: 8 HCA ports Active\n"
            "check w-23: mlx5_5 port 1 State: Down, Physical state: Polling\ncheck w-24: 8 HCA ports Active\n",
            FaultClass.NCCL_NETWORK,
        ),
    ],
)
def test_what_one_node_alone_lacks_is_that_nodes(
    tmp_path: Path, text: str, fault: FaultClass
) -> None:
    found = of_text(tmp_path, text)
    assert (found.fault, found.restart.answer) == (fault, Restart.ELSEWHERE)
    assert found.accused.nodes == ("w-23",) and not found.accused.is_proved


def test_what_all_nodes_lack_is_no_nodes_own(tmp_path: Path) -> None:
    found = of_text(tmp_path, OTHERS + NO_GDS + NO_GDS.replace("w-23", "w-21"))
    assert found.accused.nodes == () and found.restart.answer is Restart.CHANGE


# ----------------------------------------------------------------------------- whose disk it is
@pytest.mark.parametrize(
    ("path", "before", "is_own"),
    [
        ("/tmp/cache/x", "", True),
        ("/mnt/local_scratch/x", "", True),
        ("/var/lib/train/x", "", True),
        ("/var/lustre/x", "", False),
        ("/tmp/shared-weka/x", "", False),
        ("/usr/local/x", "", False),
        ("/tmp/out/x", "c101: 10.1.1.3:/export 50T 50T 1G 100% /tmp/out\n", False),
        ("/tmp/out/x", "c101: store on /tmp/out type wekafs (rw)\n", False),
    ],
)
def test_a_full_path_is_a_nodes_own_where_nothing_says_that_all_share_it(
    tmp_path: Path, path: str, before: str, is_own: bool
) -> None:
    error = f"c101: [rank8]: OSError: [Errno 28] No space left on device: '{path}'\n"
    found = of_text(tmp_path, f"c100: [rank0] starts\nc101: [rank8] starts\n{before}{error}")
    assert found.accused.nodes == (("c101",) if is_own else ())


# ----------------------------------------------------------------------------- how far it came
@pytest.mark.parametrize("end", ["train.py exit code 0\n", "python exit_code=0\n"])
def test_an_exit_code_of_0_is_no_end_where_most_steps_are_missing(tmp_path: Path, end: str) -> None:
    short = of_text(tmp_path, f"total steps: 100000\n{STEPS}{end}")
    assert (short.fault, short.restart.answer) == (FaultClass.UNKNOWN, Restart.UNKNOWN)
    assert of_text(tmp_path, f"total steps: 6\n{STEPS}{end}").fault is FaultClass.CLEAN_EXIT


def test_the_kernels_choice_beside_the_death_of_a_task(tmp_path: Path) -> None:
    paths = [tmp_path / "train.log", tmp_path / "dmesg-cx44.txt"]
    paths[0].write_text(f"{STEPS}srun: error: cx44: task 3: Killed\n")
    paths[1].write_text(f"[881233.1] {CHOSEN.format('MEMCG', 'oom_memcg=/slurm/job_5', 'python')}")
    [found] = diagnose_files(paths)
    assert (found.fault, found.accused.nodes) == (FaultClass.HOST_OOM, ())


def test_full_shared_memory_is_of_more_than_one_kind(tmp_path: Path) -> None:
    """A checkpoint is staged there too: it is not said with certainty whose it is."""
    found = of_text(
        tmp_path, "OSError: [Errno 28] No space left on device: '/dev/shm/torch_4412_881_0'\n"
    )
    assert found.fault is FaultClass.DATALOADER and found.confidence <= 0.9
