# What every SLURM job of ours does, sourced by *.sbatch: one NODE_SCRIPT per node, a request to stop, back into the queue.
# shellcheck shell=bash
set -euo pipefail

dry_run=0
if [[ ${1:-} == --dry-run ]]; then dry_run=1 && shift; fi
export LOG_DIR
export NNODES=${SLURM_JOB_NUM_NODES:-${NNODES:-1}}
export RDZV_ID=${SLURM_JOB_ID:-dry-run}-${SLURM_RESTART_COUNT:-0}
export STOP_FILE=$LOG_DIR/stop-$RDZV_ID
export MASTER_PORT=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 20000))}
if ((dry_run)); then
  export MASTER_ADDR=${MASTER_ADDR:-first-node}
else
  hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  export MASTER_ADDR=${MASTER_ADDR:-$(head -n 1 <<<"$hosts")}
fi

step=(srun --kill-on-bad-exit=1 --ntasks-per-node=1 --export=ALL)
if [[ -n $CONTAINER_IMAGE ]]; then
  step+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$CONTAINER_MOUNTS" --container-workdir="$REPOSITORY")
fi
# shellcheck disable=SC2016 # SLURM_NODEID is each node's own
step+=(bash -c 'NODE_RANK=$SLURM_NODEID exec "$0" "$@"' "$NODE_SCRIPT" "$@")

if ((dry_run)); then
  printf '%q ' "${step[@]}"
  echo
  for ((node = 0; node < NNODES; node++)); do NODE_RANK=$node "$NODE_SCRIPT" --dry-run "$@"; done
  exit 0
fi

mkdir -p "$LOG_DIR"
phase() { echo "=== $(date -u +%Y-%m-%dT%H:%M:%SZ) job $RDZV_ID phase: $*"; }
stopping=""
request_stop() {
  trap '' USR1 TERM # one is enough, and bash loses its place when a trap interrupts a substitution
  stopping=$1 interrupted=1
  phase "stop requested ($stopping)"
  touch "$STOP_FILE" # every node looks for it
}
trap 'request_stop SIGUSR1' USR1
trap 'request_stop SIGTERM' TERM

phase "start on $(tr '\n' ' ' <<<"$hosts")"
"${step[@]}" &
runner=$!
while true; do
  interrupted=0 code=0
  wait "$runner" || code=$?
  if ((interrupted == 0)); then break; fi # a signal ends `wait` early
done
phase "end, exit code $code"
if [[ -n $stopping ]] && ((code != 0)); then # a run that ended as the request came in has nothing left to do
  phase "back into the queue"
  scontrol requeue "$SLURM_JOB_ID" || true # a preempted job is requeued already
fi
exit "$code"
