#!/usr/bin/env bash
# Some GPUs of one machine, by their numbers in nvidia-smi: a rank on each.
#
#   GPUS=2,3 TRAIN="train.py --config bc.json" bash chosen_gpus.sh
#   DRY_RUN=1 bash chosen_gpus.sh
set -euo pipefail

GPUS=${GPUS:-0,1}
TRAIN=${TRAIN:-"-m robomimic.scripts.train --config bc.json"} # a script, or -m and a module; then its arguments
PYTHON=${PYTHON:-python}

[[ $GPUS =~ ^[0-9]+(,[0-9]+)*$ ]] || { echo "GPUS='$GPUS': give numbers with commas between, as 2,3" >&2; exit 2; }
IFS=, read -r -a gpus <<<"$GPUS"
twice=$(printf '%s\n' "${gpus[@]}" | sort | uniq -d)
[[ -z $twice ]] || { echo "GPUS='$GPUS' has $twice twice: two ranks would share a GPU" >&2; exit 2; }
read -r -a train <<<"$TRAIN"
[[ ${train[0]} == -m || -f ${train[0]} ]] || { echo "TRAIN: no file '${train[0]}' in $PWD" >&2; exit 2; }

# Programs see these GPUs only, as 0, 1 and so on. Without the next line CUDA may number them otherwise than nvidia-smi.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
export CUDA_VISIBLE_DEVICES=$GPUS
command=("$PYTHON" -m ddpshim run "--nproc=${#gpus[@]}" "${train[@]}")

echo "GPUs     $GPUS"
echo "ranks    ${#gpus[@]}"
echo "command  ${command[*]}"
[[ ${DRY_RUN:-0} == 0 ]] || exit 0
command -v "$PYTHON" >/dev/null || { echo "PYTHON='$PYTHON' is no program: activate your environment first" >&2; exit 2; }
exec "${command[@]}"
