#!/bin/bash
# Break jobs of a twin in every way, and keep what their users would see: slurm.sh OUT TWIN [CASE...].
# Before it: tr11 twin up --nodes 4 --gpus 2 --cpus 8 --accounting --slurmd-timeout 10 --name TWIN --dir /tmp/corpus-twins
set -u
out=$(realpath "$1"); twin=$2; shift 2; here=$(realpath "$(dirname "$0")")
tr11="tr11 twin"; at="--name $twin --dir ${TWINS:-/tmp/corpus-twins}"
eval "$($tr11 env $at)"
work=/tmp/diagnose-corpus/slurm; mkdir -p $work; cd $work || exit 1
cat > step.py <<'P'
import os, signal, sys, time
rank, node = int(os.environ["SLURM_PROCID"]), os.environ["SLURMD_NODENAME"]
fault, on, last = sys.argv[1], int(sys.argv[2]), int(os.environ.get("LAST", "12"))
for i in range(1, last + 1):
    time.sleep(float(os.environ["PACE"]))
    if rank == int(os.environ["SLURM_NTASKS"]) - 1:
        print(f" iteration {31200 + i:8d}/  115311 | consumed samples: {47729584 + 2048 * i:12d} | consumed tokens:"
              f" {(47729584 + 2048 * i) * 2048:12d} | elapsed time per iteration (s): {104.7 + i % 3 / 10:.2f} | learning"
              f" rate: 5.279E-05 | global batch size:  2048 | lm loss: {2.2 + i % 5 / 50:.6E} | grad norm: 0.24{i % 9} |"
              f" num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per"
              f" second: 19.561 | TFLOPs: {149.5 + i % 4 / 10:.2f} |", flush=True)
    if rank == 0 and i % 5 == 0:
        print(f"saving checkpoint at iteration   {31200 + i} to /scratch/checkpoints/tr11-176B-ml/checkpoints/main\n"
              f"  successfully saved checkpoint at iteration   {31200 + i} to"
              " /scratch/checkpoints/tr11-176B-ml/checkpoints/main", flush=True)
    if i == 7 and rank == on:
        if fault in {"SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM"}:
            os.kill(os.getpid(), getattr(signal, fault))
        if fault == "exit":
            sys.exit(1)
        if fault == "error":
            raise RuntimeError("The size of tensor a (2048) must match the size of tensor b (2049) at dimension 1")
        if fault == "disk":
            open("/dev/full", "w").write("x" * 9000)
P
job() {  # job CASE SBATCH-OPTIONS STEP-ARGUMENTS: submits and prints the id
    cat > "$1.slurm" <<B
#!/bin/bash
#SBATCH --job-name=tr11-176B-ml --nodes=2 --ntasks-per-node=2 --account=tr11 --no-requeue --output=${LOG-$out/$1.log}
echo "START TIME: \$(date)"
echo "nodes: \$(scontrol show hostnames \$SLURM_JOB_NODELIST | tr '\n' ' ')"
srun --wait=10 --kill-on-bad-exit=1 ${SRUN:-} python3 -u $work/step.py $3
echo "END TIME: \$(date)"
B
    sbatch --parsable $2 "$1.slurm"
}
ended() { while squeue -h -j "$1" 2>/dev/null | grep -q .; do sleep 0.5; done; sleep 1; }
running() { until [ "$(squeue -h -j "$1" -o %T)" = RUNNING ]; do sleep 0.2; done; sleep 2; }
victim() { scontrol show hostnames "$(squeue -h -j "$(cat id)" -o %N)" | tail -1; }
accounted() { sleep 2; sacct -j "$1" -o jobid%14,jobname%14,state%22,exitcode,derivedexitcode,nodelist%20 >> "$out/$2.log"; }
through() { job "$1" "$2" "$3" > id; ended "$(cat id)"; }   # a job that ends by itself
refused() {  # refused CASE OPTIONS: the terminal of who submits
    { echo "\$ sinfo -s"; sinfo -s; echo "\$ squeue -u \$USER"; squeue; echo "\$ sbatch $2 tr11-176B-ml.slurm"
      LOG=/dev/null job "$1" "$2" "none 0"; echo "\$ echo \$?"; echo 1; } > "$out/$1.log" 2>&1
}
typed() {  # typed CASE COMMAND...: one command at a terminal
    { echo "\$ sinfo -s"; sinfo -s; echo "\$ ${*:2}"; eval "${*:2}"; } > "$out/$1.log" 2>&1
}

declare -A cases=(
[slurm-no-account]='refused slurm-no-account --account=six@v100'
[slurm-no-partition]='refused slurm-no-partition --partition=gpu_p6'
[slurm-bad-array]='refused slurm-bad-array --array=10-1%1'
[slurm-huge-array]='refused slurm-huge-array --array=1-200000%1'
[slurm-many-nodes]='refused slurm-many-nodes --nodes=48'
[slurm-long]='refused slurm-long --time=200:00:00'
[slurm-time-text]='refused slurm-time-text --time=twenty'
[slurm-feature]='refused slurm-feature --constraint=a100'
[slurm-gres]='refused slurm-gres --gres=gpu:a100:16'
[slurm-dependency]='refused slurm-dependency --dependency=afterwards:17'
[slurm-exclude]='refused slurm-exclude --exclude=jean-zay-iam[01-04]'
[slurm-unknown-node]='refused slurm-unknown-node --exclude=jean-zay-iam97'
[slurm-option]='refused slurm-option --ntask-per-nodes=8'
[slurm-reservation]='refused slurm-reservation --reservation=hug'
[slurm-memory]='refused slurm-memory --mem=4T'
[slurm-no-script]='typed slurm-no-script sbatch --array=1-3%1 tr11-176B-ml-next.slurm'
[slurm-no-shebang]='echo "srun hostname" > plain.slurm; typed slurm-no-shebang sbatch plain.slurm'
[slurm-no-config]='SLURM_CONF=/nonexistent/slurm.conf typed slurm-no-config sbatch x.slurm'
[slurm-ctld-down]='$tr11 fault controller-killed $at >&2; refused slurm-ctld-down --time=10; $tr11 heal $at >&2'
[slurm-ctld-frozen]='$tr11 fault controller-frozen $at >&2; refused slurm-ctld-frozen --time=10; $tr11 heal $at >&2'
[slurm-partition-down]='$tr11 fault partition-closed $at >&2; refused slurm-partition-down --time=10; $tr11 heal $at >&2'
[slurm-munge-down]='kill -STOP $(cat $(dirname $SLURM_CONF)/munge/pid); mv $(dirname $SLURM_CONF)/munge/socket s;
    refused slurm-munge-down --time=10; mv s $(dirname $SLURM_CONF)/munge/socket; kill -CONT $(cat $(dirname $SLURM_CONF)/munge/pid)'
[slurm-sigkill]='through slurm-sigkill "" "SIGKILL 2"'
[slurm-sigsegv]='through slurm-sigsegv "" "SIGSEGV 1"; accounted "$(cat id)" slurm-sigsegv'
[slurm-sigabrt]='through slurm-sigabrt "--nodes=3" "SIGABRT 4"'
[slurm-sigbus]='through slurm-sigbus "" "SIGBUS 3"'
[slurm-sigterm]='through slurm-sigterm "" "SIGTERM 1"'
[slurm-exit]='through slurm-exit "" "exit 3"'
[slurm-error]='SRUN=-l; through slurm-error "" "error 2"; SRUN='
[slurm-device-full]='SRUN=-l; through slurm-device-full "" "disk 0"; SRUN='
[slurm-finished]='through slurm-finished "" "none 0"; accounted "$(cat id)" slurm-finished'
[slurm-time-limit]='PACE=1.5 LAST=90 job slurm-time-limit "--time=1" "none 0" > id; ended "$(cat id)"; accounted "$(cat id)" slurm-time-limit'
[slurm-scancel]='PACE=1.5 LAST=90 job slurm-scancel "" "none 0" > id; running "$(cat id)"; scancel "$(cat id)"; ended "$(cat id)"; accounted "$(cat id)" slurm-scancel'
[slurm-scancel-usr1]='PACE=1.5 LAST=90 job slurm-scancel-usr1 "" "none 0" > id; running "$(cat id)"; scancel -s USR1 "$(cat id)"; ended "$(cat id)"'
[slurm-requeue]='PACE=1.5 LAST=90 job slurm-requeue "--requeue" "none 0" > id; running "$(cat id)"; scontrol requeue "$(cat id)"; sleep 6; accounted "$(cat id)" slurm-requeue; scancel "$(cat id)"'
[slurm-node-fail]='PACE=1.5 LAST=90 job slurm-node-fail "" "none 0" > id; running "$(cat id)"; $tr11 fault node-dead --node "$(victim)" $at >&2; ended "$(cat id)"; accounted "$(cat id)" slurm-node-fail; $tr11 heal $at >&2'
[slurm-node-fail-kept]='PACE=1.5 LAST=90 job slurm-node-fail-kept "--no-kill --nodes=3" "none 0" > id; running "$(cat id)"; $tr11 fault node-dead --node "$(victim)" $at >&2; ended "$(cat id)"; $tr11 heal $at >&2'
[slurm-worker-crash]='PACE=1.5 LAST=90 job slurm-worker-crash "" "none 0" > id; running "$(cat id)"; $tr11 fault worker-crash --node "$(victim)" $at >&2; ended "$(cat id)"'
[slurm-black-hole]='$tr11 fault black-hole --node jean-zay-iam01 $at >&2; PACE=1.5 LAST=90 through slurm-black-hole "" "none 0"; $tr11 heal $at >&2'
[slurm-no-program]='sed s/python3/python3.12/ step.py >/dev/null; SRUN="/opt/envs/train/bin/python"; through slurm-no-program "" "none 0"; SRUN='
[slurm-chdir]='through slurm-chdir "--chdir=/scratch/gone" "none 0"'
[slurm-step-size]='SRUN="--nodes=6"; through slurm-step-size "" "none 0"; SRUN='
[slurm-preempted]='scontrol create PartitionName=urgent Nodes=jean-zay-iam[01-04] PriorityTier=100 PreemptMode=CANCEL >&2
    PACE=1.5 LAST=90 job slurm-preempted "" "none 0" > id; running "$(cat id)"; sbatch -p urgent -N4 --exclusive -A tr11 --wrap "sleep 8" -o /dev/null; ended "$(cat id)"; accounted "$(cat id)" slurm-preempted; scontrol delete PartitionName=urgent'
)
for case in ${*:-$(printf '%s\n' "${!cases[@]}" | sort)}; do
    squeue -h -o %i | xargs -r scancel
    export LAST=12 SRUN= PACE=0.3; eval "${cases[$case]}"
    sed -i -e "s#$out#/scratch/tr11/logs#g; s#$work#/home/user/code/tr11#g; s#$here#/home/user/code/tr11#g" \
        -e "s#$(dirname "$SLURM_CONF")#/etc/slurm#g; s/twin_$twin/jean-zay/g; s/ root / user /g; s/user=root/user=user/g" "$out/$case.log"
    echo "$case: $(wc -l < "$out/$case.log") lines"
done
