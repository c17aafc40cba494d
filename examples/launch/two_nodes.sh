#!/usr/bin/env bash
# Two machines (or more) without a scheduler. Run it on each of them, at about the same time, with the same settings but
# for NODE_RANK:
#
#   on gpu1:  NODE_RANK=0 MASTER_ADDR=gpu1 bash two_nodes.sh
#   on gpu2:  NODE_RANK=1 MASTER_ADDR=gpu1 bash two_nodes.sh
#   DRY_RUN=1 NODE_RANK=0 MASTER_ADDR=gpu1 bash two_nodes.sh
#
# Code, data and Python environment have to be at the same place on both.
set -euo pipefail

NNODES=${NNODES:-2}
NODE_RANK=${NODE_RANK:-}                                      # of this machine: 0, 1, ...
MASTER_ADDR=${MASTER_ADDR:-}                                  # machine 0, as the others know it
MASTER_PORT=${MASTER_PORT:-29500}                             # free on machine 0, and open in its firewall
NPROC=${NPROC:-gpu}                                           # ranks on this machine
TRAIN=${TRAIN:-"-m robomimic.scripts.train --config bc.json"} # a script, or -m and a module; then its arguments
PYTHON=${PYTHON:-python}
# Where a machine has several networks, the one between the nodes (see `ip addr`):
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0

problems=()
[[ $NNODES =~ ^[1-9][0-9]*$ ]] || problems+=("NNODES='$NNODES': give the number of machines")
[[ $NODE_RANK =~ ^[0-9]+$ ]] || problems+=("NODE_RANK='$NODE_RANK': give 0 on the first machine, 1 on the second")
[[ -n $MASTER_ADDR ]] || problems+=("MASTER_ADDR is not set: give the name or the address of machine 0")
[[ $MASTER_PORT =~ ^[0-9]+$ ]] || problems+=("MASTER_PORT='$MASTER_PORT': give a number")
read -r -a train <<<"$TRAIN"
[[ ${train[0]} == -m || -f ${train[0]} ]] || problems+=("TRAIN: no file '${train[0]}' in $PWD")
if ((${#problems[@]})); then
    printf '%s\n' "${problems[@]}" >&2
    exit 2
fi

command=("$PYTHON" -m ddpshim run "--nnodes=$NNODES" "--node-rank=$NODE_RANK" "--master-addr=$MASTER_ADDR"
    "--master-port=$MASTER_PORT" "--nproc=$NPROC" "${train[@]}")

echo "this is  $(hostname), machine $NODE_RANK of $NNODES"
echo "meet at  $MASTER_ADDR:$MASTER_PORT"
echo "command  ${command[*]}"
[[ ${DRY_RUN:-0} == 0 ]] || exit 0
exec "${command[@]}"
