#!/usr/bin/env bash
# One node's part of the Ray cluster of train.sbatch: ray_node.sh HEAD_IP HEAD_PORT TIMEOUT_S
#
# Runs on every node of the job and stays until it is terminated. A worker waits until the head accepts connections, so
# the order of starting does not matter. Ray takes the worker's address from its route to the head.
set -euo pipefail

head_ip=$1 head_port=$2 timeout_s=$3
resources=(--num-cpus "${SLURM_CPUS_ON_NODE:-$(nproc)}" --num-gpus "${SLURM_GPUS_ON_NODE:-0}")
ulimit -n "$(ulimit -Hn)" # one node holds thousands of sockets: the usual soft limit of 1024 is too low

if ((SLURM_NODEID == 0)); then
  exec ray start --block --head --node-ip-address "$head_ip" --port "$head_port" --include-dashboard false \
    --disable-usage-stats "${resources[@]}"
fi

for ((second = 0; second < timeout_s; second++)); do
  if (: >"/dev/tcp/$head_ip/$head_port") 2>/dev/null; then
    exec ray start --block --address "$head_ip:$head_port" --disable-usage-stats "${resources[@]}"
  fi
  sleep 1
done
echo "${SLURMD_NODENAME:-this node}: no Ray head at $head_ip:$head_port within $timeout_s s" >&2
exit 1
