
# Something that this job needs is not there: nothing is lost when the job itself goes back into the queue. Slurm takes it
# up again after two minutes; what has come back so often in vain is held, for a person to look.
back_to_queue() {
  echo "tr11: $1"
  # A task by its place in the array: the last to begin has the array's own number, which means all of them.
  local job="$SLURM_JOB_ID"
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
  fi
  if [ "${TR11_SCHEDULER:-}" != local ]; then
    timeout 60 scontrol update "JobId=$job" Requeue=1 || true
    if [ "${SLURM_RESTART_COUNT:-0}" -lt 200 ]; then
      timeout 60 scontrol requeue "$job" && sleep 60  # it ends this shell
    else
      timeout 60 scontrol requeuehold "$job" && sleep 60
    fi
  fi
  exit 3
}
