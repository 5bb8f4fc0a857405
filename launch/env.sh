# The environment of every launcher, in one place; sourced by torchrun.sh and ray/node.sh on every node. What is set already wins, so
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/torchrun.sh …      or a file of your own: LAUNCH_ENV=my.sh
# shellcheck shell=bash

# --- who takes part
: "${NNODES:=1}"                  # nodes
: "${NODE_RANK:=0}"               # this node's number; node 0 hosts the rendezvous
: "${MASTER_ADDR:=127.0.0.1}"     # node 0, as the other nodes reach it
: "${MASTER_PORT:=29500}"         # a port of node 0 that is free
: "${RDZV_ID:=megatron-dapo}"     # the same on all nodes, different for two runs on one node 0
: "${NPROC_PER_NODE:=}"           # ranks per node; empty: parallel.world_size / NNODES, else the GPUs, else 1
: "${MAX_RESTARTS:=}"             # restarts from the last checkpoint after a failed rank; empty: trainer.max_restarts
: "${LOG_DIR:=}"                  # empty: logs/ in the run directory (trainer.default_local_dir); shared by all nodes
: "${PYTHON:=python}"             # the interpreter that has megatron_dapo
: "${MODULE:=megatron_dapo.train}" # what the ranks run; megatron_dapo.sft for supervised training

# --- communication; left alone when empty
: "${NCCL_SOCKET_IFNAME:=}"       # interface for NCCL's bootstrap, e.g. eth0 or ^lo,docker0
: "${GLOO_SOCKET_IFNAME:=$NCCL_SOCKET_IFNAME}" # the same for gloo (control messages, and everything on a host)
: "${NCCL_IB_HCA:=}"              # InfiniBand cards, e.g. mlx5_0,mlx5_1
: "${LOCAL_ADDR:=}"               # address that other nodes reach this one by, where its own name does not resolve
: "${NCCL_DEBUG:=WARN}"
: "${TORCH_NCCL_AVOID_RECORD_STREAMS:=1}" # without it a tensor of an asynchronous collective is freed late
: "${CUDA_DEVICE_MAX_CONNECTIONS:=1}"     # Megatron overlaps tensor-parallel traffic only in this order

# --- processes
: "${OMP_NUM_THREADS:=}"          # empty: cores / ranks of the node
: "${RAY_NUM_CPUS:=}"             # CPUs that a node offers to Ray; empty: all it has
: "${TOKENIZERS_PARALLELISM:=false}"
: "${PYTHONUNBUFFERED:=1}"

for name in NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_HCA; do
  if [[ -n ${!name} ]]; then export "${name?}"; else unset "$name"; fi
done
export NCCL_DEBUG TORCH_NCCL_AVOID_RECORD_STREAMS CUDA_DEVICE_MAX_CONNECTIONS TOKENIZERS_PARALLELISM PYTHONUNBUFFERED
