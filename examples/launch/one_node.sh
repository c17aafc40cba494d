#!/usr/bin/env bash
# One machine, a rank on each of its GPUs. Every setting may come from the environment:
#
#   TRAIN="train.py --config bc.json" NPROC=2 bash one_node.sh
#   DRY_RUN=1 bash one_node.sh        # show what would be started, and start nothing
set -euo pipefail

TRAIN=${TRAIN:-"-m robomimic.scripts.train --config bc.json"} # a script, or -m and a module; then its arguments
NPROC=${NPROC:-auto}                                          # ranks: a number, gpu, cpu, or auto (all GPUs)
PYTHON=${PYTHON:-python}

# Words, so that an argument can hold no blanks: write those into the config file, or the array here.
read -r -a train <<<"$TRAIN"
command=("$PYTHON" -m ddpshim run "--nproc=$NPROC" "${train[@]}")

[[ $NPROC =~ ^([1-9][0-9]*|gpu|cpu|auto)$ ]] || { echo "NPROC='$NPROC': give a number, gpu, cpu or auto" >&2; exit 2; }
command -v "$PYTHON" >/dev/null || { echo "PYTHON='$PYTHON' is no program: activate your environment first" >&2; exit 2; }
[[ ${train[0]} == -m || -f ${train[0]} ]] || { echo "TRAIN: no file '${train[0]}' in $PWD" >&2; exit 2; }

echo "python   $(command -v "$PYTHON")"
echo "ranks    $NPROC"
echo "command  ${command[*]}"
[[ ${DRY_RUN:-0} == 0 ]] || exit 0
exec "${command[@]}"
