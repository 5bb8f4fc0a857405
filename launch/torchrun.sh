#!/usr/bin/env bash
# Train on this node, alone or as one of several: start it once on every node with the same words.
#
#   launch/torchrun.sh recipe=dapo_qwen2_5_7b_8gpu                                      one node
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh recipe=… key=value …      on node0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/torchrun.sh recipe=… key=value …      on the other
#   launch/torchrun.sh --dry-run recipe=…                                               print what would run
#
# Variables: launch/env.sh. A failed rank restarts all from the last checkpoint, MAX_RESTARTS times. Ctrl-C, SIGTERM,
# SIGUSR1 or `touch LOG_DIR/stop` end the run after the step it is in, with a checkpoint whatever trainer.save_freq says; the
# same command continues it. Exit codes: 0 done, 143 stopped on request, 2 a wrong configuration, 1 anything else.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dry_run=0
if [[ ${1:-} == --dry-run ]]; then dry_run=1 && shift; fi
if [[ -n ${LAUNCH_ENV:-} ]]; then source "$LAUNCH_ENV"; fi
source "$here/env.sh"

# --- the configuration is checked here, before anything starts and on every node
resolved=$("$PYTHON" -m megatron_dapo.cli.main config --for "$([[ $MODULE == *.sft ]] && echo sft || echo train)" "$@")
value() { sed -n "/^$1:/,/^[^ ]/s/^  $2: \([^ ]*\).*/\1/p" <<<"$resolved"; }
world=$(value parallel world_size)
run_dir=$(value trainer default_local_dir)
save_freq=$(value trainer save_freq)
MAX_RESTARTS=${MAX_RESTARTS:-$(value trainer max_restarts)}

gpus=0
if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | wc -l) || gpus=0; fi
if [[ -z $NPROC_PER_NODE ]]; then
  if [[ $world =~ ^[0-9]+$ ]]; then
    if ((world % NNODES)); then
      echo "torchrun.sh: parallel.world_size=$world does not divide over NNODES=$NNODES" >&2
      exit 2
    fi
    NPROC_PER_NODE=$((world / NNODES))
  else
    NPROC_PER_NODE=$((gpus > 0 ? gpus : 1))
  fi
fi
if ((gpus > 0 && NPROC_PER_NODE > gpus)); then
  echo "torchrun.sh: $NPROC_PER_NODE ranks per node, but this node has $gpus GPUs: raise NNODES or lower parallel.world_size" >&2
  exit 2
fi
if [[ -z $OMP_NUM_THREADS ]]; then
  threads=$(($(nproc) / NPROC_PER_NODE))
  OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
export OMP_NUM_THREADS
LOG_DIR=${LOG_DIR:-$run_dir/logs}
STOP_FILE=${STOP_FILE:-$LOG_DIR/stop}
export USER_ERROR_FILE=$LOG_DIR/user-error # a rank leaves it: torchrun makes 1 of every exit code, on every node

# Only rank 0 acts on a stop request (it finishes the step, saves and tells the others); torchrun must not act first, and
# it must not restart either: to it a stopped rank is a failed one. So restarts are counted below.
command=("$PYTHON" -m torch.distributed.run
  --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --max-restarts 0
  --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$RDZV_ID"
  --rdzv-conf "is_host=$((NODE_RANK == 0))" --signals-to-handle SIGQUIT)
if [[ -n $LOCAL_ADDR ]]; then command+=(--local-addr "$LOCAL_ADDR"); fi
command+=(-m "$MODULE" "$@")

if ((dry_run)); then
  echo "node $NODE_RANK of $NNODES, logs in $LOG_DIR"
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi

mkdir -p "$LOG_DIR"
if ((NODE_RANK == 0)); then rm -f "$STOP_FILE" "$USER_ERROR_FILE"; fi
exec > >(trap '' INT TERM USR1 && exec tee -a "$LOG_DIR/node-$NODE_RANK.log") 2>&1
phase() { echo "=== $(date -u +%Y-%m-%dT%H:%M:%SZ) node $NODE_RANK ($(hostname)) phase: $*"; }

phase "start, $NPROC_PER_NODE of $((NNODES * NPROC_PER_NODE)) ranks, rendezvous at $MASTER_ADDR:$MASTER_PORT"
if [[ $save_freq == -1 ]]; then phase "note: trainer.save_freq=-1, nothing is saved before a stop: after a failure the run begins anew"; fi

LAUNCH_TIME=$(date +%s)
export LAUNCH_TIME
runner=0
begin() { # the ignored signals are inherited: of a whole job's SIGTERM only rank 0 hears, which installs a handler
  LAUNCH_ATTEMPT=$attempt
  export LAUNCH_ATTEMPT
  (trap '' INT TERM USR1 && exec setsid "${command[@]}") &
  runner=$!
}
asked=0
pending=0 # a request that rank 0 has not heard yet
listening() { # rank 0, if it is on this node and has installed its handler of SIGTERM (15)
  local pid caught
  for pid in $(pgrep -P "$runner" || true); do
    if { tr '\0' '\n' <"/proc/$pid/environ"; } 2>/dev/null | grep -qx RANK=0; then
      caught=$(sed -n 's/^SigCgt:\s*//p' "/proc/$pid/status" 2>/dev/null) || return 0
      if ((0x${caught:-0} >> 14 & 1)); then echo "$pid"; fi
    fi
  done
}
tell() { # once: a second signal would end rank 0 at once
  local pid
  pid=$(listening)
  if [[ -n $pid ]]; then
    kill -TERM "$pid" && pending=0
  fi
}
request_stop() {
  if ((asked == 0)); then
    asked=1 pending=1
    phase "stop requested ($1)"
  fi
}
heed() { # SLURM signals every process of a job: rank 0 has heard a SIGTERM already, if it was listening
  local heard="" name=$caught_signal
  caught_signal=""
  if [[ $name == SIGTERM && -n ${SLURM_JOB_ID:-} ]]; then heard=$(listening); fi
  request_stop "$name"
  if [[ -n $heard ]]; then pending=0; fi
}
caught_signal="" # traps only take note, of one signal: bash loses its place when a trap interrupts a substitution
trap 'caught_signal=SIGINT; trap "" INT TERM USR1' INT
trap 'caught_signal=SIGUSR1; trap "" INT TERM USR1' USR1
trap 'caught_signal=SIGTERM; trap "" INT TERM USR1' TERM
trap 'if ((runner)) && kill -0 "$runner" 2>/dev/null; then kill -QUIT "$runner"; fi' EXIT # should this script ever leave before it

for ((attempt = 0; attempt <= MAX_RESTARTS; attempt++)); do
  if ((attempt)); then
    phase "restart $attempt of $MAX_RESTARTS, from the last checkpoint"
    sleep 3
  fi
  begin
  while kill -0 "$runner" 2>/dev/null; do
    if [[ -n $caught_signal ]]; then heed; fi
    if [[ -e $STOP_FILE ]]; then request_stop "$STOP_FILE"; fi
    if ((pending)); then tell; fi
    sleep 1 &
    wait $! || true
  done
  code=0
  wait "$runner" || code=$?
  if ((code)) && [[ -e $USER_ERROR_FILE ]]; then code=2; fi
  if ((code == 0 || code == 2 || asked)); then break; fi
  phase "failed, exit code $code"
done
if ((asked && code)); then code=143; fi
phase "end, exit code $code"
exit "$code"
