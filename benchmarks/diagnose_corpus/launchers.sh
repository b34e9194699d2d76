#!/bin/bash
# Kill rank 1 of two under launchers other than torchrun, and keep what they say: launchers.sh OUT [LAUNCHER...].
# Needs accelerate, deepspeed and Debian's openmpi-bin. Paths and hosts of the machine are replaced by neutral ones.
set -u
out=$(realpath "$1"); shift; work=$(mktemp -d); cd "$work" || exit 1
trap 'rm -r "$work"' EXIT
cat > pretrain_gpt.py <<'P'
import os, signal, sys, time
for ours, theirs in (("RANK", "OMPI_COMM_WORLD_RANK"), ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")):
    os.environ.setdefault(ours, os.environ.get(theirs, ""))
import torch, torch.distributed as dist
fault = [word for word in sys.argv[1:] if not word.startswith("--local")][0]
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1, 9):
    loss = torch.tensor([2.0 + 1 / step])
    if rank == 1 and step == 5:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "abort":
            os.abort()
        sys.exit(3)
    dist.all_reduce(loss)
    time.sleep(0.2)
    if rank == 0:
        print(f"step {step} | loss {loss.item() / 2:.4f}", flush=True)
P
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
site=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
bin=$(python -c 'import sys; print(sys.prefix)')
for launcher in "${@:-accelerate deepspeed mpirun}"; do for one in $launcher; do for fault in kill abort exit; do
    case $one in
    accelerate) python -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no \
        --dynamo_backend no pretrain_gpt.py $fault ;;
    deepspeed) python -m deepspeed.launcher.runner --num_gpus 2 pretrain_gpt.py $fault ;;
    mpirun) mpirun --allow-run-as-root --oversubscribe -np 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29517 python -u pretrain_gpt.py $fault ;;
    esac 2>&1 | sed -e "s#$work#/home/user/code/train#g; s#$bin#/home/user/conda/envs/train#g; s#$site#/usr/local/lib/python3.11#g" \
        -e "s/\bnode $(hostname)\b/node jean-zay-iam02/g" > "$out/launcher-$one-$fault.log"
done; done; done
