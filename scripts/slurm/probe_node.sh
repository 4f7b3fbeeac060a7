#!/usr/bin/env bash
# Says on one line of standard output what makes this node unfit: "NODE: reason". Says nothing when it is fit.
#
#   HYBRIDRL_MIN_SHM_GIB   shared memory that must be free, in GiB (default 1)
set -uo pipefail

bad() {
  echo "${SLURMD_NODENAME:-$(hostname)}: $*"
  exit 0
}

probe=".hybridrl-probe-${SLURM_JOB_ID:-0}-${SLURM_NODEID:-0}"
touch "$probe" 2>/dev/null || bad "cannot write to $PWD"
rm -f "$probe"

wanted_gib=${HYBRIDRL_MIN_SHM_GIB:-1}
free_gib=$(df --output=avail -BG /dev/shm 2>/dev/null | tail -n 1 | tr -dc '0-9')
((${free_gib:-0} >= wanted_gib)) || bad "${free_gib:-0} GiB free in /dev/shm, expected $wanted_gib; remove what dead jobs left there"

if ((${SLURM_GPUS_ON_NODE:-0} > 0)); then
  listed=$(timeout 30 nvidia-smi --query-gpu=ecc.errors.uncorrected.volatile.total --format=csv,noheader 2>&1) ||
    bad "nvidia-smi failed or hung: ${listed:0:100}"
  ((SLURM_GPUS_ON_NODE <= $(wc -l <<<"$listed"))) || bad "$(wc -l <<<"$listed") GPUs, expected $SLURM_GPUS_ON_NODE"
  grep -qE '^ *[1-9]|ERR' <<<"$listed" && bad "a GPU has uncorrected memory errors; reset or drain the node"
fi
exit 0
