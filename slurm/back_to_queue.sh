
# Something that this job needs is not there: nothing is lost when the job itself goes back into the queue. Slurm takes it
# up again after two minutes; what has come back so often in vain is held, for a person to look.
back_to_queue() {
  echo "tr11: $1"
  if [ "${TR11_SCHEDULER:-}" != local ]; then
    timeout 60 scontrol update "JobId=$SLURM_JOB_ID" Requeue=1 || true
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 200 ]; then
      timeout 60 scontrol requeue "$SLURM_JOB_ID" && sleep 60  # it ends this shell
    else
      timeout 60 scontrol requeuehold "$SLURM_JOB_ID" && sleep 60
    fi
  fi
  exit 3
}
