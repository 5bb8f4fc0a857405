#!/usr/bin/env bash
# Make this node part of a Ray cluster for one run: start it once on every node with the same words. Node 0 hosts the head
# and the driver; when the run ends, so does the cluster, on all nodes.
#
#   launch/ray/node.sh recipe=dapo_qwen2_5_7b_8gpu                                      one node
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/ray/node.sh recipe=… key=value …      on node0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/ray/node.sh recipe=… key=value …      on the other
#   launch/ray/node.sh --dry-run recipe=…                                               print what would run
#
# Variables: launch/env.sh. Ctrl-C, SIGTERM, SIGUSR1 or `touch LOG_DIR/stop` end the run after the step it is in, with a
# checkpoint whatever trainer.save_freq says. Exit codes of node 0: as torchrun.sh's.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dry_run=0
if [[ ${1:-} == --dry-run ]]; then dry_run=1 && shift; fi
if [[ -n ${LAUNCH_ENV:-} ]]; then source "$LAUNCH_ENV"; fi
source "$here/../env.sh"
if [[ $MODULE == megatron_dapo.train ]]; then MODULE="megatron_dapo.cli.main train"; fi # which restarts the driver

words=("$@" trainer.runtime=ray)
if [[ -n $MAX_RESTARTS ]]; then words+=("trainer.max_restarts=$MAX_RESTARTS"); fi
resolved=$("$PYTHON" -m megatron_dapo.cli.main config --for train "${words[@]}")
run_dir=$(sed -n "/^trainer:/,/^[^ ]/s/^  default_local_dir: \([^ ]*\).*/\1/p" <<<"$resolved")
LOG_DIR=${LOG_DIR:-$run_dir/logs}
export STOP_FILE=${STOP_FILE:-$LOG_DIR/stop}
over=$LOG_DIR/over-$RDZV_ID # the other nodes leave when node 0 has made it
head=$(getent ahostsv4 "$MASTER_ADDR" | awk 'NR == 1 { print $1 }' || true) # Ray knows its nodes by number, not by name
head=${head:-$MASTER_ADDR}
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # when we ask a node to leave, nothing runs there any more
export RAY_ADDRESS=$head:$MASTER_PORT RAY_NODES=$NNODES

if [[ -z ${RAY_AUTH_MODE:-} && -s ~/.ray/auth_token ]]; then export RAY_AUTH_MODE=token; fi # as the head then does

ray=("$PYTHON" -m ray.scripts.scripts start --block --disable-usage-stats)
if ((NODE_RANK == 0)); then
  ray+=(--head --port "$MASTER_PORT" --node-ip-address "$head" --include-dashboard=false)
else
  ray+=(--address "$RAY_ADDRESS")
  if [[ -n $LOCAL_ADDR ]]; then ray+=(--node-ip-address "$LOCAL_ADDR"); fi
fi
if [[ -n $RAY_NUM_CPUS ]]; then ray+=(--num-cpus "$RAY_NUM_CPUS"); fi
# shellcheck disable=SC2206 # MODULE is words
driver=("$PYTHON" -m $MODULE "${words[@]}")

if ((dry_run)); then
  echo "node $NODE_RANK of $NNODES, logs in $LOG_DIR"
  printf '%q ' "${ray[@]}" && echo
  if ((NODE_RANK == 0)); then printf '%q ' "${driver[@]}" && echo; fi
  exit 0
fi

mkdir -p "$LOG_DIR"
if ((NODE_RANK == 0)); then rm -f "$STOP_FILE" "$over"; fi
exec > >(trap '' INT TERM USR1 && exec tee -a "$LOG_DIR/node-$NODE_RANK.log") 2>&1
phase() { echo "=== $(date -u +%Y-%m-%dT%H:%M:%SZ) node $NODE_RANK ($(hostname)) phase: $*"; }
alive() { kill -0 "$1" 2>/dev/null; }
caught_signal=""
for name in INT TERM USR1; do trap "caught_signal=SIG$name" "$name"; done

phase "start, Ray at $RAY_ADDRESS"
(trap '' INT USR1 && exec setsid "${ray[@]}") & # SIGTERM is how it is asked to leave
node=$!
trap 'kill -TERM "$node" 2>/dev/null || true; wait "$node" 2>/dev/null || true' EXIT
begun=$SECONDS
until (exec 3<>"/dev/tcp/$head/$MASTER_PORT") 2>/dev/null; do
  if ! alive "$node" || ((SECONDS - begun > 300)); then
    phase "failed: no Ray at $RAY_ADDRESS"
    exit 1
  fi
  sleep 0.5
done

code=0
if ((NODE_RANK == 0)); then
  (trap '' INT TERM USR1 && exec setsid "${driver[@]}") & # our stop file is how it is asked
  runner=$!
  while alive "$runner"; do
    if [[ -n $caught_signal ]]; then
      phase "stop requested ($caught_signal)"
      caught_signal=""
      touch "$STOP_FILE"
    fi
    sleep 1 &
    wait $! || true
  done
  wait "$runner" || code=$?
  if [[ -e $STOP_FILE ]] && ((code)); then code=143; fi
  echo "$code" >"$over"
else
  until [[ -e $over ]] || ! alive "$node"; do
    if [[ -n $caught_signal ]]; then touch "$STOP_FILE" && caught_signal=""; fi
    sleep 1 &
    wait $! || true
  done
fi
phase "end, exit code $code"
exit "$code"
