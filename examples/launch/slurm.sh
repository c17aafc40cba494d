#!/usr/bin/env bash
# A SLURM job: writes the batch script, shows it, and submits it. On a login node:
#
#   NODES=2 GPUS_PER_NODE=4 TIME=12:00:00 PARTITION=gpu TRAIN="train.py --config bc.json" bash slurm.sh
#   DRY_RUN=1 bash slurm.sh           # write and show it only
#
# The ranks are signalled two minutes before the limit; a trainer that then saves and ends with exit code 75 goes back
# into the queue. `module load` and the like belong into the written script: edit it, and submit it yourself.
set -euo pipefail

NODES=${NODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
CPUS_PER_RANK=${CPUS_PER_RANK:-8} # the rank and its data workers
TIME=${TIME:-12:00:00}
PARTITION=${PARTITION:-} # empty: the site's default
JOB_NAME=${JOB_NAME:-train}
LAUNCHER=${LAUNCHER:-srun}                                    # srun: a task for each rank; torchrun: one for each node
TRAIN=${TRAIN:-"-m robomimic.scripts.train --config bc.json"} # a script, or -m and a module; then its arguments
PYTHON=${PYTHON:-python}

read -r -a train <<<"$TRAIN"
[[ ${train[0]} == -m || -f ${train[0]} ]] || { echo "TRAIN: no file '${train[0]}' in $PWD" >&2; exit 2; }
script=$JOB_NAME.sbatch
options=("--nodes=$NODES" "--gpus-per-node=$GPUS_PER_NODE" "--cpus-per-rank=$CPUS_PER_RANK" "--time=$TIME"
    "--launcher=$LAUNCHER")

text=$("$PYTHON" -m ddpshim slurm "${options[@]}" -- "${train[@]}")
printf '%s\n' "$text" | tee "$script"
echo "written to $PWD/$script"
[[ ${DRY_RUN:-0} == 0 ]] || exit 0
command -v sbatch >/dev/null || { echo "no sbatch here: run this on a login node of the cluster" >&2; exit 2; }
exec sbatch --job-name="$JOB_NAME" ${PARTITION:+--partition="$PARTITION"} "$script"
