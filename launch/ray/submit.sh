#!/usr/bin/env bash
# Train on a Ray cluster that runs already, as a job of it:
#
#   launch/ray/submit.sh recipe=dapo_qwen2_5_32b trainer.default_local_dir=/shared/runs/dapo key=value …
#   RAY_ADDRESS=http://head:8265 RUNTIME_ENV=my.yaml launch/ray/submit.sh …
#   launch/ray/submit.sh --dry-run recipe=…                             print what would run
#
# The code in WORKING_DIR is sent along and is what all nodes run; models, data and the run directory must be where every
# node sees them, so give absolute paths. The command follows the job; NO_WAIT=1 returns at once (`ray job logs ID`).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# --- parameters; what is set already wins
: "${RAY_ADDRESS:=http://127.0.0.1:8265}"            # the cluster's dashboard, which takes jobs
: "${WORKING_DIR:=$(cd "$here/../.." && pwd)}"       # what is sent to the nodes: this repository
: "${RUNTIME_ENV:=$here/runtime_env.yaml}"           # environment variables, pip packages, what is not to be sent
: "${PYTHON:=python}"                                # here, to check the configuration and submit; has megatron_dapo
: "${JOB_PYTHON:=$PYTHON}"                           # the interpreter on the nodes
: "${MODULE:=megatron_dapo.cli.main train}"          # what the job runs
: "${SUBMISSION_ID:=}"                               # the job's name; empty: Ray makes one up
: "${NO_WAIT:=}"

dry_run=0
if [[ ${1:-} == --dry-run ]]; then dry_run=1 && shift; fi
if [[ ! -f $RUNTIME_ENV ]]; then echo "submit.sh: RUNTIME_ENV=$RUNTIME_ENV is no file" >&2 && exit 2; fi
resolved=$("$PYTHON" -m megatron_dapo.cli.main config --for train "$@" trainer.runtime=ray)
run_dir=$(sed -n "/^trainer:/,/^[^ ]/s/^  default_local_dir: \([^ ]*\).*/\1/p" <<<"$resolved")
if [[ $run_dir != /* ]]; then
  echo "submit.sh: trainer.default_local_dir=$run_dir would lie in the job's temporary copy of WORKING_DIR: give an absolute path that all nodes see" >&2
  exit 2
fi

command=("$PYTHON" -m ray.scripts.scripts job submit --address "$RAY_ADDRESS" --working-dir "$WORKING_DIR" --runtime-env "$RUNTIME_ENV")
if [[ -n $SUBMISSION_ID ]]; then command+=(--submission-id "$SUBMISSION_ID"); fi
if [[ -n $NO_WAIT ]]; then command+=(--no-wait); fi
# shellcheck disable=SC2206 # MODULE is words
command+=(-- "$JOB_PYTHON" -m $MODULE "$@" trainer.runtime=ray)

if ((dry_run)); then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
if [[ -z ${RAY_AUTH_MODE:-} && -s ~/.ray/auth_token ]]; then export RAY_AUTH_MODE=token; fi # as the head then does
unset RAY_ADDRESS # it is given above; the client would take it for a cluster to join
exec "${command[@]}"
